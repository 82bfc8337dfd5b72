"""Where the wall time of each fetch of one thread went: CPU, runnable, blocked on what.

    W  wall             end - start
    U  user CPU         the thread's own clock, exact over sums (off by a scheduler tick per fetch)
    S  system CPU       belongs to the reading when the fetch read from a device, else to user code
    B  W - U - S        not on a CPU
    R  runnable         the rise of the thread's run_delay, spread over B and never beyond it
       blocked          B - R, shared out by `feeding_blocked`

Example: a fetch of 50 ms with 10 ms of CPU and 1 MiB read; run_delay rose by 8 ms; the thread was
always in state D where sampled: runnable 8 ms, block I/O 50 - 10 - 8 = 32 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.timeline import feeding_shares as kinds
from clusterprof.timeline import intervals, series
from clusterprof.timeline.feeding_blocked import (
    NO_SAMPLES,
    BlockedOn,
    Surroundings,
    at_least_io,
    blocked_on,
    count,
    remote_ratio,
    spread,
)
from clusterprof.timeline.feeding_runnable import runnable_ns
from clusterprof.timeline.model import Float, Int, SpanTable, ThreadTable

READ_AT_LEAST_BYTES = 4096
READING_NS_PER_BYTE = 20  # system CPU that reads can explain: 50 MB/s is slower than any kernel
TICK_NS = 10_000_000  # a thread's CPU clock may lag by one scheduler tick (100 Hz at worst)
GROUP_NS = 250_000_000  # fetches whose lags settle against each other
EDGE_NS = 1_000_000  # samples are stamped to about a millisecond
FEW_SAMPLES = 10
UNLIKELY_RATIO = 0.01  # states are samples too: never rule out a wait for a CPU
NOTHING = np.stack([NO_SAMPLES, NO_SAMPLES])


@dataclass(frozen=True, slots=True)
class Fetching:
    """The fetches of one thread with what it takes to split them; arrays of n fetches."""

    spans: SpanTable
    thread: ThreadTable | None
    wall_ns: Float
    user_ns: Float
    system_ns: Float
    runnable_ns: Float
    blocked_ns: Float
    reads: Int
    """1 where the fetch read from a device, else 0."""
    counts: Int
    """int64[2, 2, 9]: blocked samples by group (`reads`), state and kind."""


def measured(spans: SpanTable, thread: ThreadTable | None, around: Surroundings) -> Fetching:
    """Work out CPU, runnable and blocked time of each fetch, and count its thread's samples."""
    wall = (spans.end_ns - spans.start_ns).astype(np.float64)
    user = np.maximum(spans.b, 0).astype(np.float64)
    system = np.maximum(spans.c, 0).astype(np.float64)
    cpu = settled(user + system, wall)
    scale = np.divide(cpu, user + system, out=np.zeros_like(cpu), where=user + system > 0)
    # CPU time that lagged into a fetch which booked none is user code: kernels do not idle
    user = np.where(scale > 0, user * scale, cpu)
    off_cpu = wall - cpu
    reads = (spans.d >= READ_AT_LEAST_BYTES).astype(np.int64)
    runnable = np.zeros_like(wall)
    counts = NOTHING
    if thread is not None and len(thread.t_ns):
        counts, likely = _states(spans, thread, reads, around, off_cpu)
        runnable = runnable_ns(spans, thread, off_cpu, likely)
    blocked = off_cpu - runnable
    return Fetching(spans, thread, wall, user, cpu - user, runnable, blocked, reads, counts)


