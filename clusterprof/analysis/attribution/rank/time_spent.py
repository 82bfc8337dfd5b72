"""Sum what a rank had spent its time on when it arrived at each operation.

    |== work 200 ==|-- data wait: storage 80, cpu 20 --|== work 50 ==| arrives
    at arrival: storage 80, cpu 20, work 250

The blame compares these sums between ranks (docs/design/waits-between-ranks.md). They run from
the first step on, segment by segment, without the time in operations itself. What no
cause claimed is UNEXPLAINED; what was not lost is work, minus the time
in which the main thread had no CPU.

It also estimates the part of a rank's work in which its main thread was runnable but had no CPU.

Without a device this is not lost time of the rank itself. But a rank that waits for it
in an operation waits for a CPU, not for more work or slower computation.

    samples      |------ 100 ms, 30 of them runnable ------|
    work         |== 60 ==|   wait 40              18 of the 60 were no work
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from clusterprof import signals
from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.rank.hidden_cost import (
    HIDDEN_COLUMNS,
    HiddenCostSums,
    LossTimeBins,
    compute_hidden_cost,
)
from clusterprof.analysis.attribution.rank.host_phases import find_lock_waits, measure_end_delays
from clusterprof.analysis.attribution.rank.unprobed_rank import has_peers
from clusterprof.analysis.attribution.wait_for.blame import WORK
from clusterprof.analysis.timeline.collectives.operations import (
    apply_device_times,
    find_device_waits,
)
from clusterprof.analysis.timeline.collectives.rows import (
    RankOperations,
    RankRowBuilder,
    Store,
    choose_block_rows,
)
from clusterprof.analysis.timeline.intervals import Pair, measure_overlap, merge_intervals
from clusterprof.analysis.timeline.model import (
    PHASE_BUSY_WAIT,
    PHASE_COLLECTIVE,
    PHASE_EVAL,
    PHASE_LOCK,
    Float,
    Int,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.series import compute_differences, compute_increase
from clusterprof.analysis.timeline.spans import CollectiveSpans
from clusterprof.probe import layout

MIN_RUNNABLE_RATIO = 0.02  # less is the normal cost of every scheduler


class RunnableSums:
    """Running sums of one settled segment; the delay between two samples is spread evenly."""

    def __init__(self, rank: Rank, segment: Segment, work_until: Callable[[Int], Int]) -> None:
        """work_until: returns the work in the segment before each time, ns."""
        edges, rate = _estimate_runnable_rates(rank, segment)
        self._edges, self._rate = edges, rate
        self.has_any = bool(rate.any())
        """Whether any work was waiting for a CPU."""
        if self.has_any:
            self._work = work_until(edges)
            self._before = np.concatenate([[0.0], np.cumsum(rate * np.diff(self._work))])

    def sum_until(self, t_ns: Int, work_ns: Int) -> Float:
        """Return how much of the work before each time was waiting for a CPU: float64[n], ns.

        Only if `has_any`.
        """
        row = np.searchsorted(self._edges, t_ns, side="right") - 1
        row = np.clip(row, 0, self._rate.size - 1)
        out: Float = self._before[row] + self._rate[row] * (work_ns - self._work[row])
        return np.clip(out, 0.0, work_ns)


def _estimate_runnable_rates(rank: Rank, segment: Segment) -> tuple[Int, Float]:
    """Return sample times within the segment, its bounds, and the runnable parts between."""
    bounds = np.array([segment.start_ns, segment.end_ns], np.int64)
    thread = rank.main.threads.get(rank.pid)
    if thread is None or len(thread.t_ns) < 2:
        return bounds, np.zeros(1)
    t_ns = thread.t_ns
    growth, _ = compute_differences(thread.run_delay_ns)  # 0 where unknown
    ratio = np.clip(growth / np.maximum(np.diff(t_ns), 1), 0.0, 1.0)
    inside = t_ns[(t_ns > segment.start_ns) & (t_ns < segment.end_ns)]
    edges = np.concatenate([bounds[:1], inside, bounds[1:]])
    row = np.searchsorted(t_ns, edges[:-1], side="right") - 1
    is_sampled = (row >= 0) & (row < ratio.size)
    rate = np.where(is_sampled, ratio[np.clip(row, 0, ratio.size - 1)], 0.0)
    quota = rank.chunk.series.get((signals.CGROUP_THROTTLED.name, ""))
    if quota is not None and rate.any():  # that is cpu-throttled and stays work
        length = np.maximum(np.diff(edges), 1)
        rate -= np.clip(
            np.nan_to_num(compute_increase(quota, edges[:-1], edges[1:])) / length, 0.0, 1.0
        )
    rate[rate < MIN_RUNNABLE_RATIO] = 0.0
    return edges, rate


UNEXPLAINED = "unexplained"
"""Category of lost time that no cause claimed."""
CONTENTION = "cpu-contention"
"""Work without a CPU counts as this cause, although it is not lost time of the rank
itself.
"""
EVALUATION = "eval-host"
"""Work in an evaluation counts as this cause: ranks wait for one that evaluates alone."""
GIL = "cpu-gil"
"""Work while the training thread waits for the interpreter lock counts as this cause."""


class TimeSpent:
    """Running sums of what one rank spends, recorded at its operations."""

    def __init__(self, causes: tuple[str, ...], store: Store, ranks: int = 1) -> None:
        """causes: the possible causes; categories are these, UNEXPLAINED and work.

        ranks: number of ranks of the job.
        """
        self.categories = (*causes, UNEXPLAINED, WORK)
        self._spent = SpentTotals(self.categories)
        self._rows = RankRowBuilder(store, choose_block_rows(ranks), self.categories.index(WORK))
        self._provisional: list[tuple[Int, Int, Int, Int]] = []
        self._open: dict[_SpanKey, tuple[int, Int]] = {}
        self._loss_bins = LossTimeBins(causes)

    def add(self, rank: Rank, segment: Segment, lost: LostTime, shares: Mapping[str, Int]) -> None:
        """Add a settled segment.

        The columns of HIDDEN_COLUMNS, additional savings of a fix, follow the
        categories.
        shares: int64[n] of its lost intervals per cause, in 1/SHARE_SCALE.
        """
        operations = _get_operations(rank)
        spans = _select_ended_spans(operations, segment)
        ongoing = _select_ongoing(operations, segment)
        inside = lost.phase == PHASE_COLLECTIVE
        own_ns = np.where(inside | (lost.phase == PHASE_BUSY_WAIT), 0, lost.lost_ns)
        amounts = split_amounts(self.categories, own_ns, lost, shares)
        hidden_cost = compute_hidden_cost(rank, lost, shares)
        t_ns = [np.array([segment.end_ns], np.int64)]
        if ongoing is not None:
            t_ns = [np.maximum(ongoing.start_ns, segment.start_ns), *t_ns]
        if spans is not None:
            end_ns = spans.end_ns - measure_end_delays(rank, spans, segment.start_ns)
            t_ns = [np.maximum(spans.start_ns, segment.start_ns), end_ns, *t_ns]
        used, spent = self._spent.add(
            rank, segment, lost, amounts, hidden_cost, np.concatenate(t_ns)
        )
        if spans is not None:
            count = spans.start_ns.size
            at_arrive, at_leave = spent[:, :count].copy(), spent[:, count : 2 * count]
            blocked_ns = _measure_blocked_time(spans, segment, lost, inside)
            self._add_open(spans, segment, blocked_ns, at_arrive, used)
            blocked_ns = np.minimum(blocked_ns, end_ns - spans.start_ns)
            columns = spans.group, spans.number, spans.bytes, spans.code, blocked_ns
            table = np.stack([spans.start_ns, end_ns, *columns])
            order = np.argsort(end_ns, kind="stable")
            rows = table[:, order], at_arrive[:, order], at_leave[:, order], used
            self._provisional.append(rows)
        if ongoing is not None:
            until = _make_lost_time_sum(lost, np.flatnonzero(inside))
            arrived = spent[:, -1 - ongoing.start_ns.size : -1]
            blocked_ns = _measure_ongoing(ongoing, spans, segment, until)
            self._keep_open(ongoing, blocked_ns, arrived, used)
        if not has_peers(rank):
            self._loss_bins.add(rank, segment, lost, shares, hidden_cost)
        if not segment.provisional:
            self.confirm()

    def _keep_open(
        self, spans: CollectiveSpans, blocked_ns: Int, at_arrive: Int, used: Int
    ) -> None:
        """Keep what spans that end after the segment have so far.

        used: int64[k], the categories of the rows of `at_arrive`.
        """
        for span_row, key in enumerate(_list_keys(spans)):
            before_ns, arrived = self._open.get(key, (0, None))
            if arrived is None:
                arrived = np.zeros(self._spent.size, np.int64)
                arrived[used] = at_arrive[:, span_row]
            self._open[key] = before_ns + int(blocked_ns[span_row]), arrived

    def _add_open(
        self, spans: CollectiveSpans, segment: Segment, blocked_ns: Int, at_arrive: Int, used: Int
    ) -> None:
        """Add to ended spans, in place, their time in earlier segments.

        used: int64[k], the categories of the rows of `at_arrive`; those of earlier segments are
        among them.
        """
        rows = np.flatnonzero(spans.start_ns < segment.start_ns)
        for span_row, key in zip(
            rows.tolist(), _list_keys(spans.select(rows)) if rows.size else ()
        ):
            before = self._open.pop(key, None)
            if before is not None:
                blocked_ns[span_row] += before[0]
                at_arrive[:, span_row] = before[1][used]

    def confirm(self) -> None:
        """Take over provisional segments: another step has ended."""
        for operations in self._provisional:
            self._rows.add(*operations)
        self._provisional = []
        self._loss_bins.confirm()

    def losses_by_time_bin(self) -> tuple[Int, Int] | None:
        """Return what a rank without peers lost; None for a rank with peers."""
        return self._loss_bins.build_table()

    def operations(self) -> RankOperations | None:
        """Return all operations inside steps; None if there were none. Call once."""
        return self._rows.finish()


def split_amounts(
    categories: tuple[str, ...], own_ns: Int, lost: LostTime, shares: Mapping[str, Int]
) -> dict[int, Float]:
    """Split the counted loss of each interval by category.

    Returns index -> float64[n], ns; empty categories omitted.

    own_ns: int64[n], the part of each interval's loss that counts. shares: int64[n] per
    cause, in 1/SHARE_SCALE of the whole loss.
    """
    out: dict[int, Float] = {}
    remaining_ns = own_ns.astype(np.float64)
    for column, cause in enumerate(categories[:-2]):
        share = shares.get(cause)
        if share is not None and share.any():
            out[column] = np.minimum(own_ns, lost.lost_ns * (share / SHARE_SCALE))
            remaining_ns -= out[column]
    if remaining_ns.any():
        out[len(categories) - 2] = remaining_ns
    return out


class SpentTotals:
    """What one rank has spent by category since its first step, and its hidden cost.

    Most categories never have any time, so sums are returned for the others alone.
    """

    def __init__(self, categories: tuple[str, ...]) -> None:
        """categories: causes, UNEXPLAINED and work; HIDDEN_COLUMNS follow them."""
        self._contention = categories.index(CONTENTION) if CONTENTION in categories else None
        self._host_bound = {
            cause: categories.index(cause) for cause in (EVALUATION, GIL) if cause in categories
        }
        self._sums = np.zeros(len(categories), np.int64)
        self._hidden = HiddenCostSums()
        self.size = len(categories) + len(HIDDEN_COLUMNS)
        """Number of categories and columns."""

    def add(
        self,
        rank: Rank,
        segment: Segment,
        lost: LostTime,
        amounts: Mapping[int, Float],
        hidden_cost: Mapping[int, Int],
        t_ns: Int,
    ) -> tuple[Int, Int]:
        """Add a settled segment, and return the time by category up to given instants.

        amounts, hidden_cost: what `split_amounts` and `compute_hidden_cost` return. t_ns:
        int64[m]; the last one is the end of the segment. Returns the categories with any time,
        int64[k], ascending, and their sums, int64[k, m], ns.
        """
        moved = self._contention, self._host_bound
        running = RunningSums(self._sums, rank, segment, lost, amounts, *moved)
        spent = running.sum_until(t_ns)
        self._sums[running.categories] = spent[:, -1]
        columns, hidden = self._hidden.add(lost, hidden_cost, t_ns)
        used = np.concatenate([running.categories, self._sums.size + columns])
        return used, np.concatenate([spent, hidden]) if columns.size else spent


class RunningSums:
    """Running sums over the lost intervals of a segment, which are sorted and disjoint."""

    def __init__(
        self,
        before: Int,
        rank: Rank,
        segment: Segment,
        lost: LostTime,
        amounts: Mapping[int, Float],
        contention: int | None,
        host_bound: Mapping[str, int],
    ) -> None:
        """contention: the category of work without a CPU. host_bound: cause -> category of work
        behind which the host evaluates, or waits for the interpreter lock.
        """
        self._region, self._lost = segment, lost
        self._parts = {column: (ns, _compute_running_sum(ns)) for column, ns in amounts.items()}
        self._all = (lost.lost_ns, _compute_running_sum(lost.lost_ns))
        self._runnable: RunnableSums | None = None
        if contention is not None and rank.device:  # without a device it is lost, and no work
            runnable = RunnableSums(
                rank, segment, lambda t_ns: self._sum_work(t_ns, *self._locate(t_ns))
            )
            self._runnable = runnable if runnable.has_any else None
        used = before != 0
        used[[*amounts, before.size - 1]] = True
        if self._runnable is not None:
            used[contention] = True
        self._host_phases = list(_list_host_phases(rank, host_bound, amounts))
        used[[category for category, _, _ in self._host_phases]] = True
        (self.categories,) = used.nonzero()
        """The categories with any time, int64[k], ascending; the last one is work."""
        self._before = before[self.categories]
        self._row = {int(column): row for row, column in enumerate(self.categories)}
        self._contention = contention

    def sum_until(self, t_ns: Int) -> Int:
        """Return the time in `categories` up to each instant: int64[k, m], ns.

        All intervals before each time, and the part before it of the interval that contains it.
        """
        table = np.zeros((self.categories.size, t_ns.size), np.int64)
        self._add_in_segment(t_ns, table)
        if self._runnable is not None and self._contention is not None:
            delayed = np.rint(self._runnable.sum_until(t_ns, table[-1])).astype(np.int64)
            table[self._row[self._contention]] += delayed
            table[-1] -= delayed
        for category, intervals, phase in self._host_phases:
            hidden_ns = np.clip(self._sum_hidden(t_ns, intervals, phase), 0, table[-1])
            table[self._row[category]] += hidden_ns
            table[-1] -= hidden_ns
        table += self._before[:, None]
        return table

    def _add_in_segment(self, t_ns: Int, table: Int) -> None:
        """Add the sums since the beginning of the segment, with all time that was not lost as
        work.
        """
        row, part = self._locate(t_ns)
        for column, (ns, sums) in self._parts.items():
            table[self._row[column]] += np.rint(sums[row] + ns[row] * part).astype(np.int64)
        table[-1] += self._sum_work(t_ns, row, part)

    def _locate(self, t_ns: Int) -> tuple[Int, Float]:
        """Return the last interval that began before each time, and which part of it is over."""
        start, end = self._lost.start_ns, self._lost.end_ns
        if not start.size:
            return np.zeros(t_ns.size, np.int64), np.zeros(t_ns.size)
        row = start.searchsorted(t_ns, "right") - 1
        clipped_row = np.maximum(row, 0)
        first = start[clipped_row]
        part = np.minimum((t_ns - first) / np.maximum(end[clipped_row] - first, 1), 1.0)
        part[row < 0] = 0.0  # before the first interval
        return clipped_row, part

    def _sum_hidden(self, t_ns: Int, intervals: Pair, phase: int) -> Int:
        """Return the time in a host phase before each time that was not lost, int64[m], ns."""
        begin = np.full(t_ns.size, self._region.start_ns)
        inside_ns = measure_overlap((begin, t_ns), intervals)
        until = _make_lost_time_sum(self._lost, np.flatnonzero(self._lost.phase == phase))
        return np.asarray(inside_ns - until(t_ns), np.int64)

    def _sum_work(self, t_ns: Int, row: Int, part: Float) -> Int:
        """Return the time in the segment before each time that was not lost, int64[m], ns."""
        work_ns: Int = t_ns - self._region.start_ns
        if self._lost.start_ns.size:
            lost_ns, sums = self._all
            work_ns -= np.rint(sums[row] + lost_ns[row] * part).astype(np.int64)
        return work_ns


def _list_host_phases(
    rank: Rank, host_bound: Mapping[str, int], amounts: Mapping[int, Float]
) -> Iterator[tuple[int, Pair, int]]:
    """Yield category, intervals and phase of what a host does while its device works on.

    A host that is held up arrives late at the next operation even if its device still has work.
    """
    table = rank.main.spans.get(layout.EVAL) if EVALUATION in host_bound else None
    if table:
        evaluations = merge_intervals((table.start_ns, table.end_ns))
        yield host_bound[EVALUATION], evaluations, PHASE_EVAL
    if host_bound.get(GIL) in amounts:  # else no evidence names the lock in this segment
        yield host_bound[GIL], find_lock_waits(rank), PHASE_LOCK


def _compute_running_sum(ns: Float | Int) -> Float:
    out = np.zeros(ns.size + 1)
    np.cumsum(ns, out=out[1:])
    return out


def _get_operations(rank: Rank) -> CollectiveSpans | None:
    """Return the collective spans of a rank, with device times where measured."""
    spans = rank.main.get_spans(CollectiveSpans)
    return None if spans is None else apply_device_times(spans, find_device_waits(rank.main))


def _select_ended_spans(spans: CollectiveSpans | None, segment: Segment) -> CollectiveSpans | None:
    """Return the spans of known groups that ended in a segment, by end; None without any."""
    if spans is None:
        return None
    ended = (spans.end_ns > segment.start_ns) & (spans.end_ns <= segment.end_ns)
    rows = np.flatnonzero(ended & (spans.group != 0))
    if not rows.size:
        return None
    ends = spans.end_ns[rows]
    if (ends[1:] < ends[:-1]).any():
        rows = rows[np.argsort(ends, kind="stable")]
    ended_spans = spans.select(rows)
    # The halves of an operation match, whichever thread called them.
    joined = ended_spans.form != layout.BLOCKING
    code = np.where(joined, ended_spans.code & ~layout.OTHER_THREAD, ended_spans.code)
    return replace(ended_spans, code=code)


_SpanKey = tuple[int, int, int, int]
"""Start, end, group and number of a span."""


def _list_keys(spans: CollectiveSpans) -> list[_SpanKey]:
    columns = spans.start_ns, spans.end_ns, spans.group, spans.number
    return list(zip(*(column.tolist() for column in columns)))


def _select_ongoing(spans: CollectiveSpans | None, segment: Segment) -> CollectiveSpans | None:
    """Return the spans of known groups that continue after a segment, by end; None without any."""
    if spans is None:
        return None
    rows = np.flatnonzero(
        (spans.start_ns < segment.end_ns) & (spans.end_ns > segment.end_ns) & (spans.group != 0)
    )
    if not rows.size:
        return None
    return spans.select(rows[np.argsort(spans.end_ns[rows], kind="stable")])


def _measure_ongoing(
    ongoing: CollectiveSpans,
    ended: CollectiveSpans | None,
    segment: Segment,
    until: Callable[[Int], Int],
) -> Int:
    """Return lost time in operations inside spans that continue after a segment: int64[n], ns.

    Each nanosecond counts once, for the span that ends first, after those that end in the segment.
    """
    reach_ns = segment.start_ns
    if ended is not None:
        waits = ended.form != layout.ISSUE
        reach_ns = max(reach_ns, int(ended.end_ns[waits].max(initial=reach_ns)))
    blocked_ns = np.zeros(ongoing.start_ns.size, np.int64)
    covered_ns = segment.end_ns
    for span_row in np.flatnonzero(ongoing.form != layout.ISSUE).tolist():
        begin_ns = max(int(ongoing.start_ns[span_row]), reach_ns)
        if begin_ns < covered_ns:
            first, last = until(np.array([begin_ns, covered_ns], np.int64)).tolist()
            blocked_ns[span_row] = min(max(last - first, 0), covered_ns - begin_ns)
            covered_ns = begin_ns
    return blocked_ns


def _measure_blocked_time(
    spans: CollectiveSpans, segment: Segment, lost: LostTime, inside: np.ndarray
) -> Int:
    """Return lost time in operations inside each span, each nanosecond once: int64[n], ns."""
    waits = spans.form != layout.ISSUE
    reach = np.maximum.accumulate(np.where(waits, spans.end_ns, segment.start_ns))
    begin = np.maximum(spans.start_ns, np.append(segment.start_ns, reach[:-1]))
    end = np.where(waits, spans.end_ns, begin)
    # Spans that touch share an interval: the part inside each span counts.
    until = _make_lost_time_sum(lost, np.flatnonzero(inside))
    # Both are rounded: the difference may be a nanosecond too large.
    until_end, until_begin = np.split(until(np.concatenate([end, begin])), 2)
    blocked_ns = np.clip(until_end - until_begin, 0, np.maximum(end - begin, 0))
    start = np.maximum(spans.start_ns, segment.start_ns)
    enclosing = waits[1:] & (start[1:] < reach[:-1])
    enclosing &= start[1:] < np.maximum.accumulate(begin)[:-1]
    if enclosing.any():
        _add_time_before_enclosed(blocked_ns, spans, segment, waits, until)
    return blocked_ns


_MAX_INNER = 16
"""Number of inner operations that share such time: chains of overlapping ones have no end."""


def _add_time_before_enclosed(
    blocked_ns: Int,
    spans: CollectiveSpans,
    segment: Segment,
    waits: np.ndarray,
    until: Callable[[Int], Int],
) -> None:
    """Add the lost time of each span before spans that began later and ended earlier, in place.

    Threads call operations at the same time; the outer one waits for the inner one, and samples
    do not say in which of them the device was idle. So it goes to the inner one, as far as that
    has room. blocked_ns: int64[n], ns.

        thread 1   |------------ 100 ------------|
        thread 2        |-- 30 --|
        counted    |-20-|   30   |----- 50 ------|     20 lie before the inner one
    """
    covered: list[tuple[int, int, list[int]]] = []  # disjoint and sorted; spans in each
    starts = np.maximum(spans.start_ns, segment.start_ns).tolist()
    ends = spans.end_ns.tolist()
    lost_before = dict(zip([*starts, *ends], until(np.array([*starts, *ends])).tolist()))
    for outer, (start_ns, end_ns) in enumerate(zip(starts, ends)):
        if not waits[outer]:
            continue
        inner: list[tuple[int, int, list[int]]] = []
        while covered and covered[-1][1] > start_ns:
            inner.append(covered.pop())
        inner.reverse()
        before_ns = start_ns
        for low_ns, high_ns, members in inner:
            if low_ns > before_ns:
                left_ns = max(lost_before[low_ns] - lost_before[before_ns], 0)
                for member in members:
                    room_ns = ends[member] - starts[member] - int(blocked_ns[member])
                    part_ns = min(max(room_ns, 0), left_ns)
                    blocked_ns[member] += part_ns
                    left_ns -= part_ns
                blocked_ns[outer] += left_ns
            before_ns = high_ns
        first_ns = min([start_ns, *(low_ns for low_ns, _, _ in inner)])
        members = [outer, *(member for _, _, enclosed in inner for member in enclosed)]
        covered.append((first_ns, end_ns, members[:_MAX_INNER]))


def _make_lost_time_sum(lost: LostTime, rows: Int) -> Callable[[Int], Int]:
    """Return a function that sums the time lost in disjoint intervals before given times."""
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
        clipped_row = np.maximum(row, 0)
        part = np.clip((t_ns - start[clipped_row]) / np.maximum(length[clipped_row], 1), 0.0, 1.0)
        lost_before = before[clipped_row] + np.floor(ns[clipped_row] * part).astype(np.int64)
        return np.where(row < 0, 0, lost_before)

    return until
