"""What if a cause were gone: the operations of all ranks once more, everyone leaving each of them
when the last has come, without the cause's own pieces.

    storage 50 |== work ==|                 arrives at 150, without storage at 100
    storage 40 |== work ==|                 arrives at 140, without at 100
               |== work ==|-- waits --|     arrives at 100: all go on 50 sooner

Each rank carries along how much sooner it is by now. To an operation it comes sooner by that and by
what it had lost to the cause itself since its operation before, and by what a fix wins beyond that
(`hidden`). All leave when the last has come; who would have come anyway waits for less. Where all
ranks meet in one team nothing need be carried, for they leave together; else the operations that do
not depend on each other are played at once, one such front after the other.

Besides each cause there are four columns more: all causes at once, no transfer, work that is even
(`_uneven`; of several teams: no rank with more of it than the lower middle one of the job), and, of
several teams, work that is shared out: each rank does the mean, in even parts, and who has less
does more; a transfer takes as long as others of its kind.

Noise in what is known of single operations makes it too little: who is said to have lost too little
there holds up the others. So it is also asked over each stretch which rank waited least, then and
without the cause; the larger of the two is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from clusterprof.attribution.blame import Blamed
from clusterprof.attribution.replay_fronts import (
    BINS_PER_BLOCK,
    by_rank,
    ends,
    fronts_of,
    only,
    slow_transfers,
    uneven,
    usual_work,
)
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations

MOST_FRONTS = 1 << 11
"""Fronts that are played in full; then fewer blocks are: a part of the steps is enough."""
MET_RATIO = 0.9
"""All ranks meet in one team when so many of the operations are of them all."""
MOST_BINS = 512
ALL, TRANSFER, WORK, SHARED = -4, -3, -2, -1
"""Columns behind those of the causes."""
EXTRA = 4


@dataclass(frozen=True, slots=True)
class Won:
    """How much sooner a job would have come along, stretch by stretch; n stretches."""

    length_ns: Int
    """Time each stretch took."""
    sooner_ns: Int
    """int64[n, causes + 4]."""
    skipped: bool
    """True when parts of the run were not played again."""
    teams: bool
    """True when ranks met in several teams: more work is then told by sums over stretches."""


class Replay:
    """Plays the operations of all jobs without each cause; ranks as in blame."""

    def __init__(self, job: Sequence[int], size: Int, causes: int) -> None:
        """`job`: of each rank; `size`: how many ranks its job has; `causes`: columns asked for."""
        ranks = len(job)
        self._job, self._size = np.asarray(job, np.int64), size
        self._at_leave = np.zeros((ranks, causes + 1), np.int64)
        """What each had spent, and what is hidden, when it left its last operation."""
        self._work = np.zeros(ranks, np.int64)
        self._sooner = np.zeros((ranks, causes + EXTRA), np.int64)
        self._until = np.full(ranks, -1, np.int64)
        """When each left it."""
        self.from_ns = self._until.copy()
        """From when on each was played, -1 never; of those that always meet only some are noted."""
        self._fronts = self._blocks = self._next = 0
        self._skipped = False
        self._bins: dict[int, list[tuple[int, Int]]] = {}
        """Job -> (length, sooner) of stretches."""

    def add(
        self,
        ops: Operations,
        blamed: Blamed,
        come: Int,
        go: Int,
        work: tuple[Int, Int],
        work_causes: Sequence[int],
    ) -> None:
        """Play a block: `come` and `go`, int64[n, causes + 1], are what had been spent on arriving
        and on leaving, hidden time included, the last column on all causes; `work` alike.
        `work_causes` are those of `blamed` that stand for work."""
        if not ops.team.size:
            return
        moved = blamed.transfer_ns
        late = np.isin(blamed.cause, list(work_causes))
        less = np.bincount(blamed.row[late], blamed.ns[late], ops.rank.size).astype(np.int64)
        size = np.diff(ops.first)
        together = size == self._size[ops.rank[ops.first[:-1]]]
        if together.mean() >= MET_RATIO:
            some = np.flatnonzero(np.repeat(together, size))
            if not together.all():
                come, go, moved, less = come[some], go[some], moved[some], less[some]
                work = work[0][some], work[1][some]
                ops = only(ops, together, some)
            self._meet(ops, moved, less, self._since(ops, come, go, *work))
        else:
            self._play(ops, moved, self._since(ops, come, go, *work))
        self._blocks += 1

    def won(self) -> dict[int, Won]:
        """Return job -> what would have been won."""
        return {
            job: Won(
                np.array([length for length, _ in bins], np.int64),
                np.array([sooner for _, sooner in bins], np.int64),
                self._skipped,
                self._fronts > 0,
            )
            for job, bins in self._bins.items()
        }

    def _since(self, ops: Operations, come: Int, go: Int, work: Int, worked: Int) -> Int:
        """Return int64[n, causes + 4]: what each had lost since its operation before."""
        n = ops.rank.size
        order = np.argsort(ops.rank, kind="stable")
        rank = ops.rank[order]
        opens = np.append(True, rank[1:] != rank[:-1])
        own = np.zeros((n, come.shape[1] - 1 + EXTRA), np.int64)
        before, busy = np.empty_like(come), np.empty_like(work)
        before[order[1:]], busy[order[1:]] = go[order[:-1]], worked[order[:-1]]
        heads = order[opens]
        before[heads], busy[heads] = self._at_leave[ops.rank[heads]], self._work[ops.rank[heads]]
        own[:, : come.shape[1]] = np.maximum(come - before, 0)
        own[:, WORK] = np.maximum(work - busy, 0)
        ends = order[np.append(opens[1:], True)]
        self._at_leave[ops.rank[ends]], self._work[ops.rank[ends]] = go[ends], worked[ends]
        return own

    def _meet(self, ops: Operations, moved: Int, less: Int, own: Int) -> None:
        """All ranks of each job in one team: each operation ends sooner by itself."""
        first = ops.first[:-1]
        stay = ops.leave_ns - ops.arrive_ns
        own[:, WORK] = uneven(less, ops, self._job)
        own[:, TRANSFER] = own[:, SHARED] = 0
        sooner = -np.minimum.reduceat(stay, first)[:, None] - np.maximum.reduceat(
            -stay[:, None] - own, first
        )
        sooner[:, TRANSFER] = np.minimum.reduceat(moved, first)
        np.maximum(sooner, 0, out=sooner)
        head = ops.rank[first]
        wait = ops.blocked_ns - moved
        for job in np.unique(self._job[head]).tolist():
            mine = np.flatnonzero(self._job[head] == job)
            cuts = np.unique(np.linspace(0, mine.size, BINS_PER_BLOCK + 1).astype(np.int64))
            sums = np.add.reduceat(sooner[mine], cuts[:-1], axis=0)
            for at, (low, high) in enumerate(pairwise(cuts.tolist())):
                rows = np.arange(ops.first[mine[low]], ops.first[mine[high - 1] + 1])
                rows = rows[self._job[ops.rank[rows]] == job]
                least = self._frontier(ops.rank[rows], wait[rows], own[rows])
                sums[at] = np.maximum(sums[at], least)
            one = ops.rank[first[mine[0]]]
            leave = ops.leave_ns[first[mine]]
            since = self._until[one]
            ends = leave[cuts[1:] - 1]
            if since < 0:
                since = self.from_ns[one] = leave[0]
            begin = np.append(since, ends[:-1])
            self._put(job, ends - begin, sums)
            self._until[one] = ends[-1]

    def _frontier(self, rank: Int, wait: Int, own: Int) -> Int:
        """Return how much sooner a stretch passes by the rank that waited least, then and now."""
        waited, lost = by_rank(self._job.size, rank, wait, own)
        some = np.unique(rank)
        least: Int = (waited[some, None] + lost[some]).min(axis=0) - waited[some].min()
        return least

    def _put(self, job: int, length: Int, sooner: Int) -> None:
        bins = self._bins.setdefault(job, [])
        bins += [(int(ns), row) for ns, row in zip(length, sooner) if ns >= 0]
        while len(bins) > MOST_BINS:
            even = len(bins) // 2 * 2
            pairs = zip(bins[:even:2], bins[1:even:2])
            bins[:] = [*((a[0] + b[0], a[1] + b[1]) for a, b in pairs), *bins[even:]]

    # --- several teams ----------------------------------------------------------------------------

    def _play(self, ops: Operations, moved: Int, own: Int) -> None:
        if self._blocks < self._next:
            self._skipped = True
            self._sooner[:] = 0
            self._until[:] = -1
            return
        self._even_work(ops, own)
        front = fronts_of(ops, self._job.size)
        last = ends(ops, front)
        order = np.argsort(front, kind="stable")
        size = np.diff(ops.first)[order]
        rows = np.repeat(ops.first[:-1][order] - np.append(0, np.cumsum(size)[:-1]), size)
        rows += np.arange(rows.size)
        stay, blocked = (ops.leave_ns - ops.arrive_ns)[rows], ops.blocked_ns[rows]
        # Who stood still for most of it stood still; what samples say of it may be less.
        blocked = np.where(2 * blocked >= stay, stay, blocked)
        beyond = slow_transfers(ops, moved)[order]
        moved, rank, own = moved[rows], ops.rank[rows], own[rows]
        leave = ops.leave_ns[rows]
        begins = np.append(0, np.cumsum(size))
        cuts = np.searchsorted(front[order], np.arange(int(front[-1]) + 2))
        new = np.flatnonzero(self._until[ops.rank] < 0)[::-1]
        self._until[ops.rank[new]] = ops.arrive_ns[new]  # of each rank the first row comes last
        new = new[self.from_ns[ops.rank[new]] < 0]
        self.from_ns[ops.rank[new]] = ops.arrive_ns[new]
        known = self._sooner.copy()
        times = self._until.copy()
        latest = self._until.copy()
        begun = 0
        own[:, TRANSFER] = moved
        for number in range(cuts.size - 1):
            low, high = cuts[number], cuts[number + 1]
            span = slice(int(begins[low]), int(begins[high]))
            first = begins[low:high] - begins[low]
            who, stays = rank[span], stay[span]
            own_sooner = self._sooner[who] + own[span]
            own_sooner[:, TRANSFER] -= own[span, TRANSFER]  # is in the operation, not before it
            shortest = np.minimum.reduceat(stays, first)
            sooner = np.maximum.reduceat(-stays[:, None] - own_sooner, first)
            sooner = -shortest[:, None] - sooner
            sooner[:, TRANSFER] += np.minimum.reduceat(moved[span], first)
            sooner[:, SHARED] += beyond[low:high]
            of_op = np.repeat(sooner, size[low:high], axis=0)
            self._sooner[who] = np.minimum(own_sooner + blocked[span][:, None], of_op)
            latest[who] = leave[span]
            if number in last:
                some = slice(begun, span.stop)
                since = by_rank(self._job.size, rank[some], blocked[some] - moved[some], own[some])
                self._stretch(known, times, latest, *since)
                begun = span.stop
                known, times = self._sooner.copy(), latest.copy()
        self._until = latest
        self._fronts += cuts.size - 1
        self._next = self._blocks + 1 + self._fronts // MOST_FRONTS

    def _stretch(self, before: Int, times: Int, latest: Int, waited: Int, own: Int) -> None:
        """Note how much sooner the ranks of each job came in the mean since a while ago."""
        moved = (times >= 0) & (latest > times)
        for job in np.unique(self._job[moved]).tolist():
            mine = moved & (self._job == job)
            grown = (self._sooner[mine] - before[mine]).mean(axis=0).astype(np.int64)
            least = (waited[mine, None] + own[mine]).min(axis=0) - waited[mine].min()
            least[SHARED] = grown[SHARED]  # who has less to do gets more: no bound from below
            grown = np.maximum(grown, least)
            length = int((latest[mine] - times[mine]).mean())
            self._put(job, np.array([length]), grown[None])

    def _even_work(self, ops: Operations, own: Int) -> None:
        """Keep of each rank's work what it did beyond the lower middle rank of its job, and what
        it did beyond its part of the mean, in what it usually does between two such operations."""
        total = np.bincount(ops.rank, own[:, WORK], self._job.size)
        part, mean = np.zeros(self._job.size), np.ones(self._job.size)
        for job in np.unique(self._job[ops.rank]).tolist():
            mine = np.flatnonzero((self._job == job) & (total > 0))
            if not mine.size:  # all of its time was in operations
                continue
            usual = np.sort(total[mine])[(mine.size - 1) // 2]
            part[mine] = np.maximum(1.0 - usual / total[mine], 0.0)
            mean[mine] = total[mine].mean() / total[mine]
        shared = usual_work(ops, own[:, WORK]) * mean[ops.rank]
        own[:, SHARED] = np.rint(own[:, WORK] - shared).astype(np.int64)
        own[:, WORK] = np.rint(own[:, WORK] * part[ops.rank]).astype(np.int64)
