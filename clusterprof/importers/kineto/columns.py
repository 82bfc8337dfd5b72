"""Columns that grow, and stretches of time that are joined as they come."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from clusterprof.importers.columns import Narrow, held_by, narrow
from clusterprof.timeline.intervals import union

Int = NDArray[np.int64]
_JOIN_AFTER = 1 << 14
_PACK_AFTER = 1 << 14
_NEVER = -(1 << 62)
AT_ONCE = 1 << 14
"""Rows that are worked on together where a table is long: what is made on the way stays small."""


class Column:
    """Whole numbers, added in pieces; kept as narrow as each some thousands of them allow."""

    def __init__(self) -> None:
        self._new: list[Int] = []
        self._waiting = 0
        self._packed: list[tuple[int, int, Narrow]] = []
        """The lowest, how many, and how much more each is."""

    def add(self, values: Int) -> None:
        """Add some at the end."""
        self._new.append(values)
        self._waiting += values.size
        if self._waiting >= _PACK_AFTER:
            self._pack()

    def _pack(self) -> None:
        if self._waiting:
            values = np.concatenate(self._new)
            low = int(values.min())
            self._packed.append((low, values.size, narrow(values - low)))
        self._new, self._waiting = [], 0

    def lowest(self) -> int | None:
        """Return the lowest of them; None where there is none."""
        self._pack()
        return min((low for low, _, _ in self._packed), default=None)

    def done(self) -> Int:
        """Return all of them, in a type that holds them; they are not kept."""
        self._pack()
        packed, self._packed = self._packed[::-1], []
        low = min((low for low, _, _ in packed), default=0)
        high = max((low + int(np.max(more)) for low, _, more in packed), default=0)
        made = np.empty(sum(size for _, size, _ in packed), held_by(low, high))
        at = 0
        while packed:
            low, size, more = packed.pop()
            np.add(more, low, out=made[at : at + size], dtype=np.int64, casting="same_kind")
            at += size
        return made


class Stretches:
    """Stretches of time of which only it counts what they cover together."""

    def __init__(self) -> None:
        self._new: list[tuple[Int, Int]] = []
        self._waiting = 0
        self._joined: list[tuple[Int, Int]] = []
        """Each sorted and disjoint; most of a trace comes in order, so that little lies twice."""
        self._size = self._least = 0

    def add(self, start: Int, end: Int) -> None:
        """Add some, in any order."""
        self._new.append((start, end))
        self._waiting += start.size
        if self._waiting > _JOIN_AFTER:
            self._join()
            if self._size > 2 * self._least + _JOIN_AFTER:
                self.done()

    def _join(self) -> None:
        some = all_of(self._new)
        self._new, self._waiting = [], 0
        self._joined.append(some)
        self._size += some[0].size

    def done(self) -> tuple[Int, Int]:
        """Return what is covered, sorted and disjoint."""
        if self._new:
            self._join()
        if len(self._joined) != 1:
            self._joined = [all_of(self._joined)]
            self._size = self._least = self._joined[0][0].size
        return self._joined[0]

    def shift(self, by: int) -> None:
        """Move all of it in time, where it lies."""
        for column in self.done():
            column += by


def joined(start: Int, end: Int) -> tuple[Int, Int]:
    """Return what some stretches cover: sorted, disjoint, none of no length."""
    found = union((start, end))
    return found.start_ns, found.end_ns


def covered(pieces: Iterable[tuple[Int, Int]]) -> tuple[Int, Int]:
    """Return what a long table covers that is sorted by start and comes in pieces."""
    starts, ends = array("q"), array("q")  # they grow where they are
    reach = _NEVER
    for start, end in pieces:
        some = end > start
        start, end = start[some], end[some]
        upto = np.maximum.accumulate(np.append(reach, end))
        opens = np.flatnonzero(start > upto[:-1])
        starts.frombytes(start[opens].tobytes())
        ends.frombytes(upto[opens].tobytes())
        reach = int(upto[-1])
    ends.append(reach)
    return np.frombuffer(starts, np.int64), np.frombuffer(ends, np.int64)[1 : len(starts) + 1]


def all_of(parts: Sequence[tuple[Int, Int]]) -> tuple[Int, Int]:
    """Return what several tables of stretches cover together."""
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return joined(*(np.concatenate(column) for column in zip(*parts)))


def slices(size: int) -> Iterator[slice]:
    """Yield the rows of a long table, `AT_ONCE` at a time."""
    return (slice(low, min(low + AT_ONCE, size)) for low in range(0, size, AT_ONCE))


def counts(numbers: Int, least: int = 0) -> Int:
    """Count how often each number comes, from 0 on, for at least so many."""
    found = np.zeros(max(least, int(numbers.max(initial=-1)) + 1), np.int64)
    for some in slices(numbers.size):
        found += np.bincount(numbers[some], minlength=found.size)
    return found


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
