"""What the host of a device was doing, each instant once: launching, waiting, loading, …

What comes first in this list has the instants that several could have:

    loading      kernels and libraries, contexts, capture of graphs: happens once
    sync         calls that wait for the device
    memory       calls that allocate or free memory
    copy         copies between host and device that block the host
    launching    launching calls, operators with such calls, and pauses of up to a millisecond
    functions    Python functions, where the trace has stacks
    operators    operators and ranges that launch nothing

Operators and functions of the model that launch nothing are overhead of launching only where the
host soon launches again. In a long stretch without any call into the device runtime it computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.importers.core.device_timeline import (
    LONG_LAUNCH_NS,
    MIN_LOAD_NS,
    NO_INTERVALS,
    CoverageIndex,
    Int,
    Intervals,
    find_launching,
    merge_intervals,
    subtract_intervals,
)
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.timeline import intervals
from clusterprof.probe import layout

# Calls of the host into the device runtime: a call that can launch work, that waits for the
# device, that allocates or frees memory, that copies, that pins memory of the host, that loads
# code, captures a graph or creates something (all of which happen once), and any other call.
LAUNCH, SYNC, ALLOC, FREE, COPY_CALL, LOAD, PIN, CAPTURE, END_CAPTURE, CREATE, CALL = range(8, 19)
_SYNC = re.compile(r"Synchronize|\bsynchronize|zeEventHostSync|urQueueFinish|urEventWait$")
_ALLOC = re.compile(
    r"Malloc|MemAlloc|MemCreate|MemMap|MemSetAccess|MemAddressReserve|USM\w*Alloc", re.IGNORECASE
)
_PIN = re.compile(r"HostAlloc|HostRegister|HostMalloc|MallocHost|AllocHost")
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
    r"|CallConfiguration"
)


MAX_NAMES = 64
"""Number of functions named per process: those with the most time."""
NAME_CHARACTERS = 120
MIN_WORK_NS = 10_000
"""Shortest part of a gap that gets a `host_work` span, ns."""
_MIN_EARLY_RATIO = 0.6
_FIRST_LAUNCHES = 10
"""Launches of a trace in which the process still makes its first use of the device: a training step
has hundreds.
"""
MAX_OVERHEAD_NS = 20_000_000
"""Longest stretch in ns without a call into the device runtime that is overhead of launching:
Python hooks of a large model need 5 to 10 ms, an operator 5 to 100 us.
"""


def label_runtime_call(name: str) -> int:
    """Label a call of the host into the device runtime by its name: `SYNC`, `LAUNCH`, …"""
    if _SYNC.search(name):
        return SYNC
    if _COPY.search(name):
        return COPY_CALL
    if _PIN.search(name):
        return PIN
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
        is_long = inside.end_ns - inside.start_ns >= MIN_WORK_NS
        row = inside.interval[is_long]
        return HostWork(
            inside.start_ns[is_long], inside.end_ns[is_long], self.activity[row], self.name[row]
        )


NO_HOST_WORK = HostWork(*(np.zeros(0, np.int64) for _ in range(4)))


@dataclass(frozen=True, slots=True)
class LaunchActivity:
    """Activity of the threads that launch work, as covered time; disjoint."""

    launching: CoverageIndex
    sync: CoverageIndex
    memory: CoverageIndex
    copy: CoverageIndex
    loading: CoverageIndex
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
    operators: Mapping[int, Intervals],
    samples: HostWork = NO_HOST_WORK,
    ranges: HostWork = NO_HOST_WORK,
) -> LaunchActivity:
    """Build the activity of the host of one device.

    copies: blocking copies to the device, and from it, which wait for the device. residues: parts
    of copy calls that their copies do not explain: such a call waits for the device. steps_end_ns:
    int64[n], ends of the steps. operators: thread -> times inside its operators, disjoint.
    samples: in which function a sampler saw the host; everything else goes first. ranges: those
    that the program marked itself: they name the time of which nothing else is known.
    """
    loading = _find_loading(calls, steps_end_ns)
    sync = subtract_intervals(_join([calls.of(SYNC), copies[1], residues]), loading)
    counted = _join([loading, sync])
    memory = []
    for kind in (FREE, ALLOC, PIN):
        memory.append(subtract_intervals(merge_intervals(*calls.of(kind)), counted))
        counted = _join([counted, memory[-1]])
    copy = subtract_intervals(merge_intervals(*copies[0]), counted)
    counted = _join([counted, copy])
    start, end = calls.of(COPY_CALL)
    short = end - start < LONG_LAUNCH_NS
    launches = _join([calls.of(LAUNCH), (start[short], end[short])])
    launching_operators, other_operators = _split_operators(calls, operators)
    launching = find_launching(*_join([launches, launching_operators]))
    launching = subtract_intervals(launching, counted)
    counted = _join([counted, launching])
    functions = _remove_times(functions, counted)
    other_operators = subtract_intervals(
        other_operators, _join([counted, (functions.start, functions.end)])
    )
    named_intervals = (loading, layout.WARMING_UP), *zip(memory, _MEMORY_ACTIVITIES)
    work = _join_work([*named_intervals, (other_operators, layout.RUNNING_MODEL)], functions)
    work = overlay_work(work, _remove_times(samples, counted))
    return LaunchActivity(
        CoverageIndex(*launching),
        CoverageIndex(*sync),
        CoverageIndex(*_join(memory)),
        CoverageIndex(*copy),
        CoverageIndex(*loading),
        overlay_work(_mark_computation(work, counted), _remove_times(ranges, counted)),
    )


_MEMORY_ACTIVITIES = (layout.FREEING_MEMORY, layout.ALLOCATING_MEMORY, layout.PINNING_MEMORY)


def _mark_computation(work: HostWork, calls: Intervals) -> HostWork:
    """Return the work with model code in long stretches without calls as computation of the host.

    calls: times in calls into the device runtime, and launching. A stretch ends where a call
    begins, or a function that is not of the model.
    """
    if not work.start.size:
        return work
    in_model = np.isin(work.activity, (layout.RUNNING_MODEL, layout.COMPUTING_ON_HOST))
    bounds = _join([calls, (work.start[~in_model], work.end[~in_model])])
    before = np.searchsorted(bounds[1], work.start, side="right")
    after = np.searchsorted(bounds[0], work.end)
    stretch_ns = np.append(bounds[0], work.end[-1])[after]  # the host's records end with it
    stretch_ns -= np.append(work.start[0], bounds[1])[before]
    computing = in_model & (stretch_ns > MAX_OVERHEAD_NS)
    activity = np.where(computing, layout.COMPUTING_ON_HOST, work.activity)
    return HostWork(work.start, work.end, activity, work.name)


def _split_operators(
    calls: HostCalls, operators: Mapping[int, Intervals]
) -> tuple[Intervals, Intervals]:
    """Split the operators of threads that launch work: those with a launch in them, and the rest.

    Operators of other threads hold no device up.
    """
    parts: tuple[list[Intervals], list[Intervals]] = ([NO_INTERVALS], [NO_INTERVALS])
    is_launch = np.isin(calls.kind, (LAUNCH, COPY_CALL))
    for thread, (start, end) in operators.items():
        launches = calls.start[is_launch & (calls.thread == thread)]
        if launches.size:
            launched = np.searchsorted(launches, end) > np.searchsorted(launches, start)
            parts[0].append((start[launched], end[launched]))
            parts[1].append((start[~launched], end[~launched]))
    return _join(parts[0]), _join(parts[1])


def _find_loading(calls: HostCalls, steps_end_ns: Int) -> Intervals:
    """Find the times of what happens once: loading calls, captures, and slow calls of first use.

    A slow launch loads its kernel. A slow call that allocates, frees or pins memory shows nothing
    of that kind, except before the first launches of the trace: it creates the context or sets a
    library up, whatever it asks for (`cudaFree(0)`).
    """
    start, end = calls.of(LOAD)
    long_enough = end - start >= MIN_LOAD_NS
    parts = [(start[long_enough], end[long_enough])]
    for thread in np.unique(calls.thread[calls.kind == CAPTURE]).tolist():
        on_thread = calls.thread == thread
        begins = calls.start[on_thread & (calls.kind == CAPTURE)]
        ends = calls.end[on_thread & (calls.kind == END_CAPTURE)]
        end_row = np.searchsorted(ends, begins)
        closed = end_row < ends.size
        parts.append((begins[closed], ends[end_row[closed]]))
    launches = calls.of(LAUNCH)[0]
    for kind in (LAUNCH, ALLOC, FREE, PIN, CREATE):
        start, end = calls.of(kind)
        slow = end - start >= LONG_LAUNCH_NS
        if kind in (ALLOC, FREE, PIN):
            slow &= np.searchsorted(launches, start) < _FIRST_LAUNCHES
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
        until = int(launches[launches.size // 2]) if launches.size > 1 else int(end[-1])
    early = start < until
    total_ns = int((end - start).sum())
    if int((end - start)[early].sum()) < _MIN_EARLY_RATIO * total_ns:
        early[:] = False
    return start[early], end[early]


def _remove_times(work: HostWork, removed: Intervals) -> HostWork:
    """Return the work without what lies in the intervals."""
    start, end = subtract_intervals((work.start, work.end), removed)
    row = np.searchsorted(work.start, start, side="right") - 1
    return HostWork(start, end, work.activity[row], work.name[row])


def overlay_work(work: HostWork, other: HostWork) -> HostWork:
    """Return the work, and that of another source where it shows nothing."""
    return _join_work([], work, _remove_times(other, (work.start, work.end)))


def _join_work(named_intervals: Sequence[tuple[Intervals, int]], *named: HostWork) -> HostWork:
    """Join disjoint work: intervals and their activity, and work with names."""
    parts = [
        (*times, *np.full((2, times[0].size), [[kind], [-1]])) for times, kind in named_intervals
    ]
    parts += [(work.start, work.end, work.activity, work.name) for work in named]
    columns = [np.concatenate(column) for column in zip(*parts)]
    order = np.argsort(columns[0], kind="stable")
    return HostWork(*(column[order] for column in columns))


def _join(sets: Sequence[Intervals]) -> Intervals:
    """Join several interval sets into one union: two int64[n], ns."""
    merged = intervals.merge_intervals(*sets)
    return merged.start_ns, merged.end_ns


def add_host_work(
    node: NodeTables, pid: int, parts: Sequence[HostWork], names: Sequence[str]
) -> None:
    """Add what the host did instead of launching, and names of the functions with most of it."""
    start, end, activity, name = (
        np.concatenate([getattr(part, column) for part in parts])
        for column in ("start", "end", "activity", "name")
    )
    amount_ns = np.bincount(name + 1, end - start, minlength=len(names) + 1)[1:]
    listed = np.argsort(-amount_ns, kind="stable")[: min(MAX_NAMES, int((amount_ns > 0).sum()))]
    number = np.full(len(names) + 1, -1, np.int64)
    number[listed] = np.arange(listed.size)
    node.add_spans(
        pid, layout.HOST_WORK, start, end, activity, number[name]
    )  # -1 takes the last, -1
    node.add_host_functions(pid, [_shorten_name(names[row]) for row in listed.tolist()])


def _shorten_name(name: str) -> str:
    """Shorten the name of a function to its file's last folder: `src/data.py(9): load`."""
    path, separator, function = name.rpartition("(")
    path = "/".join(path.split("/")[-2:])
    return f"{path}{separator}{function}"[:NAME_CHARACTERS]
