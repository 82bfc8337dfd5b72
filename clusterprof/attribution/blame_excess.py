"""What the awaited rank spent more of than the one that waited, and the share of the wait it gets.

Both left an operation together and came to the next one at different times: what one of them had
more of made the difference. With an excess of storage 60 and work 20, and a wait of 40:

    storage 30, work 10         in proportion
    an excess of only 30        30 are named, 10 are the awaited rank's without a reason

An excess of work is expected (`sync-imbalance`) as far as the rank had more of it from the
beginning: the work of its first `HABIT` stretches over that of the one that waited. What is beyond
is `sync-slow-compute`. A rank that was slow from its first step on cannot be told from one that has
more to do; only what slows it can (`device-throttled` and the like take their time out of work).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from clusterprof.attribution.blame_rows import Lookup
from clusterprof.timeline.model import Int

HABIT = 32
"""Stretches of work by which a rank's usual share of it is known."""


class Habits(NamedTuple):
    """How much work the rank of each row had brought to its team before: n stretches, their sum."""

    windows: Int
    work_ns: Int


class Pairs(NamedTuple):
    """Who waited for whom, and since when they can be compared: rows, n of each."""

    waiting: Int
    awaited: Int
    mine: Int
    """Row of the one that waited in the operation that both last left together; -1 = none."""
    theirs: Int

    def take(self, some: Int) -> Pairs:
        """Return some of the pairs."""
        return Pairs(*(column[some] for column in self))


def with_habits(look: Lookup) -> tuple[Lookup, Habits]:
    """Count how much work each rank usually brings to each of its teams."""
    rows = look.rows
    order = look.by_team
    last = look.previous[order]
    follows = last >= 0
    work = np.maximum(rows.at_arrive[order, -1] - rows.at_leave[last, -1], 0)
    work[~follows] = 0
    start = np.flatnonzero(~follows)[np.cumsum(~follows) - 1]
    old = order < look.fresh
    base_n = np.where(old[start], rows.windows[order][start], 0)
    base_ns = np.where(old[start], rows.habit_ns[order][start], 0)
    n = base_n + np.arange(order.size) - start
    counted = follows & (n <= HABIT)
    work = np.where(counted, work, 0)
    sums = np.cumsum(work)
    sums = base_ns + sums - sums[start]
    columns = np.empty((4, n.size), np.int64)
    columns[:, order] = np.minimum(n, HABIT), sums, np.clip(n - 1, 0, HABIT), sums - work
    windows, habit, windows_before, habit_before = columns
    rows = replace(rows, windows=windows, habit_ns=habit)
    return replace(look, rows=rows), Habits(windows_before, habit_before)


def left_late(look: Lookup, pairs: Pairs, wait: Int) -> Int:
    """Return int64[n]: of each wait, what the awaited rank did not take longer on its own clock.

    Ranks do not leave an operation quite together: its last bytes reach one of them later.

        waiting   leave |== 100 ==| arrive                wait 30, and both took 100 since:
        awaited           30 leave |== 100 ==| arrive     30 were the network's

    0 where the two left no operation together.
    """
    rows = look.rows
    waiting, awaited, mine, theirs = pairs
    longer = rows.arrive_ns[awaited] - rows.leave_ns[theirs]
    longer -= rows.arrive_ns[waiting] - rows.leave_ns[mine]
    return np.where(mine >= 0, np.maximum(wait - np.maximum(longer, 0), 0), 0)


def excess(look: Lookup, pairs: Pairs) -> Int:
    """Return int64[n, K + 2]: what the awaited rank had more of since both left together.

    The last two columns are transfers of other operations and waits in them.
    """
    rows = look.rows
    waiting, awaited, mine, theirs = pairs
    spent = rows.at_arrive[awaited]
    spent -= rows.at_leave[theirs]
    spent -= rows.at_arrive[waiting]
    spent += rows.at_leave[mine]
    out = np.empty((waiting.size, spent.shape[1] + 2), np.int64)
    np.maximum(spent, 0, out=out[:, :-2])
    out[:, -2:] = 0
    end = look.by_rank[look.before[awaited]]
    if np.array_equal(end, theirs):  # nobody was in another operation since
        return out
    my_end = look.by_rank[look.before[waiting]]
    for column, sums in ((-2, rows.transferred_ns), (-1, rows.waited_ns)):
        more = (sums[end] - sums[theirs]) - (sums[my_end] - sums[mine])
        np.maximum(more, 0, out=out[:, column])
    return out


def shared(wait_ns: Int, excess_ns: Int) -> Int:
    """Share each wait among the columns of excess, to the nanosecond; what they lack stays over.

    Whole nanoseconds by largest remainder; of equal remainders the column to the left is served.
    """
    total = excess_ns.sum(axis=1)
    scarce = total <= wait_ns
    scale = np.where(scarce, 1.0, wait_ns / np.maximum(total, 1))
    exact = excess_ns * scale[:, None]
    whole = np.floor(exact).astype(np.int64)
    exact -= whole
    rows = np.flatnonzero(~scarce)
    left = wait_ns[rows] - whole[rows].sum(axis=1)
    # A product may round up to the next whole number: then one nanosecond too much was given.
    for row in rows[left < 0]:
        whole[row, np.argmax(whole[row])] += wait_ns[row] - whole[row].sum()
    rows, left = rows[left > 0], left[left > 0]
    rest = exact[rows]
    rest[excess_ns[rows] == 0] = -2.0
    while rows.size:
        best = np.argmax(rest, axis=1)
        whole[rows, best] += 1
        rest[np.arange(rows.size), best] -= 1.0
        left = left - 1
        more = left > 0
        rows, left, rest = rows[more], left[more], rest[more]
    return whole


def expected_work(look: Lookup, habits: Habits, pairs: Pairs) -> Int:
    """Return how much more work the awaited rank was expected to have, from its habit."""
    rows = look.rows
    waiting, awaited, mine, _ = pairs
    own = np.maximum(rows.at_arrive[waiting, -1] - rows.at_leave[mine, -1], 0)
    usual = habits.work_ns[awaited] / np.maximum(habits.windows[awaited], 1)
    other = habits.work_ns[waiting] / np.maximum(habits.windows[waiting], 1)
    more = np.where(other > 0, own * (usual / np.maximum(other, 1) - 1), usual)
    known = (habits.windows[awaited] > 0) & (habits.windows[waiting] > 0)
    return np.where(known, np.maximum(np.rint(more), 0), 0).astype(np.int64)
