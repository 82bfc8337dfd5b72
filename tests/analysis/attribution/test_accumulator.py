"""Sums of accumulators."""

from __future__ import annotations

import pickle

from clusterprof.analysis.attribution.accumulator import (
    MAX_SLOWEST_STEPS,
    Accumulator,
    merge_accumulators,
    select_slowest,
    sum_field,
    with_packed_slowest_steps,
)


def test_the_sum_of_one_field_is_that_of_the_merged_accumulators() -> None:
    parts = [
        Accumulator(totals={"lost": 3, "busy": 1}, steps={100: 2}),
        Accumulator(totals={"lost": 4}),
        Accumulator(),
    ]
    assert sum_field(parts, "totals") == {"lost": 7, "busy": 1} == merge_accumulators(*parts).totals
    assert sum_field([], "totals") == {}
    assert parts[0].totals == {"lost": 3, "busy": 1}, "the first is not changed"


def test_the_longest_and_earliest_steps_are_kept() -> None:
    first, second = {10: 5, 20: 7}, {10: 6, 30: 7, 40: 1}
    assert list(select_slowest(first, second).items()) == [(20, 7), (30, 7), (10, 6), (40, 1)]
    assert first == {10: 5, 20: 7}
    many = {start: 1 for start in range(100)}
    assert list(select_slowest({}, many)) == list(range(MAX_SLOWEST_STEPS))


def test_packed_slowest_steps_equal_the_unpacked_steps() -> None:
    whole = Accumulator(totals={"lost": 3}, slowest={10: 5, 30: 4, 20: 9})
    short = with_packed_slowest_steps(whole)
    assert list(short.slowest.items()) == [(10, 5), (30, 4), (20, 9)]
    assert (short.slowest[30], len(short.slowest), list(short.slowest)) == (4, 3, [10, 30, 20])
    assert pickle.loads(pickle.dumps(short)) == short == whole  # noqa: S301, pickled above
    assert short != with_packed_slowest_steps(
        Accumulator(totals={"lost": 3}, slowest={10: 5, 30: 4})
    )
    assert dict(with_packed_slowest_steps(Accumulator()).slowest) == {}
    more = merge_accumulators(short, Accumulator(slowest={40: 7}))
    assert list(more.slowest.items()) == [(20, 9), (40, 7), (10, 5), (30, 4)]
