"""Spans of one process as an importer adds them, and in the order in which they ended.

    spans = SpanTable()
    first = spans.add(start_ns, end_ns, layout.STEP, number, 2, 0, 0)
    place, table = spans.in_order().between(low_ns, high_ns)

A long trace has millions: a column is kept in the narrowest type that holds it, one that is the
same everywhere as one number, and what is written in order of time is put together a slice at a
time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clusterprof.importers.columns import Int, Narrow, narrow
from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS

_MEASURES = frozenset({layout.EXPOSED, layout.EXPOSED_COLLECTIVE})


@dataclass(slots=True)
class _Part:
    """What was added in one call."""

    start: Int
    took: Narrow
    rest: list[Narrow]
    """kind, a, b, c, d."""

    def end(self) -> Int:
        return self.start + self.took

    def fields(self, rows: NDArray[np.integer] | slice) -> list[Int | Narrow]:
        """Return all fields of some rows."""
        start = self.start[rows]
        took, *rest = (
            one if isinstance(one, int) else one[rows] for one in (self.took, *self.rest)
        )
        return [start, start + took, *rest]


class SpanTable:
    """All spans of one process."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self.rows = 0

    def add(self, start_ns: ArrayLike, end_ns: ArrayLike, *rest: ArrayLike) -> int:
        """Add spans; return the row of the first. `rest`: kind and a to d, numbers or columns."""
        start = np.array(start_ns, np.int64)
        took = narrow(np.broadcast_to(np.asarray(end_ns, np.int64), start.shape) - start)
        first, self.rows = self.rows, self.rows + start.size
        if start.size:
            columns = (np.asarray(one, np.int64) for one in rest)
            wide = (c if not c.ndim else np.broadcast_to(c, start.shape) for c in columns)
            self._parts.append(_Part(start, took, [narrow(one) for one in wide]))
        return first

    def bounds_ns(self) -> list[int]:
        """Return the first start and the last end; nothing of nothing."""
        if not self._parts:
            return []
        low = min(int(part.start.min()) for part in self._parts)
        return [low, max(int(part.end().max()) for part in self._parts)]

    def whole(self) -> Int:
        """Return all as int64[7, n] (`SPAN_FIELDS`), as they were added."""
        table = np.empty((len(SPAN_FIELDS), self.rows), np.int64)
        first = 0
        for part in self._parts:
            last = first + part.start.size
            for row, column in enumerate(part.fields(slice(None))):
                table[row, first:last] = column
            first = last
        return table

    def in_order(self) -> SpansInOrder:
        """Return them by their ends."""
        return SpansInOrder(self._parts)


class SpansInOrder:
    """Spans by their ends, of one end as they were added; measures name the places of others."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        sizes = [part.start.size for part in parts]
        self._first = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        end = np.concatenate([part.end() for part in parts] or [np.zeros(0, np.int64)])
        self._order = np.argsort(end, kind="stable").astype(_index(end.size))
        end.sort()
        self._end = end
        self._place = self._order[:0]
        if any(part.rest[0] in _MEASURES for part in parts):
            self._place = np.empty_like(self._order)
            self._place[self._order] = np.arange(1, end.size + 1, dtype=self._order.dtype)

    def next_ns(self, after_ns: int) -> list[int]:
        """Return when the next ends, at or after an instant; nothing at their end."""
        row = int(self._end.searchsorted(after_ns))
        return [int(self._end[row])] if row < self._end.size else []

    def between(self, low_ns: int, high_ns: int) -> tuple[int, Int]:
        """Return the place of the first that ended in [low, high), counted from 0, and int64[7, n]:
        the fields of all of these."""
        a, b = (int(self._end.searchsorted(t)) for t in (low_ns, high_ns))
        table = np.empty((len(SPAN_FIELDS), b - a), np.int64)
        rows = self._order[a:b].astype(np.int64)
        part_of = self._first.searchsorted(rows, side="right") - 1
        for number in np.unique(part_of).tolist():
            here = np.flatnonzero(part_of == number)
            part = self._parts[number]
            for field, column in enumerate(part.fields(rows[here] - self._first[number])):
                table[field, here] = column
            if part.rest[0] in _MEASURES:
                table[3, here] = self._place[table[3, here]]
        return a, table


def _index(size: int) -> type[np.signedinteger]:
    return np.int32 if size < 1 << 31 else np.int64
