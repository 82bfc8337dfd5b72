"""Table of arrivals that the blame works on: one row per operation and member.

Rows of earlier blocks come first. They are kept as far as later operations may look
back: per rank everything since the eighth last operation of each of its process groups,
but at most MAX_LOOK_BACK_OPERATIONS operations, and all of its first
FIRST_OPERATIONS. The same limits apply within a block, so that where
the run is cut into blocks changes no nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.collectives.operations import RECV, SEND, Operations
from clusterprof.analysis.timeline.model import Int

MAX_LOOK_BACK_OPERATIONS = 512
"""Number of operations of a rank after which an earlier one is dropped."""
FIRST_OPERATIONS = 64
"""First operations of a rank, about its first step: none is dropped while the rank is in
them.
"""
MAX_GROUP_OPERATIONS_BACK = 8
"""Number of earlier operations of a process group that are searched for one that two ranks
left together.
"""


@dataclass(frozen=True, slots=True)
class ArrivalRows:
    """Arrivals at operations: n rows, sorted by operation and rank."""

    op: Int
    """Number of the operation since the beginning of the run."""
    group: Int
    rank: Int
    arrive_ns: Int
    leave_ns: Int
    wait_ns: Int
    """Of the time blocked: until the last member arrived; all of it if a member was not
    recorded.
    """
    transfer_ns: Int
    """The rest of the time blocked."""
    at_arrive: Int
    """int64[K, n], ns: time the rank had spent by category since its beginning, when it
    arrived; `at_leave` when it left.
    """
    at_leave: Int
    waited_ns: Int
    """Running sum of the rank's waits, this operation included; `transferred_ns` of its
    transfers.
    """
    transferred_ns: Int
    ordinal: Int
    """Number of the operation among the rank's own, from 1."""
    segments: Int
    """Number of segments of work before operations of this group that `usual_work_ns` sums."""
    usual_work_ns: Int
    """Work of the rank in these segments, ns."""
    early_work_ns: Int
    """Work of the rank in the first few of them (EARLY_SEGMENTS), ns."""
    on_device: Int
    """1 if the times are those of a device, 0 if they are the host's."""

    def list_columns(self) -> list[Int]:
        """List all columns in their order."""
        return [getattr(self, field.name) for field in fields(self)]


def take_rows(columns: list[Int], rows: Int) -> ArrivalRows:
    """Return the chosen rows of columns; the list is emptied, so that each is released in turn.

    columns: as ArrivalRows.list_columns, int64[..., n]. rows: int64[m].
    """
    columns.reverse()
    return ArrivalRows(*[columns.pop()[..., rows] for _ in fields(ArrivalRows)])


def make_empty_rows(categories: int) -> ArrivalRows:
    """Return an empty table of arrivals, the state before the first block."""
    empty = np.zeros(0, np.int64)
    wide = np.zeros((categories, 0), np.int64)
    return ArrivalRows(
        *(
            wide if field.name in ("at_arrive", "at_leave") else empty
            for field in fields(ArrivalRows)
        )
    )


@dataclass(frozen=True, slots=True)
class ArrivalIndex:
    """The rows of a block and of the blocks before it, with indexes to find a row."""

    rows: ArrivalRows
    first_new: int
    """Rows before this one belong to earlier blocks."""
    ranks: int
    by_rank: Int
    """Rows sorted by rank, then by leave time."""
    position: Int
    """Position of each row in `by_rank`."""
    left_before: Int
    """Position of the rank's last row that it had left when it arrived here; -1 = none."""
    by_group: Int
    """Rows sorted by process group, then by rank, then by operation."""
    previous: Int
    """Row of the rank's previous operation in the same group; -1 = none, or dropped."""
    first: Int
    """First row of each operation present here, and the end. From here on an operation is
    identified by its index in this list.
    """
    operation_of_row: Int
    """Operation of each row."""
    group: Int
    """Process group of each operation: 0 … groups - 1."""


def find_shortest_durations(ops: Operations) -> Int:
    """Find per operation how long the last arrival stayed, on its own clock.

    Returns int64[operations], ns.

    All members leave together, so the rank with the shortest stay arrived last: no common
    clock is needed.
    """
    return np.minimum.reduceat(ops.leave_ns - ops.arrive_ns, ops.first[:-1])


