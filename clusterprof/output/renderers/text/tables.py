"""Tables on request: lost time by node, rank, cause, step or time (`analyze --by`).

Each table is built once from finished text; the outputs draw it as columns, sentences
or Markdown.

Ranks by causes, victim and culprit time, reduced to the ranks that stand out.

    rank 27   lost      1.2 s    its device was idle
              caused   76.8 s    its own loss and that of ranks waiting for it

A row is a rank that stands out from the median of all ranks; similar ranks of a node
share a row with the mean of their values. The remaining ranks share the last row.

The exact ledger as rows, printed to the nanosecond so that sums can be checked.

A row is a label, its depth below "observed", and one integer per column; the first
column is all ranks together if there is more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from clusterprof.output.renderers.text import code, culprits, trend, wording
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.output.renderers.text.wording import format_rank_name, sum_buckets
from clusterprof.report.history import WAITING_FOR_RANKS, SlowStep
from clusterprof.report.model import UNATTRIBUTED, RankLedger, Report
from clusterprof.units import format_quantity
from clusterprof.util.ranges import format_number_list

TABLE_NAMES = ("node", "rank", "cause", "line", "step", "time")
DEFAULT_ROWS = 10
"""Rows of a table if the user gives no number."""
DEFAULT_LINES = 30
"""Rows of the table of lines if the user gives no number."""
_NO_VALUE = "-"
_MIN_OWN_LOSS_RATIO = 0.1
"""Share of what a step lost; a smaller loss besides waiting does not explain a wait."""
_NO_HISTORY = "the history of lost time was not computed"


@dataclass(frozen=True, slots=True)
class TextTable:
    """Finished text in rows; the first column names the row, the middle ones are numbers."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1
    """How many of the last columns are text and may be cut."""
    rest: str = ""
    """What the rows leave out, or why there are none."""
    has_long_names: bool = False
    """True if the first column may take half of the width."""


def build_tables(report: Report, by: Iterable[str], top: int | None = None) -> list[TextTable]:
    """Build the tables with these names (`TABLE_NAMES`), with `top` rows each."""
    rows = {"line": DEFAULT_LINES}
    return [_TABLE_BUILDERS[name](report, top or rows.get(name, DEFAULT_ROWS)) for name in by]


def _build_node_table(report: Report, top: int) -> TextTable:
    """Build the table of nodes by what their ranks caused, or lost if ranks were not compared."""
    groups: dict[str, list[RankLedger]] = {}
    for rank in report.ranks:
        groups.setdefault(rank.node, []).append(rank)
    return _build_ranked_table(
        report,
        "BY NODE",
        ("node", "ranks"),
        top,
        [(escape_text(node, 60), f"{len(ranks):,}", ranks) for node, ranks in groups.items()],
    )


def _build_rank_table(report: Report, top: int) -> TextTable:
    return _build_ranked_table(
        report,
        "BY RANK",
        ("rank", "node"),
        top,
        [
            (str(rank.pid if rank.rank is None else rank.rank), escape_text(rank.node, 60), [rank])
            for rank in report.ranks
        ],
    )


def _build_ranked_table(
    report: Report,
    title: str,
    names: tuple[str, str],
    top: int,
    groups: Sequence[tuple[str, str, Sequence[RankLedger]]],
) -> TextTable:
    compared = any(rank.caused for rank in report.ranks)
    heads = (*names, "in steps", "lost", "share", *(("caused",) if compared else ()), "mainly")
    lines: list[tuple[int, int, tuple[str, ...]]] = []
    for first, second, ranks in groups:
        lost = sum(rank.lost_ns for rank in ranks)
        caused = _sum_by_cause(rank.caused for rank in ranks)
        chief = _find_main_cause(
            caused if compared else _sum_by_cause(rank.buckets for rank in ranks)
        )
        size = sum(caused.values()) if compared else lost
        in_step = sum(rank.in_step_ns for rank in ranks)
        row = (
            first,
            second,
            format_quantity(in_step, "ns"),
            format_quantity(lost, "ns"),
            wording.format_share(lost, in_step),
            *((format_quantity(size, "ns"),) if compared else ()),
            chief,
        )
        lines.append((-size, len(lines), row))
    lines.sort(key=lambda line: line[:2])
    verb = "caused" if compared else "lost"
    return _limit_rows(
        title, heads, [row for _, _, row in lines], top, f"{names[0]}s that {verb} less"
    )


