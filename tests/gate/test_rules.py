"""Levels, shorthands and repeats: what a team uses to keep a gate switched on."""

from __future__ import annotations

import dataclasses

import pytest

from clusterprof.errors import UsageError
from clusterprof.gate import (
    ChangeRule,
    Policy,
    Rule,
    Verdict,
    judge_runs,
    parse_any_rule,
    parse_max_stall,
    parse_min_utilization,
    require_rules,
    with_levels,
)
from clusterprof.report.model import JobFacts, Report
from tests.support.gate_runs import make_run


def verdict(*runs: Report, rules: tuple[str, ...], aggregate: str = "median") -> Verdict:
    policy = Policy(aggregate=aggregate)  # type: ignore[arg-type]
    return judge_runs(runs[0], [parse_any_rule(rule) for rule in rules], policy, runs[1:])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("lost.ratio <= 5%", Rule("lost.ratio", "<=", 0.05, "ratio", "lost.ratio <= 5%")),
        ("warn: a >= 1", Rule("a", ">=", 1.0, "", "warn: a >= 1", "warn")),
        ("off:a>=1", Rule("a", ">=", 1.0, "", "off:a>=1", "off")),
        ("step.p50_ns: +5%", ChangeRule("step.p50_ns", "+", 0.05, "%", "step.p50_ns: +5%")),
        ("a: -2pt", ChangeRule("a", "-", 0.02, "pt", "a: -2pt")),
        ("a: ±250 ms", ChangeRule("a", "±", 250e6, "ns", "a: ±250 ms")),
        ("warn: a:+1.5 points", ChangeRule("a", "+", 0.015, "pt", "warn: a:+1.5 points", "warn")),
    ],
)
def test_rules_are_parsed(text: str, rule: Rule | ChangeRule) -> None:
    assert parse_any_rule(text) == rule


def test_shorthand_options_become_rules() -> None:
    assert parse_max_stall("storage=5%").metric == "stall.storage"
    assert (parse_max_stall("cpu-gc = 0.01").operator, parse_max_stall("cpu-gc=0.01").limit) == (
        "<=",
        0.01,
    )
    assert (parse_min_utilization("70%").metric, parse_min_utilization("70%").limit) == (
        "gpu.busy_ratio",
        0.7,
    )
    for wrong in ("storage", "storage<5%", "=5%", "Storage=5%"):
        with pytest.raises(UsageError, match="is not CAUSE=LIMIT"):
            parse_max_stall(wrong)


def test_rule_levels_set_the_exit_code_of_a_failure() -> None:
    poor = make_run(storage=0.2)
    for rule, code, first in (
        ("lost.ratio <= 5%", 3, "gate FAILED: 1 of 2 rules"),
        ("warn: lost.ratio <= 5%", 0, "gate PASSED: 2 rules, 1 warning"),
        ("warn: gpu.sm_active >= 5%", 0, "gate PASSED: 2 rules, 1 warning"),
        ("gpu.sm_active >= 5%", 4, "gate CANNOT TELL: 1 of 2 rules"),
        ("off: lost.ratio <= 5%", 0, "gate PASSED: 1 rule"),
    ):
        judged = verdict(poor, rules=(rule, "gpu.busy_ratio >= 70%"))
        assert (judged.exit_code, judged.lines[0]) == (code, first)
    assert verdict(poor, rules=("warn: lost.ratio <= 5%",)).lines[1].startswith("  warn  ")


def test_levels_of_a_profile_can_be_changed() -> None:
    rules = [parse_any_rule("stall.cpu <= 1%"), parse_any_rule("lost.ratio <= 1%")]
    assert [level.level for level in with_levels(rules, ["stall.cpu=warn"])] == ["warn", "error"]
    with pytest.raises(UsageError, match=r"no rule is on 'stall\.gpu'"):
        with_levels(rules, ["stall.gpu=off"])
    with pytest.raises(UsageError, match="is not METRIC=off"):
        with_levels(rules, ["stall.cpu=maybe"])
    with pytest.raises(UsageError, match="no rules"):
        require_rules(with_levels(rules, ["stall.cpu=off", "lost.ratio=off"]))


def of(*shares: float) -> list[Report]:
    return [make_run(f"run{i}", storage=share, started=i) for i, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("rule", "aggregate", "outcome"),
    [
        ("lost.ratio <= 5%", "median", "pass"),
        ("lost.ratio <= 5%", "pessimistic", "fail"),
        ("lost.ratio <= 2%", "median", "fail"),
        ("lost.ratio <= 2%", "optimistic", "pass"),
        ("gpu.busy_ratio >= 95%", "median", "pass"),
        ("gpu.busy_ratio >= 95%", "pessimistic", "fail"),
    ],
)
def test_values_of_repeated_runs_are_aggregated(rule: str, aggregate: str, outcome: str) -> None:
    judged = verdict(*of(0.01, 0.04, 0.09), rules=(rule,), aggregate=aggregate)
    assert judged.results[0].outcome == outcome
    assert judged.results[0].why.endswith(
        f"({aggregate} of 1.0 %, 4.0 %, 9.0 %)"
        if "lost" in rule
        else f"({aggregate} of 91.0 %, 96.0 %, 99.0 %)"
    )


def test_an_even_number_of_runs_uses_the_worse_middle_value() -> None:
    judged = verdict(*of(0.01, 0.04, 0.06, 0.09), rules=("lost.ratio <= 5%",))
    assert judged.results[0].value == pytest.approx(0.06, rel=1e-3)


def test_a_single_poor_run_leaves_the_aggregate_undecided() -> None:
    good, poor = of(0.01, 0.01)
    rank = dataclasses.replace(poor.ranks[0], coverage_ratio=0.5)
    poor = dataclasses.replace(poor, ranks=(rank, poor.ranks[1]))
    for aggregate in ("median", "optimistic"):
        judged = verdict(good, poor, rules=("lost.ratio <= 5%",), aggregate=aggregate)
        assert (judged.exit_code, judged.results[0].outcome) == (4, "cannot tell")
        assert judged.unmet_preconditions[0].startswith("run1: coverage: samples cover 50.0 %")


def test_unrecorded_ranks_leave_the_verdict_undecided() -> None:
    report = dataclasses.replace(make_run(), job=JobFacts(8, 2, 1.0))
    judged = verdict(report, rules=("gpu.busy_ratio >= 1%",))
    assert judged.exit_code == 4
    assert judged.unmet_preconditions[0].startswith(
        "ranks: 2 of the job's 8 were recorded, 100.0 % needed"
    )
    lenient = judge_runs(
        report, [parse_any_rule("gpu.busy_ratio >= 1%")], Policy(min_ranks_ratio=0.25)
    )
    assert lenient.exit_code == 0
