"""Record the history of a rank: losses in equal time bins of the run, and slow steps.

    intervals    |--lost 30--|      |----lost 50----|
    time bins    |       |       |       |       |    length: a power of two
    storage          20      10     20      30       of the shortest bin

Bins are counted from the start of the recording. An interval over an edge is split at
it. Bins hold integers in fixed-point shares, like the ledger; if there are too many,
adjacent bins are merged in pairs: memory does not grow, and chunks give the same bins.

It also sums integers by row and time bin of a run, in a table that does not grow with the run.

It also sums the totals of a settled segment besides its causes: its time, its waits, its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.accumulator import MAX_SLOWEST_STEPS, SHARE_SCALE, Accumulator
from clusterprof.analysis.attribution.network.comm_threads import sum_comm_thread_time
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.rank.device_activity import build_device_windows, trim_windows
from clusterprof.analysis.attribution.rank.lost_time import SegmentAccount
from clusterprof.analysis.timeline.collectives.int_table import pack_table
from clusterprof.analysis.timeline.collectives.rows import Store
from clusterprof.analysis.timeline.data_wait.samples import is_imported
from clusterprof.analysis.timeline.intervals import merge_intervals, sum_lengths, trim_intervals
from clusterprof.analysis.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_SUSPECTED_BUSY_WAIT,
    SOURCE_HOST_SPANS,
    Int,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.spans import StepSpans
from clusterprof.probe import layout

MIN_BIN_NS = 100_000_000
"""Shortest time bin of a recording, ns."""
MIN_TRACED_BIN_NS = MIN_BIN_NS >> 8
"""Shortest time bin of an imported trace, whose times are exact: 0.39 ms; the same lengths
from there.
"""
MAX_TIME_BINS = 480
"""Time bins of a rank above which adjacent ones are merged in pairs."""


@dataclass(slots=True)
class TimeBinTable:
    """Sums by row and time bin.

    The first bin begins `first` bin lengths after the node's start.
    """

    bin_ns: int = MIN_BIN_NS
    first: int = 0
    size: int = 0
    rows: dict[str, Int] = field(default_factory=dict)
    """int64[2, size]: whole ns, and the rest in fixed-point shares of ns."""

    def add_amounts(self, name: str, first: int, shares_ns: Int) -> None:
        """Add amounts in fixed-point shares of ns to a row, from one existing time bin on."""
        row = self.rows.setdefault(name, np.zeros((2, self.size), np.int64))
        part = row[:, first - self.first : first - self.first + shares_ns.size]
        part[0] += shares_ns // SHARE_SCALE
        part[1] += shares_ns % SHARE_SCALE
        part[0] += part[1] // SHARE_SCALE
        part[1] %= SHARE_SCALE

    def extend(self, first: int, end: int) -> None:
        """Extend the table to time bins `first` to `end`."""
        if not self.size:
            self.first = first
        before = max(self.first - first, 0)
        after = max(end - self.first - self.size, 0)
        if before or after:
            self.rows = {k: np.pad(v, ((0, 0), (before, after))) for k, v in self.rows.items()}
            self.first, self.size = self.first - before, self.size + before + after

    def fold(self) -> None:
        """Merge each two time bins."""
        odd = self.first % 2
        width = ((0, 0), (odd, (self.size + odd) % 2))
        self.first, self.bin_ns = self.first // 2, 2 * self.bin_ns
        self.size = (self.size + odd + 1) // 2
        for name, row in self.rows.items():
            row = np.pad(row, width).reshape(2, -1, 2).sum(axis=2)
            row[0] += row[1] // SHARE_SCALE
            row[1] %= SHARE_SCALE
            self.rows[name] = row

    def add(self, other: TimeBinTable) -> None:
        """Add a table of the same rank; the table with shorter bins is folded first."""
        if not other.size:
            return
        while other.bin_ns < self.bin_ns:
            other.fold()
        while self.bin_ns < other.bin_ns:
            self.fold()
        self.extend(other.first, other.first + other.size)
        while self.size > MAX_TIME_BINS:
            self.fold()
            other.fold()
        first_bin = other.first - self.first
        for name, row in other.rows.items():
            sums = self.rows.setdefault(name, np.zeros((2, self.size), np.int64))
            part = sums[:, first_bin : first_bin + other.size]
            part += row
            part[0] += part[1] // SHARE_SCALE
            part[1] %= SHARE_SCALE


def with_segment_totals(
    accumulator: Accumulator, rank: Rank, segment: Segment, lost: LostTime, account: SegmentAccount
) -> Accumulator:
    """Return the accumulator with the time and the steps of its segment added."""
    length = segment.end_ns - segment.start_ns
    first_lost = int(
        lost.lost_ns[(lost.step == 0) & (lost.phase != PHASE_SUSPECTED_BUSY_WAIT)].sum()
    )
    totals = {
        **accumulator.totals,
        "in_step": length - account.unmeasured_ns,
        "unmeasured": account.unmeasured_ns,
        "unobserved": account.unobserved_ns,
        "measured": account.measured_ns,
        "busy": account.measured_ns - account.idle_ns,
        "lost": int(lost.lost_ns.sum()),
        "host_lost": int(lost.lost_ns[lost.source == SOURCE_HOST_SPANS].sum()),
        "first_step_lost": first_lost,
        "stream_pieces": account.stream_intervals,
        **({"not_asked": account.outside_selection_ns} if account.outside_selection_ns else {}),
        **({"evaluation": account.evaluation_ns} if account.evaluation_ns else {}),
        **sum_comm_thread_time(rank, segment),
    }
    steps = rank.main.get_spans(StepSpans)
    lengths: dict[int, int] = {}
    long: dict[int, int] = {}
    if steps is not None:
        ended = (steps.end_ns > segment.start_ns) & (steps.end_ns <= segment.end_ns)
        start, end = drop_duplicate_spans(steps.start_ns[ended], steps.end_ns[ended])
        lengths = _count_values(round_to_three_digits(end - start))
        totals.update(_sum_samples(steps, ended))
        longest = np.argsort(start - end, kind="stable")[:MAX_SLOWEST_STEPS]
        long = dict(zip(start[longest].tolist(), (end - start)[longest].tolist()))
        first = steps.step == 0
        if first.any():
            warm_up = merge_intervals((steps.start_ns[first], steps.end_ns[first]))
            totals["first_step"] = sum_lengths(
                trim_intervals(warm_up, segment.start_ns, segment.end_ns)
            )
    waits = rank.main.spans.get(layout.DATA_WAIT)
    if waits is not None:
        inside = trim_intervals(
            merge_intervals((waits.start_ns, waits.end_ns)), segment.start_ns, segment.end_ns
        )
        totals["wait"] = sum_lengths(inside)
    return replace(
        accumulator, totals=totals, steps=lengths, slowest=long, utilization=account.utilization
    )


def _sum_samples(steps: StepSpans, ended: NDArray[np.bool_]) -> dict[str, int]:
    """Return samples and tokens of the ended steps, and how many steps reported them."""
    out: dict[str, int] = {}
    first_row = np.unique(steps.step[ended], return_index=True)[1]
    for name, column in (("samples", steps.samples), ("tokens", steps.tokens)):
        values = column[ended][first_row]
        is_known = values >= 0
        out[name] = int(values[is_known].sum())
        out[f"{name}_steps"] = int(np.count_nonzero(is_known))
        out[f"{name}_unknown_steps"] = int(np.count_nonzero(~is_known))
    return out


_SCALES = np.array([1, 1, *(10**n for n in range(17))])  # by number of digits - 1


def _count_values(values: Int) -> dict[int, int]:
    """Return how often each value occurs, in ascending order."""
    ordered = np.sort(values)
    edges = [0, *((ordered[1:] != ordered[:-1]).nonzero()[0] + 1).tolist(), ordered.size]
    return {int(ordered[low]): high - low for low, high in pairwise(edges) if high > low}


def drop_duplicate_spans(start_ns: Int, end_ns: Int) -> tuple[Int, Int]:
    """Return spans, sorted by start, without adjacent duplicates: int64[m] start and end, ns."""
    keep = np.ones(start_ns.size, np.bool_)
    keep[1:] = (start_ns[1:] != start_ns[:-1]) | (end_ns[1:] != end_ns[:-1])
    return (start_ns, end_ns) if keep.all() else (start_ns[keep], end_ns[keep])


def round_to_three_digits(ns: Int) -> Int:
    """Round to three significant digits, int64[n], so that a histogram stays small.

    132_456_789 -> 132_000_000
    """
    digits = np.log10(np.maximum(ns, 1)).astype(np.int64)
    scale = _SCALES[digits]
    return (ns + scale // 2) // scale * scale


MAX_SLOW_STEPS = 24
"""Slowest steps of a rank that are kept, with what was lost in them."""
STEPS_PER_BLOCK = 4096
"""Steps that are packed and stored together."""
IN_STEP, PEERS, SUSPECTED_PEERS, SUSPECTED_LOSS, UNEXPLAINED = (
    "in-step",
    "peers",
    "maybe-peers",
    "perhaps",
    "rest",
)
"""Rows in addition to those of causes: time in steps; time lost in operations with other
ranks, or suspected of it; time suspected of being lost; and time that no cause
explains.
"""


@dataclass(frozen=True, slots=True)
class SlowStepRow:
    """One of the slowest steps of a rank, on its own clock."""

    number: int
    start_ns: int
    duration_ns: int
    lost: tuple[tuple[str, int], ...]
    """(row of the table, ns)."""


@dataclass(frozen=True, slots=True)
class RankTimeHistory:
    """The time bins of one rank and its steps; large data are in the store of operations."""

    begin_ns: int
    """Start of the node's recording on its clock, from which bins are counted."""
    bin_ns: int
    first_bin: int
    names: tuple[str, ...]
    stored_block: int | bytes | None
    """Position of the packed int64[2 * names, size] in a `Store`; None if there was no room."""
    length: int
    blocks: tuple[tuple[int | bytes, int, int, int], ...]
    """Position, length, first and last end of the packed (number, start, end) of steps."""
    slowest: Int
    """int64[3 + names, n]: number, start and length of its slowest steps, then ns lost in
    them.
    """
    missing_reason: str = ""
    """Why something is missing."""


