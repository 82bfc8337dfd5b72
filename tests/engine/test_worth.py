"""Money, completion times, rates and yardsticks, each from numbers added up by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import RankBooks, RankName, keep_books
from clusterprof.attribution.partial import SHARE, Partial
from clusterprof.attribution.precedence import SPENT_ON
from clusterprof.attribution.regions import RankState
from clusterprof.engine.gained import NO_STEPS, NOT_LAID, ONE_RANK, TWO_JOBS, Gained
from clusterprof.engine.peers import Across
from clusterprof.engine.worth import AT_MOST, EMULATED, NO_PRICE, OUTSIDE, metrics_of, worth_of
from clusterprof.engine.yardsticks import brought, yardsticks_of
from clusterprof.findings import Finding
from clusterprof.timeline.identity import Place
from clusterprof.timeline.model import SOURCE_DEVICE_SAMPLES

S = 10**9
STORAGE = "storage-local"
PRICE = {"gpu_price_per_hour": 3.6, "currency": "EUR"}  # 0.001 EUR per GPU-second


def books(
    rank: int = 0, in_step: int = 100 * S, lost: int = 20 * S, peers: bool = False, **totals: int
) -> RankBooks:
    """A rank that lost time to its disk, 10 s after it was started."""
    name = RankName("node", rank, 100 + rank, "gpu0", True, False, peers)
    state = RankState(
        settled_ns=1, begun_ns=10 * S, ended_ns=10 * S + in_step, first_ns=0,
        last_ns=10 * S + in_step,
    )  # fmt: skip
    sums = {"in_step": in_step, "lost": lost, "measured": in_step, "busy": in_step - lost}
    claimed = {(STORAGE, "A", SOURCE_DEVICE_SAMPLES): lost * SHARE}
    return keep_books(name, state, Partial({**sums, **totals}, claimed=claimed))


def alone(lost_s: list[int], hidden_s: int = 0) -> RankBooks:
    """A rank without peers, with stretches of 10 s of steps; in each it lost so much."""
    column = SPENT_ON.index(STORAGE)
    sums = np.zeros((len(lost_s), len(SPENT_ON) + 1), np.int64)
    sums[:, column] = sums[:, -1] = np.array(lost_s) * S
    sums[0, [column, -1]] += hidden_s * S
    lengths = np.full(len(lost_s), 10 * S)
    one = books(in_step=int(lengths.sum()), lost=sum(lost_s) * S)
    return replace(one, own_steps=(lengths, sums))


def finding(lost_ns: int, **more: object) -> Finding:
    base = Finding(CAUSES[STORAGE], lost_ns, 0.2, None, 0.9, "A", False, False)
    return replace(base, **more)  # type: ignore[arg-type]


def test_what_it_costs_and_how_much_sooner_the_job_would_end() -> None:
    one = alone([2] * 10, hidden_s=3)
    worth = worth_of([one], Across(()), [finding(20 * S)], PRICE)
    assert worth.job_ns == 100 * S and worth.gpus == 1
    assert worth.lost_cost == pytest.approx(0.02)  # 20 s at 0.001
    [cause] = worth.causes
    assert cause.saved_ns == worth.saved_ns == 23 * S  # of its production 3 s were hidden
    assert cause.lost_cost == pytest.approx(0.02) and cause.saved_cost == pytest.approx(0.023)
    assert cause.saved_low_ns is not None and cause.saved_high_ns is not None
    # one stretch of ten won 5 s, the others 2: drawn anew it is not there, or there a few times
    assert 20 * S <= cause.saved_low_ns < 23 * S < cause.saved_high_ns <= 32 * S
    assert cause.why_missing == worth.why_no_cost == ""


def test_what_never_varies_is_certain_and_a_few_stretches_tell_no_bounds() -> None:
    for stretches, bounds in ((8, (16 * S, 16 * S)), (4, (None, None))):
        [cause] = worth_of([alone([2] * stretches)], Across(()), [finding(S)], {}).causes
        assert cause.saved_ns == 2 * stretches * S
        assert (cause.saved_low_ns, cause.saved_high_ns) == bounds


def test_what_cannot_be_said_says_why() -> None:
    outside, bounded = finding(S, outside_steps=True), finding(S, upper_bound=True)
    worth = worth_of([alone([2] * 10)], Across(()), [outside, bounded], {})
    assert [(one.saved_ns, one.why_missing) for one in worth.causes] == [
        (None, OUTSIDE), (None, AT_MOST)
    ]  # fmt: skip
    assert worth.lost_cost is None and worth.why_no_cost == NO_PRICE
    emulated = replace(alone([2] * 10), emulated=True)
    assert worth_of([emulated], Across(()), [], PRICE).why_no_cost == EMULATED
    pair = [books(rank, peers=True) for rank in range(2)]
    assert Gained(pair, None).why == NOT_LAID
    assert Gained(pair[:1], None).why == ONE_RANK
    assert Gained([], None).why == NO_STEPS
    jobs = [replace(one, place=Place(job=str(at))) for at, one in enumerate(pair)]
    assert Gained(jobs, None).why == TWO_JOBS


def test_tokens_per_second_and_what_a_million_cost_now_and_if_fixed() -> None:
    known = {"tokens": 50_000, "tokens_steps": 40, "tokens_unknown_steps": 0}
    one = replace(alone([2] * 10), partial=Partial({"first_step": 0, **known}))
    worth = worth_of([one], Across(()), [finding(20 * S)], PRICE)
    assert worth.tokens_per_second == 500  # 50,000 in 100 s
    assert worth.tokens_per_second_if_fixed == 625  # in 80 s
    # 1e6 tokens take 2,000 s at 0.001 EUR a second; 1,600 s when fixed
    assert worth.cost_per_million_tokens == pytest.approx(2.0)
    assert worth.cost_per_million_tokens_if_fixed == pytest.approx(1.6)
    assert worth.samples_per_second is None
    assert worth.why_no_samples == "the steps do not say how many samples they held"
    told = {metric.name: metric.value for metric in metrics_of(worth)}
    assert told["yardstick.tokens_per_second"] == 500
    assert told["yardstick.million_tokens_cost"] == pytest.approx(2.0)
    assert told["yardstick.samples_per_second"] is None


def test_steps_that_do_not_say_what_they_held_count_like_the_others_if_they_are_few() -> None:
    def rate(known: int, unknown: int) -> tuple[float | None, str]:
        sums = {"samples": 10 * known, "samples_steps": known, "samples_unknown_steps": unknown}
        found = brought([replace(books(), partial=Partial(sums))], 100 * S, "samples")
        return found.per_second, found.why

    assert rate(100, 0) == (10, "")
    assert rate(95, 5) == (10, "")
    assert rate(80, 20) == (None, "only 80 of 100 steps say how many samples they held")
    assert rate(0, 9)[0] is None


def test_the_yardsticks_by_hand() -> None:
    # Two ranks, 10 s of start-up and 100 s in steps each: 80 and 60 s productive. Of the 40 s that
    # rank 1 lost it waited 20 for rank 0, and 8 for data on their way.
    ranks = [books(0, lost=20 * S, peers=True), books(1, lost=40 * S, peers=True)]
    ranks[1] = replace(ranks[1], felt={STORAGE: 20 * S, "net-transfer": 8 * S})
    found = {name: value for name, value, _ in yardsticks_of(ranks)}
    assert found["goodput"] == pytest.approx(140 / 220)
    assert found["load balance"] == pytest.approx(70 / 80)
    assert found["communication efficiency"] == pytest.approx(80 / 100)
    assert found["parallel efficiency"] == pytest.approx(0.7)
    assert found["straggler slowdown S"] == pytest.approx(200 / 180)
    assert found["MLPerf Storage AU"] == pytest.approx(140 / 200)


def test_the_first_step_does_not_count_for_au_and_one_rank_has_no_balance() -> None:
    one = books(lost=20 * S, first_step=10 * S, first_step_lost=10 * S)
    found = {name: (value, text) for name, value, text in yardsticks_of([one])}
    assert found["MLPerf Storage AU"][0] == pytest.approx(80 / 90)
    assert found["load balance"] == (None, "it takes at least two ranks")
    assert yardsticks_of([])[0] == ("goodput", None, NO_STEPS)


def test_the_slowdown_of_ranks_in_teams_is_that_of_the_replay() -> None:
    ranks = [books(0, lost=20 * S, peers=True), books(1, lost=40 * S, peers=True)]
    ranks[1] = replace(ranks[1], felt={STORAGE: 20 * S})
    found = {name: value for name, value, _ in yardsticks_of(ranks, 100 * S, 80 * S)}
    assert found["straggler slowdown S"] == pytest.approx(1.25)
