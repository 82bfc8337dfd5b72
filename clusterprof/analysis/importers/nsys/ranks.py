"""Training processes of a profile with their devices, reduced to what is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clusterprof.analysis.importers.core.device_timeline import (
    NO_INTERVALS,
    Int,
    Intervals,
    OperationSequence,
    compute_exposed_ns,
    find_gaps,
    find_late_launches,
    measure_overlap,
    merge_intervals,
    subtract_intervals,
)
from clusterprof.analysis.importers.nsys.activities import (
    COPY,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    KERNEL,
    Activities,
    Calls,
    LoadingTime,
    Steps,
    ThreadRanges,
    decode_pid,
    decode_process,
    find_launches,
    find_steps,
    select_host_copies,
)
from clusterprof.analysis.importers.nsys.database import ALLOC_CALL, SYNC_CALL

_MIN_WORK_SHARE = 0.01
"""Smallest share of its work that a process must do on a device to train on it."""
_MIN_LAUNCH_SHARE = 0.01


@dataclass(slots=True)
class StreamOperations:
    """Communication operations of one rank on one stream."""

    sequence: OperationSequence
    exposed_ns: Int


@dataclass(slots=True)
class RankActivity:
    """One process on one device."""

    pid: int
    """Made unique where a process has several devices."""
    device: int
    rank: int | None
    world: int | None
    from_ns: int
    until_ns: int
    steps: Steps | None
    starved: Intervals
    host_ns: tuple[Int, Int, Int, Int]
    """For each starved interval, int64[n] each, ns: in operators and launches, in calls that wait
    for the device, in allocating and freeing, in copies from the host.
    """
    waits: Intervals
    loading: list[LoadingTime]
    syncs: Intervals
    copies: tuple[Int, Int, Int]
    """Start and end (ns) of calls that copy to the device, and their bytes, int64[n] each."""
    operations: list[StreamOperations] = field(default_factory=list)


def split_ranks(
    activities: Activities,
    calls: Calls,
    threads: dict[int, ThreadRanges],
    loading: dict[int, LoadingTime],
    busy: dict[int, Intervals],
) -> list[RankActivity]:
    """Split the activities into training processes with their devices, by device and process.

    Intervals are int64[n] starts and ends in ns.
    """
    by_process = {process: [] for process in np.unique(activities.process).tolist()}  # type: dict[int, list[int]]
    work = activities.end_ns - activities.start_ns
    for process, devices in by_process.items():
        selected = activities.process == process
        work_ns = {
            d: int(work[selected & (activities.device == d)].sum())
            for d in np.unique(activities.device[selected]).tolist()
        }
        devices += [d for d, ns in work_ns.items() if ns >= _MIN_WORK_SHARE * sum(work_ns.values())]
    work_of = {process: int(work[activities.process == process].sum()) for process in by_process}
    parts = []
    for process, devices in by_process.items():
        if work_of[process] < _MIN_WORK_SHARE * max(work_of.values()):
            continue  # a helper that clears memory, or the driver's first calls: it does not train
        rows = np.flatnonzero(calls.process == process)
        process_calls = calls.of(rows)
        ranges = {tid: thread for tid, thread in threads.items() if decode_process(tid) == process}
        for index, device in enumerate(devices):
            selected = activities.of(
                np.flatnonzero((activities.process == process) & (activities.device == device))
            )
            part = _build_rank_activity(selected, process_calls, ranges, loading, busy[device])
            part.pid, part.device = (decode_pid(process) or 1) + (index << 24), device
            parts.append(part)
    return sorted(parts, key=lambda part: (part.device, part.pid))


def _build_rank_activity(
    activities: Activities,
    calls: Calls,
    threads: dict[int, ThreadRanges],
    loading: dict[int, LoadingTime],
    busy: Intervals,
) -> RankActivity:
    launched = find_launches(activities, calls)
    known = launched >= 0
    tids, times = np.unique(calls.thread[launched[known]], return_counts=True)
    launching = tids[times >= _MIN_LAUNCH_SHARE * max(int(times.sum()), 1)].tolist()
    own = [tid for tid in threads if tid in launching]
    steps = find_steps([threads[tid] for tid in own] or list(threads.values()))
    from_ns, until_ns = int(activities.start_ns.min()), int(activities.end_ns.max())
    waits = _merge_unions([threads[tid].waits() for tid in own])
    order = np.argsort(activities.start_ns, kind="stable")
    late_gaps = _find_late_gaps(
        find_gaps(busy, from_ns, until_ns), activities, order, launched, calls
    )
    starved = subtract_intervals(late_gaps, waits)
    copying, sizes = select_host_copies(activities, launched, calls)
    launching_calls = calls.of(np.flatnonzero(np.isin(calls.thread, launching)))
    return RankActivity(
        0,
        0,
        None,
        None,
        from_ns,
        until_ns,
        steps,
        starved,
        _measure_host_work(
            starved, launching_calls, calls.of(copying), [threads[tid] for tid in own]
        ),
        waits,
        [loading[tid] for tid in own if tid in loading],
        _merge_calls_of_kind(launching_calls, SYNC_CALL),
        (calls.start_ns[copying], calls.end_ns[copying], sizes),
        _list_operations(activities),
    )


def _find_late_gaps(
    idle: Intervals, activities: Activities, order: Int, launched: Int, calls: Calls
) -> Intervals:
    """Find the gaps in which the device had nothing to do because of late launches.

    order: the rows of its activities by start.
    """
    begins = activities.start_ns[order]
    position = np.minimum(begins.searchsorted(idle[1], side="left"), begins.size - 1)
    row = order[position]  # row of the activity that ends the gap
    call = np.where(begins[position] == idle[1], launched[row], -1)
    call_start, call_end = (
        np.where(call >= 0, times[call] if times.size else -1, -1)
        for times in (calls.start_ns, calls.end_ns)
    )
    blocking = (activities.kind[row] == COPY) & np.isin(
        activities.detail[row], (HOST_TO_DEVICE, DEVICE_TO_HOST)
    )
    is_late, late_until = find_late_launches(*idle, call_start, call_end, blocking)
    return idle[0][is_late], late_until[is_late]


def _measure_host_work(
    starved: Intervals, calls: Calls, copies: Calls, threads: list[ThreadRanges]
) -> tuple[Int, Int, Int, Int]:
    """Measure what launching threads did while the device was starved, each instant once."""
    waiting = _merge_calls_of_kind(calls, SYNC_CALL)
    allocating = subtract_intervals(_merge_calls_of_kind(calls, ALLOC_CALL), waiting)
    counted = _merge_unions([waiting, allocating])
    copying = subtract_intervals(merge_intervals(copies.start_ns, copies.end_ns), counted)
    counted = _merge_unions([counted, copying])
    launching = merge_intervals(calls.start_ns, calls.end_ns)
    operators = subtract_intervals(
        _merge_unions([launching, *(thread.operators.all() for thread in threads)]), counted
    )
    return (
        measure_overlap(*starved, operators),
        measure_overlap(*starved, waiting),
        measure_overlap(*starved, allocating),
        measure_overlap(*starved, copying),
    )


def _merge_calls_of_kind(calls: Calls, kind: int) -> Intervals:
    rows = calls.kind == kind
    return merge_intervals(calls.start_ns[rows], calls.end_ns[rows])


def _merge_unions(unions: list[Intervals]) -> Intervals:
    if not unions:
        return NO_INTERVALS
    return merge_intervals(
        *(np.concatenate([union_[side] for union_ in unions]) for side in (0, 1))
    )


def _list_operations(activities: Activities) -> list[StreamOperations]:
    """List the communication operations by stream; exposed is the time when nothing else ran."""
    rows = (activities.kind == KERNEL) & (activities.detail > 0)
    other_work = merge_intervals(activities.start_ns[~rows], activities.end_ns[~rows])
    operations = []
    for stream in np.unique(activities.stream[rows]).tolist():
        stream_work = activities.of(np.flatnonzero(rows & (activities.stream == stream)))
        stream_work = stream_work.of(np.argsort(stream_work.start_ns, kind="stable"))
        exposed_ns = compute_exposed_ns(stream_work.start_ns, stream_work.end_ns, other_work)
        operations.append(
            StreamOperations(
                OperationSequence(0, stream_work.start_ns, stream_work.end_ns, stream_work.detail),
                exposed_ns,
            )
        )
    return operations
