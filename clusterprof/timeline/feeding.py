"""What the critical thread did: the split of a data wait among the things that can hold it up.

A rank that waits for data waits for one thread: the worker that owns the awaited batch, or its own
main thread when it loads itself. Laid beside that thread's time, every part of the wait is one of

    no worker     before the worker's loop began
    in a fetch    split as that fetch was: CPU, runnable, blocked on what (`feeding_fetch`)
    no work       between two fetches, before the awaited batch was ready: prefetch ran dry
    delivery      after the fetch that made the awaited batch had ended, less what the worker's
                  interpreter was busy with: computing or faulting pages in for its next batch

    main    |---------------- wait for worker 1 ----------------|
    worker 1   started   |==== fetch ====|   |=== fetch ===|
            |no worker|nw| in a fetch    |nw | in a fetch  |del.|

Intervals outside any data wait, and ranks without spans, are told by thread samples alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline import feeding_fetch, intervals
from clusterprof.timeline import feeding_shares as kinds
from clusterprof.timeline.feeding_blocked import Surroundings, surroundings
from clusterprof.timeline.feeding_samples import busiest, sampled
from clusterprof.timeline.feeding_unmeasured import filled
from clusterprof.timeline.feeding_waits import began_ns, distinct, fetches_of, ready_ns, waits_of
from clusterprof.timeline.model import Feeding, Float, Int, Process, Rank, SpanTable
from clusterprof.timeline.traced import loading_shares

Fetches = dict[int, tuple[SpanTable, Float]]
_HOLDING = (kinds.USER_CPU, kinds.RUNNABLE, kinds.MEMORY)
"""What a thread does with the interpreter in its hands; reads let it go."""


def feed(rank: Rank, start_ns: Int, end_ns: Int) -> Feeding:
    """Return for each interval, sorted by start, what the critical thread did, in shares.

    int64[n] in, float64[n] out; the eleven shares of a row are not negative and sum to 1. The
    length of an interval that is empty has no split: all of it is unknown.
    """
    start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    around = surroundings(rank.chunk)
    seen = loading_shares(rank, start, end)
    if seen is not None:
        return _traced(rank, seen)
    if not rank.marked:
        table, pids = busiest(rank, start, end, around)
        return _feeding(table, np.zeros(len(start), np.bool_), pids)
    waits = waits_of(rank)
    parts = intervals.overlaps((start, end), (waits.start_ns, waits.end_ns))
    table_ns = kinds.empty(len(start))
    fetches = _split_fetches(rank, around)
    owner = waits.pid[parts.interval]
    for pid in distinct(owner):
        (rows,) = (owner == pid).nonzero()
        of = parts.interval[rows]
        part_ns = _part(
            rank, pid, fetches, around,
            (parts.start_ns[rows], parts.end_ns[rows]), (waits.start_ns[of], waits.end_ns[of]),
        )  # fmt: skip
        kinds.add_rows(table_ns, parts.piece[rows], part_ns)
    inside, longest = _inside(len(start), parts)
    _add_outside(table_ns, rank, start, end, inside, around)
    in_wait = 2 * inside > end - start
    pids = np.full(len(start), rank.pid, np.int64)
    identified = np.zeros(len(start), np.bool_)
    pids[in_wait] = owner[longest[in_wait]]
    identified[in_wait] = waits.identified[parts.interval[longest[in_wait]]] & (pids[in_wait] > 0)
    table = kinds.shares(table_ns, end - start)
    pids[table[:, kinds.UNKNOWN] >= 1.0] = 0
    return _feeding(table, identified & (pids > 0), pids)


def _traced(rank: Rank, seen: dict[str, Float]) -> Feeding:
    """What a tracer saw; reads from nobody knows where are told apart by nobody."""
    known = {"user_cpu": seen["computing"], "block_io": seen["local"],
             "remote_io": seen["network"], "socket": seen["object"]}  # fmt: skip
    n = len(seen["computing"])
    table = np.zeros((n, len(kinds.NAMES)))
    for name, share in known.items():
        table[:, kinds.NAMES.index(name)] = share
    table[:, kinds.UNKNOWN] = 1.0 - table.sum(axis=1)
    return _feeding(table, np.ones(n, np.bool_), np.full(n, rank.pid, np.int64))


def _feeding(table: Float, identified: NDArray[np.bool_], pids: Int) -> Feeding:
    columns = {name: table[:, column] for column, name in enumerate(kinds.NAMES)}
    return Feeding(**columns, identified=identified, worker_pid=pids)


def _split_fetches(rank: Rank, around: Surroundings) -> Fetches:
    """The fetches of every process that feeds this rank, and the shares of each fetch."""
    found = {}
    for process in (rank.main, *rank.workers):
        spans = fetches_of(process)
        if spans is not None:
            thread = process.threads.get(process.pid)
            found[process.pid] = feeding_fetch.measured(filled(spans, process), thread, around)
    if not found:
        return {}
    pool = feeding_fetch.pooled(list(found.values()))
    read_bytes = float(sum(int(np.maximum(f.spans.d, 0).sum()) for f in found.values()))
    return {
        pid: (f.spans, feeding_fetch.decomposed(f, pool, read_bytes, around))
        for pid, f in found.items()
    }


def _part(
    rank: Rank,
    pid: int,
    fetches: Fetches,
    around: Surroundings,
    part: intervals.Pair,
    wait: intervals.Pair,
) -> Float:
    """ns[m, 11] of parts of waits that all waited for one process."""
    process = rank.chunk.processes.get(pid)
    if process is None:
        table, _ = busiest(rank, *part, around)
        return table * (part[1] - part[0])[:, None]
    if pid == rank.pid:
        return _own_loading(process, fetches.get(pid), around, part)
    return _worker_loading(process, fetches.get(pid), around, part, wait)


def _worker_loading(
    process: Process,
    fetched: tuple[SpanTable, Float] | None,
    around: Surroundings,
    part: intervals.Pair,
    wait: intervals.Pair,
) -> Float:
    start, end = part
    table = kinds.empty(len(start))
    begin = np.minimum(np.maximum(began_ns(process), start), end)
    table[:, kinds.NO_WORKER] = begin - start
    if fetched is None:
        return table + sampled(process, begin, end, around) * (end - begin)[:, None]
    spans, split = fetched
    ready, certain = ready_ns(spans, *wait)
    until = np.minimum(np.maximum(ready, begin), end)
    table[:, kinds.DELIVERY] = np.where(certain, end - until, 0)
    # One interpreter for both: while the worker makes the next batch it hands over none.
    held = kinds.empty(len(start))
    _add_fetches(held, spans, split, (np.where(certain, until, end), end))
    for column in _HOLDING:
        table[:, column] += held[:, column]
        table[:, kinds.DELIVERY] -= held[:, column]
    covered = _add_fetches(table, spans, split, (begin, until))
    # Between two fetches the worker had nothing to do. When the fetch that ended the wait is not
    # in the recording, what looks like that is a hole in it.
    table[:, kinds.NO_WORK] = np.where(certain, until - begin - covered, 0)
    return table


def _own_loading(
    process: Process,
    fetched: tuple[SpanTable, Float] | None,
    around: Surroundings,
    part: intervals.Pair,
) -> Float:
    """The main thread loads: outside its fetches it runs the sampler, collates or pins memory."""
    table = kinds.empty(len(part[0]))
    if fetched is None:
        return table + sampled(process, *part, around) * (part[1] - part[0])[:, None]
    covered = _add_fetches(table, *fetched, part)
    table[:, kinds.USER_CPU] += part[1] - part[0] - covered
    return table


def _add_fetches(table: Float, spans: SpanTable, split: Float, part: intervals.Pair) -> Int:
    """Add to each part what the fetches inside it did; return the ns they cover."""
    found = intervals.overlaps(part, (spans.start_ns, spans.end_ns))
    inside = found.end_ns - found.start_ns
    kinds.add_rows(table, found.piece, split[found.interval] * inside[:, None])
    return np.bincount(found.piece, inside, minlength=len(table)).astype(np.int64)


def _add_outside(
    table_ns: Float, rank: Rank, start: Int, end: Int, inside: Int, around: Surroundings
) -> None:
    """Outside data waits the main thread is critical: it launches the device's work."""
    rows = np.flatnonzero(end - start > inside)
    if rows.size:
        left = (end - start - inside)[rows]
        table_ns[rows] += sampled(rank.main, start[rows], end[rows], around) * left[:, None]


def _inside(n: int, parts: intervals.Overlaps) -> tuple[Int, Int]:
    """For each interval its time in waits, and the row of its longest part in one."""
    length = parts.end_ns - parts.start_ns
    inside, longest = np.zeros(n, np.int64), np.zeros(n, np.int64)
    if (parts.piece[1:] > parts.piece[:-1]).all():  # of one wait each
        inside[parts.piece] = length
        longest[parts.piece] = np.arange(len(length))
        return inside, longest
    np.add.at(inside, parts.piece, length)
    order = np.lexsort((length, parts.piece))
    longest[parts.piece[order]] = order
    return inside, longest
