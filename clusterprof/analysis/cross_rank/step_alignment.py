"""Merge steps that ranks do not end together, up to a step that all ranks end together.

A host that runs ahead of its device ends a step before the device does; a host whose
data are late ends it when these have arrived. A rank's fault and the wait of the others
for it may therefore lie in steps of different numbers. When all ranks end a step
together again, both lie before it:

    ends of steps    rank 0   |----|----|----|----|----|
                     rank 1   |----|----|--------|--|--|    data late in the third
    operations                |    |    |           |  |

It also decides whether ranks wait for each other in every step.

Ranks are *synchronous* when their steps have the same numbers and end together: in nine
of ten steps the distance between the ends of two ranks is, within 5 ms or a tenth of a
step, that of the 32 steps around it; and it does not drift, as the distance of ranks
that are merely equally fast does. Where hosts run ahead of their devices, steps need
not end together: then the ranks never differ by more than a few steps, and another sign
shows that they wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clusterprof.analysis.attribution.rank.step_blocks import ALL_RANKS_GROUP
from clusterprof.analysis.spill import SpillReader
from clusterprof.analysis.timeline.collectives.rows import (
    ARRIVE,
    DURATION,
    HEAD_ROWS,
    SEQUENCE,
    RankOperations,
    RankRowBuilder,
    Store,
    read_block,
)
from clusterprof.analysis.timeline.model import Float, Int
from clusterprof.probe import layout

STEP_END_TOLERANCE_NS, STEP_END_TOLERANCE_RATIO = 5_000_000, 0.1
NEIGHBOR_STEPS = 32
"""Steps over which the usual distance of two step ends is taken."""
_MAX_DRIFT_FACTOR = 2.5
"""Largest growth of the distance over 16 steps, relative to one step.

The distance of independent ranks grows 4 times as much over 16 steps as over one; that
of synchronous ranks does not grow.
"""
_DRIFT_NOISE_RATIO = 0.01  # of a step: less is noise
MIN_COMMON_STEPS, MIN_SYNCHRONOUS_RATIO = 8, 0.9
MAX_STEP_LEAD = 3
"""Largest number of steps a synchronous host may be ahead of another.

Two steps that its device has not executed yet, and one that the host is about to end.
"""
MIN_LENGTH_CORRELATION, MIN_CORRELATED_STEPS = 0.8, 24
"""Rank correlation of step lengths from which they vary together, and the steps it needs.

