"""Measure idle and slowed-down time of the device in each window between two samples.

`gpu.busy_ns_total` is an integral: idle time of a window = its length - the increase.
Drivers hand over their sample buffer late and in batches, so a window can show more
busy time than its length; the excess belongs to the windows just before. Cumulative
idle time, `t - busy(t)`, can only grow; therefore the smallest value within the next
MAX_LATENESS_NS is used, which does not change totals:

    t ms                 0    100   200   300
    busy ms              0      0   150   250
    t - busy             0    100    50    50
    idle so far          0     50    50    50      50 ms idle, not 100

Without that counter the snapshot `gpu.busy_ratio` is used. It holds for the time since
the previous sample if that is at most SNAPSHOT_VALID_NS ago.

It also detects busy-waiting on the device: a kernel that counts as work but computes nothing.

A collective that runs on the device waits there for late ranks. A sampler of
utilization sees a device at 100 %; the activity of its multiprocessors and its power
show the difference:

    utilization     1.0   1.0   1.0   1.0
    SM activity     0.90  0.88  0.05  0.40        usual 0.9, busy-wait 0.05
    busy-wait                   all   59 %        (0.9 - 0.40) / (0.9 - 0.05)

The usual activity is the 90 % quantile of the device's own busy windows so far, counted
in histogram bins and updated at fixed numbers of windows, so that where a recording is
cut into chunks changes nothing. No busy-wait is detected before windows below a third
of the usual activity have been seen. From then on a window busy-waits in proportion if
it, or the previous one, is below the activity of working windows: the less they vary,
the smaller a drop counts, from a fiftieth to a fifth. Without SM activity power is
used; without either nothing is detected.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.attribution.rank.idle_time.queue import NO_QUEUE, DeviceQueue
from clusterprof.analysis.attribution.rank.idle_time.shares import NO_SHARES, PhaseShares
from clusterprof.analysis.timeline.model import Float, Int, Rank, Series
from clusterprof.analysis.timeline.series import (
    SNAPSHOT_VALID_NS,
    get_busy_readings,
    get_means_at_driver_times,
)
from clusterprof.analysis.timeline.step_profile import (
    BUSY_WAIT_RATIO,
    DEFAULT_BUSY_WAIT_RATIO,
    MIN_BUSY_RATIO,
    NO_PROFILE,
    PARTIAL_RATIO,
    StepProfile,
    add_to_profile,
    find_levels,
    measure_step_parts,
)

MAX_LATENESS_NS = 1_500_000_000
# NVML: HW slowdown 0x8, software thermal 0x20, hardware thermal 0x40, power brake 0x80. The power
# cap (0x4) is excluded: large GPUs run at it all day, and that clock is their normal one.
THROTTLE_REASON_BITS = 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True, slots=True)
class DeviceWindows:
    """Windows of measured device time, sorted and disjoint; n rows."""

    start_ns: Int
    end_ns: Int
    idle_ns: Int
    """0 <= idle_ns <= end - start."""
    slowed_ns: Int
    """Part of the busy time that a device at full clock would not have needed, ns."""


def get_sample_times(rank: Rank) -> Int:
    """Return the sample times of the rank's device: int64[n], ns, empty without samples."""
    return get_busy_readings(rank)[0]


def build_device_windows(rank: Rank) -> DeviceWindows | None:
    """Return all windows between two device samples of this chunk; None without a device."""
    t_ns, busy_ns = get_busy_readings(rank)
    if t_ns.size < 2:
        return None
    idle_so_far = _compute_future_minimum(t_ns, t_ns - t_ns[0] - (busy_ns - busy_ns[0]))
    start, end = t_ns[:-1], t_ns[1:]
    grown = np.rint(idle_so_far[1:] - idle_so_far[:-1])
    idle = np.minimum(np.maximum(grown, 0), end - start).astype(np.int64)
    is_valid = (
        busy_ns[1:] - busy_ns[:-1] >= 0
    )  # neither NaN (no reading) nor a counter that decreased
    if not is_valid.all():
        start, end, idle = start[is_valid], end[is_valid], idle[is_valid]
    return DeviceWindows(start, end, idle, _compute_slowed_time(rank, start, end - start - idle))


