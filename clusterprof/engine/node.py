"""One node, read once: chunk after chunk in, the books of its ranks out.

What cannot be judged at the end of a chunk is kept and put in front of the next one, so memory
depends on the longest step rather than on the length of the recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterprof.attribution.carry import glue, tail
from clusterprof.attribution.device import sample_times
from clusterprof.attribution.frontier import Frontier
from clusterprof.attribution.ledger import RankBooks, RankName, keep_books
from clusterprof.attribution.local import SPENT_ON, settle
from clusterprof.attribution.lost import lost_pieces
from clusterprof.attribution.partial import EMPTY, Partial, merge
from clusterprof.attribution.regions import OPEN_AT_MOST_NS, RankState
from clusterprof.attribution.spent import Spending
from clusterprof.engine.endings import Ending, Endings
from clusterprof.engine.host_notes import HostNotes
from clusterprof.engine.spill import IN_MEMORY, Place, Shelf
from clusterprof.findings import NodeFacts
from clusterprof.signals import SELF_CPU
from clusterprof.timeline.buffers import REACH_NS
from clusterprof.timeline.identity import place_of
from clusterprof.timeline.load import CHUNK_NS, NodeLoad, NodeLoaded
from clusterprof.timeline.model import Chunk, Rank
from clusterprof.timeline.network import NetworkMeter, NodeNetwork
from clusterprof.timeline.operation_rows import Store
from clusterprof.timeline.ranks import ranks_of

Key = tuple[int, int]  # pid, started_ticks
# A chunk reaches back by REACH_NS; less two samples, which may lie across its edge.
_BROUGHT_NS = REACH_NS - 200_000_000


@dataclass(frozen=True, slots=True)
class NodeResult:
    """What the analysis of one node gives; small, so that it can travel."""

    facts: NodeFacts
    books: tuple[RankBooks, ...]
    loaded: NodeLoaded
    endings: tuple[Ending, ...] = ()
    network: NodeNetwork = field(default_factory=NodeNetwork)
    """Its counters in the time of operations between ranks."""
    network_throughout: NodeNetwork = field(default_factory=NodeNetwork)
    """The same of all the time, where nobody marked an operation."""
    notes: tuple[str, ...] = ()
    """What a reader should know of its host."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A rank that may still go on."""

    state: RankState
    partial: Partial
    pending: Partial
    """Stretches that count only if another step ends after them."""
    rank: Rank
    """As last seen."""
    spending: Spending
    frontier: Frontier


def analyse_node(
    folder: Path,
    limits: Mapping[str, Any],
    chunk_ns: int | None = None,
    place: Place = IN_MEMORY,
) -> NodeResult:
    """Read one node's folder and return the books of its ranks. `limits`: bound, by cause id.

    `place` is where the operations of its ranks are kept until those of all nodes are there.
    """
    load = NodeLoad(folder) if chunk_ns is None else NodeLoad(folder, chunk_ns)
    meter, endings, network = _Meter(), Endings(), NetworkMeter()
    throughout, host = NetworkMeter(throughout=True), HostNotes()
    chunks = host.watch(throughout.watch(network.watch(load.chunks())))
    chunks = endings.watch(meter.watch(chunks))
    with Shelf(place) as shelf:
        books = books_of(chunks, limits, shelf)
    loaded = load.facts()
    duration_ns = loaded.last_ns - loaded.first_ns
    facts = NodeFacts(
        name=loaded.header.node.get("display") or loaded.header.node.get("hostname", ""),
        key=loaded.header.node.get("key", folder.name),
        boot_id=loaded.header.node.get("boot_id", ""),
        duration_ns=duration_ns,
        damaged_bytes=loaded.damage.damaged_bytes + loaded.damage.torn_tail_bytes,
        dropped_spans=loaded.dropped_spans,
        recorder_cpu_ratio=meter.cpu_ratio(duration_ns),
    )
    return NodeResult(
        facts, books, loaded, endings.all(), network.done(), throughout.done(), host.notes()
    )


def books_of(
    chunks: Iterable[Chunk], limits: Mapping[str, Any], store: Store
) -> tuple[RankBooks, ...]:
    """Return the books of every rank in a stream of chunks of one node."""
    ranks: dict[Key, _Open] = {}
    done: dict[Key, RankBooks] = {}
    parents: dict[int, int] = {}
    kept: Chunk | None = None
    for chunk in chunks:
        for key in [key for key in ranks if _gone(key, chunk)]:
            done[key] = _close(ranks.pop(key), limits)
        glued = glue(kept, chunk)
        found = {(one.pid, one.main.started_ticks): one for one in ranks_of(glued)}
        for key, one in ranks.items():
            if key not in found:  # alive, and silent in this chunk
                main = glued.processes[one.rank.pid]
                found[key] = replace(one.rank, chunk=glued, main=main, workers=())
        for key, rank in found.items():
            if key not in done:
                ranks[key] = _advance(ranks.get(key), rank, limits, store)
        needed_ns = _needed_from(ranks, chunk)
        # What the next chunk brings along by itself need not be kept.
        kept = tail(glued, needed_ns) if needed_ns < chunk.end_ns - _BROUGHT_NS else None
        parents.update({one.pid: one.main.parent_pid for one in found.values()})
    for key, one in ranks.items():
        done[key] = _close(one, limits)
    return tuple(sorted(_real(list(done.values()), parents), key=_reading_order))


