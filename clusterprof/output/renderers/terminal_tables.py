"""Tables and details of the terminal report, below its first screen.

Every cause in full, the ledger to the nanosecond, and always *Unattributed* with its
reasons and *Not seen*. The matrix of ranks by causes takes two lines per rank. Numbers are
shown in full, text is cut to the remaining width. With colors off, text is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterprof.output.renderers.text import advice, culprits, impact, summary, wording
from clusterprof.output.renderers.text.safety import (
    count_columns,
    escape_text,
    fit_to_width,
    wrap_text,
)
from clusterprof.output.renderers.text.tables import (
    MatrixRow,
    Table,
    build_cause_matrix,
    build_ledger_columns,
    build_ledger_rows,
    format_cell,
    format_exact_seconds,
    sort_by_lost_time,
)
from clusterprof.report.model import RankLedger, Report
from clusterprof.units import format_quantity

_MATRIX_ROWS = 6
_RANK_COLUMNS, _WORD_COLUMNS, _SUM_COLUMNS = 8, 7, 10
_MIN_CAUSE_COLUMNS = 15  # width of a cause column, before the remaining width is shared out
_MAX_CAUSE_COLUMNS = 18


def render_matrix(report: Report, width: int) -> Iterator[str]:
    """Render the matrix; yield nothing if ranks were not compared."""
    widest = 16 if width >= 72 else 9
    node = min(
        max((count_columns(escape_text(machine.name)) for machine in report.nodes), default=0) + 1,
        widest,
    )
    room = width - 1 - _RANK_COLUMNS - node - _WORD_COLUMNS - _SUM_COLUMNS
    count = max(room // _MIN_CAUSE_COLUMNS, 1)
    each = min(room // count, _MAX_CAUSE_COLUMNS)
    cause_matrix = build_cause_matrix(report, _MATRIX_ROWS, count)
    if cause_matrix is None:
        return
    heads = "".join(
        _align_matrix_cell(escape_text(cause, 60), each) for cause in cause_matrix.causes
    )
    yield (
        f" {'rank':<{_RANK_COLUMNS}}{fit_to_width('node', node)}{'':<{_WORD_COLUMNS}}"
        f"{heads}{'all':>{_SUM_COLUMNS}}"
    )
    for at, line in enumerate(cause_matrix.lines):
        if cause_matrix.rest and at == len(cause_matrix.lines) - 1:
            yield f" … {cause_matrix.rest}:"
            line = MatrixRow("", "", line.victim_ns, line.culprit_ns)
        label = (
            line.label
            if len(line.label) < _RANK_COLUMNS or line.ranks == 1
            else f"{line.ranks} ranks"
        )
        first = (
            f"{fit_to_width(label, _RANK_COLUMNS - 1)}"
            f" {fit_to_width(escape_text(line.node), node - 1)} "
        )
        yield _format_matrix_row(first, "lost", line.victim_ns, each)
        yield _format_matrix_row(" " * (_RANK_COLUMNS + node), "caused", line.culprit_ns, each)


def _format_matrix_row(first: str, word: str, ns: tuple[int, ...], each: int) -> str:
    cells = "".join(_align_matrix_cell(format_cell(cause_ns), each) for cause_ns in ns[:-1])
    return f" {first}{word:<{_WORD_COLUMNS}}{cells}{format_cell(ns[-1]):>{_SUM_COLUMNS}}"


def _align_matrix_cell(text: str, each: int) -> str:
    return fit_to_width(text, each - 1).strip().rjust(each)


_CODES = {"bold": "1", "dim": "2", "good": "32", "bad": "1;31", "warn": "1;33", "heading": "1;36"}


@dataclass(frozen=True, slots=True)
class Paint:
    """Wraps finished, padded text in SGR codes; no other code writes escape sequences."""

    on: bool

    def __call__(self, brush: str, text: str) -> str:
        return f"\x1b[{_CODES[brush]}m{text}\x1b[0m" if self.on and text else text


_AMOUNT_COLUMNS = 18  # one exact number: 999,999.999999999 and two blanks
_LEDGER_LABEL_COLUMNS = 25
_MAX_CULPRITS = 3  # culprits whose amounts are written
_RANKS_WHEN_MANY = 2  # ranks in the ledger if there are more than `most_ranks`
_MAX_SINGLE_NODES = 4  # with more nodes, those without damage share a line
_LEDGER_HEADING = "LEDGER, in seconds, exact to the nanosecond"
_MIN_WIDE_SCREEN = 72  # a narrower screen has fewer columns in its tables


def render_details(report: Report, width: int, paint: Paint, most_ranks: int) -> list[str]:
    """Render every section below the first screen."""
    sections = [
        ("CAUSES IN FULL", list(_render_causes(report, width, paint))),
        (
            impact.IMPACT_HEADING,
            [line for t in impact.describe_impact(report) for line in _render_item(t, width)],
        ),
        ("RANKS BY CAUSE", list(render_matrix(report, width))),
        ("RANKS", list(_render_ranks(report, width, most_ranks))),
        (
            _LEDGER_HEADING if width >= _MIN_WIDE_SCREEN else "LEDGER, in seconds",
            list(_render_ledger(report, width, most_ranks)),
        ),
        (
            impact.UTILIZATION_HEADING,
            [line for t in impact.describe_utilization(report) for line in _render_item(t, width)],
        ),
        (
            "SLOW STEPS",
            [
                line
                for text in culprits.describe_slow_steps(report)
                for line in _render_item(text, width)
            ],
        ),
        ("UNATTRIBUTED", list(_render_unattributed(report, width))),
        ("NOT SEEN", list(_render_coverage_gaps(report, width))),
        ("MEASURES", list(_render_metrics(report, width))),
        ("RECORDING", list(_render_recording(report, width))),
        (
            "NOTES",
            [line for note in report.notes for line in _render_item(escape_text(note, 600), width)],
        ),
    ]
    lines: list[str] = []
    for heading, body in sections:
        if body:
            heading = fit_to_width(heading, min(count_columns(heading), width - 4))
            rule = "─" * (width - 3 - count_columns(heading))
            lines += [f" {paint('heading', heading)} {paint('dim', rule)}", *body, ""]
    return lines[:-1]


def _render_causes(report: Report, width: int, paint: Paint) -> Iterator[str]:
    for finding in report.findings:
        name = f" {escape_text(finding.cause.id, 60)}: {wording.format_title(finding)}"
        yield paint("bold", fit_to_width(name, width).rstrip())
        whole = "the recorded time, outside steps" if finding.outside_steps else "the time in steps"
        size = (
            f"{wording.format_lost_time(finding)},"
            f" {format_quantity(finding.share_ratio, 'ratio')} of {whole}"
        )
        yield from _render_field("lost", size, width)
        yield from _render_field("sure", wording.describe_confidence(finding), width)
        yield from _render_field("wins", wording.describe_savings(finding), width)
        yield from _render_field("who", culprits.format_culprits(finding, 3), width)
        for line in culprits.describe_caused_loss(finding, _MAX_CULPRITS, report.in_step_ns):
            yield from _render_field("caused", line, width)
        yield from _render_field("peers", culprits.describe_peer_comparison(finding), width)
        yield from _render_field("since", culprits.describe_onset(finding), width)
        yield from _render_field("waits", culprits.describe_persistence(finding), width)
        for item in finding.evidence:
            yield from _render_field("seen", wording.format_evidence(item), width)
        yield from _render_field("do", advice.describe_first_step(finding), width)
        if finding.advice:
            how = [line.text for line in advice.wrap_change(finding.advice[0], width - 11)]
            yield from _render_labeled_lines("how", how)
        yield from _render_field("effort", advice.describe_effort(finding), width)
        yield from _render_field("not", "; ".join(advice.list_withheld_advice(finding)), width)
    small = wording.list_small_causes(report)
    if small:
        named = [f"{escape_text(cause, 60)} {format_quantity(ns, 'ns')}" for cause, ns in small]
        yield from wrap_text(f"Too small for a finding: {', '.join(named)}.", width - 2, " ")
    if report.findings:
        yield from wrap_text(wording.LEGEND, width - 2, " ")


def _render_ranks(report: Report, width: int, most_ranks: int) -> Iterator[str]:
    if not report.ranks:
        return
    if width < _MIN_WIDE_SCREEN:
        yield from _render_ranks_narrow(report, width, most_ranks)
        return
    several = len(report.ranks) > 1
    time = 10 if several else 11
    room = width - 8 - 8 - 2 * time - 8 - 18
    left = min(
        max((count_columns(escape_text(rank.node)) for rank in report.ranks), default=0) + 1, room
    )
    left = max(min(left, room - len("GPU-12345678 ")), 5)
    if several:  # short device names leave room for node names
        device = max(count_columns(escape_text(rank.device)) for rank in report.ranks) + 1
        names = max(count_columns(escape_text(rank.node)) for rank in report.ranks) + 1
        left = max(min(names, room - min(device, 13)), 5)
    right = room - left
    yield (
        f" {'rank':<8}{fit_to_width('node', left)}{fit_to_width('device', right)}"
        f"{'steps':>8}{'in steps':>{time}}"
        f"{'lost':>{time}}{'share':>8}  {'measured by':<15}"
    ).rstrip()
    for rank in sort_by_lost_time(report.ranks)[:most_ranks]:
        yield _format_rank_row(rank, left, right, time)
    hidden = len(report.ranks) - most_ranks
    if hidden > 0:
        yield f" … and {hidden:,} ranks that lost less: --json lists them all"


def _render_ranks_narrow(report: Report, width: int, most_ranks: int) -> Iterator[str]:
    yield f" {'rank':<8}{'lost':>10}{'share':>8}  node"
    for rank in sort_by_lost_time(report.ranks)[:most_ranks]:
        number = str(rank.pid if rank.rank is None else rank.rank)
        part = wording.format_rank_share(rank)
        node = fit_to_width(escape_text(rank.node), width - 29).rstrip()
        yield f" {number:<8}{format_quantity(rank.lost_ns, 'ns'):>10}{part:>8}  {node}"
    hidden = len(report.ranks) - most_ranks
    if hidden > 0:
        yield f" … and {hidden:,} ranks that lost less"


def _format_rank_row(rank: RankLedger, left: int, right: int, time: int) -> str:
    number = str(rank.pid if rank.rank is None else rank.rank)
    node = fit_to_width(escape_text(rank.node), left - 1)
    device = fit_to_width(escape_text(rank.device) or "none", right - 1)
    at_most = "≤" if rank.source == "host-spans" and rank.lost_ns else ""
    lost = at_most + format_quantity(rank.lost_ns, "ns")
    part = wording.format_rank_share(rank)
    return (
        f" {number:<8}{node} {device}"
        f" {rank.steps:>8,}{format_quantity(rank.in_step_ns, 'ns'):>{time}}"
        f"{lost:>{time}}{part:>8}  {escape_text(rank.source, 15)}"
    )


def _render_ledger(report: Report, width: int, most_ranks: int) -> Iterator[str]:
    if len(report.ranks) > most_ranks:
        most_ranks = min(most_ranks, _RANKS_WHEN_MANY)  # the ledgers of many ranks look alike
    everything = build_ledger_columns(report, most_ranks)
    rows = build_ledger_rows(everything)
    per_block = max((width - 1 - _LEDGER_LABEL_COLUMNS) // _AMOUNT_COLUMNS, 1)
    names = min(_LEDGER_LABEL_COLUMNS, width - 1 - _AMOUNT_COLUMNS)
    for start in range(0, len(everything), per_block):
        block = range(start, min(start + per_block, len(everything)))
        if start:
            yield ""
        headings = "".join(
            fit_to_width(everything[i].heading, _AMOUNT_COLUMNS - 2).strip().rjust(_AMOUNT_COLUMNS)
            for i in block
        )
        yield f" {'':<{names}}{headings}"
        for row in rows:
            label = fit_to_width("  " * row.depth + row.label, names)
            yield f" {label}" + "".join(
                format_exact_seconds(row.ns[i]).rjust(_AMOUNT_COLUMNS) for i in block
            )


def _render_unattributed(report: Report, width: int) -> Iterator[str]:
    if not report.lost_ns:
        yield from wrap_text("Nothing: no time inside steps was lost.", width - 2, " ")
        return
    if not report.unattributed_ns:
        yield from wrap_text(
            "Nothing: every lost nanosecond inside steps has a cause.", width - 2, " "
        )
        return
    part = wording.format_share(report.unattributed_ns, report.lost_ns)
    amount = format_quantity(report.unattributed_ns, "ns")
    summary = f"{amount}, {part} of the loss, without sufficient evidence:"
    yield from wrap_text(summary, width - 2, " ")
    for reason, ns in report.unattributed_reasons:
        yield from _render_item(
            f"{format_quantity(ns, 'ns')}: {wording.describe_unattributed_reason(reason)}", width
        )


def _render_coverage_gaps(report: Report, width: int) -> Iterator[str]:
    if not report.blinds:
        yield " Nothing is known to be missing."
    for blind in wording.list_coverage_gaps(report):
        yield from _render_item(blind, width)


def _render_metrics(report: Report, width: int) -> Iterator[str]:
    unknown: dict[str, list[str]] = {}
    for metric in report.metrics:
        if metric.value is None:
            unknown.setdefault(metric.why_missing, []).append(escape_text(metric.name, 60))
            continue
        bound = "" if metric.bound == "exact" else f"{metric.bound} "
        text = bound + format_quantity(metric.value, metric.unit)
        if width < _MIN_WIDE_SCREEN:
            yield from _render_item(f"{escape_text(metric.name, 60)} {text}", width)
            continue
        yield (
            f" {fit_to_width(escape_text(metric.name, 60), 30)}"
            f" {fit_to_width(text, width - 32).rstrip()}"
        )
    for why, names in unknown.items():
        yield from _render_item(f"not known: {', '.join(names)}: {escape_text(why, 300)}", width)


def _render_recording(report: Report, width: int) -> Iterator[str]:
    for line in summary.describe_recordings(report, _MAX_SINGLE_NODES):
        yield from _render_item(line, width)


def _render_field(label: str, text: str, width: int) -> Iterator[str]:
    if text.strip():
        yield from _render_labeled_lines(label, wrap_text(text, width - 11))


def _render_labeled_lines(label: str, lines: Sequence[str]) -> Iterator[str]:
    for at, line in enumerate(lines):
        yield f"   {'' if at else label:<7} {line}"


def _render_item(text: str, width: int) -> Iterator[str]:
    first, *more = wrap_text(text, width - 4) or [""]
    yield f" - {first}"
    yield from (f"   {line}" for line in more)


_MAX_NAME_COLUMNS = 16  # the first column has at most this width, or a quarter of the screen
_MIN_TEXT_COLUMNS = 8  # width of a text column, at least


def render_table(table: Table, width: int, paint: Paint) -> list[str]:
    """Render title, headings, rows and remark of a table.

    Columns that do not fit are dropped, starting with the rightmost number.
    """
    rule = "─" * (width - 3 - len(table.title))
    lines = [f" {paint('heading', table.title)} {paint('dim', rule)}"]
    if table.rows:
        lines += _render_grid(table, width)
    lines += (
        wrap_text(f"{'… ' if table.rows else ''}{table.rest}", width - 2, " ") if table.rest else []
    )
    return lines


def _render_grid(table: Table, width: int) -> list[str]:
    all_rows = [table.heads, *table.rows]
    count = len(table.heads)
    words = set(range(count - table.texts, count))
    sizes = [max(count_columns(row[i]) for row in all_rows) for i in range(count)]
    sizes[0] = min(sizes[0], max(_MAX_NAME_COLUMNS, width // 4))
    shown = list(range(count))
    while len(shown) > 2:
        need = sum(sizes[i] + 2 for i in shown if i not in words) + sum(
            min(sizes[i], _MIN_TEXT_COLUMNS) + 2 for i in shown if i in words
        )
        if need <= width:
            break
        numbers = [i for i in shown[1:] if i not in words]
        shown.remove(numbers[-1] if len(numbers) > 1 else shown[-1])
    left = width - 1 - sum(sizes[i] + 2 for i in shown if i not in words)
    texts = [i for i in shown if i in words]
    for at, i in enumerate(texts):
        sizes[i] = max(min(sizes[i], left // (len(texts) - at) - 2), 1)
        left -= sizes[i] + 2
    lines = []
    for row in all_rows:
        cells = [
            fit_to_width(row[i], sizes[i]) if i == 0 or i in words else row[i].rjust(sizes[i])
            for i in shown
        ]
        lines.append((" " + "  ".join(cells)).rstrip())
    return lines
