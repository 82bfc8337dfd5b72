"""Blame the waits of a run slice by slice: each slice is a task that needs no other one.

    small tables of all ranks ──> slices ──> tasks, in any order ──> sums, merged in order
                                  cuts      read, match, blame, observe

A run is cut where all ranks of a job left an operation and nothing spans the cut
(analysis.timeline.collectives.cuts). Jobs have no operations in common. Where the cuts are
depends on the recording alone, so the number of workers and what finishes first change nothing.
What is measured over several operations (bubbles, jitter, replays) never goes across a cut.

The usual work of ranks goes across cuts (analysis.attribution.wait_for.slice_state). The first
slice of a job is short and measures it. All others begin with that at once. If it turns out to have
changed before a slice, this slice and those after it are blamed once more. If a slice finds that
its operations are damaged or that something does span a cut, its job is blamed in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clusterprof.analysis.attribution.network.transfer_time import TransferTotals
from clusterprof.analysis.attribution.wait_for.blame import BlameCarryOver, blame_waits
from clusterprof.analysis.attribution.wait_for.flight_recorder import FlightRecorderComparison
from clusterprof.analysis.attribution.wait_for.slice_state import (
    LOOK_BACK_ROWS,
    NO_USUAL_WORK,
    begin_carry_over,
    merge_usual_work,
    select_usual_work,
)
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.attribution.wait_for.waits_without_culprit import Jitter, PipelineBubbles
from clusterprof.analysis.cross_rank.observers import CulpritSums, LongWaitObserver, WhatIfObserver
from clusterprof.analysis.cross_rank.slice_plan import WHOLE, JobSlices
from clusterprof.analysis.spill import SpillLocation, SpillReader
from clusterprof.analysis.timeline.collectives.matching import ChannelDirectory, RankEntry
from clusterprof.analysis.timeline.collectives.slice_stream import CutError, SliceSpan, SliceStream
from clusterprof.analysis.timeline.collectives.stream import (
    OperationBatch,
    OperationStream,
    join_batches,
)
from clusterprof.analysis.timeline.model import Int

BLOCK_ROWS = 32_000
"""Rows that are blamed at once: their working set stays in the CPU caches."""
MAX_ROWS_AT_ONCE = 64_000
"""Rows that are blamed at once where as many rows of earlier blocks may be looked up: these take
part in the sorting of each block.
"""
RunMap = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Applies a function to items, in processes or not; yields the results in the order of items."""


@dataclass(slots=True)
class BlameSums:
    """All that is summed while waits are blamed; can be sent to a worker process and merged."""

    totals: WaitTotals
    transfers: TransferTotals
    bubbles: PipelineBubbles
    jitter: Jitter
    culprits: CulpritSums
    long_waits: LongWaitObserver | None
    """None where no history was requested."""
    what_if: WhatIfObserver
    recorded: FlightRecorderComparison | None = None
    """None without dumps of the flight recorder."""

    def finish(self) -> None:
        """Evaluate the last operations added; call once, before the sums are merged."""
        self.bubbles.finish()
        self.jitter.finish()

    def merge(self, other: BlameSums) -> None:
        """Add the sums of later operations, or of other jobs; both are finished."""
        self.totals.merge(other.totals)
        self.transfers.merge(other.transfers)
        self.bubbles.merge(other.bubbles)
        self.jitter.merge(other.jitter)
        self.culprits.merge(other.culprits)
        if self.long_waits is not None and other.long_waits is not None:
            self.long_waits.merge(other.long_waits)
        self.what_if.merge(other.what_if)
        if self.recorded is not None and other.recorded is not None:
            self.recorded.merge(other.recorded)


@dataclass(frozen=True, slots=True)
class BlameColumns:
    """Which categories of spent time are read."""

    used: tuple[int, ...]
    """Those in which time was spent, and work."""
    hidden: tuple[int, ...]
    """Columns of hidden cost, for the replay only."""


@dataclass(frozen=True, slots=True)
class SliceState:
    """What a slice needs of the slices before it."""

    usual_work: Int
    """See analysis.attribution.wait_for.slice_state."""
    culprits: tuple[tuple[int, int], ...] | None = None
    """Ranks with a cause that are each replayed alone."""


FIRST_STATE = SliceState(NO_USUAL_WORK)


