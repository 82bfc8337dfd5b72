"""What a host did beside the idle time of its device, from sums over windows."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.attribution.rank.host_activity import (
    estimate_busy_rate,
    estimate_idle_share,
    estimate_idle_share_from_samples,
)

MS = 1_000_000


def of(windows: list[tuple[float, float]]) -> tuple[np.ndarray, ...]:
    """(did, idle) in ms of windows of 100 ms: did, idle, length, start."""
    did, idle = np.array(windows, np.float64).T * MS
    n = len(windows)
    return did, idle.astype(np.int64), np.full(n, 100 * MS), np.arange(n) * 100 * MS


def test_host_activity_during_device_work_explains_no_idle_time() -> None:
    # 10 % of busy time, and all of idle time: 10, 46, 28 and 10 ms of 100.
    windows = of([(10, 0), (46, 40), (28, 20), (10, 0)] * 5)
    assert estimate_busy_rate(windows[0], windows[1], windows[2]) == pytest.approx(0.1)
    assert estimate_idle_share(*windows) == pytest.approx(np.ones(20))


def test_constant_host_activity_overlaps_idle_time_in_proportion() -> None:
    # 30 % whether the device idles or not
    assert estimate_idle_share(*of([(30, 0), (30, 40), (30, 20), (30, 0)] * 5)) == pytest.approx(
        np.full(20, 0.3)
    )


def test_host_activity_only_during_device_work_never_overlaps_idle_time() -> None:
    windows = of([(100, 0), (60, 40), (80, 20), (100, 0)] * 5)
    assert estimate_idle_share(*windows) == pytest.approx(np.zeros(20))


def test_host_activity_longer_than_busy_time_overlaps_idle_time() -> None:
    # Alike, so that the windows tell nothing: 90 ms of 100, of which 60 are busy; 30 of 40 at least
    # must be beside, and as much as at any time is 0.9 of 40.
    assert estimate_idle_share(*of([(90, 40)] * 20)) == pytest.approx(np.full(20, 0.9))
    # Too few windows to tell more, too: 70 of 100 idle, and it did so for 100.
    assert estimate_idle_share(*of([(100, 70)] * 3)) == pytest.approx(np.ones(3))


def test_unknown_windows_do_not_change_the_idle_share() -> None:
    did, idle, length, start = of([(10, 0), (46, 40), (28, 20), (10, 0)] * 5)
    did[1] = np.nan
    assert estimate_idle_share(did, idle, length, start) == pytest.approx(np.ones(20))


def test_sampled_activity_counts_in_full_unless_windows_contradict() -> None:
    # A thread found blocked in every other idle window, for all of it: half of the idle time.
    half = of([(40, 40), (0, 40)] * 10)
    assert estimate_idle_share_from_samples(*half) == pytest.approx(np.full(20, 0.5))
    # Blocked for half of each window whatever the device does, seconds of both: that is no reason.
    both = of([(50, 0)] * 50 + [(50, 100)] * 50)
    assert estimate_idle_share_from_samples(*both)[50:] == pytest.approx(np.full(50, 0.5), abs=0.01)
    # Blocked only while the device works: hidden.
    hidden = of([(60, 0)] * 50 + [(0, 100)] * 50)
    assert estimate_idle_share_from_samples(*hidden)[50:] == pytest.approx(np.zeros(50), abs=0.01)


def test_the_idle_share_is_estimated_per_two_seconds() -> None:
    first, second = [(0, 0), (50, 50)] * 10, [(0, 0), (0, 50)] * 10
    share = estimate_idle_share(*of(first + second))
    assert share[:20].mean() > 0.9 and share[20:].mean() < 0.1
