"""When two ranks last left an operation together: from there on their times can be compared.

For most that is the operation before in the same team. Ranks that share several teams (a data
parallel group and the whole world) may have left a later one together, and what one of them did
before that was paid for there.

    world     |----1----|                     |----5----|
    team A          |--2--|        |--4--|                   ranks 0 and 1: before 4 comes 2, not 1
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.blame_rows import LOOK_BACK, STEPS_BACK, Lookup
from clusterprof.timeline.model import Int


class Teams:
    """The operations of each team in order, and the teams of each rank."""

    def __init__(self, look: Lookup) -> None:
        rows = look.rows
        starts = np.ones(rows.op.size, np.bool_)
        starts[1:] = rows.op[1:] != rows.op[:-1]
        first = np.flatnonzero(starts)
        self.op = rows.op[first]
        self._index = np.cumsum(starts) - 1
        labels, team = np.unique(rows.team[first], return_inverse=True)
        self._order = np.argsort(team, kind="stable")
        self._team = team
        self._ordered_team = team[self._order]
        self._base = int(self.op[0]) if self.op.size else 0
        self._span = int(self.op[-1]) - self._base + 2 if self.op.size else 1
        self._keys = self._ordered_team * self._span + self.op[self._order] - self._base
        self._several(look, labels.size)

    def _several(self, look: Lookup, teams: int) -> None:
        pair = np.unique(look.rows.rank * np.int64(teams) + self._team[self._index])
        rank = pair // teams
        self._member = pair
        self._teams = teams
        self._of_rank = pair % teams
        self._from = np.searchsorted(rank, np.arange(look.ranks + 1))
        self.most = int(np.diff(self._from).max(initial=0))

    def of_row(self, row: Int) -> Int:
        """Return the team of each row."""
        return self._team[self._index[row]]

    def nth_of(self, rank: Int, n: int) -> Int:
        """Return the n-th team of each rank, -1 when it has fewer."""
        at = self._from[rank] + n
        there = at < self._from[rank + 1]
        return np.where(there, self._of_rank[np.minimum(at, self._of_rank.size - 1)], -1)

    def has(self, team: Int, rank: Int) -> NDArray[np.bool_]:
        """Return where a rank was seen in a team."""
        wanted = rank * np.int64(self._teams) + team
        at = np.minimum(np.searchsorted(self._member, wanted), self._member.size - 1)
        return self._member[at] == wanted

    def before(self, team: Int, op: Int) -> Int:
        """Return the last operation of a team before another operation, -1 when there is none."""
        at = np.searchsorted(self._keys, team * self._span + op - self._base) - 1
        found = (at >= 0) & (self._ordered_team[at] == team)
        return np.where(found, self.op[self._order[at]], -1)


def last_together(look: Lookup, waiting: Int, awaited: Int) -> tuple[Int, Int]:
    """Return for pairs of rows of one operation the rows of the operation they last left together.

    `waiting` are rows of those who waited, `awaited` of those they waited for; -1 when none is
    known. Both must have left it before they arrived, not more than `LOOK_BACK` operations ago.
    """
    # Mostly both took part in the last operation of their team.
    mine, theirs = look.previous[waiting], look.previous[awaited]
    good = (mine >= 0) & (theirs >= 0) & (look.rows.op[mine] == look.rows.op[theirs])
    good &= _left(look, mine, waiting) & _left(look, theirs, awaited)
    some = np.flatnonzero(~good)
    if not some.size and not _several_teams(look):
        return mine, theirs
    teams = Teams(look)
    team = teams.of_row(waiting[some])
    mine[some], theirs[some] = _left_by_both(look, teams, team, waiting[some], awaited[some])
    if teams.most < 2:
        return mine, theirs
    rank, other = look.rows.rank[waiting], look.rows.rank[awaited]
    own = teams.of_row(waiting)
    for n in range(teams.most):
        team = teams.nth_of(other, n)
        some = np.flatnonzero((team >= 0) & (team != own))
        some = some[teams.has(team[some], rank[some])]
        if not some.size:
            continue
        a, b = _left_by_both(look, teams, team[some], waiting[some], awaited[some])
        left = np.where(theirs[some] >= 0, look.place[theirs[some]], -1)
        later = (b >= 0) & (look.place[np.maximum(b, 0)] > left)
        mine[some[later]], theirs[some[later]] = a[later], b[later]
    return mine, theirs


def _several_teams(look: Lookup) -> bool:
    """True when a rank is in more than one team."""
    rank, team = look.rows.rank[look.by_team], look.rows.team[look.by_team]
    opens = np.ones(rank.size, np.bool_)
    opens[1:] = (rank[1:] != rank[:-1]) | (team[1:] != team[:-1])
    return bool(np.bincount(rank[opens]).max(initial=0) > 1)


def _left_by_both(
    look: Lookup, teams: Teams, team: Int, waiting: Int, awaited: Int
) -> tuple[Int, Int]:
    rows = look.rows
    mine = np.full(waiting.size, -1, np.int64)
    theirs = mine.copy()
    open_ = np.arange(waiting.size)
    op = rows.op[waiting]
    for _ in range(STEPS_BACK):
        op = teams.before(team[open_], op)
        a = look.row_of(op, rows.rank[waiting[open_]])
        b = look.row_of(op, rows.rank[awaited[open_]])
        good = _left(look, a, waiting[open_]) & _left(look, b, awaited[open_])
        mine[open_[good]], theirs[open_[good]] = a[good], b[good]
        more = ~good & (op >= 0)
        if not more.any():
            break
        open_, op = open_[more], op[more]
    return mine, theirs


def _left(look: Lookup, earlier: Int, row: Int) -> NDArray[np.bool_]:
    """True where the earlier row was left before its rank arrived at the later one."""
    rows = look.rows
    at = np.maximum(earlier, 0)
    recent = rows.ordinal[row] - rows.ordinal[at] <= LOOK_BACK
    return (earlier >= 0) & (rows.leave_ns[at] <= rows.arrive_ns[row]) & recent
