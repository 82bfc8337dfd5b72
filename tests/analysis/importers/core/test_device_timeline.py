"""Unions, gaps and what lies in them: by hand, and against sets of single nanoseconds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.analysis.importers.core.device_timeline import (
    NEVER,
    Intervals,
    compute_exposed_ns,
    find_gaps,
    find_late_launches,
    measure_overlap,
    merge_intervals,
    subtract_intervals,
)

SOME = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def intervals_of(*pairs: tuple[int, int]) -> Intervals:
    """Intervals as two arrays."""
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def pairs_of(intervals: Intervals) -> list[tuple[int, int]]:
    return list(zip(intervals[0].tolist(), intervals[1].tolist()))


def instants(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in pairs for t in range(start, end)}


def test_merged_intervals_are_disjoint_and_gaps_are_the_rest() -> None:
    busy = merge_intervals(*intervals_of((50, 60), (10, 20), (15, 30), (30, 35), (12, 13), (7, 7)))
    assert pairs_of(busy) == [(10, 35), (50, 60)]
    assert pairs_of(find_gaps(busy, 0, 70)) == [(0, 10), (35, 50), (60, 70)]
    assert pairs_of(find_gaps(busy, 20, 55)) == [(35, 50)]
    assert pairs_of(find_gaps(merge_intervals(*intervals_of()), 3, 9)) == [(3, 9)]


def test_overlap_with_other_work_is_not_exposed_time() -> None:
    other = merge_intervals(*intervals_of((10, 20), (40, 45)))
    start, end = intervals_of((0, 15), (20, 40), (12, 18), (30, 60))
    assert measure_overlap(start, end, other).tolist() == [5, 0, 6, 5]
    assert compute_exposed_ns(start, end, other).tolist() == [10, 20, 0, 25]


def test_a_late_launch_lasts_until_its_call_returns() -> None:
    cases = [
        # gap, call, whether the call returns only after its work; until when the host was late
        ((10_000, 20_000), (9_000, 15_000), False, 15_000),
        ((10_000, 20_000), (9_000, 25_000), False, 20_000),  # it went on after the work began
        ((10_000, 20_000), (8_000, 9_000), False, None),  # it waited in the queue
        ((10_000, 20_000), (8_000, 10_000), False, None),
        ((10_000, 20_000), (9_000, 21_000), True, None),  # a copy waits for what is before it
        ((10_000, 20_000), (12_000, 21_000), True, 20_000),
        ((10_000, 11_000), (10_500, 10_900), False, None),  # as short as between any two kernels
        ((10_000, 11_001), (10_500, 10_900), False, 10_900),
        ((10_000, 20_000), (-1, -1), False, None),  # nobody says
        ((10_000, 20_000), (-1, -1), True, None),
        ((10_000, 20_000), (NEVER, NEVER), False, 20_000),
    ]
    start, end = intervals_of(*(case[0] for case in cases))
    begun, left = intervals_of(*(case[1] for case in cases))
    which, until = find_late_launches(
        start, end, begun, left, np.array([case[2] for case in cases])
    )
    ours = [t if yes else None for yes, t in zip(which.tolist(), until.tolist())]
    assert ours == [case[3] for case in cases]


@given(SOME, SOME)
def test_interval_operations_agree_with_sets_of_nanoseconds(
    rows: list[tuple[int, int]], two: list[tuple[int, int]]
) -> None:
    a, b = merge_intervals(*intervals_of(*rows)), merge_intervals(*intervals_of(*two))
    first, second = instants(rows), instants(two)
    assert instants(pairs_of(a)) == first
    assert instants(pairs_of(subtract_intervals(a, b))) == first - second
    assert instants(pairs_of(find_gaps(a, 5, 30))) == set(range(5, 30)) - first
    pairs = [(start, end) for start, end in rows if start <= end]
    if pairs:
        expected = [len(set(range(start, end)) & second) for start, end in pairs]
        assert measure_overlap(*intervals_of(*pairs), b).tolist() == expected
    for result in (pairs_of(a), pairs_of(subtract_intervals(a, b))):
        assert all(start < end for start, end in result)
        assert all(end < start for (_, end), (start, _) in pairwise(result))
