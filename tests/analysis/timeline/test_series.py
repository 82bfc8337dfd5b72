"""The rule for the time between two readings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.timeline import series
from clusterprof.analysis.timeline.model import Rank
from clusterprof.errors import DEVICES_RELEASED
from clusterprof.trace.schema import Event, Gap
from tests.support.builders import make_counter, make_gauge, make_process, make_rank, to_ns_array

NAN = float("nan")
READ = make_counter([0, 0.1, 0.2], [10, 30, 90])


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.0, 0.1, 20),  # exact
        (0.0, 0.2, 80),
        (0.05, 0.2, 70),  # half of the first difference (10) and the second (60)
        (0.025, 0.075, 10),  # both edges in one difference: half of 20
        (0.1, 0.15, 30),
        (0.1, 0.1, 0),
        (0.15, 0.25, NAN),  # the end lies after the last reading
        (-0.1, 0.1, NAN),
        (0.2, 0.2, 0),
    ],
)
def test_a_counter_rise_is_interpolated_between_readings(
    start: float, end: float, expected: float
) -> None:
    increase = series.compute_increase(READ, to_ns_array([start]), to_ns_array([end]))
    np.testing.assert_allclose(increase, [expected], rtol=1e-12)


def test_a_counter_reset_invalidates_only_the_interval_around_the_reset() -> None:
    # 0 -> 100 -> (reset) 5 -> 25: the middle difference is unusable
    read = make_counter([0, 1, 2, 3], [0, 100, 5, 25])
    start, end = to_ns_array([0, 0.5, 1, 1.5, 2, 2.5]), to_ns_array([1, 1.5, 2, 1.6, 3, 3])
    np.testing.assert_allclose(
        series.compute_increase(read, start, end), [100, NAN, NAN, NAN, 20, 10]
    )


def test_a_missing_reading_invalidates_both_adjacent_intervals() -> None:
    read = make_counter([0, 1, 2, 3, 4], [0, 10, NAN, 30, 40])
    start, end = to_ns_array([0, 0, 1, 2, 3]), to_ns_array([1, 2, 3, 3, 4])
    np.testing.assert_allclose(series.compute_increase(read, start, end), [10, NAN, NAN, NAN, 10])


def test_minus_one_in_an_integer_column_is_missing_not_a_value() -> None:
    t_ns, denied = to_ns_array([0, 1, 2]), np.array([-1, -1, -1], np.int64)
    column_increase = series.compute_column_increase(
        t_ns, denied, to_ns_array([0]), to_ns_array([2])
    )
    np.testing.assert_allclose(column_increase, [NAN])
    partly = np.array([5, -1, 9], np.int64)
    np.testing.assert_allclose(
        series.compute_column_increase(t_ns, partly, to_ns_array([0]), to_ns_array([2])), [NAN]
    )


@pytest.mark.parametrize("readings", [make_counter([], []), make_counter([1], [5])])
def test_a_single_reading_gives_no_value(readings: series.Series) -> None:
    assert np.isnan(series.compute_increase(readings, to_ns_array([1]), to_ns_array([1]))).all()
    assert np.isnan(series.compute_mean(readings, to_ns_array([1]), to_ns_array([2]))).all()


def test_a_gauge_holds_until_the_next_reading() -> None:
    busy = make_gauge([0, 0.1, 0.2, 0.4], [1.0, 0.0, 0.5, 9.0])
    start, end = to_ns_array([0.05, 0, 0.1, 0.3, 0.5]), to_ns_array([0.15, 0.4, 0.4, 0.9, 0.6])
    # 0-0.4: (0.1·1 + 0.1·0 + 0.2·0.5) / 0.4 = 0.5; 0.1-0.4: 0.1/0.3; beyond the last: nothing
    expected = [0.5, 0.5, 1 / 3, 0.5, NAN]
    np.testing.assert_allclose(series.compute_mean(busy, start, end), expected)


def test_a_missing_gauge_has_no_weight() -> None:
    busy = make_gauge([0, 1, 2, 3], [1.0, NAN, 0.0, 0.0])
    np.testing.assert_allclose(
        series.compute_mean(busy, to_ns_array([0, 1]), to_ns_array([3, 2])), [0.5, NAN]
    )


NAME = "gpu.sm_active_ratio"


def device_with(**series_of: series.Series) -> Rank:
    """A rank whose device has these series: `busy`, `until`, `active`."""
    names = {"busy": "gpu.busy_ns_total", "until": "gpu.busy_until_ns", "active": NAME}
    table = {(names[key], "gpu-0"): value for key, value in series_of.items()}
    return make_rank(10, make_process(100), device="gpu-0", series=table)


def test_busy_time_counts_up_to_the_end_of_the_drivers_period() -> None:
    # polled at 1.0, 1.1, ...; the driver's periods ended a little before. The third poll got the
    # period of the second again (and the same total): it is dropped.
    busy = make_counter([1.0, 1.1, 1.2, 1.3], [0, 5, 5, 25])
    until = make_gauge([1.0, 1.1, 1.2, 1.3], [0.97e9, 1.06e9, 1.06e9, 1.27e9])
    t_ns, busy_ns = series.get_busy_readings(device_with(busy=busy, until=until))
    assert t_ns.tolist() == to_ns_array([0.97, 1.06, 1.27]).tolist()
    assert busy_ns.tolist() == [0, 5, 25]


def test_a_period_that_ends_after_its_poll_keeps_the_time_of_the_poll() -> None:
    # every second poll reads anew, 2 ms after its own time; the other one repeats that end
    busy = make_counter([1.0, 1.1, 1.2, 1.3, 1.4], [0, 0, 50, 50, 80])
    until = make_gauge([1.0, 1.1, 1.2, 1.3, 1.4], [1.002e9, 1.002e9, 1.202e9, 1.202e9, 1.402e9])
    t_ns, busy_ns = series.get_busy_readings(device_with(busy=busy, until=until))
    assert t_ns.tolist() == to_ns_array([1.0, 1.2, 1.4]).tolist()
    assert busy_ns.tolist() == [0, 50, 80]


def test_an_end_that_cannot_be_right_leaves_the_time_of_the_poll() -> None:
    # at 1.1 the driver's clock was not understood, at 1.2 far ahead of ours, at 1.3 the end was
    # not read at all
    busy = make_counter([1.0, 1.1, 1.2, 1.3, 1.4], [0, 5, 9, 12, 20])
    until = make_gauge([1.0, 1.1, 1.2, 1.4], [0.97e9, NAN, 9.25e9, 1.38e9])
    t_ns, busy_ns = series.get_busy_readings(device_with(busy=busy, until=until))
    assert t_ns.tolist() == to_ns_array([0.97, 1.1, 1.2, 1.3, 1.38]).tolist()
    assert busy_ns.tolist() == [0, 5, 9, 12, 20]


def test_a_later_driver_end_does_not_replace_a_missing_end() -> None:
    # the poll at 1.1 read no end; that of 1.2 lies before it, and its reading is dropped
    busy = make_counter([1.0, 1.1, 1.2, 1.3], [0, 5, 9, 12])
    until = make_gauge([1.0, 1.2, 1.3], [0.97e9, 1.08e9, 1.28e9])
    t_ns, busy_ns = series.get_busy_readings(device_with(busy=busy, until=until))
    assert t_ns.tolist() == to_ns_array([0.97, 1.1, 1.28]).tolist()
    assert busy_ns.tolist() == [0, 5, 12]


def test_readings_with_a_backward_driver_end_are_dropped() -> None:
    # the second reading keeps its poll's time, 1.1; the third ended before that, at 1.05; so did
    # the fourth, which would follow the third
    busy = make_counter([1.0, 1.1, 1.2, 1.3, 1.4], [0, 5, 6, 7, 20])
    until = make_gauge([1.0, 1.1, 1.2, 1.3, 1.4], [0.97e9, NAN, 1.05e9, 1.08e9, 1.38e9])
    t_ns, busy_ns = series.get_busy_readings(device_with(busy=busy, until=until))
    assert t_ns.tolist() == to_ns_array([0.97, 1.1, 1.38]).tolist()
    assert busy_ns.tolist() == [0, 5, 20]


def test_without_ends_busy_time_counts_up_to_its_poll() -> None:
    busy = make_counter([1.0, 1.1, 1.2], [0, 5, 5])
    for given in (device_with(busy=busy), device_with(busy=busy, until=make_gauge([], []))):
        t_ns, busy_ns = series.get_busy_readings(given)
        assert (t_ns.tolist(), busy_ns.tolist()) == (
            to_ns_array([1.0, 1.1, 1.2]).tolist(),
            [0, 5, 5],
        )


def test_a_missing_busy_total_is_left_out() -> None:
    busy = make_counter([1.0, 1.1, 1.2], [0, NAN, 8])
    until = make_gauge([1.0, 1.1, 1.2], [0.97e9, 1.07e9, 1.17e9])
    t_ns, busy_ns = series.get_busy_readings(device_with(busy=busy, until=until))
    assert (t_ns.tolist(), busy_ns.tolist()) == (to_ns_array([0.97, 1.17]).tolist(), [0, 8])


def test_equal_totals_around_a_release_are_no_idle_time() -> None:
    # Idle until the device was released at 1.15 s; opened again, its collector counts from 0.
    busy = make_counter([1.0, 1.1, 5.0, 5.1], [0, 0, 0, 30])
    rank = device_with(busy=busy)
    released = Gap(int(1.15e9), "gpu_nvidia", "", "", "failed", DEVICES_RELEASED.message, "")
    of_another = Gap(int(1.05e9), "gpu_nvidia", "", "gpu-1", "failed", DEVICES_RELEASED.message, "")
    for gaps in ((released,), (released, released, of_another)):
        chunk = replace(rank.chunk, gaps=gaps)
        _, busy_ns = series.get_busy_readings(replace(rank, chunk=chunk))
        growth = np.diff(busy_ns)
        assert (growth[0], growth[2]) == (0, 30)
        assert growth[1] < 0  # not measured


def test_equal_totals_around_a_restart_of_the_helper_are_no_idle_time() -> None:
    busy = make_counter([1.0, 1.1, 5.0, 5.1], [0, 20, 20, 50])
    rank = device_with(busy=busy)
    restarted = Event(int(4.9e9), series.HELPER_RESTARTED, {"collector": "gpu_nvidia"})
    chunk = replace(rank.chunk, events=(restarted,))
    growth = np.diff(series.get_busy_readings(replace(rank, chunk=chunk))[1])
    assert (growth[0], growth[2]) == (20, 30)
    assert growth[1] < 0  # not measured


def test_a_reading_that_failed_for_a_moment_costs_no_busy_time() -> None:
    busy = make_counter([1.0, 1.1, 1.2], [0, NAN, 8])
    failed = Gap(int(1.1e9), "gpu_nvidia", "", "", "failed", "no answer yet", "")
    rank = device_with(busy=busy)
    rank = replace(rank, chunk=replace(rank.chunk, gaps=(failed,)))
    assert series.get_busy_readings(rank)[1].tolist() == [0, 8]


def test_a_mean_ends_where_the_drivers_period_does() -> None:
    active = make_gauge([1.0, 1.1, 1.2], [0.5, 0.7, 0.7])
    until = make_gauge([1.0, 1.1, 1.2], [0.97e9, 1.06e9, 1.06e9])
    moved = series.get_means_at_driver_times(device_with(active=active, until=until), NAME)
    assert moved is not None
    assert (
        moved.t_ns.tolist() == to_ns_array([0.97, 1.06]).tolist()
    )  # the third is the second again
    assert moved.values.tolist() == [0.5, 0.7]
    alone = series.get_means_at_driver_times(device_with(active=active), NAME)
    assert alone is active
    assert series.get_means_at_driver_times(device_with(until=until), NAME) is None
