"""Waits that only come from ranks not leaving an operation at the same instant.

    rank 0   leave |== work 100 ==| arrive |-- 12 --|      rank 0 "waits" 12 for rank 1, which
    rank 1         leave |== work 100 ==| arrive | leave   did nothing for longer than rank 0

Behind a long way a rank may leave later than the others, in a ring or a tree by the way the data
take. Everything between leaving and arriving is known, so what no excess explains of a wait is the
difference in leaving. As far as the two operations lasted without waiting that is the network's,
and nobody came last; beyond that something unseen held the rank up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.blame_excess import Pairs
from clusterprof.attribution.blame_rows import Rows
from clusterprof.timeline.model import Int


def left_apart(rows: Rows, pairs: Pairs, over: Int, rest_ns: Int) -> NDArray[np.bool_]:
    """True where leaving apart may explain the rest of a wait: `rest_ns` of the pairs `over`."""
    theirs = pairs.theirs[over]
    allowed = rows.transfer_ns[pairs.awaited[over]] + np.where(
        theirs >= 0, rows.transfer_ns[theirs], 0
    )
    return (pairs.mine[over] >= 0) & (rest_ns <= allowed)


def nobody_last(op: Int, wait_ns: Int, apart_ns: Int, operations: int) -> NDArray[np.bool_]:
    """True for operations in which more than half of the waits are of leaving apart."""
    waits = np.zeros(operations, np.int64)
    apart = np.zeros(operations, np.int64)
    np.add.at(waits, op, wait_ns)
    np.add.at(apart, op, apart_ns)
    result: NDArray[np.bool_] = 2 * apart > waits
    return result
