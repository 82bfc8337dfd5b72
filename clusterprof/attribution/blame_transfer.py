"""How long transfers should have taken, and how much longer they did.

Expected is bytes over the rate of the link when that is known; else the fastest tenth of all
operations of the same kind, size and number of members. What is beyond is *excess transfer*: a
candidate for congestion or a bad link, never charged to a rank. It is part of `net-transfer`.

Without a rate the tenth is known only at the end, so durations are counted in classes an eighth of
an octave wide (each 9 % longer than the one before). The expected duration is the upper edge of the
class in which the tenth lies: then the excess is exact, whatever the cut into blocks.
"""

from __future__ import annotations

import numpy as np

from clusterprof.attribution.blame import Blamed
from clusterprof.timeline.model import Float, Int
from clusterprof.timeline.operations import Operations

CLASSES_PER_OCTAVE = 8
BEST_RATIO = 0.1
FEWEST = 20  # operations of a shape below which nothing is expected of it
# How many times its bytes each member moves over its link in a ring; n = members.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GRADIENTS = 1, 2, 3, 8, 12
_Shape = tuple[int, int, int]


class Transfers:
    """Durations of transfers by shape, added up block by block."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._operations: dict[_Shape, dict[int, int]] = {}
        self._felt: dict[_Shape, dict[tuple[int, int], tuple[int, int]]] = {}

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block; operations of which members are missing say nothing about the network."""
        size = np.diff(ops.first)
        row_op = np.repeat(np.arange(size.size), size)
        taken = np.minimum.reduceat(blamed.transfer_ns, ops.first[:-1]) if size.size else size
        shape = np.stack([ops.operation, ops.bytes, size])
        shapes, of_op = np.unique(shape, axis=1, return_inverse=True)
        whole = ops.complete & (size > 1)
        of_op = np.where(whole, of_op.ravel(), -1)
        for number in range(shapes.shape[1]):
            key = (int(shapes[0, number]), int(shapes[1, number]), int(shapes[2, number]))
            mine = of_op == number
            counts = self._operations.setdefault(key, {})
            for one, n in zip(
                *(c.tolist() for c in np.unique(classes(taken[mine]), return_counts=True))
            ):
                counts[one] = counts.get(one, 0) + n
            rows = mine[row_op]
            self._add_felt(key, ops.rank[rows], blamed.transfer_ns[rows])

    def _add_felt(self, key: _Shape, rank: Int, ns: Int) -> None:
        felt = self._felt.setdefault(key, {})
        codes, inverse, n = np.unique(
            classes(ns) * self._ranks + rank, return_inverse=True, return_counts=True
        )
        sums = np.zeros(codes.size, np.int64)
        np.add.at(sums, inverse, ns)
        for code, count, total in zip(codes.tolist(), n.tolist(), sums.tolist()):
            before = felt.get(divmod(code, self._ranks), (0, 0))
            felt[divmod(code, self._ranks)] = (before[0] + count, before[1] + total)

    def expected_ns(self, shape: _Shape, bytes_per_second: float | None = None) -> float | None:
        """Return how long an operation of this shape should take; None = too few were seen."""
        operation, size, members = shape
        if bytes_per_second and size >= 0:
            return moved(operation, size, members) / bytes_per_second * 1e9
        counts = self._operations.get(shape, {})
        if sum(counts.values()) < FEWEST:
            return None
        wanted, seen = BEST_RATIO * sum(counts.values()), 0
        for one in sorted(counts):
            seen += counts[one]
            if seen >= wanted:
                return upper_edge(one)
        return None

    def excess_ns(self, bytes_per_second: float | None = None) -> Int:
        """Return per rank how much longer than expected its transfers took.

        With a rate the class in which the expected duration lies is taken by its mean.
        """
        out = np.zeros(self._ranks, np.float64)
        for shape, felt in self._felt.items():
            expected = self.expected_ns(shape, bytes_per_second)
            if expected is None:
                continue
            for (_, rank), (count, total) in felt.items():
                out[rank] += max(0.0, total - count * expected)
        return np.floor(out).astype(np.int64)


def classes(ns: Int) -> Int:
    """Return the class of each duration: 0 for up to 1 ns, 8 more for each doubling."""
    octaves = np.log2(np.maximum(ns, 1).astype(np.float64))
    return np.ceil(octaves * CLASSES_PER_OCTAVE - 1e-9).astype(np.int64)


def upper_edge(number: int) -> float:
    """Return the longest duration of a class."""
    return float(2.0 ** (number / CLASSES_PER_OCTAVE))


def moved(operation: int, size: int, members: int) -> float:
    """Return the bytes that one member sends over its link, in the best known ring."""
    factor: dict[int, Float | float] = {
        ALL_REDUCE: 2 * (members - 1) / members,
        GRADIENTS: 2 * (members - 1) / members,
        ALL_GATHER: members - 1,
        REDUCE_SCATTER: (members - 1) / members,
        ALL_TO_ALL: (members - 1) / members,
    }
    return float(factor.get(operation, 1.0)) * size
