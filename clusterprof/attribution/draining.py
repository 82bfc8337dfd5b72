"""Which part of a host's wait its device stood still: the end of it, for first its queue drains.

A device works off what it was given in the order in which it was given. While its host waits for
data, copies or collects garbage, nothing is added, so once the device has stood still in such a
wait it does so until the wait is over:

    host      |------ wait 67 ------|-- launches --
    device    ==== queue ====|  idle 20  |== work
    lost                     |--- 20 ---|              not 20 spread over the 67

That tells in which of several sample windows idle time lies: the beginning of a wait that goes on
in the next window was only idle if all of it was idle there. And of several waits in one window the
longer ones had their device idle: what was queued is taken to have lasted equally long.

    waits of 137 and 37 in a window that was idle for 22        22 in the first, none in the second
    waits of 40 and 30 in a window that was idle for 20         15 and 5: 25 were queued
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.device import Windows
from clusterprof.attribution.painting import FILL_ORDER, Painted, fill
from clusterprof.attribution.regions import AHEAD_NS, table_of
from clusterprof.probe import layout
from clusterprof.timeline.intervals import union
from clusterprof.timeline.model import (
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_H2D,
    Int,
    Lost,
    Rank,
)

STARVING = {
    PHASE_H2D: layout.H2D,
    PHASE_DATA_WAIT: layout.DATA_WAIT,
    PHASE_GC: layout.GC,
}
"""Phases in which a host gives its device nothing to do, and the spans behind them."""
PAUSE_NS = 100_000
"""Waits that follow each other within this time are one: nothing is launched in between."""
WHOLE_RATIO = 0.95
"""So much of a stretch counts as all of it: busy time is told in small steps."""


def filled(
    rank: Rank, painted: Painted, every: Windows, windows: Windows, room_ns: Int, idle_ns: Int
) -> Int:
    """Spread the idle time of each window over the rows in it; int64[n], never above the room.

    `every` has the windows before and behind those of the stretch too.
    """
    window, phase = painted.window, painted.phase
    rows = np.flatnonzero(np.isin(phase, tuple(STARVING)))
    if not rows.size:
        return fill(window, phase, room_ns, idle_ns, FILL_ORDER)
    some = painted.rows(rows)
    start_ns, end_ns = _starved(rank, some)
    begins = np.zeros(phase.size, np.bool_)
    begins[rows] = _still_queued(end_ns, some, every, windows)
    idle = fill(window, phase, np.where(begins, 0, room_ns), idle_ns, FILL_ORDER)
    if begins.any():
        left = idle_ns - np.bincount(window, idle, minlength=idle_ns.size).astype(np.int64)
        if left.any():  # there is no other place for it
            idle += fill(window, phase, room_ns - idle, left, FILL_ORDER)
    room_ns = np.where(begins, idle, room_ns)
    idle[rows] = by_age(window[rows], some.end_ns - start_ns, room_ns[rows], idle[rows])
    return idle


def by_age(group: Int, age_ns: Int, room_ns: Int, amount_ns: Int) -> Int:
    """Share out again what the rows of each group have: max(0, age - q), as far as there is room.

    `age_ns` is how long a row's wait had lasted at its end; q, how long what was queued lasted, is
    such that each group keeps its sum. Rows of one group stand together.
    """
    open_ = _in_doubt(group, room_ns, amount_ns)
    if not open_.size:
        return amount_ns
    group, age_ns, room_ns = group[open_], age_ns[open_], room_ns[open_]
    opens = np.append(True, group[1:] != group[:-1])
    heads, of = np.flatnonzero(opens), np.cumsum(opens) - 1
    total = np.add.reduceat(amount_ns[open_], heads)

    def held(queued_ns: Int) -> Int:
        return np.minimum(np.maximum(age_ns - queued_ns[of], 0), room_ns)

    low, high = np.full(heads.size, -1), np.maximum.reduceat(age_ns, heads)
    while (high - low > 1).any():  # the least q of which not more than the sum is left
        middle = (low + high) >> 1
        fits = np.add.reduceat(held(middle), heads) <= total
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    part = held(high)
    more = held(high - 1) > part  # one nanosecond each, from the first row on
    before: Int = np.cumsum(more) - more
    missing = total - np.add.reduceat(part, heads)
    out = amount_ns.copy()
    out[open_] = part + (more & (before - before[heads][of] < missing[of]))
    return out


def _in_doubt(group: Int, room_ns: Int, amount_ns: Int) -> Int:
    """Return the rows of groups of several rows that are neither empty nor full."""
    opens = np.append(True, group[1:] != group[:-1])
    heads = np.flatnonzero(opens)
    amount, room = np.add.reduceat(amount_ns, heads), np.add.reduceat(room_ns, heads)
    several = np.diff(np.append(heads, group.size)) > 1
    doubt = several & (amount > 0) & (amount < room)
    return np.flatnonzero(doubt[np.cumsum(opens) - 1])


def at_the_end(lost: Lost) -> Lost:
    """Return the pieces with those of starving waits cut down to what was lost, at their end."""
    starving = np.isin(lost.phase, tuple(STARVING))
    return replace(lost, start_ns=np.where(starving, lost.end_ns - lost.lost_ns, lost.start_ns))


def _starved(rank: Rank, rows: Painted) -> tuple[Int, Int]:
    """Start and end of the stretch without launches in which each row lies."""
    tables = [table for kind in STARVING.values() if (table := table_of(rank, kind)) is not None]
    start = np.concatenate([table.start_ns for table in tables])
    end = np.concatenate([table.end_ns for table in tables])
    start, end = union((start, end + PAUSE_NS))
    at = np.maximum(np.searchsorted(start, rows.start_ns, side="right") - 1, 0)
    return start[at], end[at] - PAUSE_NS


def _still_queued(
    end_ns: Int, rows: Painted, every: Windows, windows: Windows
) -> NDArray[np.bool_]:
    """True for rows of waits that go on behind their window, where the device then had work."""
    after = windows.end_ns[rows.window]
    until = np.minimum(end_ns, after + AHEAD_NS)
    idle = _idle_until(every, until) - _idle_until(every, after)
    result: NDArray[np.bool_] = (until > after) & (idle < WHOLE_RATIO * (until - after))
    return result


def _idle_until(every: Windows, t_ns: Int) -> Int:
    """The most that the device can have been idle before each time, from the first window on."""
    before = np.concatenate([[0], np.cumsum(every.idle_ns)])
    row = np.searchsorted(every.start_ns, t_ns, side="right") - 1
    at = np.maximum(row, 0)
    inside = np.minimum(every.idle_ns[at], t_ns - every.start_ns[at])
    return np.where(row >= 0, before[at] + inside, 0)
