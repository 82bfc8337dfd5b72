"""What the awaited rank spent more of than the one that waited, and the share of the wait it gets.

Both left an operation together and came to the next one at different times: what one of them had
more of made the difference. With an excess of storage 60 and work 20, and a wait of 40:

    storage 30, work 10         in proportion
    an excess of only 30        30 are named, 10 are the awaited rank's without a reason

An excess of work is expected (`sync-imbalance`) as far as the rank had more of it from the
beginning: the work of its first `HABIT` stretches over that of the one that waited. What is beyond
is `sync-slow-compute`. Where the first `EARLY` of them show less than half of that difference, the
rank became slow while its habit was learnt, and they alone count. A rank that was slow from its
first step on cannot be told from one that has more to do; only what slows it can
(`device-throttled` and the like take their time out of work).
Stages of a pipeline differ by design: there only what is beyond the habit of the awaited stage is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.blame_rows import Lookup, since_begin
from clusterprof.timeline.model import Float, Int

HABIT = 32
"""Stretches of work by which a rank's usual share of it is known."""
EARLY = 8
"""Those of them that tell a rank with more work from one that became slow soon."""
GREW_RATIO = 0.5
"""What the early ones show of the difference, below which it grew."""
STAGE_HABIT = 3
"""Every other stretch of a stage is empty (it receives, works, sends), and backward takes twice as
long as forward: the longest is 8/3 of their mean."""


class Habits(NamedTuple):
    """How much work the rank of each row had brought to its team before: n stretches, their sum,
    and the sum of the first `EARLY` of them."""

    windows: Int
    work_ns: Int
    early_ns: Int


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
    rows, order = look.rows, look.by_team
    follows = look.previous[order] >= 0
    heads = np.flatnonzero(~follows)
    length = np.diff(np.append(heads, order.size))
    head = order[heads]
    old = head < look.fresh
    base_n = np.where(old, rows.windows[head], 0)
    base = [np.where(old, of_row[head], 0) for of_row in (rows.habit_ns, rows.early_ns)]
    sums = []
    for base_ns in base:
        habit = np.empty_like(order)
        habit[order] = np.repeat(base_ns, length)
        sums.append(habit)
    windows = np.full(order.size, HABIT)
    before = [windows, *sums]
    young = np.flatnonzero(base_n < HABIT)
    if young.size:  # else all is known already
        columns = _counted(
            look, heads[young], length[young], base_n[young], [b[young] for b in base]
        )
        windows, *sums = (column.copy() for column in (windows, *sums))
        before = [column.copy() for column in before]
        some = columns[0]
        for column, (now, earlier), last in zip((windows, *sums), columns[1], before):
            column[some], last[some] = now, earlier
    rows = replace(rows, windows=windows, habit_ns=sums[0], early_ns=sums[1])
    return replace(look, rows=rows), Habits(*before)


def _counted(
    look: Lookup, heads: Int, length: Int, base_n: Int, base: list[Int]
) -> tuple[Int, list[tuple[Int, Int]]]:
    """Return rows and, of stretches, their work and that of early ones, with each and before it."""
    rows = look.rows
    start = np.repeat(np.cumsum(length) - length, length)
    n = np.arange(start.size) - start
    order = look.by_team[np.repeat(heads, length) + n]
    follows = n > 0
    n += np.repeat(base_n, length)
    work = np.maximum(rows.at_arrive[-1, order] - rows.at_leave[-1, look.previous[order]], 0)
    out = [(np.minimum(n, HABIT), np.clip(n - 1, 0, HABIT))]
    for most, base_ns in zip((HABIT, EARLY), base):
        counted = np.where(follows & (n <= most), work, 0)
        sums = np.cumsum(counted)
        sums += np.repeat(base_ns, length) - sums[start]
        out.append((sums, sums - counted))
    return order, out


def excess(look: Lookup, pairs: Pairs, behind_ns: Int) -> tuple[Int, Int]:
    """Return what the awaited rank had more of since both left together: which, int64[m, n] of it.

    `behind_ns` is what it had more of work than its host shows (`blame_skew.device_behind`).

    Which: 0 … K - 1 the categories, K transfers of other operations, K + 1 waits in them; those of
    which nobody had more are left out. Where the two left none together (`mine` is -1) there is
    nothing to compare, and all is 0; but in their first operations it is what they lost since their
    first steps began, and not their work, for nobody knows who began first.
    """
    rows = look.rows
    waiting, awaited, mine, theirs = pairs
    n, categories = waiting.size, len(rows.at_arrive)
    opens = np.ones(n, np.bool_)
    opens[1:] = (awaited[1:] != awaited[:-1]) | (theirs[1:] != theirs[:-1])
    heads = np.flatnonzero(opens)
    size = np.diff(np.append(heads, n))
    them, since = awaited[heads], theirs[heads]
    spent = rows.at_arrive[:, them] - rows.at_leave[:, since]
    blind = from_begin = None
    if (since < 0).any():
        none = since < 0
        spent[:, none] = rows.at_arrive[:, them[none]]
        spent[-1, none] = 0
        from_begin = (mine < 0) & since_begin(look, waiting, awaited)
        blind = (mine < 0) & ~from_begin
    which, out = [], []
    for column in np.flatnonzero((spent > 0).any(axis=1)).tolist():
        more: Int = np.repeat(spent[column], size)
        more -= rows.at_arrive[column][waiting]
        before = rows.at_leave[column][mine]
        if from_begin is not None:
            before[from_begin] = 0
        more += before
        if column == categories - 1:
            more += behind_ns
            if from_begin is not None:
                more[from_begin] = 0
        np.maximum(more, 0, out=more)
        if blind is not None:
            more[blind] = 0
        which.append(column)
        out.append(more)
    for column, more in _elsewhere(look, pairs, heads, size):
        if blind is not None:
            more[blind] = 0
        which.append(categories + column)
        out.append(more)
    return np.array(which, np.int64), np.array(out, np.int64).reshape(len(out), n)