def settled(cpu_ns: Float, wall_ns: Float) -> Float:
    """Return CPU time per fetch that fits into its wall time and keeps the sum.

    The kernel books the CPU time of a running thread at its ticks, so a fetch of 5 ms may show 8
    and its neighbour 2. The excess of one belongs to neighbours with room, at most a tick each.
    """
    kept = np.minimum(cpu_ns, wall_ns)
    excess = cpu_ns - kept
    if not excess.any():
        return kept
    room = np.minimum(wall_ns - kept, TICK_NS)
    group = (np.cumsum(wall_ns) // GROUP_NS).astype(np.int64)
    group -= group[0]
    over = np.bincount(group, excess)
    space = np.bincount(group, room)
    part = np.divide(over, space, out=np.zeros_like(over), where=space > 0)
    filled: Float = kept + room * np.minimum(part, 1.0)[group]
    return filled


def _states(
    spans: SpanTable, thread: ThreadTable, reads: Int, around: Surroundings, off_cpu: Float
) -> tuple[Int, Float]:
    """Count the blocked samples of each group, and say how likely off-CPU time was runnable.

    A group that was hardly ever seen blocked spent its off-CPU time waiting for a CPU; without
    this, a neighbour in the same sample interval that was blocked all the time would take it.
    """
    wall = spans.end_ns - spans.start_ns
    edge = np.where(wall > 4 * EDGE_NS, EDGE_NS, 0)
    row = intervals.containing(thread.t_ns, (spans.start_ns + edge, spans.end_ns - edge))
    group = np.where(row >= 0, reads[np.maximum(row, 0)], -1)
    counts: Int = np.stack([count(thread, group == read, around) for read in (0, 1)])
    likely = np.ones(len(wall))
    for read in (0, 1):
        seen = int(np.count_nonzero((group == read) & (thread.state > 0)))
        own = reads == read
        if seen >= FEW_SAMPLES and off_cpu[own].any():
            blocked = counts[read].sum() / seen * wall[own].sum() / off_cpu[own].sum()
            likely[own] = max(UNLIKELY_RATIO, 1.0 - blocked)
    return counts, likely


def pooled(all_fetching: list[Fetching]) -> Int:
    """Return int64[2, 2, 9]: the samples of all threads that fetch, for those with too few."""
    total: Int = np.sum([NOTHING, *(f.counts for f in all_fetching)], axis=0)
    return total


def decomposed(fetching: Fetching, pool: Int, read_bytes: float, around: Surroundings) -> Float:
    """Return shares[n, 11] of each fetch's wall time.

    `read_bytes` is what all the fetches of the rank read from devices in this chunk.
    """
    n = len(fetching.wall_ns)
    table = kinds.empty(n)
    reading = np.minimum(fetching.system_ns, READING_NS_PER_BYTE * fetching.spans.d)
    reading = np.where(fetching.reads == 1, reading, 0.0)
    table[:, kinds.USER_CPU] = fetching.user_ns + fetching.system_ns - reading
    table[:, kinds.READING_CPU] = reading
    table[:, kinds.RUNNABLE] = fetching.runnable_ns
    for read in (0, 1):
        rows = np.flatnonzero(fetching.reads == read)
        if not rows.size:
            continue
        on = _blocked_on(fetching, pool, read, read_bytes * read, around)
        parts = spread(fetching.blocked_ns[rows], on)
        for column, name in enumerate(
            (kinds.BLOCK_IO, kinds.REMOTE_IO, kinds.MEMORY, kinds.SOCKET, kinds.UNKNOWN)
        ):
            table[rows, name] += parts[:, column]
    return kinds.shares(table, fetching.wall_ns)


def _blocked_on(
    fetching: Fetching, pool: Int, read: int, read_bytes: float, around: Surroundings
) -> BlockedOn:
    counts = fetching.counts[read]
    if counts.sum() < FEW_SAMPLES:
        counts = pool[read]
    faults = delayed = 0.0
    if read and fetching.thread is not None and len(fetching.thread.t_ns) > 1:
        faults = float(series.differences(fetching.thread.major_faults)[0].sum())
        delayed = float(series.differences(fetching.thread.block_io_delay_ns)[0].sum())
    on = blocked_on(counts, around, read_bytes, faults, fetching=True)
    blocked = float(fetching.blocked_ns[fetching.reads == 1].sum())
    if read and blocked > 0:
        remote = remote_ratio(around, read_bytes)
        return at_least_io(on, min(1.0, delayed / blocked), remote)
    return on
