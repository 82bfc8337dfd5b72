"""Put the tables of a cluster's ledger into words, independent of the output format.

Texts come from a database and are not trusted: each passes `escape_text` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from clusterprof.fleet.queries import HOUR_NS, MAX_LEMON_P, FleetSummary, LemonFacts, NodeSums, Sums
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.model import UNATTRIBUTED
from clusterprof.units import SECOND_NS, format_quantity

_NOT_KNOWN = "not known"
_UNITS = ((HOUR_NS, "GPU-hours"), (HOUR_NS // 60, "GPU-minutes"), (SECOND_NS, "GPU-seconds"))
_MIN_UNITS = 10
"""A unit is used when the jobs held devices for at least so many of it."""
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Heading:
    """Heading of a column."""

    text: str
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class FleetTable:
    """A table in words."""

    name: str
    """Kebab-case identity."""
    title: str
    note: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0
    """Rows that are not listed."""


@dataclass(frozen=True, slots=True)
class FleetDocument:
    """Everything that a reader sees."""

    title: str
    scope: str
    warnings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    """(label, sentence)."""
    tables: tuple[FleetTable, ...]
    notes: tuple[str, ...]


class TimeFormat:
    """Formats device time of one document in one unit."""

    def __init__(self, window_ns: int) -> None:
        """Take the time for which all jobs held devices, ns; it decides the unit."""
        fitting = [unit for unit in _UNITS if window_ns >= _MIN_UNITS * unit[0]]
        self._ns, self.unit = (fitting or [_UNITS[-1]])[0]

    def format(self, ns: int) -> str:
        """Format device time without its unit."""
        value = ns / self._ns
        return (
            f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
        )


def build_fleet_document(summary: FleetSummary, top: int = 20) -> FleetDocument:
    """Build the document of a ledger. top: rows of a table."""
    time = TimeFormat(summary.sums.window_ns)
    tables = (table for build in _TABLES for table in build(summary, time, top))
    return FleetDocument(
        _escape(summary.title),
        _describe_scope(summary, time),
        tuple(_list_warnings(summary)),
        tuple(_list_facts(summary, time)),
        tuple(tables),
        tuple(_list_notes(summary)),
    )


def _escape(text: str) -> str:
    return escape_text(text) or _NOT_KNOWN


def format_date(ns: int | None) -> str:
    """Format an instant as a date in UTC."""
    if ns is None:
        return _NOT_KNOWN
    return datetime.fromtimestamp(ns // SECOND_NS, timezone.utc).strftime("%Y-%m-%d")


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_ratio(part: float, total: float) -> str:
    """Format a part of a whole as percent; a dash without a whole."""
    return format_quantity(part / total, "ratio") if total else "–"


def _describe_scope(summary: FleetSummary, time: TimeFormat) -> str:
    sums = summary.sums
    users = len({owner.user for owner in summary.owners if owner.user})
    people = f" of {_count(users, 'user')}" if users else ""
    span = ""
    if summary.first_ns is not None:
        first, last = format_date(summary.first_ns), format_date(summary.last_ns)
        span = f", started {first}" if first == last else f", started {first} to {last}"
    held_time = f"{time.format(sums.window_ns)} {time.unit}"
    nodes = _count(len(summary.nodes), "node")
    return f"{_count(sums.jobs, 'job')}{people} on {nodes}{span}; {held_time}"


def _list_warnings(summary: FleetSummary) -> Iterator[str]:
    if summary.emulated:
        jobs = (
            "all jobs" if summary.emulated == summary.sums.jobs else _count(summary.emulated, "job")
        )
        yield f"EMULATED ACCELERATORS in {jobs}: no GPU was measured there"
    if summary.upper_bound:
        yield (
            f"{_count(summary.upper_bound, 'job')} had no measured device: what they lost is an"
            " upper bound, and so are the sums"
        )


def _list_facts(summary: FleetSummary, time: TimeFormat) -> Iterator[tuple[str, str]]:
    sums = summary.sums
    if not sums.jobs:
        yield "Jobs", "No job in the ledger matches the filter."
        return
    bound = "at most " if summary.upper_bound else ""
    lost, inside = time.format(sums.lost_ns), time.format(sums.in_step_ns)
    share = format_ratio(sums.lost_ns, sums.in_step_ns)
    cost = "" if sums.lost_cost is None else f", {_format_cost(sums)} {_escape(summary.currency)}"
    yield "Lost", f"{bound}{share} of GPU time inside steps: {lost} of {inside} {time.unit}{cost}."
    chief = next((cause for cause in summary.causes if cause.cause != UNATTRIBUTED), None)
    if chief is not None and chief.lost_ns:
        title = _escape(chief.title or chief.cause)
        yield (
            "Main cause",
            f"{title}: {time.format(chief.lost_ns)} {time.unit},"
            f" {format_ratio(chief.lost_ns, sums.lost_ns)} of the loss, in"
            f" {_count(chief.jobs, 'job')}.",
        )
    yield "Lemon nodes", _describe_lemons(summary)
    idle = f"{time.format(sums.outside_ns)} {time.unit}"
    without = ""
    if summary.no_steps:
        device_time = time.format(summary.no_steps_ns)
        without = (
            f" {_count(summary.no_steps, 'job')} took no step and held {device_time} {time.unit}."
        )
    yield (
        "Held but idle",
        f"{idle}, {format_ratio(sums.outside_ns, sums.window_ns)} of the time held, before the"
        f" first and after the last step of the jobs.{without}",
    )


def _format_cost(sums: Sums) -> str:
    return "" if sums.lost_cost is None else format_quantity(sums.lost_cost, "cost")


def _describe_lemons(summary: FleetSummary) -> str:
    tested = sum(node.tested > 0 for node in summary.nodes)
    if not tested:
        return "Not known: it takes jobs of several nodes that were recorded on all of them."
    if not summary.lemons:
        return f"None of {_count(tested, 'node')} is a culprit more often than chance explains."
    names = [_escape(lemon.node) for lemon in summary.lemons]
    suffix = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    verb = "is a culprit" if len(names) == 1 else "are culprits"
    return (
        f"{', '.join(names[:_MAX_NAMED])}{suffix} {verb} more often than chance explains (p ≤"
        f" {MAX_LEMON_P:g} after correction for {_count(tested, 'node')})."
    )


_Build = Callable[[FleetSummary, TimeFormat, int], Iterator[FleetTable]]
_NAME, _NUMBER = False, True


def _make_headings(*headings: tuple[str, bool]) -> tuple[Heading, ...]:
    return tuple(Heading(text, is_number) for text, is_number in headings)


def _build_causes(summary: FleetSummary, time: TimeFormat, top: int) -> Iterator[FleetTable]:
    causes = [cause for cause in summary.causes if cause.lost_ns]
    price = _find_mean_price(summary)
    has_cost = price is not None
    rows = tuple(
        (
            _escape(cause.cause),
            _escape(cause.title or ("no sufficient evidence" if is_unknown(cause.cause) else "–")),
            f"{cause.jobs:,}",
            time.format(cause.lost_ns),
            format_ratio(cause.lost_ns, summary.sums.lost_ns),
            *([format_quantity(cause.lost_ns * price, "cost")] if price is not None else []),
        )
        for cause in causes[:top]
    )
    headings = [("cause", _NAME), ("what happens", _NAME), ("jobs", _NUMBER)]
    headings += [("lost", _NUMBER), ("of the loss", _NUMBER)]
    headings += [(_escape(summary.currency), _NUMBER)] if has_cost else []
    note = "Lost inside steps. Explained by `clusterprof explain CAUSE`."
    if has_cost and price:
        note += " Money at the mean price of a lost GPU-hour."
    yield FleetTable(
        *("causes", f"Lost time by cause, in {time.unit}", note),
        *(_make_headings(*headings), rows, max(len(causes) - top, 0)),
    )


def is_unknown(cause: str) -> bool:
    """Return whether a cause stands for lost time without one."""
    return cause == UNATTRIBUTED


def _find_mean_price(summary: FleetSummary) -> float | None:
    """Find what a lost nanosecond cost on average; None without prices."""
    sums = summary.sums
    return sums.lost_cost / sums.lost_ns if sums.lost_cost is not None and sums.lost_ns else None


def _build_lemons(summary: FleetSummary, time: TimeFormat, top: int) -> Iterator[FleetTable]:
    if not summary.lemons:
        return
    nodes = {node.node: node for node in summary.nodes}
    rows = tuple(_build_lemon_row(nodes[lemon.node], lemon, time) for lemon in summary.lemons[:top])
    tested = sum(node.tested > 0 for node in summary.nodes)
    note = (
        "A culprit costs its job at least 1 % of the time in steps, and twice the mean of its"
        " nodes, by causes that a bad node can have. n: its jobs in which some nodes were culprits;"
        " k: in which it was one; expected: by chance, were all nodes of a job alike; p:"
        " probability of k or more by chance (binomial, upper bound), and after correction for"
        f" {tested:,} nodes (Holm)."
    )
    headings = (
        *(("node", _NAME), ("n", _NUMBER), ("k", _NUMBER), ("expected", _NUMBER), ("p", _NUMBER)),
        *(("p corrected", _NUMBER), ("caused", _NUMBER), ("of what", _NAME)),
        ("devices", _NAME),
    )
    left_out = max(len(summary.lemons) - top, 0)
    yield FleetTable(
        "lemons", f"Lemon nodes, in {time.unit}", note, _make_headings(*headings), rows, left_out
    )


def _build_lemon_row(node: NodeSums, lemon: LemonFacts, time: TimeFormat) -> tuple[str, ...]:
    causes = [_escape(cause) for cause, _ in lemon.causes[:_MAX_NAMED]]
    devices = [_escape(device) for device, _ in lemon.devices[:_MAX_NAMED]]
    hidden_count = len(lemon.devices) - _MAX_NAMED
    return (
        *(_escape(node.node), f"{node.tested:,}", f"{node.culprit:,}", f"{node.expected:.1f}"),
        *(_format_p(node.p), _format_p(node.adjusted_p), time.format(node.caused_ns)),
        ", ".join(causes),
        ", ".join(devices) + (f" and {hidden_count:,} more" if hidden_count > 0 else ""),
    )


def _format_p(p: float) -> str:
    return f"{p:.2g}" if p >= 1e-300 else "< 1e-300"


def _build_nodes(summary: FleetSummary, time: TimeFormat, top: int) -> Iterator[FleetTable]:
    headings = (
        *(("node", _NAME), ("switch", _NAME), ("jobs", _NUMBER), ("held", _NUMBER)),
        *(
            ("lost there", _NUMBER),
            ("caused", _NUMBER),
            ("k of n", _NUMBER),
            ("p corrected", _NUMBER),
        ),
    )
    rows = tuple(
        (
            *(_escape(node.node), escape_text(node.switch), f"{node.jobs:,}"),
            *(time.format(node.window_ns), time.format(node.lost_ns), time.format(node.caused_ns)),
            f"{node.culprit:,} of {node.tested:,}" if node.tested else "–",
            _format_p(node.adjusted_p) if node.tested else "–",
        )
        for node in summary.nodes[:top]
    )
    note = (
        "Lost there: by its own ranks. Caused: by it, its own loss and that of ranks that waited"
        " for it. k of n: jobs in which it was a culprit, of those in which some nodes were."
    )
    left_out = max(len(summary.nodes) - top, 0)
    yield FleetTable(
        "nodes", f"Nodes, in {time.unit}", note, _make_headings(*headings), rows, left_out
    )


def _build_switches(summary: FleetSummary, time: TimeFormat, top: int) -> Iterator[FleetTable]:
    if not summary.switches:
        return
    headings = (
        *(("switch", _NAME), ("nodes", _NUMBER), ("held", _NUMBER)),
        *(("lost there", _NUMBER), ("caused", _NUMBER)),
    )
    rows = tuple(
        (
            *(_escape(switch.switch), f"{switch.nodes:,}", time.format(switch.window_ns)),
            *(time.format(switch.lost_ns), time.format(switch.caused_ns)),
        )
        for switch in summary.switches[:top]
    )
    note = "Sums of the nodes of each leaf switch, by the resource manager's topology."
    left_out = max(len(summary.switches) - top, 0)
    yield FleetTable(
        "switches", f"Switches, in {time.unit}", note, _make_headings(*headings), rows, left_out
    )


def _build_places(summary: FleetSummary, time: TimeFormat, top: int) -> Iterator[FleetTable]:
    if not summary.places:
        return
    headings = (
        *(("mount, disk or NIC", _NAME), ("main cause", _NAME), ("jobs", _NUMBER)),
        *(("nodes", _NUMBER), ("caused", _NUMBER)),
    )
    rows = tuple(
        (
            *(_escape(place.name), _escape(place.cause), f"{place.jobs:,}", f"{place.nodes:,}"),
            time.format(place.caused_ns),
        )
        for place in summary.places[:top]
    )
    note = (
        "A path is one mount on all nodes; disks and NICs belong to their node. Nodes: the most of"
        " one job."
    )
    left_out = max(len(summary.places) - top, 0)
    yield FleetTable(
        "mounts",
        f"Mounts, disks and NICs, in {time.unit}",
        note,
        _make_headings(*headings),
        rows,
        left_out,
    )


def _list_sum_headings(summary: FleetSummary) -> list[tuple[str, bool]]:
    headings = [("jobs", _NUMBER), ("held", _NUMBER), ("idle", _NUMBER)]
    headings += [("lost", _NUMBER), ("of steps", _NUMBER)]
    return headings + ([(_escape(summary.currency), _NUMBER)] if summary.currency else [])


def _list_sum_cells(summary: FleetSummary, sums: Sums, time: TimeFormat) -> list[str]:
    cells = [f"{sums.jobs:,}", time.format(sums.window_ns), time.format(sums.outside_ns)]
    cells += [time.format(sums.lost_ns), format_ratio(sums.lost_ns, sums.in_step_ns)]
    return cells + ([_format_cost(sums) or _NOT_KNOWN] if summary.currency else [])


def _build_owners(summary: FleetSummary, time: TimeFormat, top: int) -> Iterator[FleetTable]:
    rows = tuple(
        (
            *(_escape(owner.account), _escape(owner.user)),
            *_list_sum_cells(summary, owner.sums, time),
        )
        for owner in summary.owners[:top]
    )
    headings = (("account", _NAME), ("user", _NAME), *_list_sum_headings(summary))
    note = "Idle: held before the first and after the last step."
    left_out = max(len(summary.owners) - top, 0)
    yield FleetTable(
        "owners",
        f"Accounts and users, in {time.unit}",
        note,
        _make_headings(*headings),
        rows,
        left_out,
    )


def _build_weeks(summary: FleetSummary, time: TimeFormat, top: int) -> Iterator[FleetTable]:
    weeks = summary.weeks[-max(top, 53) :]
    rows = []
    before: float | None = None
    for week in weeks:
        sums = week.sums
        ratio = sums.lost_ns / sums.in_step_ns if sums.in_step_ns else None
        change = ""
        if ratio is not None and before is not None and week.week:
            change = f"{100 * (ratio - before):+.1f} pt"
        before = ratio if ratio is not None else before
        named = [cause for cause, _ in week.causes if cause != UNATTRIBUTED]
        chief = _escape(named[0]) if named else ""
        rows.append((_escape(week.week), *_list_sum_cells(summary, sums, time), change, chief))
    headings = (
        *(("week", _NAME), *_list_sum_headings(summary)),
        *(("change", _NUMBER), ("main cause", _NAME)),
    )
    note = (
        "By the start of the job, ISO weeks in UTC. Change: of the lost share, to the week before."
    )
    left_out = len(summary.weeks) - len(weeks)
    yield FleetTable(
        "weeks", f"Weeks, in {time.unit}", note, _make_headings(*headings), tuple(rows), left_out
    )


def _build_idle_jobs(summary: FleetSummary, time: TimeFormat, top: int) -> Iterator[FleetTable]:
    if not summary.idle_jobs:
        return
    headings = (
        *(("job", _NAME), ("account", _NAME), ("user", _NAME), ("week", _NAME), ("GPUs", _NUMBER)),
        *(("steps", _NUMBER), ("held", _NUMBER), ("idle", _NUMBER)),
    )
    rows = tuple(
        (
            _escape(job.name or job.title),
            *(_escape(text) for text in (job.account, job.user, job.week)),
            *(f"{job.gpus:,}", f"{job.steps:,}"),
            *(time.format(job.window_ns), time.format(job.outside_ns)),
        )
        for job in summary.idle_jobs[:top]
    )
    note = (
        "Jobs that held GPUs longest before their first and after their last step. What was lost"
        " inside steps is not in it, nor are GPUs that were allocated and not recorded."
    )
    yield FleetTable(
        "idle", f"GPUs held but idle, in {time.unit}", note, _make_headings(*headings), rows
    )


def _build_problems(summary: FleetSummary, time: TimeFormat, top: int) -> Iterator[FleetTable]:
    if not summary.problems:
        return
    rows = tuple((_escape(path), _escape(problem)) for path, problem in summary.problems[:top])
    headings = (("path", _NAME), ("why", _NAME))
    note = (
        "These runs failed to load: they are left out, or counted as of their last successful read."
    )
    left_out = max(len(summary.problems) - top, 0)
    yield FleetTable("unread", "Not read", note, _make_headings(*headings), rows, left_out)


_TABLES: Sequence[_Build] = (
    _build_causes,
    _build_lemons,
    _build_nodes,
    _build_switches,
    _build_places,
    _build_owners,
    _build_weeks,
    _build_idle_jobs,
    _build_problems,
)


def _list_notes(summary: FleetSummary) -> Iterator[str]:
    if summary.too_little_seen:
        yield (
            f"Of {_count(summary.too_little_seen, 'job')} too little was seen to judge them; they"
            " are in the sums."
        )
    if summary.no_price and summary.sums.jobs:
        yield (
            f"{_count(summary.no_price, 'job')} without a price: set facts.gpu_price_per_hour in a"
            " profile, and give it with --profile."
        )
