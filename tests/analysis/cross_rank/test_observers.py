"""What is played again without which cause: columns of spent and hidden time, by hand."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.attribution.rank.hidden_cost import ALL_CAUSES, HIDDEN_COLUMNS
from clusterprof.analysis.attribution.wait_for.blame import blame_waits
from clusterprof.analysis.attribution.what_if import ALL
from clusterprof.analysis.cross_rank.observers import WhatIfObserver
from tests.support.synthetic.jobs import CATEGORIES, MS, WORK, Fault, World

LOADING, DECODING = 0, 1


def test_removing_all_causes_closes_a_gap_only_once() -> None:
    # Both ranks load for 20 ms and decode for 10, as one gap of 32 ms: without loading all of it is
    # gone, 12 of it hidden; without all causes 2 are gone beside the 30 that were lost to them.
    faults = tuple(Fault(rank, cause) for rank in (0, 1) for cause in (LOADING, DECODING))
    world = World(2, faults)
    both, team = np.arange(2)[None, :], np.array([7])
    world.spend(5 * MS)
    world.meet(both, team, 0)
    for fault in range(4):
        world.strike(fault, (20, 10)[fault % 2] * MS)
    world.spend(42 * MS)
    world.meet(both, team, 0)
    job = world.job()
    columns = [LOADING, DECODING, WORK]
    whatif = WhatIfObserver([0, 0], CATEGORIES)
    hidden = [
        len(CATEGORIES) + HIDDEN_COLUMNS.index(name) for name in (CATEGORIES[LOADING], ALL_CAUSES)
    ]
    assert whatif.begin(columns, [*columns, *sorted(hidden)]) == sorted(hidden)
    spent = job.spent[:, columns]
    table = np.zeros((spent.shape[0], 5), np.int64)
    table[:, :3] = spent
    table[2:, 3:] = np.array([12, 2]) * MS  # of the second operation
    blamed, _ = blame_waits(job.ops, spent, spent, 2)
    whatif.add(job.ops, blamed, table, table)
    won = whatif.savings()[0].savings_ns.sum(axis=0) / MS
    assert whatif.unreplayed_ns(0) == 5 * MS
    assert whatif.causes == (CATEGORIES[LOADING], CATEGORIES[DECODING])
    assert (won[0], won[1], won[ALL]) == (32, 10, 32)
