"""The gate: every outcome of every rule, and never a pass on what is not good enough."""

from __future__ import annotations

import dataclasses
import math

import pytest

from clusterprof.errors import UsageError
from clusterprof.gate import Outcome, Policy, Verdict, judge_runs, parse_rule
from clusterprof.report.model import Metric, Report
from tests.support.reports import (
    ALL,
    S,
    make_clean_report,
    make_damaged_report,
    make_empty_report,
    make_storage_report,
    make_upper_bound_report,
)

# every rule that a perfect report would pass
EASY = ("gpu.busy_ratio >= 0%", "stall.storage <= 100%")


def verdict(report: Report, *rules: str, policy: Policy | None = None) -> Verdict:
    return judge_runs(report, [parse_rule(rule) for rule in rules], policy or Policy())


def with_metric(metric: Metric) -> Report:
    return dataclasses.replace(make_clean_report(), metrics=(metric,))


# storage_verdict: busy 354 s of 580 s = 61.03 %, storage 200 s of 580 s = 34.48 %, p95 812.3 ms
@pytest.mark.parametrize(
    ("rules", "exit_code", "outcomes"),
    [
        (["gpu.busy_ratio >= 60%"], 0, ["pass"]),
        (["gpu.busy_ratio >= 0.6", "stall.storage <= 36%"], 0, ["pass", "pass"]),
        # 34.48 % and the unattributed 0.86 %
        (["stall.storage <= 35%"], 4, ["cannot tell"]),
        (["gpu.busy_ratio >= 62%"], 3, ["fail"]),
        (["stall.storage <= 5%"], 3, ["fail"]),
        (["stall.storage_ratio < 34%"], 3, ["fail"]),
        (["step.p95_ns < 813 ms"], 0, ["pass"]),
        (["step.p95 < 812ms"], 3, ["fail"]),
        (["step.p95_ns <= 812345678"], 0, ["pass"]),
        (["step.p95_ns < 812345678"], 3, ["fail"]),
        (["step.p95_ns == 812345678"], 0, ["pass"]),
        (["step.p95_ns > 812345678"], 3, ["fail"]),
        (["gpu.sm_active_ratio >= 1%"], 4, ["cannot tell"]),
        (["gpu.busy_ratio >= 60%", "gpu.sm_active >= 1%"], 4, ["pass", "cannot tell"]),
        # certainty of failure outweighs not knowing, in either order
        (["gpu.sm_active >= 1%", "gpu.busy_ratio >= 99%"], 3, ["cannot tell", "fail"]),
        (["gpu.busy_ratio >= 99%", "gpu.sm_active >= 1%"], 3, ["fail", "cannot tell"]),
    ],
)
def test_rules_are_decided_on_a_good_recording(
    rules: list[str], exit_code: int, outcomes: list[str]
) -> None:
    judged = verdict(make_storage_report(), *rules)
    assert (judged.exit_code, [r.outcome for r in judged.results]) == (exit_code, outcomes)


# "at most 29 %": the truth is anything up to that; "at least 70 %": anything from there
@pytest.mark.parametrize(
    ("rule", "outcome"),
    [
        ("stall.cpu <= 30%", "pass"),
        ("stall.cpu <= 29%", "cannot tell"),  # 1 s of 100 s is unattributed, and may be CPU too
        ("stall.cpu < 30%", "cannot tell"),
        ("stall.cpu <= 5%", "cannot tell"),
        ("stall.cpu >= 31%", "fail"),
        ("stall.cpu >= 30%", "cannot tell"),
        ("stall.cpu > 30%", "fail"),
        ("stall.cpu == 40%", "fail"),
        ("stall.cpu == 20%", "cannot tell"),
        ("gpu.busy_ratio >= 70%", "pass"),
        ("gpu.busy_ratio > 70%", "cannot tell"),
        ("gpu.busy_ratio >= 90%", "cannot tell"),
        ("gpu.busy_ratio <= 60%", "fail"),
        ("gpu.busy_ratio < 70%", "fail"),
        ("gpu.busy_ratio <= 80%", "cannot tell"),
        ("gpu.busy_ratio == 60%", "fail"),
        ("gpu.busy_ratio == 80%", "cannot tell"),
    ],
)
def test_an_upper_bound_decides_only_rules_implied_by_the_bound(
    rule: str, outcome: Outcome
) -> None:
    assert verdict(make_upper_bound_report(), rule).results[0].outcome == outcome


def test_a_failed_gate_prints_the_expected_lines() -> None:
    rules = ("gpu.busy_ratio >= 70%", "stall.storage <= 36%", "gpu.sm_active >= 50%")
    assert verdict(make_storage_report(), *rules).lines == (
        "gate FAILED: 1 of 3 rules",
        "  FAIL  gpu.busy_ratio >= 70.0 %                is 61.0 %",
        "  pass  stall.storage_ratio <= 36.0 %           is 34.5 %",
        "  ????  gpu.sm_active_ratio >= 50.0 %           cannot tell:"
        " the driver offers no GPM on this GPU",
    )


