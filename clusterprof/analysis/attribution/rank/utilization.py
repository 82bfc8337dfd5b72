"""How much of a device its work filled, in sums over the windows of a stretch; never lost time.

SM activity of a window is the share of multiprocessors with work, mean over all of it. Idle time
has none, so activity times length is how much of the device was filled, as time, and the rest of
the busy time was under-filled:

    window 100, idle 40, SM activity 0.30      busy 60 = filled 30 + under-filled 30

Half of the device was filled while it was busy, not 0.30 of it. What of the busy time is lost
already (spinning for a late rank, a lowered clock) is left out, and so is what was perhaps spent
spinning. A reading may be older than its window (drivers are asked once a second for some): sums
over a run know nothing of that, so amounts are added up here and compared in `engine.underfill`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.attribution.device import SNAPSHOT_HOLDS_NS, Windows
from clusterprof.attribution.regions import table_of
from clusterprof.probe import layout
from clusterprof.timeline.intervals import overlap_ns, overlaps, union
from clusterprof.timeline.model import Float, Int, Rank
from clusterprof.timeline.series import rise_of

Bool = NDArray[np.bool_]
Sums = dict[tuple[str, int], int]
"""(what, level) -> ns, or ns times a unit; level 0 unless it is a histogram."""
BUSY, LOST, WORK, ACTIVE = "busy", "lost", "work", "active"
SM, SM_KNOWN = "sm", "sm_known"
POWER, REST, LIMIT, POWER_BUSY = "power", "rest", "limit", "power_busy"
HOST = "host"
LEVEL, MEMORY, MEMORY_TOTAL = "level", "memory", "memory_total"
"""Histograms: of SM activity at work in percent, of memory in use in thousandths, of its size."""
NO_SM_ACTIVITY, NO_READING, PERHAPS = "no-sm-activity", "no-reading", "perhaps-waiting"
UNMEASURED = (NO_SM_ACTIVITY, NO_READING, PERHAPS)
MEANS = {
    "occupancy": "gpu.sm_occupancy_ratio",
    "tensor": "gpu.tensor_active_ratio",
    "dram": "gpu.memory_bandwidth_ratio",
}
"""What else is averaged over the time at work, where the catalogue and the recording have it."""
KNOWN = "_known"
"""Behind any of these names: for how long it is known."""
_BUSY_RATIO = 0.5  # below it a window says little about the level of its work
_IMPOSSIBLE_RATIO = 1.05  # a share above it is no reading
_WAITS = (
    layout.DATA_WAIT, layout.H2D, layout.CHECKPOINT, layout.EVAL, layout.COMPILE, layout.GC,
    layout.COLLECTIVE,
)  # fmt: skip


def filling(rank: Rank, every: Windows, windows: Windows, lost_ns: Int, perhaps_ns: Int) -> Sums:
    """Add up what the windows of a stretch say of how its device was filled.

    `lost_ns`, `perhaps_ns`: int64[n], busy time of each window that is in the ledger of lost time,
    and that which perhaps belongs there. `every` has the windows as they were sampled; those of
    the stretch may be cut at its ends, and have all their busy time inside.
    """
    length = windows.end_ns - windows.start_ns
    busy = length - windows.idle_ns
    lost = np.minimum(lost_ns, busy)
    perhaps = np.minimum(perhaps_ns, busy - lost)
    work = busy - lost - perhaps
    clean = lost + perhaps == 0
    told = _Told(rank, windows.end_ns)
    sums = {(BUSY, 0): busy.sum(), (LOST, 0): lost.sum(), (PERHAPS, 0): perhaps.sum()}
    whole = np.maximum(_sampled_ns(every, windows), length)
    ratio = told.ratio(signals.GPU_SM_ACTIVE.name)
    if ratio is None:
        sums[NO_SM_ACTIVITY, 0] = work.sum()
    else:
        sums |= _activity(ratio, whole, length, busy, work, clean)
    for what, name in MEANS.items():
        mean = told.ratio(name)
        if mean is not None:
            some = clean & ~np.isnan(mean)
            sums[what, 0] = np.rint(mean[some] * whole[some]).sum()
            sums[what + KNOWN, 0] = work[some].sum()
    _power(sums, told, length, busy, clean)
    _memory(sums, told, length)
    _host(sums, rank, windows, clean & (work > 0))
    return {key: int(ns) for key, ns in sums.items() if ns}


class _Told:
    """Readings of one rank's device at the ends of windows."""

    def __init__(self, rank: Rank, end_ns: Int) -> None:
        self._series, self._device = rank.chunk.series, rank.device
        self._end_ns = end_ns
        self._rows: tuple[Int, Int, Float] | None = None
        """Times of readings, the row of each window's, 0 or NaN where there is none."""

    def value(self, name: str) -> Float | None:
        """Return the first reading at the end of each window or soon after it, else NaN.

        A reading tells of the time before it. None: the signal was not recorded.
        """
        series = self._series.get((name, self._device))
        if name not in signals.BY_NAME or series is None or not series.t_ns.size:
            return None
        if self._rows is None or self._rows[0] is not series.t_ns:  # mostly those of one collector
            t_ns = series.t_ns
            row = np.minimum(t_ns.searchsorted(self._end_ns, "left"), t_ns.size - 1)
            late = t_ns[row] - self._end_ns
            none = np.where((late < 0) | (late > SNAPSHOT_HOLDS_NS), np.nan, 0.0)
            self._rows = t_ns, row, none
        _, row, none = self._rows
        return series.values[row] + none

    def ratio(self, name: str) -> Float | None:
        """Return readings of a share, those that cannot be one as NaN."""
        value = self.value(name)
        if value is None:
            return None
        good = (value >= 0) & (value <= _IMPOSSIBLE_RATIO)  # of NaN neither is true
        return (
            np.minimum(value, 1.0) if good.all() else np.where(good, np.minimum(value, 1), np.nan)
        )


