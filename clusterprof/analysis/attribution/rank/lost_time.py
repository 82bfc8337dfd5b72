"""Find where device time was lost: disjoint intervals per rank and segment.

A recording arrives in chunks, and time can be settled only after every span and sample
that covers it has ended. So each rank carries a state, find_settled_segments
finds the segments that are settled now, and measure_lost_intervals divides a
settled segment into lost intervals. Segments end at sample times and step ends, which
are edges anyway: one chunk or many give the same intervals.

    device samples   |----------|----------|     idle 30 and 0 of 100
    host             wait 40 | step 60 ...
    intervals        [0, 40) wait, 30 lost       never longer than the span

Place idle time in a host's wait at its end, because the device first drains its queue.

A device executes its queue in order. While its host waits for data, copies or collects
garbage, nothing is added; once the device is idle in the wait, it stays idle until the
wait ends:

    host      |------ wait 67 ------|-- launches --
    device    ==== queue ====|  idle 20  |== work
    lost                     |--- 20 ---|              not 20 spread over the 67

This decides which of several sample windows idle time belongs to: the beginning of a
wait that continues in the next window was idle only if all of it was idle there. Of
several waits in one window, the longer ones had an idle device: the queue is assumed to
last equally long for all.

    waits of 137 and 37 in a window that was idle for 22    22 and 0
    waits of 40 and 30 in a window that was idle for 20     15 and 5: 25 queued

Read exposed time from stream events: how long a device was idle in a wait of its host.

In a wait for data the device was idle for a part of it, which is the end of the wait. A
collective's exposed time lies where analysis.timeline.collectives.operations placed it and is lost
in
full; where it overlaps a wait for data, the part of that wait moves to what is left of
it.

    host       |---- wait for data 40, exposed 10 ----|
    device     |-- operation 20 --|
    lost       |------- 20 -------|-------- 10 -------|
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.rank.chunk_boundary import (
    LOOKAHEAD_NS,
    WHOLE_RUN,
    RankState,
    Segment,
    Selection,
    find_settled_segments,
    get_spans,
    trim_to_selection,
    with_selection_bounds,
)
from clusterprof.analysis.attribution.rank.device_activity import (
    NO_ACTIVITY,
    DeviceActivity,
    DeviceWindows,
    build_device_windows,
    detect_busy_wait,
    trim_windows,
)
from clusterprof.analysis.attribution.rank.host_phases import (
    FILL_ORDER,
    HostPhases,
    allocate_by_phase,
    find_step_numbers,
    split_host_phases,
)
from clusterprof.analysis.attribution.rank.phase_shares import PhaseShares, allocate_by_shares
from clusterprof.analysis.attribution.rank.utilization import UtilizationSums, sum_utilization
from clusterprof.analysis.detectors.base import measure_device_sync
from clusterprof.analysis.timeline.collectives.operations import DeviceWaits, find_device_waits
from clusterprof.analysis.timeline.intervals import EMPTY, merge_intervals
from clusterprof.analysis.timeline.load.ranks import parse_identity
from clusterprof.analysis.timeline.model import (
    PHASE_BUSY_WAIT,
    PHASE_CHECKPOINT,
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_COPY,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    PHASE_GC,
    PHASE_H2D,
    PHASE_HIDDEN_COLLECTIVE,
    PHASE_LOCK,
    PHASE_NONE,
    PHASE_STARTUP,
    PHASE_SUSPECTED_BUSY_WAIT,
    PHASE_THROTTLED,
    SOURCE_DEVICE_SAMPLES,
    SOURCE_HOST_SPANS,
    SOURCE_STREAM_EVENTS,
    Int,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.series import (
    compute_column_increase,
    compute_growth,
    evaluate_increase,
    locate_intervals,
)
from clusterprof.analysis.timeline.spans import ExposedSpans
from clusterprof.probe import layout

STARVING_PHASES = {PHASE_H2D: layout.H2D, PHASE_DATA_WAIT: layout.DATA_WAIT, PHASE_GC: layout.GC}
"""Phases in which a host gives its device no work, and the kind of spans behind each."""
MAX_PAUSE_NS = 100_000
"""Waits that follow each other within this time count as one: nothing is launched in
between, ns.
"""
WHOLE_RATIO = 0.95
"""This part of an interval counts as all of it: busy time is reported in small steps."""


def allocate_idle_time(
    rank: Rank,
    phases: HostPhases,
    all_windows: DeviceWindows,
    windows: DeviceWindows,
    room_ns: Int,
    idle_ns: Int,
    known: PhaseShares,
) -> tuple[Int, PhaseShares]:
    """Allocate the idle time of each window to the rows in it: int64[n], ns, at most the room.

    all_windows: includes the windows before and after those of the segment. room_ns:
    int64[n], upper limit per row. idle_ns: int64[windows]. known: idle share of each phase so
    far; its update is returned too.
    """
    window, phase = phases.window, phases.phase
    asleep_ns = _measure_unknown_sleep(rank, phases, windows)
    (rows,) = _IS_STARVING[phase].nonzero()
    if not rows.size:
        return allocate_by_shares(window, phase, room_ns, idle_ns, known, asleep_ns)
    starving = phases.rows(rows)
    start_ns, end_ns = _find_launch_gaps(rank, starving)
    begins = np.zeros(phase.size, np.bool_)
    begins[rows] = _has_queued_work(end_ns, starving, all_windows, windows)
    open_ns = np.where(begins, 0, room_ns)
    idle, known = allocate_by_shares(window, phase, open_ns, idle_ns, known, asleep_ns)
    if begins.any():
        left = idle_ns - np.bincount(window, idle, minlength=idle_ns.size).astype(np.int64)
        if left.any():  # there is no other place for it
            idle += allocate_by_phase(window, phase, room_ns - idle, left, FILL_ORDER)
    room_ns = np.where(begins, idle, room_ns)
    idle[rows] = allocate_by_wait_age(
        window[rows], starving.end_ns - start_ns, room_ns[rows], idle[rows]
    )
    return idle, known


_CODES = np.arange(PHASE_LOCK + 1)
_IS_STARVING = np.isin(_CODES, tuple(STARVING_PHASES))
_IS_ASLEEP = np.isin(_CODES, (PHASE_DATA_WAIT, PHASE_COLLECTIVE, PHASE_LOCK, PHASE_CHECKPOINT))
"""Whether the main thread sleeps in each phase, bool[phases]."""


def _measure_unknown_sleep(rank: Rank, phases: HostPhases, windows: DeviceWindows) -> Int | None:
    """Measure how long the main thread slept outside its known waits in each window.

    int64[windows], ns; None if its threads were not sampled.
    """
    thread = rank.main.threads.get(rank.pid)
    if thread is None or len(thread.t_ns) < 2:
        return None
    waited = np.where(_IS_ASLEEP[phases.phase], phases.end_ns - phases.start_ns, 0)
    positions = locate_intervals(thread.t_ns, windows.start_ns, windows.end_ns)
    active = sum(
        evaluate_increase(compute_growth(column), positions)
        for column in (thread.on_cpu_ns, thread.run_delay_ns)
    )
    asleep = windows.end_ns - windows.start_ns - _sum_by_window(windows, phases.window, waited)
    return np.maximum(np.nan_to_num(asleep - active), 0.0).astype(np.int64)


def allocate_by_wait_age(group: Int, age_ns: Int, room_ns: Int, amount_ns: Int) -> Int:
    """Redistribute the amounts of each group's rows: max(0, age - q), as far as there is room.

    age_ns: int64[n], how long the wait of a row had lasted at its end. q, the duration of
    the queue, is chosen so that each group keeps its sum. Rows of one group are contiguous.
    room_ns, amount_ns: int64[n]. Returns int64[n], ns.
    """
    undecided = _find_undecided_rows(group, room_ns, amount_ns)
    if not undecided.size:
        return amount_ns
    group, age_ns, room_ns = group[undecided], age_ns[undecided], room_ns[undecided]
    starts = np.append(True, group[1:] != group[:-1])
    heads, group_of_row = np.flatnonzero(starts), np.cumsum(starts) - 1
    total = np.add.reduceat(amount_ns[undecided], heads)

    def allocate(queued_ns: Int) -> Int:
        return np.minimum(np.maximum(age_ns - queued_ns[group_of_row], 0), room_ns)

    low, high = np.full(heads.size, -1), np.maximum.reduceat(age_ns, heads)
    while (high - low > 1).any():  # the smallest q of which no more than the sum is left
        middle = (low + high) >> 1
        fits = np.add.reduceat(allocate(middle), heads) <= total
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    part = allocate(high)
    more = allocate(high - 1) > part  # one nanosecond each, from the first row on
    before: Int = np.cumsum(more) - more
    missing = total - np.add.reduceat(part, heads)
    out = amount_ns.copy()
    out[undecided] = part + (more & (before - before[heads][group_of_row] < missing[group_of_row]))
    return out


def _find_undecided_rows(group: Int, room_ns: Int, amount_ns: Int) -> Int:
    """Return the rows of groups of several rows that are neither empty nor full."""
    starts = np.append(True, group[1:] != group[:-1])
    heads = np.flatnonzero(starts)
    amount, room = np.add.reduceat(amount_ns, heads), np.add.reduceat(room_ns, heads)
    several = np.diff(np.append(heads, group.size)) > 1
    doubt = several & (amount > 0) & (amount < room)
    return np.flatnonzero(doubt[np.cumsum(starts) - 1])


def shift_to_wait_end(lost: LostTime) -> LostTime:
    """Return the intervals with those of starving waits reduced to the lost time at their end."""
    starving = _IS_STARVING[lost.phase]
    return replace(lost, start_ns=np.where(starving, lost.end_ns - lost.lost_ns, lost.start_ns))


def _find_launch_gaps(rank: Rank, rows: HostPhases) -> tuple[Int, Int]:
    """Return start and end of the interval without launches that contains each row."""
    tables = [
        table for kind in STARVING_PHASES.values() if (table := get_spans(rank, kind)) is not None
    ]
    start = np.concatenate([table.start_ns for table in tables])
    end = np.concatenate([table.end_ns for table in tables])
    start, end = merge_intervals((start, end + MAX_PAUSE_NS))
    at = np.maximum(np.searchsorted(start, rows.start_ns, side="right") - 1, 0)
    return start[at], end[at] - MAX_PAUSE_NS


def _has_queued_work(
    end_ns: Int, rows: HostPhases, all_windows: DeviceWindows, windows: DeviceWindows
) -> NDArray[np.bool_]:
    """Return whether each row's wait continues after its window with the device at work."""
    after = windows.end_ns[rows.window]
    until = np.minimum(end_ns, after + LOOKAHEAD_NS)
    idle = _compute_idle_before(all_windows, until) - _compute_idle_before(all_windows, after)
    result: NDArray[np.bool_] = (until > after) & (idle < WHOLE_RATIO * (until - after))
    return result


