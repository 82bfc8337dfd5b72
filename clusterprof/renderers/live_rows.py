"""The rows of the live screen: a line per rank, or per node where ranks are more than lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from clusterprof.findings import RankLedger
from clusterprof.live import Live, NodeLive, RankLive
from clusterprof.renderers.text_safety import safe_text
from clusterprof.renderers.whose import chief_culprits
from clusterprof.units import human

SORTS = ("lost", "caused", "busy", "step", "name")
"""Most lost first, but culprits before all; most caused; least busy; slowest; by node and rank."""
_NAME = 60
_MOST_LATE = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One line; foreign strings are safe already."""

    ranks: str
    """Number of the rank; of a node how many it has."""
    node: str
    device: str
    busy_ratio: float | None
    sm_active_ratio: float | None
    step_ns: int | None
    lost_ratio: float | None
    """Of the time inside steps; None when no step was seen."""
    lost_to: str
    """What most was lost to, or why nobody knows."""
    caused_ns: int | None
    """Lost by itself and by those that waited for it; None when ranks were not compared."""
    recorder: str
    well: bool
    """True while the recorder writes."""
    late: bool
    """True when others waited for it because of what cost most: it comes first."""
    order: tuple[str, int]


def rows_of(live: Live, by_node: bool, sort: str) -> list[Row]:
    """Return all rows, sorted; a node of which nothing is known has one too."""
    nodes = {one.key: one for one in live.nodes}
    parts: dict[str, list[tuple[RankLedger, RankLive | None]]] = {key: [] for key in nodes}
    keys = {(one.name, key) for key, one in nodes.items()}
    names = {name: key for name, key in sorted(keys, reverse=True)}
    for ledger in live.report.ranks:
        one = live.ranks.get((ledger.node, ledger.pid))
        key = one.node_key if one is not None else names.get(ledger.node, "")
        if key in parts:
            parts[key].append((ledger, one))
    late = _late(live)
    rows = []
    for key, some in parts.items():
        groups = [some] if by_node or not some else [[one] for one in some]
        rows += [_row(nodes[key], group, by_node, late) for group in groups]
    return sorted(rows, key=_ORDER[sort])


def many_ranks(live: Live) -> int:
    """Return how many rows there are rank by rank."""
    seen = {one.node_key for one in live.ranks.values()}
    return len(live.report.ranks) + sum(one.key not in seen for one in live.nodes)


def recorder_state(node: NodeLive) -> str:
    """Say how a recorder is: the age of its last record, or what has become of it."""
    age = "" if node.age_ns is None else span(node.age_ns)
    if node.state == "recording":
        return f"{age} ago" if age else "no record yet"
    if node.state == "silent":
        return f"silent for {age}"
    return node.state


def span(ns: int) -> str:
    """Write a time as people say it: 0.8 s, 12 s, 3 min, 5 h, 12 days."""
    seconds = ns / 1e9
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for least, size, unit in ((172_800, 86_400, "days"), (7_200, 3_600, "h"), (120, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def _row(
    node: NodeLive,
    some: Sequence[tuple[RankLedger, RankLive | None]],
    by_node: bool,
    late: Collection[tuple[str, int | None]],
) -> Row:
    ledgers = [ledger for ledger, _ in some]
    lives = [one for _, one in some if one is not None]
    in_step_ns = sum(one.in_step_ns for one in ledgers)
    lost_ns = sum(one.lost_ns for one in ledgers)
    caused = [ns for one in ledgers for _, ns in one.caused]
    first = ledgers[0] if ledgers else None
    return Row(
        ranks=_ranks(ledgers, by_node),
        node=safe_text(node.name, _NAME),
        device=safe_text(first.device, _NAME) if first is not None and not by_node else "",
        busy_ratio=_mean(one.busy_ratio for one in lives),
        sm_active_ratio=_mean(one.sm_active_ratio for one in lives),
        step_ns=max((one.step_ns for one in lives if one.step_ns is not None), default=None),
        lost_ratio=lost_ns / in_step_ns if in_step_ns else None,
        lost_to=_lost_to(ledgers, lives, in_step_ns),
        caused_ns=sum(caused) if caused else None,
        recorder=recorder_state(node),
        well=node.state == "recording" and not node.why,
        late=any((one.node, one.rank) in late for one in ledgers),
        order=(node.name, -1 if first is None or first.rank is None else first.rank),
    )


def _late(live: Live) -> set[tuple[str, int | None]]:
    """Return the culprits of what cost most, if others waited, and of what came to a halt."""
    findings = live.report.findings
    halted = [one for one in findings if one.outside_steps and one.cause.family != "startup"]
    found = halted or [one for one in findings if not one.outside_steps][:1]
    return {
        (who.node, who.rank)
        for one in found
        for who in chief_culprits(one)[:_MOST_LATE]
        if one.outside_steps or who.others_ns
    }


def _ranks(ledgers: Sequence[RankLedger], by_node: bool) -> str:
    if by_node:
        return str(len(ledgers))
    if not ledgers:
        return "-"
    one = ledgers[0]
    return str(one.rank) if one.rank is not None else f"pid {one.pid}"


def _lost_to(ledgers: Sequence[RankLedger], lives: Sequence[RankLive], in_step_ns: int) -> str:
    if not ledgers:
        return "no training process"
    if not in_step_ns:
        since = [one.since_step_ns for one in lives if one.since_step_ns is not None]
        return f"no step for {span(min(since))}" if since else "no step seen"
    sums: dict[str, int] = {}
    for one in ledgers:
        for cause, ns in one.buckets:
            sums[cause] = sums.get(cause, 0) + ns
    cause, ns = max(sums.items(), key=lambda one: one[1], default=("", 0))
    return f"{safe_text(cause, _NAME)} {human(ns / in_step_ns, 'ratio')}" if ns else "nothing"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return fmean(known) if known else None


def _highest(of: Callable[[Row], float | None]) -> Callable[[Row], tuple[object, ...]]:
    """Sort what is not known to the end, and equals by name."""

    def key(row: Row) -> tuple[object, ...]:
        value = of(row)
        return value is None, -(value or 0), row.order

    return key


_ORDER: dict[str, Callable[[Row], tuple[object, ...]]] = {
    "lost": _highest(lambda row: row.lost_ratio + row.late if row.lost_ratio is not None else None),
    "caused": _highest(lambda row: row.caused_ns),
    "busy": _highest(lambda row: None if row.busy_ratio is None else 1 - row.busy_ratio),
    "step": _highest(lambda row: row.step_ns),
    "name": lambda row: (row.order,),
}


def named_nodes(nodes: Sequence[NodeLive], most: int) -> str:
    """Name nodes and how their recorders are, at most so many."""
    told = [
        f"{safe_text(one.name, _NAME)} {recorder_state(one)}"
        + (f" ({safe_text(one.why, 80)})" if one.why else "")
        for one in nodes[:most]
    ]
    rest = len(nodes) - most
    return ", ".join([*told, f"{rest:,} more"] if rest > 0 else told)
