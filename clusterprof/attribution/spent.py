"""What a rank had spent its time on when it came to each operation with other ranks.

    |== work 200 ==|-- data wait: storage 80, cpu 20 --|== work 50 ==| arrives ---- leaves
                                                                      storage 80, cpu 20, work 250

Blame across ranks compares these sums between ranks (docs/design.md, section 12). They run from the
first step on, stretch after stretch, and leave out the time in operations itself; what no cause
claimed is `OTHER`, what was not lost is work, less the time in which the main thread had no CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from clusterprof.attribution.blame import WORK
from clusterprof.attribution.partial import SHARE
from clusterprof.attribution.regions import Region
from clusterprof.attribution.spent_runnable import Runnable
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_COLLECTIVE, Float, Int, Lost, Rank, SpanTable

OTHER = "unexplained"
CONTENTION = "cpu-contention"
"""Work for which there was no CPU counts as this, though it is not lost to the rank itself."""
MOST_OPERATIONS = 12_000
"""Of one rank: their sums are in memory until all ranks have been read, a third of a kB each."""


@dataclass(frozen=True, slots=True)
class RankOperations:
    """The collective spans of one rank, in the order in which they ended; n rows."""

    spans: SpanTable
    blocked_ns: Int
    """Lost time inside each; what two spans cover is the earlier one's."""
    at_arrive: Int
    """int64[n, K]: spent by then, by category, in ns."""
    at_leave: Int
    whole: bool = True
    """False when there were more than `MOST_OPERATIONS`, and none was kept."""


class Spending:
    """Adds up what one rank spends, and notes the sums at its operations."""

    def __init__(self, causes: tuple[str, ...]) -> None:
        """Take the causes there may be; the categories are these, `OTHER` and work."""
        self.categories = (*causes, OTHER, WORK)
        self._sums = np.zeros(len(self.categories))
        self._parts: list[RankOperations] = []
        self._tentative: list[RankOperations] = []
        self._count = 0

    def add(self, rank: Rank, region: Region, lost: Lost, shares: Mapping[str, Int]) -> None:
        """Take a settled stretch; `shares` are those of its lost pieces, in 1/SHARE."""
        if self._count > MOST_OPERATIONS:
            return
        spans = _ended_in(rank.main.spans.get(layout.COLLECTIVE), region)
        inside = lost.phase == PHASE_COLLECTIVE
        amounts = self._amounts(lost, inside, shares)
        sums = _Sums(rank, region, lost, amounts)
        if spans is not None:
            blocked = _blocked(spans, region, lost, inside)
            come = self._until(sums, region, np.maximum(spans.start_ns, region.start_ns))
            go = self._until(sums, region, spans.end_ns)
            self._tentative.append(RankOperations(spans, blocked, come, go))
        if not region.tentative:
            self._parts += self._tentative
            self._tentative = []
        self._count += 0 if spans is None else len(spans.start_ns)
        if self._count > MOST_OPERATIONS:
            self._parts, self._tentative = [], []
        self._sums = self._until(sums, region, np.array([region.end_ns]))[0].astype(np.float64)

    def operations(self) -> RankOperations | None:
        """Return all operations inside steps so far; None when there were none."""
        if self._count > MOST_OPERATIONS:
            none = np.zeros(0, np.int64)
            return RankOperations(SpanTable(*[none] * 7), none, none, none, whole=False)
        if not self._parts:
            return None
        tables = [part.spans for part in self._parts]
        columns = (np.concatenate([getattr(t, n) for t in tables]) for n in SpanTable.__slots__)
        return RankOperations(
            SpanTable(*columns),
            np.concatenate([part.blocked_ns for part in self._parts]),
            np.concatenate([part.at_arrive for part in self._parts]),
            np.concatenate([part.at_leave for part in self._parts]),
        )

    def _amounts(self, lost: Lost, inside: np.ndarray, shares: Mapping[str, Int]) -> Float:
        """ns[n, K + 1] of each piece: by category without work, then all that was lost."""
        table = np.zeros((lost.lost_ns.size, len(self.categories)))
        for column, cause in enumerate(self.categories[:-2]):
            if cause in shares:
                table[:, column] = lost.lost_ns * (shares[cause] / SHARE)
        table[:, -2] = lost.lost_ns - table[:, :-2].sum(axis=1)
        table[inside, :-1] = 0.0
        table[:, -1] = lost.lost_ns
        return table

    def _until(self, sums: _Sums, region: Region, t_ns: Int) -> Int:
        """Return int64[m, K]: what was spent up to each time in the stretch."""
        table = sums.until(t_ns)
        table[:, -1] = (t_ns - region.start_ns) - table[:, -1]  # what was not lost is work
        if CONTENTION in self.categories:
            delayed = sums.runnable.until(t_ns, table[:, -1])
            table[:, self.categories.index(CONTENTION)] += delayed
            table[:, -1] -= delayed
        return np.rint(self._sums + table).astype(np.int64)


class _Sums:
    """Running sums over pieces that are sorted and disjoint."""

    def __init__(self, rank: Rank, region: Region, lost: Lost, amounts: Float) -> None:
        self._lost = lost
        self._amounts = amounts
        self._before = np.zeros((amounts.shape[0] + 1, amounts.shape[1]))
        np.cumsum(amounts, axis=0, out=self._before[1:])
        self.runnable = Runnable(
            rank, region, lambda t_ns: (t_ns - region.start_ns) - self.until(t_ns)[:, -1]
        )

    def until(self, t_ns: Int) -> Float:
        """Return float64[m, K]: all pieces before each time, and its part of the one it is in."""
        start, end = self._lost.start_ns, self._lost.end_ns
        row = np.searchsorted(start, t_ns, side="right") - 1
        known = row >= 0
        row = np.maximum(row, 0)
        if not start.size:
            return np.zeros((len(t_ns), self._before.shape[1]))
        part = np.clip((t_ns - start[row]) / np.maximum(end[row] - start[row], 1), 0.0, 1.0)
        table: Float = self._before[row] + self._amounts[row] * part[:, None]
        table[~known] = 0.0
        return table


def _ended_in(table: SpanTable | None, region: Region) -> SpanTable | None:
    """The spans of known groups that ended in a stretch, in the order in which they did."""
    if table is None:
        return None
    ended = (table.end_ns > region.start_ns) & (table.end_ns <= region.end_ns)
    rows = np.flatnonzero(ended & (table.a != 0))
    if not rows.size:
        return None
    rows = rows[np.argsort(table.end_ns[rows], kind="stable")]
    return SpanTable(*(getattr(table, name)[rows] for name in SpanTable.__slots__))


def _blocked(spans: SpanTable, region: Region, lost: Lost, inside: np.ndarray) -> Int:
    """Return int64[n]: lost time in operations inside each span, none of it twice."""
    waits = (spans.d >> layout.FORM_SHIFT & layout.FORM_MASK) != layout.ISSUE
    reach = np.maximum.accumulate(np.where(waits, spans.end_ns, region.start_ns))
    begin = np.maximum(spans.start_ns, np.append(region.start_ns, reach[:-1]))
    end = np.where(waits, spans.end_ns, begin)
    own = np.flatnonzero(inside)
    before = np.concatenate([[0], np.cumsum(lost.lost_ns[own])])
    # Pieces end where spans do: every piece lies in a span as a whole or not at all.
    low = np.searchsorted(lost.start_ns[own], begin, side="left")
    high = np.searchsorted(lost.start_ns[own], end, side="left")
    return np.where(high > low, before[np.maximum(high, low)] - before[low], 0).astype(np.int64)
