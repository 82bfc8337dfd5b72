"""Compute what a late rank spent more time on than a waiting rank; split the wait by it.

Both ranks left an operation together and arrived at the next one at different times;
the difference is due to the categories in which one of them spent more time. With an
excess of storage 60 and work 20, and a wait of 40:

    storage 30, work 10         in proportion
    an excess of only 30        30 explained, 10 blamed on the late rank without cause

An excess of work is expected (`sync-imbalance`) as far as the rank had it from the
beginning: the work of its first USUAL_WORK_SEGMENTS segments divided by
that of the waiting rank. The rest is `sync-slow-compute`. If the first
EARLY_SEGMENTS segments show less than half of that difference, the
rank became slow while its usual work was being measured, and only these segments count.
A rank that was slow from its first step on cannot be distinguished from a rank with
more work; only the reason for its slowness can (`device-throttled` and similar causes
take their time out of work). Stages of a pipeline differ by design: there only the work
beyond the usual work of the late stage counts.

It also finds when two ranks last left an operation together.

From there on their times can be compared.

Mostly this is the previous operation of the same process group. Ranks that share
several groups (a data parallel group and the whole world) may have left a later
operation together, and the time one of them lost before it was already waited for
there.

    world     |----1----|                     |----5----|
    group A         |--2--|        |--4--|                   ranks 0, 1: 2 precedes 4

All that wait in one operation wait for the same rank: its rows are looked up once for
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.wait_for.arrivals import (
    MAX_GROUP_OPERATIONS_BACK,
    MAX_LOOK_BACK_OPERATIONS,
    ArrivalIndex,
    has_full_history,
)
from clusterprof.analysis.timeline.model import Float, Int

USUAL_WORK_SEGMENTS = 32
"""Segments of work from which the usual work of a rank is measured."""
EARLY_SEGMENTS = 8
"""The first of these segments; they distinguish a rank with more work from one that became
slow soon.
"""
EARLY_DIFFERENCE_RATIO = 0.5
"""If the early segments show less than this part of the difference, the difference grew
later.
"""
STAGE_WORK_RATIO = 3
"""Longest usual segment of a pipeline stage, as a multiple of the mean segment. Every
other segment is empty (receive, work, send), and backward takes twice as long as
forward: 8/3 of the mean.
"""


class UsualWork(NamedTuple):
    """Earlier work of each row's rank for its process group.

    n segments, the sum of their work, and the sum of the first
    EARLY_SEGMENTS, ns.
    """

    segments: Int
    work_ns: Int
    early_ns: Int


class WaitPairs(NamedTuple):
    """Waiting rows and the rows they waited for; n each.

    The `_since` rows are where both last left an operation together.
    """

    waiting: Int
    late: Int
    waiting_since: Int
    """Row of the waiting rank in the operation that both last left together; -1 = none."""
    late_since: Int

    def take(self, rows: Int) -> WaitPairs:
        """Return the pairs in these rows."""
        return WaitPairs(*(column[rows] for column in self))


def with_usual_work(index: ArrivalIndex) -> tuple[ArrivalIndex, UsualWork]:
    """Return the index with the usual work per rank and process group, and that work."""
    rows, order = index.rows, index.by_group
    follows = index.previous[order] >= 0
    heads = np.flatnonzero(~follows)
    length = np.diff(np.append(heads, order.size))
    head = order[heads]
    is_old = head < index.first_new
    base_n = np.where(is_old, rows.segments[head], 0)
    base = [
        np.where(is_old, of_row[head], 0) for of_row in (rows.usual_work_ns, rows.early_work_ns)
    ]
    column_sums = []
    for base_ns in base:
        habit = np.empty_like(order)
        habit[order] = np.repeat(base_ns, length)
        column_sums.append(habit)
    windows = np.full(order.size, USUAL_WORK_SEGMENTS)
    before = [windows, *column_sums]
    learning = np.flatnonzero(base_n < USUAL_WORK_SEGMENTS)
    if learning.size:  # else the usual work of all rows is known already
        columns = _count_segments(
            index, heads[learning], length[learning], base_n[learning], [b[learning] for b in base]
        )
        windows, *column_sums = (column.copy() for column in (windows, *column_sums))
        before = [column.copy() for column in before]
        learning_rows = columns[0]
        for column, (current, earlier), previous in zip(
            (windows, *column_sums), columns[1], before
        ):
            column[learning_rows], previous[learning_rows] = current, earlier
    rows = replace(
        rows, segments=windows, usual_work_ns=column_sums[0], early_work_ns=column_sums[1]
    )
    return replace(index, rows=rows), UsualWork(*before)


def _count_segments(
    index: ArrivalIndex, heads: Int, length: Int, base_n: Int, base: list[Int]
) -> tuple[Int, list[tuple[Int, Int]]]:
    """Return rows, and their number of segments, work and early work.

    Each of the three is a pair: including the row's own segment, and before it.
    """
    rows = index.rows
    start = np.repeat(np.cumsum(length) - length, length)
    n = np.arange(start.size) - start
    order = index.by_group[np.repeat(heads, length) + n]
    follows = n > 0
    n += np.repeat(base_n, length)
    work = np.maximum(rows.at_arrive[-1, order] - rows.at_leave[-1, index.previous[order]], 0)
    out = [(np.minimum(n, USUAL_WORK_SEGMENTS), np.clip(n - 1, 0, USUAL_WORK_SEGMENTS))]
    for max_segments, base_ns in zip((USUAL_WORK_SEGMENTS, EARLY_SEGMENTS), base):
        counted = np.where(follows & (n <= max_segments), work, 0)
        sums = np.cumsum(counted)
        sums += np.repeat(base_ns, length) - sums[start]
        out.append((sums, sums - counted))
    return order, out


def compute_excess(index: ArrivalIndex, pairs: WaitPairs, behind_ns: Int) -> tuple[Int, Int]:
    """Compute what the late rank spent more time on since the last common leave.

    behind_ns: int64[n], excess of work that the host does not show
    (compute_device_delay).
    Returns column numbers int64[m] and excess int64[m, n] in ns. Columns: 0 … K - 1 the
    categories, K transfers of other operations, K + 1 waits in other operations; columns
    without any excess are omitted. Pairs that left no operation together (`waiting_since`
    is -1) cannot be compared and get 0, except in their first operations: there the time
    lost since their first steps began counts, but not work, because it is unknown which
    rank began first.
    """
    rows = index.rows
    waiting, late, waiting_since, late_since = pairs
    n, categories = waiting.size, len(rows.at_arrive)
    starts = np.ones(n, np.bool_)
    starts[1:] = (late[1:] != late[:-1]) | (late_since[1:] != late_since[:-1])
    heads = np.flatnonzero(starts)
    size = np.diff(np.append(heads, n))
    late_rows, since = late[heads], late_since[heads]
    spent = rows.at_arrive[:, late_rows] - rows.at_leave[:, since]
    incomparable = from_begin = None
    if (since < 0).any():
        no_common_leave = since < 0
        spent[:, no_common_leave] = rows.at_arrive[:, late_rows[no_common_leave]]
        spent[-1, no_common_leave] = 0
        from_begin = (waiting_since < 0) & has_full_history(index, waiting, late)
        incomparable = (waiting_since < 0) & ~from_begin
    columns, out = [], []
    for column in np.flatnonzero((spent > 0).any(axis=1)).tolist():
        excess_ns: Int = np.repeat(spent[column], size)
        excess_ns -= rows.at_arrive[column][waiting]
        before = rows.at_leave[column][waiting_since]
        if from_begin is not None:
            before[from_begin] = 0
        excess_ns += before
        if column == categories - 1:
            excess_ns += behind_ns
            if from_begin is not None:
                excess_ns[from_begin] = 0
        np.maximum(excess_ns, 0, out=excess_ns)
        if incomparable is not None:
            excess_ns[incomparable] = 0
        columns.append(column)
        out.append(excess_ns)
    for column, excess_ns in _compute_excess_elsewhere(index, pairs, heads, size):
        if incomparable is not None:
            excess_ns[incomparable] = 0
        columns.append(categories + column)
        out.append(excess_ns)
    return np.array(columns, np.int64), np.array(out, np.int64).reshape(len(out), n)


def _compute_excess_elsewhere(
    index: ArrivalIndex, pairs: WaitPairs, heads: Int, size: Int
) -> Iterator[tuple[int, Int]]:
    """Yield (0, extra transfers) and (1, extra waits) of the late rank elsewhere since then.

    From each of `heads` on, `size` pairs share the late row and the row since which they
    differ.
    """
    rows = index.rows
    waiting, late, waiting_since, late_since = pairs
    late_rows, since = late[heads], late_since[heads]
    end = np.where(
        index.left_before[late_rows] >= 0, index.by_rank[index.left_before[late_rows]], -1
    )
    elsewhere = np.flatnonzero(end != since)
    if not elsewhere.size:
        return
    pair_index, row = expand_ranges(heads[elsewhere], heads[elsewhere] + size[elsewhere])
    last_left = index.left_before[waiting[row]]
    waiting_end = np.where(last_left >= 0, index.by_rank[last_left], -1)
    for column, sums in ((0, rows.transferred_ns), (1, rows.waited_ns)):
        running_sums = np.append(sums, 0)  # -1: since its steps began
        late_rank_ns = running_sums[end[elsewhere]] - running_sums[since[elsewhere]]
        if late_rank_ns.any():
            excess_ns = np.zeros(waiting.size, np.int64)
            excess_ns[row] = np.maximum(
                late_rank_ns[pair_index]
                - (running_sums[waiting_end] - running_sums[waiting_since[row]]),
                0,
            )
            yield column, excess_ns


def split_waits(wait_ns: Int, more_ns: Int) -> Int:
    """Split each wait among its excesses, exact to the nanosecond; a rest may remain.

    wait_ns: int64[n]. more_ns: int64[m, n]. Returns int64[m, n], ns. Rounded by largest
    remainder; of equal remainders the upper row is served first.
    """
    if len(more_ns) < 2:
        return np.minimum(more_ns, wait_ns)
    out = more_ns.copy()
    total = more_ns.sum(axis=0)
    rows = np.flatnonzero(total > wait_ns)
    if not rows.size:
        return out
    wait_ns, more_ns = wait_ns[rows], more_ns[:, rows]
    exact = more_ns * (wait_ns / total[rows])
    whole_ns = exact.astype(np.int64)
    missing = wait_ns - whole_ns.sum(axis=0)
    # A product may round up to the next whole number: then one nanosecond too much was allocated.
    for row in np.flatnonzero(missing < 0).tolist():
        whole_ns[np.argmax(whole_ns[:, row]), row] += missing[row]
    incomplete = np.flatnonzero(missing > 0)
    remainder = (exact - whole_ns)[:, incomplete]
    remainder[more_ns[:, incomplete] == 0] = -2.0
    missing = missing[incomplete]
    while incomplete.size:
        largest = np.argmax(remainder, axis=0)
        whole_ns[largest, incomplete] += 1
        remainder[largest, np.arange(incomplete.size)] -= 1.0
        missing = missing - 1
        is_incomplete = missing > 0
        incomplete, missing, remainder = (
            incomplete[is_incomplete],
            missing[is_incomplete],
            remainder[:, is_incomplete],
        )
    out[:, rows] = whole_ns
    return out


def expand_ranges(begin: Int, end: Int) -> tuple[Int, Int]:
    """Return for many ranges (number of the range, each index in it), int64 arrays.

    0-2 and 5-6 -> ([0, 0, 1], [0, 1, 5])
    """
    count = np.maximum(end - begin, 0)
    until = count.cumsum()
    number = np.arange(count.size).repeat(count)
    return number, np.arange(number.size) + (begin - until + count)[number]


def _scale_to_whole_segment(
    index: ArrivalIndex, pairs: WaitPairs, excess_ratio: Float, more_ns: Int, expected: Float
) -> Float:
    """Scale the expected work where the last common leave was in another process group.

    The usual work is measured per segment between operations of one group. For a part of a
    segment, as between the last message of a pipeline and the following all-reduce, it does
    not apply.
    """
    rows, (waiting, late, waiting_since, _) = index.rows, pairs
    since, late_since = index.previous[waiting], index.previous[late]
    other_group = (since >= 0) & (late_since >= 0) & (since != waiting_since)
    if not other_group.any():
        return expected
    own_work_ns = rows.at_arrive[-1, waiting] - rows.at_leave[-1, since]
    beyond = rows.at_arrive[-1, late] - rows.at_leave[-1, late_since] - own_work_ns
    scaled_ns = more_ns * np.clip(own_work_ns * excess_ratio / np.maximum(beyond, 1), 0.0, 1.0)
    return np.where(other_group & (beyond > 0), scaled_ns, expected)


def estimate_expected_work(
    index: ArrivalIndex,
    usual_work: UsualWork,
    pairs: WaitPairs,
    point_to_point: NDArray[np.bool_],
    more_ns: Int,
) -> Int:
    """Estimate how much of the late rank's extra work was expected.

    Returns int64[n], ns, at most more_ns.

    more_ns: int64[n], extra work of the late rank. point_to_point: bool[n], the operation
    is a message between two ranks: pipeline stages differ by design, so only work beyond
    the late rank's own usual work is unexpected.
    """
    rows = index.rows
    waiting, late, waiting_since, late_since = pairs
    own_work = np.maximum(rows.at_arrive[-1, waiting] - rows.at_leave[-1, waiting_since], 0)
    late_usual = usual_work.work_ns[late] / np.maximum(usual_work.segments[late], 1)
    waiting_usual = usual_work.work_ns[waiting] / np.maximum(usual_work.segments[waiting], 1)
    excess_ratio = late_usual / np.maximum(waiting_usual, 1) - 1
    early = usual_work.early_ns[late] / np.clip(usual_work.segments[late], 1, EARLY_SEGMENTS)
    early /= np.maximum(
        usual_work.early_ns[waiting] / np.clip(usual_work.segments[waiting], 1, EARLY_SEGMENTS), 1
    )
    excess_ratio = np.where(
        early - 1 < EARLY_DIFFERENCE_RATIO * excess_ratio, early - 1, excess_ratio
    )
    expected = np.where(waiting_usual > 0, own_work * excess_ratio, late_usual)
    expected = np.where(
        waiting_usual > 0,
        _scale_to_whole_segment(index, pairs, excess_ratio, more_ns, expected),
        expected,
    )
    if point_to_point.any():
        late_work = rows.at_arrive[-1, late] - rows.at_leave[-1, late_since]
        beyond = np.maximum(late_work - STAGE_WORK_RATIO * late_usual, 0)
        expected = np.where(point_to_point, more_ns - beyond, expected)
    is_known = (usual_work.segments[late] > 0) & (usual_work.segments[waiting] > 0)
    return np.minimum(
        np.where(is_known, np.maximum(np.rint(expected), 0), 0).astype(np.int64), more_ns
    )


# cells of a table of all ranks in all groups; larger groups are searched
_MAX_TABLE_CELLS = 1 << 22


class GroupIndex:
    """Index of the operations of each process group in order, and of the groups of each rank."""

    def __init__(self, index: ArrivalIndex) -> None:
        self._look = index
        count = index.group.size
        self._order = np.argsort(index.group, kind="stable")
        self._ordered = index.group[self._order]
        self._span = count + 1
        self._keys = self._ordered * np.int64(self._span) + self._order
        groups = int(index.group.max(initial=-1)) + 1
        # Rows are sorted by group, then rank: take one of each combination.
        rank, group = (
            index.rows.rank[index.by_group],
            index.group[index.operation_of_row[index.by_group]],
        )
        is_first = np.ones(rank.size, np.bool_)
        is_first[1:] = (rank[1:] != rank[:-1]) | (group[1:] != group[:-1])
        rank, group = rank[is_first], group[is_first]
        self._member = group * np.int64(index.ranks) + rank
        position = np.arange(rank.size) - np.searchsorted(group, np.arange(groups))[group]
        self._member_index = position
        self._table = None
        if groups * index.ranks <= _MAX_TABLE_CELLS:
            self._table = np.full(groups * index.ranks, -1, np.int32)
            self._table[self._member] = position
        self._of_rank = group[np.argsort(rank, kind="stable")]
        self._from = np.append(0, np.cumsum(np.bincount(rank, minlength=index.ranks)))
        self.max_groups_per_rank = int(np.diff(self._from).max(initial=0))

    def get_nth_group(self, rank: Int, n: int) -> Int:
        """Return the n-th process group of each rank, int64[m], -1 if it has fewer."""
        position = self._from[rank] + n
        has_nth = position < self._from[rank + 1]
        return np.where(has_nth, self._of_rank[np.minimum(position, self._of_rank.size - 1)], -1)

    def find_member_index(self, group: Int, rank: Int) -> Int:
        """Return the position of each rank among the recorded members of a group, int64[m], -1 =
        no member.
        """
        wanted = group * np.int64(self._look.ranks) + rank
        if self._table is not None:
            position: Int = self._table[wanted].astype(np.int64)
            return position
        nearest = np.minimum(np.searchsorted(self._member, wanted), self._member.size - 1)
        return np.where(self._member[nearest] == wanted, self._member_index[nearest], -1)

    def find_row(self, operation: Int, rank: Int) -> Int:
        """Return the row of each rank in an operation, int64[m], -1 if it took no part or was
        dropped.
        """
        index = self._look
        ranks = index.rows.rank
        operation_index = np.maximum(operation, 0)
        position = self.find_member_index(index.group[operation_index], rank)
        low, end = index.first[operation_index], index.first[operation_index + 1]
        row = np.minimum(low + position, end - 1)
        is_member = (position >= 0) & (ranks[row] == rank) & (operation >= 0)
        result = np.where(is_member, row, -1)
        unresolved = np.flatnonzero(~is_member & (position >= 0) & (operation >= 0))
        if unresolved.size:  # not all of the group took part
            low, end, wanted = low[unresolved], end[unresolved], rank[unresolved]
            last = end - 1
            while (open_ := low < end).any():
                middle = (low + end) >> 1
                is_below = ranks[np.minimum(middle, last)] < wanted
                low = np.where(open_ & is_below, middle + 1, low)
                end = np.where(open_ & ~is_below, middle, end)
            present = (low <= last) & (ranks[np.minimum(low, last)] == wanted)
            result[unresolved[present]] = low[present]
        return result

    def find_operation_before(self, group: Int, operation: Int) -> Int:
        """Return the last operation of each group before another operation, int64[m], -1 = none."""
        position = np.searchsorted(self._keys, group * np.int64(self._span) + operation) - 1
        is_in_group = (position >= 0) & (self._ordered[position] == group)
        return np.where(is_in_group, self._order[position], -1)


def find_last_common_leave(index: ArrivalIndex, waiting: Int, late: Int) -> tuple[Int, Int]:
    """Find the rows of the operation that each pair of ranks last left together.

    waiting: int64[n], rows that waited, ascending. late: int64[n], rows they waited for,
    equal for all rows of an operation. Returns the rows of both, int64[n] each, -1 = none
    known. Both must have left that operation before they arrived, at most
    MAX_LOOK_BACK_OPERATIONS operations ago.
    """
    if not waiting.size:
        return waiting, waiting
    starts = np.ones(waiting.size, np.bool_)
    starts[1:] = late[1:] != late[:-1]
    heads = np.flatnonzero(starts)
    size = np.diff(np.append(heads, waiting.size))
    late_rows = late[heads]
    # Mostly both took part in the last operation of their group.
    waiting_since, last = index.previous[waiting], index.previous[late_rows]
    ready = (last >= 0) & _is_left_before(index, last, late_rows)
    has_left = (
        np.repeat(np.where(ready, index.operation_of_row[last], -2), size)
        == index.operation_of_row[waiting_since]
    )
    has_left &= (waiting_since >= 0) & _is_left_before(index, waiting_since, waiting)
    late_since = np.repeat(last, size)
    unresolved = np.flatnonzero(~has_left)
    groups = GroupIndex(index)
    if unresolved.size:
        operation = index.operation_of_row[waiting[unresolved]]
        group = index.group[operation]
        waiting_since[unresolved], late_since[unresolved] = _find_common_leave_in_group(
            index,
            groups,
            (group, groups.find_operation_before(group, operation)),
            waiting[unresolved],
            late[unresolved],
        )
    if groups.max_groups_per_rank > 1:
        _find_later_common_leave(
            index, groups, (waiting, late, heads, size), waiting_since, late_since
        )
    return waiting_since, late_since


def _find_later_common_leave(
    index: ArrivalIndex,
    groups: GroupIndex,
    pairs: tuple[Int, Int, Int, Int],
    waiting_since: Int,
    late_since: Int,
) -> None:
    """Replace the rows by those of an operation of another group where that was left later."""
    waiting, late, heads, size = pairs
    late_rows = late[heads]
    operation, rank = index.operation_of_row[late_rows], index.rows.rank[late_rows]
    own_group = index.group[operation]
    current_position = np.where(late_since >= 0, index.position[late_since], -1)
    earliest = np.minimum.reduceat(current_position, heads)
    for n in range(groups.max_groups_per_rank):
        group = groups.get_nth_group(rank, n)
        candidates = np.flatnonzero((group >= 0) & (group != own_group))
        # What the late rank left in that group last, if it is later for any waiting rank.
        latest = groups.find_operation_before(group[candidates], operation[candidates])
        row = groups.find_row(latest, rank[candidates])
        unresolved = (latest >= 0) & (
            (row < 0) | ~_is_left_before(index, row, late_rows[candidates])
        )
        selected = np.flatnonzero(
            unresolved | ((row >= 0) & (index.position[row] > earliest[candidates]))
        )
        candidates, latest = candidates[selected], latest[selected]
        if not candidates.size:
            continue
        number, selected = expand_ranges(heads[candidates], heads[candidates] + size[candidates])
        group = group[candidates][number]
        member = np.flatnonzero(
            groups.find_member_index(group, index.rows.rank[waiting[selected]]) >= 0
        )
        selected, group, latest = selected[member], group[member], latest[number[member]]
        if not selected.size:
            continue
        waiting_row, late_row = _find_common_leave_in_group(
            index, groups, (group, latest), waiting[selected], late[selected]
        )
        later = (late_row >= 0) & (index.position[late_row] > current_position[selected])
        waiting_since[selected[later]], late_since[selected[later]] = (
            waiting_row[later],
            late_row[later],
        )
        current_position[selected[later]] = index.position[late_row[later]]


def _find_common_leave_in_group(
    index: ArrivalIndex,
    groups: GroupIndex,
    group_and_operation: tuple[Int, Int],
    waiting: Int,
    late: Int,
) -> tuple[Int, Int]:
    """Search operations of a group for a row of each rank, from a given operation backwards."""
    group, operation = group_and_operation
    rank = index.rows.rank
    waiting_since = np.full(waiting.size, -1, np.int64)
    late_since = waiting_since.copy()
    pending = np.arange(waiting.size)
    for _ in range(MAX_GROUP_OPERATIONS_BACK):
        waiting_row = groups.find_row(operation, rank[waiting[pending]])
        late_row = groups.find_row(operation, rank[late[pending]])
        has_left = _is_left_before(index, waiting_row, waiting[pending]) & _is_left_before(
            index, late_row, late[pending]
        )
        waiting_since[pending[has_left]], late_since[pending[has_left]] = (
            waiting_row[has_left],
            late_row[has_left],
        )
        is_unresolved = ~has_left & (operation >= 0)
        if not is_unresolved.any():
            break
        pending = pending[is_unresolved]
        operation = groups.find_operation_before(group[pending], operation[is_unresolved])
    return waiting_since, late_since


def _is_left_before(index: ArrivalIndex, earlier: Int, row: Int) -> NDArray[np.bool_]:
    """Return whether the earlier row was left before the arrival at the later one."""
    rows = index.rows
    is_left: NDArray[np.bool_] = rows.leave_ns[earlier] <= rows.arrive_ns[row]
    is_left &= rows.ordinal[row] - rows.ordinal[earlier] <= MAX_LOOK_BACK_OPERATIONS
    is_left &= earlier >= 0
    return is_left
