"""Detector interface: examine lost time of one rank and claim a share of it, or abstain.

A detector does not word, rank or total anything and does not know other detectors; the claims are
settled by `attribution/`. Its limits are a frozen dataclass with units in the field names; a
profile may change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.timeline.data_wait.fetches import estimate_collection_share
from clusterprof.analysis.timeline.data_wait.split import estimate_prefetch_savings
from clusterprof.analysis.timeline.device_sync import (
    find_drained_rows,
    find_samples_in_waits,
    measure_device_sync,
    measure_increase_outside_waits,
)
from clusterprof.analysis.timeline.intervals import measure_overlap, merge_intervals
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    DataWaitBreakdown,
    Float,
    Int,
    LostTime,
    Rank,
    ThreadTable,
)
from clusterprof.analysis.timeline.series import (
    IntervalPositions,
    compute_growth,
    compute_increase,
    evaluate_increase,
    locate_intervals,
)
from clusterprof.analysis.timeline.spans import HostWorkSpans
from clusterprof.probe import layout
from clusterprof.report.model import UNKNOWN_RESOURCE, Cause, Evidence, Grade, ResourceFacts
from clusterprof.signals import Signal

# Keys of cached results (`Lost.shared`, `Chunk.shared`).
_PRESENT_KEY, _CLAIMED_KEY, _HANDOVERS_KEY, _RUNNABLE_KEY = (
    "present",
    "claimed",
    "handed-over",
    "runnable",
)
_GROWTH_KEY, _COMPUTE_WAIT_KEY, _MAIN_KEY = "growth", "computing", "main thread "
_MIN_FUNCTION_RATIO, _FUNCTION_CHARACTERS = 0.05, 120


@dataclass(frozen=True, slots=True)
class Claims:
    """Shares of lost time that one cause explains."""

    share: Float
    """float64[n], 0 to 1: share of each segment's lost time."""
    grade: Grade
    """Quality of the evidence."""
    evidence: tuple[Evidence, ...] = ()
    """Numbers over this chunk that a reader can check; merged by name over chunks."""
    resource: str = ""
    """The disk, mount or worker responsible, if one stands out."""
    resource_facts: ResourceFacts = UNKNOWN_RESOURCE


class Detector(Protocol):
    """Detector of one cause."""

    @property
    def cause(self) -> Cause:
        """The cause that it claims."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Signal names (or "spans", "threads", "device") without which it must abstain."""
        ...

    @property
    def Limits(self) -> type:  # noqa: N802 - it is a class
        """A frozen dataclass of limits with defaults, units in the names."""
        ...

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Any
    ) -> Claims | None:
        """Claim shares of the lost segments.

        None = cannot tell. `breakdown` has one row per segment.
        """
        ...


# Measurements shared by several detectors. No detector imports another detector.


def select_phases(lost: LostTime, *phases: int) -> NDArray[np.bool_]:
    """Select the segments that lie in one of the phases: bool[n]."""
    present: set[int] | None = lost.shared.get(_PRESENT_KEY)
    if present is None:
        present = lost.shared[_PRESENT_KEY] = set(np.flatnonzero(np.bincount(lost.phase)).tolist())
    selected = np.zeros(lost.phase.size, np.bool_)
    for phase in present.intersection(phases):  # most causes did not occur
        selected |= lost.phase == phase
    return selected


def limit_to_data_wait(lost: LostTime, share: Float) -> Float:
    """Limit a share, float64[n], to segments in a data wait; 0 elsewhere."""
    return _limit_to_phases(lost, share, PHASE_DATA_WAIT)


def limit_to_reads(lost: LostTime, share: Float) -> Float:
    """Limit a share, float64[n], to segments in a data wait or a step.

    In a step the main thread itself reads, or waits for a process of the job that does.
    """
    return _limit_to_phases(lost, share, PHASE_DATA_WAIT, PHASE_COMPUTE)


def _limit_to_phases(lost: LostTime, share: Float, *phases: int) -> Float:
    if not share.any():
        return np.zeros(lost.start_ns.size)
    in_wait = select_phases(lost, *phases)
    return np.where(in_wait, np.minimum(np.maximum(share, 0.0), 1.0), 0.0)


