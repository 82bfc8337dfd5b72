"""When a device stood still in a collective operation that its host only issued.

The probe measures how long the default stream stood still (`exposed_collective`), not when: the
host runs ahead of its device. Each wait is laid at the earliest time at which it can have been:
not before the host came to the operation, and after the wait before it, for one stream does one
thing after another.

    host      |i|  |i|          |i|            came to three operations, and went on
    measured   40   30           20
    placed    |----40----|--30--||-20-|        the second waits for the first, the third does not

A *run* is a chain of waits of which each begins where the one before it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe import layout
from clusterprof.timeline.model import Int, Process, SpanTable

ON_DEVICE = 1 << layout.FORM_SHIFT + 4
"""Bit of field d, set here and never recorded: times are the device's, laid as early as can be."""


@dataclass(frozen=True, slots=True)
class DeviceWaits:
    """Waits of one process that were measured, sorted and disjoint; n rows, some of no length."""

    start_ns: Int
    end_ns: Int
    blocked_until_ns: Int
    """When the host went on; up to then the device may have had nothing to do at all."""
    sequence: Int
    """Of the collective span that was measured."""
    run_ends_ns: Int
    """When the last wait of the same run ends."""

    def before(self, t_ns: Int) -> Int:
        """Return int64[m]: how much of the time before each t lies in waits."""
        total = np.concatenate([[0], np.cumsum(self.end_ns - self.start_ns)])
        row = np.searchsorted(self.start_ns, t_ns, side="right")
        cut = np.where(row > 0, self.end_ns[np.maximum(row, 1) - 1] - t_ns, 0)
        return (total[row] - np.maximum(cut, 0)).astype(np.int64)

    def row_of(self, start_ns: Int, end_ns: Int) -> Int:
        """Return the wait in which each interval begins, -1 for those not wholly in one run."""
        row = np.searchsorted(self.start_ns, start_ns, side="right") - 1
        held = (row >= 0) & (end_ns <= self.run_ends_ns[row])
        return np.where(held, row, -1)


def device_waits(process: Process) -> DeviceWaits | None:
    """Return the measured waits of a process; None when there are none."""
    table = process.spans.get(layout.EXPOSED_COLLECTIVE)
    return None if table is None or not table.start_ns.size else placed(table)


def placed(table: SpanTable) -> DeviceWaits:
    """Lay the waits of `exposed_collective` spans one after the other."""
    order = np.lexsort((table.a, table.start_ns))
    issued, until = table.start_ns[order], table.end_ns[order]
    length = np.maximum(table.b[order], 0)
    ends = np.cumsum(length)
    # A wait begins when its host came, or where the one before it ended: the later of the two.
    start = np.maximum.accumulate(issued - (ends - length)) + ends - length
    end = start + length
    opens = np.ones(start.size, np.bool_)
    opens[1:] = start[1:] > end[:-1]
    last = np.append(np.flatnonzero(opens)[1:] - 1, start.size - 1)
    return DeviceWaits(start, end, until, table.a[order], end[last][np.cumsum(opens) - 1])


def still_needed(table: SpanTable, from_ns: int) -> NDArray[np.bool_]:
    """True for `exposed_collective` spans whose run has not ended by then.

    A run begins when its first host came, whatever was before: what is kept is laid as it was.
    """
    waits = placed(table)
    keep = np.empty(table.start_ns.size, np.bool_)
    keep[np.lexsort((table.a, table.start_ns))] = waits.run_ends_ns > from_ns
    return keep | (table.end_ns > from_ns)


def on_device(table: SpanTable, waits: DeviceWaits | None) -> SpanTable:
    """Return collective spans with the device's times where they were measured, sorted by start.

    Blocking operations among them are marked `ON_DEVICE`: arrival and leave are both the device's.
    """
    if waits is None:
        return table
    order = np.argsort(waits.sequence, kind="stable")
    known = waits.sequence[order]
    row = np.minimum(np.searchsorted(known, table.sequence), known.size - 1)
    found = known[row] == table.sequence
    wait = order[row]
    start = np.where(found, waits.start_ns[wait], table.start_ns)
    end = np.where(found, waits.end_ns[wait], table.end_ns)
    again = np.argsort(start, kind="stable")
    whole = found & (table.d >> layout.FORM_SHIFT & layout.FORM_MASK == layout.BLOCKING)
    how = np.where(whole, table.d | ON_DEVICE, table.d)
    rest = (table.a, table.b, table.c, how, table.sequence)
    return SpanTable(start[again], end[again], *(column[again] for column in rest))
