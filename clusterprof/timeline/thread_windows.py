"""What a thread did in each of many short windows, by the samples at their begin and inside.

Counters say for how long it ran or was ready to; what it was blocked on in the rest, the states in
which it was found there. Where spans mark what belongs together samples are pooled
instead (`feeding_samples`); here every window stands for itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clusterprof.timeline import series
from clusterprof.timeline.feeding_blocked import (
    ASLEEP,
    LOCAL,
    MEMORY,
    NAMELESS,
    PAGE,
    POLL,
    SOCKET,
    Surroundings,
)
from clusterprof.timeline.feeding_blocked import OTHER as SOMETHING
from clusterprof.timeline.model import Float, Int, ThreadTable

_READS_FROM_RATIO = 0.5  # of the blocked samples of a window


class Windowed(NamedTuple):
    """Shares of each window, float64[n]; what is missing to 1 it slept. NaN where not known."""

    on_cpu: Float
    runnable: Float
    storage: Float
    """Blocked on a disk or mount."""
    memory: Float
    reading: Float
    """Part of `on_cpu` that a loader which is blocked on storage spends in the kernel: it reads."""

    @property
    def at_work(self) -> Float:
        """Return the part in which it did not sleep."""
        return self.on_cpu + self.runnable + self.storage + self.memory


def windowed(
    thread: ThreadTable, start_ns: Int, end_ns: Int, around: Surroundings, loads: bool = False
) -> Windowed:
    """Return what a thread did in each window.

    One that `loads` waits for data in a receive from another host; any other for its peers.
    """
    length = np.maximum(end_ns - start_ns, 1)
    at = series.located(thread.t_ns, start_ns, end_ns)
    on_cpu = np.clip(series.risen(series.growth_of(thread.on_cpu_ns), at) / length, 0.0, 1.0)
    runnable = series.risen(series.growth_of(thread.run_delay_ns), at) / length
    runnable = np.clip(np.nan_to_num(runnable), 0.0, 1.0 - np.nan_to_num(on_cpu))
    storage, memory = _blocked_on(thread, start_ns, end_ns, around, loads)
    blocked = 1.0 - on_cpu - runnable
    reads = loads and bool((storage >= _READS_FROM_RATIO).any())
    reading = on_cpu * (_kernel_ratio(thread) if reads else 0.0)
    return Windowed(on_cpu, runnable, storage * blocked, memory * blocked, reading)


def _blocked_on(
    thread: ThreadTable, start_ns: Int, end_ns: Int, around: Surroundings, loads: bool
) -> tuple[Float, Float]:
    """Which part of the blocked samples of each window was storage, and memory.

    A window in which the thread was never found blocked has the mix of all samples: reads of less
    than a millisecond are often missed, and are no sleep for that.
    """
    none = np.zeros(start_ns.size)
    if not thread.t_ns.size:
        return none, none
    known = thread.wchan < len(around.wchan_kind) - 1
    kind = around.wchan_kind[np.where(known, thread.wchan, -1)]
    deep, light = thread.state == ord("D"), thread.state == ord("S")
    vague = np.isin(kind, (LOCAL, PAGE, SOMETHING, NAMELESS, POLL, *(() if loads else (SOCKET,))))
    asleep = (light & (vague | (kind == ASLEEP))) | (deep & (kind == ASLEEP))
    memory = (deep | light) & (kind == MEMORY)
    storage = (deep | light) & ~asleep & ~memory
    # A state holds until the next sample; threads are sampled a little after devices.
    early = (end_ns - start_ns) // 4
    first = np.searchsorted(thread.t_ns, start_ns - early, side="left")
    last = np.searchsorted(thread.t_ns, end_ns - early, side="left")
    first = np.where(first == last, np.maximum(first - 1, 0), first)
    count = _among(deep | light, first, last)

    def part(which: np.ndarray) -> Float:
        pooled = float(which.sum()) / max(float((deep | light).sum()), 1.0)
        return np.where(count > 0, _among(which, first, last) / np.maximum(count, 1), pooled)

    return part(storage), part(memory)


def _kernel_ratio(thread: ThreadTable) -> float:
    """Which part of its CPU time a thread spent in the kernel; 0 where that is not known."""
    known = (thread.user_ns >= 0) & (thread.system_ns >= 0)
    if np.count_nonzero(known) < 2:
        return 0.0
    user, system = (one[known][-1] - one[known][0] for one in (thread.user_ns, thread.system_ns))
    return float(system) / max(float(user + system), 1.0)


def _among(which: np.ndarray, first: Int, last: Int) -> Int:
    before = np.concatenate([[0], np.cumsum(which)])
    return before[last] - before[first]
