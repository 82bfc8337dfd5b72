"""Charge the time that ranks stood still in operations with each other to whom it was caused by.

    books of every rank ──> operations matched ──> waits and transfers ──> books with causes
                            job, group, number     who came last, and why

Every rank's ledger keeps its sums: what was "peers" becomes the causes for which it waited there.
Where a rank had too many operations to be kept in memory, all of it stays "peers".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from clusterprof.attribution.blame import UNKNOWN, Blamed, settle_waits
from clusterprof.attribution.blame_books import Books
from clusterprof.attribution.ledger import RankBooks, charged
from clusterprof.attribution.local import PEERS, PRECEDENCE
from clusterprof.attribution.partial import SHARE, Partial, merge
from clusterprof.attribution.spent import OTHER, WORK, RankOperations
from clusterprof.engine.aligned import Alignment, Sampler
from clusterprof.engine.hang_report import hung
from clusterprof.engine.jobs import UNCLEAR, told_apart
from clusterprof.engine.node import NodeResult
from clusterprof.findings import Blind, Finding
from clusterprof.timeline.collectives import Arrivals, match, together, whole_spans
from clusterprof.timeline.model import SOURCE_DEVICE_SAMPLES, SOURCE_HOST_SPANS, Int
from clusterprof.timeline.operations import Operations

PEERS_UNKNOWN = "peers-unknown"
GROUP_ANNOUNCED = "group-announced"
_GRADE = "B"  # durations of marked spans; no counter says the same


class Watcher(Protocol):
    """Something that adds up what blame says, block after block."""

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Take a block of operations and what each wait in it was charged to."""


@dataclass(frozen=True, slots=True)
class Across:
    """All nodes of a recording, and what only their ranks together tell."""

    nodes: tuple[NodeResult, ...]
    """With the time in operations charged in the books of their ranks."""
    unmatched: Mapping[str, int] = field(default_factory=dict)
    """Reason (`timeline.collectives`) -> spans of operations that were left out."""
    clock_bound_ns: int | None = None
    """How far the common time of two nodes may be off; None: `clock_reason` says why."""
    clock_reason: str = "no operations of ranks were laid side by side"
    """What the bound does not hold for; "" when it holds for all nodes."""
    findings: tuple[Finding, ...] = ()
    """Of time outside the steps."""
    notes: tuple[str, ...] = ()
    """Sentences a reader must know."""
    blinds: tuple[Blind, ...] = ()
    """What was not recorded."""


def across_ranks(nodes: Sequence[NodeResult]) -> Across:
    """Lay the operations of all ranks side by side and charge the time in them."""
    told = told_apart(nodes)
    across = _side_by_side(told.nodes)
    still = hung(across.nodes)
    return replace(
        across,
        nodes=still.nodes,
        notes=(*still.notes, *told.notes, *across.notes),
        blinds=(*told.blinds, *across.blinds),
        findings=still.findings,
    )


def _side_by_side(nodes: Sequence[NodeResult]) -> Across:
    books = [(node, one) for node in nodes for one in node.books]
    found = [
        (at, *pair)
        for at, pair in enumerate(books)
        if pair[1].operations is not None and pair[1].job != UNCLEAR
    ]
    if not found:
        return Across(tuple(nodes))
    if not all(one.operations.whole for _, _, one in found if one.operations is not None):
        return Across(tuple(nodes))  # beside some ranks alone the others would be called unknown
    sampler = Sampler(nodes)
    arrivals, come, go = _arrivals(found, sampler)
    clock = sampler.alignment()
    arrivals = replace(arrivals, when_ns=_on_one_clock(arrivals, nodes, books, clock))
    matched = match(arrivals, _members(found))
    ops = matched.operations
    summed = Books(len(books), (*PRECEDENCE, OTHER, WORK))
    watchers: tuple[Watcher, ...] = (summed,)
    blamed, _ = settle_waits(ops, come[ops.source], go[ops.source], len(books))
    for watcher in watchers:
        watcher.add(ops, blamed)
    new = {at: _charged(one, at, summed) for at, _, one in found}
    left = iter(new.get(at, one) for at, (_, one) in enumerate(books))
    charged_nodes = tuple(
        replace(node, books=tuple(next(left) for _ in node.books)) for node in nodes
    )
    return Across(charged_nodes, matched.unmatched, clock.bound_ns, clock.reason, notes=clock.notes)