def _elsewhere(look: Lookup, pairs: Pairs, heads: Int, size: Int) -> Iterator[tuple[int, Int]]:
    """Yield (0, more transfers) and (1, more waits) of the awaited rank in other operations since.

    Of `heads` on, `size` pairs each have the same awaited row and row since which they differ.
    """
    rows = look.rows
    waiting, awaited, mine, theirs = pairs
    them, since = awaited[heads], theirs[heads]
    end = np.where(look.before[them] >= 0, look.by_rank[look.before[them]], -1)
    some = np.flatnonzero(end != since)
    if not some.size:
        return
    at, row = ranges(heads[some], heads[some] + size[some])
    last = look.before[waiting[row]]
    my_end = np.where(last >= 0, look.by_rank[last], -1)
    for column, sums in ((0, rows.transferred_ns), (1, rows.waited_ns)):
        so_far = np.append(sums, 0)  # -1 = when its steps began
        theirs_ns = so_far[end[some]] - so_far[since[some]]
        if theirs_ns.any():
            more = np.zeros(waiting.size, np.int64)
            more[row] = np.maximum(theirs_ns[at] - (so_far[my_end] - so_far[mine[row]]), 0)
            yield column, more


def shared(wait_ns: Int, excess_ns: Int) -> Int:
    """Share each wait among the rows of excess, to the nanosecond; what they lack stays over.

    Whole nanoseconds by largest remainder; of equal remainders the upper row is served.
    """
    if len(excess_ns) < 2:
        return np.minimum(excess_ns, wait_ns)
    out = excess_ns.copy()
    total = excess_ns.sum(axis=0)
    rows = np.flatnonzero(total > wait_ns)
    if not rows.size:
        return out
    wait_ns, excess_ns = wait_ns[rows], excess_ns[:, rows]
    exact = excess_ns * (wait_ns / total[rows])
    whole = exact.astype(np.int64)
    left = wait_ns - whole.sum(axis=0)
    # A product may round up to the next whole number: then one nanosecond too much was given.
    for row in np.flatnonzero(left < 0).tolist():
        whole[np.argmax(whole[:, row]), row] += left[row]
    some = np.flatnonzero(left > 0)
    rest = (exact - whole)[:, some]
    rest[excess_ns[:, some] == 0] = -2.0
    left = left[some]
    while some.size:
        best = np.argmax(rest, axis=0)
        whole[best, some] += 1
        rest[best, np.arange(some.size)] -= 1.0
        left = left - 1
        more = left > 0
        some, left, rest = some[more], left[more], rest[:, more]
    out[:, rows] = whole
    return out


def ranges(begin: Int, end: Int) -> tuple[Int, Int]:
    """Return for many ranges (number of the range, each index in it).

    0-2 and 5-6 -> ([0, 0, 1], [0, 1, 5])
    """
    count = np.maximum(end - begin, 0)
    until = count.cumsum()
    which = np.arange(count.size).repeat(count)
    return which, np.arange(which.size) + (begin - until + count)[which]


def _of_whole(look: Lookup, pairs: Pairs, more: Float, more_ns: Int, due: Float) -> Float:
    """Return `due`, where ranks last left an operation of another team together by what they had
    worked since this team's last: habits are of such stretches, and of a part of one, as between
    the last message of a pipeline and the all-reduce behind it, they say nothing."""
    rows, (waiting, awaited, mine, _) = look.rows, pairs
    since, theirs = look.previous[waiting], look.previous[awaited]
    other = (since >= 0) & (theirs >= 0) & (since != mine)
    own = rows.at_arrive[-1, waiting] - rows.at_leave[-1, since]
    beyond = rows.at_arrive[-1, awaited] - rows.at_leave[-1, theirs] - own
    whole = more_ns * np.clip(own * more / np.maximum(beyond, 1), 0.0, 1.0)
    return np.where(other & (beyond > 0), whole, due)


def expected_work(
    look: Lookup, habits: Habits, pairs: Pairs, passes: NDArray[np.bool_], more_ns: Int
) -> Int:
    """Return how much more work the awaited rank was expected to have, of the `more_ns` it had.

    `passes` is true where one rank passed something on to another: stages of a pipeline differ by
    design, so only what is beyond the awaited rank's own habit was not expected.
    """
    rows = look.rows
    waiting, awaited, mine, theirs = pairs
    own = np.maximum(rows.at_arrive[-1, waiting] - rows.at_leave[-1, mine], 0)
    usual = habits.work_ns[awaited] / np.maximum(habits.windows[awaited], 1)
    other = habits.work_ns[waiting] / np.maximum(habits.windows[waiting], 1)
    more = usual / np.maximum(other, 1) - 1
    early = habits.early_ns[awaited] / np.clip(habits.windows[awaited], 1, EARLY)
    early /= np.maximum(habits.early_ns[waiting] / np.clip(habits.windows[waiting], 1, EARLY), 1)
    more = np.where(early - 1 < GREW_RATIO * more, early - 1, more)
    due = np.where(other > 0, own * more, usual)
    due = np.where(other > 0, _of_whole(look, pairs, more, more_ns, due), due)
    passed = rows.at_arrive[-1, awaited] - rows.at_leave[-1, theirs]
    due = np.where(passes, more_ns - np.maximum(passed - STAGE_HABIT * usual, 0), due)
    known = (habits.windows[awaited] > 0) & (habits.windows[waiting] > 0)
    return np.minimum(np.where(known, np.maximum(np.rint(due), 0), 0).astype(np.int64), more_ns)
