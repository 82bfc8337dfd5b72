"""Charge the time that ranks stood still in operations with each other to whom it was caused by.

    books of every rank ──> operations matched ──> waits and transfers ──> books with causes
                            job, group, number     who came last, and why

Every rank's ledger keeps its sums: what was "peers" becomes the causes for which it waited there.
Operations are read from where the analysis of each node has put them, and blamed block by block.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from clusterprof.attribution.blame import UNKNOWN, WORK, Blamed, causes, settle_waits
from clusterprof.attribution.blame_books import Books
from clusterprof.attribution.ledger import RankBooks, charged
from clusterprof.attribution.local import PEERS, PRECEDENCE
from clusterprof.attribution.partial import SHARE, Partial, merge
from clusterprof.attribution.spent import OTHER
from clusterprof.engine.node import NodeResult
from clusterprof.engine.spill import IN_MEMORY, Place, Reader
from clusterprof.timeline.collectives_directory import Person
from clusterprof.timeline.collectives_stream import Stream
from clusterprof.timeline.model import SOURCE_DEVICE_SAMPLES, SOURCE_HOST_SPANS, Int
from clusterprof.timeline.operation_rows import RankOperations
from clusterprof.timeline.operations import Operations

PEERS_UNKNOWN = "peers-unknown"
GROUP_ANNOUNCED = "group-announced"
CATEGORIES = (*PRECEDENCE, OTHER, WORK)
BLOCK_ROWS = 32_000
"""Rows that blame takes at once: what it works on stays in the caches of the CPU."""
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
    not_compared: str = ""
    """Why operations of ranks were not laid side by side at all; "" when they were."""


def across_ranks(nodes: Sequence[NodeResult], place: Place = IN_MEMORY) -> Across:
    """Lay the operations of all ranks side by side and charge the time in them.

    `place` is where the analysis of the nodes has put them. When they cannot be read back, all time
    in them stays "peers": beside some ranks alone the others would be called unknown.
    """
    books = [(node, one) for node in nodes for one in node.books]
    found = [(at, *pair) for at, pair in enumerate(books) if pair[1].operations is not None]
    if not found:
        return Across(tuple(nodes))
    lost = [one.operations.why_lost for _, _, one in found if one.operations is not None]
    if any(lost):
        return Across(tuple(nodes), not_compared=max(lost))
    summed = Books(len(books), CATEGORIES)
    watchers: tuple[Watcher, ...] = (summed,)
    try:
        with Reader(place) as reader:
            unmatched = _watched(found, len(books), reader, watchers)
    except OSError as error:
        return Across(tuple(nodes), not_compared=str(error))
    new = {at: _charged(one, at, summed) for at, _, one in found}
    left = iter(new.get(at, one) for at, (_, one) in enumerate(books))
    charged_nodes = tuple(
        replace(node, books=tuple(next(left) for _ in node.books)) for node in nodes
    )
    return Across(charged_nodes, unmatched)


def _watched(
    found: Sequence[tuple[int, NodeResult, RankBooks]],
    ranks: int,
    reader: Reader,
    watchers: Sequence[Watcher],
) -> Mapping[str, int]:
    """Read operations block by block, blame them, tell the watchers; return what did not match."""
    people = [_person(at, node, one) for at, node, one in found]
    spent = sorted({int(c) for one in people for b in one.operations.blocks for c in b.come})
    # Of most categories nothing was ever spent; work, the last one, is always asked for.
    columns = [*(c for c in spent if c != len(CATEGORIES) - 1), len(CATEGORIES) - 1]
    few, every = causes([CATEGORIES[c] for c in columns]), causes(CATEGORIES)
    number = np.array([every.index(name) for name in few])
    stream = Stream(people, _members(found), columns, reader.get)
    carry = None
    for ops, come, go in stream.stretches(BLOCK_ROWS):
        blamed, carry = settle_waits(ops, come, go, ranks, carry)
        blamed = replace(blamed, cause=number[blamed.cause])
        for watcher in watchers:
            watcher.add(ops, blamed)
    return stream.unmatched


def _person(at: int, node: NodeResult, one: RankBooks) -> Person:
    operations: RankOperations = one.operations  # type: ignore[assignment]
    name = at if one.ledger.rank is None else one.ledger.rank
    return Person(at, name, _job(one.identity), _wall_ahead_ns(node), operations)


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
