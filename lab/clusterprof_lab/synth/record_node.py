"""The node's own counters: CPUs, pressure, memory, the job's cgroup."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.errors import Unavailable
from clusterprof.signals import Signal
from clusterprof_lab.synth.activity_counters import ROW
from clusterprof_lab.synth.interval_sums import limit_growth, merge_intervals, sum_amounts
from clusterprof_lab.synth.recorder_view import RecorderView

Int = NDArray[np.int64]
Float = NDArray[np.float64]

JIFFY_NS = 10_000_000
PAGE_BYTES = 4096
PERIOD_NS = 100_000_000  # of a CPU quota
MEMORY_BYTES = 512 << 30
_NO_QUOTA = Unavailable("absent", "no CPU quota is set", "")
_NO_LIMIT = Unavailable("absent", "no memory limit is set", "")


@dataclass
class Column:
    """One signal of one device at the ticks of its collector."""

    signal: Signal
    device: str
    values: Float
    why: Unavailable | None = None
    """Why there is none."""


def round_to_unit(values: Float, unit: int) -> Float:
    """Return counters as a file shows them that counts whole units."""
    return np.floor((values + 0.5) / unit) * unit


def make_cpu_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """/proc/stat, all cores together."""
    times = _make_cpu_times(sight, sight.sum_threads(ticks), "all", sight.node.cpus, ticks)
    states = np.array([place.state for place in sight.codes.places] or [""])
    doing = sight.doing[:, ticks]
    runs = ((states[doing] == "R") & (doing >= 0)).sum(axis=0)
    waits = _compute_io_waits(sight)
    blocked = ((doing >= 0) & waits[doing]).sum(axis=0)
    for signal, now in ((signals.CPU_RUNNABLE, runs + 1), (signals.CPU_BLOCKED, blocked)):
        times.append(
            Column(signal, "", sight.get_story_gauge(signal.name, "", ticks, now.astype(float)))
        )
    return times


def make_core_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """/proc/stat, core by core: each thread has one of its own as long as there are any."""
    count = sight.node.cpus
    columns = []
    for core in range(count):
        sums = sight.grown[core::count][:, :, ticks].sum(axis=0)
        columns += _make_cpu_times(sight, sums, str(core), 1, ticks)
    return columns


def _make_cpu_times(
    sight: RecorderView, sums: Float, device: str, cpus: int, ticks: Int
) -> list[Column]:
    t_ns = sight.t_ns[ticks]
    share = 1.0 if device == "all" else 1.0 / sight.node.cpus
    times = []
    rest = cpus * (t_ns - sight.start_ns).astype(float)
    for signal, name in (
        (signals.CPU_USER, "user"),
        (signals.CPU_SYSTEM, "system"),
        (signals.CPU_IOWAIT, "iowait"),
        (signals.CPU_STEAL, ""),
    ):
        spent = sums[ROW[name]] if name else np.zeros(len(ticks))
        spent = spent + share * sight.compute_story_growth(signal.name, "all", ticks)
        rest = rest - (spent - spent[0])
        times.append((signal, spent))
    times.insert(2, (signals.CPU_IDLE, np.maximum.accumulate(np.maximum(rest, 0.0))))
    return [
        Column(signal, device, round_to_unit(sight.draw_initial_value(JIFFY_NS) + spent, JIFFY_NS))
        for signal, spent in times
    ]


def _compute_io_waits(sight: RecorderView) -> NDArray[np.bool_]:
    return np.array(["iowait" in place.counts for place in sight.codes.places] or [False])


def make_pressure_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """/proc/pressure and that of the job's cgroup."""
    columns = []
    own = len(sight.tracks)
    for device, grown in (("", sight.grown), ("cgroup", sight.grown[:own])):
        of = grown[:, :, ticks]
        for signal, name in (
            (signals.PRESSURE_CPU_SOME, "delay"),
            (signals.PRESSURE_IO_SOME, "iowait"),
            (signals.PRESSURE_IO_FULL, "iowait"),
            (signals.PRESSURE_MEMORY_SOME, "memory"),
            (signals.PRESSURE_MEMORY_FULL, "memory"),
        ):
            stalled = _average_stall(of[:, ROW[name]], of[:, ROW["not_idle"]], sight.t_ns[ticks])
            stalled = stalled + sight.compute_story_growth(signal.name, device, ticks)
            total = limit_growth(stalled, sight.t_ns[ticks])
            columns.append(
                Column(signal, device, round_to_unit(sight.draw_initial_value(1000) + total, 1000))
            )
    return columns


