"""Estimate the confidence in a cause, and decide when only its family is named.

score = prior of the grade * margin * coverage. It decides whether a cause is named at
all. The printed confidence is the probability that the cause is right, measured on jobs
with known faults (below).

    grade    meaning                          leaf    family
    A        marker and counter agree         0.95    0.97
    B        one direct signal                0.85    0.92
    C        correlation only                 0.60    0.78
    D        prior knowledge                  0.30    0.45

margin: unexplained time of the same kind could belong to another cause, 1 - 0.2 * its
part.
coverage: 0.8 + 0.2 * the part of the time that was measured. A leaf is named from 0.7
on, otherwise its family if that reaches 0.7, otherwise the time stays unattributed.

A claim of half a GPU-second rests on a handful of samples and is right less often than
a claim of minutes, whatever its grade. PRECISION_BY_GPU_S is how
often claims of each size were right on the corpus (split dev, real and synthetic jobs
with equal weight); the score scales it relative to
MEAN_CORPUS_SCORE. Time between two marks does not depend on
samples: half a second of transfers in 100 steps was measured 100 times and weighs as
100 samples do.

That product is calibrated last. confidence.json holds, for each kind of visibility, how
often claims of each confidence were right on the development split (isotonic regression:
the closest in squares of all functions that never fall). Claims between two entries are
interpolated; a kind of visibility without a table keeps the product.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from clusterprof.report.model import Grade

Visibility = Literal["hooked", "driver", "unmatched", "unmarked", "partial", "imported"]
"""What was seen of a job: marks and device times of the job's own hooks or an emulator; marks, and
devices as their driver samples them; marks, but no operations that match between ranks; no marks;
not all of its ranks; the trace of another tool."""

LEAF_PRIOR: Mapping[str, float] = {"A": 0.95, "B": 0.85, "C": 0.60, "D": 0.30}
FAMILY_PRIOR: Mapping[str, float] = {"A": 0.97, "B": 0.92, "C": 0.78, "D": 0.45}
MIN_SCORE_TO_NAME = 0.7
"""Score from which a leaf, or its family, is named."""
PRECISION_BY_GPU_S = ((0.2, 0.69), (0.45, 0.72), (0.9, 0.93), (2.0, 0.945))
"""(lost GPU-seconds of a claim, part of these claims that was right), measured on the
corpus.
"""
MEAN_CORPUS_SCORE = 0.86
"""Mean score of the claims in PRECISION_BY_GPU_S."""
MAX_CONFIDENCE = 0.98
"""Highest confidence that is reported."""
_SAMPLE_INTERVAL_S = 0.1
"""Sampling interval in all of the corpus, seconds."""
_TABLE = json.loads(Path(__file__).with_name("confidence.json").read_text(encoding="utf-8"))
CALIBRATION: dict[str, Sequence[tuple[float, float]]] = _TABLE["tables"]
"""By kind of visibility: (confidence before calibration, part of such claims that was right)."""
_MARGIN_WEIGHT = 0.2
_COVERAGE_FLOOR = 0.8


def compute_confidence_score(
    by_grade: Mapping[str, int],
    unexplained: int,
    coverage_ratio: float,
    priors: Mapping[str, float] = LEAF_PRIOR,
) -> float:
    """Compute the score of a claim, 0 to 1: prior of its grades * margin * coverage.

    by_grade: claimed amount per grade. unexplained: unexplained time of the same kind, in
    the same unit. coverage_ratio: measured part of the time. 80 % grade A and 20 % C,
    nothing unexplained, full
    coverage: 0.8 * 0.95 + 0.2 * 0.60 = 0.88.
    """
    claimed = sum(by_grade.values())
    if claimed <= 0:
        return 0.0
    prior = sum(priors[grade] * amount for grade, amount in by_grade.items()) / claimed
    margin = 1 - _MARGIN_WEIGHT * unexplained / (claimed + unexplained)
    coverage = _COVERAGE_FLOOR + (1 - _COVERAGE_FLOOR) * min(1.0, max(0.0, coverage_ratio))
    return prior * margin * coverage


def estimate_confidence(
    score: float,
    lost_ns: int,
    marked_steps: int = 0,
    unknown_ratio: float = 0.0,
    visibility: Visibility | None = None,
) -> float:
    """Estimate the probability that a cause of this much lost GPU time is right.

    Interpolated by the logarithm of its size: 0.9 s at the mean score are right in 93 of
    100 cases, 0.2 s in 69; half the mean score halves both. Returns 0 to
    MAX_CONFIDENCE.
    lost_ns: lost GPU time, ns.
    marked_steps: steps of ranks in which the job's own marks timed it; 9 of them weigh as
    much as 0.9 s of samples.
    unknown_ratio: part of the job's lost time that has no cause; it can hide a larger cause.
    visibility: None leaves the confidence uncalibrated.
    """
    sizes, precisions = zip(*PRECISION_BY_GPU_S)
    size = math.log(max(lost_ns * 1e-9, marked_steps * _SAMPLE_INTERVAL_S, 1e-9))
    precision = float(np.interp(size, [math.log(size_s) for size_s in sizes], precisions))
    confidence = min(MAX_CONFIDENCE, precision * score / MEAN_CORPUS_SCORE) * (1 - unknown_ratio)
    return confidence if visibility is None else calibrate_confidence(confidence, visibility)


def calibrate_confidence(confidence: float, visibility: Visibility) -> float:
    """Return how often claims of a confidence were right, 0 to MAX_CONFIDENCE; it never falls."""
    table = CALIBRATION.get(visibility)
    if not table:
        return confidence
    confidences, hit_rates = zip(*table)
    return min(MAX_CONFIDENCE, float(np.interp(confidence, confidences, hit_rates)))


def choose_main_grade(by_grade: Mapping[str, int]) -> Grade:
    """Return the grade of most of a claim; of two equal ones the weaker."""
    main_grade: Grade = "D"
    for grade in ("D", "C", "B", "A"):
        if by_grade.get(grade, 0) > by_grade.get(main_grade, 0):
            main_grade = grade  # type: ignore[assignment]
    return main_grade
