"""Replay the operations of all ranks without a cause (what-if), and sum the savings.

    storage 50 |== work ==|                 arrives at 150, without storage at 100
    storage 40 |== work ==|                 arrives at 140, without at 100
               |== work ==|-- waits --|     arrives at 100: all continue 50 earlier

All ranks leave an operation when the last one has arrived, without the intervals lost to the cause.
The savings of each rank accumulate. It arrives earlier by these, by what it lost to the cause
itself since its previous operation, and by the hidden cost (analysis.attribution.rank.hidden_cost).
All leave when the last has arrived; ranks that are early wait for less. If all ranks meet in one
process group nothing needs to be propagated, because they leave together. Otherwise operations that
do not depend on each other are replayed at once, level after level.

There are further columns in addition to the causes: all causes at once; no transfer; even
work (`compute_uneven_work`; with several groups: no rank has more than the lower median
of the job); and the two that the straggler slowdown S compares, both without any time
that is neither an operation nor work ("delays"): the work as it was, and balanced work:
each rank does the mean, in even parts, and ranks with less work do more; a transfer takes
as long as others of its kind.

Gaps are time of a rank for which nothing was recorded. In a pipeline they often are waits
that no operation shows, and such a wait ends when what it waits for does:

    rank 0   |======== work 45 ========|              |meet|
    rank 1   |== work 20 ==|.. gap 22 ..|              |meet|
    without the extra work of rank 0, and the gap as long as before, all meet 3 earlier, not 25

With several groups, even work and the work of single ranks are therefore replayed without
gaps, and the replay that only has no gaps is subtracted.

Noise in the data of single operations makes the savings too small: a rank with too
little recorded loss delays the others. Therefore each bin is also evaluated by the rank
that waited least, with and without the cause; the larger result is used.

Prepare a block for the replay: levels, ends of time bins, and uneven work.

It also estimates the savings of fixing one cause, without a what-if replay.

Attributed time is additive; recoverable time is not, and the two are never mixed. For a
rank that no other waits for, device time attributed to a cause was idle because of it
and nothing else at that instant; without the cause the host would have been earlier by
at least that much. So the attributed time is a lower bound of the savings, and that is
what is reported:

    production of a batch   60 read + 40 decode = 100, of which 30 hidden behind compute
    lost 70                 42 is for reading; without it the wait is 10: saves 60 >= 42

No value is reported if no device was measured (the loss itself is only an upper bound).
Where ranks wait for each other, the next late rank limits the savings: a culprit saves
the time between the next late rank and itself, a cause the time between the last rank
and the one that would be last without the cause (analysis.attribution.wait_for.totals). If ranks
do not all meet in every step, a cause saves what its culprits save individually plus
what all ranks lost in common:

    rank 0   |-- storage 20 --|== work ==|                        arrives at 120
    rank 1   |-- storage 20 --|== work ==|                        arrives at 120
    rank 2   |-- storage 50 --------------|== work ==|            arrives at 150
    rank 2 alone saves 3 * 30, all without storage 3 * 30 + 3 * 20

No value is reported if operations of ranks were not matched. A report uses this
estimate only where no what-if replay was possible (analysis.findings.report).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point, order_by_group
from clusterprof.analysis.attribution.wait_for.blame import BlockBlame
from clusterprof.analysis.attribution.wait_for.time_bins import index_keys
from clusterprof.analysis.timeline.collectives.operations import Operations, combine_labels
from clusterprof.analysis.timeline.model import Float, Int

MAX_NS = np.iinfo(np.int64).max
CLOSE_LEVELS = 4
"""Group levels within this distance count as one: groups that meet in parallel."""
BINS_PER_BLOCK = 16
"""Most time bins per block."""


def sum_by_rank(ranks: int, rank: Int, wait: Int, own_ns: Int) -> tuple[Int, Int]:
    """Sum waits and losses by rank: int64[ranks] and int64[ranks, columns], ns.

    rank, wait: int64[n]. own_ns: int64[n, columns].
    """
    waited = np.bincount(rank, wait, ranks).astype(np.int64)
    lost = np.stack([np.bincount(rank, column, ranks) for column in own_ns.T], axis=1)
    return waited, lost.astype(np.int64)


def select_operations(ops: Operations, selected: NDArray[np.bool_], rows: Int) -> Operations:
    """Return the selected operations.

    selected: bool[operations]. rows: int64[m], rows of these operations.
    """
    size = np.diff(ops.first)[selected]
    return replace(
        ops,
        first=np.append(0, np.cumsum(size)),
        process_group=ops.process_group[selected],
        operation=ops.operation[selected],
        bytes=ops.bytes[selected],
        complete=ops.complete[selected],
        **{
            name: getattr(ops, name)[rows]
            for name in ("rank", "arrive_ns", "leave_ns", "blocked_ns", "source")
        },
        on_device=ops.on_device[rows] if ops.on_device.size else ops.on_device,
        row_bytes=ops.row_bytes[:0],
    )


def compute_uneven_work(work_deficit: Int, ops: Operations, job: Int) -> Int:
    """Compute by how much the work of each row deviates from even work: int64[n], ns.

    work_deficit: int64[n], how much less than the last arrival each rank had worked.
    Variation between operations is split evenly; a rank with permanently more work gets the
    lower median. Negative where a rank would get more work. job: int64[ranks].
    """
    size = np.diff(ops.first)
    op = np.repeat(np.arange(size.size), size)
    difference = np.add.reduceat(work_deficit, ops.first[:-1])[op] / size[op] - work_deficit
    rows = np.bincount(ops.rank, minlength=job.size)
    level = np.bincount(ops.rank, difference, job.size) / np.maximum(rows, 1)
    median_level = np.zeros(job.size)
    for number in np.unique(job[ops.rank]).tolist():
        rows_of_job = np.flatnonzero((job == number) & (rows > 0))
        median_level[rows_of_job] = np.sort(level[rows_of_job])[(rows_of_job.size - 1) // 2]
    return np.rint(difference - median_level[ops.rank]).astype(np.int64)


def compute_usual_work(ops: Operations, work: Int) -> Float:
    """Compute the mean work of a row's rank between operations of the same groups and kinds.

    work: int64[n], ns before each row. Returns float64[n], ns: mean over rows of the rank
    whose operation and previous operation have the same process group and kind as here.
    """
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    kind = combine_labels(ops.process_group[op], ops.operation[op])
    order = np.argsort(ops.rank, kind="stable")
    before = np.zeros_like(kind)
    before[order[1:]] = np.where(ops.rank[order[1:]] == ops.rank[order[:-1]], kind[order[:-1]], 0)
    _, which = np.unique(combine_labels(ops.rank, before, kind), return_inverse=True)
    mean: Float = np.bincount(which, work) / np.bincount(which)
    return mean[which]


def compute_transfer_excess(ops: Operations, transfer_ns: Int) -> Int:
    """Compute how much longer than the median of its kind each transfer took.

    transfer_ns: int64[n]. Returns int64[operations], ns. A rank that only issued an operation
    shows nothing of its transfer.
    """
    shown_ns = np.where(ops.blocked_ns > 0, transfer_ns, MAX_NS)
    shortest_ns = np.minimum.reduceat(shown_ns, ops.first[:-1])
    shortest_ns[shortest_ns == MAX_NS] = 0
    _, which = np.unique(
        combine_labels(ops.operation, np.diff(ops.first), ops.bytes), return_inverse=True
    )
    order = np.lexsort((shortest_ns, which))
    count = np.bincount(which)
    median = shortest_ns[order[np.cumsum(count) - count + (count - 1) // 2]]
    return np.asarray(shortest_ns - median[which], np.int64)


def find_bin_ends(ops: Operations, level: Int) -> frozenset[int]:
    """Find the levels after which a time bin ends.

    These are levels where ranks met in process groups, if they do not only send to each
    other, and the last level. level: int64[operations].
    """
    last = int(level.max())
    group_levels = np.unique(level[~is_point_to_point(ops.operation)])
    # Of several close together take the last: groups that meet in parallel.
    group_levels = (
        group_levels[np.append(np.diff(group_levels) > CLOSE_LEVELS, True)]
        if group_levels.size
        else np.arange(last + 1)
    )
    bin_ends = group_levels[
        np.unique(np.linspace(0, group_levels.size, BINS_PER_BLOCK + 1)[1:].astype(np.int64) - 1)
    ]
    return frozenset([*bin_ends.tolist(), last])


def assign_dependency_levels(ops: Operations, ranks: int) -> Int:
    """Assign each operation to the first level after all operations it waits for.

    Returns int64[operations].
    """
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    order = order_by_group(ops.rank, ranks)
    before = np.full(op.size, -1)  # the operation that the rank left before
    of_same_rank = np.flatnonzero(ops.rank[order[1:]] == ops.rank[order[:-1]])
    before[order[of_same_rank + 1]] = op[order[of_same_rank]]
    # Most members come from the same few operations.
    starts = np.append(True, (op[1:] != op[:-1]) | (before[1:] != before[:-1]))
    begins = np.searchsorted(np.flatnonzero(starts), ops.first).tolist()
    waited_for = (before[starts] + 1).tolist()
    levels = [-1]
    for begin, end in pairwise(begins):
        levels.append(1 + max(map(levels.__getitem__, waited_for[begin:end])))
    return np.array(levels[1:], np.int64)


MAX_LEVELS = 1 << 11
"""Fronts that are replayed in full; beyond that fewer blocks are: a part of the steps is
enough.
"""
MIN_COMMON_GROUP_RATIO = 0.9
"""All ranks meet in one process group if this part of the operations includes them all."""
MAX_SAVINGS_BINS = 512
MAX_CULPRITS = 8
"""Ranks and causes that are each replayed alone, with several groups."""
EXTRA_COLUMNS = 7 + MAX_CULPRITS
ALL, TRANSFER, WORK, GAPS, DELAYS, BALANCED, EVEN = range(-EXTRA_COLUMNS, -MAX_CULPRITS)
"""Columns after those of the causes. From EVEN on, WORK without gaps, for several groups only."""
CULPRITS = -MAX_CULPRITS
"""First of the columns of single ranks."""


@dataclass(frozen=True, slots=True)
class WhatIfSavings:
    """Savings of a job in a what-if replay; n time bins."""

    length_ns: Int
    """Duration of each bin, ns."""
    savings_ns: Int
    """int64[n, causes + EXTRA_COLUMNS], ns."""
    skipped: bool
    """True if parts of the run were not replayed."""
    several_groups: bool
    """True if ranks met in several process groups: then sums over bins measure the extra work."""
    culprits: tuple[tuple[int, int], ...] = ()
    """Rank, and cause or WORK, of each column from CULPRITS on; WORK is replayed without gaps."""


class WhatIfReplay:
    """Replays the operations of all jobs without each cause; ranks as in the blame."""

    def __init__(self, job: Sequence[int], size: Int, causes: int) -> None:
        """job: job of each rank. size: number of ranks in the job of each rank. causes: number of
        columns.
        """
        ranks = len(job)
        self._job, self._size = np.asarray(job, np.int64), size
        self._at_leave = np.zeros((ranks, causes + 2), np.int64)
        """Time each rank had spent, hidden cost included, when it left its last operation."""
        self._work = np.zeros(ranks, np.int64)
        self._savings = np.zeros((ranks, causes + EXTRA_COLUMNS), np.int64)
        self._last_leave_ns = np.full(ranks, -1, np.int64)
        """When each rank left its last operation, ns."""
        self.from_ns = self._last_leave_ns.copy()
        """Begin of the replay of each rank, -1 = never; of ranks that always meet only some are
        recorded.
        """
        self._culprits: tuple[tuple[int, int], ...] | None = None
        self._levels = self._blocks = self._next = 0
        self._levels_before = 0
        self._skipped = False
        self._bins: dict[int, list[tuple[int, Int]]] = {}
        """Job -> (length, savings) of time bins."""
        self._merged: dict[int, tuple[bool, bool, tuple[tuple[int, int], ...]]] = {}
        """Job -> parts were skipped, several groups, culprits; for what was merged."""

    def add(
        self,
        ops: Operations,
        blamed: BlockBlame,
        at_arrive: Int,
        at_leave: Int,
        work: tuple[Int, Int],
        work_causes: Sequence[int],
    ) -> None:
        """Replay a block of operations.

        at_arrive, at_leave: int64[n, causes + 2], ns spent on arrival and on leave, hidden cost
        included; the last columns are all causes and gaps. work: int64[n] each, likewise.
        work_causes: causes of `blamed` that stand for work.
        """
        if not ops.process_group.size:
            return
        transfer_ns = blamed.transfer_ns
        work_entries = np.isin(blamed.cause, list(work_causes))
        work_deficit = np.bincount(
            blamed.row[work_entries], blamed.ns[work_entries], ops.rank.size
        ).astype(np.int64)
        size = np.diff(ops.first)
        # Two stages of a pipeline are all ranks, too, but the messages between them are a chain.
        is_common = size == self._size[ops.rank[ops.first[:-1]]]
        is_common &= ~is_point_to_point(ops.operation)
        if is_common.mean() >= MIN_COMMON_GROUP_RATIO:
            common_rows = np.flatnonzero(np.repeat(is_common, size))
            if not is_common.all():
                at_arrive, at_leave, transfer_ns, work_deficit = (
                    at_arrive[common_rows],
                    at_leave[common_rows],
                    transfer_ns[common_rows],
                    work_deficit[common_rows],
                )
                work = work[0][common_rows], work[1][common_rows]
                ops = select_operations(ops, is_common, common_rows)
            self._replay_common_group(
                ops,
                transfer_ns,
                work_deficit,
                self._compute_lost_since(ops, at_arrive, at_leave, *work),
            )
        else:
            own_ns = self._compute_lost_since(ops, at_arrive, at_leave, *work)
            self._replay_levels(ops, transfer_ns, np.ascontiguousarray(own_ns))
        self._blocks += 1

    def begin(
        self, rank: Int, at_leave: Int, work: Int, leave_ns: Int, culprits: tuple | None
    ) -> None:
        """Begin after operations that are not replayed here, the last of which all ranks left.

        rank: int64[n]. at_leave, work: what each rank had spent then, as in `add`. leave_ns: when
        it left, int64[n]. culprits: those that the replay of the operations before has chosen.
        """
        self._at_leave[rank], self._work[rank] = at_leave, work
        self._last_leave_ns[rank] = leave_ns
        self._culprits = culprits or ()
        self._levels_before = MAX_LEVELS

    def merge(self, other: WhatIfReplay) -> None:
        """Add the savings of later operations, or of other jobs."""
        for job, bins in other._bins.items():
            own_bins = self._bins.setdefault(job, [])
            own_bins += bins
            _combine_bins(own_bins)
            skipped, several_groups, culprits = self._merged.get(job, (False, False, ()))
            self._merged[job] = (
                skipped or other._skipped,
                several_groups or other._levels > 0,
                culprits or other._culprits or (),
            )
        self.from_ns = np.where(self.from_ns < 0, other.from_ns, self.from_ns)

    @property
    def culprits(self) -> tuple[tuple[int, int], ...] | None:
        """Rank, and cause or WORK, that are each replayed alone; None = not chosen yet."""
        return self._culprits

    def get_savings(self) -> dict[int, WhatIfSavings]:
        """Return the savings of each job."""
        return {
            job: WhatIfSavings(
                np.array([length_ns for length_ns, _ in bins], np.int64),
                np.array([savings for _, savings in bins], np.int64),
                *self._merged.get(job, (self._skipped, self._levels > 0, self._culprits or ())),
            )
            for job, bins in self._bins.items()
        }

    def _compute_lost_since(
        self, ops: Operations, at_arrive: Int, at_leave: Int, work: Int, worked: Int
    ) -> Int:
        """Compute the time that each rank lost since its previous operation, ns.

        int64[n, causes + EXTRA_COLUMNS].
        """
        n = ops.rank.size
        order = order_by_group(ops.rank, self._job.size)
        rank = ops.rank[order]
        starts = np.append(True, rank[1:] != rank[:-1])
        previous = np.empty_like(order)
        previous[order[1:]] = order[:-1]
        previous[order[0]] = 0  # of the first row of a rank it is replaced
        heads, ends = order[starts], order[np.append(starts[1:], True)]
        head_rank, end_rank = ops.rank[heads], ops.rank[ends]

        def since(spent: Int, amount_at_leave: Int, latest_amount: Int) -> Int:
            before = amount_at_leave[previous]
            before[heads] = latest_amount[head_rank]
            latest_amount[end_rank] = amount_at_leave[ends]
            return np.maximum(spent - before, 0)

        columns = at_arrive.shape[1] - 2
        own_ns = np.zeros((columns + EXTRA_COLUMNS, n), np.int64).T
        for column in range(columns + 2):
            lost = since(at_arrive[:, column], at_leave[:, column], self._at_leave[:, column])
            own_ns[:, column if column <= columns else GAPS] = lost
        own_ns[:, DELAYS] = own_ns[:, columns] + own_ns[:, GAPS]
        own_ns[:, WORK] = since(work, worked, self._work)
        return own_ns

    def _replay_common_group(
        self, ops: Operations, transfer_ns: Int, work_deficit: Int, own_ns: Int
    ) -> None:
        """Replay jobs with all ranks in one process group, one operation at a time."""
        first = ops.first[:-1]
        stay = ops.leave_ns - ops.arrive_ns
        size = np.diff(ops.first)
        mean_work = np.repeat(np.add.reduceat(own_ns[:, WORK], first) // size, size)
        own_ns[:, BALANCED] = own_ns[:, DELAYS] + own_ns[:, WORK] - mean_work
        own_ns[:, WORK] = compute_uneven_work(work_deficit, ops, self._job)
        own_ns[:, TRANSFER] = 0
        savings = np.zeros((first.size, own_ns.shape[1]), np.int64)
        savings[:, :EVEN] = -np.minimum.reduceat(stay, first)[:, None] - np.maximum.reduceat(
            -stay[:, None] - own_ns[:, :EVEN], first
        )
        savings[:, TRANSFER] = np.minimum.reduceat(transfer_ns, first)
        np.maximum(savings, 0, out=savings)
        savings[:, BALANCED] += compute_transfer_excess(ops, transfer_ns)
        head = ops.rank[first]
        wait = ops.blocked_ns - transfer_ns
        for job in np.unique(self._job[head]).tolist():
            job_ops = np.flatnonzero(self._job[head] == job)
            cuts = np.unique(np.linspace(0, job_ops.size, BINS_PER_BLOCK + 1).astype(np.int64))
            sums = np.add.reduceat(savings[job_ops], cuts[:-1], axis=0)
            bin_of_operation = np.full(first.size, -1)
            bin_of_operation[job_ops] = np.repeat(np.arange(cuts.size - 1), np.diff(cuts))
            least = self._compute_lower_bounds(
                np.repeat(bin_of_operation, size), ops.rank, wait, own_ns[:, :GAPS]
            )
            sums[:, :GAPS] = np.maximum(sums[:, :GAPS], least)
            head_rank = ops.rank[first[job_ops[0]]]
            leave = ops.leave_ns[first[job_ops]]
            begin_ns = self._last_leave_ns[head_rank]
            bin_ends = leave[cuts[1:] - 1]
            if begin_ns < 0:
                begin_ns = self.from_ns[head_rank] = leave[0]
            begin = np.append(begin_ns, bin_ends[:-1])
            self._append_bins(job, bin_ends - begin, sums)
            self._last_leave_ns[head_rank] = bin_ends[-1]

    def _compute_lower_bounds(self, time_bin: Int, rank: Int, wait: Int, own_ns: Int) -> Int:
        """Return the savings of bins by the rank that waited least, with and without the cause.

        time_bin: int64[n], -1 = none. rank, wait: int64[n]. own_ns: int64[n, columns]. Returns
        int64[bins, columns], ns.
        """
        ranks, bins = self._job.size, int(time_bin.max()) + 1
        rows = slice(None) if (time_bin >= 0).all() else np.flatnonzero(time_bin >= 0)
        cell, cell_index = index_keys(time_bin[rows] * ranks + rank[rows])
        starts = np.searchsorted(cell, np.arange(bins) * ranks)
        waited = np.bincount(cell_index, wait[rows], cell.size).astype(np.int64)
        least_waited = np.minimum.reduceat(waited, starts)
        out = np.empty((bins, own_ns.shape[1]), np.int64)
        for column, ns in enumerate(own_ns.T):
            lost = np.bincount(cell_index, ns[rows], cell.size).astype(np.int64)
            out[:, column] = np.minimum.reduceat(waited + lost, starts) - least_waited
        return out

    def _append_bins(self, job: int, length: Int, savings: Int) -> None:
        bins = self._bins.setdefault(job, [])
        bins += [(int(ns), row) for ns, row in zip(length, savings) if ns >= 0]
        _combine_bins(bins)

    # --- several process groups

    def _begin_new_ranks(self, ops: Operations) -> None:
        """Set the begin of ranks without an operation so far to their first arrival."""
        rows = np.flatnonzero(self._last_leave_ns[ops.rank] < 0)[::-1]
        # a rank's first row is assigned last
        self._last_leave_ns[ops.rank[rows]] = ops.arrive_ns[rows]
        rows = rows[self.from_ns[ops.rank[rows]] < 0]
        self.from_ns[ops.rank[rows]] = ops.arrive_ns[rows]

    def _replay_levels(self, ops: Operations, transfer_ns: Int, own_ns: Int) -> None:
        if self._blocks < self._next:
            self._skipped = True
            self._savings[:] = 0
            self._last_leave_ns[:] = -1
            return
        self._even_work(ops, own_ns)
        level = assign_dependency_levels(ops, self._job.size)
        last = find_bin_ends(ops, level)
        order = np.argsort(level, kind="stable")
        size = np.diff(ops.first)[order]
        rows = np.repeat(ops.first[:-1][order] - np.append(0, np.cumsum(size)[:-1]), size)
        rows += np.arange(rows.size)
        stay, blocked = (ops.leave_ns - ops.arrive_ns)[rows], ops.blocked_ns[rows]
        # A rank that waited for most of its stay waited for all of it; samples may show less.
        blocked = np.where(2 * blocked >= stay, stay, blocked)
        beyond = compute_transfer_excess(ops, transfer_ns)[order]
        transfer_ns, rank, own_ns = transfer_ns[rows], ops.rank[rows], own_ns[rows]
        leave = ops.leave_ns[rows]
        begins = np.append(0, np.cumsum(size))
        cuts = np.searchsorted(level[order], np.arange(int(level[-1]) + 2))
        self._begin_new_ranks(ops)
        savings_before = self._savings.copy()
        times_before = self._last_leave_ns.copy()
        latest = self._last_leave_ns.copy()
        bin_begin = 0
        own_ns[:, TRANSFER] = transfer_ns
        for number in range(cuts.size - 1):
            low, high = cuts[number], cuts[number + 1]
            span = slice(int(begins[low]), int(begins[high]))
            first = begins[low:high] - begins[low]
            members, stays = rank[span], stay[span]
            rank_savings = self._savings[members] + own_ns[span]
            rank_savings[:, TRANSFER] -= own_ns[span, TRANSFER]  # is in the operation itself
            shortest = np.minimum.reduceat(stays, first)
            savings = np.maximum.reduceat(-stays[:, None] - rank_savings, first)
            savings = -shortest[:, None] - savings
            savings[:, TRANSFER] += np.minimum.reduceat(transfer_ns[span], first)
            savings[:, BALANCED] += beyond[low:high]
            of_op = np.repeat(savings, size[low:high], axis=0)
            self._savings[members] = np.minimum(rank_savings + blocked[span][:, None], of_op)
            latest[members] = leave[span]
            if number in last:
                bin_rows = slice(bin_begin, span.stop)
                since = sum_by_rank(
                    self._job.size,
                    rank[bin_rows],
                    blocked[bin_rows] - transfer_ns[bin_rows],
                    own_ns[bin_rows],
                )
                self._append_front_bin(savings_before, times_before, latest, *since)
                bin_begin = span.stop
                savings_before, times_before = self._savings.copy(), latest.copy()
        self._last_leave_ns = latest
        self._levels += cuts.size - 1
        self._next = self._blocks + 1 + (self._levels + self._levels_before) // MAX_LEVELS

    def _append_front_bin(
        self, savings_before: Int, times_before: Int, latest: Int, waited: Int, own_ns: Int
    ) -> None:
        """Append a bin with the mean savings of each job's ranks since the previous bin."""
        progressed = (times_before >= 0) & (latest > times_before)
        for job in np.unique(self._job[progressed]).tolist():
            members = progressed & (self._job == job)
            grown = (self._savings[members] - savings_before[members]).mean(axis=0).astype(np.int64)
            least = (waited[members, None] + own_ns[members, :GAPS]).min(axis=0) - waited[
                members
            ].min()
            # None with gaps, which are waits, or where ranks with less work get more.
            grown[:GAPS] = np.maximum(grown[:GAPS], least)
            length = int((latest[members] - times_before[members]).mean())
            self._append_bins(job, np.array([length]), grown[None])

    def _even_work(self, ops: Operations, own_ns: Int) -> None:
        """Reduce the work column to work beyond the lower median of the job, and balance the other
        one.

        Balanced is the work beyond a rank's part of the mean, per usual work between two
        operations.
        """
        total = np.bincount(ops.rank, own_ns[:, WORK], self._job.size)
        part, mean = np.zeros(self._job.size), np.ones(self._job.size)
        for job in np.unique(self._job[ops.rank]).tolist():
            ranks_of_job = np.flatnonzero((self._job == job) & (total > 0))
            if not ranks_of_job.size:  # all of its time was in operations
                continue
            usual = np.sort(total[ranks_of_job])[(ranks_of_job.size - 1) // 2]
            part[ranks_of_job] = np.maximum(1.0 - usual / total[ranks_of_job], 0.0)
            mean[ranks_of_job] = total[ranks_of_job].mean() / total[ranks_of_job]
        shared = compute_usual_work(ops, own_ns[:, WORK]) * mean[ops.rank]
        own_ns[:, BALANCED] = own_ns[:, DELAYS] + np.rint(own_ns[:, WORK] - shared).astype(np.int64)
        own_ns[:, WORK] = np.rint(own_ns[:, WORK] * part[ops.rank]).astype(np.int64)
        own_ns[:, EVEN] = own_ns[:, GAPS] + own_ns[:, WORK]
        if self._culprits is None:
            self._culprits = self._choose_culprits(ops, own_ns)
        for culprit_column, (rank, column) in enumerate(self._culprits, CULPRITS):
            own_ns[:, culprit_column] = np.where(ops.rank == rank, own_ns[:, column], 0)
            own_ns[:, culprit_column] += own_ns[:, GAPS] if column == WORK else 0

    def _choose_culprits(self, ops: Operations, own_ns: Int) -> tuple[tuple[int, int], ...]:
        """Choose the ranks and causes that lost most in the first block, work included."""
        columns = [*range(own_ns.shape[1] - EXTRA_COLUMNS), WORK]
        lost = sum_by_rank(self._job.size, ops.rank, ops.rank, own_ns[:, columns])[1]
        largest = np.argsort(-lost, axis=None, kind="stable")[:MAX_CULPRITS]
        pairs = zip(*np.unravel_index(largest, lost.shape))
        return tuple((int(rank), columns[c]) for rank, c in pairs if lost[rank, c] > 0)


def _combine_bins(bins: list[tuple[int, Int]]) -> None:
    """Combine neighboring bins until there are not too many."""
    while len(bins) > MAX_SAVINGS_BINS:
        even = len(bins) // 2 * 2
        neighbors = zip(bins[:even:2], bins[1:even:2])
        bins[:] = [
            *((first[0] + second[0], first[1] + second[1]) for first, second in neighbors),
            *bins[even:],
        ]


def compute_recoverable_ns(attributed_ns: int, upper_bound: bool, has_peers: bool) -> int | None:
    """Return the device time that fixing only this cause saves at least, ns; None = unknown."""
    if upper_bound or has_peers:
        return None
    return attributed_ns


def compute_common_ns(own_ns: Sequence[int]) -> int:
    """Return the sum of what all ranks lost in common: ranks times the smallest loss, ns.

    Assumes that it was lost in the same steps; otherwise the ranks waited for each other
    instead.
    """
    return len(own_ns) * min(own_ns, default=0)