def _compute_idle_before(all_windows: DeviceWindows, t_ns: Int) -> Int:
    """Return the maximum idle time before each time, from the first window on."""
    before = np.concatenate([[0], np.cumsum(all_windows.idle_ns)])
    row = np.searchsorted(all_windows.start_ns, t_ns, side="right") - 1
    at = np.maximum(row, 0)
    inside = np.minimum(all_windows.idle_ns[at], t_ns - all_windows.start_ns[at])
    return np.where(row >= 0, before[at] + inside, 0)


@dataclass(frozen=True, slots=True)
class ExposedTime:
    """Exposed time of each host-phase row; n rows."""

    lost_ns: Int
    measured: NDArray[np.bool_]
    """True where stream events measured the row, even if the result is 0."""
    idle_ns: Int
    """Part of the lost time that device samples show as idle, ns. The rest looks like work to
    them: while ranks wait for each other, their devices run the operation.
    """


def has_exposed_times(rank: Rank) -> bool:
    """Return whether any wait of this rank was measured by stream events."""
    kinds = (layout.EXPOSED, layout.EXPOSED_COLLECTIVE, layout.EXPOSED_COPY)
    return any(get_spans(rank, kind) is not None for kind in kinds)


def measure_exposed_time(rank: Rank, phases: HostPhases) -> ExposedTime:
    """Return the exposed time of each host-phase row from stream events."""
    waits = find_device_waits(rank.main)
    lost_ns, measured = _measure_data_waits(rank, phases, waits)
    length = phases.end_ns - phases.start_ns
    idle_ns = lost_ns
    if get_spans(rank, layout.EXPOSED_COPY) is not None:  # samples show a copy as work
        copying = phases.phase == PHASE_COPY
        lost_ns, idle_ns = np.where(copying, length, lost_ns), np.where(copying, 0, lost_ns)
        measured = measured | copying
    if waits is None:
        return ExposedTime(lost_ns, measured, idle_ns)
    wait = waits.find_rows(phases.start_ns, phases.end_ns)
    inside = wait >= 0
    # While the host itself was blocked, it gave the device no work.
    blocked_ns = np.clip(waits.blocked_until_ns[wait] - phases.start_ns, 0, length)
    return ExposedTime(
        np.where(inside, length, lost_ns), measured | inside, np.where(inside, blocked_ns, idle_ns)
    )


