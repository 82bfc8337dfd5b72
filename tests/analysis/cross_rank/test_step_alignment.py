"""Steps that ranks do not end together are put together until they do: by hand."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.attribution.rank.step_blocks import ALL_RANKS_GROUP
from clusterprof.analysis.cross_rank.step_alignment import (
    compute_common_wait_ns,
    find_common_step_ends,
    merge_steps,
)
from clusterprof.analysis.spill import IN_MEMORY, SpillReader, SpillWriter
from clusterprof.analysis.timeline.collectives.rows import (
    ARRIVE,
    DURATION,
    HEAD_ROWS,
    SEQUENCE,
    RankOperations,
    RankRowBuilder,
    read_block,
)
from clusterprof.probe import layout

MS = 1_000_000


def ends(times_ms: list[int], first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(first, first + len(times_ms)), np.array(times_ms) * MS


def test_steps_with_diverging_ends_are_no_operations() -> None:
    # Steps of 100 ms. The data of the third are 150 ms late on the second rank, whose clock is 1 s
    # ahead; its host catches up with the fifth. 8 ms apart is together.
    step_ends = ends([100, 200, 300, 400, 500, 600])
    other = ends([1100, 1208, 1450, 1480, 1500, 1600])
    assert find_common_step_ends([step_ends, other]).tolist() == [0, 1, 4, 5]


def test_the_last_common_step_ends_the_last_operation() -> None:
    first, other = ends([100, 200, 300, 400]), ends([200, 300, 480, 500], first=1)
    assert find_common_step_ends([first, other]).tolist() == [1, 2, 3]


def test_at_most_sixteen_steps_are_merged() -> None:
    # 40 steps, as often early as late, by half a step.
    step_ends = ends([100 * k for k in range(40)])
    other = ends([100 * k + (50 if k % 2 else -50) for k in range(40)])
    assert find_common_step_ends([step_ends, other]).tolist() == [15, 31, 39]


def operations(stay_ms: list[int], spent_ms: list[list[int]]) -> RankOperations:
    """Steps of 100 ms from number 0 on."""
    n = len(stay_ms)
    end, stay = (np.arange(n) + 1) * 100 * MS, np.array(stay_ms) * MS
    alike = np.ones(n, np.int64)
    rows = RankRowBuilder(
        SpillWriter(IN_MEMORY), block_rows=3
    )  # so that one operation lies in two blocks
    spent = np.array(spent_ms).T * MS
    how = layout.OTHER_OPERATION * alike
    table = np.stack([end - stay, end, ALL_RANKS_GROUP * alike, np.arange(n), -alike, how, stay])
    rows.add(table, spent, spent)
    result = rows.finish()
    assert result is not None
    return result


def test_merged_steps_end_with_waits_and_keep_last_spent_time() -> None:
    whole = operations([5, 10, 0, 20, 40], [[1, 9], [2, 18], [3, 27], [4, 36], [5, 45]])
    with SpillReader(IN_MEMORY) as reader, SpillWriter(IN_MEMORY) as shelf:
        result = merge_steps(
            whole, np.array([0, 3]), reader, shelf
        )  # what comes after 3 is left out
    [block] = result.blocks
    rows = np.zeros((HEAD_ROWS + 4, block.rows), np.int64)
    assert isinstance(block.location, bytes)
    read_block(block.location, block, np.arange(2), rows)
    assert rows[SEQUENCE].tolist() == [0, 3]
    assert rows[DURATION].tolist() == [5 * MS, 30 * MS]
    assert rows[ARRIVE].tolist() == [95 * MS, 370 * MS]
    assert (rows[HEAD_ROWS : HEAD_ROWS + 2] // MS).tolist() == [[1, 4], [9, 36]]


def test_common_wait_sums_the_minimum_of_all_ranks_per_step() -> None:
    # The least of each step: 4, 5, 5, 6, 40. Beyond twice the usual, 10, nothing is counted.
    item = (*ends([100, 200, 300, 400, 500]), np.array([4, 50, 5, 6, 40]) * MS)
    other = (*ends([100, 200, 300, 400, 500]), np.array([9, 5, 30, 7, 60]) * MS)
    assert compute_common_wait_ns([item, other]) == (4 + 5 + 5 + 6 + 10) * MS
    # Alike in two of five steps: nobody does that in every step.
    rare = (*ends([100, 200, 300, 400, 500]), np.array([0, 50, 0, 0, 40]) * MS)
    assert compute_common_wait_ns([rare, rare]) == 0
