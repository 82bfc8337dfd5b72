"""Measure how long transfers took, how long they should have taken, and the excess.

The expected duration is bytes over the rate of the links if that is known; otherwise
the fastest tenth of all operations with equal kind, size, number of members and number
of nodes. Operations that overlap with computation are waited for only in part, and the
shortest of these parts depends mostly on the computation: for them the median is
expected. What is beyond is *excess transfer*: a candidate for congestion, a bad link or
a wrong route, never blamed on a rank.

The tenth is known only at the end, so durations are counted in classes an eighth of an
octave wide (each 9 % longer than the previous one), and so are sizes. The expected
duration is the upper edge of the class that contains the tenth: then the excess is
exact, wherever the run is cut into blocks. With a known rate, the class that contains
the expected duration is represented by its mean.

A *cell* is one kind and size of operations among the ranks of one set of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point
from clusterprof.analysis.attribution.wait_for.blame import BlockBlame
from clusterprof.analysis.attribution.wait_for.time_bins import index_keys
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.analysis.timeline.model import Int
from clusterprof.util.statistics import find_quantile

CLASSES_PER_OCTAVE = 8
FASTEST_QUANTILE, MEDIAN_QUANTILE = 0.1, 0.5
MIN_OPERATIONS = 20  # minimum of operations of a shape for an expected duration
MAX_TRANSFER_CELLS = 4096
"""Limit of cells: operations beyond are not compared. It bounds memory, together with the
ranks.
"""
# Collectives by the multiple of their bytes that each member sends over its link in a ring.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GRADIENTS = 1, 2, 3, 8, 12
_MAX_CLASS = 512  # class of a duration of 2**64 ns
_MAX_UNMERGED_ROWS = 1 << 16


@dataclass(slots=True)
class TransferCell:
    """Operations with equal kind, size and set of nodes."""

    nodes: frozenset[int]
    operation: int
    members: int
    size_class: int
    """Size class of the bytes; -1 = unknown."""
    overlapped: bool
    """True if ranks did other work during the transfer."""
    operations: int = 0
    bytes: int = 0
    """Sum over all these operations."""
    durations: dict[int, int] = field(default_factory=dict)
    """Duration class -> operations; the duration is the time until the first member could
    continue.
    """

    @property
    def transferred_bytes(self) -> float | None:
        """Bytes that one member sends in one operation; None if the size is not known."""
        if self.size_class < 0 or not self.operations:
            return None
        return compute_ring_bytes(self.operation, self.bytes / self.operations, self.members)

    @property
    def key(self) -> tuple[frozenset[int], int, int, int, bool]:
        """What identifies the cell."""
        return self.nodes, self.operation, self.members, self.size_class, self.overlapped

    @property
    def shape(self) -> tuple[int, int, int, int, bool]:
        """Attributes that cells must share to be compared."""
        return self.operation, self.size_class, self.members, len(self.nodes), self.overlapped


class TransferTotals:
    """Durations of transfers by cell and rank, summed over all blocks."""

    def __init__(self, node: Int, transfer: int) -> None:
        """node: int64[ranks], node of each rank. transfer: index of the cause that stands for
        transfers.
        """
        self.node = node
        self._transfer = transfer
        self.cells: list[TransferCell] = []
        self.victim_ns = np.zeros(node.size, np.int64)
        """int64[ranks], ns: all time in transfers, including those without an expected duration."""
        self._number: dict[tuple[frozenset[int], int, int, int, bool], int] = {}
        self._span_of_group: dict[int, int] = {}
        self._spans: dict[frozenset[int], int] = {}
        empty = np.zeros(0, np.int64)
        # Sorted: (cell, class, rank) in one number, number of operations, total duration.
        self._rows = empty, empty, empty
        self._new: list[tuple[Int, Int, Int]] = []

    def add(self, ops: Operations, blamed: BlockBlame) -> None:
        """Add one block; operations with missing members are no evidence about the network."""
        size = np.diff(ops.first)
        if not size.size:
            return
        row_op = np.repeat(np.arange(size.size), size)
        blamed_transfer = blamed.cause == self._transfer
        ns = blamed.transfer_ns.copy()
        np.add.at(ns, blamed.row[blamed_transfer], blamed.ns[blamed_transfer])
        np.add.at(self.victim_ns, ops.rank, ns)
        cell = self._find_cells(ops, size)
        has_cell = cell[row_op] >= 0
        # For a message only the receiver's time is the transfer; in others all leave together.
        first = ops.first[:-1]
        longest, shortest = np.maximum.reduceat(ns, first), np.minimum.reduceat(ns, first)
        duration_class = compute_duration_classes(
            np.where(is_point_to_point(ops.operation), longest, shortest)
        )
        self._count_operations(cell, duration_class, ops.bytes)
        has_cell &= ns > 0
        code = (
            cell[row_op[has_cell]] * _MAX_CLASS + compute_duration_classes(ns[has_cell])
        ) * self.node.size
        self._count_rows(code + ops.rank[has_cell], ns[has_cell])

    def merge(self, other: TransferTotals) -> None:
        """Add the transfers of other operations."""
        self.victim_ns += other.victim_ns
        key, count, ns = other._merge()
        if not other.cells:
            return
        number = np.array([self._get_cell(cell.key) for cell in other.cells], np.int64)
        for cell_number, cell in zip(number.tolist(), other.cells):
            if cell_number < 0:
                continue
            own_cell = self.cells[cell_number]
            own_cell.operations += cell.operations
            own_cell.bytes += cell.bytes
            for duration_class, operations in cell.durations.items():
                own_cell.durations[duration_class] = (
                    own_cell.durations.get(duration_class, 0) + operations
                )
        cell_of_row, code = np.divmod(key, _MAX_CLASS * self.node.size)
        has_cell = number[cell_of_row] >= 0
        key = number[cell_of_row[has_cell]] * (_MAX_CLASS * self.node.size) + code[has_cell]
        self._new.append((key, count[has_cell], ns[has_cell]))
        self._merge()

    def _find_cells(self, ops: Operations, size: Int) -> Int:
        """Return the index of each operation's cell; -1 if the operation is no evidence."""
        is_whole = ops.complete & (size > 1)
        span = np.full(size.size, -1, np.int64)
        usable = np.flatnonzero(is_whole)
        groups, first, of_op = np.unique(
            ops.process_group[usable], return_index=True, return_inverse=True
        )
        node_set_numbers = np.zeros(groups.size, np.int64)
        for number, (group, op) in enumerate(zip(groups.tolist(), usable[first].tolist())):
            span_number = self._span_of_group.get(group)
            if span_number is None:
                ranks = ops.rank[ops.first[op] : ops.first[op + 1]]
                nodes = frozenset(self.node[ranks].tolist())
                span_number = self._span_of_group[group] = self._spans.setdefault(
                    nodes, len(self._spans)
                )
            node_set_numbers[number] = span_number
        span[usable] = node_set_numbers[of_op]
        sizes = np.where(ops.bytes >= 0, compute_duration_classes(np.maximum(ops.bytes, 0)), -1)
        stay = ops.leave_ns - ops.arrive_ns
        overlapped = np.maximum.reduceat(stay - ops.blocked_ns, ops.first[:-1]) > 0
        overlapped |= ops.operation == GRADIENTS
        columns = (span, ops.operation, size, sizes + 1, overlapped.astype(np.int64))
        code = np.zeros(size.size, np.int64)
        for column in columns:
            code = code * (int(column.max()) + 2) + column + 1
        _, first, of_op = np.unique(code, return_index=True, return_inverse=True)
        sets = list(self._spans)
        cells = np.full(first.size, -1, np.int64)
        for number, op in enumerate(first.tolist()):
            if span[op] >= 0:
                shape = int(ops.operation[op]), int(size[op]), int(sizes[op]), bool(overlapped[op])
                cells[number] = self._get_cell((sets[span[op]], *shape))
        return cells[of_op]

    def _get_cell(self, key: tuple[frozenset[int], int, int, int, bool]) -> int:
        number = self._number.get(key, -1)
        if number < 0 and len(self.cells) < MAX_TRANSFER_CELLS:
            number = self._number[key] = len(self.cells)
            self.cells.append(TransferCell(*key))
        return number

    def _count_operations(self, cell: Int, duration_class: Int, size: Int) -> None:
        has_cell = cell >= 0
        code, n = np.unique(
            cell[has_cell] * _MAX_CLASS + duration_class[has_cell], return_counts=True
        )
        for key, operations in zip(code.tolist(), n.tolist()):
            durations = self.cells[key // _MAX_CLASS].durations
            durations[key % _MAX_CLASS] = durations.get(key % _MAX_CLASS, 0) + operations
        numbers, of_op, n = np.unique(cell[has_cell], return_inverse=True, return_counts=True)
        sums = np.zeros(numbers.size, np.int64)
        np.add.at(sums, of_op, np.maximum(size[has_cell], 0))
        for cell_index, operations, total in zip(numbers.tolist(), n.tolist(), sums.tolist()):
            self.cells[cell_index].operations += operations
            self.cells[cell_index].bytes += total

    def _count_rows(self, code: Int, ns: Int) -> None:
        self._new.append(_sum_by_key(code, np.ones_like(code), ns))
        if sum(key.size for key, _, _ in self._new) > self._rows[0].size + _MAX_UNMERGED_ROWS:
            self._merge()

    def _merge(self) -> tuple[Int, Int, Int]:
        """Merge new rows; deferred, because sorting all rows for every block would cost more than
        the blocks.
        """
        if self._new:
            self._rows = _sum_by_key(*(np.concatenate(c) for c in zip(self._rows, *self._new)))
            self._new = []
        return self._rows

    def find_expected_ns(self) -> list[float | None]:
        """Return per cell the duration expected of its shape without a rate, ns; None = too few
        operations.
        """
        shapes: dict[tuple[int, int, int, int, bool], dict[int, int]] = {}
        for cell in self.cells:
            counts = shapes.setdefault(cell.shape, {})
            for duration_class, n in cell.durations.items():
                counts[duration_class] = counts.get(duration_class, 0) + n
        expected = {
            shape: _find_duration_ns(durations, MEDIAN_QUANTILE if shape[-1] else FASTEST_QUANTILE)
            for shape, durations in shapes.items()
        }
        return [expected[cell.shape] for cell in self.cells]

    def sum_cell_ns(self) -> Int:
        """Return int64[cells]: time of all ranks in the transfers of each cell, ns."""
        key, _, ns = self._merge()
        sums = np.zeros(len(self.cells), np.int64)
        np.add.at(sums, key // (_MAX_CLASS * max(self.node.size, 1)), ns)
        return sums

    def compute_excess_ns(self, expected_ns: Mapping[int, float]) -> dict[frozenset[int], Int]:
        """Return per set of nodes, int64[ranks], how much longer than expected transfers took, ns.

        expected_ns: expected duration by cell index; cells without one have no excess.
        """
        out: dict[frozenset[int], Any] = {}
        ranks = max(self.node.size, 1)
        key, count, ns = self._merge()
        cell = key // (_MAX_CLASS * ranks)
        limit = np.full(len(self.cells) + 1, np.inf)
        for number, limit_ns in expected_ns.items():
            limit[number] = limit_ns
        beyond = np.maximum(ns - count * limit[cell], 0.0)
        for number, transfer_cell in enumerate(self.cells):
            low, high = np.searchsorted(cell, (number, number + 1))
            sums = np.bincount(key[low:high] % ranks, weights=beyond[low:high], minlength=ranks)
            out[transfer_cell.nodes] = out.get(transfer_cell.nodes, 0.0) + sums[: self.node.size]
        for nodes, sums in out.items():  # in place: a job of many nodes has many rows
            out[nodes] = np.floor(sums).astype(np.int64)
        return out


def _sum_by_key(key: Int, count: Int, ns: Int) -> tuple[Int, Int, Int]:
    """Sum rows with equal key; sorted by key."""
    if not key.size:
        return key, count, ns
    keys, of_row = index_keys(key)
    # Floats are exact up to 2**53.
    counts, sums = (np.bincount(of_row, column, keys.size) for column in (count, ns))
    return keys, counts.astype(np.int64), sums.astype(np.int64)


def _find_duration_ns(durations: Mapping[int, int], quantile: float) -> float | None:
    """Find the quantile of durations, ns; None for too few operations.

    durations: class of a duration -> number of operations.
    """
    duration_class = find_quantile(durations, quantile)
    if duration_class is None or sum(durations.values()) < MIN_OPERATIONS:
        return None
    return compute_upper_edge(int(duration_class))


def compute_duration_classes(ns: Int) -> Int:
    """Compute the class of each duration or size: 0 up to 1, 8 more for each doubling.

    ns: int64[n], ns or bytes. Returns int64[n].
    """
    octaves = np.log2(np.maximum(ns, 1).astype(np.float64))
    return np.ceil(octaves * CLASSES_PER_OCTAVE - 1e-9).astype(np.int64)


def compute_upper_edge(duration_class: int) -> float:
    """Compute the longest duration of a class, ns."""
    return float(2.0 ** (duration_class / CLASSES_PER_OCTAVE))


def compute_ring_bytes(operation: int, size: float, members: int) -> float:
    """Compute the bytes that one member sends over its link, in the best known ring algorithm."""
    factor = {
        ALL_REDUCE: 2 * (members - 1) / members,
        GRADIENTS: 2 * (members - 1) / members,
        ALL_GATHER: members - 1,
        REDUCE_SCATTER: (members - 1) / members,
        ALL_TO_ALL: (members - 1) / members,
    }
    return float(factor.get(operation, 1.0)) * size
