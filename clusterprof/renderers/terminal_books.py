"""What stands below the first screen of the terminal report: details, ledger, what is unknown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterprof.findings import RankLedger, Report
from clusterprof.renderers import (
    advised,
    changes,
    header,
    numbers,
    sure,
    underfill,
    unseen,
    whose,
    words,
    worth,
)
from clusterprof.renderers.books import columns_of, exact_seconds, rows_of, worst_first
from clusterprof.renderers.paint import Paint
from clusterprof.renderers.terminal_matrix import matrix
from clusterprof.renderers.text_safety import columns, fit, safe_text, wrap
from clusterprof.units import human

_AMOUNT = 18  # columns of one exact number: 999,999.999999999 and two blanks
_LABEL = 25
_MOST_CULPRITS = 3  # whose amounts are told
_OF_MANY = 2  # ranks in the ledger when there are more than it can hold
_ALONE = 4  # up to so many nodes have a line of their own
_LEDGER = "LEDGER, in seconds, exact to the nanosecond"
_NARROW = 72  # of a narrower screen tables have fewer columns


def books(report: Report, width: int, paint: Paint, most_ranks: int) -> list[str]:
    """Return every section below the first screen."""
    sections = [
        ("CAUSES IN FULL", list(_causes(report, width, paint))),
        (worth.HEADING, [line for t in worth.sentences(report) for line in _item(t, width)]),
        ("RANKS BY CAUSE", list(matrix(report, width))),
        ("RANKS", list(_ranks(report, width, most_ranks))),
        (
            _LEDGER if width >= _NARROW else "LEDGER, in seconds",
            list(_ledger(report, width, most_ranks)),
        ),
        (
            underfill.HEADING,
            [line for t in underfill.sentences(report) for line in _item(t, width)],
        ),
        ("SLOW STEPS", [line for text in whose.tail(report) for line in _item(text, width)]),
        ("UNATTRIBUTED", list(_unattributed(report, width))),
        ("NOT SEEN", list(_not_seen(report, width))),
        ("MEASURES", list(_measures(report, width))),
        ("RECORDING", list(_recording(report, width))),
        ("NOTES", [line for note in report.notes for line in _item(safe_text(note, 600), width)]),
    ]
    lines: list[str] = []
    for heading, body in sections:
        if body:
            heading = fit(heading, min(columns(heading), width - 4))
            rule = "─" * (width - 3 - columns(heading))
            lines += [f" {paint('heading', heading)} {paint('dim', rule)}", *body, ""]
    return lines[:-1]


def _causes(report: Report, width: int, paint: Paint) -> Iterator[str]:
    for finding in report.findings:
        name = f" {safe_text(finding.cause.id, 60)}: {words.title(finding)}"
        yield paint("bold", fit(name, width).rstrip())
        whole = "the recorded time, outside steps" if finding.outside_steps else "the time in steps"
        size = f"{words.lost(finding)}, {human(finding.share_ratio, 'ratio')} of {whole}"
        yield from _field("lost", size, width)
        yield from _field("sure", sure.in_full(finding), width)
        yield from _field("wins", words.wins(finding), width)
        yield from _field("whose", whose.culprits(finding, 3), width)
        for line in whose.caused(finding, _MOST_CULPRITS, report.in_step_ns):
            yield from _field("caused", line, width)
        yield from _field("beside", whose.beside(finding), width)
        yield from _field("since", whose.since(finding), width)
        yield from _field("waits", whose.persistence(finding), width)
        for item in finding.evidence:
            yield from _field("seen", numbers.evidence(item), width)
        yield from _field("do", advised.first(finding), width)
        if finding.advice:
            how = [line.text for line in changes.laid_out(finding.advice[0], width - 11)]
            yield from _labelled("how", how)
        yield from _field("effort", advised.effort(finding), width)
        yield from _field("not", "; ".join(advised.withheld(finding)), width)
    small = words.small_causes(report)
    if small:
        named = [f"{safe_text(cause, 60)} {human(ns, 'ns')}" for cause, ns in small]
        yield from wrap(f"Too small to be a finding: {', '.join(named)}.", width - 2, " ")
    if report.findings:
        yield from wrap(words.LEGEND, width - 2, " ")


def _ranks(report: Report, width: int, most_ranks: int) -> Iterator[str]:
    if not report.ranks:
        return
    if width < _NARROW:
        yield from _ranks_narrow(report, width, most_ranks)
        return
    several = len(report.ranks) > 1
    time = 10 if several else 11
    room = width - 8 - 8 - 2 * time - 8 - 18
    left = min(max((columns(safe_text(rank.node)) for rank in report.ranks), default=0) + 1, room)
    left = max(min(left, room - len("GPU-12345678 ")), 5)
    if several:  # names of devices that are short leave room for those of nodes
        device = max(columns(safe_text(rank.device)) for rank in report.ranks) + 1
        names = max(columns(safe_text(rank.node)) for rank in report.ranks) + 1
        left = max(min(names, room - min(device, 13)), 5)
    right = room - left
    yield (
        f" {'rank':<8}{fit('node', left)}{fit('device', right)}{'steps':>8}{'in steps':>{time}}"
        f"{'lost':>{time}}{'share':>8}  {'measured by':<15}"
    ).rstrip()
    for rank in worst_first(report.ranks)[:most_ranks]:
        yield _rank(rank, left, right, time)
    hidden = len(report.ranks) - most_ranks
    if hidden > 0:
        yield f" … and {hidden:,} ranks that lost less: --json has them all"


def _ranks_narrow(report: Report, width: int, most_ranks: int) -> Iterator[str]:
    yield f" {'rank':<8}{'lost':>10}{'share':>8}  node"
    for rank in worst_first(report.ranks)[:most_ranks]:
        number = str(rank.pid if rank.rank is None else rank.rank)
        part = words.rank_share(rank)
        node = fit(safe_text(rank.node), width - 29).rstrip()
        yield f" {number:<8}{human(rank.lost_ns, 'ns'):>10}{part:>8}  {node}"
    hidden = len(report.ranks) - most_ranks
    if hidden > 0:
        yield f" … and {hidden:,} ranks that lost less"


def _rank(rank: RankLedger, left: int, right: int, time: int) -> str:
    number = str(rank.pid if rank.rank is None else rank.rank)
    node = fit(safe_text(rank.node), left - 1)
    device = fit(safe_text(rank.device) or "none", right - 1)
    at_most = "≤" if rank.source == "host-spans" and rank.lost_ns else ""
    lost = at_most + human(rank.lost_ns, "ns")
    part = words.rank_share(rank)
    return (
        f" {number:<8}{node} {device} {rank.steps:>8,}{human(rank.in_step_ns, 'ns'):>{time}}"
        f"{lost:>{time}}{part:>8}  {safe_text(rank.source, 15)}"
    )


def _ledger(report: Report, width: int, most_ranks: int) -> Iterator[str]:
    if len(report.ranks) > most_ranks:
        most_ranks = min(most_ranks, _OF_MANY)  # each looks like the next
    everything = columns_of(report, most_ranks)
    rows = rows_of(everything)
    per_block = max((width - 1 - _LABEL) // _AMOUNT, 1)
    names = min(_LABEL, width - 1 - _AMOUNT)
    for start in range(0, len(everything), per_block):
        block = range(start, min(start + per_block, len(everything)))
        if start:
            yield ""
        headings = "".join(
            fit(everything[i].heading, _AMOUNT - 2).strip().rjust(_AMOUNT) for i in block
        )
        yield f" {'':<{names}}{headings}"
        for row in rows:
            label = fit("  " * row.depth + row.label, names)
            yield f" {label}" + "".join(exact_seconds(row.ns[i]).rjust(_AMOUNT) for i in block)


def _underfilled(report: Report, width: int) -> Iterator[str]:
    for told in underfill.sentences(report):
        yield from _item(told, width)


def _unattributed(report: Report, width: int) -> Iterator[str]:
    if not report.lost_ns:
        yield from wrap("Nothing: no time inside steps was lost.", width - 2, " ")
        return
    if not report.unattributed_ns:
        yield from wrap("Nothing: every lost nanosecond inside steps has a cause.", width - 2, " ")
        return
    part = words.share(report.unattributed_ns, report.lost_ns)
    amount = human(report.unattributed_ns, "ns")
    told = f"{amount}, {part} of the loss, without sufficient evidence:"
    yield from wrap(told, width - 2, " ")
    for reason, ns in report.unattributed_reasons:
        yield from _item(f"{human(ns, 'ns')}: {unseen.reason(reason)}", width)


def _not_seen(report: Report, width: int) -> Iterator[str]:
    if not report.blinds:
        yield " Nothing is known to be missing."
    for blind in unseen.blinds(report):
        yield from _item(blind, width)


def _measures(report: Report, width: int) -> Iterator[str]:
    unknown: dict[str, list[str]] = {}
    for metric in report.metrics:
        if metric.value is None:
            unknown.setdefault(metric.why_missing, []).append(safe_text(metric.name, 60))
            continue
        bound = "" if metric.bound == "exact" else f"{metric.bound} "
        text = bound + human(metric.value, metric.unit)
        if width < _NARROW:
            yield from _item(f"{safe_text(metric.name, 60)} {text}", width)
            continue
        yield f" {fit(safe_text(metric.name, 60), 30)} {fit(text, width - 32).rstrip()}"
    for why, names in unknown.items():
        yield from _item(f"not known: {', '.join(names)}: {safe_text(why, 300)}", width)


def _recording(report: Report, width: int) -> Iterator[str]:
    for line in header.recordings(report, _ALONE):
        yield from _item(line, width)


def _field(label: str, text: str, width: int) -> Iterator[str]:
    if text.strip():
        yield from _labelled(label, wrap(text, width - 11))


def _labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    for at, line in enumerate(lines):
        yield f"   {'' if at else label:<7} {line}"


def _item(text: str, width: int) -> Iterator[str]:
    first, *more = wrap(text, width - 4) or [""]
    yield f" - {first}"
    yield from (f"   {line}" for line in more)
