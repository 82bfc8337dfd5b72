"""Rows of many ranks at once become operations, as far as nothing that belongs to them may come.

rank 0   1  2  3  4  5 | 6 7        rows in the order in which each rank left them
rank 1   1  2  3           may still come with 4: 4 is open, and what any rank left after it
settled  1  2  3           waits with it
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.collectives_directory import Directory
from clusterprof.timeline.device_waits import ON_DEVICE
from clusterprof.timeline.model import Int
from clusterprof.timeline.operation_rows import (
    ARRIVE,
    BLOCKED,
    BYTES,
    CHANNEL,
    KIND,
    SEQUENCE,
    STAY,
)
from clusterprof.timeline.operations import RECV, SEND, Operations

_SPARE_CELLS = 1 << 20
_TURNS = 12  # of putting operations in an order that suits all ranks; clocks mostly need one or two


class Settled(NamedTuple):
    """What a window became."""

    operations: Operations
    waiting: NDArray[np.bool_]
    """Rows that are not settled yet; of each rank the last ones."""
    open: tuple[Int, Int]
    """Channel and number of operations to which a row may still come."""
    unmatched: dict[str, int]


class _Laid(NamedTuple):
    """Rows by operation: `order[first[i]:first[i + 1]]`, by rank; the others came twice."""

    order: Int
    first: Int
    op: Int
    """Operation of each row of the window."""
    once: NDArray[np.bool_]


def settle(table: Int, rank: Int, when_ns: Int, book: Directory, coming: Int) -> Settled:
    """Settle a window.

    `table` holds rows as `timeline.operation_rows` names them, CHANNEL being the entry in the
    directory, sorted by person; `rank` and `when_ns` (the leave on a roughly common clock) belong
    to them. `coming` is the lowest number by channel that a row not read yet may have.
    """
    entry, number = table[CHANNEL], table[SEQUENCE]
    channel = book.channel[entry]
    laid = _laid_out(channel, number, book.place[entry], book.members)
    head = laid.order[laid.first[:-1]]
    open_ = number[head] >= coming[channel[head]]
    settled, waiting = _closed(laid, open_, rank)
    begin, end = laid.first[:-1][settled], laid.first[1:][settled]
    order = laid.order[_ranges(begin, end)]
    unmatched: dict[str, int] = {}
    twice = int(np.count_nonzero(~laid.once & ~waiting))
    if twice:
        unmatched["seen-twice"] = twice
    size = end - begin
    kind = table[KIND] & ~ON_DEVICE
    order, size = _of_one_kind(order, size, kind, unmatched)
    first = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    turn = _turn(order, first, rank, when_ns)
    order = order[_ranges(first[:-1][turn], first[1:][turn])]
    size = size[turn]
    first = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    of = channel[order[first[:-1]]]
    brought = table[BYTES][order]
    arrive = table[ARRIVE][order]
    operations = Operations(
        first, book.team[of], kind[order[first[:-1]]],
        np.maximum.reduceat(brought, first[:-1]) if of.size else of, size >= book.wanted[of],
        rank[order], arrive, arrive + table[STAY][order], table[BLOCKED][order], order,
        (table[KIND][order] & ON_DEVICE) != 0,
    )  # fmt: skip
    return Settled(operations, waiting, (channel[head[open_]], number[head[open_]]), unmatched)


def _laid_out(channel: Int, number: Int, place: Int, members: Int) -> _Laid:
    """Find the rows of each operation: every (channel, number, member) is a cell."""
    n = channel.size
    low, high = np.full(members.size, np.iinfo(np.int64).max), np.full(members.size, -1)
    np.minimum.at(low, channel, number)
    np.maximum.at(high, channel, number)
    width = np.where(high >= low, high - low + 1, 0)
    if float(width.astype(np.float64) @ members) > 8 * n + _SPARE_CELLS:
        order = np.lexsort((place, number, channel))
        c, k, p = channel[order], number[order], place[order]
        new = np.ones(n, np.bool_)
        new[1:] = (c[1:] != c[:-1]) | (k[1:] != k[:-1])
        first_seen = new.copy()
        first_seen[1:] |= p[1:] != p[:-1]
        op = np.empty(n, np.int64)
        op[order] = np.cumsum(new) - 1
        once = np.empty(n, np.bool_)
        once[order] = first_seen
        order = order[first_seen]
    else:
        cells = width * members
        start = np.cumsum(cells) - cells
        cell = start[channel] + (number - low[channel]) * members[channel] + place
        rows = np.full(int(cells.sum()), -1, np.int32)
        rows[cell[::-1]] = np.arange(n - 1, -1, -1, dtype=np.int32)  # of several the first stays
        order = rows[rows >= 0].astype(np.int64)
        c, k = channel[order], number[order]
        new = np.ones(order.size, np.bool_)
        new[1:] = (c[1:] != c[:-1]) | (k[1:] != k[:-1])
        op = np.empty(n, np.int64)
        op[order] = np.cumsum(new) - 1
        once = np.ones(n, np.bool_)
        if order.size < n:
            kept = rows[cell]
            once = kept == np.arange(n)
            op = op[kept]
        first = np.flatnonzero(new)
        return _Laid(order, np.append(first, order.size), op, once)
    sorted_op = op[order]
    first = np.flatnonzero(np.concatenate([[True], sorted_op[1:] != sorted_op[:-1]])[: order.size])
    return _Laid(order, np.append(first, order.size), op, once)


def _closed(
    laid: _Laid, open_: NDArray[np.bool_], rank: Int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which operations can be settled, and which rows wait.

    What a rank left after one that waits waits too, and with it all other rows of that operation.
    """
    op, n = laid.op, rank.size
    if not open_.any():
        return ~open_, np.zeros(n, np.bool_)
    blocked = open_.copy()
    starts = np.flatnonzero(np.concatenate([[True], rank[1:] != rank[:-1]]))
    ends = np.append(starts[1:], n)
    number = np.repeat(np.arange(starts.size), ends - starts)
    reach = ends.copy()  # rows of each rank before this one do not wait
    while True:
        some = np.flatnonzero(blocked[op])
        nearest = ends.copy()
        np.minimum.at(nearest, number[some], some)
        if np.array_equal(nearest, reach):
            break
        reach = nearest
        waiting = np.arange(n) >= reach[number]
        blocked[op[waiting]] = True
    return ~blocked, blocked[op]


