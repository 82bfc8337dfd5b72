"""Unions, gaps and what lies in them: by hand, and against sets of single nanoseconds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.importers.device_gaps import (
    Intervals,
    both,
    exposed,
    gaps,
    inside,
    starved,
    union,
    without,
)

SOME = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def some(*pairs: tuple[int, int]) -> Intervals:
    """Intervals as two arrays."""
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def said(intervals: Intervals) -> list[tuple[int, int]]:
    return list(zip(intervals[0].tolist(), intervals[1].tolist()))


def instants(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in pairs for t in range(start, end)}


def test_a_union_is_sorted_and_apart_and_gaps_are_the_rest() -> None:
    busy = union(*some((50, 60), (10, 20), (15, 30), (30, 35), (12, 13), (7, 7)))
    assert said(busy) == [(10, 35), (50, 60)]
    assert said(gaps(busy, 0, 70)) == [(0, 10), (35, 50), (60, 70)]
    assert said(gaps(busy, 20, 55)) == [(35, 50)]
    assert said(gaps(union(*some()), 3, 9)) == [(3, 9)]


def test_what_an_operation_shares_with_other_work_is_not_exposed() -> None:
    other = union(*some((10, 20), (40, 45)))
    start, end = some((0, 15), (20, 40), (12, 18), (30, 60))
    assert inside(start, end, other).tolist() == [5, 0, 6, 5]
    assert exposed(start, end, other).tolist() == [10, 20, 0, 25]


def test_a_gap_is_starved_when_the_next_launch_returned_after_it_began() -> None:
    idle = some((10, 20), (30, 40), (50, 60), (70, 80))
    begins = np.array([0, 20, 40, 60], np.int64)  # nothing begins at 80
    launched = np.array([1, 15, 9, -1], np.int64)  # in the gap, long before it, unknown
    assert starved(idle, begins, launched).tolist() == [True, False, False, False]


@given(SOME, SOME)
def test_they_are_sets_of_nanoseconds(
    one: list[tuple[int, int]], two: list[tuple[int, int]]
) -> None:
    a, b = union(*some(*one)), union(*some(*two))
    first, second = instants(one), instants(two)
    assert instants(said(a)) == first
    assert instants(said(without(a, b))) == first - second
    assert instants(said(both(a, b))) == first & second
    assert instants(said(gaps(a, 5, 30))) == set(range(5, 30)) - first
    pairs = [(start, end) for start, end in one if start <= end]
    if pairs:
        expected = [len(set(range(start, end)) & second) for start, end in pairs]
        assert inside(*some(*pairs), b).tolist() == expected
    for found in (said(a), said(without(a, b)), said(both(a, b))):
        assert all(start < end for start, end in found)
        assert all(end < start for (_, end), (start, _) in pairwise(found))
