"""Place idle device time by following the queue of work that the host gives its device.

Each step launches the same amount of work, evenly over the time in which its host launches, and the
device works off what is queued:

    host     launch 20 | wait 80            work of 50 per step
    queued   0 .. 30   | 30 .. 0
    device   busy 20   | busy 30, idle 50

A wait costs nothing until the queue is empty; from then on the device is idle to its end. Idle
shares of phases (`analysis.attribution.rank.idle_time.shares`) are linear and cannot express that.
A queue in turn assumes that work is launched evenly, and that the host never waits for the device
in the middle of a step. Both predict the idle time of the first minute's windows. The queue is used
if its predictions are better, and for as long as they are.

The prediction for a window is then fitted to the measured idle time. If it is too large, it is
reduced in proportion. If it is too small, the rest goes to the waits in which the queue ran empty,
then to phases in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.rank.host_phases import FILL_ORDER, allocate_by_phase
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_EVAL,
    PHASE_HIDDEN_COLLECTIVE,
    PHASE_NONE,
    PHASE_SYNC,
    Float,
    Int,
)

ASLEEP = max(FILL_ORDER) + 1
"""The part of PHASE_COMPUTE in which the main thread slept."""
LAUNCHING = (PHASE_COMPUTE, PHASE_HIDDEN_COLLECTIVE, PHASE_EVAL, PHASE_NONE)
"""Phases in which the host launches work."""
_MIN_LAUNCHING_RATIO = 0.25
"""A step launches for at least this part of the median time: others are cut by the recording."""
_MAX_ERROR_RATIO = 0.9
"""The queue is followed if its error is at most this part of the error of the shares."""
_MAX_SYNC_RATIO = 0.02
"""A host that waits for its device for a larger part of the time empties the queue."""
_CHECK_INTERVAL = 512
"""Number of windows after which both are compared again, and the work per step is updated."""


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that continues after the end of a segment."""

    start_ns: int
    launching_ns: int
    """For how long it launched before the end of the segment."""


@dataclass(frozen=True, slots=True)
class DeviceQueue:
    """Work that the host has launched and the device has not done, and how much a step launches."""

    work_ns: int = 0
    """Work of a step; 0 = the queue does not predict when this device is idle."""
    usual_ns: int = 0
    """Median time in which a step launches."""
    queued_ns: int = 0
    """Work in the queue at the end of the last window."""
    open_step: OpenStep | None = None
    windows: int = 0
    """Number of windows since the last comparison; the sums below are over these."""
    error_ns: int = 0
    """Sum of the differences between predicted and measured idle time."""
    shares_error_ns: int = 0
    """Sum of the differences between the prediction by idle shares and measured idle time."""
    busy_ns: int = 0
    launched_steps: float = 0.0
    """Number of steps whose work was launched."""


NO_QUEUE = DeviceQueue()


@dataclass(frozen=True, slots=True)
class LaunchRows:
    """Host phases in order of time, with sleep outside known waits (ASLEEP) apart; n rows."""

    window: Int
    """Window of each row, ascending."""
    phase: Int
    length_ns: Int
    step: Int
    """Number of steps begun."""