def _ranges(begin: Int, end: Int) -> Int:
    """Return 0 1 2 7 8 for 0-3 and 7-9."""
    count = end - begin
    before = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(begin - before, count)


def _of_one_kind(order: Int, size: Int, kind: Int, unmatched: dict[str, int]) -> tuple[Int, Int]:
    """Leave out rows that are of another kind than most of their operation."""
    mine = kind[order]
    mine = np.where(mine == RECV, SEND, mine)
    first = np.cumsum(size) - size
    if (mine == np.repeat(mine[first], size)).all():
        return order, size
    op = np.repeat(np.arange(size.size), size)
    codes, count = np.unique(op * 256 + mine, return_counts=True)
    best = np.empty(size.size, np.int64)
    by_count = np.argsort(count, kind="stable")
    best[codes[by_count] // 256] = codes[by_count] % 256
    same = mine == best[op]
    unmatched["another-operation"] = int(np.count_nonzero(~same))
    return order[same], np.bincount(op[same], minlength=size.size)


def _turn(order: Int, first: Int, rank: Int, when_ns: Int) -> Int:
    """Return the operations in an order in which every rank left them.

    They are taken by when the last member left. Where clocks say otherwise than the ranks do, an
    operation moves behind all that its members left before it, and so on until all is well. That
    fails only where ranks left the same operations in different order; then clocks decide.
    """
    if first.size < 3:
        return np.arange(first.size - 1)
    heads = first[:-1]
    key = np.maximum.reduceat(when_ns[order], heads)
    key -= key.min()
    by_time = np.argsort(key, kind="stable")
    of_row = np.full(rank.size, -1)
    of_row[order] = np.repeat(np.arange(heads.size), np.diff(first))
    rows = np.flatnonzero(of_row >= 0)
    op, who = of_row[rows], rank[rows]
    who = np.cumsum(np.concatenate([[0], who[1:] != who[:-1]]))
    place = np.arange(rows.size)
    found = key
    for _ in range(_TURNS):
        mine = found[op]
        if ((mine[1:] > mine[:-1]) | (who[1:] != who[:-1])).all():
            return by_time if found is key else np.argsort(found, kind="stable")
        apart = int(mine.max()) + rows.size + 1
        if apart > (1 << 62) // (int(who[-1]) + 1):
            break
        lift = who * apart - place
        behind = np.maximum.accumulate(mine + lift) - lift
        column = np.zeros(rank.size, np.int64)
        column[rows] = behind
        found = np.maximum.reduceat(column[order], heads)
    return by_time
