"""Our blame rolled up to stages is StageFrontier's increments, where one barrier ends each step.

Of every rank: its own time in a stage, and its waits blamed on the stage of the last rank.

    rank 0   load 10  work 50           waits 40 for rank 1's loading
    rank 1   load 50  work 50           F = 50, 100: increments 50, 50
    rolled up: rank 0  10 + 40, 50      rank 1  50, 50
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.attribution.wait_for.blame import BLAME_CAUSES, blame_waits
from tests.support.synthetic.jobs import CATEGORIES, MS, WORK, Fault, Job, World

BENCH = Path(__file__).resolve().parents[4] / "bench"
LOADING, COLLECTING = 0, 2


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    from baselines import rules

    yield rules
    for name in ("baselines", "baselines.rules"):
        sys.modules.pop(name, None)


def rolled_up(job: Job, table: np.ndarray) -> np.ndarray:
    """Return [steps, ranks, stages]: own time, and waits by the stage they are charged to."""
    blamed, _ = blame_waits(job.ops, job.spent, job.spent, job.ranks)
    steps = table.shape[0] + 1  # the first has nothing before it to compare with
    # Work is charged under two names, and the rest of a stage's name is a category's.
    stage = np.concatenate([np.arange(WORK), [WORK, WORK], np.full(len(BLAME_CAUSES) - 2, -1)])
    out = np.zeros((steps, job.ranks, table.shape[2]))
    out[1:] = table
    step, rank = np.divmod(blamed.row, job.ranks)
    later = step > 0
    assert np.all(stage[blamed.cause[later]] >= 0)
    np.add.at(out, (step[later], rank[later], stage[blamed.cause[later]]), blamed.ns[later])
    return out[1:]


def run(ranks: int, rows: list[list[tuple[int, int, int]]]) -> Job:
    """One barrier a step; each step a list of (rank, category, ms) beyond 20 loading, 50 work."""
    world = World(ranks, (Fault(0, LOADING),))
    for more in rows:
        world.spend(20 * MS, LOADING)
        world.spend(50 * MS)
        for rank, category, ms in more:
            world.spend(ms * MS, category, rank)
        world.meet(np.arange(ranks)[None, :], np.array([1]), 5 * MS)
    return world.job()


def test_blame_of_every_rank_rolls_up_to_the_frontier_increments(rules: Any) -> None:
    """Who comes last is behind in no stage; it wanders, and so does the stage."""
    job = run(
        4,
        [
            [],
            [(1, LOADING, 30)],
            [(2, WORK, 25)],
            [(3, LOADING, 40), (3, WORK, 10)],
            [],
            [(0, COLLECTING, 7)],
            [(1, LOADING, 30), (2, LOADING, 10)],
        ],
    )
    table = rules.split_stages(job)
    increments = rules.compute_increments(table)
    by_hand = np.zeros((6, len(CATEGORIES) + 1))
    by_hand[:, LOADING] = [50, 20, 60, 20, 20, 50]
    by_hand[:, WORK] = [50, 75, 60, 50, 50, 50]
    by_hand[:, COLLECTING] = [0, 0, 0, 0, 7, 0]
    assert np.array_equal(increments, by_hand * MS)
    result = rolled_up(job, table)
    assert np.array_equal(result, np.repeat(increments[:, None, :], 4, axis=1))


def test_random_late_ranks_roll_up_to_the_frontier_increments(rules: Any) -> None:
    """300 steps of 8 ranks to the nanosecond, one rank late in each, in one or more stages."""
    world = World(8, (Fault(0, LOADING),), seed=5)
    for _ in range(301):
        world.spend(int(world.random.integers(1, 20 * MS)), LOADING)
        world.spend(int(world.random.integers(1, 50 * MS)))
        late = int(world.random.integers(8))
        for category in range(len(CATEGORIES)):
            if world.random.random() < 0.5:
                world.spend(int(world.random.integers(30 * MS)), category, late)
        world.meet(np.arange(8)[None, :], np.array([1]), 5 * MS)
    job = world.job()
    table = rules.split_stages(job)
    result, increments = rolled_up(job, table), rules.compute_increments(table)
    # A wait of n stages is shared in whole nanoseconds.
    assert np.abs(result - increments[:, None, :]).max() <= 1
    assert np.array_equal(result.sum(axis=2), np.repeat(increments.sum(axis=1)[:, None], 8, axis=1))


def test_sums_stay_equal_with_two_late_ranks_in_different_stages(rules: Any) -> None:
    """Rank 1 loads 30 longer, rank 2 works 40 longer and comes last: nobody waits for loading.

    The frontier gives loading 30 and work 10 more, though without rank 1 not a nanosecond would be
    won; we charge those who waited for rank 2 with its work alone.
    """
    job = run(3, [[], [(1, LOADING, 30), (2, WORK, 40)]])
    table = rules.split_stages(job)
    (increments,), (result,) = rules.compute_increments(table), rolled_up(job, table)
    assert [increments[LOADING], increments[WORK]] == [50 * MS, 60 * MS]
    assert result[:, [LOADING, WORK]].tolist() == [
        [20 * MS, 90 * MS],
        [50 * MS, 60 * MS],
        [20 * MS, 90 * MS],
    ]
    assert np.all(result.sum(axis=1) == increments.sum())