def _build_cause_table(report: Report, top: int) -> TextTable:
    """Build the table of all causes inside steps, including unattributed time."""
    heads = ("cause", "lost", "share", "confidence", "gain", "where")
    finding_by_cause = {
        finding.cause.id: finding for finding in wording.select_in_step_findings(report)
    }
    rows = []
    for id_, ns in sorted(
        wording.sum_buckets(report).items(), key=lambda line: (-line[1], line[0])
    ):
        finding = finding_by_cause.get(id_)
        if not ns:
            continue
        amounts = (
            escape_text(id_, 60),
            format_quantity(ns, "ns"),
            wording.format_share(ns, report.in_step_ns),
        )
        if finding is None:
            about = "see Unattributed" if id_ == UNATTRIBUTED else "too small for a finding"
            rows.append((*amounts, _NO_VALUE, _NO_VALUE, about))
            continue
        gain = wording.format_recoverable_time(finding, "unknown")
        names = culprits.format_culprits(finding, 2) or _NO_VALUE
        rows.append((*amounts, wording.format_confidence(finding), gain, names))
    return _limit_rows("BY CAUSE", heads, rows, top, "causes that cost less")


def _build_line_table(report: Report, top: int) -> TextTable:
    """Build the table of lost time by line of the user's own code, over all causes and ranks."""
    heads = ("line", "lost", "share", "function", "mainly")
    why = code.explain_missing_lines(report)
    if why:
        return TextTable("BY LINE", heads, (), 2, why)
    totals = code.sum_lines(report.code)
    rows = code.list_total_rows(totals, code.build_file_names(report), top)
    remainder = code.describe_totals_rest(totals, len(rows))
    return TextTable(
        "BY LINE, of the lost time", heads, tuple(rows), 2, remainder, has_long_names=True
    )


def _build_step_table(report: Report, top: int) -> TextTable:
    """Build the table of the slowest steps and what all ranks lost in them."""
    heads = ("step", "began", "took", "lost", "last to arrive", "mainly")
    history = report.history
    if history is None or not history.slow_steps:
        why = history.why_missing if history is not None else _NO_HISTORY
        return TextTable("BY STEP", heads, (), 2, escape_text(why or "no steps were marked", 300))
    rows, last_ns = [], history.begin_ns + history.bin_count * history.bin_ns
    for step in history.slow_steps[:top]:
        last = _NO_VALUE if step.rank is None else _format_rank(report, step.rank)
        lost = sum(ns for _, ns in step.lost)
        rows.append(
            (
                f"{step.number:,}",
                trend.format_time_in_run(step.start_ns, last_ns),
                format_quantity(step.duration_ns, "ns"),
                format_quantity(lost, "ns"),
                last,
                _explain_slow_step(report, step) if lost else _NO_VALUE,
            )
        )
    count = max((rank.steps for rank in report.ranks), default=0)
    return TextTable("BY STEP, the slowest", heads, tuple(rows), 2, f"of {count:,} steps")


def _explain_slow_step(report: Report, step: SlowStep) -> str:
    """Explain what cost most in a step; for waiting, which rank was late and why."""
    cause = step.lost[0][0]
    if cause != WAITING_FOR_RANKS:
        return trend.get_cause_label(cause)
    rank_name = "" if step.rank is None else wording.format_rank_name(report.ranks[step.rank])
    late = _find_late_cause(report, step)
    if not rank_name:
        return (
            f"{trend.get_cause_label(cause)}, mainly late for {late}"
            if late
            else trend.get_cause_label(cause)
        )
    return f"{late}: waiting for {rank_name}" if late else f"waiting for {rank_name}"


def _find_late_cause(report: Report, step: SlowStep) -> str:
    """Find what the last rank was late for: in this step, else usually; "" if unknown.

    A recorded wait names the cause. Otherwise the time lost in the step besides waiting
    does: a rank that lost time itself is the one that others wait for.
    """
    waits: dict[str, int] = {}
    for wait in () if report.history is None else report.history.waits:
        if wait.step == step.number and wait.cause and wait.culprit == step.rank:
            waits[wait.cause] = waits.get(wait.cause, 0) + wait.duration_ns
    if waits:
        return _find_main_cause(waits)
    own_lost = {
        cause: ns for cause, ns in step.lost if cause not in (WAITING_FOR_RANKS, UNATTRIBUTED)
    }
    if sum(own_lost.values()) >= _MIN_OWN_LOSS_RATIO * sum(ns for _, ns in step.lost):
        return _find_main_cause(own_lost)
    caused = () if step.rank is None else report.ranks[step.rank].caused
    return _find_main_cause(dict(caused)) if any(ns for _, ns in caused) else ""


