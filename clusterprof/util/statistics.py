"""Find quantiles of histograms."""

from __future__ import annotations

from collections.abc import Mapping


def find_quantile(counts: Mapping[int, int], fraction: float) -> float | None:
    """Find the smallest value that at least this fraction of the values does not exceed.

    counts: value -> how often it occurs. fraction: 0 to 1. Returns the value in the unit of
    the keys; None without values.
    """
    total = sum(counts.values())
    reached = 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= fraction * total:
            return float(value)
    return None
