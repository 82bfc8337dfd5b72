"""Percentiles, parts of a run, single ranks and worth, as rules may name them, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from clusterprof.errors import UsageError
from clusterprof.gate import Policy, RuleResult, judge_runs, parse_rule
from clusterprof.gate.rules import find_metric
from clusterprof.report.impact import Impact
from clusterprof.report.model import Metric, Report
from tests.support.gate_runs import MS, make_run


def value(name: str, report: Report) -> float | None:
    return find_metric(name, report, name).value


def result(report: Report, rule: str) -> RuleResult:
    return judge_runs(report, [parse_rule(rule)], Policy()).results[0]


def test_percentiles_of_steps_lie_within_their_bin() -> None:
    # 100 steps of 100, 101, … 199 ms, twice: a bin is 0.54 % wide
    report = make_run(steps=[(100 + i) * MS for i in range(100)])
    for name, ms in (("step.p10_ns", 109), ("step.p90", 189), ("step.p99.5_ns", 199)):
        assert value(name, report) == pytest.approx(ms * MS, rel=0.011)
    assert value("step.mean", report) == 149.5 * MS
    # one that the report has by itself is taken from there
    assert value("step.p50", report) == 149 * MS


def test_rules_can_name_parts_of_a_run() -> None:
    # 40 steps of 100 ms, two per stretch; the last four steps lose 40 % more
    report = make_run(steps=[100 * MS] * 40, storage=0.1)
    steps = report.steps
    assert steps is not None
    lost = list(steps.lost_ns)
    lost[-4:] = [ns + 2 * 40 * MS for ns in lost[-4:]]
    slow = dataclasses.replace(
        steps, lost_ns=tuple(lost), lost=(("storage-local", "storage", tuple(lost)),)
    )
    report = dataclasses.replace(report, steps=slow)
    assert value("lost.ratio.max", report) == pytest.approx(0.5)
    assert value("lost.ratio.min", report) == pytest.approx(0.1)
    # 18 of 20 stretches are at 10 %
    assert value("stall.storage.p90", report) == pytest.approx(0.1)
    assert value("stall.storage_ratio.p95", report) == pytest.approx(0.5)
    assert result(report, "lost.ratio.max <= 45%").outcome == "fail"


def test_rules_can_name_the_worst_and_the_best_rank() -> None:
    report = make_run(storage=0.1)
    first = report.ranks[0]
    more = first.lost_ns * 3
    worse = dataclasses.replace(
        first,
        lost_ns=more,
        productive_ns=first.in_step_ns - more,
        buckets=(("storage-local", more), ("unattributed", 0)),
    )
    report = dataclasses.replace(report, ranks=(worse, report.ranks[1]))
    assert value("lost.ratio.rank_max", report) == pytest.approx(0.3, rel=1e-6)
    assert value("lost.ratio.rank_min", report) == pytest.approx(0.1, rel=1e-6)
    assert value("stall.storage.rank_max", report) == pytest.approx(0.3, rel=1e-6)
    with pytest.raises(UsageError, match="not known per rank"):
        value("gpu.busy_ratio.rank_max", report)


def test_unavailable_parts_state_a_reason() -> None:
    short = make_run(steps=[100 * MS] * 10)
    assert (
        find_metric("lost.ratio.max", short, "").why_missing
        == "fewer than 20 time bins of the run have steps"
    )
    old = dataclasses.replace(make_run(), steps=None)
    assert "no blocks of steps" in find_metric("step.p90_ns", old, "").why_missing
    assert (
        find_metric("gpu.sm_active.p10", make_run(), "").why_missing
        == "no SM activity was recorded"
    )
    with pytest.raises(UsageError, match="not known for parts of a run"):
        value("data_wait.ratio.max", make_run())


def test_unattributed_time_can_leave_a_part_rule_undecided() -> None:
    report = make_run(steps=[100 * MS] * 40, storage=0.1)
    steps = report.steps
    assert steps is not None
    columns = dict.fromkeys(range(40), 0)
    columns[39] = 2 * 60 * MS
    unknown = ("unattributed", "unattributed", tuple(columns.values()))
    report = dataclasses.replace(
        report, steps=dataclasses.replace(steps, lost=(steps.lost[0], unknown))
    )
    # 10 % everywhere, and 30 % of the last stretch are lost without a cause
    assert result(report, "stall.storage_ratio.max <= 20%").outcome == "cannot tell"
    assert result(report, "stall.storage_ratio.max <= 41%").outcome == "pass"
    assert result(report, "stall.storage_ratio.max <= 5%").outcome == "fail"


def test_cost_rules_are_judged_and_missing_costs_state_a_reason() -> None:
    report = make_run()
    rank_result = result(report, "cost.lost <= 5")
    assert (rank_result.outcome, rank_result.why[:26]) == (
        "cannot tell",
        "it was not computed: set f",
    )
    job_impact = Impact(
        2.0,
        "USD",
        4.5,
        10**9,
        (),
        tokens_per_second=1000.0,
        efficiency_metrics=(
            ("straggler.slowdown_ratio", 1.08, "S"),
            ("pop.balance_ratio", None, "alone"),
        ),
    )
    report = dataclasses.replace(report, impact=job_impact)
    for rule, outcome in (
        ("cost.lost <= 5", "pass"),
        ("cost.lost <= 4", "fail"),
        ("tokens_per_second >= 1001", "fail"),
        ("straggler.slowdown <= 1.1", "pass"),
        ("straggler.slowdown_ratio <= 105%", "fail"),
        ("pop.balance >= 80%", "cannot tell"),
    ):
        assert result(report, rule).outcome == outcome, rule
    # a metric of the report by the same name is the one that counts
    metric = Metric("cost.lost", 9.0, "USD")
    report = dataclasses.replace(report, metrics=(*report.metrics, metric))
    assert result(report, "cost.lost <= 5").outcome == "fail"
