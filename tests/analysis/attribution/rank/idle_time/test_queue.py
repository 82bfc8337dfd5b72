"""Idle device time by the queue of launched work: hand-computed schedules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.attribution.rank.idle_time.queue import (
    ASLEEP,
    NO_QUEUE,
    DeviceQueue,
    LaunchRows,
    compute_launched_steps,
    fit_to_windows,
    follow_queue,
    learn_queue,
    predict_by_queue,
    separate_sleep,
)
from clusterprof.analysis.attribution.rank.idle_time.shares import (
    PHASES,
    PhaseShares,
    follow_shares_of_queue,
    update_shares,
)
from clusterprof.analysis.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_SYNC,
)

MS = 1_000_000
STEP = (PHASE_COMPUTE, PHASE_DATA_WAIT)


def build_steps(waits_ms: list[int], launch_ms: int = 10) -> LaunchRows:
    """Steps of a window each: the host launches for `launch_ms`, then waits for data."""
    count = len(waits_ms)
    lengths = np.array([[launch_ms, wait] for wait in waits_ms]).ravel() * MS
    number = np.repeat(np.arange(count), 2)
    return LaunchRows(number, np.tile(STEP, count), lengths.astype(np.int64), number)


def test_a_wait_is_idle_from_the_time_at_which_the_queue_is_empty() -> None:
    # 30 ms of work a step. Launching takes 10: 20 are queued then. Waits of 5, 20 and 50: after the
    # first 15 are left, so 35 before the second wait, of which 15 remain; 35 are done in the third.
    rows = build_steps([5, 20, 50])
    launched_steps, _ = compute_launched_steps(rows)
    idle_ns, queued_ns = follow_queue(launched_steps, rows.length_ns, 30 * MS)
    assert (idle_ns / MS).tolist() == [0, 0, 0, 0, 0, 15]
    assert queued_ns == 0


def test_work_that_is_still_queued_keeps_the_device_busy_in_the_next_segment() -> None:
    rows = build_steps([5])
    _, queued_ns = follow_queue(np.array([1.0, 0.0]), rows.length_ns, 30 * MS)
    assert queued_ns == 15 * MS
    idle_ns, _ = follow_queue(np.zeros(1), np.array([20 * MS]), 30 * MS, queued_ns)
    assert idle_ns.tolist() == [5 * MS]


def test_a_device_that_is_faster_than_its_host_idles_while_the_host_launches() -> None:
    # 4 ms of work in 10 of launching: idle for 6 of them, and in all of the wait.
    rows = build_steps([20, 20])
    idle_ns, _ = follow_queue(np.array([1.0, 0, 1.0, 0]), rows.length_ns, 4 * MS)
    assert (idle_ns / MS).tolist() == [6, 20, 6, 20]


def test_each_step_launches_the_same_work_however_long_it_takes() -> None:
    rows = build_steps([0, 0, 0, 0])
    rows = replace(rows, length_ns=np.array([10, 0, 20, 0, 30, 0, 2, 0]) * MS)
    launched_steps, usual_ns = compute_launched_steps(rows)
    assert usual_ns == 15 * MS
    # The last one launches for less than a quarter of 15: it is cut by the recording.
    assert launched_steps.tolist() == pytest.approx([1, 0, 1, 0, 1, 0, 2 / 3.75, 0])


def test_a_step_that_began_before_the_segment_launches_the_rest_of_its_work() -> None:
    rows = build_steps([0])
    launched_steps, _ = compute_launched_steps(rows, before_ns=20 * MS, usual_ns=30 * MS)
    assert launched_steps.tolist() == pytest.approx([1 / 3, 0])
    launched_steps, _ = compute_launched_steps(rows, after_ns=10 * MS, usual_ns=30 * MS)
    assert launched_steps.tolist() == pytest.approx([1 / 2, 0])


def test_sleep_of_unknown_place_lies_in_the_middle_of_launching() -> None:
    rows = LaunchRows(np.array([0]), np.array([PHASE_COMPUTE]), np.array([40 * MS]), np.array([0]))
    apart = separate_sleep(rows, np.array([30 * MS]), None)
    assert apart.phase.tolist() == [PHASE_COMPUTE, ASLEEP, PHASE_COMPUTE]
    assert (apart.length_ns / MS).tolist() == [5, 30, 5]
    behind_sync = separate_sleep(rows, np.array([30 * MS]), np.array([True]))
    assert (behind_sync.length_ns / MS).tolist() == [0, 30, 10]


def make_waits(count: int) -> list[int]:
    return [5 if step % 2 else 60 for step in range(count)]


def measure_windows(rows: LaunchRows, idle_ns: np.ndarray) -> np.ndarray:
    return np.bincount(rows.window, idle_ns).astype(np.int64)


def test_the_queue_is_followed_if_it_predicts_the_windows_better() -> None:
    # Waits of 60 and 5 in turn: the long ones are idle for 60 - 20 - 15, the short ones not at all.
    rows = build_steps(make_waits(64))
    launched_steps, _ = compute_launched_steps(rows)
    idle_ns = measure_windows(rows, follow_queue(launched_steps, rows.length_ns, 30 * MS)[0])
    shares_idle_ns = np.full(64, idle_ns.mean())
    queue = learn_queue(rows, idle_ns, shares_idle_ns)
    # What the last step has queued is not done yet, and counts as 15 ms less in 64 steps.
    assert queue.work_ns / MS == pytest.approx(30, abs=15 / 64 + 0.01)
    assert learn_queue(rows, idle_ns, idle_ns.astype(np.float64)) == NO_QUEUE


def test_a_queue_that_the_host_empties_in_its_steps_is_not_followed() -> None:
    # The same steps, in which a wait for the device of 0.5 or 2 ms follows each wait for data.
    rows = build_steps(make_waits(64))
    launched_steps, _ = compute_launched_steps(rows)
    idle_ns = measure_windows(rows, follow_queue(launched_steps, rows.length_ns, 30 * MS)[0])
    for wait_ms, is_followed in ((0.5, True), (2, False)):
        count, order = 64, np.argsort(np.r_[rows.window, np.arange(64)], kind="stable")
        synced = LaunchRows(
            np.r_[rows.window, np.arange(count)][order],
            np.r_[rows.phase, np.full(count, PHASE_SYNC)][order],
            np.r_[rows.length_ns, np.full(count, round(wait_ms * MS))][order],
            np.r_[rows.step, np.arange(count)][order],
        )
        queue = learn_queue(synced, idle_ns, np.full(64, idle_ns.mean()))
        assert (queue.work_ns > 0) == is_followed


def test_the_queue_is_given_up_when_the_shares_predict_better() -> None:
    rows = build_steps(make_waits(1024))
    launched_steps, _ = compute_launched_steps(rows)
    queue = DeviceQueue(work_ns=25 * MS, usual_ns=10 * MS)
    right = measure_windows(rows, follow_queue(launched_steps, rows.length_ns, 30 * MS)[0])
    poor = np.zeros(1024)
    predicted_ns, kept = predict_by_queue(rows, launched_steps, right, poor, queue)
    assert kept.work_ns / MS == pytest.approx(30, abs=0.1)
    assert not np.isnan(predicted_ns).any()
    # The queue was learned from the first 100 windows: they do not count again.
    _, kept = predict_by_queue(rows, launched_steps, right, poor, queue, learned=100)
    assert kept.windows == 1024 - 100 - 512
    # Idle in all of each wait: the shares say so, and after 512 windows they are believed.
    full = measure_windows(rows, np.where(rows.phase == PHASE_DATA_WAIT, rows.length_ns, 0))
    predicted_ns, given_up = predict_by_queue(rows, launched_steps, full, full * 1.0, queue)
    assert given_up == NO_QUEUE
    assert np.isnan(predicted_ns).tolist() == [False] * 1024 + [True] * 1024


@pytest.mark.parametrize("cut", [1, 100, 511, 512, 513, 700])
def test_a_cut_between_windows_changes_nothing(cut: int) -> None:
    rows = build_steps(make_waits(1024))
    launched_steps, _ = compute_launched_steps(rows)
    queue = DeviceQueue(work_ns=29 * MS, usual_ns=10 * MS)
    idle_ns = measure_windows(rows, follow_queue(launched_steps, rows.length_ns, 30 * MS)[0])
    whole, at_once = predict_by_queue(rows, launched_steps, idle_ns, np.zeros(1024), queue)
    parts = []
    for low, high in ((0, cut), (cut, 1024)):
        inside = (rows.window >= low) & (rows.window < high)
        part = LaunchRows(
            rows.window[inside] - low, rows.phase[inside], rows.length_ns[inside], rows.step[inside]
        )
        amounts = launched_steps[inside], idle_ns[low:high], np.zeros(high - low)
        predicted_ns, queue = predict_by_queue(part, *amounts, queue)
        parts.append(predicted_ns)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert queue == at_once


def test_predicted_idle_time_is_fitted_to_what_was_measured() -> None:
    # Window 0: 30 and 10 predicted, 20 measured: half of each. Window 1: 30 of 40 and nothing of 20
    # predicted, 45 measured: 10 more fit where the queue ran empty, the other 5 in the other wait,
    # although waits for data come first otherwise.
    window = np.array([0, 0, 1, 1])
    phase = np.array([PHASE_COLLECTIVE, PHASE_DATA_WAIT, PHASE_COLLECTIVE, PHASE_DATA_WAIT])
    room_ns = np.array([40, 40, 40, 20]) * MS
    predicted_ns = np.array([30.0, 10.0, 30.0, 0.0]) * MS
    fitted_ns = fit_to_windows(window, phase, room_ns, predicted_ns, np.array([20, 45]) * MS)
    assert (fitted_ns / MS).tolist() == [15, 5, 40, 5]


def test_in_a_job_of_several_ranks_shares_are_the_means_of_the_queue() -> None:
    # Of each 60 + 5 of waiting, 25 are idle: 5 / 13. Launching is never idle.
    rows = build_steps(make_waits(64))
    known = PhaseShares(windows=64, shares=(0.5,) * PHASES)
    followed = follow_shares_of_queue(known, rows, DeviceQueue(work_ns=30 * MS, usual_ns=10 * MS))
    assert followed.shares[PHASE_COMPUTE] == 0.0
    assert followed.shares[PHASE_DATA_WAIT] == pytest.approx(5 / 13, abs=0.01)
    assert followed.shares[PHASE_COLLECTIVE] == 0.5
    assert follow_shares_of_queue(known, rows, NO_QUEUE) == known


@pytest.mark.parametrize(("idle_part", "kept"), [(0.4, True), (1.0, False)])
def test_shares_of_a_queue_stay_unless_others_are_far_better(idle_part: float, kept: bool) -> None:
    # 100 windows that are half launching and half a wait, idle for a part of the wait.
    parts = np.zeros(PHASES)
    parts[[PHASE_COMPUTE, PHASE_DATA_WAIT]] = 0.5
    idle = 0.5 * idle_part
    shares = np.zeros(PHASES)
    shares[PHASE_DATA_WAIT] = 0.4
    known = PhaseShares(
        windows=100,
        products=tuple((100 * np.outer(parts, parts)).ravel()),
        idle_products=tuple(100 * parts * idle),
        idle_squares=100 * idle**2,
        shares=tuple(shares),
        from_queue=True,
    )
    assert (update_shares(known).shares == known.shares) == kept
    assert update_shares(known).from_queue == kept
