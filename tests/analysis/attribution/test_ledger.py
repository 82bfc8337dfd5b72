"""The law of the house on random claims: what is lost is what is shared out, to the nanosecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.analysis.attribution.accumulator import (
    EMPTY_ACCUMULATOR,
    MAX_SLOWEST_STEPS,
    SHARE_SCALE,
    Accumulator,
    merge_accumulators,
    round_by_largest_remainder,
)
from clusterprof.analysis.attribution.ledger import (
    LOW_CONFIDENCE,
    RankIdentity,
    allocate_buckets,
    build_rank_result,
)
from clusterprof.analysis.attribution.rank.chunk_boundary import RankState
from clusterprof.analysis.attribution.rank.claims import BLOCKED, NO_SIGNAL, allocate_claims
from clusterprof.analysis.attribution.rank.history import round_to_three_digits
from clusterprof.analysis.attribution.rank.host_phases import FILL_ORDER, allocate_by_phase
from clusterprof.analysis.attribution.taxonomy import CAUSES, PRECEDENCE
from clusterprof.analysis.detectors.registry import DETECTORS
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, PHASE_DATA_WAIT

SHARES = st.one_of(st.floats(-0.5, 1.5), st.just(float("nan")), st.just(1.0), st.just(1 / 3))
UNITS = st.integers(0, 10**13)
CLAIMED = st.dictionaries(
    st.tuples(st.sampled_from(sorted(CAUSES)), st.sampled_from("ABCD"), st.sampled_from([1, 2, 3])),
    UNITS,
    max_size=12,
)
REASONS = st.dictionaries(st.sampled_from([NO_SIGNAL, BLOCKED, "gap"]), UNITS, max_size=3)
PARTIALS = st.builds(
    Accumulator,
    totals=st.dictionaries(st.sampled_from(["lost", "in_step", "wait"]), UNITS),
    claimed=CLAIMED,
    unexplained=REASONS,
    steps=st.dictionaries(st.integers(1, 10**10), st.integers(1, 99), max_size=4),
)


@given(st.dictionaries(st.sampled_from(PRECEDENCE), st.lists(SHARES, min_size=3, max_size=3)))
def test_every_piece_is_allocated_exactly_once(claims: dict) -> None:
    arrays = {id_: np.array(values) for id_, values in claims.items()}
    shares, left = allocate_claims(arrays, 3)
    assert all((share >= 0).all() for share in shares.values())
    assert (left >= 0).all()
    np.testing.assert_array_equal(sum(shares.values(), left), np.full(3, SHARE_SCALE))
    again, _ = allocate_claims(dict(reversed(arrays.items())), 3)
    for id_, share in shares.items():
        np.testing.assert_array_equal(again[id_], share)


def test_claims_are_served_in_order_of_precedence() -> None:
    # storage-local 0.6, cpu-preprocess wants 0.7 of the 0.4 that are left, nobody the rest
    claims = {"cpu-preprocess": np.array([0.7]), "storage-local": np.array([0.6])}
    shares, left = allocate_claims(claims, 1)
    assert abs(shares["storage-local"][0] / SHARE_SCALE - 0.6) < 1e-6
    assert shares["cpu-preprocess"][0] == SHARE_SCALE - shares["storage-local"][0]
    assert left[0] == 0


def completed(partial: Accumulator) -> tuple[Accumulator, int]:
    """The same partial with so much unexplained that it is whole nanoseconds of lost time."""
    units = sum(partial.claimed.values()) + sum(partial.unexplained.values())
    rest = {**partial.unexplained}
    rest[NO_SIGNAL] = rest.get(NO_SIGNAL, 0) + -units % SHARE_SCALE
    lost_ns = (units + -units % SHARE_SCALE) // SHARE_SCALE
    return Accumulator(partial.totals, partial.claimed, rest), lost_ns


@given(PARTIALS, st.floats(0, 1))
def test_buckets_and_reasons_add_up_to_the_lost_time(partial: Accumulator, coverage: float) -> None:
    whole, lost_ns = completed(partial)
    buckets, reasons = allocate_buckets(whole, lost_ns, coverage)
    amounts = [bucket.lost_ns for bucket in buckets] + [ns for _, ns in reasons]
    assert sum(amounts) == lost_ns
    assert all(amount >= 0 for amount in amounts)
    assert amounts[: len(buckets)] == sorted(amounts[: len(buckets)], reverse=True)
    assert all(0 <= bucket.confidence_ratio <= 1 for bucket in buckets)


@given(PARTIALS, st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_window_splits_into_unmeasured_outside_and_in_step_time(
    partial: Accumulator, before: int, after: int, unmeasured: int
) -> None:
    whole, lost_ns = completed(partial)
    in_step = lost_ns + before  # any productive time will do
    totals = {"lost": lost_ns, "in_step": in_step, "unmeasured": unmeasured}
    whole = Accumulator(totals, whole.claimed, whole.unexplained)
    begun, end = 7 + before, 7 + before + in_step + unmeasured
    state = RankState(
        settled_ns=end, step_begin_ns=begun, step_end_ns=end, first_ns=7, last_ns=end + after
    )
    name = RankIdentity("node", 0, 100, "gpu-0", True, False, False)
    ledger = build_rank_result(name, state, whole).ledger
    assert ledger.window_ns == ledger.unmeasured_ns + ledger.outside_ns + ledger.in_step_ns
    assert ledger.in_step_ns == ledger.productive_ns + ledger.lost_ns
    assert sum(ns for _, ns in ledger.buckets) == ledger.lost_ns == lost_ns
    assert sum(ns for _, ns in ledger.outside_buckets) == ledger.outside_ns == before + after
    # start-up is what lies before the first step, the rest came after the last
    expected = [("startup", before), ("after-steps", after)]
    assert ledger.outside_buckets == tuple(line for line in expected if line[1])


@given(PARTIALS, PARTIALS, PARTIALS)
def test_partials_merge_in_any_grouping_and_order(
    a: Accumulator, b: Accumulator, c: Accumulator
) -> None:
    assert (
        merge_accumulators(merge_accumulators(a, b), c)
        == merge_accumulators(a, merge_accumulators(b, c))
        == merge_accumulators(c, a, b)
    )
    assert (
        merge_accumulators(EMPTY_ACCUMULATOR, a)
        == merge_accumulators(a)
        == merge_accumulators(a, EMPTY_ACCUMULATOR)
    )


def test_remainders_go_to_the_largest_and_ties_by_name() -> None:
    half, third = SHARE_SCALE // 2, SHARE_SCALE // 4
    units = {("b", "x"): SHARE_SCALE + half, ("b", "y"): half, ("b", "z"): third, ("r", "w"): third}
    # 1.5, 0.5, 0.25, 0.25 of 2.5: not whole, so it is refused
    with pytest.raises(AssertionError, match="do not add up"):
        round_by_largest_remainder(units, 2)
    units[("r", "v")] = half
    # 1.5 0.5 0.25 0.25 0.5 of 3: two left over, to the halves in order of their names
    assert round_by_largest_remainder(units, 3) == {
        ("b", "x"): 2,
        ("b", "y"): 1,
        ("b", "z"): 0,
        ("r", "w"): 0,
        ("r", "v"): 0,
    }


def test_low_confidence_moves_time_to_the_family_then_to_unattributed() -> None:
    def ids(grade: str, coverage: float = 1.0) -> tuple[list[str], list[str]]:
        partial = Accumulator(claimed={("storage-local", grade, 2): 10 * SHARE_SCALE})
        buckets, reasons = allocate_buckets(partial, 10, coverage)
        return [bucket.id for bucket in buckets], [reason for reason, _ in reasons]

    assert ids("A") == (["storage-local"], [])
    assert ids("B") == (["storage-local"], [])  # 0.85
    assert ids("C") == (["storage"], [])  # leaf 0.60, family 0.78
    assert ids("D") == ([], [LOW_CONFIDENCE])  # leaf 0.30, family 0.45
    assert ids("B", coverage=0.0) == (["storage"], [])  # leaf 0.85 * 0.8 = 0.68, family 0.74
    assert ids("C", coverage=0.0) == ([], [LOW_CONFIDENCE])  # family 0.78 * 0.8 = 0.62


@given(st.data())
def test_filling_never_exceeds_a_row_nor_its_window(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    window = np.sort(np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))))
    phase = np.array(data.draw(st.lists(st.sampled_from(FILL_ORDER), min_size=n, max_size=n)))
    capacity = st.lists(st.integers(0, 10**11), min_size=n, max_size=n)
    room = np.array(data.draw(capacity), np.int64)
    amount = np.array(data.draw(st.lists(st.integers(0, 10**11), min_size=4, max_size=4)))
    got = allocate_by_phase(window, phase, room, amount, FILL_ORDER)
    assert ((got >= 0) & (got <= room)).all()
    for number in range(4):
        mine = window == number
        expected = min(int(amount[number]), int(room[mine].sum()))
        assert abs(int(got[mine].sum()) - expected) <= 1  # rounding of one running sum
        first, second = PHASE_DATA_WAIT, PHASE_COMPUTE
        if got[mine & (phase == second)].sum() > 1:  # waits are full before steps get any
            assert (room - got)[mine & (phase == first)].sum() <= 1


def test_every_cause_has_its_place_in_the_precedence() -> None:
    ids = {detector.cause.id for detector in DETECTORS}
    assert set(PRECEDENCE) == ids
    assert len(PRECEDENCE) == len(ids)
    assert {detector.cause.family for detector in DETECTORS} <= set(CAUSES)


def test_step_lengths_are_rounded_to_three_digits() -> None:
    lengths = np.array([0, 999, 1_000, 1_004, 132_456_789, 999_500])
    assert round_to_three_digits(lengths).tolist() == [0, 999, 1_000, 1_000, 132_000_000, 1_000_000]


def test_the_slowest_steps_are_kept_in_any_merge_order() -> None:
    # a hundred steps, of which the one that begins at second n takes n ns; 36 to 99 are the slowest
    parts = [Accumulator(slowest={at: at for at in range(first, 100, 3)}) for first in range(3)]
    a, b, c = parts
    whole = merge_accumulators(a, b, c).slowest
    assert MAX_SLOWEST_STEPS == 64
    assert whole == {at: at for at in range(36, 100)}
    assert (
        merge_accumulators(merge_accumulators(c, a), b).slowest
        == merge_accumulators(a, merge_accumulators(b, c)).slowest
        == whole
    )
