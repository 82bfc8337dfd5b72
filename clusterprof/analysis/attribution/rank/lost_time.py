"""Find where device time was lost: disjoint intervals per rank and segment.

A recording arrives in chunks, and time can be settled only after every span and sample
that covers it has ended. So each rank carries a state, find_settled_segments
finds the segments that are settled now, and measure_lost_intervals divides a
settled segment into lost intervals. Segments end at sample times and step ends, which
are edges anyway: one chunk or many give the same intervals.

    device samples   |----------|----------|     idle 30 and 0 of 100
    host             wait 40 | step 60 ...
    intervals        [0, 40) wait, 30 lost       never longer than the span

It also reads exposed time from stream events: how long a device was idle in a wait of its host.

In a wait for data the device was idle for a part of it, which is the end of the wait. A
collective's exposed time lies where analysis.timeline.collectives.operations placed it and is lost
in full; where it overlaps a wait for data, the part of that wait moves to what is left of it.

    host       |---- wait for data 40, exposed 10 ----|
    device     |-- operation 20 --|
    lost       |------- 20 -------|-------- 10 -------|
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.rank.chunk_boundary import (
    LEARNED_NS,
    WHOLE_RECORDING,
    PartOfRecording,
    RankState,
    Segment,
    find_sample_before,
    find_settled_segments,
    get_spans,
    trim_to_part,
    with_part_bounds,
)
from clusterprof.analysis.attribution.rank.device_activity import (
    NO_ACTIVITY,
    DeviceActivity,
    DeviceWindows,
    build_device_windows,
    detect_busy_wait,
    trim_windows,
    update_levels,
)
from clusterprof.analysis.attribution.rank.host_phases import (
    FILL_ORDER,
    HostPhases,
    allocate_by_phase,
    find_step_numbers,
    split_host_phases,
)
from clusterprof.analysis.attribution.rank.idle_time.allocation import (
    IS_STARVING,
    allocate_idle_time,
    learn_idle_time,
    sum_by_window,
)
from clusterprof.analysis.attribution.rank.idle_time.shares import MIN_WINDOWS
from clusterprof.analysis.attribution.rank.time_spent import MIN_RUNNABLE_RATIO
from clusterprof.analysis.attribution.rank.unprobed_rank import has_peers, has_waited_in_operations
from clusterprof.analysis.attribution.rank.utilization import UtilizationSums, sum_utilization
from clusterprof.analysis.timeline.collectives.operations import DeviceWaits, find_device_waits
from clusterprof.analysis.timeline.device_sync import (
    measure_device_sync,
    measure_increase_outside_waits,
)
from clusterprof.analysis.timeline.intervals import EMPTY
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
    PHASE_SYNC,
    PHASE_THROTTLED,
    SOURCE_DEVICE_SAMPLES,
    SOURCE_HOST_SPANS,
    SOURCE_STREAM_EVENTS,
    Float,
    Int,
    LostTime,
    Rank,
    ThreadTable,
)
from clusterprof.analysis.timeline.series import compute_column_increase, compute_differences
from clusterprof.analysis.timeline.spans import ExposedSpans
from clusterprof.probe import layout


def shift_to_wait_end(lost: LostTime) -> LostTime:
    """Return the intervals with those of starving waits reduced to the lost time at their end."""
    starving = IS_STARVING[lost.phase]
    return replace(lost, start_ns=np.where(starving, lost.end_ns - lost.lost_ns, lost.start_ns))


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
    are evaluated.
    """
    zeros = np.zeros(phases.start_ns.size, np.int64)
    exposed = rank.main.get_spans(ExposedSpans)
    if exposed is None or not exposed.start_ns.size:
        return zeros, zeros.astype(bool)
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
    PHASE_SYNC,
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
    evaluation_ns: int = 0
    """Measured time in evaluations that was not lost, ns."""


def find_lost_intervals(
    rank: Rank, state: RankState, last: bool = False, part: PartOfRecording = WHOLE_RECORDING
) -> tuple[tuple[tuple[Segment, LostTime, SegmentAccount], ...], RankState]:
    """Find the segments that can be settled now, with their lost intervals.

    Time before the first step and after the last one is outside the steps and has no
    intervals; nor has time outside the analyzed part. Also returns the next state.
    last: settle everything up to the end of the last step or wait.
    """
    ready, next_state = find_settled_segments(rank, state, last)
    next_state = with_part_bounds(rank, next_state, part)
    settled, activity = [], state.activity
    if ready and activity is NO_ACTIVITY:
        activity = _learn_activity(rank, ready)
    for untrimmed in (piece for ready_segment in ready for piece in _split_segment(ready_segment)):
        segment = trim_to_part(rank, untrimmed, next_state, part)
        outside_ns = untrimmed.end_ns - untrimmed.start_ns - (segment.end_ns - segment.start_ns)
        if segment.end_ns == segment.start_ns:
            settled.append(
                (segment, NO_LOST_TIME, SegmentAccount(0, 0, 0, 0, outside_selection_ns=outside_ns))
            )
            continue
        lost, account, activity = measure_lost_intervals(rank, segment, activity)
        settled.append((segment, lost, replace(account, outside_selection_ns=outside_ns)))
    return tuple(settled), replace(next_state, activity=activity)


