"""Host activity that holds up the device: data waits, device waits, blocking copies.

Steps of a trace: as the profiler marked them, else inferred.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.device_timeline import CoverageIndex, trim_copy_calls
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.kineto import classify
from clusterprof.analysis.importers.kineto.device_gaps import DeviceWork, RuntimeCalls
from clusterprof.analysis.importers.kineto.event_columns import Int, count_values, join_intervals
from clusterprof.probe import layout
from clusterprof.units import SECOND_NS

_SYNC_MERGE_NS = 5_000_000
"""Waits for the device closer than this many ns become one `sync` span, as in the probe."""
_UNCHANGED_KINDS = (
    (classify.OPTIMIZER, layout.OPTIMIZER, 0, 0),
    (classify.GC, layout.GC, -1, -1),
    (classify.COMPILE, layout.COMPILE, -1, 0),
)


@dataclass(frozen=True, slots=True)
class Marks:
    """Annotated ranges of a process, sorted by start. Times in ns."""

    start: Int
    end: Int
    kind: Int
    thread: Int
    number: Int

    def of_threads(self, is_selected: NDArray[np.bool_]) -> Marks:
        """Return the ranges of the selected threads.

        is_selected: bool, one per thread number.
        """
        keep = is_selected[self.thread]
        columns = (self.end, self.kind, self.thread, self.number)
        return Marks(self.start[keep], *(column[keep] for column in columns))

    def of(self, kind: int) -> tuple[Int, Int, Int]:
        """Return start and end (ns) and thread of the ranges of one kind, int64[n] each."""
        which = self.kind == kind
        return self.start[which], self.end[which], self.thread[which]


@dataclass(frozen=True, slots=True)
class BlockingCopies:
    """Copies during which the host waited, because the call returned only after them.
    n rows, times in ns.
    """

    start: Int
    """Start of the part of the call that its copy explains, ns."""
    end: Int
    bytes: Int
    to_device: NDArray[np.bool_]
    call_start: Int


@dataclass(frozen=True, slots=True)
class HostTimeline:
    """Host side of one process."""

    calls: RuntimeCalls
    marks: Marks
    copies: BlockingCopies | None

    def copies_in(self) -> tuple[Int, Int]:
        """Return starts and ends of blocking copies to the device, int64[n], ns."""
        return self._copies(True)

    def copies_out(self) -> tuple[Int, Int]:
        """Return starts and ends of blocking copies from the device, int64[n], ns.

        Each of them waits for all work before it.
        """
        return self._copies(False)

    def residues(self) -> tuple[Int, Int]:
        """Return the parts of calls that copies to the device do not explain, int64[n], ns."""
        if self.copies is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        which = self.copies.to_device & (self.copies.start > self.copies.call_start)
        return self.copies.call_start[which], self.copies.start[which]

    def _copies(self, to_device: bool) -> tuple[Int, Int]:
        if self.copies is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        which = self.copies.to_device == to_device
        return self.copies.start[which], self.copies.end[which]


def find_blocking_copies(work: DeviceWork, calls: RuntimeCalls) -> BlockingCopies:
    """Find the copies between host and device whose call returned only after they were done.

    The arrays of the result are int64[n] in ns and bytes, sorted by the start of the call.
    """
    rows = np.flatnonzero(
        np.isin(work.kind, (classify.COPY_IN, classify.COPY_OUT)) & (work.call >= 0)
    )
    call = work.call[rows]
    blocking = calls.ends(call) >= work.ends(rows)
    rows, call = rows[blocking], call[blocking]
    order = np.argsort(calls.start[call], kind="stable")
    rows, call = rows[order], call[order]
    start, end, size = calls.start[call], calls.ends(call), work.bytes_of(rows)
    to_device = work.kind[rows] == classify.COPY_IN
    own_start = trim_copy_calls(start, end, work.duration[rows].astype(np.int64), size)
    return BlockingCopies(np.where(to_device, own_start, start), end, size, to_device, start)


def add_host_spans(
    node: NodeTables,
    pid: int,
    host: HostTimeline,
    operators: dict[int, tuple[Int, Int]],
    steps: ProfilerSteps,
    account: Account,
) -> None:
    """Add the host spans of one process to the node.

    operators: thread -> starts and ends of its operators, int64[n] each, ns.
    """
    main = find_main_thread(host)
    window = int(steps.start[0]), int(steps.end[-1])
    _add_data_waits(node, pid, host.marks, main, operators, window, account)
    waits = (host.calls.of(classify.SYNC), host.copies_out(), host.residues())
    _add_device_syncs(node, pid, *(np.concatenate(side) for side in zip(*waits)))
    if host.copies is not None:
        to_device = host.copies.to_device
        copies = host.copies
        node.add_spans(
            pid,
            layout.H2D,
            copies.start[to_device],
            copies.end[to_device],
            copies.bytes[to_device],
            0,
        )
    _add_allocator_spans(node, pid, host.calls)
    for kind, span_kind, a, b in _UNCHANGED_KINDS:
        start, end, _ = host.marks.of(kind)
        if kind != classify.OPTIMIZER:
            start, end = join_intervals(start, end)
        node.add_spans(pid, span_kind, start, end, a, b)
    if host.copies is None:
        _count_host_collectives(host.marks, main, account)


def find_main_thread(host: HostTimeline) -> int:
    """Find the thread of the steps, else of the loader, else the one with most runtime calls."""
    for kind in (
        classify.STEP,
        classify.LOADER_WITHOUT_WORKERS,
        classify.LOADER_WITH_WORKERS,
        classify.OPTIMIZER,
    ):
        thread = host.marks.of(kind)[2]
        if thread.size:
            return int(count_values(thread).argmax())
    thread = host.calls.thread
    return int(count_values(thread).argmax()) if thread.size else -1


def _add_data_waits(
    node: NodeTables,
    pid: int,
    marks: Marks,
    main: int,
    operators: dict[int, tuple[Int, Int]],
    window: tuple[int, int],
    account: Account,
) -> None:
    """Add waits for data, and the loading work in those of a loader without worker processes.

    window: from the first to the last step, ns; a wait before or after them delays no step.
    """
    for kind, loader, workers in (
        (classify.LOADER_WITHOUT_WORKERS, 0, 0),
        (classify.LOADER_WITH_WORKERS, -1, -1),
    ):
        start, end, thread = marks.of(kind)
        on_main = thread == main
        if not on_main.all():
            account.skipped["waits for data outside the training thread"] += int(
                np.count_nonzero(~on_main)
            )
            start, end = start[on_main], end[on_main]
        start, end = np.maximum(start, window[0]), np.minimum(end, window[1])
        outside = end <= start
        if outside.any():
            account.skipped["waits for data outside the steps"] += int(np.count_nonzero(outside))
            start, end = start[~outside], end[~outside]
        node.add_spans(pid, layout.DATA_WAIT, start, end, -1, loader, workers, -1)
        account.read["waits for data"] += start.size
        if kind == classify.LOADER_WITHOUT_WORKERS and start.size and main in operators:
            computed = CoverageIndex(*operators[main]).covered_within(start, end)
            node.add_spans(pid, layout.LOADING, start, end, 0, computed, 0, 0)


def _add_device_syncs(node: NodeTables, pid: int, start: Int, end: Int) -> None:
    """Add waits for the device, merging those close together."""
    nonempty = end > start
    start, end = start[nonempty], end[nonempty]
    if not start.size:
        return
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.flatnonzero(np.concatenate([[True], start[1:] - reach[:-1] > _SYNC_MERGE_NS]))
    wait_ns = np.maximum(end - np.maximum(start, np.concatenate([[0], reach[:-1]])), 0)
    count = np.diff(np.append(opens, start.size))
    last = np.append(opens[1:], start.size) - 1
    ns = np.add.reduceat(wait_ns, opens)
    node.add_spans(pid, layout.SYNC, start[opens], reach[last], ns, count)


def _add_allocator_spans(node: NodeTables, pid: int, calls: RuntimeCalls) -> None:
    """Add the number of device memory allocations and frees in each second.

    A span reaches from the first to the last of them: nothing may lie outside the file's events.
    """
    pin_ends, free_ends = calls.of(classify.PIN)[1], calls.of(classify.FREE)[1]
    alloc_ends = np.concatenate([calls.of(classify.ALLOC)[1], pin_ends])
    if not alloc_ends.size and not free_ends.size:
        return
    ends = np.sort(np.concatenate([alloc_ends, free_ends]))
    seconds, first = np.unique(ends // SECOND_NS, return_index=True)
    mallocs = np.bincount(np.searchsorted(seconds, alloc_ends // SECOND_NS), minlength=seconds.size)
    frees = np.bincount(np.searchsorted(seconds, free_ends // SECOND_NS), minlength=seconds.size)
    last = np.append(first[1:], ends.size) - 1
    node.add_spans(pid, layout.ALLOCATOR, ends[first], ends[last], -1, mallocs, frees, 0)


def _count_host_collectives(marks: Marks, main: int, account: Account) -> None:
    """Count communication operations run by the host: only the main thread's can hold it up."""
    _, _, thread = marks.of(classify.HOST_COMM)
    on_other_threads = int(np.count_nonzero(thread != main))
    if on_other_threads:
        account.skipped["communication operations outside the training thread"] += on_other_threads
    if thread.size > on_other_threads:
        account.skipped["communication operations run by the host"] += (
            thread.size - on_other_threads
        )


