"""Yardsticks as their authors define them, by hand, and those that contradict each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.findings.efficiency_metrics import (
    GAPS_ON_CRITICAL_PATH,
    IMPOSSIBLE_SAVINGS,
    LESS_THAN_ONE,
    MORE_THAN_WORK,
    NO_BENCHMARK,
    NO_STEPS,
    NOT_COMPARED,
    SLOWDOWN,
    TOLERANCE,
    TOO_FEW_RANKS,
    UNEXPLAINED_IDLE,
    compute_efficiency_metrics,
    find_slowdown_contradiction,
    withhold_impossible_savings,
)
from clusterprof.report.impact import CauseImpact, Impact
from tests.support.rank_results import STORAGE, S, make_rank_result


def pair() -> list[RankResult]:
    """Two ranks, 10 s of start-up and 100 s in steps each: 80 and 60 s productive."""
    return [
        make_rank_result(0, lost=20 * S, peers=True),
        make_rank_result(1, lost=40 * S, peers=True),
    ]


def test_efficiency_metrics_match_values_computed_by_hand() -> None:
    values = {name: value for name, value, _ in compute_efficiency_metrics(pair(), 1.25, au=0.9)}
    assert values["goodput"] == pytest.approx(140 / 220)
    # POP: useful 80 and 60 of a run of 100
    assert values["load balance"] == pytest.approx(70 / 80)
    assert values["communication efficiency"] == pytest.approx(80 / 100)
    assert values["parallel efficiency"] == pytest.approx(70 / 100)
    assert values["straggler slowdown S"] == 1.25
    assert values["MLPerf Storage AU"] == 0.9


def test_a_metric_without_its_inputs_has_a_reason() -> None:
    alone = {
        name: (value, why)
        for name, value, why in compute_efficiency_metrics([make_rank_result()], 1.2)
    }
    assert alone["load balance"] == (None, TOO_FEW_RANKS)
    assert alone["straggler slowdown S"] == (None, TOO_FEW_RANKS)
    assert alone["MLPerf Storage AU"] == (None, NO_BENCHMARK)
    both = {name: (value, why) for name, value, why in compute_efficiency_metrics(pair())}
    assert both["straggler slowdown S"] == (None, NOT_COMPARED)
    lines = compute_efficiency_metrics(pair(), None, GAPS_ON_CRITICAL_PATH)
    assert ("straggler slowdown S", None, GAPS_ON_CRITICAL_PATH) in lines
    assert compute_efficiency_metrics([])[0] == ("goodput", None, NO_STEPS)


def test_a_slowdown_that_contradicts_the_report_is_withheld() -> None:
    # Of a pipeline with load balance 0.47: parallel efficiency 0.452, 0.317 lost to uneven work.
    assert find_slowdown_contradiction(1.97, 0.452, 0.317) == ""
    # 1 / 1.04 - 0.452 = 0.51 would be idle with even work, where 0.231 was lost to other causes.
    assert find_slowdown_contradiction(1.04, 0.452, 0.317) == UNEXPLAINED_IDLE
    assert find_slowdown_contradiction(2.3, 0.452, 0.317) == MORE_THAN_WORK  # 1 / 0.452 = 2.21
    assert find_slowdown_contradiction(0.83, 0.48, 0.1) == LESS_THAN_ONE
    assert find_slowdown_contradiction(1.2, None, 0.1) == ""
    lines = {name: (value, why) for name, value, why in compute_efficiency_metrics(pair(), 1.5)}
    assert lines["straggler slowdown S"] == (None, MORE_THAN_WORK)  # 1 / 0.7 = 1.43


@given(st.lists(st.integers(0, 100), min_size=2, max_size=6), st.floats(0.5, 4.0))
def test_reported_efficiency_metrics_are_consistent_with_each_other(
    lost: list[int], slowdown: float
) -> None:
    ranks = [make_rank_result(at, lost=s * S, peers=True) for at, s in enumerate(lost)]
    lines = compute_efficiency_metrics(ranks, slowdown)
    values = {name: value for name, value, _ in lines}
    parallel, printed = values["parallel efficiency"], values["straggler slowdown S"]
    if parallel is not None:
        balance, efficiency = values["load balance"], values["communication efficiency"]
        assert parallel == pytest.approx((balance or 0.0) * (efficiency or 0.0))
        assert 0.0 <= (values["goodput"] or 0.0) <= parallel <= min(balance or 0, efficiency or 0)
        if printed is not None:
            assert 1.0 - TOLERANCE <= printed <= (1.0 + TOLERANCE) / parallel
    assert all(why for _, value, why in lines if value is None)
    assert printed is None or dict((n, w) for n, _, w in lines)["straggler slowdown S"] == SLOWDOWN


def savings(cause: str, saved_s: int) -> CauseImpact:
    return CauseImpact(cause, None, saved_s * S, (saved_s - 1) * S, (saved_s + 1) * S)


def check(all_s: int | None, *causes: CauseImpact) -> tuple[list[int | None], int | None]:
    """Check savings of two ranks with 80 and 60 of 100 s productive; the result in s."""
    impact = Impact(
        None, "", None, 100 * S, causes, gpus=2, saved_ns=None if all_s is None else all_s * S
    )
    checked = withhold_impossible_savings(impact, pair())
    for line in checked.causes:
        missing = line.saved_ns is None
        assert (line.why_missing == IMPOSSIBLE_SAVINGS) == line.is_unknowable == missing
        assert (line.saved_low_ns is None) == missing
    saved = [None if line.saved_ns is None else line.saved_ns // S for line in checked.causes]
    return saved, None if checked.saved_ns is None else checked.saved_ns // S


def test_savings_that_leave_less_time_than_the_work_are_withheld() -> None:
    # 80 s of work remain without storage, 60 if no rank has more than the lower median
    assert check(20, savings(STORAGE, 20), savings("sync-imbalance", 20)) == ([20, 20], 20)
    assert check(40, savings(STORAGE, 30), savings("sync-imbalance", 40)) == ([None, 40], 40)
    assert check(50, savings("sync-imbalance", 50)) == ([None], None)
    # all fixed saves no less than one fixed
    assert check(5, savings(STORAGE, 20)) == ([20], None)
    assert check(None) == ([], None)


@given(st.lists(st.tuples(st.sampled_from((STORAGE, "sync-imbalance")), st.integers(1, 120))))
def test_reported_savings_never_exceed_the_lost_time(cases: list[tuple[str, int]]) -> None:
    saved, _ = check(None, *(savings(cause, s) for cause, s in cases))
    for (cause, before), after in zip(cases, saved):
        most = 40 if cause == "sync-imbalance" else 20
        assert after == (before if before <= most + 2 else None)


def test_savings_outside_steps_are_not_checked() -> None:
    empty = Impact(None, "", None, None, (savings(STORAGE, 7),))
    assert withhold_impossible_savings(empty, [replace(make_rank_result(), buckets=())]) is empty
