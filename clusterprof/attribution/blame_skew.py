"""Waits that only come from ranks not leaving an operation at the same instant.

    rank 0   leave |== work 100 ==| arrive |-- 12 --|      rank 0 "waits" 12 for rank 1, which
    rank 1         leave |== work 100 ==| arrive | leave   did nothing for longer than rank 0

Behind a long way, or where packets are lost, a rank may leave later than the others. Everything
between leaving and arriving is on the rank's own clock: what the awaited rank did not take longer
there, the network did, and nobody came last. (What holds a rank up inside an operation after all
have come to it looks the same.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.blame_excess import Pairs
from clusterprof.attribution.blame_rows import Rows
from clusterprof.timeline.model import Int


def left_apart(rows: Rows, pairs: Pairs, wait_ns: Int) -> Int:
    """Return int64[n]: of each wait, what the awaited rank did not take longer on its own clock.

        waiting   leave |== 100 ==| arrive                wait 30, and both took 100 since:
        awaited           30 leave |== 100 ==| arrive     30 were the network's

    0 where the two left no operation together, or a device was measured (`device_behind`).
    """
    known = (pairs.mine >= 0) & (rows.on_device[pairs.waiting] | rows.on_device[pairs.awaited] == 0)
    longer = np.maximum(_longer(rows, pairs), 0)
    return np.where(known, np.maximum(wait_ns - longer, 0), 0)


def device_behind(rows: Rows, pairs: Pairs, wait_ns: Int) -> Int:
    """Return int64[n]: how much longer the awaited rank's device took than its host shows.

    Devices leave an operation together, and come to it at a time that nobody measures: where one
    is laid depends on how far its host was ahead. So who was waited for took longer by the wait.

        waiting   leave |== 90 ==| arrive                 wait 30, and hosts show 10 more:
        awaited   leave |== 100 ==| arrive                20 more on the device

    0 where no device was measured, or the two left no operation together.
    """
    seen = (rows.on_device[pairs.waiting] | rows.on_device[pairs.awaited]) != 0
    return np.where(seen & (pairs.mine >= 0), wait_ns - _longer(rows, pairs), 0)


def _longer(rows: Rows, pairs: Pairs) -> Int:
    waiting, awaited, mine, theirs = pairs
    longer: Int = rows.arrive_ns[awaited] - rows.leave_ns[theirs]
    longer -= rows.arrive_ns[waiting] - rows.leave_ns[mine]
    return longer


def nobody_last(op: Int, wait_ns: Int, apart_ns: Int, operations: int) -> NDArray[np.bool_]:
    """True for operations in which more than half of the waits are of leaving apart."""
    waits = np.zeros(operations, np.int64)
    apart = np.zeros(operations, np.int64)
    np.add.at(waits, op, wait_ns)
    np.add.at(apart, op, apart_ns)
    result: NDArray[np.bool_] = 2 * apart > waits
    return result
