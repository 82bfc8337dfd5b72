"""What a batch costs beyond the wait for it, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.rank.hidden_cost import (
    ALL_CAUSES,
    HIDDEN_COLUMNS,
    HiddenCostSums,
    compute_hidden_cost,
)
from clusterprof.analysis.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    Rank,
)
from clusterprof.probe import layout
from tests.support.builders import make_lost_segments, make_process, make_rank, make_spans, ns

MAIN, WORKER = 100, 201
STORAGE, GC = HIDDEN_COLUMNS.index("storage-local"), HIDDEN_COLUMNS.index("cpu-gc")


def waiting() -> Rank:
    """Waits from 3 to 10 s for the batch that its worker makes from 0 to 10 s."""
    main = make_process(MAIN, spans={layout.DATA_WAIT: make_spans((3, 10, 0, WORKER))})
    worker = make_process(WORKER, spans={layout.FETCH: make_spans((0, 10))}, parent=MAIN)
    return make_rank(12, main, [worker])


def shares(**of: list[float]) -> dict[str, np.ndarray]:
    return {
        name.replace("_", "-"): np.array([round(value * SHARE_SCALE) for value in batch], np.int64)
        for name, batch in of.items()
    }


def in_s(amounts: dict[int, np.ndarray], number: int) -> list[float]:
    return [round(value / 1e9, 3) for value in amounts[number].tolist()]


WAIT = make_lost_segments((3, 10, 7, PHASE_DATA_WAIT))


def test_hidden_cost_of_a_cause_is_its_production_share() -> None:
    # 10 s of production, 7 waited: 60 % of it are 6 s, of which 4.2 are in the wait
    hidden_cost = compute_hidden_cost(
        waiting(), WAIT, shares(storage_local=[0.6], cpu_preprocess=[0.4])
    )
    assert in_s(hidden_cost, STORAGE) == [1.8]
    assert in_s(hidden_cost, HIDDEN_COLUMNS.index("cpu-preprocess")) == [
        1.2
    ]  # 4 of 10 s, 2.8 in the wait
    # never more than the wait: 90 % of the production are 9 s
    most = compute_hidden_cost(waiting(), WAIT, shares(storage_local=[0.9]))
    assert in_s(most, STORAGE) == in_s(most, HIDDEN_COLUMNS.index(ALL_CAUSES)) == [0.7]


def test_removing_only_the_main_cause_closes_a_whole_gap() -> None:
    pieces = make_lost_segments((10, 11, 1, PHASE_COMPUTE), (11, 12, 1, PHASE_COMPUTE))
    hidden_cost = compute_hidden_cost(waiting(), pieces, shares(cpu_gc=[0.8, 0.3]))
    assert in_s(hidden_cost, GC) == [0.2, 0.0]


def test_the_main_cause_of_a_gap_also_recovers_minor_claims() -> None:
    # of 1 s the host launched for 0.7, and waited for a CPU for 0.2: had it nothing to launch, it
    # would wait for none. Of the next neither is the chief: 0.4 of 0.8 each, and half of the rest.
    pieces = make_lost_segments((10, 11, 1, PHASE_COMPUTE), (11, 12, 1, PHASE_COMPUTE))
    hidden_cost = compute_hidden_cost(
        waiting(), pieces, shares(launch_bound=[0.7, 0.4], cpu_gil=[0.2, 0.4])
    )
    assert in_s(hidden_cost, HIDDEN_COLUMNS.index("launch-bound")) == [0.3, 0.1]
    assert in_s(hidden_cost, HIDDEN_COLUMNS.index("cpu-gil")) == [0.022, 0.1]  # 0.2 of 0.9


def test_all_causes_together_recover_at_most_the_lost_piece() -> None:
    # of the wait both are gone: 7 s; each cause alone closes what is said above
    hidden_cost = compute_hidden_cost(
        waiting(), WAIT, shares(storage_local=[0.6], cpu_preprocess=[0.4])
    )
    assert HIDDEN_COLUMNS.index(ALL_CAUSES) not in hidden_cost
    # of a gap of 1 s 0.9 are claimed: 0.1 more
    gap = make_lost_segments((10, 11, 1, PHASE_COMPUTE))
    hidden_cost = compute_hidden_cost(waiting(), gap, shares(launch_bound=[0.7], cpu_gil=[0.2]))
    assert in_s(hidden_cost, HIDDEN_COLUMNS.index(ALL_CAUSES)) == [0.1]


def test_a_device_wait_before_a_save_belongs_to_the_save() -> None:
    # Step 0 waits for its device once, and saves for 3 s; 0.5 s of launching late are the sync's.
    # Step 1 asks its device twice, step 2 only writes a little: theirs stay theirs.
    pieces = make_lost_segments(
        (3, 6, 3, PHASE_CHECKPOINT),
        (6, 7, 0.5, PHASE_COMPUTE),
        (13, 16, 3, PHASE_CHECKPOINT),
        (16, 17, 0.5, PHASE_COMPUTE),
        (23, 24, 0.2, PHASE_CHECKPOINT),
        (26, 27, 0.5, PHASE_COMPUTE),
    )
    pieces = replace(pieces, step=np.array([0, 0, 1, 1, 2, 2]))
    marks = {
        layout.STEP: make_spans((0, 10, 0), (10, 20, 1), (20, 30, 2)),
        layout.CHECKPOINT: make_spans((3, 6), (13, 16), (23, 24)),
        # the second of step 0 is inside the save, and part of it
        layout.SYNC: make_spans((2, 3, 0, 1), (4, 5, 0, 1), (12, 13, 0, 2), (22, 23, 0, 1)),
    }
    rank_ = make_rank(40, make_process(MAIN, spans=marks))
    hidden_cost = compute_hidden_cost(
        rank_, pieces, shares(checkpoint=[1, 0, 1, 0, 1, 0], h2d_sync=[0, 1, 0, 1, 0, 1])
    )
    assert in_s(hidden_cost, HIDDEN_COLUMNS.index("checkpoint")) == [0, 0.5, 0, 0, 0, 0]


def test_running_sums_are_interpolated_inside_a_piece() -> None:
    sums = HiddenCostSums()
    pieces = WAIT
    amounts = {STORAGE: np.array([ns(1.4)], np.int64)}
    columns, first = sums.add(pieces, amounts, np.array([ns(2), ns(6.5), ns(12)], np.int64))
    assert columns.tolist() == [STORAGE] and first.tolist() == [[0, ns(0.7), ns(1.4)]]
    columns, later = sums.add(pieces, {}, np.array([ns(20)], np.int64))
    assert columns.tolist() == [STORAGE] and later.tolist() == [[ns(1.4)]]
