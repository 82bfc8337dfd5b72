"""What the device and the steps of each rank did in a window, gathered while its chunks pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from clusterprof import signals
from clusterprof.attribution.device import busy_windows, within
from clusterprof.engine.metrics import quantile
from clusterprof.live import RankLive
from clusterprof.probe import layout
from clusterprof.timeline.load import NodeLoad
from clusterprof.timeline.model import Chunk, Rank
from clusterprof.timeline.ranks import ranks_of


class Watched:
    """A load whose chunks are looked at as they pass."""

    def __init__(self, load: NodeLoad, since_ns: int) -> None:
        """What lies before `since_ns` is not looked at."""
        self._load, self._since_ns = load, since_ns
        self._seen: dict[int, _Seen] = {}
        self.facts = load.facts

    def chunks(self) -> Iterator[Chunk]:
        """Pass the chunks through."""
        for chunk in self._load.chunks():
            for rank in ranks_of(chunk):
                self._seen.setdefault(rank.pid, _Seen()).add(rank, self._since_ns)
            yield chunk

    def ranks(self) -> dict[int, RankLive]:
        """Return what the ranks did, by process id."""
        return {pid: seen.told() for pid, seen in self._seen.items()}


class _Seen:
    """One rank so far."""

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
        since_ns = max(since_ns, self._until_ns)  # a chunk reaches back into the one before
        self._until_ns = chunk.end_ns
        steps = rank.main.spans.get(layout.STEP)
        if steps is not None and steps.end_ns.size:
            own = (steps.end_ns >= since_ns) & ((steps.end_ns < chunk.end_ns) | chunk.last)
            self._steps.update((steps.end_ns - steps.start_ns)[own].tolist())
            self._step_ended_ns = max(self._step_ended_ns or 0, int(steps.end_ns.max()))
        windows = busy_windows(rank) if rank.device else None
        if windows is not None:
            inside = within(windows, since_ns, chunk.end_ns)
            self._looked_ns += int((inside.end_ns - inside.start_ns).sum())
            self._idle_ns += int(inside.idle_ns.sum())
        self._add_active(rank, since_ns)

    def _add_active(self, rank: Rank, since_ns: int) -> None:
        """A gauge holds for the time before each reading."""
        series = rank.chunk.series.get((signals.GPU_SM_ACTIVE.name, rank.device))
        if series is None or series.t_ns.size < 2:
            return
        held = np.diff(series.t_ns).astype(np.float64)
        values = series.values[1:]
        known = ~np.isnan(values) & (series.t_ns[1:] > since_ns)
        self._held_ns += float(held[known].sum())
        self._active += float((values[known] * held[known]).sum())

    def told(self) -> RankLive:
        middle = quantile(self._steps, 0.5)
        ended_ns = self._step_ended_ns
        return RankLive(
            node_key=self._node_key,
            busy_ratio=1.0 - self._idle_ns / self._looked_ns if self._looked_ns > 0 else None,
            sm_active_ratio=self._active / self._held_ns if self._held_ns > 0 else None,
            step_ns=None if middle is None else int(middle),
            since_step_ns=None if ended_ns is None else max(self._until_ns - ended_ns, 0),
        )
