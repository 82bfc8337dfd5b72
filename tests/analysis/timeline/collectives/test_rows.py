"""When a rank counts its operations from the beginning again, and when threads are in disorder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from clusterprof.analysis.timeline.collectives.rows import (
    ChannelNumbering,
    RankRowBuilder,
    choose_block_rows,
    read_block,
    read_blocks,
)
from clusterprof.probe.layout import ALL_REDUCE, GRADIENTS, OTHER_THREAD

GROUP = 7


def assign(
    numbers: Sequence[int], channels: ChannelNumbering | None = None, begin: int = 0
) -> list[int]:
    """The incarnation of each operation of one group; they arrive one after another."""
    channels = ChannelNumbering() if channels is None else channels
    same = np.full(len(numbers), GROUP, np.int64)
    arrive_ns = 1000 * (begin + np.arange(len(numbers), dtype=np.int64))
    number = np.array(numbers, np.int64)
    channel = channels.assign(same, same * 0 - 1, same * 0, arrive_ns, number)
    return [channels.channels[at][3] for at in channel.tolist()]


@pytest.mark.parametrize(
    "numbers",
    [
        [0, 1, 3, 2, 4, 5],  # two threads began at the same time
        [0, 1, 4, 3, 2, 5],
        [1, 2, 5, 1, 6],  # by four
        [*range(200), 136, 200],  # by 63
    ],
)
def test_out_of_order_threads_do_not_count_as_restart(numbers: list[int]) -> None:
    assert assign(numbers) == [0] * len(numbers)


@pytest.mark.parametrize(
    ("numbers", "incarnations"),
    [
        ([0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]),
        ([5, 0, 1], [0, 1, 1]),
        ([0, 1, 0, 1, 0], [0, 0, 1, 1, 2]),
        ([*range(130), 66, 67], [0] * 130 + [0, 0]),  # from 129 to 66: by 63
        ([*range(131), 66, 67], [0] * 131 + [1, 1]),  # from 130 to 66: by 64
    ],
)
def test_counting_from_zero_or_far_back_counts_as_restart(
    numbers: list[int], incarnations: list[int]
) -> None:
    assert assign(numbers) == incarnations


@pytest.mark.parametrize(
    ("first", "then", "incarnations"),
    [
        ([0, 1, 3], [2, 4], [0, 0]),  # in disorder across two blocks
        ([0, 1, 2], [0, 1], [1, 1]),
        ([*range(100, 200)], [136, 137], [0, 0]),
        ([*range(100, 200)], [135, 136], [1, 1]),
    ],
)
def test_restarts_are_detected_equally_across_blocks(
    first: list[int], then: list[int], incarnations: list[int]
) -> None:
    channels = ChannelNumbering()
    assign(first, channels)
    assert assign(then, channels, begin=len(first)) == incarnations
    assert assign([*first, *then])[len(first) :] == incarnations


def test_a_late_ending_operation_does_not_count_as_restart() -> None:
    channels = ChannelNumbering()
    assign([*range(1, 200)], channels, begin=10)
    assert assign([0], channels, begin=5) == [0]  # it began first and ended last
    assert assign([0], channels, begin=500) == [1]


def test_each_channel_is_numbered_separately() -> None:
    channels = ChannelNumbering()
    group = np.array([7, 8, 7, 8], np.int64)
    none = np.zeros(4, np.int64)
    numbers = np.array([4, 0, 5, 1], np.int64)
    channel = channels.assign(group, none - 1, none, np.arange(4) * 1000, numbers)
    assert [channels.channels[at] for at in channel.tolist()] == [
        (7, -1, 0, 0),
        (8, -1, 0, 0),
        (7, -1, 0, 0),
        (8, -1, 0, 0),
    ]


def build_and_read(
    builder: RankRowBuilder, at_arrive: list[int], at_leave: list[int]
) -> np.ndarray:
    """Three operations of another thread and one of the main thread, of 100 ns each."""
    other = ALL_REDUCE | OTHER_THREAD
    rows = [  # start, end, group, number, bytes, code, lost
        (1000, 1100, GROUP, 0, 8, other, 30),
        (1200, 1300, GROUP, 1, 8, other, 0),
        (1400, 1500, GROUP, 2, 8, other, 60),
        (1600, 1700, GROUP, 3, 8, ALL_REDUCE, 50),
    ]
    builder.add(np.array(rows).T, np.array([at_arrive]), np.array([at_leave]))
    operations = builder.finish()
    assert operations is not None
    (block,) = operations.blocks
    out = np.zeros((9, 4), np.int64)
    assert isinstance(block.location, bytes)
    read_block(block.location, block, np.zeros(1, np.int64), out)
    return out


def test_other_thread_operations_arrive_when_the_device_runs_dry() -> None:
    # Lost time is averaged over operations: 30 + 0 + 60 of 100 + 100 + 100 ns are 30 of each. The
    # fourth was called by the main thread and stays. A nanosecond of each of the others is hidden.
    spent = [500, 570, 670, 710], [570, 670, 710, 760]
    out = build_and_read(RankRowBuilder(Kept()), *spent)
    assert out[0].tolist() == [1069, 1269, 1469, 1600]  # arrivals
    assert out[1].tolist() == [31, 31, 31, 100]
    assert out[2].tolist() == [30, 30, 30, 50]  # of it lost
    assert out[7].tolist() == [570, 670, 710, 710]  # spent at arrival
    assert out[8].tolist() == [570, 670, 710, 760]  # spent at leave


def test_work_moves_out_of_the_operation_that_lost_time_moves_into() -> None:
    # 30 + 0 + 60 of lost time become 30 + 30 + 30: the second operation has 30 less of work, the
    # third 30 more, and after it the sum is the same as before.
    work = [500, 670, 870, 1010], [570, 770, 910, 1060]
    out = build_and_read(RankRowBuilder(Kept(), work=0), *work)
    assert out[7].tolist() == [570, 740, 910, 1010]
    assert out[8].tolist() == [570, 740, 910, 1060]


def test_spans_added_for_different_categories_share_a_block() -> None:
    # categories 2 and 4 of 5 first, then 0 and 2: what a part does not list is 0 there
    builder = RankRowBuilder(Kept())
    first = [(1000, 1100, GROUP, 0, 8, ALL_REDUCE, 10)]
    later = [(1200, 1300, GROUP, 1, 8, ALL_REDUCE, 20)]
    builder.add(np.array(first).T, np.array([[5], [70]]), np.array([[6], [70]]), np.array([2, 4]))
    builder.add(np.array(later).T, np.array([[3], [9]]), np.array([[3], [9]]), np.array([0, 2]))
    operations = builder.finish()
    assert operations is not None
    (block,) = operations.blocks
    assert block.arrive_categories.tolist() == [0, 2, 4]
    assert block.leave_categories.tolist() == [2]
    out = np.zeros((7 + 2 * 5, 2), np.int64)
    assert isinstance(block.location, bytes)
    read_block(block.location, block, np.arange(5), out)
    assert out[7:12].tolist() == [[0, 3], [0, 0], [5, 9], [0, 0], [70, 0]]  # at arrival
    assert out[12:].tolist() == [[0, 3], [0, 0], [6, 9], [0, 0], [70, 0]]  # at leave


class Kept:
    """A store that keeps every block in memory."""

    why_full = ""

    def put(self, data: bytes) -> bytes:
        return data


@pytest.mark.parametrize(
    ("ranks", "rows"), [(0, 2048), (1, 2048), (488, 2048), (489, 2044), (2000, 500), (10_000, 128)]
)
def test_blocks_of_a_very_large_job_are_smaller(ranks: int, rows: int) -> None:
    assert choose_block_rows(ranks) == rows


@pytest.mark.parametrize(
    ("wait_ns", "kept"),
    [
        (900_000, [0, 1]),  # the host goes on at once: nobody waits for anybody there
        (1_100_000, [0, 0, 1, 1]),
    ],
)
def test_gradient_waits_are_kept_only_for_blocked_hosts(wait_ns: int, kept: list[int]) -> None:
    hook = 8  # the group of the thread's own operations
    other = ALL_REDUCE | OTHER_THREAD
    rows = [  # start, end, group, number, bytes, code, lost
        (0, wait_ns, GROUP, 0, 8, GRADIENTS, 0),
        (5_000_000, 7_000_000, hook, 0, 8, other, 0),
        (10_000_000, 10_000_000 + wait_ns, GROUP, 1, 8, GRADIENTS, 0),
        (15_000_000, 17_000_000, hook, 1, 8, other, 0),
    ]
    builder = RankRowBuilder(Kept())
    none = np.zeros((1, 4), np.int64)
    builder.add(np.array(rows).T, none, none)
    operations = builder.finish()
    assert operations is not None
    (block,) = operations.blocks
    assert isinstance(block.location, bytes)
    out = np.zeros((9, len(kept)), np.int64)
    read_block(block.location, block, np.zeros(1, np.int64), out)
    assert sorted(out[3].tolist()) == kept  # numbers of the operations


def test_blocks_of_different_layouts_are_read_together() -> None:
    # Each rank has one block. Two are of equal layout; the third has spent time in another category
    # before, the fourth has one row only. In operations ranks spend category 2 alone.
    spent = [
        ([0, 2], [[5, 5, 9], [1, 4, 6]]),
        ([0, 2], [[2, 3, 3], [0, 7, 8]]),
        ([1, 2], [[6, 6, 6], [3, 5, 7]]),
        ([0, 2], [[8], [4]]),
    ]
    blocks, outs = [], []
    for number, (categories, at_arrive) in enumerate(spent):
        n = len(at_arrive[0])
        rows = [(100 * at + number, 100 * at + 50, GROUP, at, 8, ALL_REDUCE, 40) for at in range(n)]
        at_leave = np.array(at_arrive)
        at_leave[1] += 10 + number
        builder = RankRowBuilder(Kept())
        builder.add(np.array(rows).T, np.array(at_arrive), at_leave, np.array(categories))
        operations = builder.finish()
        assert operations is not None
        (block,) = operations.blocks
        assert isinstance(block.location, bytes)
        blocks.append((block.location, block))
        outs.append(np.full((7 + 3 + 1, n), -1, np.int64))
    read_blocks(blocks, np.arange(3), np.array([2]), outs)
    for number, (out, (categories, at_arrive)) in enumerate(zip(outs, spent)):
        n = len(at_arrive[0])
        assert out[0].tolist() == [100 * at + number for at in range(n)]  # arrivals
        assert out[3].tolist() == list(range(n))  # numbers
        want = np.zeros((3, n), np.int64)
        want[categories] = at_arrive
        assert out[7:10].tolist() == want.tolist()  # spent at arrival
        assert out[10].tolist() == [ns + 10 + number for ns in at_arrive[1]]  # category 2 at leave
