"""Values of a recorded signal over any interval; only this module interpolates readings.

**A counter is an integral.** The difference of two adjacent readings is exact for the
time between them; where inside that time it happened is unknown. An interval edge that
falls between two readings takes its share of *that one* difference in proportion to
time; everything further inside is exact. With `disk.read_ns_total` read at 0, 100 and
200 ms as 10, 30 and 90:

    interval       increase  why
    0 - 100 ms     20        exact
    0 - 200 ms     80        exact
    50 - 200 ms    70        half of the first difference (10), all of the second (60)
    150 - 250 ms   NaN       the end lies after the last reading

A difference is unusable if a reading is missing (NaN) or smaller than the previous one
(a reset, or a counter that ran backwards). An interval that needs an unusable
difference is NaN, not a guess.

**A gauge is the value at an instant.** It holds from its reading until the next one;
after the last reading the value is unknown. The time of missing readings is left out of
the mean.

It also estimates the step length from the period of a series, if no steps are marked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.timeline.model import Float, Int, Rank, Series
from clusterprof.errors import DEVICES_RELEASED

HELPER_RESTARTED = "helper-restarted"
"""The event after which a collector's helper process counts from 0 again."""


def compute_increase(series: Series, start_ns: Int, end_ns: Int) -> Float:
    """Compute by how much a counter grew over each interval: float64[n], NaN where unknown.

    Never negative. Intervals (int64[n], ns) may overlap and may be in any order. An empty
    interval between the first and the last reading has an increase of 0.
    """
    return compute_column_increase(series.t_ns, series.values, start_ns, end_ns)


def compute_column_increase(t_ns: Int, values: Float | Int, start_ns: Int, end_ns: Int) -> Float:
    """Compute the increase of a counter column over each interval.

    Returns float64[n], NaN where unknown.

    t_ns: int64[m], times of the readings. values: float64[m] with NaN, or int64[m] with -1,
    for readings that are not available. start_ns, end_ns: int64[n].
    """
    return evaluate_increase(compute_growth(values), locate_intervals(t_ns, start_ns, end_ns))


@dataclass(frozen=True, slots=True)
class CounterGrowth:
    """Cumulative growth of a counter, independent of the intervals it is evaluated for."""

    growth: Float
    """float64[m - 1]: between adjacent readings, 0 where unusable."""
    before: Float
    """float64[m]: the sum of all growth before each reading."""
    unusable_before: Int | None
    """int64[m]: the number of unusable differences before each reading; None if all are
    usable.
    """


@dataclass(frozen=True, slots=True)
class IntervalPositions:
    """Positions of n intervals among reading times.

    Valid for all counters read at those times.
    """

    start_row: Int
    """The difference into which the start of the interval falls."""
    start_fraction: Float
    """Position of the start within that difference, 0 to 1."""
    end_row: Int
    end_fraction: Float
    is_covered: NDArray[np.bool_]
    """True for an interval between the first and the last reading."""
    empty: NDArray[np.bool_]
    """True for an interval that ends where it starts."""


def compute_growth(values: Float | Int) -> CounterGrowth:
    """Compute the cumulative growth of a counter from its readings.

    values: float64[m] with NaN, or int64[m] with -1, for readings that are not available.
    """
    growth, unusable = compute_differences(values)
    unusable_before = np.concatenate([[0], np.cumsum(unusable)]) if unusable.any() else None
    return CounterGrowth(growth, _sum_growth_before(growth), unusable_before)


