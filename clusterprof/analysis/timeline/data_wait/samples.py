"""Estimate the activity of a thread from samples alone, without fetch spans.

Counters of a thread (time on a CPU, time runnable) are integrals and are distributed
over the interval between two samples. The remaining time was blocked; the samples
inside the intervals show on what. Accurate for seconds; blurred for intervals much
shorter than the time between samples.

Activity of a thread in many short windows, from the samples at their start and inside.

Counters give the time on a CPU and the time runnable; the sampled states give what the
thread was blocked on in the remaining time. Where spans show what belongs together,
samples are pooled instead (`analysis.timeline.data_wait.samples`); here every window is
evaluated by itself.

Time that a thread slept at a given place, from samples of its state and `wchan`.

A sample holds until the next one. The recorder reads the place of a short sleep only
occasionally. A sample without a name gets the place of the last named sample if that
was less than a second before, else the place of the next one.

    samples    S futex   S ?     R       S ?     S futex
    on a lock  |======================|       |===========|     R is on a CPU or waits for one

Host activity in an imported trace, which has no thread samples.

A profiler or a tracer of system calls recorded the job instead of Clusterprof. Its
spans `starved` (the device had no work because its host had not launched any yet) and
`loading` (reads and compute of the thread that loads) replace the samples of threads
(docs/design/recording-format.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline import intervals, series
from clusterprof.analysis.timeline.data_wait import blocked as kinds
from clusterprof.analysis.timeline.data_wait.blocked import (
    BLOCKED_ASLEEP,
    BLOCKED_LOCAL,
    BLOCKED_MEMORY,
    BLOCKED_PAGE,
    BLOCKED_POLL,
    BLOCKED_SOCKET,
    BLOCKED_UNNAMED,
    ReadContext,
    allocate_blocked_time,
    count_blocked_samples,
    estimate_blocked_shares,
)
from clusterprof.analysis.timeline.data_wait.blocked import BLOCKED_OTHER as SOMETHING
from clusterprof.analysis.timeline.data_wait.fetches import READING_NS_PER_BYTE
from clusterprof.analysis.timeline.intervals import find_overlaps
from clusterprof.analysis.timeline.model import Chunk, Float, Int, Process, Rank, ThreadTable
from clusterprof.analysis.timeline.spans import LoadingSpans, SpanTimes
from clusterprof.probe import layout

MIN_INTERVAL_SAMPLES = 5
_BLOCKED_COLUMNS = (kinds.BLOCK_IO, kinds.REMOTE_IO, kinds.MEMORY, kinds.SOCKET)
MAX_IDLE_RATIO = 0.1


def estimate_activity(process: Process, start_ns: Int, end_ns: Int, context: ReadContext) -> Float:
    """Estimate the activity of a process's main thread in each interval.

    Returns float64[n, 11] shares. start_ns, end_ns: int64[n], sorted by start. Rows without
    the required samples are unknown.
    """
    thread = process.threads.get(process.pid)
    if thread is None or len(thread.t_ns) < 2:
        return kinds.make_unknown_shares(len(start_ns))
    length = np.maximum(end_ns - start_ns, 1).astype(np.float64)
    positions = series.locate_intervals(thread.t_ns, start_ns, end_ns)
    on_cpu = series.evaluate_increase(series.compute_growth(thread.on_cpu_ns), positions)
    runnable = series.evaluate_increase(series.compute_growth(thread.run_delay_ns), positions)
    on_cpu = np.minimum(on_cpu, length)
    runnable = np.minimum(np.fmax(runnable, 0.0), length - on_cpu)
    read_bytes = _sum_read_bytes(process)
    reading = on_cpu * _estimate_reading_ratio(thread, read_bytes)
    table = kinds.make_empty_table(len(start_ns))
    table[:, kinds.USER_CPU] = on_cpu - reading
    table[:, kinds.READING_CPU] = reading
    table[:, kinds.RUNNABLE] = runnable
    counts = _count_interval_samples(thread, start_ns, end_ns, context)
    faults = float(series.compute_differences(thread.major_faults)[0].sum())
    blocked_shares = estimate_blocked_shares(counts, context, read_bytes, faults)
    if blocked_shares.samples:
        blocked = allocate_blocked_time(length - on_cpu - runnable, blocked_shares)
        for column, name in enumerate(_BLOCKED_COLUMNS):
            table[:, name] += blocked[:, column]
    table[np.isnan(on_cpu)] = 0.0
    return kinds.normalize_shares(table, length)


def _count_interval_samples(
    thread: ThreadTable, start_ns: Int, end_ns: Int, context: ReadContext
) -> Int:
    """Count the blocked samples inside the intervals; of the whole chunk if they are too few."""
    row = intervals.find_containing(thread.t_ns, intervals.merge_intervals((start_ns, end_ns)))
    counts = count_blocked_samples(thread, row >= 0, context)
    if counts.sum() < MIN_INTERVAL_SAMPLES:
        counts = count_blocked_samples(thread, np.ones(len(thread.t_ns), np.bool_), context)
    return counts


def _sum_read_bytes(process: Process) -> float:
    """Sum what the process read from devices in the available samples; 0 if unknown."""
    if process.io is None or len(process.io.t_ns) < 2:
        return 0.0
    return float(series.compute_differences(process.io.read_bytes)[0].sum())


def _estimate_reading_ratio(thread: ThreadTable, read_bytes: float) -> float:
    """Estimate the fraction of a thread's CPU time that its reads explain in the kernel."""
    if read_bytes <= 0:
        return 0.0
    system = float(series.compute_differences(thread.system_ns)[0].sum())
    on_cpu = float(series.compute_differences(thread.on_cpu_ns)[0].sum())
    if on_cpu <= 0:
        return 0.0
    return min(system, READING_NS_PER_BYTE * read_bytes, on_cpu) / on_cpu


