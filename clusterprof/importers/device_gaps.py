"""Arithmetic of intervals on a device's timeline: busy, idle, exposed, starved.

    busy = union(start_ns, end_ns)                    # sorted, disjoint
    idle = gaps(busy, first_ns, last_ns)
    inside(start_ns, end_ns, busy)                    # of each interval: ns within the union

Intervals are two int64 arrays of one length, starts and ends in ns; a union's are sorted and
disjoint. Nothing here knows of a format.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
Intervals = tuple[Int, Int]
NONE: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))


def union(start_ns: Int, end_ns: Int) -> Intervals:
    """Return the sorted, disjoint intervals that cover the same instants; empty ones are left."""
    real = end_ns > start_ns
    start_ns, end_ns = start_ns[real], end_ns[real]
    if not start_ns.size:
        return NONE
    order = np.argsort(start_ns, kind="stable")
    start_ns, end_ns = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.empty(start_ns.size, np.bool_)
    first[0] = True
    np.greater(start_ns[1:], end_ns[:-1], out=first[1:])
    rows = np.flatnonzero(first)
    return start_ns[rows], end_ns[np.append(rows[1:], start_ns.size) - 1]


def gaps(busy: Intervals, from_ns: int, until_ns: int) -> Intervals:
    """Return what of [from_ns, until_ns] a union leaves open."""
    start, end = clipped(busy, from_ns, until_ns)
    opens, closes = np.append(from_ns, end), np.append(start, until_ns)
    real = closes > opens
    return opens[real], closes[real]


def clipped(some: Intervals, from_ns: int, until_ns: int) -> Intervals:
    """Return what of a union lies in [from_ns, until_ns]."""
    start, end = np.maximum(some[0], from_ns), np.minimum(some[1], until_ns)
    real = end > start
    return start[real], end[real]


def inside(start_ns: Int, end_ns: Int, cover: Intervals) -> Int:
    """Return how many ns of each interval lie in a union."""
    if not cover[0].size:
        return np.zeros(start_ns.size, np.int64)
    return _covered_until(end_ns, cover) - _covered_until(start_ns, cover)


def _covered_until(t_ns: Int, cover: Intervals) -> Int:
    """How many ns of a union lie before each instant."""
    start, end = cover
    before = np.concatenate([[0], np.cumsum(end - start)])
    row = start.searchsorted(t_ns, side="right")
    last = np.maximum(row - 1, 0)
    return np.where(row > 0, before[last] + np.minimum(t_ns, end[last]) - start[last], 0)


def both(one: Intervals, other: Intervals) -> Intervals:
    """Return the instants that lie in two unions."""
    if not one[0].size or not other[0].size:
        return NONE
    return without(one, gaps(other, int(one[0][0]), int(one[1][-1])))


def without(one: Intervals, other: Intervals) -> Intervals:
    """Return the instants of a union that do not lie in another."""
    if not one[0].size or not other[0].size:
        return one
    edges = np.concatenate([one[0], one[1], other[0], other[1]])
    change = np.repeat([1, -1, -2, 2], [one[0].size, one[1].size, other[0].size, other[1].size])
    order = np.argsort(edges, kind="stable")
    edges, level = edges[order], np.cumsum(change[order])
    last = np.append(edges[1:] != edges[:-1], True)  # several edges of one instant are one
    edges, level = edges[last], level[last]
    within = level == 1
    rises = np.flatnonzero(within & ~np.append(False, within[:-1]))
    falls = np.flatnonzero(~within & np.append(False, within[:-1]))
    return edges[rises], edges[falls]


def starved(idle: Intervals, begins_ns: Int, launched_ns: Int) -> NDArray[np.bool_]:
    """Say of each gap whether its device had been given nothing to do.

    `begins_ns`, sorted: when each activity of the device began; `launched_ns`: when the host's call
    that launched it returned, -1 unknown. A gap is starved when the call behind it returned only
    after the gap had begun; where that is not known it is not.
    """
    if not begins_ns.size:
        return np.zeros(idle[0].size, np.bool_)
    row = begins_ns.searchsorted(idle[1], side="left")
    known = row < begins_ns.size
    row = np.minimum(row, begins_ns.size - 1)
    return known & (begins_ns[row] == idle[1]) & (launched_ns[row] > idle[0])


def exposed(start_ns: Int, end_ns: Int, other: Intervals) -> Int:
    """Return how many ns of each operation the device did nothing else, `other` being the rest."""
    return (end_ns - start_ns) - inside(start_ns, end_ns, other)
