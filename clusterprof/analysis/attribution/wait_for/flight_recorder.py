"""Compare our split of operations into waits and transfers with PyTorch's flight recorder.

The flight recorder notes when each rank issued each operation, by the wall clock. Nothing of ours
takes part in that: it is a second source for who came last and how long the others waited.

    rank 0   issued |====== blocked: waits ======|== transfer ==|
    rank 1                                issued |== blocked ===|
                                                 last issue, by its dump

A rank may issue an operation and work on, as a backward pass does while its first buckets move. The
others wait for it until it waits as well, which our spans say: `behind_ns`.

With gloo the dump (PyTorch 2.13) holds no start and no end, so a split has the time for which a
rank was blocked from our spans, and the moment at which the wait ends from the dump. An operation
and an entry of its kind belong together if the entry was issued while the operation ran, or last
before it where our operation begins later than its call: one of another thread begins where the
training thread waits. The gradients of DistributedDataParallel are one operation of ours and many
of the dump: the last bucket counts, without which no rank goes on.

Left out: operations whose times are a device's, sends and receives, and operations with a member
without a dump.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point
from clusterprof.analysis.attribution.wait_for.blame import BlockBlame
from clusterprof.analysis.importers.nccl.flight_recorder import Dump, find_operation
from clusterprof.analysis.timeline.collectives.matching import ClockOffset, RankEntry
from clusterprof.analysis.timeline.collectives.operations import Operations, combine_labels
from clusterprof.analysis.timeline.model import Int
from clusterprof.probe import layout
from clusterprof.units import format_quantity

MAX_DIFFERENCE_RATIO = 0.03
"""Of the compared time: a larger difference of a rank's waits, or more waits for another rank than
here, is reported as a disagreement. Both sources have errors of microseconds per operation."""
_MIN_BEHIND_RATIO = 0.01
_MAX_NAMED_RANKS = 4
_NO_ENTRY = -1
_NOT_JOINED = (
    "PyTorch's flight recorder: its entries could not be joined with the operations here; the wall"
    " clock may have been set while the job ran, or jobs with equal ranks were recorded together"
)


@dataclass(frozen=True, slots=True)
class RankClock:
    """A rank that has operations, and its clock."""

    entry: RankEntry
    wall_minus_own_ns: int
    """How far the wall clock of its node was ahead of the node's own clock."""
    first_ns: int
    last_ns: int
    """Its first and last record, on its own clock."""


@dataclass(frozen=True, slots=True)
class IssuedOperations:
    """What the dump of one rank says: k collective operations in the order of their issue."""

    created_ns: Int
    """int64[k], ns on the rank's own clock, ascending."""
    key: Int
    """int64[k]: number of the operation over all ranks."""
    operation: Int
    """int64[k]: kind (`layout.ALL_REDUCE` and others)."""
    clock_offset: ClockOffset
    global_rank: int


@dataclass(frozen=True, slots=True)
class IssueTable:
    """All dumps of a job's ranks, joined by process group and number: m operations."""

    by_rank: Mapping[int, IssuedOperations]
    """By the number of the process over all jobs."""
    members: Int
    """int64[m]: number of ranks whose dump has the operation."""
    last_ns: Int
    """int64[m]: when the last of them issued it, ns on the common clock."""
    last_rank: Int
    """int64[m]: the rank that did."""


def build_issue_table(dumps: Sequence[Dump], ranks: Sequence[RankClock]) -> IssueTable | None:
    """Join the dumps of several ranks; None if fewer than two ranks have one.

    A dump belongs to the process of its rank that lived while its operations were issued. If
    several did, as where two jobs were recorded together, the dump is left out.
    """
    keys: dict[tuple[int, str, int], int] = {}
    by_rank: dict[int, IssuedOperations] = {}
    for dump in dumps:
        rows = sorted(
            (entry.created_ns, entry.group, entry.number, find_operation(entry.name))
            for entry in dump.entries
            if not entry.message and entry.created_ns is not None and entry.number > 0
        )
        owners = [rank for rank in ranks if _is_owner(rank, dump.rank, [row[0] for row in rows])]
        if len(owners) != 1:
            continue
        owner = owners[0]
        numbers = [
            keys.setdefault((owner.entry.job, group, number), len(keys))
            for _, group, number, _ in rows
        ]
        by_rank[owner.entry.rank] = IssuedOperations(
            np.array([row[0] for row in rows], np.int64) - owner.wall_minus_own_ns,
            np.array(numbers, np.int64),
            np.array([row[3] for row in rows], np.int64),
            owner.entry.clock_offset,
            owner.entry.global_rank,
        )
    return _join_ranks(by_rank, len(keys)) if len(by_rank) > 1 else None


