"""Split the wall time of each fetch of one thread: on CPU, runnable, blocked and on what.

    W  wall             end - start
    U  user CPU         the thread's own clock, exact over sums (off by a scheduler tick per fetch)
    S  system CPU       belongs to the reading if the fetch read from a device, else to user code
    B  W - U - S        not on a CPU
    R  runnable         the increase of the thread's run_delay, distributed over B, never beyond it
       blocked          B - R, divided by `analysis.timeline.data_wait.blocked`

Example: a fetch of 50 ms with 10 ms of CPU and 1 MiB read; run_delay rose by 8 ms; the
thread was always in state D when sampled: runnable 8 ms, block I/O 50 - 10 - 8 = 32 ms.

Time that a thread was runnable without a CPU, inside each of its fetches.

`run_delay` is an integral read every 100 ms: exact between two samples, and its
distribution inside is unknown. It can only have grown while the thread was off CPU. The
increase in a sample interval is therefore distributed over the off-CPU time of the
fetches in it; no fetch gets more than it has.

    samples      |--- increase 30 ms ---|
    fetches      |== 40 off ==|= 20 |      off-CPU time of the two inside the interval
    runnable          20         10

A wait for a CPU is accounted when it *ends*, which may be long after it began (the
period of a quota). What exceeds its own fetches goes to the fetches within one second
around it, and what exceeds those to the fetches within some seconds.

It also estimates CPU time and bytes of unmeasured fetches from samples of their process.

A loader other than torch's may mark its fetches with `clusterprof.span("fetch")`. A
worker does almost nothing between two fetches, so the growth of its counters between
two samples is divided among the fetches in between, in proportion to their time there.

    samples   |------ on_cpu rises by 60 ms ------|
    fetches     |== 40 ms ==|        |= 20 ms =|
    CPU              40                   20          never more than the length of the fetch
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clusterprof.analysis.timeline import intervals, series
from clusterprof.analysis.timeline.data_wait import blocked as kinds
from clusterprof.analysis.timeline.data_wait.blocked import (
    NO_SAMPLES,
    BlockedShares,
    ReadContext,
    allocate_blocked_time,
    count_blocked_samples,
    ensure_min_io,
    estimate_blocked_shares,
    estimate_remote_ratio,
)
from clusterprof.analysis.timeline.model import (
    DataWaitBreakdown,
    Float,
    Int,
    Process,
    Rank,
    ThreadTable,
)
from clusterprof.analysis.timeline.spans import FetchSpans
from clusterprof.probe import layout

EXCESS_WINDOWS_NS = (1_000_000_000, 4_000_000_000, 16_000_000_000)
"""Windows in ns within which excess runnable time is moved to other fetches, smallest
first.
"""


def allocate_runnable_time(
    spans: FetchSpans, thread: ThreadTable, off_cpu: Float, weight: Float
) -> Float:
    """Allocate runnable time to each fetch: float64[n] ns, at most its off-CPU time.

    off_cpu: float64[n], ns. weight: float64[n], relative likelihood that off-CPU time was
    runnable.
    """
    growth, unusable = series.compute_differences(thread.run_delay_ns)
    sample_intervals = thread.t_ns[:-1], thread.t_ns[1:]
    overlaps = intervals.find_overlaps((spans.start_ns, spans.end_ns), sample_intervals)
    if not len(overlaps.segment):
        return np.zeros_like(off_cpu)
    if unusable.all():
        return _estimate_from_states(spans, thread, off_cpu)
    inside = (overlaps.end_ns - overlaps.start_ns).astype(np.float64)
    wall = np.maximum(spans.end_ns - spans.start_ns, 1)
    room = (weight * off_cpu / wall)[overlaps.segment] * inside
    allocated = growth[overlaps.interval] * _compute_ratio(
        room, _sum_groups(overlaps.interval, room, len(growth))
    )
    if unusable.any():  # some samples are missing: assume the rate of the rest of this chunk
        hole = unusable[overlaps.interval]
        measured = room[~hole].sum()
        allocated[hole] = room[hole] * (allocated[~hole].sum() / measured if measured > 0 else 0.0)
    requested = np.bincount(overlaps.segment, allocated, minlength=len(off_cpu)).astype(np.float64)
    runnable = np.minimum(requested, off_cpu)
    excess = allocated * _compute_ratio(requested - runnable, requested)[overlaps.segment]
    if excess.any():
        length = np.maximum(sample_intervals[1] - sample_intervals[0], 1)
        covered = np.minimum(
            np.bincount(overlaps.interval, inside, minlength=len(length)) / length, 1
        )
        excess *= covered[overlaps.interval]  # the rest of the interval may have waited too
        for window_ns in EXCESS_WINDOWS_NS:
            spare = inside * ((off_cpu - runnable) / wall)[overlaps.segment]
            extra, excess = _allocate_excess(
                overlaps, sample_intervals[0], excess, spare, window_ns
            )
            runnable += np.bincount(overlaps.segment, extra, minlength=len(off_cpu))
    return np.minimum(runnable, off_cpu)


def _allocate_excess(
    overlaps: intervals.Overlaps, bin_start_ns: Int, excess: Float, spare: Float, window_ns: int
) -> tuple[Float, Float]:
    """Allocate the excess of each window to free off-CPU time in it; return what remains too."""
    number = (bin_start_ns - bin_start_ns[0]) // window_ns
    window = np.concatenate([[0], np.cumsum(number[1:] > number[:-1])])[overlaps.interval]
    requested, room = (np.bincount(window, amount).astype(np.float64) for amount in (excess, spare))
    fill_ratio = np.minimum(_compute_ratio(requested, room), 1.0)
    return spare * fill_ratio[window], excess * _compute_ratio(
        np.maximum(requested - room, 0.0), requested
    )[window]


def _sum_groups(where: Int, amount: Float, n: int) -> Float:
    """Return for each row the sum of its group."""
    return np.asarray(np.bincount(where, amount, minlength=n), np.float64)[where]


def _compute_ratio(part: Float, total: Float) -> Float:
    """Compute part / whole, 0 where the whole is 0."""
    result: Float = np.divide(part, total, out=np.zeros(len(total)), where=total > 0)
    return result


def _estimate_from_states(spans: FetchSpans, thread: ThreadTable, off_cpu: Float) -> Float:
    """Estimate runnable time without run_delay: samples in state R beyond the CPU time used."""
    inside = intervals.find_containing(thread.t_ns, (spans.start_ns, spans.end_ns)) >= 0
    states = thread.state[inside]
    known_states = states[states > 0]
    wall = float((spans.end_ns - spans.start_ns).sum())
    if not len(known_states) or not off_cpu.any():
        return np.zeros_like(off_cpu)
    waited = float(np.mean(known_states == ord("R"))) * wall - (wall - float(off_cpu.sum()))
    return off_cpu * min(1.0, max(0.0, waited) / float(off_cpu.sum()))


MIN_READ_BYTES = 4096
READING_NS_PER_BYTE = 20  # system CPU time of reads: 50 MB/s is slower than any kernel
TICK_NS = 10_000_000  # a thread's CPU clock may lag by one scheduler tick (100 Hz at worst)
GROUP_NS = 250_000_000  # fetches within this time exchange CPU time that lagged
EDGE_NS = 1_000_000  # samples are stamped to about a millisecond
MIN_BLOCKED_SAMPLES = 10
MIN_RUNNABLE_WEIGHT = 0.01  # states are only samples: never rule out a wait for a CPU
NO_COUNTS = np.stack([NO_SAMPLES, NO_SAMPLES])


@dataclass(frozen=True, slots=True)
class FetchTimes:
    """Measured times of one thread's fetches, float64[n] ns, and the counts to split them."""

    spans: FetchSpans
    thread: ThreadTable | None
    wall_ns: Float
    user_ns: Float
    system_ns: Float
    runnable_ns: Float
    blocked_ns: Float
    reads: Int
    """int64[n]: 1 where the fetch read from a device, else 0."""
    counts: Int
    """int64[2, 2, 10]: blocked samples by group (`reads`), state and kind."""