def _activity(ratio: Float, whole: Int, length: Int, busy: Int, work: Int, clean: Bool) -> Sums:
    """Add up SM activity; `whole` is how long each window was when it was sampled."""
    known = ~np.isnan(ratio)
    active = np.rint(np.nan_to_num(ratio) * whole).astype(np.int64)
    sums = {
        (NO_READING, 0): work[~known].sum(),
        (SM, 0): np.minimum(active, length).sum(),  # 0 where it is not known
        (SM_KNOWN, 0): length[known].sum(),
    }
    # Where it span too, its work is taken to have been as full as it can have been.
    active = np.where(clean, active, np.minimum(active, work))
    sums[WORK, 0], sums[ACTIVE, 0] = work[known].sum(), active.sum()
    level = clean & known & (busy > 0) & (busy >= _BUSY_RATIO * length)
    percent = np.rint(100 * active[level] / busy[level])
    _counted(sums, LEVEL, np.minimum(percent, 100).astype(np.int64), work[level])
    return sums


def _sampled_ns(every: Windows, windows: Windows) -> Int:
    """How long each window was when it was sampled, before the stretch cut it."""
    row = np.searchsorted(every.end_ns, windows.start_ns, side="right")
    return (every.end_ns - every.start_ns)[np.minimum(row, every.end_ns.size - 1)]


def _counted(sums: Sums, what: str, levels: Int, ns: Int) -> None:
    """Add a histogram of small levels: how long each was seen."""
    if not levels.size:
        return
    low, high = int(levels.min()), int(levels.max())
    if low == high:
        sums[what, low] = int(ns.sum())
        return
    total = np.bincount(levels, ns)  # whole numbers, far below 2**53
    (some,) = total.nonzero()
    sums.update({(what, level): int(total[level]) for level in some.tolist()})


def _power(sums: Sums, told: _Told, length: Int, busy: Int, clean: Bool) -> None:
    """Watts times ns: of windows at work (they may have idled in part), and of idle ones."""
    watts, limit = told.value(signals.GPU_POWER.name), told.value(signals.GPU_POWER_LIMIT.name)
    if watts is None or limit is None:
        return
    drawn = (watts >= 0) & (limit > 0)
    at_work, at_rest = drawn & clean & (busy > 0), drawn & (busy == 0)
    parts = (POWER, watts, at_work), (REST, watts, at_rest), (LIMIT, limit, drawn)
    for what, values, some in parts:
        sums[what, 0] = np.rint(values[some] * length[some]).sum()
        sums[what + KNOWN, 0] = length[some].sum()
    sums[POWER_BUSY, 0] = busy[at_work].sum()


def _memory(sums: Sums, told: _Told, length: Int) -> None:
    """For how long which part of the memory was in use, rounded up to thousandths."""
    used, total = (
        told.value(signals.GPU_MEMORY_USED.name),
        told.value(signals.GPU_MEMORY_TOTAL.name),
    )
    if used is None or total is None:
        return
    some = (used >= 0) & (total > 0) & (used <= total)
    used, total, ns = used[some], total[some], length[some]
    _counted(sums, MEMORY, np.ceil(1000 * used / total).astype(np.int64), ns)
    if total.size:
        sums[MEMORY_TOTAL, int(total.max())] = int(ns.sum())


def _host(sums: Sums, rank: Rank, windows: Windows, some: Bool) -> None:
    """How long the main thread ran outside marked waits, and how long it was outside them.

    It may spin while it waits for the device, which is no launching; unmarked, that is not told
    apart.
    """
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not rank.marked or not some.any():
        return
    start, end = windows.start_ns[some], windows.end_ns[some]
    ran = rise_of(thread.t_ns, thread.on_cpu_ns, start, end)
    known = ~np.isnan(ran)
    waits = [(t.start_ns, t.end_ns) for kind in _WAITS if (t := table_of(rank, kind)) is not None]
    outside = end - start - (overlap_ns((start, end), union(*waits)) if waits else 0)
    synced = _synced(rank, start, end)
    outside = np.maximum(outside - synced, 0)
    ran = np.clip(ran - synced, 0, outside)
    sums[HOST, 0] = int(np.rint(ran[known]).sum())
    sums[HOST + KNOWN, 0] = int(np.rint(outside[known]).sum())


def _synced(rank: Rank, start_ns: Int, end_ns: Int) -> Float:
    """How much of each window the main thread waited for its device, in marked waits.

    One span may stand for several calls: `a` is for how long they waited in all.
    """
    sync = table_of(rank, layout.SYNC)
    if sync is None:
        return np.zeros(start_ns.size)
    length = np.maximum(sync.end_ns - sync.start_ns, 1)
    weight = np.minimum(sync.a, length) / length
    parts = overlaps((start_ns, end_ns), (sync.start_ns, sync.end_ns))
    waited = (parts.end_ns - parts.start_ns) * weight[parts.interval]
    return np.bincount(parts.piece, waited, minlength=start_ns.size).astype(np.float64)
