"""How long transfers should have taken, and how much longer they did.

Expected is bytes over the rate of the links when that is known; else the fastest tenth of all
operations of the same kind, size, number of members and number of nodes. Of operations that overlap
with computation only the rest is waited for, and the shortest rest says most about the computation:
of these the middle is expected. What is beyond is *excess transfer*: a candidate for congestion, a
bad link or a wrong path, never charged to a rank.

The tenth is known only at the end, so durations are counted in classes an eighth of an octave wide
(each 9 % longer than the one before), and so are sizes. The expected duration is the upper edge of
the class in which the tenth lies: then the excess is exact, whatever the cut into blocks. With a
rate the class in which the expected duration lies is taken by its mean.

A *cell* is one kind and size of operations among the ranks of one set of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterprof.attribution.blame import Blamed
from clusterprof.attribution.blame_rows import is_pair
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations

CLASSES_PER_OCTAVE = 8
BEST_RATIO, MIDDLE_RATIO = 0.1, 0.5
FEWEST = 20  # operations of a shape below which nothing is expected of it
MOST_CELLS = 4096
"""What comes after these is not compared with anything; memory is bounded by them and the ranks."""
# How many times its bytes each member moves over its link in a ring; n = members.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GRADIENTS = 1, 2, 3, 8, 12
_MOST_CLASS = 512  # of a duration: 2**64 ns
_MERGED_AT = 1 << 16


@dataclass(slots=True)
class Cell:
    """Operations of one kind, size and set of members' nodes."""

    nodes: frozenset[int]
    operation: int
    members: int
    size_class: int
    """Class of the bytes; -1 unknown."""
    overlapped: bool
    """True when ranks did something else while the data were on their way."""
    operations: int = 0
    bytes: int = 0
    """Of all of them together."""
    durations: dict[int, int] = field(default_factory=dict)
    """Class of the time until the first could go on -> operations."""

    @property
    def moved_bytes(self) -> float | None:
        """What one member sends in one of them; None when the size is not known."""
        if self.size_class < 0 or not self.operations:
            return None
        return moved(self.operation, self.bytes / self.operations, self.members)

    @property
    def shape(self) -> tuple[int, int, int, int, bool]:
        """What cells must share to be compared."""
        return self.operation, self.size_class, self.members, len(self.nodes), self.overlapped


