"""Rules on changes: found beyond chance, passed within it, and never a verdict on unlike runs."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from clusterprof.errors import UsageError
from clusterprof.gate import Policy, RuleResult, Verdict, judge_runs, parse_any_rule
from clusterprof.gate.regression import (
    Sample,
    compute_t_quantile,
    estimate_difference,
    sample_metric,
)
from clusterprof.report.model import Report
from tests.support.gate_runs import MS, draw_step_lengths, make_run

QUIET = Policy(between_runs_ratio=0.0)


def verdict(now: Report, *before: Report, rule: str, policy: Policy = QUIET) -> Verdict:
    return judge_runs(now, [parse_any_rule(rule)], policy, (), before)


def result(now: Report, *before: Report, rule: str, policy: Policy = QUIET) -> RuleResult:
    return verdict(now, *before, rule=rule, policy=policy).results[0]


def times(ms: float, seed: int, title: str = "run", started: int = 2, **facts: object) -> Report:
    return make_run(title, draw_step_lengths(ms=ms, seed=seed), started=started, **facts)


@pytest.mark.parametrize(
    ("ms", "rule", "outcome"),
    [
        (100.0, "step.p50_ns: +5%", "pass"),
        (110.0, "step.p50_ns: +5%", "fail"),
        (105.0, "step.p50_ns: +5%", "cannot tell"),
        (90.0, "step.p50_ns: +5%", "pass"),
        (90.0, "step.p50_ns: -5%", "fail"),
        (90.0, "step.p50_ns: ±5%", "fail"),
        (110.0, "step.p50_ns: +-5%", "fail"),
        (100.5, "step.p50_ns: ±5%", "pass"),
        (110.0, "step.mean_ns: +5%", "fail"),
        (110.0, "step.p95: +5%", "fail"),
        (110.0, "step.p50_ns: +20 ms", "pass"),
        (110.0, "step.p50_ns: +5 ms", "fail"),
        (110.0, "warn: step.p50_ns: +5%", "fail"),
    ],
)
def test_step_time_changes_are_decided_beyond_chance(ms: float, rule: str, outcome: str) -> None:
    # 100 steps with 1 % of chance: the median is known to about 0.13 %, a difference to 0.18 %
    assert result(times(ms, 1), times(100.0, 2, started=1), rule=rule).outcome == outcome


@pytest.mark.parametrize(
    ("storage", "rule", "outcome"),
    [
        (0.10, "stall.storage_ratio: +2pt", "fail"),
        (0.05, "stall.storage_ratio: +2pt", "pass"),
        (0.10, "stall.storage: +2 points", "fail"),
        (0.10, "lost.ratio: +10pt", "pass"),
        (0.10, "gpu.busy_ratio: -2pt", "fail"),
        (0.10, "gpu.busy_ratio: +2pt", "pass"),
        (0.10, "stall.storage_ratio: +50%", "fail"),
        (0.06, "stall.storage_ratio: +50%", "pass"),
    ],
)
def test_cause_share_changes_are_decided_beyond_chance(
    storage: float, rule: str, outcome: str
) -> None:
    now, before = make_run("now", storage=storage, started=2), make_run("before", storage=0.05)
    assert result(now, before, rule=rule).outcome == outcome


def test_a_regression_prints_the_change_and_its_interval() -> None:
    judged = verdict(times(110.0, 1), times(100.0, 2, started=1), rule="step.p50_ns: +5%")
    moved = judged.results[0].change
    assert moved is not None
    # medians of 100 draws of N(1, 1 %) around 110 and 100 ms: 1.25 % / sqrt(100) of chance each
    assert moved.estimate == pytest.approx(0.10, abs=0.005)
    assert moved.low < moved.estimate < moved.high
    assert moved.high - moved.low == pytest.approx(2 * 2.447 * 0.0018 * 1.1, rel=0.5)
    assert (moved.steps, moved.runs, moved.relative) == (100, (1, 1), True)
    assert judged.exit_code == 3
    assert judged.lines[0] == "gate FAILED: 1 of 1 rule"
    assert judged.lines[1].startswith("  FAIL  step.p50_ns: +5 %  ")
    assert ", was 99." in judged.lines[1] or ", was 100." in judged.lines[1]
    assert judged.lines[1].endswith(" on are detected in 95 % of runs")


def test_an_undecided_rule_states_the_number_of_steps_needed() -> None:
    now = make_run("now", draw_step_lengths(30, 107.0, 0.05, 1), started=2)
    before = make_run("before", draw_step_lengths(30, 100.0, 0.05, 2))
    rank_result = result(now, before, rule="step.mean_ns: +5%")
    assert rank_result.outcome == "cannot tell"
    moved = rank_result.change
    assert moved is not None and moved.steps_needed is not None
    assert moved.steps == 30
    assert f"{moved.steps_needed:,} steps needed, 30 seen" in rank_result.why
    # with so many similar steps it is detected, within the rate of chance
    more = 4 * moved.steps_needed
    now = make_run("now", draw_step_lengths(more, 107.0, 0.05, 3), started=2)
    before = make_run("before", draw_step_lengths(more, 100.0, 0.05, 4))
    assert result(now, before, rule="step.mean_ns: +5%").outcome == "fail"


def test_more_baselines_are_requested_when_steps_cannot_decide() -> None:
    rough = Policy(between_runs_ratio=0.02)
    rank_result = result(
        times(103.0, 1), times(100.0, 2, started=1), rule="step.p50_ns: +5%", policy=rough
    )
    assert rank_result.outcome == "cannot tell"
    assert rank_result.change is not None and rank_result.change.steps_needed is None
    assert re.search(r"; \d+ more --baseline( and \d+ more --repeat)? needed$", rank_result.why)
    at_the_limit = times(105.0, 2)  # the same steps, 5 % longer to the nanosecond
    rank_result = result(
        at_the_limit, times(100.0, 2, started=1), rule="step.p50_ns: +5%", policy=rough
    )
    assert rank_result.why.endswith("neither more steps nor more runs are likely to decide it")


def test_baselines_that_differ_widen_the_interval() -> None:
    alike = [times(100 + 0.1 * i, i, f"b{i}", 1) for i in range(4)]
    apart = [times(100 + 5.0 * i, i, f"b{i}", 1) for i in range(4)]
    now = times(107.5, 9)
    narrow, wide = (result(now, *batch, rule="step.p50_ns: +2%").change for batch in (alike, apart))
    assert narrow is not None and wide is not None
    assert wide.high - wide.low > 5 * (narrow.high - narrow.low)
    assert result(now, *alike, rule="step.p50_ns: +2%").outcome == "fail"
    assert result(now, *apart, rule="step.p50_ns: +2%").outcome == "cannot tell"


def test_differences_of_runs_are_computed_with_their_interval() -> None:
    # differences 3 - mean(1, 2) = 1.5; prior 0.5 with the weight of 6 runs, one more from two
    # baselines whose squares about their mean are 0.5: (6 * 0.25 + 0.5) / 7 = 2 / 7 between runs
    ours, theirs = [Sample(3.0, 0.04, 50)], [Sample(1.0, 0.0, 60), Sample(2.0, 0.0, 70)]
    difference = estimate_difference(ours, theirs, 0.5, logarithms=False)
    assert difference.estimate == 1.5
    assert difference.between_runs**2 == pytest.approx(2 / 7)
    assert difference.within_variance == pytest.approx(0.04)
    assert difference.error**2 == pytest.approx(0.04 + 2 / 7 * (1 + 1 / 2))
    assert difference.quantile == compute_t_quantile(7)
    assert (difference.steps, difference.runs) == (50, (1, 2))
    assert difference.smallest_detectable(1.0) == pytest.approx(
        1 + (compute_t_quantile(7) + 1.6448536) * difference.error
    )


def test_student_t_quantiles_match_published_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 6: 2.447, 7: 2.365, 10: 2.228, 30: 2.042}
    assert {n: round(compute_t_quantile(n), 3) for n in table} == table


def test_resampled_values_vary_with_the_theoretical_standard_error() -> None:
    # the mean of 100 independent steps with 5 % of chance is known to 5 % / 10 = 0.5 %
    values = [
        sample_metric("step.mean_ns", make_run(steps=draw_step_lengths(100, 100.0, 0.05, i)).steps)
        for i in range(9)
    ]
    spread = [float(value.std() / value.mean()) for value in values if value is not None]
    assert sum(spread) / 9 == pytest.approx(0.005, rel=0.1)
    assert sample_metric("step.mean_ns", make_run(steps=draw_step_lengths(9)).steps) is None
    assert sample_metric("recorder.cpu_ratio", make_run().steps) is None


def test_autocorrelated_steps_widen_the_resampled_spread() -> None:
    random = np.random.default_rng(3)
    slow, x = [], 0.0
    for step in random.standard_normal(400):
        x = 0.8 * x + 0.6 * step
        slow.append(round(100 * MS * (1 + 0.05 * x)))
    mixed = [slow[at] for at in random.permutation(400)]
    drawn = [sample_metric("step.mean_ns", make_run(steps=batch).steps) for batch in (slow, mixed)]
    assert drawn[0] is not None and drawn[1] is not None
    assert drawn[0].std() > 1.5 * drawn[1].std()


def test_the_interval_contains_the_true_change_at_its_stated_rate() -> None:
    held = 0
    for seed in range(30):
        rank_result = result(
            times(103.0, 2 * seed), times(100.0, 2 * seed + 1, started=1), rule="step.mean_ns: +1%"
        )
        assert rank_result.change is not None
        held += rank_result.change.low <= 0.03 <= rank_result.change.high
    assert held >= 26  # 95 % of 30 are 28.5


def test_judging_the_same_runs_repeats_the_verdict() -> None:
    now, before = times(104.9, 1), times(100.0, 2, started=1)
    first = verdict(now, before, rule="step.p50_ns: +5%")
    assert all(verdict(now, before, rule="step.p50_ns: +5%") == first for _ in range(20))


UNLIKE = {
    "gpu-model": {"gpu_models": (("A100", 2),)},
    "nodes": {"nodes": 2},
    "world-size": {"world_size": 4},
    "batch-size": {"batch_size": 64.0},
    "tokens": {"tokens": 4096.0},
    "measured-by": {"measured_by": ("host-spans",)},
    "order": {"started_at_ns": 3 * 10**9},
}


@pytest.mark.parametrize("field", UNLIKE)
def test_unlike_runs_are_refused_with_the_differing_field(field: str) -> None:
    now, before = times(100.0, 1), times(100.0, 2, started=1, **UNLIKE[field])
    judged = verdict(now, before, rule="step.p50_ns: +5%")
    assert (judged.exit_code, judged.outcome) == (4, "cannot tell")
    assert f"(--allow-unlike {field})" in judged.unmet_preconditions[0]
    allowed = dataclasses.replace(QUIET, allow_unlike=(field,))
    assert verdict(now, before, rule="step.p50_ns: +5%", policy=allowed).exit_code == 0


def test_differences_between_runs_are_reported() -> None:
    now, before = times(100.0, 1), times(100.0, 2, started=1, batch_size=64.0, drivers=("570",))
    judged = verdict(now, before, rule="step.p50_ns: +5%")
    assert judged.unmet_preconditions == (
        "baseline run: unlike: batch-size: 64 in the baseline, 32 now (--allow-unlike batch-size)",
    )
    assert judged.notes == ("baseline run: note: driver: 570 in the baseline, 580.1 now",)


def test_identical_or_incomparable_runs_are_refused() -> None:
    now, before = times(100.0, 1), times(100.0, 2, started=1)
    emulated = dataclasses.replace(before, emulated=True)
    long = make_run("long", draw_step_lengths(201), started=1)
    unknown = dataclasses.replace(before, fingerprint=None)
    twice = dataclasses.replace(before, title="other")
    for baselines, printed in (
        ([now], "same recording"),
        ([emulated], "emulated"),
        ([long], "length: 201 steps in the baseline, 100 now"),
        ([unknown], "does not say what kind of run"),
        ([before, twice], "other and run are the same recording"),
        ([make_run("short", draw_step_lengths(19), started=1)], "steps: 19"),
    ):
        judged = verdict(now, *baselines, rule="step.p50_ns: +5%")
        assert judged.exit_code == 4, printed
        assert any(printed in text for text in judged.unmet_preconditions), (
            printed,
            judged.unmet_preconditions,
        )


def test_an_absolute_rule_is_judged_on_unlike_runs() -> None:
    rules = [parse_any_rule("gpu.busy_ratio >= 101%"), parse_any_rule("step.p50_ns: +5%")]
    verdicts = judge_runs(times(100.0, 1), rules, QUIET, (), [times(100.0, 2, started=1, nodes=9)])
    assert [item.outcome for item in verdicts.results] == ["fail", "cannot tell"]
    assert verdicts.exit_code == 3


def test_missing_numbers_leave_a_rule_undecided() -> None:
    now, before = times(100.0, 1), times(100.0, 2, started=1)
    rank_result = result(now, before, rule="gpu.sm_active: -1pt")
    assert (rank_result.outcome, rank_result.why) == ("cannot tell", "no SM activity was recorded")
    rank_result = result(now, before, rule="stall.storage_ratio: +50%")
    assert rank_result.outcome == "cannot tell" and "give the limit in pt" in rank_result.why
    # chance within a run is not known of it: three baselines show how runs differ
    rank_result = result(now, before, rule="data_wait.ratio: +2pt")
    assert rank_result.outcome == "cannot tell" and "give 3 baselines" in rank_result.why
    several = [times(100.0, seed, f"b{seed}", 1) for seed in range(3)]
    assert result(now, *several, rule="data_wait.ratio: +2pt").outcome == "pass"
    no_blocks = dataclasses.replace(now, steps=None)
    assert result(no_blocks, before, rule="step.p50_ns: +5%").outcome == "cannot tell"
    nan = dataclasses.replace(
        now, metrics=tuple(dataclasses.replace(m, value=math.nan) for m in now.metrics)
    )
    assert result(nan, before, rule="lost.ratio: +5pt").outcome == "cannot tell"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("step.p50_ns: +5pt", "is in ns"),
        ("step.p50_ns: +5", "is in ns"),
        ("lost.ratio: +5", "is in ratio"),
        ("lost.ratio: +5 ms", "is in ratio"),
        ("step.p50_ns: +0%", "must be above 0"),
        ("step.p50_ns: +-+5%", "must be above 0"),
        ("step.p50_ns: +5%pt", "not a unit"),
        ("step.p50_ns: 5%", "is not METRIC OPERATOR LIMIT"),
        ("step.q50: +5%", "unknown metric"),
    ],
)
def test_invalid_change_rules_are_refused(rule: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        verdict(times(100.0, 1), times(100.0, 2, started=1), rule=rule)
    assert message in caught.value.message


def test_change_rules_and_baselines_require_each_other() -> None:
    with pytest.raises(UsageError, match="needs a run to compare with"):
        verdict(times(100.0, 1), rule="step.p50_ns: +5%")
    with pytest.raises(UsageError, match="no rule on a change"):
        verdict(times(100.0, 1), times(100.0, 2, started=1), rule="gpu.busy_ratio >= 1%")