def _measure_data_waits(
    rank: Rank, phases: HostPhases, waits: DeviceWaits | None
) -> tuple[Int, NDArray[np.bool_]]:
    """Return exposed time of each row, and whether the row lies in a measured wait.

    A measured amount lies at the end of its own wait, outside operations
    (analysis.attribution.rank.lost_time), so that a row's part does not depend on which other rows
    are
    evaluated.
    """
    none = np.zeros(phases.start_ns.size, np.int64)
    exposed = rank.main.get_spans(ExposedSpans)
    if exposed is None or not exposed.start_ns.size:
        return none, none.astype(bool)
    order = np.argsort(exposed.start_ns, kind="stable")
    start, end, amount = (
        column[order] for column in (exposed.start_ns, exposed.end_ns, exposed.device_ns)
    )
    row = np.maximum(np.searchsorted(start, phases.start_ns, side="right") - 1, 0)
    inside = (phases.start_ns >= start[row]) & (phases.end_ns <= end[row])
    length = phases.end_ns - phases.start_ns
    first, last, begin, until = start, end, phases.start_ns, phases.end_ns
    if waits is not None:  # time in operations does not count
        first, last, begin, until = (
            t - waits.measure_before(t) for t in (first, last, begin, until)
        )
    idle_from = (last - np.clip(amount, 0, np.maximum(last - first, 0)))[row]
    part = np.maximum(until, idle_from) - np.maximum(begin, idle_from)
    return np.where(inside, np.clip(part, 0, length), 0).astype(np.int64), inside


