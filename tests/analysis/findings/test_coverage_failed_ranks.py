"""Which rank failed first, as the notes say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from clusterprof.analysis.findings.coverage import describe_failed_ranks
from clusterprof.analysis.node.observations import FailedExit


@dataclass
class Thing:
    """Any object with these attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def build_rank(pid: int, number: int | None, first_ns: int = 0) -> Any:
    ledger, place = Thing(pid=pid), Thing(rank=number)
    return Thing(ledger=ledger, place=place, started_ticks=1, first_ns=first_ns)


def describe(ranks: list[Any], *exits: tuple[int, int, int, int]) -> tuple[str, ...]:
    """exits: pid, time, exit status, signal."""
    failed = tuple(FailedExit(pid, 1, t, status, number) for pid, t, status, number in exits)
    node = Thing(facts=Thing(name="gpu-a"), ranks=ranks, failed_exits=failed)
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
def test_the_first_that_failed_by_itself_is_named(exits: Any, text: str) -> None:
    assert describe(RANKS, *exits) == (f"the job failed: {text}",)


def test_a_process_without_a_rank_is_named_by_its_number() -> None:
    (text,) = describe([build_rank(100, None)], (100, 50, 3, 0))
    assert text == "the job failed: process 100 on gpu-a ended with exit status 3"


def test_helpers_and_ranks_that_were_ended_from_outside_say_nothing() -> None:
    assert describe(RANKS, (999, 50, 1, 0), (100, 60, 0, 15), (101, 60, 0, 2)) == ()


def test_a_rank_that_was_started_again_has_not_failed_the_job() -> None:
    assert describe([build_rank(100, 0), build_rank(200, 0, first_ns=80)], (100, 50, 1, 0)) == ()