def _build_time_table(report: Report, top: int) -> TextTable:
    """Build the table of equal time bins of the run, in order."""
    heads = ("from", "to", "in steps", "busy", "lost", "mainly")
    bins = trend.split_run(report, top)
    if not bins:
        why = report.history.why_missing if report.history is not None else _NO_HISTORY
        return TextTable("BY TIME", heads, (), 1, escape_text(why, 300))
    rows, last_ns = [], bins[-1].end_ns
    for time_bin in bins:
        ratio = time_bin.lost_ratio
        chief = trend.get_cause_label(time_bin.causes[0][0]) if time_bin.causes else _NO_VALUE
        rows.append(
            (
                *(
                    trend.format_time_in_run(ns, last_ns)
                    for ns in (time_bin.start_ns, time_bin.end_ns)
                ),
                format_quantity(time_bin.in_step_ns, "ns"),
                _NO_VALUE if ratio is None else format_quantity(1 - ratio, "ratio"),
                format_quantity(time_bin.lost_ns, "ns"),
                chief if time_bin.lost_ns else _NO_VALUE,
            )
        )
    return TextTable("BY TIME", heads, tuple(rows), 1)


def _format_rank(report: Report, index: int) -> str:
    rank = report.ranks[index]
    return f"{wording.format_rank_name(rank)} on {escape_text(rank.node, 60)}"


def _find_main_cause(amounts: Mapping[str, int]) -> str:
    if not any(amounts.values()):
        return _NO_VALUE
    return escape_text(max(sorted(amounts), key=lambda cause: amounts[cause]), 60)


