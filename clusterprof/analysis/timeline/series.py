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

from dataclasses import dataclass
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
    return risen(growth_of(values), located(t_ns, start_ns, end_ns))


@dataclass(frozen=True, slots=True)
class Growth:
    """A counter made ready to be asked; the same whatever the intervals are."""

    growth: Float
    """Between neighbouring readings, 0 where unusable."""
    before: Float
    """The sum of all growth before each reading."""
    bad_before: Int | None
    """How many unusable differences there are before each reading; None when all are usable."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where intervals lie among the times of readings; the same for all counters read then."""

    start_row: Int
    """The difference into which the start falls."""
    start_part: Float
    """How far into it, 0 to 1."""
    end_row: Int
    end_part: Float
    known: NDArray[np.bool_]
    """True for an interval between the first and the last reading."""
    empty: NDArray[np.bool_]
    """True for an interval that ends where it starts."""


def growth_of(values: Float | Int) -> Growth:
    """Return what the readings of a counter say; in an integer column -1 means not available."""
    growth, bad = differences(values)
    bad_before = np.concatenate([[0], np.cumsum(bad)]) if bad.any() else None
    return Growth(growth, _running(growth), bad_before)


def located(t_ns: Int, start_ns: Int, end_ns: Int) -> Located:
    """Find intervals among the times of readings."""
    start_ns, end_ns = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    empty = end_ns == start_ns
    if len(t_ns) < 2:
        row, part = np.zeros(len(start_ns), np.int64), np.zeros(len(start_ns))
        return Located(row, part, row, part, np.zeros(len(row), np.bool_), empty)
    known = (start_ns >= t_ns[0]) & (end_ns <= t_ns[-1]) & (end_ns >= start_ns)
    length = np.maximum(t_ns[1:] - t_ns[:-1], 1)
    start_row, start_part = _placed(t_ns, length, start_ns, side="right")
    end_row, end_part = _placed(t_ns, length, end_ns, side="left")
    return Located(start_row, start_part, end_row, end_part, known, empty)


def risen(of: Growth, at: Located) -> Float:
    """Return float64[n]: by how much a counter grew over each interval; NaN where unknown."""
    if not len(of.growth) or not len(at.known):
        return np.full(len(at.known), np.nan)
    known = at.known
    if of.bad_before is not None:
        end_row = np.maximum(at.end_row, at.start_row)
        usable = of.bad_before[end_row + 1] == of.bad_before[at.start_row]
        known = known & (usable | at.empty)
    grown = _at(of, at.end_row, at.end_part)
    grown -= _at(of, at.start_row, at.start_part)
    np.maximum(grown, 0.0, out=grown)
    return grown if known.all() else np.where(known, grown, np.nan)


def _placed(
    t_ns: Int, length_ns: Int, edge_ns: Int, side: Literal["left", "right"]
) -> tuple[Int, Float]:
    """The row of the difference each edge falls into, and how far into it."""
    row = t_ns.searchsorted(edge_ns, side) - 1
    np.maximum(row, 0, out=row)
    np.minimum(row, len(length_ns) - 1, out=row)
    part = (edge_ns - t_ns[row]) / length_ns[row]
    np.maximum(part, 0.0, out=part)
    np.minimum(part, 1.0, out=part)
    return row, part


def _at(of: Growth, row: Int, part: Float) -> Float:
    """The counter at each edge."""
    value = part * of.growth[row]
    value += of.before[row]
    return value


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
    counts = values.dtype.kind == "i"
    growth = (values[1:] - values[:-1]).astype(np.float64, copy=False)
    if len(growth) and values[0] >= 0 and growth.min() >= 0:  # nothing missing, no step back
        return growth, np.zeros(len(growth), np.bool_)
    missing = values < 0 if counts else np.isnan(values)
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
    of, at = Growth(growth, _running(growth), None), located(t_ns, start, end)
    difference = _at(of, at.end_row, at.end_part) - _at(of, at.start_row, at.start_part)
    return np.maximum(difference, 0.0)
