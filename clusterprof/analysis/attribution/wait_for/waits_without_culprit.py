"""Find pipeline bubbles: waits due to the schedule of a pipeline, not to a rank's work.

    stage 0   |1|2|3|4|-- waits --|4|3|2|1|      both stages work equally long,
    stage 1   waits |1|2|3|4|4|3|2|1| waits      and each waits for the other

The blame attributes a wait for a message to the work of the sender. Between ranks with
equal work this wait is due to the schedule: over many steps a rank can delay another by
its work for no longer than it was busier than the other. The rest is a bubble and has
no culprit.

Busy is all time between operations. Other reasons for late messages (a slow disk, …)
are therefore subtracted as far as the rank is blamed for them. Evaluated per segment of
SEGMENT_OPERATIONS operations per rank, independent of blocks, so
that a rank that was slow in one segment and its neighbor in another do not cancel out.

It also measures how the work of ranks differs: systematically, at random, or by outliers.

For each operation it is known by how much each rank worked less than the last arrival.
In a window of operations of one process group, the *level* of a rank is how much more
than the median rank it worked on average, and the *spread* is the typical size of the
remaining differences:

    work of rank 0   100 103  98 101  99   level 0       spread 2
    work of rank 1   129 131 133 130 127   level 30      beyond four errors: systematic
    work of rank 2    99 101 160 100  98   level 0       160 is an outlier, not spread

A level counts if chance would hardly ever produce it. Random differences are *uneven*
work if they are large compared to the time between operations, or skewed as sequence
lengths are; jitter is symmetric.

It also finds jitter: waits for work that varies at random, without culprit and without cause.

    rank 0   |== 100 ==|-- 3 --|  |== 103 ==|       |== 98 ===|-- 4 --|
    rank 1   |== 103 ==|          |== 99 ===|- 4 -| |== 102 ==|             at random

The blame attributes every wait for work to the work of the last arrival. As far as that rank works
more than the other in operation after operation (its level,
analysis.attribution.wait_for.waits_without_culprit), or had an outlier, it keeps the blame. The
rest is jitter and has no cause. If differences are large or skewed, work is uneven, and the rest is
`sync-imbalance`.

Evaluated for WINDOW_OPERATIONS operations of a process group at a
time, independent of blocks. Point-to-point messages are excluded: the jitter of a
pipeline shows as bubbles (analysis.attribution.wait_for.waits_without_culprit).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point
from clusterprof.analysis.attribution.wait_for.blame import (
    IMBALANCE,
    SLOW_COMPUTE,
    TRANSFER,
    UNKNOWN_WORK_DEFICIT,
    BlockBlame,
    list_causes,
)
from clusterprof.analysis.attribution.wait_for.late_rank_excess import expand_ranges
from clusterprof.analysis.attribution.wait_for.time_bins import index_keys
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.analysis.timeline.model import Float, Int

BUBBLE = "sync-bubble"
"""Id of the cause that bubbles are reported under."""
SEGMENT_OPERATIONS = 64
"""Operations per rank in one segment, over which busy times are compared."""
_MAX_UNMERGED_PAIRS = 1 << 16


class PipelineBubbles:
    """Sums of bubbles over all blocks; where the run is cut into blocks changes no nanosecond."""

    def __init__(self, ranks: int, categories: Sequence[str]) -> None:
        names = list_causes(categories)
        self._work = names.index(IMBALANCE), names.index(SLOW_COMPUTE)
        self._transfer = names.index(TRANSFER)
        self._ranks, self._names = ranks, names
        self.victim_ns = np.zeros((ranks, len(names)), np.int64)
        """int64[rank, cause]: of the waits blamed on work, the part that is a bubble, ns;
        `culprit_ns` sums the same waits by culprit.
        """
        self.culprit_ns = np.zeros((ranks, len(names)), np.int64)
        self._operations = 0
        empty = np.zeros(0, np.int64)
        self._blamed: list[tuple[Int, Int]] = [(empty, empty)]
        self._begin_ns = np.full(ranks, -1, np.int64)
        self._latest_ns = np.full(ranks, -1, np.int64)
        self._blocked_ns = np.zeros(ranks, np.int64)

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add one block of operations and its blame."""
        row_op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
        segment_length = SEGMENT_OPERATIONS * self._ranks
        begin, entry = 0, 0
        while begin < ops.process_group.size:
            end = min(
                ops.process_group.size, begin + segment_length - self._operations % segment_length
            )
            low, high = int(ops.first[begin]), int(ops.first[end])
            last = int(np.searchsorted(blamed.row, high))
            self._add(ops, blamed, row_op, slice(low, high), slice(entry, last))
            self._operations += end - begin
            if self._operations % segment_length == 0:
                self._settle()
            begin, entry = end, last

    def begin(self, rank: Int, leave_ns: Int) -> None:
        """Begin after operations that are not added: when each rank left the last, ns."""
        self._begin_ns[rank] = self._latest_ns[rank] = leave_ns

    def finish(self) -> PipelineBubbles:
        """Evaluate the last segment; call once, at the end."""
        self._settle()
        return self

    def merge(self, other: PipelineBubbles) -> None:
        """Add the bubbles of other operations; both are finished."""
        self.victim_ns += other.victim_ns
        self.culprit_ns += other.culprit_ns

    def victim_change(self, rank: int) -> dict[str, int]:
        """Return the changes to the victim times of a rank by cause, ns; they sum to 0."""
        return self._make_change(self.victim_ns[rank], with_bubble=True)

    def culprit_change(self, rank: int) -> dict[str, int]:
        """Return the changes to the culprit times of a rank by cause, ns; bubbles have no
        culprit."""
        return self._make_change(self.culprit_ns[rank], with_bubble=False)

    @staticmethod
    def add_causes(ns: Mapping[str, int], added_ns: Mapping[str, int]) -> dict[str, int]:
        """Return the sum of two mappings from cause to ns, without causes that become 0."""
        sums = {cause: ns.get(cause, 0) + added_ns.get(cause, 0) for cause in (*ns, *added_ns)}
        return {cause: amount for cause, amount in sums.items() if amount}

    def _make_change(self, ns: Int, with_bubble: bool) -> dict[str, int]:
        out = {self._names[index]: -int(ns[index]) for index in self._work if ns[index]}
        if out and with_bubble:
            out[BUBBLE] = int(ns.sum())
        return out

    def _add(
        self, ops: Operations, blamed: BlockBlame, row_op: Int, rows: slice, entries: slice
    ) -> None:
        rank = ops.rank[rows]
        new_ranks = rank[self._begin_ns[rank] < 0]
        if new_ranks.size:
            first = np.full(self._ranks, np.iinfo(np.int64).max)
            np.minimum.at(first, rank, ops.arrive_ns[rows])
            self._begin_ns[new_ranks] = self._latest_ns[new_ranks] = first[new_ranks]
        np.maximum.at(self._latest_ns, rank, ops.leave_ns[rows])
        np.add.at(self._blocked_ns, rank, ops.blocked_ns[rows])
        message = is_point_to_point(ops.operation)[row_op[blamed.row[entries]]]
        if not message.any():
            return
        row, culprit, cause, ns = (
            column[entries][message]
            for column in (blamed.row, blamed.culprit, blamed.cause, blamed.ns)
        )
        is_pair = (culprit >= 0) & (culprit != ops.rank[row]) & (cause != self._transfer)
        row, culprit, cause = row[is_pair], culprit[is_pair], cause[is_pair]
        # kind: 0 imbalance, 1 slow compute, 2 any other cause
        kind = np.where(cause == self._work[0], 0, np.where(cause == self._work[1], 1, 2))
        key = (ops.rank[row] * self._ranks + culprit) * 3 + kind
        self._blamed.append(_sum_by_pair(key, ns[is_pair]))
        if (
            sum(keys.size for keys, _ in self._blamed)
            > 2 * self._blamed[0][0].size + _MAX_UNMERGED_PAIRS
        ):
            self._blamed = [_sum_by_pair(*(np.concatenate(c) for c in zip(*self._blamed)))]

    def _settle(self) -> None:
        """Evaluate a segment: compare what each rank is blamed for by another with who was
        busier."""
        keys, ns = (np.concatenate(column) for column in zip(*self._blamed))
        busy = self._latest_ns - self._begin_ns - self._blocked_ns
        pairs, of_key = np.unique(keys // 3, return_inverse=True)
        table = np.zeros((pairs.size, 3), np.int64)
        np.add.at(table, (of_key, keys % 3), ns)
        rank, culprit = pairs // self._ranks, pairs % self._ranks
        excess_ns = np.maximum(busy[culprit] - busy[rank] - table[:, 2], 0)
        work = table[:, :2].sum(axis=1)
        bubble = np.maximum(work - excess_ns, 0)
        # A culprit that took part in no operation in this segment cannot be compared.
        bubble[self._latest_ns[culprit] <= self._begin_ns[culprit]] = 0
        first = np.floor(table[:, 0] * (bubble / np.maximum(work, 1))).astype(np.int64)
        first = np.clip(first, bubble - table[:, 1], np.minimum(bubble, table[:, 0]))
        for cause, part in zip(self._work, (first, bubble - first)):
            np.add.at(self.victim_ns[:, cause], rank, part)
            np.add.at(self.culprit_ns[:, cause], culprit, part)
        empty = np.zeros(0, np.int64)
        self._blamed = [(empty, empty)]
        self._begin_ns = self._latest_ns.copy()
        self._blocked_ns[:] = 0


def _sum_by_pair(key: Int, ns: Int) -> tuple[Int, Int]:
    keys, of_entry = np.unique(key, return_inverse=True)
    sums = np.zeros(keys.size, np.int64)
    np.add.at(sums, of_entry, ns)
    return keys, sums


SIGNIFICANT_ERRORS = 4.0
"""Standard errors beyond which a level is significant (by chance for one rank in 30,000)."""
OUTLIER_SPREADS = 6.0
"""Spreads beyond which a difference is an outlier, not jitter."""
UNEVEN_SPREAD_RATIO = 0.15
"""Work is uneven if its spread exceeds this part of the time between operations. Jitter of
a tenth measures up to 0.13 over 40 steps of two ranks.
"""
UNEVEN_SKEWNESS = 0.7
"""Work is also uneven if its skewness exceeds this value (sequence lengths: 1 to 3;
chance: 0).
"""
MIN_UNEVEN_SPREAD_RATIO = 0.02
"""Skewed work counts only if its spread is at least this part of the time between
operations: the noise of every machine is slightly skewed.
"""
_MAX_GROUP_LENGTHS = 16  # groups of more different lengths are sorted all at once
_MAD_TO_SIGMA = 1.4826  # median of |x| -> standard deviation of a normal distribution
_SKEWNESS_ERRORS = 3.0  # skewness must also exceed this many of its standard errors


class WorkSamples(NamedTuple):
    """Work of ranks in operations; n rows, sorted by window and operation."""

    window: Int
    operation: Int
    rank: Int
    work_ns: Float
    """How much more the rank worked than the last arrival: 0 for that rank, mostly negative."""


class WorkVariation(NamedTuple):
    """Work differences of each window; one row per window."""

    spread_ns: Float
    uneven: NDArray[np.bool_]
    key: Int
    """window * ranks + rank of each level, ascending."""
    level_ns: Float
    """0 where the level may be chance."""
    level_of_row_ns: Float
    """Level of the rank of each sample."""

    def level(self, window: Int, rank: Int, ranks: int) -> Float:
        """Return the level of ranks in windows, float64[m], ns."""
        position = np.minimum(np.searchsorted(self.key, window * ranks + rank), self.key.size - 1)
        has_level = self.key[position] == window * ranks + rank
        return np.where(has_level, self.level_ns[position], 0.0)


def evaluate_work_variation(
    samples: WorkSamples, windows: int, ranks: int, period_ns: Float
) -> WorkVariation:
    """Evaluate the work differences of windows.

    period_ns: float64[windows], mean time from one operation to the next.
    """
    difference = (
        samples.work_ns
        - compute_group_medians(samples.work_ns, samples.operation)[samples.operation]
    )
    key, key_index = index_keys(samples.window * ranks + samples.rank)
    count = np.bincount(key_index, minlength=key.size)
    level = np.bincount(key_index, difference, key.size) / np.maximum(count, 1)
    residual = difference - level[key_index]
    window_of_key = key // ranks
    members = np.bincount(window_of_key, minlength=windows)
    # Each rank is part of the median that it is compared to.
    correction = np.sqrt(members / np.maximum(members - 1, 1))
    spread = (
        _MAD_TO_SIGMA
        * compute_group_medians(np.abs(residual), samples.window, windows)
        * correction
    )
    significant = np.abs(level) > SIGNIFICANT_ERRORS * spread[window_of_key] / np.sqrt(
        np.maximum(count, 1)
    )
    skewness, error = _compute_skewness(residual, samples.window, spread, members)
    is_skewed = (skewness > np.maximum(UNEVEN_SKEWNESS, _SKEWNESS_ERRORS * error)) & (
        spread > MIN_UNEVEN_SPREAD_RATIO * period_ns
    )
    uneven = is_skewed | (spread > UNEVEN_SPREAD_RATIO * period_ns)
    level = np.where(significant, level, 0.0)
    return WorkVariation(spread, uneven, key, level, level[key_index])


def _compute_skewness(
    residual: Float, window: Int, spread: Float, members: Int
) -> tuple[Float, Float]:
    """Return the skewness of each window, without outliers, and its standard error.

    Differences from the median of few ranks are less skewed than the work itself; this is
    corrected.
    """
    size = spread.size
    regular = np.abs(residual) <= OUTLIER_SPREADS * spread[window]
    residual, window = residual[regular], window[regular]
    count = np.maximum(np.bincount(window, minlength=size), 1)
    residual = residual - (np.bincount(window, residual, size) / count)[window]
    square = np.bincount(window, residual**2, size) / count
    cube = np.bincount(window, residual**3, size) / count
    raw = cube / np.maximum(square, 1e-9) ** 1.5
    n = np.maximum(members, 3)
    retained = np.where(members > 2, (n - 2) / np.sqrt(n * (n - 1.0)), np.inf)
    return raw / retained, np.sqrt(6.0 / count) / np.where(members > 2, retained, 1.0)


def compute_group_medians(value: Float, group: Int, groups: int | None = None) -> Float:
    """Compute the median of each group: float64[groups], 0 for an empty group.

    value: float64[n]. group: int64[n]. Of an even number of values, the mean of the middle
    two.
    """
    size = int(group.max(initial=-1)) + 1 if groups is None else groups
    count = np.bincount(group, minlength=size)
    if not value.size:
        return np.zeros(size)
    begin = np.cumsum(count) - count
    lengths = np.flatnonzero(np.bincount(count))
    if lengths.size > _MAX_GROUP_LENGTHS or (group[1:] < group[:-1]).any():
        order = np.lexsort((value, group))
        low, high = begin + np.maximum(count - 1, 0) // 2, begin + count // 2
        last = value.size - 1
        middle = value[order[np.minimum(low, last)]] + value[order[np.minimum(high, last)]]
        return np.where(count > 0, middle / 2, 0.0)
    out = np.zeros(size)
    for length in lengths[lengths > 0].tolist():
        groups_of_length = np.flatnonzero(count == length)
        if groups_of_length.size * length == value.size:
            rows = value.reshape(-1, length)
        else:
            rows = value[begin[groups_of_length, None] + np.arange(length)]
        low, high = (length - 1) // 2, length // 2
        parted = np.partition(rows, (low, high) if low < high else low, axis=1)
        out[groups_of_length] = (parted[:, low] + parted[:, high]) / 2
    return out


WINDOW_OPERATIONS = 64
"""Operations of a process group in one window, over which the work of its ranks is
compared.
"""
_MIN_ROWS_TO_SETTLE = 1 << 16
"""Number of pending rows from which full windows are looked for and evaluated."""


class Jitter:
    """Sums of the waits for work that are jitter, over all blocks."""

    def __init__(self, ranks: int, categories: Sequence[str]) -> None:
        names = list_causes(categories)
        self._work = names.index(IMBALANCE), names.index(SLOW_COMPUTE)
        self._ranks = ranks
        self.victim_ns = np.zeros((ranks, 2), np.int64)
        """int64[rank, 2], ns: what leaves imbalance and slow compute by victim; imbalance may be
        negative: it gains. `culprit_ns` sums by culprit.
        """
        self.culprit_ns = np.zeros((ranks, 2), np.int64)
        self.join_last = False
        """Whether operations after the last full window of a group belong to that window: further
        operations of the group follow, which are added elsewhere.
        """
        self._groups: dict[int, tuple[int, int]] = {}
        """Process group -> (operations so far, when its lowest rank left the last of them)."""
        self._operations: list[Int] = []
        """int64[5, operations]: process group, number, last arrival, period, pending rows."""
        self._rows: list[Int] = []
        """int64[4, rows]: rank, work deficit, waits for imbalance and for slow compute."""
        self._count, self._kept = 0, 0

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add one block of operations and its blame."""
        if not ops.process_group.size:
            return
        is_evaluated = (
            ~is_point_to_point(ops.operation)
            & (np.diff(ops.first) > 1)
            & (blamed.last_arrival >= 0)
        )
        row_op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
        ordinal, period = self._number_operations(ops, is_evaluated)
        direct = blamed.culprit == blamed.last_arrival[row_op[blamed.row]]
        rows = np.flatnonzero(
            is_evaluated[row_op] & (blamed.work_deficit_ns != UNKNOWN_WORK_DEFICIT)
        )
        table = np.empty((4, rows.size), np.int64)
        table[:2] = ops.rank[rows], blamed.work_deficit_ns[rows]
        for line, cause in zip(table[2:], self._work):
            entries = np.flatnonzero(direct & (blamed.cause == cause))
            work = np.bincount(blamed.row[entries], blamed.ns[entries], row_op.size)
            line[:] = work[rows]
        size = np.bincount(row_op[rows], minlength=ordinal.size)
        columns = np.stack([ops.process_group, ordinal, blamed.last_arrival, period, size])
        self._operations.append(columns[:, size > 0])
        self._rows.append(table)
        self._count += rows.size
        if self._count > max(_MIN_ROWS_TO_SETTLE, 2 * self._kept):
            self._settle(only_full=True)

    def finish(self) -> Jitter:
        """Evaluate the remaining windows; call once, at the end."""
        if self._rows:
            self._settle(only_full=False)
        return self

    def merge(self, other: Jitter) -> None:
        """Add the jitter of other operations; both are finished."""
        self.victim_ns += other.victim_ns
        self.culprit_ns += other.culprit_ns

    def jitter_ns(self, rank: int) -> int:
        """Return how much of the victim time of a rank is jitter, ns."""
        return int(self.victim_ns[rank].sum())

    def victim_change(self, rank: int) -> dict[str, int]:
        """Return the changes to the victim times of a rank by cause, ns."""
        return self._make_change(self.victim_ns[rank])

    def culprit_change(self, rank: int) -> dict[str, int]:
        """Return the changes to the culprit times of a rank by cause, ns; jitter has no culprit."""
        return self._make_change(self.culprit_ns[rank])

    def _make_change(self, ns: Int) -> dict[str, int]:
        pairs = zip((IMBALANCE, SLOW_COMPUTE), ns.tolist())
        return {cause: -amount for cause, amount in pairs if amount}

    def _number_operations(self, ops: Operations, is_evaluated: np.ndarray) -> tuple[Int, Int]:
        """Return per operation its number in its process group and the time since the previous
        one, ns.
        """
        ordinal, period = np.zeros((2, ops.process_group.size), np.int64)
        operation_index = np.flatnonzero(is_evaluated)
        groups, group = np.unique(ops.process_group[operation_index], return_inverse=True)
        order = np.argsort(group, kind="stable")
        operation_index, group = operation_index[order], group[order]
        before = [self._groups.get(label, (0, 0)) for label in groups.tolist()]
        count, last = np.array(before, np.int64).reshape(-1, 2).T
        leave = ops.leave_ns[ops.first[operation_index]]
        size = np.bincount(group, minlength=groups.size)
        ends = np.cumsum(size)
        ordinal[operation_index] = (
            count[group] + np.arange(operation_index.size) - (ends - size)[group]
        )
        previous = np.append(0, leave[:-1])
        previous[ends - size] = last
        period[operation_index] = np.where(
            ordinal[operation_index] > 0, np.maximum(leave - previous, 0), -1
        )
        after = zip((count + size).tolist(), leave[ends - 1].tolist())
        self._groups.update(zip(groups.tolist(), after))
        return ordinal, period

    def _settle(self, only_full: bool) -> None:
        """Evaluate windows; `only_full` leaves windows that may still grow."""
        operations = np.concatenate(self._operations, axis=1)
        group, ordinal, _, _, size = operations
        window = ordinal // WINDOW_OPERATIONS
        groups, group_index = np.unique(group, return_inverse=True)
        full_windows = np.array(
            [self._groups[label][0] // WINDOW_OPERATIONS for label in groups.tolist()], np.int64
        )
        ready = np.ones(group.size, np.bool_)
        if only_full:
            ready = window < full_windows[group_index] - self.join_last
        elif self.join_last:
            window = np.minimum(window, np.maximum(full_windows[group_index] - 1, 0))
        first, rows = np.cumsum(size) - size, np.concatenate(self._rows, axis=1)
        open_operations = np.flatnonzero(~ready)
        self._operations = [operations[:, open_operations]]
        self._rows = [
            rows[
                :,
                expand_ranges(
                    first[open_operations], first[open_operations] + size[open_operations]
                )[1],
            ]
        ]
        self._count = self._kept = self._rows[0].shape[1]
        due = np.flatnonzero(ready)
        if not due.size:
            return
        due = due[np.lexsort((ordinal[due], group[due]))]
        opens = np.append(True, (np.diff(group[due]) != 0) | (np.diff(window[due]) != 0))
        windows = np.flatnonzero(opens)
        until = np.append(windows[1:], due.size)
        rows_until = np.append(0, np.cumsum(size[due]))
        begin = 0
        for end in until.tolist():  # some at once: temporary arrays are many
            if end < due.size and rows_until[end] - rows_until[begin] < _MIN_ROWS_TO_SETTLE:
                continue
            settled = due[begin:end]
            number = np.cumsum(opens[begin:end]) - 1
            row = expand_ranges(first[settled], first[settled] + size[settled])[1]
            self._evaluate_windows(operations[:, settled], number, rows[:, row])
            begin = end

    def _evaluate_windows(self, operations: Int, window: Int, rows: Int) -> None:
        """Evaluate whole windows.

        window: int64[operations], from 0, ascending. operations, rows: as they are kept.
        """
        ranks = self._ranks
        _, _, last_arrival, period, size = operations
        rank, work_deficit, imbalance, slow = rows
        count = int(window[-1]) + 1
        has_period = period >= 0
        length = np.bincount(window[has_period], period[has_period], count) / np.maximum(
            np.bincount(window[has_period], minlength=count), 1
        )
        operation, window_of_row = (
            np.repeat(column, size) for column in (np.arange(size.size), window)
        )
        variation = evaluate_work_variation(
            WorkSamples(window_of_row, operation, rank, -work_deficit.astype(np.float64)),
            count,
            ranks,
            length,
        )
        level_difference = np.repeat(variation.level(window, last_arrival, ranks), size)
        level_difference -= variation.level_of_row_ns
        uneven = variation.uneven[window_of_row]
        max_ns = np.where(variation.uneven, np.inf, OUTLIER_SPREADS * variation.spread_ns)
        ratio = _compute_random_ratio(work_deficit, level_difference, max_ns[window_of_row])
        random_ns = np.rint((imbalance + slow) * ratio).astype(np.int64)
        from_slow = np.minimum(random_ns, slow)
        # If work is uneven, its random part becomes imbalance.
        from_imbalance = np.where(uneven, -from_slow, random_ns - from_slow)
        starts = np.cumsum(size) - size
        for column, ns in enumerate((from_imbalance, from_slow)):
            if ns.any():
                self.victim_ns[:, column] += np.bincount(rank, ns, ranks).astype(np.int64)
                of_operation = np.add.reduceat(ns, starts)
                self.culprit_ns[:, column] += np.bincount(last_arrival, of_operation, ranks).astype(
                    np.int64
                )


def _compute_random_ratio(work_deficit: Int, usual_ns: Float, most_ns: Float) -> Float:
    """Return the random part of each difference: beyond the usual one and no outlier."""
    work_deficit = np.maximum(work_deficit, 0)
    beyond = work_deficit - np.clip(usual_ns, 0, work_deficit)
    beyond[beyond > most_ns] = 0
    return beyond / np.maximum(work_deficit, 1)
