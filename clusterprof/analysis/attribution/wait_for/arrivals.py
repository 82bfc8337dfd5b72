"""The rows that blame works on: one per operation and member, those of earlier blocks in front.

What is kept of earlier blocks is what later operations may look back at: per rank everything since
the eighth last operation of each of its teams, but never more than `LOOK_BACK` operations, and all
of its first `BEGIN`. The same limits hold when nothing is cut, so that the cut into blocks changes
no nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import RECV, SEND, Operations

LOOK_BACK = 512
"""Operations of a rank after which an earlier one is forgotten."""
BEGIN = 64
"""A rank's first operations, about its first step: while it is in them none is forgotten."""
STEPS_BACK = 8
"""Earlier operations of a team that are tried before a pair is said to have left none together."""


@dataclass(frozen=True, slots=True)
class Rows:
    """n rows, sorted by operation and rank."""

    op: Int
    """Number of the operation since the beginning."""
    team: Int
    rank: Int
    arrive_ns: Int
    leave_ns: Int
    wait_ns: Int
    """Of the time blocked: until the last member arrived; all of it where one was not seen."""
    transfer_ns: Int
    """The rest of the time blocked."""
    at_arrive: Int
    """int64[K, n]: what the rank had spent, by category, when it arrived, since its beginning."""
    at_leave: Int
    waited_ns: Int
    """What the rank had waited in all, this operation included; `transferred_ns` alike."""
    transferred_ns: Int
    ordinal: Int
    """Number of the operation among the rank's own."""
    windows: Int
    """How many stretches of work before operations of this team stand behind `habit_ns`."""
    habit_ns: Int
    """Work of the rank in those stretches."""
    early_ns: Int
    """Work of the rank in the first few of them (`blame_excess.EARLY`)."""
    on_device: Int
    """1 where the times are those of a device, 0 where they are the host's."""

    def take(self, rows: Int | NDArray[np.bool_]) -> Rows:
        """Return some of the rows."""
        return Rows(*(getattr(self, one.name)[..., rows] for one in fields(self)))


def no_rows(categories: int) -> Rows:
    """Return the rows before the first block."""
    none = np.zeros(0, np.int64)
    wide = np.zeros((categories, 0), np.int64)
    return Rows(*(wide if one.name in ("at_arrive", "at_leave") else none for one in fields(Rows)))


@dataclass(frozen=True, slots=True)
class Lookup:
    """All rows of a block and before it, with the ways to find one."""

    rows: Rows
    fresh: int
    """Rows before this one are of earlier blocks."""
    ranks: int
    by_rank: Int
    """Rows sorted by rank, then by when it left."""
    place: Int
    """Where each row stands in `by_rank`."""
    before: Int
    """Place of the rank's last row that it had left when it arrived here; -1 = none."""
    by_team: Int
    """Rows sorted by team, then by rank, then by operation."""
    previous: Int
    """Row of the rank's operation before in the same team; -1 = none, or forgotten."""
    first: Int
    """First row of each operation there is here, and the end; operations are meant by their place
    in this list from here on."""
    of_row: Int
    """Operation of each row."""
    team: Int
    """Team of each operation: 0 … teams - 1."""


def shortest_stay(ops: Operations) -> Int:
    """Return per operation how long the last to arrive stayed, on its own clock.

    All leave together, so who stayed shortest came last: no common clock is needed.
    """
    return np.minimum.reduceat(ops.leave_ns - ops.arrive_ns, ops.first[:-1])


def last_to_arrive(ops: Operations, shortest: Int, look: Lookup) -> Int:
    """Return per operation the row of the member that came last.

    Of members that came together the one that had waited least in its operation before is taken
    (the others may have left that together with it, having waited for it), then the lowest rank.
    """
    rows = np.flatnonzero(ops.leave_ns - ops.arrive_ns == np.repeat(shortest, np.diff(ops.first)))
    op = np.searchsorted(ops.first, rows, side="right") - 1
    if rows.size > shortest.size:
        before = look.before[look.fresh + rows]
        waited = np.where(before >= 0, look.rows.wait_ns[look.by_rank[before]], 0)
        order = np.lexsort((rows, waited, op))
        rows, op = rows[order], op[order]
    return rows[np.searchsorted(op, np.arange(shortest.size))]


def joined(
    kept: Rows, ops: Operations, number: int, at_arrive: Int, at_leave: Int, shortest: Int
) -> Rows:
    """Return the kept rows and, behind them, those of a block whose first operation is `number`.

    `at_arrive` and `at_leave` are int64[n, K].
    """
    op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
    none = np.zeros(op.size, np.int64)
    wait = np.maximum(ops.blocked_ns - np.where(unseen(ops), 0, shortest)[op], 0)
    new = Rows(
        op + number, ops.team[op], ops.rank, ops.arrive_ns, ops.leave_ns, wait,
        ops.blocked_ns - wait, np.ascontiguousarray(at_arrive.T), np.ascontiguousarray(at_leave.T),
        none, none, none, none, none, none,
        ops.on_device.astype(np.int64) if ops.on_device.size else none,
    )  # fmt: skip
    if not kept.op.size:
        return new
    return Rows(
        *(
            np.concatenate([getattr(kept, f.name), getattr(new, f.name)], axis=-1)
            for f in fields(Rows)
        )
    )


