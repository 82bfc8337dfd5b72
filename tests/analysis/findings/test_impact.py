"""Money, completion times, and rates, each from numbers added up by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.attribution.accumulator import Accumulator
from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.taxonomy import CAUSES, CLAIMABLE_CAUSES
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.findings.efficiency_metrics import NO_STEPS
from clusterprof.analysis.findings.impact import (
    EMULATED,
    NO_PRICE,
    NOT_MATCHED,
    OUTSIDE_STEPS,
    SEVERAL_JOBS,
    UNRECORDED_PEERS,
    UPPER_BOUND_ONLY,
    SavingsModel,
    build_impact,
    compute_rate,
    list_impact_metrics,
)
from clusterprof.analysis.timeline.load.ranks import JobPosition
from clusterprof.report.model import Finding
from tests.support.rank_results import STORAGE, S, make_rank_result

PRICE = {"gpu_price_per_hour": 3.6, "currency": "EUR"}  # 0.001 EUR per GPU-second


def alone(lost_s: list[int], hidden_s: int = 0) -> RankResult:
    """A rank without peers, with stretches of 10 s of steps; in each it lost so much."""
    column = CLAIMABLE_CAUSES.index(STORAGE)
    sums = np.zeros((len(lost_s), len(CLAIMABLE_CAUSES) + 1), np.int64)
    sums[:, column] = sums[:, -1] = np.array(lost_s) * S
    sums[0, [column, -1]] += hidden_s * S
    lengths = np.full(len(lost_s), 10 * S)
    rank_result = make_rank_result(in_step=int(lengths.sum()), lost=(sum(lost_s) + hidden_s) * S)
    return replace(rank_result, losses_by_time_bin=(lengths, sums))


def finding(lost_ns: int, **more: object) -> Finding:
    base = Finding(CAUSES[STORAGE], lost_ns, 0.2, None, 0.9, "A", False, False)
    return replace(base, **more)  # type: ignore[arg-type]


def test_impact_states_lost_cost_and_saved_time() -> None:
    item = alone([2] * 10, hidden_s=3)
    job_impact = build_impact([item], JobState(()), [finding(20 * S)], PRICE)
    assert job_impact.job_ns == 100 * S and job_impact.gpus == 1
    assert job_impact.lost_cost == pytest.approx(0.023)  # 23 s at 0.001, 3 of them to other causes
    [cause] = job_impact.causes
    assert (
        cause.saved_ns == job_impact.saved_ns == 23 * S
    )  # 3 s of its production were hidden there
    assert cause.lost_cost == pytest.approx(0.02) and cause.saved_cost == pytest.approx(0.023)
    assert cause.saved_low_ns is not None and cause.saved_high_ns is not None
    # one stretch of ten won 5 s, the others 2: drawn anew it is not there, or there a few times
    assert 20 * S <= cause.saved_low_ns < 23 * S < cause.saved_high_ns <= 32 * S
    assert cause.why_missing == job_impact.why_no_cost == ""


def test_savings_bounds_need_enough_bins_and_close_on_constant_loss() -> None:
    for stretches, bounds in ((8, (16 * S, 16 * S)), (4, (None, None))):
        [cause] = build_impact([alone([2] * stretches)], JobState(()), [finding(S)], {}).causes
        assert cause.saved_ns == 2 * stretches * S
        assert (cause.saved_low_ns, cause.saved_high_ns) == bounds


def test_missing_savings_and_cost_have_a_reason() -> None:
    outside, bounded = finding(S, outside_steps=True), finding(S, upper_bound=True)
    job_impact = build_impact([alone([2] * 10)], JobState(()), [outside, bounded], {})
    assert [(cause.saved_ns, cause.why_missing) for cause in job_impact.causes] == [
        (None, OUTSIDE_STEPS),
        (None, UPPER_BOUND_ONLY),
    ]
    assert job_impact.lost_cost is None and job_impact.why_no_cost == NO_PRICE
    emulated = replace(alone([2] * 10), emulated=True)
    assert build_impact([emulated], JobState(()), [], PRICE).why_no_cost == EMULATED
    pair = [make_rank_result(rank, peers=True) for rank in range(2)]
    assert SavingsModel(pair, None).why == NOT_MATCHED
    assert SavingsModel(pair[:1], None).why == UNRECORDED_PEERS
    assert SavingsModel([], None).why == NO_STEPS
    jobs = [replace(value, job_position=JobPosition(job=str(at))) for at, value in enumerate(pair)]
    assert SavingsModel(jobs, None).why == SEVERAL_JOBS


def test_token_rate_and_cost_are_given_before_and_after_fixing() -> None:
    known = {"tokens": 50_000, "tokens_steps": 40, "tokens_unknown_steps": 0}
    item = replace(alone([2] * 10), accumulator=Accumulator({"first_step": 0, **known}))
    job_impact = build_impact([item], JobState(()), [finding(20 * S)], PRICE)
    assert job_impact.tokens_per_second == 500  # 50,000 in 100 s
    assert job_impact.tokens_per_second_if_fixed == 625  # in 80 s
    # 1e6 tokens take 2,000 s at 0.001 EUR a second; 1,600 s when fixed
    assert job_impact.cost_per_million_tokens == pytest.approx(2.0)
    assert job_impact.cost_per_million_tokens_if_fixed == pytest.approx(1.6)
    assert job_impact.samples_per_second is None
    assert job_impact.why_no_samples == "the steps do not report how many samples they held"
    by_key = {metric.name: metric.value for metric in list_impact_metrics(job_impact)}
    assert by_key["yardstick.tokens_per_second"] == 500
    assert by_key["yardstick.million_tokens_cost"] == pytest.approx(2.0)
    assert by_key["yardstick.samples_per_second"] is None


def test_few_steps_without_sample_counts_use_the_mean() -> None:
    def rate(known: int, unknown: int) -> tuple[float | None, str]:
        sums = {"samples": 10 * known, "samples_steps": known, "samples_unknown_steps": unknown}
        rate = compute_rate(
            [replace(make_rank_result(), accumulator=Accumulator(sums))], 100 * S, "samples"
        )
        return rate.per_second, rate.why

    assert rate(100, 0) == (10, "")
    assert rate(95, 5) == (10, "")
    assert rate(80, 20) == (None, "only 80 of 100 steps report how many samples they held")
    assert rate(0, 9)[0] is None
