"""How many waited for a rank."""

from __future__ import annotations

import numpy as np

from clusterprof.attribution.blame import Blamed
from clusterprof.timeline.operations import Operations

MOST_RANKS = 4096
"""Of more ranks the victims are not counted: a number for each pair of them is kept."""
_WORTH_RATIO = 0.1


class Victims:
    """How long each rank waited for each other, whatever the cause."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waited_ns = np.zeros(ranks * ranks if ranks <= MOST_RANKS else 0)

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        known = np.flatnonzero(blamed.culprit >= 0)
        if not known.size:
            return
        row, culprit, ns = blamed.row[known], blamed.culprit[known], blamed.ns[known]
        if self._waited_ns.size:
            np.add.at(self._waited_ns, culprit * self._ranks + ops.rank[row], ns.astype(float))

    def of(self, culprit: int) -> int | None:
        """Return how many others waited at least a tenth as long for it as the one that waited
        longest; None when it was not counted."""
        if not self._waited_ns.size:
            return None
        waited = self._waited_ns[culprit * self._ranks : (culprit + 1) * self._ranks].copy()
        waited[culprit] = 0
        longest = waited.max(initial=0)
        return int(np.count_nonzero(waited >= _WORTH_RATIO * longest)) if longest else 0
