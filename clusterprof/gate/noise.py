"""How far a number of a run could be off by chance: block bootstrap, and what baselines show.

Two kinds of chance are added up. Within a run neighbouring steps resemble each other, so whole
stretches of blocks are drawn anew, not single steps:

    blocks      0 1 2 3 4 5 6 7 8 9
    drawn       4 5 6 | 0 1 2 | 8 9 0 | 4        500 times, always the same ones

Between runs of one job something differs too (nodes, neighbours, caches). How much, baselines and
repeats say; until there are some, a policy says it, and weighs as much as `PRIOR_RUNS` runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from clusterprof.gate.columns import columns_of
from clusterprof.stepstats import BINS_PER_OCTAVE, StepStats

DRAWS = 500
FEWEST_BLOCKS = 10
"""Of fewer nothing is said of what is usual."""
PRIOR_RUNS = 6
CONFIDENCE = 0.95
POWER_Z = 1.6448536269514722
"""What is found with a power of 95 % lies so many standard errors beyond what can be told."""
_SEED = 20_260_101

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of one run, and how it varies within it."""

    value: float
    variance: float
    """Of the value, or of its logarithm; by chance within the run."""
    steps: int
    """Of the rank with the fewest."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far candidate and baselines are apart, and what is known of that."""

    estimate: float
    """Difference of values, or of logarithms."""
    error: float
    """Its standard error."""
    quantile: float
    """Standard errors on each side of the interval, by Student's t."""
    between: float
    """Standard deviation between runs that was reckoned with."""
    runs: tuple[int, int]
    """Candidates and baselines."""
    steps: int
    """Of the shortest run."""
    within: float
    """The part of error**2 that more steps would make smaller."""

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.estimate - self.quantile * self.error

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.estimate + self.quantile * self.error

    def found_from(self, limit: float) -> float:
        """Return the smallest true difference that would be told from a limit in 95 % of runs."""
        return limit + (self.quantile + POWER_Z) * self.error

    def steps_needed(self, limit: float) -> int | None:
        """Return how many steps each run needs to tell this difference from a limit; None when no
        number of steps would do."""
        gap = abs(self.estimate - limit) / self.quantile
        room = gap**2 - (self.error**2 - self.within)
        if room <= 0 or self.within <= 0:
            return None
        needed = self.steps * self.within / room
        return math.ceil(needed) if needed < 1e9 else None


def draws(name: str, steps: StepStats | None) -> Float | None:
    """Return what a metric would be in `DRAWS` runs like this one; None where it cannot be said."""
    if steps is None or steps.blocks < FEWEST_BLOCKS:
        return None
    drawn = weights(steps.blocks)
    if name.startswith("step.p"):
        return _quantiles(steps, float(name.removeprefix("step.p").removesuffix("_ns")), drawn)
    columns = columns_of(name, steps)
    return None if columns is None else drawn_ratio(*columns)


def drawn_ratio(above: Sequence[int], below: Sequence[int]) -> Float | None:
    """Return the ratio of the sums of two columns in `DRAWS` runs; None where one has nothing."""
    drawn = weights(len(below))
    sums = [drawn @ np.array(column, np.float64) for column in (above, below)]
    return _widened(sums[0] / sums[1], len(below)) if (sums[1] > 0).all() else None


def _widened(drawn: Float, blocks: int) -> Float:
    """Undo what drawing from so few stretches makes the spread too small by."""
    middle = drawn.mean()
    return middle + (drawn - middle) * math.sqrt(blocks / (blocks - _stretch(blocks)))


def _stretch(blocks: int) -> int:
    return max(1, round(blocks ** (1 / 3)))


@lru_cache(maxsize=8)
def weights(blocks: int) -> Float:
    """Return how often each block is drawn, float64[DRAWS, blocks]; stretches go round the end."""
    length = _stretch(blocks)
    stretches = -(-blocks // length)
    random = np.random.default_rng(_SEED)
    start = random.integers(0, blocks, (DRAWS, stretches))
    at = (start[:, :, None] + np.arange(length)).reshape(DRAWS, -1)[:, :blocks] % blocks
    out = np.zeros((DRAWS, blocks))
    np.add.at(out, (np.arange(DRAWS)[:, None], at), 1)
    return out


def _quantiles(steps: StepStats, percent: float, drawn: Float) -> Float | None:
    bins = sorted({bin_ for block in steps.lengths for bin_, _ in block})
    if not bins:
        return None
    place = {bin_: at for at, bin_ in enumerate(bins)}
    table = np.zeros((steps.blocks, len(bins)))
    for row, block in enumerate(steps.lengths):
        for bin_, count in block:
            table[row, place[bin_]] = count
    reached = np.cumsum(drawn @ table, axis=1)
    target = percent / 100 * reached[:, -1]
    at = np.minimum((reached < target[:, None]).sum(axis=1), len(bins) - 1)
    rows = np.arange(len(at))
    before = np.where(at > 0, reached[rows, at - 1], 0.0)
    inside = (target - before) / np.maximum(reached[rows, at] - before, 1.0)
    low = 2.0 ** (np.array(bins, np.float64)[at] / BINS_PER_OCTAVE)
    return _widened(low * (1 + inside * (2 ** (1 / BINS_PER_OCTAVE) - 1)), steps.blocks)


def compared(
    ours: Sequence[Sample], theirs: Sequence[Sample], prior: float, logarithms: bool
) -> Difference:
    """Lay candidates beside baselines; `prior` is the standard deviation between runs that is
    reckoned with until they show it, in the same measure as the variances."""
    values = [
        np.array([math.log(one.value) if logarithms else one.value for one in some])
        for some in (ours, theirs)
    ]
    inside = [np.array([one.variance for one in some]) for some in (ours, theirs)]
    more = sum(len(some) - 1 for some in values)
    spread = sum(float(((some - some.mean()) ** 2).sum()) for some in values)
    # What runs differ by holds the chance within them too: that is added apart.
    own = sum(float(one.mean()) * (len(one) - 1) for one in inside)
    between = (PRIOR_RUNS * prior**2 + max(0.0, spread - own)) / (PRIOR_RUNS + more)
    within = sum(float(one.sum()) / len(one) ** 2 for one in inside)
    among = between * sum(1 / len(one) for one in inside)
    return Difference(
        estimate=float(values[0].mean() - values[1].mean()),
        error=math.sqrt(within + among),
        quantile=student(PRIOR_RUNS + more),
        between=math.sqrt(between),
        runs=(len(ours), len(theirs)),
        steps=min(one.steps for one in (*ours, *theirs)),
        within=within,
    )


@lru_cache(maxsize=64)
def student(freedom: int) -> float:
    """Return how many standard errors hold 95 % by Student's t with so many degrees of freedom."""
    wanted = 1 - (1 - CONFIDENCE) / 2
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < wanted else (low, middle)
    return (low + high) / 2


def _below(t: float, freedom: int) -> float:
    """The share of Student's distribution below t >= 0; whole degrees of freedom (A&S 26.7.3)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom == 1:
        return 0.5 + angle / math.pi
    term = cosine if freedom % 2 else 1.0
    total = 0.0
    for k in range(2 + freedom % 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    if freedom % 2:
        return 0.5 + (angle + sine * total) / math.pi
    return 0.5 + sine * total / 2
