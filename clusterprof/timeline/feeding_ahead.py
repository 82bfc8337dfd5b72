"""Which waits a loader would have spared itself had it been allowed to work further ahead.

The throughput identity over the batches that it could have had ready with `AHEAD` of them per
worker: what these took to make, by all workers together, against the time in which they were used.

    batches        5  5  5  5 700          4 workers, a step takes 150: 720 / 4 = 180 of 750
    waited                    150          workers rest for most of the time: none of it was needed
    all of 700                             3500 / 4 = 875 of 750: 125 of the waits were
"""

from __future__ import annotations

import numpy as np

from clusterprof.probe.layout import LOADER_START
from clusterprof.timeline.feeding_waits import fetches_of, waits_of
from clusterprof.timeline.model import Float, Int, Rank

AHEAD = 4
"""Batches per worker that any loader can keep ready; one that may keep as many is not to blame."""
BUSY_AT_MOST_RATIO = 0.5
"""Workers that are busy for more of the time are no idle workers."""


def spared(rank: Rank, t_ns: Int) -> Float:
    """Return float64[n]: part of the wait at each time that working further ahead would have saved.

    0 where the loader may work that far ahead already, has no workers, or did not say.
    """
    none = np.zeros(t_ns.size)
    busy = [spans for one in rank.workers if (spans := fetches_of(one)) is not None]
    waits = waits_of(rank)
    if not busy or not waits.start_ns.size or not 0 < _prefetch(rank) < AHEAD:
        return none
    n, count = waits.start_ns.size, len(rank.workers)
    first = np.maximum(np.arange(n) - AHEAD * count, 0)
    begin, end = waits.start_ns[first], waits.end_ns
    total = np.concatenate([[0], np.cumsum(waits.end_ns - waits.start_ns)])
    waited = total[1:] - total[first]
    made = np.zeros(n, np.int64)
    for one in busy:
        made += _until(one.start_ns, one.end_ns, end) - _until(one.start_ns, one.end_ns, begin)
    needed = np.maximum(made / count - (end - begin - waited), 0.0)
    saved = np.clip(1.0 - needed / np.maximum(waited, 1), 0.0, 1.0)
    saved[made > BUSY_AT_MOST_RATIO * count * (end - begin)] = 0.0
    row = np.searchsorted(waits.start_ns, t_ns, side="right") - 1
    at = np.maximum(row, 0)
    return np.where((row >= 0) & (t_ns <= waits.end_ns[at]), saved[at], none)


def _prefetch(rank: Rank) -> int:
    """The most batches that a worker may have ready; 0 unknown."""
    table = rank.main.spans.get(LOADER_START)
    return 0 if table is None or not table.c.size else int(table.c.max())


def _until(start_ns: Int, end_ns: Int, t_ns: Int) -> Int:
    """How much of the time before each t lies in intervals, which are disjoint and sorted."""
    before = np.concatenate([[0], np.cumsum(end_ns - start_ns)])
    row = np.searchsorted(start_ns, t_ns, side="right")
    over = np.where(row > 0, end_ns[np.maximum(row, 1) - 1] - t_ns, 0)
    return (before[row] - np.maximum(over, 0)).astype(np.int64)