def trim_windows(windows: DeviceWindows, start_ns: int, end_ns: int) -> DeviceWindows:
    """Return the windows inside `[start_ns, end_ns)`; busy time of a cut window stays inside.

    Outside the steps are start-up and shutdown, where the device has no work.
    """
    first = int(np.searchsorted(windows.end_ns, start_ns, side="right"))
    last = int(np.searchsorted(windows.start_ns, end_ns, side="left"))
    keep = slice(first, max(first, last))
    start = np.maximum(windows.start_ns[keep], start_ns)
    end = np.minimum(windows.end_ns[keep], end_ns)
    busy = windows.end_ns[keep] - windows.start_ns[keep] - windows.idle_ns[keep]
    idle = np.maximum(end - start - busy, 0)
    slowed = np.minimum(windows.slowed_ns[keep], end - start - idle)
    return DeviceWindows(start, end, idle, slowed)


def _compute_future_minimum(t_ns: Int, idle_so_far: Float) -> Float:
    """Return the smallest value within the next MAX_LATENESS_NS of each row."""
    if not (idle_so_far[1:] < idle_so_far[:-1]).any():
        return idle_so_far
    horizon = np.searchsorted(t_ns, t_ns + MAX_LATENESS_NS, side="right")
    out = idle_so_far.copy()
    reach, shifted = 1, idle_so_far
    longest = int(np.max(horizon - np.arange(t_ns.size)))
    while reach < longest:
        shifted = np.append(shifted[1:], np.inf)
        within_reach = np.arange(t_ns.size) + reach < horizon
        out = np.where(within_reach, np.minimum(out, shifted), out)
        reach += 1
    return out


def _compute_slowed_time(rank: Rank, start_ns: Int, busy_ns: Int) -> Int:
    """Compute busy time lost to a lowered clock while the device reported a fault."""
    series = [
        rank.chunk.series.get((signal.name, rank.device))
        for signal in (signals.GPU_THROTTLE, signals.GPU_SM_CLOCK, signals.GPU_SM_CLOCK_MAX)
    ]
    if any(column is None or not column.t_ns.size for column in series):
        return np.zeros(start_ns.size, np.int64)
    bits, clock, highest = (
        _sample_gauge(column, start_ns) for column in series if column is not None
    )
    slowed = (np.nan_to_num(bits).astype(np.int64) & THROTTLE_REASON_BITS) != 0
    with np.errstate(invalid="ignore", divide="ignore"):
        missing_ratio = np.clip(np.nan_to_num(1.0 - clock / highest), 0.0, 1.0)
    return np.where(slowed, np.rint(busy_ns * missing_ratio), 0.0).astype(np.int64)


def _sample_gauge(series: Series, t_ns: Int) -> Float:
    """Return the value of a gauge at each instant: the last reading; NaN before the first one."""
    row = np.searchsorted(series.t_ns, t_ns, side="right") - 1
    return np.where(row >= 0, series.values[np.maximum(row, 0)], np.nan)


USUAL_QUANTILE = 0.9
MAX_PARTIAL_RATIO = 0.98
"""Limit of `PARTIAL_RATIO`, where activity hardly varies by itself."""
NEAR_USUAL_RATIO, MIN_SEEN_WINDOWS = 0.25, 16
"""Part of the windows, of at least MIN_SEEN_WINDOWS, whose distance
from the usual activity measures how much it varies.
"""
MIN_BUSY_WAIT_WINDOWS_RATIO = 0.01
"""Part of the busy windows so far that must show busy-waiting, at least
MIN_BUSY_WAIT_WINDOWS of them.
"""
MIN_BUSY_WAIT_WINDOWS = 3
_MIN_READABLE_RATIO = (
    0.1  # below it no evidence of device activity; 0.5 for power, drawn when idle too
)
_BINS = 1000
_MAX_WATTS = 2000.0
_FIRST_UPDATE, _UPDATE_INTERVAL = 4, 128


