"""What a rank that no other waits for lost by cause, stretch after stretch of its steps.

Nothing it loses is somebody else's wait, so without a cause it is sooner by what that cost it and
by what is hidden behind other work (`hidden`). The stretches say how much that varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clusterprof.attribution.hidden import HIDDEN
from clusterprof.attribution.partial import SHARE
from clusterprof.attribution.regions import Region
from clusterprof.probe import layout
from clusterprof.timeline.model import Int, Lost, Rank

MOST_BINS = 256
BINS_PER_REGION = 16


class OwnSteps:
    """Sums per stretch of steps; `causes` are the names of its columns."""

    def __init__(self, causes: Sequence[str]) -> None:
        self._causes = tuple(causes)
        self._bins: list[tuple[int, Int]] = []
        self._tentative: list[tuple[int, Int]] = []

    def add(
        self,
        rank: Rank,
        region: Region,
        lost: Lost,
        shares: Mapping[str, Int],
        hidden: Mapping[int, Int],
    ) -> None:
        """Take a settled stretch; `shares` are those of its pieces, in 1/SHARE."""
        edges = _edges(rank, region)
        row = np.searchsorted(edges, lost.end_ns, side="left") - 1
        row = np.clip(row, 0, edges.size - 2)
        sums = np.zeros((edges.size - 1, len(self._causes) + 1), np.int64)
        for column, cause in enumerate(self._causes):
            share = shares.get(cause)
            if share is not None and share.any():
                ns = lost.lost_ns * share // SHARE
                sums[:, -1] += np.bincount(row, ns, edges.size - 1).astype(np.int64)
                if cause in HIDDEN:
                    ns = ns + hidden.get(HIDDEN.index(cause), 0)
                sums[:, column] = np.bincount(row, ns, edges.size - 1)
        sums[:, -1] = np.maximum(sums[:, -1], sums[:, :-1].max(axis=1))
        self._tentative += zip(np.diff(edges).tolist(), sums)
        if not region.tentative:
            self.confirm()

    def confirm(self) -> None:
        """Take what was tentative: another step has ended."""
        self._bins += self._tentative
        self._tentative = []
        while len(self._bins) > MOST_BINS:
            even = len(self._bins) // 2 * 2
            pairs = zip(self._bins[:even:2], self._bins[1:even:2])
            merged = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
            self._bins = [*merged, *self._bins[even:]]

    def stretches(self) -> tuple[Int, Int] | None:
        """Return int64[n] lengths and int64[n, causes + 1], the last column being all causes."""
        if not self._bins:
            return None
        lengths, sums = zip(*self._bins)
        return np.array(lengths, np.int64), np.stack(sums)


def _edges(rank: Rank, region: Region) -> Int:
    """Return times between which stretches lie: ends of steps, a few, and those of the region."""
    steps = rank.main.spans.get(layout.STEP)
    inside = np.zeros(0, np.int64)
    if steps is not None:
        inside = steps.end_ns[(steps.end_ns > region.start_ns) & (steps.end_ns < region.end_ns)]
        inside = np.unique(inside)
        inside = inside[:: max(inside.size // BINS_PER_REGION, 1)]
    return np.concatenate([[region.start_ns], inside, [region.end_ns]]).astype(np.int64)
