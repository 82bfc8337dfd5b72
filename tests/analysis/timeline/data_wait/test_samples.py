"""How long a thread slept at a place, on samples whose answer is arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clusterprof.analysis.timeline.data_wait.samples import find_runs, find_sleep_samples
from tests.support.builders import WCHAN_NAMES, make_thread, parse_activity, to_ns_array

LOCK = WCHAN_NAMES.index("futex_wait_queue")


def on_lock(name: str) -> bool:
    return "futex" in name


def test_sleep_samples_on_a_lock_are_found() -> None:
    table = make_thread(parse_activity("L0.3 U0.3 L0.4"), 1)
    sleeps = find_sleep_samples(table, WCHAN_NAMES, on_lock)
    assert sleeps.tolist() == [True] * 3 + [False] * 3 + [True] * 4 + [False]


def test_short_unnamed_sleep_inherits_the_neighbouring_place() -> None:
    table = make_thread(parse_activity("S1 L3"), 4)
    wchan = table.wchan.copy()
    wchan[12:20] = -1  # after two samples on the lock
    wchan[0:10] = -1  # before: asleep at a place that nobody asked for, until the lock
    wchan[30:40] = -1
    table = replace(table, wchan=wchan)
    sleeps = find_sleep_samples(table, WCHAN_NAMES, on_lock)
    # the name at 1.0 s speaks for less than a second before, that at 2.9 s for less than one after
    assert np.flatnonzero(sleeps).tolist() == list(range(1, 39))


def test_runs_bridge_a_single_other_sample() -> None:
    t_ns = to_ns_array([0.1 * i for i in range(10)])
    first, last = find_runs(t_ns, np.array([0, 1, 1, 0, 1, 0, 0, 1, 0, 0], np.bool_))
    assert (first.tolist(), last.tolist()) == ([1, 7], [4, 7])
    assert find_runs(t_ns, np.zeros(10, np.bool_))[0].tolist() == []