def locate_intervals(t_ns: Int, start_ns: Int, end_ns: Int) -> IntervalPositions:
    """Locate intervals among the times of readings; all arrays int64, ns."""
    start_ns, end_ns = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    empty = end_ns == start_ns
    if len(t_ns) < 2:
        row, fraction = np.zeros(len(start_ns), np.int64), np.zeros(len(start_ns))
        return IntervalPositions(row, fraction, row, fraction, np.zeros(len(row), np.bool_), empty)
    is_covered = (start_ns >= t_ns[0]) & (end_ns <= t_ns[-1]) & (end_ns >= start_ns)
    length = np.maximum(t_ns[1:] - t_ns[:-1], 1)
    start_row, start_fraction = _locate_edges(t_ns, length, start_ns, side="right")
    end_row, end_fraction = _locate_edges(t_ns, length, end_ns, side="left")
    return IntervalPositions(start_row, start_fraction, end_row, end_fraction, is_covered, empty)


def evaluate_increase(counter: CounterGrowth, positions: IntervalPositions) -> Float:
    """Evaluate by how much a counter grew over each interval: float64[n], NaN where unknown."""
    if not len(counter.growth) or not len(positions.is_covered):
        return np.full(len(positions.is_covered), np.nan)
    is_covered = positions.is_covered
    if counter.unusable_before is not None:
        end_row = np.maximum(positions.end_row, positions.start_row)
        unusable = counter.unusable_before
        usable = unusable[end_row + 1] == unusable[positions.start_row]
        is_covered = is_covered & (usable | positions.empty)
    grown = _estimate_counter_at(counter, positions.end_row, positions.end_fraction)
    grown -= _estimate_counter_at(counter, positions.start_row, positions.start_fraction)
    np.maximum(grown, 0.0, out=grown)
    return grown if is_covered.all() else np.where(is_covered, grown, np.nan)


def _locate_edges(
    t_ns: Int, length_ns: Int, edge_ns: Int, side: Literal["left", "right"]
) -> tuple[Int, Float]:
    """Locate each edge: the row of the difference it falls into, and the position within it."""
    row = t_ns.searchsorted(edge_ns, side) - 1
    np.maximum(row, 0, out=row)
    np.minimum(row, len(length_ns) - 1, out=row)
    fraction = (edge_ns - t_ns[row]) / length_ns[row]
    np.maximum(fraction, 0.0, out=fraction)
    np.minimum(fraction, 1.0, out=fraction)
    return row, fraction


def _estimate_counter_at(counter: CounterGrowth, row: Int, fraction: Float) -> Float:
    """Estimate the counter at each edge."""
    value = fraction * counter.growth[row]
    value += counter.before[row]
    return value


def _sum_growth_before(growth: Float) -> Float:
    """Sum all growth before each reading, float64[n + 1]."""
    before = np.zeros(len(growth) + 1)
    np.cumsum(growth, out=before[1:])
    return before


def compute_differences(values: Float | Int) -> tuple[Float, NDArray[np.bool_]]:
    """Compute the growth between adjacent readings, and a mask of the unusable differences.

    float64[n - 1] (0 where unusable) and bool[n - 1]. A difference is unusable next to a
    missing reading (NaN, or -1 in an integer column) and at a backwards step.
    """
    counts = values.dtype.kind == "i"
    growth = (values[1:] - values[:-1]).astype(np.float64, copy=False)
    if len(growth) and values[0] >= 0 and growth.min() >= 0:  # none missing, no step back
        return growth, np.zeros(len(growth), np.bool_)
    missing = values < 0 if counts else np.isnan(values)
    unusable = missing[1:] | missing[:-1] | ~(growth >= 0)
    return np.where(unusable, 0.0, growth), unusable


def compute_mean(series: Series, start_ns: Int, end_ns: Int) -> Float:
    """Compute the time-weighted mean of a gauge over each interval.

    Returns float64[n], NaN where unknown. With readings 1.0 at 0 ms, 0.0 at 100 ms and any
    value at 200 ms, the mean over 50 - 150 ms is 0.5. Time without a reading has no weight.
    """
    start_ns, end_ns = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    if len(series.t_ns) < 2:
        return np.full(len(start_ns), np.nan)
    hold_ns = np.diff(series.t_ns).astype(np.float64)
    missing = np.isnan(series.values[:-1])
    weight = np.where(missing, 0.0, hold_ns)
    value = np.where(missing, 0.0, series.values[:-1])
    low, high = series.t_ns[0], series.t_ns[-1]
    start, end = np.clip(start_ns, low, high), np.clip(end_ns, low, high)
    area = _sum_between(series.t_ns, weight * value, start, end)
    time = _sum_between(series.t_ns, weight, start, end)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(time > 0, area / time, np.nan)


