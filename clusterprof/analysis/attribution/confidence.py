"""How sure we are of a cause, and when we rather say less.

score = prior of the grade * margin * coverage. It decides whether a cause is named at all; what is
printed is the probability that the cause is right, measured on jobs with known faults (below).

    grade    what it means                    leaf    family
    A        marker and counter agree         0.95    0.97
    B        one direct signal                0.85    0.92
    C        correlation only                 0.60    0.78
    D        prior knowledge                  0.30    0.45

margin: time of the same kind that nothing explains could belong to another cause, 1 - 0.2 * its
part. coverage: 0.8 + 0.2 * the part of the time that was measured. A leaf is named from 0.7 on,
else its family, if that is sure enough, else the time stays unattributed.

A claim of half a GPU-second rests on a handful of samples and is right less often than one of
minutes, whatever its grade. `RIGHT_BY_GPU_S` is how often claims of a size were right on the corpus
(split dev, real and synthetic jobs weighing the same); the score moves it about `MEAN_SCORE`. Time
between two marks is no matter of samples: half a second of transfers in 100 steps was looked at 100
times, and weighs as 100 samples do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from clusterprof.findings import Grade

LEAF_PRIOR: Mapping[str, float] = {"A": 0.95, "B": 0.85, "C": 0.60, "D": 0.30}
FAMILY_PRIOR: Mapping[str, float] = {"A": 0.97, "B": 0.92, "C": 0.78, "D": 0.45}
NAMED_FROM = 0.7
RIGHT_BY_GPU_S = ((0.2, 0.69), (0.45, 0.72), (0.9, 0.93), (2.0, 0.945))
"""Lost GPU-seconds of a claim, and which part of such claims was right."""
MEAN_SCORE = 0.86
"""Of those claims."""
AT_MOST = 0.98
_SAMPLE_S = 0.1
"""Samples come ten times a second in all of the corpus."""
_MARGIN_WEIGHT = 0.2
_COVERAGE_FLOOR = 0.8


def confidence(
    by_grade: Mapping[str, int],
    unexplained: int,
    coverage_ratio: float,
    priors: Mapping[str, float] = LEAF_PRIOR,
) -> float:
    """Return how probable it is that a claim names the right cause, 0 to 1.

    `by_grade` holds the claimed amount per grade, `unexplained` what of the same kind of time
    nothing explains, in the same unit. 80 % grade A and 20 % C, nothing unexplained, full coverage:
    0.8 * 0.95 + 0.2 * 0.60 = 0.88.
    """
    claimed = sum(by_grade.values())
    if claimed <= 0:
        return 0.0
    prior = sum(priors[grade] * amount for grade, amount in by_grade.items()) / claimed
    margin = 1 - _MARGIN_WEIGHT * unexplained / (claimed + unexplained)
    covered = _COVERAGE_FLOOR + (1 - _COVERAGE_FLOOR) * min(1.0, max(0.0, coverage_ratio))
    return prior * margin * covered


def calibrated(score: float, lost_ns: int, marked: int = 0) -> float:
    """Return how probable it is that a cause of `lost_ns` of GPU time is right, 0 to `AT_MOST`.

    By the logarithm of its size between those measured: 0.9 s at the mean score are right in 93 of
    100 cases, and so are 0.2 s in 69; a score of half the mean halves both. `marked`: in how many
    steps of ranks the job's own marks timed it; 9 of them say as much as 0.9 s of samples.
    """
    sizes, right = zip(*RIGHT_BY_GPU_S)
    size = math.log(max(lost_ns * 1e-9, marked * _SAMPLE_S, 1e-9))
    part = float(np.interp(size, [math.log(one) for one in sizes], right))
    return min(AT_MOST, part * score / MEAN_SCORE)


def main_grade(by_grade: Mapping[str, int]) -> Grade:
    """Return the grade that most of a claim has; of two equal ones the weaker."""
    best: Grade = "D"
    for grade in ("D", "C", "B", "A"):
        if by_grade.get(grade, 0) > by_grade.get(best, 0):
            best = grade  # type: ignore[assignment]
    return best
