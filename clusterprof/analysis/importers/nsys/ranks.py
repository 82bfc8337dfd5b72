"""Training processes of a profile with their devices, reduced to what is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clusterprof.analysis.importers.core.device_timeline import (
    NO_INTERVALS,
    CoverageIndex,
    Int,
    Intervals,
    OperationSequence,
    compute_exposed_ns,
    extend_waited_gaps,
    find_exposed_copies,
    find_gaps,
    find_late_launches,
    merge_intervals,
    subtract_intervals,
    trim_copy_calls,
)
from clusterprof.analysis.importers.core.host_activity import (
    NO_HOST_WORK,
    SYNC,
    HostCalls,
    HostWork,
    build_host_activity,
)
from clusterprof.analysis.importers.nsys.activities import (
    COPY,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    KERNEL,
    Activities,
    CudaCalls,
    LoadingTime,
    NvtxSteps,
    ThreadRanges,
    decode_pid,
    decode_process,
    find_launches,
    find_steps,
    select_host_copies,
)
from clusterprof.analysis.importers.nsys.samples import HostSamples
from clusterprof.analysis.importers.nsys.stacks import ThreadStacks, build_thread_stacks

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
    steps: NvtxSteps | None
    starved: Intervals
    host_ns: tuple[Int, Int, Int, Int]
    """For each starved interval, int64[n] each, ns: launching, in calls that wait for the device,
    in allocating and freeing, in copies from the host.
    """
    host_work: HostWork
    """What the host did instead of launching in these intervals."""
    function_names: list[str]
    stacks: ThreadStacks
    """Stacks of the thread that launches most."""
    exposed_copies: tuple[Int, Int, Int, Int]
    """As `find_exposed_copies` returns them."""
    waits: Intervals
    loading: list[LoadingTime]
    syncs: Intervals
    copies: tuple[Int, Int, Int]
    """Start and end (ns) of the part of calls to the device that their copies explain, and bytes;
    int64[n] each.
    """
    operations: list[StreamOperations] = field(default_factory=list)


def split_ranks(
    activities: Activities,
    calls: CudaCalls,
    threads: dict[int, ThreadRanges],
    loading: dict[int, LoadingTime],
    busy: dict[int, Intervals],
    samples: HostSamples,
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
            part = _build_rank_activity(
                selected, process_calls, ranges, loading, busy[device], samples
            )
            part.pid, part.device = (decode_pid(process) or 1) + (index << 24), device
            parts.append(part)
    return sorted(parts, key=lambda part: (part.device, part.pid))


def _build_rank_activity(
    activities: Activities,
    calls: CudaCalls,
    threads: dict[int, ThreadRanges],
    loading: dict[int, LoadingTime],
    busy: Intervals,
    samples: HostSamples,
) -> RankActivity:
    launched = find_launches(activities, calls)
    is_launched = launched >= 0
    tids, times = np.unique(calls.thread[launched[is_launched]], return_counts=True)
    launching = tids[times >= _MIN_LAUNCH_SHARE * max(int(times.sum()), 1)].tolist()
    launchers = [tid for tid in threads if tid in launching]
    main = int(tids[times.argmax()]) if tids.size else None
    launches_ns = calls.start_ns[launched[is_launched]]
    steps = find_steps([threads[tid] for tid in launchers] or list(threads.values()), launches_ns)
    from_ns, until_ns = int(activities.start_ns.min()), int(activities.end_ns.max())
    waits = _merge_unions([threads[tid].waits() for tid in launchers])
    order = np.argsort(activities.start_ns, kind="stable")
    launching_calls = calls.of(np.flatnonzero(np.isin(calls.thread, launching)))
    copies, residues = _trim_copies(activities, launched, calls)
    last_ns = steps.end_ns if steps is not None else np.array([until_ns])
    copies_out = _find_blocking_copies_out(activities, launched, calls)
    syncs = _merge_unions([_merge_calls_of_kind(launching_calls, SYNC), copies_out, residues])
    activity = build_host_activity(
        _list_host_calls(launching_calls),
        (copies[:2], copies_out),
        residues,
        NO_HOST_WORK,
        last_ns,
        {tid: threads[tid].operators.all() for tid in launchers},
        samples.of_thread(main),
    )
    first_ns = from_ns if steps is None else min(from_ns, int(steps.start_ns[0]))
    late_gaps = _find_late_gaps(
        find_gaps(busy, first_ns, until_ns), activities, order, launched, calls, activity.sync
    )
    starved = subtract_intervals(late_gaps, waits)
    covers = (activity.launching, activity.sync, activity.memory, activity.copy)
    return RankActivity(
        pid=0,
        device=0,
        rank=None,
        world=None,
        from_ns=from_ns,
        until_ns=until_ns,
        steps=steps,
        starved=starved,
        host_ns=tuple(cover.covered_within(*starved) for cover in covers),  # type: ignore[arg-type]
        host_work=activity.work.within(*starved),
        function_names=samples.names,
        stacks=_build_stacks(main, threads, samples, steps, (from_ns, until_ns)),
        exposed_copies=_find_exposed_copies(activities, waits),
        waits=waits,
        loading=[loading[tid] for tid in launchers if tid in loading],
        syncs=syncs,
        copies=copies,
        operations=_list_operations(activities),
    )


def _list_host_calls(calls: CudaCalls) -> HostCalls:
    return HostCalls(calls.start_ns, calls.end_ns, calls.kind, calls.thread)


def _build_stacks(
    main: int | None,
    threads: dict[int, ThreadRanges],
    samples: HostSamples,
    steps: NvtxSteps | None,
    window: tuple[int, int],
) -> ThreadStacks:
    """Build the stacks of the thread that launches most, from the first step to the last.

    window: from the first to the last activity of the device, ns.
    """
    if steps is not None:
        window = (min(window[0], int(steps.start_ns[0])), max(window[1], int(steps.end_ns[-1])))
    ranges = None if main is None else threads.get(main)
    return build_thread_stacks(ranges, samples.frames, samples.times_of_thread(main), window)


def _trim_copies(
    activities: Activities, launched: Int, calls: CudaCalls
) -> tuple[tuple[Int, Int, Int], Intervals]:
    """Return calls that copy to the device, as far as their copies explain them, and the rest.

    The calls are starts and ends (ns) and bytes, int64[n] each.
    """
    rows = select_host_copies(activities, launched, calls)
    start, end = calls.start_ns[launched[rows]], calls.end_ns[launched[rows]]
    copying_ns = activities.end_ns[rows] - activities.start_ns[rows]
    own_start = trim_copy_calls(start, end, copying_ns, activities.bytes[rows])
    return (own_start, end, activities.bytes[rows]), merge_intervals(start, own_start)


def _find_blocking_copies_out(activities: Activities, launched: Int, calls: CudaCalls) -> Intervals:
    """Find the calls that copy from the device and returned only after it: they wait for it."""
    rows = select_host_copies(activities, launched, calls, DEVICE_TO_HOST)
    rows = rows[calls.end_ns[launched[rows]] >= activities.end_ns[rows]]
    return merge_intervals(calls.start_ns[launched[rows]], calls.end_ns[launched[rows]])


def _find_exposed_copies(activities: Activities, waits: Intervals) -> tuple[Int, Int, Int, Int]:
    """Find the time in which the device only copied from or to its host, outside data waits."""
    copying = (activities.kind == COPY) & np.isin(
        activities.detail, (HOST_TO_DEVICE, DEVICE_TO_HOST)
    )
    other_work = merge_intervals(activities.start_ns[~copying], activities.end_ns[~copying])
    return find_exposed_copies(
        activities.start_ns[copying],
        activities.end_ns[copying],
        activities.bytes[copying],
        activities.detail[copying] == HOST_TO_DEVICE,
        _merge_unions([other_work, waits]),
    )


def _find_late_gaps(
    idle: Intervals,
    activities: Activities,
    order: Int,
    launched: Int,
    calls: CudaCalls,
    sync: CoverageIndex,
) -> Intervals:
    """Find the gaps in which the device had nothing to do because of late launches.

    order: the rows of its activities by start. sync: waits of the host for the device.
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
    late_until = extend_waited_gaps(idle[0], late_until, idle[1], sync)
    return idle[0][is_late], late_until[is_late]


def _merge_calls_of_kind(calls: CudaCalls, kind: int) -> Intervals:
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