@dataclass(frozen=True, slots=True)
class SliceTask:
    """A slice to blame."""

    entries: Sequence[RankEntry]
    """The ranks of the job, with the blocks of the slice only."""
    directory: ChannelDirectory
    span: SliceSpan | None
    """None: the job in one piece."""
    ranks: int
    """Number of ranks over all jobs."""
    columns: BlameColumns
    sums: BlameSums
    """Without operations."""
    spill: SpillLocation
    """Where the blocks are."""
    state: SliceState = FIRST_STATE

    def list_blocks(self) -> list[tuple[int | bytes, int]]:
        """List the blocks that the slice needs: location and length in bytes."""
        return [
            (block.location, block.length)
            for entry in self.entries
            for block in entry.operations.blocks
        ]


@dataclass(frozen=True, slots=True)
class SliceBlame:
    """Blame of a slice."""

    sums: BlameSums | None
    """None where the job cannot be cut as planned."""
    unmatched: Mapping[str, int]
    """Reason (timeline.collectives.stream) -> spans left out."""
    usual_work: Int
    """At the end of the slice."""
    partial: Int
    """int64[2, m]: operations in which not all members took part (see `SliceStream`)."""
    unresolved: bool = False
    """See BlameCarryOver."""


_NOT_CUT = SliceBlame(None, {}, NO_USUAL_WORK, np.zeros((2, 0), np.int64))


def blame_slice(task: SliceTask) -> SliceBlame:
    """Read, match and blame the operations of a slice.

    Raises: OSError when the operations cannot be read back.
    """
    with SpillReader(task.spill) as reader:
        try:
            return _blame_slice(task, reader)
        except CutError:
            return _NOT_CUT


def _blame_slice(task: SliceTask, reader: SpillReader) -> SliceBlame:
    sums = deepcopy(task.sums)
    columns, span = task.columns, task.span
    read = [*columns.used, *columns.hidden]
    if span is None:
        stream = OperationStream(task.entries, {}, read, reader.get, task.directory)
        _observe_batches(task, sums, stream, None)
        sums.finish()
        return replace(_NOT_CUT, sums=sums, unmatched=stream.unmatched)
    stream = SliceStream(task.entries, task.directory, read, reader.get, span, LOOK_BACK_ROWS)
    carry = None if span.begin is None else _begin_slice(task, sums, stream)
    sums.jitter.join_last = span.end is not None
    carry = _observe_batches(task, sums, stream, carry)
    if carry is None or carry.has_wait_before_context or stream.unmatched:
        return _NOT_CUT
    sums.finish()
    partial = stream.partial_operations()
    return SliceBlame(sums, {}, select_usual_work(carry), partial, carry.unresolved)


def _begin_slice(task: SliceTask, sums: BlameSums, stream: SliceStream) -> BlameCarryOver:
    """Begin the sums and the blame with the operations before the slice."""
    ops, at_arrive, at_leave, ordinal = stream.read_context()
    used_columns = slice(len(task.columns.used))
    last = ops.process_group.size - 1
    cut, leave = ops.take_range(last, last + 1), at_leave[int(ops.first[last]) :]
    sums.bubbles.begin(cut.rank, cut.leave_ns)
    sums.what_if.begin_slice(cut, leave, task.state.culprits)
    return begin_carry_over(
        ops, at_arrive[:, used_columns], at_leave[:, used_columns], ordinal, task.state.usual_work
    )


def _observe_batches(
    task: SliceTask, sums: BlameSums, stream: OperationStream, carry: BlameCarryOver | None
) -> BlameCarryOver | None:
    """Blame all operations of a stream; return the carry-over at its end, None without any."""
    used_columns = slice(len(task.columns.used))
    batches = stream.read_batches(BLOCK_ROWS)
    while parts := _take_batches(batches, 0 if carry is None else carry.rows.op.size):
        ops, arrive, leave = join_batches(parts)
        before, carry = [carry], None
        # the call takes over the only reference, so that the rows of before are released in it
        blamed, carry = blame_waits(
            ops, arrive[:, used_columns], leave[:, used_columns], task.ranks, before.pop()
        )
        for part, part_blame in zip(parts, blamed.split([part.operations for part in parts])):
            sums.what_if.add(part.operations, part_blame, part.at_arrive, part.at_leave)
        del parts, arrive, leave
        sums.totals.add(ops, blamed)
        sums.transfers.add(ops, blamed)
        sums.bubbles.add(ops, blamed)
        sums.jitter.add(ops, blamed)
        sums.culprits.add(ops, blamed)
        if sums.long_waits is not None:
            sums.long_waits.add(ops, blamed)
        if sums.recorded is not None:
            sums.recorded.add(ops, blamed)
    return carry


