"""Data-wait breakdown: split a data wait by the activity of the critical thread.

A rank that waits for data waits for one thread: the worker that owns the awaited batch,
or its own main thread if it loads the data itself. Every part of the wait is compared
with that thread's activity and is one of:

    no worker     before the worker's loop began
    in a fetch    split as that fetch was: CPU, runnable, blocked on what
    no work       between two fetches, before the awaited batch was ready: prefetch ran dry
    delivery      after the fetch that made the awaited batch had ended, except while the worker's
                  interpreter was busy: computing or faulting pages in for its next batch
    own work      the part of the last two in which the waiting thread itself computed: it draws the
                  next indices (a sampler), or unpickles the batch

    main    |---------------- wait for worker 1 ----------------|
    worker 1   started   |==== fetch ====|   |=== fetch ===|
            |no worker|nw| in a fetch    |nw | in a fetch  |del.|

Intervals outside any data wait, and ranks without spans, are split by thread samples
alone.

It also finds the worker that each data wait waited for, and the fetch behind the awaited batch.

It also estimates which data waits a larger prefetch would have avoided.

Throughput identity over the batches that the loader could have had ready with
`PREFETCH_BATCHES` per worker: the time that all workers together needed
to make them, against the time in which they were used.

    batches        5  5  5  5 700          4 workers, a step takes 150: 720 / 4 = 180 of 750
    waited                    150          workers are mostly idle: all of it was avoidable
    all of 700                             3500 / 4 = 875 of 750: 125 of the waits were needed
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline import intervals
from clusterprof.analysis.timeline.data_wait import blocked as kinds
from clusterprof.analysis.timeline.data_wait import fetches
from clusterprof.analysis.timeline.data_wait.blocked import ReadContext, get_read_context
from clusterprof.analysis.timeline.data_wait.fetches import fill_unmeasured
from clusterprof.analysis.timeline.data_wait.samples import (
    compute_loading_shares,
    estimate_activity,
    list_loading_threads,
    select_busiest_thread,
    view_thread,
)
from clusterprof.analysis.timeline.model import (
    DataWaitBreakdown,
    Float,
    Int,
    Process,
    Rank,
    ThreadTable,
)
from clusterprof.analysis.timeline.series import compute_column_increase
from clusterprof.analysis.timeline.spans import DataWaitSpans, FetchSpans, LoaderStartSpans
from clusterprof.probe.layout import FETCH, WORKER_START

UNKNOWN_PID = 0
_RUNNING, _KNOWN_STATES = ord("R"), (ord("R"), ord("S"), ord("D"))
_MIN_STATES = 8
"""Number of samples that show what a waiting thread does."""
_IDLE_COLUMNS = [kinds.DELIVERY, kinds.NO_WORK]
"""Activities in which no worker works on the awaited batch."""
LONG_AGO_NS = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class DataWaits:
    """Data waits of a rank, disjoint and sorted; int64[n] columns."""

    start_ns: Int
    end_ns: Int
    pid: Int
    """Process of the critical thread; 0 if unknown."""
    identified: NDArray[np.bool_]
    """bool[n]: True if the span named the process, or if only one process or thread can load."""


def find_data_waits(rank: Rank) -> DataWaits:
    """Find the data waits of a rank and the process that each waited for.

    A span that names no worker (-1) waited for the worker whose fetch was the last to end
    before the wait ended; without workers, for the main thread.
    """
    spans = rank.main.get_spans(DataWaitSpans)
    if spans is None or not len(spans.start_ns):
        no_waits = np.zeros(0, np.int64)
        return DataWaits(no_waits, no_waits, no_waits, no_waits.astype(np.bool_))
    reach = np.maximum.accumulate(spans.end_ns)
    start = spans.start_ns.copy()
    np.maximum(start[1:], reach[:-1], out=start[1:])
    nonempty = spans.end_ns > start  # a wait inside another one belongs to the outer one
    end, owner = spans.end_ns, spans.worker_pid
    if not nonempty.all():
        start, end, owner = start[nonempty], end[nonempty], owner[nonempty]
    pid = np.where(owner == 0, rank.pid, np.maximum(owner, UNKNOWN_PID))
    unnamed = owner < 0
    loaders = [p for p in (*rank.workers, rank.main) if select_fetches(p) is not None]
    identified = ~unnamed | (len(loaders) == 1)
    if unnamed.any():
        pid[unnamed] = _find_last_finisher(loaders, end[unnamed])
        if not loaders and (len(rank.workers) or len(list_loading_threads(rank))) == 1:
            pid[unnamed] = rank.workers[0].pid if rank.workers else rank.pid
            identified[:] = True  # nothing else makes batches
    for owner_pid in list_distinct(pid):
        if owner_pid not in rank.chunk.processes:
            identified &= pid != owner_pid
    return DataWaits(start, end, pid, identified)


def list_distinct(pids: Int) -> list[int]:
    """List the distinct values of int64[n] in ascending order."""
    if pids.size and (pids == pids[0]).all():  # most ranks have one worker, or none
        return [int(pids[0])]
    return np.unique(pids).tolist()  # type: ignore[no-any-return]


def _find_last_finisher(loaders: list[Process], end_ns: Int) -> Int:
    """Find the worker whose fetch ended last at or before each instant; 0 if there is none."""
    ends = [fetch.end_ns for p in loaders if (fetch := select_fetches(p)) is not None]
    if not ends:
        return np.full(len(end_ns), UNKNOWN_PID, np.int64)
    pids = np.repeat([p.pid for p in loaders], [len(e) for e in ends])
    all_ends = np.concatenate(ends)
    order = np.argsort(all_ends, kind="stable")
    row = np.searchsorted(all_ends[order], end_ns, side="right") - 1
    return np.where(row >= 0, pids[order][np.maximum(row, 0)], UNKNOWN_PID)


def select_fetches(process: Process) -> FetchSpans | None:
    """Select the fetches of a process so that they are disjoint and sorted.

    None if there are none.
    """
    spans = process.get_spans(FetchSpans)
    if spans is None or not len(spans.start_ns):
        return None
    if (spans.start_ns[1:] >= spans.end_ns[:-1]).all():
        return spans
    reach = np.maximum.accumulate(spans.end_ns)
    return spans.select(np.append(True, spans.start_ns[1:] >= reach[:-1]))


def find_worker_start(process: Process) -> int:
    """Find when a worker was ready to fetch, in ns; the smallest int64 if it was not recorded.

    Between the start of its loop and its first fetch it runs `worker_init_fn`.
    """
    spans = process.spans.get(WORKER_START)
    if spans is None or not len(spans.start_ns):
        return int(LONG_AGO_NS)
    fetches = process.spans.get(FETCH)
    if fetches is None or not len(fetches.start_ns):
        return int(spans.start_ns[-1])
    if _is_complete(process, spans.sequence[-1:], fetches.sequence[:1]).all():
        return int(fetches.start_ns[0])
    return int(spans.start_ns[-1])


def find_batch_ready(
    process: Process, fetches: FetchSpans, wait_start_ns: Int, wait_end_ns: Int
) -> tuple[Int, Int]:
    """Find when the awaited batch of each wait was ready, and whether that is certain.

    int64[n] each. The last fetch of the process that ended before the wait ended made the batch.
    Without an earlier fetch, it was never ready (the end of the wait). A fetch that ended before
    the wait began is certain only if no record after it is missing: the second array is
    then 1, else 0. Times in ns.
    """
    row = np.searchsorted(fetches.end_ns, wait_end_ns, side="right") - 1
    has_fetch = row >= 0
    row = np.maximum(row, 0)
    ready = np.where(has_fetch, fetches.end_ns[row], wait_end_ns)
    following = np.minimum(row + 1, len(fetches.end_ns) - 1)
    uninterrupted = (following == row) | _is_complete(
        process, fetches.sequence[row], fetches.sequence[following]
    )
    certain = has_fetch & ((ready > wait_start_ns) | uninterrupted)
    return ready, certain.astype(np.int64)


def _is_complete(process: Process, first: Int, last: Int) -> NDArray[np.bool_]:
    """Return whether no record of any kind is missing between two sequence numbers: bool[n]."""
    count = last - first
    complete = count == 1
    if not complete.all():
        tables = [table.sequence for table in process.spans.values()]
        if process.stacks is not None:
            tables.append(process.stacks.sequence)
        recorded = np.unique(np.concatenate(tables))
        present = recorded.searchsorted(last) - recorded.searchsorted(first)
        complete = (count > 0) & (present == count)
    return np.asarray(complete, np.bool_)


SplitFetches = dict[int, tuple[FetchSpans, Float]]
_GIL_COLUMNS = (kinds.USER_CPU, kinds.RUNNABLE, kinds.MEMORY)
"""Activities in which a thread holds the interpreter lock; reads release it."""


def split_data_wait(rank: Rank, start_ns: Int, end_ns: Int) -> DataWaitBreakdown:
    """Split each interval by the activity of the critical thread, in shares.

    start_ns, end_ns: int64[n], sorted by start. The eleven shares of a row, float64[n]
    each, are not negative and sum to 1. An empty interval is entirely unknown.
    """
    start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    context = get_read_context(rank.chunk)
    traced = compute_loading_shares(rank, start, end)
    if traced is not None:
        return _build_traced_breakdown(rank, traced)
    if not rank.marked:
        table, pids = select_busiest_thread(rank, start, end, context)
        return _build_breakdown(table, np.zeros(len(start), np.bool_), pids)
    waits = find_data_waits(rank)
    overlaps = intervals.find_overlaps((start, end), (waits.start_ns, waits.end_ns))
    table_ns = kinds.make_empty_table(len(start))
    fetches = _split_fetches(rank, context)
    owner = waits.pid[overlaps.interval]
    critical = owner.copy()
    for pid in list_distinct(owner):
        (rows,) = (owner == pid).nonzero()
        wait_row = overlaps.interval[rows]
        segment_ns = _split_wait_segment(
            rank,
            pid,
            fetches,
            context,
            (overlaps.start_ns[rows], overlaps.end_ns[rows]),
            (waits.start_ns[wait_row], waits.end_ns[wait_row]),
        )
        if pid != rank.pid:
            on_own_work = _claim_own_computation(
                rank,
                segment_ns,
                (overlaps.start_ns[rows], overlaps.end_ns[rows]),
                _IDLE_COLUMNS if pid in fetches else [kinds.UNKNOWN],
            )
            critical[rows[on_own_work]] = rank.pid
        kinds.add_to_rows(table_ns, overlaps.segment[rows], segment_ns)
    inside, longest = _measure_wait_overlap(len(start), overlaps)
    _add_time_outside_waits(table_ns, rank, start, end, inside, context)
    in_wait = 2 * inside > end - start
    pids = np.full(len(start), rank.pid, np.int64)
    identified = np.zeros(len(start), np.bool_)
    pids[in_wait] = critical[longest[in_wait]]
    identified[in_wait] = waits.identified[overlaps.interval[longest[in_wait]]] & (
        pids[in_wait] > 0
    )
    table = kinds.normalize_shares(table_ns, end - start)
    pids[table[:, kinds.UNKNOWN] >= 1.0] = 0
    return _build_breakdown(table, identified & (pids > 0), pids)


def _claim_own_computation(
    rank: Rank, segment_ns: Float, segment: intervals.Pair, columns: list[int]
) -> NDArray[np.bool_]:
    """Move idle time of waits to computation, as far as the waiting thread itself was active.

    It unpickles what another process has sent, or draws the next indices for its workers: they
    have no task then, and no batch is in transfer. Its samples in all these waits together show it.
    Changes segment_ns, float64[m, 11]. columns: those that are idle time.
    Returns the rows of which most is such time: bool[m].
    """
    thread = rank.main.threads.get(rank.pid)
    if thread is None:
        return np.zeros(len(segment_ns), np.bool_)
    waits = intervals.merge_intervals(segment)
    inside = intervals.find_containing(thread.t_ns, waits) >= 0
    measured = inside & np.isin(thread.state, _KNOWN_STATES)
    count = int(measured.sum())
    if count < _MIN_STATES:
        return np.zeros(len(segment_ns), np.bool_)
    ratio = int((thread.state[measured] == _RUNNING).sum()) / count
    length_ns = segment[1] - segment[0]
    idle_ns = segment_ns[:, columns].sum(axis=1)
    moved_ns = np.minimum(ratio * length_ns, idle_ns)
    segment_ns[:, columns] *= (1.0 - moved_ns / np.maximum(idle_ns, 1.0))[:, None]
    on_cpu_ratio = _compute_on_cpu_ratio(thread, waits)
    segment_ns[:, kinds.USER_CPU] += on_cpu_ratio * moved_ns
    segment_ns[:, kinds.RUNNABLE] += (1.0 - on_cpu_ratio) * moved_ns
    return np.asarray(2 * moved_ns > length_ns, np.bool_)


def _compute_on_cpu_ratio(thread: ThreadTable, waits: intervals.Pair) -> float:
    """Compute which part of its runnable time a thread was on a CPU; 1 where it is not known."""
    on_cpu_ns, delay_ns = (
        float(np.nansum(compute_column_increase(thread.t_ns, column, *waits)))
        for column in (thread.on_cpu_ns, thread.run_delay_ns)
    )
    return on_cpu_ns / (on_cpu_ns + delay_ns) if on_cpu_ns > 0 else 1.0


def _build_traced_breakdown(rank: Rank, traced: dict[str, Float]) -> DataWaitBreakdown:
    """Build the breakdown from a trace; reads of unknown origin count as unknown."""
    shares = {
        "user_cpu": traced["computing"],
        "block_io": traced["local"],
        "remote_io": traced["network"],
        "socket": traced["object"],
    }
    n = len(traced["computing"])
    table = np.zeros((n, len(kinds.SHARE_NAMES)))
    for name, share in shares.items():
        table[:, kinds.SHARE_NAMES.index(name)] = share
    table[:, kinds.UNKNOWN] = 1.0 - table.sum(axis=1)
    return _build_breakdown(table, np.ones(n, np.bool_), np.full(n, rank.pid, np.int64))


def _build_breakdown(table: Float, identified: NDArray[np.bool_], pids: Int) -> DataWaitBreakdown:
    columns = {name: table[:, column] for column, name in enumerate(kinds.SHARE_NAMES)}
    return DataWaitBreakdown(**columns, identified=identified, worker_pid=pids)


def _split_fetches(rank: Rank, context: ReadContext) -> SplitFetches:
    """Return the fetches of every process that loads for this rank, with their shares."""
    times_by_pid = {}
    for process in (rank.main, *rank.workers):
        spans = select_fetches(process)
        if spans is not None:
            view = _view_fetching_thread(rank, spans) if process is rank.main else process
            times_by_pid[process.pid] = fetches.measure_fetches(
                fill_unmeasured(spans, view), view.threads.get(process.pid), context
            )
    if not times_by_pid:
        return {}
    pool = fetches.combine_counts(list(times_by_pid.values()))
    fetched = [np.maximum(times.spans.read_bytes, 0) for times in times_by_pid.values()]
    read_bytes = float(sum(int(bytes_.sum()) for bytes_ in fetched))
    return {
        pid: (f.spans, fetches.split_fetches(f, pool, read_bytes, context))
        for pid, f in times_by_pid.items()
    }


def _view_fetching_thread(rank: Rank, spans: FetchSpans) -> Process:
    """Return the rank's process with the thread that fetches as its main thread.

    A buffer around a loader without workers fetches in a thread of its own: it is the one whose CPU
    time agrees best with that of the fetches, which each thread measures itself.
    """
    tids = list_loading_threads(rank)
    fetch_cpu_ns = spans.user_cpu_ns + spans.system_cpu_ns
    if not tids or (fetch_cpu_ns < 0).any():
        return rank.main

    def compute_difference(tid: int) -> float:
        thread = rank.main.threads.get(tid)
        if thread is None:
            return np.inf
        cpu_ns = compute_column_increase(
            thread.t_ns, thread.on_cpu_ns, spans.start_ns, spans.end_ns
        )
        return float(np.abs(np.nan_to_num(cpu_ns) - fetch_cpu_ns).sum())

    closest = min((rank.pid, *tids), key=compute_difference)
    return rank.main if closest == rank.pid else view_thread(rank.main, closest)


def _split_wait_segment(
    rank: Rank,
    pid: int,
    fetches: SplitFetches,
    context: ReadContext,
    segment: intervals.Pair,
    wait: intervals.Pair,
) -> Float:
    """Split segments of waits that all waited for one process: float64[m, 11], ns."""
    process = rank.chunk.processes.get(pid)
    if process is None:
        table, _ = select_busiest_thread(rank, *segment, context)
        return table * (segment[1] - segment[0])[:, None]
    if pid == rank.pid:
        return _split_main_process_wait(rank, fetches.get(pid), context, segment)
    return _split_worker_wait(process, fetches.get(pid), context, segment, wait)


def _split_worker_wait(
    process: Process,
    fetched: tuple[FetchSpans, Float] | None,
    context: ReadContext,
    segment: intervals.Pair,
    wait: intervals.Pair,
) -> Float:
    start, end = segment
    table = kinds.make_empty_table(len(start))
    begin = np.minimum(np.maximum(find_worker_start(process), start), end)
    table[:, kinds.NO_WORKER] = begin - start
    if fetched is None:
        return table + estimate_activity(process, begin, end, context) * (end - begin)[:, None]
    spans, split = fetched
    ready, certain = find_batch_ready(process, spans, *wait)
    until = np.minimum(np.maximum(ready, begin), end)
    table[:, kinds.DELIVERY] = np.where(certain, end - until, 0)
    # One interpreter does both: while the worker makes the next batch, it delivers none.
    holding_gil = kinds.make_empty_table(len(start))
    _add_fetches(holding_gil, spans, split, (np.where(certain, until, end), end))
    for column in _GIL_COLUMNS:
        table[:, column] += holding_gil[:, column]
        table[:, kinds.DELIVERY] -= holding_gil[:, column]
    covered = _add_fetches(table, spans, split, (begin, until))
    # Between two fetches the worker had nothing to do. If the fetch that ended the wait is missing
    # from the recording, the time is unknown instead.
    table[:, kinds.NO_WORK] = np.where(certain, until - begin - covered, 0)
    return table


def _split_main_process_wait(
    rank: Rank,
    fetched: tuple[FetchSpans, Float] | None,
    context: ReadContext,
    segment: intervals.Pair,
) -> Float:
    """Split segments in which the main thread loads, or another thread of its process.

    Between fetches it samples, collates or pins memory.
    """
    table = kinds.make_empty_table(len(segment[0]))
    if fetched is None:
        shares, _ = select_busiest_thread(rank, *segment, context)
        return table + shares * (segment[1] - segment[0])[:, None]
    covered = _add_fetches(table, *fetched, segment)
    table[:, kinds.USER_CPU] += segment[1] - segment[0] - covered
    return table


def _add_fetches(table: Float, spans: FetchSpans, split: Float, segment: intervals.Pair) -> Int:
    """Add to each segment the shares of the fetches inside it; return the ns they cover."""
    overlaps = intervals.find_overlaps(segment, (spans.start_ns, spans.end_ns))
    inside = overlaps.end_ns - overlaps.start_ns
    kinds.add_to_rows(table, overlaps.segment, split[overlaps.interval] * inside[:, None])
    return np.bincount(overlaps.segment, inside, minlength=len(table)).astype(np.int64)


def _add_time_outside_waits(
    table_ns: Float, rank: Rank, start: Int, end: Int, inside: Int, context: ReadContext
) -> None:
    """Add time outside data waits, where the main thread is critical: it launches work."""
    rows = np.flatnonzero(end - start > inside)
    if rows.size:
        outside_ns = (end - start - inside)[rows]
        table_ns[rows] += (
            estimate_activity(rank.main, start[rows], end[rows], context) * outside_ns[:, None]
        )


def _measure_wait_overlap(n: int, overlaps: intervals.Overlaps) -> tuple[Int, Int]:
    """Measure each interval's time in waits, and find its longest overlap with one."""
    length = overlaps.end_ns - overlaps.start_ns
    inside, longest = np.zeros(n, np.int64), np.zeros(n, np.int64)
    if (overlaps.segment[1:] > overlaps.segment[:-1]).all():  # in one wait each
        inside[overlaps.segment] = length
        longest[overlaps.segment] = np.arange(len(length))
        return inside, longest
    np.add.at(inside, overlaps.segment, length)
    order = np.lexsort((length, overlaps.segment))
    longest[overlaps.segment[order]] = order
    return inside, longest


