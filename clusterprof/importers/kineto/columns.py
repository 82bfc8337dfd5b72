"""Columns that grow, and stretches of time that are joined as they come."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clusterprof.timeline.intervals import union

Int = NDArray[np.int64]
_JOIN_AFTER = 1 << 16


class Column:
    """Whole numbers, added in pieces; `code` is that of `array`, wide enough for all of them."""

    def __init__(self, code: str = "q") -> None:
        self._kept = array(code)

    def add(self, values: ArrayLike) -> None:
        """Add some at the end."""
        self._kept.frombytes(np.ascontiguousarray(values, self._kept.typecode).tobytes())

    def done(self) -> Int:
        """Return all of them; nothing may be added after that."""
        return np.frombuffer(self._kept, self._kept.typecode)


class Stretches:
    """Stretches of time of which only it counts what they cover together."""

    def __init__(self) -> None:
        self._start, self._end = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._new: list[tuple[Int, Int]] = []
        self._waiting = 0

    def add(self, start: Int, end: Int) -> None:
        """Add some, in any order."""
        self._new.append((start, end))
        self._waiting += start.size
        if self._waiting > max(_JOIN_AFTER, self._start.size):
            self.done()

    def done(self) -> tuple[Int, Int]:
        """Return what is covered, sorted and disjoint."""
        if self._new:
            parts = [(self._start, self._end), *self._new]
            start, end = (np.concatenate(column) for column in zip(*parts))
            self._start, self._end = joined(start, end)
            self._new, self._waiting = [], 0
        return self._start, self._end


def joined(start: Int, end: Int) -> tuple[Int, Int]:
    """Return what some stretches cover: sorted, disjoint, none of no length."""
    found = union((start, end))
    return found.start_ns, found.end_ns


def all_of(parts: Sequence[tuple[Int, Int]]) -> tuple[Int, Int]:
    """Return what several tables of stretches cover together."""
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return joined(*(np.concatenate(column) for column in zip(*parts)))


class Cover:
    """How much of the time before an instant is covered by disjoint stretches."""

    def __init__(self, start: Int, end: Int) -> None:
        self.start, self.end = start, end
        self._total = np.concatenate([[0], np.cumsum(end - start)]).astype(np.int64)

    def before(self, t: Int) -> Int:
        """Return ns before each t."""
        row = self.start.searchsorted(t, side="right")
        if not self.start.size:
            return np.zeros(np.shape(t), np.int64)
        over = np.where(row > 0, self.end[np.maximum(row, 1) - 1] - t, 0)
        return (self._total[row] - np.maximum(over, 0)).astype(np.int64)

    def within(self, start: Int, end: Int) -> Int:
        """Return ns in each [start, end); 0 where end is before start."""
        return np.maximum(self.before(np.maximum(start, end)) - self.before(start), 0)

    def first_free(self, t: Int) -> Int:
        """Return the first instant at or after each t that is not covered."""
        if not self.start.size:
            return t
        row = self.start.searchsorted(t, side="right") - 1
        inside = (row >= 0) & (t < self.end[np.maximum(row, 0)])
        return np.where(inside, self.end[np.maximum(row, 0)], t)
