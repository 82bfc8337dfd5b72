"""Collect what the report needs on culprits and slow steps while waits are blamed.

Replay a job without each cause: columns of spent time in, saved job time out.

It also collects the longest waits of ranks for each other while waits are blamed.

The longest few of every culprit are kept, so that the largest culprit does not hide the
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.rank.hidden_cost import ALL_CAUSES, HIDDEN_COLUMNS
from clusterprof.analysis.attribution.rank.time_spent import UNEXPLAINED
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.attribution.wait_for.blame import (
    BLAME_CAUSES,
    IMBALANCE,
    SLOW_COMPUTE,
    BlockBlame,
)
from clusterprof.analysis.attribution.wait_for.blame import list_causes as blame_causes
from clusterprof.analysis.attribution.wait_for.time_bins import WaitTimeBins
from clusterprof.analysis.attribution.wait_for.totals import (
    MIN_STEPS_FOR_TAIL,
    SavingsTotals,
    SlowSteps,
    VictimCounts,
)
from clusterprof.analysis.attribution.what_if import WhatIfReplay, WhatIfSavings
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.analysis.timeline.model import Int
from clusterprof.report.history import SlowStepSummary
from clusterprof.report.model import Persistence
from clusterprof.util.statistics import find_quantile

_TOO_FEW_STEPS = f"fewer than {MIN_STEPS_FOR_TAIL} steps were recorded"
_NO_SLOW_RANK = "no rank delayed the others in them, or they took hardly longer than the rest"


@dataclass(frozen=True, slots=True)
class CulpritSums:
    """What is summed for culprits while waits are blamed; can be sent to a worker process."""

    time_bins: WaitTimeBins
    victims: VictimCounts
    savings: SavingsTotals
    slow: Sequence[SlowSteps]
    """Of one rank of each job."""

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add one block of operations and the blame for each wait in it."""
        self.time_bins.add(ops, blamed)
        self.victims.add(ops, blamed)
        self.savings.add(ops, blamed)
        for slow in self.slow:
            slow.add(ops, blamed)

    def merge(self, other: CulpritSums) -> None:
        """Add the sums of later operations."""
        self.time_bins.merge(other.time_bins)
        self.victims.merge(other.victims)
        self.savings.merge(other.savings)
        for slow_steps, slow in zip(self.slow, other.slow):
            slow_steps.merge(slow)


def make_culprit_sums(ranks: Sequence[tuple[NodeResult, RankResult]], causes: int) -> CulpritSums:
    """Make the sums for culprits without operations; causes: number of them."""
    begin_ns = np.array([node.loaded.first_ns for node, _ in ranks], np.int64)
    first: dict[str, int] = {}
    labels = [first.setdefault(node.facts.key, index) for index, (node, _) in enumerate(ranks)]
    results = [rank for _, rank in ranks]
    return CulpritSums(
        WaitTimeBins(causes, begin_ns, labels),
        VictimCounts(len(ranks)),
        SavingsTotals(_count_job_ranks(results), causes),
        _choose_slow_step_ranks(results),
    )


