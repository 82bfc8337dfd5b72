"""The truth tables of the docstrings, and the laws of sets on random ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.analysis.timeline import intervals
from clusterprof.analysis.timeline.intervals import Intervals

Rows = list[tuple[int, int]]


def made(rows: Rows) -> Intervals:
    table = np.array(rows, np.int64).reshape(-1, 2)
    return Intervals(table[:, 0].copy(), table[:, 1].copy())


def rows(result: tuple[np.ndarray, np.ndarray]) -> Rows:
    return list(zip(result[0].tolist(), result[1].tolist()))


@pytest.mark.parametrize(
    ("given_rows", "merged"),
    [
        ([(0, 5), (3, 8)], [(0, 8)]),
        ([(0, 5), (5, 8)], [(0, 8)]),
        ([(0, 5), (6, 8)], [(0, 5), (6, 8)]),
        ([(0, 9), (2, 3), (4, 12)], [(0, 12)]),
        ([(6, 8), (0, 5)], [(0, 5), (6, 8)]),
        ([(4, 4)], []),
        ([], []),
    ],
)
def test_merging_intervals_gives_their_union(given_rows: Rows, merged: Rows) -> None:
    assert rows(intervals.merge_intervals(made(given_rows))) == merged


def test_union_of_no_set_is_empty() -> None:
    assert rows(intervals.merge_intervals()) == []


@pytest.mark.parametrize(
    ("a", "b", "both", "only_a"),
    [
        ([(0, 10)], [(5, 15)], [(5, 10)], [(0, 5)]),
        ([(0, 10)], [(2, 3), (8, 12)], [(2, 3), (8, 10)], [(0, 2), (3, 8)]),
        ([(0, 10)], [(10, 12)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], [(0, 10)], []),
        ([(0, 10), (20, 30)], [(5, 25)], [(5, 10), (20, 25)], [(0, 5), (25, 30)]),
        ([(0, 10)], [], [], [(0, 10)]),
        ([], [(0, 10)], [], []),
    ],
)
def test_intersect_and_subtract(a: Rows, b: Rows, both: Rows, only_a: Rows) -> None:
    assert rows(intervals.find_intersection(made(a), made(b))) == both
    assert rows(intervals.subtract_intervals(made(a), made(b))) == only_a


def test_overlaps_names_every_part_with_its_rows() -> None:
    overlaps = intervals.find_overlaps(made([(0, 10), (10, 12), (7, 7)]), made([(2, 4), (6, 12)]))
    parts = list(zip(*(column.tolist() for column in overlaps)))
    assert parts == [(0, 0, 2, 4), (0, 1, 6, 10), (1, 1, 10, 12)]


def test_overlap_ns_answers_row_by_row_also_for_pieces_that_overlap() -> None:
    pieces = made([(0, 10), (3, 3), (5, 20), (-5, 1), (30, 40)])
    # 2-4 and 6-8: 4 ns of 0-10, none of an empty piece, 2 ns of 5-20
    assert intervals.measure_overlap(pieces, made([(2, 4), (6, 8)])).tolist() == [4, 0, 2, 0, 0]
    assert intervals.measure_overlap(pieces, made([])).tolist() == [0, 0, 0, 0, 0]


def test_containing_is_half_open() -> None:
    t_ns = np.array([1, 2, 4, 7, 8], np.int64)
    assert intervals.find_containing(t_ns, made([(2, 4), (6, 8)])).tolist() == [-1, 0, -1, 1, -1]
    assert intervals.find_containing(t_ns, made([])).tolist() == [-1] * 5


def test_intervals_are_trimmed_to_a_window() -> None:
    assert rows(intervals.trim_intervals(made([(0, 10), (20, 30), (40, 50)]), 5, 25)) == [
        (5, 10),
        (20, 25),
    ]


edges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)
sets = edges.map(lambda e: intervals.merge_intervals(made([(s, s + n) for s, n in e])))


def instants(result: tuple[np.ndarray, np.ndarray]) -> set[int]:
    return {t for start, end in rows(result) for t in range(start, end)}


@given(sets, sets)
def test_laws_of_sets_agree_with_sets_of_instants(a: Intervals, b: Intervals) -> None:
    first, two = instants(a), instants(b)
    assert instants(intervals.merge_intervals(a, b)) == first | two
    assert instants(intervals.find_intersection(a, b)) == first & two
    assert instants(intervals.subtract_intervals(a, b)) == first - two
    both = intervals.sum_lengths(intervals.find_intersection(a, b))
    joined = intervals.sum_lengths(intervals.merge_intervals(a, b))
    assert joined == intervals.sum_lengths(a) + intervals.sum_lengths(b) - both
    assert (
        intervals.sum_lengths(intervals.subtract_intervals(a, b)) == intervals.sum_lengths(a) - both
    )


@given(edges, sets)
def test_overlap_of_pieces_agrees_with_sets_of_instants(
    pieces_edges: list[tuple[int, int]], b: Intervals
) -> None:
    pieces = made([(s, s + n) for s, n in sorted(pieces_edges)])
    covered = instants(b)
    expected = [len(covered & set(range(s, e))) for s, e in rows(pieces)]
    assert intervals.measure_overlap(pieces, b).tolist() == expected
    parts = intervals.find_overlaps(pieces, b)
    assert (
        np.bincount(parts.segment, parts.end_ns - parts.start_ns, minlength=len(expected)).tolist()
        == expected
    )


@given(sets, sets)
def test_interval_operations_return_disjoint_sorted_sets(a: Intervals, b: Intervals) -> None:
    for span in (
        intervals.merge_intervals(a, b),
        intervals.find_intersection(a, b),
        intervals.subtract_intervals(a, b),
    ):
        assert np.all(span.end_ns > span.start_ns)
        assert np.all(span.start_ns[1:] >= span.end_ns[:-1])


def test_allocation_by_wait_age_keeps_the_sum_of_each_group() -> None:
    # Ages of up to 100 s, some far apart; the sum of a group is compared with the definition.
    random = np.random.default_rng(11)
    group = np.repeat(np.arange(40), 3)
    age = (10 ** random.uniform(0, 11, group.size)).astype(np.int64)
    room = (age * random.uniform(0, 1, group.size)).astype(np.int64)
    amount = (room * random.uniform(0, 1, group.size)).astype(np.int64)
    out = intervals.allocate_by_wait_age(group, age, room, amount)
    for number in range(40):
        rows = group == number
        total = int(amount[rows].sum())
        assert int(out[rows].sum()) == total
        # What is missing of the age is the queue, the same for all rows that are cut: a nanosecond
        # less for some of them, so that nothing is left over.
        cut = rows & (out > 0) & (out < room)
        queued = age[cut] - out[cut]
        if 0 < total < int(room[rows].sum()) and queued.size:
            assert int(queued.max() - queued.min()) <= 1
