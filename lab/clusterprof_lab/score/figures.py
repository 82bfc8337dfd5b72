"""Numbers with the interval they are known to: Wilson's for parts of trials, a bootstrap for means.

A trial is a job with a fault, never a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959963984540054
TWO_SIDED = (0.025, 0.975)
_DRAWS = 1000
_SEED = 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; `value` is None when nothing was claimed or asked."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    """Trials."""
    hits: int | None = None
    """Of a part: how many of them."""


NO_FIGURE = Figure(None, None, None, 0)


def compute_wilson(hits: int, n: int) -> Figure:
    """Return hits / n with Wilson's 95 % interval; 9 of 10 is 0.9 (0.596 to 0.982)."""
    if not n:
        return NO_FIGURE
    part, square = hits / n, Z_95 * Z_95
    middle = (part + square / (2 * n)) / (1 + square / n)
    reach = Z_95 * math.sqrt(part * (1 - part) / n + square / (4 * n * n)) / (1 + square / n)
    low = 0.0 if hits == 0 else max(0.0, middle - reach)
    high = 1.0 if hits == n else min(1.0, middle + reach)
    return Figure(part, low, high, n, hits)


def compute_ratio(answers: Sequence[bool | None]) -> Figure:
    """Return the part that is true of those that are not None."""
    asked = [answer for answer in answers if answer is not None]
    return compute_wilson(sum(asked), len(asked))


def bootstrap_trials(
    trials: Sequence[Sequence[float]], what: Callable[[np.ndarray], float] | None = None
) -> Figure:
    """Return a number over the values of all trials, with a bootstrap of whole trials.

    `what` is the mean when it is not given.
    """
    kept = [np.asarray(trial, float) for trial in trials if len(trial)]
    if not kept:
        return NO_FIGURE
    all_values = np.concatenate(kept)
    value = float(all_values.mean() if what is None else what(all_values))
    if len(kept) == 1:
        return Figure(value, None, None, 1)
    drawn = draw_trials(len(kept))
    if what is None:
        sums, sizes = (
            np.array([trial.sum() for trial in kept]),
            np.array([trial.size for trial in kept]),
        )
        values = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    else:
        values = np.array([what(np.concatenate([kept[row] for row in rows])) for rows in drawn])
    low, high = np.quantile(values, TWO_SIDED)
    return Figure(value, float(low), float(high), len(kept))


def draw_trials(n: int) -> np.ndarray:
    """Return which of n trials each round of a bootstrap has; int64[rounds, n], always the same."""
    return np.random.default_rng(_SEED).integers(0, n, (_DRAWS, n))


def compute_p95(values: np.ndarray) -> float:
    """Return the value that 95 % do not exceed: one of them, not between two."""
    place = math.ceil(0.95 * values.size) - 1
    return float(np.partition(values, place)[place])