# Without a device these host waits count in full, as an upper bound.
_HOST_PHASES = (
    PHASE_STARTUP,
    PHASE_CHECKPOINT,
    PHASE_H2D,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_LOCK,
    PHASE_COLLECTIVE,
)
# Where a device that busy-waited is assumed to have done so: after the host issued a collective.
_BUSY_WAIT_ORDER = (
    PHASE_COLLECTIVE,
    PHASE_HIDDEN_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_NONE,
    PHASE_H2D,
    PHASE_GC,
    PHASE_LOCK,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    PHASE_CHECKPOINT,
    PHASE_STARTUP,
)


NO_LOST_TIME = LostTime(*(np.zeros(0, np.int64) for _ in range(6)))

MAX_SEGMENT_NS = 7_200_000_000_000
"""Limit of a segment's length, ns: a longer one (a step of hours) is settled in parts,
because its time multiplied by 2**20 would overflow int64.
"""


@dataclass(frozen=True, slots=True)
class SegmentAccount:
    """Totals of one segment: its length - `unmeasured_ns` is time in steps."""

    unmeasured_ns: int
    measured_ns: int
    """Time with device samples."""
    idle_ns: int
    """Part of `measured_ns` without work on the device."""
    stream_intervals: int
    """Number of intervals whose loss was measured by stream events."""
    utilization: UtilizationSums = field(default_factory=dict)
    """Utilization of the device while it was busy (analysis.attribution.rank.utilization)."""
    windows: tuple[Int, Int, Int] | None = None
    """Start, length and idle time of each window between two samples, int64[n] each, ns; None
    without a device.
    """
    unobserved_ns: int = 0
    """Time without a device outside known waits, in which the main thread was not sampled, ns."""
    outside_selection_ns: int = 0
    """Time outside the selected part of the run (analysis.attribution.rank.chunk_boundary), ns."""


