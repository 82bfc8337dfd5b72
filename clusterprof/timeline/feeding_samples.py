"""What a thread did, from its samples alone: no spans, or time outside any fetch.

Counters of a thread (time on a CPU, time runnable) are integrals and are spread over the interval
between two samples; what is left was blocked, and the samples inside the intervals say on what.
Good for seconds; blurred for intervals much shorter than the time between samples.
"""

from __future__ import annotations

import numpy as np

from clusterprof.timeline import feeding_shares as kinds
from clusterprof.timeline import intervals, series
from clusterprof.timeline.feeding_blocked import (
    Surroundings,
    blocked_on,
    count,
    spread,
)
from clusterprof.timeline.feeding_fetch import READING_NS_PER_BYTE
from clusterprof.timeline.model import Float, Int, Process, Rank, ThreadTable

FEW_SAMPLES = 5
_BLOCKED = (kinds.BLOCK_IO, kinds.REMOTE_IO, kinds.MEMORY, kinds.SOCKET)
IDLE_BELOW_RATIO = 0.1


def sampled(process: Process, start_ns: Int, end_ns: Int, around: Surroundings) -> Float:
    """Return shares[n, 11] of what the main thread of a process did in each interval.

    Intervals are sorted by start; where the samples needed are missing all is unknown.
    """
    thread = process.threads.get(process.pid)
    if thread is None or len(thread.t_ns) < 2:
        return kinds.all_unknown(len(start_ns))
    length = np.maximum(end_ns - start_ns, 1).astype(np.float64)
    at = series.located(thread.t_ns, start_ns, end_ns)
    on_cpu = series.risen(series.growth_of(thread.on_cpu_ns), at)
    runnable = series.risen(series.growth_of(thread.run_delay_ns), at)
    on_cpu = np.minimum(on_cpu, length)
    runnable = np.minimum(np.fmax(runnable, 0.0), length - on_cpu)
    read_bytes = _read_bytes(process)
    reading = on_cpu * _reading_ratio(thread, read_bytes)
    table = kinds.empty(len(start_ns))
    table[:, kinds.USER_CPU] = on_cpu - reading
    table[:, kinds.READING_CPU] = reading
    table[:, kinds.RUNNABLE] = runnable
    counts = _counts(thread, start_ns, end_ns, around)
    faults = float(series.differences(thread.major_faults)[0].sum())
    on = blocked_on(counts, around, read_bytes, faults)
    if on.samples:
        blocked = spread(length - on_cpu - runnable, on)
        for column, name in enumerate(_BLOCKED):
            table[:, name] += blocked[:, column]
    table[np.isnan(on_cpu)] = 0.0
    return kinds.shares(table, length)


def _counts(thread: ThreadTable, start_ns: Int, end_ns: Int, around: Surroundings) -> Int:
    """The blocked samples inside the intervals; of the whole chunk when they are too few."""
    row = intervals.containing(thread.t_ns, intervals.union((start_ns, end_ns)))
    counts = count(thread, row >= 0, around)
    if counts.sum() < FEW_SAMPLES:
        counts = count(thread, np.ones(len(thread.t_ns), np.bool_), around)
    return counts


def _read_bytes(process: Process) -> float:
    """What the process read from devices in the samples at hand; 0 when unknown."""
    if process.io is None or len(process.io.t_ns) < 2:
        return 0.0
    return float(series.differences(process.io.read_bytes)[0].sum())


def _reading_ratio(thread: ThreadTable, read_bytes: float) -> float:
    """The part of a thread's CPU time that was in the kernel and that its reads can explain."""
    if read_bytes <= 0:
        return 0.0
    system = float(series.differences(thread.system_ns)[0].sum())
    on_cpu = float(series.differences(thread.on_cpu_ns)[0].sum())
    if on_cpu <= 0:
        return 0.0
    return min(system, READING_NS_PER_BYTE * read_bytes, on_cpu) / on_cpu


def busiest(rank: Rank, start_ns: Int, end_ns: Int, around: Surroundings) -> tuple[Float, Int]:
    """Return shares[n, 11] and the pid of the busiest feeding thread of each interval.

    The workers' main threads feed; when none of them does anything, or there are none, the main
    thread of the rank. The time in which even the busiest slept is unknown.
    """
    feeders = [*rank.workers, rank.main]
    tables = np.stack([sampled(p, start_ns, end_ns, around) for p in feeders])
    active = 1.0 - tables[:, :, kinds.UNKNOWN]
    if len(feeders) > 1:
        workers = active[:-1]
        main_only = workers.max(axis=0) < IDLE_BELOW_RATIO
        active[-1] = np.where(main_only, active[-1], -1.0)
    chosen = np.argmax(active, axis=0)
    rows = np.arange(len(start_ns))
    pids = np.array([p.pid for p in feeders], np.int64)
    result = tables[chosen, rows]
    seen = result[:, kinds.UNKNOWN] < 1.0
    return result, np.where(seen, pids[chosen], 0)
