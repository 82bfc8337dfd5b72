"""Sum the utilization of a device over the windows of a segment; this is never lost time.

SM activity of a window is the share of multiprocessors with work, averaged over the
window. Idle time has none, so activity times length is the used part of the device, as
time, and the rest of the busy time was under-used:

    window 100, idle 40, SM activity 0.30      busy 60 = used 30 + under-used 30

Half of the device was used while it was busy, not 0.30 of it. Busy time that counts as
lost already (busy-waiting for a late rank, a lowered clock) is excluded, and so is
suspected busy-waiting. A reading may be older than its window (some drivers are queried
once a second). Sums over a run are not affected, so amounts are summed here and
compared in analysis.findings.utilization.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.attribution.rank.chunk_boundary import get_spans
from clusterprof.analysis.attribution.rank.device_activity import SNAPSHOT_VALID_NS, DeviceWindows
from clusterprof.analysis.timeline.device_sync import (
    measure_device_sync,
    measure_increase_outside_waits,
)
from clusterprof.analysis.timeline.intervals import measure_overlap, merge_intervals
from clusterprof.analysis.timeline.model import Float, Int, Rank
from clusterprof.analysis.timeline.series import compute_column_increase
from clusterprof.probe import layout

Bool = NDArray[np.bool_]
UtilizationSums = dict[tuple[str, int], int]
"""(quantity, level) -> ns, or ns times a unit; level 0 unless it is a histogram."""
BUSY, LOST, WORK, ACTIVE = "busy", "lost", "work", "active"
SM, SM_KNOWN = "sm", "sm_known"
POWER, IDLE_POWER, POWER_LIMIT, POWER_BUSY = "power", "rest", "limit", "power_busy"
HOST = "host"
LEVEL, MEMORY, MEMORY_TOTAL = "level", "memory", "memory_total"
"""Histograms: of SM activity at work in percent, of memory in use in thousandths, of its
size.
"""
NO_SM_ACTIVITY, NO_READING, SUSPECTED_WAIT = "no-sm-activity", "no-reading", "perhaps-waiting"
UNMEASURED = (NO_SM_ACTIVITY, NO_READING, SUSPECTED_WAIT)
MEAN_SIGNALS = {
    "occupancy": "gpu.sm_occupancy_ratio",
    "tensor": "gpu.tensor_active_ratio",
    "dram": "gpu.memory_bandwidth_ratio",
}
"""Other signals averaged over the time at work, where the catalog and the recording have
them.
"""
KNOWN_SUFFIX = "_known"
"""Suffix of these names: for how long the quantity is known."""
_MIN_BUSY_RATIO = 0.5  # below it a window is no evidence of the level of its work
_MAX_VALID_RATIO = 1.05  # a share above it is no valid reading
_WAITS = (
    layout.DATA_WAIT,
    layout.H2D,
    layout.CHECKPOINT,
    layout.EVAL,
    layout.COMPILE,
    layout.GC,
    layout.COLLECTIVE,
)


def sum_utilization(
    rank: Rank, all_windows: DeviceWindows, windows: DeviceWindows, lost_ns: Int, suspected_ns: Int
) -> UtilizationSums:
    """Sum the device utilization over the windows of a segment.

    lost_ns, suspected_ns: int64[n], busy time of each window that is in the ledger of lost
    time, and that is suspected to belong there. all_windows: the windows as sampled; those
    of the segment may be cut at its ends, and have all their busy time inside.
    """
    length = windows.end_ns - windows.start_ns
    busy = length - windows.idle_ns
    lost = np.minimum(lost_ns, busy)
    suspected = np.minimum(suspected_ns, busy - lost)
    work = busy - lost - suspected
    clean = lost + suspected == 0
    readings = _DeviceReadings(rank, windows.end_ns)
    sums = {(BUSY, 0): busy.sum(), (LOST, 0): lost.sum(), (SUSPECTED_WAIT, 0): suspected.sum()}
    sampled_ns = np.maximum(_get_sampled_lengths(all_windows, windows), length)
    ratio = readings.ratio(signals.GPU_SM_ACTIVE.name)
    if ratio is None:
        sums[NO_SM_ACTIVITY, 0] = work.sum()
    else:
        sums |= _sum_activity(ratio, sampled_ns, length, busy, work, clean)
    for signal, name in MEAN_SIGNALS.items():
        mean = readings.ratio(name)
        if mean is not None:
            measured = clean & ~np.isnan(mean)
            sums[signal, 0] = np.rint(mean[measured] * sampled_ns[measured]).sum()
            sums[signal + KNOWN_SUFFIX, 0] = work[measured].sum()
    _sum_power(sums, readings, length, busy, clean)
    _count_memory_levels(sums, readings, length)
    _sum_host_time(sums, rank, windows, clean & (work > 0))
    return {key: int(ns) for key, ns in sums.items() if ns}


class _DeviceReadings:
    """Readings of one rank's device at the ends of windows."""

    def __init__(self, rank: Rank, end_ns: Int) -> None:
        self._series, self._device = rank.chunk.series, rank.device
        self._end_ns = end_ns
        self._rows: tuple[Int, Int, Float] | None = None
        """Times of the readings, the row of each window, and 0 or NaN where there is none."""

    def value(self, name: str) -> Float | None:
        """Return the first reading at the end of each window or soon after it, otherwise NaN.

        A reading describes the time before it. None: the signal was not recorded.
        """
        series = self._series.get((name, self._device))
        if name not in signals.BY_NAME or series is None or not series.t_ns.size:
            return None
        if self._rows is None or self._rows[0] is not series.t_ns:  # mostly those of one collector
            t_ns = series.t_ns
            row = np.minimum(t_ns.searchsorted(self._end_ns, "left"), t_ns.size - 1)
            late = t_ns[row] - self._end_ns
            missing = np.where((late < 0) | (late > SNAPSHOT_VALID_NS), np.nan, 0.0)
            self._rows = t_ns, row, missing
        _, row, missing = self._rows
        return series.values[row] + missing

    def ratio(self, name: str) -> Float | None:
        """Return readings of a share; impossible values become NaN."""
        value = self.value(name)
        if value is None:
            return None
        is_valid = (value >= 0) & (value <= _MAX_VALID_RATIO)  # of NaN neither is true
        return (
            np.minimum(value, 1.0)
            if is_valid.all()
            else np.where(is_valid, np.minimum(value, 1), np.nan)
        )