PREFETCH_BATCHES = 4
"""Batches per worker that any loader can keep ready; a loader that may keep as many is not
at fault.
"""
MAX_BUSY_RATIO = 0.5
"""Workers that are busy for a larger fraction of the time do not count as idle."""


def estimate_prefetch_savings(rank: Rank, t_ns: Int) -> Float:
    """Estimate the fraction of the wait at each time that a larger prefetch would avoid.

    float64[n] for t_ns, int64[n]. 0 if the loader may already work that far ahead, has no
    workers, or its settings were not recorded.
    """
    zeros = np.zeros(t_ns.size)
    fetch_tables = [
        spans for worker in rank.workers if (spans := select_fetches(worker)) is not None
    ]
    waits = find_data_waits(rank)
    if (
        not fetch_tables
        or not waits.start_ns.size
        or not 0 < _find_prefetch_limit(rank) < PREFETCH_BATCHES
    ):
        return zeros
    lifetimes = _find_worker_lifetimes(rank.workers)
    n, max_workers = waits.start_ns.size, count_live_workers(rank.workers)
    first = np.maximum(np.arange(n) - PREFETCH_BATCHES * max_workers, 0)
    begin, end = waits.start_ns[first], waits.end_ns
    # Workers of finished epochs do no work; only those that lived then could have.
    alive_ns = sum(
        np.maximum(np.minimum(end, died_ns) - np.maximum(begin, born_ns), 0)
        for born_ns, died_ns in lifetimes
    )
    count = np.clip(alive_ns / np.maximum(end - begin, 1), 1.0, max_workers)
    total = np.concatenate([[0], np.cumsum(waits.end_ns - waits.start_ns)])
    waited = total[1:] - total[first]
    fetch_ns = np.zeros(n, np.int64)
    for table in fetch_tables:
        fetch_ns += _measure_time_before(table.start_ns, table.end_ns, end)
        fetch_ns -= _measure_time_before(table.start_ns, table.end_ns, begin)
    needed = np.maximum(fetch_ns / count - (end - begin - waited), 0.0)
    saved = np.clip(1.0 - needed / np.maximum(waited, 1), 0.0, 1.0)
    saved[fetch_ns > MAX_BUSY_RATIO * count * (end - begin)] = 0.0
    row = np.searchsorted(waits.start_ns, t_ns, side="right") - 1
    wait_row = np.maximum(row, 0)
    return np.where((row >= 0) & (t_ns <= waits.end_ns[wait_row]), saved[wait_row], zeros)


