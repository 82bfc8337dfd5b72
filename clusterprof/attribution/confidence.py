"""How sure we are of a cause, and when we rather say less.

confidence = prior of the grade * margin * coverage, as a probability that the cause is right. The
priors are a table, not a measurement: calibration on recordings with known faults replaces it.

    grade    what it means                    leaf    family
    A        marker and counter agree         0.95    0.97
    B        one direct signal                0.85    0.92
    C        correlation only                 0.60    0.78
    D        prior knowledge                  0.30    0.45

margin: time of the same kind that nothing explains could belong to another cause, 1 - 0.2 * its
part. coverage: 0.8 + 0.2 * the part of the time that was measured. A leaf is named from 0.7 on,
else its family, if that is sure enough, else the time stays unattributed.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterprof.findings import Grade

LEAF_PRIOR: Mapping[str, float] = {"A": 0.95, "B": 0.85, "C": 0.60, "D": 0.30}
FAMILY_PRIOR: Mapping[str, float] = {"A": 0.97, "B": 0.92, "C": 0.78, "D": 0.45}
NAMED_FROM = 0.7
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


def main_grade(by_grade: Mapping[str, int]) -> Grade:
    """Return the grade that most of a claim has; of two equal ones the weaker."""
    best: Grade = "D"
    for grade in ("D", "C", "B", "A"):
        if by_grade.get(grade, 0) > by_grade.get(best, 0):
            best = grade  # type: ignore[assignment]
    return best
