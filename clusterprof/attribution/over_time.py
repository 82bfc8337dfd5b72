"""When a rank lost what: its time and its losses in equal stretches of the run, and its steps.

    pieces       |--lost 30--|      |----lost 50----|
    stretches    |       |       |       |       |         of a power of two of `FINEST_NS`,
    storage          20      10     20      30             counted from the start of the recording

A piece over an edge is cut at it. Stretches are whole nanoseconds in 1/SHARE, like the books; two
become one when there are too many: memory does not grow, and chunks give the same stretches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from clusterprof.attribution.device import busy_windows, within
from clusterprof.attribution.lost import Account
from clusterprof.attribution.partial import SHARE
from clusterprof.attribution.regions import Region
from clusterprof.attribution.stretch_table import FINEST_TRACED_NS, MOST, Table
from clusterprof.attribution.totals import distinct
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_COLLECTIVE, PHASE_PERHAPS, Int, Lost, Rank
from clusterprof.timeline.operation_rows import Store
from clusterprof.timeline.packing import packed
from clusterprof.timeline.traced import is_imported

SLOWEST = 24
"""Steps of a rank that are kept with what was lost in them."""
BLOCK_STEPS = 4096
IN_STEP, PEERS, MAYBE, PERHAPS, REST = "in-step", "peers", "maybe-peers", "perhaps", "rest"
"""Rows beside those of causes: time in steps; lost in operations with other ranks, perhaps so,
perhaps lost at all; and what no cause explains."""


@dataclass(frozen=True, slots=True)
class SlowRow:
    """One of the slowest steps of a rank, on its own clock."""

    number: int
    start_ns: int
    duration_ns: int
    lost: tuple[tuple[str, int], ...]
    """(row of the table, ns)."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The table of one rank and its steps; what is large is where the operations are."""

    begin_ns: int
    """Start of the node's recording, on its clock: from here stretches are counted."""
    stretch_ns: int
    first: int
    names: tuple[str, ...]
    place: int | bytes | None
    """Of the packed int64[2 * names, size] in a `Store`; None when there was no room."""
    length: int
    blocks: tuple[tuple[int | bytes, int, int, int], ...]
    """Place, length, first and last end of the packed (number, start, end) of steps."""
    slowest: Int
    """int64[3 + names, n]: number, start and length of its slowest steps, then ns lost in them."""
    why: str = ""
    """Why something is missing."""


@dataclass(slots=True)
class _Stretch:
    """What one settled stretch of the recording adds."""

    table: Table
    steps: Int
    slow: list[SlowRow]


