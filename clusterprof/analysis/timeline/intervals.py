"""Interval arithmetic on sorted int64 arrays; no other module compares interval edges.

Intervals are half-open, `[start_ns, end_ns)`. A *set* is sorted by start and disjoint,
as `merge_intervals` returns it. *Segments* are also sorted by start, but
they are rows of a caller's table: they are never merged, and results are given row by
row. Every function uses sorting, binary search or cumulative sums; there is no Python
loop over rows.

    a                 0----------10        20------30
    b                      5-----------15
    intersection           5-----10
    a without b       0----5               20------30
    merged            0----------------15  20------30
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from clusterprof.analysis.timeline.model import Int


class Intervals(NamedTuple):
    """Starts and ends of n intervals, int64[n] each, ns.

    Any pair of arrays may be used instead.
    """

    start_ns: Int
    end_ns: Int


Pair = tuple[Int, Int]

EMPTY = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


class Overlaps(NamedTuple):
    """Overlapping parts of segments and intervals, ordered by segment; int64[m] columns."""

    segment: Int
    """Row of the segment."""
    interval: Int
    """Row of the interval."""
    start_ns: Int
    end_ns: Int


def merge_intervals(*sets: Pair) -> Intervals:
    """Merge any intervals, in any order, into one set; intervals that touch become one.

    Arrays are int64[n], ns.

    | in                 | out     |
    |--------------------|---------|
    | 0-5, 3-8           | 0-8     |
    | 0-5, 5-8           | 0-8     |
    | 0-5, 6-8           | 0-5 6-8 |
    | 0-9, 2-3           | 0-9     |
    | 4-4 (empty)        | nothing |
    """
    start, end = _concat_nonempty(sets)
    if not start.size:
        return EMPTY
    if (start[1:] > end[:-1]).all():
        return Intervals(start, end)
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.empty(start.size, np.bool_)
    opens[0] = True
    np.greater(start[1:], reach[:-1], out=opens[1:])
    first = np.flatnonzero(opens)
    last = np.append(first[1:] - 1, start.size - 1)
    return Intervals(start[first], reach[last])


def _concat_nonempty(sets: tuple[Pair, ...]) -> Pair:
    if len(sets) == 1:
        start, end = (np.asarray(side, np.int64) for side in sets[0])
    else:
        start = np.concatenate([np.asarray(s, np.int64) for s, _ in sets] or [EMPTY.start_ns])
        end = np.concatenate([np.asarray(e, np.int64) for _, e in sets] or [EMPTY.end_ns])
    nonempty = end > start
    return (start, end) if nonempty.all() else (start[nonempty], end[nonempty])


def find_overlaps(segments: Pair, intervals: Pair) -> Overlaps:
    """Find every overlap of a segment with an interval of a set, with both row numbers.

    Arrays are int64[n], ns.

    | segments | set          | rows (segment, interval, overlap)  |
    |----------|--------------|------------------------------------|
    | 0-10     | 2-4 6-12     | (0, 0, 2-4) (0, 1, 6-10)           |
    | 0-3 3-6  | 2-4          | (0, 0, 2-3) (1, 0, 3-4)            |
    | 0-2      | 2-4          | none: they only touch              |
    | 5-5      | 2-9          | none: an empty segment             |
    """
    segment_start, segment_end = segments
    start, end = intervals
    low = end.searchsorted(segment_start, "right")
    high = start.searchsorted(segment_end, "left")
    count = np.maximum(high - low, 0)
    count[segment_end <= segment_start] = 0
    if count.size and count.min() == count.max() == 1:  # segments cut at the edges of the set
        return Overlaps(
            np.arange(count.size, dtype=np.int64),
            low,
            np.maximum(segment_start, start[low]),
            np.minimum(segment_end, end[low]),
        )
    segment = np.arange(count.size, dtype=np.int64).repeat(count)
    interval = np.arange(segment.size, dtype=np.int64)
    interval += (low - (count.cumsum() - count))[segment]
    return Overlaps(
        segment,
        interval,
        np.maximum(segment_start[segment], start[interval]),
        np.minimum(segment_end[segment], end[interval]),
    )


def find_intersection(a: Pair, b: Pair) -> Intervals:
    """Find the time that lies in both sets.

    Arrays are int64[n], ns.

    | a    | b        | out      |
    |------|----------|----------|
    | 0-10 | 5-15     | 5-10     |
    | 0-10 | 2-3 8-12 | 2-3 8-10 |
    | 0-10 | 10-12    | nothing  |
    """
    overlaps = find_overlaps(a, b)
    return Intervals(overlaps.start_ns, overlaps.end_ns)


def subtract_intervals(a: Pair, b: Pair) -> Intervals:
    """Return the time that lies in the set `a` and not in the set `b`.

    Arrays are int64[n], ns.

    | a    | b        | out          |
    |------|----------|--------------|
    | 0-10 | 2-3      | 0-2 3-10     |
    | 0-10 | 0-10     | nothing      |
    | 0-10 | 12-13    | 0-10         |
    | 0-10 | nothing  | 0-10         |
    """
    start, end = a
    if not len(start) or not len(b[0]):
        return Intervals(start, end)
    low, high = int(start[0]), int(end[-1])
    holes = trim_intervals(b, low, high)
    free_start = np.concatenate([[low], holes.end_ns])
    free_end = np.concatenate([holes.start_ns, [high]])
    nonempty = free_end > free_start
    return find_intersection(a, (free_start[nonempty], free_end[nonempty]))


def trim_intervals(intervals: Pair, start_ns: int, end_ns: int) -> Intervals:
    """Trim intervals to `[start_ns, end_ns)` and drop those outside; int64[n] arrays, ns."""
    start = np.maximum(intervals[0], start_ns)
    end = np.minimum(intervals[1], end_ns)
    nonempty = end > start
    return Intervals(start, end) if nonempty.all() else Intervals(start[nonempty], end[nonempty])


def sum_lengths(intervals: Pair) -> int:
    """Sum the lengths of the intervals of a set, in ns; int64[n] each."""
    return int(intervals[1].sum() - intervals[0].sum())


def measure_overlap(segments: Pair, intervals: Pair) -> Int:
    """Measure how much of each segment the set covers: int64[n], ns.

    Segments may overlap each other.

    | segments  | set     | out    |
    |-----------|---------|--------|
    | 0-10 5-20 | 2-4 6-8 | 4, 2   |
    | 3-3       | 0-9     | 0      |
    """
    start, end = intervals
    if not len(start):
        return np.zeros(len(segments[0]), np.int64)
    before = np.cumsum(end - start) - (end - start)
    return _measure_coverage_until(segments[1], start, end, before) - _measure_coverage_until(
        segments[0], start, end, before
    )


def _measure_coverage_until(t_ns: Int, start: Int, end: Int, before: Int) -> Int:
    """Measure how much of the set lies before each time, int64[n], ns."""
    row = np.maximum(np.searchsorted(start, t_ns, side="right") - 1, 0)
    inside = np.minimum(t_ns, end[row]) - start[row]
    result: Int = before[row] + np.maximum(inside, 0)
    return result


def find_containing(t_ns: Int, intervals: Pair) -> Int:
    """Find the row of the set's interval that contains each time: int64[n], -1 for none.

    | t        | set      | out       |
    |----------|----------|-----------|
    | 2, 4, 7  | 2-4 6-8  | 0, -1, 1  |
    """
    start, end = intervals
    if not len(start):
        return np.full(len(t_ns), -1, np.int64)
    row = np.searchsorted(start, t_ns, side="right") - 1
    inside = (row >= 0) & (np.asarray(t_ns) < end[np.maximum(row, 0)])
    return np.where(inside, row, -1)


def allocate_by_wait_age(group: Int, age_ns: Int, room_ns: Int, amount_ns: Int) -> Int:
    """Redistribute the amounts of each group's rows: max(0, age - q), as far as there is room.

    age_ns: int64[n], how long the wait of a row had lasted at its end. q, the duration of
    the queue, is chosen so that each group keeps its sum. Rows of one group are contiguous.
    room_ns, amount_ns: int64[n]. Returns int64[n], ns.
    """
    undecided = _find_undecided_rows(group, room_ns, amount_ns)
    if not undecided.size:
        return amount_ns
    group, age_ns, room_ns = group[undecided], age_ns[undecided], room_ns[undecided]
    starts = np.append(True, group[1:] != group[:-1])
    heads, group_of_row = np.flatnonzero(starts), np.cumsum(starts) - 1
    total = np.add.reduceat(amount_ns[undecided], heads)

    def allocate(queued_ns: Int) -> Int:
        return np.minimum(np.maximum(age_ns - queued_ns[group_of_row], 0), room_ns)

    def is_too_long(queued_ns: Int) -> Int:
        return np.add.reduceat(allocate(queued_ns), heads) - total

    high = _find_first_root(
        is_too_long, np.full(heads.size, -1), np.maximum.reduceat(age_ns, heads)
    )
    part = allocate(high)
    extra = allocate(high - 1) > part  # one nanosecond each, from the first row on
    before: Int = np.cumsum(extra) - extra
    missing = total - np.add.reduceat(part, heads)
    out = amount_ns.copy()
    out[undecided] = part + (extra & (before - before[heads][group_of_row] < missing[group_of_row]))
    return out


_MAX_INTERPOLATIONS = 8


def _find_first_root(function: Callable[[Int], Int], low: Int, high: Int) -> Int:
    """Find the first whole number above `low` at which a falling function is not above 0.

    Element by element, int64[n]; at `high` it is not above 0. It is nearly linear in between:
    interpolation finds most numbers at once, and halving the rest.
    """
    at_low, at_high = function(low), function(high)
    rounds = 0
    while (high - low > 1).any():
        part = at_low / np.maximum(at_low - at_high, 1) if rounds < _MAX_INTERPOLATIONS else 0.5
        middle = low + np.ceil(part * (high - low)).astype(np.int64)
        middle = np.maximum(np.minimum(middle, high - 1), low + 1)
        at_middle = function(middle)
        fits = at_middle <= 0
        low, at_low = np.where(fits, low, middle), np.where(fits, at_low, at_middle)
        high, at_high = np.where(fits, middle, high), np.where(fits, at_middle, at_high)
        rounds += 1
    return high


def _find_undecided_rows(group: Int, room_ns: Int, amount_ns: Int) -> Int:
    """Return the rows of groups of several rows that are neither empty nor full."""
    starts = np.append(True, group[1:] != group[:-1])
    heads = np.flatnonzero(starts)
    amount, room = np.add.reduceat(amount_ns, heads), np.add.reduceat(room_ns, heads)
    several = np.diff(np.append(heads, group.size)) > 1
    doubt = several & (amount > 0) & (amount < room)
    return np.flatnonzero(doubt[np.cumsum(starts) - 1])
