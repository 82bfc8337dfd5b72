"""Settle one node's part of the window: the last minute of its recording, analyzed by itself.

    until the newest record      [since ------------------------ latest]
    until a common end           [since ----------------- until]  latest

With a common end, nodes that were settled by different processes fit together: the
window ends with the batch of records in which the end lies.

It also measures each rank's device activity and steps in a window, chunk by chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from clusterprof import signals
from clusterprof.analysis.attribution.rank.device_activity import build_device_windows, trim_windows
from clusterprof.analysis.node.analyze import NodeResult, analyze_load
from clusterprof.analysis.timeline.load.chunks import LoadedNode, NodeLoader
from clusterprof.analysis.timeline.load.ranks import find_ranks
from clusterprof.analysis.timeline.model import Chunk, Rank
from clusterprof.probe import layout
from clusterprof.report.live import RankStatus
from clusterprof.trace.decoder import PackedSpans
from clusterprof.trace.live_tail import NodeTail
from clusterprof.trace.reader import Damage
from clusterprof.trace.schema import Record
from clusterprof.util.statistics import find_quantile

WINDOW_NS = 60_000_000_000
LEAD_NS = 3_000_000_000
"""Intervals that end in the window may begin that much before it, ns."""
KEEP_MORE_NS = LEAD_NS + 10_000_000_000
"""Time before the window from which records are kept, ns: the common end of windows may lie that
much before a node's newest record, without the lead."""
BATCH_NS = 400_000_000
"""Longest time between the first and the last sample at the end of one batch of records, ns; the
next batch follows at least twice as late."""
_ONE_CHUNK_NS = 1 << 62  # ns: the window is one chunk …
MAX_ROWS = 4_000_000
"""… unless it has more rows than that: a minute of 8 GPUs and their host has 0.3 million."""


@dataclass(frozen=True, slots=True)
class NodeWindow:
    """The window of one node, settled."""

    result: NodeResult
    ranks: Mapping[int, RankStatus]
    """By process id."""


def settle_window(
    tail: NodeTail, limits: Mapping[str, Any], since_ns: int, until_ns: int | None = None
) -> NodeWindow:
    """Analyze a part of what a node's tail keeps; times in ns on the node's clock.

    limits: bound limits object per cause id. until_ns: None = to the newest record.
    """
    window = WindowReader(tail, since_ns - LEAD_NS, until_ns)
    load = NodeLoader(tail.folder, _ONE_CHUNK_NS, window, MAX_ROWS, rejects_late_ends=True)
    observer = ObservedChunkSource(load, since_ns)
    load_like: Any = observer  # has the methods of a NodeLoader that are called
    result = analyze_load(load_like, tail.folder.name, limits, since_ns=since_ns)
    return NodeWindow(result, observer.ranks())


class ChunkSource(Protocol):
    """The methods of a NodeLoader that an analysis calls."""

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks in order of time."""

    def facts(self) -> LoadedNode:
        """Return the facts collected so far."""


class ObservedChunkSource:
    """A node load that observes its chunks as they pass through."""

    def __init__(self, load: ChunkSource, since_ns: int) -> None:
        """Wrap a load; what lies before `since_ns` is ignored."""
        self._load, self._since_ns = load, since_ns
        self._seen: dict[int, _RankActivity] = {}
        self.facts = load.facts

    def chunks(self) -> Iterator[Chunk]:
        """Pass the chunks through."""
        for chunk in self._load.chunks():
            for rank in find_ranks(chunk):
                self._seen.setdefault(rank.pid, _RankActivity()).add(rank, self._since_ns)
            yield chunk
            del chunk  # else it stays while the next one is read

    def ranks(self) -> dict[int, RankStatus]:
        """Return the activity of the ranks by process id."""
        return {pid: activity.result() for pid, activity in self._seen.items()}


class _RankActivity:
    """Activity of one rank so far."""

    def __init__(self) -> None:
        self._node_key = ""
        self._idle_ns = self._looked_ns = 0
        self._active = self._held_ns = 0.0
        self._steps: Counter[int] = Counter()
        self._step_ended_ns: int | None = None
        self._until_ns = 0

    def add(self, rank: Rank, since_ns: int) -> None:
        chunk = rank.chunk
        self._node_key = str(chunk.header.node.get("key", ""))
        since_ns = max(since_ns, self._until_ns)  # a chunk overlaps the one before
        self._until_ns = chunk.end_ns
        steps = rank.main.spans.get(layout.STEP)
        if steps is not None and steps.end_ns.size:
            is_own = (steps.end_ns >= since_ns) & ((steps.end_ns < chunk.end_ns) | chunk.last)
            self._steps.update((steps.end_ns - steps.start_ns)[is_own].tolist())
            self._step_ended_ns = max(self._step_ended_ns or 0, int(steps.end_ns.max()))
        windows = build_device_windows(rank) if rank.device else None
        if windows is not None:
            inside = trim_windows(windows, since_ns, chunk.end_ns)
            self._looked_ns += int((inside.end_ns - inside.start_ns).sum())
            self._idle_ns += int(inside.idle_ns.sum())
        self._add_active(rank, since_ns)

    def _add_active(self, rank: Rank, since_ns: int) -> None:
        """Add SM activity; a gauge holds for the time before each reading."""
        series = rank.chunk.series.get((signals.GPU_SM_ACTIVE.name, rank.device))
        if series is None or series.t_ns.size < 2:
            return
        interval_ns = np.diff(series.t_ns).astype(np.float64)
        values = series.values[1:]
        measured = ~np.isnan(values) & (series.t_ns[1:] > since_ns)
        self._held_ns += float(interval_ns[measured].sum())
        self._active += float((values[measured] * interval_ns[measured]).sum())

    def result(self) -> RankStatus:
        middle = find_quantile(self._steps, 0.5)
        ended_ns = self._step_ended_ns
        return RankStatus(
            node_key=self._node_key,
            busy_ratio=1.0 - self._idle_ns / self._looked_ns if self._looked_ns > 0 else None,
            sm_active_ratio=self._active / self._held_ns if self._held_ns > 0 else None,
            step_ns=None if middle is None else int(middle),
            since_step_ns=None if ended_ns is None else max(self._until_ns - ended_ns, 0),
        )


class WindowReader:
    """Reads the records of a node's window."""

    def __init__(self, tail: NodeTail, since_ns: int, until_ns: int | None) -> None:
        """Take the bounds on the node's clock, ns; until_ns None = to the newest record."""
        self._tail, self._since_ns = tail, since_ns
        self._until_ns = None if until_ns is None else tail.find_batch_end(until_ns, BATCH_NS)

    @property
    def damage(self) -> Damage:
        return Damage(
            damaged_bytes=self._tail.damaged_bytes,
            implausible_records=self._tail.implausible_records,
            implausible_example="the time of a record" if self._tail.implausible_records else "",
        )

    def packed(self) -> Iterator[list[Record | PackedSpans]]:
        return self._tail.records(self._since_ns, self._until_ns)
