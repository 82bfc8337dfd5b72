"""Decides how each column is stored: divided by what its values have in common, and beside whom.

Kernels count in ticks, drivers in milliwatts; the nanoseconds and watts made of them hold nothing
more. And planes compress better when columns that move alike stand together. Both are decided
from the first rows of a collector (one row first, if that is all there is), hold until they prove
wrong or until the next segment, and stand in its layout, so that a reader needs to guess nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from clusterprof.trace import columns as packing
from clusterprof.trace import frame


class Table(NamedTuple):
    """The columns of one record."""

    name: str
    rows: int
    typecodes: str
    """q or d per column."""
    columns: Sequence[array]
    times: tuple[array, ...] = ()
    """Columns of every record of this kind, not of its layout: when rows were sampled."""


class Plan(NamedTuple):
    """How the columns of a collector are stored."""

    typecodes: str
    stored: str
    """One of frame.STORED_TYPES per column."""
    order: dict[str, list[int]]
    """By way of storing: the columns stored so, calm ones first."""
    flat_order: tuple[int, ...]
    """All columns in the order of storing."""
    settled: bool
    """False when made of a single row, which tells nothing about how columns move."""


class Planner:
    """Remembers the plan of each collector."""

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}

    def forget(self) -> None:
        """Decide everything anew when it is next needed."""
        self._plans.clear()

    def pack(
        self, sink: packing.PlaneSink, tables: Sequence[Table], lag: int
    ) -> tuple[list[Plan], list[frame.Block]]:
        """Store tables; return the plan of each, and the blocks: equal lengths share blocks."""
        plans = [self._plan(table) for table in tables]
        blocks = []
        for rows in dict.fromkeys(table.rows for table in tables):
            if not rows:
                continue
            members = [n for n, table in enumerate(tables) if table.rows == rows]
            lanes = self._lanes(tables, plans, members)
            floats = lanes.pop("d", b"")
            for kind, data in ((packing.INT, b"".join(lanes.values())), (packing.FLOAT, floats)):
                if data:
                    columns = len(data) // packing.LANE_BYTES // rows
                    blocks.append(packing.pack_block(sink, kind, data, columns, lag))
        return plans, blocks

    def _plan(self, table: Table) -> Plan:
        known = self._plans.get(table.name)
        if (
            known is not None
            and known.typecodes == table.typecodes
            and (known.settled or table.rows <= 1)
        ):
            return known
        return self._remember(table, "".join(map(storage_of, table.columns)))

    def _lanes(
        self, tables: Sequence[Table], plans: list[Plan], members: Sequence[int]
    ) -> dict[str, bytes]:
        """Return the lanes of all members by way of storing; correct plans that prove wrong."""
        lanes = {}
        for code in frame.STORED_TYPES:
            columns = [column for n in members for column in tables[n].times] if code == "q" else []
            for n in members:
                if code in plans[n].order:
                    of = tables[n].columns
                    columns += [of[index] for index in plans[n].order[code]]
            if columns:
                stored = store(columns, code)
                if stored is None:
                    for n in members:
                        plans[n] = self._correct(tables[n], plans[n], code)
                    return self._lanes(tables, plans, members)
                lanes[code] = stored
        return lanes

    def _correct(self, table: Table, plan: Plan, code: str) -> Plan:
        if code not in plan.order:
            return plan
        stored = "".join(
            storage_of(column) if its == code else its
            for column, its in zip(table.columns, plan.stored)
        )
        return self._remember(table, stored)

    def _remember(self, table: Table, stored: str) -> Plan:
        order: dict[str, list[int]] = {}
        for code in frame.STORED_TYPES:
            if code in stored:
                mine = [n for n, its in enumerate(stored) if its == code]
                order[code] = sorted(mine, key=lambda n: _spread(table.columns[n], stored[n]))
        flat = tuple(index for indices in order.values() for index in indices)
        plan = Plan(table.typecodes, stored, order, flat, settled=table.rows > 1)
        self._plans[table.name] = plan
        return plan


def storage_of(column: array) -> str:
    """Return how a column is stored best, one of frame.STORED_TYPES."""
    if column.typecode == "d":
        return "d" if store([column], "m") is None else "m"
    common = gcd(*column)
    if common:
        for code in "tikuq":
            if not common % frame.FACTORS[code] and store([column], code) is not None:
                return code
    return "q"


def store(columns: Sequence[array], code: str) -> bytes | None:
    """Return the lanes of columns stored in a certain way, or None when that is not exact."""
    data = b"".join(columns)
    if code == "m":
        return packing.thousandths(data)
    return data if code in "qd" else packing.divided(data, frame.FACTORS[code])


def _spread(column: array, code: str) -> int:
    """Bits that the values of a column differ in, once stored."""
    if code == "d" or not column:
        return 0
    spread = max(column) - min(column)
    return round(1000 * spread if code == "m" else spread // frame.FACTORS[code]).bit_length()