def sum_claimed_ns(lost: LostTime, share: Float | NDArray[np.bool_]) -> float:
    """Sum the lost time of which a share is claimed, ns; share: float64[n] or bool[n].

    Not as a product of vectors: OpenBLAS spreads a long one over threads, which busy-wait.
    """
    return float((share * lost.lost_ns).sum())


def compute_claimed_mean(lost: LostTime, share: Float, values: Float | None = None) -> float:
    """Compute the mean of values (default: of the share itself) over the claimed lost time.

    share, values: float64[n]. 0.0 if nothing is claimed; unknown values (NaN) have no weight.
    """
    values = share if values is None else values
    unknown = np.isnan(values)
    weight = np.where(unknown | (share <= 0), 0.0, lost.lost_ns)
    total = float(weight.sum())
    if total <= 0:
        return 0.0
    terms = np.nan_to_num(values) if unknown.any() else values
    return float(np.sum(weight * terms) / total)


def measure_claimed_growth(
    rank: Rank, name: str, device: str, lost: LostTime, share: Float
) -> float | None:
    """Measure by how much a counter rose over the claimed segments.

    None if it was not recorded.

    share: float64[n]; segments with a share above 0 count.
    """
    series = rank.chunk.series.get((name, device))
    if series is None:
        return None
    claimed = _find_claimed_segments(lost, share)
    if not claimed.start_ns.size:
        return 0.0
    growth = rank.chunk.shared.get((_GROWTH_KEY, name, device))
    if growth is None:
        growth = rank.chunk.shared[_GROWTH_KEY, name, device] = compute_growth(series.values)
    increase = evaluate_increase(growth, claimed.locate(series.t_ns))
    total = float(increase.sum())
    return total if total == total else float(np.nansum(increase))


class _ClaimedSegments:
    """Segments of which a share is claimed, and their positions among readings."""

    def __init__(self, lost: LostTime, share: Float) -> None:
        rows = np.flatnonzero(share > 0)
        self.share = share
        self.start_ns, self.end_ns = lost.start_ns[rows], lost.end_ns[rows]
        self._t_ns: Int | None = None
        self._located: IntervalPositions | None = None

    def locate(self, t_ns: Int) -> IntervalPositions:
        """Locate the segments among reading times.

        The counters of one collector share their times.
        """
        if self._located is None or self._t_ns is not t_ns:
            self._t_ns, self._located = t_ns, locate_intervals(t_ns, self.start_ns, self.end_ns)
        return self._located


def _find_claimed_segments(lost: LostTime, share: Float) -> _ClaimedSegments:
    """Return the claimed segments.

    Cached, because a detector measures several counters for one share.
    """
    claimed: _ClaimedSegments | None = lost.shared.get(_CLAIMED_KEY)
    if claimed is None or claimed.share is not share:
        claimed = lost.shared[_CLAIMED_KEY] = _ClaimedSegments(lost, share)
    return claimed


def measure_pressure(
    rank: Rank, signal: Signal, lost: LostTime, share: Float, note: str
) -> tuple[Grade, tuple[Evidence, ...]]:
    """Measure the node's stall time during the claimed segments, and derive the grade from it.

    share: float64[n]. Grade A if the kernel counted stalls too; B, without evidence, if it has no
    pressure figures.
    """
    pressure_ns = measure_claimed_growth(rank, signal.name, "", lost, share)
    length_ns = float(np.sum((lost.end_ns - lost.start_ns)[share > 0]))
    if pressure_ns is None or length_ns <= 0:
        return "B", ()
    name = signal.name.replace("_ns_total", "_ratio")
    ratio = min(1.0, pressure_ns / length_ns)
    return "A" if pressure_ns > 0 else "B", (Evidence(name, ratio, "ratio", note),)


def find_busiest_device(rank: Rank, name: str, lost: LostTime, share: Float) -> tuple[str, float]:
    """Find the device whose counter rose most over the claimed segments, and its growth.

    share: float64[n]. ("", 0.0) if no counter rose.
    """
    busiest = ("", 0.0)
    for device in sorted(device for signal, device in rank.chunk.series if signal == name):
        values = rank.chunk.series[(name, device)].values
        if values.size and values[0] != values[-1]:  # most disks of a node are idle
            amount = measure_claimed_growth(rank, name, device, lost, share) or 0.0
            if amount > busiest[1]:
                busiest = (device, amount)
    return busiest


