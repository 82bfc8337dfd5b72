"""Where the columns of a record lie in the blocks of its frame, found once per shape of frame.

Frames of one collector look alike second after second; what is where is worked out for the first
and remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from clusterprof.trace import columns as packing
from clusterprof.trace import frame
from clusterprof.trace.frame import FrameError

_MOST_PLANS = 256
Place = tuple[str, int, int]
"""How a column is stored (STORED_TYPES), its block (-1: it has no rows) and its row there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is where in a frame; the same object for all frames that look alike."""

    parts: Sequence[tuple[tuple[Place, ...], tuple[Place, ...]]]
    """Per record where its times (one column; not for tables) and its columns are; records of all
    frames share what is the same."""


class PlanBook:
    """Remembers what is where in the frames of a recording, whose layouts never change."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}
        self._same: dict[tuple[Place, ...], tuple[Place, ...]] = {}

    def plan(self, kind: int, header: frame.ColumnsHeader, layouts: Sequence[Any]) -> Plan:
        """Return what is where; raise FrameError when a frame does not hold what it promises."""
        key = (
            kind,
            tuple([(part.layout, part.rows) for part in header.parts]),
            tuple([(one.kind, one.columns, one.rows, one.lag) for one in header.blocks]),
        )
        found = self._plans.get(key)
        if found is None:
            places = _of_tables if kind == frame.KIND_ROWS else _of_samples
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
                self._same.clear()
            parts = [((t_ns,), columns) for t_ns, columns in places(header, layouts)]
            found = self._plans[key] = Plan([(self._one(t), self._one(c)) for t, c in parts])
        return found

    def _one(self, places: tuple[Place, ...]) -> tuple[Place, ...]:
        return self._same.setdefault(places, places)


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
