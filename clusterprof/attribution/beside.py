"""Which part of the idle time of a device passed while its host did something, from sums alone.

A window between two samples says how long the device idled and how long a thread ran, not whether
both were at once. Many windows do. What a thread does while the device is busy is the same part of
busy time in all of them, and what it does beyond that it did while the device idled:

    of 100 ms   idle    0   40   20    0
    on a CPU           10   46   28   10     10 % while busy: 10, 6, 8, 10
    beyond              0   40   20    0     all of the idle time

Within one window it is no more than fits, and no less than must be: 90 ms on a CPU leave 10 ms for
40 ms of idle time to lie beside. Shares hold for stretches of `STRETCH_NS`, in which the windows'
errors cancel, for an idle time often lies across the edge of two.
"""

from __future__ import annotations

import numpy as np

from clusterprof.timeline.model import Float, Int

STRETCH_NS = 2_000_000_000
FEWEST_WINDOWS = 8
_SPREAD_RATIO = 0.05
"""Idle parts of windows that differ by less say nothing of what happens while a device is busy."""
_SAMPLED_WINDOWS = 5
"""Are looked at as one where a thread is sampled: a sample says little of the window it lies in."""


def counted(did_ns: Float, idle_ns: Int, length_ns: Int, start_ns: Int) -> Float:
    """Return float64[n]: the part of each window's idle time beside what a counter says it did.

    `did_ns` is exact for each window, NaN where not known. Where windows are too much alike it is
    taken to do so as much beside idle time as beside any other.
    """
    known = ~np.isnan(did_ns)
    did, idle = np.where(known, did_ns, 0.0), np.where(known, idle_ns, 0).astype(np.float64)
    busy = np.where(known, length_ns, 0) - idle
    rate = _usual(did, busy, idle)
    least, most = np.maximum(did - busy, 0.0), np.minimum(did, idle)
    return _shares(did - rate * busy, least, most, idle, start_ns)


def while_busy(did_ns: Float, idle_ns: Int, length_ns: Int) -> float:
    """Return which part of the time in which the device is busy a thread does so, 0 to 1."""
    known = ~np.isnan(did_ns)
    did, idle = did_ns[known], idle_ns[known].astype(np.float64)
    return _usual(did, length_ns[known] - idle, idle)


def _usual(did: Float, busy: Float, idle: Float) -> float:
    rate, _ = _while_busy(did, busy, idle)
    if np.isnan(rate):
        rate = float(did.sum()) / max(float((busy + idle).sum()), 1.0)
    return min(max(rate, 0.0), 1.0)


def found(did_ns: Float, idle_ns: Int, length_ns: Int, start_ns: Int) -> Float:
    """Return the same for what a thread was found in when sampled: right in the mean alone.

    A training thread that waits for a disk does so while its device works only as far as the
    windows show it beyond doubt (two standard errors).
    """
    known = ~np.isnan(did_ns)
    did, idle = np.where(known, did_ns, 0.0), np.where(known, idle_ns, 0).astype(np.float64)
    busy = np.where(known, length_ns, 0) - idle
    block = np.arange(idle.size) // _SAMPLED_WINDOWS
    sums = [np.bincount(block, weights=one).astype(np.float64) for one in (did, busy, idle)]
    rate, error = _while_busy(sums[0], sums[1], sums[2])
    rate = 0.0 if np.isnan(rate) else min(max(rate - 2 * error, 0.0), 1.0)
    return _shares(did - rate * busy, np.zeros_like(idle), idle, idle, start_ns)


def _while_busy(did: Float, busy: Float, idle: Float) -> tuple[float, float]:
    """Which part of busy time it does so, and the standard error; NaN where that is not known."""
    some = busy + idle > 0
    if np.count_nonzero(some) < FEWEST_WINDOWS:
        return np.nan, np.nan
    if float(np.std(idle[some] / (busy + idle)[some])) < _SPREAD_RATIO:
        return np.nan, np.nan
    # did = rate * busy + other * idle, by least squares
    bb, ii, bi = float(busy @ busy), float(idle @ idle), float(busy @ idle)
    determinant = bb * ii - bi * bi
    if determinant <= 0:
        return np.nan, np.nan
    rate = (float(did @ busy) * ii - float(did @ idle) * bi) / determinant
    other = (float(did @ idle) * bb - float(did @ busy) * bi) / determinant
    rest = did - rate * busy - other * idle
    variance = float(rest @ rest) / max(np.count_nonzero(some) - 2, 1)
    return rate, float(np.sqrt(variance * ii / determinant))


def _shares(beyond: Float, least: Float, most: Float, idle: Float, start_ns: Int) -> Float:
    at = start_ns // STRETCH_NS
    at = at - (at.min() if at.size else 0)
    sums = [np.bincount(at, weights=column) for column in (beyond, least, most, idle)]
    share = np.clip(sums[0], sums[1], sums[2]) / np.maximum(sums[3], 1.0)
    return np.clip(share, 0.0, 1.0)[at]
