"""The longest waits of ranks for each other, noted while blame passes block after block.

Of every culprit its longest few are kept, so that who is named first does not hide the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.attribution.blame import Blamed
from clusterprof.attribution.blame_tail import SlowSteps
from clusterprof.attribution.ledger import RankBooks
from clusterprof.timeline.operations import Operations

OF_EACH = 12
"""Waits that are kept of each culprit."""
SHARE_OF_EACH = 4
"""Of these so many come first, whoever else waited for longer."""
MOST = 256
"""Waits of a report."""
MOST_SLOW = 20
"""Slow steps of a job."""
_LAST_RATIO = 0.05  # of a step: for less than that nobody kept the others waiting in it
_BUFFER = 1 << 14


@dataclass(frozen=True, slots=True)
class LongWait:
    """One wait; times are the victim's own."""

    victim: int
    culprit: int
    """Rank as in the books of all nodes; -1 = nobody, or not known."""
    cause: int
    start_ns: int
    duration_ns: int


class LongWaits:
    """A watcher of blame; ranks are numbered as in the books of all nodes."""

    def __init__(self, ranks: Sequence[RankBooks], causes: Sequence[str]) -> None:
        self.causes = tuple(causes)
        self._floor_ns = np.zeros(len(ranks) + 1, np.int64)
        """Of each culprit: what is no longer than this is not among its longest."""
        self._kept = np.zeros((5, 0), np.int64)
        """culprit, ns, victim, cause, start."""
        self._slow = _slow_steps(ranks)

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        for slow in self._slow:
            slow.add(ops, blamed)
        row = blamed.row
        if not row.size:
            return
        # What a row was charged for in parts is one wait, for whom most of it was charged to.
        opens = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
        most = np.maximum.reduceat(blamed.ns, opens)
        chief = np.flatnonzero(blamed.ns == np.repeat(most, np.diff(np.append(opens, row.size))))
        chief = chief[np.append(True, row[chief[1:]] != row[chief[:-1]])]
        whole_ns = np.add.reduceat(blamed.ns, opens)
        culprit = blamed.culprit[chief]
        some = np.flatnonzero(whole_ns > self._floor_ns[culprit])
        if not some.size:
            return
        chief, culprit, ns = chief[some], culprit[some], whole_ns[some]
        at = row[chief]
        begin = ops.leave_ns[at] - ops.blocked_ns[at]
        new = np.stack([culprit, ns, ops.rank[at], blamed.cause[chief], begin])
        self._kept = np.concatenate([self._kept, new], axis=1)
        if self._kept.shape[1] > _BUFFER + OF_EACH * self._floor_ns.size:
            self._settle()

    def _settle(self) -> None:
        """Keep the longest few of each culprit; of equal ones the earliest, then by victim."""
        culprit, ns, victim, _, start = self._kept
        order = np.lexsort((victim, start, -ns, culprit))
        kept = self._kept[:, order]
        opens = np.flatnonzero(np.append(True, kept[0, 1:] != kept[0, :-1]))
        place = np.arange(kept.shape[1])
        place -= np.repeat(opens, np.diff(np.append(opens, place.size)))
        last = np.flatnonzero(place == OF_EACH - 1)
        self._floor_ns[kept[0, last]] = kept[1, last]
        self._kept = kept[:, place < OF_EACH]

    def longest(self, named: Collection[int]) -> list[LongWait]:
        """Return the longest waits, some for each of the `named` culprits among them."""
        if not self._kept.shape[1]:
            return []
        self._settle()
        culprit, ns = self._kept[:2]
        opens = np.append(True, culprit[1:] != culprit[:-1])
        place = np.arange(culprit.size) - np.maximum.accumulate(
            np.where(opens, np.arange(culprit.size), 0)
        )
        first = np.isin(culprit, list(named)) & (place < SHARE_OF_EACH)
        order = np.lexsort((np.arange(ns.size), -ns, ~first))[:MOST]
        return [
            LongWait(int(who), int(of), int(cause), int(start), int(ns))
            for of, ns, who, cause, start in self._kept[:, order].T.tolist()
        ]

    def last_in(self) -> dict[tuple[int, int], int]:
        """Return who came last in slow steps: (rank, start of its step) -> culprit."""
        return {
            (slow.rank, start_ns): culprit
            for slow in self._slow
            for start_ns, culprit in slow.last(_LAST_RATIO).items()
        }


def slowest_of(ranks: Sequence[RankBooks]) -> dict[int, list[int]]:
    """Return job -> numbers of its slowest steps, by the rank that took longest, slowest first."""
    longest: dict[int, dict[int, int]] = {}
    for one in ranks:
        of_job = longest.setdefault(one.job, {})
        steps = one.times.slowest[[0, 2]].T.tolist() if one.times is not None else []
        for number, ns in steps:
            of_job[number] = max(ns, of_job.get(number, 0))
    return {
        job: sorted(of_job, key=lambda number: (-of_job[number], number))[:MOST_SLOW]
        for job, of_job in longest.items()
    }


def _slow_steps(ranks: Sequence[RankBooks]) -> list[SlowSteps]:
    """Look into the slow steps of each job by the rank that knows most of them."""
    numbers = slowest_of(ranks)
    chosen: dict[int, tuple[int, Mapping[int, int]]] = {}
    for at, one in enumerate(ranks):
        if one.times is None or one.operations is None:
            continue
        wanted = set(numbers[one.job])
        steps = one.times.slowest[:3].T.tolist()
        mine = {start: ns for number, start, ns in steps if number in wanted}
        if mine and len(mine) > len(chosen.get(one.job, (0, {}))[1]):
            chosen[one.job] = at, mine
    return [SlowSteps(at, steps, None, len(ranks)) for at, steps in chosen.values()]
