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

from clusterprof.attribution.blame_excess import ranges
from clusterprof.attribution.blame_rows import LOOK_BACK, STEPS_BACK, Lookup
from clusterprof.timeline.model import Int

_MOST_SEATS = 1 << 22  # of a table of all ranks in all teams; larger ones are searched


class Teams:
    """The operations of each team in order, and the teams of each rank."""

    def __init__(self, look: Lookup) -> None:
        self._look = look
        count = look.team.size
        self._order = np.argsort(look.team, kind="stable")
        self._ordered = look.team[self._order]
        self._span = count + 1
        self._keys = self._ordered * np.int64(self._span) + self._order
        teams = int(look.team.max(initial=-1)) + 1
        # Rows stand by team, then rank: one of each pair of them.
        rank, team = look.rows.rank[look.by_team], look.team[look.of_row[look.by_team]]
        new = np.ones(rank.size, np.bool_)
        new[1:] = (rank[1:] != rank[:-1]) | (team[1:] != team[:-1])
        rank, team = rank[new], team[new]
        self._member = team * np.int64(look.ranks) + rank
        seat = np.arange(rank.size) - np.searchsorted(team, np.arange(teams))[team]
        self._seat = seat
        self._table = None
        if teams * look.ranks <= _MOST_SEATS:
            self._table = np.full(teams * look.ranks, -1, np.int32)
            self._table[self._member] = seat
        self._of_rank = team[np.argsort(rank, kind="stable")]
        self._from = np.append(0, np.cumsum(np.bincount(rank, minlength=look.ranks)))
        self.most = int(np.diff(self._from).max(initial=0))

    def nth_of(self, rank: Int, n: int) -> Int:
        """Return the n-th team of each rank, -1 when it has fewer."""
        at = self._from[rank] + n
        there = at < self._from[rank + 1]
        return np.where(there, self._of_rank[np.minimum(at, self._of_rank.size - 1)], -1)

    def seat(self, team: Int, rank: Int) -> Int:
        """Return which of those who were seen in a team a rank is, -1 when it was not."""
        wanted = team * np.int64(self._look.ranks) + rank
        if self._table is not None:
            found: Int = self._table[wanted].astype(np.int64)
            return found
        at = np.minimum(np.searchsorted(self._member, wanted), self._member.size - 1)
        return np.where(self._member[at] == wanted, self._seat[at], -1)

    def row_of(self, operation: Int, rank: Int) -> Int:
        """Return the row of a rank in an operation, -1 where it took no part or is forgotten."""
        look = self._look
        ranks = look.rows.rank
        at = np.maximum(operation, 0)
        seat = self.seat(look.team[at], rank)
        low, end = look.first[at], look.first[at + 1]
        row = np.minimum(low + seat, end - 1)
        good = (seat >= 0) & (ranks[row] == rank) & (operation >= 0)
        found = np.where(good, row, -1)
        rest = np.flatnonzero(~good & (seat >= 0) & (operation >= 0))
        if rest.size:  # not all of the team took part
            low, end, wanted = low[rest], end[rest], rank[rest]
            last = end - 1
            while (open_ := low < end).any():
                middle = (low + end) >> 1
                less = ranks[np.minimum(middle, last)] < wanted
                low = np.where(open_ & less, middle + 1, low)
                end = np.where(open_ & ~less, middle, end)
            there = (low <= last) & (ranks[np.minimum(low, last)] == wanted)
            found[rest[there]] = low[there]
        return found

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
        at = look.of_row[waiting[some]]
        team = look.team[at]
        mine[some], theirs[some] = _left_by_both(
            look, teams, (team, teams.before(team, at)), waiting[some], awaited[some]
        )
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
        row = teams.row_of(latest, rank[ask])
        unsure = (latest >= 0) & ((row < 0) | ~_left(look, row, them[ask]))
        some = np.flatnonzero(unsure | ((row >= 0) & (look.place[row] > earliest[ask])))
        ask, latest = ask[some], latest[some]
        if not ask.size:
            continue
        number, some = ranges(heads[ask], heads[ask] + size[ask])
        team = team[ask][number]
        member = np.flatnonzero(teams.seat(team, look.rows.rank[waiting[some]]) >= 0)
        some, team, latest = some[member], team[member], latest[number[member]]
        if not some.size:
            continue
        a, b = _left_by_both(look, teams, (team, latest), waiting[some], awaited[some])
        later = (b >= 0) & (look.place[b] > left[some])
        mine[some[later]], theirs[some[later]] = a[later], b[later]
        left[some[later]] = look.place[b[later]]


def _left_by_both(
    look: Lookup, teams: Teams, ask: tuple[Int, Int], waiting: Int, awaited: Int
) -> tuple[Int, Int]:
    """Look for a row of each in operations of a team, from a given one backwards."""
    team, operation = ask
    rank = look.rows.rank
    mine = np.full(waiting.size, -1, np.int64)
    theirs = mine.copy()
    open_ = np.arange(waiting.size)
    for _ in range(STEPS_BACK):
        a = teams.row_of(operation, rank[waiting[open_]])
        b = teams.row_of(operation, rank[awaited[open_]])
        good = _left(look, a, waiting[open_]) & _left(look, b, awaited[open_])
        mine[open_[good]], theirs[open_[good]] = a[good], b[good]
        more = ~good & (operation >= 0)
        if not more.any():
            break
        open_ = open_[more]
        operation = teams.before(team[open_], operation[more])
    return mine, theirs


def _left(look: Lookup, earlier: Int, row: Int) -> NDArray[np.bool_]:
    """True where the earlier row was left before its rank arrived at the later one."""
    rows = look.rows
    left: NDArray[np.bool_] = rows.leave_ns[earlier] <= rows.arrive_ns[row]
    left &= rows.ordinal[row] - rows.ordinal[earlier] <= LOOK_BACK
    left &= earlier >= 0
    return left
