"""Find quantiles of histograms, test whether a count is more than chance, fit shares.

Source of least squares with bounds: Lawson and Hanson, "Solving Least Squares Problems" (1974);
here by coordinate descent, which converges for them (Luo and Tseng, 1992).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_ROUNDS, _CONVERGED = 200, 1e-5


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


def compute_binomial_tail(trials: int, successes: int, probability: float) -> float:
    """Compute the probability of at least so many successes in independent trials, 0 to 1.

    Where the probability differs from trial to trial, that for their mean is an upper bound, as
    long as successes are at least one more than their expected number. Source: Hoeffding, "On the
    distribution of the number of successes in independent trials" (1956), theorem 4.
    """
    if successes <= 0:
        return 1.0
    if successes > trials or probability <= 0:
        return 0.0
    if probability >= 1:
        return 1.0
    odds = probability / (1 - probability)
    log_term = (
        math.lgamma(trials + 1)
        - math.lgamma(successes + 1)
        - math.lgamma(trials - successes + 1)
        + successes * math.log(probability)
        + (trials - successes) * math.log1p(-probability)
    )
    term = total = 1.0  # relative to the first, which may be too small for a float
    for count in range(successes, trials):
        term *= (trials - count) / (count + 1) * odds
        total += term
        if term < 1e-17 * total:  # terms rise only up to the mean, and fall from there on
            break
    return min(1.0, math.exp(log_term + math.log(total)))


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for the number of tests, so that any false one is as improbable as stated.

    Source: Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def solve_within_bounds(matrix: Floats, target: Floats) -> Floats:
    """Minimize x * matrix * x / 2 - target * x for 0 <= x <= 1: float64[k].

    matrix: float64[k, k], positive definite. target: float64[k].
    """
    solved = np.asarray(np.linalg.solve(matrix, target) if target.size else target, np.float64)
    if (solved < 0).any() or (solved > 1).any():
        solved = _descend(matrix, target, np.clip(solved, 0.0, 1.0))
    return solved


def _descend(matrix: Floats, target: Floats, shares: Floats) -> Floats:
    """Minimize x * matrix * x / 2 - target * x for 0 <= x <= 1, from these shares: float64[k]."""
    values = shares.tolist()
    rows = tuple(zip(matrix.tolist(), np.diag(matrix).tolist(), target.tolist()))
    for _ in range(_ROUNDS):
        converged = True
        for index, (row, diagonal, wanted) in enumerate(rows):
            previous = values[index]
            value = (wanted - sum(map(mul, row, values)) + diagonal * previous) / diagonal
            values[index] = value = 0.0 if value < 0.0 else 1.0 if value > 1.0 else value
            if abs(value - previous) >= _CONVERGED:
                converged = False
        if converged:
            break
    return np.array(values)