def find_last_arrivals(ops: Operations, shortest: Int, index: ArrivalIndex) -> Int:
    """Find per operation the row of the member that arrived last: int64[operations].

    Of members that arrived together, the one that had waited least in its previous
    operation is taken (the others may have left that operation together with it, having
    waited for it), then the lowest rank. shortest: int64[operations], ns.
    """
    rows = np.flatnonzero(ops.leave_ns - ops.arrive_ns == np.repeat(shortest, np.diff(ops.first)))
    op = np.searchsorted(ops.first, rows, side="right") - 1
    if rows.size > shortest.size:
        before = index.left_before[index.first_new + rows]
        waited = np.where(before >= 0, index.rows.wait_ns[index.by_rank[before]], 0)
        order = np.lexsort((rows, waited, op))
        rows, op = rows[order], op[order]
    return rows[np.searchsorted(op, np.arange(shortest.size))]


def append_block_rows(
    before: ArrivalRows,
    ops: Operations,
    first_number: int,
    at_arrive: Int,
    at_leave: Int,
    shortest: Int,
) -> ArrivalRows:
    """Return the kept rows followed by those of a block whose first operation has this number.

    at_arrive, at_leave: int64[n, K], ns. shortest: int64[operations], ns.
    """
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    zeros = np.zeros(op.size, np.int64)
    wait = np.maximum(ops.blocked_ns - np.where(has_unrecorded_member(ops), 0, shortest)[op], 0)
    block_rows = ArrivalRows(
        op + first_number,
        ops.process_group[op],
        ops.rank,
        ops.arrive_ns,
        ops.leave_ns,
        wait,
        ops.blocked_ns - wait,
        np.ascontiguousarray(at_arrive.T),
        np.ascontiguousarray(at_leave.T),
        zeros,
        zeros,
        zeros,
        zeros,
        zeros,
        zeros,
        ops.on_device.astype(np.int64) if ops.on_device.size else zeros,
    )
    if not before.op.size:
        return block_rows
    return ArrivalRows(
        *(
            np.concatenate([getattr(before, f.name), getattr(block_rows, f.name)], axis=-1)
            for f in fields(ArrivalRows)
        )
    )


def build_arrival_index(rows: ArrivalRows, first_new: int, ranks: int) -> ArrivalIndex:
    """Build the index of all rows, and continue the running sums of each rank."""
    n = rows.op.size
    starts = np.ones(n, np.bool_)
    starts[1:] = rows.op[1:] != rows.op[:-1]
    heads = np.flatnonzero(starts)
    operation_of_row = np.cumsum(starts) - 1
    group = np.unique(rows.group[heads], return_inverse=True)[1]
    by_op = order_by_group(rows.rank, ranks)
    by_rank = by_op
    rank, leave = rows.rank[by_rank], rows.leave_ns[by_rank]
    starts_rank = np.ones(n, np.bool_)
    starts_rank[1:] = rank[1:] != rank[:-1]
    if (leave[1:] < leave[:-1])[~starts_rank[1:]].any():  # asynchronous: left in another order
        by_rank = np.lexsort((rows.op, rows.leave_ns, rows.rank))
        leave = rows.leave_ns[by_rank]
    position = np.empty_like(by_rank)
    position[by_rank] = np.arange(n)
    rows = _sum_per_rank(rows, by_rank, starts_rank, first_new)
    last_left = _find_last_left(rows.arrive_ns[by_rank], leave, starts_rank)
    left_before = np.empty_like(last_left)
    left_before[by_rank] = last_left
    by_group = by_op[order_by_group(group[operation_of_row[by_op]], int(group.max(initial=0)) + 1)]
    previous = _find_previous_rows(rows, by_group, group[operation_of_row[by_group]])
    return ArrivalIndex(
        rows,
        first_new,
        ranks,
        by_rank,
        position,
        left_before,
        by_group,
        previous,
        np.append(heads, n),
        operation_of_row,
        group,
    )


def order_by_group(group: Int, groups: int) -> Int:
    """Return the stable order that sorts rows by group: int64[n].

    group: int64[n], each below `groups`.
    """
    # Short integers are sorted in one pass.
    order: Int = np.argsort(group.astype(np.int16) if groups < 1 << 15 else group, kind="stable")
    return order


def _find_previous_rows(rows: ArrivalRows, by_group: Int, group: Int) -> Int:
    current, last = by_group[1:], by_group[:-1]
    rank, ordinal = rows.rank[by_group], rows.ordinal[by_group]
    is_same = (rank[1:] == rank[:-1]) & (group[1:] == group[:-1])
    is_same &= ordinal[1:] - ordinal[:-1] <= MAX_LOOK_BACK_OPERATIONS
    previous = np.full(by_group.size, -1, np.int64)
    previous[current[is_same]] = last[is_same]
    return previous


