"""The length of a step, where nobody marked steps: what repeats in a series."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clusterprof.timeline.model import Float

SURE_FROM = 0.95
FEWEST_PERIODS = 8
_SHORTEST_SAMPLES = 3
_NEARLY = 0.98  # of the highest peak: a multiple of the period correlates as well as the period


class Period(NamedTuple):
    """What repeats, and how well."""

    samples: float
    acf: float
    """Autocorrelation at that distance, 1 for a series that repeats exactly."""


def period_of(values: Float) -> Period | None:
    """Return the period of a series of evenly spaced values; None where it is short or flat.

    0 1 0 0 1 0 0 1 0 … repeats after 3 samples. Of the peaks of the autocorrelation the shortest
    counts that is nearly as high as the highest; a period that is no whole number of samples shows
    at the first multiple that nearly is.
    """
    n = values.size
    most = n // FEWEST_PERIODS
    if most <= _SHORTEST_SAMPLES or np.ptp(values) <= 0:
        return None
    centred = values - values.mean()
    spectrum = np.fft.rfft(centred, 2 * n)
    sums = np.fft.irfft(np.abs(spectrum) ** 2)[: most + 2]
    # Each distance by the number of pairs it has, so that distant ones are not smaller for that.
    acf = sums / np.arange(n, n - sums.size, -1) / (sums[0] / n)
    inner = acf[_SHORTEST_SAMPLES : most + 1]
    peaks = np.flatnonzero(
        (inner >= acf[_SHORTEST_SAMPLES - 1 : most])
        & (inner >= acf[_SHORTEST_SAMPLES + 1 : most + 2])
    )
    if not peaks.size:
        return None
    best = float(inner[peaks].max())
    if best <= 0:
        return None
    first = int(peaks[inner[peaks] >= _NEARLY * best][0]) + _SHORTEST_SAMPLES
    return Period(float(first), min(best, 1.0))