def measure_fetches(
    spans: FetchSpans, thread: ThreadTable | None, context: ReadContext
) -> FetchTimes:
    """Measure CPU, runnable and blocked time of each fetch, and count its thread's samples."""
    wall = (spans.end_ns - spans.start_ns).astype(np.float64)
    user = np.maximum(spans.user_cpu_ns, 0).astype(np.float64)
    system = np.maximum(spans.system_cpu_ns, 0).astype(np.float64)
    cpu = fit_cpu_time(user + system, wall)
    scale = np.divide(cpu, user + system, out=np.zeros_like(cpu), where=user + system > 0)
    # CPU time that lagged into a fetch without any counts as user code: kernels do not idle
    user = np.where(scale > 0, user * scale, cpu)
    off_cpu = wall - cpu
    reads = (spans.read_bytes >= MIN_READ_BYTES).astype(np.int64)
    runnable = np.zeros_like(wall)
    counts = NO_COUNTS
    if thread is not None and len(thread.t_ns):
        counts, likely = _count_states(spans, thread, reads, context, off_cpu)
        runnable = allocate_runnable_time(spans, thread, off_cpu, likely)
    blocked = off_cpu - runnable
    return FetchTimes(spans, thread, wall, user, cpu - user, runnable, blocked, reads, counts)


