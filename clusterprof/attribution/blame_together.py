"""When two ranks last left an operation together: from there on their times can be compared.

For most that is the operation before in the same team. Ranks that share several teams (a data
parallel group and the whole world) may have left a later one together, and what one of them did
before that was paid for there.

    world     |----1----|                     |----5----|
    team A          |--2--|        |--4--|                   ranks 0 and 1: before 4 comes 2, not 1

All that wait in one operation wait for the same rank: its side is looked up once for all of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.blame_rows import LOOK_BACK, STEPS_BACK, Lookup
from clusterprof.timeline.model import Int


class Teams:
    """The operations of each team in order, and the teams of each rank."""

    def __init__(self, look: Lookup) -> None:
        self._look = look
        count = look.team.size
        self._order = np.argsort(look.team, kind="stable")
        self._ordered = look.team[self._order]
        self._span = count + 1
        self._keys = self._ordered * np.int64(self._span) + self._order
        self._teams = int(look.team.max(initial=-1)) + 1
        # Rows stand by team, then rank: one of each pair of them.
        rank, team = look.rows.rank[look.by_team], look.team[look.of_row[look.by_team]]
        new = np.ones(rank.size, np.bool_)
        new[1:] = (rank[1:] != rank[:-1]) | (team[1:] != team[:-1])
        self._member = np.sort(rank[new] * np.int64(self._teams) + team[new])
        self._of_rank = self._member % self._teams
        self._from = np.searchsorted(self._member // self._teams, np.arange(look.ranks + 1))
        self.most = int(np.diff(self._from).max(initial=0))

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

    def before(self, team: Int, operation: Int) -> Int:
        """Return the last operation of a team before another operation, -1 when there is none."""
        at = np.searchsorted(self._keys, team * np.int64(self._span) + operation) - 1
        found = (at >= 0) & (self._ordered[at] == team)
        return np.where(found, self._order[at], -1)


def last_together(look: Lookup, waiting: Int, awaited: Int) -> tuple[Int, Int]:
    """Return for pairs of rows of one operation the rows of the operation they last left together.

    `waiting` are rows of those who waited, ascending, `awaited` of those they waited for, the same
    for all of an operation; -1 when none is known. Both must have left it before they arrived, not
    more than `LOOK_BACK` operations ago.
    """
    if not waiting.size:
        return waiting, waiting
    opens = np.ones(waiting.size, np.bool_)
    opens[1:] = awaited[1:] != awaited[:-1]
    heads = np.flatnonzero(opens)
    size = np.diff(np.append(heads, waiting.size))
    them = awaited[heads]
    # Mostly both took part in the last operation of their team.
    mine, last = look.previous[waiting], look.previous[them]
    ready = (last >= 0) & _left(look, last, them)
    good = np.repeat(np.where(ready, look.of_row[last], -2), size) == look.of_row[mine]
    good &= (mine >= 0) & _left(look, mine, waiting)
    theirs = np.repeat(last, size)
    some = np.flatnonzero(~good)
    teams = Teams(look)
    if some.size:
        team = look.team[look.of_row[waiting[some]]]
        mine[some], theirs[some] = _left_by_both(look, teams, team, waiting[some], awaited[some])
    if teams.most > 1:
        _other_teams(look, teams, (waiting, awaited, heads, size), mine, theirs)
    return mine, theirs


def _other_teams(
    look: Lookup, teams: Teams, pairs: tuple[Int, Int, Int, Int], mine: Int, theirs: Int
) -> None:
    """Put in what was left together in another team, where that was later."""
    waiting, awaited, heads, size = pairs
    them = awaited[heads]
    at, rank = look.of_row[them], look.rows.rank[them]
    own = look.team[at]
    left = np.where(theirs >= 0, look.place[theirs], -1)
    earliest = np.minimum.reduceat(left, heads)
    for n in range(teams.most):
        team = teams.nth_of(rank, n)
        ask = np.flatnonzero((team >= 0) & (team != own))
        # What the awaited rank left in that team last, if it is later for anybody who waits.
        latest = teams.before(team[ask], at[ask])
        row = look.row_of(latest, rank[ask])
        unsure = (latest >= 0) & ((row < 0) | ~_left(look, row, them[ask]))
        ask = ask[unsure | ((row >= 0) & (look.place[row] > earliest[ask]))]
        if not ask.size:
            continue
        some = np.arange(int(size[ask].sum()))
        some += np.repeat(heads[ask] - (np.cumsum(size[ask]) - size[ask]), size[ask])
        team = np.repeat(team[ask], size[ask])
        member = teams.has(team, look.rows.rank[waiting[some]])
        some, team = some[member], team[member]
        if not some.size:
            continue
        a, b = _left_by_both(look, teams, team, waiting[some], awaited[some])
        later = (b >= 0) & (look.place[b] > left[some])
        mine[some[later]], theirs[some[later]] = a[later], b[later]
        left[some[later]] = look.place[b[later]]


def _left_by_both(
    look: Lookup, teams: Teams, team: Int, waiting: Int, awaited: Int
) -> tuple[Int, Int]:
    rank = look.rows.rank
    mine = np.full(waiting.size, -1, np.int64)
    theirs = mine.copy()
    open_ = np.arange(waiting.size)
    operation = look.of_row[waiting]
    for _ in range(STEPS_BACK):
        operation = teams.before(team[open_], operation)
        a = look.row_of(operation, rank[waiting[open_]])
        b = look.row_of(operation, rank[awaited[open_]])
        good = _left(look, a, waiting[open_]) & _left(look, b, awaited[open_])
        mine[open_[good]], theirs[open_[good]] = a[good], b[good]
        more = ~good & (operation >= 0)
        if not more.any():
            break
        open_, operation = open_[more], operation[more]
    return mine, theirs


def _left(look: Lookup, earlier: Int, row: Int) -> NDArray[np.bool_]:
    """True where the earlier row was left before its rank arrived at the later one."""
    rows = look.rows
    left: NDArray[np.bool_] = rows.leave_ns[earlier] <= rows.arrive_ns[row]
    left &= rows.ordinal[row] - rows.ordinal[earlier] <= LOOK_BACK
    left &= earlier >= 0
    return left