def find_lost_intervals(
    rank: Rank, state: RankState, last: bool = False, selection: Selection = WHOLE_RUN
) -> tuple[tuple[tuple[Segment, LostTime, SegmentAccount], ...], RankState]:
    """Find the segments that can be settled now, with their lost intervals.

    Time before the first step and after the last one is outside the steps and has no
    intervals; nor has time outside the selection. Also returns the next state.
    last: settle everything up to the end of the last step or wait.
    """
    ready, next_state = find_settled_segments(rank, state, last)
    next_state = with_selection_bounds(rank, next_state, selection)
    settled, activity = [], state.activity
    for whole in (piece for ready_segment in ready for piece in _split_segment(ready_segment)):
        segment = trim_to_selection(rank, whole, next_state, selection)
        outside_ns = whole.end_ns - whole.start_ns - (segment.end_ns - segment.start_ns)
        if segment.end_ns == segment.start_ns:
            settled.append(
                (segment, NO_LOST_TIME, SegmentAccount(0, 0, 0, 0, outside_selection_ns=outside_ns))
            )
            continue
        lost, account, activity = measure_lost_intervals(rank, segment, activity)
        settled.append((segment, lost, replace(account, outside_selection_ns=outside_ns)))
    return tuple(settled), replace(next_state, activity=activity)


def _split_segment(segment: Segment) -> Iterator[Segment]:
    """Yield a segment in parts whose time, in fixed-point shares of ns, fits well into int64."""
    for start_ns in range(
        segment.start_ns, max(segment.end_ns, segment.start_ns + 1), MAX_SEGMENT_NS
    ):
        yield replace(
            segment, start_ns=start_ns, end_ns=min(start_ns + MAX_SEGMENT_NS, segment.end_ns)
        )


def measure_lost_intervals(
    rank: Rank, segment: Segment, activity: DeviceActivity = NO_ACTIVITY
) -> tuple[LostTime, SegmentAccount, DeviceActivity]:
    """Divide a settled segment into lost intervals, from the best available source."""
    all_windows = build_device_windows(rank) if rank.device else None
    if all_windows is None:
        unmeasured = segment.end_ns - segment.start_ns if rank.device or not rank.marked else 0
        phases = split_host_phases(rank, segment.start_ns, segment.end_ns, EMPTY)
        if unmeasured:
            return _build_lost(rank, phases, []), SegmentAccount(unmeasured, 0, 0, 0), activity
        return *_measure_from_host(rank, phases), activity
    windows = trim_windows(all_windows, segment.start_ns, segment.end_ns)
    busy_wait_ns, suspected_ns = np.zeros((2, windows.start_ns.size), np.int64)
    if (parse_identity(rank.main.registration).world_size or 1) > 1:
        busy_wait_ns, suspected_ns, activity = detect_busy_wait(rank, windows, activity)
        if layout.EXPOSED_COLLECTIVE in rank.main.spans:  # device events measure these waits better
            busy_wait_ns[:] = 0
        if layout.COLLECTIVE in rank.main.spans:
            suspected_ns[:] = 0
    not_idle = busy_wait_ns, suspected_ns
    lost, account, shares = _measure_from_samples(
        rank, segment, all_windows, windows, not_idle, activity.phase_shares
    )
    return lost, account, replace(activity, phase_shares=shares)