def count_live_workers(workers: Iterable[Process]) -> int:
    """Count the workers of a rank that lived at the same time, at most; 0 without workers.

    A loader without persistent workers starts new ones in every epoch.
    """
    lifetimes = _find_worker_lifetimes(workers)
    births = sorted(born_ns for born_ns, _ in lifetimes)
    deaths = sorted(died_ns for _, died_ns in lifetimes)
    return max(
        (index + 1 - bisect_left(deaths, born_ns) for index, born_ns in enumerate(births)),
        default=0,
    )


def _find_worker_lifetimes(workers: Iterable[Process]) -> list[tuple[int, int]]:
    """Return when each worker was first and last seen in this chunk, ns."""
    lifetimes = []
    for worker in workers:
        tables = [thread.t_ns for thread in worker.threads.values() if thread.t_ns.size]
        spans_ns = [(int(t_ns[0]), int(t_ns[-1])) for t_ns in tables]
        if (spans := select_fetches(worker)) is not None:
            spans_ns.append((int(spans.start_ns[0]), int(spans.end_ns[-1])))
        if not spans_ns:  # neither sampled nor fetching: nothing says that it has ended
            lifetimes.append((LONG_AGO_NS, -LONG_AGO_NS - 1))
            continue
        lifetimes.append((min(t for t, _ in spans_ns), max(t for _, t in spans_ns)))
    return lifetimes


def _find_prefetch_limit(rank: Rank) -> int:
    """Return the largest number of batches that a worker may have ready; 0 unknown."""
    starts = rank.main.get_spans(LoaderStartSpans)
    return 0 if starts is None else int(starts.prefetch_factor.max(initial=0))


def _measure_time_before(start_ns: Int, end_ns: Int, t_ns: Int) -> Int:
    """Measure how much time before each t lies in intervals (disjoint and sorted)."""
    before = np.concatenate([[0], np.cumsum(end_ns - start_ns)])
    row = np.searchsorted(start_ns, t_ns, side="right")
    over = np.where(row > 0, end_ns[np.maximum(row, 1) - 1] - t_ns, 0)
    return (before[row] - np.maximum(over, 0)).astype(np.int64)