def looked_up(rows: Rows, fresh: int, ranks: int) -> Lookup:
    """Sort the rows of a block every way that is needed, and carry the sums of each rank on."""
    n = rows.op.size
    starts = np.ones(n, np.bool_)
    starts[1:] = rows.op[1:] != rows.op[:-1]
    heads = np.flatnonzero(starts)
    of_row = np.cumsum(starts) - 1
    team = np.unique(rows.team[heads], return_inverse=True)[1]
    by_op = in_groups(rows.rank, ranks)
    by_rank = by_op
    rank, leave = rows.rank[by_rank], rows.leave_ns[by_rank]
    opens = np.ones(n, np.bool_)
    opens[1:] = rank[1:] != rank[:-1]
    if (leave[1:] < leave[:-1])[~opens[1:]].any():  # asynchronous: left in another order
        by_rank = np.lexsort((rows.op, rows.leave_ns, rows.rank))
        leave = rows.leave_ns[by_rank]
    place = np.empty_like(by_rank)
    place[by_rank] = np.arange(n)
    rows = _summed_up(rows, by_rank, opens, fresh)
    before = _left_before(rows.arrive_ns[by_rank], leave, opens)
    found = np.empty_like(before)
    found[by_rank] = before
    by_team = by_op[in_groups(team[of_row[by_op]], int(team.max(initial=0)) + 1)]
    previous = _previous(rows, by_team, team[of_row[by_team]])
    return Lookup(
        rows, fresh, ranks, by_rank, place, found, by_team, previous,
        np.append(heads, n), of_row, team,
    )  # fmt: skip


def in_groups(number: Int, most: int) -> Int:
    """Return the order that sorts by a number below `most`, and leaves the rest as it was."""
    # Short numbers are sorted in one pass.
    order: Int = np.argsort(number.astype(np.int16) if most < 1 << 15 else number, kind="stable")
    return order


def _previous(rows: Rows, by_team: Int, team: Int) -> Int:
    now, last = by_team[1:], by_team[:-1]
    rank, ordinal = rows.rank[by_team], rows.ordinal[by_team]
    same = (rank[1:] == rank[:-1]) & (team[1:] == team[:-1])
    same &= ordinal[1:] - ordinal[:-1] <= LOOK_BACK
    previous = np.full(by_team.size, -1, np.int64)
    previous[now[same]] = last[same]
    return previous


def _left_before(arrive: Int, leave: Int, opens: NDArray[np.bool_]) -> Int:
    """Return for each place the last one of its rank that was left when it arrived; -1 = none."""
    before = np.arange(arrive.size) - 1
    before[opens] = -1
    late = np.flatnonzero(arrive[1:] < leave[:-1]) + 1
    late = late[~opens[late]]
    if late.size:  # asynchronous: still under way
        start = np.flatnonzero(opens)[np.cumsum(opens) - 1]
        while late.size:
            before[late] -= 1
            late = late[before[late] >= start[late]]
            late = late[leave[before[late]] > arrive[late]]
        before[before < start] = -1
    return before


def _summed_up(rows: Rows, by_rank: Int, opens: NDArray[np.bool_], fresh: int) -> Rows:
    """Sum per rank, going on from what the rows of earlier blocks say already."""
    heads = np.flatnonzero(opens)
    length = np.diff(np.append(heads, by_rank.size))
    # A rank whose first row here is an old one goes on from that row's sum.
    head = by_rank[heads]
    old = head < fresh

    def carried(value: Int, so_far: Int) -> Int:
        mine = value[by_rank]
        sums = np.cumsum(mine)
        begin = np.where(old, so_far[head], mine[heads])
        sums += np.repeat(begin - sums[heads], length)
        out = np.empty_like(sums)
        out[by_rank] = sums
        return out

    ordinal = np.empty_like(by_rank)
    begin = np.where(old, rows.ordinal[head], 1)
    ordinal[by_rank] = np.arange(by_rank.size) + np.repeat(begin - heads, length)
    return replace(
        rows,
        waited_ns=carried(rows.wait_ns, rows.waited_ns),
        transferred_ns=carried(rows.transfer_ns, rows.transferred_ns),
        ordinal=ordinal,
    )


def kept(look: Lookup) -> Int:
    """Return the rows that later blocks may ask for."""
    rows, order = look.rows, look.by_team
    back = STEPS_BACK + 1
    rank, label = rows.rank[order], look.team[look.of_row[order]]
    same = np.zeros(order.size, np.bool_)
    same[:-back] = (rank[:-back] == rank[back:]) & (label[:-back] == label[back:])
    last = np.zeros(look.ranks, np.int64)
    opens = np.flatnonzero(np.append(np.diff(rows.rank[look.by_rank]) != 0, True))
    ends = look.by_rank[opens]
    last[rows.rank[ends]] = rows.ordinal[ends]
    oldest = last.copy()
    tail = order[~same]  # the last few of each team
    np.minimum.at(oldest, rows.rank[tail], rows.ordinal[tail])
    # One more: its sums are where the next block begins.
    oldest = np.where(last <= BEGIN, 0, np.maximum(oldest, last - LOOK_BACK) - 1)
    return np.flatnonzero(rows.ordinal >= oldest[rows.rank])


def since_begin(look: Lookup, waiting: Int, awaited: Int) -> NDArray[np.bool_]:
    """True where all that both ranks did so far is known, from the first steps of both on.

    Of a rank that was seen later than the other fewer operations are known.
    """
    number, opens = look.rows.ordinal, look.before < 0
    first = np.maximum(number[waiting], number[awaited]) <= BEGIN
    first &= np.abs(number[waiting] - number[awaited]) <= STEPS_BACK
    result: NDArray[np.bool_] = first | opens[waiting] & opens[awaited]
    return result


def unseen(ops: Operations) -> NDArray[np.bool_]:
    """Return the operations of which a member was not seen: all may have waited for that one."""
    return ~ops.complete | (np.diff(ops.first) < 2)


def is_pair(operation: Int) -> NDArray[np.bool_]:
    """True where one rank sends and one receives."""
    return (operation == SEND) | (operation == RECV)
