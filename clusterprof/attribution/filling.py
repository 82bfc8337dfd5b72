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

from clusterprof import signals
from clusterprof.attribution.device import SNAPSHOT_HOLDS_NS, Windows
from clusterprof.attribution.regions import table_of
from clusterprof.probe import layout
from clusterprof.timeline.intervals import overlap_ns, overlaps, union
from clusterprof.timeline.model import Float, Int, Rank
from clusterprof.timeline.series import rise_of

Sums = dict[tuple[str, int], int]
"""(what, level) -> ns, or ns times a unit; level 0 unless it is a histogram."""
BUSY, LOST, WORK, ACTIVE = "busy", "lost", "work", "active"
SM, SM_KNOWN = "sm", "sm_known"
POWER, POWER_KNOWN, POWER_BUSY = "power", "power_known", "power_busy"
REST, REST_KNOWN, LIMIT, LIMIT_KNOWN = "rest", "rest_known", "limit", "limit_known"
HOST, HOST_KNOWN = "host", "host_known"
LEVEL, MEMORY, MEMORY_TOTAL = "level", "memory", "memory_total"
"""Histograms: of SM activity at work in percent, of memory in use in thousandths, of its size."""
NO_SM_ACTIVITY, NO_READING, PERHAPS = "no-sm-activity", "no-reading", "perhaps-waiting"
UNMEASURED = (NO_SM_ACTIVITY, NO_READING, PERHAPS)
MEANS = {
    "occupancy": "gpu.sm_occupancy_ratio",
    "tensor": "gpu.tensor_active_ratio",
    "dram": "gpu.dram_active_ratio",
}
"""What else is averaged over the time at work, where the catalogue and the recording have it."""
KNOWN = "_known"
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
    sums = {(BUSY, 0): busy.sum(), (LOST, 0): lost.sum(), (PERHAPS, 0): perhaps.sum()}
    whole = np.maximum(_sampled_ns(every, windows), length)
    ratio = _ratio(rank, signals.GPU_SM_ACTIVE.name, windows.end_ns)
    known = ~np.isnan(ratio)
    there = bool(known.any()) or (signals.GPU_SM_ACTIVE.name, rank.device) in rank.chunk.series
    sums[NO_READING if there else NO_SM_ACTIVITY, 0] = work[~known].sum()
    active = np.rint(np.nan_to_num(ratio) * whole).astype(np.int64)
    sums[SM, 0] = np.minimum(active, length)[known].sum()
    sums[SM_KNOWN, 0] = length[known].sum()
    # Where it span too, its work is taken to have been as full as it can have been.
    active = np.where(clean, active, np.minimum(active, work))
    sums[WORK, 0], sums[ACTIVE, 0] = work[known].sum(), active[known].sum()
    level = clean & known & (busy > 0) & (busy >= _BUSY_RATIO * length)
    percent = np.clip(np.rint(100 * active / np.maximum(busy, 1)), 0, 100).astype(np.int64)
    _counted(sums, LEVEL, percent[level], work[level])
    for what, name in MEANS.items():
        mean = _ratio(rank, name, windows.end_ns)
        some = clean & ~np.isnan(mean)
        sums[what, 0] = np.rint(mean[some] * whole[some]).sum()
        sums[what + KNOWN, 0] = work[some].sum()
    _power(sums, rank, windows, clean)
    _memory(sums, rank, windows)
    _host(sums, rank, windows, clean & (work > 0))
    return {key: int(ns) for key, ns in sums.items() if ns}


def _sampled_ns(every: Windows, windows: Windows) -> Int:
    """How long each window was when it was sampled, before the stretch cut it."""
    row = np.searchsorted(every.end_ns, windows.start_ns, side="right")
    return (every.end_ns - every.start_ns)[np.minimum(row, every.end_ns.size - 1)]


def _reading(rank: Rank, name: str, t_ns: Int) -> Float:
    """Return the first reading at each time or soon after it, NaN where there is none.

    A reading tells of the time before it.
    """
    series = rank.chunk.series.get((name, rank.device))
    if name not in signals.BY_NAME or series is None or not series.t_ns.size:
        return np.full(t_ns.size, np.nan)
    row = np.searchsorted(series.t_ns, t_ns, side="left")
    at = np.minimum(row, series.t_ns.size - 1)
    late = (row >= series.t_ns.size) | (series.t_ns[at] - t_ns > SNAPSHOT_HOLDS_NS)
    return np.where(late, np.nan, series.values[at])


def _ratio(rank: Rank, name: str, t_ns: Int) -> Float:
    """Return readings of a share, those that cannot be one as NaN."""
    value = _reading(rank, name, t_ns)
    with np.errstate(invalid="ignore"):
        good = (value >= 0) & (value <= _IMPOSSIBLE_RATIO)
    return np.where(good, np.minimum(value, 1.0), np.nan)


def _counted(sums: Sums, what: str, levels: Int, ns: Int) -> None:
    """Add a histogram: how long each level was seen."""
    for level in np.unique(levels).tolist():
        sums[what, level] = int(ns[levels == level].sum())


def _power(sums: Sums, rank: Rank, windows: Windows, clean: np.ndarray) -> None:
    """Watts times ns: of windows at work (they may have idled in part), and of idle ones."""
    length = windows.end_ns - windows.start_ns
    busy = length - windows.idle_ns
    watts = _reading(rank, signals.GPU_POWER.name, windows.end_ns)
    limit = _reading(rank, signals.GPU_POWER_LIMIT.name, windows.end_ns)
    with np.errstate(invalid="ignore"):
        drawn, limited = watts >= 0, limit > 0
    parts = (
        (POWER, POWER_KNOWN, watts, drawn & clean & (busy > 0)),
        (REST, REST_KNOWN, watts, drawn & (busy == 0)),
        (LIMIT, LIMIT_KNOWN, limit, limited),
    )
    for what, known, values, some in parts:
        sums[what, 0] = int(np.rint(values[some] * length[some]).sum())
        sums[known, 0] = int(length[some].sum())
    sums[POWER_BUSY, 0] = int(busy[parts[0][3]].sum())


def _memory(sums: Sums, rank: Rank, windows: Windows) -> None:
    """For how long which part of the memory was in use, rounded up to thousandths."""
    used = _reading(rank, signals.GPU_MEMORY_USED.name, windows.end_ns)
    total = _reading(rank, signals.GPU_MEMORY_TOTAL.name, windows.end_ns)
    with np.errstate(invalid="ignore"):
        some = (used >= 0) & (total > 0) & (used <= total)
    length = (windows.end_ns - windows.start_ns)[some]
    part = np.ceil(1000 * used[some] / total[some]).astype(np.int64)
    _counted(sums, MEMORY, part, length)
    _counted(sums, MEMORY_TOTAL, total[some].astype(np.int64), length)


def _host(sums: Sums, rank: Rank, windows: Windows, some: np.ndarray) -> None:
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
    sums[HOST_KNOWN, 0] = int(np.rint(outside[known]).sum())


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
    return np.bincount(parts.piece, waited, minlength=start_ns.size)