def _average_stall(stall_ns: Float, not_idle_ns: Float, t_ns: Int) -> Float:
    """The kernel's mean over CPUs, weighted by how long each was not idle; a thread is a CPU.

    https://www.kernel.org/doc/html/latest/accounting/psi.html and kernel/sched/psi.c
    """
    stall, busy = np.diff(stall_ns, axis=1), np.diff(not_idle_ns, axis=1)
    stall = np.minimum(stall, np.diff(t_ns))
    busy = np.maximum(busy, stall)  # a wait for a CPU is booked when it ends
    weight = busy.sum(axis=0)
    mean: Float = np.divide((stall * busy).sum(axis=0), weight, where=weight > 0, out=0 * weight)
    return np.concatenate([[0.0], np.cumsum(mean)])


def make_recorder_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """What recording cost: `self.*` as the loop knows it."""
    kept = np.zeros(len(sight.t_ns), np.bool_)
    kept[sight.kept] = True
    taken = np.cumsum(kept)[ticks]
    late = np.cumsum(np.where(kept, sight.late_ns, 0))[ticks]
    return [
        Column(signals.SELF_CPU, "recorder", (250e6 + 800e3 * taken).astype(float)),
        Column(signals.SELF_RSS, "recorder", np.full(len(ticks), float(22 << 20))),
        Column(signals.SELF_LATE, "", late.astype(float)),
        Column(signals.SELF_TICKS_MISSED, "", np.cumsum(~kept)[ticks].astype(float)),
    ]


def make_memory_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """/proc/meminfo, /proc/vmstat, and the NUMA nodes' numastat."""
    sums = sight.sum_threads(ticks)
    scanned = _sum_bytes(sight, "memory", ("reclaim", ""), ticks) / PAGE_BYTES
    again = _sum_bytes(sight, "block-io", ("again",), ticks) / PAGE_BYTES
    columns = [
        Column(
            signal,
            "",
            round_to_unit(sight.get_story_gauge(signal.name, "", ticks, otherwise), PAGE_BYTES),
        )
        for signal, otherwise in (
            (signals.MEMORY_AVAILABLE, 0.75 * MEMORY_BYTES),
            (signals.MEMORY_CACHED, 0.25 * MEMORY_BYTES),
            (signals.MEMORY_SWAP_FREE, 0.0),
            (signals.MEMORY_DIRTY, 64 << 20),
            (signals.MEMORY_WRITEBACK, 0.0),
        )
    ]
    none = np.zeros(len(ticks))
    for signal, device, grown, unit in (
        (signals.MEMORY_MAJOR_FAULTS, "", sums[ROW["faults"]], 1),
        (signals.MEMORY_SWAP_IN, "", sums[ROW["swap_in"]], PAGE_BYTES),
        (signals.MEMORY_SWAP_OUT, "", none, PAGE_BYTES),
        (signals.MEMORY_RECLAIM_DIRECT, "", scanned, 1),
        (signals.MEMORY_REFAULTS, "", again, 1),
        (signals.MEMORY_OOM_KILLS, "", none, 1),
        (signals.MEMORY_NUMA_MISSES, "node0", none, 1),
    ):
        total = grown + sight.compute_story_growth(signal.name, device, ticks)
        base = 0 if signal is signals.MEMORY_OOM_KILLS else sight.draw_initial_value(unit)
        columns.append(Column(signal, device, round_to_unit(base + total, unit)))
    return columns


def _sum_bytes(sight: RecorderView, doing: str, what: tuple[str, ...], ticks: Int) -> Float:
    """Bytes of acts of some kinds."""
    codes = [code for key, code in sight.codes.of.items() if key[0] == doing and key[1] in what]
    total = np.zeros(len(ticks))
    for track in sight.everybody if codes else ():
        of = np.isin(track.code, codes)
        spans = track.start_ns[of], track.end_ns[of]
        total += sum_amounts(*spans, track.bytes[of], sight.t_ns[ticks])
    return total