def select_busiest_thread(
    rank: Rank, start_ns: Int, end_ns: Int, context: ReadContext
) -> tuple[Float, Int]:
    """Select the busiest data-loading thread of each interval; return its shares and its pid.

    float64[n, 11] and int64[n]; start_ns, end_ns: int64[n]. Candidates are the workers'
    main threads; if none of them is active, or there are none, the threads of the rank itself.
    Time in which even the busiest thread slept is unknown.
    """
    rank_threads = [rank.main, *(view_thread(rank.main, tid) for tid in list_loading_threads(rank))]
    feeders = [*rank.workers, *rank_threads]
    tables = np.stack([estimate_activity(p, start_ns, end_ns, context) for p in feeders])
    active = 1.0 - tables[:, :, kinds.UNKNOWN]
    if rank.workers:
        count = len(rank.workers)
        own_only = active[:count].max(axis=0) < MAX_IDLE_RATIO
        active[count:] = np.where(own_only, active[count:], -1.0)
    chosen = np.argmax(active, axis=0)
    rows = np.arange(len(start_ns))
    pids = np.array([p.pid for p in feeders], np.int64)
    result = tables[chosen, rows]
    is_known = result[:, kinds.UNKNOWN] < 1.0
    return result, np.where(is_known, pids[chosen], 0)


HELPER_THREADS = (
    "pt_autograd",
    "pt_nccl",
    "pt_gloo",
    "pt_tcp",
    "nccl",
    "NCCL",
    "cuda",
    "nv_",
    "UVM",
    "gloo",
)
"""Beginnings of the names of threads that work for the thread that trains."""
MAX_LOADING_THREADS = 8
_MIN_LOADING_RATIO = 0.02  # of the time: a thread that loads is on a CPU, or blocked in reads


def list_loading_threads(rank: Rank) -> list[int]:
    """List the threads of a rank that may make its batches: those that are not asleep.

    Thread ids, the busiest first, at most MAX_LOADING_THREADS. Empty without hooks: whether the
    main thread waits for them is then not known.
    """
    if not rank.marked:
        return []
    busy = []
    for tid, thread in rank.main.threads.items():
        if tid == rank.pid or thread.name.startswith(HELPER_THREADS) or len(thread.t_ns) < 2:
            continue
        grown_ns = float(series.compute_differences(thread.on_cpu_ns)[0].sum())
        blocked_ratio = float(np.mean(thread.state == ord("D")))
        length_ns = max(int(thread.t_ns[-1] - thread.t_ns[0]), 1)
        ratio = grown_ns / length_ns + blocked_ratio
        if ratio >= _MIN_LOADING_RATIO:
            busy.append((-ratio, tid))
    return [tid for _, tid in sorted(busy)[:MAX_LOADING_THREADS]]


def view_thread(process: Process, tid: int) -> Process:
    """Return a process as if one of its other threads were its main thread."""
    return replace(process, threads={process.pid: process.threads[tid]})


_READING_BLOCKED_RATIO = 0.5  # of the blocked samples of a window


class ThreadWindows(NamedTuple):
    """Shares of each window, float64[n]; the rest to 1 is sleep. NaN if unknown."""

    on_cpu: Float
    runnable: Float
    storage: Float
    """Blocked on a disk or mount."""
    memory: Float
    reading: Float
    """Part of `on_cpu` that a loader blocked on storage spends in the kernel for reading."""

    @property
    def active(self) -> Float:
        """Return the share in which the thread did not sleep, float64[n]."""
        return self.on_cpu + self.runnable + self.storage + self.memory