def _on_one_clock(
    arrivals: Arrivals,
    nodes: Sequence[NodeResult],
    books: Sequence[tuple[NodeResult, RankBooks]],
    clock: Alignment,
) -> Int:
    """Return when each rank left, on the common clock."""
    number = {id(node): at for at, node in enumerate(nodes)}
    node_of = np.array([number[id(node)] for node, _ in books])[arrivals.rank]
    when_ns = arrivals.leave_ns.copy()
    for one in np.unique(node_of):
        when_ns[node_of == one] = clock.when_ns(one, arrivals.leave_ns[node_of == one])
    return when_ns


def _arrivals(
    found: Sequence[tuple[int, NodeResult, RankBooks]], sampler: Sampler
) -> tuple[Arrivals, Int, Int]:
    """All operations of all ranks, and what each rank had spent when it came and left."""
    parts, come, go = [], [], []
    past = 0
    for at, node, one in found:
        operations: RankOperations = one.operations  # type: ignore[assignment]
        spans = operations.spans
        whole = whole_spans(spans.start_ns, spans.end_ns, spans.a, spans.b, spans.c, spans.d)
        source = whole["source"]
        leaves = whole["leaver"]
        sampler.add(node, one, whole)
        n = len(source)
        parts.append(
            Arrivals(
                rank=np.full(n, at),
                global_rank=np.full(n, at if one.ledger.rank is None else one.ledger.rank),
                job=np.full(n, one.job),
                arrive_ns=whole["arrive_ns"],
                leave_ns=whole["leave_ns"],
                blocked_ns=operations.blocked_ns[leaves],
                when_ns=whole["leave_ns"],
                group=whole["group"],
                sequence=whole["sequence"],
                bytes=whole["bytes"],
                operation=whole["operation"],
                peer=whole["peer"],
                source=past + np.arange(n),
            )
        )
        come.append(operations.at_arrive[source])
        go.append(operations.at_leave[leaves])
        past += n
    return together(*parts), np.concatenate(come), np.concatenate(go)


def _members(
    found: Sequence[tuple[int, NodeResult, RankBooks]],
) -> dict[tuple[int, int], Int]:
    """The global ranks of every group that was announced, by job and group."""
    jobs = {(node.facts.key, one.ledger.pid): one.job for _, node, one in found}
    members: dict[tuple[int, int], Int] = {}
    for node in {node.facts.key: node for _, node, _ in found}.values():
        for event in node.loaded.events:
            if event.kind == GROUP_ANNOUNCED:
                said = event.attributes
                job = jobs.get((node.facts.key, said["pid"]))
                if job is not None:
                    members[job, said["group"]] = np.array(said["ranks"], np.int64)
    return members


def _charged(one: RankBooks, at: int, summed: Books) -> RankBooks:
    felt = {c: int(ns) for c, ns in zip(summed.causes, summed.felt_ns[at]) if ns}
    caused = {c: int(ns) for c, ns in zip(summed.causes, summed.caused_ns[at]) if ns}
    source = SOURCE_DEVICE_SAMPLES if one.ledger.device else SOURCE_HOST_SPANS
    unseen = sum(felt.pop(name, 0) for name in (OTHER, UNKNOWN))
    moved = Partial(
        claimed={(cause, _GRADE, source): ns * SHARE for cause, ns in felt.items()},
        unexplained={
            PEERS: -(sum(felt.values()) + unseen) * SHARE,
            **({PEERS_UNKNOWN: unseen * SHARE} if unseen else {}),
        },
    )
    partial = merge(one.partial, moved)
    left = {reason: units for reason, units in partial.unexplained.items() if units}
    return charged(one, replace(partial, unexplained=left), felt, caused)
