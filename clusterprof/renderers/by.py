"""Tables that are asked for: lost time by node, rank, cause, step or time (`analyze --by`).

Each is made once, of finished words, and drawn by the outputs as columns, sentences or Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from clusterprof.findings import UNATTRIBUTED, RankLedger, Report
from clusterprof.history import WAITING, SlowStep
from clusterprof.renderers import sparks, sure, whose, words
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human

BY = ("node", "rank", "cause", "step", "time")
TOP = 10
"""Rows of a table, when nobody asks for more or fewer."""
_NOTHING = "-"
_OWN_RATIO = 0.1
"""Of what a step lost: less beside waiting explains no wait."""
_NO_HISTORY = "when time was lost was not worked out"


@dataclass(frozen=True, slots=True)
class Table:
    """Finished words in rows; the first column names the row, numbers are the middle ones."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1
    """How many of the last columns are words, and may be cut."""
    rest: str = ""
    """What is not in the rows, or why there are none."""


def tables(report: Report, by: Iterable[str], top: int | None = None) -> list[Table]:
    """Return the tables of these names (`BY`), with `top` rows each."""
    return [_TABLES[name](report, top or TOP) for name in by]


def _by_node(report: Report, top: int) -> Table:
    """Nodes by what their ranks caused, else lost."""
    groups: dict[str, list[RankLedger]] = {}
    for rank in report.ranks:
        groups.setdefault(rank.node, []).append(rank)
    return _ranked(
        report, "BY NODE", ("node", "ranks"), top,
        [(safe_text(node, 60), f"{len(some):,}", some) for node, some in groups.items()],
    )  # fmt: skip


def _by_rank(report: Report, top: int) -> Table:
    return _ranked(
        report, "BY RANK", ("rank", "node"), top,
        [
            (str(one.pid if one.rank is None else one.rank), safe_text(one.node, 60), [one])
            for one in report.ranks
        ],
    )  # fmt: skip


def _ranked(
    report: Report,
    title: str,
    names: tuple[str, str],
    top: int,
    groups: Sequence[tuple[str, str, Sequence[RankLedger]]],
) -> Table:
    compared = any(rank.caused for rank in report.ranks)
    heads = (*names, "in steps", "lost", "share", *(("caused",) if compared else ()), "chiefly")
    lines: list[tuple[int, int, tuple[str, ...]]] = []
    for first, second, some in groups:
        lost = sum(one.lost_ns for one in some)
        caused = _summed(one.caused for one in some)
        chief = _chief(caused if compared else _summed(one.buckets for one in some))
        size = sum(caused.values()) if compared else lost
        in_step = sum(one.in_step_ns for one in some)
        row = (
            first, second, human(in_step, "ns"), human(lost, "ns"), words.share(lost, in_step),
            *((human(size, "ns"),) if compared else ()), chief,
        )  # fmt: skip
        lines.append((-size, len(lines), row))
    lines.sort(key=lambda line: line[:2])
    what = "caused" if compared else "lost"
    return _cut(title, heads, [row for _, _, row in lines], top, f"{names[0]}s that {what} less")


def _by_cause(report: Report, top: int) -> Table:
    """All causes inside steps, unattributed among them."""
    heads = ("cause", "lost", "share", "sure", "wins", "whose")
    found = {one.cause.id: one for one in words.in_step(report)}
    rows = []
    for id_, ns in sorted(words.summed(report).items(), key=lambda line: (-line[1], line[0])):
        finding = found.get(id_)
        if not ns:
            continue
        amounts = (safe_text(id_, 60), human(ns, "ns"), words.share(ns, report.in_step_ns))
        if finding is None:
            about = "see Unattributed" if id_ == UNATTRIBUTED else "too small to be a finding"
            rows.append((*amounts, _NOTHING, _NOTHING, about))
            continue
        gain = words.recoverable(finding, "unknown")
        who = whose.culprits(finding, 2) or _NOTHING
        rows.append((*amounts, sure.certainty(finding), gain, who))
    return _cut("BY CAUSE", heads, rows, top, "causes that cost less")