def _is_owner(rank: RankClock, number: int, created_ns: Sequence[int]) -> bool:
    if rank.entry.global_rank != number or not created_ns:
        return False
    middle_ns = created_ns[len(created_ns) // 2] - rank.wall_minus_own_ns
    return rank.first_ns <= middle_ns <= rank.last_ns


def _join_ranks(by_rank: Mapping[int, IssuedOperations], operations: int) -> IssueTable:
    members = np.zeros(operations, np.int64)
    last_ns = np.full(operations, np.iinfo(np.int64).min)
    last_rank = np.full(operations, -1, np.int64)
    for rank, issued in sorted(by_rank.items()):
        members[issued.key] += 1
        common_ns = issued.created_ns + _compute_offset_ns(issued.clock_offset, issued.created_ns)
        is_later = common_ns > last_ns[issued.key]
        last_ns[issued.key[is_later]] = common_ns[is_later]
        last_rank[issued.key[is_later]] = rank
    return IssueTable(by_rank, members, last_ns, last_rank)


def _compute_offset_ns(offset: ClockOffset, t_ns: Int) -> Int:
    """Compute what to add to times of a rank's clock, int64[n], ns."""
    drift_ns = np.rint((t_ns - offset.since_ns) * offset.drift).astype(np.int64)
    return drift_ns + offset.shift_ns


class FlightRecorderComparison:
    """Sums over all operations that both sources have; integers, so that they can be merged."""

    def __init__(self, table: IssueTable, ranks: int) -> None:
        """Start without operations; ranks: number of processes over all jobs."""
        self._table = table
        self.global_rank = {rank: issued.global_rank for rank, issued in table.by_rank.items()}
        """Rank number within its job, by process with a dump."""
        self.operations = 0
        """Number of operations that were compared."""
        self.covered_ns = 0
        """Time in operations all of whose members have a dump that reaches back so far, ns."""
        self.wait_ns = np.zeros((2, ranks), np.int64)
        """Waits until the last rank came: by the dumps, and by our spans. int64[2, ranks], ns."""
        self.blocked_ns = np.zeros(ranks, np.int64)
        """int64[ranks], ns: time in operations, of which the rest was transfer."""
        self.behind_ns = 0
        """Waits by the dumps after the last rank had issued the operation, ns: it worked on."""
        self.same_last_ns = 0
        """Waits by the dumps in operations where both sources name one last rank, ns."""
        self.extent_ns = np.array(
            [[np.iinfo(np.int64).max] * ranks, [np.iinfo(np.int64).min] * ranks], np.int64
        )
        """int64[2, ranks]: first arrival and last leave, ns on the rank's clock."""
        self._left_ns: dict[tuple[int, int], int] = {}  # by rank, and label of group and kind

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Compare one block of operations; blamed: the waits that were found in them."""
        size = np.diff(ops.first)
        op = np.repeat(np.arange(size.size), size)
        key, is_covered = self._find_entries(ops, op)
        first_key = key[ops.first[:-1]]
        is_joined = np.logical_and.reduceat(key == first_key[op], ops.first[:-1])
        is_joined &= ops.complete & (size > 1) & (first_key != _NO_ENTRY)
        is_joined[is_joined] = self._table.members[first_key[is_joined]] == size[is_joined]
        is_covered &= ops.complete & (size > 1)
        self.covered_ns += int(ops.blocked_ns[is_covered[op]].sum())
        self.operations += int(np.count_nonzero(is_joined))
        rows = np.flatnonzero(is_joined[op])
        rank, arrive_ns = ops.rank[rows], ops.arrive_ns[rows]
        for number in np.unique(rank).tolist():
            rank_rows = np.flatnonzero(rank == number)
            offset = self._table.by_rank[number].clock_offset
            arrive_ns[rank_rows] += _compute_offset_ns(offset, arrive_ns[rank_rows])
        begin_ns = arrive_ns + (ops.leave_ns - ops.blocked_ns - ops.arrive_ns)[rows]
        blocked_ns = ops.blocked_ns[rows]
        last_ns, last_rank = self._table.last_ns[key[rows]], self._table.last_rank[key[rows]]
        issued_ns = np.clip(last_ns - begin_ns, 0, blocked_ns)
        last_arrive_ns = np.zeros(size.size, np.int64)
        last_arrive_ns[op[rows[rank == last_rank]]] = arrive_ns[rank == last_rank]
        wait_end_ns = np.maximum(last_ns, last_arrive_ns[op[rows]])
        wait_ns = np.clip(wait_end_ns - begin_ns, 0, blocked_ns)
        self.behind_ns += int((wait_ns - issued_ns).sum())
        np.add.at(self.wait_ns[0], rank, wait_ns)
        np.add.at(self.wait_ns[1], rank, blocked_ns - blamed.transfer_ns[rows])
        np.add.at(self.blocked_ns, rank, blocked_ns)
        np.minimum.at(self.extent_ns[0], rank, ops.arrive_ns[rows])
        np.maximum.at(self.extent_ns[1], rank, ops.leave_ns[rows])
        is_same = last_rank == blamed.last_arrival[op[rows]]
        self.same_last_ns += int(wait_ns[is_same].sum())

    def merge(self, other: FlightRecorderComparison) -> None:
        """Add the sums of later operations, or of other jobs."""
        self.operations += other.operations
        self.covered_ns += other.covered_ns
        self.wait_ns += other.wait_ns
        self.blocked_ns += other.blocked_ns
        self.behind_ns += other.behind_ns
        self.same_last_ns += other.same_last_ns
        self.extent_ns[0] = np.minimum(self.extent_ns[0], other.extent_ns[0])
        self.extent_ns[1] = np.maximum(self.extent_ns[1], other.extent_ns[1])

    def list_difference_ratios(self) -> dict[int, float]:
        """Return how far the waits of each compared process differ, as a part of its time."""
        length_ns = self.extent_ns[1] - self.extent_ns[0]
        difference_ns = np.abs(self.wait_ns[0] - self.wait_ns[1])
        compared = np.flatnonzero(self.blocked_ns)
        return {rank: float(difference_ns[rank] / length_ns[rank]) for rank in compared.tolist()}

    def _find_entries(self, ops: Operations, op: Int) -> tuple[Int, Int]:
        """Find the entry of each row, _NO_ENTRY = none, and which operations dumps reach back to.

        op: int64[n], operation of each row. Returns int64[n], bool[operations].
        """
        key = np.full(op.size, _NO_ENTRY, np.int64)
        is_covered = np.zeros(op.size, np.bool_)
        kind = ops.operation & layout.OPERATION_MASK
        is_usable = ~is_point_to_point(kind)[op]
        if ops.on_device.size:
            is_usable &= ~ops.on_device
        for rank, issued in self._table.by_rank.items():
            rows = np.flatnonzero(ops.rank == rank)
            if not rows.size:
                continue
            label = combine_labels(ops.process_group[op[rows]], kind[op[rows]])
            for value in np.unique(label).tolist():
                rows_of_label = rows[label == value]
                key[rows_of_label] = self._match_rows(
                    rank,
                    value,
                    int(kind[op[rows_of_label[0]]]),
                    ops.arrive_ns[rows_of_label],
                    ops.leave_ns[rows_of_label],
                )
            is_covered[rows] = ops.leave_ns[rows] >= issued.created_ns[0]
        key[~is_usable] = _NO_ENTRY
        covered = np.logical_and.reduceat(is_covered & is_usable, ops.first[:-1])
        return key, covered

    def _match_rows(self, rank: int, label: int, kind: int, arrive_ns: Int, leave_ns: Int) -> Int:
        """Find the entry of each operation of one rank, group and kind.

        label: of group and kind. arrive_ns, leave_ns: int64[n]. Returns int64[n], keys; _NO_ENTRY
        where none fits.
        """
        issued = self._table.by_rank[rank]
        where = (rank, label)
        latest_ns = np.maximum.accumulate(np.append(self._left_ns.get(where, 0), leave_ns))
        self._left_ns[where] = int(latest_ns[-1])
        expected = layout.ALL_REDUCE if kind == layout.GRADIENTS else kind
        rows = np.flatnonzero((issued.operation == expected) | (kind == layout.OTHER_OPERATION))
        if not rows.size:
            return np.full(arrive_ns.size, _NO_ENTRY, np.int64)
        created_ns = issued.created_ns[rows]
        first_within = np.searchsorted(created_ns, arrive_ns, side="left")
        last_within = np.searchsorted(created_ns, leave_ns, side="right") - 1
        is_begun = (first_within > last_within) | (kind == layout.GRADIENTS)
        position = np.clip(np.where(is_begun, last_within, first_within), 0, rows.size - 1)
        fits = (created_ns[position] <= leave_ns) & (created_ns[position] >= latest_ns[:-1])
        fits |= ~is_begun
        return np.where(fits, issued.key[rows[position]], _NO_ENTRY)


def describe_comparison(
    comparison: FlightRecorderComparison | None, dumps: Sequence[Dump]
) -> tuple[str, ...]:
    """Describe how far both sources agree, in notes of the report; empty without dumps.

    comparison: None if the dumps could not be joined.
    """
    if sum(any(not entry.message for entry in dump.entries) for dump in dumps) < 2:
        return ()
    if comparison is None or not comparison.operations:
        return (_NOT_JOINED,)
    recorder_waits_ns, clusterprof_waits_ns = comparison.wait_ns
    ratios = comparison.list_difference_ratios()
    blocked_ns, behind_ns = int(comparison.blocked_ns.sum()), comparison.behind_ns
    recorder_ns, clusterprof_ns = int(recorder_waits_ns.sum()), int(clusterprof_waits_ns.sum())
    waits = _compare_times(recorder_ns, clusterprof_ns)
    if behind_ns >= _MIN_BEHIND_RATIO * recorder_ns > 0:
        waits += f", of it {format_quantity(behind_ns, 'ns')} while that rank worked on"
    transfers = _compare_times(blocked_ns - recorder_ns, blocked_ns - clusterprof_ns)
    named = sorted(ratios, key=lambda rank: (-int(recorder_waits_ns[rank]), rank))[
        :_MAX_NAMED_RANKS
    ]
    by_rank = "; ".join(
        f"rank {comparison.global_rank[rank]} waited "
        + _compare_times(int(recorder_waits_ns[rank]), int(clusterprof_waits_ns[rank]))
        for rank in sorted(named)
    )
    same_ratio = comparison.same_last_ns / max(recorder_ns, 1)
    verdict = "agrees" if _is_agreement(comparison) else "does not agree"
    percent = 100 * blocked_ns / max(comparison.covered_ns, blocked_ns, 1)
    return (
        f"PyTorch's flight recorder {verdict}: waited for a rank {waits}, transferred {transfers},"
        f" in {comparison.operations:,} operations of {len(ratios)} ranks ({percent:.0f} % of the"
        f" time in operations); largest difference"
        f" {100 * max(ratios.values(), default=0.0):.1f} % of a rank's time; the same last rank in"
        f" {100 * same_ratio:.0f} % of the wait ({by_rank})",
    )


def _is_agreement(comparison: FlightRecorderComparison) -> bool:
    """Return whether both sources show waits of equal length for the same ranks."""
    ratios = comparison.list_difference_ratios()
    length_ns = (comparison.extent_ns[1] - comparison.extent_ns[0])[list(ratios)]
    for_others_ns = int(comparison.wait_ns[0].sum()) - comparison.same_last_ns
    return max(
        ratios.values(), default=0.0
    ) <= MAX_DIFFERENCE_RATIO and for_others_ns <= MAX_DIFFERENCE_RATIO * int(length_ns.sum())


def _compare_times(recorder_ns: int, clusterprof_ns: int) -> str:
    return f"{format_quantity(recorder_ns, 'ns')} ({format_quantity(clusterprof_ns, 'ns')} here)"
