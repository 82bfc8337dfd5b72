"""Busy-waiting on the device: a kernel is resident, counts as work, and computes nothing.

A collective that runs on the device waits there for the ranks that are late. To a sampler of
utilisation that is a device at 100 %; its multiprocessors, and its power, say otherwise:

    utilisation     1.0   1.0   1.0   1.0
    SM activity     0.90  0.88  0.05  0.40        usual 0.9, spinning 0.05
    spins                       all   59 %        (0.9 - 0.40) / (0.9 - 0.05)

What is usual is the 90 % quantile of the device's own busy windows so far, counted in bins and
looked up at fixed numbers of windows, so that the cut of a recording into chunks changes nothing.
Nothing spins before windows below a third of it have been seen; from then on a window spins in
proportion, when it, or the one before it, is below what windows at work are: the less they vary,
the smaller a drop counts, from a fiftieth to a fifth. Without SM activity power is asked;
without either nothing can be said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clusterprof import signals
from clusterprof.attribution.device import Windows
from clusterprof.timeline.model import Float, Int, Rank

USUAL_QUANTILE = 0.9
CLEAR_RATIO = 1 / 3
"""Of the usual activity: below it a busy device computes nothing."""
PARTLY_RATIO, PARTLY_AT_MOST_RATIO = 0.8, 0.98
"""Of the usual activity: a window below it was at work in part of its time only. The higher the
less activity varies by itself."""
NEAR_RATIO, LEAST_SEEN = 0.25, 16
"""So many windows about the usual, and of so many, say how much it varies."""
CLEAR_AT_LEAST_RATIO = 0.01
"""Of the busy windows so far; and no fewer than `CLEAR_AT_LEAST`."""
CLEAR_AT_LEAST = 3
_UNSEEN_CLEAR_RATIO = 0.06
"""Of the usual activity: taken for that of a collective where none was seen alone."""
_BUSY_RATIO = 0.5  # below it a window says little about what is usual
_BARELY_RATIO = 0.1  # below it nothing about what the device did; of power, which idles too, 0.5
_BINS = 1000
_MOST_WATTS = 2000.0
_FIRST_LOOK, _LOOK_EVERY = 4, 128


@dataclass(frozen=True, slots=True)
class Activity:
    """How active one device was in its busy windows so far, and what that makes usual."""

    counts: tuple[int, ...] = ()
    """Windows per bin of activity."""
    seen: int = 0
    usual: float = 0.0
    """As of the last look; 0 = not known yet."""
    clear: float = 0.0
    """Activity of a device that spins, 0 = none was seen to."""
    confirmed: bool = False
    partly: float = PARTLY_RATIO
    """Of what is usual: below it a window is less active than others happen to be."""
    before: float = 1.0
    """Activity of the last window, as a part of what was usual."""


NOTHING_SEEN = Activity()


def spinning(rank: Rank, windows: Windows, known: Activity) -> tuple[Int, Int, Activity]:
    """Return for how long the device spun in each window, or perhaps did, and what is known then.

    int64[n] each, 0 <= spun + perhaps <= busy. All 0 where neither SM activity nor power was
    recorded. Perhaps: it was less active than usual, and no window was seen of spinning alone;
    steps may be too short for that.
    """
    none = np.zeros(windows.start_ns.size, np.int64)
    for name, scale in ((signals.GPU_SM_ACTIVE.name, 1.0), (signals.GPU_POWER.name, _MOST_WATTS)):
        series = rank.chunk.series.get((name, rank.device))
        if series is None or not series.t_ns.size or not none.size:
            continue
        # A reading tells of the time before it.
        row = np.searchsorted(series.t_ns, windows.end_ns, side="left")
        value = series.values[np.minimum(row, series.t_ns.size - 1)] / scale
        value[row >= series.t_ns.size] = np.nan
        if not np.isnan(value).all():
            return _spun(windows, np.clip(value, 0.0, 1.0), scale == 1.0, known)
    return none, none, known


def _spun(
    windows: Windows, value: Float, counts_idle: bool, known: Activity
) -> tuple[Int, Int, Activity]:
    """`counts_idle`: while the device is idle the value is 0, else about that of spinning."""
    length = windows.end_ns - windows.start_ns
    busy = np.where(length > 0, 1.0 - windows.idle_ns / np.maximum(length, 1), 0.0)
    level = value / np.maximum(busy, _BARELY_RATIO) if counts_idle else value
    level = np.minimum(level, 1.0)
    readable = ~np.isnan(level)
    tells = (busy >= _BUSY_RATIO) & readable
    asked = (busy >= _BARELY_RATIO) & readable if counts_idle else tells
    out, perhaps = np.zeros((2, length.size), np.int64)
    at = 0
    while at < length.size:
        # Up to the next look all windows are judged alike.
        room = _next_look(known.seen) - known.seen
        some = np.flatnonzero(tells[at:])[:room]
        end = length.size if some.size < room else at + int(some[-1]) + 1
        part = slice(at, end)
        low = np.where(asked[part], level[part] / known.usual if known.usual else 1.0, 1.0)
        beside = np.minimum(low, np.append(known.before, low[:-1])) < known.partly
        if known.confirmed:
            spins = _part(value[part], busy[part], counts_idle, known)
            out[part] = np.where(asked[part] & beside, np.rint(spins * length[part]), 0)
        elif known.usual and counts_idle:
            guess = replace(known, clear=_UNSEEN_CLEAR_RATIO * known.usual)
            spins = _part(value[part], busy[part], counts_idle, guess)
            perhaps[part] = np.where(asked[part] & beside, np.rint(spins * length[part]), 0)
        known = _looked(replace(known, before=float(low[-1])), level[part][tells[part]])
        at = end
    work = length - windows.idle_ns
    return np.minimum(out, work), np.minimum(perhaps, work), known


def _part(value: Float, busy: Float, counts_idle: bool, known: Activity) -> Float:
    """The part of each window in which the device was busy and not at its usual activity."""
    usual, clear = known.usual, known.clear
    if counts_idle:
        part = (usual * busy - value) / (usual - clear)
    else:
        part = busy - (value - clear) / (usual - clear)
    return np.clip(np.nan_to_num(part), 0.0, busy)


def _next_look(seen: int) -> int:
    if seen < _LOOK_EVERY:
        look = _FIRST_LOOK
        while look <= seen:
            look *= 2
        return look
    return (seen // _LOOK_EVERY + 1) * _LOOK_EVERY


def _looked(known: Activity, level: Float) -> Activity:
    """Count some windows, and look at what is usual when it is time to."""
    if not level.size:
        return known
    counts = np.array(known.counts or (0,) * (_BINS + 1), np.int64)
    counts += np.bincount(np.rint(level * _BINS).astype(np.int64), minlength=_BINS + 1)
    seen = known.seen + level.size
    known = replace(known, counts=tuple(counts.tolist()), seen=seen)
    if seen != _next_look(seen - 1):
        return known
    until = np.cumsum(counts)
    usual = float(np.searchsorted(until, USUAL_QUANTILE * seen)) / _BINS
    clear_windows = int(until[int(usual * CLEAR_RATIO * _BINS)])
    enough = max(CLEAR_AT_LEAST, CLEAR_AT_LEAST_RATIO * seen)
    clear = float(np.searchsorted(until, max(1, clear_windows // 8))) / _BINS
    return replace(
        known,
        usual=usual,
        clear=clear,
        confirmed=usual > 0 and clear_windows >= enough,
        partly=_partly(until, round(usual * _BINS), seen),
    )


def _partly(until: Int, usual: int, seen: int) -> float:
    """Return the activity, as a part of the usual, that windows at work hardly ever fall below.

    How far apart those about the usual lie says how much it varies by itself: of a normal
    distribution a quarter lies within 0.7 standard deviations of its 90 % quantile, and 6 times
    that below it one window in 400. `until`: windows up to each bin.
    """
    width = np.arange(1, max(usual, 2))
    low, high = np.maximum(usual - width - 1, 0), np.minimum(usual + width, _BINS)
    near = np.flatnonzero(until[high] - until[low] >= NEAR_RATIO * seen)
    if not near.size or seen < LEAST_SEEN or not usual:
        return PARTLY_RATIO
    return float(np.clip(1 - 6 * width[near[0]] / usual, PARTLY_RATIO, PARTLY_AT_MOST_RATIO))
