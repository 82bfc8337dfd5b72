"""Place idle time in a host's wait at its end, because the device first drains its queue.

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
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.attribution.rank.chunk_boundary import LOOKAHEAD_NS, get_spans
from clusterprof.analysis.attribution.rank.device_activity import (
    DeviceActivity,
    DeviceWindows,
    trim_windows,
)
from clusterprof.analysis.attribution.rank.host_phases import (
    FILL_ORDER,
    HostPhases,
    allocate_by_phase,
    split_host_phases,
)
from clusterprof.analysis.attribution.rank.idle_time.queue import (
    DeviceQueue,
    LaunchRows,
    OpenStep,
    compute_launched_steps,
    fit_to_windows,
    learn_queue,
    measure_launching,
    predict_by_queue,
    separate_sleep,
)
from clusterprof.analysis.attribution.rank.idle_time.shares import (
    PhaseShares,
    allocate_by_shares,
    follow_shares_of_queue,
    learn_shares,
    predict_by_shares,
)
from clusterprof.analysis.attribution.rank.unprobed_rank import has_peers
from clusterprof.analysis.timeline.device_sync import (
    find_drained_rows,
    measure_increase_outside_waits,
)
from clusterprof.analysis.timeline.intervals import allocate_by_wait_age, merge_intervals
from clusterprof.analysis.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_H2D,
    PHASE_LOCK,
    PHASE_SYNC,
    Float,
    Int,
    Rank,
)
from clusterprof.analysis.timeline.series import (
    compute_growth,
    compute_mean,
    evaluate_increase,
    locate_intervals,
)
from clusterprof.probe import layout

STARVING_PHASES = {PHASE_H2D: layout.H2D, PHASE_DATA_WAIT: layout.DATA_WAIT, PHASE_GC: layout.GC}
"""Phases in which a host gives its device no work, and the kind of spans behind each."""
_CODES = np.arange(PHASE_SYNC + 1)
IS_STARVING = np.isin(_CODES, tuple(STARVING_PHASES))
"""Whether each phase is one of them, bool[phases]."""
COPYING_BYTES_PER_SECOND = 1e9
"""Mean rate of the bus from which copies can keep a device idle; less is control traffic."""
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
    activity: DeviceActivity,
) -> tuple[Int, DeviceActivity]:
    """Allocate the idle time of each window to the rows in it: int64[n], ns, at most the room.

    all_windows: includes the windows before and after those of the segment. room_ns:
    int64[n], upper limit per row. idle_ns: int64[windows]. activity: has the idle share of each
    phase so far, and the queue of the device; its update is returned too.
    """
    learned_shares = activity.phase_shares
    learned = int(np.searchsorted(windows.end_ns, activity.learned_until_ns, side="right"))
    window, phase = phases.window, phases.phase
    asleep_ns, drained = sleep = _measure_sleep(rank, phases, windows)
    (rows,) = IS_STARVING[phase].nonzero()
    begins = np.zeros(phase.size, np.bool_)
    if rows.size:
        starving = phases.rows(rows)
        start_ns, end_ns = _find_launch_gaps(rank, starving)
        begins[rows] = _has_queued_work(end_ns, starving, all_windows, windows)
    open_ns = np.where(begins, 0, room_ns)
    share_arguments = (learned_shares, asleep_ns, learned, drained)
    idle, learned_shares = allocate_by_shares(window, phase, open_ns, idle_ns, *share_arguments)
    predicted_ns = _predict_whole_windows(
        phases, windows, room_ns, idle_ns, asleep_ns, activity.phase_shares
    )
    followed, queue = _predict_by_queue(
        rank, phases, all_windows, windows, predicted_ns, sleep, activity
    )
    by_queue = ~np.isnan(followed)
    if by_queue.any():
        fitted = fit_to_windows(window, phase, open_ns, np.nan_to_num(followed), idle_ns)
        idle = np.where(by_queue, fitted, idle)
    if begins.any():
        remaining_ns = idle_ns - np.bincount(window, idle, minlength=idle_ns.size).astype(np.int64)
        if remaining_ns.any():  # there is no other place for it
            idle += allocate_by_phase(window, phase, room_ns - idle, remaining_ns, FILL_ORDER)
    aged = rows[~by_queue[rows]]
    if aged.size:
        room_ns = np.where(begins, idle, room_ns)
        without_queue = ~by_queue[rows]
        idle[aged] = allocate_by_wait_age(
            window[aged], (starving.end_ns - start_ns)[without_queue], room_ns[aged], idle[aged]
        )
    return idle, replace(activity, phase_shares=learned_shares, queue=queue)


def learn_idle_time(
    rank: Rank,
    phases: HostPhases,
    windows: DeviceWindows,
    room_ns: Int,
    idle_ns: Int,
    activity: DeviceActivity,
) -> DeviceActivity:
    """Learn the idle shares of phases, and the queue of the device, from the first windows.

    room_ns, idle_ns: as in `allocate_idle_time`.
    """
    window, phase = phases.window, phases.phase
    if not window.size:
        return activity
    sleep = _measure_sleep(rank, phases, windows)
    copying = is_copying(rank, int(phases.start_ns[0]), int(phases.end_ns[-1]))
    shares = learn_shares(window, phase, room_ns, idle_ns, phases.steps_begun, *sleep, copying)
    activity = replace(activity, phase_shares=shares)
    if not (rank.marked and shares.shares):
        return activity
    launches = separate_sleep(_read_launch_rows(phases), *sleep)
    predicted_ns = _predict_whole_windows(phases, windows, room_ns, idle_ns, sleep[0], shares)
    queue = learn_queue(launches, windows.idle_ns, predicted_ns)
    if not has_peers(rank):
        return replace(activity, queue=queue)
    # The waits of other ranks are attributed to what a late rank lost. If its idle time were placed
    # only where its queue was empty, a delay that its own queue hid would count as work. So all
    # waits of a phase get the same share.
    return replace(activity, phase_shares=follow_shares_of_queue(shares, launches, queue))


def _read_launch_rows(phases: HostPhases) -> LaunchRows:
    length_ns = phases.end_ns - phases.start_ns
    return LaunchRows(phases.window, phases.phase, length_ns, phases.steps_begun)


def _predict_whole_windows(
    phases: HostPhases,
    windows: DeviceWindows,
    room_ns: Int,
    idle_ns: Int,
    asleep_ns: Int | None,
    learned_shares: PhaseShares,
) -> Float:
    """Predict the idle time of each window by the shares, and add what stream events measured."""
    rows = phases.window, phases.phase, room_ns
    return predict_by_shares(rows, idle_ns.size, asleep_ns, learned_shares) + (
        windows.idle_ns - idle_ns
    )


def _predict_by_queue(
    rank: Rank,
    phases: HostPhases,
    all_windows: DeviceWindows,
    windows: DeviceWindows,
    shares_idle_ns: Float,
    sleep: _Sleep,
    activity: DeviceActivity,
) -> tuple[Float, DeviceQueue]:
    """Predict the idle time of each row by the queue: float64[n], ns, NaN where it is not followed.

    shares_idle_ns: float64[windows], as predicted by the shares.
    """
    queue, steps = activity.queue, get_spans(rank, layout.STEP)
    if not queue.work_ns or steps is None or not phases.window.size:
        return np.full(phases.window.size, np.nan), queue
    learned = int(np.searchsorted(windows.end_ns, activity.learned_until_ns, side="right"))
    rows = separate_sleep(_read_launch_rows(phases), *sleep)
    step_ns = steps.start_ns[np.maximum(phases.steps_begun[[0, -1]] - 1, 0)]
    open_step = queue.open_step
    is_open = open_step is not None and open_step.start_ns == step_ns[0]
    before_ns = open_step.launching_ns if open_step is not None and is_open else 0
    end_ns = int(phases.end_ns[-1])
    after_ns = _measure_launching_after(rank, all_windows, steps.start_ns, end_ns)
    in_step_ns = int(measure_launching(rows)[rows.step == rows.step[-1]].sum())
    in_step_ns += before_ns if step_ns[0] == step_ns[1] else 0
    if after_ns is None:  # the end of the step is not recorded yet
        after_ns = max(queue.usual_ns - in_step_ns, 0)
    launched_steps, _ = compute_launched_steps(rows, before_ns, after_ns, queue.usual_ns)
    predicted_ns, queue = predict_by_queue(
        rows, launched_steps, windows.idle_ns, shares_idle_ns, queue, learned
    )
    open_step = OpenStep(int(step_ns[1]), in_step_ns)
    in_row_ns = predicted_ns.reshape(phases.window.size, -1).sum(axis=1)
    return in_row_ns, replace(queue, open_step=open_step)


def _measure_launching_after(
    rank: Rank, all_windows: DeviceWindows, starts_ns: Int, end_ns: int
) -> int | None:
    """Measure for how long a step launches after the end of a segment, ns; None if it is open."""
    row = int(np.searchsorted(starts_ns, end_ns))
    if row == starts_ns.size:
        return None
    until_ns = int(starts_ns[row])
    if until_ns == end_ns:
        return 0
    windows = trim_windows(all_windows, end_ns, until_ns)
    phases = split_host_phases(rank, end_ns, until_ns, (windows.start_ns, windows.end_ns))
    phases = phases.rows(phases.measured.nonzero()[0])
    rows = separate_sleep(_read_launch_rows(phases), *_measure_sleep(rank, phases, windows))
    return int(measure_launching(rows).sum())


_Sleep = tuple[Int | None, NDArray[np.bool_]]
"""Unknown sleep of each window, and the rows that begin with an empty queue."""


def _measure_sleep(rank: Rank, phases: HostPhases, windows: DeviceWindows) -> _Sleep:
    computing = phases.phase == PHASE_COMPUTE
    drained = find_drained_rows(rank.main, phases.start_ns, phases.end_ns, computing)
    return measure_unknown_sleep(rank, phases, windows), drained


_IS_ASLEEP = np.isin(
    _CODES, (PHASE_DATA_WAIT, PHASE_COLLECTIVE, PHASE_LOCK, PHASE_CHECKPOINT, PHASE_SYNC)
)
"""Whether the main thread sleeps in each phase, bool[phases]."""


def measure_unknown_sleep(rank: Rank, phases: HostPhases, windows: DeviceWindows) -> Int | None:
    """Measure how long the main thread slept outside its known waits in each window.

    int64[windows], ns; None if its threads were not sampled.
    """
    thread = rank.main.threads.get(rank.pid)
    if thread is None or len(thread.t_ns) < 2:
        return None
    waited = np.where(_IS_ASLEEP[phases.phase], phases.end_ns - phases.start_ns, 0)
    positions = locate_intervals(thread.t_ns, windows.start_ns, windows.end_ns)
    active = np.zeros(windows.start_ns.size)
    for column in ("on_cpu_ns", "run_delay_ns"):
        grown = evaluate_increase(compute_growth(getattr(thread, column)), positions)
        outside = measure_increase_outside_waits(rank, column, windows.start_ns, windows.end_ns)
        active += grown if outside is None else np.where(np.isnan(grown), np.nan, outside)
    asleep = windows.end_ns - windows.start_ns - sum_by_window(windows, phases.window, waited)
    return np.maximum(np.nan_to_num(asleep - active), 0.0).astype(np.int64)


def is_copying(rank: Rank, start_ns: int, end_ns: int) -> bool:
    """Return whether the device copied much from and to its host, by the counters of its bus."""
    sums = [
        series
        for signal in (signals.GPU_PCIE_RECEIVE, signals.GPU_PCIE_TRANSMIT)
        if (series := rank.chunk.series.get((signal.name, rank.device))) is not None
    ]
    bounds = np.array([start_ns]), np.array([end_ns])
    rate = sum(float(np.nan_to_num(compute_mean(series, *bounds))[0]) for series in sums)
    return rate >= COPYING_BYTES_PER_SECOND


def _find_launch_gaps(rank: Rank, rows: HostPhases) -> tuple[Int, Int]:
    """Return start and end of the interval without launches that contains each row."""
    tables = [
        table for kind in STARVING_PHASES.values() if (table := get_spans(rank, kind)) is not None
    ]
    start = np.concatenate([table.start_ns for table in tables])
    end = np.concatenate([table.end_ns for table in tables])
    start, end = merge_intervals((start, end + MAX_PAUSE_NS))
    clipped_row = np.maximum(np.searchsorted(start, rows.start_ns, side="right") - 1, 0)
    return start[clipped_row], end[clipped_row] - MAX_PAUSE_NS


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
    clipped_row = np.maximum(row, 0)
    inside = np.minimum(all_windows.idle_ns[clipped_row], t_ns - all_windows.start_ns[clipped_row])
    return np.where(row >= 0, before[clipped_row] + inside, 0)


def sum_by_window(windows: DeviceWindows, window: Int, ns: Int) -> Int:
    """Sum amounts of rows by the window that contains each row: int64[windows], ns."""
    return np.bincount(window, ns, minlength=windows.start_ns.size).astype(np.int64)