def _by_step(report: Report, top: int) -> Table:
    """The slowest steps, and what all ranks lost in them."""
    heads = ("step", "began", "took", "lost", "last to come", "chiefly")
    history = report.history
    if history is None or not history.slow_steps:
        why = history.why_missing if history is not None else _NO_HISTORY
        return Table("BY STEP", heads, (), 2, safe_text(why or "no steps were marked", 300))
    rows, last_ns = [], history.begin_ns + history.stretches * history.stretch_ns
    for step in history.slow_steps[:top]:
        last = _NOTHING if step.rank is None else _rank(report, step.rank)
        lost = sum(ns for _, ns in step.lost)
        rows.append(
            (
                f"{step.number:,}", sparks.clock_of(step.start_ns, last_ns),
                human(step.duration_ns, "ns"),
                human(lost, "ns"), last, _why_slow(report, step) if lost else _NOTHING,
            )
        )  # fmt: skip
    count = max((rank.steps for rank in report.ranks), default=0)
    return Table("BY STEP, the slowest", heads, tuple(rows), 2, f"of {count:,} steps")


def _why_slow(report: Report, step: SlowStep) -> str:
    """Say what cost most in a step; of waiting, for whom and what that one was late for."""
    cause = step.lost[0][0]
    if cause != WAITING:
        return sparks.called(cause)
    who = "" if step.rank is None else words.rank_name(report.ranks[step.rank])
    late = _late_for(report, step)
    if not who:
        return f"{sparks.called(cause)}, chiefly late for {late}" if late else sparks.called(cause)
    return f"{late}: waiting for {who}" if late else f"waiting for {who}"


def _late_for(report: Report, step: SlowStep) -> str:
    """Return what the last to come was late for: in this step, else most of the time; "" unknown.

    A wait that was kept says it; so does what was lost in the step beside waiting, for a rank that
    lost time itself is the one that others wait for.
    """
    waits: dict[str, int] = {}
    for one in () if report.history is None else report.history.waits:
        if one.step == step.number and one.cause and one.culprit == step.rank:
            waits[one.cause] = waits.get(one.cause, 0) + one.duration_ns
    if waits:
        return _chief(waits)
    own = {cause: ns for cause, ns in step.lost if cause not in (WAITING, UNATTRIBUTED)}
    if sum(own.values()) >= _OWN_RATIO * sum(ns for _, ns in step.lost):
        return _chief(own)
    caused = () if step.rank is None else report.ranks[step.rank].caused
    return _chief(dict(caused)) if any(ns for _, ns in caused) else ""


def _by_time(report: Report, top: int) -> Table:
    """Equal parts of the run, in order."""
    heads = ("from", "to", "in steps", "busy", "lost", "chiefly")
    some = sparks.parts(report, top)
    if not some:
        why = report.history.why_missing if report.history is not None else _NO_HISTORY
        return Table("BY TIME", heads, (), 1, safe_text(why, 300))
    rows, last_ns = [], some[-1].end_ns
    for one in some:
        ratio = one.lost_ratio
        chief = sparks.called(one.causes[0][0]) if one.causes else _NOTHING
        rows.append(
            (
                *(sparks.clock_of(ns, last_ns) for ns in (one.start_ns, one.end_ns)),
                human(one.in_step_ns, "ns"),
                _NOTHING if ratio is None else human(1 - ratio, "ratio"),
                human(one.lost_ns, "ns"), chief if one.lost_ns else _NOTHING,
            )
        )  # fmt: skip
    return Table("BY TIME", heads, tuple(rows), 1)


def _rank(report: Report, at: int) -> str:
    rank = report.ranks[at]
    return f"{words.rank_name(rank)} on {safe_text(rank.node, 60)}"


def _chief(amounts: Mapping[str, int]) -> str:
    if not any(amounts.values()):
        return _NOTHING
    return safe_text(max(sorted(amounts), key=lambda cause: amounts[cause]), 60)


def _summed(lines: Iterable[Iterable[tuple[str, int]]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for some in lines:
        for cause, ns in some:
            sums[cause] = sums.get(cause, 0) + ns
    return sums


def _cut(
    title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], top: int, less: str
) -> Table:
    left = len(rows) - top
    rest = f"and {left:,} {less}: --top {len(rows)} shows all" if left > 0 else ""
    return Table(title, heads, tuple(rows[:top]), 1, rest)


_TABLES: Mapping[str, Callable[[Report, int], Table]] = {
    "node": _by_node,
    "rank": _by_rank,
    "cause": _by_cause,
    "step": _by_step,
    "time": _by_time,
}