def test_an_undecided_gate_prints_the_expected_lines() -> None:
    assert verdict(make_damaged_report(), "gpu.busy_ratio >= 50%").lines == (
        "gate CANNOT TELL: 1 of 1 rule · EMULATED accelerators",
        "  ????  gpu.busy_ratio >= 50.0 %                cannot tell: is 60.0 %,"
        " but the recording does not meet the preconditions",
        "  coverage: samples cover 83.0 % of the time on the worst rank, 90.0 % needed"
        " (see --min-coverage)",
        "  damage: 120.6 KiB of the recording could not be read, 64.0 KiB allowed",
    )


def test_a_difference_below_the_rounding_is_shown() -> None:
    judged = verdict(with_metric(Metric("gpu.busy_ratio", 0.69996, "ratio")), "gpu.busy >= 70%")
    assert judged.lines[1].endswith("is 70.0 % (0.69996, the limit 0.7)")
    assert judged.exit_code == 3


@pytest.mark.parametrize(
    ("rule", "outcome"),
    [
        # 10 s of 100 s are storage for certain, another 20 s may be
        ("stall.storage <= 30%", "pass"),
        ("stall.storage < 30%", "cannot tell"),
        ("stall.storage <= 10%", "cannot tell"),
        ("stall.storage < 10%", "fail"),
        ("stall.storage >= 10%", "pass"),
        ("stall.storage >= 30%", "cannot tell"),
        ("stall.storage > 30%", "fail"),
        ("gpu.busy >= 69%", "cannot tell"),
    ],
)
def test_unattributed_time_can_leave_a_cause_rule_undecided(rule: str, outcome: Outcome) -> None:
    good = make_clean_report()
    metrics = (Metric("stall.storage_ratio", 0.1, "ratio"), Metric("gpu.busy_ratio", None, "ratio"))
    report = dataclasses.replace(
        good, in_step_ns=100 * S, unattributed_ns=20 * S, lost_ns=30 * S, metrics=metrics
    )
    result = verdict(report, rule).results[0]
    assert result.outcome == outcome
    if outcome == "cannot tell" and "storage" in rule:
        assert result.why == "is 10.0 %, and another 20.0 % is lost without a known cause"