class Times:
    """Adds up when one rank lost what."""

    def __init__(self, store: Store) -> None:
        """`store` takes what is large."""
        self._store = store
        self._table, self._begin_ns = Table(), 0
        self._tentative: list[_Stretch] = []
        self._slow: list[SlowRow] = []
        self._steps: list[Int] = []
        self._blocks: list[tuple[int | bytes, int, int, int]] = []
        self._sums: dict[str, int] = {}
        self._open: dict[int, dict[str, int]] = {}
        self._why = ""

    def add(
        self,
        rank: Rank,
        region: Region,
        lost: Lost,
        shares: Mapping[str, Int],
        left: tuple[Int, Int],
        account: Account,
    ) -> None:
        """Take a settled stretch; `shares` of its pieces, in 1/SHARE, what they `left`, and the
        part of that which may be waiting."""
        self._begin_ns = int(rank.chunk.header.started.get("monotonic_ns", 0))
        rows = _Rows(lost, _by_row(lost, shares, *left))
        if not self._table.size and not self._tentative and is_imported(rank.chunk):
            self._table.stretch_ns = FINEST_TRACED_NS
        table = self._stretches(region, rows, _measured(rank, region, account))
        steps = _ended(rank, region)
        slow = self._slow_steps(rank, region, rows, steps)
        self._tentative.append(_Stretch(table, steps, slow))
        if not region.tentative:
            self.confirm()

    def confirm(self) -> None:
        """Take what was tentative: another step has ended."""
        for one in self._tentative:
            self._take(one)
        self._tentative = []

    def _stretches(self, region: Region, rows: _Rows, measured: tuple[Int, Int]) -> Table:
        table = Table(self._table.stretch_ns)
        begin, end = region.start_ns - self._begin_ns, region.end_ns - self._begin_ns
        while end // table.stretch_ns - begin // table.stretch_ns >= MOST - 1:
            table.fold()
        first = begin // table.stretch_ns
        last = max((end - 1) // table.stretch_ns, first)
        table.cover(first, last + 1)
        edges = self._begin_ns + np.arange(first, last + 2) * table.stretch_ns
        for name, units in zip(rows.names, np.diff(rows.until(edges))):
            table.put(name, first, units)
        in_step = np.diff(_inside(*measured, edges))
        table.rows[IN_STEP] = np.stack([in_step, np.zeros_like(in_step)])
        return table

    def _slow_steps(self, rank: Rank, region: Region, rows: _Rows, steps: Int) -> list[SlowRow]:
        """Return the steps of a stretch that may be among the slowest."""
        number, start, end = steps
        least = self._slow[-1].duration_ns if len(self._slow) >= SLOWEST else -1
        some = np.flatnonzero(end - start > least)
        some = np.sort(some[np.argsort(start[some] - end[some], kind="stable")[:SLOWEST]])
        opened = _open_at_the_end(rank, region)
        at = np.concatenate([start[some], end[some], opened, [region.end_ns]]).astype(np.int64)
        sums = rows.until(np.maximum(at, region.start_ns))

        def so_far(column: int) -> dict[str, int]:
            return {
                **self._sums,
                **{k: self._sums.get(k, 0) + int(u) for k, u in zip(rows.names, sums[:, column])},
            }

        out = []
        for i, row in enumerate(some.tolist()):
            early = int(start[row]) < region.start_ns
            before = self._open.get(int(start[row])) if early else so_far(i)
            if before is not None:
                after = so_far(some.size + i)
                amounts = ((k, (u - before.get(k, 0)) // SHARE) for k, u in after.items())
                lost = tuple((name, ns) for name, ns in amounts if ns)
                span = int(start[row]), int(end[row] - start[row])
                out.append(SlowRow(int(number[row]), *span, lost))
        still = {t: sums for t, sums in self._open.items() if t in set(opened.tolist())}
        fresh = {int(t): so_far(2 * some.size + i) for i, t in enumerate(opened)}
        self._open = {**fresh, **still}
        self._sums = so_far(-1)
        return out

    def _take(self, one: _Stretch) -> None:
        self._table.add(one.table)
        self._slow = sorted(
            [*self._slow, *one.slow], key=lambda step: (-step.duration_ns, step.start_ns)
        )[:SLOWEST]
        if one.steps.size:
            self._steps.append(one.steps)
        if sum(part.shape[1] for part in self._steps) >= BLOCK_STEPS:
            self._put_steps()

    def _put_steps(self) -> None:
        steps = np.concatenate(self._steps, axis=1)
        self._steps = []
        data = packed(steps)
        place = self._store.put(data)
        if place is None:
            self._why = self._store.why_full
        else:
            self._blocks.append((place, len(data), int(steps[2].min()), int(steps[2].max())))

    def done(self) -> RankTimes | None:
        """Return what was added up; None when nothing was settled. Call it once."""
        if not self._table.size:
            return None
        if self._steps:
            self._put_steps()
        names = tuple(sorted(name for name, row in self._table.rows.items() if row.any()))
        data = packed(np.concatenate([self._table.rows[name] for name in names])) if names else b""
        place = self._store.put(data)
        if place is None:
            self._why = self._store.why_full
        return RankTimes(
            self._begin_ns, self._table.stretch_ns, self._table.first, names, place, len(data),
            tuple(self._blocks), _packed_steps(self._slow, names), self._why,
        )  # fmt: skip


def _packed_steps(steps: list[SlowRow], names: tuple[str, ...]) -> Int:
    table = np.zeros((3 + len(names), len(steps)), np.int64)
    for column, step in enumerate(steps):
        lost = dict(step.lost)
        amounts = [lost.get(name, 0) for name in names]
        table[:, column] = [step.number, step.start_ns, step.duration_ns, *amounts]
    return table


class _Rows:
    """Amounts of pieces, by row, and their sums up to any time."""

    def __init__(self, lost: Lost, shares: Mapping[str, Int]) -> None:
        """`shares`: in 1/SHARE of each piece; those that are 0 throughout are left out."""
        self.names = tuple(shares)
        self._lost = lost
        n = lost.start_ns.size
        self._shares = np.stack([*shares.values(), np.zeros(n, np.int64)])[:-1]
        self._sums = np.zeros((len(self.names), n + 1), np.int64)
        np.cumsum(self._shares * lost.lost_ns, axis=1, out=self._sums[:, 1:])

    def until(self, t_ns: Int) -> Int:
        """Return int64[rows, m] in 1/SHARE ns: all pieces before each time, and its part of the
        one that it is in."""
        start, end, ns = self._lost.start_ns, self._lost.end_ns, self._lost.lost_ns
        row = np.searchsorted(start, t_ns, side="left")
        out: Int = self._sums[:, row]
        some = np.flatnonzero((row > 0) & (end[row - 1] > t_ns)) if start.size else row[:0]
        if some.size:
            at = row[some] - 1
            part = (t_ns[some] - start[at]) / (end[at] - start[at])
            rest = ns[at] - np.floor(ns[at] * part).astype(np.int64)
            out[:, some] -= rest * self._shares[:, at]
        return out


def _by_row(lost: Lost, shares: Mapping[str, Int], left: Int, waiting: Int) -> dict[str, Int]:
    """Return the share of each piece that goes to each row, without rows of nothing."""
    rest = left - waiting
    inside, perhaps = lost.phase == PHASE_COLLECTIVE, lost.phase == PHASE_PERHAPS
    peers = np.where(inside, rest, 0)
    rows = {
        **shares,
        PEERS: peers,
        MAYBE: np.where(perhaps, 0, waiting),
        PERHAPS: np.where(perhaps, waiting, 0),
        REST: rest - peers,
    }
    return {name: share for name, share in rows.items() if share.any()}


def _measured(rank: Rank, region: Region, account: Account) -> tuple[Int, Int]:
    """Return the starts and ends of the time in a stretch that was measured."""
    length = region.end_ns - region.start_ns
    if account.unmeasured_ns == length:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if account.unmeasured_ns:
        every = busy_windows(rank)
        if every is not None:
            windows = within(every, region.start_ns, region.end_ns)
            return windows.start_ns, windows.end_ns
    return np.array([region.start_ns]), np.array([region.end_ns])


def _inside(start: Int, end: Int, t_ns: Int) -> Int:
    """Return how much of some intervals lies before each time."""
    if not start.size:
        return np.zeros(t_ns.size, np.int64)
    before = np.concatenate([[0], np.cumsum(end - start)])
    row = np.searchsorted(start, t_ns, side="right")
    at = np.maximum(row - 1, 0)
    over = np.where(row > 0, np.maximum(end[at] - t_ns, 0), 0)
    result: Int = before[row] - over
    return result


def _ended(rank: Rank, region: Region) -> Int:
    """Return int64[3, n]: number, start and end of the steps that ended in a stretch."""
    table = rank.main.spans.get(layout.STEP)
    if table is None:
        return np.zeros((3, 0), np.int64)
    rows = np.flatnonzero((table.end_ns > region.start_ns) & (table.end_ns <= region.end_ns))
    if distinct(table.start_ns[rows], table.end_ns[rows])[0].size < rows.size:
        pairs = np.stack([table.start_ns[rows], table.end_ns[rows]])
        rows = rows[np.unique(pairs, axis=1, return_index=True)[1]]
    return np.stack([table.a[rows], table.start_ns[rows], table.end_ns[rows]])


def _open_at_the_end(rank: Rank, region: Region) -> Int:
    """Return the starts of the steps that go on behind a stretch."""
    table = rank.main.spans.get(layout.STEP)
    if table is None:
        return np.zeros(0, np.int64)
    return np.unique(
        table.start_ns[(table.start_ns < region.end_ns) & (table.end_ns > region.end_ns)]
    )
