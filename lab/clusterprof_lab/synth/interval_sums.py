"""Integrals of overlapping intervals: bytes of many readers, time with any reader, gauges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clusterprof_lab.synth.activity_counters import Clock
from clusterprof_lab.synth.story import Rate

Int = NDArray[np.int64]
Float = NDArray[np.float64]


def sum_amounts(start_ns: Int, end_ns: Int, amounts: Float | Int, t_ns: Int) -> Float:
    """Return float64[n]: how much had come by each time, each amount evenly over its interval.

    Intervals may overlap. Example: 10 over [0, 100) and 10 over [50, 150): 15 at 100.
    """
    nonempty = (end_ns > start_ns) & (np.asarray(amounts) != 0)
    if not nonempty.any():
        return np.zeros(len(t_ns))
    start, end, amount = (
        start_ns[nonempty],
        end_ns[nonempty],
        np.asarray(amounts, np.float64)[nonempty],
    )
    rate = amount / (end - start)
    at = np.concatenate([start, end])
    order = np.argsort(at, kind="stable")
    at = at[order]
    level = np.cumsum(np.concatenate([rate, -rate])[order])
    sums = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(at))])
    return np.interp(t_ns, at, sums)


def merge_intervals(start_ns: Int, end_ns: Int) -> tuple[Int, Int]:
    """Return disjoint, sorted intervals that cover the same time."""
    order = np.argsort(start_ns, kind="stable")
    start, end = start_ns[order], end_ns[order]
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    first = np.append(True, start[1:] > reach[:-1])
    return start[first], reach[np.append(np.flatnonzero(first)[1:] - 1, len(start) - 1)]


def measure_covered_ns(start_ns: Int, end_ns: Int, t_ns: Int) -> Float:
    """Return float64[n]: time covered by any of the intervals up to each time."""
    start, end = merge_intervals(start_ns, end_ns)
    return sum_amounts(start, end, end - start, t_ns)


def limit_growth(total: Float, t_ns: Int) -> Float:
    """Return a counter of time that grows no faster than time does."""
    if not len(total):
        return total
    out = total.copy()
    out[1:] = total[0] + np.cumsum(np.minimum(np.diff(total), np.diff(t_ns)))
    return out


def sum_rates(rates: Sequence[Rate], clock: Clock, t_ns: Int) -> Float:
    """Return float64[n]: a counter, given only its growth."""
    if not rates:
        return np.zeros(len(t_ns))
    start, end, amount = _make_arrays(rates, clock)
    return sum_amounts(start, end, amount, t_ns)


def hold_gauge(rates: Sequence[Rate], clock: Clock, t_ns: Int, otherwise: float | Float) -> Float:
    """Return float64[n]: a gauge; `otherwise` where no value is given."""
    out = np.zeros(len(t_ns)) + otherwise
    for start, end, value in zip(*_make_arrays(rates, clock)) if rates else ():
        out[(t_ns >= start) & (t_ns < end)] = value
    return out


def _make_arrays(rates: Sequence[Rate], clock: Clock) -> tuple[Int, Int, Float]:
    start = clock.read(np.array([rate.start_ns for rate in rates], np.int64))
    end = clock.read(np.array([rate.end_ns for rate in rates], np.int64))
    return start, end, np.array([rate.value for rate in rates], np.float64)
