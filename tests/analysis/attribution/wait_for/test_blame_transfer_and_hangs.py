"""Transfers against what they should take, and operations that nobody leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.attribution.network import transfer_time
from clusterprof.analysis.attribution.network.transfer_time import (
    TransferTotals,
    compute_duration_classes,
    compute_upper_edge,
)
from clusterprof.analysis.attribution.wait_for.blame import blame_waits, list_causes
from clusterprof.analysis.attribution.wait_for.hangs import StuckRank, find_hangs
from tests.support.synthetic.jobs import CATEGORIES, MS, World

ALL_REDUCE, GRADIENTS = 1, 12
TRANSFER = list_causes(CATEGORIES).index("net-transfer")
TWO_NODES = np.array([0, 0, 1, 1])


def transfers_of(
    durations_ns: list[int], cut: int, size: int = 8_000_000, kind: int = ALL_REDUCE
) -> TransferTotals:
    world = World(4)
    for ns in durations_ns:
        world.spend(MS)
        world.meet(np.arange(4)[None, :], np.array([1]), ns, kind)
    job = world.job()
    out, carry = TransferTotals(TWO_NODES, TRANSFER), None
    for begin, end in ((0, cut), (cut, len(durations_ns))):
        ops = replace(job.ops, bytes=np.full(len(durations_ns), size)).take_range(begin, end)
        spent = job.spent[4 * begin : 4 * end]
        blamed, carry = blame_waits(ops, spent, spent, 4, carry)
        out.add(ops, blamed)
    return out


def beyond(result: TransferTotals) -> list[int]:
    """By rank, what was beyond without a rate."""
    known = {n: ns for n, ns in enumerate(result.find_expected_ns()) if ns is not None}
    [(nodes, ns)] = result.compute_excess_ns(known).items()
    assert nodes == {0, 1}
    return ns.tolist()


def test_the_fastest_tenth_is_expected_and_the_rest_is_excess() -> None:
    # 30 transfers of 2^20 ns (an edge of a class) and 10 of four times that: 10 x 3 x 2^20 more.
    durations = [1 << 20] * 30 + [1 << 22] * 10
    transfers = transfers_of(durations, 17)
    assert transfers.find_expected_ns() == [1 << 20]
    assert beyond(transfers) == [30 << 20] * 4
    assert beyond(transfers_of(durations, 40)) == [30 << 20] * 4
    assert transfers.victim_ns.tolist() == [70 << 20] * 4


def test_the_median_is_expected_for_operations_overlapping_computation() -> None:
    # The tenth of 2^10 ns is what computation hid best; 12 of 2^22 ns are 2^22 - 2^20 too long.
    durations = [1 << 10] * 4 + [1 << 20] * 24 + [1 << 22] * 12
    transfers = transfers_of(durations, 20, kind=GRADIENTS)
    assert transfers.find_expected_ns() == [1 << 20]
    assert beyond(transfers) == [12 * 3 << 20] * 4


def test_a_known_rate_determines_the_expected_transfer_time() -> None:
    # A ring all-reduce of 8 MB over 4 members moves 2 x 3/4 x 8 MB = 12 MB: 1 ms at 12 GB/s.
    transfers = transfers_of([3 * MS] * 5, 2)
    [cell] = transfers.cells
    assert (cell.nodes, cell.members, cell.operations) == ({0, 1}, 4, 5)
    assert cell.transferred_bytes == 12e6
    assert (
        transfers.compute_excess_ns({0: 12e6 / 12e9 * 1e9})[frozenset({0, 1})].tolist()
        == [5 * 2 * MS] * 4
    )


def test_few_operations_have_no_expected_transfer_time() -> None:
    transfers = transfers_of([MS] * 4 + [9 * MS], 2)
    assert transfers.find_expected_ns() == [None]
    assert beyond(transfers) == [0] * 4


def test_operations_of_a_node_are_not_compared_with_those_over_the_network() -> None:
    # Pairs of ranks on one node and over two: the same bytes, ten times as long.
    world = World(4)
    for _ in range(30):
        world.meet(np.array([[0, 1], [2, 3]]), np.array([1, 2]), 1 << 20)
        world.meet(np.array([[0, 2], [1, 3]]), np.array([3, 4]), 10 << 20)
    job = world.job()
    totals = TransferTotals(TWO_NODES, TRANSFER)
    totals.add(job.ops, blame_waits(job.ops, job.spent, job.spent, 4)[0])
    best = {tuple(cell.nodes): ns for cell, ns in zip(totals.cells, totals.find_expected_ns())}
    assert best == {(0,): 1 << 20, (1,): 1 << 20, (0, 1): pytest.approx(10 << 20, rel=0.1)}
    sums = totals.compute_excess_ns(dict.fromkeys(range(len(totals.cells)), 0.0))
    assert sum(ns.sum() for ns in sums.values()) == totals.victim_ns.sum() == 30 * 4 * 11 << 20


def test_too_many_kinds_of_operations_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_time, "MAX_TRANSFER_CELLS", 0)
    transfers = transfers_of([MS] * 30, 7)
    assert not transfers.cells and not transfers.compute_excess_ns({})
    assert transfers.victim_ns.tolist() == [30 * MS] * 4


def test_every_duration_lies_in_its_class() -> None:
    ns = np.array([0, 1, 2, 3, 1000, 1 << 40])
    for value, number in zip(ns.tolist(), compute_duration_classes(ns).tolist()):
        assert value <= compute_upper_edge(number) * (1 + 1e-9)
        assert number == 0 or value > compute_upper_edge(number - 1)


def test_a_rank_waiting_for_no_rank_is_the_hang_root() -> None:
    # The example of the module: 0 and 1 wait for 2, which waits for 3, which is in no operation.
    world, pair = 1, 2
    stuck = [StuckRank(0, world, 812, 90), StuckRank(1, world, 812, 90), StuckRank(2, pair, 40, 95)]
    (hangs,) = find_hangs(stuck, {world: [0, 1, 2], pair: [2, 3]}, frozenset(range(4)))
    assert (hangs.roots, hangs.is_cycle, hangs.recorded) == ((3,), False, True)
    assert hangs.waiting == (2, 0, 1)
    assert hangs.waiting_ns == 275


def test_circular_waits_are_reported_as_a_cycle() -> None:
    # Rank 0 is in operation 5 of team 1 and rank 1 in operation 9 of team 2: each waits for the
    # other, and rank 2 for rank 0.
    stuck = [StuckRank(0, 1, 5, 10), StuckRank(1, 2, 9, 20), StuckRank(2, 3, 0, 5)]
    (hangs,) = find_hangs(stuck, {1: [0, 1], 2: [0, 1], 3: [0, 2]}, frozenset(range(3)))
    assert (hangs.roots, hangs.is_cycle) == ((0, 1), True)
    assert hangs.waiting == (1, 0, 2)


def test_members_of_a_team_in_different_operations_wait_for_each_other() -> None:
    stuck = [StuckRank(0, 1, 5, 10), StuckRank(1, 1, 6, 10)]
    (hangs,) = find_hangs(stuck, {1: [0, 1]}, frozenset(range(2)))
    assert hangs.is_cycle


def test_a_root_without_a_recording_is_reported_as_unseen() -> None:
    (hangs,) = find_hangs([StuckRank(0, 1, 5, 10)], {1: [0, 7]}, frozenset([0]))
    assert (hangs.roots, hangs.recorded) == ((7,), False)


def test_an_operation_joined_by_all_members_is_the_hang() -> None:
    # Ranks 1 and 2 are in operation 4 of team 2, all of its members; rank 0 waits for rank 1.
    stuck = [StuckRank(0, 1, 5, 30), StuckRank(1, 2, 4, 20), StuckRank(2, 2, 4, 10)]
    (hangs,) = find_hangs(stuck, {1: [0, 1], 2: [1, 2]}, frozenset(range(3)))
    assert (hangs.roots, hangs.is_complete, hangs.is_cycle) == ((1, 2), True, False)
    assert hangs.waiting == (0, 1, 2)
    assert hangs.waiting_ns == 60