_MIN_OPTIMIZER_STEPS = 3
_MIN_LATE_WORK_RATIO = 0.5  # of the time from the first to the last step


@dataclass(frozen=True, slots=True)
class ProfilerSteps:
    """Steps with start, end (ns) and number, int64[n] each; sorted, disjoint."""

    start: Int
    end: Int
    number: Int


def select_marked_steps(
    start: Int, end: Int, number: Int, account: Account
) -> ProfilerSteps | None:
    """Select the steps that the profiler marked; None if there are none.

    start, end: int64[n], ns. number: int64[n], -1 if unknown.
    """
    usable = np.flatnonzero((number >= 0) & (end > start))
    if not usable.size:
        return None
    order = usable[np.lexsort((-end[usable], start[usable]))]
    start, end, number = start[order], end[order], number[order]
    reach = np.concatenate([[start[0]], np.maximum.accumulate(end)[:-1]])
    keep = start >= reach
    nested = int(np.count_nonzero(~keep))
    if nested:
        account.skipped["steps nested in another"] += nested
    return ProfilerSteps(start[keep], end[keep], number[keep])


def extend_steps(steps: ProfilerSteps, work: DeviceWork, calls: RuntimeCalls) -> ProfilerSteps:
    """Extend each step to the end of the work launched in it, if the device is far behind.

    A host that only launches is done with its steps long before its device:

        host      | 1 | 2 | 3 |
        device        | work of 1 | work of 2 | work of 3 |
        steps     | 1             | 2         | 3         |
    """
    first, last = int(steps.start[0]), int(steps.end[-1])
    if not calls.start.size:
        return steps
    launched_ns = calls.start[np.maximum(work.call, 0)]
    inside = (work.call >= 0) & (launched_ns >= first) & (launched_ns <= last)
    work_end = (work.start[inside] + work.duration[inside]).astype(np.int64)
    if work_end.max(initial=last) - last < _MIN_LATE_WORK_RATIO * (last - first):
        return steps
    step = np.searchsorted(steps.start, launched_ns[inside], side="right") - 1
    end = steps.end.copy()
    np.maximum.at(end, step, work_end)
    end = np.maximum.accumulate(end)
    start = np.maximum(steps.start, np.append(steps.start[0], end[:-1]))
    return ProfilerSteps(start, np.maximum(end, start + 1), steps.number)