class CulpritObserver:
    """Answers questions about culprits from what was observed; ranks are numbered over all nodes
    in order.
    """

    def __init__(
        self, ranks: Sequence[RankResult], causes: Sequence[str], sums: CulpritSums
    ) -> None:
        # The results themselves hold the tables of operations, half a gigabyte of 10,000 ranks.
        self._places = [(rank.ledger.node, rank.ledger.rank) for rank in ranks]
        self._steps = [rank.ledger.steps for rank in ranks]
        self._causes, self.sums = causes, sums

    def persistence(self, leaves: Collection[str]) -> Persistence | None:
        """Return how the culprits of some causes change over the run; None = not known."""
        return self.sums.time_bins.persistence(self._cause_numbers(leaves))

    def find_blamed_leaves(self, leaves: Sequence[str], waited_ns: int) -> Sequence[str]:
        """Find the causes under which the waits of a finding, waited_ns in all, were blamed.

        Most waits of an imbalance may have been blamed as slow work, until all operations showed
        that work is uneven (Jitter).
        """
        if IMBALANCE not in leaves:
            return leaves
        with_slow_work, bins = (*leaves, SLOW_COMPUTE), self.sums.time_bins
        known_ns, both_ns = (
            bins.sum_waits(self._cause_numbers(c)) for c in (leaves, with_slow_work)
        )
        return with_slow_work if 2 * known_ns < min(waited_ns, both_ns) else leaves

    def victim_count(self, rank_index: int) -> int | None:
        """Return how many other ranks waited for a rank; None where that is not known."""
        return self.sums.victims.count_victims(rank_index)

    def recoverable_ns(self, rank_index: int, leaves: Collection[str], own_ns: int) -> int:
        """Return the device time all ranks save when one culprit is on time.

        own_ns: what the culprit lost by itself.
        """
        causes = self._cause_numbers(leaves)
        return self.sums.savings.estimate_savings(
            rank_index, causes, own_ns, self._steps[rank_index]
        )

    def all_recoverable_ns(self, leaves: Collection[str]) -> int | None:
        """Return the device time all ranks save without some causes; None where it is not known.

        Work is none of these causes: without work there is no job.
        """
        if not set(leaves).isdisjoint(BLAME_CAUSES):
            return None
        causes = self._cause_numbers(leaves)
        return self.sums.savings.estimate_savings_without_causes(causes, self._steps)

    def summarize_slow_steps(self, lengths: Mapping[int, int]) -> SlowStepSummary:
        """Return how long steps take and which ranks set the length of slow ones.

        lengths: step length in ns -> number of steps, over all ranks.
        """
        p50, p99 = (find_quantile(lengths, share) for share in (0.5, 0.99))
        counts: dict[int, int] = {}
        for slow in self.sums.slow:
            for rank, steps in slow.count_steps_by_culprit(p50 or 0.0).items():
                counts[rank] = counts.get(rank, 0) + steps
        order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        slow_steps = sum(slow.length_ns.size for slow in self.sums.slow)
        why = "" if counts else _NO_SLOW_RANK if slow_steps else _TOO_FEW_STEPS
        return SlowStepSummary(
            steps=sum(slow.count for slow in self.sums.slow),
            slow_step_count=slow_steps,
            p50_ns=None if p50 is None else int(p50),
            p99_ns=None if p99 is None else int(p99),
            late_ranks=tuple((*self._places[rank_index], steps) for rank_index, steps in order),
            why_missing=why,
        )

    def _cause_numbers(self, leaves: Collection[str]) -> list[int]:
        families = {leaf for leaf in leaves if leaf in ("network", "synchronization")}
        return [
            number
            for number, cause in enumerate(self._causes)
            if cause in leaves or (cause in CAUSES and CAUSES[cause].family in families)
        ]


def _count_job_ranks(ranks: Sequence[RankResult]) -> Int:
    """Count for each rank the recorded ranks of its job, int64[ranks]."""
    jobs = [rank.job for rank in ranks]
    counts = Counter(jobs)
    return np.array([counts[job] for job in jobs], np.int64)


def _choose_slow_step_ranks(ranks: Sequence[RankResult]) -> list[SlowSteps]:
    """Choose the rank with the most steps of each job, the first of several."""
    rank_of_job: dict[int, int] = {}
    for index, rank in enumerate(ranks):
        if rank.operations is None:
            continue
        chosen = rank_of_job.setdefault(rank.job, index)
        if rank.ledger.steps > ranks[chosen].ledger.steps:
            rank_of_job[rank.job] = index
    return [
        SlowSteps(index, ranks[index].accumulator.slowest, ranks[index].ledger.steps, len(ranks))
        for index in rank_of_job.values()
    ]


