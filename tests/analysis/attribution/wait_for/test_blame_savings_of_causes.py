"""What all ranks win when a cause is gone everywhere, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.attribution.wait_for.blame import WORK, blame_waits, list_causes
from clusterprof.analysis.attribution.wait_for.totals import SavingsTotals
from clusterprof.analysis.timeline.collectives.operations import Operations

MS = 1_000_000
CATEGORIES = ("storage-local", "cpu-gc", WORK)
STEPS = 10


def gains(lost_ms: list[list[int]], cut: int = STEPS) -> SavingsTotals:
    """Ranks that lose `lost_ms` (to storage, to gc) and work 100 ms, then meet; ten times alike."""
    lost = np.array(lost_ms)
    ranks = len(lost)
    come = lost.sum(axis=1) + 100
    step = int(come.max()) + 10
    leave = np.repeat(np.arange(1, STEPS + 1) * step, ranks)
    arrive = leave - step + np.tile(come, STEPS)
    ops = Operations(
        first=np.arange(STEPS + 1) * ranks,
        process_group=np.zeros(STEPS, np.int64),
        operation=np.ones(STEPS, np.int64),
        bytes=np.full(STEPS, 1000),
        complete=np.ones(STEPS, np.bool_),
        rank=np.tile(np.arange(ranks), STEPS),
        arrive_ns=arrive * MS,
        leave_ns=leave * MS,
        blocked_ns=(leave - arrive) * MS,
        source=np.arange(ranks * STEPS),
    )
    each = np.concatenate([lost, np.full((ranks, 1), 100)], axis=1)
    spent = np.cumsum(np.repeat(each[None], STEPS, axis=0), axis=0).reshape(-1, 3) * MS
    result, carry = SavingsTotals(np.full(ranks, ranks), len(list_causes(CATEGORIES))), None
    for begin in range(0, STEPS, cut):
        block = ops.take_range(begin, min(begin + cut, STEPS))
        rows = spent[begin * ranks : (begin + cut) * ranks]
        blamed, carry = blame_waits(block, rows, rows, ranks, carry)
        result.add(block, blamed)
    return result


def won_ms(totals: SavingsTotals, cause: str, steps: int = STEPS) -> float | None:
    ns = totals.estimate_savings_without_causes(
        [CATEGORIES.index(cause)], [steps] * len(totals.all_rank_operations)
    )
    return None if ns is None else ns / MS


@pytest.mark.parametrize("cut", [1, 3, STEPS])
def test_removing_a_cause_makes_both_late_ranks_arrive_in_time(cut: int) -> None:
    # They come at 150 and 140, the third at 100: without storage all at 100, 50 sooner.
    assert won_ms(gains([[50, 0], [40, 0], [0, 0]], cut), "storage-local") == STEPS * 3 * 50


def test_the_next_cause_limits_the_savings_of_a_removed_cause() -> None:
    # Without storage the last comes at 130, without gc at 150.
    result = gains([[50, 0], [0, 30], [0, 0]])
    assert won_ms(result, "storage-local") == STEPS * 3 * 20
    assert won_ms(result, "cpu-gc") == 0


def test_equal_loss_of_all_ranks_is_saved_by_all() -> None:
    assert won_ms(gains([[20, 0], [20, 0]]), "storage-local") == STEPS * 2 * 20


def test_savings_are_unknown_unless_all_ranks_meet_each_step() -> None:
    assert won_ms(gains([[50, 0], [0, 0]]), "storage-local", steps=2 * STEPS) is None
