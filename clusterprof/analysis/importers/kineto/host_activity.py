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

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.importers.core.device_timeline import (
    LONG_LAUNCH_NS,
    MIN_LOAD_NS,
    Intervals,
    find_launching,
    merge_intervals,
    subtract_intervals,
)
from clusterprof.analysis.importers.kineto import classify
from clusterprof.analysis.importers.kineto.functions import ACTIVITIES, FunctionTimes
from clusterprof.analysis.importers.kineto.gather import CoverageIndex, Int, join_interval_sets
from clusterprof.analysis.timeline.intervals import find_overlaps
from clusterprof.probe import layout

MIN_WORK_NS = 10_000
"""Shortest part of a gap that gets a `host_work` span, ns."""
_MIN_EARLY_RATIO = 0.6


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
        inside = find_overlaps((start, end), (self.start, self.end))
        kept = inside.end_ns - inside.start_ns >= MIN_WORK_NS
        row = inside.interval[kept]
        return HostWork(
            inside.start_ns[kept], inside.end_ns[kept], self.activity[row], self.name[row]
        )


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
    functions: FunctionTimes,
    steps_end_ns: Int,
) -> HostActivity:
    """Build the activity of the host of one device.

    copies: blocking copies to the device, and from it, which wait for the device. residues: parts
    of copy calls that their copies do not explain. steps_end_ns: int64[n], ends of the steps.
    """
    loading = _find_loading(calls, residues, steps_end_ns)
    sync = subtract_intervals(join_interval_sets([calls.of(classify.SYNC), copies[1]]), loading)
    counted = join_interval_sets([loading, sync])
    free = subtract_intervals(merge_intervals(*calls.of(classify.FREE)), counted)
    counted = join_interval_sets([counted, free])
    alloc = subtract_intervals(merge_intervals(*calls.of(classify.ALLOC)), counted)
    counted = join_interval_sets([counted, alloc])
    copy = subtract_intervals(merge_intervals(*copies[0]), counted)
    counted = join_interval_sets([counted, copy])
    start, end = calls.of(classify.COPY_CALL)
    short = end - start < LONG_LAUNCH_NS
    launches = join_interval_sets([calls.of(classify.LAUNCH), (start[short], end[short])])
    launching = subtract_intervals(find_launching(*launches), counted)
    counted = join_interval_sets([counted, launching])
    return HostActivity(
        CoverageIndex(*launching),
        CoverageIndex(*sync),
        CoverageIndex(*join_interval_sets([free, alloc])),
        CoverageIndex(*copy),
        _join_work(loading, free, functions, counted),
    )


def _find_loading(calls: HostCalls, residues: Intervals, steps_end_ns: Int) -> Intervals:
    """Find the times of what happens once: loading calls, captures, launches that load first."""
    start, end = calls.of(classify.LOAD)
    long_enough = end - start >= MIN_LOAD_NS
    parts = [(start[long_enough], end[long_enough])]
    for thread in np.unique(calls.thread[calls.kind == classify.CAPTURE]).tolist():
        own = calls.thread == thread
        begins = calls.start[own & (calls.kind == classify.CAPTURE)]
        ends = calls.end[own & (calls.kind == classify.END_CAPTURE)]
        at = np.searchsorted(ends, begins)
        closed = at < ends.size
        parts.append((begins[closed], ends[at[closed]]))
    start, end = calls.of(classify.LAUNCH)
    slow = join_interval_sets([(start, end), residues])
    long_enough = slow[1] - slow[0] >= LONG_LAUNCH_NS
    parts.append(_select_early(slow[0][long_enough], slow[1][long_enough], start, steps_end_ns))
    return join_interval_sets(parts)


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
    loading: Intervals, free: Intervals, functions: FunctionTimes, counted: Intervals
) -> HostWork:
    """Join what is reported by itself: loading, freeing, and functions at all other times."""
    activity = np.array([ACTIVITIES.get(kind, 0) for kind in range(64)])[functions.kind]
    known = functions.select(activity > 0)
    outside = subtract_intervals((known.start, known.end), counted)
    row = np.maximum(np.searchsorted(known.start, outside[0], side="right") - 1, 0)
    parts = [
        (loading[0], loading[1], np.full(loading[0].size, layout.WARMING_UP), -1),
        (free[0], free[1], np.full(free[0].size, layout.FREEING_MEMORY), -1),
        (outside[0], outside[1], activity[activity > 0][row], known.name[row]),
    ]
    columns = [
        np.concatenate([np.broadcast_to(part[i], part[0].shape) for part in parts])
        for i in range(4)
    ]
    order = np.argsort(columns[0], kind="stable")
    return HostWork(*(column[order] for column in columns))
