"""Operations that are read block by block are those that are read at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from clusterprof.analysis.attribution.wait_for.blame import blame_waits
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.timeline.collectives import stream
from clusterprof.analysis.timeline.collectives.int_table import pack_table, unpack_table
from clusterprof.analysis.timeline.collectives.matching import ClockOffset, RankEntry
from clusterprof.analysis.timeline.collectives.rows import RankOperations, RankRowBuilder
from clusterprof.analysis.timeline.collectives.stream import (
    OperationBatch,
    OperationStream,
    join_batches,
)
from clusterprof.probe.layout import GRADIENTS
from tests.support.synthetic.jobs import CATEGORIES, MS, Fault, Job, World
from tests.support.synthetic.matching import CollectiveSpans, concat_spans, match_spans
from tests.support.synthetic.scenarios import LAYOUTS
from tests.support.synthetic.score import blame_job
from tests.support.synthetic.spans import make_spans

HOUR = 3600 * 10**9


class Kept:
    """A store that keeps what it is given and says where it is."""

    why_full = ""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def put(self, data: bytes) -> int:
        self.data.append(data)
        return len(self.data) - 1

    def get(self, place: int | bytes, length: int) -> bytes:
        assert isinstance(place, int) and len(self.data[place]) == length
        return self.data[place]


def streamed(job: Job, block_rows: int, most_rows: int, ahead_ns: Sequence[int] = ()) -> WaitTotals:
    """Blame a job whose ranks' rows come in blocks of some rows; clocks may be anywhere."""
    ops, store = job.ops, Kept()
    spans = make_spans(job, ops.arrive_ns, ops.leave_ns, ops.leave_ns)
    people = []
    for rank in range(job.ranks):
        mine = spans.take(np.flatnonzero(spans.rank == rank))
        mine = mine.take(np.argsort(mine.leave_ns, kind="stable"))
        rows = RankRowBuilder(store, block_rows)
        how = mine.operation | (mine.peer + 1) << 16
        off = ahead_ns[rank] if ahead_ns else 0
        table = (
            mine.arrive_ns + off,
            mine.leave_ns + off,
            mine.group,
            mine.sequence,
            mine.bytes,
            how,
            mine.blocked_ns,
        )
        spent = job.spent[mine.source].T
        rows.add(np.stack(table), spent, spent)
        result = rows.finish()
        if result is not None:
            people.append(RankEntry(rank, rank, 0, ClockOffset(), result))
    stream = OperationStream(people, {}, range(len(CATEGORIES)), store.get)
    books, carry = WaitTotals(job.ranks, CATEGORIES), None
    for part, come, go in stream.read_batches(most_rows):
        assert part.rank.size <= most_rows or part.process_group.size == 1
        blamed, carry = blame_waits(part, come, go, job.ranks, carry)
        books.add(part, blamed)
    assert stream.unmatched == {}
    return books


def check_same(result: WaitTotals, expected: WaitTotals) -> None:
    for name in ("victim_ns", "culprit_ns", "recoverable_ns", "last_arrivals", "late_peers"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), name)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("block_rows", [1, 3, 10, 2048])