def _sum_activity(
    ratio: Float, sampled_ns: Int, length: Int, busy: Int, work: Int, clean: Bool
) -> UtilizationSums:
    """Sum SM activity; sampled_ns is the length of each window when it was sampled."""
    is_known = ~np.isnan(ratio)
    active = np.rint(np.nan_to_num(ratio) * sampled_ns).astype(np.int64)
    sums = {
        (NO_READING, 0): work[~is_known].sum(),
        (SM, 0): np.minimum(active, length).sum(),  # 0 where it is not known
        (SM_KNOWN, 0): length[is_known].sum(),
    }
    # Where it busy-waited too, its work is assumed to have been as full as possible.
    active = np.where(clean, active, np.minimum(active, work))
    sums[WORK, 0], sums[ACTIVE, 0] = work[is_known].sum(), active.sum()
    level = clean & is_known & (busy > 0) & (busy >= _MIN_BUSY_RATIO * length)
    percent = np.rint(100 * active[level] / busy[level])
    _count_levels(sums, LEVEL, np.minimum(percent, 100).astype(np.int64), work[level])
    return sums


def _get_sampled_lengths(all_windows: DeviceWindows, windows: DeviceWindows) -> Int:
    """Return the length of each window when it was sampled, before the segment cut it."""
    row = np.searchsorted(all_windows.end_ns, windows.start_ns, side="right")
    return (all_windows.end_ns - all_windows.start_ns)[np.minimum(row, all_windows.end_ns.size - 1)]


def _count_levels(sums: UtilizationSums, signal: str, levels: Int, ns: Int) -> None:
    """Add a histogram of small levels: how long each was seen."""
    if not levels.size:
        return
    low, high = int(levels.min()), int(levels.max())
    if low == high:
        sums[signal, low] = int(ns.sum())
        return
    total = np.bincount(levels, ns)  # whole numbers, far below 2**53
    (nonzero,) = total.nonzero()
    sums.update({(signal, level): int(total[level]) for level in nonzero.tolist()})


def _sum_power(
    sums: UtilizationSums, readings: _DeviceReadings, length: Int, busy: Int, clean: Bool
) -> None:
    """Sum watts times ns of windows at work (idle in part, perhaps) and of idle windows."""
    watts, limit = (
        readings.value(signals.GPU_POWER.name),
        readings.value(signals.GPU_POWER_LIMIT.name),
    )
    if watts is None or limit is None:
        return
    drawn = (watts >= 0) & (limit > 0)
    at_work, at_rest = drawn & clean & (busy > 0), drawn & (busy == 0)
    parts = (POWER, watts, at_work), (IDLE_POWER, watts, at_rest), (POWER_LIMIT, limit, drawn)
    for signal, values, selected in parts:
        sums[signal, 0] = np.rint(values[selected] * length[selected]).sum()
        sums[signal + KNOWN_SUFFIX, 0] = length[selected].sum()
    sums[POWER_BUSY, 0] = busy[at_work].sum()


def _count_memory_levels(sums: UtilizationSums, readings: _DeviceReadings, length: Int) -> None:
    """Sum how long which part of the memory was in use, rounded up to thousandths."""
    used, total = (
        readings.value(signals.GPU_MEMORY_USED.name),
        readings.value(signals.GPU_MEMORY_TOTAL.name),
    )
    if used is None or total is None:
        return
    valid = (used >= 0) & (total > 0) & (used <= total)
    used, total, ns = used[valid], total[valid], length[valid]
    _count_levels(sums, MEMORY, np.ceil(1000 * used / total).astype(np.int64), ns)
    if total.size:
        sums[MEMORY_TOTAL, int(total.max())] = int(ns.sum())


def _sum_host_time(
    sums: UtilizationSums, rank: Rank, windows: DeviceWindows, selected: Bool
) -> None:
    """Sum how long the main thread ran outside marked waits, and the time outside them.

    While it waits for the device it may poll, which is not launching; without marks the two cannot
    be distinguished.
    """
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not rank.marked or not selected.any():
        return
    start, end = windows.start_ns[selected], windows.end_ns[selected]
    ran = compute_column_increase(thread.t_ns, thread.on_cpu_ns, start, end)
    is_known = ~np.isnan(ran)
    waits = [(t.start_ns, t.end_ns) for kind in _WAITS if (t := get_spans(rank, kind)) is not None]
    outside = end - start - (measure_overlap((start, end), merge_intervals(*waits)) if waits else 0)
    outside = np.maximum(outside - measure_device_sync(rank, start, end), 0)
    ran_outside = measure_increase_outside_waits(rank, "on_cpu_ns", start, end)
    ran = np.clip(ran if ran_outside is None else ran_outside, 0, outside)
    sums[HOST, 0] = int(np.rint(ran[is_known]).sum())
    sums[HOST + KNOWN_SUFFIX, 0] = int(np.rint(outside[is_known]).sum())
