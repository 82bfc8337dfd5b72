"""Stream of the operations of all ranks, read in blocks from each rank's stored rows.

The next rows of a rank are read as long as none of its rows wait. If operations wait
for a member, that member's rows are read. Ranks therefore advance together however far
apart their clocks are, and memory depends on the number of ranks, not on the length of
the recording. The block boundaries do not change any operation.

It also matches rows of many ranks to operations, as far as no further row can arrive for them.

rank 0   1  2  3  4  5 | 6 7        rows in the order in which each rank left them
rank 1   1  2  3           may still arrive at 4: 4 is open, and what any rank left after it
settled  1  2  3           waits with it

Spans that cannot be matched reliably are left out and counted with a reason:

| reason | what was seen |
|---|---|
| `group-unknown` | the span names no group |
| `number-unknown` | the span has no number |
| `peer-unknown` | a send or receive that does not name its peer |
| `issue-not-seen` · `wait-not-seen` | half of an asynchronous operation |
| `backwards` | it ends before it begins, or blocks for longer than it lasts |
| `seen-twice` | the same rank a second time in one operation |
| `another-operation` | its kind differs from that of most members with that number |
| `restart-unclear` | the rank restarted more or less often than the others of its group |
| `sequence-skew` | its numbers are shifted: its leaves fit the operation before or after |
| `too-late` | so many operations waited for it that they were settled without it |

Send and receive are matched by sender, receiver and number; both belong to the process group of
the pair. An operation is settled when every recorded member has been read beyond it.
Operations are yielded in an order in which every member left them; clocks, roughly aligned or not
aligned, only help to find that order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.collectives.matching import (
    ChannelDirectory,
    RankEntry,
    build_directory,
)
from clusterprof.analysis.timeline.collectives.operations import ON_DEVICE, RECV, SEND, Operations
from clusterprof.analysis.timeline.collectives.rows import (
    ARRIVE,
    BLOCK_ROWS,
    BLOCKED,
    BYTES,
    CHANNEL,
    DURATION,
    HEAD_ROWS,
    KIND,
    NO_NUMBER,
    SEQUENCE,
    list_categories,
    read_blocks,
)
from clusterprof.analysis.timeline.model import Int
from clusterprof.probe.layout import ALL_TO_ALL

_SPARE_CELLS = 1 << 20
_MANY_RANKS = 1024
"""Ranks of a job whose rows take so much memory that what others have freed is returned before."""
_MAX_ORDER_PASSES = (
    12  # passes for finding an order that fits all ranks; clocks mostly need one or two
)


class SettledOperations(NamedTuple):
    """Result of one window."""

    operations: Operations
    waiting: NDArray[np.bool_]
    """bool[n]: rows that are not settled yet; the last rows of each rank."""
    open: tuple[Int, Int]
    """Channel and number, int64[k], of operations for which a row may still arrive."""
    unmatched: dict[str, int]


class _GroupedRows(NamedTuple):
    """Rows by operation, `order[first[i]:first[i + 1]]`, sorted by rank, without duplicates."""

    order: Int
    first: Int
    op: Int
    """Operation of each row of the window."""
    once: NDArray[np.bool_]


def settle_operations(
    table: Int, rank: Int, when_ns: Int, directory: ChannelDirectory, lowest_unread: Int
) -> SettledOperations:
    """Settle the operations of a window.

    table: int64[rows of a block, n] as named in `analysis.timeline.collectives.rows`, CHANNEL
    being the entry in the directory, sorted by rank. rank, when_ns: int64[n]; when_ns is
    the leave time on a roughly common clock, in ns. lowest_unread: int64[channels], the lowest
    number that an unread row may have.
    """
    entry, number = table[CHANNEL], table[SEQUENCE]
    channel = directory.channel[entry]
    grouped = _group_rows(channel, number, directory.member_index[entry], directory.members)
    head = grouped.order[grouped.first[:-1]]
    is_open = number[head] >= lowest_unread[channel[head]]
    settled, waiting = _find_settled(grouped, is_open, rank)
    begin, end = grouped.first[:-1][settled], grouped.first[1:][settled]
    order = grouped.order[_expand_ranges(begin, end)]
    unmatched: dict[str, int] = {}
    duplicates = int(np.count_nonzero(~grouped.once & ~waiting))
    if duplicates:
        unmatched["seen-twice"] = duplicates
    open_operations = channel[head[is_open]], number[head[is_open]]
    del grouped, channel  # of a large job each column takes ten megabytes
    size = end - begin
    order, size = _filter_majority_kind(order, size, table[KIND] & ~ON_DEVICE, unmatched)
    first = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    operation_order = _order_operations(order, first, rank, when_ns)
    order = order[_expand_ranges(first[:-1][operation_order], first[1:][operation_order])]
    size = size[operation_order]
    first = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    head = order[first[:-1]]
    operation_channel = directory.channel[entry[head]]
    message_bytes = operation_channel
    if head.size:
        message_bytes = np.maximum.reduceat(table[BYTES][order], first[:-1])
    kind = table[KIND][head] & ~ON_DEVICE
    has_all_to_all = bool((kind == ALL_TO_ALL).any())
    arrive = table[ARRIVE][order]
    leave = table[DURATION][order]
    leave += arrive
    operations = Operations(
        first,
        directory.process_group[operation_channel],
        kind,
        message_bytes,
        size >= directory.expected_members[operation_channel],
        rank[order],
        arrive,
        leave,
        table[BLOCKED][order],
        order,
        (table[KIND][order] & ON_DEVICE) != 0,
        table[BYTES][order] if has_all_to_all else np.zeros(0, np.int64),
    )
    return SettledOperations(operations, waiting, open_operations, unmatched)


def _group_rows(channel: Int, number: Int, member_index: Int, members: Int) -> _GroupedRows:
    """Find the rows of each operation: every (channel, number, member) is a cell."""
    n = channel.size
    low, high = np.full(members.size, np.iinfo(np.int64).max), np.full(members.size, -1)
    np.minimum.at(low, channel, number)
    np.maximum.at(high, channel, number)
    width = np.where(high >= low, high - low + 1, 0)
    if float(width.astype(np.float64) @ members) > 8 * n + _SPARE_CELLS:
        order = np.lexsort((member_index, number, channel))
        c, k, p = channel[order], number[order], member_index[order]
        is_first = np.ones(n, np.bool_)
        is_first[1:] = (c[1:] != c[:-1]) | (k[1:] != k[:-1])
        first_seen = is_first.copy()
        first_seen[1:] |= p[1:] != p[:-1]
        op = np.empty(n, np.int64)
        op[order] = np.cumsum(is_first) - 1
        once = np.empty(n, np.bool_)
        once[order] = first_seen
        order = order[first_seen]
    else:
        cells = width * members
        start = np.cumsum(cells) - cells
        cell = number - low[channel]
        cell *= members[channel]
        cell += start[channel]
        cell += member_index
        rows = np.full(int(cells.sum()), -1, np.int32)
        rows[cell[::-1]] = np.arange(n - 1, -1, -1, dtype=np.int32)  # the first stays
        order = rows[rows >= 0].astype(np.int64)
        is_first = np.ones(order.size, np.bool_)
        is_first[1:] = False
        for column in (channel, number):  # one after the other: there may be millions
            values = column[order]
            is_first[1:] |= values[1:] != values[:-1]
            del values
        op = np.empty(n, np.int64)
        op_of_cell: Int = np.cumsum(is_first, dtype=np.int64)
        op_of_cell -= 1
        op[order] = op_of_cell
        once = np.ones(n, np.bool_)
        if order.size < n:
            first_row = rows[cell]
            once = first_row == np.arange(n)
            op = op[first_row]
        first = np.flatnonzero(is_first)
        return _GroupedRows(order, np.append(first, order.size), op, once)
    sorted_op = op[order]
    first = np.flatnonzero(np.concatenate([[True], sorted_op[1:] != sorted_op[:-1]])[: order.size])
    return _GroupedRows(order, np.append(first, order.size), op, once)


def _find_settled(
    grouped: _GroupedRows, is_open: NDArray[np.bool_], rank: Int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which operations can be settled, and which rows wait.

    Rows that a rank left after a waiting row also wait, and with them all rows of their
    operations.
    """
    op, n = grouped.op, rank.size
    if not is_open.any():
        return ~is_open, np.zeros(n, np.bool_)
    blocked = is_open.copy()
    starts = np.flatnonzero(np.concatenate([[True], rank[1:] != rank[:-1]]))
    ends = np.append(starts[1:], n)
    number = np.repeat(np.arange(starts.size), ends - starts)
    reach = ends.copy()  # rows of each rank before this one do not wait
    while True:
        blocked_rows = np.flatnonzero(blocked[op])
        nearest = ends.copy()
        np.minimum.at(nearest, number[blocked_rows], blocked_rows)
        if np.array_equal(nearest, reach):
            break
        reach = nearest
        waiting = np.arange(n) >= reach[number]
        blocked[op[waiting]] = True
    return ~blocked, blocked[op]


