"""Clocks are aligned within the printed bound, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.timeline.clock_sync import UNALIGNED, align_clocks
from tests.support.synthetic.clocks import SECOND_NS, align_random_cluster

OPERATIONS = np.arange(40)
TIMES = (OPERATIONS + 1) * SECOND_NS


def leaves(
    sets: list[list[int]], offset_ns: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """40 operations of each set of nodes, once a second."""
    operation, node, leave = [], [], []
    for number, nodes in enumerate(sets):
        for item in nodes:
            operation.append(OPERATIONS + 100 * number)
            node.append(np.full(40, item))
            leave.append(TIMES + number + offset_ns[item])
    return np.concatenate(operation), np.concatenate(node), np.concatenate(leave)


def test_the_true_error_stays_within_the_bound() -> None:
    # `python -m bench blame` runs 10,000 of these.
    assert [seed for seed in range(200) if align_random_cluster(seed)[0] > 1] == []


def test_clocks_of_two_nodes_are_aligned() -> None:
    # Node 1 is 5 s ahead: both are 2.5 s from the middle, in which the common clock lies.
    alignment = align_clocks(*leaves([[0, 1]], [0, 5 * SECOND_NS]), 2)
    t = np.array([7 * SECOND_NS])
    assert (
        abs(int(alignment.to_common_ns(0, t)[0] - alignment.to_common_ns(1, t + 5 * SECOND_NS)[0]))
        <= 1
    )
    assert int(alignment.bound(0, t)[0]) <= 10


def test_nodes_are_aligned_through_others() -> None:
    alignment = align_clocks(*leaves([[0, 1, 2], [2, 3], [3, 4]], [0, 10, -999_999, 5_000, 70]), 5)
    assert (alignment.component == 0).all()
    t = np.array([20 * SECOND_NS])
    far = int(alignment.to_common_ns(4, t + 70)[0] - alignment.to_common_ns(0, t)[0])
    assert abs(far) <= int(alignment.bound(4, t)[0] + alignment.bound(0, t)[0])
    assert (
        int(alignment.bound(4, t)[0])
        >= int(alignment.bound(3, t)[0])
        >= int(alignment.bound(2, t)[0])
    )


def test_nodes_that_share_no_operation_cannot_be_aligned() -> None:
    alignment = align_clocks(*leaves([[0, 1], [2, 3]], [0, 1, 2, 3]), 5)
    assert (
        alignment.component[0]
        == alignment.component[1]
        != alignment.component[2]
        == alignment.component[3]
    )
    assert alignment.component[4] == UNALIGNED
    with pytest.raises(ValueError, match="shares no operation"):
        alignment.to_common_ns(4, np.array([0]))


def test_too_few_operations_give_no_alignment() -> None:
    operation, node, leave = leaves([[0, 1]], [0, 1])
    few = operation < 5
    alignment = align_clocks(operation[few], node[few], leave[few], 2)
    assert alignment.lines == (None, None)


def test_late_leavers_do_not_move_the_clock() -> None:
    operation, node, leave = leaves([[0, 1, 2]], [0, 0, 0])
    leave[(node == 1) & (operation % 5 == 0)] += SECOND_NS // 2
    alignment = align_clocks(operation, node, leave, 3)
    t = np.array([20 * SECOND_NS])
    assert abs(int(alignment.to_common_ns(1, t)[0] - alignment.to_common_ns(0, t)[0])) <= 2