def _measure_from_host(rank: Rank, phases: HostPhases) -> tuple[LostTime, SegmentAccount]:
    """Use stream events where a wait has them, otherwise the full wait.

    Outside any known wait the time in which the host slept counts, so that the sum is an upper
    bound. Where the host was not sampled, no bound is known.
    """
    events = measure_exposed_time(rank, phases)
    in_full = np.isin(phases.phase, _HOST_PHASES) & ~events.measured
    length = phases.end_ns - phases.start_ns
    outside = ~in_full & ~events.measured
    asleep_ns, sampled = _measure_sleep(rank, phases)
    parts = [
        (events.lost_ns, SOURCE_STREAM_EVENTS),
        (np.where(in_full, length, 0), SOURCE_HOST_SPANS),
        (np.where(outside, asleep_ns, 0), SOURCE_HOST_SPANS),
    ]
    lost = shift_to_wait_end(_build_lost(rank, phases, parts))
    unobserved_ns = int(length[outside & ~sampled].sum())
    measured = int(np.count_nonzero(events.measured))
    return lost, SegmentAccount(0, 0, 0, measured, unobserved_ns=unobserved_ns)


def _measure_sleep(rank: Rank, phases: HostPhases) -> tuple[Int, NDArray[np.bool_]]:
    """Measure how long the main thread slept in each row: int64[n], ns; and if it was sampled.

    Marked waits for the device do not count: the device worked meanwhile. Nor does waiting for a
    CPU, which `analysis.attribution.rank.time_spent` takes from the work. 0 where the thread was
    not sampled, bool[n].
    """
    length = phases.end_ns - phases.start_ns
    thread = rank.main.threads.get(rank.pid)
    if thread is None or len(thread.t_ns) < 2:
        return np.zeros(length.size, np.int64), np.zeros(length.size, np.bool_)
    on_cpu_ns, delay_ns = (
        compute_column_increase(thread.t_ns, column, phases.start_ns, phases.end_ns)
        for column in (thread.on_cpu_ns, thread.run_delay_ns)
    )
    synced_ns = measure_device_sync(rank, phases.start_ns, phases.end_ns)
    asleep_ns = np.nan_to_num(length - on_cpu_ns) - np.nan_to_num(delay_ns) - synced_ns
    return np.clip(np.rint(asleep_ns), 0, length).astype(np.int64), ~np.isnan(on_cpu_ns)


def _measure_from_samples(
    rank: Rank,
    segment: Segment,
    all_windows: DeviceWindows,
    windows: DeviceWindows,
    not_idle: tuple[Int, Int],
    shares: PhaseShares,
) -> tuple[LostTime, SegmentAccount, PhaseShares]:
    busy_wait_ns, suspected_ns = not_idle
    phases = split_host_phases(
        rank, segment.start_ns, segment.end_ns, (windows.start_ns, windows.end_ns)
    )
    inside = phases.measured
    if not inside.all():
        phases = phases.rows(inside.nonzero()[0])
    window, phase, length = phases.window, phases.phase, phases.end_ns - phases.start_ns
    parts: list[tuple[Int, int]] = []
    rest, room, left = windows.idle_ns, length, length
    none = np.zeros(length.size, np.int64)
    stream_pieces, busy_lost, suspected = 0, none, none  # of the time that samples show as busy
    if has_exposed_times(rank):
        events = measure_exposed_time(rank, phases)
        known = np.bincount(window, weights=events.idle_ns, minlength=windows.start_ns.size)
        rest = np.maximum(windows.idle_ns - known, 0).astype(np.int64)
        room, left = np.where(events.measured, 0, length), length - events.lost_ns
        stream_pieces = int(np.count_nonzero(events.measured))
        parts.append((events.lost_ns, SOURCE_STREAM_EVENTS))
        busy_lost = np.maximum(events.lost_ns - events.idle_ns, 0)
    idle, shares = allocate_idle_time(rank, phases, all_windows, windows, room, rest, shares)
    lost = _build_lost(rank, phases, [*parts, (idle, SOURCE_DEVICE_SAMPLES)])
    tails = []
    if busy_wait_ns.any():
        busy_wait = allocate_by_phase(window, phase, left - idle, busy_wait_ns, _BUSY_WAIT_ORDER)
        left, busy_lost = left - busy_wait, busy_lost + busy_wait
        in_operation = (phase == PHASE_COLLECTIVE) | (phase == PHASE_HIDDEN_COLLECTIVE)
        tails.append((busy_wait, np.where(in_operation, PHASE_COLLECTIVE, PHASE_BUSY_WAIT)))
    if suspected_ns.any():
        busy_wait = allocate_by_phase(window, phase, left - idle, suspected_ns, _BUSY_WAIT_ORDER)
        left, suspected = left - busy_wait, busy_wait
        tails.append((busy_wait, np.full(busy_wait.size, PHASE_SUSPECTED_BUSY_WAIT, np.int64)))
    if windows.slowed_ns.any():
        slow = allocate_by_phase(window, phase, left - idle, windows.slowed_ns, FILL_ORDER[::-1])
        busy_lost = busy_lost + slow
        tails.append((slow, np.full(slow.size, PHASE_THROTTLED, np.int64)))
    if tails:
        lost = _append_busy_losses(rank, lost, phases, tails)
    lost = shift_to_wait_end(lost)
    measured_ns = int((windows.end_ns - windows.start_ns).sum())
    unmeasured = segment.end_ns - segment.start_ns - measured_ns
    not_work = (_sum_by_window(windows, window, ns) for ns in (busy_lost, suspected))
    utilization = sum_utilization(rank, all_windows, windows, *not_work)
    idle_ns = int(windows.idle_ns.sum())
    window_columns = (windows.start_ns, windows.end_ns - windows.start_ns, windows.idle_ns)
    account = SegmentAccount(
        unmeasured, measured_ns, idle_ns, stream_pieces, utilization, window_columns
    )
    return lost, account, shares


