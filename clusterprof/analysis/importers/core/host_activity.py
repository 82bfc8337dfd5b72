"""What the host of a device was doing, each instant once: launching, waiting, loading, …

What comes first in this list has the instants that several could have:

    loading      kernels and libraries, contexts, capture of graphs: happens once
    sync         calls that wait for the device
    memory       calls that allocate or free memory
    copy         copies between host and device that block the host
    launching    launching calls, and pauses of up to a millisecond between two of them
    functions    Python functions, where the trace has stacks
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.importers.core.device_timeline import (
    LONG_LAUNCH_NS,
    MIN_LOAD_NS,
    CoverageIndex,
    Int,
    Intervals,
    find_launching,
    merge_intervals,
    subtract_intervals,
)
from clusterprof.analysis.timeline import intervals
from clusterprof.probe import layout

# Calls of the host into the device runtime: a call that can launch work, that waits for the
# device, that allocates or frees memory, that copies, that loads code, captures a graph or creates
# something (all of which happen once), and any other call.
LAUNCH, SYNC, ALLOC, FREE, COPY_CALL, LOAD, CAPTURE, END_CAPTURE, CREATE, CALL = range(8, 18)
_SYNC = re.compile(r"Synchronize|\bsynchronize|zeEventHostSync|urQueueFinish|urEventWait$")
_ALLOC = re.compile(
    r"Malloc|MemAlloc|MemCreate|MemMap|MemSetAccess|MemAddressReserve|HostAlloc|HostRegister"
    r"|USM\w*Alloc",
    re.IGNORECASE,
)
_FREE = re.compile(
    r"(?:cuda|hip|cu)Free|MemFree|HostFree|MemRelease|MemUnmap|USMFree|HostUnregister|PoolTrimTo",
    re.IGNORECASE,
)
_LOAD = re.compile(
    r"Module(?:Load|GetFunction|Create)|Library(?:Load|Get)|KernelGetFunction|cuLink[A-Z]|nvrtc"
    r"|(?:Ctx|Context)Create|PrimaryCtxRetain|(?:cu|hip|ze|cudaDevice)Init|Func(?:Get|Set)Attribute"
    r"|GraphInstantiate|GraphUpload|RegisterFatBinary"
)
_CAPTURE = re.compile(r"(Begin|End)Capture")
_COPY = re.compile(r"Memcpy|MemCopy", re.IGNORECASE)
_NO_LAUNCH = re.compile(
    r"Get|Set[A-Z]|Query|Occupancy|Captur|Record|WaitEvent|Create|Destroy|Register|Attribute|Info"
)


MIN_WORK_NS = 10_000
"""Shortest part of a gap that gets a `host_work` span, ns."""
_MIN_EARLY_RATIO = 0.6


def label_runtime_call(name: str) -> int:
    """Label a call of the host into the device runtime by its name: `SYNC`, `LAUNCH`, …"""
    if _SYNC.search(name):
        return SYNC
    if _COPY.search(name):
        return COPY_CALL
    if _ALLOC.search(name):
        return ALLOC
    if _FREE.search(name):
        return FREE
    if _LOAD.search(name):
        return LOAD
    if capture := _CAPTURE.search(name):
        return CAPTURE if capture[1] == "Begin" else END_CAPTURE
    if _NO_LAUNCH.search(name):
        return CREATE if "Create" in name else CALL
    return LAUNCH


@dataclass(frozen=True, slots=True)
class HostWork:
    """What the host did instead of launching: n rows, sorted and disjoint, times in ns."""

    start: Int
    end: Int
    activity: Int
    """`layout.WARMING_UP` and others."""
    name: Int
    """Row of the function's name; -1 if none is known."""

    def within(self, start: Int, end: Int) -> HostWork:
        """Return the parts inside disjoint, sorted times, int64[m] each, ns."""
        inside = intervals.find_overlaps((start, end), (self.start, self.end))
        kept = inside.end_ns - inside.start_ns >= MIN_WORK_NS
        row = inside.interval[kept]
        return HostWork(
            inside.start_ns[kept], inside.end_ns[kept], self.activity[row], self.name[row]
        )


NO_HOST_WORK = HostWork(*(np.zeros(0, np.int64) for _ in range(4)))


@dataclass(frozen=True, slots=True)
class HostActivity:
    """Activity of the threads that launch work, as covered time; disjoint."""

    launching: CoverageIndex
    sync: CoverageIndex
    memory: CoverageIndex
    copy: CoverageIndex
    work: HostWork