def describe_allowed_cpus(allowed: int, cores: int, online: int) -> Evidence:
    """Describe how many CPUs affinity and cpuset allow, and how many cores those are."""
    core_note = "" if cores == allowed else f" ({cores} cores)"
    note = f"of {online} CPUs{core_note} are allowed by affinity or cpuset"
    return Evidence("job.cpus_allowed_count", float(allowed), "count", note)


def measure_main_thread(rank: Rank, column: str, lost: LostTime, rows: NDArray[np.bool_]) -> Float:
    """Measure the share of each selected segment by which a main-thread counter rose.

    Returns float64[n]. column: "on_cpu_ns" or "run_delay_ns". rows: bool[n]. NaN where not selected
    or unknown. What it rose by in marked waits for the device does not count.
    """
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not rows.any():
        return np.full(lost.start_ns.size, np.nan)
    ratio = lost.shared.get(_MAIN_KEY + column)
    if ratio is None:
        positions = lost.shared.get(_MAIN_KEY)
        if positions is None:
            positions = locate_intervals(thread.t_ns, lost.start_ns, lost.end_ns)
            lost.shared[_MAIN_KEY] = positions
        ratio = evaluate_increase(compute_growth(getattr(thread, column)), positions)
        outside_ns = measure_increase_outside_waits(rank, column, lost.start_ns, lost.end_ns)
        if outside_ns is not None:
            ratio = np.where(np.isnan(ratio), np.nan, outside_ns)
        ratio = np.clip(ratio / np.maximum(lost.end_ns - lost.start_ns, 1), 0.0, 1.0)
        lost.shared[_MAIN_KEY + column] = ratio
    return np.where(rows, ratio, np.nan)


def measure_throttling(rank: Rank, lost: LostTime, rows: NDArray[np.bool_]) -> Float:
    """Measure the share of each selected segment without CPU quota left: float64[n].

    0 if unknown. rows: bool[n]. The kernel sums the time over CPUs, so the share is capped at 1.
    """
    out = np.zeros(lost.start_ns.size)
    series = rank.chunk.series.get((signals.CGROUP_THROTTLED.name, ""))
    if series is None or not rows.any():
        return out
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    growth = compute_increase(series, start, end) / np.maximum(end - start, 1)
    out[rows] = np.clip(np.nan_to_num(growth), 0.0, 1.0)
    return out


def estimate_compute_wait(
    rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown
) -> tuple[Float, Float]:
    """Estimate the share of each segment in which the awaited batch was being computed.

    float64[n] each, without collections of garbage. The second array is the part of it that a
    larger prefetch would have avoided (`analysis.timeline.data_wait.split`).
    """
    cached = lost.shared.get(_COMPUTE_WAIT_KEY)
    if cached is None or cached[0] is not breakdown:
        collecting = estimate_collection_share(rank, lost.start_ns, lost.end_ns, breakdown)
        share = limit_to_reads(lost, breakdown.user_cpu - collecting)
        avoidable = np.zeros(share.size)
        # No worker can do ahead of time what the training thread itself does in a wait.
        rows = np.flatnonzero((share > 0) & (breakdown.worker_pid != rank.pid))
        if rows.size and rank.workers:
            avoidable[rows] = share[rows] * estimate_prefetch_savings(rank, lost.end_ns[rows])
        cached = lost.shared[_COMPUTE_WAIT_KEY] = breakdown, (share, avoidable)
    return cached[1]  # type: ignore[no-any-return]


def estimate_handover_delay(
    rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, column: str
) -> Float:
    """Estimate the share of each segment in which a busy worker delayed a finished batch.

    Returns float64[n]. A worker sends a batch through a separate thread that needs the worker's
    interpreter. What the worker's main thread did meanwhile (`column`: "user_ns" or "run_delay_ns")
    delays the batch.
    """
    out = np.zeros(lost.start_ns.size)
    late, by_worker = _find_handovers(rank, lost, breakdown)
    for rows, thread, length, positions in by_worker:
        growth = evaluate_increase(compute_growth(getattr(thread, column)), positions)
        out[rows] = late[rows] * np.clip(np.nan_to_num(growth) / length, 0.0, 1.0)
    return out