def _find_last_left(arrive: Int, leave: Int, starts_rank: NDArray[np.bool_]) -> Int:
    """Return for each position the last one of its rank left before this arrival; -1 = none."""
    before = np.arange(arrive.size) - 1
    before[starts_rank] = -1
    late = np.flatnonzero(arrive[1:] < leave[:-1]) + 1
    late = late[~starts_rank[late]]
    if late.size:  # asynchronous: still under way
        start = np.flatnonzero(starts_rank)[np.cumsum(starts_rank) - 1]
        while late.size:
            before[late] -= 1
            late = late[before[late] >= start[late]]
            late = late[leave[before[late]] > arrive[late]]
        before[before < start] = -1
    return before


def _sum_per_rank(
    rows: ArrivalRows, by_rank: Int, starts_rank: NDArray[np.bool_], first_new: int
) -> ArrivalRows:
    """Compute running sums per rank, continued from the rows of earlier blocks."""
    heads = np.flatnonzero(starts_rank)
    length = np.diff(np.append(heads, by_rank.size))
    # A rank whose first row here belongs to an earlier block continues from that row's sum.
    head = by_rank[heads]
    is_old = head < first_new

    def running_sum(value: Int, sum_before: Int) -> Int:
        sorted_value = value[by_rank]
        sums = np.cumsum(sorted_value)
        begin = np.where(is_old, sum_before[head], sorted_value[heads])
        sums += np.repeat(begin - sums[heads], length)
        out = np.empty_like(sums)
        out[by_rank] = sums
        return out

    # Between rows of earlier blocks others may have been dropped.
    number = rows.ordinal[by_rank]
    step = np.ones(by_rank.size, np.int64)
    old_pairs = np.flatnonzero((by_rank[1:] < first_new) & (by_rank[:-1] < first_new))
    step[old_pairs + 1] = number[old_pairs + 1] - number[old_pairs]
    count = np.cumsum(step)
    ordinal = np.empty_like(by_rank)
    begin = np.where(is_old, rows.ordinal[head], 1)
    ordinal[by_rank] = count + np.repeat(begin - count[heads], length)
    return replace(
        rows,
        waited_ns=running_sum(rows.wait_ns, rows.waited_ns),
        transferred_ns=running_sum(rows.transfer_ns, rows.transferred_ns),
        ordinal=ordinal,
    )


def select_kept_rows(index: ArrivalIndex) -> Int:
    """Return the rows that later blocks may look up, int64[m]."""
    rows, order = index.rows, index.by_group
    distance = MAX_GROUP_OPERATIONS_BACK + 1
    rank, label = rows.rank[order], index.group[index.operation_of_row[order]]
    has_later = np.zeros(order.size, np.bool_)
    has_later[:-distance] = (rank[:-distance] == rank[distance:]) & (
        label[:-distance] == label[distance:]
    )
    last = np.zeros(index.ranks, np.int64)
    ends_rank = np.flatnonzero(np.append(np.diff(rows.rank[index.by_rank]) != 0, True))
    ends = index.by_rank[ends_rank]
    last[rows.rank[ends]] = rows.ordinal[ends]
    oldest = last.copy()
    latest = order[~has_later]  # the last few of each process group
    np.minimum.at(oldest, rows.rank[latest], rows.ordinal[latest])
    # One more: its sums are where the next block begins.
    oldest = np.where(
        last <= FIRST_OPERATIONS, 0, np.maximum(oldest, last - MAX_LOOK_BACK_OPERATIONS) - 1
    )
    return np.flatnonzero(rows.ordinal >= oldest[rows.rank])


def has_full_history(index: ArrivalIndex, waiting: Int, late: Int) -> NDArray[np.bool_]:
    """Return for pairs of rows whether all operations of both ranks are known.

    Known means: since the first steps of both. Of a rank that was recorded later than the
    other, fewer operations are known.
    waiting, late: int64[n], rows.
    Returns bool[n].
    """
    number, has_none_before = index.rows.ordinal, index.left_before < 0
    first = np.maximum(number[waiting], number[late]) <= FIRST_OPERATIONS
    first &= np.abs(number[waiting] - number[late]) <= MAX_GROUP_OPERATIONS_BACK
    result: NDArray[np.bool_] = first | has_none_before[waiting] & has_none_before[late]
    return result


def has_unrecorded_member(ops: Operations) -> NDArray[np.bool_]:
    """Return per operation whether a member was not recorded: bool[operations].

    All others may have waited for it.
    """
    return ~ops.complete | (np.diff(ops.first) < 2)


def is_point_to_point(operation: Int) -> NDArray[np.bool_]:
    """Return for operation kinds, int64[n], whether one rank sends and one receives: bool[n]."""
    return (operation == SEND) | (operation == RECV)