PROFILER_STEPS = (
    "profiler steps (ProfilerStep#)",
    "call profiler.step() in the training loop to see steps",
)
"""What marks the steps of a Kineto trace, and how to get them."""


def infer_steps(
    from_ns: int,
    until_ns: int,
    optimizers_end: Int,
    account: Account,
    missing: tuple[str, str] = PROFILER_STEPS,
) -> ProfilerSteps:
    """Infer unmarked steps from optimizer to optimizer, or treat everything as one step.

    from_ns, until_ns: ns. optimizers_end: int64[n], ns. missing: what would mark steps in this
    format, and how to get it.
    """
    inside = np.unique(optimizers_end[(optimizers_end > from_ns)])
    if inside.size >= _MIN_OPTIMIZER_STEPS:
        edges = np.concatenate([[from_ns], inside])
        edges[-1] = max(int(edges[-1]), until_ns)
        account.notes.append(
            f"the trace has no {missing[0]}: each step is assumed to end with the"
            " optimizer step; the first begins with the first work on the device"
        )
        return ProfilerSteps(edges[:-1], edges[1:], np.arange(1, edges.size))
    account.notes.append(
        f"the trace has no {missing[0]}: everything from the first to the last"
        f" work is treated as one step; {missing[1]}"
    )
    bounds = np.array([from_ns]), np.array([max(until_ns, from_ns + 1)])
    return ProfilerSteps(*bounds, np.array([1]))
