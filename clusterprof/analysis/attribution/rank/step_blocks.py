"""Sum time, samples, losses and step lengths of one rank in blocks of its steps.

    steps     0  1  2  3  4  5  6         width 2; few blocks in any run
    blocks    |  0  |  1  |  2  | 3

An instant belongs to the block of the step that ends next. If there are more blocks
than MAX_BLOCKS, adjacent ones are merged in pairs: the result depends on the
steps alone, not on how they were read.

Treat steps as operations of all ranks where operations between ranks have no marks.

In a synchronous job all ranks leave the last collective of a step together, so the end
of a step is an implicit barrier: a rank arrives at it when it has waited for data and
worked, and then waits.

    rank 0   |== work 200 ==|-------- waits 100 --------|
    rank 1   |-- storage 100 --|== work 200 ==|         arrives last, waits for no rank

From then on it is blamed like a marked operation (analysis.attribution.wait_for.blame): durations
only, no clock. A rank may wait at several places of a step; all of it is placed at the
end. Without steps an operation is an interval of GRID_INTERVAL_NS of
wall-clock time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.rank.hidden_cost import compute_hidden_cost
from clusterprof.analysis.attribution.rank.lost_time import SegmentAccount
from clusterprof.analysis.attribution.rank.time_spent import SpentTotals, split_amounts
from clusterprof.analysis.attribution.rank.unprobed_rank import has_peers, has_waited_in_operations
from clusterprof.analysis.timeline.collectives.int_table import (
    PackedTable,
    keep_packed,
    read_table_shape,
)
from clusterprof.analysis.timeline.collectives.rows import RankOperations, RankRowBuilder, Store
from clusterprof.analysis.timeline.model import PHASE_SUSPECTED_BUSY_WAIT, Int, LostTime, Rank
from clusterprof.analysis.timeline.series import Period, estimate_period
from clusterprof.analysis.timeline.spans import StepSpans
from clusterprof.probe import layout
from clusterprof.report.history import BINS_PER_OCTAVE

MAX_BLOCKS = 128
"""Number of blocks above which adjacent ones are merged in pairs."""
STEPS, STEP_NS, TIME, MEASURED, IDLE, LOST, SAMPLES, TOKENS, REPORTED = range(9)
"""Rows of StepBlockTable; samples and tokens are those of steps that
reported them.
"""
ROWS = 9
SUSPECTED = "perhaps"
"""Row of lost time that counts only if all ranks confirm it; not part of the lost time."""
_MAX_KEYS = 4096
_BIN_BITS = 16  # a length of 2**62 ns is bin 7,936

Keys = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBlockTable:
    """Totals of a rank by block of steps; small, so that it can be sent between processes."""

    width: int
    packed_sums: PackedTable
    """See `sums`; packed, because there may be thousands of ranks."""
    lost: Mapping[str, Int] = field(default_factory=dict)
    """Cause id as claimed -> int64[blocks], lost ns."""
    keys: Keys = field(default_factory=lambda: np.zeros((2, 0), np.int32))
    """int32[2, n]: block << 16 | bin of a step length, ascending; and the number of steps."""

    @property
    def sums(self) -> Int:
        """Return the sums by block, int64[ROWS, blocks]."""
        return self.packed_sums.unpack()

    def count_blocks(self) -> int:
        """Count the blocks."""
        return read_table_shape(self.packed_sums.data)[1]

    def widen(self, width: int) -> StepBlockTable:
        """Return the totals in blocks of `width` steps, a multiple of the current width."""
        times = width // self.width
        if times == 1:
            return self
        sums = self.sums
        block_begins = np.arange(0, sums.shape[1], times)
        lost = {cause: np.add.reduceat(ns, block_begins) for cause, ns in self.lost.items()}
        block, bin_ = unpack_keys(self.keys)
        keys = merge_keys(np.stack([block // times << _BIN_BITS | bin_, self.keys[1]]))
        wide_sums = keep_packed(np.add.reduceat(sums, block_begins, axis=1))
        return StepBlockTable(width, wide_sums, lost, keys.astype(np.int32))


class StepBlocks:
    """Builds the block totals of one rank from settled segments."""

    def __init__(self) -> None:
        self._width = 1
        self._ended = 0
        """Steps that have ended so far, including provisional ones."""
        self._certain = 0
        self._sums = np.zeros((ROWS, MAX_BLOCKS), np.int64)
        self._lost: dict[str, Int] = {}
        self._keys = np.zeros((2, 0), np.int64)
        """Block and bin combined in one number, and the number of steps."""
        self._provisional: list[_SettledSteps] = []

    def add(
        self,
        rank: Rank,
        segment: Segment,
        lost: LostTime,
        shares: Mapping[str, Int],
        account: SegmentAccount,
    ) -> None:
        """Add a settled segment.

        shares: int64[n] of its lost intervals per cause, in 1/SHARE_SCALE.
        """
        settled = _SettledSteps(self._ended, rank, segment, lost, shares, account)
        self._ended += settled.ends.size
        self._provisional.append(settled)
        if not segment.provisional:
            self.confirm()

    def confirm(self) -> None:
        """Take over provisional segments: another step has ended."""
        for stretch in self._provisional:
            self._add_settled(stretch)
        self._certain, self._provisional = self._ended, []

    def finish(self) -> StepBlockTable | None:
        """Return the block totals; None without a step."""
        if not self._certain:
            return None
        blocks = -(-self._certain // self._width)
        # Time after the last step belongs to the last block.
        remainder = self._sums[:, blocks:].sum(axis=1)
        self._sums[:, blocks - 1] += remainder
        lost = {}
        for cause, ns in self._lost.items():
            ns[blocks - 1] += ns[blocks:].sum()
            lost[cause] = ns[:blocks].copy()
        keys = merge_keys(self._keys).astype(np.int32)  # int32: there may be thousands of ranks
        return StepBlockTable(self._width, keep_packed(self._sums[:, :blocks]), lost, keys)

    def _add_settled(self, settled: _SettledSteps) -> None:
        last = settled.first + settled.ends.size
        while last // self._width >= MAX_BLOCKS:
            self._double_width()
        edges = settled.edges(self._width)
        first = settled.first // self._width
        columns = slice(first, first + edges.size + 1)
        self._sums[:, columns] += settled.sums(edges, self._width)
        for cause, ns in settled.losses(edges):
            if cause not in self._lost:
                self._lost[cause] = np.zeros(MAX_BLOCKS, np.int64)
            self._lost[cause][columns] += ns
        if settled.ends.size:
            block = (settled.first + np.arange(settled.ends.size)) // self._width
            keys = np.stack(
                [block << _BIN_BITS | compute_length_bins(settled.lengths), np.ones_like(block)]
            )
            self._keys = np.concatenate([self._keys, keys], axis=1)
            if self._keys.shape[1] > _MAX_KEYS:
                self._keys = merge_keys(self._keys)

    def _double_width(self) -> None:
        self._width *= 2
        self._sums = _merge_column_pairs(self._sums)
        self._lost = {cause: _merge_column_pairs(ns[None])[0] for cause, ns in self._lost.items()}
        block, bin_ = unpack_keys(self._keys)
        self._keys[0] = block // 2 << _BIN_BITS | bin_


class _SettledSteps:
    """A settled segment, with the steps that ended in it."""

    def __init__(
        self,
        first: int,
        rank: Rank,
        segment: Segment,
        lost: LostTime,
        shares: Mapping[str, Int],
        account: SegmentAccount,
    ) -> None:
        """first: number of steps that had ended before."""
        self.first, self._region, self._account = first, segment, account
        suspected = lost.phase == PHASE_SUSPECTED_BUSY_WAIT
        self._lost = lost
        self._certain_ns = np.where(suspected, 0, lost.lost_ns)
        self._claims = {
            cause: self._certain_ns * share // SHARE_SCALE
            for cause, share in shares.items()
            if share.any()
        }
        if suspected.any():
            self._claims[SUSPECTED] = lost.lost_ns - self._certain_ns
        self.ends = self.lengths = np.zeros(0, np.int64)
        self._counts = np.zeros((2, 0), np.int64)
        steps = rank.main.get_spans(StepSpans)
        if steps is not None:
            rows = np.flatnonzero(
                (steps.end_ns > segment.start_ns) & (steps.end_ns <= segment.end_ns)
            )
            start, end = steps.start_ns[rows], steps.end_ns[rows]
            is_first = np.ones(rows.size, np.bool_)  # a span may be present twice
            is_first[1:] = (start[1:] != start[:-1]) | (end[1:] != end[:-1])
            rows = rows[is_first][np.argsort(end[is_first], kind="stable")]
            self.ends, self.lengths = steps.end_ns[rows], steps.end_ns[rows] - steps.start_ns[rows]
            self._counts = np.stack([steps.samples[rows], steps.tokens[rows]])

    def edges(self, width: int) -> Int:
        """Return when each block but the last one ends."""
        last_rows = np.arange(width - 1 - self.first % width, self.ends.size, width)
        return self.ends[last_rows]

    def sums(self, edges: Int, width: int) -> Int:
        """Return int64[ROWS, edges + 1]."""
        out = np.zeros((ROWS, edges.size + 1), np.int64)
        bounds = np.concatenate([[self._region.start_ns], edges, [self._region.end_ns]])
        out[TIME] = np.diff(bounds)
        windows = self._account.windows
        if windows is not None:
            start, measured, idle = windows
            block = np.searchsorted(edges, start, side="right")
            out[MEASURED] = _sum_by_block(block, measured, edges.size)
            out[IDLE] = _sum_by_block(block, idle, edges.size)
        out[LOST] = _sum_by_block(self._find_blocks(edges), self._certain_ns, edges.size)
        if self.ends.size:
            block = (self.first + np.arange(self.ends.size)) // width - self.first // width
            out[STEPS] = np.bincount(block, minlength=edges.size + 1)
            out[STEP_NS] = _sum_by_block(block, self.lengths, edges.size)
            samples, tokens = self._counts
            reported = samples > 0
            out[SAMPLES] = _sum_by_block(block, np.where(reported, samples, 0), edges.size)
            out[TOKENS] = _sum_by_block(
                block, np.where(reported, np.maximum(tokens, 0), 0), edges.size
            )
            out[REPORTED] = np.bincount(block[reported], minlength=edges.size + 1)
        return out

    def losses(self, edges: Int) -> list[tuple[str, Int]]:
        """Return (cause, int64[edges + 1]) of the claimed time, ns."""
        block = self._find_blocks(edges)
        return [(cause, _sum_by_block(block, ns, edges.size)) for cause, ns in self._claims.items()]

    def _find_blocks(self, edges: Int) -> Int:
        return edges.searchsorted(self._lost.start_ns, "right")


def compute_length_bins(lengths_ns: Int) -> Int:
    """Compute the histogram bin of each length: int64[n]."""
    octaves = np.log2(np.maximum(lengths_ns, 1).astype(np.float64))
    return np.floor(BINS_PER_OCTAVE * octaves).astype(np.int64)


def merge_keys(keys: Int | Keys) -> Int:
    """Merge equal keys and sum their counts: int64[2, m], keys ascending."""
    distinct_keys, key_index = np.unique(keys[0], return_inverse=True)
    counts = np.bincount(key_index, weights=keys[1], minlength=distinct_keys.size).astype(np.int64)
    return np.stack([distinct_keys, counts])


def unpack_keys(keys: Int | Keys) -> tuple[Any, Any]:
    """Split keys into block and bin, int64[n] each."""
    return keys[0] >> _BIN_BITS, keys[0] & (1 << _BIN_BITS) - 1


def _sum_by_block(block: Int, ns: Int, edges: int) -> Int:
    # float64 adds whole numbers below 2**53 exactly: a stretch is never 100 days long
    return np.bincount(block, weights=ns, minlength=edges + 1).astype(np.int64)


def _merge_column_pairs(table: Int) -> Int:
    """Merge each two columns; the second half of the result is empty."""
    out = np.zeros_like(table)
    out[:, : table.shape[1] // 2] = table[:, ::2] + table[:, 1::2]
    return out


ALL_RANKS_GROUP = 1
"""Group number of all ranks of a job; no group of a marked operation is compared with it."""
GRID_INTERVAL_NS = 2_000_000_000
TICK_NS, MAX_TICKS = 100_000_000, 6000  # for the period, where steps have no marks


class _StepArrivals:
    """The steps of a rank, and its time by category up to the end of each."""

    def __init__(self, categories: tuple[str, ...], store: Store) -> None:
        self._categories = categories
        self._spent = SpentTotals(categories)
        self._rows = RankRowBuilder(store)
        self._provisional: list[tuple[Int, Int, Int]] = []
        self._waited_ns = 0
        """Since the last step that ended, ns."""

    def add(
        self, rank: Rank, segment: Segment, lost: LostTime, shares: Mapping[str, Int], waiting: Int
    ) -> None:
        """Add a settled segment."""
        waited_ns = lost.lost_ns * waiting // SHARE_SCALE
        amounts = split_amounts(self._categories, lost.lost_ns - waited_ns, lost, shares)
        end, number = (
            _find_step_ends(rank, segment) if rank.marked else _find_grid_ends(rank, segment)
        )
        before = _sum_waits_before(lost, waited_ns, end)
        t_ns = np.append(end, segment.end_ns)
        hidden_cost = compute_hidden_cost(rank, lost, shares)
        used, spent = self._spent.add(rank, segment, lost, amounts, hidden_cost, t_ns)
        if end.size:
            stay = np.diff(before, prepend=0)
            stay[0] += self._waited_ns
            self._waited_ns = int(waited_ns.sum() - before[-1])
            ones = np.ones_like(end)
            table = np.stack(
                [
                    end - stay,
                    end,
                    ALL_RANKS_GROUP * ones,
                    number,
                    -ones,
                    layout.OTHER_OPERATION * ones,
                    stay,
                ]
            )
            self._provisional.append((table, spent[:, :-1], used))
        else:
            self._waited_ns += int(waited_ns.sum())
        if not segment.provisional:
            self.confirm()

    def confirm(self) -> None:
        """Take over provisional segments: another step has ended."""
        for table, spent, used in self._provisional:
            self._rows.add(table, spent, spent, used)
        self._provisional = []

    def finish(self) -> RankOperations | None:
        """Return the steps as operations; None if there were none."""
        return self._rows.finish()


class ImplicitSteps:
    """Sums of what one rank spends up to the end of each step.

    Kept twice: without and with suspected busy-waiting as waiting.
    """

    def __init__(self, categories: tuple[str, ...], store: Store) -> None:
        """categories: as in analysis.attribution.rank.time_spent: causes, what no cause explains,
        work.
        """
        self._certain: _StepArrivals | None = _StepArrivals(categories, store)
        self._with_suspected = _StepArrivals(categories, store)
        self._has_suspected = False
        self._ticks: list[Int] = []
        self._ticks_count = 0
        self._since_tick_ns = 0

    def add(
        self, rank: Rank, segment: Segment, lost: LostTime, shares: Mapping[str, Int], waiting: Int
    ) -> None:
        """Add a settled segment.

        shares, waiting: int64[n] of its lost intervals, in 1/SHARE_SCALE.
        """
        if self._certain is None or not has_peers(rank) or has_waited_in_operations(rank):
            self._certain = None  # its own marks are more precise, from then on and before
            return
        self._with_suspected.add(rank, segment, lost, shares, waiting)
        rows = np.flatnonzero(lost.phase != PHASE_SUSPECTED_BUSY_WAIT)
        if rows.size < lost.phase.size:
            self._has_suspected = True
            columns = (getattr(lost, field.name)[rows] for field in fields(LostTime) if field.init)
            lost, waiting = LostTime(*columns), waiting[rows]
            shares = {name: share[rows] for name, share in shares.items()}
        self._certain.add(rank, segment, lost, shares, waiting)
        if not rank.marked and self._ticks_count < MAX_TICKS:
            self._add_ticks(segment, lost)

    def confirm(self) -> None:
        """Take over provisional segments: another step has ended."""
        self._with_suspected.confirm()
        if self._certain is not None:
            self._certain.confirm()

    def _add_ticks(self, segment: Segment, lost: LostTime) -> None:
        """Record the time lost in each tenth of a second."""
        ticks_ns = (
            np.arange(segment.start_ns // TICK_NS + 1, segment.end_ns // TICK_NS + 1) * TICK_NS
        )
        before = np.concatenate(
            [_sum_waits_before(lost, lost.lost_ns, ticks_ns), lost.lost_ns.sum(keepdims=True)]
        )
        grown = np.diff(before, prepend=0)
        grown[0] += self._since_tick_ns
        self._since_tick_ns = int(grown[-1])
        self._ticks.append(grown[:-1])
        self._ticks_count += ticks_ns.size

    def period(self) -> Period | None:
        """Return the period of the lost time of a rank without steps, in ticks."""
        if not self._ticks:
            return None
        return estimate_period(np.concatenate(self._ticks)[:MAX_TICKS].astype(np.float64))

    def operations(self) -> tuple[RankOperations | None, RankOperations | None]:
        """Return the steps, and the steps with suspected busy-waiting as waiting; call once.

        The first is None if there were none, or if operations were marked; the second is None
        if nothing was suspected.
        """
        if self._certain is None:
            return None, None
        return (
            self._certain.finish(),
            self._with_suspected.finish() if self._has_suspected else None,
        )


def _find_step_ends(rank: Rank, segment: Segment) -> tuple[Int, Int]:
    """Return end and number of the steps that ended in a segment."""
    steps = rank.main.get_spans(StepSpans)
    if steps is None:
        empty = np.zeros(0, np.int64)
        return empty, empty
    rows = np.flatnonzero((steps.end_ns > segment.start_ns) & (steps.end_ns <= segment.end_ns))
    rows = rows[np.argsort(steps.end_ns[rows], kind="stable")]
    number = steps.step[rows]
    is_first = np.ones(rows.size, np.bool_)
    is_first[1:] = number[1:] > np.maximum.accumulate(number)[:-1]
    return steps.end_ns[rows[is_first]], number[is_first]


def _find_grid_ends(rank: Rank, segment: Segment) -> tuple[Int, Int]:
    """Return ends and numbers of wall-clock intervals, which all nodes roughly share."""
    started = rank.chunk.header.started
    clock_offset_ns = int(started.get("realtime_ns", 0)) - int(started.get("monotonic_ns", 0))
    first = (segment.start_ns + clock_offset_ns) // GRID_INTERVAL_NS + 1
    number = np.arange(
        first, (segment.end_ns + clock_offset_ns) // GRID_INTERVAL_NS + 1, dtype=np.int64
    )
    return number * GRID_INTERVAL_NS - clock_offset_ns, number


def _sum_waits_before(lost: LostTime, waited_ns: Int, t_ns: Int) -> Int:
    """Return how much of the waited time of intervals lies before each time: int64[m], ns."""
    if not waited_ns.size:
        return np.zeros(t_ns.size, np.int64)
    before = np.concatenate([[0], np.cumsum(waited_ns)])
    row = np.searchsorted(lost.start_ns, t_ns, side="right") - 1
    clipped_row = np.maximum(row, 0)
    length = np.maximum(lost.end_ns - lost.start_ns, 1)[clipped_row]
    part = np.clip((t_ns - lost.start_ns[clipped_row]) / length, 0.0, 1.0)
    return np.where(
        row < 0, 0, before[clipped_row] + np.floor(waited_ns[clipped_row] * part).astype(np.int64)
    )
