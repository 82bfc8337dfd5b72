"""The live screen: the last minute of a job, its losses, culprits and recorders.

No line is wider and no screen is longer than requested.

Rows of the live screen: one per rank, or per node if there are more ranks than lines.

The live screen as sentences, for screen readers, logs and terminals without cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Group, RenderableType
from rich.text import Text

from clusterprof.output.renderers.terminal_tables import (
    Prose,
    draw_lines,
    format_lines,
    indent,
    make_grid,
    make_line,
    make_masthead,
)
from clusterprof.output.renderers.text import culprits, summary, wording
from clusterprof.output.renderers.text.culprits import select_main_culprits
from clusterprof.output.renderers.text.safety import count_columns, escape_text
from clusterprof.report.live import LiveView, NodeStatus, RankStatus
from clusterprof.report.model import RankLedger
from clusterprof.units import format_quantity

SORT_KEYS = ("lost", "caused", "busy", "step", "name")
"""Sort keys of the rows.

lost: culprits, then most lost; caused: most caused first; busy: least busy first;
step: slowest first; name: by node and rank.
"""
_MAX_NAME_CHARACTERS = 60
_MAX_LATE_RANKS = 3
_MAX_LOSS_CHARACTERS = 30  # the longest known cause and its share have 28


@dataclass(frozen=True, slots=True)
class LiveRow:
    """One row; foreign strings are already safe."""

    ranks: str
    """Number of the rank; for a node, how many ranks it has."""
    node: str
    device: str
    busy_ratio: float | None
    sm_active_ratio: float | None
    step_ns: int | None
    lost_ratio: float | None
    """Share of the time inside steps; None if no step was seen."""
    lost_to: str
    """The largest cause of loss, or why it is not known."""
    caused_ns: int | None
    """Time lost by the rank and by ranks that waited for it; None if not compared."""
    recorder: str
    recorder_cell: str
    """The same for a column of a table."""
    is_healthy: bool
    """True while the recorder writes."""
    is_late: bool
    """True if others waited for this rank because of the main cause: it is sorted first."""
    order: tuple[str, int]


def build_rows(live: LiveView, by_node: bool, sort: str) -> list[LiveRow]:
    """Build all rows, sorted by `sort`; a node without any known rank gets a row too."""
    nodes = {node.key: node for node in live.nodes}
    parts: dict[str, list[tuple[RankLedger, RankStatus | None]]] = {key: [] for key in nodes}
    keys = {(node.name, key) for key, node in nodes.items()}
    names = {name: key for name, key in sorted(keys, reverse=True)}
    for ledger in live.report.ranks:
        rank = live.ranks.get((ledger.node, ledger.pid))
        key = rank.node_key if rank is not None else names.get(ledger.node, "")
        if key in parts:
            parts[key].append((ledger, rank))
    late = _find_late_ranks(live)
    rows = []
    for key, node_ranks in parts.items():
        groups = [node_ranks] if by_node or not node_ranks else [[pair] for pair in node_ranks]
        rows += [_build_row(nodes[key], group, by_node, late) for group in groups]
    return sorted(rows, key=_SORT_FUNCTIONS[sort])


def count_rank_rows(live: LiveView) -> int:
    """Count the rows of the view by rank."""
    node_keys = {rank.node_key for rank in live.ranks.values()}
    return len(live.report.ranks) + sum(node.key not in node_keys for node in live.nodes)


def describe_recorder_state(node: NodeStatus, short: bool = False) -> str:
    """Describe the state of a recorder: age of its last record, or why it does not write.

    short: leave out what the heading of a column says.
    """
    age = "" if node.age_ns is None else format_duration(node.age_ns)
    if node.state == "recording" and age:
        return age if short else f"{age} ago"
    if node.state == "recording":
        return "no record yet"
    if node.state == "silent":
        return f"silent {age}" if short else f"silent for {age}"
    return node.state


def format_duration(ns: int) -> str:
    """Format a duration (ns) in round units: 0.8 s, 12 s, 3 min, 5 h, 12 days."""
    seconds = ns / 1e9
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for least, size, unit in ((172_800, 86_400, "days"), (7_200, 3_600, "h"), (120, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def _build_row(
    node: NodeStatus,
    pairs: Sequence[tuple[RankLedger, RankStatus | None]],
    by_node: bool,
    late: Collection[tuple[str, int | None]],
) -> LiveRow:
    ledgers = [ledger for ledger, _ in pairs]
    lives = [rank for _, rank in pairs if rank is not None]
    in_step_ns = sum(ledger.in_step_ns for ledger in ledgers)
    lost_ns = sum(ledger.lost_ns for ledger in ledgers)
    caused = [ns for ledger in ledgers for _, ns in ledger.caused]
    first = ledgers[0] if ledgers else None
    return LiveRow(
        ranks=_format_ranks(ledgers, by_node),
        node=escape_text(node.name, _MAX_NAME_CHARACTERS),
        device=escape_text(first.device, _MAX_NAME_CHARACTERS)
        if first is not None and not by_node
        else "",
        busy_ratio=_compute_mean(rank.busy_ratio for rank in lives),
        sm_active_ratio=_compute_mean(rank.sm_active_ratio for rank in lives),
        step_ns=max((rank.step_ns for rank in lives if rank.step_ns is not None), default=None),
        lost_ratio=lost_ns / in_step_ns if in_step_ns else None,
        lost_to=_describe_main_loss(ledgers, lives, in_step_ns),
        caused_ns=sum(caused) if caused else None,
        recorder=describe_recorder_state(node),
        recorder_cell=describe_recorder_state(node, short=True),
        is_healthy=node.state == "recording" and not node.why,
        is_late=any((ledger.node, ledger.rank) in late for ledger in ledgers),
        order=(node.name, -1 if first is None or first.rank is None else first.rank),
    )


def _find_late_ranks(live: LiveView) -> set[tuple[str, int | None]]:
    """Find the main culprits that others waited for, or the ranks that caused a hang."""
    findings = live.report.findings
    halted = [
        finding
        for finding in findings
        if finding.outside_steps and finding.cause.family != "startup"
    ]
    late_findings = halted or [finding for finding in findings if not finding.outside_steps][:1]
    return {
        (culprit.node, culprit.rank)
        for finding in late_findings
        for culprit in select_main_culprits(finding)[:_MAX_LATE_RANKS]
        if finding.outside_steps or culprit.others_ns
    }


def _format_ranks(ledgers: Sequence[RankLedger], by_node: bool) -> str:
    if by_node:
        return str(len(ledgers))
    if not ledgers:
        return "-"
    ledger = ledgers[0]
    return str(ledger.rank) if ledger.rank is not None else f"pid {ledger.pid}"


def _describe_main_loss(
    ledgers: Sequence[RankLedger], lives: Sequence[RankStatus], in_step_ns: int
) -> str:
    if not ledgers:
        return "no training process"
    if not in_step_ns:
        since = [rank.since_step_ns for rank in lives if rank.since_step_ns is not None]
        return f"no step for {format_duration(min(since))}" if since else "no step seen"
    sums: dict[str, int] = {}
    for ledger in ledgers:
        for cause, ns in ledger.buckets:
            sums[cause] = sums.get(cause, 0) + ns
    cause, ns = max(sums.items(), key=lambda bucket: bucket[1], default=("", 0))
    return (
        f"{escape_text(cause, _MAX_NAME_CHARACTERS)} {format_quantity(ns / in_step_ns, 'ratio')}"
        if ns
        else "nothing"
    )


def _compute_mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


def _make_descending_key(
    get_value: Callable[[LiveRow], float | None],
) -> Callable[[LiveRow], tuple[object, ...]]:
    """Make a sort key: largest first, unknown values last, equal values by name."""

    def key(row: LiveRow) -> tuple[object, ...]:
        value = get_value(row)
        return value is None, -(value or 0), row.order

    return key


_SORT_FUNCTIONS: dict[str, Callable[[LiveRow], tuple[object, ...]]] = {
    "lost": _make_descending_key(
        lambda row: row.lost_ratio + row.is_late if row.lost_ratio is not None else None
    ),
    "caused": _make_descending_key(lambda row: row.caused_ns),
    "busy": _make_descending_key(
        lambda row: None if row.busy_ratio is None else 1 - row.busy_ratio
    ),
    "step": _make_descending_key(lambda row: row.step_ns),
    "name": lambda row: (row.order,),
}


def describe_recorder_nodes(nodes: Sequence[NodeStatus], max_names: int) -> str:
    """Describe at most `max_names` nodes and the state of their recorders."""
    states = [
        f"{escape_text(node.name, _MAX_NAME_CHARACTERS)} {describe_recorder_state(node)}"
        + (f" ({escape_text(node.why, 80)})" if node.why else "")
        for node in nodes[:max_names]
    ]
    hidden_count = len(nodes) - max_names
    return ", ".join([*states, f"{hidden_count:,} more"] if hidden_count > 0 else states)


MIN_WIDTH = 40
_NEGLIGIBLE_RATIO = 0.0005  # a smaller share would be printed as 0.0 %
_NO_VALUE = "-"
_LATE_LEGEND = "* others waited for this rank most, because of the main cause"


@dataclass(frozen=True, slots=True)
class View:
    """What the user has chosen to see."""

    width: int = 80
    height: int = 24
    sort: str = "lost"
    """A word of `SORT_KEYS`."""
    by: str = "auto"
    """"rank", "node", or "auto": nodes if there are more ranks than lines."""
    first: int = 0
    """Index of the top row."""


def draw_screen(live: LiveView, view: View, color: bool, foot: str = "") -> list[str]:
    """Draw one screen as strings, one a line; `foot` is the last line."""
    return format_lines(draw_screen_lines(live, view, foot), color).splitlines()


def draw_screen_lines(live: LiveView, view: View, foot: str = "") -> list[Text]:
    """Draw the lines of one screen; `foot` is the last line."""
    width = max(view.width, MIN_WIDTH)
    head = draw_lines(Group(*_describe_head(live, width)), width)
    foot_lines = [_make_remark(foot, width)] if foot else []
    room = max(view.height - len(head) - 2 - len(foot_lines), 3)
    by_node = view.by == "node" or (view.by == "auto" and count_rank_rows(live) > room)
    rows = build_rows(live, by_node, view.sort)
    first = min(max(view.first, 0), max(len(rows) - room, 0))
    shown = rows[first : first + room]
    if len(rows) > room:
        shown = shown[: room - 1]
    lines = [*head, Text(), *_draw_table(shown, by_node, width)]
    if len(rows) > room:
        noun = "nodes" if by_node else "ranks"
        position = f"{first + 1}-{first + len(shown)} of {len(rows):,} {noun}"
        lines.append(_make_remark(position, width))
    if any(row.is_late for row in shown) and len(lines) + len(foot_lines) + 1 < view.height:
        lines += [Text(), _make_remark(_LATE_LEGEND, width)]
    if foot_lines:
        lines += [Text()] * (view.height - len(lines) - len(foot_lines)) + foot_lines
    return lines


def _make_remark(text: str, width: int) -> Text:
    return draw_lines(indent(make_line(text, "dim"), right=0), width)[0]


def _describe_head(live: LiveView, width: int) -> Iterator[RenderableType]:
    title = f"clusterprof top  {escape_text(live.title)}"
    right = f"{describe_live_scope(live)}, last {format_duration(live.window_ns)}"
    yield make_masthead(title, right, width)
    yield indent(Prose(describe_live_verdict(live), "bold", 3))
    if live.report.in_step_ns:
        yield indent(make_line(describe_levels(live)), right=0)
        yield indent(make_line(_fit_parts(list_live_causes(live), "Lost to: ", width - 2)))
    for warning in list_live_warnings(live):
        yield indent(Prose(f"! {warning}", "warn", 2))


def describe_live_verdict(live: LiveView) -> str:
    """Describe in one sentence what cost most in the window, and the culprits."""
    report = live.report
    for finding in report.findings:
        if finding.outside_steps and finding.cause.family != "startup":
            culprit_names = culprits.format_culprits(finding, 2)
            by = f", by {culprit_names}" if culprit_names else ""
            return f"{escape_text(finding.cause.id, 60)}: {wording.format_title(finding)}{by}."
    if not live.nodes or all(node.age_ns is None for node in live.nodes):
        return "Nothing has been recorded yet."
    if not report.ranks:
        return "No training process was seen in this time."
    if not report.in_step_ns:
        return "No step ended in this time."
    return wording.describe_verdict(report)


def list_live_causes(live: LiveView) -> list[str]:
    """List the causes of loss in the window with their share of step time, largest first."""
    report = live.report
    sums = sorted(wording.sum_buckets(report).items(), key=lambda bucket: (-bucket[1], bucket[0]))
    shares = [
        f"{escape_text(cause, 60)} {wording.format_share(ns, report.in_step_ns)}"
        for cause, ns in sums
        if ns >= _NEGLIGIBLE_RATIO * report.in_step_ns
    ]
    return shares or ["nothing"]


def list_live_warnings(live: LiveView) -> list[str]:
    """List what the user must know: emulation, troubled recorders, the end of the recording."""
    out = []
    if live.report.emulated:
        out.append("EMULATED accelerators: no GPU was measured")
    if live.ended:
        ago = "" if live.age_ns is None else f" {format_duration(live.age_ns)} ago"
        reasons = dict.fromkeys(escape_text(node.why, 80) for node in live.nodes if node.why)
        why = f" ({'; '.join(list(reasons)[:2])})" if reasons else ""
        out.append(
            f"This recording has ended{ago}{why}: its last {format_duration(live.window_ns)}"
        )
    else:
        out += _describe_recorders(live.nodes)
    damaged = sum(node.damaged_bytes for node in live.nodes)
    if damaged:
        out.append(f"{format_quantity(damaged, 'bytes')} could not be read")
    if live.trouble:
        out.append(escape_text(live.trouble))
    if live.reading:
        out.append(escape_text(live.reading))
    return out


def _describe_recorders(nodes: Sequence[NodeStatus]) -> list[str]:
    troubled = [node for node in nodes if node.state != "recording" or node.why]
    if troubled and len(troubled) == len(nodes) and all(node.state == "silent" for node in nodes):
        newest = min(nodes, key=lambda node: node.age_ns or 0)
        return [f"All recorders are silent; the newest: {describe_recorder_state(newest)}"]
    return [f"Recorders: {describe_recorder_nodes(troubled, 3)}"] if troubled else []


def describe_live_scope(live: LiveView) -> str:
    """Describe how many nodes and ranks there are."""
    ranks, size = len(live.report.ranks), None
    if live.report.job is not None:
        size = live.report.job.world_size
    rank_count = summary.format_count(ranks, "rank")
    if size is not None and size > ranks:
        rank_count = f"{ranks:,} of {summary.format_count(size, 'rank')}"
    return f"{summary.format_count(len(live.nodes), 'node')}, {rank_count}"


def describe_levels(live: LiveView) -> str:
    """Describe how busy the devices are, how long steps take and how much time is lost."""
    parts = []
    busy = [rank.busy_ratio for rank in live.ranks.values() if rank.busy_ratio is not None]
    filled = [
        rank.sm_active_ratio for rank in live.ranks.values() if rank.sm_active_ratio is not None
    ]
    steps = [rank.step_ns for rank in live.ranks.values() if rank.step_ns is not None]
    if busy:
        parts.append(
            f"Busy {format_quantity(fmean(busy), 'ratio')} (least"
            f" {format_quantity(min(busy), 'ratio')})"
        )
    if filled:
        parts.append(f"SM activity {format_quantity(fmean(filled), 'ratio')}")
    if steps:
        parts.append(f"step {format_quantity(sorted(steps)[len(steps) // 2], 'ns')}")
    at_most = "at most " if wording.is_upper_bound(live.report) else ""
    parts.append(
        f"lost {at_most}{wording.format_share(live.report.lost_ns, live.report.in_step_ns)}"
    )
    return ", ".join(parts) + "."


def _fit_parts(parts: Sequence[str], before: str, width: int) -> str:
    """Join as many parts as a line holds, followed by the number of the others."""
    for shown in range(len(parts), 0, -1):
        hidden_count = len(parts) - shown
        suffix = [f"{hidden_count} more"] if hidden_count else []
        line = before + ", ".join([*parts[:shown], *suffix])
        if count_columns(line) <= width:
            return line
    return before + parts[0]


# --- the table ----------------------------------------------------------------------------------

_TEXT_HEADINGS = ("NODE", "DEVICE", "RECORDER")
# Left out one after the other until the rest fits.
_DROP_ORDER = ("DEVICE", "SM", "CAUSED", "RANKS", "BUSY", "STEP", "RECORDER", "LOST")


def _draw_table(rows: Sequence[LiveRow], by_node: bool, width: int) -> list[Text]:
    """Draw the headings and a line for each row; `*` marks the ranks others waited for."""
    heads = _select_headings(rows, by_node)
    grid = make_grid(
        heads,
        [_format_cells(row, heads) for row in rows],
        [heads.index(head) for head in _TEXT_HEADINGS if head in heads],
        width - 1,
        [heads.index(head) for head in _DROP_ORDER if head in heads],
        gap=1,
    )
    for column in grid.columns:
        if str(column.header) == "LOST TO":
            column.justify = "left"
    lines = []
    for row, line in zip((None, *rows), draw_lines(grid, width - 1)):
        line = Text.assemble("*" if row is not None and row.is_late else " ", line)
        if row is not None and (row.is_late or not row.is_healthy):
            line.stylize("bad" if row.is_late else "warn")
        lines.append(line)
    return lines


def _select_headings(rows: Sequence[LiveRow], by_node: bool) -> tuple[str, ...]:
    out = ["NODE", "RANKS"] if by_node else ["RANK", "NODE", "DEVICE"]
    out.append("BUSY")
    if any(row.sm_active_ratio is not None for row in rows):
        out.append("SM")
    out += ["STEP", "LOST", "LOST TO"]
    if any(row.caused_ns is not None for row in rows):
        out.append("CAUSED")
    return (*out, "RECORDER")


def _format_cells(row: LiveRow, headings: tuple[str, ...]) -> tuple[str, ...]:
    cells = {
        "RANK": row.ranks,
        "RANKS": row.ranks,
        "NODE": row.node,
        "DEVICE": row.device or _NO_VALUE,
        "BUSY": _format_ratio(row.busy_ratio),
        "SM": _format_ratio(row.sm_active_ratio),
        "STEP": _NO_VALUE if row.step_ns is None else _format_step_time(row.step_ns),
        "LOST": _format_ratio(row.lost_ratio),
        "LOST TO": escape_text(row.lost_to, _MAX_LOSS_CHARACTERS),
        "CAUSED": _NO_VALUE if row.caused_ns is None else format_quantity(row.caused_ns, "ns"),
        "RECORDER": row.recorder_cell,
    }
    return tuple(cells[heading] for heading in headings)


def _format_ratio(value: float | None) -> str:
    return _NO_VALUE if value is None else format_quantity(value, "ratio")


def _format_step_time(ns: int) -> str:
    """Format a step time in few characters: 74.0 ms, 740 ms, 7.40 s."""
    return f"{ns / 1e6:.0f} ms" if 99_950_000 <= ns < 999_500_000 else format_quantity(ns, "ns")


_MAX_ROWS = 50


def describe_screen(live: LiveView, sort: str = "lost", by: str = "auto") -> str:
    """Describe what the live screen shows, one line per item."""
    by_node = by == "node" or (by == "auto" and count_rank_rows(live) > _MAX_ROWS)
    rows = build_rows(live, by_node, sort)
    lines = [
        f"Recording: {escape_text(live.title)}",
        f"Recorded: {describe_live_scope(live)}; the last {format_duration(live.window_ns)} of"
        f" it is shown",
        f"Verdict: {describe_live_verdict(live)}",
    ]
    if live.report.in_step_ns:
        lines += [
            f"Numbers: {describe_levels(live)}",
            f"Lost to: {', '.join(list_live_causes(live))}",
        ]
    lines += [f"Warning: {warning}" for warning in list_live_warnings(live)]
    lines += [_describe_row(row, by_node) for row in rows[:_MAX_ROWS]]
    if len(rows) > _MAX_ROWS:
        lines.append(f"{summary.format_count(len(rows) - _MAX_ROWS, 'more line')} not shown")
    return "\n".join(lines) + "\n"


def _describe_row(row: LiveRow, by_node: bool) -> str:
    name = f"{row.node}, {row.ranks} ranks" if by_node else f"{row.node} rank {row.ranks}"
    if row.ranks == "-":
        name = row.node
    parts = [f"on {row.device}"] if row.device else []
    if row.busy_ratio is not None:
        parts.append(f"busy {format_quantity(row.busy_ratio, 'ratio')}")
    if row.sm_active_ratio is not None:
        parts.append(f"SM activity {format_quantity(row.sm_active_ratio, 'ratio')}")
    if row.step_ns is not None:
        parts.append(f"step {format_quantity(row.step_ns, 'ns')}")
    if row.lost_ratio is not None:
        parts.append(f"lost {format_quantity(row.lost_ratio, 'ratio')}, most to {row.lost_to}")
    else:
        parts.append(row.lost_to)
    if row.caused_ns is not None:
        parts.append(f"caused {format_quantity(row.caused_ns, 'ns')}")
    return f"{name}: {', '.join([*parts, f'recorder {row.recorder}'])}"