@dataclass(frozen=True, slots=True)
class HostCalls:
    """Calls of one process into the device runtime, sorted by start; n rows, times in ns."""

    start: Int
    end: Int
    kind: Int
    thread: Int

    def of(self, *kinds: int) -> Intervals:
        """Return starts and ends of the calls of some kinds, int64[m], ns."""
        which = np.isin(self.kind, kinds)
        return self.start[which], self.end[which]


def build_host_activity(
    calls: HostCalls,
    copies: tuple[Intervals, Intervals],
    residues: Intervals,
    functions: HostWork,
    steps_end_ns: Int,
) -> HostActivity:
    """Build the activity of the host of one device.

    copies: blocking copies to the device, and from it, which wait for the device. residues: parts
    of copy calls that their copies do not explain: such a call waits for the device. steps_end_ns:
    int64[n], ends of the steps.
    """
    loading = _find_loading(calls, steps_end_ns)
    waits = [calls.of(SYNC), copies[1], residues]
    sync = subtract_intervals(_join(waits), loading)
    counted = _join([loading, sync])
    free = subtract_intervals(merge_intervals(*calls.of(FREE)), counted)
    counted = _join([counted, free])
    alloc = subtract_intervals(merge_intervals(*calls.of(ALLOC)), counted)
    counted = _join([counted, alloc])
    copy = subtract_intervals(merge_intervals(*copies[0]), counted)
    counted = _join([counted, copy])
    start, end = calls.of(COPY_CALL)
    short = end - start < LONG_LAUNCH_NS
    launches = _join([calls.of(LAUNCH), (start[short], end[short])])
    launching = subtract_intervals(find_launching(*launches), counted)
    counted = _join([counted, launching])
    return HostActivity(
        CoverageIndex(*launching),
        CoverageIndex(*sync),
        CoverageIndex(*_join([free, alloc])),
        CoverageIndex(*copy),
        _join_work(loading, free, functions, counted),
    )


def _find_loading(calls: HostCalls, steps_end_ns: Int) -> Intervals:
    """Find the times of what happens once: loading calls, captures, and slow calls of first use.

    The first call of a process creates the context, whatever it asks for (`cudaFree(0)`).
    """
    start, end = calls.of(LOAD)
    long_enough = end - start >= MIN_LOAD_NS
    parts = [(start[long_enough], end[long_enough])]
    for thread in np.unique(calls.thread[calls.kind == CAPTURE]).tolist():
        own = calls.thread == thread
        begins = calls.start[own & (calls.kind == CAPTURE)]
        ends = calls.end[own & (calls.kind == END_CAPTURE)]
        at = np.searchsorted(ends, begins)
        closed = at < ends.size
        parts.append((begins[closed], ends[at[closed]]))
    launches = calls.of(LAUNCH)[0]
    for kind in (LAUNCH, ALLOC, FREE, CREATE):
        start, end = calls.of(kind)
        slow = end - start >= LONG_LAUNCH_NS
        parts.append(_select_early(start[slow], end[slow], launches, steps_end_ns))
    return _join(parts)


def _select_early(start: Int, end: Int, launches: Int, steps_end_ns: Int) -> Intervals:
    """Select the calls at the beginning, if most of the time in such calls lies there.

    The beginning is the first of several steps, else the first half of all launches. launches:
    int64[n], ns.
    """
    if not start.size:
        return start, end
    if steps_end_ns.size > 1:
        until = int(steps_end_ns[0])
    else:
        until = int(launches[launches.size // 2]) if launches.size else int(end[-1])
    early = start < until
    total_ns = int((end - start).sum())
    if int((end - start)[early].sum()) < _MIN_EARLY_RATIO * total_ns:
        early[:] = False
    return start[early], end[early]


def _join_work(
    loading: Intervals, free: Intervals, functions: HostWork, counted: Intervals
) -> HostWork:
    """Join what is reported by itself: loading, freeing, and functions at all other times."""
    start, end = subtract_intervals((functions.start, functions.end), counted)
    row = np.searchsorted(functions.start, start, side="right") - 1
    parts = (
        (*loading, np.full(loading[0].size, layout.WARMING_UP), np.full(loading[0].size, -1)),
        (*free, np.full(free[0].size, layout.FREEING_MEMORY), np.full(free[0].size, -1)),
        (start, end, functions.activity[row], functions.name[row]),
    )
    columns = [np.concatenate(column) for column in zip(*parts)]
    order = np.argsort(columns[0], kind="stable")
    return HostWork(*(column[order] for column in columns))


def _join(sets: Sequence[Intervals]) -> Intervals:
    """Join several interval sets into one union: two int64[n], ns."""
    merged = intervals.merge_intervals(*sets)
    return merged.start_ns, merged.end_ns
