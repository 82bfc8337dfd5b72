"""Who kept the others waiting when: persistence, victims and slow steps, from blame made by hand.

Every rank is a member of every operation; one operation a second. In `run` an operation is a list
of (culprit, ns): so much every other rank waited for that one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.attribution.wait_for import time_bins
from clusterprof.analysis.attribution.wait_for.blame import WORK, BlockBlame
from clusterprof.analysis.attribution.wait_for.time_bins import WaitTimeBins
from clusterprof.analysis.attribution.wait_for.totals import (
    SavingsTotals,
    SlowSteps,
    VictimCounts,
    WaitTotals,
)
from clusterprof.analysis.cross_rank.observers import CulpritObserver, CulpritSums
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.probe.layout import ALL_REDUCE, ALL_TO_ALL
from clusterprof.report.model import Persistence

S, MS = 1_000_000_000, 1_000_000
CAUSES, CAUSE = 4, 2
Waits = list[tuple[int, int]]


def run(ranks: int, waits: list[Waits], first_ns: int = 0) -> tuple[Operations, BlockBlame]:
    """One operation a second, left by all ranks at full seconds from `first_ns` + 0.5 s on."""
    count = len(waits)
    leave = np.repeat(first_ns + S // 2 + np.arange(count) * S, ranks)
    ns = np.array([sum(ns for _, ns in wait) for wait in waits], np.int64)
    ops = Operations(
        first=np.arange(count + 1) * ranks,
        process_group=np.zeros(count, np.int64),
        operation=np.ones(count, np.int64),
        bytes=np.zeros(count, np.int64),
        complete=np.ones(count, np.bool_),
        rank=np.tile(np.arange(ranks), count),
        arrive_ns=leave - np.repeat(ns, ranks),
        leave_ns=leave,
        blocked_ns=np.repeat(ns, ranks),
        source=np.arange(count * ranks),
    )
    entries = [
        (op * ranks + rank, culprit, ns)
        for op, wait in enumerate(waits)
        for rank in range(ranks)
        for culprit, ns in wait
        if rank != culprit and ns
    ]
    row, culprit, ns = np.array(entries, np.int64).reshape(-1, 3).T
    last = np.array([wait[0][0] if wait else -1 for wait in waits], np.int64)
    blamed = BlockBlame(
        row,
        culprit,
        np.full(row.size, CAUSE),
        ns,
        np.zeros(count * ranks, np.int64),
        last,
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count * ranks, np.int64),
        np.zeros((0, count), np.int64),
    )
    return ops, blamed


def judged(ranks: int, waits: list[Waits], nodes: list[int] | None = None) -> Persistence | None:
    stretches = WaitTimeBins(CAUSES, np.zeros(ranks, np.int64), nodes or [0] * ranks)
    stretches.add(*run(ranks, waits))
    return stretches.persistence([CAUSE])


def test_a_constant_culprit_is_steady() -> None:
    # 40 stretches alike: nine tenths of the waiting lie in any 36 of them, by time the first
    judgment = judged(8, [[(3, 90 * MS)]] * 40)
    assert judgment == Persistence("steady", 0, 36 * S, 36, 40, 1, 36)


def test_two_constant_culprits_are_steady() -> None:
    # 3 and 5 in turn: two of eight ranks, not more than a third, and each has its part throughout
    judgment = judged(8, [[(3, 50 * MS), (5, 50 * MS)]] * 40)
    assert judgment is not None and (judgment.kind, judgment.main_culprit_bins) == ("steady", 36)


def test_jitter_of_the_others_does_not_hide_a_steady_culprit() -> None:
    waits: list[Waits] = [[(3, 60 * MS), (at % 8, 20 * MS)] for at in range(40)]
    judgment = judged(8, waits)
    assert judgment is not None and judgment.kind == "steady"


def test_waits_confined_to_a_short_period_are_transient() -> None:
    waits: list[Waits] = [[(1, MS)] for _ in range(40)]
    waits[12:17] = [[(3, 90 * MS)] for _ in range(5)]
    # 450 of 485 ms of waiting: 90 % are reached within the fifth of the large ones
    assert judged(8, waits) == Persistence("transient", 12 * S, 17 * S, 5, 40, 1, 5)


def test_bursts_throughout_the_run_are_not_transient() -> None:
    waits: list[Waits] = [[(3, 90 * MS)] if at % 8 == 0 else [] for at in range(40)]
    judgment = judged(8, waits)
    # stretches 0, 8, …, 32: five, which lie in 33 of 40
    assert judgment == Persistence("steady", 0, 33 * S, 5, 40, 1, 5)


def test_a_different_culprit_each_time_is_wandering() -> None:
    judgment = judged(8, [[(at * 5 % 8, 90 * MS)] for at in range(40)])
    assert judgment is not None and (judgment.kind, judgment.culprits) == ("wandering", 8)


def test_culprits_alternating_within_a_time_bin_are_wandering() -> None:
    # every stretch holds all eight, each for an eighth: none of them is the culprit
    judgment = judged(8, [[(rank, 10 * MS) for rank in range(8)]] * 40)
    assert judgment is not None and judgment.kind == "wandering"


def test_an_occasionally_changing_culprit_is_wandering() -> None:
    waits: list[Waits] = [[(1 + 4 * (at // 14), 90 * MS)] for at in range(42)]
    judgment = judged(16, waits)
    # rank 1, then 5, then 9; rank 1 caused a third and has its part in a third of the run
    assert judgment is not None and (judgment.kind, judgment.culprits) == ("wandering", 3)


def test_alternating_ranks_of_a_node_count_as_a_single_culprit() -> None:
    # ranks 0 to 3 take turns; that is all of a job of one node, and one node of two
    waits: list[Waits] = [[(at % 4, 90 * MS)] for at in range(40)]
    of_two = judged(8, waits, [0, 0, 0, 0, 1, 1, 1, 1])
    assert of_two is not None and of_two.kind == "steady"
    alone = judged(4, waits)
    assert alone is not None and alone.kind == "wandering"


def test_a_short_run_has_no_persistence() -> None:
    assert judged(8, [[(3, 90 * MS)]] * 7) is None
    assert judged(8, [[(3, 90 * MS)]] * 8) is not None
    assert judged(8, [[] for _ in range(40)]) is None


def test_long_runs_use_longer_bins_independent_of_block_cuts() -> None:
    waits: list[Waits] = [[(3, 90 * MS)] if 300 <= at < 344 else [(1, 1)] for at in range(1000)]
    ops, blamed = run(4, waits)
    whole, cut = (WaitTimeBins(CAUSES, np.zeros(4, np.int64), [0] * 4) for _ in range(2))
    whole.add(ops, blamed)
    for begin in range(0, 1000, 125):
        cut.add(*run(4, waits[begin : begin + 125], first_ns=begin * S))
    # 1000 s in at most 128 stretches: 8 s each; seconds 300 to 343 lie in stretches 37 to 42
    assert whole.length_ns == cut.length_ns == 8 * S
    persistent = whole.persistence([CAUSE])
    assert persistent == cut.persistence([CAUSE])
    # the first of these holds 4 s, the others all the rest, 40 of 44
    assert persistent == Persistence("transient", 38 * 8 * S, 43 * 8 * S, 5, 125, 1, 5)


def test_run_time_counts_from_the_start_of_the_rank() -> None:
    stretches = WaitTimeBins(CAUSES, np.array([100 * S] * 4), [0] * 4)
    waits: list[Waits] = [[(3, 90 * MS)] if 10 <= at < 14 else [] for at in range(40)]
    stretches.add(*run(4, waits, first_ns=100 * S))
    persistent = stretches.persistence([CAUSE])
    assert persistent is not None and (persistent.from_ns, persistent.to_ns) == (10 * S, 14 * S)


def test_persistence_counts_only_the_given_causes() -> None:
    stretches = WaitTimeBins(CAUSES, np.zeros(8, np.int64), [0] * 8)
    stretches.add(*run(8, [[(3, 90 * MS)]] * 40))
    assert stretches.persistence([0, 1, 3]) is None


def test_time_bins_keep_a_bounded_number_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_bins, "MAX_CELLS", 64)
    stretches = WaitTimeBins(CAUSES, np.zeros(16, np.int64), [0] * 16)
    for begin in range(0, 400, 50):
        waits: list[Waits] = [[(3, 90 * MS), (at % 16, MS)] for at in range(50)]
        stretches.add(*run(16, waits, first_ns=begin * S))
    assert stretches._cell.size <= 64  # what is small is forgotten first
    persistent = stretches.persistence([CAUSE])
    assert persistent is not None and persistent.kind == "steady"


def test_victims_are_those_that_waited_at_least_a_tenth_as_long() -> None:
    victims = VictimCounts(8)
    ops, blamed = run(8, [[(3, 100 * MS)]] * 10)
    victims.add(ops, blamed)
    assert [victims.count_victims(rank) for rank in range(8)] == [0, 0, 0, 7, 0, 0, 0, 0]
    # rank 0 waits for nothing much: 9 ms of the 100 of the others
    less = np.where(ops.rank[blamed.row] == 0, 9 * MS, blamed.ns)
    victims = VictimCounts(8)
    victims.add(ops, BlockBlame(*(less if c is blamed.ns else c for c in columns_of(blamed))))
    assert victims.count_victims(3) == 6


def columns_of(blamed: BlockBlame) -> list[np.ndarray]:
    return [getattr(blamed, name) for name in BlockBlame.__slots__]


def steps_of(slow: dict[int, int]) -> dict[int, int]:
    """Start -> length of steps that end half a second before each full second but one."""
    return {at * S: slow.get(at, 600 * MS) for at in range(40)}


def test_slow_steps_are_counted_by_culprit() -> None:
    # steps of 600 ms; 5, 17 and 30 take 900: rank 3 keeps the others waiting for 300 ms in two of
    # them and rank 6 in one; rank 1 does for 20 ms in all others
    waits: list[Waits] = [[(1, 20 * MS)] for _ in range(40)]
    waits[5], waits[17], waits[30] = [(3, 300 * MS)], [(6, 300 * MS)], [(3, 300 * MS), (1, 9 * MS)]
    slow = SlowSteps(0, steps_of({at: 900 * MS for at in (5, 17, 30)}), 40, 8)
    slow.add(*run(8, waits))
    assert slow.length_ns.tolist() == [900 * MS] * 3
    assert slow.count_steps_by_culprit(600 * MS) == {3: 2, 6: 1}


def test_a_slow_step_with_little_waiting_has_no_culprit() -> None:
    # 300 ms more, of which the others waited for 70, less than a quarter
    waits: list[Waits] = [[(3, 70 * MS)] for _ in range(40)]
    slow = SlowSteps(0, steps_of({5: 900 * MS}), 40, 8)
    slow.add(*run(8, waits))
    assert slow.count_steps_by_culprit(600 * MS) == {}


def test_slow_steps_are_not_reported_for_few_steps() -> None:
    assert SlowSteps(0, {0: 5 * S}, 19, 8).length_ns.size == 0
    assert SlowSteps(0, {0: 5 * S}, 20, 8).length_ns.size == 1


def test_bytes_of_all_to_all_are_summed_where_their_sizes_differ() -> None:
    ops, blamed = run(3, [[]] * 6)
    sizes = [
        [1, 1, 4],  # mean 2, the largest is twice as large: counts
        [9, 10, 11],  # the largest is 1.1 times the mean of 10
        [1, 1, 4],  # an all-reduce
        [1, 1, 4],  # a member was not recorded
        [-1, 1, 4],  # not known
        [20, 30, 10],  # mean 20, the largest is 1.5 times: counts
    ]
    kinds = np.full(6, ALL_TO_ALL)
    kinds[2] = ALL_REDUCE
    ops = replace(
        ops,
        operation=kinds,
        complete=np.arange(6) != 3,
        bytes=np.array(sizes).max(axis=1),
        row_bytes=np.array(sizes).ravel(),
    )
    totals = WaitTotals(3, [WORK])
    totals.add(ops, blamed)
    assert totals.all_to_all_bytes.tolist() == [[21, 31, 14], [22, 22, 22]]
    more = WaitTotals(3, [WORK])
    more.add(ops.take_range(5, 6), run(3, [[]])[1])
    totals.merge(more)
    assert totals.all_to_all_bytes.tolist() == [[41, 61, 24], [42, 42, 42]]


def test_no_all_to_all_bytes_are_counted_for_other_operations() -> None:
    totals = WaitTotals(3, [WORK])
    totals.add(*run(3, [[]] * 2))
    assert not totals.all_to_all_bytes.any()


def test_imbalance_waits_blamed_as_slow_work_keep_their_culprits() -> None:
    # 40 waits of 90 ms, all blamed as slow work (CAUSE) before work was found to be uneven
    bins = WaitTimeBins(CAUSES, np.zeros(2, np.int64), [0] * 2)
    bins.add(*run(2, [[(at % 2, 90 * MS)] for at in range(40)]))
    savings = SavingsTotals(np.array([2, 2]), CAUSES)
    sums = CulpritSums(bins, VictimCounts(2), savings, [])
    observer = CulpritObserver([], ["sync-imbalance", "", "sync-slow-compute", ""], sums)
    waited_ns = 40 * 90 * MS
    both = ("sync-imbalance", "sync-slow-compute")
    assert observer.find_blamed_leaves(["sync-imbalance"], waited_ns) == both
    assert observer.find_blamed_leaves(["storage-local"], waited_ns) == ["storage-local"]
    # Of a finding without waits nothing has to be found.
    assert observer.find_blamed_leaves(["sync-imbalance"], 0) == ["sync-imbalance"]
