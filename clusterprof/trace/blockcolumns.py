"""Where the columns of a record lie in the blocks of its frame, found once per shape of frame.

Frames of one collector look alike second after second; what is where is worked out for the first
and remembered. A record's columns stay rows of a block until somebody asks for one, so that a
chunk can join the blocks of a minute rather than a hundred times sixty columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from clusterprof.trace import columns as packing
from clusterprof.trace import frame
from clusterprof.trace.frame import FrameError

_MOST_PLANS = 256
Place = tuple[str, int, int]
"""How a column is stored (STORED_TYPES), its block (-1: it has no rows) and its row there."""


class BlockColumns(Sequence[NDArray[Any]]):
    """The columns of one record; each is made when it is asked for."""

    __slots__ = ("arrays", "places")

    def __init__(self, places: tuple[Place, ...], arrays: Sequence[NDArray[Any]]) -> None:
        self.places = places
        """The same object for records that look alike."""
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(index, slice):
            return [one_of(place, self.arrays) for place in self.places[index]]
        return one_of(self.places[index], self.arrays)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter([one_of(place, self.arrays) for place in self.places])


def one_of(place: Place, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return a column as it was recorded."""
    code, block, row = place
    if block < 0:
        return np.empty(0, "<f8" if code in "md" else "<i8")
    return restored(code, arrays[block][row])


def restored(code: str, stored: NDArray[Any]) -> NDArray[Any]:
    """Undo the scaling of columns that were stored in one way."""
    if code == "m":
        return stored / 1000.0
    factor = frame.FACTORS.get(code, 1)
    return stored if factor == 1 else stored * np.int64(factor)


class PlanBook:
    """Remembers what is where in the frames of a recording, whose layouts never change."""

    def __init__(self) -> None:
        self._plans: dict[Any, list[tuple[Place, tuple[Place, ...]]]] = {}
        self._same: dict[tuple[Place, ...], tuple[Place, ...]] = {}

    def places(
        self, kind: int, header: frame.ColumnsHeader, layouts: Sequence[Any]
    ) -> list[tuple[Place, tuple[Place, ...]]]:
        """Return per part where its times (not for tables) and its columns are."""
        parts, blocks = header.parts, header.blocks
        key = (
            kind,
            tuple([(part.layout, part.rows) for part in parts]),
            tuple([(block.kind, block.columns, block.rows) for block in blocks]),
        )
        found = self._plans.get(key)
        if found is None:
            plan = _of_tables if kind == frame.KIND_ROWS else _of_samples
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
                self._same.clear()
            found = [
                (t_ns, self._same.setdefault(columns, columns))
                for t_ns, columns in plan(header, layouts)
            ]
            self._plans[key] = found
        return found


def _of_samples(
    header: frame.ColumnsHeader, layouts: Sequence[Any]
) -> list[tuple[Place, tuple[Place, ...]]]:
    queues = _Queues(list(enumerate(header.blocks)))
    t_ns = [queues.take("q", part.rows) for part in header.parts]
    taken = queues.take_all(header.parts, layouts)
    for layout, columns in zip(layouts, taken):
        if not isinstance(layout, frame.ColumnsLayout):
            raise FrameError("a columns frame refers to the layout of a table")
        if not len(columns) == len(layout.signals) == len(layout.devices):
            raise FrameError("signals, devices and types differ in number")
    return list(zip(t_ns, taken))


def _of_tables(
    header: frame.ColumnsHeader, layouts: Sequence[Any]
) -> list[tuple[Place, tuple[Place, ...]]]:
    """Tables do not share blocks: each has its own period."""
    found = []
    pairs = iter(enumerate(header.blocks))
    for part, layout in zip(header.parts, layouts):
        if not isinstance(layout, frame.RowsLayout) or len(layout.names) != len(layout.types):
            raise FrameError("a rows frame refers to a layout that is not a table's")
        kinds = {code == "d" for code in layout.types}  # one block of each
        queues = _Queues(list(islice(pairs, len(kinds) if part.rows else 0)))
        (columns,) = queues.take_all([part], [layout])
        found.append((("q", -1, 0), columns))
    return found


class _Queues:
    """Hands out the columns of blocks in the order in which they were stored."""

    def __init__(self, blocks: Sequence[tuple[int, frame.Block]]) -> None:
        self._columns = {
            (block.kind, block.rows): iter([(index, row) for row in range(block.columns)])
            for index, block in blocks
        }

    def take(self, code: str, rows: int) -> Place:
        """Return the next column that was stored in this way."""
        if not rows:
            return code, -1, 0
        kind = packing.FLOAT if code == "d" else packing.INT
        place = next(self._columns[kind, rows], None)
        if place is None:
            raise FrameError("fewer columns than the header promises")
        return code, *place

    def take_all(
        self, parts: Sequence[frame.ColumnsPart], layouts: Sequence[Any]
    ) -> list[tuple[Place, ...]]:
        """Return the columns of each record in its own order."""
        taken: list[list[Any]] = []
        for layout in layouts:
            if sorted(layout.order) != list(range(len(layout.types))):
                raise FrameError("an order that leaves out a column")
            if set(layout.types) - set(frame.STORED_TYPES):
                raise FrameError("columns of an unknown type")
            taken.append([None] * len(layout.types))
        for code in frame.STORED_TYPES:
            for part, layout, columns in zip(parts, layouts, taken):
                for index in layout.order if code in layout.types else ():
                    if layout.types[index] == code:
                        columns[index] = self.take(code, part.rows)
        return [tuple(columns) for columns in taken]
