"""What a rank had spent its time on when it came to each operation with other ranks.

    |== work 200 ==|-- data wait: storage 80, cpu 20 --|== work 50 ==| arrives ---- leaves
                                                                      storage 80, cpu 20, work 250

Blame across ranks compares these sums between ranks (docs/design.md, section 12). They run from the
first step on, stretch after stretch, and leave out the time in operations itself; what no cause
claimed is `OTHER`, what was not lost is work, less the time in which the main thread had no CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from clusterprof.attribution.blame import WORK
from clusterprof.attribution.hidden import Running, hidden_ns
from clusterprof.attribution.own_steps import OwnSteps
from clusterprof.attribution.partial import SHARE
from clusterprof.attribution.regions import Region
from clusterprof.attribution.spent_runnable import Runnable
from clusterprof.attribution.unmarked import has_peers
from clusterprof.probe import layout
from clusterprof.timeline.device_waits import device_waits, on_device
from clusterprof.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_SPINNING,
    Float,
    Int,
    Lost,
    Rank,
    SpanTable,
)
from clusterprof.timeline.operation_rows import RankOperations, RankRows, Store

OTHER = "unexplained"
CONTENTION = "cpu-contention"
"""Work for which there was no CPU counts as this, though it is not lost to the rank itself."""


class Spending:
    """Adds up what one rank spends, and notes the sums at its operations."""

    def __init__(self, causes: tuple[str, ...], store: Store) -> None:
        """Take the causes there may be; the categories are these, `OTHER` and work."""
        self.categories = (*causes, OTHER, WORK)
        self._contention = causes.index(CONTENTION) if CONTENTION in causes else None
        self._sums = np.zeros(len(self.categories), np.int64)
        self._rows = RankRows(store)
        self._tentative: list[tuple[Int, Int, Int]] = []
        self._hidden = Running()
        self._own = OwnSteps(causes)

    def add(self, rank: Rank, region: Region, lost: Lost, shares: Mapping[str, Int]) -> None:
        """Take a settled stretch; `shares` are those of its lost pieces, in 1/SHARE.

        Behind the categories stand those of `HIDDEN`, what a fix would win beyond them.
        """
        spans = _ended_in(_operations_of(rank), region)
        inside = lost.phase == PHASE_COLLECTIVE
        own_ns = np.where(inside | (lost.phase == PHASE_SPINNING), 0, lost.lost_ns)
        amounts = amounts_of(self.categories, own_ns, lost, shares)
        sums = Sums(self._sums, rank, region, lost, amounts, self._contention)
        more = hidden_ns(rank, lost, shares)
        if spans is not None:
            table = np.stack([*spans, _blocked(spans, region, lost, inside)])
            times = np.maximum(spans[0], region.start_ns), spans[1]
            come, go = (
                np.concatenate([sums.until(t_ns), hidden])
                for t_ns, hidden in zip(times, self._hidden.add(lost, more, *times))
            )
            self._tentative.append((table, come, go))
        else:
            self._hidden.add(lost, more)
        if not has_peers(rank):
            self._own.add(rank, region, lost, shares, more)
        if not region.tentative:
            self.confirm()
        self._sums = sums.in_all()

    def confirm(self) -> None:
        """Take what was tentative: another step has ended."""
        for part in self._tentative:
            self._rows.add(*part)
        self._tentative = []
        self._own.confirm()

    def own(self) -> tuple[Int, Int] | None:
        """Return what a rank without peers lost (`OwnSteps.stretches`); None for one with peers."""
        return self._own.stretches()

    def operations(self) -> RankOperations | None:
        """Return all operations inside steps; None when there were none. Call it once."""
        return self._rows.finish()


def amounts_of(
    categories: tuple[str, ...], own_ns: Int, lost: Lost, shares: Mapping[str, Int]
) -> dict[int, Float]:
    """Return category -> ns of each piece, without those of which there is nothing.

    `own_ns` is what counts of each piece's loss; the shares are of that.
    """
    out: dict[int, Float] = {}
    rest = own_ns.astype(np.float64)
    for column, cause in enumerate(categories[:-2]):
        share = shares.get(cause)
        if share is not None and share.any():
            out[column] = np.minimum(own_ns, lost.lost_ns * (share / SHARE))
            rest -= out[column]
    if rest.any():
        out[len(categories) - 2] = rest
    return out


class Sums:
    """Running sums over the pieces of a stretch, which are sorted and disjoint."""

    def __init__(
        self,
        before: Int,
        rank: Rank,
        region: Region,
        lost: Lost,
        amounts: Mapping[int, Float],
        contention: int | None,
    ) -> None:
        """`contention` is the category of work for which there was no CPU, None for none."""
        self._before, self._region, self._lost = before, region, lost
        self._parts = {column: (ns, _running(ns)) for column, ns in amounts.items()}
        self._all = (lost.lost_ns, _running(lost.lost_ns))
        self._contention = contention
        if contention is not None:
            self._runnable = Runnable(rank, region, lambda t_ns: self._since(t_ns)[-1])

    def until(self, t_ns: Int) -> Int:
        """Return int64[K, m]: what had been spent at each time, by category.

        All pieces before each time, and its part of the one it is in.
        """
        table = self._since(t_ns)
        if self._contention is not None:
            delayed = np.rint(self._runnable.until(t_ns, table[-1])).astype(np.int64)
            table[self._contention] += delayed
            table[-1] -= delayed
        table += self._before[:, None]
        return table

    def _since(self, t_ns: Int) -> Int:
        """The same since the beginning of the stretch, with all that was not lost as work."""
        table = np.zeros((self._before.size, t_ns.size), np.int64)
        table[-1] = t_ns - self._region.start_ns
        start, end = self._lost.start_ns, self._lost.end_ns
        if not start.size:
            return table
        row = np.searchsorted(start, t_ns, side="right") - 1
        at = np.maximum(row, 0)
        part = np.minimum((t_ns - start[at]) / np.maximum(end[at] - start[at], 1), 1.0)
        part[row < 0] = 0.0  # before the first piece
        for column, (ns, sums) in self._parts.items():
            table[column] += np.rint(sums[at] + ns[at] * part).astype(np.int64)
        lost_ns, sums = self._all
        # What was not lost is work.
        table[-1] -= np.rint(sums[at] + lost_ns[at] * part).astype(np.int64)
        return table

    def in_all(self) -> Int:
        """Return int64[K]: what had been spent at the end of the stretch."""
        return self.until(np.array([self._region.end_ns]))[:, 0]


def _running(ns: Float | Int) -> Float:
    out = np.zeros(ns.size + 1)
    np.cumsum(ns, out=out[1:])
    return out


def _operations_of(rank: Rank) -> SpanTable | None:
    """The collective spans of a rank, where they were measured with the times of its device."""
    table = rank.main.spans.get(layout.COLLECTIVE)
    return None if table is None else on_device(table, device_waits(rank.main))


def _ended_in(table: SpanTable | None, region: Region) -> tuple[Int, ...] | None:
    """Start, end, a to d of the spans of known groups that ended in a stretch, as they ended."""
    if table is None:
        return None
    ended = (table.end_ns > region.start_ns) & (table.end_ns <= region.end_ns)
    rows = np.flatnonzero(ended & (table.a != 0))
    if not rows.size:
        return None
    ends = table.end_ns[rows]
    if (ends[1:] < ends[:-1]).any():
        rows = rows[np.argsort(ends, kind="stable")]
    columns = (table.start_ns, table.end_ns, table.a, table.b, table.c, table.d)
    return tuple(column[rows] for column in columns)


def _blocked(spans: tuple[Int, ...], region: Region, lost: Lost, inside: np.ndarray) -> Int:
    """Return int64[n]: lost time in operations inside each span, none of it twice."""
    start, end, *_, how = spans
    waits = (how >> layout.FORM_SHIFT & layout.FORM_MASK) != layout.ISSUE
    reach = np.maximum.accumulate(np.where(waits, end, region.start_ns))
    begin = np.maximum(start, np.append(region.start_ns, reach[:-1]))
    end = np.where(waits, end, begin)
    # Spans that touch share a piece: of each piece counts what lies in the span.
    until = _lost_until(lost, np.flatnonzero(inside))
    # Both are rounded: the difference may be a nanosecond more than there is.
    return np.clip(until(end) - until(begin), 0, np.maximum(end - begin, 0))


def _lost_until(lost: Lost, rows: Int) -> Callable[[Int], Int]:
    """Return what gives the time lost in some pieces, which do not overlap, before a time."""
    start, length, ns = (
        lost.start_ns[rows],
        lost.end_ns[rows] - lost.start_ns[rows],
        lost.lost_ns[rows],
    )
    before = np.concatenate([[0], np.cumsum(ns)])

    def until(t_ns: Int) -> Int:
        row = np.searchsorted(start, t_ns, side="right") - 1
        if not start.size:
            return np.zeros(t_ns.size, np.int64)
        at = np.maximum(row, 0)
        part = np.clip((t_ns - start[at]) / np.maximum(length[at], 1), 0.0, 1.0)
        found = before[at] + np.floor(ns[at] * part).astype(np.int64)
        return np.where(row < 0, 0, found)

    return until