def fit_cpu_time(cpu_ns: Float, wall_ns: Float) -> Float:
    """Fit the CPU time of each fetch, float64[n] ns, into its wall time, keeping the sum.

    The kernel accounts the CPU time of a running thread at its ticks, so a fetch of 5 ms
    may show 8 ms and its neighbor 2 ms. The excess of one is moved to neighbors with room,
    at most a tick each.
    """
    fitted = np.minimum(cpu_ns, wall_ns)
    excess = cpu_ns - fitted
    if not excess.any():
        return fitted
    room = np.minimum(wall_ns - fitted, TICK_NS)
    group = (np.cumsum(wall_ns) // GROUP_NS).astype(np.int64)
    group -= group[0]
    over = np.bincount(group, excess)
    space = np.bincount(group, room)
    fill_ratio = np.divide(over, space, out=np.zeros_like(over), where=space > 0)
    filled: Float = fitted + room * np.minimum(fill_ratio, 1.0)[group]
    return filled


def _count_states(
    spans: FetchSpans, thread: ThreadTable, reads: Int, context: ReadContext, off_cpu: Float
) -> tuple[Int, Float]:
    """Count the blocked samples of each group; estimate how likely off-CPU time is runnable.

    A group that was hardly ever seen blocked spent its off-CPU time waiting for a CPU.
    Without this weight, a neighbor in the same sample interval that was always blocked
    would get that time.
    """
    wall = spans.end_ns - spans.start_ns
    edge = np.where(wall > 4 * EDGE_NS, EDGE_NS, 0)
    row = intervals.find_containing(thread.t_ns, (spans.start_ns + edge, spans.end_ns - edge))
    group = np.where(row >= 0, reads[np.maximum(row, 0)], -1)
    counts: Int = np.stack(
        [count_blocked_samples(thread, group == read, context) for read in (0, 1)]
    )
    runnable_weight = np.ones(len(wall))
    for read in (0, 1):
        sample_count = int(np.count_nonzero((group == read) & (thread.state > 0)))
        in_group = reads == read
        if sample_count >= MIN_BLOCKED_SAMPLES and off_cpu[in_group].any():
            blocked = (
                counts[read].sum() / sample_count * wall[in_group].sum() / off_cpu[in_group].sum()
            )
            runnable_weight[in_group] = max(MIN_RUNNABLE_WEIGHT, 1.0 - blocked)
    return counts, runnable_weight


def combine_counts(all_fetching: list[FetchTimes]) -> Int:
    """Combine the samples of all threads that fetch: int64[2, 2, 10].

    Used for threads with too few.
    """
    total: Int = np.sum([NO_COUNTS, *(f.counts for f in all_fetching)], axis=0)
    return total


def split_fetches(
    fetching: FetchTimes, pool: Int, read_bytes: float, context: ReadContext
) -> Float:
    """Split each fetch's wall time into shares, float64[n, 11].

    pool: int64[2, 2, 10], samples of all threads. read_bytes: bytes that all fetches of the
    rank read from devices in this chunk.
    """
    n = len(fetching.wall_ns)
    table = kinds.make_empty_table(n)
    reading = np.minimum(fetching.system_ns, READING_NS_PER_BYTE * fetching.spans.read_bytes)
    reading = np.where(fetching.reads == 1, reading, 0.0)
    table[:, kinds.USER_CPU] = fetching.user_ns + fetching.system_ns - reading
    table[:, kinds.READING_CPU] = reading
    table[:, kinds.RUNNABLE] = fetching.runnable_ns
    for read in (0, 1):
        rows = np.flatnonzero(fetching.reads == read)
        if not rows.size:
            continue
        blocked_shares = _estimate_group_shares(fetching, pool, read, read_bytes * read, context)
        parts = allocate_blocked_time(fetching.blocked_ns[rows], blocked_shares)
        for column, name in enumerate(
            (kinds.BLOCK_IO, kinds.REMOTE_IO, kinds.MEMORY, kinds.SOCKET, kinds.UNKNOWN)
        ):
            table[rows, name] += parts[:, column]
    return kinds.normalize_shares(table, fetching.wall_ns)


def _estimate_group_shares(
    fetching: FetchTimes, pool: Int, read: int, read_bytes: float, context: ReadContext
) -> BlockedShares:
    counts = fetching.counts[read]
    if counts.sum() < MIN_BLOCKED_SAMPLES:
        counts = pool[read]
    faults = delayed_ns = 0.0
    if read and fetching.thread is not None and len(fetching.thread.t_ns) > 1:
        faults = float(series.compute_differences(fetching.thread.major_faults)[0].sum())
        delayed_ns = float(series.compute_differences(fetching.thread.block_io_delay_ns)[0].sum())
    blocked_shares = estimate_blocked_shares(counts, context, read_bytes, faults, in_fetches=True)
    blocked = float(fetching.blocked_ns[fetching.reads == 1].sum())
    if read and blocked > 0:
        remote = estimate_remote_ratio(context, read_bytes)
        return ensure_min_io(blocked_shares, min(1.0, delayed_ns / blocked), remote)
    return blocked_shares


def fill_unmeasured(spans: FetchSpans, process: Process) -> FetchSpans:
    """Fill CPU times and bytes from samples where they are -1; 0 where nothing is known.

    The kernel's share of the CPU time is known only for all fetches together.
    """
    columns = spans.user_cpu_ns, spans.system_cpu_ns, spans.read_bytes
    if not any(np.any(column < 0) for column in columns):
        return spans
    user_cpu_ns, system_cpu_ns, read_bytes = columns
    zeros = np.zeros(len(spans.start_ns))
    thread = process.threads.get(process.pid)
    cpu, system = zeros, 0.0
    if thread is not None:
        wall = (spans.end_ns - spans.start_ns).astype(np.float64)
        cpu = np.minimum(_allocate_growth(spans, thread.t_ns, thread.on_cpu_ns), wall)
        ticks = [
            float(series.compute_differences(c)[0].sum())
            for c in (thread.user_ns, thread.system_ns)
        ]
        system = ticks[1] / sum(ticks) if sum(ticks) > 0 else 0.0
    read = (
        zeros
        if process.io is None
        else _allocate_growth(spans, process.io.t_ns, process.io.read_bytes)
    )
    measured = (user_cpu_ns >= 0) & (system_cpu_ns >= 0)
    filled = (
        np.where(measured, user_cpu_ns, np.rint(cpu * (1 - system))),
        np.where(measured, system_cpu_ns, np.rint(cpu * system)),
        np.where(read_bytes >= 0, read_bytes, np.rint(read)),
    )
    user, kernel, read_ = (column.astype(np.int64) for column in filled)
    return replace(spans, user_cpu_ns=user, system_cpu_ns=kernel, read_bytes=read_)


def _allocate_growth(spans: FetchSpans, t_ns: Int, counter: Int) -> Float:
    """Allocate the growth of a counter to the fetches: float64[n]."""
    if len(t_ns) < 2:
        return np.zeros(len(spans.start_ns))
    growth, _ = series.compute_differences(counter)
    overlaps = intervals.find_overlaps((spans.start_ns, spans.end_ns), (t_ns[:-1], t_ns[1:]))
    inside = (overlaps.end_ns - overlaps.start_ns).astype(np.float64)
    interval_total = np.bincount(overlaps.interval, inside, minlength=len(growth))[
        overlaps.interval
    ]
    share = growth[overlaps.interval] * inside / np.maximum(interval_total, 1.0)
    return np.asarray(
        np.bincount(overlaps.segment, share, minlength=len(spans.start_ns)), np.float64
    )


def estimate_collection_share(
    rank: Rank, start_ns: Int, end_ns: Int, breakdown: DataWaitBreakdown
) -> Float:
    """Estimate which share of each interval the awaited worker collected garbage: float64[n].

    A collection computes, so it gets CPU time and waits for a CPU like the rest of the batch. The
    share is a part of `breakdown.user_cpu`. start_ns, end_ns: int64[n].
    """
    share = np.zeros(len(start_ns))
    computing = breakdown.user_cpu > 0
    active = np.maximum(breakdown.user_cpu + breakdown.runnable, 1e-9)
    for pid in np.unique(breakdown.worker_pid[computing]).tolist():
        process = rank.chunk.processes.get(pid)
        pauses = process.spans.get(layout.GC) if process is not None else None
        if pauses is None or pid == rank.pid:
            continue
        rows = computing & (breakdown.worker_pid == pid)
        collecting_ns = intervals.measure_overlap(
            (start_ns[rows], end_ns[rows]),
            intervals.merge_intervals((pauses.start_ns, pauses.end_ns)),
        )
        ratio = collecting_ns / np.maximum(end_ns[rows] - start_ns[rows], 1)
        on_cpu = ratio * breakdown.user_cpu[rows] / active[rows]
        share[rows] = np.minimum(on_cpu, breakdown.user_cpu[rows])
    return share
