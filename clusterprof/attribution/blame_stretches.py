"""Does the same rank keep the others waiting all the time, once, or another one each time?

    stretches of the run      1    2    3    4    5    6    7    8
    rank 3 caused            90   80   95   85   90   90   80   90     steady
    rank 3 caused             0    0    0   95   90    0    0    0     transient: stretches 4 to 5
    rank 0, 1, 2, … caused   r3   r0   r6   r1   r7   r3   r2   r5     wandering

Sums are kept per stretch of the run, cause and culprit. A stretch is a second at first and twice as
long whenever there would be too many of them, so memory does not grow with the run. The order of
blocks does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from clusterprof.attribution.blame import Blamed
from clusterprof.persistence import Persistence
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations

FIRST_LENGTH_NS = 1_000_000_000
MOST_STRETCHES = 128
FEWEST_STRETCHES = 8
"""With fewer nothing is said."""
MOST_CELLS = 1 << 19
"""(stretch, cause, culprit) with a sum; above it stretches grow, and at last the smallest go."""
HOLDS_RATIO = 0.9
"""The stretches that count hold this part of the waiting; jitter in between does not."""
TRANSIENT_RATIO = 0.5
"""Transient: they lie within this part of the run …"""
UNBROKEN_RATIO = 2 / 3
"""… and are at least this part of what lies between the first and the last of them."""
CHIEF_RATIO = 2 / 3
"""The chief culprits are the fewest that caused this part of the waiting."""
FEW_OF = 3
"""Steady: they are at most one of so many ranks (rounded up), or all on one node …"""
MOST_RATIO = 2 / 3
"""… and have their part in at least this part of the stretches that count."""
_PART_RATIO = 0.5  # having one's part: this much of one's share of the whole


class Stretches:
    """Who kept others waiting when."""

    def __init__(self, causes: int, begin_ns: Int, node: Sequence[int]) -> None:
        """`begin_ns`: per rank, where on its own clock the run began; `node`: a label per rank."""
        self._causes, self._ranks = causes, len(begin_ns)
        self._begin_ns = begin_ns
        self._node = np.asarray(node)
        self.length_ns = FIRST_LENGTH_NS
        self._operations = np.zeros(MOST_STRETCHES, np.int64)
        self._cell = np.zeros(0, np.int64)
        self._ns = np.zeros(0, np.int64)

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        if not ops.team.size:
            return
        head = ops.first[:-1]
        when_ns = np.maximum(ops.leave_ns[head] - self._begin_ns[ops.rank[head]], 0)
        while int(when_ns.max()) // self.length_ns >= MOST_STRETCHES:
            self._grow()
        stretch = when_ns // self.length_ns
        self._operations += np.bincount(stretch, minlength=MOST_STRETCHES)
        known = np.flatnonzero(blamed.culprit >= 0)
        if not known.size:
            return
        op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))[blamed.row[known]]
        cell = stretch[op] * self._causes + blamed.cause[known]
        self._put(*_summed(cell * self._ranks + blamed.culprit[known], blamed.ns[known]))
        while self._cell.size > MOST_CELLS and np.count_nonzero(self._operations) > 16:
            self._grow()
        if self._cell.size > MOST_CELLS:
            keep = np.sort(np.argsort(-self._ns, kind="stable")[: MOST_CELLS // 2])
            self._cell, self._ns = self._cell[keep], self._ns[keep]

    def _put(self, cell: Int, ns: Int) -> None:
        self._cell, self._ns = _summed(
            np.concatenate([self._cell, cell]), np.concatenate([self._ns, ns])
        )

    def _grow(self) -> None:
        self.length_ns *= 2
        pairs = self._operations.reshape(-1, 2).sum(axis=1)
        self._operations = np.concatenate([pairs, np.zeros_like(pairs)])
        width = self._causes * self._ranks
        stretch, rest = np.divmod(self._cell, width)
        self._cell, self._ns = _summed(stretch // 2 * width + rest, self._ns)

    def persistence(self, causes: Collection[int]) -> Persistence | None:
        """Judge the waiting for some causes together; None when the run is too short or there was
        none."""
        seen = np.flatnonzero(self._operations)
        rows = np.isin(self._cell // self._ranks % self._causes, list(causes))
        if seen.size < FEWEST_STRETCHES or not rows.any():
            return None
        cell, ns = self._cell[rows], self._ns[rows]
        who, column = np.unique(cell % self._ranks, return_inverse=True)
        line = np.searchsorted(seen, cell // (self._ranks * self._causes))
        table = np.zeros((seen.size, who.size), np.int64)
        np.add.at(table, (line, column), ns)
        counts = _holding(table.sum(axis=1))
        chiefs = _chiefs(table.sum(axis=0))
        present = self._present(table[counts], table.sum(axis=0), who, chiefs)
        kind = self._kind(counts, seen.size, who[chiefs], present)
        return Persistence(
            kind=kind,  # type: ignore[arg-type]
            from_ns=int(seen[counts[0]]) * self.length_ns,
            to_ns=int(seen[counts[-1]] + 1) * self.length_ns,
            stretches=counts.size,
            seen=seen.size,
            culprits=np.unique(np.argmax(table[counts], axis=1)).size,
            most=present,
        )

    def _present(self, table: Int, total: Int, who: Int, chiefs: Int) -> int:
        """In how many stretches the chief culprit, or the node of them all, has its part."""
        some = chiefs if self._one_node(who[chiefs]) else chiefs[:1]
        share = total[some].sum() / total.sum()
        part = table[:, some].sum(axis=1) / table.sum(axis=1)
        return int(np.count_nonzero(part >= _PART_RATIO * share))

    def _kind(self, counts: Int, seen: int, chiefs: Int, present: int) -> str:
        extent = int(counts[-1] - counts[0]) + 1
        if extent <= TRANSIENT_RATIO * seen and counts.size >= UNBROKEN_RATIO * extent:
            return "transient"
        few = chiefs.size <= -(-self._ranks // FEW_OF) or self._one_node(chiefs)
        return "steady" if few and present >= MOST_RATIO * counts.size else "wandering"

    def _one_node(self, ranks: Int) -> bool:
        """True when they are of one node, and that is not the only one."""
        alike = np.unique(self._node[ranks]).size == 1
        return alike and np.unique(self._node).size > 1


def _holding(total: Int) -> Int:
    """Return the fewest stretches that hold most of the waiting, in the order of time."""
    order = np.argsort(-total, kind="stable")
    enough = np.searchsorted(np.cumsum(total[order]), HOLDS_RATIO * total.sum()) + 1
    return np.sort(order[:enough])


def _chiefs(total: Int) -> Int:
    """Return the fewest culprits that caused most of the waiting, the largest first."""
    order = np.argsort(-total, kind="stable")
    enough = np.searchsorted(np.cumsum(total[order]), CHIEF_RATIO * total.sum()) + 1
    return order[:enough]


def _summed(cell: Int, ns: Int) -> tuple[Int, Int]:
    """Sum by cell; cells come back in rising order. Floats are exact up to 2**53 ns a cell."""
    if not cell.size:
        return cell, ns
    low = int(cell.min())
    if int(cell.max()) - low < max(1 << 20, 2 * cell.size):
        sums = np.bincount(cell - low, weights=ns)
        found = np.flatnonzero(sums)
        return found + low, sums[found].astype(np.int64)
    found, at = np.unique(cell, return_inverse=True)
    return found, np.bincount(at, weights=ns).astype(np.int64)
