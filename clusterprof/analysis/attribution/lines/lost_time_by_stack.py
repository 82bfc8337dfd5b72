"""Share the lost time of a rank out among the Python stacks sampled in it.

    lost interval        |-------- 100 ms, 60 of them lost to cpu-preprocess --------|
    samples of 50 ms          ^ augment                  ^ decode
    shares                    30 ms                      30 ms

A sample stands for the time since the sample before, so it carries that time's share of the loss,
whether or not other intervals were sampled. At the end the shares of a cause are scaled to its
lost time. The critical thread is the one that the time is lost to:

    wait for a batch     the worker that owns it, over the whole fetch: whatever is faster in a
                         fetch shortens the wait, not only what the worker does last; or the other
                         threads, while the thread that trains waits for one of them
    wait for the lock    the other threads, one of which kept the interpreter lock
    all other time       the thread that trains

Samples in which that thread waited for the device carry nothing: the device worked then, and stood
still directly afterwards. Of a cause
that needs the CPU only samples on a CPU count, of one that makes the thread sleep only the others,
where the state of the thread is known and there are such samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.timeline.device_sync import select_device_waits
from clusterprof.analysis.timeline.intervals import (
    find_containing,
    measure_overlap,
    merge_intervals,
)
from clusterprof.analysis.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_NONE,
    DataWaitBreakdown,
    Float,
    Int,
    LostTime,
    Process,
    Rank,
    ThreadTable,
)
from clusterprof.analysis.timeline.series import compute_column_increase
from clusterprof.analysis.timeline.spans import FetchSpans, StackSamples
from clusterprof.report.model import UNATTRIBUTED

PEERS = "peers"
"""Time in operations with other ranks, whatever made the rank wait there."""
_SLEEPING_FAMILIES = ("storage", "network")
_SLEEPING_CAUSES = ("host-asleep",)
_COMPUTING_CAUSES = ("cpu-preprocess", "launch-bound", "launch-recompile", "cpu-gc")
_HELD_LOCK = "cpu-gil"
_RUNNING, _DISK_WAIT = ord("R"), ord("D")
_LATE_NS = 300_000
"""A sample taken this much later than due found another thread with the interpreter lock."""
_STATE_NS = 50_000_000
"""A thread was on a CPU if it was for more than half the time this far around a sample."""
_GROUP_NS = 1_000_000_000
"""Lost intervals are grouped to find where in a step they are lost: samples of devices are longer
than many steps."""
_MIN_WAIT_DENSITY = 0.5
"""Where more of the time is lost, a sleeping thread waits; elsewhere its own threads may compute
for it."""
ANY_THREAD, ON_CPU, ASLEEP = range(3)
_WRITING_STATES = {"eval-host": ASLEEP}
"""State of a thread that writes or sends, of causes that may also be its own computation."""
_MIN_WRITING_RATIO = 0.5
"""Sleeping samples are used alone if they can carry this part of the loss."""


def _build_needed_states() -> dict[str, int]:
    """Build by cause which samples count; for all others each sample counts."""
    states = {id_: ASLEEP for id_, cause in CAUSES.items() if cause.family in _SLEEPING_FAMILIES}
    states |= dict.fromkeys(_SLEEPING_CAUSES, ASLEEP)
    return states | dict.fromkeys(_COMPUTING_CAUSES, ON_CPU)


_NEEDED_STATES = _build_needed_states()

StackSums = NDArray[np.float64]
"""float64[4, n]: stack number of the node, ns, number of samples, sum of squares of ns."""
NO_SUMS: StackSums = np.zeros((4, 0))


@dataclass(frozen=True, slots=True)
class RankStackTimes:
    """What the sampled stacks of one rank and its workers carry."""

    lost: Mapping[str, StackSums] = field(default_factory=dict)
    """By cause as claimed, PEERS or "unattributed": lost time, to be scaled to the ledger."""
    in_steps: StackSums = field(default_factory=lambda: NO_SUMS)
    """Time of the training thread in steps outside waits for peers."""
    samples: int = 0
    worked: StackSums = field(default_factory=lambda: NO_SUMS)
    """The part of `in_steps` that was not lost, where no device was measured; else empty."""


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples of one thread: n rows, sorted by time."""

    t_ns: Int
    stack: Int
    interval_ns: Int
    state: Int
    """ON_CPU, ASLEEP, or ANY_THREAD where the state is not known."""