def _sum_between(t_ns: Int, growth: Float, start: Int, end: Int) -> Float:
    counter, positions = (
        CounterGrowth(growth, _sum_growth_before(growth), None),
        locate_intervals(t_ns, start, end),
    )
    difference = _estimate_counter_at(
        counter, positions.end_row, positions.end_fraction
    ) - _estimate_counter_at(counter, positions.start_row, positions.start_fraction)
    return np.maximum(difference, 0.0)


MIN_CONFIDENT_ACF = 0.95
MIN_PERIODS = 8
_MIN_PERIOD_SAMPLES = 3
_PEAK_RATIO = 0.98  # of the highest peak: a multiple of the period correlates as well as the period


class Period(NamedTuple):
    """Period of a series and how well the series repeats."""

    samples: float
    acf: float
    """Autocorrelation at that distance; 1 for a series that repeats exactly."""


def estimate_period(values: Float) -> Period | None:
    """Estimate the period of evenly spaced values, float64[n]; None if short or flat.

    0 1 0 0 1 0 0 1 0 … repeats after 3 samples. The result is the shortest peak of the
    autocorrelation that is nearly as high as the highest one. A period that is not a whole
    number of samples appears at its first multiple that nearly is.
    """
    n = values.size
    max_samples = n // MIN_PERIODS
    if max_samples <= _MIN_PERIOD_SAMPLES or np.ptp(values) <= 0:
        return None
    centered = values - values.mean()
    spectrum = np.fft.rfft(centered, 2 * n)
    sums = np.fft.irfft(np.abs(spectrum) ** 2)[: max_samples + 2]
    # Divide by the number of pairs at each distance, so that long distances are not too small.
    acf = sums / np.arange(n, n - sums.size, -1) / (sums[0] / n)
    inner = acf[_MIN_PERIOD_SAMPLES : max_samples + 1]
    peaks = np.flatnonzero(
        (inner >= acf[_MIN_PERIOD_SAMPLES - 1 : max_samples])
        & (inner >= acf[_MIN_PERIOD_SAMPLES + 1 : max_samples + 2])
    )
    if not peaks.size:
        return None
    highest = float(inner[peaks].max())
    if highest <= 0:
        return None
    first = int(peaks[inner[peaks] >= _PEAK_RATIO * highest][0]) + _MIN_PERIOD_SAMPLES
    return Period(float(first), min(highest, 1.0))


_READINGS = "readings"  # name in `Chunk.shared`
SNAPSHOT_VALID_NS = 2_500_000_000
"""A snapshot of utilization holds for the time since the one before if that is no longer, ns."""


def get_busy_readings(rank: Rank) -> tuple[Int, Float]:
    """Return sample times and cumulative busy time of the rank's device: int64[n], float64[n], ns.

    A NaN or a decrease marks unmeasured time.
    """
    readings = rank.chunk.shared.get((_READINGS, rank.device))
    if readings is None:
        readings = rank.chunk.shared[_READINGS, rank.device] = _read_busy_time(rank)
    return readings  # type: ignore[no-any-return]


def get_means_at_driver_times(rank: Rank, name: str) -> Series | None:
    """Return a series of means of the rank's device at the times up to which they were measured.

    A value that is repeated, because the driver had no newer one, is dropped. None if it was
    not recorded.
    """
    series = rank.chunk.series.get((name, rank.device))
    until = rank.chunk.series.get((signals.GPU_BUSY_UNTIL.name, rank.device))
    if series is None or until is None:
        return series
    t_ns, values = _move_to_driver_times(series.t_ns, series.values, until)
    return Series(t_ns, values, series.is_counter)


