"""Operations played again without a cause: by hand, and against the same job without its fault."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from clusterprof.analysis.attribution.wait_for.blame import (
    IMBALANCE,
    SLOW_COMPUTE,
    blame_waits,
    list_causes,
)
from clusterprof.analysis.attribution.what_if import (
    ALL,
    BALANCED,
    CULPRITS,
    DELAYS,
    GAPS,
    TRANSFER,
    WhatIfReplay,
    WhatIfSavings,
    compute_transfer_excess,
)
from clusterprof.analysis.attribution.what_if import EVEN as EVEN_WITHOUT_GAPS
from clusterprof.analysis.attribution.what_if import WORK as EVEN
from tests.support.synthetic.jobs import CATEGORIES, MS, WORK, Fault, Job, World
from tests.support.synthetic.scenarios import LAYOUTS

LOADING, DECODING = 0, 1
LOST = WORK  # work is the last category, all before it are causes
CHARGED = tuple(list_causes(CATEGORIES).index(name) for name in (IMBALANCE, SLOW_COMPUTE))


def played(job: Job, cuts: tuple[int, ...] = ()) -> WhatIfSavings:
    """Play a job again, in blocks that begin at the given operations."""
    ranks = job.ranks
    replay = WhatIfReplay([0] * ranks, np.full(ranks, ranks), LOST)
    carry = None
    for begin, end in itertools.pairwise([0, *cuts, job.ops.process_group.size]):
        ops = job.ops.take_range(begin, end)
        spent = job.spent[job.ops.first[begin] : job.ops.first[end]]
        blamed, carry = blame_waits(ops, spent, spent, ranks, carry)
        lost = np.column_stack([spent[:, :LOST], spent[:, :LOST].sum(axis=1), 0 * spent[:, 0]])
        work = spent[:, WORK], spent[:, WORK]
        replay.add(ops, blamed, lost, lost, work, CHARGED)
    return replay.get_savings()[0]


def sooner_ms(won: WhatIfSavings, column: int) -> float:
    return float(won.savings_ns[:, column].sum()) / MS


def test_removing_a_shared_cause_saves_the_longer_delay() -> None:
    # All load, rank 1 for 20 ms and rank 2 for 50; rank 2 decodes for 5 more; all work for 10.
    world = World(3, (Fault(1, LOADING), Fault(2, LOADING), Fault(2, DECODING)))
    everyone, team = np.arange(3)[None, :], np.array([7])
    world.meet(everyone, team, MS)
    for fault, ms in enumerate((20, 50, 5)):
        world.strike(fault, ms * MS)
    world.spend(10 * MS)
    world.meet(everyone, team, MS)
    won = played(world.job())
    assert not won.several_groups and not won.skipped
    # they came at 11, 31 and 66: without loading at 11, 11 and 16, without decoding at 11, 31, 61
    assert sooner_ms(won, LOADING) == 50
    assert sooner_ms(won, DECODING) == 5
    assert sooner_ms(won, ALL) == 55
    assert sooner_ms(won, TRANSFER) == 2  # two operations of 1 ms
    # from leaving the first operation to leaving the second; the first has nothing before it
    assert int(won.length_ns.sum()) == (55 + 10 + 1) * MS


def test_savings_reach_ranks_that_never_met_the_culprit() -> None:
    # rank 0 loads for 50 ms, rank 1 waits for it, then rank 2 waits for rank 1, then 3 for 2
    world = World(4, (Fault(0, LOADING),))
    pair = np.array([[0, 1], [2, 3]])
    world.meet(pair, np.array([5, 6]), 0)
    world.strike(0, 50 * MS)
    for team in ([0, 1], [1, 2], [2, 3]):
        world.spend(10 * MS, who=team)
        world.meet(np.array([team]), np.array([sum(team) + 10]), 0)
    won = played(world.job())
    assert won.several_groups
    assert sooner_ms(won, LOADING) == 50  # the mean of four ranks that are all 50 sooner


def test_even_work_averages_alternating_load_and_equalizes_a_slow_rank() -> None:
    everyone, team = np.arange(3)[None, :], np.array([7])
    turns, slow = World(3), World(3)
    for world in (turns, slow):
        world.meet(everyone, team, 0)
    for step in range(6):
        for rank in range(3):
            turns.spend((40 if rank == step % 3 else 10) * MS, who=[rank])
            slow.spend((40 if rank == 1 else 10) * MS, who=[rank])
        turns.meet(everyone, team, 0)
        slow.meet(everyone, team, 0)
    # in turn: 40 becomes the mean of 40, 10 and 10; rank 1 alone: 40 becomes 10
    assert sooner_ms(played(turns.job()), EVEN) == pytest.approx(6 * 20, rel=0.02)
    assert sooner_ms(played(slow.job()), EVEN) == pytest.approx(6 * 30, rel=0.02)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_savings_match_the_job_without_the_fault(layout: str) -> None:
    for seed in range(1 if layout == "pipeline" else 3):
        random = np.random.default_rng(seed)
        ranks, rank = 16, int(random.integers(16))
        size = int(random.integers(5 * MS, 30 * MS))
        faults = (Fault(rank, LOADING), Fault((rank + 8) % ranks, DECODING))
        steps = 8 if layout == "pipeline" else 20
        with_it, without = (
            LAYOUTS[layout](ranks, faults, (ns, size // 2), steps, MS // 4, seed)
            for ns in (size, 0)
        )
        truth_ms = float((end_ns(with_it) - end_ns(without)).mean()) / MS
        assert sooner_ms(played(with_it), LOADING) == pytest.approx(truth_ms, rel=0.1), seed


def end_ns(job: Job) -> np.ndarray:
    ends = np.zeros(job.ranks, np.int64)
    np.maximum.at(ends, job.ops.rank, job.true_leave_ns)
    return ends


def test_cutting_into_blocks_changes_savings_only_slightly() -> None:
    job = LAYOUTS["nodes and world"](16, (Fault(3, LOADING),), (20 * MS,), 20, MS // 4, 1)
    whole = sooner_ms(played(job), LOADING)
    half = job.ops.process_group.size // 2
    assert sooner_ms(played(job, (half,)), LOADING) == pytest.approx(whole, rel=0.05)


def test_balanced_stages_each_do_the_mean_work() -> None:
    # Stage 2 works 40 ms a step, the others 10: shared out all work 20.
    world = World(3)
    both = ([0, 1], 11), ([1, 2], 12)
    for step in range(7):
        if step:
            for rank, ms in enumerate((10, 10, 40)):
                world.spend(ms * MS, who=[rank])
        for team, number in both:
            world.meet(np.array([team]), np.array([number]), 0)
    won = played(world.job())
    assert won.several_groups
    # The last operations of ranks 1 and 2 end at 240, then at 120; that of rank 0 at 210, then 120.
    assert sooner_ms(won, BALANCED) == (90 + 120 + 120) / 3
    # No more than the lower middle rank, which has 10: all at 60.
    assert sooner_ms(won, EVEN) == (150 + 180 + 180) / 3


def test_transfer_excess_is_relative_to_the_median_transfer() -> None:
    world = World(3)
    for ns in (5, 9, 6):
        world.meet(np.array([[0, 1]]), np.array([11]), ns * MS)
    world.meet(np.arange(3)[None, :], np.array([7]), 50 * MS)
    job = world.job()
    moved = job.ops.leave_ns - job.ops.arrive_ns
    assert (compute_transfer_excess(job.ops, moved) / MS).tolist() == [-1, 3, 0, 0]


def pipelines(copies: int, slow_ms: int, gap: bool, steps: int = 6) -> Job:
    """Stage 0 sends to stage 1 of its copy, then all copies of a stage meet, then all ranks.

    Rank 0 works `slow_ms` a step, all others 10 ms. With a gap, copy 1 waits after its work for
    copy 0, without an operation that shows it.
    """
    world = World(2 * copies, (Fault(2, DECODING), Fault(3, DECODING)))
    everyone = np.arange(2 * copies)[None, :]
    world.meet(everyone, np.array([7]), 0)
    for _ in range(steps):
        for rank in range(2 * copies):
            world.spend((slow_ms if rank == 0 else 10) * MS, who=[rank])
        for copy in range(copies):
            world.meet(np.array([[2 * copy, 2 * copy + 1]]), np.array([20 + copy]), 0)
        if gap:  # unrecorded: until copy 0 is there, less 3 ms
            for fault in (0, 1):
                world.strike(fault, (slow_ms - 13) * MS)
        for stage in (0, 1):
            world.meet(np.arange(stage, 2 * copies, 2)[None, :], np.array([30 + stage]), 0)
        world.meet(everyone, np.array([7]), 0)
    return world.job()


def played_with_gaps(job: Job) -> WhatIfSavings:
    """Play a job again in which nothing explains what was decoding: it is a gap."""
    replay = WhatIfReplay([0] * job.ranks, np.full(job.ranks, job.ranks), LOST)
    blamed, _ = blame_waits(job.ops, job.spent, job.spent, job.ranks)
    lost = np.zeros((job.spent.shape[0], LOST + 2), np.int64)
    lost[:, -1] = job.spent[:, DECODING]
    replay.add(job.ops, blamed, lost, lost, (job.spent[:, WORK],) * 2, CHARGED)
    return replay.get_savings()[0]


def test_gaps_behind_a_slow_rank_do_not_hide_its_savings() -> None:
    # All steps take 40 ms because of rank 0. With its work like that of others they take 10, and
    # balanced (70 ms of four ranks) 17.5. The gap of copy 1 is 27 ms: 10 + 27 of 40.
    won = played_with_gaps(pipelines(2, 40, gap=True))
    assert won.several_groups
    assert sooner_ms(won, GAPS) == 0  # none is on the way
    assert sooner_ms(won, EVEN) == 6 * 3  # as if copy 1 had worked for 37 ms
    assert sooner_ms(won, EVEN_WITHOUT_GAPS) == 6 * 30
    length_ms = float(won.length_ns.sum()) / MS
    assert length_ms == 240
    assert sooner_ms(won, BALANCED) == 6 * (40 - 17.5)
    slowdown = (length_ms - sooner_ms(won, DELAYS)) / (length_ms - sooner_ms(won, BALANCED))
    assert slowdown == pytest.approx(40 / 17.5)
    # Rank 0 is the first of the culprits; the others have no work beyond the middle.
    assert won.culprits == ((0, EVEN),)
    assert sooner_ms(won, CULPRITS) == 6 * 30


def test_a_gap_on_the_critical_path_is_no_wait() -> None:
    # Both copies work for 10 ms; copy 1 then stands still for 30 that nothing explains.
    world = pipelines(2, 10, gap=False)
    assert sooner_ms(played_with_gaps(world), GAPS) == 0
    late = played_with_gaps(_late_copy())
    assert sooner_ms(late, GAPS) == 6 * 30


def _late_copy() -> Job:
    world = World(4, (Fault(2, DECODING), Fault(3, DECODING)))
    everyone = np.arange(4)[None, :]
    world.meet(everyone, np.array([7]), 0)
    for _ in range(6):
        world.spend(10 * MS)
        for copy in (0, 1):
            world.meet(np.array([[2 * copy, 2 * copy + 1]]), np.array([20 + copy]), 0)
        for fault in (0, 1):
            world.strike(fault, 30 * MS)
        for stage in (0, 1):
            world.meet(np.arange(stage, 4, 2)[None, :], np.array([30 + stage]), 0)
        world.meet(everyone, np.array([7]), 0)
    return world.job()


def test_slowdown_is_the_longest_over_the_mean_work_of_ranks() -> None:
    world, everyone = World(3), np.arange(3)[None, :]
    world.meet(everyone, np.array([7]), 0)
    for step in range(6):
        for rank in range(3):
            world.spend((40 if rank == step % 3 else 10) * MS, who=[rank])
        world.meet(everyone, np.array([7]), 0)
    won = played(world.job())
    # 40 ms a step; the mean is 20, with any slow rank
    assert sooner_ms(won, DELAYS) == 0
    assert sooner_ms(won, BALANCED) == 6 * 20
