"""Tasks in a pool of processes: their order, their number at a time, and processes that die."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from clusterprof.analysis.tasks.base import PoolRunner, TaskFailure
from clusterprof.errors import ClusterprofError


def test_a_task_that_kills_its_process_fails_alone_in_the_pool() -> None:
    results = list(PoolRunner(2).run_tasks(die_at_two, range(4)))
    assert [results[at] for at in (0, 1, 3)] == [0, 1, 3]
    failure = results[2]
    assert isinstance(failure, TaskFailure) and "died" in failure.why
    with pytest.raises(ClusterprofError, match="died"):
        list(PoolRunner(2).map(die_at_two, [2, 3]))


def die_at_two(number: int) -> int:
    if number == 2:
        os._exit(1)
    return number


class Squares(Sequence[int]):
    """Numbers that are made when they are needed, and how many were."""

    def __init__(self, count: int) -> None:
        self.count, self.made = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: Any) -> Any:
        self.made = max(self.made, at + 1)
        return at * at


def test_a_pool_holds_few_items_at_a_time() -> None:
    items = Squares(50)
    with PoolRunner(2) as pool:
        results = pool.map(abs, items)
        assert [next(results) for _ in range(10)] == [number**2 for number in range(10)]
        assert items.made <= 10 + 2 * 2
        assert list(results) == [number**2 for number in range(10, 50)]
