"""Waits in a pipeline that its order makes, against those that somebody's work makes."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.attribution.wait_for import waits_without_culprit
from clusterprof.analysis.attribution.wait_for.blame import blame_waits, list_causes
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.attribution.wait_for.waits_without_culprit import BUBBLE, PipelineBubbles
from tests.support.synthetic.jobs import CATEGORIES, MS, WORK, Fault, Job
from tests.support.synthetic.scenarios import make_data_parallel_job, make_pipeline_job

STEPS, STAGES = 40, 4


def blame_in_blocks(job: Job, cut: int = 10**9) -> tuple[WaitTotals, PipelineBubbles]:
    """Blame a job in blocks of `cut` operations."""
    books, bubbles, carry = (
        WaitTotals(job.ranks, CATEGORIES),
        PipelineBubbles(job.ranks, CATEGORIES),
        None,
    )
    for begin in range(0, job.ops.process_group.size, cut):
        end = min(begin + cut, job.ops.process_group.size)
        block = job.ops.take_range(begin, end)
        spent = job.spent[job.ops.first[begin] : job.ops.first[end]]
        blamed, carry = blame_waits(block, spent, spent, job.ranks, carry)
        books.add(block, blamed)
        bubbles.add(block, blamed)
    return books, bubbles.finish()


def work_ms(books: WaitTotals, bubbles: PipelineBubbles) -> tuple[float, float]:
    """What is charged to work in all, and what of that is a bubble."""
    columns = [
        list_causes(CATEGORIES).index(name) for name in ("sync-imbalance", "sync-slow-compute")
    ]
    felt = int(books.victim_ns[:, columns].sum())
    bubble = sum(bubbles.victim_change(rank).get(BUBBLE, 0) for rank in range(len(books.victim_ns)))
    return felt / MS, bubble / MS


def test_waits_in_a_pipeline_of_equal_stages_are_bubbles() -> None:
    job = make_pipeline_job(STAGES, steps=STEPS)
    books, bubbles = blame_in_blocks(job)
    work, bubble = work_ms(books, bubbles)
    # Filling and draining: every stage waits in every step, and blame names the work of others.
    assert work > 1000
    assert bubble == pytest.approx(work, rel=0.05)
    for rank in range(STAGES):
        moved = bubbles.victim_change(rank)
        assert sum(moved.values()) == 0
        felt = dict(zip(books.causes, books.victim_ns[rank].tolist()))
        assert all(felt.get(cause, 0) + ns >= 0 for cause, ns in moved.items())
        caused = dict(zip(books.causes, books.culprit_ns[rank].tolist()))
        assert all(caused[cause] + ns >= 0 for cause, ns in bubbles.culprit_change(rank).items())
    assert bubbles.victim_ns.sum() == bubbles.culprit_ns.sum() == round(bubble * MS)


def test_a_stage_with_more_work_keeps_its_caused_waits() -> None:
    # 5 ms more in each of the 8 batches (forward and back) of stage 2: 40 ms a step.
    fault = Fault(2, WORK)
    books, bubbles = blame_in_blocks(make_pipeline_job(STAGES, (fault,), (5 * MS,), steps=STEPS))
    work, bubble = work_ms(books, bubbles)
    kept = books.culprit_ns[:-1] - bubbles.culprit_ns
    columns = [books.causes.index(name) for name in ("sync-imbalance", "sync-slow-compute")]
    by_rank = kept[:, columns].sum(axis=1) / MS
    assert int(np.argmax(by_rank)) == 2
    assert by_rank[2] > 0.9 * by_rank.sum()
    # Each of the other three was kept waiting by no more than it was less busy.
    assert by_rank.sum() == pytest.approx(work - bubble)
    assert 0 < by_rank[2] <= 3 * 40 * STEPS * 1.05


def test_two_stages_that_are_slow_in_turn_do_not_cancel_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits_without_culprit, "SEGMENT_OPERATIONS", 16)
    early, late = Fault(1, WORK), Fault(3, WORK)
    quiet = work_ms(*blame_in_blocks(make_pipeline_job(STAGES, steps=STEPS)))
    job = make_pipeline_job(STAGES, (early, late), (5 * MS, 5 * MS), steps=STEPS, odds=0.1, seed=3)
    work, bubble = work_ms(*blame_in_blocks(job))
    assert work - bubble > quiet[0] - quiet[1]


def test_other_causes_of_a_late_rank_leave_bubbles_unchanged() -> None:
    # Stage 1 reads for 5 ms before each batch: its own cause, and the rest is a bubble as before.
    fault = Fault(1, CATEGORIES.index("storage-local"))
    books, bubbles = blame_in_blocks(make_pipeline_job(STAGES, (fault,), (5 * MS,), steps=STEPS))
    work, bubble = work_ms(books, bubbles)
    assert bubble > 0.8 * work
    storage = books.culprit_ns[1, books.causes.index("storage-local")]
    assert storage > 0 and bubbles.culprit_ns[1, books.causes.index("storage-local")] == 0


def test_operations_of_all_ranks_have_no_bubbles() -> None:
    job = make_data_parallel_job(4, (Fault(1, WORK),), (9 * MS,), steps=STEPS)
    assert work_ms(*blame_in_blocks(job))[1] == 0


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_cutting_into_blocks_does_not_change_bubbles(cut: int) -> None:
    job = make_pipeline_job(8, (Fault(2, WORK),), (5 * MS,), steps=20, jitter_ns=MS, odds=0.5)
    whole, parts = blame_in_blocks(job)[1], blame_in_blocks(job, cut)[1]
    assert np.array_equal(whole.victim_ns, parts.victim_ns)
    assert np.array_equal(whole.culprit_ns, parts.culprit_ns)
