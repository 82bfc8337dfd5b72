"""Estimate the host activity of a rank without probe during the idle time of its device.

    main thread on a CPU, ready to run, blocked      counters and samples of the thread
    other threads of the training process            likewise: one may hold the lock
    copies to the device                             bytes on its bus, at copy rate
    saving a model                                   idle windows with much written

The estimates are those of analysis.attribution.rank.host_activity.

It also estimates from sums which part of device idle time coincided with a host activity.

A window between two samples shows how long the device was idle and how long a thread
ran, but not whether both coincided. Many windows do. The thread is active for the same
part of busy time in all of them, and its activity beyond that coincided with idle time:

    of 100 ms   idle    0   40   20    0
    on a CPU           10   46   28   10     10 % while busy: 10, 6, 8, 10
    beyond              0   40   20    0     all of the idle time

Each window bounds the result from above and below: with 90 ms on a CPU and 40 ms idle,
at most 10 ms of the idle time do not coincide. Shares are computed per segment of
SEGMENT_NS, in which the errors of single windows cancel, because
an idle interval often extends over two windows.
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.attribution.rank.device_activity import (
    DeviceWindows,
    build_device_windows,
    trim_windows,
)
from clusterprof.analysis.timeline.data_wait.blocked import ReadContext
from clusterprof.analysis.timeline.data_wait.fetches import READING_NS_PER_BYTE
from clusterprof.analysis.timeline.data_wait.samples import ThreadWindows, measure_thread_windows
from clusterprof.analysis.timeline.model import (
    PHASE_NONE,
    Float,
    Int,
    LostTime,
    Process,
    Rank,
    ThreadTable,
)
from clusterprof.analysis.timeline.series import (
    compute_differences,
    compute_growth,
    evaluate_increase,
    locate_intervals,
)

SEGMENT_NS = 2_000_000_000
"""Length of a segment for which one share is computed, ns."""
MIN_WINDOWS = 8
_MIN_IDLE_SPREAD = 0.05
"""Standard deviation of the idle ratio below which windows are too similar to fit a busy
rate.
"""
_WINDOWS_PER_SAMPLE = 5
"""Windows evaluated as one where a thread state is sampled: one sample describes its
window poorly.
"""


def estimate_idle_share(active_ns: Float, idle_ns: Int, window_ns: Int, start_ns: Int) -> Float:
    """Estimate which part of each window's idle time coincided with a counted activity.

    active_ns: float64[n], exact per window, NaN = not known. idle_ns, window_ns, start_ns:
    int64[n].
    Returns float64[n], 0 to 1. If windows are too similar, the activity is assumed to be as
    frequent in idle time as in busy time.
    """
    is_known = ~np.isnan(active_ns)
    active, idle = (
        np.where(is_known, active_ns, 0.0),
        np.where(is_known, idle_ns, 0).astype(np.float64),
    )
    busy = np.where(is_known, window_ns, 0) - idle
    rate = _estimate_rate(active, busy, idle)
    lower_ns, upper_ns = np.maximum(active - busy, 0.0), np.minimum(active, idle)
    return _compute_segment_shares(active - rate * busy, lower_ns, upper_ns, idle, start_ns)


def estimate_busy_rate(active_ns: Float, idle_ns: Int, window_ns: Int) -> float:
    """Estimate for which part of the device's busy time a thread is active, 0 to 1.

    active_ns: float64[n], NaN = not known. idle_ns, window_ns: int64[n].
    """
    is_known = ~np.isnan(active_ns)
    active, idle = active_ns[is_known], idle_ns[is_known].astype(np.float64)
    return _estimate_rate(active, window_ns[is_known] - idle, idle)


def _estimate_rate(active: Float, busy: Float, idle: Float) -> float:
    rate, _ = _fit_busy_rate(active, busy, idle)
    if np.isnan(rate):
        rate = float(active.sum()) / max(float((busy + idle).sum()), 1.0)
    return min(max(rate, 0.0), 1.0)


def estimate_idle_share_from_samples(
    active_ns: Float, idle_ns: Int, window_ns: Int, start_ns: Int
) -> Float:
    """Estimate which part of each window's idle time coincided with a sampled thread state.

    Unbiased in the mean only. A training thread that waits for a disk is assumed to do so
    in busy time only as far as the windows prove it (two standard errors).
    active_ns: float64[n], NaN = not measured. idle_ns, window_ns, start_ns: int64[n].
    Returns float64[n], 0 to 1.
    """
    is_known = ~np.isnan(active_ns)
    active, idle = (
        np.where(is_known, active_ns, 0.0),
        np.where(is_known, idle_ns, 0).astype(np.float64),
    )
    busy = np.where(is_known, window_ns, 0) - idle
    block = np.arange(idle.size) // _WINDOWS_PER_SAMPLE
    sums = [
        np.bincount(block, weights=column).astype(np.float64) for column in (active, busy, idle)
    ]
    rate, error = _fit_busy_rate(sums[0], sums[1], sums[2])
    rate = 0.0 if np.isnan(rate) else min(max(rate - 2 * error, 0.0), 1.0)
    return _compute_segment_shares(active - rate * busy, np.zeros_like(idle), idle, idle, start_ns)


def _fit_busy_rate(active: Float, busy: Float, idle: Float) -> tuple[float, float]:
    """Fit the active part of busy time and its standard error; NaN = unknown."""
    is_known = busy + idle > 0
    if np.count_nonzero(is_known) < MIN_WINDOWS:
        return np.nan, np.nan
    if float(np.std(idle[is_known] / (busy + idle)[is_known])) < _MIN_IDLE_SPREAD:
        return np.nan, np.nan
    # active = rate * busy + idle_rate * idle, by least squares
    bb, ii, bi = float(busy @ busy), float(idle @ idle), float(busy @ idle)
    determinant = bb * ii - bi * bi
    if determinant <= 0:
        return np.nan, np.nan
    rate = (float(active @ busy) * ii - float(active @ idle) * bi) / determinant
    idle_rate = (float(active @ idle) * bb - float(active @ busy) * bi) / determinant
    residual = active - rate * busy - idle_rate * idle
    variance = float(residual @ residual) / max(np.count_nonzero(is_known) - 2, 1)
    return rate, float(np.sqrt(variance * ii / determinant))


def _compute_segment_shares(
    beyond: Float, lower_ns: Float, upper_ns: Float, idle: Float, start_ns: Int
) -> Float:
    segment = start_ns // SEGMENT_NS
    segment = segment - (segment.min() if segment.size else 0)
    sums = [np.bincount(segment, weights=column) for column in (beyond, lower_ns, upper_ns, idle)]
    share = np.clip(sums[0], sums[1], sums[2]) / np.maximum(sums[3], 1.0)
    return np.clip(share, 0.0, 1.0)[segment]


PAUSED = "paused"
MIN_MODEL_BYTES = 16 << 20
"""Mean bytes written per pause from which a model is saved; less is a log."""
MIN_COPY_BYTES_PER_SECOND = 1e9
"""Lowest rate of copies, bytes per second: even a copy from pageable memory is faster."""
MAX_COPY_BYTES_PER_SECOND = 64e9
"""Highest rate of copies, bytes per second: no bus is faster, so a higher rate means that
bytes were copied while the device worked.
"""
_WHOLE_RATIO = 0.95  # of a window: the device did nothing
_MIN_OTHERS_RATIO = 0.5
"""Part of idle time: a thread that runs for less is not what the main thread waits for."""
_DRIVER_RATIO, _LAUNCHING_RATIO, _AT_WORK_RATIO = 0.5, 0.5, 0.5


class HostActivity(NamedTuple):
    """Host activity as a part of each lost interval, float64[n].

    The main thread slept for the rest.
    """

    on_cpu: Float
    runnable: Float
    storage: Float
    memory: Float
    other_threads: Float
    """Other threads of the process were on a CPU."""
    copying: Float
    saves: NDArray[np.bool_]
    """Pauses in which the process wrote, if it saves models in pauses."""
    saves_models: bool
    launching: bool
    """The main thread is on a CPU for most of the device's busy time, too."""
    in_driver: bool
    """Most of `on_cpu` was in the kernel, and not for reading or writing."""