The standard error of the correlation of 24 independent lengths is 0.2: 0.8 is four
times as much.
"""
MIN_EXPECTED_DRIFT_STEPS = 4.0
"""Steps by which independent ranks would have drifted apart by their own lost time."""


def has_common_step_ends(ends: Sequence[tuple[Int, Int]]) -> bool:
    """Return whether ranks are synchronous by the ends of their steps.

    ends: per rank, step numbers and ends (ns), int64[steps] each.
    """
    numbers = ends[0][0]
    for rank_numbers, _ in ends[1:]:
        numbers = np.intersect1d(numbers, rank_numbers)
    max_steps = max(number.size for number, _ in ends)
    if numbers.size < max(MIN_COMMON_STEPS, MIN_SYNCHRONOUS_RATIO * max_steps):
        return False
    table = np.stack([end[np.searchsorted(number, numbers)] for number, end in ends])
    middle = np.sort(table - table[:, :1], axis=0)[(len(ends) - 1) // 2]
    step_ns = float(np.median(np.diff(middle)))
    return all(_has_stable_distance(row - row[0] - middle, step_ns) for row in table)


def _has_stable_distance(apart_ns: Int, step_ns: float) -> bool:
    """Return whether the distance of a rank's step ends from the middle rank's is stable.

    apart_ns: int64[steps], ns.
    """
    allowed = max(STEP_END_TOLERANCE_NS, STEP_END_TOLERANCE_RATIO * step_ns)
    near_count = 0
    for begin in range(0, apart_ns.size, NEIGHBOR_STEPS):
        part = apart_ns[begin : begin + NEIGHBOR_STEPS]
        near_count += int(np.count_nonzero(np.abs(part - np.median(part)) <= allowed))
    if near_count < MIN_SYNCHRONOUS_RATIO * apart_ns.size:
        return False
    lag = NEIGHBOR_STEPS // 2
    if apart_ns.size < 2 * lag:
        return True
    once = np.median(np.abs(apart_ns[1:] - apart_ns[:-1]))
    later = np.median(np.abs(apart_ns[lag:] - apart_ns[:-lag]))
    return bool(later <= max(_MAX_DRIFT_FACTOR * once, _DRIFT_NOISE_RATIO * step_ns))


def has_bounded_step_lead(
    ends: Sequence[tuple[Int, Int]], own_ns: Sequence[int], busy_waited: bool = False
) -> bool:
    """Return whether ranks stay within a few steps because they wait for each other.

    Hosts run ahead of devices that wait, so steps need not end together: how long a host is
    ahead depends on how long its device waits, the number of steps it is ahead does not.
    Ranks that are merely equally fast stay close for a while too. One of three signs shows
    that ranks wait for each other: devices busy-wait (`busy_waited`); the ranks would have
    drifted apart by what each lost by itself (`own_ns`); the lengths of their steps rise
    and fall together.

    ends: per rank, step numbers and ends (ns), int64[steps] each. own_ns: ns per rank.
    """
    numbers = ends[0][0]
    for rank_numbers, _ in ends[1:]:
        numbers = np.intersect1d(numbers, rank_numbers)
    if numbers.size < max(
        MIN_COMMON_STEPS, MIN_SYNCHRONOUS_RATIO * max(number.size for number, _ in ends)
    ):
        return False
    table = np.stack([end[np.searchsorted(number, numbers)] for number, end in ends])
    # Node clocks may be far apart: take each rank's median offset to the first rank out.
    offset_ns = np.median(table - table[0], axis=1).astype(np.int64)
    table = np.maximum.accumulate(table - offset_ns[:, None], axis=1)
    middle = np.sort(table, axis=0)[(len(ends) - 1) // 2]
    finished_steps = np.stack([np.searchsorted(row, middle, side="right") for row in table])
    if int((finished_steps.max(axis=0) - finished_steps.min(axis=0)).max()) > MAX_STEP_LEAD:
        return False
    drift = max(own_ns) - min(own_ns)
    step_ns = float(np.median(np.diff(middle)))
    return (
        busy_waited
        or drift >= MIN_EXPECTED_DRIFT_STEPS * step_ns
        or _has_correlated_lengths(np.diff(table), np.diff(middle))
    )


def _has_correlated_lengths(lengths_ns: Int, middle_ns: Int) -> bool:
    """Return whether all ranks' steps are long and short when those of the middle rank are.

    Lengths are compared by rank order, so that one step that is long everywhere, as the
    first step is, has no weight. lengths_ns: int64[ranks, steps]; middle_ns: int64[steps].
    """
    ranks = np.stack([_rank_values(row) for row in (middle_ns, *lengths_ns)])
    if middle_ns.size < MIN_CORRELATED_STEPS or (np.ptp(ranks, axis=1) == 0).any():
        return False
    table: Any = np.corrcoef(ranks)
    return bool((table[0, 1:] >= MIN_LENGTH_CORRELATION).all())


def _rank_values(row: Int) -> Float:
    """Return the rank of each value, float64[n]; equal values share their mean rank."""
    _, position, count = np.unique(row, return_inverse=True, return_counts=True)
    places: Float = (np.cumsum(count) - (count - 1) / 2)[position]
    return places


MAX_MERGED_STEPS = 16
"""Largest number of steps merged into one operation.

In a longer operation several ranks may have been late for each other.
"""


def read_step_ends(operations: RankOperations, reader: SpillReader) -> tuple[Int, Int, Int]:
    """Read a rank's steps by number: number, end (ns), waiting time (ns); int64[steps]."""
    parts = [np.zeros((3, 0), np.int64)]
    for block in operations.blocks:
        kinds = (
            max((int(c) for c in (*block.arrive_categories, *block.leave_categories)), default=-1)
            + 1
        )
        rows = np.zeros((HEAD_ROWS + 2 * kinds, block.rows), np.int64)
        read_block(reader.get(block.location, block.length), block, np.arange(kinds), rows)
        parts.append(np.stack([rows[SEQUENCE], rows[ARRIVE] + rows[DURATION], rows[DURATION]]))
    number, end, stay = np.concatenate(parts, axis=1)
    number, first = np.unique(number, return_index=True)
    return number, end[first], stay[first]