class WhatIfObserver:
    """Observes blame, and replays each block without each cause."""

    def __init__(self, job: Sequence[int], categories: Sequence[str]) -> None:
        """Start without blocks.

        job: number of the job of each rank. categories: names of spent time; work is the last.
        """
        self._job, self._categories = job, tuple(categories)
        self.causes: tuple[str, ...] = ()
        """Causes to which some time was lost."""
        self._cause_columns: list[int] = []
        self._gap_columns: list[int] = []
        self._hidden: list[tuple[int, int]] = []
        self._all_causes_column: int | None = None
        self._work = 0
        self._work_causes = (0, 0)
        self._replay: WhatIfReplay | None = None
        self._begun_ns = np.full(len(job), -1, np.int64)
        """When each rank's steps began, ns on its own clock; -1 = not yet. int64[ranks]."""

    def begin(self, columns: Sequence[int], spent: Sequence[int]) -> list[int]:
        """Take the categories that have time; return the further columns that are needed."""
        names = [self._categories[c] for c in columns]
        self._cause_columns = [
            position for position, name in enumerate(names[:-1]) if name != UNEXPLAINED
        ]
        self._gap_columns = [
            position for position, name in enumerate(names[:-1]) if name == UNEXPLAINED
        ]
        self.causes = tuple(names[position] for position in self._cause_columns)
        self._work = len(columns) - 1
        named = blame_causes(names)
        self._work_causes = named.index(IMBALANCE), named.index(SLOW_COMPUTE)
        hidden = [c for c in spent if c >= len(self._categories)]
        hidden_names = [HIDDEN_COLUMNS[c - len(self._categories)] for c in hidden]
        self._hidden = [
            (self.causes.index(name), len(columns) + position)
            for position, name in enumerate(hidden_names)
            if name in self.causes
        ]
        self._all_causes_column = (
            len(columns) + hidden_names.index(ALL_CAUSES) if ALL_CAUSES in hidden_names else None
        )
        job = np.asarray(self._job)
        _, which, count = np.unique(job, return_inverse=True, return_counts=True)
        self._replay = WhatIfReplay(self._job, count[which], len(self.causes))
        return hidden

    @property
    def culprits(self) -> tuple[tuple[int, int], ...] | None:
        """Ranks with a cause that are each replayed alone; None = not chosen yet."""
        return None if self._replay is None else self._replay.culprits

    def begin_slice(
        self, ops: Operations, leave: Int, culprits: tuple[tuple[int, int], ...] | None
    ) -> None:
        """Begin after a cut: an operation of all ranks that are added later.

        leave: spent ns up to leaving it, int64[ranks, columns]. culprits: chosen before it.
        """
        assert self._replay is not None, "begin() comes first"
        self._replay.begin(
            ops.rank, self._lost(leave), leave[:, self._work], ops.leave_ns, culprits
        )

    def merge(self, other: WhatIfObserver) -> None:
        """Add the replay of later operations."""
        assert self._replay is not None and other._replay is not None, "begin() comes first"
        self._replay.merge(other._replay)
        self._begun_ns = np.where(self._begun_ns < 0, other._begun_ns, self._begun_ns)

    def add(self, ops: Operations, blamed: BlockBlame, arrive: Int, leave: Int) -> None:
        """Add a block of operations with its blame and all columns of spent time.

        arrive, leave: spent ns up to arrival and leaving, int64[rows, columns].
        """
        assert self._replay is not None, "begin() comes first"
        self._record_first_rows(ops, arrive)
        work = arrive[:, self._work], leave[:, self._work]
        self._replay.add(
            ops, blamed, self._lost(arrive), self._lost(leave), work, self._work_causes
        )

    def _record_first_rows(self, ops: Operations, arrive: Int) -> None:
        first_rows = np.flatnonzero(self._begun_ns[ops.rank] < 0)[::-1]
        began = ops.arrive_ns[first_rows] - arrive[first_rows, : self._work + 1].sum(axis=1)
        self._begun_ns[ops.rank[first_rows]] = began  # the first row of each rank is written last

    def unreplayed_ns(self, job: int) -> int:
        """Return the mean time ranks of a job spent in steps before the first replayed block,
        ns."""
        if self._replay is None:
            return 0
        from_ns = self._replay.from_ns
        rows = (np.asarray(self._job) == job) & (from_ns >= 0) & (self._begun_ns >= 0)
        return int((from_ns - self._begun_ns)[rows].mean()) if rows.any() else 0

    def savings(self) -> dict[int, WhatIfSavings]:
        """Return by job what would have been saved, by `causes` and the columns behind them."""
        return {} if self._replay is None else self._replay.get_savings()

    def _lost(self, spent: Int) -> Int:
        """Return lost and hidden ns by cause, then of all causes, then gaps.

        int64[rows, causes + 2].
        """
        causes = len(self._cause_columns)
        out = np.zeros((causes + 2, len(spent)), np.int64)  # each column contiguous
        for row, column in enumerate(self._cause_columns):
            out[row] = spent[:, column]
            out[causes] += out[row]
        for row, column in self._hidden:
            out[row] += spent[:, column]
        if self._all_causes_column is not None:
            out[causes] += spent[:, self._all_causes_column]
        for column in self._gap_columns:
            out[causes + 1] += spent[:, column]
        return out.T