@dataclass(frozen=True, slots=True)
class DeviceActivity:
    """Activity of one device in its busy windows so far, and its usual activity."""

    counts: bytes = bytes(8 * (_BINS + 1))
    """Number of windows per activity bin, int64[bins]."""
    windows_seen: int = 0
    usual: float = 0.0
    """Usual activity as of the last update; 0 = not known yet."""
    busy_wait_level: float = 0.0
    """Activity of a device that busy-waits; 0 = never seen."""
    confirmed: bool = False
    partial_ratio: float = PARTIAL_RATIO
    """Part of the usual activity below which a window is less active than normal variation
    explains.
    """
    previous: float = 1.0
    """Activity of the last window, as a part of the usual one."""
    phase_shares: PhaseShares = NO_SHARES
    """Idle share of each host phase (analysis.attribution.rank.idle_time.shares)."""
    queue: DeviceQueue = NO_QUEUE
    """Work that the host has launched (analysis.attribution.rank.idle_time.queue)."""
    profile: StepProfile = NO_PROFILE
    """Activity over the course of a step."""
    learned_until_ns: int = -(1 << 62)
    """Windows up to this time were counted before they are divided."""


NO_ACTIVITY = DeviceActivity()


def detect_busy_wait(
    rank: Rank, windows: DeviceWindows, known: DeviceActivity
) -> tuple[Int, Int, DeviceActivity]:
    """Detect for how long the device busy-waited, or is suspected of it, in each window.

    Returns int64[n] each, ns, 0 <= confirmed + suspected <= busy, and the updated activity.
    All 0 if neither SM activity nor power was recorded. Suspected: the device was less
    active than usual, but no window of busy-waiting alone was seen; steps may be too short
    for that.
    """
    none = np.zeros(windows.start_ns.size, np.int64)
    for name, scale in ((signals.GPU_SM_ACTIVE.name, 1.0), (signals.GPU_POWER.name, _MAX_WATTS)):
        is_mean = scale == 1.0
        series = (
            get_means_at_driver_times(rank, name)
            if is_mean
            else rank.chunk.series.get((name, rank.device))
        )
        if series is None or not series.t_ns.size or not none.size:
            continue
        if is_mean:  # since the reading before
            value = _average_over_windows(series, windows)
        else:  # a reading describes the time before it
            row = np.searchsorted(series.t_ns, windows.end_ns, side="left")
            value = series.values[np.minimum(row, series.t_ns.size - 1)] / scale
            value[row >= series.t_ns.size] = np.nan
        if not np.isnan(value).all():
            parts = (
                measure_step_parts(rank, (windows.start_ns, windows.end_ns), known.profile)
                if is_mean
                else None
            )
            if parts is not None:
                parts[windows.end_ns <= known.learned_until_ns] = 0.0
            value = np.clip(value, 0.0, 1.0)
            return _estimate_busy_wait(windows, value, scale == 1.0, known, parts)
    return none, none, known


def _average_over_windows(series: Series, windows: DeviceWindows) -> Float:
    """Return the mean of a series over each window, float64[n].

    series: each reading is the mean since the reading before, the first one over as long as the
    second. NaN for a window of which less than half was covered by readings.
    """
    before_ns = 2 * series.t_ns[0] - series.t_ns[min(1, series.t_ns.size - 1)]
    edges_ns = np.append(before_ns, series.t_ns)
    lengths_ns = np.diff(edges_ns).astype(np.float64)
    is_known = ~np.isnan(series.values) & (lengths_ns <= SNAPSHOT_VALID_NS)
    known_ns = np.where(is_known, lengths_ns, 0.0)
    weighted_ns = known_ns * np.nan_to_num(series.values)

    def over_windows(part_ns: Float) -> Float:
        total_ns = np.append(0.0, np.cumsum(part_ns))
        until_end, until_start = (
            np.interp(t_ns, edges_ns, total_ns) for t_ns in (windows.end_ns, windows.start_ns)
        )
        return until_end - until_start

    covered_ns = over_windows(known_ns)
    is_covered = covered_ns >= 0.5 * (windows.end_ns - windows.start_ns)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(
            is_covered & (covered_ns > 0), over_windows(weighted_ns) / covered_ns, np.nan
        )


