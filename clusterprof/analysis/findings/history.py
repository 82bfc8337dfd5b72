"""Build a run's history: lost time by rank and time bin, longest waits, slow steps.

It also splits one rank's lost time into time bins, with the names and sums of its ledger.

The lost time of a rank is known by time bin under the names of causes. The ledger may name a family
instead, and has attributed the time in operations to its causes. Here every ledger line that is the
rank's own keeps its sum, and its waits for others are `WAITING`.

It also finds ranks that ended while others of their job continued.

    rank 0  ████████████                  loses 0 %      both together 20 %
    rank 1  ████████████████████████      loses 40 %     then rank 1 alone: 40 %

Nothing changed when rank 0 ended, except that it is no longer counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.rank.claims import WITH_PEERS as PEERS_LEFT
from clusterprof.analysis.attribution.rank.history import (
    IN_STEP,
    MIN_BIN_NS,
    PEERS,
    SUSPECTED_LOSS,
    SUSPECTED_PEERS,
    UNEXPLAINED,
    RankTimeHistory,
)
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.cross_rank.observers import (
    MAX_SLOW_STEPS,
    LongWaitObserver,
    list_slowest_steps,
)
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.cross_rank.wait_totals import (
    Amounts,
    choose_reported_ids,
    compute_culprit_totals,
)
from clusterprof.analysis.job.clock_sync import NodeClockAlignment
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.spill import SpillLocation, SpillReader
from clusterprof.analysis.timeline.collectives.int_table import read_table_shape, unpack_table
from clusterprof.analysis.timeline.model import Int
from clusterprof.report.history import WAITING_FOR_RANKS, History, RankHistory, SlowStep, Wait
from clusterprof.report.model import UNATTRIBUTED

_CAUSE_BEFORE = {"eval": "cpu"}
"""Causes found from all ranks together, and the cause that had their time before."""


@dataclass(frozen=True, slots=True)
class LossRows:
    """Lost time by name and time bin of the run: whole ns, and the fraction in 1/SHARE ns."""

    names: tuple[str, ...]
    whole_ns: Int
    """int64[names, bins], ns."""
    fraction: Int
    """int64[names, bins], 1/SHARE ns."""

    def sum(self, names: tuple[str, ...]) -> tuple[Int, Int]:
        """Return the sum of some rows: whole ns and fraction, int64[bins] each."""
        rows = [number for number, name in enumerate(self.names) if name in names]
        return self.whole_ns[rows].sum(axis=0), self.fraction[rows].sum(axis=0)


def align_to_bins(edges_ns: Int, whole_ns: Int, fraction: Int, at_ns: Int) -> tuple[Int, Int]:
    """Convert amounts between `edges_ns` into amounts between `at_ns`.

    edges_ns: int64[n + 1], at_ns: int64[bins + 1]. whole_ns, fraction: int64[rows, n], ns and
    1/SHARE ns. Returns int64[rows, bins] of both. Amounts outside the first and the last of `at_ns`
    go to the nearest bin; where edges differ, amounts are taken as even.
    """
    row = np.clip(np.searchsorted(edges_ns, at_ns, side="right") - 1, 0, edges_ns.size - 2)
    length = np.maximum(edges_ns[row + 1] - edges_ns[row], 1)
    part = np.clip((at_ns - edges_ns[row]) / length, 0.0, 1.0)
    parts_by_bin = []
    for amounts in (whole_ns, fraction):
        before = np.concatenate([np.zeros((len(amounts), 1), np.int64), amounts], axis=1)
        before = np.cumsum(before, axis=1)
        until = before[:, row] + np.floor(amounts[:, row] * part).astype(np.int64)
        until[:, 0], until[:, -1] = 0, before[:, -1]
        parts_by_bin.append(np.diff(until, axis=1))
    return parts_by_bin[0], parts_by_bin[1]


def split_own_and_waiting(rank: RankResult, own_ns: Amounts) -> dict[str, int]:
    """Split a rank's lost time into its own ledger lines and `WAITING`.

    own_ns: CulpritTotals.own_ns. Together the lines are its lost time in ns, and none
    is negative.
    """
    lines = dict(own_ns)
    waiting_ns = min(dict(rank.reasons).get(PEERS_LEFT, 0), max(lines.get(UNATTRIBUTED, 0), 0))
    lines[UNATTRIBUTED] = lines.get(UNATTRIBUTED, 0) - waiting_ns
    lines[WAITING_FOR_RANKS] = rank.ledger.lost_ns - sum(lines.values())
    for name in [name for name, ns in lines.items() if ns < 0]:
        largest = max(lines, key=lambda name: lines[name])
        lines[largest] += lines[name]
        lines[name] = 0
    return {name: ns for name, ns in lines.items() if ns}


def allocate_lost_time(rank: RankResult, own_ns: Amounts, rows: LossRows) -> dict[str, Int]:
    """Allocate a rank's lost time to time bins, by ledger line.

    Returns int64[bins] per line, ns; the sums are those of its ledger to the ns.
    """
    lines = split_own_and_waiting(rank, own_ns)
    profiles = _build_profiles(rank, lines, rows)
    all_rows = rows.sum(tuple(name for name in rows.names if name not in (IN_STEP, SUSPECTED_LOSS)))
    out = {}
    for name, ns in lines.items():
        whole_ns, fraction = profiles.get(name, all_rows)
        if not (whole_ns.any() or fraction.any()):
            whole_ns, fraction = all_rows if all_rows[0].any() else rows.sum((IN_STEP,))
        out[name] = allocate_by_weight(ns, whole_ns, fraction)
    _settle_rounding(out, rows.sum((IN_STEP,))[0])
    return out


def _build_profiles(
    rank: RankResult, lines: Mapping[str, int], rows: LossRows
) -> dict[str, tuple[Int, Int]]:
    """Build for each line the rows that show when its time was lost."""
    named = {leaf for bucket in rank.buckets for leaf in bucket.causes}
    row_names = set(rows.names)
    profiles = {}
    for bucket in rank.buckets:
        leaves = tuple(leaf for leaf in bucket.causes if leaf in row_names)
        if not leaves and bucket.id in _CAUSE_BEFORE:
            leaves = (_CAUSE_BEFORE[bucket.id],)
        profiles[bucket.id] = rows.sum(leaves)
    special = {IN_STEP, PEERS, SUSPECTED_PEERS, SUSPECTED_LOSS, UNEXPLAINED}
    unclear = tuple(name for name in rows.names if name not in named and name not in special)
    pool = (
        (PEERS, SUSPECTED_PEERS, SUSPECTED_LOSS)
        if is_busy_wait_counted(rank, rows)
        else (PEERS, SUSPECTED_PEERS)
    )
    waited = rows.sum(pool)
    profiles[WAITING_FOR_RANKS] = waited
    unexplained = rows.sum((UNEXPLAINED, *unclear))
    pooled = int(waited[0].sum())
    excess_ns = max(pooled - lines.get(WAITING_FOR_RANKS, 0), 0)
    if excess_ns > 1:  # part of what may have been waiting was none: it has no cause
        unexplained = (unexplained[0] + allocate_by_weight(excess_ns, *waited), unexplained[1])
    profiles[UNATTRIBUTED] = unexplained
    return profiles


def is_busy_wait_counted(rank: RankResult, rows: LossRows) -> bool:
    """Return whether suspected busy-waiting counts as lost time of a rank."""
    names = tuple(name for name in rows.names if name != IN_STEP)
    whole_ns, fraction = rows.sum(names)
    suspected = int(rows.sum((SUSPECTED_LOSS,))[0].sum())
    return (
        rank.ledger.lost_ns
        > int(whole_ns.sum()) + int(fraction.sum()) // SHARE_SCALE - suspected // 2 - 1
    )


def allocate_by_weight(total_ns: int, whole_ns: Int, fraction: Int) -> Int:
    """Allocate whole ns in proportion to amounts; the largest remainders are rounded up.

    10 by 1.5, 1.5 and 2.0 is 3, 3 and 4. whole_ns, fraction: int64[n], ns and 1/SHARE ns.
    Returns int64[n], whose sum is total_ns.
    """
    out = whole_ns + fraction // SHARE_SCALE
    remainders = fraction % SHARE_SCALE
    difference = (total_ns - int(whole_ns.sum())) * SHARE_SCALE - int(fraction.sum())
    if abs(difference) < SHARE_SCALE:
        missing = total_ns - int(out.sum())
        out[np.argsort(-remainders, kind="stable")[:missing]] += 1
        return out
    weights = [int(a) * SHARE_SCALE + int(b) for a, b in zip(whole_ns.tolist(), fraction.tolist())]
    total_weight = sum(weights)
    if not total_weight:
        weights, total_weight = [1] * len(weights), len(weights)
    parts = [divmod(total_ns * weight, total_weight) for weight in weights]
    out = np.array([part for part, _ in parts], np.int64)
    missing = total_ns - int(out.sum())
    order = sorted(range(len(parts)), key=lambda index: (-parts[index][1], index))
    out[order[:missing]] += 1
    return out


def _settle_rounding(lost: dict[str, Int], in_step: Int) -> None:
    """Move the ns by which rounding put more into a time bin than it holds."""
    if not lost:
        return
    excess = sum(lost.values()) - in_step
    for bin_index in np.flatnonzero(excess > 0).tolist():
        for name in sorted(lost, key=lambda name: -int(lost[name][bin_index])):
            free = np.flatnonzero(excess < 0)
            for target in free[np.argsort(np.abs(free - bin_index), kind="stable")].tolist():
                ns = min(int(excess[bin_index]), -int(excess[target]), int(lost[name][bin_index]))
                lost[name][bin_index] -= ns
                lost[name][target] += ns
                excess[bin_index] -= ns
                excess[target] += ns
                if excess[bin_index] <= 0:
                    break
            if excess[bin_index] <= 0:
                break


EARLY_RATIO = 1 / 24
"""Part of the run by which a rank must end before the others to have ended early."""


def find_early_ends(
    ranks: Sequence[RankHistory],
    results: Sequence[RankResult],
    begin_ns: int,
    stretch_ns: int,
    step_every: int,
) -> tuple[tuple[int, int], ...]:
    """Find the ranks whose last step ended early: (index, run time in ns), by index.

    A process that was restarted as the same rank has not ended.
    """
    ends: dict[int, int] = {}
    for rank in ranks:
        bins_with_steps = [index for index, ns in enumerate(rank.in_step_ns) if ns]
        if bins_with_steps:
            end_ns = begin_ns + (bins_with_steps[-1] + 1) * stretch_ns
            has_step_ends = step_every == 1 and rank.step_ends_ns
            ends[rank.rank] = min(end_ns, rank.step_ends_ns[-1]) if has_step_ends else end_ns
    last: dict[tuple[int, str, int | None, int], int] = {}
    for index, end_ns in ends.items():
        last[_get_rank_identity(results[index])] = max(
            last.get(_get_rank_identity(results[index]), 0), end_ns
        )
    jobs: dict[int, int] = {}
    for identity, end_ns in last.items():
        jobs[identity[0]] = max(jobs.get(identity[0], 0), end_ns)
    return tuple(
        (index, end_ns)
        for index, end_ns in sorted(ends.items())
        if last[_get_rank_identity(results[index])] == end_ns
        and end_ns < jobs[results[index].job] - EARLY_RATIO * (jobs[results[index].job] - begin_ns)
    )


def _get_rank_identity(rank: RankResult) -> tuple[int, str, int | None, int]:
    ledger = rank.ledger
    number = ledger.pid if ledger.rank is None else 0
    return rank.job, ledger.node if ledger.rank is None else "", ledger.rank, number


MAX_BINS = 240
MIN_BINS = 30
MAX_CELLS = 240_000
"""Time bins times ranks; many ranks get fewer bins, but at least the minimum."""
MAX_STEP_ENDS, MIN_STEP_ENDS = 512, 32
"""Step ends stored per rank, at most and at least."""
_NO_STEPS = "no time inside steps was recorded"
_CLOCKS_NOT_ALIGNED = "the nodes' clocks could not be aligned: times are those of their wall clocks"


def build_history(across: JobState, spill: SpillLocation, windowed: bool = False) -> History:
    """Build the history of a run.

    The nodes must have been analyzed with `history`; spill: where they have stored their data.
    windowed: only a part of the run was analyzed.
    """
    nodes = across.nodes
    pairs = [(node_number, rank) for node_number, node in enumerate(nodes) for rank in node.ranks]
    ranks = [rank for _, rank in pairs]
    if across.clock is None or all(rank.history is None for rank in ranks):
        return History(None, 0, 0, (), why_missing=_NO_STEPS)
    try:
        with SpillReader(spill) as reader:
            return _build_from_tables(across, across.clock, pairs, reader, windowed)
    except OSError as error:
        return History(None, 0, 0, (), why_missing=f"it could not be read back: {error}")


def _build_from_tables(
    across: JobState,
    clock: NodeClockAlignment,
    pairs: Sequence[tuple[int, RankResult]],
    reader: SpillReader,
    windowed: bool,
) -> History:
    results = [rank for _, rank in pairs]
    tables = [_load_rank_table(node, rank, clock, reader) for node, rank in pairs]
    present = [table for table in tables if table is not None]
    if not present:
        why = next(
            (
                rank.history.missing_reason
                for rank in results
                if rank.history and rank.history.missing_reason
            ),
            _NO_STEPS,
        )
        return History(None, 0, 0, (), why_missing=why)
    start_ns = min(
        _find_run_start_ns(across.nodes, clock), *(int(table.edges[0]) for table in present)
    )
    begin_ns = (min(int(table.edges[0]) for table in present) - start_ns) if windowed else 0
    end_ns = max(int(table.edges[-1]) for table in present) - start_ns
    max_bins = max(MIN_BINS, min(MAX_BINS, MAX_CELLS // len(results)))
    length = min(MIN_BIN_NS, *(table.times.bin_ns for table in present))
    while -(-end_ns // length) - begin_ns // length > max_bins:
        length *= 2
    first, count = begin_ns // length, -(-end_ns // length) - begin_ns // length
    at_ns = start_ns + (first + np.arange(count + 1)) * length
    stride = _choose_step_stride(results)
    own_ns = [totals.own_ns for totals in compute_culprit_totals(results)]
    context = stride, start_ns, reader
    ranks = tuple(
        _build_rank_history(index, results[index], table, own_ns[index], at_ns, context)
        for index, table in enumerate(tables)
    )
    ended = find_early_ends(ranks, results, first * length, length, stride)
    events = _EventBuilder(pairs, clock, start_ns, reader)
    reasons = [
        rank.history.missing_reason
        for rank in results
        if rank.history is not None and rank.history.missing_reason
    ]
    is_unaligned = (
        len(across.nodes) > 1 and across.clock_bound_ns is None and _is_on_wall_clocks(clock)
    )
    return History(
        started_at_ns=start_ns if _has_wall_clocks(across.nodes) else None,
        bin_ns=length,
        bin_count=count,
        ranks=ranks,
        waits=events.waits(across.long_waits),
        slow_steps=events.slow_steps(across.long_waits, results),
        step_stride=stride,
        why_missing=max(reasons, default=_CLOCKS_NOT_ALIGNED if is_unaligned else ""),
        begin_ns=first * length,
        ended=ended,
    )


@dataclass(frozen=True, slots=True)
class _RankTable:
    edges: Int
    """Edges of its time bins on the clock of the run; int64[bins + 1], ns."""
    times: RankTimeHistory
    packed: bytes
    """Its amounts, packed until they are needed: those of all ranks would take a GiB."""
    clock: NodeClockAlignment
    node: int

    def read_amounts(self) -> tuple[Int, Int]:
        """Read lost time by name and time bin: whole ns, and the rest in 1/SHARE ns."""
        table = unpack_table(self.packed).reshape(len(self.times.names), 2, -1)
        return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


def _load_rank_table(
    node: int, rank: RankResult, clock: NodeClockAlignment, reader: SpillReader
) -> _RankTable | None:
    times = rank.history
    if times is None or times.stored_block is None or not times.names:
        return None
    packed = reader.get(times.stored_block, times.length)
    rows, columns = read_table_shape(packed)
    bins = rows * columns // (2 * len(times.names))
    edges = times.begin_ns + (times.first_bin + np.arange(bins + 1)) * times.bin_ns
    return _RankTable(clock.to_common_ns(node, edges), times, packed, clock, node)


def _build_rank_history(
    rank_index: int,
    rank: RankResult,
    table: _RankTable | None,
    rank_own_ns: Mapping[str, int],
    at_ns: Int,
    marks: tuple[int, int, SpillReader],
) -> RankHistory:
    if table is None:
        zeros = (0,) * (at_ns.size - 1)
        return RankHistory(rank_index, zeros, (), ())
    rows = LossRows(table.times.names, *align_to_bins(table.edges, *table.read_amounts(), at_ns))
    lost = allocate_lost_time(rank, rank_own_ns, rows)
    order = sorted(lost, key=lambda name: (-int(lost[name].sum()), name))
    stride, start_ns, reader = marks
    ends = [
        steps[2][steps[0] % stride == 0]
        for steps in (_load_steps(block, reader) for block in table.times.blocks)
    ]
    own_ns = np.concatenate([np.zeros(0, np.int64), *ends])
    return RankHistory(
        rank=rank_index,
        in_step_ns=tuple(rows.sum((IN_STEP,))[0].tolist()),
        lost=tuple((name, tuple(lost[name].tolist())) for name in order),
        step_ends_ns=tuple((table.clock.to_common_ns(table.node, own_ns) - start_ns).tolist()),
    )


def _load_steps(block: tuple[int | bytes, int, int, int], reader: SpillReader) -> Int:
    return unpack_table(reader.get(block[0], block[1]))


def _choose_step_stride(ranks: Sequence[RankResult]) -> int:
    max_ends = max(MIN_STEP_ENDS, min(MAX_STEP_ENDS, 4 * MAX_CELLS // len(ranks)))
    stride = 1
    while max(rank.ledger.steps for rank in ranks) > max_ends * stride:
        stride *= 2
    return stride


def _find_run_start_ns(nodes: Sequence[NodeResult], clock: NodeClockAlignment) -> int:
    """Find the start of the first recording on the clock of the run, ns."""
    starts = []
    for node_number, node in enumerate(nodes):
        begin = node.loaded.header.started.get("monotonic_ns", node.loaded.first_ns)
        starts.append(int(clock.to_common_ns(node_number, np.array([int(begin)]))[0]))
    return min(starts)


def _has_wall_clocks(nodes: Sequence[NodeResult]) -> bool:
    return all(node.loaded.header.started.get("realtime_ns") for node in nodes)


def _is_on_wall_clocks(clock: NodeClockAlignment) -> bool:
    """Return whether clocks of several machines are related by their wall clocks only."""
    return len(clock.clocks.lines) > 1 and any(line is None for line in clock.clocks.lines)


@dataclass(frozen=True, slots=True)
class _EventBuilder:
    """Builds waits and slow steps for the report."""

    pairs: Sequence[tuple[int, RankResult]]
    clock: NodeClockAlignment
    start_ns: int
    reader: SpillReader

    def waits(self, observer: LongWaitObserver | None) -> tuple[Wait, ...]:
        """Return the longest waits by start."""
        if observer is None:
            return ()
        ranks = [rank for _, rank in self.pairs]
        named = {rank_index for rank_index, rank in enumerate(ranks) if rank.culprit_ns}
        ids = choose_reported_ids(ranks)
        out = [
            Wait(
                start_ns=self._to_run_ns(wait.victim, wait.start_ns),
                duration_ns=wait.duration_ns,
                victim=wait.victim,
                culprit=wait.culprit if wait.culprit >= 0 else None,
                cause=_find_reported_id(observer.causes[wait.cause], ids),
                step=self._find_step(wait.victim, wait.start_ns),
            )
            for wait in observer.longest(named)
        ]
        return tuple(sorted(out, key=lambda wait: (wait.start_ns, wait.victim)))

    def _to_run_ns(self, rank_index: int, t_ns: int) -> int:
        return (
            int(self.clock.to_common_ns(self.pairs[rank_index][0], np.array([t_ns]))[0])
            - self.start_ns
        )

    def _find_step(self, rank_index: int, t_ns: int) -> int | None:
        """Return the step of a rank at an instant of its own clock; None = outside its steps."""
        times = self.pairs[rank_index][1].history
        for block in times.blocks if times is not None else ():
            if block[3] > t_ns:
                number, start, end = _load_steps(block, self.reader)
                inside = np.flatnonzero((start <= t_ns) & (end > t_ns))
                return int(number[inside[0]]) if inside.size else None
        return None

    def slow_steps(
        self, observer: LongWaitObserver | None, ranks: Sequence[RankResult]
    ) -> tuple[SlowStep, ...]:
        """Return the slowest steps of all jobs, slowest first."""
        last = {} if observer is None else observer.last_arrivals()
        out = [
            step
            for job, numbers in list_slowest_steps(ranks).items()
            for step in self._build_slow_steps(job, numbers, last)
        ]
        out.sort(key=lambda step: (-step.duration_ns, step.number))
        return tuple(out[:MAX_SLOW_STEPS])

    def _build_slow_steps(
        self, job: int, numbers: Sequence[int], last: Mapping[tuple[int, int], int]
    ) -> list[SlowStep]:
        """Build the steps with these numbers of a job, in one pass over its ranks."""
        sums = {number: _SlowStepSum() for number in numbers}
        for rank_index, (_, result) in enumerate(self.pairs):
            if result.job != job or result.history is None:
                continue
            columns: dict[int, int] = {}
            for column, number in enumerate(result.history.slowest[0].tolist()):
                if number in sums:
                    columns.setdefault(number, column)
            if not columns:
                continue
            lines = [_find_ledger_line(result, name) for name in result.history.names]
            for number, column in columns.items():
                _, start_ns, duration_ns, *amounts = result.history.slowest[:, column].tolist()
                step = sums[number]
                step.longest = max(step.longest, (duration_ns, -rank_index, start_ns))
                step.rank = last.get((rank_index, start_ns), step.rank)
                for id_, ns in zip(lines, amounts):
                    if id_ and ns:
                        step.lost[id_] = step.lost.get(id_, 0) + ns
        return [self._finish_slow_step(number, step) for number, step in sums.items()]

    def _finish_slow_step(self, number: int, step: _SlowStepSum) -> SlowStep:
        duration, rank_index, start = step.longest[0], -step.longest[1], step.longest[2]
        lines = tuple(sorted(step.lost.items(), key=lambda line: (-line[1], line[0])))
        return SlowStep(number, self._to_run_ns(rank_index, start), duration, step.rank, lines)


@dataclass(slots=True)
class _SlowStepSum:
    """Sums over the ranks of one step."""

    longest: tuple[int, int, int] = (0, 0, 0)
    """Duration, minus the place of the rank, and start on its clock, ns."""
    rank: int | None = None
    """Place of the rank that arrived last."""
    lost: dict[str, int] = field(default_factory=dict)


def _find_reported_id(cause: str, ids: Mapping[str, str]) -> str:
    """Return the id under which the report lists a cause of waiting; "" when not known."""
    if cause in ids:
        return ids[cause]
    family = CAUSES[cause].family if cause in CAUSES else ""
    return family if family in ids.values() else cause if cause in CAUSES else ""


def _find_ledger_line(rank: RankResult, name: str) -> str:
    """Return the ledger line that a row of a rank's table belongs to; "" for none."""
    if name == SUSPECTED_LOSS:
        return WAITING_FOR_RANKS if rank.victim_ns else ""
    if name == PEERS or (name == SUSPECTED_PEERS and rank.victim_ns):
        return WAITING_FOR_RANKS
    return next((b.id for b in rank.buckets if name in b.causes), UNATTRIBUTED)
