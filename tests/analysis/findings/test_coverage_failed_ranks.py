"""Which rank failed first, as the notes say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from clusterprof.analysis.findings.coverage import describe_failed_ranks
from clusterprof.analysis.node.observations import FailedExit, OperationUnderWay, RankEnding
from clusterprof.analysis.timeline.stacks import StackTree
from clusterprof.probe import layout


@dataclass
class Thing:
    """Any object with these attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def build_rank(pid: int, number: int | None, first_ns: int = 0) -> Any:
    ledger, place = Thing(pid=pid), Thing(rank=number)
    return Thing(ledger=ledger, job_position=place, started_ticks=1, first_ns=first_ns, job=0)


def build_ending(pid: int, number: int, operation: int = -1) -> RankEnding:
    """How a rank ended that was in an all_reduce of this number; -1 = in none."""
    ending = RankEnding(pid, 1, Thing(rank=number))  # type: ignore[arg-type]
    if operation >= 0:
        ending.last_begun = OperationUnderWay(40, 7, operation, layout.ALL_REDUCE)
    return ending


def describe(
    ranks: list[Any], *exits: tuple[int, int, int, int], endings: tuple[RankEnding, ...] = ()
) -> tuple[str, ...]:
    """exits: pid, time, exit status, signal."""
    failed = tuple(FailedExit(pid, 1, t, status, number) for pid, t, status, number in exits)
    loaded = Thing(stacks=StackTree())
    node = Thing(
        facts=Thing(name="gpu-a"), ranks=ranks, failed_exits=failed, endings=endings, loaded=loaded
    )
    return describe_failed_ranks([node])  # type: ignore[list-item]


RANKS = [build_rank(100, 0), build_rank(101, 1), build_rank(102, 2)]


@pytest.mark.parametrize(
    ("exits", "text"),
    [
        (
            ((101, 50, 1, 0), (100, 60, 0, 15), (102, 60, 0, 15)),
            "rank 1 on gpu-a ended with exit status 1",
        ),
        (
            ((102, 50, 0, 9), (100, 60, 1, 0)),
            "rank 2 on gpu-a was killed by SIGKILL, and 1 more after it",
        ),
        (((102, 50, 0, 77),), "rank 2 on gpu-a was killed by signal 77"),
    ],
)
def test_the_first_rank_to_fail_by_itself_is_named(exits: Any, text: str) -> None:
    assert describe(RANKS, *exits) == (f"the job failed: {text}",)


KILLED = (101, 50, 0, 9)


@pytest.mark.parametrize(
    ("own", "where"),
    [
        (-1, "ranks 0, 2 were in all_reduce 20, where it had not arrived"),
        (19, "ranks 0, 2 were in all_reduce 20, where it had not arrived"),
        (20, "ranks 0, 2 were in all_reduce 20 too"),
    ],
)
def test_the_last_operation_of_the_other_ranks_is_named(own: int, where: str) -> None:
    endings = build_ending(100, 0, 20), build_ending(101, 1, own), build_ending(102, 2, 20)
    (text,) = describe(RANKS, KILLED, endings=endings)
    assert text == f"the job failed: rank 1 on gpu-a was killed by SIGKILL; {where}"


def test_ranks_outside_operations_are_left_out_of_the_failure_note() -> None:
    endings = build_ending(100, 0), build_ending(101, 1, 20), build_ending(102, 2)
    (text,) = describe(RANKS, KILLED, endings=endings)
    assert text == "the job failed: rank 1 on gpu-a was killed by SIGKILL"


def test_a_failed_process_without_a_rank_is_named_by_pid() -> None:
    (text,) = describe([build_rank(100, None)], (100, 50, 3, 0))
    assert text == "the job failed: process 100 on gpu-a ended with exit status 3"


def test_failed_helpers_and_terminated_ranks_make_no_failure_note() -> None:
    assert describe(RANKS, (999, 50, 1, 0), (100, 60, 0, 15), (101, 60, 0, 2)) == ()


def test_a_restarted_rank_makes_no_failure_note() -> None:
    assert describe([build_rank(100, 0), build_rank(200, 0, first_ns=80)], (100, 50, 1, 0)) == ()
