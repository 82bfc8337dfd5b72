"""How many waited for a rank, and what it would win itself if it came with the second last."""

from __future__ import annotations

import numpy as np

from clusterprof.attribution.blame import Blamed
from clusterprof.timeline.operations import Operations

MOST_RANKS = 4096
"""Of more ranks the victims are not counted: a number for each pair of them is kept."""
_WORTH_RATIO = 0.1


class Victims:
    """Sums for each pair of ranks, and for each culprit and cause."""

    def __init__(self, ranks: int, causes: int) -> None:
        self._ranks = ranks
        self._waited_ns = np.zeros(ranks * ranks if ranks <= MOST_RANKS else 0)
        self.own_gain_ns = np.zeros((ranks, causes))
        """[culprit, cause]: how much earlier it would itself have gone on."""

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        known = np.flatnonzero(blamed.culprit >= 0)
        if not known.size:
            return
        row, culprit, ns = blamed.row[known], blamed.culprit[known], blamed.ns[known]
        if self._waited_ns.size:
            np.add.at(self._waited_ns, culprit * self._ranks + ops.rank[row], ns.astype(float))
        op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))[row]
        waited = np.bincount(op, weights=ns, minlength=ops.team.size)
        # Who was waited for through others came last elsewhere, and wins there.
        itself = culprit == blamed.last[op]
        gain = (ns * blamed.recoverable_ns[op] / np.maximum(waited[op], 1))[itself]
        np.add.at(self.own_gain_ns, (culprit[itself], blamed.cause[known][itself]), gain)

    def of(self, culprit: int) -> int | None:
        """Return how many others waited at least a tenth as long for it as the one that waited
        longest; None when it was not counted."""
        if not self._waited_ns.size:
            return None
        waited = self._waited_ns[culprit * self._ranks : (culprit + 1) * self._ranks].copy()
        waited[culprit] = 0
        longest = waited.max(initial=0)
        return int(np.count_nonzero(waited >= _WORTH_RATIO * longest)) if longest else 0