def estimate_host_activity(rank: Rank, lost: LostTime, around: ReadContext) -> HostActivity:
    """Estimate what the host did in the lost intervals of a segment."""
    all_windows = build_device_windows(rank)
    thread = rank.main.threads.get(rank.pid)
    n = lost.start_ns.size
    if all_windows is None or thread is None:
        zeros, false = np.zeros(n), np.zeros(n, np.bool_)
        return HostActivity(zeros, zeros, zeros, zeros, zeros, zeros, false, False, False, False)
    windows = trim_windows(all_windows, int(lost.start_ns[0]), int(lost.end_ns[-1]))
    row = np.searchsorted(windows.start_ns, lost.start_ns, side="right") - 1
    length, idle = windows.end_ns - windows.start_ns, windows.idle_ns
    main = measure_thread_windows(thread, windows.start_ns, windows.end_ns, around)
    saves, models = np.zeros(length.size, np.bool_), False
    if _is_saving_models(rank, thread, _trim_to_work(all_windows), around):
        saves, models = _find_save_windows(rank, windows, main), True
    unexplained = np.where(saves, np.nan, length)  # time explained by saves is not claimed again
    window_times = idle, length, windows.start_ns
    return HostActivity(
        estimate_idle_share(main.on_cpu * unexplained, *window_times)[row],
        estimate_idle_share(main.runnable * unexplained, *window_times)[row],
        estimate_idle_share_from_samples(
            _split_edge_samples(main.storage) * unexplained, *window_times
        )[row],
        estimate_idle_share_from_samples(
            _split_edge_samples(main.memory) * unexplained, *window_times
        )[row],
        _estimate_other_threads(rank, windows)[row],
        _estimate_copying(rank, windows)[row],
        saves[row] & (lost.phase == PHASE_NONE),
        models,
        estimate_busy_rate(main.on_cpu * length, idle, length) >= _LAUNCHING_RATIO,
        _is_in_driver(rank, thread, windows),
    )