WAITS_PER_CULPRIT = 12
"""Waits that are kept of each culprit."""
RESERVED_PER_CULPRIT = 4
"""Waits of each culprit that are listed first, even if others were longer."""
MAX_WAITS = 256
"""Waits in a report."""
MAX_SLOW_STEPS = 20
"""Slow steps listed per job."""
_LATE_RATIO = 0.05  # of a step: a rank that delays the others by less did not make the step slow
_BUFFER_WAITS = 1 << 14


@dataclass(frozen=True, slots=True)
class LongWait:
    """One wait; times are ns on the victim's own clock."""

    victim: int
    culprit: int
    """Number of the rank over all nodes; -1 = no culprit, or not known."""
    cause: int
    start_ns: int
    duration_ns: int


class LongWaitObserver:
    """Observes blame for the longest waits; ranks are numbered over all nodes in order."""

    def __init__(self, ranks: Sequence[RankResult], causes: Sequence[str]) -> None:
        self.causes = tuple(causes)
        self._floor_ns = np.zeros(len(ranks) + 1, np.int64)
        """By culprit: shorter waits are not among its longest, int64[culprits + 1]."""
        self._kept = np.zeros((5, 0), np.int64)
        """Rows: culprit, ns, victim, cause, start; int64[5, waits]."""
        self._slow = _choose_slow_step_observers(ranks)

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add one block of operations and the blame for each wait in it."""
        for slow in self._slow:
            slow.add(ops, blamed)
        row = blamed.row
        if not row.size:
            return
        # A row blamed in parts is one wait, listed for the culprit with the largest part.
        starts = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
        largest_ns = np.maximum.reduceat(blamed.ns, starts)
        main = np.flatnonzero(
            blamed.ns == np.repeat(largest_ns, np.diff(np.append(starts, row.size)))
        )
        main = main[np.append(True, row[main[1:]] != row[main[:-1]])]
        whole_ns = np.add.reduceat(blamed.ns, starts)
        culprit = blamed.culprit[main]
        long_enough = np.flatnonzero(whole_ns >= np.maximum(self._floor_ns[culprit], 1))
        if not long_enough.size:
            return
        main, culprit, ns = main[long_enough], culprit[long_enough], whole_ns[long_enough]
        wait_row = row[main]
        begin_ns = ops.leave_ns[wait_row] - ops.blocked_ns[wait_row]
        waits = np.stack([culprit, ns, ops.rank[wait_row], blamed.cause[main], begin_ns])
        self._kept = np.concatenate([self._kept, waits], axis=1)
        if self._kept.shape[1] > _BUFFER_WAITS + WAITS_PER_CULPRIT * self._floor_ns.size:
            self._settle()

    def merge(self, other: LongWaitObserver) -> None:
        """Add the longest waits in other operations."""
        for slow_steps, slow in zip(self._slow, other._slow):
            slow_steps.merge(slow)
        self._kept = np.concatenate([self._kept, other._kept], axis=1)
        if self._kept.shape[1]:
            self._settle()

    def _settle(self) -> None:
        """Keep the longest few waits of each culprit; ties by start, then by victim."""
        culprit, ns, victim, cause, start = self._kept
        order = np.lexsort((cause, victim, start, -ns, culprit))
        waits = self._kept[:, order]
        starts = np.flatnonzero(np.append(True, waits[0, 1:] != waits[0, :-1]))
        position = np.arange(waits.shape[1])
        position -= np.repeat(starts, np.diff(np.append(starts, position.size)))
        last = np.flatnonzero(position == WAITS_PER_CULPRIT - 1)
        self._floor_ns[waits[0, last]] = waits[1, last]
        self._kept = waits[:, position < WAITS_PER_CULPRIT]

    def longest(self, named: Collection[int]) -> list[LongWait]:
        """Return the longest waits, with a few reserved for each of the `named` culprits."""
        if not self._kept.shape[1]:
            return []
        self._settle()
        culprit, ns = self._kept[:2]
        is_start = np.append(True, culprit[1:] != culprit[:-1])
        position = np.arange(culprit.size) - np.maximum.accumulate(
            np.where(is_start, np.arange(culprit.size), 0)
        )
        first = np.isin(culprit, list(named)) & (position < RESERVED_PER_CULPRIT)
        order = np.lexsort((np.arange(ns.size), -ns, ~first))[:MAX_WAITS]
        return [
            LongWait(int(victim), int(culprit_rank), int(cause), int(start), int(ns))
            for culprit_rank, ns, victim, cause, start in self._kept[:, order].T.tolist()
        ]

    def last_arrivals(self) -> dict[tuple[int, int], int]:
        """Return which rank arrived last in slow steps: (rank, start of its step) -> culprit."""
        return {
            (slow.rank, start_ns): culprit
            for slow in self._slow
            for start_ns, culprit in slow.find_culprit_per_step(_LATE_RATIO).items()
        }


def list_slowest_steps(ranks: Sequence[RankResult]) -> dict[int, list[int]]:
    """List the numbers of the slowest steps of each job, slowest first.

    A step is as long as for the rank that took longest.
    """
    longest: dict[int, dict[int, int]] = {}
    for rank in ranks:
        steps_ns = longest.setdefault(rank.job, {})
        steps = rank.history.slowest[[0, 2]].T.tolist() if rank.history is not None else []
        for number, ns in steps:
            steps_ns[number] = max(ns, steps_ns.get(number, 0))
    return {
        job: sorted(steps_ns, key=lambda number: (-steps_ns[number], number))[:MAX_SLOW_STEPS]
        for job, steps_ns in longest.items()
    }


def _choose_slow_step_observers(ranks: Sequence[RankResult]) -> list[SlowSteps]:
    """Choose for the slow steps of each job the rank that recorded most of them."""
    numbers = list_slowest_steps(ranks)
    steps_of_job: dict[int, tuple[int, Mapping[int, int]]] = {}
    for index, rank in enumerate(ranks):
        if rank.history is None or rank.operations is None:
            continue
        wanted = set(numbers[rank.job])
        steps = rank.history.slowest[:3].T.tolist()
        own_steps = {start: ns for number, start, ns in steps if number in wanted}
        if own_steps and len(own_steps) > len(steps_of_job.get(rank.job, (0, {}))[1]):
            steps_of_job[rank.job] = index, own_steps
    return [SlowSteps(index, steps, None, len(ranks)) for index, steps in steps_of_job.values()]
