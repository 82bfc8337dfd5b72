"""How sure a finding is: the score of its evidence, and how much there was to see of it."""

from __future__ import annotations

from typing import get_args

import pytest

from clusterprof.analysis.attribution.confidence import (
    CALIBRATION,
    MAX_CONFIDENCE,
    Visibility,
    calibrate_confidence,
    estimate_confidence,
)

S = 1_000_000_000


@pytest.mark.parametrize(
    ("score", "lost_s", "right"),
    [
        (0.86, 0.9, 0.93),  # as measured
        (0.86, 0.2, 0.69),
        (0.86, 0.001, 0.69),  # smaller ones than were measured
        (0.86, 0.3, 0.705),  # 0.3 is half-way from 0.2 to 0.45 by logarithm
        (0.86, 3600.0, 0.945),
        (0.43, 0.9, 0.465),  # half the score, half as sure
        (0.95, 3600.0, MAX_CONFIDENCE),  # 0.945 * 0.95 / 0.86 = 1.04
        (0.0, 3600.0, 0.0),
    ],
)
def test_confidence_follows_evidence_score_and_lost_time(
    score: float, lost_s: float, right: float
) -> None:
    assert estimate_confidence(score, round(lost_s * S)) == pytest.approx(right, abs=5e-4)


@pytest.mark.parametrize(
    ("lost_s", "marked", "right"),
    [
        (0.2, 9, 0.93),  # nine marked steps tell what nine samples do, 0.9 s of them
        (0.2, 2, 0.69),  # two are as little as was seen of 0.2 s
        (0.2, 1000, 0.945),
        (0.9, 2, 0.93),  # and take nothing away
    ],
)
def test_confidence_of_marked_time_follows_the_number_of_marks(
    lost_s: float, marked: int, right: float
) -> None:
    assert estimate_confidence(0.86, round(lost_s * S), marked) == pytest.approx(right, abs=5e-4)


@pytest.mark.parametrize(
    ("score", "lost_s", "unknown", "right"),
    [
        (0.86, 0.9, 0.0, 0.93),
        (0.86, 0.9, 0.5, 0.465),  # half of what was lost has no cause: half as sure
        (0.86, 0.2, 0.1, 0.621),  # nine tenths of 0.69
        (0.95, 3600.0, 0.25, 0.735),  # of the highest confidence, 0.98, not of 1.04
        (0.86, 0.9, 1.0, 0.0),
    ],
)
def test_time_without_a_cause_lowers_the_confidence(
    score: float, lost_s: float, unknown: float, right: float
) -> None:
    estimated = estimate_confidence(score, round(lost_s * S), unknown_ratio=unknown)
    assert estimated == pytest.approx(right, abs=5e-4)


def test_calibration_interpolates_between_measured_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALIBRATION, "driver", [(0.5, 0.2), (0.7, 0.4), (0.9, 1.0)])
    for confidence, right in (
        (0.3, 0.2),
        (0.5, 0.2),
        (0.6, 0.3),
        (0.8, 0.7),
        (0.9, MAX_CONFIDENCE),
    ):
        assert calibrate_confidence(confidence, "driver") == pytest.approx(right)
    # 0.93 at full score and size, of which 0.7 is 0.651: 0.2 + 0.151
    estimated = estimate_confidence(0.86, round(0.9 * S), unknown_ratio=0.3, visibility="driver")
    assert estimated == pytest.approx(0.351)


def test_a_visibility_without_a_table_is_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CALIBRATION, "imported", raising=False)
    assert calibrate_confidence(0.61, "imported") == 0.61


def test_the_stored_calibration_tables_are_monotonic() -> None:
    assert set(CALIBRATION) <= set(get_args(Visibility))
    for table in CALIBRATION.values():
        assert len(table) <= 12
        confidence, right = zip(*table)
        assert list(confidence) == sorted(set(confidence)) and list(right) == sorted(right)
        assert confidence[0] >= 0 and confidence[-1] <= 1 and right[0] >= 0 and right[-1] <= 1
