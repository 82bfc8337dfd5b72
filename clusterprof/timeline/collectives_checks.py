"""What matching by number cannot see: ranks that began again, and ranks whose numbers are off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Int

FEWEST = 8  # operations below which nothing is said about skew
LAGS = (-3, -2, -1, 1, 2, 3)
BETTER = 4  # a shifted row of numbers must fit that many times better


def first_of(op: Int, rank: Int, t_ns: Int) -> NDArray[np.bool_]:
    """True for the first row of each rank in each operation."""
    order = np.lexsort((t_ns, rank, op))
    keep = np.ones(op.size, np.bool_)
    keep[1:] = (op[order][1:] != op[order][:-1]) | (rank[order][1:] != rank[order][:-1])
    out = np.empty_like(keep)
    out[order] = keep
    return out


def restarts(
    rank: Int, channel: Int, sequence: Int, arrive_ns: Int
) -> tuple[Int, NDArray[np.bool_]]:
    """Return how often a rank had begun again, and whether that agrees with most of its group.

    A number that is not higher than the one before it is a beginning. A rank whose recording lacks
    the first beginning counts one less than the others: its numbers mean other operations.
    """
    order = np.lexsort((arrive_ns, rank, channel))
    number, who, where = sequence[order], rank[order], channel[order]
    same = np.zeros(order.size, np.bool_)
    same[1:] = (who[1:] == who[:-1]) & (where[1:] == where[:-1])
    again = np.zeros(order.size, np.bool_)
    # The same number at the same place is the same span seen twice, not a beginning.
    again[1:] = same[1:] & (number[1:] < number[:-1])
    total = np.cumsum(again)
    start = np.flatnonzero(~same)
    of_start = np.cumsum(~same) - 1
    epoch = total - total[start][of_start] if order.size else total
    if not again.any():
        return np.zeros(order.size, np.int64), np.ones(order.size, np.bool_)
    most = np.maximum.reduceat(epoch, start)
    _, group = np.unique(where[start], return_inverse=True)
    # The commonest count of each group; of equally common ones the higher.
    codes, count = np.unique(group * (most.max() + 1) + most, return_counts=True)
    usual = np.zeros(group.max() + 1, np.int64)
    by_count = np.lexsort((codes, count))
    usual[codes[by_count] // (most.max() + 1)] = codes[by_count] % (most.max() + 1)
    out = np.empty(order.size, np.int64)
    clear = np.empty(order.size, np.bool_)
    out[order] = epoch
    clear[order] = (most == usual[group])[of_start]
    return out, clear


def off_by_some(
    rank: Int, team: Int, sequence: Int, op: Int, leave_ns: Int, asked: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """True for rows of ranks whose leaves fit another operation of the team better than their own.

    All members leave together, so from one operation to the next all clocks advance alike:

        others    100    300    150    400
        rank 3    300    150    400    ...       its numbers are one behind

    Of a team of two it cannot be told whose numbers are off: both are left out.
    """
    out = np.zeros(rank.size, np.bool_)
    rows = np.flatnonzero(asked)
    order = rows[np.lexsort((sequence[rows], rank[rows], team[rows]))]
    follows = np.zeros(order.size, np.bool_)
    now, last = order[1:], order[:-1]
    follows[1:] = (rank[now] == rank[last]) & (team[now] == team[last])
    follows[1:] &= sequence[now] == sequence[last] + 1
    step = np.zeros(rank.size, np.int64)
    step[now[follows[1:]]] = (leave_ns[now] - leave_ns[last])[follows[1:]]
    rows = order[follows]
    if not rows.size:
        return out
    usual = _middle(op[rows], step[rows])
    off = np.abs(step[rows] - usual)
    # Rows stand sorted by team and rank: a new number wherever either changes.
    opens = np.ones(rows.size, np.bool_)
    opens[1:] = (team[rows][1:] != team[rows][:-1]) | (rank[rows][1:] != rank[rows][:-1])
    pair = np.cumsum(opens) - 1
    error, height = _typical(pair, off), _typical(pair, usual)
    suspects = np.flatnonzero((error > height // 10) & (np.bincount(pair) >= FEWEST))
    for one in suspects.tolist():
        mine = rows[pair == one]
        found = _fits_elsewhere(mine, rows, team, rank, sequence, step, int(error[one]))
        if found:
            out |= (team == team[mine[0]]) & (rank == rank[mine[0]])
    return out


def _fits_elsewhere(
    mine: Int, rows: Int, team: Int, rank: Int, sequence: Int, step: Int, error: int
) -> bool:
    others = rows[(team[rows] == team[mine[0]]) & (rank[rows] != rank[mine[0]])]
    numbers, at = np.unique(sequence[others], return_inverse=True)
    if not numbers.size:
        return False
    usual = np.zeros(numbers.size, np.int64)
    usual[at] = _middle(sequence[others], step[others])
    for lag in LAGS:
        wanted = sequence[mine] + lag
        place = np.minimum(np.searchsorted(numbers, wanted), numbers.size - 1)
        there = numbers[place] == wanted
        if there.sum() >= FEWEST:
            off = np.abs(step[mine] - usual[place])[there]
            if int(np.median(off)) * BETTER < error:
                return True
    return False


def _middle(group: Int, values: Int) -> Int:
    """For each row the lower median of the values of its group."""
    order = np.lexsort((values, group))
    _, first, inverse, count = np.unique(
        group[order], return_index=True, return_inverse=True, return_counts=True
    )
    out = np.empty_like(values)
    out[order] = values[order][first + (count - 1) // 2][inverse]
    return out


def _typical(group: Int, values: Int) -> Int:
    """The lower median of each group, groups numbered from 0."""
    out = np.zeros(group.max() + 1, np.int64)
    out[group] = _middle(group, values)
    return out
