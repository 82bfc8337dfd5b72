"""One node, read once: chunk after chunk in, the books of its ranks out.

What cannot be judged at the end of a chunk is kept and put in front of the next one, so memory
depends on the longest step rather than on the length of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterprof.attribution.carry import glue, tail
from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.regions import OPEN_AT_MOST_NS
from clusterprof.attribution.window import WHOLE, Window
from clusterprof.engine.endings import Ending, Endings
from clusterprof.engine.host_notes import HostNotes
from clusterprof.engine.open_rank import Asked, OpenRank, advanced, closed
from clusterprof.engine.part import seen_by
from clusterprof.engine.progress import watched
from clusterprof.engine.setups import NodeSetup, Setups
from clusterprof.engine.spill import IN_MEMORY, Place, Shelf
from clusterprof.findings import NodeFacts
from clusterprof.signals import SELF_CPU
from clusterprof.timeline.buffers import REACH_NS
from clusterprof.timeline.load import CHUNK_NS, NodeLoad, NodeLoaded
from clusterprof.timeline.model import Chunk
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
    setup: NodeSetup = field(default_factory=NodeSetup)
    """How it and its ranks were set up."""


def analyse_node(
    folder: Path,
    limits: Mapping[str, Any],
    chunk_ns: int | None = None,
    place: Place = IN_MEMORY,
    history: bool = False,
    within: Callable[[int], None] | None = None,
    window: Window = WHOLE,
) -> NodeResult:
    """Read one node's folder and return the books of its ranks. `limits`: bound, by cause id.

    `place` is where the operations of its ranks are kept until those of all nodes are there;
    `history` asks for when time was lost, too; `within` is told the bytes read so far; what
    lies outside `window` counts as outside the steps.
    """
    load = NodeLoad(folder) if chunk_ns is None else NodeLoad(folder, chunk_ns)
    return analyse_load(load, folder.name, limits, place, history, within, window)


def analyse_load(
    load: NodeLoad,
    key: str,
    limits: Mapping[str, Any],
    place: Place = IN_MEMORY,
    history: bool = False,
    within: Callable[[int], None] | None = None,
    window: Window = WHOLE,
    since_ns: int | None = None,
) -> NodeResult:
    """Do the same with what was opened already; what lies before `since_ns` is not looked at."""
    meter, endings, network = _Meter(), Endings(), NetworkMeter()
    throughout, host, setups = NetworkMeter(throughout=True), HostNotes(), Setups()
    chunks = seen_by(network, watched(load, within), window)
    chunks = setups.watch(host.watch(seen_by(throughout, chunks, window)))
    chunks = endings.watch(meter.watch(chunks))
    with Shelf(place) as shelf:
        books = books_of(chunks, limits, shelf, history, window, since_ns)
    loaded = load.facts()
    duration_ns = loaded.last_ns - loaded.first_ns
    facts = NodeFacts(
        name=loaded.header.node.get("display") or loaded.header.node.get("hostname", ""),
        key=loaded.header.node.get("key", key),
        boot_id=loaded.header.node.get("boot_id", ""),
        duration_ns=duration_ns,
        damaged_bytes=loaded.damage.damaged_bytes + loaded.damage.torn_tail_bytes,
        dropped_spans=loaded.dropped_spans,
        recorder_cpu_ratio=meter.cpu_ratio(duration_ns),
        named=loaded.header.node.get("hostname") != "",
    )
    return NodeResult(
        facts, books, loaded, endings.all(), network.done(), throughout.done(), host.notes(),
        setups.done(facts.name),
    )  # fmt: skip


def books_of(
    chunks: Iterable[Chunk],
    limits: Mapping[str, Any],
    store: Store,
    history: bool = False,
    window: Window = WHOLE,
    since_ns: int | None = None,
) -> tuple[RankBooks, ...]:
    """Return the books of every rank in a stream of chunks of one node, from `since_ns` on."""
    asked = Asked(limits, store, history, window, since_ns)
    ranks: dict[Key, OpenRank] = {}
    done: dict[Key, RankBooks] = {}
    parents: dict[int, int] = {}
    kept: Chunk | None = None
    for chunk in chunks:
        for key in [key for key in ranks if _gone(key, chunk)]:
            done[key] = closed(ranks.pop(key), limits)
        glued = glue(kept, chunk)
        at_once = chunk.last and since_ns is not None  # a window is one chunk, settled in one go
        found = {(one.pid, one.main.started_ticks): one for one in ranks_of(glued)}
        for key, one in ranks.items():
            if key not in found:  # alive, and silent in this chunk
                main = glued.processes[one.rank.pid]
                found[key] = replace(one.rank, chunk=glued, main=main, workers=())
        for key, rank in found.items():
            if key not in done:
                ranks[key] = advanced(ranks.get(key), rank, asked, at_once)
        needed_ns = _needed_from(ranks, chunk)
        # What the next chunk brings along by itself need not be kept.
        needed = needed_ns < chunk.end_ns - _BROUGHT_NS and not chunk.last
        kept = tail(glued, needed_ns) if needed else None
        parents.update({one.pid: one.main.parent_pid for one in found.values()})
    for key, one in ranks.items():
        done[key] = closed(one, limits)
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


def _needed_from(ranks: Mapping[Key, OpenRank], chunk: Chunk) -> int:
    """From when on some rank still needs what was recorded."""
    oldest = chunk.end_ns - OPEN_AT_MOST_NS
    times = [chunk.end_ns]
    for one in ranks.values():
        times.append(oldest if one.state.settled_ns is None else one.state.settled_ns)
        if not one.rank.marked:  # its first span may still come, and begin some time ago
            times.append(chunk.end_ns - CHUNK_NS)
    return max(min(times), oldest)


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
