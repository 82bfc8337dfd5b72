"""Transfers against what they should take, and operations that nobody leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from synthetic.jobs import MS, World

from clusterprof.attribution.blame import settle_waits
from clusterprof.attribution.blame_hangs import Stuck, hangs
from clusterprof.attribution.blame_transfer import Transfers, classes, upper_edge

ALL_REDUCE = 1


def transfers_of(durations_ns: list[int], cut: int, size: int = 8_000_000) -> Transfers:
    world = World(4)
    for ns in durations_ns:
        world.spend(MS)
        world.meet(np.arange(4)[None, :], np.array([1]), ns)
    job = world.job()
    out, carry = Transfers(4), None
    for begin, end in ((0, cut), (cut, len(durations_ns))):
        ops = replace(job.ops, bytes=np.full(len(durations_ns), size)).cut(begin, end)
        spent = job.spent[4 * begin : 4 * end]
        blamed, carry = settle_waits(ops, spent, spent, 4, carry)
        out.add(ops, blamed)
    return out


def test_the_fastest_tenth_is_expected_and_the_rest_is_excess() -> None:
    # 30 transfers of 2^20 ns (an edge of a class) and 10 of four times that: 10 x 3 x 2^20 more.
    durations = [1 << 20] * 30 + [1 << 22] * 10
    found = transfers_of(durations, 17)
    assert found.expected_ns((ALL_REDUCE, 8_000_000, 4)) == 1 << 20
    assert found.excess_ns().tolist() == [30 << 20] * 4
    assert transfers_of(durations, 40).excess_ns().tolist() == [30 << 20] * 4


def test_a_known_rate_says_what_is_expected() -> None:
    # A ring all-reduce of 8 MB over 4 members moves 2 x 3/4 x 8 MB = 12 MB: 1 ms at 12 GB/s.
    found = transfers_of([3 * MS] * 5, 2)
    assert found.excess_ns(12e9).tolist() == [5 * 2 * MS] * 4


def test_of_few_operations_nothing_is_expected() -> None:
    assert transfers_of([MS] * 4 + [9 * MS], 2).excess_ns().tolist() == [0] * 4


def test_every_duration_lies_in_its_class() -> None:
    ns = np.array([0, 1, 2, 3, 1000, 1 << 40])
    for value, number in zip(ns.tolist(), classes(ns).tolist()):
        assert value <= upper_edge(number) * (1 + 1e-9)
        assert number == 0 or value > upper_edge(number - 1)


def test_who_waits_for_nobody_is_the_root() -> None:
    # The example of the module: 0 and 1 wait for 2, which waits for 3, which is in no operation.
    world, pair = 1, 2
    stuck = [Stuck(0, world, 812, 90), Stuck(1, world, 812, 90), Stuck(2, pair, 40, 95)]
    (found,) = hangs(stuck, {world: [0, 1, 2], pair: [2, 3]}, frozenset(range(4)))
    assert (found.roots, found.circle, found.recorded) == ((3,), False, True)
    assert found.waiting == (2, 0, 1)
    assert found.waiting_ns == 275


def test_a_circle_has_no_root() -> None:
    # Rank 0 is in operation 5 of team 1 and rank 1 in operation 9 of team 2: each waits for the
    # other, and rank 2 for rank 0.
    stuck = [Stuck(0, 1, 5, 10), Stuck(1, 2, 9, 20), Stuck(2, 3, 0, 5)]
    (found,) = hangs(stuck, {1: [0, 1], 2: [0, 1], 3: [0, 2]}, frozenset(range(3)))
    assert (found.roots, found.circle) == ((0, 1), True)
    assert found.waiting == (1, 0, 2)


def test_members_of_a_team_in_different_operations_wait_for_each_other() -> None:
    stuck = [Stuck(0, 1, 5, 10), Stuck(1, 1, 6, 10)]
    (found,) = hangs(stuck, {1: [0, 1]}, frozenset(range(2)))
    assert found.circle


def test_a_root_without_a_recording_is_said_to_be_unseen() -> None:
    (found,) = hangs([Stuck(0, 1, 5, 10)], {1: [0, 7]}, frozenset([0]))
    assert (found.roots, found.recorded) == ((7,), False)


def test_an_operation_that_all_have_come_to_hangs_itself() -> None:
    # Ranks 1 and 2 are in operation 4 of team 2, all of its members; rank 0 waits for rank 1.
    stuck = [Stuck(0, 1, 5, 30), Stuck(1, 2, 4, 20), Stuck(2, 2, 4, 10)]
    (found,) = hangs(stuck, {1: [0, 1], 2: [1, 2]}, frozenset(range(3)))
    assert (found.roots, found.inside, found.circle) == ((1, 2), True, False)
    assert found.waiting == (0, 1, 2)
    assert found.waiting_ns == 60