def _learn_activity(rank: Rank, ready: Sequence[Segment]) -> DeviceActivity:
    """Return the activity of the device over the first minute, in order to measure that minute."""
    all_windows = build_device_windows(rank) if rank.device else None
    if all_windows is None:
        return NO_ACTIVITY
    begin_ns = ready[0].start_ns
    end_ns = min(ready[-1].end_ns, find_sample_before(rank, begin_ns + LEARNED_NS))
    windows = trim_windows(all_windows, begin_ns, end_ns)
    activity = NO_ACTIVITY
    is_enough = windows.start_ns.size >= MIN_WINDOWS
    if is_enough and has_peers(rank):
        activity = update_levels(detect_busy_wait(rank, windows, activity)[2])
    rows = _read_rows(rank, Segment(begin_ns, end_ns, False), windows)
    activity = learn_idle_time(rank, rows.phases, windows, rows.room_ns, rows.idle_ns, activity)
    return replace(activity, learned_until_ns=end_ns) if is_enough else activity


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
    if has_peers(rank):
        busy_wait_ns, suspected_ns, activity = detect_busy_wait(rank, windows, activity)
        if layout.EXPOSED_COLLECTIVE in rank.main.spans:  # device events measure these waits better
            busy_wait_ns[:] = 0
        if has_waited_in_operations(rank):
            suspected_ns[:] = 0
    not_idle = busy_wait_ns, suspected_ns
    return _measure_from_samples(rank, segment, all_windows, windows, not_idle, activity)


def _measure_from_host(rank: Rank, phases: HostPhases) -> tuple[LostTime, SegmentAccount]:
    """Use stream events where a wait has them, otherwise the full wait.

    Outside any known wait the time in which the host slept or was ready and had no CPU counts, so
    that the sum is an upper bound. Where the host was not sampled, no bound is known.
    """
    events = measure_exposed_time(rank, phases)
    in_full = np.isin(phases.phase, _HOST_PHASES) & ~events.measured
    length = phases.end_ns - phases.start_ns
    outside = ~in_full & ~events.measured
    stopped_ns, sampled = _measure_stopped_time(rank, phases)
    parts = [
        (events.lost_ns, SOURCE_STREAM_EVENTS),
        (np.where(in_full, length, 0), SOURCE_HOST_SPANS),
        (np.where(outside, stopped_ns, 0), SOURCE_HOST_SPANS),
    ]
    lost = shift_to_wait_end(_build_lost(rank, phases, parts))
    unobserved_ns = int(length[outside & ~sampled].sum())
    measured = int(np.count_nonzero(events.measured))
    evaluation_ns = _measure_evaluation(phases, lost, np.ones(length.size, np.bool_))
    account = SegmentAccount(
        0, 0, 0, measured, unobserved_ns=unobserved_ns, evaluation_ns=evaluation_ns
    )
    return lost, account


def _measure_evaluation(phases: HostPhases, lost: LostTime, measured: NDArray[np.bool_]) -> int:
    """Measure the time in evaluations that was not lost, ns; measured: bool[n] of the rows."""
    in_evaluation = (phases.phase == PHASE_EVAL) & measured
    if not in_evaluation.any():
        return 0
    length_ns = int((phases.end_ns - phases.start_ns)[in_evaluation].sum())
    row = np.searchsorted(phases.start_ns, lost.start_ns, side="right") - 1
    return max(length_ns - int(lost.lost_ns[in_evaluation[row]].sum()), 0)


def _measure_stopped_time(rank: Rank, phases: HostPhases) -> tuple[Int, NDArray[np.bool_]]:
    """Measure how long the main thread did not run, and whether it was sampled, in each row.

    It slept, or was ready and had no CPU for more than a scheduler costs. Marked waits for the
    device do not count: the device worked meanwhile. Returns int64[n], ns, 0 where the thread was
    not sampled, and bool[n].
    """
    length = phases.end_ns - phases.start_ns
    thread = rank.main.threads.get(rank.pid)
    if thread is None or len(thread.t_ns) < 2:
        return np.zeros(length.size, np.int64), np.zeros(length.size, np.bool_)
    on_cpu_ns, delay_ns = (
        _measure_increase(rank, thread, column, phases) for column in ("on_cpu_ns", "run_delay_ns")
    )
    usual_ns = np.where(delay_ns < MIN_RUNNABLE_RATIO * length, np.nan_to_num(delay_ns), 0.0)
    synced_ns = measure_device_sync(rank, phases.start_ns, phases.end_ns)
    stopped_ns = np.nan_to_num(length - on_cpu_ns) - usual_ns - synced_ns
    return np.clip(np.rint(stopped_ns), 0, length).astype(np.int64), ~np.isnan(on_cpu_ns)


