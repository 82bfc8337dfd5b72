"""Charge the time that ranks stood still in operations with each other to whom it was caused by.

    books of every rank ──> operations matched ──> waits and transfers ──> books with causes
                            job, group, number     who came last, and why

Every rank's ledger keeps its sums: what was "peers" becomes the causes for which it waited there.
Where a rank had too many operations to be kept in memory, all of it stays "peers".
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from clusterprof.attribution.blame import UNKNOWN, Blamed, settle_waits
from clusterprof.attribution.blame_books import Books
from clusterprof.attribution.ledger import RankBooks, charged
from clusterprof.attribution.local import PEERS, PEERS_UNKNOWN, PRECEDENCE
from clusterprof.attribution.partial import SHARE, Partial, merge
from clusterprof.attribution.spent import OTHER, WORK, RankOperations
from clusterprof.engine.node import NodeResult
from clusterprof.engine.witness import Witness
from clusterprof.timeline.collectives import Arrivals, match, together, whole_spans
from clusterprof.timeline.model import SOURCE_DEVICE_SAMPLES, SOURCE_HOST_SPANS, Int
from clusterprof.timeline.operations import Operations

GROUP_ANNOUNCED = "group-announced"
_GRADE = "B"  # durations of marked spans; no counter says the same
_JOB_VARIABLES = (
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "FLUX_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
)
_RESTART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


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
    witness: Witness | None = None
    """What was noted while blame passed; None where operations were not laid side by side."""
    clock_bound_ns: int | None = None
    """The clocks of the nodes were aligned to within this; None when they were not."""
    clock_why: str = ""
    """Why they were not."""


def across_ranks(nodes: Sequence[NodeResult]) -> Across:
    """Lay the operations of all ranks side by side and charge the time in them."""
    books = [(node, one) for node in nodes for one in node.books]
    found = [(at, *pair) for at, pair in enumerate(books) if pair[1].operations is not None]
    if not found:
        return Across(tuple(nodes))
    if not all(one.operations.whole for _, _, one in found if one.operations is not None):
        return Across(tuple(nodes))  # beside some ranks alone the others would be called unknown
    arrivals, come, go = _arrivals(found)
    matched = match(arrivals, _members(found))
    ops = matched.operations
    summed = Books(len(books), (*PRECEDENCE, OTHER, WORK))
    witness = Witness(books, summed)
    watchers: tuple[Watcher, ...] = (summed, witness)
    blamed, _ = settle_waits(ops, come[ops.source], go[ops.source], len(books))
    for watcher in watchers:
        watcher.add(ops, blamed)
    new = {at: _charged(one, at, summed) for at, _, one in found}
    left = iter(new.get(at, one) for at, (_, one) in enumerate(books))
    charged_nodes = tuple(
        replace(node, books=tuple(next(left) for _ in node.books)) for node in nodes
    )
    return Across(charged_nodes, matched.unmatched, witness)


def _arrivals(found: Sequence[tuple[int, NodeResult, RankBooks]]) -> tuple[Arrivals, Int, Int]:
    """All operations of all ranks, and what each rank had spent when it came and left."""
    parts, come, go = [], [], []
    past = 0
    for at, node, one in found:
        operations: RankOperations = one.operations  # type: ignore[assignment]
        spans = operations.spans
        whole = whole_spans(spans.start_ns, spans.end_ns, spans.a, spans.b, spans.c, spans.d)
        source = whole["source"]
        leaves = whole["leaver"]
        ahead_ns = _wall_ahead_ns(node)
        n = len(source)
        parts.append(
            Arrivals(
                rank=np.full(n, at),
                global_rank=np.full(n, at if one.ledger.rank is None else one.ledger.rank),
                job=np.full(n, _job(one.identity)),
                arrive_ns=whole["arrive_ns"],
                leave_ns=whole["leave_ns"],
                blocked_ns=operations.blocked_ns[leaves],
                when_ns=whole["leave_ns"] + ahead_ns,
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
    jobs = {(node.facts.key, one.ledger.pid): _job(one.identity) for _, node, one in found}
    members: dict[tuple[int, int], Int] = {}
    for node in {node.facts.key: node for _, node, _ in found}.values():
        for event in node.loaded.events:
            if event.kind == GROUP_ANNOUNCED:
                said = event.attributes
                job = jobs.get((node.facts.key, said["pid"]))
                if job is not None:
                    members[job, said["group"]] = np.array(said["ranks"], np.int64)
    return members


def _wall_ahead_ns(node: NodeResult) -> int:
    """How far the wall clock of a node was ahead of its own; good enough to order operations."""
    started = node.loaded.header.started
    return int(started.get("realtime_ns", 0)) - int(started.get("monotonic_ns", 0))


def _job(identity: Mapping[str, str]) -> int:
    """A number for the job a rank belongs to, or the life of it that a restart began."""
    name = next((identity[key] for key in _JOB_VARIABLES if identity.get(key)), "")
    lives = [identity.get(key, "0") for key in _RESTART_VARIABLES]
    return zlib.crc32("\0".join(map(str, (name, *lives))).encode())


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