def _estimate_busy_wait(
    windows: DeviceWindows,
    value: Float,
    counts_idle: bool,
    known: DeviceActivity,
    parts: Float | None,
) -> tuple[Int, Int, DeviceActivity]:
    """Estimate confirmed and suspected busy-waiting of each window.

    counts_idle: the value is 0 while the device is idle, otherwise about that of
    busy-waiting. parts: see measure_step_parts; None for power, of which
    busy-waiting takes an unknown part.
    """
    length = windows.end_ns - windows.start_ns
    busy = np.where(length > 0, 1.0 - windows.idle_ns / np.maximum(length, 1), 0.0)
    level = value / np.maximum(busy, _MIN_READABLE_RATIO) if counts_idle else value
    level = np.minimum(level, 1.0)
    readable = ~np.isnan(level)
    informative = (busy >= MIN_BUSY_RATIO) & readable
    judged = (busy >= _MIN_READABLE_RATIO) & readable if counts_idle else informative
    counted = informative & (windows.end_ns > known.learned_until_ns)
    limits, known = _follow_activity(level, counted, (parts, value, busy), known)
    relative = np.ones(length.size)
    np.divide(level, limits.usual, out=relative, where=judged & (limits.usual > 0))
    is_below = np.minimum(relative, np.append(known.previous, relative[:-1])) < limits.partial_ratio
    known = replace(known, previous=float(relative[-1]) if length.size else known.previous)
    may_wait = limits.confirmed | (limits.usual > 0) if counts_idle else limits.confirmed
    (rows,) = (judged & is_below & may_wait).nonzero()
    ratio = _compute_busy_wait_part(value[rows], busy[rows], counts_idle, limits.select(rows))
    waited_ns = np.zeros(length.size, np.int64)
    waited_ns[rows] = np.rint(ratio * length[rows])
    waited_ns = np.minimum(waited_ns, length - windows.idle_ns)
    confirmed_ns = np.where(limits.confirmed, waited_ns, 0)
    return confirmed_ns, waited_ns - confirmed_ns, known


class _ActivityLimits(NamedTuple):
    """What each window is judged by, n rows: see DeviceActivity."""

    usual: Float
    busy_wait_level: Float
    partial_ratio: Float
    confirmed: NDArray[np.bool_]

    def select(self, rows: Int) -> _ActivityLimits:
        """Return the limits of some windows."""
        usual, busy_wait_level, partial_ratio, confirmed = self
        return _ActivityLimits(
            usual[rows], busy_wait_level[rows], partial_ratio[rows], confirmed[rows]
        )


def _follow_activity(
    level: Float,
    counted: NDArray[np.bool_],
    columns: tuple[Float | None, Float, Float],
    known: DeviceActivity,
) -> tuple[_ActivityLimits, DeviceActivity]:
    """Count the activity of windows; return what was known at each of them, and the update.

    columns: parts (None = unknown), value and busy share of each window, for the profile.
    """
    parts, value, busy = columns
    (at_counted,) = counted.nonzero()
    bins = np.rint(level[at_counted] * _BINS).astype(np.int64)
    sizes, limits = [], []
    at = seen = 0
    while at < level.size:
        # Up to the next update all windows are judged alike.
        room = _compute_next_update(known.windows_seen) - known.windows_seen
        is_due = seen + room <= bins.size
        until = seen + room if is_due else bins.size
        end = int(at_counted[until - 1]) + 1 if is_due else level.size
        sizes.append(end - at)
        limits.append((known.usual, known.busy_wait_level, known.partial_ratio, known.confirmed))
        profile = known.profile
        if parts is not None:
            profile = add_to_profile(profile, parts[at:end], value[at:end], busy[at:end])
        counts = np.bincount(bins[seen:until], minlength=_BINS + 1)
        counts += np.frombuffer(known.counts, np.int64)
        known = replace(
            known,
            counts=counts.tobytes(),
            windows_seen=known.windows_seen + until - seen,
            profile=profile,
        )
        known = update_levels(known) if is_due else known
        at, seen = end, until
    by_block = np.array(limits, np.float64).reshape(-1, 4)
    usual, busy_wait_level, partial_ratio, confirmed = np.repeat(by_block, sizes, axis=0).T
    return _ActivityLimits(usual, busy_wait_level, partial_ratio, confirmed > 0), known