def _read_busy_time(rank: Rank) -> tuple[Int, Float]:
    total = rank.chunk.series.get((signals.GPU_BUSY_TIME.name, rank.device))
    if total is not None and total.t_ns.size:
        measured = ~np.isnan(total.values)
        # A counter needs no reading in between: the next one still contains all of it.
        t_ns = total.t_ns[measured]
        busy_ns = _reset_at_restarts(rank, t_ns, total.values[measured])
        until = rank.chunk.series.get((signals.GPU_BUSY_UNTIL.name, rank.device))
        return (t_ns, busy_ns) if until is None else _move_to_driver_times(t_ns, busy_ns, until)
    ratio = rank.chunk.series.get((signals.GPU_BUSY.name, rank.device))
    if ratio is None or not rank.device:
        return np.zeros(0, np.int64), np.zeros(0)
    return ratio.t_ns, _sum_busy_ratio(ratio)


def _reset_at_restarts(rank: Rank, t_ns: Int, busy_ns: Float) -> Float:
    """Let cumulative busy time decrease where the device's collector was opened again.

    A device that was released, or whose helper died or hung, is counted from 0 again: two equal
    totals around that do not mean that it was idle. t_ns int64[n], busy_ns float64[n], ns; returns
    float64[n].
    """
    chunk = rank.chunk
    restarts_ns = {event.t_ns for event in chunk.events if event.kind == HELPER_RESTARTED}
    restarts_ns |= {
        gap.t_ns
        for gap in chunk.gaps
        if gap.message == DEVICES_RELEASED.message and gap.device in ("", rank.device)
    }
    if not restarts_ns or not t_ns.size:
        return busy_ns
    restarts = np.searchsorted(np.asarray(sorted(restarts_ns), np.int64), t_ns)
    return busy_ns - restarts * (float(np.ptp(busy_ns)) + 1.0)


def _move_to_driver_times(t_ns: Int, busy_ns: Float, until: Series) -> tuple[Int, Float]:
    """Return the readings at the ends of the driver's periods instead of when they were polled.

    A driver hands a period over up to a period late. t_ns int64[n], busy_ns float64[n]: polled
    totals. until: end of the period of each poll, NaN where the driver's clock was not
    understood; those readings keep the time of the poll. Readings that end no later than the
    one before are dropped, so times strictly increase. A poll reads the driver a little after its
    own time, so a period can end after it; that reading keeps the time of the poll, too.
    """
    if not until.t_ns.size:
        return t_ns, busy_ns
    row = np.minimum(np.searchsorted(until.t_ns, t_ns), until.t_ns.size - 1)
    end_ns = until.values[row]
    is_known = (until.t_ns[row] == t_ns) & ~np.isnan(end_ns) & (end_ns <= t_ns + SNAPSHOT_VALID_NS)
    ends = np.where(is_known, end_ns, t_ns).astype(np.int64)
    latest = np.maximum.accumulate(ends)
    is_new = np.append(True, ends[1:] > latest[:-1]) if ends.size else np.zeros(0, np.bool_)
    return np.minimum(ends, t_ns)[is_new], busy_ns[is_new]


def _sum_busy_ratio(ratio: Series) -> Float:
    """Compute cumulative busy time of a snapshot series; decreases mark unmeasured time."""
    interval_ns = np.diff(ratio.t_ns).astype(np.float64)
    step = np.rint(interval_ns * ratio.values[1:])
    step[interval_ns > SNAPSHOT_VALID_NS] = np.nan
    so_far = np.concatenate([[0.0], np.nancumsum(step)])
    # A missing step makes the counter decrease, which readers interpret as not measured.
    fallen = np.concatenate([[0.0], np.cumsum(np.isnan(step) * 1.0)])
    return so_far - fallen * (float(ratio.t_ns[-1] - ratio.t_ns[0]) + 1.0)
