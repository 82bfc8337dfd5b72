"""What one profile says of each training process and its device, reduced to what is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clusterprof.importers.collective_order import Side
from clusterprof.importers.device_gaps import (
    NONE,
    Int,
    Intervals,
    exposed,
    gaps,
    inside,
    late,
    union,
    without,
)
from clusterprof.importers.nsys.device import (
    COPY,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    KERNEL,
    Activities,
    Calls,
    copies_from_host,
    launches,
    pid_of,
)
from clusterprof.importers.nsys.host import Loading, Steps, Thread, process_of, steps_of
from clusterprof.importers.nsys.names import ALLOC_CALL, SYNC_CALL

_MINOR = 0.01
"""A process that did less than this part of its work on a device does not train on it."""
_LAUNCHES = 0.01


@dataclass(slots=True)
class Operations:
    """Operations of one rank on one stream."""

    side: Side
    exposed_ns: Int


@dataclass(slots=True)
class RankPart:
    """One process on one device."""

    pid: int
    """Made up where a process has several devices."""
    device: int
    rank: int | None
    world: int | None
    from_ns: int
    until_ns: int
    steps: Steps | None
    starved: Intervals
    host_ns: tuple[Int, Int, Int, Int]
    """Of each starved interval: in operators and launches, in calls that wait for the device, in
    allocating and freeing, in copies from the host."""
    waits: Intervals
    loading: list[Loading]
    syncs: Intervals
    copies: tuple[Int, Int, Int]
    """Start and end of calls that copy to the device, and their bytes."""
    operations: list[Operations] = field(default_factory=list)


def parts_of(
    some: Activities,
    calls: Calls,
    threads: dict[int, Thread],
    loading: dict[int, Loading],
    busy: dict[int, Intervals],
) -> list[RankPart]:
    """Return every training process with its device, by device and process."""
    by_process = {one: [] for one in np.unique(some.process).tolist()}  # type: dict[int, list[int]]
    work = some.end_ns - some.start_ns
    for process, devices in by_process.items():
        mine = some.process == process
        spent = {d: int(work[mine & (some.device == d)].sum())
                 for d in np.unique(some.device[mine]).tolist()}  # fmt: skip
        devices += [d for d, ns in spent.items() if ns >= _MINOR * sum(spent.values())]
    found = []
    for process, devices in by_process.items():
        rows = np.flatnonzero(calls.process == process)
        of_process = calls.of(rows)
        ranges = {tid: one for tid, one in threads.items() if process_of(tid) == process}
        for place, device in enumerate(devices):
            mine = some.of(np.flatnonzero((some.process == process) & (some.device == device)))
            part = _part(mine, of_process, ranges, loading, busy[device])
            part.pid, part.device = (pid_of(process) or 1) + (place << 24), device
            found.append(part)
    return sorted(found, key=lambda part: (part.device, part.pid))


def _part(
    mine: Activities,
    calls: Calls,
    threads: dict[int, Thread],
    loading: dict[int, Loading],
    busy: Intervals,
) -> RankPart:
    launched = launches(mine, calls)
    known = launched >= 0
    tids, times = np.unique(calls.thread[launched[known]], return_counts=True)
    launching = tids[times >= _LAUNCHES * max(int(times.sum()), 1)].tolist()
    own = [tid for tid in threads if tid in launching]
    steps = steps_of([threads[tid] for tid in own] or list(threads.values()))
    from_ns, until_ns = int(mine.start_ns.min()), int(mine.end_ns.max())
    waits = _together([threads[tid].waits() for tid in own])
    order = np.argsort(mine.start_ns, kind="stable")
    dry = _dry(gaps(busy, from_ns, until_ns), mine, order, launched, calls)
    hungry = without(dry, waits)
    copying, sizes = copies_from_host(mine, launched, calls)
    calls_now = calls.of(np.flatnonzero(np.isin(calls.thread, launching)))
    return RankPart(
        0, 0, None, None, from_ns, until_ns, steps, hungry,
        _host_work(hungry, calls_now, calls.of(copying), [threads[tid] for tid in own]),
        waits, [loading[tid] for tid in own if tid in loading], _of_kind(calls_now, SYNC_CALL),
        (calls.start_ns[copying], calls.end_ns[copying], sizes), _operations(mine),
    )  # fmt: skip


def _dry(idle: Intervals, mine: Activities, order: Int, launched: Int, calls: Calls) -> Intervals:
    """Return when a device had been given nothing to do; `order`: of its activities by start."""
    begins = mine.start_ns[order]
    place = np.minimum(begins.searchsorted(idle[1], side="left"), begins.size - 1)
    row = order[place]  # of the activity that ends the gap
    call = np.where(begins[place] == idle[1], launched[row], -1)
    begun, left = (
        np.where(call >= 0, one[call] if one.size else -1, -1)
        for one in (calls.start_ns, calls.end_ns)
    )
    held = (mine.kind[row] == COPY) & np.isin(mine.what[row], (HOST_TO_DEVICE, DEVICE_TO_HOST))
    which, until = late(*idle, begun, left, held)
    return idle[0][which], until[which]


def _host_work(
    hungry: Intervals, calls: Calls, copies: Calls, threads: list[Thread]
) -> tuple[Int, Int, Int, Int]:
    """What launching threads did while the device had nothing to do; no instant counts twice."""
    waiting = _of_kind(calls, SYNC_CALL)
    allocating = without(_of_kind(calls, ALLOC_CALL), waiting)
    taken = _together([waiting, allocating])
    copying = without(union(copies.start_ns, copies.end_ns), taken)
    taken = _together([taken, copying])
    launching = union(calls.start_ns, calls.end_ns)
    operators = without(_together([launching, *(one.operators.all() for one in threads)]), taken)
    return (
        inside(*hungry, operators), inside(*hungry, waiting),
        inside(*hungry, allocating), inside(*hungry, copying),
    )  # fmt: skip


def _of_kind(calls: Calls, kind: int) -> Intervals:
    rows = calls.kind == kind
    return union(calls.start_ns[rows], calls.end_ns[rows])


def _together(some: list[Intervals]) -> Intervals:
    if not some:
        return NONE
    return union(*(np.concatenate([one[at] for one in some]) for at in (0, 1)))


def _operations(mine: Activities) -> list[Operations]:
    """Operations with other ranks, by stream; exposed is when nothing else ran on the device."""
    rows = (mine.kind == KERNEL) & (mine.what > 0)
    rest = union(mine.start_ns[~rows], mine.end_ns[~rows])
    found = []
    for stream in np.unique(mine.stream[rows]).tolist():
        one = mine.of(np.flatnonzero(rows & (mine.stream == stream)))
        one = one.of(np.argsort(one.start_ns, kind="stable"))
        alone = exposed(one.start_ns, one.end_ns, rest)
        found.append(Operations(Side(0, one.start_ns, one.end_ns, one.what), alone))
    return found
