"""Arithmetic of intervals on a device's timeline: busy, idle, exposed, starved.

    busy = union(start_ns, end_ns)                    # sorted, disjoint
    idle = gaps(busy, first_ns, last_ns)
    inside(start_ns, end_ns, busy)                    # of each interval: ns within the union

Intervals are two int64 arrays of one length, starts and ends in ns; a union's are sorted and
disjoint. Nothing here knows of a format;
the arithmetic itself is `timeline.intervals`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline import intervals

Int = NDArray[np.int64]
Intervals = tuple[Int, Int]
NONE: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))


def union(start_ns: Int, end_ns: Int) -> Intervals:
    """Return the sorted, disjoint intervals that cover the same instants; empty ones are left."""
    found = intervals.union((start_ns, end_ns))
    return found.start_ns, found.end_ns


def gaps(busy: Intervals, from_ns: int, until_ns: int) -> Intervals:
    """Return what of [from_ns, until_ns] a union leaves open."""
    start, end = clipped(busy, from_ns, until_ns)
    opens, closes = np.append(from_ns, end), np.append(start, until_ns)
    real = closes > opens
    return opens[real], closes[real]


def clipped(some: Intervals, from_ns: int, until_ns: int) -> Intervals:
    """Return what of a union lies in [from_ns, until_ns]."""
    found = intervals.clip(some, from_ns, until_ns)
    return found.start_ns, found.end_ns


def inside(start_ns: Int, end_ns: Int, cover: Intervals) -> Int:
    """Return how many ns of each interval lie in a union."""
    return intervals.overlap_ns((start_ns, end_ns), cover)


def both(one: Intervals, other: Intervals) -> Intervals:
    """Return the instants that lie in two unions."""
    found = intervals.intersect(one, other)
    return found.start_ns, found.end_ns


def without(one: Intervals, other: Intervals) -> Intervals:
    """Return the instants of a union that do not lie in another."""
    found = intervals.subtract(one, other)
    return found.start_ns, found.end_ns


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
