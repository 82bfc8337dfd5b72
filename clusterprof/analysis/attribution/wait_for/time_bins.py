"""Sum blamed waits by cell, and by time bin: is there one steady culprit, or are there several?

`WaitTimeBins` judges the persistence of waits: one steady culprit, a transient one, or
changing ones.

    time bins of the run      1    2    3    4    5    6    7    8
    rank 3 caused            90   80   95   85   90   90   80   90     steady
    rank 3 caused             0    0    0   95   90    0    0    0     transient
    rank 0, 1, 2, … caused   r3   r0   r6   r1   r7   r3   r2   r5     wandering

Waits are summed per time bin of the run, cause and culprit. A bin is one second long at
first; its length doubles whenever there would be too many bins, so memory does not grow
with the run. The order of blocks does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from clusterprof.analysis.attribution.wait_for.blame import BlockBlame
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.analysis.timeline.model import Int
from clusterprof.report.model import Persistence

_MAX_UNMERGED_CELLS = 1 << 16


class CellSums:
    """Sums of ns by cell; only nonzero cells are stored."""

    def __init__(self) -> None:
        empty = np.zeros(0, np.int64)
        self._kept = empty, empty
        self._new: list[tuple[Int, Int]] = []
        self._count = 0

    def add(self, cell: Int, ns: Int) -> None:
        """Add amounts; int64[n] each."""
        if cell.size:
            self._new.append(sum_by_cell(cell, ns))
            self._count += self._new[-1][0].size
            if self._count > self._kept[0].size + _MAX_UNMERGED_CELLS:
                self.sums()

    def merge(self, other: CellSums) -> None:
        """Add the sums of other operations."""
        self.add(*other.sums())

    def sums(self) -> tuple[Int, Int]:
        """Return the cells, ascending, and the sum of each, ns."""
        if self._new:
            parts = zip(self._kept, *self._new)
            self._kept = sum_by_cell(*(np.concatenate(columns) for columns in parts))
            self._new, self._count = [], 0
        return self._kept


FIRST_BIN_NS = 1_000_000_000
"""Length of a time bin at first, ns."""
MAX_TIME_BINS = 128
"""Number of time bins above which their length doubles."""
MIN_TIME_BINS = 8
"""With fewer time bins persistence is not judged."""
MAX_CELLS = 1 << 19
"""Limit of (time bin, cause, culprit) sums; above it bins grow, and finally the smallest
are dropped.
"""
RELEVANT_BINS_RATIO = 0.9
"""The relevant bins hold this part of the waiting; jitter in between is ignored."""
TRANSIENT_EXTENT_RATIO = 0.5
"""Transient: the relevant bins lie within this part of the run …"""
CONTIGUOUS_RATIO = 2 / 3
"""… and are at least this part of the bins between the first and the last of them."""
MAIN_CULPRITS_RATIO = 2 / 3
"""The main culprits are the fewest that caused this part of the waiting."""
RANKS_PER_STEADY_CULPRIT = 3
"""Steady: the main culprits are at most one of this many ranks (rounded up), or all on one
node …
"""
STEADY_PRESENCE_RATIO = 2 / 3
"""… and are present in at least this part of the relevant bins."""
_PRESENCE_SHARE_RATIO = 0.5  # present: at least this part of its share of the whole


class WaitTimeBins:
    """Waits per time bin of the run, cause and culprit."""

    def __init__(self, causes: int, begin_ns: Int, node: Sequence[int]) -> None:
        """begin_ns: per rank, begin of the run on its own clock. node: a label per rank."""
        self._causes, self._ranks = causes, len(begin_ns)
        self._begin_ns = begin_ns
        self._node = np.asarray(node)
        self.length_ns = FIRST_BIN_NS
        self._operations = np.zeros(MAX_TIME_BINS, np.int64)
        self._cell = np.zeros(0, np.int64)
        self._ns = np.zeros(0, np.int64)

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add one block of operations and its blame."""
        if not ops.process_group.size:
            return
        head = ops.first[:-1]
        when_ns = np.maximum(ops.leave_ns[head] - self._begin_ns[ops.rank[head]], 0)
        while int(when_ns.max()) // self.length_ns >= MAX_TIME_BINS:
            self._double_bin_length()
        time_bin = when_ns // self.length_ns
        self._operations += np.bincount(time_bin, minlength=MAX_TIME_BINS)
        with_culprit = np.flatnonzero(blamed.culprit >= 0)
        if not with_culprit.size:
            return
        op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))[
            blamed.row[with_culprit]
        ]
        cell = time_bin[op] * self._causes + blamed.cause[with_culprit]
        cell, ns = sum_by_cell(
            cell * self._ranks + blamed.culprit[with_culprit], blamed.ns[with_culprit]
        )
        self._add_cells(cell, ns)

    def merge(self, other: WaitTimeBins) -> None:
        """Add the bins of other operations, which may be doubled for that."""
        while other.length_ns > self.length_ns:
            self._double_bin_length()
        while other.length_ns < self.length_ns:
            other._double_bin_length()
        self._operations += other._operations
        self._add_cells(other._cell, other._ns)

    def _add_cells(self, cell: Int, ns: Int) -> None:
        self._cell, self._ns = sum_by_cell(
            np.concatenate([self._cell, cell]), np.concatenate([self._ns, ns])
        )
        while self._cell.size > MAX_CELLS and np.count_nonzero(self._operations) > 16:
            self._double_bin_length()
        if self._cell.size > MAX_CELLS:
            keep = np.sort(np.argsort(-self._ns, kind="stable")[: MAX_CELLS // 2])
            self._cell, self._ns = self._cell[keep], self._ns[keep]

    def _double_bin_length(self) -> None:
        self.length_ns *= 2
        pairs = self._operations.reshape(-1, 2).sum(axis=1)
        self._operations = np.concatenate([pairs, np.zeros_like(pairs)])
        width = self._causes * self._ranks
        time_bin, cell_in_bin = np.divmod(self._cell, width)
        self._cell, self._ns = sum_by_cell(time_bin // 2 * width + cell_in_bin, self._ns)

    def persistence(self, causes: Collection[int]) -> Persistence | None:
        """Judge the waiting for these causes together; None if the run is too short or there was
        none.
        """
        used_bins = np.flatnonzero(self._operations)
        rows = np.isin(self._cell // self._ranks % self._causes, list(causes))
        if used_bins.size < MIN_TIME_BINS or not rows.any():
            return None
        cell, ns = self._cell[rows], self._ns[rows]
        ranks, column = np.unique(cell % self._ranks, return_inverse=True)
        line = np.searchsorted(used_bins, cell // (self._ranks * self._causes))
        table = np.zeros((used_bins.size, ranks.size), np.int64)
        np.add.at(table, (line, column), ns)
        relevant = np.sort(_select_fewest(table.sum(axis=1), RELEVANT_BINS_RATIO))
        main = _select_fewest(table.sum(axis=0), MAIN_CULPRITS_RATIO)
        present = self._count_present_bins(table[relevant], table.sum(axis=0), ranks, main)
        kind = self._classify(relevant, used_bins.size, ranks[main], present)
        return Persistence(
            kind=kind,  # type: ignore[arg-type]
            from_ns=int(used_bins[relevant[0]]) * self.length_ns,
            to_ns=int(used_bins[relevant[-1]] + 1) * self.length_ns,
            waiting_bins=relevant.size,
            operation_bins=used_bins.size,
            culprits=np.unique(np.argmax(table[relevant], axis=1)).size,
            main_culprit_bins=present,
        )

    def sum_waits(self, causes: Collection[int]) -> int:
        """Sum the waiting for these causes over the run, ns."""
        rows = np.isin(self._cell // self._ranks % self._causes, list(causes))
        return int(self._ns[rows].sum())

    def _count_present_bins(self, table: Int, total: Int, ranks: Int, main: Int) -> int:
        """Count the bins in which the main culprit, or the node of all main culprits, has its
        usual part.
        """
        counted_ranks = main if self._is_one_node(ranks[main]) else main[:1]
        share = total[counted_ranks].sum() / total.sum()
        part = table[:, counted_ranks].sum(axis=1) / table.sum(axis=1)
        return int(np.count_nonzero(part >= _PRESENCE_SHARE_RATIO * share))

    def _classify(self, relevant: Int, seen_bins: int, main: Int, present: int) -> str:
        extent = int(relevant[-1] - relevant[0]) + 1
        if (
            extent <= TRANSIENT_EXTENT_RATIO * seen_bins
            and relevant.size >= CONTIGUOUS_RATIO * extent
        ):
            return "transient"
        has_few_culprits = main.size <= -(
            -self._ranks // RANKS_PER_STEADY_CULPRIT
        ) or self._is_one_node(main)
        return (
            "steady"
            if has_few_culprits and present >= STEADY_PRESENCE_RATIO * relevant.size
            else "wandering"
        )

    def _is_one_node(self, ranks: Int) -> bool:
        """Return whether the ranks are all on one node, and it is not the only node."""
        on_one_node = np.unique(self._node[ranks]).size == 1
        return on_one_node and np.unique(self._node).size > 1


def _select_fewest(total: Int, ratio: float) -> Int:
    """Return the indices of the fewest totals that sum up to this part of all, largest first."""
    order = np.argsort(-total, kind="stable")
    enough = np.searchsorted(np.cumsum(total[order]), ratio * total.sum()) + 1
    return order[:enough]


def sum_by_cell(cell: Int, ns: Int) -> tuple[Int, Int]:
    """Sum by cell; cells are returned ascending. Floats are exact up to 2**53 ns per cell."""
    if not cell.size:
        return cell, ns
    lowest = int(cell.min())
    if int(cell.max()) - lowest < max(1 << 20, 2 * cell.size):
        sums = np.bincount(cell - lowest, weights=ns)
        cells = np.flatnonzero(sums)
        return cells + lowest, sums[cells].astype(np.int64)
    cells, cell_index = np.unique(cell, return_inverse=True)
    return cells, np.bincount(cell_index, weights=ns).astype(np.int64)


def index_keys(key: Int) -> tuple[Int, Int]:
    """Return the distinct keys, ascending, and the index of each given key among them.

    key: int64[n], not negative. Returns int64[m] and int64[n].
    """
    span = int(key.max()) + 1
    if span > max(1 << 20, 8 * key.size):
        keys, key_index = np.unique(key, return_inverse=True)
        return keys, key_index
    number = np.zeros(span, np.int64)
    number[key] = 1
    keys = np.flatnonzero(number)
    number[keys] = np.arange(keys.size)
    return keys, number[key]
