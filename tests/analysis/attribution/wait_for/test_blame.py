"""Blame on jobs small enough to reckon by hand. Times in ms; transfer is 5 unless said."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.attribution.wait_for.blame import NO_CULPRIT
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.timeline.collectives.operations import SEND
from tests.support.synthetic.jobs import (
    CATEGORIES,
    MS,
    WORK,
    Fault,
    World,
    make_pipeline_groups,
    send_to_stage,
)
from tests.support.synthetic.score import blame_job, rank_culprits

STORAGE, PREPROCESS, GC = 0, 1, 2
ALL = np.array([1])


def in_ms(books: WaitTotals) -> dict[tuple[int, str], int]:
    """{(culprit, cause): ms}."""
    out = {}
    for who, cause in zip(*np.nonzero(books.culprit_ns)):
        rank = NO_CULPRIT if who == len(books.culprit_ns) - 1 else int(who)
        out[(rank, books.causes[cause])] = int(books.culprit_ns[who, cause]) // MS
    return out


def felt_ms(books: WaitTotals, cause: str) -> list[int]:
    return (books.victim_ns[:, books.causes.index(cause)] // MS).tolist()


def test_a_wait_is_blamed_on_the_cause_of_late_start() -> None:
    # docs/design/waits-between-ranks.md: both leave together; rank 1 loads for 100, then both
    # work 200.
    # Rank 0 waits 100 while rank 1 computes: they are caused by rank 1's storage.
    world = World(2, (Fault(1, STORAGE),))
    world.meet(np.array([[0, 1]]), ALL, 5 * MS)
    world.strike(0, 100 * MS)
    world.spend(200 * MS)
    world.meet(np.array([[0, 1]]), ALL, 5 * MS)
    books = blame_job(world.job())
    assert in_ms(books) == {(1, "storage-local"): 100, (NO_CULPRIT, "net-transfer"): 20}
    assert felt_ms(books, "storage-local") == [100, 0]
    assert int(books.recoverable_ns.sum()) == 100 * MS


def test_unequal_waits_for_a_late_rank_are_charged_by_excess() -> None:
    # Work of rank r before the second operation: 10, 20, … 70; rank 7 works 40 and preprocesses 60.
    # It arrives at 100: the others wait 90, 80 … 30, in all 420, and each has 5 of transfer, twice.
    # Excess of rank 7 over rank r: 60 of preprocessing, and of work 40 - 10(r + 1) where positive:
    # 30, 20, 10, 0, 0, 0, 0. Ranks 0 to 2 have an excess that adds up to their wait exactly; rank 3
    # waits 60 (60); ranks 4 to 6 wait 50, 40, 30, all preprocessing: 360 in all, and 60 of work.
    world = World(8)
    everyone = np.arange(8)[None, :]
    world.meet(everyone, ALL, 5 * MS)
    world.spend(np.array([10, 20, 30, 40, 50, 60, 70, 40]) * MS)
    world.spend(60 * MS, PREPROCESS, np.array([7]))
    world.meet(everyone, ALL, 5 * MS)
    books = blame_job(world.job())
    assert in_ms(books) == {
        (7, "cpu-preprocess"): 360,
        (7, "sync-slow-compute"): 60,
        (NO_CULPRIT, "net-transfer"): 80,
    }
    assert felt_ms(books, "cpu-preprocess") == [60, 60, 60, 60, 50, 40, 30, 0]
    assert felt_ms(books, "net-transfer") == [10] * 8
    assert rank_culprits(books) == [(7, 420 * MS)]
    # Rank 6 comes 30 before rank 7: were rank 7 as early as that, each of seven gains 30.
    assert int(books.recoverable_ns.sum()) == 7 * 30 * MS


def test_the_last_of_several_late_ranks_gets_the_wait() -> None:
    # Ranks 2 and 3 load for 80 and 100, ranks 0 and 1 not at all: waits 100, 100, 20.
    world = World(4, (Fault(2, STORAGE), Fault(3, STORAGE)))
    everyone = np.arange(4)[None, :]
    world.meet(everyone, ALL, 5 * MS)
    world.strike(0, 80 * MS)
    world.strike(1, 100 * MS)
    world.meet(everyone, ALL, 5 * MS)
    books = blame_job(world.job())
    assert in_ms(books)[(3, "storage-local")] == 220
    assert (2, "storage-local") not in in_ms(books)
    assert int(books.recoverable_ns.sum()) == 3 * 20 * MS
    assert books.late_peers.tolist()[3] == 1 + 0  # rank 2; in the first operation nobody was late


def test_a_wandering_culprit_is_blamed_step_by_step() -> None:
    # Rank s is late by 40 in step s of 4: the three others wait 40 each.
    world = World(4, tuple(Fault(rank, GC) for rank in range(4)))
    everyone = np.arange(4)[None, :]
    world.meet(everyone, ALL, 5 * MS)
    for step in range(4):
        world.spend(50 * MS)
        world.strike(step, 40 * MS)
        world.meet(everyone, ALL, 5 * MS)
    milliseconds = in_ms(blame_job(world.job()))
    assert milliseconds == {
        **{(rank, "cpu-gc"): 120 for rank in range(4)},
        (NO_CULPRIT, "net-transfer"): 100,
    }


def test_blame_passes_through_waiting_ranks_to_the_first_cause() -> None:
    # Rank 0 loads 60. Rank 1 meets it first and waits 60; rank 2 meets rank 1 and waits 60 + 5 for
    # the transfer of the first meeting; rank 3 meets rank 2 and waits 60 + 5 + 5. All for rank 0.
    world = World(4, (Fault(0, STORAGE),))
    pairs = [np.array([[0, 1]]), np.array([[1, 2]]), np.array([[2, 3]])]
    teams = [np.array([10]), np.array([11]), np.array([12])]
    for strike in (0, 60 * MS):
        world.meet(np.arange(4)[None, :], ALL, 5 * MS)
        world.strike(0, strike)
        for pair, team in zip(pairs, teams):
            world.meet(pair, team, 5 * MS)
    books = blame_job(world.job())
    assert in_ms(books)[(0, "storage-local")] == 60 * 3
    assert felt_ms(books, "storage-local") == [0, 60, 60, 60]
    assert [rank for rank, _ in rank_culprits(books)] == [0]


def test_delays_before_an_operation_of_another_group_count_only_there() -> None:
    # Ranks 0 and 1 are in a pair and in the world. Rank 0 loads 100 before a world operation, where
    # rank 1 waits for it; then rank 1 loads 50, and rank 0 waits 50 in the pair. Looking back to
    # the pair's last operation would find rank 1's wait of 100 and hand two thirds to rank 0.
    world = World(4, (Fault(0, STORAGE), Fault(1, GC)))
    everyone, pairs = np.arange(4)[None, :], np.array([[0, 1], [2, 3]])
    world.meet(everyone, ALL, 5 * MS)
    world.meet(pairs, np.array([10, 11]), 5 * MS)
    world.strike(0, 100 * MS)
    world.meet(everyone, ALL, 5 * MS)
    world.strike(1, 50 * MS)
    world.meet(pairs, np.array([10, 11]), 5 * MS)
    milliseconds = in_ms(blame_job(world.job()))
    assert milliseconds[(0, "storage-local")] == 300
    assert milliseconds[(1, "cpu-gc")] == 50


def test_lasting_extra_work_is_imbalance_and_sudden_work_is_slow() -> None:
    # Rank 1 works 60 where the others work 50, from the first step on: expected from its second
    # step. Rank 2 works 90 in the last step only: 40 more than rank 0 or 3, of which none was
    # expected, and 30 more than rank 1.
    world = World(4)
    everyone = np.arange(4)[None, :]
    for step in range(12):
        world.spend(50 * MS)
        world.spend(10 * MS, WORK, np.array([1]))
        if step == 11:
            world.spend(40 * MS, WORK, np.array([2]))
        world.meet(everyone, ALL, 5 * MS)
    milliseconds = in_ms(blame_job(world.job()))
    # Step 0 has nothing before it, step 1 no habit: 30 each; nine steps of 30 are expected.
    assert milliseconds[(1, "unattributed")] == 30
    assert milliseconds[(1, "sync-slow-compute")] == 30
    assert milliseconds[(1, "sync-imbalance")] == 9 * 30
    assert milliseconds[(2, "sync-slow-compute")] == 40 + 30 + 40


def test_a_rank_slowing_during_baseline_learning_is_slow_compute() -> None:
    # All work 50; rank 1 takes 80 from step 12 on, of 40. Its first 32 stretches (steps 1 to 32)
    # hold 21 slow ones: by them alone 20 of the 30 would be expected of it. Its first 8 are as
    # long as those of the others, so none is: 28 steps in which three ranks wait 30.
    world = World(4)
    everyone = np.arange(4)[None, :]
    for step in range(40):
        world.spend(50 * MS)
        if step >= 12:
            world.spend(30 * MS, WORK, np.array([1]))
        world.meet(everyone, ALL, 5 * MS)
    assert in_ms(blame_job(world.job())) == {
        (1, "sync-slow-compute"): 28 * 3 * 30,
        (NO_CULPRIT, "net-transfer"): 40 * 4 * 5,
    }


def test_a_late_sender_is_blamed_for_the_receiver_wait() -> None:
    # Two stages, two replicas; replica 1's first stage (rank 2) loads 30 in the second step.
    world = World(4, (Fault(2, STORAGE),))
    grid, planes, teams = make_pipeline_groups(4, 2)
    for step in range(2):
        world.strike(0, 30 * MS * step)
        send_to_stage(world, grid, 0, 1, MS)
        send_to_stage(world, grid, 1, 0, MS)
        world.meet(planes, teams, 5 * MS)
    milliseconds = in_ms(blame_job(world.job()))
    # Rank 3 waits 30 for it; then ranks 0 and 1 wait 30 each in the two reductions.
    assert milliseconds == {
        (2, "storage-local"): 90,
        (NO_CULPRIT, "net-transfer"): 2 * (4 + 4 + 20),
    }


def test_ranks_in_first_operations_are_compared_from_step_start() -> None:
    # Rank 0 loads 30. Rank 1 waits 30 for it; rank 2 has left nothing together with rank 1 and
    # waits 31: 30 that rank 1 waited itself, so rank 0's, and 1 that the first message took.
    world = World(3, (Fault(0, STORAGE),))
    grid, _, _ = make_pipeline_groups(3, 3)
    world.strike(0, 30 * MS)
    send_to_stage(world, grid, 0, 1, MS)
    send_to_stage(world, grid, 1, 2, MS)
    milliseconds = in_ms(blame_job(world.job()))
    assert milliseconds == {(0, "storage-local"): 60, (NO_CULPRIT, "net-transfer"): 2 * 2 + 1}


def test_a_rank_seen_later_is_not_compared_by_earlier_time() -> None:
    # Ranks 0 and 1 meet nine times, rank 1 loading 10 each time; then rank 2, which was not seen
    # before, collects garbage for 30, and rank 1 waits for it: for what else, nobody saw.
    world = World(3, (Fault(1, STORAGE), Fault(2, GC)))
    for _ in range(9):
        world.strike(0, 10 * MS)
        world.meet(np.array([[0, 1]]), ALL, MS)
    world.t[2] = world.t[1]
    world.strike(1, 30 * MS)
    world.meet(np.array([[1, 2]]), np.array([2]), MS)
    milliseconds = in_ms(blame_job(world.job()))
    assert milliseconds == {
        (1, "storage-local"): 90,
        (2, "unattributed"): 30,
        (NO_CULPRIT, "net-transfer"): 20,
    }


def test_a_heavier_stage_is_imbalance_until_exceeding_its_own_baseline() -> None:
    world = World(2)
    grid, _, _ = make_pipeline_groups(2, 2)
    for step in range(10):
        send_to_stage(world, grid, 0, 1, MS)
        world.spend((160 if step == 9 else 40) * MS, WORK, np.array([1]))
        send_to_stage(world, grid, 1, 0, MS)
    # Rank 0 waits for all of it. Step 0 has no habit. From then on rank 1's is 40 and 0 by turns,
    # 20 on average: up to 60 are expected, so of the last 160 there are 100 slow.
    milliseconds = in_ms(blame_job(world.job()))
    assert milliseconds == {
        (1, "sync-slow-compute"): 40 + 100,
        (1, "sync-imbalance"): 8 * 40 + 60,
        (NO_CULPRIT, "net-transfer"): 2 * 2 * 10,
    }


def test_a_rank_recorded_alone_waits_for_an_unknown_peer() -> None:
    world = World(1)
    world.meet(np.array([[0]]), ALL, 30 * MS)
    assert in_ms(blame_job(world.job())) == {(NO_CULPRIT, "sync-unknown-peer"): 30}


def test_victim_and_culprit_sums_agree_by_cause() -> None:
    world = World(3, (Fault(1, STORAGE), Fault(2, GC)))
    everyone = np.arange(3)[None, :]
    for step in range(5):
        world.spend(np.array([7, 11, 13]) * 1_000_001)
        world.strike(step % 2, 3_333_333)
        world.meet(everyone, ALL, 1)
    books = blame_job(world.job())
    np.testing.assert_array_equal(books.victim_ns.sum(axis=0), books.culprit_ns.sum(axis=0))
    assert len(books.causes) == len(CATEGORIES) + 4


def test_extra_work_after_a_message_is_judged_since_last_meeting() -> None:
    # Rank 0 sends what it worked 20 for, then both meet: rank 1 works 60 behind the message in
    # every step. Rank 0 works nothing there, so no habit tells of that stretch; but since they last
    # met in this team rank 1 always worked 60 to its 20. Two meetings go by before that is known.
    world = World(2)
    for _ in range(12):
        world.spend(20 * MS, who=[0])
        world.meet(np.array([[0, 1]]), np.array([9]), 5 * MS, kind=SEND)
        world.spend(60 * MS, who=[1])
        world.meet(np.array([[0, 1]]), ALL, 5 * MS)
    milliseconds = in_ms(blame_job(world.job()))
    assert milliseconds[(1, "sync-imbalance")] == 10 * 60
    assert milliseconds[(1, "sync-slow-compute")] == 2 * 60


def test_waits_for_the_work_of_a_stage_are_counted_as_waits_in_messages() -> None:
    # Rank 1 waits 9 times in a message for rank 0, which works 50 ms longer.
    world = World(2)
    for _ in range(10):
        world.spend(np.array([60, 10]) * MS)
        world.meet(np.array([[0, 1]]), ALL, 5 * MS, kind=SEND)
    books = blame_job(world.job())
    in_messages, in_all = books.work_wait_ns
    assert in_messages.tolist() == in_all.tolist() and in_all[0] > 0 and in_all[1] == 0
    world = World(2)
    for _ in range(10):
        world.spend(np.array([60, 10]) * MS)
        world.meet(np.array([[0, 1]]), ALL, 5 * MS)
    in_messages, in_all = blame_job(world.job()).work_wait_ns
    assert not in_messages.any() and in_all[0] == 9 * 50 * MS