def measure_thread_windows(
    thread: ThreadTable, start_ns: Int, end_ns: Int, context: ReadContext, loads: bool = False
) -> ThreadWindows:
    """Measure the activity of a thread in each window; start_ns, end_ns: int64[n].

    loads: the thread loads data, so a receive from another host is a wait for data; for any
    other thread it is a wait for its peers.
    """
    length = np.maximum(end_ns - start_ns, 1)
    positions = series.locate_intervals(thread.t_ns, start_ns, end_ns)
    on_cpu = np.clip(
        series.evaluate_increase(series.compute_growth(thread.on_cpu_ns), positions) / length,
        0.0,
        1.0,
    )
    runnable = (
        series.evaluate_increase(series.compute_growth(thread.run_delay_ns), positions) / length
    )
    runnable = np.clip(np.nan_to_num(runnable), 0.0, 1.0 - np.nan_to_num(on_cpu))
    storage, memory = _measure_blocked_shares(thread, start_ns, end_ns, context, loads)
    blocked = 1.0 - on_cpu - runnable
    reads = loads and bool((storage >= _READING_BLOCKED_RATIO).any())
    reading = on_cpu * (_compute_kernel_ratio(thread) if reads else 0.0)
    return ThreadWindows(on_cpu, runnable, storage * blocked, memory * blocked, reading)


def _measure_blocked_shares(
    thread: ThreadTable, start_ns: Int, end_ns: Int, context: ReadContext, loads: bool
) -> tuple[Float, Float]:
    """Measure which share of the blocked samples of each window was storage, and memory.

    A window without a blocked sample gets the mix of all samples: reads shorter than a
    millisecond are often missed by the sampling, but they are not sleep.
    """
    zeros = np.zeros(start_ns.size)
    if not thread.t_ns.size:
        return zeros, zeros
    has_kind = thread.wchan < len(context.wchan_kind) - 1
    kind = context.wchan_kind[np.where(has_kind, thread.wchan, -1)]
    uninterruptible, interruptible = thread.state == ord("D"), thread.state == ord("S")
    unclear = np.isin(
        kind,
        (
            BLOCKED_LOCAL,
            BLOCKED_PAGE,
            SOMETHING,
            BLOCKED_UNNAMED,
            BLOCKED_POLL,
            *(() if loads else (BLOCKED_SOCKET,)),
        ),
    )
    asleep = (interruptible & (unclear | (kind == BLOCKED_ASLEEP))) | (
        uninterruptible & (kind == BLOCKED_ASLEEP)
    )
    memory = (uninterruptible | interruptible) & (kind == BLOCKED_MEMORY)
    storage = (uninterruptible | interruptible) & ~asleep & ~memory
    # A state holds until the next sample; threads are sampled slightly later than devices.
    early = (end_ns - start_ns) // 4
    first = np.searchsorted(thread.t_ns, start_ns - early, side="left")
    last = np.searchsorted(thread.t_ns, end_ns - early, side="left")
    first = np.where(first == last, np.maximum(first - 1, 0), first)
    count = _count_between(uninterruptible | interruptible, first, last)

    def compute_share(selected: np.ndarray) -> Float:
        pooled = float(selected.sum()) / max(float((uninterruptible | interruptible).sum()), 1.0)
        return np.where(
            count > 0, _count_between(selected, first, last) / np.maximum(count, 1), pooled
        )

    return compute_share(storage), compute_share(memory)


def _compute_kernel_ratio(thread: ThreadTable) -> float:
    """Compute the fraction of a thread's CPU time spent in the kernel; 0 if unknown."""
    measured = (thread.user_ns >= 0) & (thread.system_ns >= 0)
    if np.count_nonzero(measured) < 2:
        return 0.0
    user, system = (
        counter[measured][-1] - counter[measured][0]
        for counter in (thread.user_ns, thread.system_ns)
    )
    return float(system) / max(float(user + system), 1.0)


def _count_between(selected: np.ndarray, first: Int, last: Int) -> Int:
    before = np.concatenate([[0], np.cumsum(selected)])
    return before[last] - before[first]


_NAME_VALID_NS = 1_000_000_000
_SLEEP_STATES = (ord("S"), ord("D"))


