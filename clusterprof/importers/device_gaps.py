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
GAP_NS = 1_000
"""Shorter gaps are what one kernel after another costs, whoever launched them when."""
NEVER = 1 << 62
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


def late(
    start_ns: Int, end_ns: Int, begun_ns: Int, left_ns: Int, held: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], Int]:
    """Say of each gap of a device whether its host launched too late what comes after, and until
    when it was late: the end of that call.

        host      launch A |      | launch B |
        device             | A |.............| B |
                               ^ the call was not over yet: nothing was in the queue

    `begun_ns`, `left_ns`: of the call that launched what ends the gap, -1 unknown (nobody is late
    then), `NEVER` where nothing was launched any more. A call of which `held` is true, a copy
    between host and device, returns only after its work: it is late if it began after the gap did.
    """
    told_ns = np.where(held, begun_ns, left_ns)
    which = (left_ns >= 0) & (told_ns > start_ns) & (end_ns - start_ns > GAP_NS)
    return which, np.minimum(left_ns, end_ns)


def exposed(start_ns: Int, end_ns: Int, other: Intervals) -> Int:
    """Return how many ns of each operation the device did nothing else, `other` being the rest."""
    return (end_ns - start_ns) - inside(start_ns, end_ns, other)
