"""Charge the time that ranks stood still in operations with each other to whom it was caused by.

    books of every rank ──> operations matched ──> waits and transfers ──> books with causes
                            job, group, number     who came last, and why

Every rank's ledger keeps its sums: what was "peers" becomes the causes for which it waited there.
Operations are read from where the analysis of each node has put them, and blamed block by block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from clusterprof.attribution.blame import UNKNOWN, UNKNOWN_PEER, WORK, Blamed, causes, settle_waits
from clusterprof.attribution.blame_books import Books
from clusterprof.attribution.blame_bubbles import Bubbles
from clusterprof.attribution.blame_jitter import Jitter
from clusterprof.attribution.ledger import RankBooks, charged
from clusterprof.attribution.local import JITTER, PEERS, PEERS_UNKNOWN
from clusterprof.attribution.partial import SHARE, Partial, merge
from clusterprof.attribution.precedence import SPENT_ON
from clusterprof.attribution.spent import OTHER
from clusterprof.engine.aligned import Alignment, aligned
from clusterprof.engine.caused import agreed
from clusterprof.engine.frontier import (
    alone,
    by_family,
    known_to_move,
    shown_ns,
    stepped,
    taken_from,
)
from clusterprof.engine.hang_report import hung
from clusterprof.engine.jobs import UNCLEAR, told_apart
from clusterprof.engine.limits import bound
from clusterprof.engine.network import NetworkTimes, NetworkTold
from clusterprof.engine.node import NodeResult
from clusterprof.engine.paused import paused_together
from clusterprof.engine.perhaps import given_back
from clusterprof.engine.restarts import restarted
from clusterprof.engine.silent import silent
from clusterprof.engine.spill import IN_MEMORY, Place, Reader
from clusterprof.engine.troubled import sending_ns, troubled
from clusterprof.engine.waits import LongWaits
from clusterprof.engine.whatif import Whatif
from clusterprof.engine.witness import Witness
from clusterprof.findings import Blind, Finding, Grade
from clusterprof.timeline.collectives_directory import Person
from clusterprof.timeline.collectives_stream import Stream
from clusterprof.timeline.model import SOURCE_DEVICE_SAMPLES, SOURCE_HOST_SPANS, Int
from clusterprof.timeline.operation_rows import RankOperations
from clusterprof.timeline.operations import Operations

GROUP_ANNOUNCED = "group-announced"
CATEGORIES = (*SPENT_ON, OTHER, WORK)
BLOCK_ROWS = 32_000
"""Rows that blame takes at once: what it works on stays in the caches of the CPU."""
_GRADE: Grade = "B"  # durations of marked spans; no counter says the same


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
    network: NetworkTold = field(default_factory=NetworkTold)
    witness: Witness | None = None
    """What was noted while blame passed; None where operations were not laid side by side."""
    clock: Alignment | None = None
    """Takes the times of every node to the common clock, in the order of `nodes`."""
    waits: LongWaits | None = None
    """None where nobody asked, or operations were not laid side by side."""
    whatif: Whatif | None = None
    """What fixing a cause would have won; None likewise."""


def across_ranks(
    nodes: Sequence[NodeResult], place: Place = IN_MEMORY, limits: Mapping[str, Any] | None = None
) -> Across:
    """Lay the operations of all ranks side by side and charge the time in them.

    `place` is where the analysis of the nodes has put them. When they cannot be read back, all time
    in them stays "peers": beside some ranks alone the others would be called unknown. `limits`
    holds a bound limits object per cause id; None = the defaults.
    """
    told = told_apart(nodes)
    anew = restarted(told.nodes, told.jobs)
    clock = aligned(anew.nodes)  # by operations alone: the ends of steps say it roughly
    across = _side_by_side(anew.nodes, clock, place, limits or bound({}))
    still = hung(paused_together(given_back(alone(across.nodes))))
    quiet = silent(still.nodes)
    return replace(
        across,
        nodes=agreed(quiet.nodes),
        notes=(*still.notes, *quiet.notes, *told.notes, *across.notes),
        blinds=(*told.blinds, *across.blinds),
        findings=(*still.findings, *quiet.findings, *anew.findings),
        clock=clock,
    )


def _side_by_side(
    nodes: Sequence[NodeResult], clock: Alignment, place: Place, limits: Mapping[str, Any]
) -> Across:
    try:
        badly = troubled(nodes, limits)
        steps = stepped(nodes, place, badly)
    except OSError as error:
        return Across(tuple(nodes), not_compared=str(error), clock=clock)
    nodes = steps.nodes
    books = [(node, one) for node in nodes for one in node.books]
    found = [
        (at, *pair)
        for at, pair in enumerate(books)
        if pair[1].operations is not None and pair[1].job != UNCLEAR
    ]
    if not found:
        return Across(tuple(nodes), notes=steps.notes, clock=clock)
    lost = [one.operations.why_lost for _, _, one in found if one.operations is not None]
    if any(lost):
        return Across(tuple(nodes), not_compared=max(lost), clock=clock)
    summed = Books(len(books), CATEGORIES)
    bubbles, jitter = Bubbles(len(books), CATEGORIES), Jitter(len(books), CATEGORIES)
    network = NetworkTimes(nodes, CATEGORIES, limits)
    witness = Witness(books, summed)
    asked = any(one.times is not None for _, one in books)
    waits = LongWaits([one for _, one in books], summed.causes) if asked else None
    watchers: list[Watcher] = [summed, network, bubbles, jitter, witness]
    watchers += [] if waits is None else [waits]
    whatif = Whatif([one.job for _, one in books], CATEGORIES)
    try:
        with Reader(place) as reader:
            people = _people(found, nodes, clock)
            members = {**_members(found), **steps.members}
            unmatched = _watched(people, members, len(books), reader, watchers, whatif)
    except OSError as error:
        return Across(tuple(nodes), not_compared=str(error), clock=clock)
    told = network.told()
    structure = bubbles.done(), jitter.done()
    shown = shown_ns([one for _, one in books], badly, steps.steady_ns, sending_ns(nodes))
    new = {
        at: _charged(
            one, at, summed, told, structure,
            one.job in steps.jobs, shown.get(one.job), one.job in steps.whole,
        )
        for at, _, one in found
    }  # fmt: skip
    left = iter(new.get(at, one) for at, (_, one) in enumerate(books))
    return Across(
        tuple(replace(node, books=tuple(next(left) for _ in node.books)) for node in nodes),
        unmatched,
        clock_bound_ns=clock.bound_ns,
        clock_reason=clock.reason,
        notes=(*clock.notes, *steps.notes),
        network=told,
        witness=witness,
        clock=clock,
        waits=waits,
        whatif=whatif,
    )


def _watched(
    people: Sequence[Person],
    members: Mapping[tuple[int, int], Int],
    ranks: int,
    reader: Reader,
    watchers: Sequence[Watcher],
    whatif: Whatif,
) -> Mapping[str, int]:
    """Read operations block by block, blame them, tell the watchers; return what did not match."""
    blocks = (block for one in people for block in one.operations.blocks)
    spent = sorted({int(c) for block in blocks for c in (*block.come, *block.go)})
    # Of most categories nothing was ever spent; work, the last one, is always asked for.
    columns = [*(c for c in spent if c < len(CATEGORIES) - 1), len(CATEGORIES) - 1]
    hidden = whatif.begin(columns, spent)
    few, every = causes([CATEGORIES[c] for c in columns]), causes(CATEGORIES)
    number = np.array([every.index(name) for name in few])
    stream = Stream(people, members, [*columns, *hidden], reader.get)
    carry = None
    own = slice(len(columns))
    for ops, come, go in stream.stretches(BLOCK_ROWS):
        blamed, carry = settle_waits(ops, come[:, own], go[:, own], ranks, carry)
        whatif.add(ops, blamed, come, go)
        sooner = np.zeros((len(every), blamed.sooner_ns.shape[1]), np.int64)
        sooner[number[: len(blamed.sooner_ns)]] = blamed.sooner_ns
        blamed = replace(blamed, cause=number[blamed.cause], sooner_ns=sooner)
        for watcher in watchers:
            watcher.add(ops, blamed)
    return stream.unmatched


def _people(
    found: Sequence[tuple[int, NodeResult, RankBooks]],
    nodes: Sequence[NodeResult],
    clock: Alignment,
) -> list[Person]:
    number = {id(node): at for at, node in enumerate(nodes)}
    people = []
    for at, node, one in found:
        operations: RankOperations = one.operations  # type: ignore[assignment]
        name = at if one.ledger.rank is None else one.ledger.rank
        ahead = clock.ahead(number[id(node)], one.first_ns, one.last_ns)
        people.append(Person(at, name, one.job, ahead, operations))
    return people


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


def _charged(
    one: RankBooks,
    at: int,
    summed: Books,
    told: NetworkTold,
    structure: tuple[Bubbles, Jitter],
    steps: bool,
    shown: int | None,
    whole: bool,
) -> RankBooks:
    """`steps`: of its steps, not of operations that were marked; `shown` see `shown_ns`; `whole`:
    of these, and no rank is missing: where one seems to, its steps could not be matched."""
    bubbles, jitter = structure
    felt = {c: int(ns) for c, ns in zip(summed.causes, summed.felt_ns[at]) if ns}
    caused = {c: int(ns) for c, ns in zip(summed.causes, summed.caused_ns[at]) if ns}
    source = SOURCE_DEVICE_SAMPLES if one.ledger.device else SOURCE_HOST_SPANS
    unseen = sum(
        felt.pop(name, 0) for name in (OTHER, UNKNOWN, *((UNKNOWN_PEER,) if whole else ()))
    )
    felt = bubbles.added(told.felt(at, felt), bubbles.felt(at))
    felt = bubbles.added(felt, jitter.felt(at))
    caused = bubbles.added(caused, bubbles.caused(at))
    caused = bubbles.added(caused, jitter.caused(at))
    moved_ns = jitter.moved_ns(at)
    taken = {PEERS: -(sum(felt.values()) + unseen + moved_ns)}
    if steps:
        felt, caused = known_to_move(by_family(felt), shown), by_family(caused)
        taken = taken_from(one, felt, unseen + moved_ns)
    grade: Grade = _GRADE if one.marked else "C"
    moved = Partial(
        claimed={(cause, grade, source): ns * SHARE for cause, ns in felt.items()},
        unexplained={
            **{reason: ns * SHARE for reason, ns in taken.items()},
            **({PEERS_UNKNOWN: unseen * SHARE} if unseen else {}),
            **({JITTER: moved_ns * SHARE} if moved_ns else {}),
        },
    )
    partial = merge(one.partial, moved, told.asked[at])
    left = {reason: units for reason, units in partial.unexplained.items() if units}
    return charged(one, replace(partial, unexplained=left), felt, caused)
