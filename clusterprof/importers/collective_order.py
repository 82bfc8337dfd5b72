"""Which rows of operations, seen on several ranks, are the same operations.

    sides = [Side(key, start_ns, end_ns, operation), ...]     # one per rank and stream, in order
    for group in grouped(sides): group.members, group.first   # number of the row 0 of each

A device stays in an operation until all its members are in it, so operations of all members that
are one overlap in time: what one rank did before its profile began, or after it ended, shows by a
row that meets nobody. Times must be of one clock, or of clocks that agree to about an operation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.importers.device_gaps import Int

MEET_AT_LEAST = 0.8
_SHIFT_AT_MOST = 32
_LOOKED_AT = 4096


@dataclass(frozen=True, slots=True)
class Side:
    """The operations of one rank on one stream, in order."""

    key: Hashable
    """Who: no two sides of one rank are in one group."""
    start_ns: Int
    end_ns: Int
    operation: Int


@dataclass(frozen=True, slots=True)
class Group:
    """Sides whose operations are the same."""

    members: tuple[int, ...]
    """Places in the list of sides."""
    first: tuple[int, ...]
    """Number in the group of the first row of each."""


def grouped(sides: Sequence[Side]) -> list[Group]:
    """Put sides together whose operations meet; who meets nobody is in no group."""
    left = [number for number, side in enumerate(sides) if side.start_ns.size]
    found = []
    while left:
        head, *rest = left
        shifts = {head: 0}
        for other in rest:
            if sides[other].key in {sides[one].key for one in shifts}:
                continue
            shift = _shift(sides[head], sides[other])
            if shift is not None:
                shifts[other] = shift
        left = [one for one in rest if one not in shifts]
        if len(shifts) > 1:
            low = min(shifts.values())
            found.append(Group(tuple(shifts), tuple(one - low for one in shifts.values())))
    return found


def _shift(one: Side, other: Side) -> int | None:
    """By how many rows one side begins before the other, if they are the same operations."""
    best, most = None, 0.0
    for shift in sorted(range(-_SHIFT_AT_MOST, _SHIFT_AT_MOST + 1), key=abs):
        a, b = max(shift, 0), max(-shift, 0)
        rows = min(one.start_ns.size - a, other.start_ns.size - b, _LOOKED_AT)
        # A shift by which hardly anything of the shorter one is left proves nothing.
        if rows < max(1, min(one.start_ns.size, other.start_ns.size) // 2):
            continue
        here, there = slice(a, a + rows), slice(b, b + rows)
        meet = (one.start_ns[here] < other.end_ns[there]) & (
            other.start_ns[there] < one.end_ns[here]
        )
        meet &= one.operation[here] == other.operation[there]
        part = float(np.mean(meet))
        if part > most:
            best, most = shift, part
    return best if most >= MEET_AT_LEAST else None