def _measure_increase(rank: Rank, thread: ThreadTable, column: str, phases: HostPhases) -> Float:
    """Measure by how much a counter of the main thread rose in each row: float64[n], ns, or NaN.

    Between two readings it rises outside the waits in which the thread sleeps, as far as there is
    time outside:

        readings   |------------- 12 ms on a CPU -------------|
        host       wait 20 ms | compute 10 ms | wait 20 ms ...
        risen             0 ms |        10 ms  | the rest, 2 ms
    """
    start_ns, end_ns = phases.start_ns, phases.end_ns
    values = getattr(thread, column)
    grown = compute_column_increase(thread.t_ns, values, start_ns, end_ns)
    outside = measure_increase_outside_waits(rank, column, start_ns, end_ns)
    if outside is None:
        asleep = _find_sleeping_rows(rank, phases)
        if not asleep.any():
            return grown
        edges = np.stack([start_ns[asleep], end_ns[asleep]], axis=1).ravel()
        slept_ns = np.repeat(np.cumsum(end_ns[asleep] - start_ns[asleep]), 2)
        slept_ns[::2] -= end_ns[asleep] - start_ns[asleep]
        outside = _measure_increase_awake(thread.t_ns, values, (edges, slept_ns), phases)
    return np.where(np.isnan(grown), np.nan, outside)


def _find_sleeping_rows(rank: Rank, phases: HostPhases) -> NDArray[np.bool_]:
    """Find the rows of known waits in which the main thread sleeps.

    In a wait for data it does if workers load them; else it loads them itself.
    """
    asleep: NDArray[np.bool_] = phases.phase == PHASE_COLLECTIVE
    return asleep | (phases.phase == PHASE_DATA_WAIT) if rank.workers else asleep


