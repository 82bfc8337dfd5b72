"""Stream of the operations between two cuts, and of those before that they look back to.

    rank 0   ..2 3 | 4 |  5 6 7 ..  | 8 | 9 ..        slice: 5 to 8
    rank 1   ..2   | 4 |  5   7 ..  | 8 | 9 ..        context: the last operation of each group
                     ^ begin          ^ end           up to the begin, 4 among them

A cut is an operation of all ranks that each left before it arrived at any that it left later
(analysis.timeline.collectives.cuts). Blocks at both ends are read as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clusterprof.analysis.timeline.collectives.int_table import PackedTable
from clusterprof.analysis.timeline.collectives.leave_time_samples import LeaveTimeSamples
from clusterprof.analysis.timeline.collectives.matching import ChannelDirectory, RankEntry
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.analysis.timeline.collectives.rows import (
    CHANNEL,
    NO_NUMBER,
    SEQUENCE,
    RankOperations,
    read_blocks,
)
from clusterprof.analysis.timeline.collectives.stream import (
    GetBlock,
    OperationBatch,
    OperationStream,
)
from clusterprof.analysis.timeline.model import Int

CUT_ORDINAL = 1 << 20
"""Number given to the operation of the cut among those of each rank: its true one is not known,
only that it is beyond the first ones.
"""


class CutError(Exception):
    """The run cannot be cut here: its operations are damaged, or something spans the cut."""


class Cut(NamedTuple):
    """An operation of all ranks, after which the run is cut."""

    channel: int
    """As in the directory."""
    number: int


@dataclass(frozen=True, slots=True)
class SliceSpan:
    """The blocks of each rank between two cuts."""

    begin: Cut | None
    """None: from the beginning."""
    end: Cut | None
    """None: to the end."""
    first: Int
    """int64[ranks]: the block with the operation of the begin."""
    last: Int
    """int64[ranks]: the block with the operation of the end; -1 if the rank has none."""
    lead: Int
    """int64[ranks]: number of blocks before the first that the context may need."""


class LookBackContext(NamedTuple):
    """Operations before the slice that its operations may look back to; the cut is the last."""

    operations: Operations
    at_arrive: Int
    """int64[n, categories], ns."""
    at_leave: Int
    ordinal: Int
    """int64[n]: number of each row among those of its rank; that of the cut is CUT_ORDINAL."""


def select_slice_entries(entries: Sequence[RankEntry], span: SliceSpan) -> list[RankEntry]:
    """Return the ranks with only the blocks of a slice, and what the stream needs of them."""
    no_samples = LeaveTimeSamples(0, *np.zeros((3, 0), np.int64))
    out = []
    for entry, first, last, lead in zip(
        entries, span.first.tolist(), span.last.tolist(), span.lead.tolist()
    ):
        operations = entry.operations
        low, high = first - lead, last + 1
        lowest = operations.lowest[low : high + 1].copy()
        lowest[-1] = NO_NUMBER
        out.append(
            RankEntry(
                entry.rank,
                entry.global_rank,
                entry.job,
                entry.clock_offset,
                RankOperations(
                    channels=operations.channels[:0],
                    counts=operations.counts[:0],
                    blocks=operations.blocks[low:high],
                    lowest=lowest,
                    samples=PackedTable(3, b""),
                    left_out={},
                    leaves=no_samples,
                    barriers=no_samples,
                ),
            )
        )
    return out


class SliceStream(OperationStream):
    """Reads and matches the operations of a slice: its context first, then its batches."""

    def __init__(
        self,
        ranks: Sequence[RankEntry],
        directory: ChannelDirectory,
        categories: Sequence[int],
        get: GetBlock,
        span: SliceSpan,
        look_back: int,
    ) -> None:
        """Set up the stream.

        ranks: as select_slice_entries returns them. look_back: number of rows of a rank before the
        slice, the cut included, that the context may come from.
        """
        super().__init__(ranks, {}, categories, get, directory)
        self.unmatched = {}
        self._span, self._look_back = span, look_back
        self._rest: tuple[Operations, Int] | None = None
        self._partial: list[Int] = []
        self._end_entry = self._find_cut_entries(span.end)

    def _find_cut_entries(self, cut: Cut | None) -> Int:
        """Return the entry of the channel of a cut of each rank, int64[ranks], -1 = none."""
        out = np.full(len(self._ranks), -1)
        if cut is not None:
            entries = np.flatnonzero(self._directory.channel == cut.channel)
            out[np.searchsorted(self._directory.base, entries, side="right") - 1] = entries
        return out

    def partial_operations(self) -> Int:
        """Return channel and number of the operations in which not all members of the channel
        took part, int64[2, m].
        """
        return np.concatenate([np.zeros((2, 0), np.int64), *self._partial], axis=1)

    def read_context(self) -> LookBackContext:
        """Read the context; call it first, for slices that have a begin.

        Raises: CutError when the cut is not found in the blocks named.
        """
        begin = self._span.begin
        assert begin is not None
        entries = self._find_cut_entries(begin)
        parts, ordinals = [], []
        for number, lead in enumerate(self._span.lead.tolist()):
            rows, cut_row = self._read_head(number, lead, int(entries[number]), begin.number)
            group = self._directory.process_group[self._channel[rows[CHANNEL, : cut_row + 1]]]
            context = _select_context(group, self._look_back)
            parts += [rows[:, context], rows[:, cut_row + 1 :]]
            self._waiting_rows[number] = context.size + rows.shape[1] - cut_row - 1
            ordinals += [
                CUT_ORDINAL - cut_row + context,
                np.zeros(rows.shape[1] - cut_row - 1, np.int64),
            ]
            self._read[number] = lead + 1
            base = slice(int(self._directory.base[number]), int(self._directory.base[number + 1]))
            self._unread[base] = self._ranks[number].operations.lowest[lead + 1]
        self._table = np.concatenate(parts, axis=1)
        ordinal = np.concatenate(ordinals)
        rows_of_context = int(np.count_nonzero(ordinal))
        operations, table = self._settle_held()
        size = int(np.searchsorted(operations.first, rows_of_context))
        context_ops = operations.take_range(0, min(size, operations.process_group.size))
        ordinal = ordinal[context_ops.source]
        if ordinal.size != rows_of_context or not ordinal.all():
            raise CutError("operations before the cut do not come first")
        self._rest = operations.take_range(size, operations.process_group.size), table
        [batch] = super()._split_batches(context_ops, table, 1 << 62)
        return LookBackContext(batch.operations, batch.at_arrive, batch.at_leave, ordinal)

    def _read_head(
        self, number: int, lead: int, cut_entry: int, cut_number: int
    ) -> tuple[Int, int]:
        """Read the block of a rank with the cut, and those before it where the context needs them.

        Returns the rows, and which of them is the operation of the cut.
        """
        rows = self._read_rows(number, lead)
        cut_row = _find_row(rows, cut_entry, cut_number)
        while lead and cut_row + 1 < self._look_back:
            lead -= 1
            before = self._read_rows(number, lead)
            rows, cut_row = np.concatenate([before, rows], axis=1), cut_row + before.shape[1]
        return rows, cut_row

    def _read_rows(self, number: int, block_number: int) -> Int:
        """Read a block of a rank without the rows that are left out."""
        block = self._ranks[number].operations.blocks[block_number]
        rows = np.empty((self._rows, block.rows), np.int64)
        data = self._get(block.location, block.length)
        read_blocks([(data, block)], self._category_slot, self._leave_slots, [rows])
        rows[CHANNEL] += self._directory.base[number]
        self._trim(number, block_number, rows)
        keep = self._channel[rows[CHANNEL]] >= 0
        return rows if keep.all() else rows[:, keep]

    def _trim(self, number: int, block_number: int, rows: Int) -> None:
        """Leave out what follows the end of the slice."""
        last = block_number + 1 == len(self._ranks[number].operations.blocks)
        if self._span.end is not None and last:
            end_row = _find_row(rows, int(self._end_entry[number]), self._span.end.number)
            rows[CHANNEL, end_row + 1 :] = self._channel.size - 1

    def read_batches(self, most_rows: int) -> Iterator[OperationBatch]:
        """Yield the operations of the slice; read_context comes before.

        Raises: CutError when the end is not found.
        """
        remaining, self._rest = self._rest, None
        if remaining is not None:
            yield from self._split_batches(*remaining, most_rows)
        yield from super().read_batches(most_rows)
        if self._passed.any():
            raise CutError("operations were settled without all members")

    def _split_batches(
        self, ops: Operations, table: Int, most_rows: int
    ) -> Iterator[OperationBatch]:
        channel = self._channel[table[CHANNEL, ops.source[ops.first[:-1]]]]
        partial = np.flatnonzero(np.diff(ops.first) < self._directory.members[channel])
        if partial.size:
            numbers = table[SEQUENCE, ops.source[ops.first[partial]]]
            self._partial.append(np.stack([channel[partial], numbers]))
        return super()._split_batches(ops, table, most_rows)


def _find_row(rows: Int, entry: int, number: int) -> int:
    matches = np.flatnonzero((rows[CHANNEL] == entry) & (rows[SEQUENCE] == number))
    if matches.size != 1:
        raise CutError("the operation of a cut is not where it should be")
    return int(matches[0])


def _select_context(group: Int, look_back: int) -> Int:
    """Return the rows of a rank that the slice looks back to: the last of each process group.

    group: int64[n], those of its rows up to the cut.
    """
    last = np.unique(group[-look_back:][::-1], return_index=True)[1]
    rows: Int = np.sort(group.size - 1 - last)
    return rows