class StackTimeSums:
    """Builds what the stacks of one rank carry, from settled segments."""

    def __init__(self) -> None:
        self._sums: dict[str, StackSums] = {}
        self._in_steps = NO_SUMS
        self._samples = 0
        self._pending: list[tuple[str, StackSums]] = []

    def add(
        self,
        rank: Rank,
        segment: Segment,
        lost: LostTime,
        shares: Mapping[str, Int],
        unclaimed: Int,
        breakdown: DataWaitBreakdown,
    ) -> None:
        """Add a settled segment.

        shares: int64[n] of its lost intervals per cause, and the rest: in 1/SHARE_SCALE.
        """
        if any(process.stacks is not None for process in (rank.main, *rank.workers)):
            self._add_samples(rank, segment, lost, _split_loss(lost, shares, unclaimed), breakdown)
        if not segment.provisional:
            self.confirm()

    def _add_samples(
        self,
        rank: Rank,
        segment: Segment,
        lost: LostTime,
        amounts: Mapping[str, Float],
        breakdown: DataWaitBreakdown,
    ) -> None:
        """Add the samples of the threads that train and load; amounts: float64[n] each, ns."""
        in_wait = lost.phase == PHASE_DATA_WAIT
        by_worker = in_wait & (breakdown.worker_pid > 0) & (breakdown.worker_pid != rank.pid)
        unsampled = [worker.pid for worker in rank.workers if not _may_have_stacks(worker)]
        for_unsampled = by_worker & np.isin(breakdown.worker_pid, unsampled)
        by_worker &= ~for_unsampled
        in_step = lost.phase == PHASE_COMPUTE
        for_thread = in_wait & ~by_worker & ~for_unsampled
        for_thread |= in_step & (breakdown.worker_pid == rank.pid)
        by_thread = self._add_feeding_threads(rank, segment, lost, amounts, for_thread)
        awaits = (in_step & (breakdown.worker_pid > 0)) | for_unsampled
        main = _select_samples(rank.main, segment.start_ns, segment.end_ns)
        if main is not None:
            self._add_main(rank, main, lost, amounts, ~by_worker & ~by_thread, awaits)
        if _HELD_LOCK in amounts:
            self._add_lock_holders(rank.main, segment, float(amounts[_HELD_LOCK].sum()))
        for pid in np.unique(breakdown.worker_pid[by_worker]).tolist():
            worker = next((process for process in rank.workers if process.pid == pid), None)
            if worker is not None:
                rows = by_worker & (breakdown.worker_pid == pid)
                self._add_worker(worker, lost, amounts, rows)

    def confirm(self) -> None:
        """Take over provisional segments: another step has ended."""
        for key, sums in self._pending:
            self._sums[key] = merge_stack_sums(self._sums.get(key, NO_SUMS), sums)
            if key == _IN_STEPS:
                self._samples += int(sums[2].sum())
        self._pending = []

    def finish(self) -> RankStackTimes | None:
        """Return the sums; None where no stack was sampled."""
        lost = dict(self._sums)
        in_steps = lost.pop(_IN_STEPS, NO_SUMS)
        worked = lost.pop(_WORKED, NO_SUMS)
        if not in_steps.size and not lost:
            return None
        samples = max(self._samples, int(sum(sums[2].sum() for sums in lost.values())))
        return RankStackTimes(lost, in_steps, samples, worked)

    def _add_main(
        self,
        rank: Rank,
        samples: _Samples,
        lost: LostTime,
        amounts: Mapping[str, Float],
        counted: NDArray[np.bool_],
        awaits: NDArray[np.bool_],
    ) -> None:
        """Add the samples of the thread that trains.

        counted, awaits: bool[n], the intervals whose loss it carries, and those in which it waited
        for another process that computed: there it slept.
        """
        row = np.searchsorted(lost.start_ns, samples.t_ns, side="right") - 1
        inside = row >= 0
        inside[inside] = samples.t_ns[inside] < lost.end_ns[row[inside]]
        in_collective = np.zeros(row.size, np.bool_)
        in_collective[inside] = lost.phase[row[inside]] == PHASE_COLLECTIVE
        self._put(_IN_STEPS, samples.stack[~in_collective], samples.interval_ns[~in_collective])
        counts = inside.copy()
        counts[inside] = counted[row[inside]]
        density = _compute_density(rank.main, samples.t_ns, lost, row, inside)
        if not rank.device:
            worked_ns = samples.interval_ns * (1 - density)
            is_wait = (samples.state == ASLEEP) & (density > _MIN_WAIT_DENSITY)
            rows = ~in_collective & ~is_wait & (worked_ns > 0)
            self._put(_WORKED, samples.stack[rows], worked_ns[rows])
        counts &= density > 0
        lost_row, density = row[counts], density[counts]
        selected = _select_rows(samples, counts)
        for key, ns in amounts.items():
            if key == _HELD_LOCK:
                continue
            share = (ns / np.maximum(lost.lost_ns, 1))[lost_row]
            for rows, needed in (
                (~awaits[lost_row], _get_needed_state(key)),
                (awaits[lost_row], ASLEEP),
            ):
                if rows.any():
                    loses = share[rows] * density[rows]
                    self._put_by_state(key, _select_rows(selected, rows), loses, needed)

    def _add_worker(
        self, worker: Process, lost: LostTime, amounts: Mapping[str, Float], rows: NDArray[np.bool_]
    ) -> None:
        """Spread the loss of waits for a worker over the whole fetches that they waited for."""
        fetches = worker.get_spans(FetchSpans)
        if worker.stacks is None:
            return
        start, end = lost.start_ns, lost.end_ns
        if fetches is not None and fetches.start_ns.size:
            # The batch was made in the first fetch that ended after the wait had begun. When it
            # arrives, the next fetch has begun already.
            fetch = np.searchsorted(fetches.end_ns, start, side="right")
            fetch_row = np.minimum(fetch, fetches.end_ns.size - 1)
            within = (fetch == fetch_row) & (fetches.start_ns[fetch_row] < end)
            start = np.where(within, fetches.start_ns[fetch_row], start)
            end = np.where(within, fetches.end_ns[fetch_row], end)
        bounds, group = np.unique(np.stack([start[rows], end[rows]]), axis=1, return_inverse=True)
        group = np.asarray(group).reshape(-1)
        begin, until = bounds
        samples = _select_samples(worker, int(begin.min()), int(until.max()))
        if samples is None:
            return
        row = np.searchsorted(begin, samples.t_ns, side="right") - 1
        inside = row >= 0
        inside[inside] = samples.t_ns[inside] < until[row[inside]]
        fetch_row, inside_samples = row[inside], _select_rows(samples, inside)
        length_ns = np.maximum(until - begin, 1)
        for key, ns in amounts.items():
            total_ns = np.bincount(group, ns[rows], minlength=begin.size)
            loses = (total_ns / length_ns)[fetch_row]
            self._put_by_state(key, inside_samples, loses, _get_needed_state(key))

    def _add_feeding_threads(
        self,
        rank: Rank,
        segment: Segment,
        lost: LostTime,
        amounts: Mapping[str, Float],
        rows: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Share the loss of waits for own threads out among the stacks of these threads.

        They are sampled when the thread that trains waits for them. Returns bool[n], the rows whose
        loss they carry: all, unless none was sampled.
        """
        samples = None
        if rows.any() and not rank.workers:  # processes that make batches are not sampled
            samples = _select_feeding_samples(rank.main, segment.start_ns, segment.end_ns)
        if samples is None:
            return np.zeros_like(rows)
        row = find_containing(samples.t_ns, (lost.start_ns, lost.end_ns))
        inside = (row >= 0) & rows[row]
        if not inside.any():
            return np.zeros_like(rows)
        lost_row, inside_samples = row[inside], _select_rows(samples, inside)
        length_ns = np.maximum(lost.end_ns - lost.start_ns, 1)
        for key, ns in amounts.items():
            self._put_by_state(
                key, inside_samples, (ns / length_ns)[lost_row], _get_needed_state(key)
            )
        return rows

    def _add_lock_holders(self, main: Process, segment: Segment, total_ns: float) -> None:
        """Divide time in which other threads held the interpreter lock among their stacks.

        The probe samples them at the end of each wait for the lock.
        """
        stacks = main.stacks
        if stacks is None:
            return
        rows = (stacks.thread > 0) & (stacks.interval_ns > 0)
        rows &= stacks.end_ns > stacks.start_ns  # not those that feed the thread that trains
        rows &= (stacks.start_ns >= segment.start_ns) & (stacks.start_ns < segment.end_ns)
        if rows.any():
            weight = stacks.interval_ns[rows] / int(stacks.interval_ns[rows].sum())
            self._put(_HELD_LOCK, stacks.stack[rows], total_ns * weight)

    def _put_by_state(self, key: str, samples: _Samples, density: Float, needed: int) -> None:
        """Add the samples whose thread state fits the cause; all samples if none fits.

        Those that fit also carry the loss of the others, up to all of their own time.
        """
        loses = density > 0
        ns = density * samples.interval_ns
        fits = loses & ((samples.state == needed) | (samples.state == ANY_THREAD))
        if needed != ANY_THREAD and fits.any():
            scaled_ns = ns * (float(ns[loses].sum()) / float(ns[fits].sum()))
            scaled_ns = np.minimum(scaled_ns, samples.interval_ns)
            is_enough = float(scaled_ns[fits].sum()) >= _MIN_WRITING_RATIO * float(ns[loses].sum())
            if key not in _WRITING_STATES or is_enough:
                loses, ns = fits, scaled_ns
        if loses.any():
            self._put(key, samples.stack[loses], ns[loses])

    def _put(self, key: str, stack: Int, ns: Int | Float) -> None:
        if stack.size:
            ns = np.rint(ns).astype(np.float64)  # whole numbers add up in any order
            sums = np.stack([stack.astype(np.float64), ns, np.ones(ns.size), ns * ns])
            self._pending.append((key, merge_stack_sums(sums)))


_IN_STEPS, _WORKED = "in steps", "worked"


def _may_have_stacks(worker: Process) -> bool:
    """Return whether a worker is sampled, or is one of a data loader: these are, if any process."""
    return worker.stacks is not None or FetchSpans.kind in worker.spans


def _get_needed_state(key: str) -> int:
    """Return which samples of a thread count for a cause."""
    return _NEEDED_STATES.get(key, _WRITING_STATES.get(key, ANY_THREAD))


def _split_loss(lost: LostTime, shares: Mapping[str, Int], unclaimed: Int) -> dict[str, Float]:
    """Split the loss of each interval by cause: float64[n] each, ns; empty causes left out."""
    in_collective = lost.phase == PHASE_COLLECTIVE
    parts = {
        **shares,
        PEERS: np.where(in_collective, unclaimed, 0),
        UNATTRIBUTED: np.where(in_collective, 0, unclaimed),
    }
    return {
        key: lost.lost_ns * (share / SHARE_SCALE) for key, share in parts.items() if share.any()
    }


def _select_samples(process: Process, start_ns: int, end_ns: int) -> _Samples | None:
    """Select the samples of a process's main thread that were due within some time."""
    stacks = process.stacks
    if stacks is None:
        return None
    rows = (stacks.thread == 0) & (stacks.start_ns >= start_ns) & (stacks.start_ns < end_ns)
    if not rows.any():
        return None
    return _read_states(stacks.select(rows), process.threads.get(process.pid))


def _select_feeding_samples(main: Process, start_ns: int, end_ns: int) -> _Samples | None:
    """Select the samples of other threads, taken while the thread that trains waited for them.

    Whether such a thread was on a CPU shows in the samples of its counters.
    """
    stacks = main.stacks
    if stacks is None:
        return None
    rows = (stacks.thread > 0) & (stacks.end_ns == stacks.start_ns) & (stacks.stack > 0)
    rows &= (stacks.start_ns >= start_ns) & (stacks.start_ns < end_ns)
    if not rows.any():
        return None
    stacks = stacks.select(rows)
    state = np.full(stacks.start_ns.size, ANY_THREAD)
    for tid in np.unique(stacks.thread).tolist():
        thread = main.threads.get(tid)
        if thread is None:
            continue
        (samples_of_thread,) = (stacks.thread == tid).nonzero()
        window = (
            stacks.start_ns[samples_of_thread] - _STATE_NS,
            stacks.start_ns[samples_of_thread] + _STATE_NS,
        )
        cpu_ns = compute_column_increase(thread.t_ns, thread.on_cpu_ns, *window)
        on_cpu = np.nan_to_num(cpu_ns) >= _STATE_NS
        state[samples_of_thread] = np.where(
            np.isnan(cpu_ns), ANY_THREAD, np.where(on_cpu, ON_CPU, ASLEEP)
        )
    return _Samples(stacks.start_ns, stacks.stack, np.maximum(stacks.interval_ns, 1), state)


def _read_states(stacks: StackSamples, thread: ThreadTable | None) -> _Samples:
    """Find out for each sample whether the thread was on a CPU.

    A late one came when the thread had given the interpreter lock away: it computed until then, or
    waited for a page of a file, which keeps the lock. Its samples by the recorder show which, and
    where they are too rare, those of all late samples together.
    """
    late = stacks.end_ns - stacks.start_ns >= _LATE_NS
    on_cpu = late | (stacks.state == _RUNNING)
    is_known = stacks.state > 0
    if thread is not None and late.any() and (thread.state == _DISK_WAIT).any():
        lock_holds = merge_intervals((stacks.start_ns[late], stacks.end_ns[late]))
        state = thread.state[find_containing(thread.t_ns, lock_holds) >= 0]
        if 2 * np.count_nonzero(state == _DISK_WAIT) > state.size:
            on_cpu &= ~late
            is_known |= late
    state = np.where(on_cpu, ON_CPU, np.where(is_known, ASLEEP, ANY_THREAD))
    interval_ns = np.maximum(stacks.interval_ns, 0)
    return _Samples(stacks.start_ns, stacks.stack, interval_ns, state)


def _select_rows(samples: _Samples, rows: NDArray[np.bool_]) -> _Samples:
    return _Samples(
        samples.t_ns[rows], samples.stack[rows], samples.interval_ns[rows], samples.state[rows]
    )


def _compute_density(
    process: Process, t_ns: Int, lost: LostTime, row: Int, inside: NDArray[np.bool_]
) -> Float:
    """Compute which part of the time around each sample was lost: float64[n], 0 to 1.

    row: int64[n], the lost interval that began last; inside: bool[n], whether the sample is in it.

    The loss of an interval is spread evenly, unless the host waits for its device in each step. The
    device works during such a wait, and at its end its queue is empty: the loss follows at once.

        steps        |----- wait -----|------------------|     30 of 100 lost
        lost         |                |== 30 ==|         |
    """
    lost_row = np.maximum(row, 0)
    density = np.zeros(t_ns.size)
    length_ns = np.maximum(lost.end_ns - lost.start_ns, 1)
    density[inside] = (lost.lost_ns / length_ns)[lost_row[inside]]
    begin_ns, end_ns = select_device_waits(process)
    if not begin_ns.size:
        return density
    end_ns = np.maximum.accumulate(end_ns)
    latest = np.searchsorted(begin_ns, t_ns, side="right") - 1
    latest_end_ns = end_ns[np.maximum(latest, 0)]
    is_compute = np.isin(lost.phase, (PHASE_COMPUTE, PHASE_NONE))
    in_compute = inside & is_compute[lost_row] if is_compute.size else inside
    (rows,) = is_compute.nonzero()
    edges = np.flatnonzero(np.diff(lost.start_ns[rows] // _GROUP_NS)) + 1
    for group in np.split(rows, edges) if rows.size else ():
        first_ns, last_ns = int(lost.start_ns[group[0]]), int(lost.end_ns[group[-1]])
        low, high = np.searchsorted(end_ns, (first_ns, last_ns)).tolist()
        if 2 * (high - low) < np.unique(lost.step[group]).size:  # steps without a wait
            continue
        gaps = end_ns[low:high], np.append(begin_ns[low + 1 : high], last_ns)
        gaps = gaps[0], np.maximum(*gaps)
        room_ns = measure_overlap(gaps, (lost.start_ns[group], lost.end_ns[group]))
        reach_ns, early_density = _find_reach(room_ns, lost.lost_ns[group], length_ns[group])
        members = in_compute & (t_ns >= first_ns) & (t_ns < last_ns)
        follows = (latest >= low) & (t_ns < latest_end_ns + reach_ns)
        density[members] = np.where(follows, 1.0, early_density)[members]
    density[(latest >= 0) & (t_ns < latest_end_ns)] = 0.0
    return density


def _find_reach(room_ns: Int, lost_ns: Int, length_ns: Int) -> tuple[int, float]:
    """Find for how long the loss lasts after each wait for the device, ns.

    It is equally long after each of them, or until the next wait begins. room_ns: int64[k], the
    time until then. lost_ns, length_ns: int64[n], of the lost intervals. Returns also the part of
    all other time that is lost where there is not enough room, 0 to 1.
    """
    total_ns, all_room_ns = int(lost_ns.sum()), int(room_ns.sum())
    if total_ns >= all_room_ns:
        other_ns = max(int(length_ns.sum()) - all_room_ns, 1)
        return int(room_ns.max(initial=0)) + 1, min((total_ns - all_room_ns) / other_ns, 1.0)
    low, high = 0, int(room_ns.max(initial=0))
    while low < high:  # the smallest length that has room for the loss
        middle = (low + high) // 2
        if int(np.minimum(room_ns, middle).sum()) >= total_ns:
            high = middle
        else:
            low = middle + 1
    return low, 0.0


def merge_stack_sums(*tables: StackSums) -> StackSums:
    """Merge sums by stack: float64[4, n], sorted by stack."""
    joined = np.concatenate(tables, axis=1)
    stacks, inverse = np.unique(joined[0], return_inverse=True)
    sums = [np.bincount(inverse, row, minlength=stacks.size) for row in joined[1:]]
    return np.stack([stacks, *sums])


def list_stacks(sums: StackSums) -> Iterator[tuple[int, float, int, float]]:
    """Yield stack number, ns, number of samples and sum of squares of each stack."""
    for stack, ns, samples, squares in sums.T.tolist():
        yield int(stack), ns, int(samples), squares
