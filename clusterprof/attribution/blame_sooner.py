"""How much sooner operations would have gone on: without the last to come, without a cause."""

from __future__ import annotations

import numpy as np

from clusterprof.attribution.blame_rows import Lookup
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations


def sooner(ops: Operations, look: Lookup) -> Int:
    """Return int64[K - 1, m]: of the m operations, how much sooner each would go on without what
    any of its members lost to a category since the team's operation before.

        storage 50 |== work ==|                 arrives at 150
        storage 40 |== work ==|                 arrives at 140
                   |== work ==|-- waits --|     arrives at 100     50 sooner without storage

    In a rank's first operation it is since its steps began.
    """
    rows = look.rows
    fresh = slice(look.fresh, None)
    previous = look.previous[fresh]
    come = ops.arrive_ns - ops.leave_ns  # who came last stands highest
    latest = np.maximum.reduceat(come, ops.first[:-1])
    blind = (previous < 0) & (look.before[fresh] >= 0)
    out = np.zeros((len(rows.at_arrive) - 1, ops.team.size), np.int64)
    for column, ns in enumerate(out):
        spent = rows.at_arrive[column, fresh] - np.where(
            previous >= 0, rows.at_leave[column, previous], 0
        )
        spent[blind] = 0
        if (spent > 0).any():
            left = come - np.maximum(spent, 0)
            ns[:] = latest - np.maximum.reduceat(left, ops.first[:-1])
    return out


def alone(ops: Operations, shortest: Int, last: Int) -> tuple[Int, Int]:
    """Return how much the last to arrive alone delayed each operation, and who was late with it."""
    stay = ops.leave_ns - ops.arrive_ns
    op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
    longest = np.maximum.reduceat(stay, ops.first[:-1])
    others = stay.copy()
    others[last] = np.iinfo(np.int64).max
    second = np.minimum.reduceat(others, ops.first[:-1])
    alone = np.diff(ops.first) < 2
    late = 2 * (stay - shortest[op]) < (longest - shortest)[op]
    late[last] = False
    count = np.bincount(op[late], minlength=ops.team.size)
    return np.where(alone, 0, second - shortest), count