def _trim_to_work(windows: DeviceWindows) -> DeviceWindows:
    """Return the windows from the first to the last in which the device worked."""
    working = np.flatnonzero(windows.idle_ns < windows.end_ns - windows.start_ns)
    used = slice(working[0], working[-1] + 1) if working.size else slice(0)
    return DeviceWindows(*(getattr(windows, field.name)[used] for field in fields(windows)))


def _split_edge_samples(active: Float) -> Float:
    """Split a sample at the edge of two windows evenly."""
    after = np.append(active[1:], active[-1:])
    return (active + after) / 2


def _estimate_other_threads(rank: Rank, windows: DeviceWindows) -> Float:
    """Estimate the part of idle time in which another thread ran more than in busy time.

    A thread that polls is always on a CPU and explains nothing.
    """
    length = windows.end_ns - windows.start_ns
    busiest_share = np.zeros(length.size)
    busiest_ns = _MIN_OTHERS_RATIO * float(windows.idle_ns.sum())
    for tid, thread in rank.main.threads.items():
        if tid == rank.pid or len(thread.t_ns) < 2:
            continue
        positions = locate_intervals(thread.t_ns, windows.start_ns, windows.end_ns)
        grown_ns = np.nan_to_num(
            evaluate_increase(compute_growth(thread.on_cpu_ns), positions)
        )  # no samples: the thread slept
        share = estimate_idle_share(
            np.minimum(grown_ns, length), windows.idle_ns, length, windows.start_ns
        )
        ran_ns = float((share * windows.idle_ns).sum())
        if ran_ns > busiest_ns:
            busiest_share, busiest_ns = share, ran_ns
    return busiest_share


def _estimate_copying(rank: Rank, windows: DeviceWindows) -> Float:
    """Estimate the part of idle time in which data were copied to the device."""
    zeros = np.zeros(windows.start_ns.size)
    series = rank.chunk.series.get((signals.GPU_PCIE_RECEIVE.name, rank.device))
    if series is None or not series.t_ns.size:
        return zeros
    length, idle = windows.end_ns - windows.start_ns, windows.idle_ns
    row = np.searchsorted(series.t_ns, windows.end_ns)  # a reading describes the time before it
    is_sampled = row < series.t_ns.size
    rate = np.where(is_sampled, series.values[np.minimum(row, series.t_ns.size - 1)], np.nan)
    copied = np.nan_to_num(rate) * length / 1e9
    copies = (copied > 0) & (idle > 0)
    if not copies.any():
        return zeros
    speeds, weights = copied[copies] / (idle[copies] / 1e9), copied[copies]
    order = np.argsort(speeds)
    median_index = np.searchsorted(np.cumsum(weights[order]), 0.5 * weights.sum())
    speed = float(speeds[order][min(int(median_index), order.size - 1)])
    if not MIN_COPY_BYTES_PER_SECOND <= speed <= MAX_COPY_BYTES_PER_SECOND:
        return zeros
    return estimate_idle_share(
        np.minimum(copied / speed * 1e9, length), idle, length, windows.start_ns
    )


