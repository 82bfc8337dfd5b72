"""Figures over runs, worked out by hand: parts with Wilson's interval, means, calibration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof_lab.families import FAMILIES
from clusterprof_lab.score import calibrate
from clusterprof_lab.score.calibrate import (
    LEAST_CLAIMS,
    Bin,
    compute_reliability,
    cross_validate,
    estimate_ece,
    fit_isotonic,
    fit_table,
    fit_tables,
    main,
)
from clusterprof_lab.score.figures import (
    NO_FIGURE,
    Figure,
    bootstrap_trials,
    compute_p95,
    compute_wilson,
)
from clusterprof_lab.score.judge import Judgment
from clusterprof_lab.score.metrics import JudgedRun, Score, compute_score, list_errors
from clusterprof_lab.score.sizes import Claim, group_by_size
from clusterprof_lab.score.sizes import main as learn

ZERO = dict.fromkeys(FAMILIES, 0.0)


def row(judged: Judgment, easy: bool | None = None, mode: str = "M0") -> JudgedRun:
    return JudgedRun("t", "s", "storage", "synth", "medium", 0, "us", mode, easy, judged)


def rounded(figure: Figure) -> tuple[float | None, ...]:
    known = (None if x is None else round(x, 3) for x in (figure.value, figure.low, figure.high))
    return (*known, figure.n, figure.hits)


def test_wilson_intervals_match_textbook_values() -> None:
    assert rounded(compute_wilson(9, 10)) == (0.9, 0.596, 0.982, 10, 9)
    assert rounded(compute_wilson(0, 10)) == (0.0, 0.0, 0.278, 10, 0)
    assert rounded(compute_wilson(10, 10)) == (1.0, 0.722, 1.0, 10, 10)
    assert rounded(compute_wilson(299, 299)) == (1.0, 0.987, 1.0, 299, 299)
    assert compute_wilson(0, 0) == NO_FIGURE


def test_the_bootstrap_resamples_jobs_and_not_buckets() -> None:
    assert bootstrap_trials([]) == NO_FIGURE
    assert bootstrap_trials([[1.0, 3.0]]) == Figure(2.0, None, None, 1)
    alike = bootstrap_trials([[1.0, 3.0]] * 20)
    assert alike == Figure(2.0, 2.0, 2.0, 20)  # no job differs from another
    mixed = bootstrap_trials([[0.0]] * 10 + [[1.0]] * 10)
    assert mixed.value == 0.5 and mixed.low is not None and mixed.high is not None
    assert 0.25 <= mixed.low < 0.4 and 0.6 < mixed.high <= 0.75


def test_p95_is_a_value_of_the_sample() -> None:
    assert bootstrap_trials([[float(n)] for n in range(1, 101)], compute_p95).value == 95.0
    assert bootstrap_trials([[1.0] * 19 + [9.0]], compute_p95).value == 1.0


GOOD = Judgment(
    wanted="storage",
    named_family="storage",
    named_leaf="storage-local",
    errors={**ZERO, "storage": 2.0, "unattributed": 0.6},
    active=("storage", "unattributed"),
    family_right=True,
    leaf_top1=True,
    leaf_top2=True,
    abstained=False,
    emitted=(("storage-local", 0.95, True),),
    culprit_right=True,
    inverted=False,
    false_causes=(),
    unattributed_ratio=0.02,
    residual_ns=0,
    wrong_first_sure=False,
    gain_error=-4.0,
    first_blamed=1,
)
BAD = Judgment(
    wanted="storage",
    named_family="cpu",
    named_leaf="cpu-gc",
    errors={**ZERO, "storage": 13.0, "cpu": 13.0},
    active=("storage", "cpu"),
    family_right=False,
    leaf_top1=False,
    leaf_top2=True,
    abstained=False,
    emitted=(("cpu-gc", 0.9, False), ("storage-local", 0.75, True)),
    culprit_right=False,
    inverted=True,
    false_causes=("cpu",),
    unattributed_ratio=0.1,
    residual_ns=-3,
    wrong_first_sure=True,
    gain_error=2.0,
    first_blamed=0,
)
NULL = Judgment(
    wanted="nothing",
    named_family="nothing",
    errors=ZERO,
    nobody_right=True,
    inverted=False,
    false_causes=(),
    residual_ns=0,
    wrong_first_sure=False,
)


def test_the_calibration_error_interval_depends_on_the_number_of_jobs() -> None:
    assert estimate_ece([[], []]) == NO_FIGURE
    alone = estimate_ece([[(0.9, True), (0.9, False)]])
    assert rounded(alone) == (0.4, None, None, 1, None)
    # half of the jobs are right in all they say, half wrong: one job's claims are one trial
    few = estimate_ece([[(0.5, right)] * 50 for right in (True, False) * 2])
    many = estimate_ece([[(0.5, right)] for right in (True, False) * 100])
    assert few.value == many.value == 0.0
    assert few.high == 0.5 and many.high is not None and many.high < 0.1


def test_a_score_holds_all_figures_of_its_runs() -> None:
    score = compute_score([row(GOOD), row(GOOD, easy=True), row(BAD, easy=False), row(NULL)])
    values = {k: (figure.value, figure.n, figure.hits) for k, figure in score.figures.items()}
    rounded = {
        k: (None if v is None else round(v, 6), n, hits) for k, (v, n, hits) in values.items()
    }
    assert rounded == {
        "bucket_error_mean": (round((2.6 * 2 + 26) / 52, 6), 4, None),
        "bucket_error_p95": (2.0, 4, None),  # two of 52 values are 13
        "bucket_error_active_mean": (round((2.6 * 2 + 26) / 6, 6), 3, None),
        "bucket_error_active_p95": (13.0, 3, None),
        "family_top1": (round(2 / 3, 6), 3, 2),
        "leaf_top1": (round(2 / 3, 6), 3, 2),
        "leaf_top2": (1.0, 3, 3),
        "leaf_abstained": (0.0, 3, 0),
        "leaf_precision": (round(2 / 3, 6), 3, 2),
        "leaf_precision_all": (0.75, 4, 3),
        "culprit_top1": (0.5, 2, 1),
        "culprit_top1_easy": (1.0, 1, 1),
        "nobody_blamed": (1.0, 1, 1),
        "both_found": (None, 0, None),
        "inversions": (0.25, 4, 1),
        "false_on_nulls": (0.0, 1, 0),
        "false_anywhere": (round(1 / 3, 6), 3, 1),
        "unattributed": (round(0.14 / 3, 6), 3, None),
        # 0.95, 0.95 right and 0.9 wrong in one bin: |2/3 - 2.8/3| * 3/4; 0.75 right: 0.25 / 4
        "ece": (round(0.8 / 3 * 0.75 + 0.25 / 4, 6), 3, None),
        "wrong_first_sure": (0.25, 4, 1),
        "conserved": (0.75, 4, 3),
        "residual_ns": (3.0, 4, None),
        "gain_error": (round(10 / 3, 6), 3, None),
    }
    assert {k: (figure.value, figure.n) for k, figure in score.by_cause.items()} == {
        "storage": (17 / 3, 3),
        "cpu": (13.0, 1),
        "unattributed": (0.6, 2),
    }
    assert score.confusion == {"storage": {"storage": 2, "cpu": 1}, "nothing": {"nothing": 1}}


def test_runs_without_claims_give_no_figures() -> None:
    score = compute_score([row(Judgment(wanted="storage", named_family=None))])
    assert set(score.figures.values()) == {NO_FIGURE}
    assert score == Score(score.figures, {}, {}, ())


def test_errors_of_a_run_are_listed() -> None:
    assert list_errors(row(GOOD)) == () and list_errors(row(NULL)) == ()
    assert list_errors(row(BAD)) == (
        "family",
        "leaf",
        "culprit",
        "inversion",
        "residual",
        "false cpu",
        "storage off by 13.0",
    )
    coarse = Judgment(
        wanted="cpu", named_family="cpu", family_right=True, leaf_top1=False, abstained=True
    )
    assert list_errors(row(coarse)) == ("leaf",)
    assert list_errors(row(coarse, mode="M2")) == ()  # no more can be known there


def test_reliability_bins_match_a_hand_computation() -> None:
    pairs = [(0.95, True), (0.91, True), (0.99, False), (1.0, True), (0.72, False)]
    bins, ece = compute_reliability(pairs)
    assert [
        (figure.low, figure.high, round(figure.said, 4), figure.right, figure.n) for figure in bins
    ] == [(0.7, 0.8, 0.72, 0.0, 1), (0.9, 1.0, 0.9625, 0.75, 4)]
    assert round(ece, 6) == round((0.72 + 4 * 0.2125) / 5, 6)
    assert compute_reliability([]) == ((), 0.0)
    assert isinstance(bins[0], Bin)


def test_isotonic_regression_pools_decreasing_values() -> None:
    # 0.6: 1 of 2; 0.7: 0 of 1 pools with it to 1 of 3; 0.8: 1 of 1; 0.9: 1 of 2 pools to 2 of 3
    pairs = [(0.6, True), (0.6, False), (0.7, False), (0.8, True), (0.9, True), (0.9, False)]
    assert fit_isotonic(pairs) == [(0.6, 0.7, 1 / 3, 3), (0.8, 0.9, 2 / 3, 3)]
    assert fit_isotonic([]) == []


def make_claims(
    confidence: float, right: int, n: int, mode: str = "M0", testbed: str = "synth"
) -> list[list[object]]:
    """Lines of `claims` as in a score, each of a job of its own."""
    return [
        [confidence, at < right, "cpu-gc", mode, testbed, f"job {confidence} {mode} {at}"]
        for at in range(n)
    ]


def test_a_table_is_fitted_to_groups_of_claims() -> None:
    def claim(confidence: float, right: int, n: int) -> list[tuple[float, bool]]:
        return [(confidence, at < right) for at in range(n)]

    assert LEAST_CLAIMS == 25
    pairs = [*claim(0.5, 10, 20), *claim(0.6, 5, 10), *claim(0.7, 12, 30), *claim(0.9, 27, 30)]
    # 0.5 and 0.6 are one group, whose mean is (20 * 0.5 + 10 * 0.6) / 30 = 0.533 and of which
    # 15 of 30 are right; 12 of 30 at 0.7 fall below that, so both pool to 27 of 60 around
    # (0.533 + 0.7) / 2 = 0.617.
    assert fit_table(pairs) == [(0.0, 0.0), (0.617, 0.45), (0.9, 0.9)]
    # What is left over is too little for a group of its own: 27 of 30 and 0 of 10.
    assert fit_table([*claim(0.9, 27, 30), *claim(0.95, 0, 10)]) == [(0.0, 0.0), (0.912, 0.675)]


def test_each_visibility_kind_with_enough_claims_has_a_table() -> None:
    claims = [
        *make_claims(0.9, 54, 60),
        *make_claims(0.9, 30, 60, "D0"),
        *make_claims(0.9, 1, 10, "M4"),  # too few
        [0.98, True, "startup", "M0", "synth", "job"],  # outside steps
        [0.98, True, "cpu-gc", "A1", "synth", "job"],  # no mode that is calibrated
    ]
    assert fit_tables(claims) == {
        "driver": [(0.0, 0.0), (0.9, 0.5)],
        "hooked": [(0.0, 0.0), (0.9, 0.9)],
    }


def test_independent_jobs_replace_own_jobs_in_calibration_tables() -> None:
    own = make_claims(0.9, 60, 60)
    few, enough = (make_claims(0.9, n // 2, n, testbed="sharded") for n in (40, 60))
    assert fit_tables([*own, *few]) == {"hooked": [(0.0, 0.0), (0.9, 0.8)]}  # 80 of 100
    assert fit_tables([*own, *enough]) == {"hooked": [(0.0, 0.0), (0.9, 0.5)]}


def test_calibration_on_other_jobs_reduces_the_error() -> None:
    # Of claims said with 60, 80 and 95 % as many are right as 35, 55 and 85 %.
    parts = ((0.6, 70), (0.8, 110), (0.95, 170))
    claims = [
        line for confidence, right in parts for line in make_claims(confidence, right, 200, "D0")
    ]
    before, after, n = cross_validate(claims)["driver"]
    assert n == 600
    assert before == pytest.approx((0.25 + 0.25 + 0.1) / 3)
    assert after < 0.06


def test_confidence_is_fitted_only_on_the_dev_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, table_file = tmp_path / "score.json", tmp_path / "confidence.json"
    monkeypatch.setattr(calibrate, "TABLE_FILE", table_file)
    # What is said with 90 % is right in half of all cases; that with 50 % is as sure as it says.
    claims = [*make_claims(0.9, 30, 60), *make_claims(0.5, 30, 60, "D0")]

    def store(split: str, calibrated: bool) -> int:
        document = {"split": split, "calibrated": calibrated, "claims": claims}
        path.write_text(json.dumps(document), encoding="utf-8")
        return main(["--store", str(path)])

    assert store("test", calibrated=False) == 2
    assert "only dev" in capsys.readouterr().err
    assert store("dev", calibrated=True) == 2
    assert "--uncalibrated" in capsys.readouterr().err
    assert not table_file.exists()
    assert store("dev", calibrated=False) == 0
    assert "driver: left out" in capsys.readouterr().out
    stored = json.loads(table_file.read_text(encoding="utf-8"))
    assert stored["tables"] == {"hooked": [[0.0, 0.0], [0.9, 0.5]]}


def test_accuracy_by_size_weighs_testbeds_equally_and_never_falls() -> None:
    def claim(testbed: str, gpu_s: float, right: int, n: int) -> list[Claim]:
        return [Claim(testbed, gpu_s, at < right) for at in range(n)]

    # Of 4 synthetic claims each weighs 1/4, of 2 real ones each 1/2.
    claims = [
        *claim("synth", 0.2, 1, 2),
        *claim("real", 0.2, 0, 1),
        *claim("synth", 3.0, 2, 2),
        *claim("real", 3.0, 1, 1),
    ]
    # small: 1/4 of 2/4 + 1/2; large: all
    assert group_by_size(claims) == [(0.3, 0.25, 3), (4.8, 1.0, 3)]
    # larger claims that are right less often are pooled with those before: 1/4 + 1/4 of all
    falling = [*claim("synth", 0.2, 1, 2), *claim("synth", 3.0, 1, 2), *claim("real", 3.0, 0, 2)]
    assert group_by_size(falling) == [(4.8, 0.25, 6)]


def test_learning_sizes_without_runs_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn([str(tmp_path)]) == 2
    assert "give folders" in capsys.readouterr().err
