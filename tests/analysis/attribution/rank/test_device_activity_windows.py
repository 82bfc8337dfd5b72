"""Means of a device since their last reading, over windows with other edges: by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from clusterprof.analysis.attribution.rank import device_activity
from clusterprof.analysis.attribution.rank.device_activity import DeviceWindows
from tests.support.builders import make_gauge, to_ns_array

NAN = float("nan")


def average(
    t_s: Sequence[float], values: Sequence[float], *windows: tuple[float, float]
) -> list[float]:
    start, end = (to_ns_array([window[at] for window in windows]) for at in (0, 1))
    none = np.zeros(len(windows), np.int64)
    given = DeviceWindows(start, end, none, none)
    return device_activity._average_over_windows(make_gauge(t_s, values), given).tolist()


def test_a_reading_is_the_mean_since_the_previous_reading() -> None:
    # 0.2 up to 1, 0.4 up to 2, 0.8 up to 3; the first one covers as long as the second: from 0 on
    t_s, values = [1, 2, 3], [0.2, 0.4, 0.8]
    assert average(t_s, values, (0, 1), (1, 2), (2, 3)) == pytest.approx([0.2, 0.4, 0.8])
    # half of the first and half of the second; a quarter of the second and all of the third
    assert average(t_s, values, (0.5, 1.5)) == pytest.approx([0.3])
    assert average(t_s, values, (1.75, 3)) == pytest.approx([(0.25 * 0.4 + 0.8) / 1.25])


def test_a_window_less_than_half_covered_has_no_mean() -> None:
    # readings cover [0, 2): all, half and less than half of these windows
    t_s, values = [1, 2], [0.2, 0.4]
    result = average(t_s, values, (1, 2), (1.5, 2.5), (1.5, 2.6), (2, 3))
    assert result == pytest.approx([0.4, 0.4, NAN, NAN], nan_ok=True)


def test_a_missing_reading_covers_nothing() -> None:
    # 0.2 in [0, 1), unknown in [1, 2), 0.8 in [2, 3)
    t_s, values = [1, 2, 3], [0.2, NAN, 0.8]
    result = average(t_s, values, (0, 2), (1, 2), (1.5, 3), (1.2, 2.7))
    assert result == pytest.approx([0.2, NAN, 0.8, NAN], nan_ok=True)


def test_a_reading_after_a_long_gap_is_ignored() -> None:
    # a mean over 2.5 s holds, one over 2.6 s does not
    assert average([1, 2, 4.5], [0.2, 0.4, 0.8], (3, 4)) == pytest.approx([0.8])
    assert average([1, 2, 4.6], [0.2, 0.4, 0.8], (3, 4)) == pytest.approx([NAN], nan_ok=True)
    # a single reading covers nothing
    assert average([1], [0.2], (0, 1)) == pytest.approx([NAN], nan_ok=True)