def _is_in_driver(rank: Rank, thread: ThreadTable, windows: DeviceWindows) -> bool:
    """Return whether the main thread's CPU time during idle time was spent in the driver."""
    if (thread.user_ns < 0).any() or (thread.system_ns < 0).any() or not windows.start_ns.size:
        return False
    positions = locate_intervals(thread.t_ns, windows.start_ns, windows.end_ns)
    length = windows.end_ns - windows.start_ns
    parts = []
    for column in (thread.user_ns, thread.system_ns):
        ran = np.clip(evaluate_increase(compute_growth(column), positions), 0, length)
        share = estimate_idle_share(ran, windows.idle_ns, length, windows.start_ns)
        parts.append(float((share * windows.idle_ns).sum()))
    user, system = parts
    system -= READING_NS_PER_BYTE * _sum_transferred_bytes(rank.main)
    return system > _DRIVER_RATIO * (user + max(system, 0.0)) > 0


def _sum_transferred_bytes(process: Process) -> float:
    """Sum what a process read and wrote in the present samples, page cache included."""
    if process.io is None or process.io.t_ns.size < 2:
        return 0.0
    columns = process.io.read_chars, process.io.write_chars
    return float(sum(compute_differences(column)[0].sum() for column in columns))


def is_mostly_writing(process: Process, since_ns: int) -> bool:
    """Return whether a process wrote more than it read: if blocked, it saves, not loads."""
    io = process.io
    if io is None or not io.t_ns.size:
        return False
    row = max(int(np.searchsorted(io.t_ns, since_ns, side="right")) - 1, 0)
    return bool(io.write_bytes[-1] - io.write_bytes[row] > io.read_chars[-1] - io.read_chars[row])


def find_pauses(lost: LostTime) -> NDArray[np.bool_]:
    """Find intervals in which the device does nothing, and those adjacent to them: bool[n]."""
    is_whole = lost.lost_ns >= _WHOLE_RATIO * np.maximum(lost.end_ns - lost.start_ns, 1)
    is_whole &= lost.phase == PHASE_NONE  # device not busy, and host not computing
    joined = lost.start_ns[1:] == lost.end_ns[:-1]
    out = is_whole.copy()
    out[1:] |= is_whole[:-1] & joined
    out[:-1] |= is_whole[1:] & joined
    return out


def sum_cpu_time_in_pauses(lost: LostTime, share: Int) -> dict[str, int]:
    """Sum the time on a CPU in pauses, ns in fixed-point shares, for `totals`.

    share: int64[n], in 1/SHARE_SCALE.
    """
    units = int((lost.lost_ns * share)[find_pauses(lost)].sum())
    return {PAUSED: units} if units else {}


def _is_saving_models(
    rank: Rank, thread: ThreadTable, windows: DeviceWindows, around: ReadContext
) -> bool:
    """Return whether the training process writes as much per pause as a model has."""
    io = rank.main.io
    if io is None or io.t_ns.size < 2 or not windows.start_ns.size:
        return False
    main = measure_thread_windows(thread, windows.start_ns, windows.end_ns, around)
    is_save = _find_save_windows(rank, windows, main)
    count = np.count_nonzero(is_save[1:] & ~is_save[:-1]) + bool(is_save[0])
    row = max(int(np.searchsorted(io.t_ns, windows.start_ns[0], side="right")) - 1, 0)
    return bool(count and io.write_bytes[-1] - io.write_bytes[row] >= MIN_MODEL_BYTES * count)


def _find_save_windows(
    rank: Rank, windows: DeviceWindows, main: ThreadWindows
) -> NDArray[np.bool_]:
    """Find windows of pauses in which the main thread is active and the process writes."""
    is_whole = windows.idle_ns >= _WHOLE_RATIO * (windows.end_ns - windows.start_ns)
    at_work = np.nan_to_num(main.active) >= _AT_WORK_RATIO
    return is_whole & at_work & _has_written(rank, windows.start_ns, windows.end_ns)


def _has_written(rank: Rank, start_ns: Int, end_ns: Int) -> NDArray[np.bool_]:
    """Return for each interval whether the training process wrote to a disk about then."""
    io = rank.main.io
    assert io is not None
    grown, _ = compute_differences(io.write_bytes)
    first = np.searchsorted(io.t_ns, start_ns, side="right") - 1
    last = np.searchsorted(io.t_ns, end_ns, side="left") + 1  # writes show up a little later
    before = np.concatenate([[0.0], np.cumsum(grown > 0)])
    low, high = np.clip(first, 0, grown.size), np.clip(last, 0, grown.size)
    out: NDArray[np.bool_] = before[high] > before[low]
    return out
