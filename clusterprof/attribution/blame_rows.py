"""The rows that blame works on: one per operation and member, those of earlier blocks in front.

What is kept of earlier blocks is what later operations may look back at: per rank everything since
the eighth last operation of each of its teams, but never more than `LOOK_BACK` operations. The
same limit holds when nothing is cut, so that the cut into blocks changes no nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import RECV, SEND, Operations

LOOK_BACK = 512
"""Operations of a rank after which an earlier one is forgotten."""
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
    """int64[n, K]: what the rank had spent, by category, when it arrived, since its beginning."""
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

    def take(self, rows: Int | NDArray[np.bool_]) -> Rows:
        """Return some of the rows."""
        return Rows(*(getattr(self, one.name)[rows] for one in fields(self)))


def no_rows(categories: int) -> Rows:
    """Return the rows before the first block."""
    none = np.zeros(0, np.int64)
    wide = np.zeros((0, categories), np.int64)
    return Rows(*(wide if one.name in ("at_arrive", "at_leave") else none for one in fields(Rows)))


@dataclass(frozen=True, slots=True)
class Lookup:
    """All rows of a block and before it, with the ways to find one."""

    rows: Rows
    fresh: int
    """Rows before this one are of earlier blocks."""
    key: Int
    """op * ranks + rank, ascending."""
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

    def row_of(self, op: Int, rank: Int) -> Int:
        """Return the row of a rank in an operation, -1 where it took no part or is forgotten."""
        wanted = op * self.ranks + rank
        at = np.minimum(np.searchsorted(self.key, wanted), self.key.size - 1)
        return np.where((op >= 0) & (self.key[at] == wanted), at, -1)


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
    """Return the kept rows and, behind them, those of a block whose first operation is `number`."""
    op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
    none = np.zeros(op.size, np.int64)
    wait = np.maximum(ops.blocked_ns - np.where(unseen(ops), 0, shortest)[op], 0)
    new = Rows(
        op + number, ops.team[op], ops.rank, ops.arrive_ns, ops.leave_ns, wait,
        ops.blocked_ns - wait, at_arrive, at_leave, none, none, none, none, none,
    )  # fmt: skip
    if not kept.op.size:
        return new
    return Rows(
        *(np.concatenate([getattr(kept, f.name), getattr(new, f.name)]) for f in fields(Rows))
    )


def looked_up(rows: Rows, fresh: int, ranks: int) -> Lookup:
    """Sort the rows of a block every way that is needed, and carry the sums of each rank on."""
    by_rank = np.lexsort((rows.op, rows.leave_ns, rows.rank))
    place = np.empty_like(by_rank)
    place[by_rank] = np.arange(by_rank.size)
    rank = rows.rank[by_rank]
    opens = np.ones(rank.size, np.bool_)
    opens[1:] = rank[1:] != rank[:-1]
    start = np.flatnonzero(opens)[np.cumsum(opens) - 1]
    old = by_rank < fresh
    rows = replace(
        rows,
        waited_ns=_carried(rows.wait_ns, rows.waited_ns, by_rank, start, old),
        transferred_ns=_carried(rows.transfer_ns, rows.transferred_ns, by_rank, start, old),
        ordinal=_carried(np.ones_like(rows.op), rows.ordinal, by_rank, start, old),
    )
    arrive, leave = rows.arrive_ns[by_rank], rows.leave_ns[by_rank]
    before = np.arange(rank.size) - 1
    late = np.flatnonzero(before >= start)
    while (late := late[leave[before[late]] > arrive[late]]).size:  # asynchronous: still under way
        before[late] -= 1
        late = late[before[late] >= start[late]]
    before[before < start] = -1
    found = np.empty_like(before)
    found[by_rank] = before
    key = rows.op * ranks + rows.rank
    return Lookup(rows, fresh, key, ranks, by_rank, place, found, *_by_team(rows))


def _by_team(rows: Rows) -> tuple[Int, Int]:
    order = np.lexsort((rows.op, rows.rank, rows.team))
    now, last = order[1:], order[:-1]
    same = (rows.rank[now] == rows.rank[last]) & (rows.team[now] == rows.team[last])
    same &= rows.ordinal[now] - rows.ordinal[last] <= LOOK_BACK
    previous = np.full(order.size, -1, np.int64)
    previous[now[same]] = last[same]
    return order, previous


def _carried(value: Int, so_far: Int, order: Int, start: Int, old: NDArray[np.bool_]) -> Int:
    """Sum per rank, going on from what the rows of earlier blocks say already."""
    sums = np.cumsum(value[order])
    sums = sums - sums[start] + value[order][start]
    # A rank whose first row here is an old one goes on from that row's sum.
    base = np.where(old[start], so_far[order][start] - value[order][start], 0)
    out = np.empty_like(sums)
    out[order] = sums + base
    return out


def kept(look: Lookup) -> Rows:
    """Return the rows that later blocks may ask for."""
    rows = look.rows
    team = np.lexsort((rows.op, rows.team, rows.rank))
    same = np.zeros(team.size, np.bool_)
    back = STEPS_BACK + 1
    rank, label = rows.rank[team], rows.team[team]
    same[:-back] = (rank[:-back] == rank[back:]) & (label[:-back] == label[back:])
    last = np.zeros(look.ranks, np.int64)
    np.maximum.at(last, rows.rank, rows.ordinal)
    oldest = last.copy()
    tail = team[~same]  # the last few of each team
    np.minimum.at(oldest, rows.rank[tail], rows.ordinal[tail])
    # One more: its sums are where the next block begins.
    oldest = np.maximum(oldest, last - LOOK_BACK) - 1
    return rows.take(rows.ordinal >= oldest[rows.rank])


def unseen(ops: Operations) -> NDArray[np.bool_]:
    """Return the operations of which a member was not seen: all may have waited for that one."""
    return ~ops.complete | (np.diff(ops.first) < 2)


def is_pair(operation: Int) -> NDArray[np.bool_]:
    """True where one rank sends and one receives."""
    return (operation == SEND) | (operation == RECV)
