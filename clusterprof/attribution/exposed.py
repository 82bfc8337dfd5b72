"""What stream events say about lost time: how long a device stood still in a wait of its host.

A wait for data stood still for a part of it; that part is the end of the wait. An operation
with other ranks stood still for a time that lies where `timeline.device_waits` laid it, and is lost
as a whole; where it lies over a wait for data, that wait's part goes to what is left of it.

    host       |---- wait for data 40, exposed 10 ----|
    device     |-- operation 20 --|
    lost       |------- 20 -------|-------- 10 -------|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.painting import Painted
from clusterprof.attribution.regions import table_of
from clusterprof.probe import layout
from clusterprof.timeline.device_waits import DeviceWaits, device_waits
from clusterprof.timeline.model import Int, Rank


@dataclass(frozen=True, slots=True)
class Exposed:
    """What was measured in each painted row; n rows."""

    lost_ns: Int
    measured: NDArray[np.bool_]
    """True where a stream event tells, be it nothing."""
    idle_ns: Int
    """Of the lost time, what samples of the device see as idle too. The rest is work to them: while
    ranks wait for each other, their devices run the operation."""


def is_measured(rank: Rank) -> bool:
    """True when any wait of this rank was measured by stream events."""
    kinds = (layout.EXPOSED, layout.EXPOSED_COLLECTIVE)
    return any(table_of(rank, kind) is not None for kind in kinds)


def exposed(rank: Rank, painted: Painted) -> Exposed:
    """Return what stream events say about each painted row."""
    waits = device_waits(rank.main)
    lost_ns, measured = _in_data_waits(rank, painted, waits)
    if waits is None:
        return Exposed(lost_ns, measured, lost_ns)
    wait = waits.row_of(painted.start_ns, painted.end_ns)
    inside = wait >= 0
    length = painted.end_ns - painted.start_ns
    # While the host itself was held up it gave the device nothing to do.
    held_ns = np.clip(waits.blocked_until_ns[wait] - painted.start_ns, 0, length)
    return Exposed(
        np.where(inside, length, lost_ns),
        measured | inside,
        np.where(inside, held_ns, lost_ns),
    )


def _in_data_waits(
    rank: Rank, painted: Painted, waits: DeviceWaits | None
) -> tuple[Int, NDArray[np.bool_]]:
    """Exposed device time of each row, and whether the row lies in a wait that was measured.

    A measured amount lies at the end of its own wait, outside operations (`draining`), so that a
    row's part does not depend on which other rows are looked at.
    """
    none = np.zeros(painted.start_ns.size, np.int64)
    table = table_of(rank, layout.EXPOSED)
    if table is None:
        return none, none.astype(bool)
    order = np.argsort(table.start_ns, kind="stable")
    start, end, amount = table.start_ns[order], table.end_ns[order], table.b[order]
    row = np.maximum(np.searchsorted(start, painted.start_ns, side="right") - 1, 0)
    held = (painted.start_ns >= start[row]) & (painted.end_ns <= end[row])
    length = painted.end_ns - painted.start_ns
    first, last, begin, until = start, end, painted.start_ns, painted.end_ns
    if waits is not None:  # time in operations does not count
        first, last, begin, until = (t - waits.before(t) for t in (first, last, begin, until))
    stood_still = (last - np.clip(amount, 0, np.maximum(last - first, 0)))[row]
    part = np.maximum(until, stood_still) - np.maximum(begin, stood_still)
    return np.where(held, np.clip(part, 0, length), 0).astype(np.int64), held