def _sum_by_window(windows: DeviceWindows, window: Int, ns: Int) -> Int:
    """Sum amounts of rows by the window that contains each row."""
    return np.bincount(window, ns, minlength=windows.start_ns.size).astype(np.int64)


def _build_lost(rank: Rank, phases: HostPhases, parts: list[tuple[Int, int]]) -> LostTime:
    """Return the rows with a loss; of two sources the first one that is not zero counts."""
    amount = parts[0][0] if parts else np.zeros(phases.start_ns.size, np.int64)
    for part, _ in parts[1:]:
        amount = np.where(amount == 0, part, amount)
    (rows,) = (amount > 0).nonzero()
    source = np.full(rows.size, parts[0][1] if len(parts) == 1 else 0, np.int64)
    for part, code in reversed(parts) if len(parts) > 1 else ():
        source[part[rows] > 0] = code
    kept = phases.rows(rows)
    steps = find_step_numbers(rank, kept.start_ns, kept.steps_begun)
    # Idle time there is the main thread's: it had not launched anything.
    phase = np.where(kept.phase == PHASE_HIDDEN_COLLECTIVE, PHASE_COMPUTE, kept.phase)
    return LostTime(kept.start_ns, kept.end_ns, amount[rows], phase, source, steps)


def _append_busy_losses(
    rank: Rank, lost: LostTime, phases: HostPhases, tails: list[tuple[Int, Int]]
) -> LostTime:
    """Place time lost on a busy device at the end of its row, so that intervals stay disjoint.

    tails: ns and phase of each row, the first ones at the very end.
    """
    end = phases.end_ns
    parts = []
    for ns, phase in tails:
        lossy = np.flatnonzero(ns > 0)
        rows = phases.rows(lossy)
        cut = end[lossy] - ns[lossy]
        step = find_step_numbers(rank, rows.start_ns, rows.steps_begun)
        parts.append((cut, end[lossy], ns[lossy], phase[lossy], step))
        end = end - ns
    at = np.searchsorted(phases.start_ns, lost.start_ns)
    parts.append((lost.start_ns, end[at], lost.lost_ns, lost.phase, lost.step))
    start, end, ns, phase, step = (np.concatenate(columns) for columns in zip(*parts))
    source = np.full(start.size, SOURCE_DEVICE_SAMPLES, np.int64)
    source[start.size - lost.source.size :] = lost.source
    order = np.argsort(start, kind="stable")
    return LostTime(*(column[order] for column in (start, end, ns, phase, source, step)))