def make_cgroup_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """cpu.stat, cpu.max, memory.* of the job's cgroup."""
    sums = sight.sum_threads(ticks, own=True)
    throttled = sums[ROW["throttled"]] + sight.compute_story_growth(
        signals.CGROUP_THROTTLED.name, "", ticks
    )
    periods, ran_out = _count_quota_periods(sight, ticks)
    quota = sight.get_story_values(signals.CGROUP_QUOTA.name, "")
    limited = bool(quota) or bool(throttled.any())
    cpus = (
        float(
            np.ceil((sums[ROW["user"]] + sums[ROW["system"]])[-1] / (sight.end_ns - sight.start_ns))
        )
        or 1.0
    )
    high = _count_high_events(sight, ticks)
    limit = sight.get_story_values(signals.CGROUP_MEMORY_LIMIT.name, "")
    used = sums[ROW["user"]] + sums[ROW["system"]]

    def counter(signal: Signal, grown: Float, unit: int = 1) -> Column:
        base = sight.draw_initial_value(1000 * unit) if unit > 1 else 0
        return Column(signal, "", round_to_unit(base + grown, unit))

    def gauge(signal: Signal, otherwise: float) -> Column:
        return Column(signal, "", sight.get_story_gauge(signal.name, "", ticks, otherwise))

    columns = [
        counter(
            signals.CGROUP_CPU,
            used + sight.compute_story_growth(signals.CGROUP_CPU.name, "", ticks),
            1000,
        ),
        counter(signals.CGROUP_PERIODS, periods if limited else 0 * periods),
        counter(signals.CGROUP_THROTTLED_PERIODS, ran_out),
        counter(signals.CGROUP_THROTTLED, throttled, 1000),
        gauge(signals.CGROUP_QUOTA, cpus),
        gauge(signals.CGROUP_MEMORY, float(40 << 30)),
        gauge(signals.CGROUP_MEMORY_LIMIT, 0.0),
        counter(signals.CGROUP_MEMORY_HIGH, high),
        counter(
            signals.CGROUP_OOM_KILLS,
            sight.compute_story_growth(signals.CGROUP_OOM_KILLS.name, "", ticks),
        ),
    ]
    columns[4].why = None if limited else _NO_QUOTA
    columns[6].why = None if limit else _NO_LIMIT
    return columns


def _count_quota_periods(sight: RecorderView, ticks: Int) -> tuple[Float, Float]:
    """Quota periods that had begun, and those in which the quota ran out."""
    t_ns = sight.t_ns[ticks]
    begun = np.floor((t_ns - sight.start_ns) / PERIOD_NS)
    codes = [code for key, code in sight.codes.of.items() if key[0] == "throttled"]
    starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for track in sight.tracks if codes else ():
        of = np.isin(track.code, codes)
        starts.append(track.start_ns[of])
        ends.append(track.end_ns[of])
    start, _ = merge_intervals(np.concatenate(starts), np.concatenate(ends))
    _, at = np.unique((start - sight.start_ns) // PERIOD_NS, return_index=True)
    ran_out = np.searchsorted(start[at], t_ns, side="right").astype(float)
    injected = sight.compute_story_growth(signals.CGROUP_THROTTLED_PERIODS.name, "", ticks)
    return begun + sight.compute_story_growth(
        signals.CGROUP_PERIODS.name, "", ticks
    ), ran_out + injected


def _count_high_events(sight: RecorderView, ticks: Int) -> Float:
    codes = [code for key, code in sight.codes.of.items() if key == ("memory", "")]
    t_ns = sight.t_ns[ticks]
    total = sight.compute_story_growth(signals.CGROUP_MEMORY_HIGH.name, "", ticks)
    for track in sight.tracks if codes else ():
        of = np.isin(track.code, codes)
        before = np.concatenate([[0], np.cumsum(np.maximum(track.operations[of], 1))])
        total = total + before[np.searchsorted(track.start_ns[of], t_ns, side="right")]
    return total
