"""Work that varies, against ranks that work more, against work that is uneven."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.attribution.wait_for import waits_without_culprit
from clusterprof.analysis.attribution.wait_for.blame import blame_waits, list_causes
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.attribution.wait_for.waits_without_culprit import Jitter
from clusterprof.analysis.timeline.collectives.operations import Operations
from tests.support.synthetic.jobs import CATEGORIES, Job
from tests.support.synthetic.scenarios import make_data_parallel_job

MS = 1_000_000
RANKS, STEPS = 8, 60
WORK_COLUMNS = [
    list_causes(CATEGORIES).index(name) for name in ("sync-imbalance", "sync-slow-compute")
]


def stepping(work_ms: np.ndarray) -> tuple[Operations, np.ndarray]:
    """Ranks that meet after each step; `work_ms`: steps x ranks. Operations, what was spent."""
    steps, ranks = work_ms.shape
    work = np.rint(work_ms * MS).astype(np.int64)
    length = work.max(axis=1) + 2 * MS  # and the transfer
    leave = np.cumsum(length)
    ops = Operations(
        first=np.arange(steps + 1) * ranks,
        process_group=np.zeros(steps, np.int64),
        operation=np.ones(steps, np.int64),
        bytes=np.full(steps, 1000),
        complete=np.ones(steps, np.bool_),
        rank=np.tile(np.arange(ranks), steps),
        arrive_ns=((leave - length)[:, None] + work).ravel(),
        leave_ns=np.repeat(leave, ranks),
        blocked_ns=(length[:, None] - work).ravel(),
        source=np.arange(steps * ranks),
    )
    spent = np.zeros((steps * ranks, len(CATEGORIES)), np.int64)
    spent[:, -1] = np.cumsum(work, axis=0).ravel()
    return ops, spent


def blame_in_blocks(
    ops: Operations, spent: np.ndarray, ranks: int, cut: int = 10**9
) -> tuple[WaitTotals, Jitter]:
    """Blame operations in blocks of `cut`."""
    books, jitter, carry = WaitTotals(ranks, CATEGORIES), Jitter(ranks, CATEGORIES), None
    for begin in range(0, ops.process_group.size, cut):
        end = min(begin + cut, ops.process_group.size)
        block, rows = ops.take_range(begin, end), spent[ops.first[begin] : ops.first[end]]
        blamed, carry = blame_waits(block, rows, rows, ranks, carry)
        books.add(block, blamed)
        jitter.add(block, blamed)
    return books, jitter.finish()


def charged_ms(work_ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Imbalance and slow compute that ranks caused in the end, and what is jitter, in ms."""
    ops, spent = stepping(work_ms)
    books, jitter = blame_in_blocks(ops, spent, work_ms.shape[1])
    left = books.culprit_ns[:-1, WORK_COLUMNS] - jitter.culprit_ns
    assert (left >= 0).all()
    assert jitter.victim_ns.sum() == jitter.culprit_ns.sum()
    return left / MS, jitter.victim_ns.sum(axis=1) / MS


def noise(seed: int, spread_ms: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, spread_ms, (STEPS, RANKS))


def waited_ms(work_ms: np.ndarray) -> float:
    """All waits but those of the first step, before which nothing is compared."""
    return float((work_ms.max(axis=1, keepdims=True) - work_ms)[1:].sum())


@pytest.mark.parametrize("seed", range(5))
def test_random_work_variation_is_charged_to_no_rank(seed: int) -> None:
    work = 100 + noise(seed, 7.0)
    left, moved = charged_ms(work)
    assert moved.sum() == pytest.approx(waited_ms(work), rel=0.1)
    assert left.sum() < 0.05 * waited_ms(work)


@pytest.mark.parametrize("more_ms", [10.0, 40.0])
def test_a_rank_with_constant_extra_work_stays_charged(more_ms: float) -> None:
    # Seven ranks wait 59 times for rank 3, each time for the 10 or 40 ms it works more, or for less
    # where they happen to work that much longer themselves.
    work = 100 + noise(1, 2.0)
    work[:, 3] += more_ms
    left, moved = charged_ms(work)
    waits = np.clip(work[1:, 3:4] - work[1:], 0, more_ms).sum()
    assert left[3].sum() == pytest.approx(waits, rel=0.05)
    assert left.sum() - left[3].sum() < 0.02 * left[3].sum()
    assert left.sum() + moved.sum() == pytest.approx(waited_ms(work), rel=1e-6)


def test_waits_without_noise_are_not_moved_to_jitter() -> None:
    work = np.full((STEPS, RANKS), 100.0)
    work[:, 3] += 20
    work[30, 5] += 400
    _, moved = charged_ms(work)
    assert moved.sum() == 0


def test_a_single_long_delay_is_no_jitter() -> None:
    # Rank 5 takes 200 ms longer, once: seven others wait.
    work = 100 + noise(2, 2.0)
    work[30, 5] += 200
    left, _ = charged_ms(work)
    assert left[5].sum() == pytest.approx(7 * 200, rel=0.1)


def test_varying_sequence_lengths_are_an_imbalance() -> None:
    # Some batches are much longer than the others, of whatever rank.
    work = 90 + 10 * np.random.default_rng(3).gamma(1.5, 1 / 1.5, (STEPS, RANKS))
    left, moved = charged_ms(work)
    assert moved.sum() == 0
    assert left[:, 0].sum() == pytest.approx(waited_ms(work), rel=0.05)


def test_large_alternating_work_differences_are_an_imbalance() -> None:
    work = 100 + noise(4, 25.0)
    left, moved = charged_ms(work)
    assert moved.sum() == 0
    assert left[:, 0].sum() == pytest.approx(waited_ms(work), rel=0.05)


def test_uneven_batches_with_overlapping_reduction_are_an_imbalance() -> None:
    # Gradients are reduced during the backward pass: the last rank to arrive is blocked for 1 ms
    # less than the reduction takes. The other rank has the longer batch at random.
    lengths = np.random.default_rng(5).choice([20.0, 40.0, 90.0], (STEPS, 2))
    work = lengths + noise(6, 0.5)[:, :2]
    ops, spent = stepping(work)
    overlapping = replace(ops, blocked_ns=ops.blocked_ns - MS)
    books, jitter = blame_in_blocks(overlapping, spent, 2)
    imbalance, slow = (books.culprit_ns[:-1, WORK_COLUMNS] - jitter.culprit_ns).sum(axis=0) / MS
    assert imbalance == pytest.approx(waited_ms(work), rel=0.05)
    assert slow < 0.01 * imbalance and jitter.victim_ns.sum() == 0


@pytest.mark.parametrize("cut", [1, 7, 64, 100])
def test_cutting_into_blocks_does_not_change_jitter(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_without_culprit, "_MIN_ROWS_TO_SETTLE", 50)
    job: Job = make_data_parallel_job(RANKS, steps=150, jitter_ns=3 * MS)
    whole = blame_in_blocks(job.ops, job.spent, job.ranks)[1]
    parts = blame_in_blocks(job.ops, job.spent, job.ranks, cut)[1]
    assert whole.victim_ns.any()
    assert (whole.victim_ns == parts.victim_ns).all() and (
        whole.culprit_ns == parts.culprit_ns
    ).all()