@pytest.mark.parametrize("hours", [0, 5])
def test_block_size_leaves_streamed_blame_unchanged(
    layout: str, block_rows: int, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MIN_READ_AHEAD_ROWS", 2)
    job = LAYOUTS[layout](8, (Fault(5, 1),), (9 * MS,), 12, MS, 4)
    clocks = (np.random.default_rng(2).integers(-HOUR, HOUR, 8) * hours).tolist()
    check_same(streamed(job, block_rows, 7, clocks), blame_job(job))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Ranks that meet in random teams, some of which are met in rarely."""
    ranks = draw(st.integers(2, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    world = World(ranks)
    teams = [np.sort(random.permutation(ranks)[: random.integers(1, ranks + 1)]) for _ in range(4)]
    often = random.dirichlet(np.full(4, 0.5))
    for _ in range(draw(st.integers(1, 60))):
        for category in range(len(CATEGORIES)):
            world.spend(random.integers(1, 10**7, ranks), category)
        number = int(random.choice(4, p=often))
        world.meet(teams[number][None, :], np.array([number]), int(random.integers(1, 10**6)))
    return world.job()


@given(jobs(), st.integers(1, 9), st.lists(st.integers(-HOUR, HOUR), min_size=6, max_size=6))
def test_streamed_blame_equals_blame_in_memory(
    job: Job, block_rows: int, clocks: list[int]
) -> None:
    kept, stream.MIN_READ_AHEAD_ROWS = stream.MIN_READ_AHEAD_ROWS, 1
    try:
        check_same(streamed(job, block_rows, 5, clocks), blame_job(job))
    finally:
        stream.MIN_READ_AHEAD_ROWS = kept


@pytest.mark.parametrize("several", [False, True])
def test_buffered_rows_stay_bounded_for_a_leading_rank(several: bool) -> None:
    # Rank 0 works on its own for long, then with the others: their rows wait, not read on.
    world = World(3)
    for _ in range(4000):
        world.spend(MS)
        world.meet(np.array([[0]]), np.array([1]), 1000)
    for _ in range(300):
        world.spend(MS)
        world.meet(np.array([[0, 1, 2]]), np.array([2]), 1000)
        if several:
            world.meet(np.array([[1, 2]]), np.array([3]), 1000)
    job = world.job()
    most = 0
    settle = stream.settle_operations

    def watched(table: np.ndarray, *rest: object) -> object:
        nonlocal most
        most = max(most, table.shape[1])
        return settle(table, *rest)  # type: ignore[arg-type]

    stream.settle_operations, kept = watched, stream.settle_operations  # type: ignore[assignment]
    try:
        check_same(streamed(job, 32, 500), blame_job(job))
    finally:
        stream.settle_operations = kept
    assert most <= 3 * (stream.MIN_READ_AHEAD_ROWS + 3 * 32)


def test_excess_waiting_rows_are_settled_without_late_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The last rank's rows come behind 500 of its own; with 100 that may wait, it comes too late.
    monkeypatch.setattr(stream, "MIN_READ_AHEAD_ROWS", 10)
    monkeypatch.setattr(stream, "MAX_WAITING_ROWS", 100)
    monkeypatch.setattr(stream, "MAX_WAITING_BLOCKS", 0)
    world = World(2)
    for _ in range(500):
        world.spend(MS, who=[1])
        world.meet(np.array([[1]]), np.array([1]), 1000)
    for number in range(200):
        world.spend(MS)
        world.meet(np.array([[0, 1]]), np.array([2]), 1000)
        world.meet(np.array([[0]]), np.array([3 + number % 2]), 1000)
    ops = world.job().ops
    spans = make_spans(world.job(), ops.arrive_ns, ops.leave_ns, ops.leave_ns)
    matching = match_spans(spans, block_rows=150)
    late = matching.unmatched["too-late"]
    assert 0 < late < 200
    assert matching.operations.rank.size + late == ops.rank.size
    # Where it came too late the other is alone: not complete, and nobody is blamed.
    size = np.diff(matching.operations.first)
    together = (
        matching.operations.process_group == matching.operations.process_group[np.argmax(size)]
    )
    assert np.count_nonzero(together & (size == 1)) == late
    assert (matching.operations.complete == (size == 2))[together].all()


def whole(*spans: tuple[int, ...], block_rows: int = 3) -> tuple[RankOperations, Kept]:
    """Rows of spans (start, end, group, number, how)."""
    store = Kept()
    rows = RankRowBuilder(store, block_rows)
    for start, end, group, number, how in spans:
        table = np.array([[start], [end], [group], [number], [8], [how], [end - start]])
        rows.add(table, np.array([[start]]), np.array([[end]]))
    result = rows.finish()
    assert result is not None
    return result, store


def rows_of(result: RankOperations, store: Kept) -> list[list[int]]:
    tables = [unpack_table(store.get(block.location, block.length)) for block in result.blocks]
    return np.concatenate([table[:4] for table in tables], axis=1).T.tolist()


def test_issue_and_wait_are_joined_across_blocks() -> None:
    issue, wait = 1 << 8 | 1, 2 << 8 | 1
    whole_report, store = whole(
        (10, 11, 7, 0, issue),
        (12, 13, 7, 1, issue),
        (20, 30, 7, 2, 1),
        (31, 40, 7, 3, 1),
        (41, 60, 7, 1, wait),
        (61, 62, 7, 0, wait),
        (63, 64, 7, 9, wait),
        (70, 71, 7, 4, issue),
    )
    # arrive, stay, blocked, number; number 1 was waited for before number 0
    assert rows_of(whole_report, store) == [
        [20, 10, 10, 2],
        [31, 9, 9, 3],
        [12, 48, 19, 1],
        [10, 52, 1, 0],
    ]
    assert whole_report.left_out == {"issue-not-seen": 1, "wait-not-seen": 1}
    assert whole_report.counts.tolist() == [4]  # waiting late is no second life
    assert whole_report.lowest[:, 0].tolist() == [0, 0, np.iinfo(np.int64).max]


@pytest.mark.parametrize("block_rows", [1, 2, 3, 9])
def test_ddp_gradient_waits_end_the_operations_of_the_hook(block_rows: int) -> None:
    issue = 1 << 8 | 1
    operations = [
        (10, 11, 7, 0, issue),  # the next wait is not DDP's: nobody saw who waits for this one
        (12, 13, 7, 1, 1),
        (20, 21, 7, 2, issue),
        (22, 23, 7, 3, issue),
        (24, 40, 7, 4, GRADIENTS),
        (50, 51, 7, 5, issue),
        (52, 60, 7, 6, GRADIENTS),
    ]
    report, store = whole(*operations, block_rows=block_rows)
    assert report.left_out == {"wait-not-seen": 1}
    assert [row[3] for row in rows_of(report, store)] == [1, 4, 6]


def test_a_send_is_not_joined_with_a_receive() -> None:
    send, receive = 1 << 8 | 10 | 2 << 16, 2 << 8 | 11 | 2 << 16
    whole_report, _ = whole((10, 11, 7, 0, send), (12, 20, 7, 0, receive))
    assert whole_report.left_out == {"issue-not-seen": 1, "wait-not-seen": 1}


def test_restart_numbering_continues_across_blocks() -> None:
    numbers = [0, 1, 2, 3, 0, 1, 0, 1, 2]
    whole_report, _ = whole(
        *((10 * i, 10 * i + 5, 7, n, 1) for i, n in enumerate(numbers)), block_rows=2
    )
    assert whole_report.channels.tolist() == [[7, -1, 0, 0], [7, -1, 0, 1], [7, -1, 0, 2]]
    assert whole_report.counts.tolist() == [4, 2, 3]


@given(arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 40))))
def test_any_table_can_be_packed(table: np.ndarray) -> None:
    np.testing.assert_array_equal(unpack_table(pack_table(table)), table)


def test_table_differences_are_packed_in_minimal_width() -> None:
    steady = np.arange(1000) * 250_000_000
    jitter = steady + np.random.default_rng(0).integers(0, 30_000, 1000)
    assert len(pack_table(np.stack([steady, steady % 7 * 0]))) == 16 + 2 * 24
    assert len(pack_table(np.stack([steady, jitter]))) == 16 + 2 * 24 + 2 * 999


@pytest.mark.parametrize("begin", [0, 9_000, 1_000_000])
def test_sequence_skew_is_found_for_any_recording_start(begin: int) -> None:
    # All leave at the same times; rank 2 is one number behind.
    number = np.arange(begin, begin + 9_000)
    leave = np.cumsum(np.random.default_rng(1).integers(50, 500, 9_000)) * 1_000
    parts = []
    for rank, lag in ((0, 0), (1, 0), (2, -1)):
        flat = np.full(9_000, rank)
        parts.append(
            CollectiveSpans(
                flat,
                flat,
                flat * 0,
                leave - 20,
                leave,
                flat * 0 + 20,
                leave,
                flat * 0 + 77,
                number + lag,
                flat,
                flat * 0 + 1,
                flat * 0 - 1,
                np.arange(9_000),
            )
        )
    matching = match_spans(concat_spans(*parts))
    nameless = {} if begin else {"number-unknown": 1}  # number -1
    assert matching.unmatched == {"sequence-skew": 9_000 - len(nameless), **nameless}
    assert np.diff(matching.operations.first).tolist() == [2] * 9_000


def test_a_rank_with_unpaired_halves_has_no_operations() -> None:
    whole_report, store = whole((10, 20, 7, 0, 2 << 8 | 1), (30, 40, 7, 1, 2 << 8 | 1))
    stream = OperationStream([RankEntry(0, 0, 0, ClockOffset(), whole_report)], {}, (0,), store.get)
    assert list(stream.read_batches(100)) == []
    assert stream.unmatched == {"issue-not-seen": 2}


def test_time_inside_an_operation_is_counted_at_leave() -> None:
    """Two ranks meet five times; the second category grows inside, the first only between."""
    numbers, store, people = np.arange(5), Kept(), []
    for rank in range(2):
        zeros = np.zeros(5, np.int64)
        start = 100 * numbers + 10 * rank
        spans = (start, 100 * numbers + 50, zeros + 9, numbers, zeros, zeros + 1, zeros)
        at_arrive = np.stack([7 * numbers + rank, 3 * numbers])
        builder = RankRowBuilder(store, 2)
        builder.add(np.stack(spans), at_arrive, at_arrive + np.array([[0], [2]]))
        result = builder.finish()
        assert result is not None
        people.append(RankEntry(rank, rank, 0, ClockOffset(), result))
    batches = list(OperationStream(people, {}, (0, 1), store.get).read_batches(4))
    joined = stream.join_batches(batches)
    assert len(batches) > 1 and joined.operations.first.tolist() == [0, 2, 4, 6, 8, 10]
    assert joined.operations.rank.tolist() == [0, 1] * 5
    expected = [[7 * n + rank, 3 * n] for n in range(5) for rank in range(2)]
    assert joined.at_arrive.tolist() == expected
    assert joined.at_leave.tolist() == [[work, other + 2] for work, other in expected]


def test_all_to_all_sizes_of_all_members_are_kept() -> None:
    kinds, ranks = np.array([1, 8, 1]), 2  # the second of three operations is an all-to-all
    zeros = np.zeros(3, np.int64)
    arrive = np.arange(3) * 100
    spans = [
        CollectiveSpans(
            *(zeros + rank, zeros + rank, zeros, arrive, arrive + 50, zeros + 50, arrive + 50),
            *(zeros + 7, np.arange(3), 10 * np.arange(3) + rank, kinds, zeros - 1, zeros),
        )
        for rank in range(ranks)
    ]
    ops = match_spans(concat_spans(*spans)).operations
    assert ops.row_bytes.tolist() == [0, 1, 10, 11, 20, 21]
    assert ops.take_range(1, 2).row_bytes.tolist() == [10, 11]
    plain = match_spans(concat_spans(*(part.take(kinds == 1) for part in spans))).operations
    assert plain.row_bytes.tolist() == []
    batches = [
        OperationBatch(part, *np.zeros((2, part.rank.size, 1), np.int64))
        for part in (plain, ops.take_range(1, 2))
    ]
    assert join_batches(batches).operations.row_bytes.tolist() == [-1, -1, -1, -1, 10, 11]
