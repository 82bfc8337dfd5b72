"""How long the device stood idle, and was slowed, in each window between two of its samples.

`gpu.busy_ns_total` is an integral: idle time of a window = its length - the rise. Drivers hand
their sample buffer over late and in lumps, so that a window can show more busy time than it is
long; the excess belongs to the windows just before. Idle time so far, `t - busy(t)`, can only grow,
therefore the smallest value of the next `LATE_NS` is taken for it, which leaves totals untouched:

    t ms                 0    100   200   300
    busy ms              0      0   150   250
    t - busy             0    100    50    50
    idle so far          0     50    50    50      50 ms idle, not 100

Without that counter the snapshot `gpu.busy_ratio` stands in: it holds for the time since the
sample before it, if that is no more than `SNAPSHOT_HOLDS_NS` ago.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.timeline.model import Float, Int, Rank, Series

LATE_NS = 1_500_000_000
_READINGS = "readings"  # name in `Chunk.shared`
SNAPSHOT_HOLDS_NS = 2_500_000_000
# NVML: HW slowdown 0x8, software thermal 0x20, hardware thermal 0x40, power brake 0x80. The power
# cap (0x4) is missing on purpose: large GPUs run at it all day, and that clock is their normal.
SLOWED_BITS = 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True, slots=True)
class Windows:
    """Stretches of measured device time, sorted and disjoint; n rows."""

    start_ns: Int
    end_ns: Int
    idle_ns: Int
    """0 <= idle_ns <= end - start."""
    slowed_ns: Int
    """Part of the busy time that a device at full clock would not have needed."""


def sample_times(rank: Rank) -> Int:
    """Return when the rank's device was sampled: int64[n], empty when it was not."""
    return _readings(rank)[0]


def busy_windows(rank: Rank) -> Windows | None:
    """Return every window between two samples in this chunk; None when there is no device."""
    t_ns, busy_ns = _readings(rank)
    if t_ns.size < 2:
        return None
    idle_so_far = _only_growing(t_ns, t_ns - t_ns[0] - (busy_ns - busy_ns[0]))
    start, end = t_ns[:-1], t_ns[1:]
    grown = np.rint(idle_so_far[1:] - idle_so_far[:-1])
    idle = np.minimum(np.maximum(grown, 0), end - start).astype(np.int64)
    good = busy_ns[1:] - busy_ns[:-1] >= 0  # neither NaN (no reading) nor a counter that went back
    if not good.all():
        start, end, idle = start[good], end[good], idle[good]
    return Windows(start, end, idle, _slowed(rank, start, end - start - idle))


def within(windows: Windows, start_ns: int, end_ns: int) -> Windows:
    """Return the windows inside `[start_ns, end_ns)`; of one that is cut, busy time stays inside.

    At the edge of the steps the other side is start-up or the end, where the device has no work.
    """
    first = int(np.searchsorted(windows.end_ns, start_ns, side="right"))
    last = int(np.searchsorted(windows.start_ns, end_ns, side="left"))
    keep = slice(first, max(first, last))
    start = np.maximum(windows.start_ns[keep], start_ns)
    end = np.minimum(windows.end_ns[keep], end_ns)
    busy = windows.end_ns[keep] - windows.start_ns[keep] - windows.idle_ns[keep]
    idle = np.maximum(end - start - busy, 0)
    slowed = np.minimum(windows.slowed_ns[keep], end - start - idle)
    return Windows(start, end, idle, slowed)


def _readings(rank: Rank) -> tuple[Int, Float]:
    """Sample times and busy time so far; NaN marks a stretch that was not measured."""
    known = rank.chunk.shared.get((_READINGS, rank.device))
    if known is None:
        known = rank.chunk.shared[_READINGS, rank.device] = _read(rank)
    return known  # type: ignore[no-any-return]


def _read(rank: Rank) -> tuple[Int, Float]:
    total = rank.chunk.series.get((signals.GPU_BUSY_TIME.name, rank.device))
    if total is not None and total.t_ns.size:
        known = ~np.isnan(total.values)
        # A counter needs no reading in between: the next one still has all of it.
        return total.t_ns[known], total.values[known]
    ratio = rank.chunk.series.get((signals.GPU_BUSY.name, rank.device))
    if ratio is None or not rank.device:
        return np.zeros(0, np.int64), np.zeros(0)
    return ratio.t_ns, _summed(ratio)


def _summed(ratio: Series) -> Float:
    """Busy time so far of a snapshot series; NaN steps where it says nothing."""
    held = np.diff(ratio.t_ns).astype(np.float64)
    step = np.rint(held * ratio.values[1:])
    step[held > SNAPSHOT_HOLDS_NS] = np.nan
    so_far = np.concatenate([[0.0], np.nancumsum(step)])
    # A missing step makes the counter fall, which every reader takes for "not measured".
    fallen = np.concatenate([[0.0], np.cumsum(np.isnan(step) * 1.0)])
    return so_far - fallen * (float(ratio.t_ns[-1] - ratio.t_ns[0]) + 1.0)


def _only_growing(t_ns: Int, idle_so_far: Float) -> Float:
    """Least value within the next `LATE_NS` of each row."""
    if not (idle_so_far[1:] < idle_so_far[:-1]).any():
        return idle_so_far
    horizon = np.searchsorted(t_ns, t_ns + LATE_NS, side="right")
    out = idle_so_far.copy()
    reach, shifted = 1, idle_so_far
    longest = int(np.max(horizon - np.arange(t_ns.size)))
    while reach < longest:
        shifted = np.append(shifted[1:], np.inf)
        within_reach = np.arange(t_ns.size) + reach < horizon
        out = np.where(within_reach, np.minimum(out, shifted), out)
        reach += 1
    return out


def _slowed(rank: Rank, start_ns: Int, busy_ns: Int) -> Int:
    """Busy time lost to a lowered clock while the device gave a reason that is a fault."""
    series = [
        rank.chunk.series.get((signal.name, rank.device))
        for signal in (signals.GPU_THROTTLE, signals.GPU_SM_CLOCK, signals.GPU_SM_CLOCK_MAX)
    ]
    if any(one is None or not one.t_ns.size for one in series):
        return np.zeros(start_ns.size, np.int64)
    bits, clock, highest = (_held(one, start_ns) for one in series if one is not None)
    slowed = (np.nan_to_num(bits).astype(np.int64) & SLOWED_BITS) != 0
    with np.errstate(invalid="ignore", divide="ignore"):
        missing_ratio = np.clip(np.nan_to_num(1.0 - clock / highest), 0.0, 1.0)
    return np.where(slowed, np.rint(busy_ns * missing_ratio), 0.0).astype(np.int64)


def _held(series: Series, t_ns: Int) -> Float:
    """Value of a gauge at each instant: the last reading at or before it; NaN before the first."""
    row = np.searchsorted(series.t_ns, t_ns, side="right") - 1
    return np.where(row >= 0, series.values[np.maximum(row, 0)], np.nan)
