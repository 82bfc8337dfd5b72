"""Which part of a rank's work its main thread was ready for and had no CPU.

Without a device nothing of it is lost to the rank itself. But who waits for it in an operation
waits for a CPU, and not for more work or slower computation.

    samples      |------ 100 ms, 30 of them runnable ------|
    work         |== 60 ==|   wait 40                           18 of the 60 were no work
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clusterprof import signals
from clusterprof.attribution.regions import Region
from clusterprof.timeline.model import Float, Int, Rank
from clusterprof.timeline.series import differences, rise

RUNNABLE_AT_LEAST_RATIO = 0.02  # less is what every scheduler costs


class Runnable:
    """Running sums of one settled stretch; the delay between two samples is spread evenly."""

    def __init__(self, rank: Rank, region: Region, work_until: Callable[[Int], Float]) -> None:
        """`work_until` returns the ns of work in the stretch before each time."""
        edges, rate = _rates(rank, region)
        self._edges, self._rate = edges, rate
        self._idle = not rate.any()
        if not self._idle:
            self._work = work_until(edges)
            self._before = np.concatenate([[0.0], np.cumsum(rate * np.diff(self._work))])

    def until(self, t_ns: Int, work_ns: Float) -> Float | float:
        """Return float64[n]: of the work before each time, what was waiting for a CPU."""
        if self._idle:
            return 0.0
        row = np.searchsorted(self._edges, t_ns, side="right") - 1
        row = np.clip(row, 0, self._rate.size - 1)
        out: Float = self._before[row] + self._rate[row] * (work_ns - self._work[row])
        return np.clip(out, 0.0, work_ns)


def _rates(rank: Rank, region: Region) -> tuple[Int, Float]:
    """Sample times within the stretch and its ends, and the part runnable between them."""
    ends = np.array([region.start_ns, region.end_ns], np.int64)
    thread = rank.main.threads.get(rank.pid)
    if thread is None or len(thread.t_ns) < 2:
        return ends, np.zeros(1)
    t_ns = thread.t_ns
    growth, _ = differences(thread.run_delay_ns)  # 0 where it is not known
    ratio = np.clip(growth / np.maximum(np.diff(t_ns), 1), 0.0, 1.0)
    inside = t_ns[(t_ns > region.start_ns) & (t_ns < region.end_ns)]
    edges = np.concatenate([ends[:1], inside, ends[1:]])
    row = np.searchsorted(t_ns, edges[:-1], side="right") - 1
    known = (row >= 0) & (row < ratio.size)
    rate = np.where(known, ratio[np.clip(row, 0, ratio.size - 1)], 0.0)
    quota = rank.chunk.series.get((signals.CGROUP_THROTTLED.name, ""))
    if quota is not None and rate.any():  # that is cpu-throttled, and stays work
        length = np.maximum(np.diff(edges), 1)
        rate -= np.clip(np.nan_to_num(rise(quota, edges[:-1], edges[1:])) / length, 0.0, 1.0)
    rate[rate < RUNNABLE_AT_LEAST_RATIO] = 0.0
    return edges, rate
