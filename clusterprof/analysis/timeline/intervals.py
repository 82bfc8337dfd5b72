"""Interval arithmetic on sorted int64 arrays; nobody else writes `max(start)` and `min(end)`.

Intervals are half-open, `[start_ns, end_ns)`. A *set* is sorted by start and disjoint, as `union`
returns it; *pieces* are sorted by start too, but are rows of somebody's table: never merged, and
answered row by row. Everything is a sort, a binary search or a cumulative sum; no row costs Python.

    a                 0----------10        20------30
    b                      5-----------15
    intersect(a, b)        5-----10
    subtract(a, b)    0----5               20------30
    union(a, b)       0----------------15  20------30
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clusterprof.timeline.model import Int


class Intervals(NamedTuple):
    """Starts and ends of n intervals, int64[n] each; any pair of arrays will do in its place."""

    start_ns: Int
    end_ns: Int


Pair = tuple[Int, Int]

EMPTY = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


class Overlaps(NamedTuple):
    """The parts where a piece and an interval coincide, in order of the pieces; m rows."""

    piece: Int
    """Row of the piece."""
    interval: Int
    """Row of the interval."""
    start_ns: Int
    end_ns: Int


def union(*sets: Pair) -> Intervals:
    """Merge any intervals, in any order, into one set; intervals that touch become one.

    | in                 | out     |
    |--------------------|---------|
    | 0-5, 3-8           | 0-8     |
    | 0-5, 5-8           | 0-8     |
    | 0-5, 6-8           | 0-5 6-8 |
    | 0-9, 2-3           | 0-9     |
    | 4-4 (empty)        | nothing |
    """
    start, end = _joined(sets)
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


def _joined(sets: tuple[Pair, ...]) -> Pair:
    if len(sets) == 1:
        start, end = (np.asarray(side, np.int64) for side in sets[0])
    else:
        start = np.concatenate([np.asarray(s, np.int64) for s, _ in sets] or [EMPTY.start_ns])
        end = np.concatenate([np.asarray(e, np.int64) for _, e in sets] or [EMPTY.end_ns])
    some = end > start
    return (start, end) if some.all() else (start[some], end[some])


def overlaps(pieces: Pair, intervals: Pair) -> Overlaps:
    """List every part where a piece and an interval of a set coincide, with both row numbers.

    | pieces   | set          | rows (piece, interval, part)    |
    |----------|--------------|---------------------------------|
    | 0-10     | 2-4 6-12     | (0, 0, 2-4) (0, 1, 6-10)        |
    | 0-3 3-6  | 2-4          | (0, 0, 2-3) (1, 0, 3-4)         |
    | 0-2      | 2-4          | none: they only touch           |
    | 5-5      | 2-9          | none: an empty piece has no part |
    """
    piece_start, piece_end = pieces
    start, end = intervals
    low = end.searchsorted(piece_start, "right")
    high = start.searchsorted(piece_end, "left")
    count = np.maximum(high - low, 0)
    count[piece_end <= piece_start] = 0
    if count.size and count.min() == count.max() == 1:  # pieces cut at the edges of the set
        return Overlaps(
            np.arange(count.size, dtype=np.int64),
            low,
            np.maximum(piece_start, start[low]),
            np.minimum(piece_end, end[low]),
        )
    piece = np.arange(count.size, dtype=np.int64).repeat(count)
    interval = np.arange(piece.size, dtype=np.int64)
    interval += (low - (count.cumsum() - count))[piece]
    return Overlaps(
        piece,
        interval,
        np.maximum(piece_start[piece], start[interval]),
        np.minimum(piece_end[piece], end[interval]),
    )


def intersect(a: Pair, b: Pair) -> Intervals:
    """Return what lies in both sets.

    | a    | b        | out     |
    |------|----------|---------|
    | 0-10 | 5-15     | 5-10    |
    | 0-10 | 2-3 8-12 | 2-3 8-10 |
    | 0-10 | 10-12    | nothing |
    """
    both = overlaps(a, b)
    return Intervals(both.start_ns, both.end_ns)


def subtract(a: Pair, b: Pair) -> Intervals:
    """Return what lies in the set `a` and not in the set `b`.

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
    holes = clip(b, low, high)
    free_start = np.concatenate([[low], holes.end_ns])
    free_end = np.concatenate([holes.start_ns, [high]])
    some = free_end > free_start
    return intersect(a, (free_start[some], free_end[some]))


def clip(intervals: Pair, start_ns: int, end_ns: int) -> Intervals:
    """Return the parts inside `[start_ns, end_ns)`; those outside vanish."""
    start = np.maximum(intervals[0], start_ns)
    end = np.minimum(intervals[1], end_ns)
    some = end > start
    return Intervals(start, end) if some.all() else Intervals(start[some], end[some])


def total(intervals: Pair) -> int:
    """Return the length of a set in ns."""
    return int(intervals[1].sum() - intervals[0].sum())


def overlap_ns(pieces: Pair, intervals: Pair) -> Int:
    """Return int64[n]: how many ns of each piece the set covers. Pieces may overlap each other.

    | pieces    | set     | out    |
    |-----------|---------|--------|
    | 0-10 5-20 | 2-4 6-8 | 4, 2   |
    | 3-3       | 0-9     | 0      |
    """
    start, end = intervals
    if not len(start):
        return np.zeros(len(pieces[0]), np.int64)
    before = np.cumsum(end - start) - (end - start)
    return _covered_until(pieces[1], start, end, before) - _covered_until(
        pieces[0], start, end, before
    )


def _covered_until(t_ns: Int, start: Int, end: Int, before: Int) -> Int:
    """How much of the set lies before each t."""
    row = np.maximum(np.searchsorted(start, t_ns, side="right") - 1, 0)
    inside = np.minimum(t_ns, end[row]) - start[row]
    result: Int = before[row] + np.maximum(inside, 0)
    return result


def containing(t_ns: Int, intervals: Pair) -> Int:
    """Return int64[n]: the row of the set's interval that contains each instant, -1 where none.

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


def elementary(*sets: Pair) -> Intervals:
    """Cut time at every start and end: the pieces inside which no set changes, gaps included.

    | sets             | out                     |
    |------------------|-------------------------|
    | 0-10 and 4-6     | 0-4 4-6 6-10            |
    | 0-2 and 5-6      | 0-2 2-5 5-6             |
    | one empty        | nothing                 |
    """
    start, end = _joined(sets)
    cuts = np.unique(np.concatenate([start, end]))
    return Intervals(cuts[:-1], cuts[1:])
