"""Lost time in operations that threads of one rank call at the same time: by hand."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.rank.time_spent import TimeSpent
from clusterprof.analysis.timeline.collectives.rows import (
    BLOCKED,
    END,
    HEAD_ROWS,
    RankOperations,
    read_block,
)
from clusterprof.analysis.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_EVAL,
    PHASE_LOCK,
)
from clusterprof.probe import layout
from tests.support.builders import (
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)

GROUP, END_S = 7, 100
OTHER = layout.ALL_REDUCE | layout.OTHER_THREAD
Operation = tuple[float, float, int]  # start, end, code


class Kept:
    """A store that returns what it is given."""

    why_full = ""

    def put(self, data: bytes) -> bytes:
        return data


def record(
    operations: list[Operation],
    idle: list[tuple[float, float, float]],
    cuts: tuple[int, ...] = (),
    kept: tuple[float, float, int] | None = None,
) -> RankOperations:
    """The operations of a rank; `idle`: intervals in operations and what was lost in each.

    cuts: when a segment ends and the next one begins. kept: a wait for the interpreter lock (start,
    end, pause before it in ns), with a main thread that sleeps on a lock all the time.
    """
    table = make_spans(
        *((start, end, GROUP, at, 0, code) for at, (start, end, code) in enumerate(operations))
    )
    marks = {layout.COLLECTIVE: table}
    asleep = None
    if kept is not None:
        marks[layout.INTERPRETER_WAIT] = make_spans(kept)
        asleep = make_thread(parse_activity(f"L{END_S}"), END_S, hz=1)
    timeline = make_rank(END_S, make_process(100, spans=marks, thread=asleep))
    spending = TimeSpent(("storage-local",), Kept())
    for begin, end in zip((0, *cuts), (*cuts, END_S)):
        here = [piece for piece in idle if begin <= piece[0] < end]
        pieces = make_lost_segments(*((*piece, PHASE_COLLECTIVE) for piece in here))
        spending.add(timeline, Segment(ns(begin), ns(end), False), pieces, {})
    result = spending.operations()
    assert result is not None
    return result


def blocked_s(operations: list[Operation], *idle: tuple[float, float, float]) -> list[float]:
    """The lost time in each operation, in the order in which they end."""
    (block,) = record(operations, list(idle)).blocks
    table = np.zeros((HEAD_ROWS + 2 * 3, block.rows), np.int64)
    assert isinstance(block.location, bytes)
    read_block(block.location, block, np.arange(3), table)
    return (table[BLOCKED] / 1e9).tolist()


def read_table(operations: RankOperations) -> list[list[int]]:
    (block,) = operations.blocks
    table = np.zeros((HEAD_ROWS + 2 * 3, block.rows), np.int64)
    assert isinstance(block.location, bytes)
    read_block(block.location, block, np.arange(3), table)
    return table.tolist()


def test_an_operation_ends_when_its_thread_lacks_only_the_interpreter_lock() -> None:
    # The lock is kept from 40 to 70: of two operations of other threads one ends with it. The rank
    # lost 25 in it before that; what it lost after that is no part of the operation.
    operations = [(10, 70, OTHER), (72, 80, OTHER)]
    idle = [(10, 40, 25), (40, 70, 30), (72, 80, 8)]
    table = read_table(record(operations, idle, kept=(50, 70, ns(20))))
    assert [blocked / 1e9 for blocked in table[BLOCKED]] == [30, 8]  # all that is left of it
    assert sum(read_table(record(operations, idle))[BLOCKED]) == ns(25 + 30 + 8)


def test_lost_time_moves_between_operations_without_adding_work() -> None:
    # 2 and 18 of 20 are lost in two operations of another thread, and become 10 of each. The rank
    # has worked for 30 - 10 when it leaves the first one, and for 60 - 20 when it leaves the other.
    table = read_table(record([(10, 30, OTHER), (40, 60, OTHER)], [(10, 30, 2), (40, 60, 18)]))
    assert [blocked / 1e9 for blocked in table[BLOCKED]] == [10, 10]
    work_at_leave = table[HEAD_ROWS + 3 + 2]
    assert [work / 1e9 for work in work_at_leave] == [20, 40]


@pytest.mark.parametrize("cuts", [(), (35,), (20, 50)])
def test_work_in_an_evaluation_is_no_work_of_the_step(cuts: tuple[int, ...]) -> None:
    # Evaluates in [20, 50) and loses 12 of it; loses 5 of [60, 70). It arrives at 80: worked for
    # 80 - 12 - 5 = 63, of which 18 in the evaluation.
    marks = {
        layout.COLLECTIVE: make_spans((80, 90, GROUP, 0, 0, layout.ALL_REDUCE)),
        layout.EVAL: make_spans((20, 50)),
    }
    timeline = make_rank(END_S, make_process(100, spans=marks))
    spending = TimeSpent(("eval-host",), Kept())
    for begin, end in zip((0, *cuts), (*cuts, END_S)):
        rows = [(20, 35, 6, PHASE_EVAL), (35, 50, 6, PHASE_EVAL), (60, 70, 5, PHASE_COMPUTE)]
        pieces = make_lost_segments(*(row for row in rows if begin <= row[0] < end))
        here = np.where(pieces.phase == PHASE_EVAL, SHARE_SCALE, 0)
        spending.add(timeline, Segment(ns(begin), ns(end), False), pieces, {"eval-host": here})
    result = spending.operations()
    assert result is not None
    table = read_table(result)
    arrived = [table[HEAD_ROWS + row][0] / 1e9 for row in range(3)]
    assert arrived == [30, 5, 45]  # evaluation, unexplained, work


@pytest.mark.parametrize("cuts", [(), (35,)])
@pytest.mark.parametrize("named", [True, False])
def test_work_while_the_lock_is_kept_counts_as_the_lock_if_that_is_named(
    named: bool, cuts: tuple[int, ...]
) -> None:
    # Another thread keeps the lock in [20, 50); the device is idle for 12 of it, and for 5 of
    # [60, 70). It arrives at 80: worked for 80 - 12 - 5 = 63, of which 18 while its host could not.
    marks = {
        layout.COLLECTIVE: make_spans((80, 90, GROUP, 0, 0, layout.ALL_REDUCE)),
        layout.INTERPRETER_WAIT: make_spans((20, 50, 0)),
    }
    asleep = make_thread(parse_activity(f"L{END_S}"), END_S, hz=1)
    timeline = make_rank(END_S, make_process(100, spans=marks, thread=asleep))
    spending = TimeSpent(("cpu-gil",), Kept())
    for begin, end in zip((0, *cuts), (*cuts, END_S)):
        rows = [(20, 35, 6, PHASE_LOCK), (35, 50, 6, PHASE_LOCK), (60, 70, 5, PHASE_COMPUTE)]
        pieces = make_lost_segments(*(row for row in rows if begin <= row[0] < end))
        share = np.where(pieces.phase == PHASE_LOCK, SHARE_SCALE, 0)
        shares = {"cpu-gil": share} if named else {}
        spending.add(timeline, Segment(ns(begin), ns(end), False), pieces, shares)
    result = spending.operations()
    assert result is not None
    table = read_table(result)
    arrived = [table[HEAD_ROWS + row][0] / 1e9 for row in range(3)]
    # the lock, unexplained, work
    assert arrived == ([30, 5, 45] if named else [0, 17, 63])


def test_an_operation_cut_by_a_segment_keeps_its_earlier_loss() -> None:
    # [10, 70) loses 20 before 50 and 10 after it; at its arrival the rank had worked for 10.
    operations = [(10, 70, layout.ALL_REDUCE), (80, 90, layout.ALL_REDUCE)]
    idle = [(20, 40, 20), (60, 70, 10), (85, 90, 5)]
    whole = read_table(record(operations, idle))
    assert [ns / 1e9 for ns in whole[BLOCKED]] == [30, 5]
    assert read_table(record(operations, idle, (50,))) == whole
    assert read_table(record(operations, idle, (45, 55, 85))) == whole  # in the middle of it, too


def test_segment_cuts_do_not_change_overlapping_operations() -> None:
    operations = [(0, 60, OTHER), (40, 100, layout.ALL_REDUCE)]
    idle = [(0, 50, 50), (50, 100, 50)]
    assert read_table(record(operations, idle, (50,))) == read_table(record(operations, idle))


def test_an_enclosing_operation_gets_the_loss_around_the_inner_operation() -> None:
    # The outer one lasts for [0, 100), the inner one for [20, 50). The device idles all the time:
    # the inner one has its 30, the outer one the rest.
    both = [(20, 50, OTHER), (0, 100, layout.ALL_REDUCE)]
    assert blocked_s(both, (0, 100, 100)) == [30, 70]


def test_loss_before_an_inner_operation_fills_the_inner_operation_first() -> None:
    # Idle for half of each: 10 before, 15 in and 25 after the inner one, which has room for 15.
    both = [(20, 50, OTHER), (0, 100, layout.ALL_REDUCE)]
    assert blocked_s(both, (0, 100, 50)) == [25, 25]
    # 20 before, 25 of 30 in it: room for 5; the outer one has the other 15 and the 50 after it
    assert blocked_s(both, (0, 20, 20), (20, 50, 25), (50, 100, 50)) == [30, 65]
    # nothing was lost before it
    assert blocked_s(both, (20, 50, 6), (50, 100, 50)) == [6, 50]


def test_several_inner_operations_take_the_loss_before_each() -> None:
    # [10, 20) and [60, 80) inside [0, 100): before them 5 and 20 were lost, inside 2 and 10, after
    # 10. Room for 8 and 10: the first takes 5, the second 10 of the 20. 27 of 30 in the operations
    # of another thread, in each of which the device worked equally long: 1.5.
    operations = [(10, 20, OTHER), (60, 80, OTHER), (0, 100, layout.ALL_REDUCE)]
    idle = ((0, 10, 5), (10, 20, 2), (20, 60, 20), (60, 80, 10), (80, 100, 10))
    assert blocked_s(operations, *idle) == [8.5, 18.5, 20]


def test_overlapping_operations_count_no_loss_twice() -> None:
    # [0, 60) ends first, [40, 100) began later: it has what was lost after 60
    overlapping = [(0, 60, OTHER), (40, 100, layout.ALL_REDUCE)]
    assert blocked_s(overlapping, (0, 100, 100)) == [60, 40]
    # one after the other: the device worked for 25 of each
    assert blocked_s([(0, 60, OTHER), (60, 100, OTHER)], (0, 100, 50)) == [35, 15]


@pytest.mark.parametrize("seed", range(20))
def test_each_nanosecond_is_counted_once(seed: int) -> None:
    # Any operations of three threads, each with those of its own one after another: what is lost
    # inside their union is counted once, and none has more than its length.
    rng = np.random.default_rng(seed)
    operations: list[Operation] = []
    for _ in range(3):
        edges = np.sort(rng.choice(np.arange(1, END_S), 6, replace=False)).tolist()
        operations += [(edges[at], edges[at + 1], OTHER) for at in (0, 2, 4)]
    operations.sort(key=lambda operation: operation[:2])
    pieces = [
        (start, start + 1, float(rng.choice([0.0, 0.25, 0.5, 1.0])))
        for start in range(END_S)
        if any(low <= start < high for low, high, _ in operations)
    ]
    shares = blocked_s(operations, *pieces)
    by_end = sorted(operations, key=lambda operation: operation[END])
    assert sum(shares) == pytest.approx(sum(piece[2] for piece in pieces))
    for share, (start, end, _) in zip(shares, by_end):
        assert 0 <= share <= end - start


def test_issue_and_wait_of_an_operation_match_across_threads() -> None:
    issue = OTHER | layout.ISSUE << layout.FORM_SHIFT
    wait = layout.ALL_REDUCE | layout.WAIT << layout.FORM_SHIFT
    table = make_spans((10, 11, GROUP, 0, 0, issue), (40, 60, GROUP, 0, 0, wait))
    timeline = make_rank(END_S, make_process(100, spans={layout.COLLECTIVE: table}))
    spending = TimeSpent(("storage-local",), Kept())
    spending.add(timeline, Segment(0, ns(END_S), False), make_lost_segments(), {})
    result = spending.operations()
    assert result is not None
    assert ([block.rows for block in result.blocks], result.left_out) == ([1], {})