_WorkerHandovers = tuple[Int, ThreadTable, Float, IntervalPositions]


def _find_handovers(
    rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown
) -> tuple[Float, list[_WorkerHandovers]]:
    """Find the share of each segment in which its batch was in transfer, and handovers.

    By worker: rows, main thread, length of the transfer, its positions among the thread's samples.
    """
    cached = lost.shared.get(_HANDOVERS_KEY)
    if cached is not None and cached[0] is breakdown:
        return cached[1]  # type: ignore[no-any-return]
    delivery_share = limit_to_data_wait(lost, breakdown.delivery)
    delivery_rows = np.flatnonzero(delivery_share > 0)
    owner = breakdown.worker_pid[delivery_rows]
    by_worker: list[_WorkerHandovers] = []
    for pid in sorted(set(owner.tolist())):
        process = rank.chunk.processes.get(pid)
        thread = None if process is None else process.threads.get(pid)
        if thread is None or pid == rank.pid:
            continue
        rows = delivery_rows[owner == pid]
        end = lost.end_ns[rows]
        length = np.maximum(delivery_share[rows] * (end - lost.start_ns[rows]), 1.0)
        positions = locate_intervals(thread.t_ns, end - length.astype(np.int64), end)
        by_worker.append((rows, thread, length, positions))
    lost.shared[_HANDOVERS_KEY] = breakdown, (delivery_share, by_worker)
    return delivery_share, by_worker


def measure_runnable(rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown) -> Float:
    """Measure the share of each segment in which the critical thread had no CPU: float64[n].

    In a data wait that is the thread making the batch, inside a step the main thread.
    """
    cached = lost.shared.get(_RUNNABLE_KEY)
    if cached is not None and cached[0] is breakdown:
        return cached[1]  # type: ignore[no-any-return]
    delay = limit_to_data_wait(lost, breakdown.runnable) + estimate_handover_delay(
        rank, lost, breakdown, "run_delay_ns"
    )
    inside = select_phases(lost, PHASE_COMPUTE)
    if inside.any():
        main_delay = measure_main_thread(rank, "run_delay_ns", lost, inside)
        in_step = np.minimum(np.nan_to_num(main_delay) + breakdown.runnable, 1.0)
        delay = np.where(inside, in_step, delay)
    lost.shared[_RUNNABLE_KEY] = breakdown, delay
    return delay


_POLL_WCHANS = ("poll_schedule", "do_poll", "ep_poll", "do_select")
"""Parts of the names of kernel functions in which a thread waits for any of several files."""
_DEVICE_SPANS = (
    layout.EXPOSED,
    layout.EXPOSED_COLLECTIVE,
    layout.EXPOSED_COPY,
    layout.H2D,
    layout.SYNC,
    layout.STARVED,
)
"""Kinds of spans that need a hook on the device."""


def is_poll(name: str) -> bool:
    """Return whether a kernel function waits for any of several files, sockets or devices."""
    return any(wchan in name for wchan in _POLL_WCHANS)


def may_wait_in_driver(rank: Rank) -> bool:
    """Return whether sleep in `poll` may be an unmarked wait for the rank's device.

    A driver waits for its device, or for a copy, in `poll` on a device file.
    """
    return bool(rank.device) and not any(kind in rank.main.spans for kind in _DEVICE_SPANS)


def find_certain_idle_time(asleep_ns: Float, busy_ns: Float) -> Float:
    """Return for how long the device must have been idle while the host slept: float64[n], ns.

    In one segment sleep can exceed the busy time by chance. So all segments with such sleep count
    together: a host that sleeps only while its device works slept no longer than it was busy.
    """
    asleep = asleep_ns > 0
    beyond_ns = np.maximum(asleep_ns - busy_ns, 0.0)
    most_ns = float(beyond_ns.sum())
    in_all_ns = max(float((asleep_ns - busy_ns)[asleep].sum()), 0.0)
    return beyond_ns * (in_all_ns / most_ns) if most_ns > 0 else beyond_ns


_SLEEP_STATES = (ord("S"), ord("D"))
_MOVE_WINDOW_NS = 1_000_000_000


_MIN_SLEEP_SAMPLES = 16
"""Fewer samples do not show where a thread sleeps."""