def poor_reports() -> dict[str, Report]:
    """Reports that look perfect and are worth nothing, each for one reason."""
    good = make_clean_report()
    rank, node = good.ranks[0], good.nodes[0]

    def rank_with(**changes: object) -> Report:
        worse = dataclasses.replace(rank, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(good, ranks=(rank, worse))

    def node_with(**changes: object) -> Report:
        worse = dataclasses.replace(node, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(good, nodes=(node, worse))

    metrics = {
        "missing": Metric("gpu.busy_ratio", None, "ratio", "no device"),
        "nan": Metric("gpu.busy_ratio", math.nan, "ratio"),
        "inf": Metric("gpu.busy_ratio", math.inf, "ratio"),
    }
    return {
        "too few steps of one rank": rank_with(steps=19),
        "no steps": rank_with(steps=0),
        "coverage of one rank": rank_with(coverage_ratio=0.89),
        "coverage is not a number": rank_with(coverage_ratio=math.nan),
        "damage": node_with(damaged_bytes=(64 << 10) + 1),
        "dropped spans": node_with(dropped_spans=101),
        "no ranks": dataclasses.replace(good, ranks=()),
        "no process": make_empty_report(),
    } | {
        name: dataclasses.replace(good, metrics=(metric, good.metrics[1]))
        for name, metric in metrics.items()
    }


def test_the_clean_report_passes() -> None:
    assert verdict(make_clean_report(), *EASY).exit_code == 0


@pytest.mark.parametrize("name", poor_reports())
def test_poor_reports_never_pass(name: str) -> None:
    report = poor_reports()[name]
    rules = [rule for rule in EASY if rule.split()[0] != "stall.storage" or len(report.metrics) > 1]
    judged = verdict(report, *rules)
    assert judged.exit_code == 4
    assert judged.lines[0].startswith("gate CANNOT TELL")


@pytest.mark.parametrize(("word", "code"), [("fail", 4), ("warn", 0), ("pass", 0)])
def test_the_policy_can_accept_undecided_rules(word: str, code: int) -> None:
    policy = Policy(on_inconclusive=word)  # type: ignore[arg-type]
    judged = verdict(make_damaged_report(), "gpu.busy_ratio >= 50%", policy=policy)
    assert (judged.exit_code, judged.outcome) == (code, "cannot tell")
    assert judged.lines[0].startswith("gate CANNOT TELL")
    assert ("--on-inconclusive" in judged.lines[0]) == (code == 0)
    # a certain failure is never let through
    assert verdict(make_storage_report(), "gpu.busy >= 99%", policy=policy).exit_code == 3


def test_the_policy_sets_the_preconditions_of_a_verdict() -> None:
    lenient = Policy(
        min_steps=90, min_coverage_ratio=0.83, max_damaged_bytes=123_456, max_dropped_spans=17
    )
    assert verdict(make_damaged_report(), "gpu.busy_ratio >= 50%", policy=lenient).exit_code == 0
    for name, value in (
        ("min_steps", 91),
        ("min_coverage_ratio", 0.84),
        ("max_damaged_bytes", 123_455),
        ("max_dropped_spans", 16),
    ):
        stricter = dataclasses.replace(lenient, **{name: value})
        assert (
            verdict(make_damaged_report(), "gpu.busy_ratio >= 50%", policy=stricter).exit_code == 4
        ), name


def test_a_recording_that_was_changed_cannot_be_judged() -> None:
    clean = make_clean_report()
    assert verdict(clean, "gpu.busy_ratio >= 10%").exit_code == 0
    altered = dataclasses.replace(clean.nodes[0], altered_segments=1)
    changed = dataclasses.replace(clean, nodes=(altered,))
    judged = verdict(changed, "gpu.busy_ratio >= 10%")
    assert (judged.exit_code, judged.outcome) == (4, "cannot tell")
    assert f"the recording of {altered.name} was changed after it was closed" in "\n".join(
        judged.lines
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("gpu.busy_ratio", "is not METRIC OPERATOR LIMIT"),
        ("gpu.busy_ratio => 70%", "is not METRIC OPERATOR LIMIT"),
        ("gpu.busy_ratio = 70%", "is not METRIC OPERATOR LIMIT"),
        ("gpu.busy_ratio != 70%", "is not METRIC OPERATOR LIMIT"),
        (">= 70%", "is not METRIC OPERATOR LIMIT"),
        ("gpu.busy_ratio >= ", "'=' is not a number"),
        ("gpu.busy_ratio >= high", "is not a number with a unit"),
        ("gpu.busy_ratio >= nan", "is not a number with a unit"),
        ("gpu.busy_ratio >= 70 parsecs", "'parsecs' is not a unit"),
        ("gpu.busy_ratio >= 1e999", "is too large"),
        ("gpu.busy_ratio >= " + 600 * "9" + "%", "…' is not a number with a unit"),
        ("gpu.busy_ratio >= 7" + 70_000 * " " + "% or so", "has 70,026 characters; at most 1,000"),
        ("gpu.busy_ratio >= 70ms", "gpu.busy_ratio is in ratio, not in ns"),
        ("step.p95_ns <= 5%", "step.p95_ns is in ns, not in ratio"),
        ("stall.storage <= 5", "stall.storage_ratio is a ratio from 0 to 1"),
        ("gpu.bussy_ratio >= 70%", "did you mean gpu.busy_ratio"),
        ("stall.storge <= 5%", "did you mean stall.storage"),
        ("zzz >= 1", "unknown metric 'zzz'"),
    ],
)
def test_an_invalid_rule_is_a_usage_error(rule: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        verdict(make_storage_report(), rule)
    assert message in caught.value.message
    assert caught.value.exit_code == 2


def test_a_gate_without_rules_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no rules"):
        verdict(make_storage_report())


def test_an_ambiguous_metric_stem_is_refused() -> None:
    metrics = (Metric("x.y_ratio", 0.1, "ratio"), Metric("x.y_ns", 1.0, "ns"))
    with pytest.raises(UsageError, match=r"did you mean x\.y_ratio or x\.y_ns"):
        verdict(dataclasses.replace(make_clean_report(), metrics=metrics), "x.y <= 1")


@pytest.mark.parametrize("name", ["lost.ratio", "lost_ratio", "stall.cpu-gc_ratio"])
def test_a_metric_is_found_by_name_and_stem(name: str) -> None:
    report = with_metric(Metric(name, 0.07, "ratio"))
    for written in (name, name[: -len("_ratio")]):
        assert verdict(report, f"{written}<=7%").results[0].metric == name


def test_percent_limits_are_compared_exactly() -> None:
    """0.01 * 7 is 0.07000000000000001: a limit must not let 7.000000000000001 % pass."""
    judged = verdict(with_metric(Metric("stall.cpu_ratio", 0.07, "ratio")), "stall.cpu < 7%")
    assert judged.exit_code == 3


@pytest.mark.parametrize("name", ALL)
def test_emulated_accelerators_are_named_in_the_first_line(name: str) -> None:
    report = ALL[name]()
    first = verdict(report, "gpu.busy_ratio >= 1%").lines[0]
    assert ("EMULATED" in first) == report.emulated
