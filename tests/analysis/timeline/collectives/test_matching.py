"""Spans of ranks become operations, and what cannot be matched is counted with its reason."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.timeline.collectives.operations import RECV, SEND
from clusterprof.analysis.timeline.collectives.rows import match_halves
from tests.support.synthetic.matching import CollectiveSpans, MatchResult, concat_spans, match_spans

ALL_REDUCE, BARRIER = 1, 9
RANDOM = np.random.default_rng(7)
LEAVES = np.cumsum(RANDOM.integers(50, 500, 40)) * 1_000


def spans_of(
    rank: int,
    leave_ns: np.ndarray = LEAVES,
    sequence: np.ndarray | None = None,
    group: int = 77,
    job: int = 0,
    operation: int = ALL_REDUCE,
    peer: int = -1,
    global_rank: int | None = None,
    ahead_ns: int = 0,
) -> CollectiveSpans:
    n = leave_ns.size
    sequence = np.arange(n) if sequence is None else sequence
    full = np.full
    return CollectiveSpans(
        full(n, rank),
        full(n, rank if global_rank is None else global_rank),
        full(n, job),
        leave_ns - 20 + ahead_ns,
        leave_ns + ahead_ns,
        full(n, 20),
        leave_ns,
        full(n, group),
        sequence,
        full(n, 64),
        full(n, operation),
        full(n, peer),
        np.arange(n) + 1000 * rank,
    )


def sizes(result: MatchResult) -> list[int]:
    return np.diff(result.operations.first).tolist()


def test_spans_with_equal_group_and_number_are_matched() -> None:
    matching = match_spans(
        concat_spans(*(spans_of(rank, ahead_ns=rank * 10**9) for rank in (2, 0, 1)))
    )
    assert sizes(matching) == [3] * 40
    assert matching.operations.rank.tolist() == [0, 1, 2] * 40
    assert matching.operations.complete.all()
    assert matching.operations.source[:3].tolist() == [0, 1000, 2000]
    assert matching.unmatched == {}


def test_spans_of_other_jobs_or_groups_are_not_matched() -> None:
    matching = match_spans(
        concat_spans(spans_of(0), spans_of(1, job=1), spans_of(2, group=78), spans_of(3))
    )
    assert sorted(sizes(matching)) == [1] * 80 + [2] * 40
    assert np.unique(matching.operations.process_group).size == 3


def test_operations_without_an_announced_member_are_incomplete() -> None:
    spans = concat_spans(spans_of(0), spans_of(1))
    matching = match_spans(spans, {(0, 77): np.array([0, 1, 2])})
    assert sizes(matching) == [2] * 40
    assert not matching.operations.complete.any()


def test_a_truncated_recording_is_matched_in_its_own_operations() -> None:
    late = spans_of(1, LEAVES[10:], np.arange(10, 40))
    matching = match_spans(concat_spans(spans_of(0), late))
    assert sizes(matching) == [1] * 10 + [2] * 30
    assert matching.operations.complete.tolist() == [False] * 10 + [True] * 30


def test_numbers_restarted_on_all_ranks_are_matched() -> None:
    again = np.concatenate([np.arange(20), np.arange(20)])
    matching = match_spans(concat_spans(*(spans_of(rank, sequence=again) for rank in range(3))))
    assert sizes(matching) == [3] * 40
    assert matching.unmatched == {}


def test_a_rank_with_fewer_restarts_is_left_out() -> None:
    # Ranks 0 and 1 saw both lives, rank 2 only the second: its 0 … 19 are not their first 20.
    again = np.concatenate([np.arange(20), np.arange(20)])
    both = [spans_of(rank, sequence=again) for rank in range(2)]
    matching = match_spans(concat_spans(*both, spans_of(2, LEAVES[20:], np.arange(20))))
    assert matching.unmatched == {"restart-unclear": 20}
    assert sizes(matching) == [2] * 40


@pytest.mark.parametrize("lag", [-2, -1, 1])
def test_a_rank_with_shifted_numbers_is_left_out(lag: int) -> None:
    off = spans_of(2, LEAVES[5:30], np.arange(5, 30) + lag)
    matching = match_spans(concat_spans(spans_of(0), spans_of(1), off))
    assert matching.unmatched == {"sequence-skew": 25}
    assert sizes(matching) == [2] * 40


def test_jitter_and_late_leavers_do_not_count_as_skew() -> None:
    late = LEAVES + RANDOM.integers(0, 20_000, LEAVES.size)
    late[7] += 25_000
    matching = match_spans(concat_spans(spans_of(0), spans_of(1), spans_of(2, late)))
    assert matching.unmatched == {}


def test_unmatchable_spans_are_counted_by_reason() -> None:
    matching = match_spans(
        concat_spans(
            spans_of(0),
            spans_of(1),
            spans_of(2, group=0),
            spans_of(0, operation=SEND),
            spans_of(1, LEAVES[:3]),
            spans_of(2, LEAVES[:5], operation=BARRIER),
        )
    )
    assert matching.unmatched == {
        "group-unknown": 40,
        "peer-unknown": 40,
        "seen-twice": 3,
        "another-operation": 5,
    }


def test_sends_and_receives_are_matched_by_direction() -> None:
    there = spans_of(0, operation=SEND, peer=1), spans_of(1, operation=RECV, peer=0)
    back = (
        spans_of(1, LEAVES + 7, operation=SEND, peer=0),
        spans_of(0, LEAVES + 7, operation=RECV, peer=1),
    )
    matching = match_spans(concat_spans(*there, *back))
    assert sizes(matching) == [2] * 80
    assert matching.operations.complete.all()
    assert np.unique(matching.operations.process_group).size == 1  # one pair, both ways


def test_an_asynchronous_operation_spans_issue_to_wait_end() -> None:
    #  issue 10-12, wait 50-80 · blocking 90-95 · an issue without a wait · a wait without an issue
    start, end = np.array([10, 50, 90, 100, 110]), np.array([12, 80, 95, 101, 120])
    a, b = np.full(5, 77), np.array([0, 0, 1, 2, 3])
    form = np.array([1, 2, 0, 1, 2])
    spans = np.stack([start, end, a, b, np.full(5, 64), form << 8 | 1 | 4 << 16, end - start])
    begin, leave = match_halves(spans)
    assert (begin.tolist(), leave.tolist()) == ([0, 2], [1, 2])


def test_a_span_that_ends_before_it_begins_is_left_out() -> None:
    wrong = spans_of(2)
    wrong.leave_ns[3] -= 50  # it came 20 before
    matching = match_spans(concat_spans(spans_of(0), spans_of(1), wrong))
    assert matching.unmatched == {"backwards": 1}