def _take_batches(batches: Iterator[OperationBatch], kept_rows: int) -> list[OperationBatch]:
    """Take the next batches, as many rows as the blame keeps of those before; none at the end."""
    wanted = min(max(kept_rows, BLOCK_ROWS), MAX_ROWS_AT_ONCE)
    out: list[OperationBatch] = []
    while wanted > 0 and (batch := next(batches, None)) is not None:
        out.append(batch)
        wanted -= batch.operations.rank.size
    return out


class _JobBlame:
    """The blame of one job, slice by slice."""

    def __init__(self, job: JobSlices) -> None:
        self.job = job
        self.sums: BlameSums | None = None
        """None until a slice was blamed."""
        self.unmatched = job.count_unmatched()
        self._next = 0 if len(job.spans) > 1 else WHOLE
        self._state = FIRST_STATE
        self._assumed: dict[int, SliceState] = {}
        self._partial: list[Int] = []
        self._unresolved = False

    def list_slices(self) -> list[tuple[int, SliceState]]:
        """List the slices that can be blamed now: the first alone, then all others at once."""
        if self._next == WHOLE:
            return [(WHOLE, FIRST_STATE)] if self.sums is None else []
        end = len(self.job.spans) if self._next else 1
        self._assumed = {number: self._state for number in range(self._next, end)}
        return list(self._assumed.items())

    def add(self, number: int, blame: SliceBlame) -> None:
        """Add the result of a slice, in the order of the list.

        It is left out if the state before the slice was not the one it was blamed with.
        """
        if number != self._next:
            return
        if number == WHOLE:
            self.sums, self.unmatched = blame.sums, dict(blame.unmatched)
        elif blame.sums is None:
            self._begin_again()
        elif _is_equal(self._assumed[number], self._state):
            self._merge(blame, blame.sums)

    def _merge(self, blame: SliceBlame, sums: BlameSums) -> None:
        usual_work = merge_usual_work(self._state.usual_work, blame.usual_work)
        if self.sums is None:
            self.sums, culprits = sums, sums.what_if.culprits
        else:
            self.sums.merge(sums)
            culprits = self._state.culprits
        self._state = SliceState(usual_work, culprits)
        self._partial.append(blame.partial)
        self._unresolved |= blame.unresolved
        self._next += 1
        if self._next == len(self.job.spans):
            partial = np.concatenate(self._partial, axis=1)
            spans_cut = np.unique(partial, axis=1).shape[1] < partial.shape[1]
            if spans_cut or (self._unresolved and partial.size):
                self._begin_again()

    def _begin_again(self) -> None:
        """Blame the job in one piece: it is damaged, or something spans a cut."""
        self.sums, self._next = None, WHOLE


def _is_equal(state: SliceState, other: SliceState) -> bool:
    return state is other or (
        state.culprits == other.culprits and np.array_equal(state.usual_work, other.usual_work)
    )


class _Tasks(Sequence[Any]):
    """Tasks that are made when they are needed: each holds small tables of all ranks."""

    def __init__(self, run_slices: Sequence[Any], make_task: Callable[[Any], SliceTask]) -> None:
        self._slices, self._make_task = run_slices, make_task

    def __len__(self) -> int:
        return len(self._slices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make_task(run_slice) for run_slice in self._slices[index]]
        return self._make_task(self._slices[index])


def blame_in_slices(
    jobs: Sequence[JobSlices],
    sums: BlameSums,
    columns: BlameColumns,
    ranks: int,
    spill: SpillLocation,
    run_map: RunMap = map,
) -> dict[str, int]:
    """Blame all operations of some jobs, and add the results to the sums.

    ranks: number of ranks over all jobs. Returns unmatched spans by reason.

    Raises: OSError when the operations cannot be read back.
    """

    def make_task(run_slice: tuple[_JobBlame, int, SliceState]) -> SliceTask:
        blame, number, state = run_slice
        return SliceTask(*blame.job.select(number), ranks, columns, sums, spill, state)

    blames = [_JobBlame(job) for job in jobs]
    while run_slices := [
        (blame, *run_slice) for blame in blames for run_slice in blame.list_slices()
    ]:
        results = run_map(blame_slice, _Tasks(run_slices, make_task))
        for (blame, number, _), result in zip(run_slices, results):
            blame.add(number, result)
    unmatched: dict[str, int] = {}
    for blame in blames:
        assert blame.sums is not None
        sums.merge(blame.sums)
        for reason, count in blame.unmatched.items():
            unmatched[reason] = unmatched.get(reason, 0) + count
    return unmatched