def _compute_busy_wait_part(
    value: Float, busy: Float, counts_idle: bool, limits: _ActivityLimits
) -> Float:
    """Return the part of each window in which the device was busy below its usual activity."""
    usual = limits.usual
    busy_wait_level = np.where(
        limits.confirmed, limits.busy_wait_level, DEFAULT_BUSY_WAIT_RATIO * usual
    )
    if counts_idle:
        part = (usual * busy - value) / (usual - busy_wait_level)
    else:
        part = busy - (value - busy_wait_level) / (usual - busy_wait_level)
    return np.clip(np.nan_to_num(part), 0.0, busy)


def _compute_next_update(windows_seen: int) -> int:
    if windows_seen < _UPDATE_INTERVAL:
        update = _FIRST_UPDATE
        while update <= windows_seen:
            update *= 2
        return update
    return (windows_seen // _UPDATE_INTERVAL + 1) * _UPDATE_INTERVAL


def update_levels(known: DeviceActivity) -> DeviceActivity:
    """Determine the usual activity and that of busy-waiting from all windows so far."""
    windows_seen = known.windows_seen
    if not windows_seen:
        return known
    until = np.frombuffer(known.counts, np.int64).cumsum()
    usual = float(until.searchsorted(USUAL_QUANTILE * windows_seen)) / _BINS
    busy_wait_windows = int(until[int(usual * BUSY_WAIT_RATIO * _BINS)])
    enough = max(MIN_BUSY_WAIT_WINDOWS, MIN_BUSY_WAIT_WINDOWS_RATIO * windows_seen)
    busy_wait_level = float(until.searchsorted(max(1, busy_wait_windows // 8))) / _BINS
    confirmed = usual > 0 and busy_wait_windows >= enough
    partial_ratio = _compute_partial_ratio(until, round(usual * _BINS), windows_seen)
    quarter = float(until.searchsorted(NEAR_USUAL_RATIO * windows_seen)) / _BINS
    # A device that is equally active in all windows mixes nothing, whatever the fit of parts says.
    fitted = find_levels(known.profile) if quarter < MAX_PARTIAL_RATIO * usual else None
    if fitted is not None:  # a window that busy-waited for most of its time shows no level alone
        # Rounded: sums of numbers with fractions depend on where a recording is cut.
        usual = max(usual, round(fitted[0], 6))
        busy_wait_level = min(busy_wait_level, round(fitted[1], 6))
        confirmed, partial_ratio = True, MAX_PARTIAL_RATIO
    return replace(
        known,
        usual=usual,
        busy_wait_level=busy_wait_level,
        confirmed=confirmed,
        partial_ratio=partial_ratio,
    )


def _compute_partial_ratio(until: Int, usual: int, windows_seen: int) -> float:
    """Compute the part of the usual activity that working windows hardly ever fall below.

    The spread of windows near the usual activity measures its variation: of a normal
    distribution a quarter lies within 0.7 standard deviations of its 90 % quantile, and one
    window in 400 lies 6 times that below it. until: number of windows up to each bin.
    """
    if windows_seen < MIN_SEEN_WINDOWS or not usual:
        return PARTIAL_RATIO

    def count_near(width: int) -> int:
        return int(until[min(usual + width, _BINS)] - until[max(usual - width - 1, 0)])

    widths = range(1, max(usual, 2))
    row = bisect_left(widths, NEAR_USUAL_RATIO * windows_seen, key=count_near)
    if row == len(widths):
        return PARTIAL_RATIO
    return min(max(1 - 6 * widths[row] / usual, PARTIAL_RATIO), MAX_PARTIAL_RATIO)