def _measure_increase_awake(
    t_ns: Int, values: Int, slept: tuple[Int, Int], phases: HostPhases
) -> Float:
    """Measure by how much a counter rose in each row if it rises while the thread is awake.

    slept: times, and how long the thread had slept before each; int64[m]. Returns float64[n].
    """
    awake_ns, first, last = (
        t - np.interp(t, *slept) for t in (t_ns, phases.start_ns, phases.end_ns)
    )
    growth = np.minimum(compute_differences(values)[0], np.diff(awake_ns))
    running_sum = np.concatenate([[0.0], np.cumsum(growth)])
    risen = np.interp(last, awake_ns, running_sum) - np.interp(first, awake_ns, running_sum)
    return np.asarray(risen, np.float64)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Host phases of sampled time, and the part that stream events do not measure; n rows."""

    phases: HostPhases
    room_ns: Int
    idle_ns: Int
    """Idle time of each window, int64[windows]."""
    events: ExposedTime | None


def _read_rows(rank: Rank, segment: Segment, windows: DeviceWindows) -> _Rows:
    phases = split_host_phases(
        rank, segment.start_ns, segment.end_ns, (windows.start_ns, windows.end_ns)
    )
    inside = phases.measured
    if not inside.all():
        phases = phases.rows(inside.nonzero()[0])
    length = phases.end_ns - phases.start_ns
    if not has_exposed_times(rank):
        return _Rows(phases, length, windows.idle_ns, None)
    events = measure_exposed_time(rank, phases)
    measured_ns = np.bincount(phases.window, events.idle_ns, minlength=windows.start_ns.size)
    idle_ns = np.maximum(windows.idle_ns - measured_ns, 0).astype(np.int64)
    return _Rows(phases, np.where(events.measured, 0, length), idle_ns, events)


def _measure_from_samples(
    rank: Rank,
    segment: Segment,
    all_windows: DeviceWindows,
    windows: DeviceWindows,
    not_idle: tuple[Int, Int],
    activity: DeviceActivity,
) -> tuple[LostTime, SegmentAccount, DeviceActivity]:
    busy_wait_ns, suspected_ns = not_idle
    rows = _read_rows(rank, segment, windows)
    phases, room_ns = rows.phases, rows.phases.end_ns - rows.phases.start_ns
    window, phase = phases.window, phases.phase
    zeros = np.zeros(room_ns.size, np.int64)
    parts: list[tuple[Int, int]] = []
    stream_pieces, busy_lost, suspected = 0, zeros, zeros  # of the time that samples show as busy
    if rows.events is not None:
        room_ns = room_ns - rows.events.lost_ns
        stream_pieces = int(np.count_nonzero(rows.events.measured))
        parts.append((rows.events.lost_ns, SOURCE_STREAM_EVENTS))
        busy_lost = np.maximum(rows.events.lost_ns - rows.events.idle_ns, 0)
    idle, activity = allocate_idle_time(
        rank, phases, all_windows, windows, rows.room_ns, rows.idle_ns, activity
    )
    room_ns = room_ns - idle
    lost = _build_lost(rank, phases, [*parts, (idle, SOURCE_DEVICE_SAMPLES)])
    tails = []
    # A device busy-waits in an operation, whatever its host does meanwhile.
    is_covered = phases.in_operation & (phase != PHASE_COLLECTIVE)
    waiting = np.where(is_covered, PHASE_HIDDEN_COLLECTIVE, phase)
    if busy_wait_ns.any():
        busy_wait = allocate_by_phase(window, waiting, room_ns, busy_wait_ns, _BUSY_WAIT_ORDER)
        room_ns, busy_lost = room_ns - busy_wait, busy_lost + busy_wait
        in_operation = (waiting == PHASE_COLLECTIVE) | is_covered
        tails.append((busy_wait, np.where(in_operation, PHASE_COLLECTIVE, PHASE_BUSY_WAIT)))
    if suspected_ns.any():
        busy_wait = allocate_by_phase(window, waiting, room_ns, suspected_ns, _BUSY_WAIT_ORDER)
        room_ns, suspected = room_ns - busy_wait, busy_wait
        tails.append((busy_wait, np.full(busy_wait.size, PHASE_SUSPECTED_BUSY_WAIT, np.int64)))
    if windows.slowed_ns.any():
        slow = allocate_by_phase(window, phase, room_ns, windows.slowed_ns, FILL_ORDER[::-1])
        busy_lost = busy_lost + slow
        tails.append((slow, np.full(slow.size, PHASE_THROTTLED, np.int64)))
    if tails:
        lost = _append_busy_losses(rank, lost, phases, tails)
    lost = shift_to_wait_end(lost)
    measured_ns = int((windows.end_ns - windows.start_ns).sum())
    unmeasured = segment.end_ns - segment.start_ns - measured_ns
    not_work = (sum_by_window(windows, window, ns) for ns in (busy_lost, suspected))
    utilization = sum_utilization(rank, all_windows, windows, *not_work)
    window_columns = (windows.start_ns, windows.end_ns - windows.start_ns, windows.idle_ns)
    account = SegmentAccount(
        unmeasured,
        measured_ns,
        int(windows.idle_ns.sum()),
        stream_pieces,
        utilization,
        window_columns,
        evaluation_ns=_measure_evaluation(phases, lost, phases.measured),
    )
    return lost, account, activity


_IS_COMPUTE = np.isin(np.arange(PHASE_SYNC + 1), (PHASE_HIDDEN_COLLECTIVE, PHASE_SYNC))


def _build_lost(rank: Rank, phases: HostPhases, parts: list[tuple[Int, int]]) -> LostTime:
    """Return the rows with a loss; of two sources the first one that is not zero counts."""
    amount = parts[0][0] if parts else np.zeros(phases.start_ns.size, np.int64)
    for part, _ in parts[1:]:
        amount = np.where(amount == 0, part, amount)
    (rows,) = (amount > 0).nonzero()
    source = np.full(rows.size, parts[0][1] if len(parts) == 1 else 0, np.int64)
    for part, code in reversed(parts) if len(parts) > 1 else ():
        source[part[rows] > 0] = code
    lost_phases = phases.rows(rows)
    steps = find_step_numbers(rank, lost_phases.start_ns, lost_phases.steps_begun)
    # Idle time there is the main thread's: it had not launched anything.
    phase = np.where(_IS_COMPUTE[lost_phases.phase], PHASE_COMPUTE, lost_phases.phase)
    phase = np.where((lost_phases.phase == PHASE_SYNC) & (steps < 0), PHASE_NONE, phase)
    return LostTime(lost_phases.start_ns, lost_phases.end_ns, amount[rows], phase, source, steps)


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
    lost_rows = np.searchsorted(phases.start_ns, lost.start_ns)
    parts.append((lost.start_ns, end[lost_rows], lost.lost_ns, lost.phase, lost.step))
    start, end, ns, phase, step = (np.concatenate(columns) for columns in zip(*parts))
    source = np.full(start.size, SOURCE_DEVICE_SAMPLES, np.int64)
    source[start.size - lost.source.size :] = lost.source
    order = np.argsort(start, kind="stable")
    return LostTime(*(column[order] for column in (start, end, ns, phase, source, step)))
