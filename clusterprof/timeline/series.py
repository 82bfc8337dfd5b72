"""What readings say about the time between them: the only place with that rule.

**A counter is an integral.** The difference of two neighbouring readings is exact for the time
between them, and nothing is known of where inside it happened. An edge that falls between two
readings takes its part of *that one* difference in proportion to time; everything further in is
exact. With `disk.read_ns_total` read at 0, 100 and 200 ms as 10, 30 and 90:

    interval       rise      why
    0 - 100 ms     20        exact
    0 - 200 ms     80        exact
    50 - 200 ms    70        half of the first difference (10), all of the second (60)
    150 - 250 ms   NaN       the end lies after the last reading

A difference is unusable when a reading is missing (NaN) or smaller than the one before (a reset or
a counter that ran backwards); an interval that needs such a difference is NaN, never a guess.

**A gauge is the value of an instant.** It holds from its reading until the next one; after the
last reading nothing is known. Missing readings leave their time out of the mean.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Float, Int, Series


def rise(series: Series, start_ns: Int, end_ns: Int) -> Float:
    """Return float64[n]: by how much a counter grew over each interval; NaN where unknown.

    Never negative. Intervals may overlap and come in any order; an empty interval between the
    first and the last reading has risen by 0.
    """
    return rise_of(series.t_ns, series.values, start_ns, end_ns)


def rise_of(t_ns: Int, values: Float | Int, start_ns: Int, end_ns: Int) -> Float:
    """Do what `rise` does for bare columns; in an integer column -1 means not available."""
    start_ns, end_ns = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    if len(t_ns) < 2 or not len(start_ns):
        return np.full(len(start_ns), np.nan)
    growth, bad = differences(values)
    before = _running(growth)
    at_start, row_start = _interpolated(t_ns, before, growth, start_ns, side="right")
    at_end, row_end = _interpolated(t_ns, before, growth, end_ns, side="left")
    known = (start_ns >= t_ns[0]) & (end_ns <= t_ns[-1]) & (end_ns >= start_ns)
    if bad.any():
        row_end = np.maximum(row_end, row_start)
        bad_before = np.concatenate([[0], np.cumsum(bad)])
        known &= (bad_before[row_end + 1] == bad_before[row_start]) | (end_ns == start_ns)
    return np.where(known, np.maximum(at_end - at_start, 0.0), np.nan)


def _interpolated(
    t_ns: Int, before: Float, growth: Float, edge_ns: Int, side: Literal["left", "right"]
) -> tuple[Float, Int]:
    """The counter at each edge, and the row of the difference the edge falls into."""
    row = t_ns.searchsorted(edge_ns, side) - 1
    np.maximum(row, 0, out=row)
    np.minimum(row, len(growth) - 1, out=row)
    length = np.maximum(t_ns[1:] - t_ns[:-1], 1)
    part = (edge_ns - t_ns[row]) / length[row]
    np.maximum(part, 0.0, out=part)
    np.minimum(part, 1.0, out=part)
    part *= growth[row]
    part += before[row]
    return part, row


def _running(growth: Float) -> Float:
    """The sum of all growth before each reading, float64[n + 1]."""
    before = np.zeros(len(growth) + 1)
    np.cumsum(growth, out=before[1:])
    return before


def differences(values: Float | Int) -> tuple[Float, NDArray[np.bool_]]:
    """Return the growth between neighbouring readings (0 where unusable) and where it is unusable.

    float64[n - 1] and bool[n - 1]; unusable next to a missing reading (NaN, or -1 in an integer
    column) and at a backwards step.
    """
    if np.issubdtype(values.dtype, np.integer):
        missing = values < 0
        growth = (values[1:] - values[:-1]).astype(np.float64)
    else:
        missing = np.isnan(values)
        growth = np.subtract(values[1:], values[:-1], dtype=np.float64)
    bad = missing[1:] | missing[:-1] | ~(growth >= 0)
    return np.where(bad, 0.0, growth), bad


def mean(series: Series, start_ns: Int, end_ns: Int) -> Float:
    """Return float64[n]: the time-weighted mean of a gauge over each interval; NaN where unknown.

    With readings 1.0 at 0 ms, 0.0 at 100 ms and any at 200 ms: over 50 - 150 ms the mean is 0.5.
    Time without a reading carries no weight; see `coverage` for how much that is.
    """
    start_ns, end_ns = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    if len(series.t_ns) < 2:
        return np.full(len(start_ns), np.nan)
    held = np.diff(series.t_ns).astype(np.float64)
    missing = np.isnan(series.values[:-1])
    weight = np.where(missing, 0.0, held)
    value = np.where(missing, 0.0, series.values[:-1])
    low, high = series.t_ns[0], series.t_ns[-1]
    start, end = np.clip(start_ns, low, high), np.clip(end_ns, low, high)
    area = _integral(series.t_ns, weight * value, start, end)
    time = _integral(series.t_ns, weight, start, end)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(time > 0, area / time, np.nan)


def coverage(series: Series, start_ns: Int, end_ns: Int, longest_gap_ns: int = 0) -> Float:
    """Return float64[n], 0 to 1: the share of each interval between two usable readings.

    Two readings further apart than `longest_gap_ns` (when it is given) cover nothing. NaN for an
    empty interval.
    """
    start_ns, end_ns = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    length = (end_ns - start_ns).astype(np.float64)
    if len(series.t_ns) < 2:
        return np.where(length > 0, 0.0, np.nan)
    held = np.diff(series.t_ns)
    counts = series.is_counter
    bad = differences(series.values)[1] if counts else np.isnan(series.values[:-1])
    if longest_gap_ns:
        bad = bad | (held > longest_gap_ns)
    low, high = series.t_ns[0], series.t_ns[-1]
    start, end = np.clip(start_ns, low, high), np.clip(end_ns, low, high)
    covered = _integral(series.t_ns, np.where(bad, 0.0, held), start, end)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(length > 0, covered / length, np.nan)


def _integral(t_ns: Int, growth: Float, start: Int, end: Int) -> Float:
    before = _running(growth)
    at_start, _ = _interpolated(t_ns, before, growth, start, side="right")
    at_end, _ = _interpolated(t_ns, before, growth, end, side="left")
    return np.maximum(at_end - at_start, 0.0)
