"""The steps of a trace: as the profiler marked them, else as well as can be told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.importers.base import Account
from clusterprof.importers.kineto.columns import Int

_OPTIMIZERS_AT_LEAST = 3


@dataclass(frozen=True, slots=True)
class Steps:
    """When steps began and ended; sorted, disjoint."""

    start: Int
    end: Int
    number: Int


def marked(start: Int, end: Int, number: Int, account: Account) -> Steps | None:
    """Return the steps that the profiler marked; None when there are none."""
    some = np.flatnonzero((number >= 0) & (end > start))
    if not some.size:
        return None
    order = some[np.lexsort((-end[some], start[some]))]
    start, end, number = start[order], end[order], number[order]
    reach = np.concatenate([[start[0]], np.maximum.accumulate(end)[:-1]])
    keep = start >= reach
    left = int(np.count_nonzero(~keep))
    if left:
        account.skipped["steps within another"] += left
    return Steps(start[keep], end[keep], number[keep])


def inferred(from_ns: int, until_ns: int, optimizers_end: Int, account: Account) -> Steps:
    """Return steps where nobody marked any: from optimizer to optimizer, or one over all."""
    inside = np.unique(optimizers_end[(optimizers_end > from_ns)])
    if inside.size >= _OPTIMIZERS_AT_LEAST:
        edges = np.concatenate([[from_ns], inside])
        edges[-1] = max(int(edges[-1]), until_ns)
        account.notes.append(
            "no step of the profiler (ProfilerStep#) in it: a step is taken to end where the"
            " optimizer's does; the first begins with the first work on the device"
        )
        return Steps(edges[:-1], edges[1:], np.arange(1, edges.size))
    account.notes.append(
        "no step of the profiler (ProfilerStep#) in it: all from the first to the last work is"
        " taken for one step; call profiler.step() in the training loop to see steps"
    )
    whole = np.array([from_ns]), np.array([max(until_ns, from_ns + 1)])
    return Steps(*whole, np.array([1]))
