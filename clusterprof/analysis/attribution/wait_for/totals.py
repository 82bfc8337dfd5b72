"""Sum the blamed waits of all blocks: by rank, by step, by what ending them saves.

`WaitTotals` sums by victim and by culprit, `VictimCounts` by pair of ranks.

`SlowSteps`: the tail of step times often has a cause of its own. One rank per job is
evaluated, because in synchronous training a slow step is slow for all ranks. The waits in
the operations of its slow steps are summed by culprit. The culprit that caused most of them
set the step, if the others waited for it for a good part of what the step took longer.

`SavingsTotals` estimates what all ranks would save if a single culprit arrived in time.

    rank 0   |== work ==|------------ waits 50 ------------|        saved: 30
    rank 1   |== work ==|-- storage 20 --|---- waits 30 ---|        saved: 30
    rank 2   |== work ==|-- storage 50 --------------------|        continues 30 earlier

The savings reach only to the next late rank. A rank that was late because it had itself
waited for the same culprit elsewhere (its node, its pipeline stage) would also be in
time: it does not count as the next late rank. This holds for waits since the previous
operation of the process group, which all its members had left together.

What is saved in one operation may be lost again in a later one if another rank is
equally late there. If all ranks of a job meet in every step this cannot happen: the
time by which they continue earlier is saved. Otherwise the waits that end are added up,
which may be too much.

Without a cause, for all ranks that it made late, an operation of this kind ends earlier
by the time between the last arrival and the arrival that would then be last
(estimate_savings_by_category): 50 above, because rank 0 is in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point
from clusterprof.analysis.attribution.wait_for.blame import (
    IMBALANCE,
    NO_CULPRIT,
    SLOW_COMPUTE,
    TRANSFER,
    BlockBlame,
    list_causes,
)
from clusterprof.analysis.attribution.wait_for.time_bins import CellSums, index_keys
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.analysis.timeline.model import Float, Int
from clusterprof.probe.layout import ALL_TO_ALL

MIN_UNEVEN_RATIO = 1.2
"""Largest message of an all-to-all, relative to the mean of its members, from which on its sizes
differ."""
ALL_TO_ALL_TOTALS = ("all_to_all_bytes", "all_to_all_mean_bytes")
"""Names of the rows of `WaitTotals.all_to_all_bytes` in the accumulator of a rank."""

WORK_WAIT_TOTALS = ("message_work_wait_ns", "work_wait_ns")
"""Names of the rows of `WaitTotals.work_wait_ns` in the accumulator of a rank."""


class WaitTotals:
    """Totals of waits over all blocks; integers, so the order of blocks does not matter."""

    def __init__(self, ranks: int, categories: Sequence[str]) -> None:
        self.causes = list_causes(categories)
        shape = (ranks, len(self.causes))
        self.victim_ns = np.zeros(shape, np.int64)
        """int64[rank, cause]: time in operations by what kept the rank there, ns."""
        self.culprit_ns = np.zeros((ranks + 1, len(self.causes)), np.int64)
        """int64[culprit, cause], ns; the last row is NO_CULPRIT, which holds transfers."""
        self.recoverable_ns = np.zeros_like(self.culprit_ns)
        """Of `culprit_ns`: waiting that ends if this culprit alone arrives with the second last,
        ns.
        """
        self.late_peers = np.zeros(ranks, np.int64)
        """int64[ranks]: number of other late ranks in the operations where the rank arrived last.
        """
        self.last_arrivals = np.zeros(ranks, np.int64)
        """int64[ranks]: number of operations in which the rank arrived last."""
        self.all_to_all_bytes = np.zeros((2, ranks), np.int64)
        """int64[2, ranks]: bytes that the rank brought to all-to-all operations whose sizes differ,
        and the mean of the members of each, summed.
        """
        self.work_wait_ns = np.zeros((2, ranks), np.int64)
        """int64[2, ranks]: waits of others for the work of the rank, in messages between two ranks
        and in all operations, ns.
        """

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add the blame of one block of operations."""
        rank, row = ops.rank, blamed.row
        self.victim_ns += _sum_into_table(rank[row], blamed.cause, blamed.ns, self.victim_ns.shape)
        self.culprit_ns += _sum_into_table(
            blamed.culprit, blamed.cause, blamed.ns, self.culprit_ns.shape
        )
        transfer = self.causes.index(TRANSFER)
        transfer_ns = np.bincount(rank, weights=blamed.transfer_ns, minlength=len(self.victim_ns))
        self.victim_ns[:, transfer] += transfer_ns.astype(np.int64)
        self.culprit_ns[NO_CULPRIT, transfer] += int(blamed.transfer_ns.sum())
        wait = ops.blocked_ns - blamed.transfer_ns
        recoverable = np.minimum(np.repeat(blamed.recoverable_ns, np.diff(ops.first)), wait)
        recoverable_ratio = (recoverable / np.maximum(wait, 1))[row]
        recoverable_ratio[blamed.culprit < 0] = 0.0
        recoverable = np.rint(blamed.ns * recoverable_ratio)
        self.recoverable_ns += _sum_into_table(
            blamed.culprit, blamed.cause, recoverable, self.culprit_ns.shape
        )
        has_last_arrival = blamed.last_arrival >= 0
        np.add.at(self.last_arrivals, blamed.last_arrival[has_last_arrival], 1)
        np.add.at(
            self.late_peers,
            blamed.last_arrival[has_last_arrival],
            blamed.late_peers[has_last_arrival],
        )
        self._add_work_waits(ops, blamed)
        if ops.row_bytes.size:
            self._add_all_to_all(ops)

    def _add_work_waits(self, ops: Operations, blamed: BlockBlame) -> None:
        work = [self.causes.index(name) for name in (IMBALANCE, SLOW_COMPUTE)]
        entries = np.flatnonzero(np.isin(blamed.cause, work) & (blamed.culprit >= 0))
        culprit, ns = blamed.culprit[entries], blamed.ns[entries]
        message = np.repeat(is_point_to_point(ops.operation), np.diff(ops.first))
        in_message = np.where(message[blamed.row[entries]], ns, 0)
        for sums, part_ns in zip(self.work_wait_ns, (in_message, ns)):
            np.add.at(sums, culprit, part_ns)

    def _add_all_to_all(self, ops: Operations) -> None:
        size, heads = np.diff(ops.first), ops.first[:-1]
        total = np.add.reduceat(ops.row_bytes, heads)
        differs = (ops.operation == ALL_TO_ALL) & ops.complete
        differs &= np.minimum.reduceat(ops.row_bytes, heads) >= 0
        differs &= (ops.bytes * size >= MIN_UNEVEN_RATIO * total) & (total > 0)
        rows = np.flatnonzero(np.repeat(differs, size))
        mean = np.repeat(total // size, size)
        for sums, column in zip(self.all_to_all_bytes, (ops.row_bytes, mean)):
            np.add.at(sums, ops.rank[rows], column[rows])

    def merge(self, other: WaitTotals) -> None:
        """Add the totals of other operations."""
        names = ("victim_ns", "culprit_ns", "recoverable_ns", "late_peers", "last_arrivals")
        for name in (*names, "all_to_all_bytes", "work_wait_ns"):
            sums = getattr(self, name)
            sums += getattr(other, name)


def _sum_into_table(rank: Int, cause: Int, ns: Int | Float, shape: tuple[int, ...]) -> Int:
    """Sum into a table; row -1 is the last. Floats are exact up to 2**53 ns (104 days)."""
    cell = np.where(rank < 0, shape[0] - 1, rank) * shape[1] + cause
    sums = np.bincount(cell, weights=ns, minlength=shape[0] * shape[1])
    return sums.astype(np.int64).reshape(shape)


MAX_COUNTED_RANKS = 4096
"""With more ranks victims are not counted: memory is one number per pair of ranks."""
_MIN_WAIT_RATIO = 0.1


class VictimCounts:
    """How long each rank waited for each other rank, over all causes."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waited = CellSums()
        """Cell: culprit * ranks + victim."""

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add one block of operations and its blame."""
        if self._ranks <= MAX_COUNTED_RANKS:
            with_culprit = np.flatnonzero(blamed.culprit >= 0)
            cell = blamed.culprit[with_culprit] * self._ranks + ops.rank[blamed.row[with_culprit]]
            self._waited.add(cell, blamed.ns[with_culprit])

    def merge(self, other: VictimCounts) -> None:
        """Add the counts of other operations."""
        self._waited.merge(other._waited)

    def count_victims(self, culprit: int) -> int | None:
        """Count the ranks that waited for the culprit at least a tenth as long as its longest
        victim.

        None if victims were not counted.
        """
        if self._ranks > MAX_COUNTED_RANKS:
            return None
        cell, ns = self._waited.sums()
        low, high = np.searchsorted(cell, (culprit * self._ranks, (culprit + 1) * self._ranks))
        waited = ns[low:high][cell[low:high] != culprit * (self._ranks + 1)]
        longest = waited.max(initial=0)
        return int(np.count_nonzero(waited >= _MIN_WAIT_RATIO * longest)) if longest else 0


MIN_STEPS_FOR_TAIL = 20
"""With fewer steps the tail of step times is not evaluated."""
SLOW_STEPS_RATIO = 0.01
"""Part of the steps, the slowest, that counts as slow."""
MIN_SLOW_STEPS = 3
"""At least this many of the slowest steps count as slow …"""
SLOW_STEP_FACTOR = 1.05
"""… if they took longer than the median step by this factor."""
EXPLAINED_RATIO = 0.25
"""Part of what a step took longer than the median step for which the others must have waited."""


class SlowSteps:
    """The slow steps of one rank, and the waits in each by culprit."""

    def __init__(
        self, rank: int, steps: Mapping[int, int], steps_made: int | None, ranks: int
    ) -> None:
        """steps: start -> length of the longest steps, ns, by the rank's own clock.
        steps_made: number of steps of the run; None to evaluate all of `steps`.
        """
        limit = len(steps) if steps_made is None else 0
        if steps_made is not None and steps_made >= MIN_STEPS_FOR_TAIL:
            limit = max(MIN_SLOW_STEPS, round(SLOW_STEPS_RATIO * steps_made))
        order = sorted(steps.items(), key=lambda step: (-step[1], step[0]))[:limit]
        order.sort()
        self.count = steps_made or 0
        self.rank = self._rank = rank
        self._start_ns = np.array([start for start, _ in order], np.int64)
        self.length_ns = np.array([ns for _, ns in order], np.int64)
        self._ranks = ranks
        self._caused = CellSums()
        """Cell: step * ranks + culprit."""
        self._met = np.zeros(ranks, np.bool_)

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add one block of operations and its blame."""
        rank_rows = np.flatnonzero(ops.rank == self._rank)
        if not rank_rows.size or not self.length_ns.size:
            return
        op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
        leave_ns = ops.leave_ns[rank_rows]
        step = np.searchsorted(self._start_ns, leave_ns, side="left") - 1
        inside = step >= 0
        inside &= leave_ns <= self._start_ns[step] + self.length_ns[step]
        of_op = np.full(ops.process_group.size, -1)
        of_op[op[rank_rows[inside]]] = step[inside]
        self._met[ops.rank[of_op[op] >= 0]] = True
        entry = of_op[op[blamed.row]]
        entries_in_step = np.flatnonzero((entry >= 0) & (blamed.culprit >= 0))
        self._caused.add(
            entry[entries_in_step] * self._ranks + blamed.culprit[entries_in_step],
            blamed.ns[entries_in_step],
        )

    def merge(self, other: SlowSteps) -> None:
        """Add the waits of other operations in the same steps."""
        self._caused.merge(other._caused)
        self._met |= other._met

    def _caused_ns(self) -> Int:
        """Return what each culprit caused in each step, int64[steps, ranks], ns."""
        cell, ns = self._caused.sums()
        out = np.zeros(self.length_ns.size * self._ranks, np.int64)
        out[cell] = ns
        return out.reshape(self.length_ns.size, self._ranks)

    def count_steps_by_culprit(self, median_ns: float) -> dict[int, int]:
        """Count the slow steps that each rank delayed: rank -> steps.

        median_ns: length of the median step.
        """
        peer_count = self._count_others()
        out: dict[int, int] = {}
        for length_ns, caused_ns in zip(self.length_ns, self._caused_ns()):
            if length_ns < SLOW_STEP_FACTOR * median_ns:
                continue
            rank = int(np.argmax(caused_ns))
            waited_ns = caused_ns[rank] / peer_count
            if waited_ns > 0 and waited_ns >= EXPLAINED_RATIO * (length_ns - median_ns):
                out[rank] = out.get(rank, 0) + 1
        return out

    def find_culprit_per_step(self, min_ratio: float) -> dict[int, int]:
        """Return start of a step -> rank that delayed the others most in it.

        min_ratio: part of the step, at least, that the others must have waited for this rank.
        """
        peer_count = self._count_others()
        out: dict[int, int] = {}
        for start_ns, length_ns, caused_ns in zip(
            self._start_ns.tolist(), self.length_ns.tolist(), self._caused_ns()
        ):
            rank = int(np.argmax(caused_ns))
            if caused_ns[rank] >= max(min_ratio * length_ns * peer_count, 1):
                out[start_ns] = rank
        return out

    def _count_others(self) -> int:
        """Count the ranks that met in the slow steps, without the evaluated one; at least 1."""
        return max(int(np.count_nonzero(self._met)) - 1, 1)


_NONE = -1
MIN_SYNCHRONOUS_RATIO = 0.9
"""All ranks meet in every step if this part of their steps has an operation of all ranks."""


class SavingsTotals:
    """Possible savings by culprit and cause, summed over all blocks."""

    def __init__(self, job_size: Int, causes: int) -> None:
        """job_size: int64[ranks], number of ranks in the job of each rank."""
        ranks = len(job_size)
        self._ranks, self._causes, self._job_size = ranks, causes, job_size
        self.others_ns = np.zeros((ranks, causes), np.int64)
        """int64[culprit, cause], ns: of the waits blamed on it, the part that ends if it is in
        time.
        """
        self.own_ns = np.zeros((ranks, causes), np.int64)
        """int64[culprit, cause], ns: how much earlier the culprit itself would have continued."""
        self.all_ns = np.zeros((ranks, causes), np.int64)
        """int64[culprit, cause], ns: how much earlier all ranks would have left operations of all
        ranks.
        """
        self.cause_ns = np.zeros((ranks, causes), np.int64)
        """int64[rank, cause], ns: how much earlier the rank would have left operations of all
        ranks without the cause.
        """
        self.all_rank_operations = np.zeros(ranks, np.int64)
        """int64[ranks]: number of operations of all ranks of its job that the rank took part in."""
        self._culprit = np.full(ranks, _NONE)
        """The rank each rank waited for last; `_when` is the number of that operation."""
        self._when = np.full(ranks, _NONE)
        self._last_operation: dict[int, int] = {}
        """Process group -> number of its last operation."""
        self._count = 0

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add one block of operations and its blame."""
        if not ops.process_group.size:
            return
        op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
        recent_culprit = self._find_recent_culprits(ops, blamed, op)
        self._count += ops.process_group.size
        all_members = np.diff(ops.first)[op] == self._job_size[ops.rank]
        self.all_rank_operations += np.bincount(ops.rank[all_members], minlength=self._ranks)
        all_member_rows = np.flatnonzero(all_members)
        for cause in np.flatnonzero(blamed.savings_ns.any(axis=1)).tolist():
            ns = blamed.savings_ns[cause, op[all_member_rows]]
            self.cause_ns[:, cause] += np.bincount(
                ops.rank[all_member_rows], ns, self._ranks
            ).astype(np.int64)
        with_culprit = np.flatnonzero(blamed.culprit >= 0)
        if not with_culprit.size:
            return
        row, culprit, cause = (
            blamed.row[with_culprit],
            blamed.culprit[with_culprit],
            blamed.cause[with_culprit],
        )
        pair, pair_index = index_keys(op[row] * self._ranks + culprit)
        savings = np.minimum(
            blamed.ns[with_culprit], self._compute_savings(ops, recent_culprit, pair)[pair_index]
        )
        shape = self.others_ns.shape
        self.others_ns += _sum_into_table(culprit, cause, savings, shape)
        # A rank waited for through other ranks arrived last elsewhere; it continues earlier there.
        itself = np.flatnonzero(culprit == blamed.last_arrival[op[row]])
        largest = self._find_largest(pair, pair_index, cause, savings, itself)
        self.own_ns += _sum_into_table(*largest, shape)
        with_all_ranks = np.flatnonzero(np.diff(ops.first)[op[row]] == self._job_size[culprit])
        largest = self._find_largest(pair, pair_index, cause, savings, with_all_ranks)
        self.all_ns += _sum_into_table(*largest, shape)

    def merge(self, other: SavingsTotals) -> None:
        """Add the savings of later operations, with which no rank waits any more."""
        for name in ("others_ns", "own_ns", "all_ns", "cause_ns", "all_rank_operations"):
            sums = getattr(self, name)
            sums += getattr(other, name)

    def estimate_savings(self, culprit: int, causes: Sequence[int], own_ns: int, steps: int) -> int:
        """Estimate what all ranks save if the culprit is in time, ns, as far as these causes made
        it late.

        own_ns: time the culprit itself lost to the causes. steps: number of its steps.
        """
        if steps > 0 and self.all_rank_operations[culprit] >= MIN_SYNCHRONOUS_RATIO * steps:
            earlier_ns = int(self.all_ns[culprit, causes].sum())
            return (int(self._job_size[culprit]) - 1) * earlier_ns + min(own_ns, earlier_ns)
        earlier_ns = int(self.own_ns[culprit, causes].sum())
        return int(self.others_ns[culprit, causes].sum()) + min(own_ns, earlier_ns)

    def estimate_savings_without_causes(
        self, causes: Sequence[int], steps: Sequence[int]
    ) -> int | None:
        """Estimate what all ranks save if these causes made no rank late, ns.

        None if not all ranks of a job met in (nearly) all of their steps.
        """
        counts = np.asarray(steps)
        if ((self.all_rank_operations < MIN_SYNCHRONOUS_RATIO * counts) | (self._job_size < 2))[
            counts > 0
        ].any():
            return None
        return int(self.cause_ns[:, list(causes)].sum())

    def _find_largest(
        self, pair: Int, pair_index: Int, cause: Int, savings: Int, candidates: Int
    ) -> tuple[Int, Int, Int]:
        """Return culprit, cause and the largest savings of each operation.

        candidates: the entries to choose from.
        """
        largest = np.zeros(pair.size * self._causes, np.int64)
        np.maximum.at(
            largest, pair_index[candidates] * self._causes + cause[candidates], savings[candidates]
        )
        nonzero = np.flatnonzero(largest)
        return pair[nonzero // self._causes] % self._ranks, nonzero % self._causes, largest[nonzero]

    def _find_recent_culprits(self, ops: Operations, blamed: BlockBlame, op: Int) -> Int:
        """Return per row the rank waited for since the previous operation of the group, -1 =
        none."""
        main_culprit = _find_main_culprits(blamed, op.size)
        sort_key = (
            ops.rank.astype(np.uint16) if self._ranks <= 1 << 16 else ops.rank
        )  # sorts faster
        order = np.argsort(sort_key, kind="stable")  # rows of a rank stay in order of time
        rank = ops.rank[order]
        number = self._count + op[order]
        opens = np.append(True, rank[1:] != rank[:-1])
        start = np.maximum.accumulate(np.where(opens, np.arange(rank.size), 0))
        waited = main_culprit[order] != _NONE
        latest = np.maximum.accumulate(np.where(waited, np.arange(rank.size), -1))
        before = np.append(-1, latest[:-1])
        in_block = before >= start
        culprit = np.where(in_block, main_culprit[order][before], self._culprit[rank])
        when = np.where(in_block, number[before], self._when[rank])
        recent = when > self._find_previous_operations(ops)[op[order]]
        out = np.empty_like(main_culprit)
        out[order] = np.where(recent, culprit, _NONE)
        ends = np.flatnonzero(np.append(opens[1:], True))
        met = ends[latest[ends] >= start[ends]]
        self._culprit[rank[met]] = main_culprit[order][latest[met]]
        self._when[rank[met]] = number[latest[met]]
        return out

    def _find_previous_operations(self, ops: Operations) -> Int:
        """Return the number of the group's previous operation for each operation, -1 = none."""
        groups, group = np.unique(ops.process_group, return_inverse=True)
        order = np.argsort(group, kind="stable")
        number = self._count + order
        opens = np.append(True, group[order][1:] != group[order][:-1])
        carried = np.array([self._last_operation.get(label, _NONE) for label in groups.tolist()])
        previous = np.empty_like(group)
        previous[order] = np.where(opens, carried[group[order]], np.append(_NONE, number[:-1]))
        ends = np.append(opens[1:], True)
        self._last_operation.update(zip(groups.tolist(), number[ends].tolist()))
        return previous

    def _compute_savings(self, ops: Operations, recent_culprit: Int, pair: Int) -> Int:
        """Return how much earlier an operation ends if a culprit and its victims are in time.

        pair: operation * ranks + culprit.
        """
        op, culprit = np.divmod(pair, self._ranks)
        size = np.diff(ops.first)
        stay = ops.leave_ns - ops.arrive_ns
        shortest = np.minimum.reduceat(stay, ops.first[:-1])
        begin = np.cumsum(size[op]) - size[op]
        row = np.arange(int(size[op].sum())) - np.repeat(begin - ops.first[op], size[op])
        row_culprit = np.repeat(culprit, size[op])
        with_culprit = (recent_culprit[row] == row_culprit) | (ops.rank[row] == row_culprit)
        stay_of_peers = np.where(with_culprit, np.iinfo(np.int64).max, stay[row])
        return np.minimum.reduceat(stay_of_peers, begin) - shortest[op]


def _find_main_culprits(blamed: BlockBlame, rows: int) -> Int:
    """Return per row the rank that most of its wait is blamed on, -1 if it did not wait."""
    main_culprit = np.full(rows, _NONE)
    if blamed.row.size:
        begin = np.flatnonzero(np.append(True, blamed.row[1:] != blamed.row[:-1]))
        largest_ns = np.maximum.reduceat(blamed.ns, begin)
        size = np.diff(np.append(begin, blamed.row.size))
        largest = np.flatnonzero(blamed.ns == np.repeat(largest_ns, size))
        main_culprit[blamed.row[largest]] = blamed.culprit[largest]
    return main_culprit