def _real(books: list[RankBooks], parents: Mapping[int, int]) -> list[RankBooks]:
    """Leave out what was taken for a rank and is none.

    Before the first span of a job its ranks are guessed. And a child of a rank that marks spans of
    its own but never waits or steps is a worker.
    """
    if any(one.marked for one in books):
        books = [one for one in books if one.marked]
    pids = {one.ledger.pid for one in books}
    return [one for one in books if one.ledger.in_step_ns or parents[one.ledger.pid] not in pids]


def _reading_order(books: RankBooks) -> tuple[bool, int, int]:
    rank = books.ledger.rank
    return rank is None, rank or 0, books.ledger.pid


def _gone(key: Key, chunk: Chunk) -> bool:
    process = chunk.processes.get(key[0])
    return process is None or process.started_ticks != key[1]


def _needed_from(ranks: Mapping[Key, _Open], chunk: Chunk) -> int:
    """From when on some rank still needs what was recorded."""
    oldest = chunk.end_ns - OPEN_AT_MOST_NS
    times = [chunk.end_ns]
    for one in ranks.values():
        times.append(oldest if one.state.settled_ns is None else one.state.settled_ns)
        if not one.rank.marked:  # its first span may still come, and begin some time ago
            times.append(chunk.end_ns - CHUNK_NS)
    return max(min(times), oldest)


def _advance(one: _Open | None, rank: Rank, limits: Mapping[str, Any], store: Store) -> _Open:
    if not sample_times(rank).size:  # known by name and never sampled is not measured
        rank = replace(rank, device="")
    if one is None:
        one = _Open(RankState(), EMPTY, EMPTY, rank, *_noted(store))
        return _settled(one, rank, limits, last=False)
    if rank.marked and not one.rank.marked:
        # The first span: what was guessed of the time before is dropped, it was start-up.
        state = RankState(first_ns=one.state.first_ns, last_ns=one.state.last_ns)
        one = _Open(state, EMPTY, EMPTY, rank, *_noted(store))
    # A chunk in which a rank says nothing does not make it a rank without a probe or a device.
    rank = replace(
        rank,
        rank=rank.rank if rank.rank is not None else one.rank.rank,
        marked=rank.marked or one.rank.marked,
        device=rank.device or one.rank.device,
        emulated=rank.emulated or one.rank.emulated,
    )
    return _settled(one, rank, limits, last=False)


def _noted(store: Store) -> tuple[Spending, Frontier]:
    spending = Spending(SPENT_ON, store)
    return spending, Frontier(spending.categories, store)


def _settled(one: _Open, rank: Rank, limits: Mapping[str, Any], last: bool) -> _Open:
    found, state = lost_pieces(rank, one.state, last)
    partial, pending = one.partial, one.pending
    for region, lost, account in found:
        new = settle(rank, region, lost, account, limits, one.spending, one.frontier)
        if region.tentative:
            pending = merge(pending, new)
        else:
            partial, pending = merge(partial, pending, new), EMPTY
    return _Open(state, partial, pending, rank, one.spending, one.frontier)


def _close(one: _Open, limits: Mapping[str, Any]) -> RankBooks:
    """Settle a rank to the end; what lies after its last step is outside, whatever it was."""
    one = _settled(one, one.rank, limits, last=True)
    rank = one.rank
    node = rank.chunk.header.node
    place = place_of(rank.main.registration)
    name = RankName(
        node=node.get("display") or node.get("hostname", ""),
        rank=rank.rank,
        pid=rank.pid,
        device=rank.device,
        marked=rank.marked,
        emulated=rank.emulated,
        has_peers=(place.world_size or 1) > 1,
        identity=dict(rank.main.registration.get("variables", {})),
        place=place,
        started_ticks=rank.main.started_ticks,
    )
    books = keep_books(name, one.state, one.partial, one.spending.operations())
    steps, perhaps = one.frontier.operations()
    own = one.spending.own()
    return replace(
        books, frontier=steps, perhaps=perhaps, period=one.frontier.period(), own_steps=own
    )


class _Meter:
    """Adds up what recording itself cost, while chunks pass by."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[float, float]] = {}

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Pass chunks through and note the CPU time of the recorder and its helpers."""
        for chunk in chunks:
            for (name, device), series in chunk.series.items():
                if name != SELF_CPU.name:
                    continue
                known = series.values[series.values == series.values]
                if known.size:
                    first = self._latest.get(device, (float(known[0]), 0.0))[0]
                    self._latest[device] = (first, float(known[-1]))
            yield chunk

    def cpu_ratio(self, duration_ns: int) -> float | None:
        """CPU time of all its processes over the recorded time; None when it was not recorded."""
        if not self._latest or duration_ns <= 0:
            return None
        return max(0.0, sum(last - first for first, last in self._latest.values())) / duration_ns
