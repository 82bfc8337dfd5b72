"""Operations of one rank in order of ending: joined, numbered by channel, in blocks.

Blocks hold the same rows in whatever order the spans arrived; they go to a store as
bytes.

Number message channels.

A *channel* has its own sequence numbers: a process group, or the messages from one rank
to another within a group. When a rank restarts its counting, a new incarnation, and so
a new channel, begins. Threads that start operations at the same time can be seen in the
wrong order, which is no restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.collectives.cuts import CutSampler
from clusterprof.analysis.timeline.collectives.int_table import (
    PackedTable,
    keep_packed,
    pack_table,
    read_table_layout,
    unpack_tables,
)
from clusterprof.analysis.timeline.collectives.leave_time_samples import (
    NO_LEAVES,
    LeaveTimeSampler,
    LeaveTimeSamples,
)
from clusterprof.analysis.timeline.collectives.operations import (
    ON_DEVICE,
    RECV,
    SEND,
    SpentRows,
    combine_labels,
    concat_spent,
)
from clusterprof.analysis.timeline.intervals import allocate_by_wait_age
from clusterprof.analysis.timeline.model import Int
from clusterprof.probe import layout
from clusterprof.probe.layout import (
    BARRIER,
    BLOCKING,
    FORM_MASK,
    FORM_SHIFT,
    GRADIENTS,
    ISSUE,
    OPERATION_MASK,
    WAIT,
)

_MAX_DISORDER = 64
"""Numbers by which operations of several threads can be out of order."""


def _is_restart(before: Int, number: Int) -> NDArray[np.bool_]:
    """Return whether a rank counts from the beginning again: bool[n].

    before, number: int64[n], numbers of operations that follow each other.
    """
    fallen = before - number
    result: NDArray[np.bool_] = (fallen >= _MAX_DISORDER) | ((fallen > 0) & (number == 0))
    return result


def _find_wait_after(spans: Int, issue: NDArray[np.bool_]) -> tuple[Int, NDArray[np.bool_]]:
    """Find the operation after each row that is no issue: its kind, int64[n], and whether known.

    spans: int64[7, n] in order of ending. issue: bool[n]. Known: bool[n].
    """
    (other_rows,) = (~issue).nonzero()
    row = np.searchsorted(other_rows, np.arange(issue.size))
    kind = np.append(spans[CODE][other_rows] & OPERATION_MASK, -1)[row]
    return kind, np.asarray(row < other_rows.size, np.bool_)


class ChannelNumbering:
    """The channels of one rank, and the progress of each."""

    def __init__(self) -> None:
        self.channels: list[tuple[int, int, int, int]] = []
        """Group; peer, -1 for none; kind (send, receive, or 0 for all others); incarnation."""
        self._channel_of: dict[tuple[int, int], int] = {}  # (line, life) -> channel
        # A line is a channel with all its incarnations. By its label, ascending:
        no_lines = np.zeros(0, np.int64)
        self._label, self._of_label = no_lines, no_lines
        # By line: its present incarnation, and the progress within it.
        self._life, self._channel = no_lines, no_lines
        self._number, self._arrive_ns = no_lines, no_lines

    def assign(self, group: Int, peer: Int, direction: Int, arrive_ns: Int, number: Int) -> Int:
        """Return the channel of each operation: int64[n].

        Operations are in the order of their ends.
        """
        line = self._find_lines(group, peer, direction)
        order = np.argsort(arrive_ns, kind="stable")
        # Two-byte keys are sorted by counting.
        short = line[order].astype(np.int16 if self._life.size < 1 << 15 else np.int64)
        order = order[np.argsort(short, kind="stable")]
        sorted_line, sorted_number, sorted_arrive_ns = line[order], number[order], arrive_ns[order]
        opens = np.ones(sorted_line.size, np.bool_)
        opens[1:] = sorted_line[1:] != sorted_line[:-1]
        restarts = np.zeros(sorted_line.size, np.bool_)
        restarts[1:] = ~opens[1:] & _is_restart(sorted_number[:-1], sorted_number[1:])
        # The very first two operations can be out of order too.
        first_two = opens[:-1] & (self._number[sorted_line[:-1]] < 0) & (sorted_number[:-1] == 1)
        restarts[1:] &= ~first_two
        heads = np.flatnonzero(opens)
        line_heads = sorted_line[heads]
        # An operation that began before the latest one is merely late, not a restart.
        restarts[heads] = _is_restart(self._number[line_heads], sorted_number[heads]) & (
            sorted_arrive_ns[heads] > self._arrive_ns[line_heads]
        )
        tails = np.append(heads[1:], sorted_line.size) - 1
        later = sorted_arrive_ns[tails] > self._arrive_ns[line_heads]
        self._number[line_heads] = np.where(later, sorted_number[tails], self._number[line_heads])
        self._arrive_ns[line_heads] = np.maximum(
            sorted_arrive_ns[tails], self._arrive_ns[line_heads]
        )
        if not restarts.any():
            return self._channel[line]
        restart_count = np.cumsum(restarts)
        before: Int = np.repeat(
            restart_count[heads] - restarts[heads], np.diff([*heads, sorted_line.size])
        )
        incarnation = self._life[sorted_line] + restart_count - before
        self._life[line_heads] = incarnation[tails]
        out = np.empty(sorted_line.size, np.int64)
        for line_number, line_incarnation in sorted(
            set(zip(sorted_line.tolist(), incarnation.tolist()))
        ):
            out[(sorted_line == line_number) & (incarnation == line_incarnation)] = (
                self._get_incarnation_channel(line_number, line_incarnation)
            )
        self._channel[line_heads] = out[tails]
        channel = np.empty(sorted_line.size, np.int64)
        channel[order] = out
        return channel

    def _find_lines(self, group: Int, peer: Int, direction: Int) -> Int:
        label = combine_labels(group, peer, direction)
        index = np.minimum(np.searchsorted(self._label, label), max(self._label.size - 1, 0))
        if not self._label.size or not (self._label[index] == label).all():
            labels, first = np.unique(label, return_index=True)
            rows = np.sort(first[~np.isin(labels, self._label)])
            self._add_lines(*(column[rows] for column in (label, group, peer, direction)))
            index = np.searchsorted(self._label, label)
        return self._of_label[index]

    def _add_lines(self, label: Int, group: Int, peer: Int, direction: Int) -> None:
        count = self._life.size
        all_labels = np.concatenate([self._label, label])
        all_lines = np.concatenate([self._of_label, count + np.arange(label.size)])
        order = np.argsort(all_labels)
        self._label, self._of_label = all_labels[order], all_lines[order]
        channels = len(self.channels) + np.arange(label.size)
        zeros = np.zeros(label.size, np.int64)
        self._life = np.concatenate([self._life, zeros])
        self._number = np.concatenate([self._number, zeros - 1])
        self._arrive_ns = np.concatenate([self._arrive_ns, zeros + np.iinfo(np.int64).min])
        self._channel = np.concatenate([self._channel, channels])
        for number, key in enumerate(zip(group.tolist(), peer.tolist(), direction.tolist())):
            self._channel_of[count + number, 0] = len(self.channels)
            self.channels.append((*key, 0))

    def _get_incarnation_channel(self, line: int, incarnation: int) -> int:
        if (line, incarnation) not in self._channel_of:
            self._channel_of[line, incarnation] = len(self.channels)
            self.channels.append((*self.channels[self._channel_of[line, 0]][:3], incarnation))
        return self._channel_of[line, incarnation]


BLOCK_ROWS, MIN_BLOCK_ROWS = 2048, 128
"""Rows of a block, and of one in a very large job."""
MAX_ROWS_AT_ONCE = 1_000_000
"""The blame reads a block of each rank at once: with more ranks blocks are smaller."""
MAX_PENDING_ISSUES = 4096
"""Limit of issued asynchronous operations of a rank whose end has not been seen."""
NO_NUMBER = np.iinfo(np.int64).max
_MAX_NUMBER = 1 << 62
"""Greatest number of an operation; those of real jobs stay below 2**40, and `NO_NUMBER` is none."""
SPAN_ROWS = 7
START, END, GROUP, NUMBER, SIZE, CODE, BLOCKED_TIME = range(SPAN_ROWS)
"""Rows of a table of spans: the fields of a span, and the lost time inside it."""
HEAD_ROWS = 7
ARRIVE, DURATION, BLOCKED, SEQUENCE, BYTES, KIND, CHANNEL = range(HEAD_ROWS)
"""Rows of a block; below them the time spent at arrival, then the additional time spent at
leave.
"""
SAMPLE_EVERY, SAMPLE_RUN = 4096, 32


class Store(Protocol):
    """Storage for blocks."""

    why_full: str
    """Reason why nothing more is stored, once `put` has returned None."""

    def put(self, data: bytes) -> int | bytes | None:
        """Return the location of the data, or the data itself; None if there is no room."""


@dataclass(frozen=True, slots=True)
class RankOperationBlock:
    """Some rows of one rank, in the order in which it left them."""

    rows: int
    location: int | bytes
    length: int
    arrive_categories: Int
    """Categories in which time had been spent at arrival; the others are 0."""
    leave_categories: Int
    """Categories in which more time had been spent at leave than at arrival."""


@dataclass(frozen=True, slots=True)
class RankOperations:
    """The operations of one rank and the locations of their blocks. Small."""

    channels: Int
    """int64[c, 4]: group; peer, -1 for none; kind (send, receive, or 0 for all others);
    incarnation.
    """
    counts: Int
    """int64[c]: rows of each channel."""
    blocks: tuple[RankOperationBlock, ...]
    lowest: Int
    """int64[blocks + 1, c]: lowest number of a channel from this block on; `NO_NUMBER` = none."""
    samples: PackedTable
    """int64[3, m]: channel, number and leave time of some operations, selected alike on all
    ranks.
    """
    left_out: Mapping[str, int]
    """Reason (`timeline.collectives`) -> spans."""
    leaves: LeaveTimeSamples
    """A sample of the operations in which the rank blocked, for aligning clocks."""
    barriers: LeaveTimeSamples
    """The corresponding sample of barriers only: in these the host itself waits, not only
    the device. A result has only one of both (`select_clock_samples`).
    """
    why_lost: str = ""
    """Reason why blocks are missing although there were operations; "" if all are there."""
    cuts: Int = field(default_factory=lambda: np.zeros((2, 0), np.int64))
    """int64[2, m]: channel and number of operations after which the run may be cut."""

    def select_clock_samples(self, host_waits: bool | None) -> RankOperations:
        """Return the operations with only the sample of leaves that aligns clocks.

        host_waits: the host waits in every operation, so `leaves` is kept; otherwise it waits only
        in barriers, so `barriers` is kept. None: these operations align no clocks.
        """
        return replace(
            self,
            leaves=self.leaves if host_waits else NO_LEAVES,
            barriers=self.barriers if host_waits is False else NO_LEAVES,
        )


def list_categories(categories: Iterable[Int]) -> list[int]:
    """List the distinct categories of many blocks, ascending; int64[k] each, most of them equal."""
    distinct = {rows.tobytes() for rows in categories}
    return sorted({int(row) for data in distinct for row in np.frombuffer(data, np.int64)})


def select_sampled(number: Int) -> NDArray[np.bool_]:
    """Select the first 32 of every 4,096 numbers and after each power of two: bool[n].

    number: int64[n], sequence numbers of operations.
    """
    top = np.left_shift(1, np.frexp(np.maximum(number, 1).astype(np.float64))[1] - 1)
    return (number % SAMPLE_EVERY < SAMPLE_RUN) | (number - top < SAMPLE_RUN)


def choose_block_rows(ranks: int) -> int:
    """Choose how many rows a block has in a job of so many ranks."""
    return min(max(MAX_ROWS_AT_ONCE // max(ranks, 1), MIN_BLOCK_ROWS), BLOCK_ROWS)


class RankRowBuilder:
    """Builds blocks from the collective spans of one rank, in the order in which they ended."""

    def __init__(self, store: Store, block_rows: int = BLOCK_ROWS, work: int | None = None) -> None:
        """work: the category that counts time that was not lost; None = none does."""
        self._store, self._size, self._work = store, block_rows, work
        self._waiting: list[SpentRows] = []
        self._count = 0
        self._pending: SpentRows | None = None
        self._followed = np.zeros(0, np.bool_)
        """Whether another operation than an issue has ended after each pending row."""
        self._channels = ChannelNumbering()
        self._blocks: list[RankOperationBlock] = []
        self._lowest: list[Int] = []
        self._totals: list[Int] = []
        self._samples: list[Int] = []
        self._left_out: dict[str, int] = {}
        self._leaves, self._barriers = LeaveTimeSampler(), LeaveTimeSampler((BARRIER,))
        self._cuts = CutSampler()
        self._why_lost = ""
        self._categories: dict[bytes, Int] = {}

    def add(self, spans: Int, at_arrive: Int, at_leave: Int, categories: Int | None = None) -> None:
        """Add spans and the time spent so far at their start and end.

        spans: int64[7, n]. at_arrive, at_leave: int64[k, n], ns. categories: int64[k], ascending,
        the category of each of these rows; None = all categories in order.
        """
        if categories is None:
            categories = np.arange(at_arrive.shape[0])
        self._waiting.append(SpentRows(spans, at_arrive, at_leave, categories))
        self._count += spans.shape[1]
        if self._count < self._size:
            return
        rows = concat_spent(self._waiting)
        begin = 0
        while self._count - begin >= self._size:
            self._take(rows.select(slice(begin, begin + self._size)))
            begin += self._size
        spans, at_arrive, at_leave, categories = rows.select(slice(begin, None))
        self._waiting = [SpentRows(spans.copy(), at_arrive.copy(), at_leave.copy(), categories)]
        self._count -= begin

    def finish(self) -> RankOperations | None:
        """Return the operations of the rank; None if there were none."""
        if self._count:
            self._take(concat_spent(self._waiting))
        self._waiting, self._count = [], 0
        if self._pending is not None:
            self._leave_out("wait-not-seen", self._pending.spans.shape[1])
        if not self._channels.channels and not self._left_out:
            return None
        channels_seen = len(self._channels.channels)
        lowest = np.full((len(self._blocks) + 1, channels_seen), NO_NUMBER)
        counts = np.zeros(channels_seen, np.int64)
        for number, (block_lowest, total) in enumerate(zip(self._lowest, self._totals)):
            lowest[number, : block_lowest.size] = block_lowest
            counts[: total.size] += total
        lowest = np.minimum.accumulate(lowest[::-1])[::-1].copy()
        samples = np.concatenate([np.zeros((3, 0), np.int64), *self._samples], axis=1)
        channels = np.array(self._channels.channels, np.int64).reshape(-1, 4)
        blocks = tuple(self._blocks)
        if self._why_lost:
            blocks, lowest = (), lowest[-1:]
        return RankOperations(
            channels,
            counts,
            blocks,
            lowest,
            keep_packed(samples),
            dict(self._left_out),
            self._leaves.leaves(),
            self._barriers.leaves(),
            self._why_lost,
            self._cuts.cuts(),
        )

    def _leave_out(self, reason: str, count: int) -> None:
        if count:
            self._left_out[reason] = self._left_out.get(reason, 0) + count

    def _take(self, rows: SpentRows) -> None:
        if self._why_lost:
            return
        if self._pending is not None or (rows.spans[CODE] >> FORM_SHIFT & FORM_MASK).any():
            rows = self._join_halves(rows)
        spans, at_arrive, at_leave, categories = rows
        duration = spans[END] - spans[START]
        backwards, unnumbered = (
            (spans[BLOCKED_TIME] < 0) | (spans[BLOCKED_TIME] > duration),
            (spans[NUMBER] < 0) | (spans[NUMBER] > _MAX_NUMBER),
        )
        if backwards.any() or unnumbered.any():
            self._leave_out("backwards", int(np.count_nonzero(backwards)))
            self._leave_out("number-unknown", int(np.count_nonzero(unnumbered & ~backwards)))
            rows = rows.select(~(backwards | unnumbered))
        unwaited = _find_unwaited_gradients(rows.spans)
        if unwaited.any():
            rows = rows.select(~unwaited)
        spans, at_arrive, at_leave, _ = rows
        if not spans.shape[1]:
            return
        kind = spans[CODE] & 255
        direction = np.where((kind == SEND) | (kind == RECV), kind, 0)
        peer = np.where(direction > 0, (spans[CODE] >> 16 & 0xFFFFFFFF) - 1, -1)
        channel = self._channels.assign(spans[GROUP], peer, direction, spans[START], spans[NUMBER])
        self._record_totals(channel, spans)
        work = np.flatnonzero(categories == self._work)
        spans, at_arrive, at_leave = _delay_hidden_arrivals(spans, at_arrive, at_leave, work)
        self._cuts.add(channel, spans[NUMBER], spans[START], spans[END], direction == 0)
        duration = spans[END] - spans[START]
        arrived = at_arrive.any(axis=1)
        (used,) = (arrived | at_leave.any(axis=1)).nonzero()
        increase = at_leave[used] - at_arrive[used]
        grown = increase.any(axis=1)
        arrive_rows, leave_rows = arrived.nonzero()[0], used[grown]
        arrive_categories, leave_categories = categories[arrive_rows], categories[leave_rows]
        code = spans[CODE] & (255 | ON_DEVICE)
        head = (spans[START], duration, spans[BLOCKED_TIME], spans[NUMBER], spans[SIZE], code)
        data = pack_table(
            np.concatenate([np.stack([*head, channel]), at_arrive[arrive_rows], increase[grown]])
        )
        location = self._store.put(data)
        if location is None:
            self._why_lost = self._store.why_full
            self._blocks = []
            return
        share = self._categories.setdefault  # equal arrays are one: there are many blocks
        used = [share(rows.tobytes(), rows) for rows in (arrive_categories, leave_categories)]
        self._blocks.append(RankOperationBlock(spans.shape[1], location, len(data), *used))

    def _join_halves(self, rows: SpentRows) -> SpentRows:
        """Join issues and waits of asynchronous operations, also with pending issues."""
        if self._pending is not None:
            rows = concat_spent([self._pending, rows])
        spans, at_arrive, at_leave, categories = rows
        begin, end = match_halves(spans)
        unmatched = np.ones(spans.shape[1], np.bool_)
        unmatched[begin] = unmatched[end] = False
        issue = (spans[CODE] >> FORM_SHIFT & FORM_MASK) == ISSUE
        self._leave_out("issue-not-seen", int(np.count_nonzero(unmatched & ~issue)))
        # What a communication hook of DDP begins DDP itself waits for, and that wait has a span.
        kind, has_next = _find_wait_after(spans, issue)
        followed = np.append(self._followed, np.zeros(issue.size - self._followed.size, np.bool_))
        hooked = ~followed & (kind == GRADIENTS)
        waiting = np.flatnonzero(unmatched & issue & ~hooked)
        self._leave_out("wait-not-seen", waiting.size - waiting[-MAX_PENDING_ISSUES:].size)
        waiting = waiting[-MAX_PENDING_ISSUES:]
        self._pending = rows.select(waiting) if waiting.size else None
        self._followed = (followed | has_next)[waiting]
        out = spans[:, end]
        out[[START, SIZE]] = spans[:, begin][[START, SIZE]]
        return SpentRows(out, at_arrive[:, begin], at_leave[:, end], categories)

    def _record_totals(self, channel: Int, spans: Int) -> None:
        """Record the facts of a block that must be known before any block is read."""
        lowest = np.full(len(self._channels.channels), NO_NUMBER)
        np.minimum.at(lowest, channel, spans[NUMBER])
        self._lowest.append(lowest)
        self._totals.append(np.bincount(channel, minlength=lowest.size))
        kind = spans[CODE] & 255
        blocking_kind = np.where(spans[CODE] >> FORM_SHIFT & FORM_MASK, 0, kind)  # 0 is no kind
        for sample in (self._leaves, self._barriers):
            sample.add(blocking_kind, spans[GROUP], spans[NUMBER], spans[START], spans[END])
        sampled_rows = np.flatnonzero(
            select_sampled(spans[NUMBER]) & (kind != SEND) & (kind != RECV)
        )
        if sampled_rows.size:
            sampled_values = (
                channel[sampled_rows],
                spans[NUMBER, sampled_rows],
                spans[END, sampled_rows],
            )
            self._samples.append(np.stack(sampled_values))


_MIN_HOST_WAIT_NS = 1_000_000
"""A host that leaves operations sooner than this, in the median, does not wait in them."""


def _find_unwaited_gradients(spans: Int) -> NDArray[np.bool_]:
    """Find the waits of DDP for its gradients in which no rank waits for another: bool[n].

    A hook can reduce gradients in a thread of its own while the main thread goes on: the ranks meet
    in the operations of that thread. spans: int64[7, n].
    """
    by_other = (spans[CODE] & layout.OTHER_THREAD) != 0
    gradients = ~by_other & ((spans[CODE] & layout.OPERATION_MASK) == layout.GRADIENTS)
    gradients &= (spans[CODE] & ON_DEVICE) == 0
    count = np.count_nonzero(gradients)
    if not count or np.count_nonzero(by_other) < count:
        return np.zeros(gradients.size, np.bool_)
    duration_ns = (spans[END] - spans[START])[gradients]
    return gradients & (np.median(duration_ns) < _MIN_HOST_WAIT_NS)


_SHARED_ROWS = 64
"""Operations that share their lost time: device samples are coarser than operations."""


def _delay_hidden_arrivals(
    spans: Int, at_arrive: Int, at_leave: Int, work: Int
) -> tuple[Int, Int, Int]:
    """Delay arrivals at operations behind which the device still worked, by the hidden time.

    These are the operations of other threads, and DDP's wait for its gradients. For the others the
    rank arrived when its device ran out of work. If all ranks are in an operation and one of them
    still computes, the others wait for that rank, not for the transfer. A nanosecond stays hidden,
    which marks the operation as overlapped.

    The device is assumed to have worked equally long in each of some operations, as with waits for
    data (`analysis.attribution.rank.idle_time.allocation`).

        rank 0   |====|-- arrived -- 80 idle ---|
        rank 1      |=== 60 hidden ===| 20 idle |    rank 0 waited 60 for rank 1; transfer 20

    spans: int64[7, n]; their lost time keeps its sum. at_arrive, at_leave: int64[K, n], ns. work:
    number of their row of time that was not lost, which moves the other way; int64[1] or empty.
    """
    by_other = (spans[CODE] & layout.OTHER_THREAD) != 0
    gradients = ~by_other & ((spans[CODE] & layout.OPERATION_MASK) == layout.GRADIENTS)
    gradients &= (spans[CODE] & ON_DEVICE) == 0
    if not (by_other.any() or gradients.any()):
        return spans, at_arrive, at_leave
    spans, at_arrive, at_leave = spans.copy(), at_arrive.copy(), at_leave.copy()
    for rows in (np.flatnonzero(by_other), np.flatnonzero(gradients)):
        duration = spans[END, rows] - spans[START, rows]
        blocked = spans[BLOCKED_TIME, rows]
        if rows.size:
            shared = allocate_by_wait_age(rows // _SHARED_ROWS, duration, duration, blocked)
            if work.size:
                moved_ns = np.append(0, np.cumsum(shared - blocked))
                for side, t_ns in ((at_arrive, spans[START]), (at_leave, spans[END])):
                    side[work] -= moved_ns[np.searchsorted(spans[END, rows], t_ns, side="right")]
            blocked = shared
        delayed_ns = duration - blocked - 1
        spans[BLOCKED_TIME, rows] = blocked
        spans[START, rows] += np.maximum(delayed_ns, 0)
        hidden = rows[delayed_ns > 0]
        at_arrive[:, hidden] = at_leave[:, hidden]
    return spans, at_arrive, at_leave


def match_halves(spans: Int) -> tuple[Int, Int]:
    """Match the first and the last span of each complete operation.

    Returns int64[m] rows each, in order of the ends. For blocking operations both are the
    same span. spans: int64[7, n].
    """
    form = spans[CODE] >> FORM_SHIFT & FORM_MASK
    operation = spans[CODE] & ~(FORM_MASK << FORM_SHIFT)
    order = np.lexsort((spans[END], operation, spans[NUMBER], spans[GROUP]))
    key = spans[[GROUP, NUMBER]][:, order]
    operation = operation[order]
    equal = (key[:, 1:] == key[:, :-1]).all(axis=0) & (operation[1:] == operation[:-1])
    kind = form[order]
    pair = np.flatnonzero(equal & (kind[:-1] == ISSUE) & (kind[1:] == WAIT))
    plain = np.flatnonzero(form == BLOCKING)
    begin, end = (np.append(plain, rows) for rows in (order[pair], order[pair + 1]))
    by_end = np.argsort(end, kind="stable")
    return begin[by_end], end[by_end]


_MAX_BLOCKS_AT_ONCE = 64
"""Blocks that are unpacked together: their tables stay in the CPU caches."""


def read_block(data: bytes, block: RankOperationBlock, slot: Int, out: Int) -> None:
    """Read one block into a table: its rows, time spent at arrival and at leave.

    out: int64[7 + 2 * slots, n]. slot: int64[categories], the row offset of each category.
    """
    read_blocks([(data, block)], slot, np.arange((len(out) - HEAD_ROWS) // 2), [out])


def read_blocks(
    blocks: Sequence[tuple[bytes, RankOperationBlock]], slot: Int, grown: Int, outs: Sequence[Int]
) -> None:
    """Read blocks of many ranks into tables: rows, time spent at arrival, then at leave.

    slot: int64[categories], the row offset of each category. grown: int64[m], ascending, the slots
    in which ranks spend time in operations: of the others the time at leave is that at arrival.
    outs: int64[7 + slots + m, n], one for each block.
    """
    by_layout: dict[tuple[bytes, ...], list[int]] = {}
    for number, (data, block) in enumerate(blocks):
        categories = block.arrive_categories.tobytes(), block.leave_categories.tobytes()
        by_layout.setdefault((read_table_layout(data), *categories), []).append(number)
    for numbers in by_layout.values():
        for begin in range(0, len(numbers), _MAX_BLOCKS_AT_ONCE):
            chosen = numbers[begin : begin + _MAX_BLOCKS_AT_ONCE]
            tables = unpack_tables([blocks[number][0] for number in chosen])
            block, height = blocks[chosen[0]][1], len(outs[chosen[0]])
            spread = _spread_categories(tables, block, slot, grown, height)
            for number, table in zip(chosen, spread):
                outs[number][:] = table


def _spread_categories(
    tables: Int, block: RankOperationBlock, slot: Int, grown: Int, height: int
) -> Int:
    """Return the rows of blocks, int64[blocks, height, n], from int64[blocks, r, n] as packed."""
    out = np.zeros((len(tables), height, tables.shape[2]), np.int64)
    out[:, :HEAD_ROWS] = tables[:, :HEAD_ROWS]
    for index, row in enumerate(slot[block.arrive_categories].tolist(), HEAD_ROWS):
        out[:, HEAD_ROWS + row] = tables[:, index]
    leave = height - grown.size
    for index, row in enumerate(grown.tolist(), leave):
        out[:, index] = out[:, HEAD_ROWS + row]
    increases = np.searchsorted(grown, slot[block.leave_categories])
    for index, row in enumerate(increases.tolist(), HEAD_ROWS + block.arrive_categories.size):
        out[:, leave + row] += tables[:, index]
    return out