def find_common_step_ends(ends: Sequence[tuple[Int, Int]]) -> Int:
    """Find the numbers of the steps that all ranks end together, int64[n].

    ends: per rank, step numbers and ends (ns), int64[steps] each. The found steps are at
    most MAX_MERGED_STEPS apart, and the last step that all ranks have is one of
    them.
    """
    numbers = ends[0][0]
    for rank_numbers, _ in ends[1:]:
        numbers = np.intersect1d(numbers, rank_numbers)
    table = np.stack([end[np.searchsorted(number, numbers)] for number, end in ends])
    step_ns = float(np.median(np.diff(table[0]))) if numbers.size > 1 else 0.0
    apart = table - table[0]
    for row in range(0, numbers.size, NEIGHBOR_STEPS):
        chunk = apart[:, row : row + NEIGHBOR_STEPS]
        chunk -= np.median(chunk, axis=1).astype(np.int64)[:, None]
    spread = apart.max(axis=0) - apart.min(axis=0)
    is_common = spread <= max(STEP_END_TOLERANCE_NS, STEP_END_TOLERANCE_RATIO * step_ns)
    is_common[-1:] = True
    rows, last = [], -1
    for row in np.flatnonzero(is_common).tolist():
        rows += [*range(last + MAX_MERGED_STEPS, row, MAX_MERGED_STEPS), row]
        last = row
    return numbers[np.array(rows, np.int64)]


def compute_common_wait_ns(steps: Sequence[tuple[Int, Int, Int]]) -> int:
    """Compute for how long all ranks waited equally long in every step, summed over steps, ns.

    Synchronous ranks meet in every step, and a transfer takes about equally long in each:
    more than twice the median counts as twice the median.

    steps: per rank, step numbers, ends (ns) and waiting time (ns); int64[steps] each.
    """
    numbers = steps[0][0]
    for rank_numbers, _, _ in steps[1:]:
        numbers = np.intersect1d(numbers, rank_numbers)
    waited = np.stack(
        [stay[np.searchsorted(step_numbers, numbers)] for step_numbers, _, stay in steps]
    )
    least = waited.min(axis=0)
    return int(np.minimum(least, 2 * int(np.median(least))).sum()) if numbers.size else 0


def merge_steps(
    operations: RankOperations, numbers: Int, reader: SpillReader, store: Store
) -> RankOperations:
    """Merge the steps of a rank up to each of some step numbers, all waits at the end.

    Steps behind the last number, and merged steps that do not end with the step of that
    number, are left out. numbers: int64[n], ascending.
    """
    used = [
        int(c)
        for block in operations.blocks
        for c in (*block.arrive_categories, *block.leave_categories)
    ]
    categories = max(used, default=-1) + 1
    parts = []
    for block in operations.blocks:
        rows = np.zeros((HEAD_ROWS + 2 * categories, block.rows), np.int64)
        data = reader.get(block.location, block.length)
        read_block(data, block, np.arange(categories), rows)
        parts.append(rows[: HEAD_ROWS + categories])
    if not parts:
        return operations
    rows = np.concatenate(parts, axis=1)
    group = np.searchsorted(numbers, rows[SEQUENCE])
    before = np.concatenate([[0], np.cumsum(rows[DURATION])])
    last = np.flatnonzero(np.append(np.diff(group) != 0, True))
    stay = np.diff(before[last + 1], prepend=0)
    is_complete = group[last] < numbers.size
    is_complete[is_complete] = (
        rows[SEQUENCE, last[is_complete]] == numbers[group[last[is_complete]]]
    )
    last, stay = last[is_complete], stay[is_complete]
    end = rows[ARRIVE, last] + rows[DURATION, last]
    ones = np.ones_like(end)
    table = np.stack(
        [
            end - stay,
            end,
            ALL_RANKS_GROUP * ones,
            rows[SEQUENCE, last],
            -ones,
            layout.OTHER_OPERATION * ones,
            stay,
        ]
    )
    spent = rows[HEAD_ROWS:, last]
    out = RankRowBuilder(store)
    out.add(table, spent, spent)
    merged_operations = out.finish()
    return operations if merged_operations is None else merged_operations