def measure_sleep(rank: Rank, lost: LostTime, rows: NDArray[np.bool_]) -> Float:
    """Measure how long the main thread was neither on a CPU nor runnable.

    Returns float64[n], ns; 0 unknown. Marked waits for the device do not count. rows: bool[n], the
    segments to measure.
    """
    length = (lost.end_ns - lost.start_ns).astype(np.float64)
    active = measure_main_thread(rank, "on_cpu_ns", lost, rows) + np.nan_to_num(
        measure_main_thread(rank, "run_delay_ns", lost, rows)
    )
    asleep = np.clip(1.0 - active, 0.0, 1.0) * length - measure_device_sync(
        rank, lost.start_ns, lost.end_ns
    )
    asleep = np.where(rows & ~np.isnan(active), np.maximum(asleep, 0.0), 0.0)
    return _move_sleep_after_waits(rank, lost, rows, asleep)


def find_drained_segments(rank: Rank, lost: LostTime) -> NDArray[np.bool_]:
    """Find the segments of steps that follow a marked wait for the device: bool[n]."""
    in_compute = select_phases(lost, PHASE_COMPUTE)
    return find_drained_rows(rank.main, lost.start_ns, lost.end_ns, in_compute)


def _move_sleep_after_waits(
    rank: Rank, lost: LostTime, rows: NDArray[np.bool_], asleep_ns: Float
) -> Float:
    """Divide the sleep between segments after waits for the device and others as samples do.

    Counters are read too rarely to show on which side of such a wait the thread slept; many samples
    of its state together do. rows: bool[n]. asleep_ns: float64[n]. Returns float64[n], ns.
    """
    drained = rows & find_drained_segments(rank, lost)
    if not drained.any() or not (rows & ~drained).any():
        return asleep_ns
    count = int(select_sleep_samples(rank, lost, rows).sum())
    if count < _MIN_SLEEP_SAMPLES:
        return asleep_ns
    ratio = int(select_sleep_samples(rank, lost, drained).sum()) / count
    length_ns = (lost.end_ns - lost.start_ns).astype(np.float64)
    out = asleep_ns.copy()
    for side, part in ((drained, ratio), (rows & ~drained, 1.0 - ratio)):
        wanted_ns, now_ns = part * float(asleep_ns.sum()), float(asleep_ns[side].sum())
        out[side] *= wanted_ns / max(now_ns, 1.0)
    return np.minimum(out, length_ns)


def measure_host_work(rank: Rank, lost: LostTime, *activities: int) -> Float:
    """Measure the share of each segment's lost time that the host spent in given activities.

    Returns float64[n], 0 without `host_work` spans. activities: `probe.layout.WARMING_UP` and
    others. Only time inside steps counts that no other wait explains.
    """
    share = np.zeros(lost.start_ns.size)
    work = rank.main.get_spans(HostWorkSpans)
    if work is None:
        return share
    rows = np.isin(work.activity, activities)
    inside = select_phases(lost, PHASE_COMPUTE)
    if not rows.any() or not inside.any():
        return share
    times = merge_intervals((work.start_ns[rows], work.end_ns[rows]))
    covered_ns = measure_overlap((lost.start_ns[inside], lost.end_ns[inside]), times)
    share[inside] = np.minimum(covered_ns / np.maximum(lost.lost_ns[inside], 1), 1.0)
    return share


def name_host_functions(
    rank: Rank, lost: LostTime, share: Float, *activities: int
) -> tuple[Evidence, ...]:
    """Name the two functions in which the host spent most of the claimed time.

    share: float64[n]. Empty where no function is known.
    """
    total_ns = max(float((share * lost.lost_ns).sum()), 1.0)
    return tuple(
        Evidence(
            f"host.function{number}_ratio",
            min(1.0, float(covered_ns.sum()) / total_ns),
            "ratio",
            f"of that time the host was in {name}",
        )
        for number, (name, covered_ns) in enumerate(
            list_host_functions(rank, lost, share > 0, *activities), 1
        )
        if float(covered_ns.sum()) >= _MIN_FUNCTION_RATIO * total_ns
    )