class Transfers:
    """Durations of transfers by cell and rank, added up block by block."""

    def __init__(self, node: Int, transfer: int) -> None:
        """Take the node of each rank, and the number of the cause that stands for transfers."""
        self.node = node
        self._transfer = transfer
        self.cells: list[Cell] = []
        self.felt_ns = np.zeros(node.size, np.int64)
        """[rank]: all time in transfers, those that nothing can be expected of included."""
        self._number: dict[tuple[frozenset[int], int, int, int, bool], int] = {}
        self._span: dict[int, int] = {}
        self._spans: dict[frozenset[int], int] = {}
        none = np.zeros(0, np.int64)
        # Sorted: (cell, class, rank) in one number, how many operations, how long in all.
        self._rows = none, none, none
        self._new: list[tuple[Int, Int, Int]] = []

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block; operations of which members are missing say nothing about the network."""
        size = np.diff(ops.first)
        if not size.size:
            return
        row_op = np.repeat(np.arange(size.size), size)
        charged = blamed.cause == self._transfer
        ns = blamed.transfer_ns.copy()
        np.add.at(ns, blamed.row[charged], blamed.ns[charged])
        np.add.at(self.felt_ns, ops.rank, ns)
        cell = self._cells(ops, size)
        known = cell[row_op] >= 0
        # Of a message the receiver sees how long it was on its way; all others leave together.
        first = ops.first[:-1]
        longest, shortest = np.maximum.reduceat(ns, first), np.minimum.reduceat(ns, first)
        taken = classes(np.where(is_pair(ops.operation), longest, shortest))
        self._count_operations(cell, taken, ops.bytes)
        known &= ns > 0
        code = (cell[row_op[known]] * _MOST_CLASS + classes(ns[known])) * self.node.size
        self._count_rows(code + ops.rank[known], ns[known])

    def _cells(self, ops: Operations, size: Int) -> Int:
        """The number of each operation's cell; -1 where it says nothing."""
        whole = ops.complete & (size > 1)
        span = np.full(size.size, -1, np.int64)
        usable = np.flatnonzero(whole)
        teams, first, of_op = np.unique(ops.team[usable], return_index=True, return_inverse=True)
        known = np.zeros(teams.size, np.int64)
        for number, (team, op) in enumerate(zip(teams.tolist(), usable[first].tolist())):
            found = self._span.get(team)
            if found is None:
                ranks = ops.rank[ops.first[op] : ops.first[op + 1]]
                nodes = frozenset(self.node[ranks].tolist())
                found = self._span[team] = self._spans.setdefault(nodes, len(self._spans))
            known[number] = found
        span[usable] = known[of_op]
        sizes = np.where(ops.bytes >= 0, classes(np.maximum(ops.bytes, 0)), -1)
        stay = ops.leave_ns - ops.arrive_ns
        over = np.maximum.reduceat(stay - ops.blocked_ns, ops.first[:-1]) > 0
        over |= ops.operation == GRADIENTS
        columns = (span, ops.operation, size, sizes + 1, over.astype(np.int64))
        code = np.zeros(size.size, np.int64)
        for column in columns:
            code = code * (int(column.max()) + 2) + column + 1
        _, first, of_op = np.unique(code, return_index=True, return_inverse=True)
        sets = list(self._spans)
        cells = np.full(first.size, -1, np.int64)
        for number, op in enumerate(first.tolist()):
            if span[op] >= 0:
                what = int(ops.operation[op]), int(size[op]), int(sizes[op]), bool(over[op])
                cells[number] = self._cell((sets[span[op]], *what))
        return cells[of_op]

    def _cell(self, key: tuple[frozenset[int], int, int, int, bool]) -> int:
        number = self._number.get(key, -1)
        if number < 0 and len(self.cells) < MOST_CELLS:
            number = self._number[key] = len(self.cells)
            self.cells.append(Cell(*key))
        return number

    def _count_operations(self, cell: Int, taken: Int, size: Int) -> None:
        some = cell >= 0
        code, n = np.unique(cell[some] * _MOST_CLASS + taken[some], return_counts=True)
        for one, count in zip(code.tolist(), n.tolist()):
            durations = self.cells[one // _MOST_CLASS].durations
            durations[one % _MOST_CLASS] = durations.get(one % _MOST_CLASS, 0) + count
        numbers, of_op, n = np.unique(cell[some], return_inverse=True, return_counts=True)
        sums = np.zeros(numbers.size, np.int64)
        np.add.at(sums, of_op, np.maximum(size[some], 0))
        for number, count, total in zip(numbers.tolist(), n.tolist(), sums.tolist()):
            self.cells[number].operations += count
            self.cells[number].bytes += total

    def _count_rows(self, code: Int, ns: Int) -> None:
        self._new.append(_summed(code, np.ones_like(code), ns))
        if sum(key.size for key, _, _ in self._new) > self._rows[0].size + _MERGED_AT:
            self._merge()

    def _merge(self) -> None:
        """Sorting what is there anew for every block would cost more than the blocks do."""
        self._rows = _summed(*(np.concatenate(c) for c in zip(self._rows, *self._new)))
        self._new = []

    def best_ns(self) -> list[float | None]:
        """Return per cell what is expected of its shape without a rate; None = too few."""
        shapes: dict[tuple[int, int, int, int, bool], dict[int, int]] = {}
        for cell in self.cells:
            seen = shapes.setdefault(cell.shape, {})
            for one, n in cell.durations.items():
                seen[one] = seen.get(one, 0) + n
        best = {
            shape: _best(seen, MIDDLE_RATIO if shape[-1] else BEST_RATIO)
            for shape, seen in shapes.items()
        }
        return [best[cell.shape] for cell in self.cells]

    def taken_ns(self) -> Int:
        """Return int64[cells]: the time of all ranks in the transfers of each."""
        if self._new:
            self._merge()
        key, _, ns = self._rows
        sums = np.zeros(len(self.cells), np.int64)
        np.add.at(sums, key // (_MOST_CLASS * max(self.node.size, 1)), ns)
        return sums

    def beyond_ns(self, expected_ns: Mapping[int, float]) -> dict[frozenset[int], Int]:
        """Return per set of nodes, int64[ranks]: how much longer than expected transfers took.

        `expected_ns` is per cell; of a cell that is not among them nothing is beyond.
        """
        out: dict[frozenset[int], Any] = {}
        ranks = max(self.node.size, 1)
        if self._new:
            self._merge()
        key, count, ns = self._rows
        cell = key // (_MOST_CLASS * ranks)
        limit = np.full(len(self.cells) + 1, np.inf)
        for number, due_ns in expected_ns.items():
            limit[number] = due_ns
        beyond = np.maximum(ns - count * limit[cell], 0.0)
        for number, one in enumerate(self.cells):
            low, high = np.searchsorted(cell, (number, number + 1))
            sums = np.bincount(key[low:high] % ranks, weights=beyond[low:high], minlength=ranks)
            out[one.nodes] = out.get(one.nodes, 0.0) + sums[: self.node.size]
        return {nodes: np.floor(sums).astype(np.int64) for nodes, sums in out.items()}


def _summed(key: Int, count: Int, ns: Int) -> tuple[Int, Int, Int]:
    """Add up what has the same key; sorted."""
    keys, of_row = np.unique(key, return_inverse=True)
    counts, sums = np.zeros(keys.size, np.int64), np.zeros(keys.size, np.int64)
    np.add.at(counts, of_row, count)
    np.add.at(sums, of_row, ns)
    return keys, counts, sums


def _best(durations: Mapping[int, int], part: float) -> float | None:
    wanted, seen = part * sum(durations.values()), 0
    if sum(durations.values()) < FEWEST:
        return None
    for one in sorted(durations):
        seen += durations[one]
        if seen >= wanted:
            return upper_edge(one)
    return None


def classes(ns: Int) -> Int:
    """Return the class of each duration: 0 for up to 1 ns, 8 more for each doubling."""
    octaves = np.log2(np.maximum(ns, 1).astype(np.float64))
    return np.ceil(octaves * CLASSES_PER_OCTAVE - 1e-9).astype(np.int64)


def upper_edge(number: int) -> float:
    """Return the longest duration of a class."""
    return float(2.0 ** (number / CLASSES_PER_OCTAVE))


def moved(operation: int, size: float, members: int) -> float:
    """Return the bytes that one member sends over its link, in the best known ring."""
    factor = {
        ALL_REDUCE: 2 * (members - 1) / members,
        GRADIENTS: 2 * (members - 1) / members,
        ALL_GATHER: members - 1,
        REDUCE_SCATTER: (members - 1) / members,
        ALL_TO_ALL: (members - 1) / members,
    }
    return float(factor.get(operation, 1.0)) * size