def _sum_by_cause(lines: Iterable[Iterable[tuple[str, int]]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for buckets in lines:
        for cause, ns in buckets:
            sums[cause] = sums.get(cause, 0) + ns
    return sums


def _limit_rows(
    title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], top: int, noun: str
) -> TextTable:
    hidden_count = len(rows) - top
    remainder = (
        f"and {hidden_count:,} {noun}: --top {len(rows)} shows all" if hidden_count > 0 else ""
    )
    return TextTable(title, heads, tuple(rows[:top]), 1, remainder)


_TABLE_BUILDERS: Mapping[str, Callable[[Report, int], TextTable]] = {
    "node": _build_node_table,
    "rank": _build_rank_table,
    "cause": _build_cause_table,
    "line": _build_line_table,
    "step": _build_step_table,
    "time": _build_time_table,
}


_SIMILAR_RATIO = 0.1  # of what most ranks lost; ranks that differ by less are similar
_EXTRA_ROWS = 2  # this many ranks more than the row limit are still shown one by one
EMPTY_CELL = "-"


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One rank, or several ranks of a node with the mean of each value."""

    label: str
    node: str
    victim_ns: tuple[int, ...]
    """Victim time in ns per cause of the matrix; the last element is the sum over all causes."""
    culprit_ns: tuple[int, ...]
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class CauseMatrix:
    """The table, with a sentence about the ranks that share the last row."""

    causes: tuple[str, ...]
    lines: tuple[MatrixRow, ...]
    rest: str
    """"" when every rank has a line of its own."""


def build_cause_matrix(report: Report, most_rows: int, most_causes: int) -> CauseMatrix | None:
    """Build the matrix; None if ranks were not compared or there is only one."""
    ranks = report.ranks
    if len(ranks) < 2 or not any(rank.caused for rank in ranks):
        return None
    victim = [dict(rank.buckets) for rank in ranks]
    caused = [dict(rank.caused) for rank in ranks]
    causes = _select_causes(victim, caused, most_causes)
    lines = [
        MatrixRow(
            str(rank.pid if rank.rank is None else rank.rank),
            rank.node,
            (*(f.get(cause, 0) for cause in causes), sum(f.values())),
            (*(c.get(cause, 0) for cause in causes), sum(c.values())),
        )
        for rank, f, c in zip(ranks, victim, caused)
    ]
    if len(lines) <= most_rows + _EXTRA_ROWS:
        order = sorted(range(len(lines)), key=lambda index: (-lines[index].culprit_ns[-1], index))
        return CauseMatrix(causes, tuple(lines[index] for index in order), "")
    groups, hidden = _select_outliers(lines, most_rows)
    shown = [_merge_rows(lines, group, ranks) for group in groups]
    if not hidden:
        return CauseMatrix(causes, tuple(shown), "")
    merged = _merge_rows(lines, hidden, ranks)
    return CauseMatrix(
        causes, (*shown, merged), _describe_remaining_ranks([lines[index] for index in hidden])
    )


def format_cell(ns: int) -> str:
    """Format a cell; zero is a dash, so that nonzero values stand out."""
    return format_quantity(ns, "ns") if ns else EMPTY_CELL


def _select_causes(
    victim: Sequence[dict[str, int]], caused: Sequence[dict[str, int]], max_causes: int
) -> tuple[str, ...]:
    """Select the causes in which victims and culprits differ most; among equals the largest."""
    moved: dict[str, int] = {}
    size: dict[str, int] = {}
    for f, c in zip(victim, caused):
        for cause in {*f, *c}:
            moved[cause] = moved.get(cause, 0) + abs(f.get(cause, 0) - c.get(cause, 0))
            size[cause] = size.get(cause, 0) + f.get(cause, 0)
    order = sorted(moved, key=lambda cause: (-moved[cause], -size[cause], cause))
    return tuple([cause for cause in order if moved[cause] or size[cause]][:max_causes])


def _select_outliers(
    lines: Sequence[MatrixRow], max_ranks: int
) -> tuple[list[list[int]], list[int]]:
    """Select ranks far from the median, grouped by node and similarity, and the rest.

    The groups are sorted by culprit time, largest first.
    """
    victim, caused = (
        sorted(values) for values in zip(*((x.victim_ns[-1], x.culprit_ns[-1]) for x in lines))
    )
    victim_ns, caused_ns = victim[len(lines) // 2], caused[len(lines) // 2]
    least = _SIMILAR_RATIO * max(victim_ns, caused_ns)

    def apart(index: int) -> int:
        line = lines[index]
        return max(abs(line.victim_ns[-1] - victim_ns), abs(line.culprit_ns[-1] - caused_ns))

    groups: list[list[int]] = []
    for index in sorted(range(len(lines)), key=lambda index: (-apart(index), index)):
        if apart(index) <= least and groups:
            break
        similar = next((g for g in groups if _is_similar(lines[g[0]], lines[index], least)), None)
        if similar is not None:
            similar.append(index)
        elif len(groups) < max_ranks:
            groups.append([index])
    groups.sort(key=lambda g: (-lines[g[0]].culprit_ns[-1], -lines[g[0]].victim_ns[-1], g[0]))
    shown = {index for group in groups for index in group}
    return [sorted(group) for group in groups], sorted(set(range(len(lines))) - shown)


def _is_similar(line: MatrixRow, other: MatrixRow, least: float) -> bool:
    """Return whether two ranks of a node differ by at most `least` ns in every value."""
    pairs = zip((*line.victim_ns, *line.culprit_ns), (*other.victim_ns, *other.culprit_ns))
    return line.node == other.node and all(abs(a - b) <= least for a, b in pairs)


def _merge_rows(
    lines: Sequence[MatrixRow], group: Sequence[int], ranks: Sequence[RankLedger]
) -> MatrixRow:
    """Merge the rows of several ranks into one: the mean of each cell."""
    rows = [lines[index] for index in group]
    if len(rows) == 1:
        return rows[0]
    victim, caused = (
        _compute_mean_columns([row.victim_ns for row in rows]),
        _compute_mean_columns([row.culprit_ns for row in rows]),
    )
    return MatrixRow(
        _format_rank_numbers([ranks[index] for index in group]),
        rows[0].node,
        victim,
        caused,
        len(rows),
    )


def _compute_mean_columns(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) // len(rows) for column in zip(*rows))


def _format_rank_numbers(ranks: Sequence[RankLedger]) -> str:
    numbers = [rank.rank for rank in ranks if rank.rank is not None and rank.rank >= 0]
    return format_number_list(numbers) if len(numbers) == len(ranks) else "others"


def _describe_remaining_ranks(rows: Sequence[MatrixRow]) -> str:
    """Describe how similar the ranks of the last row are."""
    count = f"{len(rows):,} more {'rank' if len(rows) == 1 else 'ranks'}"
    spans = []
    for word, column in (
        ("lost", [x.victim_ns[-1] for x in rows]),
        ("caused", [x.culprit_ns[-1] for x in rows]),
    ):
        spans.append((word, min(column), max(column)))
    middle = sum(row.victim_ns[-1] for row in rows) / len(rows)
    if all(high - low <= 2 * _SIMILAR_RATIO * middle for _, low, high in spans):
        return f"{count}, all alike; each"
    ranges = ", ".join(
        f"{word} {format_quantity(low, 'ns')} to {format_quantity(high, 'ns')}"
        for word, low, high in spans
    )
    return f"{count} ({ranges}); on average"


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One line of the ledger."""

    label: str
    depth: int
    ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LedgerColumn:
    """One rank, or all of them."""

    heading: str
    rank: RankLedger | None
    """None for all ranks together."""
    window_ns: int
    unmeasured_ns: int
    outside_ns: int
    outside: dict[str, int]
    in_step_ns: int
    productive_ns: int
    lost_ns: int
    causes: dict[str, int]


def build_ledger_columns(report: Report, most_ranks: int) -> list[LedgerColumn]:
    """Build the column of all ranks, then of up to `most_ranks` ranks, most lost time first."""
    everyone = LedgerColumn(
        "all ranks",
        None,
        report.window_ns,
        report.unmeasured_ns,
        report.outside_ns,
        dict(report.outside_buckets),
        report.in_step_ns,
        report.productive_ns,
        report.lost_ns,
        sum_buckets(report),
    )
    ranks = [_build_rank_column(rank) for rank in sort_by_lost_time(report.ranks)[:most_ranks]]
    return ranks if len(report.ranks) == 1 else [everyone, *ranks]


def sort_by_lost_time(ranks: Sequence[RankLedger]) -> list[RankLedger]:
    """Sort ranks by lost time, largest first; ranks with equal loss keep their order."""
    order = {id(rank): index for index, rank in enumerate(ranks)}
    return sorted(ranks, key=lambda rank: (-rank.lost_ns, order[id(rank)]))


def build_ledger_rows(columns: Sequence[LedgerColumn]) -> list[LedgerRow]:
    """Build the rows of the ledger; a cause that a rank does not have is a known 0."""

    def row(label: str, depth: int, values: Sequence[int]) -> LedgerRow:
        return LedgerRow(escape_text(label, 60), depth, tuple(values))

    outside = _order_causes(column.outside for column in columns)
    causes = _order_causes(column.causes for column in columns)
    rows = [
        row("observed", 0, [c.window_ns for c in columns]),
        row("not measured", 1, [c.unmeasured_ns for c in columns]),
        row("outside steps", 1, [c.outside_ns for c in columns]),
    ]
    rows += [row(cause, 2, [c.outside.get(cause, 0) for c in columns]) for cause in outside]
    rows += [
        row("in steps", 1, [c.in_step_ns for c in columns]),
        row("productive", 2, [c.productive_ns for c in columns]),
        row("lost", 2, [c.lost_ns for c in columns]),
    ]
    rows += [row(cause, 3, [c.causes.get(cause, 0) for c in columns]) for cause in causes]
    return rows


def format_exact_seconds(ns: int) -> str:
    """Format nanoseconds as seconds without rounding: 1,234.000000005."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 10**9:,}.{ns % 10**9:09d}"


def _build_rank_column(rank: RankLedger) -> LedgerColumn:
    return LedgerColumn(
        format_rank_name(rank),
        rank,
        rank.window_ns,
        rank.unmeasured_ns,
        rank.outside_ns,
        _sum_buckets(rank.outside_buckets),
        rank.in_step_ns,
        rank.productive_ns,
        rank.lost_ns,
        _sum_buckets(rank.buckets),
    )


def _sum_buckets(buckets: Sequence[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for cause, ns in buckets:
        sums[cause] = sums.get(cause, 0) + ns
    return sums


def _order_causes(buckets: object) -> list[str]:
    """Order the causes of all columns by their largest value, unattributed last."""
    sums: dict[str, int] = {}
    for column in buckets:  # type: ignore[attr-defined]
        for cause, ns in column.items():
            sums[cause] = max(sums.get(cause, 0), ns)
    return sorted(sums, key=lambda cause: (cause == UNATTRIBUTED, -sums[cause], cause))
