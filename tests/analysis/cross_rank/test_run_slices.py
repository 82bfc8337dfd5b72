"""Waits that are blamed slice by slice, in any order, are those of the run in one piece."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterprof.analysis.cross_rank import run_slices as slices_module
from clusterprof.analysis.cross_rank.run_slices import SliceTask
from clusterprof.analysis.cross_rank.slice_plan import JobSlices
from tests.support.synthetic.jobs import (
    CATEGORIES,
    MS,
    Fault,
    Job,
    World,
    make_pipeline_groups,
    send_to_stage,
)
from tests.support.synthetic.matching import CollectiveSpans
from tests.support.synthetic.run_slices import (
    TaskRunner,
    blame_job,
    list_all_results,
    list_exact_results,
    make_entries,
    plan_job_slices,
    sample_all_cuts,
)
from tests.support.synthetic.scenarios import LAYOUTS, WORLD_TEAM, do_work, draw_fault

HOUR = 3600 * 10**9
JOBS = settings.default.max_examples // 3  # each is a third of a second


def check_slices(
    entries: list, rows: int, ranks: int, seed: int = 0
) -> tuple[list[JobSlices], TaskRunner]:
    """Check that a job blamed in slices gives the results of the job in one piece."""
    jobs = plan_job_slices(entries, rows)
    whole = [JobSlices(job.entries, job.directory, ()) for job in jobs]
    expected, left_out = blame_job(whole, ranks)
    one_by_one, unmatched = blame_job(jobs, ranks)
    assert unmatched == left_out
    assert list_exact_results(one_by_one) == list_exact_results(expected)
    runs = TaskRunner(seed)
    shuffled, unmatched = blame_job(jobs, ranks, runs)
    assert unmatched == left_out
    assert list_all_results(shuffled) == list_all_results(one_by_one)
    return jobs, runs


@pytest.mark.parametrize("layout", ["data parallel", "nodes and world"])
@pytest.mark.parametrize("block_rows", [16, 50, 2048])
def test_slicing_a_job_keeps_every_nanosecond(layout: str, block_rows: int) -> None:
    job = draw_fault(layout, 8, 5, 300, decoy=True)
    with sample_all_cuts():
        entries = make_entries(job, block_rows)
    [run_slices], runs = check_slices(entries, 60, 8)
    rows_of_a_rank = 300 if layout == "data parallel" else 600
    expected = 1 + round((rows_of_a_rank - 70) / 60) if block_rows == 16 else 1
    assert len(run_slices.spans) >= (expected - 1 if block_rows < 2048 else 0)
    if block_rows == 16:
        assert runs.rounds == [1, len(run_slices.spans) - 1]  # nothing was blamed twice


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Ranks that meet in random teams, and now and then all of them."""
    ranks = draw(st.integers(2, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    world = World(ranks, late_ns=draw(st.sampled_from([0, 0, MS])))
    teams = [np.sort(random.permutation(ranks)[: random.integers(1, ranks + 1)]) for _ in range(3)]
    teams.append(np.arange(ranks))
    often = random.dirichlet(np.full(4, 0.5))
    often = 0.6 * often + 0.4 * np.array([0, 0, 0, 1])
    for _ in range(draw(st.integers(150, 400))):
        for category in range(len(CATEGORIES)):
            world.spend(random.integers(1, 10**7, ranks), category)
        number = int(random.choice(4, p=often))
        world.meet(teams[number][None, :], np.array([number]), int(random.integers(1, 10**6)))
    return world.job()


@settings(max_examples=JOBS)
@given(
    jobs(),
    st.integers(3, 20),
    st.integers(10, 60),
    st.lists(st.integers(-HOUR, HOUR), min_size=6, max_size=6),
    st.integers(0, 100),
)
def test_random_jobs_in_random_slices_give_the_same_blame(
    job: Job, block_rows: int, rows: int, clocks: list[int], seed: int
) -> None:
    with sample_all_cuts():
        entries = make_entries(job, block_rows, ahead_ns=clocks)
    check_slices(entries, rows, job.ranks, seed)


@settings(max_examples=JOBS)
@given(st.integers(0, 2**32), st.integers(5, 40), st.integers(10, 80), st.floats(0, 0.05))
def test_damaged_recordings_in_slices_give_the_same_blame(
    seed: int, block_rows: int, rows: int, lost: float
) -> None:
    random = np.random.default_rng(seed)
    job = draw_fault("nodes and world", 4, seed, 150)

    def drop(spans: CollectiveSpans) -> CollectiveSpans:
        return spans.take(np.flatnonzero(random.random(spans.rank.size) >= lost))

    with sample_all_cuts():
        entries = make_entries(job, block_rows, drop)
    check_slices(entries, rows, 4, seed)


def make_pipeline(steps: int, seed: int, ranks: int = 8) -> Job:
    """Return a pipeline of four stages; all ranks meet after every step."""
    world = World(ranks, (Fault(2, 1),), seed)
    grid, planes, teams = make_pipeline_groups(ranks, 4)
    for step in range(steps):
        for order in (range(4), range(3, -1, -1)):
            path = list(order)
            for _ in range(3):
                for here, there in zip(path, [*path[1:], None]):
                    do_work(world, 10 * MS, MS, grid[:, here])
                    if here == 2 and step % 3:
                        world.strike(0, 3 * MS)
                    if there is not None:
                        send_to_stage(world, grid, here, there, MS // 10)
        world.meet(planes, teams, 5 * MS)
        world.meet(np.arange(ranks)[None, :], np.array([WORLD_TEAM]), MS)
    return world.job()


@settings(max_examples=JOBS // 2)
@given(st.integers(0, 2**32), st.integers(10, 40), st.integers(20, 60))
def test_pipelines_with_a_barrier_are_blamed_in_slices(
    seed: int, block_rows: int, rows: int
) -> None:
    with sample_all_cuts():
        entries = make_entries(make_pipeline(20, seed), block_rows)
    [run_slices], runs = check_slices(entries, rows, 8, seed)
    assert len(run_slices.spans) > 1 and runs.rounds[0] == 1


def test_a_pipeline_without_a_barrier_is_not_sliced() -> None:
    with sample_all_cuts():
        entries = make_entries(LAYOUTS["pipeline"](8, steps=20), 16)
    [run_slices], runs = check_slices(entries, 40, 8)
    assert not run_slices.spans and runs.rounds == [1]


@settings(max_examples=JOBS)
@given(st.integers(0, 2**32), st.integers(5, 20), st.integers(10, 60), st.floats(0, 0.3))
def test_overlapping_operations_in_slices_give_the_same_blame(
    seed: int, block_rows: int, rows: int, part: float
) -> None:
    random = np.random.default_rng(seed)
    job = draw_fault("nodes and world", 4, seed, 150)

    def begin_early(spans: CollectiveSpans) -> CollectiveSpans:
        # Of each rank alone, or of an operation of all members: issued up to three steps before.
        early = random.random(spans.rank.size) < part / 4
        numbers = np.flatnonzero(random.random(500) < part)
        early |= np.isin(spans.sequence, numbers) & (spans.group == WORLD_TEAM + 1)
        ns = np.where(early, random.integers(1, 150 * MS, spans.rank.size), 0)
        return replace(spans, arrive_ns=spans.arrive_ns - ns)

    with sample_all_cuts():
        entries = make_entries(job, block_rows, begin_early)
    check_slices(entries, rows, 4, seed)


def test_an_operation_that_spans_a_cut_is_found() -> None:
    # Rank 1 makes its half of the operation of its node of step 100 only after the meeting of all.
    job = draw_fault("nodes and world", 4, 3, 150)

    def delay(spans: CollectiveSpans) -> CollectiveSpans:
        moved = (spans.rank == 1) & (spans.group == 1) & (spans.sequence == 100)
        world = (spans.rank == 1) & (spans.group == WORLD_TEAM + 1) & (spans.sequence == 100)
        leave = spans.leave_ns[world] + 2 * MS
        return replace(
            spans,
            arrive_ns=np.where(moved, leave - MS, spans.arrive_ns),
            leave_ns=np.where(moved, leave, spans.leave_ns),
            blocked_ns=np.where(moved, MS, spans.blocked_ns),
        )

    with sample_all_cuts():
        entries = make_entries(job, 8, delay)
    runs = TaskRunner()
    rounds = []
    for rows in (10, 11, 13):  # one of them cuts there
        _, runs = check_slices(entries, rows, 4)
        rounds.append(len(runs.rounds))
    assert 3 in rounds and set(rounds) <= {2, 3}


def test_several_jobs_are_blamed_independently() -> None:
    first, second = (draw_fault("data parallel", 4, seed, 150) for seed in (1, 2))
    with sample_all_cuts():
        entries = [*make_entries(first, 16), *make_entries(second, 16, job_number=1, first_rank=4)]
    both, _ = blame_job(plan_job_slices(entries, 40), 8, TaskRunner(), [0] * 4 + [1] * 4)
    alone, _ = blame_job(plan_job_slices(entries[4:], 40), 8, map, [0] * 4 + [1] * 4)
    assert both.totals.victim_ns[4:].tolist() == alone.totals.victim_ns[4:].tolist()
    assert sorted(both.what_if.savings()) == [0, 1]
    assert np.array_equal(
        both.what_if.savings()[1].savings_ns, alone.what_if.savings()[1].savings_ns
    )


def test_a_slice_task_lists_the_blocks_to_read() -> None:
    with sample_all_cuts():
        entries = make_entries(draw_fault("data parallel", 4, 1, 150), 16)
    tasks: list[SliceTask] = []

    def run(function: Any, items: Any) -> Any:
        tasks.extend(items)
        return map(function, items)

    jobs = plan_job_slices(entries, 16)
    blame_job(jobs, 4, run)
    assert len(tasks) == len(jobs[0].spans) > 3
    stored = {block.location for e in entries for block in e.operations.blocks}
    for task in tasks:
        assert len(task.list_blocks()) == sum(len(e.operations.blocks) for e in task.entries)
        assert {place for place, _ in task.list_blocks()} <= stored
    # Rows 0 … 149 of each of four ranks are in ten blocks. The first slice ends with row 80, the
    # first of block 5; a slice can look back to 512 rows, here to all before it.
    assert tasks[0].span is not None and tasks[0].span.end == (0, 80)
    assert len(tasks[0].list_blocks()) == 4 * 6


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_number_of_rows_at_once_does_not_change_blame(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = make_entries(draw_fault(layout, 8, 5, 60), 16)
    jobs = plan_job_slices(entries, 60)
    whole = [JobSlices(job.entries, job.directory, ()) for job in jobs]
    monkeypatch.setattr(slices_module, "BLOCK_ROWS", 40)
    taken = []
    real = slices_module.join_batches
    monkeypatch.setattr(
        slices_module, "join_batches", lambda parts: taken.append(len(parts)) or real(parts)
    )
    results = []
    for most in (40, 100, 1000):
        monkeypatch.setattr(slices_module, "MAX_ROWS_AT_ONCE", most)
        results.append(list_all_results(blame_job(whole, 8)[0]))
        taken.append(0)
    assert results[0] == results[1] == results[2]
    assert max(taken) > 2