def separate_sleep(
    rows: LaunchRows, asleep_ns: Int | None, drained: NDArray[np.bool_] | None
) -> LaunchRows:
    """Divide each row of PHASE_COMPUTE into launching, sleep and launching: 3 n rows.

    Sleep lies where the queue was empty, as far as there is room, and comes first there. The rest
    is spread over the other rows: when in a row is not known, so half of the launching comes before
    it. If all of it came before, a short wait for data that follows would be idle in full.
    asleep_ns: int64[windows]; None = not known, nothing is divided. drained: as in `shares`.
    """
    if asleep_ns is None:
        return rows
    window, phase, length_ns = rows.window, rows.phase, rows.length_ns
    compute = phase == PHASE_COMPUTE
    first = compute & drained if drained is not None else np.zeros(phase.size, np.bool_)
    sleep_ns = place_sleep(window, length_ns, asleep_ns.astype(np.float64), first)
    left_ns = asleep_ns - np.bincount(window, sleep_ns, minlength=asleep_ns.size)
    sleep_ns += place_sleep(window, length_ns, np.maximum(left_ns, 0.0), compute & ~first)
    sleep_ns = np.rint(sleep_ns).astype(np.int64)
    before_ns = np.where(first, 0, (length_ns - sleep_ns) // 2)
    parts_ns = np.stack([before_ns, sleep_ns, length_ns - sleep_ns - before_ns], axis=1)
    phases = np.stack([phase, np.full(phase.size, ASLEEP), phase], axis=1)
    return LaunchRows(
        np.repeat(window, 3), phases.ravel(), parts_ns.ravel(), np.repeat(rows.step, 3)
    )


def place_sleep(window: Int, room_ns: Int, asleep_ns: Float, drained: NDArray[np.bool_]) -> Float:
    """Place sleep, or its idle time, where the queue was empty: float64[n], ns.

    A thread that sleeps launches nothing, so a device without work stays idle until it wakes.
    asleep_ns: float64[windows].
    """
    open_ns = np.where(drained, room_ns, 0)
    in_window_ns = np.bincount(window, open_ns, minlength=asleep_ns.size)
    ratio = np.minimum(asleep_ns / np.maximum(in_window_ns, 1.0), 1.0)
    return np.asarray(open_ns * ratio[window], np.float64)


def measure_launching(rows: LaunchRows) -> Int:
    """Return the time in each row in which the host launched: int64[n], ns."""
    return np.where(np.isin(rows.phase, LAUNCHING), rows.length_ns, 0)


def compute_launched_steps(
    rows: LaunchRows, before_ns: int = 0, after_ns: int = 0, usual_ns: int = 0
) -> tuple[Float, int]:
    """Return the part of a step's work that each row launches, float64[n], and the usual time.

    before_ns: for how long the first step launched before the first row; after_ns: the last step
    after the last row. usual_ns: median time in which a step launches; 0 = the median of these.
    """
    launching_ns = measure_launching(rows)
    if not launching_ns.size:
        return np.zeros(0), usual_ns
    step = rows.step - rows.step[0]
    in_step_ns = np.bincount(step, launching_ns)
    in_step_ns[0] += before_ns
    in_step_ns[-1] += after_ns
    if not usual_ns:
        usual_ns = int(np.median(in_step_ns[in_step_ns > 0])) if in_step_ns.any() else 0
    least_ns = max(_MIN_LAUNCHING_RATIO * usual_ns, 1.0)
    return launching_ns / np.maximum(in_step_ns, least_ns)[step], usual_ns


def follow_queue(
    launched_steps: Float, length_ns: Int, work_ns: int, queued_ns: int = 0
) -> tuple[Int, int]:
    """Return the idle time in each row, int64[n], and the work in the queue after the last, ns."""
    if not length_ns.size:
        return np.zeros(0, np.int64), queued_ns
    work = np.rint(launched_steps * work_ns).astype(np.int64)
    ahead_ns = queued_ns + np.cumsum(work - length_ns)
    # The device is idle for as long as work done would exceed work launched.
    idle_so_far_ns = -np.minimum(np.minimum.accumulate(ahead_ns), 0)
    return np.diff(idle_so_far_ns, prepend=0), int(ahead_ns[-1] + idle_so_far_ns[-1])


def learn_queue(rows: LaunchRows, idle_ns: Int, shares_idle_ns: Float) -> DeviceQueue:
    """Learn the work of a step; NO_QUEUE if the shares predict idle time better.

    NO_QUEUE also if the host waits for the device in its steps: how much of a step's work it had
    launched by then is not known.

    idle_ns: int64[windows]. shares_idle_ns: float64[windows], as predicted by the shares.
    """
    launched_steps, usual_ns = compute_launched_steps(rows)
    total = float(launched_steps.sum())
    busy_ns = int(rows.length_ns.sum()) - int(idle_ns.sum())
    synced_ns = int(rows.length_ns[rows.phase == PHASE_SYNC].sum())
    is_synchronized = synced_ns > _MAX_SYNC_RATIO * int(rows.length_ns.sum())
    if total <= 0 or busy_ns <= 0 or rows.step[-1] == rows.step[0] or is_synchronized:
        return NO_QUEUE
    work_ns = round(busy_ns / total)
    predicted_ns, _ = follow_queue(launched_steps, rows.length_ns, work_ns)
    in_window_ns = np.bincount(rows.window, predicted_ns, minlength=idle_ns.size)
    error_ns = np.abs(in_window_ns - idle_ns).sum()
    if error_ns > _MAX_ERROR_RATIO * np.abs(shares_idle_ns - idle_ns).sum():
        return NO_QUEUE
    return DeviceQueue(work_ns=work_ns, usual_ns=usual_ns)


def predict_by_queue(
    rows: LaunchRows,
    launched_steps: Float,
    idle_ns: Int,
    shares_idle_ns: Float,
    queue: DeviceQueue,
    learned: int = 0,
) -> tuple[Float, DeviceQueue]:
    """Return the idle time of each row by the queue, float64[n], and the queue afterwards.

    launched_steps: part of a step's work that each row launches. idle_ns, shares_idle_ns:
    [windows], measured and as predicted by the shares. learned: number of windows at the beginning
    from which the queue was learned. NaN from the window on in which the queue is given up.
    """
    predicted_ns = np.full(rows.window.size, np.nan)
    length_ns = np.bincount(rows.window, rows.length_ns, minlength=idle_ns.size).astype(np.int64)
    begin = 0
    while begin < idle_ns.size and queue.work_ns:
        until = min(idle_ns.size, begin + _CHECK_INTERVAL - queue.windows)
        until = min(until, learned) if begin < learned else until
        first, last = np.searchsorted(rows.window, [begin, until])
        part = slice(int(first), int(last))
        idle, queued_ns = follow_queue(
            launched_steps[part], rows.length_ns[part], queue.work_ns, queue.queued_ns
        )
        predicted_ns[part] = idle
        queue = replace(queue, queued_ns=queued_ns)
        if begin >= learned:
            windows = slice(begin, until)
            in_window_ns = np.bincount(rows.window[part] - begin, idle, minlength=until - begin)
            queue = _compare_predictions(
                replace(
                    queue,
                    windows=queue.windows + until - begin,
                    error_ns=queue.error_ns + round(np.abs(in_window_ns - idle_ns[windows]).sum()),
                    shares_error_ns=queue.shares_error_ns
                    + round(float(np.abs(shares_idle_ns[windows] - idle_ns[windows]).sum())),
                    busy_ns=queue.busy_ns + int((length_ns[windows] - idle_ns[windows]).sum()),
                    launched_steps=queue.launched_steps + float(launched_steps[part].sum()),
                )
            )
        begin = until
    return predicted_ns, queue


def _compare_predictions(queue: DeviceQueue) -> DeviceQueue:
    """Give the queue up if the shares predicted better; else update the work of a step."""
    if queue.windows < _CHECK_INTERVAL:
        return queue
    if queue.error_ns > queue.shares_error_ns or queue.launched_steps <= 0:
        return NO_QUEUE
    return DeviceQueue(
        work_ns=max(round(queue.busy_ns / queue.launched_steps), 1),
        usual_ns=queue.usual_ns,
        queued_ns=queue.queued_ns,
        open_step=queue.open_step,
    )


def fit_to_windows(window: Int, phase: Int, room_ns: Int, predicted_ns: Float, idle_ns: Int) -> Int:
    """Fit predicted idle time to that of each window: int64[n], ns, at most the room.

    window, phase, room_ns: int64[n]. idle_ns: int64[windows].
    """
    predicted_ns = np.minimum(predicted_ns, room_ns)
    in_window_ns = np.bincount(window, predicted_ns, minlength=idle_ns.size)
    open_ns = np.where(predicted_ns > 0, room_ns - predicted_ns, 0.0)
    left_ns = np.bincount(window, open_ns, minlength=idle_ns.size)
    missing_ns = idle_ns - in_window_ns
    scale = np.clip(idle_ns / np.maximum(in_window_ns, 1.0), 0.0, 1.0)
    added_ratio = np.clip(missing_ns / np.maximum(left_ns, 1.0), 0.0, 1.0)
    fitted_ns = predicted_ns * scale[window] + open_ns * added_ratio[window]
    out = np.minimum(np.floor(fitted_ns).astype(np.int64), room_ns)
    rest_ns = idle_ns - np.bincount(window, out, minlength=idle_ns.size).astype(np.int64)
    return out + allocate_by_phase(window, phase, room_ns - out, rest_ns, FILL_ORDER)
