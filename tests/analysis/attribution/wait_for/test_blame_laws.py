"""What holds for every job: sums, invariance, and that no victim is blamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.analysis.attribution.wait_for import arrivals
from clusterprof.analysis.attribution.wait_for.blame import blame_waits
from tests.support.synthetic.jobs import CATEGORIES, MS, WORK, Fault, Job, World
from tests.support.synthetic.scenarios import LAYOUTS, make_data_parallel_job, make_hierarchical_job
from tests.support.synthetic.score import blame_job, judge_job, rank_culprits


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Ranks that spend random times and meet in random teams, all alike or not."""
    ranks = draw(st.integers(2, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    world = World(ranks, late_ns=draw(st.sampled_from([0, 1000])))
    teams = [random.permutation(ranks)[: random.integers(1, ranks + 1)] for _ in range(4)]
    teams = [np.sort(team) for team in teams]
    for _ in range(draw(st.integers(1, 30))):
        for category in range(len(CATEGORIES)):
            batch = random.random(ranks) < 0.4
            world.spend(random.integers(0, 10**7, ranks) * batch, category)
        number = int(random.integers(len(teams)))
        kind = int(random.choice([1, 1, 9, 10 if teams[number].size == 2 else 1]))
        transfer = int(random.integers(0, 10**6))
        world.meet(teams[number][None, :], np.array([number]), transfer, kind)
    return world.job()


def renumbered(job: Job, new: np.ndarray) -> Job:
    """Give every rank another number."""
    ops = job.ops
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    order = np.lexsort((new[ops.rank], op))
    columns = {name: getattr(ops, name)[order] for name in ("arrive_ns", "leave_ns", "blocked_ns")}
    return replace(
        job, ops=replace(ops, rank=new[ops.rank][order], **columns), spent=job.spent[order]
    )


@given(jobs())
def test_felt_and_caused_time_are_equal_in_every_operation(job: Job) -> None:
    blamed, _ = blame_waits(job.ops, job.spent, job.spent, job.ranks)
    assert (blamed.ns > 0).all()
    charged = np.bincount(blamed.row, weights=blamed.ns, minlength=job.ops.rank.size)
    np.testing.assert_array_equal(charged + blamed.transfer_ns, job.ops.blocked_ns)
    books = blame_job(job)
    assert int(books.victim_ns.sum()) == int(job.ops.blocked_ns.sum())
    np.testing.assert_array_equal(books.victim_ns.sum(axis=0), books.culprit_ns.sum(axis=0))
    assert (books.recoverable_ns <= books.culprit_ns).all()


@given(jobs(), st.lists(st.integers(0, 30), max_size=6))
def test_cutting_into_blocks_does_not_change_blame(job: Job, cuts: list[int]) -> None:
    whole = blame_job(job)
    cut = blame_job(job, tuple(min(at, job.ops.process_group.size) for at in cuts))
    np.testing.assert_array_equal(cut.victim_ns, whole.victim_ns)
    np.testing.assert_array_equal(cut.culprit_ns, whole.culprit_ns)
    np.testing.assert_array_equal(cut.recoverable_ns, whole.recoverable_ns)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_cutting_with_a_short_look_back_does_not_change_blame(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MAX_LOOK_BACK_OPERATIONS", 9)
    monkeypatch.setattr(
        "clusterprof.analysis.attribution.wait_for.late_rank_excess.MAX_LOOK_BACK_OPERATIONS", 9
    )
    job = LAYOUTS[layout](8, (Fault(3, 0),), (4 * MS,), jitter_ns=MS // 2)
    whole, cut = blame_job(job), blame_job(job, tuple(range(1, job.ops.process_group.size, 3)))
    np.testing.assert_array_equal(cut.culprit_ns, whole.culprit_ns)
    np.testing.assert_array_equal(cut.victim_ns, whole.victim_ns)


@given(jobs(), st.randoms(use_true_random=False))
def test_clock_offsets_do_not_change_blame(job: Job, random: object) -> None:
    shift = np.array([random.randint(-(10**15), 10**15) for _ in range(job.ranks)])  # type: ignore[attr-defined]
    ops = job.ops
    moved = replace(
        ops, arrive_ns=ops.arrive_ns + shift[ops.rank], leave_ns=ops.leave_ns + shift[ops.rank]
    )
    np.testing.assert_array_equal(
        blame_job(replace(job, ops=moved)).culprit_ns, blame_job(job).culprit_ns
    )


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("seed", range(4))
def test_renumbering_ranks_does_not_change_blame(layout: str, seed: int) -> None:
    # With jitter no two ranks arrive in the same nanosecond; then nothing depends on numbers.
    job = LAYOUTS[layout](8, (Fault(5, 1),), (7 * MS,), jitter_ns=3 * MS, seed=seed)
    new = np.random.default_rng(seed).permutation(8)
    before, after = blame_job(job), blame_job(renumbered(job, new))
    np.testing.assert_array_equal(after.victim_ns[new], before.victim_ns)
    np.testing.assert_array_equal(after.culprit_ns[:-1][new], before.culprit_ns[:-1])
    np.testing.assert_array_equal(after.culprit_ns[-1], before.culprit_ns[-1])


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("make", [make_data_parallel_job, make_hierarchical_job])
@pytest.mark.parametrize("seed", range(8))
def test_blame_without_jitter_matches_the_truth_and_spares_victims(
    make: Callable[..., Job], several: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    ranks = int(random.choice([4, 8, 32]))
    faults = tuple(
        Fault(int(rank), int(random.integers(WORK)))
        for rank in random.choice(ranks, 3 if several else 1, replace=False)
    )
    sizes = tuple(int(size) for size in random.integers(MS, 40 * MS, len(faults)))
    job = make(ranks, faults, sizes, seed=seed, odds=0.5)
    books = blame_job(job)
    assert {rank for rank, _ in rank_culprits(books)} <= {fault.rank for fault in faults}
    transfer = int(books.victim_ns[:, books.causes.index("net-transfer")].sum())
    assert transfer == job.truth.transferred_ns
    assert int(books.culprit_ns.sum()) - transfer == job.truth.waited_ns
    for fault, ns in zip(faults, job.truth.felt_ns.sum(axis=0).tolist()):
        # Before the first operation there is nothing to compare with: that wait has no reason.
        result = int(books.culprit_ns[fault.rank, fault.category])
        assert ns - _first_steps(job) <= result <= ns


def _first_steps(job: Job) -> int:
    """Waits of the first operation of every team."""
    _, first = np.unique(job.ops.process_group, return_index=True)
    rows = np.isin(np.repeat(np.arange(job.ops.process_group.size), np.diff(job.ops.first)), first)
    return int(job.ops.blocked_ns[rows].sum())


@pytest.mark.parametrize("ranks", [8, 64, 256])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_rank_at_fault_is_named(layout: str, ranks: int) -> None:
    seeds = range(4 if layout == "pipeline" else 16)
    wrong = [seed for seed in seeds if not judge_job(layout, ranks, seed, steps=8).right]
    assert wrong == []