def list_host_functions(
    rank: Rank, lost: LostTime, selected: NDArray[np.bool_], *activities: int, count: int = 2
) -> list[tuple[str, Int]]:
    """List the functions in which the host spent most of the selected lost intervals.

    selected: bool[n]. count: how many at most. Returns the name of each and its time in the
    selected intervals, int64[n], ns.
    """
    names = rank.main.registration.get("host_functions")
    work = rank.main.get_spans(HostWorkSpans)
    if work is None or not isinstance(names, (list, tuple)) or not selected.any():
        return []
    rows = np.isin(work.activity, activities) & (work.function >= 0)
    rows &= work.function < len(names)
    times, function = (work.start_ns[rows], work.end_ns[rows]), work.function[rows]
    segments = merge_intervals((lost.start_ns[selected], lost.end_ns[selected]))
    amount_ns = np.bincount(function, measure_overlap(times, segments), minlength=len(names))
    functions = []
    for row in np.argsort(-amount_ns, kind="stable")[:count].tolist():
        calls = merge_intervals((times[0][function == row], times[1][function == row]))
        covered_ns = measure_overlap((lost.start_ns, lost.end_ns), calls)
        functions.append((str(names[row])[:_FUNCTION_CHARACTERS], covered_ns * selected))
    return [(name, ns) for name, ns in functions if ns.any()]


def compute_sleep_ratios(
    rank: Rank, lost: LostTime, rows: NDArray[np.bool_], selected: NDArray[np.bool_]
) -> Float:
    """Compute which part of each segment's sleep was in the selected samples: float64[n].

    A segment without a sample gets the part of all segments together. rows: bool[n].
    selected: bool[samples] of the main thread.
    """
    thread = rank.main.threads[rank.pid]
    asleep = select_sleep_samples(rank, lost, rows)
    row = np.searchsorted(lost.start_ns, thread.t_ns[asleep], side="right") - 1
    count = np.bincount(row, minlength=lost.start_ns.size)
    matching = np.bincount(row, selected[asleep], minlength=lost.start_ns.size)
    total = float(matching.sum()) / max(int(count.sum()), 1)
    ratios = np.where(count > 0, matching / np.maximum(count, 1), total)
    return np.where(rows, ratios, 0.0)


def select_sleep_samples(rank: Rank, lost: LostTime, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Select the samples of the main thread that show where it slept in the chosen segments.

    rows: bool[n]. Returns bool[samples]. Samples in marked waits for the device are left out, and
    so are samples without a wchan: the thread woke while it was being read.
    """
    thread = rank.main.threads[rank.pid]
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    row = np.searchsorted(start, thread.t_ns, side="right") - 1
    inside = row >= 0
    inside[inside] = thread.t_ns[inside] < end[row[inside]]
    asleep = inside & np.isin(thread.state, _SLEEP_STATES) & (thread.wchan >= 0)
    return asleep & ~find_samples_in_waits(rank.main, thread.t_ns)


def compute_sample_ratio(samples: NDArray[np.bool_], selected: NDArray[np.bool_]) -> float:
    """Compute the share of samples that are selected.

    0.0 if there are no samples. bool[n] each.
    """
    count = int(samples.sum())
    return float((samples & selected).sum()) / count if count else 0.0


def limit_to_lost_time(room_ns: Float, lost: LostTime, rows: NDArray[np.bool_]) -> Float:
    """Limit an amount in each segment to the time that it and nearby segments lost.

    Returns float64[n], ns. room_ns: float64[n]. rows: bool[n]. Devices and threads are sampled ten
    times a second and not at the same instants. What exceeds one segment goes to other selected
    segments of that second:

        amount  60  20   0   10        three segments of one second, one of the next
        lost    30  30  40  100
        limited 30  26  24   10        30 too many, room for 10 and 40: three fifths of both
    """
    fits_ns = np.minimum(room_ns, lost.lost_ns)
    second = lost.start_ns // _MOVE_WINDOW_NS
    second = second - second.min(initial=0)
    excess = np.bincount(second, weights=room_ns - fits_ns)
    free_ns = np.where(rows, lost.lost_ns - fits_ns, 0.0)
    room = np.bincount(second, weights=free_ns)
    ratio = np.minimum(1.0, excess / np.maximum(room, 1.0))
    return fits_ns + free_ns * ratio[second]