def find_sleep_samples(
    thread: ThreadTable, names: tuple[str, ...], is_wanted: Callable[[str], bool]
) -> NDArray[np.bool_]:
    """Find the samples in which the thread slept in a kernel function that `is_wanted` accepts.

    names: wchan names of the chunk, to which `thread.wchan` points. Returns bool[n].
    """
    asleep = (thread.state == _SLEEP_STATES[0]) | (thread.state == _SLEEP_STATES[1])
    wanted_wchans = np.array([*(is_wanted(name) for name in names), False])
    has_name = (thread.wchan >= 0) & (thread.wchan < len(names))
    in_wchan = wanted_wchans[np.where(has_name, thread.wchan, -1)] & asleep
    (named,) = (has_name & asleep).nonzero()
    (nameless,) = (~has_name & asleep).nonzero()
    if named.size and nameless.size:
        row = named.searchsorted(nameless) - 1
        before, after = named[np.maximum(row, 0)], named[np.minimum(row + 1, named.size - 1)]
        t_ns = thread.t_ns
        recent = (row >= 0) & (t_ns[nameless] - t_ns[before] < _NAME_VALID_NS)
        soon = (after > nameless) & (t_ns[after] - t_ns[nameless] < _NAME_VALID_NS)
        in_wchan[nameless] = (recent & in_wchan[before]) | (~recent & soon & in_wchan[after])
    return in_wchan


def find_runs(t_ns: Int, selected: NDArray[np.bool_]) -> tuple[Int, Int]:
    """Find the first and last row of every run of selected samples, skipping single others.

    t_ns: int64[n]. which: bool[n]. Returns int64[k] each.
    """
    (rows,) = selected.nonzero()
    if not rows.size:
        return rows, rows
    breaks = np.flatnonzero((np.diff(rows) > 2) | (np.diff(t_ns[rows]) > _NAME_VALID_NS)) + 1
    first = rows[np.concatenate([[0], breaks])]
    last = rows[np.concatenate([breaks - 1, [rows.size - 1]])]
    return first, last


_IMPORTER_KEY = "importer"  # in the header's versions: the importer that made the recording


def is_imported(chunk: Chunk) -> bool:
    """Return whether a recording was made from a trace of another tool."""
    return _IMPORTER_KEY in chunk.header.versions


def has_traced_threads(rank: Rank) -> bool:
    """Return whether a trace replaces the thread samples of this rank."""
    return bool({layout.STARVED, layout.LOADING} & rank.main.spans.keys())


def allocate_span_amounts(
    table: SpanTimes | None, start_ns: Int, end_ns: Int, **columns: Int | None
) -> Float:
    """Allocate amounts of spans to intervals: float64[k, n], k amounts in n intervals.

    columns: int64[spans] each; an amount is distributed evenly over its span; None = the
    span's length. start_ns, end_ns: int64[n].
    """
    out = np.zeros((len(columns), len(start_ns)))
    if table is None or not table.start_ns.size or not len(start_ns):
        return out
    order = np.argsort(table.start_ns, kind="stable")
    spans = table.start_ns[order], table.end_ns[order]
    length = np.maximum(spans[1] - spans[0], 1)
    overlap_rows = find_overlaps((start_ns, end_ns), spans)
    share = (overlap_rows.end_ns - overlap_rows.start_ns) / length[overlap_rows.interval]
    for row, amount in enumerate(columns.values()):
        amount_ns = length if amount is None else np.minimum(np.maximum(amount[order], 0), length)
        out[row] = np.bincount(
            overlap_rows.segment, share * amount_ns[overlap_rows.interval], minlength=len(start_ns)
        )
    return out


_STORAGE_CODES = {
    "local": layout.STORAGE_LOCAL,
    "network": layout.STORAGE_NETWORK,
    "object": layout.STORAGE_OBJECT,
}


def compute_loading_shares(rank: Rank, start_ns: Int, end_ns: Int) -> dict[str, Float] | None:
    """Compute which share of each interval the loading thread read or computed.

    Returns float64[n] per name. `local`, `network`, `object`: reads of files stored there;
    `elsewhere`: reads of unknown origin; `computing`. None if the trace has no such spans.
    Shares of a row sum to at most 1.
    """
    loading = rank.main.get_spans(LoadingSpans)
    if loading is None:
        return None
    reads = {
        name: np.where(loading.storage == code, loading.reading_ns, 0)
        for name, code in _STORAGE_CODES.items()
    }
    has_storage = np.isin(loading.storage, tuple(_STORAGE_CODES.values()))
    reads["elsewhere"] = np.where(has_storage, 0, loading.reading_ns)
    amounts = allocate_span_amounts(
        loading, start_ns, end_ns, **reads, computing=loading.computing_ns
    )
    amounts /= np.maximum(end_ns - start_ns, 1)
    amounts /= np.maximum(amounts.sum(axis=0), 1.0)
    return dict(zip((*reads, "computing"), amounts))
