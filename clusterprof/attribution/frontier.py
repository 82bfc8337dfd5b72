"""Steps as operations: who was last, where nobody marked the operations between ranks.

In a synchronous job all ranks leave the last collective of a step together, so the step is an
operation too: a rank comes to it when it has waited for data and worked, and then waits.

    rank 0   |== work 200 ==|-------- waits 100 --------|
    rank 1   |-- storage 100 --|== work 200 ==|           comes last: waits for nobody

From then on it is blamed like a marked one (`blame`): durations only, no clock. A rank may wait in
several places of a step; all of it is laid at the end. Without steps an operation is a stretch of
`GRID_NS` of everybody's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from clusterprof.attribution.hidden import Running, hidden_ns
from clusterprof.attribution.partial import SHARE
from clusterprof.attribution.regions import Region
from clusterprof.attribution.spent import CONTENTION, Sums, amounts_of
from clusterprof.attribution.unmarked import has_peers, marks_operations
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_PERHAPS, Int, Lost, Rank
from clusterprof.timeline.operation_rows import RankOperations, RankRows, Store
from clusterprof.timeline.periods import Period, period_of

GROUP = 1
"""What all ranks of a job are called here; no group of a marked operation is asked with it."""
GRID_NS = 2_000_000_000
TICK_NS, MOST_TICKS = 100_000_000, 6000  # for the period, where nobody marked steps


class _Steps:
    """The steps of a rank, and what it had spent at the end of each."""

    def __init__(self, categories: tuple[str, ...], store: Store) -> None:
        self._categories = categories
        contention = CONTENTION in categories
        self._contention = categories.index(CONTENTION) if contention else None
        self._sums = np.zeros(len(categories), np.int64)
        self._rows = RankRows(store)
        self._tentative: list[tuple[Int, Int]] = []
        self._hidden = Running()
        self._waited_ns = 0
        """Since the last step that ended."""

    def add(
        self, rank: Rank, region: Region, lost: Lost, shares: Mapping[str, Int], waiting: Int
    ) -> None:
        """Take a settled stretch."""
        waited_ns = lost.lost_ns * waiting // SHARE
        amounts = amounts_of(self._categories, lost.lost_ns - waited_ns, lost, shares)
        sums = Sums(self._sums, rank, region, lost, amounts, self._contention)
        end, number = _steps(rank, region) if rank.marked else _grid(rank, region)
        before = _until(lost, waited_ns, end)
        (hidden,) = self._hidden.add(lost, hidden_ns(rank, lost, shares), end)
        if end.size:
            stay = np.diff(before, prepend=0)
            stay[0] += self._waited_ns
            self._waited_ns = int(waited_ns.sum() - before[-1])
            alike = np.ones_like(end)
            table = np.stack([
                end - stay, end, GROUP * alike, number, -alike, layout.OTHER_OPERATION * alike,
                stay,
            ])  # fmt: skip
            self._tentative.append((table, np.concatenate([sums.until(end), hidden])))
        else:
            self._waited_ns += int(waited_ns.sum())
        if not region.tentative:
            self.confirm()
        self._sums = sums.in_all()

    def confirm(self) -> None:
        """Take what was tentative: another step has ended."""
        for table, spent in self._tentative:
            self._rows.add(table, spent, spent)
        self._tentative = []

    def finish(self) -> RankOperations | None:
        """Return the steps; None when there were none."""
        return self._rows.finish()


class Frontier:
    """Adds up what one rank spends, and notes the sums at the end of each step: twice, without and
    with the time in which its device perhaps span."""

    def __init__(self, categories: tuple[str, ...], store: Store) -> None:
        """`categories` as in `spent`: causes, what no cause explains, work."""
        self._sure: _Steps | None = _Steps(categories, store)
        self._with = _Steps(categories, store)
        self._perhaps = False
        self._ticks: list[Int] = []
        self._ticks_count = 0
        self._since_tick_ns = 0

    def add(
        self, rank: Rank, region: Region, lost: Lost, shares: Mapping[str, Int], waiting: Int
    ) -> None:
        """Take a settled stretch; `shares` and `waiting` are those of its pieces, in 1/SHARE."""
        if self._sure is None or not has_peers(rank) or marks_operations(rank):
            self._sure = None  # its own marks say it better, then and before
            return
        self._with.add(rank, region, lost, shares, waiting)
        rows = np.flatnonzero(lost.phase != PHASE_PERHAPS)
        if rows.size < lost.phase.size:
            self._perhaps = True
            columns = (getattr(lost, one.name)[rows] for one in fields(Lost) if one.init)
            lost, waiting = Lost(*columns), waiting[rows]
            shares = {name: share[rows] for name, share in shares.items()}
        self._sure.add(rank, region, lost, shares, waiting)
        if not rank.marked and self._ticks_count < MOST_TICKS:
            self._tick(region, lost)

    def confirm(self) -> None:
        """Take what was tentative: another step has ended."""
        self._with.confirm()
        if self._sure is not None:
            self._sure.confirm()

    def _tick(self, region: Region, lost: Lost) -> None:
        """Note what was lost in every tenth of a second."""
        at = np.arange(region.start_ns // TICK_NS + 1, region.end_ns // TICK_NS + 1) * TICK_NS
        before = np.concatenate([_until(lost, lost.lost_ns, at), lost.lost_ns.sum(keepdims=True)])
        grown = np.diff(before, prepend=0)
        grown[0] += self._since_tick_ns
        self._since_tick_ns = int(grown[-1])
        self._ticks.append(grown[:-1])
        self._ticks_count += at.size

    def period(self) -> Period | None:
        """Return what repeats in the lost time of a rank without steps, in ticks."""
        if not self._ticks:
            return None
        return period_of(np.concatenate(self._ticks)[:MOST_TICKS].astype(np.float64))

    def operations(self) -> tuple[RankOperations | None, RankOperations | None]:
        """Return the steps, and those with what perhaps was waiting; call it once.

        None when there were none, or operations were marked; or nothing was perhaps.
        """
        if self._sure is None:
            return None, None
        return self._sure.finish(), self._with.finish() if self._perhaps else None


def _steps(rank: Rank, region: Region) -> tuple[Int, Int]:
    """End and number of the steps that ended in a stretch."""
    table = rank.main.spans.get(layout.STEP)
    if table is None:
        none = np.zeros(0, np.int64)
        return none, none
    rows = np.flatnonzero((table.end_ns > region.start_ns) & (table.end_ns <= region.end_ns))
    rows = rows[np.argsort(table.end_ns[rows], kind="stable")]
    number = table.a[rows]
    new = np.ones(rows.size, np.bool_)
    new[1:] = number[1:] > np.maximum.accumulate(number)[:-1]
    return table.end_ns[rows[new]], number[new]


def _grid(rank: Rank, region: Region) -> tuple[Int, Int]:
    """Ends of stretches of wall-clock time, which all nodes roughly share, and their numbers."""
    started = rank.chunk.header.started
    ahead_ns = int(started.get("realtime_ns", 0)) - int(started.get("monotonic_ns", 0))
    first = (region.start_ns + ahead_ns) // GRID_NS + 1
    number = np.arange(first, (region.end_ns + ahead_ns) // GRID_NS + 1, dtype=np.int64)
    return number * GRID_NS - ahead_ns, number


def _until(lost: Lost, waited_ns: Int, t_ns: Int) -> Int:
    """Return int64[m]: of the time waited in some pieces, what lies before each time."""
    if not waited_ns.size:
        return np.zeros(t_ns.size, np.int64)
    before = np.concatenate([[0], np.cumsum(waited_ns)])
    row = np.searchsorted(lost.start_ns, t_ns, side="right") - 1
    at = np.maximum(row, 0)
    length = np.maximum(lost.end_ns - lost.start_ns, 1)[at]
    part = np.clip((t_ns - lost.start_ns[at]) / length, 0.0, 1.0)
    return np.where(row < 0, 0, before[at] + np.floor(waited_ns[at] * part).astype(np.int64))
