"""Sums by row and stretch of a run: whole numbers, in a table that does not grow with the run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clusterprof.attribution.partial import SHARE
from clusterprof.timeline.model import Int

FINEST_NS = 100_000_000
FINEST_TRACED_NS = FINEST_NS >> 8
"""Of an imported trace, whose times are exact: the same lengths from 0.39 ms on."""
MOST = 480
"""Stretches of a rank; above it two become one."""


@dataclass(slots=True)
class Table:
    """Sums by row and stretch; the first stretch begins `first` lengths after the node's start."""

    stretch_ns: int = FINEST_NS
    first: int = 0
    size: int = 0
    rows: dict[str, Int] = field(default_factory=dict)
    """int64[2, size]: whole ns, and what is left in 1/SHARE ns."""

    def put(self, name: str, first: int, units: Int) -> None:
        """Add amounts in 1/SHARE ns to a row, from one stretch on that the table holds."""
        row = self.rows.setdefault(name, np.zeros((2, self.size), np.int64))
        part = row[:, first - self.first : first - self.first + units.size]
        part[0] += units // SHARE
        part[1] += units % SHARE
        part[0] += part[1] // SHARE
        part[1] %= SHARE

    def cover(self, first: int, end: int) -> None:
        """Make room for stretches `first` to `end`."""
        if not self.size:
            self.first = first
        before = max(self.first - first, 0)
        after = max(end - self.first - self.size, 0)
        if before or after:
            self.rows = {k: np.pad(v, ((0, 0), (before, after))) for k, v in self.rows.items()}
            self.first, self.size = self.first - before, self.size + before + after

    def fold(self) -> None:
        """Make one stretch of two."""
        odd = self.first % 2
        width = ((0, 0), (odd, (self.size + odd) % 2))
        self.first, self.stretch_ns = self.first // 2, 2 * self.stretch_ns
        self.size = (self.size + odd + 1) // 2
        for name, row in self.rows.items():
            row = np.pad(row, width).reshape(2, -1, 2).sum(axis=2)
            row[0] += row[1] // SHARE
            row[1] %= SHARE
            self.rows[name] = row

    def add(self, other: Table) -> None:
        """Add a table of the same rank; the finer of the two is folded."""
        if not other.size:
            return
        while other.stretch_ns < self.stretch_ns:
            other.fold()
        while self.stretch_ns < other.stretch_ns:
            self.fold()
        self.cover(other.first, other.first + other.size)
        while self.size > MOST:
            self.fold()
            other.fold()
        at = other.first - self.first
        for name, row in other.rows.items():
            mine = self.rows.setdefault(name, np.zeros((2, self.size), np.int64))
            part = mine[:, at : at + other.size]
            part += row
            part[0] += part[1] // SHARE
            part[1] %= SHARE
