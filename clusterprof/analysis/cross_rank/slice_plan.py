"""Plan where the run of each job is cut into slices, from small tables that its ranks carry.

Where the cuts are depends on the recording alone. No block of operations is read. The first slice
is short, because all others wait for it: it measures the usual work of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clusterprof.analysis.attribution.wait_for.arrivals import (
    FIRST_OPERATIONS,
    MAX_LOOK_BACK_OPERATIONS,
)
from clusterprof.analysis.attribution.wait_for.late_rank_excess import USUAL_WORK_SEGMENTS
from clusterprof.analysis.attribution.wait_for.slice_state import LOOK_BACK_ROWS
from clusterprof.analysis.timeline.collectives.cuts import find_common_cuts
from clusterprof.analysis.timeline.collectives.leave_time_samples import LeaveTimeSamples
from clusterprof.analysis.timeline.collectives.matching import (
    ChannelDirectory,
    RankEntry,
    build_directory,
)
from clusterprof.analysis.timeline.collectives.rows import NO_NUMBER
from clusterprof.analysis.timeline.collectives.slice_stream import (
    Cut,
    SliceSpan,
    select_slice_entries,
)
from clusterprof.analysis.timeline.model import Int

FIRST_SLICE_ROWS = 1024
"""Rows of a rank in the first slice, at least."""
SLICE_ROWS = 6144
"""Rows of a rank in every other slice, at least: three blocks. One more is read for each cut."""
MAX_FIRST_SLICE_ROWS = 16_384
"""Rows of a rank after which the first slice ends although a group is still being measured."""
WHOLE = -1
"""Number of the slice that is the whole job."""


@dataclass(frozen=True, slots=True)
class JobSlices:
    """A job and its slices."""

    entries: Sequence[RankEntry]
    directory: ChannelDirectory
    spans: Sequence[SliceSpan]
    """In order; fewer than two where the job is not cut."""

    def select(self, number: int) -> tuple[Sequence[RankEntry], ChannelDirectory, SliceSpan | None]:
        """Return what the task of a slice needs of the job; number: of a slice, or WHOLE."""
        if number != WHOLE:
            span = self.spans[number]
            return select_slice_entries(self.entries, span), self.directory, span
        no_samples = LeaveTimeSamples(0, *np.zeros((3, 0), np.int64))
        entries = [
            replace(
                entry, operations=replace(entry.operations, leaves=no_samples, barriers=no_samples)
            )
            for entry in self.entries
        ]
        return entries, self.directory, None

    def count_unmatched(self) -> dict[str, int]:
        """Count the spans that were left out before any was read, by reason."""
        out = dict(self.directory.unmatched)
        for entry in self.entries:
            for reason, count in entry.operations.left_out.items():
                out[reason] = out.get(reason, 0) + count
        return out


def plan_slices(
    entries: Sequence[RankEntry], members: Mapping[tuple[int, int], Int]
) -> list[JobSlices]:
    """Plan the slices of all jobs.

    entries: ranks of any job. members: global ranks of each announced (job, group), int64[k].
    """
    jobs: dict[int, list[RankEntry]] = {}
    for entry in entries:
        jobs.setdefault(entry.job, []).append(entry)
    out = []
    for job_entries in jobs.values():
        directory = build_directory(job_entries, members)
        out.append(JobSlices(job_entries, directory, _plan_job(job_entries, directory)))
    return out


def _plan_job(entries: Sequence[RankEntry], directory: ChannelDirectory) -> list[SliceSpan]:
    """Return the slices of a job, none where it is not cut."""
    if not all(entry.operations.blocks and entry.operations.cuts.size for entry in entries):
        return []
    channel, number = np.concatenate(
        [
            np.stack([directory.channel[base + entry.operations.cuts[0]], entry.operations.cuts[1]])
            for base, entry in zip(directory.base.tolist(), entries)
        ],
        axis=1,
    )
    has_channel = channel >= 0
    cut_channel, numbers = find_common_cuts(channel[has_channel], number[has_channel], len(entries))
    if not numbers.size:
        return []
    ranks = np.arange(1, len(entries) + 1)
    entry_of_channel = _find_entries(directory, cut_channel)
    if not np.array_equal(np.searchsorted(directory.base, entry_of_channel, side="right"), ranks):
        return []  # not one entry of each rank: one rank has two, another has none
    block = np.stack(
        [
            np.searchsorted(entry.operations.lowest[:-1, block_number], numbers, side="right") - 1
            for entry, block_number in zip(
                entries, (entry_of_channel - directory.base[:-1]).tolist()
            )
        ]
    )
    cuts = _choose_cuts(entries, block, numbers, int(entry_of_channel[0]))
    return _make_spans(entries, Cut(cut_channel, -1), numbers[cuts], block[:, cuts])


def _find_entries(directory: ChannelDirectory, channel: int) -> Int:
    """Return the entry of each rank of a channel that all ranks have, int64[ranks]."""
    return np.flatnonzero(directory.channel == channel)


def _choose_cuts(
    entries: Sequence[RankEntry], block: Int, numbers: Int, first_channel: int
) -> list[int]:
    """Choose cuts so that slices have the wanted number of rows.

    block: int64[ranks, cuts], the block of each rank with the operation. first_channel: channel
    of the cuts among those of the first rank. Returns indices of cuts, ascending.
    """
    rows_before = [
        np.cumsum([0, *(block.rows for block in entry.operations.blocks)]) for entry in entries
    ]
    surely_before = np.min(
        [rows[block_number] for rows, block_number in zip(rows_before, block)], axis=0
    )
    # Where the operation is in its block is known roughly: numbers are evenly spaced.
    first, block_number = entries[0].operations, block[0]
    lowest = first.lowest[:, first_channel]
    end = np.where(
        lowest[block_number + 1] == NO_NUMBER, lowest[block_number] + 1, lowest[block_number + 1]
    )
    part = np.clip(
        (numbers - lowest[block_number]) / np.maximum(end - lowest[block_number], 1), 0.0, 1.0
    )
    row_position = rows_before[0][block_number] + part * np.diff(rows_before[0])[block_number]
    total = int(rows_before[0][-1])
    cuts: list[int] = []
    for cut in range(numbers.size):
        if total - row_position[cut] < SLICE_ROWS / 2:
            break
        if cuts:
            if row_position[cut] - row_position[cuts[-1]] >= SLICE_ROWS:
                cuts.append(cut)
        elif row_position[cut] >= FIRST_SLICE_ROWS and surely_before[cut] > FIRST_OPERATIONS:
            is_measured = _is_usual_work_measured(
                first.lowest, first.counts, int(block_number[cut]), row_position[cut]
            )
            if is_measured or row_position[cut] >= MAX_FIRST_SLICE_ROWS:
                cuts.append(cut)
    return cuts


def _is_usual_work_measured(lowest: Int, counts: Int, block: int, row_position: float) -> bool:
    """Return whether a rank has shown its usual work in each of its groups before a block.

    lowest, counts: see RankOperations. Groups with too few operations to look back from each to
    the one before show none.
    """
    begun = lowest[0] < NO_NUMBER
    is_over = lowest[block] == NO_NUMBER
    observed_count = np.minimum(np.where(is_over, counts, lowest[block] - lowest[0]), counts)
    is_rare = observed_count * MAX_LOOK_BACK_OPERATIONS < row_position
    return bool((~begun | is_rare | is_over | (observed_count > USUAL_WORK_SEGMENTS)).all())


def _make_spans(
    entries: Sequence[RankEntry], cut: Cut, numbers: Int, block: Int
) -> list[SliceSpan]:
    """Make the slices between cuts; block: int64[ranks, cuts]."""
    if not numbers.size:
        return []
    last_block = np.array([len(entry.operations.blocks) - 1 for entry in entries])
    cuts = [None, *(cut._replace(number=number) for number in numbers.tolist()), None]
    edges = np.column_stack([np.zeros(len(entries), np.int64), block, last_block])
    return [
        SliceSpan(
            cuts[index],
            cuts[index + 1],
            edges[:, index],
            edges[:, index + 1],
            np.array(
                [
                    _count_leading_blocks(entry, int(first))
                    for entry, first in zip(entries, edges[:, index])
                ]
            )
            if index
            else np.zeros(len(entries), np.int64),
        )
        for index in range(len(cuts) - 1)
    ]


def _count_leading_blocks(entry: RankEntry, first: int) -> int:
    """Count the blocks before a block that its first row can look back to."""
    rows, count = 0, 0
    while count < first and rows < LOOK_BACK_ROWS:
        count += 1
        rows += entry.operations.blocks[first - count].rows
    return count
