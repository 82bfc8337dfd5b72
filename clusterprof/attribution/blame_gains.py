"""What all ranks win back when one culprit alone is in time: no more than up to the next late rank.

    rank 0   |== work ==|------------ waits 50 ------------|        won back: 30
    rank 1   |== work ==|-- storage 20 --|---- waits 30 ---|        won back: 30
    rank 2   |== work ==|-- storage 50 --------------------|        rank 2 goes on 30 sooner itself

A rank that came late because it had waited for the same culprit elsewhere (its node, its stage) is
in time with it: it does not count as the next late one. That holds for waits since the team's
operation before; then all its members had left together.

What ends in one operation may come back in a later one, if somebody else is as late there. Where
all ranks of a job meet in every step it cannot: what they go on sooner there is what they win.
Elsewhere the waits that end are added up, and that may be too much.

Without a cause, whoever was late for it, such an operation ends sooner by the time between the last
to come and who would then be the last (`blame_sooner`): 50 above, for rank 0 is in time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.attribution.blame import Blamed
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations

_NEVER = -1
MET_RATIO = 0.9
"""Ranks meet in every step when so many of their steps have an operation of them all."""


class Gains:
    """Sums by culprit and cause, over all blocks."""

    def __init__(self, job_size: Int, causes: int) -> None:
        """`job_size`: per rank, how many ranks its job has."""
        ranks = len(job_size)
        self._ranks, self._causes, self._job_size = ranks, causes, job_size
        self.others_ns = np.zeros((ranks, causes), np.int64)
        """[culprit, cause]: of the waits charged to it, what ends when it is in time."""
        self.own_ns = np.zeros((ranks, causes), np.int64)
        """[culprit, cause]: how much sooner it would itself have gone on."""
        self.all_ns = np.zeros((ranks, causes), np.int64)
        """[culprit, cause]: how much sooner all ranks would have left operations of them all."""
        self.cause_ns = np.zeros((ranks, causes), np.int64)
        """[rank, cause]: how much sooner it would have left operations of all without the cause."""
        self.all_met = np.zeros(ranks, np.int64)
        """How many operations of all ranks of its job each was in."""
        self._culprit = np.full(ranks, _NEVER)
        """Whom each rank waited for last, and in which operation."""
        self._when = np.full(ranks, _NEVER)
        self._met: dict[int, int] = {}
        """Team -> its last operation."""
        self._count = 0

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        if not ops.team.size:
            return
        op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
        late_with = self._late_with(ops, blamed, op)
        self._count += ops.team.size
        of_all = np.diff(ops.first)[op] == self._job_size[ops.rank]
        self.all_met += np.bincount(ops.rank[of_all], minlength=self._ranks)
        some = np.flatnonzero(of_all)
        for cause in np.flatnonzero(blamed.sooner_ns.any(axis=1)).tolist():
            ns = blamed.sooner_ns[cause, op[some]]
            self.cause_ns[:, cause] += np.bincount(ops.rank[some], ns, self._ranks).astype(np.int64)
        known = np.flatnonzero(blamed.culprit >= 0)
        if not known.size:
            return
        row, culprit, cause = blamed.row[known], blamed.culprit[known], blamed.cause[known]
        pair, at = _numbered(op[row] * self._ranks + culprit)
        gain = np.minimum(blamed.ns[known], self._sooner(ops, late_with, pair)[at])
        self._sum(self.others_ns, culprit, cause, gain)
        # Who was waited for through others came last elsewhere, and goes on sooner there.
        itself = np.flatnonzero(culprit == blamed.last[op[row]])
        self._sum(self.own_ns, *self._most(pair, at, cause, gain, itself))
        everyone = np.flatnonzero(np.diff(ops.first)[op[row]] == self._job_size[culprit])
        self._sum(self.all_ns, *self._most(pair, at, cause, gain, everyone))

    def of(self, culprit: int, causes: Sequence[int], own_ns: int, steps: int) -> int:
        """Return what all ranks win when a culprit is in time, as far as some causes made it late.

        `own_ns` is what it lost to them itself, `steps` how many steps it made.
        """
        if steps > 0 and self.all_met[culprit] >= MET_RATIO * steps:
            sooner_ns = int(self.all_ns[culprit, causes].sum())
            return (int(self._job_size[culprit]) - 1) * sooner_ns + min(own_ns, sooner_ns)
        sooner_ns = int(self.own_ns[culprit, causes].sum())
        return int(self.others_ns[culprit, causes].sum()) + min(own_ns, sooner_ns)

    def of_causes(self, causes: Sequence[int], steps: Sequence[int]) -> int | None:
        """Return what all ranks win without some causes, whoever was late for them.

        None where not all ranks of a job met in (nearly) all of their `steps`.
        """
        made = np.asarray(steps)
        if ((self.all_met < MET_RATIO * made) | (self._job_size < 2))[made > 0].any():
            return None
        return int(self.cause_ns[:, list(causes)].sum())

    def _most(self, pair: Int, at: Int, cause: Int, gain: Int, some: Int) -> tuple[Int, Int, Int]:
        """Return culprit, cause and the largest gain of each operation, from some entries."""
        most = np.zeros(pair.size * self._causes, np.int64)
        np.maximum.at(most, at[some] * self._causes + cause[some], gain[some])
        found = np.flatnonzero(most)
        return pair[found // self._causes] % self._ranks, found % self._causes, most[found]

    def _sum(self, table: Int, culprit: Int, cause: Int, ns: Int) -> None:
        cell = culprit * self._causes + cause
        table += np.bincount(cell, ns, table.size).astype(np.int64).reshape(table.shape)

    def _late_with(self, ops: Operations, blamed: Blamed, op: Int) -> Int:
        """Return per row whom the rank had waited for since its team's operation before, or -1."""
        chief = _chief_culprit(blamed, op.size)
        short = ops.rank.astype(np.uint16) if self._ranks <= 1 << 16 else ops.rank  # sorts faster
        order = np.argsort(short, kind="stable")  # rows of a rank stay in the order of time
        rank = ops.rank[order]
        number = self._count + op[order]
        opens = np.append(True, rank[1:] != rank[:-1])
        start = np.maximum.accumulate(np.where(opens, np.arange(rank.size), 0))
        waited = chief[order] != _NEVER
        latest = np.maximum.accumulate(np.where(waited, np.arange(rank.size), -1))
        before = np.append(-1, latest[:-1])
        here = before >= start
        culprit = np.where(here, chief[order][before], self._culprit[rank])
        when = np.where(here, number[before], self._when[rank])
        fresh = when > self._previous(ops)[op[order]]
        out = np.empty_like(chief)
        out[order] = np.where(fresh, culprit, _NEVER)
        ends = np.flatnonzero(np.append(opens[1:], True))
        seen = ends[latest[ends] >= start[ends]]
        self._culprit[rank[seen]] = chief[order][latest[seen]]
        self._when[rank[seen]] = number[latest[seen]]
        return out

    def _previous(self, ops: Operations) -> Int:
        """Return the number of the operation that each one's team had before it, or -1."""
        teams, team = np.unique(ops.team, return_inverse=True)
        order = np.argsort(team, kind="stable")
        number = self._count + order
        opens = np.append(True, team[order][1:] != team[order][:-1])
        carried = np.array([self._met.get(one, _NEVER) for one in teams.tolist()])
        previous = np.empty_like(team)
        previous[order] = np.where(opens, carried[team[order]], np.append(_NEVER, number[:-1]))
        ends = np.append(opens[1:], True)
        self._met.update(zip(teams.tolist(), number[ends].tolist()))
        return previous

    def _sooner(self, ops: Operations, late_with: Int, pair: Int) -> Int:
        """Return by how much an operation ends sooner when a culprit, and who is late with it, is
        in time; `pair`: operation * ranks + culprit."""
        op, culprit = np.divmod(pair, self._ranks)
        size = np.diff(ops.first)
        stay = ops.leave_ns - ops.arrive_ns
        shortest = np.minimum.reduceat(stay, ops.first[:-1])
        begin = np.cumsum(size[op]) - size[op]
        row = np.arange(int(size[op].sum())) - np.repeat(begin - ops.first[op], size[op])
        who = np.repeat(culprit, size[op])
        with_it = (late_with[row] == who) | (ops.rank[row] == who)
        others = np.where(with_it, np.iinfo(np.int64).max, stay[row])
        return np.minimum.reduceat(others, begin) - shortest[op]


def _chief_culprit(blamed: Blamed, rows: int) -> Int:
    """Return per row the rank that most of its wait was charged to, -1 when it did not wait."""
    chief = np.full(rows, _NEVER)
    if blamed.row.size:
        begin = np.flatnonzero(np.append(True, blamed.row[1:] != blamed.row[:-1]))
        most = np.maximum.reduceat(blamed.ns, begin)
        size = np.diff(np.append(begin, blamed.row.size))
        largest = np.flatnonzero(blamed.ns == np.repeat(most, size))
        chief[blamed.row[largest]] = blamed.culprit[largest]
    return chief


def _numbered(key: Int) -> tuple[Int, Int]:
    """Return the keys there are, rising, and for each given one its number among them."""
    span = int(key.max()) + 1
    if span > max(1 << 20, 8 * key.size):
        found, at = np.unique(key, return_inverse=True)
        return found, at
    number = np.zeros(span, np.int64)
    number[key] = 1
    found = np.flatnonzero(number)
    number[found] = np.arange(found.size)
    return found, number[key]