def _expand_ranges(begin: Int, end: Int) -> Int:
    """Expand ranges: 0 1 2 7 8 for 0-3 and 7-9."""
    count = end - begin
    before = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(begin - before, count)


def _filter_majority_kind(
    order: Int, size: Int, kind: Int, unmatched: dict[str, int]
) -> tuple[Int, Int]:
    """Drop rows whose kind differs from that of most rows of their operation."""
    row_kind = kind[order]
    row_kind = np.where(row_kind == RECV, SEND, row_kind)
    first = np.cumsum(size) - size
    if (row_kind == np.repeat(row_kind[first], size)).all():
        return order, size
    op = np.repeat(np.arange(size.size), size)
    codes, count = np.unique(op * 256 + row_kind, return_counts=True)
    majority = np.empty(size.size, np.int64)
    by_count = np.argsort(count, kind="stable")
    majority[codes[by_count] // 256] = codes[by_count] % 256
    in_majority = row_kind == majority[op]
    unmatched["another-operation"] = int(np.count_nonzero(~in_majority))
    return order[in_majority], np.bincount(op[in_majority], minlength=size.size)


def _order_operations(order: Int, first: Int, rank: Int, when_ns: Int) -> Int:
    """Order the operations so that every rank left them in that order.

    They are sorted by the leave time of the last member. Where this contradicts the order
    in which a rank left them, an operation moves behind all operations that its members
    left before it, repeatedly until there is no contradiction. This fails only if ranks
    left the same operations in different order; then the clocks decide.
    """
    if first.size < 3:
        return np.arange(first.size - 1)
    heads = first[:-1]
    key = np.maximum.reduceat(when_ns[order], heads)
    key -= key.min()
    by_time = np.argsort(key, kind="stable")
    of_row = np.full(rank.size, -1, np.int32)
    of_row[order] = np.repeat(np.arange(heads.size, dtype=np.int32), np.diff(first))
    rows = of_row >= 0
    op, row_rank = of_row[rows], rank[rows]
    new_rank = row_rank[1:] != row_rank[:-1]
    del of_row, row_rank  # there may be millions
    adjusted = key
    for _ in range(_MAX_ORDER_PASSES):
        row_time = adjusted[op]
        if ((row_time[1:] > row_time[:-1]) | new_rank).all():
            return by_time if adjusted is key else np.argsort(adjusted, kind="stable")
        rank_gap = int(row_time.max()) + op.size + 1
        if rank_gap > (1 << 62) // (int(np.count_nonzero(new_rank)) + 1):
            break
        lift = np.cumsum(np.append(False, new_rank)) * rank_gap - np.arange(op.size)
        running_max = np.maximum.accumulate(row_time + lift) - lift
        column = np.zeros(rank.size, np.int64)
        column[rows] = running_max
        adjusted = np.maximum.reduceat(column[order], heads)
    return by_time


MAX_WAITING_ROWS = 1 << 20
"""Limit of rows that may wait for members; beyond it operations are settled without them."""
MAX_WAITING_BLOCKS = 6
"""The limit of waiting rows in blocks per rank; the larger of both limits applies."""
_RANKS_READ_AT_ONCE = 256
MIN_READ_AHEAD_ROWS = 1024
"""A rank with no more waiting rows than this is read further."""
GetBlock = Callable[[int | bytes, int], bytes]


class OperationBatch(NamedTuple):
    """Some operations with the time that each member had spent at arrival and at leave."""

    operations: Operations
    at_arrive: Int
    """int64[n, categories], ns."""
    at_leave: Int
    """int64[n, categories], ns."""


def join_batches(batches: Sequence[OperationBatch]) -> OperationBatch:
    """Join batches that follow each other; without any, raises ValueError."""
    if len(batches) == 1:
        return batches[0]
    operations = [batch.operations for batch in batches]
    rows = np.cumsum([0, *(ops.rank.size for ops in operations)])
    first = [ops.first[:-1] + before for ops, before in zip(operations, rows[:-1].tolist())]
    columns = {
        column.name: np.concatenate([getattr(ops, column.name) for ops in operations])
        for column in fields(Operations)
        if column.name not in ("first", "row_bytes")
    }
    if any(ops.row_bytes.size for ops in operations):
        columns["row_bytes"] = np.concatenate(
            [
                ops.row_bytes if ops.row_bytes.size else np.full_like(ops.rank, -1)
                for ops in operations
            ]
        )
    return OperationBatch(
        Operations(np.append(np.concatenate(first), rows[-1]), **columns),
        np.concatenate([batch.at_arrive.T for batch in batches], axis=1).T,
        np.concatenate([batch.at_leave.T for batch in batches], axis=1).T,
    )


def return_freed_memory() -> None:
    """Return memory that was freed to the system, where the C library can.

    Tables of all ranks are allocated and freed in turn, of different sizes: the holes between those
    that are left would add up to half a gigabyte for 10,000 ranks.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class OperationStream:
    """Reads and matches operations; `unmatched` is complete when all batches have been read."""

    def __init__(
        self,
        ranks: Sequence[RankEntry],
        announced: Mapping[tuple[int, int], Int],
        categories: Sequence[int],
        get: GetBlock,
        directory: ChannelDirectory | None = None,
    ) -> None:
        """Set up the stream.

        categories: of time spent, to include. get: reads stored data. directory: that of these
        ranks, if it is known already.
        """
        self._ranks, self._get = ranks, get
        self._directory = build_directory(ranks, announced) if directory is None else directory
        self._channel = np.append(self._directory.channel, -1)
        """Channel of each entry; one more, the last, for rows that are left out."""
        max_category = max((int(c) for c in categories), default=-1)
        self._category_slot = np.full(max_category + 1, -1)
        self._category_slot[list(categories)] = np.arange(len(categories))
        leave_categories = list_categories(
            block.leave_categories for entry in ranks for block in entry.operations.blocks
        )
        self._leave_slots = np.sort(self._category_slot[leave_categories])
        """Slots of the categories in which any rank spends time in operations, mostly work alone:
        the others have no row for the time at leave."""
        self._first_leave = HEAD_ROWS + len(categories)
        self._rows = self._first_leave + self._leave_slots.size
        self._read = np.zeros(len(ranks), np.int64)
        self._blocks = np.array([len(entry.operations.blocks) for entry in ranks], np.int64)
        lowest = [entry.operations.lowest[0] for entry in ranks]
        self._unread = np.concatenate([*lowest, np.zeros(0, np.int64)])
        self._table = np.zeros((self._rows, 0), np.int64)
        self._waiting_rows = np.zeros(len(ranks), np.int64)
        self._passed = np.zeros(self._directory.process_group.size, np.int64)
        self._wanted = np.ones(len(ranks), np.bool_)
        self.unmatched = dict(self._directory.unmatched)
        for entry in ranks:
            self._count(entry.operations.left_out)

    def _count(self, reasons: Mapping[str, int]) -> None:
        for reason, count in reasons.items():
            self.unmatched[reason] = self.unmatched.get(reason, 0) + count

    def read_batches(self, most_rows: int) -> Iterator[OperationBatch]:
        """Yield all operations in an order in which every rank left them.

        Batches have up to `most_rows` rows, or one operation.
        """
        while (self._read < self._blocks).any():
            if self._read.size >= _MANY_RANKS:
                return_freed_memory()
            self._load(self._wanted & (self._read < self._blocks))
            yield from self._split_batches(*self._settle_held(), most_rows)
        assert not self._table.shape[1]

    def _settle_held(self) -> tuple[Operations, Int]:
        """Settle the rows that were read, and decide which ranks are read next."""
        book, table = self._directory, self._table
        rank_index = np.repeat(np.arange(len(self._ranks)), self._waiting_rows)
        rank = np.array([entry.rank for entry in self._ranks])[rank_index]
        when_ns = _shift_to_common_clock(
            table[ARRIVE] + table[DURATION], self._waiting_rows, self._ranks
        )
        lowest_unread = np.full(book.process_group.size, NO_NUMBER)
        usable = book.channel >= 0
        np.minimum.at(lowest_unread, book.channel[usable], self._unread[usable])
        window = settle_operations(table, rank, when_ns, book, lowest_unread)
        max_waiting = max(MAX_WAITING_ROWS, MAX_WAITING_BLOCKS * self._blocks.size * BLOCK_ROWS)
        if np.count_nonzero(window.waiting) > max_waiting:
            window = settle_operations(
                table, rank, when_ns, book, np.full(lowest_unread.size, NO_NUMBER)
            )
            channel = book.channel[table[CHANNEL]]
            np.maximum.at(self._passed, channel, table[SEQUENCE] + 1)
        self._count(window.unmatched)
        rows = np.flatnonzero(window.waiting)
        self._table = table[:, rows]
        self._waiting_rows = np.bincount(rank_index[rows], minlength=len(self._ranks))
        farthest = np.full(book.process_group.size, -1)
        np.maximum.at(farthest, *window.open)
        has_awaited = usable.copy()
        has_awaited[usable] = self._unread[usable] <= farthest[book.channel[usable]]
        sums = np.concatenate([[0], np.cumsum(has_awaited)])
        read_limit = max(int(self._waiting_rows.min(initial=NO_NUMBER)), MIN_READ_AHEAD_ROWS)
        self._wanted = (np.diff(sums[book.base]) > 0) | (self._waiting_rows <= read_limit)
        return window.operations, table

    def _load(self, wanted: np.ndarray) -> None:
        """Append the next block of each of these ranks to its waiting rows."""
        blocks = [
            entry.operations.blocks[int(block_number)] if is_wanted else None
            for entry, block_number, is_wanted in zip(self._ranks, self._read, wanted)
        ]
        new_rows = np.array([0 if block is None else block.rows for block in blocks], np.int64)
        sizes = self._waiting_rows + new_rows
        ends = np.cumsum(sizes)
        table = np.empty((self._rows, int(ends[-1]) if ends.size else 0), np.int64)
        old_begins = np.cumsum(self._waiting_rows) - self._waiting_rows
        for number in np.flatnonzero(self._waiting_rows).tolist():
            begin, waiting_rows = int(ends[number] - sizes[number]), int(self._waiting_rows[number])
            table[:, begin : begin + waiting_rows] = self._table[
                :, old_begins[number] : old_begins[number] + waiting_rows
            ]
        numbers = [number for number, block in enumerate(blocks) if block is not None]
        for begin in range(0, len(numbers), _RANKS_READ_AT_ONCE):
            self._read_new(numbers[begin : begin + _RANKS_READ_AT_ONCE], table, ends)
        self._table, self._waiting_rows = self._drop_unmatched(table, sizes)

    def _read_new(self, numbers: Sequence[int], table: Int, ends: Int) -> None:
        """Read the next block of some ranks into their last rows of a table.

        ends: int64[ranks], the end of the rows of each rank.
        """
        book = self._directory
        read, outs = [], []
        for number, end in zip(numbers, ends[numbers].tolist()):
            block = self._ranks[number].operations.blocks[int(self._read[number])]
            read.append((self._get(block.location, block.length), block))
            outs.append(table[:, end - block.rows : end])
        read_blocks(read, self._category_slot, self._leave_slots, outs)
        for number, out in zip(numbers, outs):
            out[CHANNEL] += book.base[number]
            self._trim(number, int(self._read[number]), out)
            self._read[number] += 1
            lowest = self._ranks[number].operations.lowest[self._read[number]]
            self._unread[book.base[number] : book.base[number + 1]] = lowest

    def _trim(self, number: int, block_number: int, rows: Int) -> None:
        """Mark rows of a block that are left out, by the last entry of channels; here none."""

    def _drop_unmatched(self, table: Int, sizes: Int) -> tuple[Int, Int]:
        """Drop rows of channels left out, and rows too late for operations already settled."""
        channel = self._channel[table[CHANNEL]]
        keep = channel >= 0
        if self._passed.any():
            late = keep & (table[SEQUENCE] < self._passed[channel])
            self._count({"too-late": int(np.count_nonzero(late))} if late.any() else {})
            keep &= ~late
        if keep.all():
            return table, sizes
        rank_index = np.repeat(np.arange(sizes.size), sizes)
        return table[:, keep], np.bincount(rank_index[keep], minlength=sizes.size)

    def _split_batches(
        self, ops: Operations, table: Int, most_rows: int
    ) -> Iterator[OperationBatch]:
        at_arrive = np.take(table[HEAD_ROWS : self._first_leave], ops.source, axis=1)
        at_leave = np.take(table[self._first_leave :], ops.source, axis=1)
        del table  # there may be a gigabyte
        begin = 0
        while begin < ops.process_group.size:
            end = int(np.searchsorted(ops.first, ops.first[begin] + most_rows, side="right")) - 1
            end = max(end, begin + 1)
            rows = slice(int(ops.first[begin]), int(ops.first[end]))
            # Copies, so that a batch does not keep the rows of all ranks until the next are read.
            batch_arrive = at_arrive[:, rows].copy()
            batch_leave = batch_arrive.copy()
            batch_leave[self._leave_slots] = at_leave[:, rows]
            part = ops.take_range(begin, end)
            part = Operations(*[getattr(part, column.name).copy() for column in fields(part)])
            yield OperationBatch(part, batch_arrive.T, batch_leave.T)
            begin = end


def _shift_to_common_clock(t_ns: Int, rows: Int, ranks: Sequence[RankEntry]) -> Int:
    """Shift times to a common clock; `rows` of them belong to each rank, one after the other."""
    since_ns, shift_ns = np.array(
        [(entry.clock_offset.since_ns, entry.clock_offset.shift_ns) for entry in ranks]
    ).T
    drift = np.array([entry.clock_offset.drift for entry in ranks])
    if not drift.any():
        return t_ns + np.repeat(shift_ns, rows)
    drift_ns = (t_ns - np.repeat(since_ns, rows)) * np.repeat(drift, rows)
    return t_ns + np.repeat(shift_ns, rows) + drift_ns.astype(np.int64)