@dataclass(slots=True)
class _SettledHistory:
    """What one settled segment of the recording adds."""

    table: TimeBinTable
    steps: Int
    slow: list[SlowStepRow]


class HistoryBuilder:
    """Builds the history of one rank."""

    def __init__(self, store: Store) -> None:
        """store: holds large data."""
        self._store = store
        self._table, self._begin_ns = TimeBinTable(), 0
        self._provisional: list[_SettledHistory] = []
        self._slow: list[SlowStepRow] = []
        self._steps: list[Int] = []
        self._blocks: list[tuple[int | bytes, int, int, int]] = []
        self._sums: dict[str, int] = {}
        self._open: dict[int, dict[str, int]] = {}
        self._why = ""

    def add(
        self,
        rank: Rank,
        segment: Segment,
        lost: LostTime,
        shares: Mapping[str, Int],
        unclaimed_and_waiting: tuple[Int, Int],
        account: SegmentAccount,
    ) -> None:
        """Add a settled segment.

        shares: int64[n] of its lost intervals per cause, in 1/SHARE_SCALE.
        unclaimed_and_waiting: what they left, and the part of that which may be waiting.
        """
        self._begin_ns = int(rank.chunk.header.started.get("monotonic_ns", 0))
        rows = _RowSums(lost, _split_into_rows(lost, shares, *unclaimed_and_waiting))
        if not self._table.size and not self._provisional and is_imported(rank.chunk):
            self._table.bin_ns = MIN_TRACED_BIN_NS
        table = self._build_bins(segment, rows, _find_measured_time(rank, segment, account))
        steps = _find_ended_steps(rank, segment)
        slow = self._slow_steps(rank, segment, rows, steps)
        self._provisional.append(_SettledHistory(table, steps, slow))
        if not segment.provisional:
            self.confirm()

    def confirm(self) -> None:
        """Take over provisional segments: another step has ended."""
        for settled in self._provisional:
            self._merge_settled(settled)
        self._provisional = []

    def _build_bins(
        self, segment: Segment, rows: _RowSums, measured: tuple[Int, Int]
    ) -> TimeBinTable:
        table = TimeBinTable(self._table.bin_ns)
        begin, end = segment.start_ns - self._begin_ns, segment.end_ns - self._begin_ns
        while end // table.bin_ns - begin // table.bin_ns >= MAX_TIME_BINS - 1:
            table.fold()
        first = begin // table.bin_ns
        last = max((end - 1) // table.bin_ns, first)
        table.extend(first, last + 1)
        edges = self._begin_ns + np.arange(first, last + 2) * table.bin_ns
        for name, units in zip(rows.names, np.diff(rows.sum_until(edges))):
            table.add_amounts(name, first, units)
        in_step = np.diff(_sum_before(*measured, edges))
        table.rows[IN_STEP] = np.stack([in_step, np.zeros_like(in_step)])
        return table

    def _slow_steps(
        self, rank: Rank, segment: Segment, rows: _RowSums, steps: Int
    ) -> list[SlowStepRow]:
        """Return the steps of a segment that may be among the slowest."""
        number, start, end = steps
        least = self._slow[-1].duration_ns if len(self._slow) >= MAX_SLOW_STEPS else -1
        candidates = np.flatnonzero(end - start > least)
        candidates = np.sort(
            candidates[
                np.argsort(start[candidates] - end[candidates], kind="stable")[:MAX_SLOW_STEPS]
            ]
        )
        open_starts = _find_open_steps(rank, segment)
        boundaries_ns = np.concatenate(
            [start[candidates], end[candidates], open_starts, [segment.end_ns]]
        ).astype(np.int64)
        sums = rows.sum_until(np.maximum(boundaries_ns, segment.start_ns))

        def so_far(column: int) -> dict[str, int]:
            return {
                **self._sums,
                **{k: self._sums.get(k, 0) + int(u) for k, u in zip(rows.names, sums[:, column])},
            }

        out = []
        for i, row in enumerate(candidates.tolist()):
            early = int(start[row]) < segment.start_ns
            before = self._open.get(int(start[row])) if early else so_far(i)
            if before is not None:
                after = so_far(candidates.size + i)
                amounts = ((k, (u - before.get(k, 0)) // SHARE_SCALE) for k, u in after.items())
                lost = tuple((name, ns) for name, ns in amounts if ns)
                span = int(start[row]), int(end[row] - start[row])
                out.append(SlowStepRow(int(number[row]), *span, lost))
        still_open = {t: sums for t, sums in self._open.items() if t in set(open_starts.tolist())}
        added = {int(t): so_far(2 * candidates.size + i) for i, t in enumerate(open_starts)}
        self._open = {**added, **still_open}
        self._sums = so_far(-1)
        return out

    def _merge_settled(self, settled: _SettledHistory) -> None:
        self._table.add(settled.table)
        self._slow = sorted(
            [*self._slow, *settled.slow], key=lambda step: (-step.duration_ns, step.start_ns)
        )[:MAX_SLOW_STEPS]
        if settled.steps.size:
            self._steps.append(settled.steps)
        if sum(part.shape[1] for part in self._steps) >= STEPS_PER_BLOCK:
            self._store_steps()

    def _store_steps(self) -> None:
        steps = np.concatenate(self._steps, axis=1)
        self._steps = []
        data = pack_table(steps)
        stored_block = self._store.put(data)
        if stored_block is None:
            self._why = self._store.why_full
        else:
            self._blocks.append((stored_block, len(data), int(steps[2].min()), int(steps[2].max())))

    def finish(self) -> RankTimeHistory | None:
        """Return the history; None if nothing was settled. Call once."""
        if not self._table.size:
            return None
        if self._steps:
            self._store_steps()
        names = tuple(sorted(name for name, row in self._table.rows.items() if row.any()))
        data = (
            pack_table(np.concatenate([self._table.rows[name] for name in names])) if names else b""
        )
        stored_block = self._store.put(data)
        if stored_block is None:
            self._why = self._store.why_full
        return RankTimeHistory(
            self._begin_ns,
            self._table.bin_ns,
            self._table.first,
            names,
            stored_block,
            len(data),
            tuple(self._blocks),
            _build_step_table(self._slow, names),
            self._why,
        )


def _build_step_table(steps: list[SlowStepRow], names: tuple[str, ...]) -> Int:
    table = np.zeros((3 + len(names), len(steps)), np.int64)
    for column, step in enumerate(steps):
        lost = dict(step.lost)
        amounts = [lost.get(name, 0) for name in names]
        table[:, column] = [step.number, step.start_ns, step.duration_ns, *amounts]
    return table


class _RowSums:
    """Amounts of lost intervals by row, and their sums up to any time."""

    def __init__(self, lost: LostTime, shares: Mapping[str, Int]) -> None:
        """shares: int64[n] of each interval, in 1/SHARE_SCALE, without rows that
        are all 0.
        """
        self.names = tuple(shares)
        self._lost = lost
        n = lost.start_ns.size
        self._shares = np.stack([*shares.values(), np.zeros(n, np.int64)])[:-1]
        self._sums = np.zeros((len(self.names), n + 1), np.int64)
        np.cumsum(self._shares * lost.lost_ns, axis=1, out=self._sums[:, 1:])

    def sum_until(self, t_ns: Int) -> Int:
        """Return the sums before each time, int64[rows, m], in fixed-point shares of ns.

        All intervals before each time, and the part before it of the interval that contains it.
        """
        start, end, ns = self._lost.start_ns, self._lost.end_ns, self._lost.lost_ns
        row = np.searchsorted(start, t_ns, side="left")
        out: Int = self._sums[:, row]
        inside = np.flatnonzero((row > 0) & (end[row - 1] > t_ns)) if start.size else row[:0]
        if inside.size:
            enclosing_row = row[inside] - 1
            part = (t_ns[inside] - start[enclosing_row]) / (
                end[enclosing_row] - start[enclosing_row]
            )
            later_ns = ns[enclosing_row] - np.floor(ns[enclosing_row] * part).astype(np.int64)
            out[:, inside] -= later_ns * self._shares[:, enclosing_row]
        return out


def _split_into_rows(
    lost: LostTime, shares: Mapping[str, Int], unclaimed: Int, waiting: Int
) -> dict[str, Int]:
    """Return the share of each interval that goes to each row, without empty rows."""
    lost_alone = unclaimed - waiting
    inside, suspected = lost.phase == PHASE_COLLECTIVE, lost.phase == PHASE_SUSPECTED_BUSY_WAIT
    peers = np.where(inside, lost_alone, 0)
    rows = {
        **shares,
        PEERS: peers,
        SUSPECTED_PEERS: np.where(suspected, 0, waiting),
        SUSPECTED_LOSS: np.where(suspected, waiting, 0),
        UNEXPLAINED: lost_alone - peers,
    }
    return {name: share for name, share in rows.items() if share.any()}


def _find_measured_time(rank: Rank, segment: Segment, account: SegmentAccount) -> tuple[Int, Int]:
    """Return the starts and ends of the measured time in a segment."""
    length = segment.end_ns - segment.start_ns
    if account.unmeasured_ns == length:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if account.unmeasured_ns:
        all_windows = build_device_windows(rank)
        if all_windows is not None:
            windows = trim_windows(all_windows, segment.start_ns, segment.end_ns)
            return windows.start_ns, windows.end_ns
    return np.array([segment.start_ns]), np.array([segment.end_ns])


def _sum_before(start: Int, end: Int, t_ns: Int) -> Int:
    """Return how much of some intervals lies before each time."""
    if not start.size:
        return np.zeros(t_ns.size, np.int64)
    before = np.concatenate([[0], np.cumsum(end - start)])
    row = np.searchsorted(start, t_ns, side="right")
    row_before = np.maximum(row - 1, 0)
    over = np.where(row > 0, np.maximum(end[row_before] - t_ns, 0), 0)
    result: Int = before[row] - over
    return result


def _find_ended_steps(rank: Rank, segment: Segment) -> Int:
    """Return int64[3, n]: number, start and end of the steps that ended in a segment."""
    steps = rank.main.get_spans(StepSpans)
    if steps is None:
        return np.zeros((3, 0), np.int64)
    ended = steps.select((steps.end_ns > segment.start_ns) & (steps.end_ns <= segment.end_ns))
    if drop_duplicate_spans(ended.start_ns, ended.end_ns)[0].size < ended.start_ns.size:
        pairs = np.stack([ended.start_ns, ended.end_ns])
        ended = ended.select(np.unique(pairs, axis=1, return_index=True)[1])
    return np.stack([ended.step, ended.start_ns, ended.end_ns])


def _find_open_steps(rank: Rank, segment: Segment) -> Int:
    """Return the starts of the steps that continue after a segment."""
    table = rank.main.spans.get(layout.STEP)
    if table is None:
        return np.zeros(0, np.int64)
    return np.unique(
        table.start_ns[(table.start_ns < segment.end_ns) & (table.end_ns > segment.end_ns)]
    )
