"""Directory of the channels of all ranks, known before any of their rows is read.

Each rank lists its channels (`analysis.timeline.collectives.rows`). This module combines them
into channels shared by all ranks, with the members of each, and leaves out those that
cannot be matched reliably.

Checks for errors that matching by number misses: restarts and shifted numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.collectives.operations import SEND, combine_labels
from clusterprof.analysis.timeline.collectives.rows import RankOperations
from clusterprof.analysis.timeline.model import Int

MIN_SKEW_OPERATIONS = 8  # minimum operations for a decision about skew
LAGS = (-3, -2, -1, 1, 2, 3)
MIN_FIT_RATIO = 4  # numbers shifted by a lag must fit that many times better


def find_skewed_rows(
    rank: Int,
    process_group: Int,
    sequence: Int,
    op: Int,
    leave_ns: Int,
    candidates: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Find rows of ranks whose leaves fit another operation of the group better: bool[n].

    All arrays [n]; int64 or int32, leave_ns in ns; candidates: bool, the rows to check. All
    members leave together, so from one operation to the next all clocks advance equally:

        others    100    300    150    400
        rank 3    300    150    400    ...       its numbers are one behind

    In a group of two it is unknown whose numbers are shifted: both are left out.
    """
    out = np.zeros(rank.size, np.bool_)
    rows = np.flatnonzero(candidates)
    order = rows[np.lexsort((sequence[rows], rank[rows], process_group[rows]))]
    follows = np.zeros(order.size, np.bool_)
    current, previous = order[1:], order[:-1]
    follows[1:] = (rank[current] == rank[previous]) & (
        process_group[current] == process_group[previous]
    )
    follows[1:] &= sequence[current] == sequence[previous] + 1
    step = np.zeros(rank.size, np.int64)
    step[current[follows[1:]]] = (leave_ns[current] - leave_ns[previous])[follows[1:]]
    rows = order[follows]
    del order, follows, current, previous  # there may be millions
    if not rows.size:
        return out
    median_step = _compute_row_medians(op[rows], step[rows])
    deviation = np.abs(step[rows] - median_step)
    # Rows are sorted by process group and rank: a new pair starts wherever either changes.
    opens = np.ones(rows.size, np.bool_)
    opens[1:] = (process_group[rows][1:] != process_group[rows][:-1]) | (
        rank[rows][1:] != rank[rows][:-1]
    )
    pair = np.cumsum(opens) - 1
    error, median_size = (
        _compute_group_medians(pair, deviation),
        _compute_group_medians(pair, median_step),
    )
    suspects = np.flatnonzero(
        (error > median_size // 10) & (np.bincount(pair) >= MIN_SKEW_OPERATIONS)
    )
    for pair_number in suspects.tolist():
        own_rows = rows[pair == pair_number]
        fits_better = _has_better_lag(
            own_rows, rows, process_group, rank, sequence, step, int(error[pair_number])
        )
        if fits_better:
            out |= (process_group == process_group[own_rows[0]]) & (rank == rank[own_rows[0]])
    return out


def _has_better_lag(
    own_rows: Int, rows: Int, process_group: Int, rank: Int, sequence: Int, step: Int, error: int
) -> bool:
    other_rows = rows[
        (process_group[rows] == process_group[own_rows[0]]) & (rank[rows] != rank[own_rows[0]])
    ]
    numbers, number_index = np.unique(sequence[other_rows], return_inverse=True)
    if not numbers.size:
        return False
    median_step = np.zeros(numbers.size, np.int64)
    median_step[number_index] = _compute_row_medians(sequence[other_rows], step[other_rows])
    for lag in LAGS:
        wanted = sequence[own_rows] + lag
        row = np.minimum(np.searchsorted(numbers, wanted), numbers.size - 1)
        present = numbers[row] == wanted
        if present.sum() >= MIN_SKEW_OPERATIONS:
            deviation = np.abs(step[own_rows] - median_step[row])[present]
            if int(np.median(deviation)) * MIN_FIT_RATIO < error:
                return True
    return False


def _compute_row_medians(group: Int, values: Int) -> Int:
    """Return for each row the lower median of the values of its group."""
    order = np.lexsort((values, group))
    _, first, inverse, count = np.unique(
        group[order], return_index=True, return_inverse=True, return_counts=True
    )
    out = np.empty_like(values)
    out[order] = values[order][first + (count - 1) // 2][inverse]
    return out


def _compute_group_medians(group: Int, values: Int) -> Int:
    """Return the lower median of each group, groups numbered from 0."""
    out = np.zeros(group.max() + 1, np.int64)
    out[group] = _compute_row_medians(group, values)
    return out


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Conversion from one clock to another: a shift with linear drift."""

    since_ns: int = 0
    shift_ns: int = 0
    drift: float = 0.0


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One process that has operations."""

    rank: int
    """Process: 0 … ranks - 1 over all jobs; a restarted process is another one."""
    global_rank: int
    """Rank number within its job."""
    job: int
    clock_offset: ClockOffset
    """Correction to add to its clock so that it roughly matches all others."""
    operations: RankOperations


@dataclass(frozen=True, slots=True)
class ChannelDirectory:
    """Entries are the channels of each rank, one after the other.

    Channels are shared by all ranks.
    """

    base: Int
    """int64[ranks + 1]: first entry of each rank; one more at the end."""
    channel: Int
    """int64[entries]: channel of each entry; -1 = left out."""
    member_index: Int
    """int64[entries]: index of the entry's rank among the channel's members, in the order of
    ranks.
    """
    process_group: Int
    """int64[channels]: label of each channel's process group."""
    members: Int
    """int64[channels]: number of ranks with rows in each channel."""
    expected_members: Int
    """int64[channels]: number of members of its process group in all, as far as known."""
    unmatched: Mapping[str, int]
    """Number of rows left out, by reason."""


def build_directory(
    ranks: Sequence[RankEntry], announced: Mapping[tuple[int, int], Int]
) -> ChannelDirectory:
    """Build the directory of channels of all ranks.

    announced: global ranks of each (job, group), int64[k].
    """
    tables = [entry.operations.channels for entry in ranks]
    sizes = [len(table) for table in tables]
    group, peer, direction, life = np.concatenate(tables).reshape(-1, 4).T
    count = np.concatenate([entry.operations.counts for entry in ranks])
    rank_index = np.repeat(np.arange(len(ranks)), sizes)
    job, global_rank = (
        np.repeat([getattr(entry, name) for entry in ranks], sizes)
        for name in ("job", "global_rank")
    )
    pair = direction > 0
    sender, receiver = (
        np.where(direction == SEND, global_rank, peer),
        np.where(direction == SEND, peer, global_rank),
    )
    low, high = np.minimum(sender, receiver), np.maximum(sender, receiver)
    zeros = np.zeros_like(low)
    of_group = combine_labels(job, group, zeros, zeros)
    process_group = np.where(pair, combine_labels(job, low, high, zeros + 1), of_group)
    numbers = np.where(pair, combine_labels(job, group, sender, receiver), of_group)
    unmatched: dict[str, int] = {}
    usable = np.ones(rank_index.size, np.bool_)

    def leave_out(rows: np.ndarray, reason: str) -> None:
        rows = rows & usable
        if count[rows].sum():
            unmatched[reason] = int(count[rows].sum())
        usable[rows] = False

    leave_out((group == 0) & ~pair, "group-unknown")
    leave_out(pair & (peer < 0), "peer-unknown")
    leave_out(~_check_restarts(rank_index, numbers, life, usable), "restart-unclear")
    leave_out(
        _find_skewed_channels(
            ranks, rank_index, process_group, combine_labels(numbers, life), usable & ~pair
        ),
        "sequence-skew",
    )
    channel, member_index, first, members = _assign_channels(combine_labels(numbers, life), usable)
    expected_members = _count_group_members(
        process_group, rank_index, usable, pair, job, group, announced
    )[first]
    base = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return ChannelDirectory(
        base, channel, member_index, process_group[first], members, expected_members, unmatched
    )


def _check_restarts(rank_index: Int, numbers: Int, life: Int, usable: np.ndarray) -> np.ndarray:
    """Return where a rank restarted as often as most ranks with which it has operations.

    A rank whose recording lacks the first start counts one restart less than the others:
    its numbers mean other operations.
    """
    clear = np.ones(rank_index.size, np.bool_)
    if not life.any():
        return clear
    rows = np.flatnonzero(usable)
    pair, of_pair = np.unique(combine_labels(rank_index[rows], numbers[rows]), return_inverse=True)
    max_life = np.zeros(pair.size, np.int64)
    np.maximum.at(max_life, of_pair, life[rows])
    _, first = np.unique(of_pair, return_index=True)
    _, number_space = np.unique(numbers[rows][first], return_inverse=True)
    # The most frequent count; of equally frequent ones the higher.
    codes, count = np.unique(number_space * (max_life.max() + 1) + max_life, return_counts=True)
    usual_restarts = np.zeros(number_space.max() + 1, np.int64)
    by_count = np.lexsort((codes, count))
    usual_restarts[codes[by_count] // (max_life.max() + 1)] = codes[by_count] % (max_life.max() + 1)
    clear[rows] = (max_life == usual_restarts[number_space])[of_pair]
    return clear


def _find_skewed_channels(
    ranks: Sequence[RankEntry],
    rank_index: Int,
    process_group: Int,
    label: Int,
    candidates: np.ndarray,
) -> np.ndarray:
    """Find channels with shifted sequence numbers, from the samples that all ranks keep."""
    out = np.zeros(rank_index.size, np.bool_)
    base, entries, numbers, leaves = 0, [], [], []
    for entry_of_rank in ranks:
        channel_index, number, leave = entry_of_rank.operations.samples.unpack()
        entries.append(channel_index + base)
        numbers.append(number)
        leaves.append(leave)
        base += len(entry_of_rank.operations.channels)
    entry, number, leave = (np.concatenate(parts) for parts in (entries, numbers, leaves))
    del entries, numbers, leaves
    selected = candidates[entry]
    if not selected.all():
        entry, number, leave = entry[selected], number[selected], leave[selected]
    del selected
    if not entry.size:
        return out
    # Of a large job each column takes tens of megabytes: half of that with short numbers.
    short: Any = np.int32 if max(entry.size, rank_index.size) < 1 << 31 else np.int64
    op = np.unique(combine_labels(label[entry], number), return_inverse=True)[1].astype(short)
    entry = entry.astype(short)
    group = np.unique(process_group, return_inverse=True)[1].astype(short)
    skewed = find_skewed_rows(
        rank_index.astype(short)[entry], group[entry], number, op, leave, np.ones(op.size, np.bool_)
    )
    if skewed.any():
        skewed_labels = np.unique(
            combine_labels(rank_index[entry[skewed]], process_group[entry[skewed]])
        )
        out = np.isin(combine_labels(rank_index, process_group), skewed_labels) & candidates
    return out


def _assign_channels(label: Int, usable: np.ndarray) -> tuple[Int, Int, Int, Int]:
    """Assign numbers to channels; return channel and member index of each entry.

    Also the first entry and the size of each channel.
    """
    channel, member_index = np.full(label.size, -1), np.zeros(label.size, np.int64)
    rows = np.flatnonzero(usable)
    _, first, inverse, size = np.unique(
        label[rows], return_index=True, return_inverse=True, return_counts=True
    )
    channel[rows] = inverse
    order = np.argsort(inverse, kind="stable")  # entries are in the order of ranks
    start = np.cumsum(size) - size
    member_index[rows[order]] = np.arange(rows.size) - start[inverse[order]]
    return channel, member_index, rows[first], size


def _count_group_members(
    process_group: Int,
    rank_index: Int,
    usable: np.ndarray,
    pair: np.ndarray,
    job: Int,
    group: Int,
    announced: Mapping[tuple[int, int], Int],
) -> Int:
    """Count the members of each entry's process group: announced, else seen; 2 for pairs."""
    labels, first, group_index = np.unique(process_group, return_index=True, return_inverse=True)
    member_labels = np.unique(
        group_index[usable] * np.int64(rank_index.max(initial=0) + 1) + rank_index[usable]
    )
    expected_members = np.bincount(
        member_labels // (rank_index.max(initial=0) + 1), minlength=labels.size
    )
    expected_members[pair[first]] = 2
    for number, row in enumerate(first.tolist()):
        ranks = announced.get((int(job[row]), int(group[row])))
        if ranks is not None and not pair[row]:
            expected_members[number] = len(ranks)
    return expected_members[group_index]
