"""What matching by number cannot see: ranks that began again, and ranks whose numbers are off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Int

FEWEST = 8  # operations below which nothing is said about skew
LAGS = (-3, -2, -1, 1, 2, 3)
BETTER = 4  # a shifted row of numbers must fit that many times better


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
