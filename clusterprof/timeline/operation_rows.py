"""The operations of one rank as they end: halves put together, numbered by channel, cut in blocks.

Blocks hold the same rows however the spans arrived; they go to a store as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe.layout import BARRIER, BLOCKING, FORM_MASK, FORM_SHIFT, ISSUE, WAIT
from clusterprof.timeline.device_waits import ON_DEVICE
from clusterprof.timeline.leaves import Leaves, LeaveSample
from clusterprof.timeline.model import Int
from clusterprof.timeline.operation_channels import Channels
from clusterprof.timeline.operations import RECV, SEND
from clusterprof.timeline.packing import packed, unpacked

BLOCK_ROWS = 2048
PENDING_MOST = 4096
"""Issues of asynchronous operations of a rank that may wait for their end to be seen."""
NEVER = np.iinfo(np.int64).max
SPAN_ROWS = 7
START, END, GROUP, NUMBER, SIZE, HOW, STOOD = range(SPAN_ROWS)
"""Rows of a table of spans: a span's fields, and the lost time inside."""
HEAD_ROWS = 7
ARRIVE, STAY, BLOCKED, SEQUENCE, BYTES, KIND, CHANNEL = range(HEAD_ROWS)
"""Rows of a block; then what had been spent on arriving, and how much more on leaving."""
SAMPLE_EVERY, SAMPLE_RUN = 4096, 32


class Store(Protocol):
    """Where blocks go."""

    why_full: str
    """Why nothing more is taken, once `put` has returned None."""

    def put(self, data: bytes) -> int | bytes | None:
        """Return where the data is, or the data itself; None when there is no room."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of one rank, in the order in which it left them."""

    rows: int
    place: int | bytes
    length: int
    come: Int
    """Categories of which something had been spent; the others are 0."""
    go: Int
    """Those of which more had been spent on leaving than on arriving."""


@dataclass(frozen=True, slots=True)
class RankOperations:
    """The operations of one rank: what they are, and where their blocks are. Small."""

    channels: Int
    """int64[c, 4]: group; peer, -1 for none; kind (send, receive, or 0 for all others); life."""
    counts: Int
    """Rows of each channel."""
    blocks: tuple[Block, ...]
    lowest: Int
    """int64[blocks + 1, c]: the lowest number of a channel in this block or after; `NEVER`."""
    samples: Int
    """int64[3, m]: channel, number and leaving time of some operations, alike on all ranks."""
    left_out: Mapping[str, int]
    """Reason (`timeline.collectives`) -> spans."""
    leaves: Leaves
    """A choice of the operations in which the rank stood, to align clocks by."""
    barriers: Leaves
    """The same of barriers alone: in these the host waits, whatever devices do."""
    why_lost: str = ""
    """Why there are no blocks although there were operations; "" when there are all."""


def sampled(number: Int) -> NDArray[np.bool_]:
    """True for the first of every 4,096 numbers, and the first after each power of two."""
    top = np.left_shift(1, np.frexp(np.maximum(number, 1).astype(np.float64))[1] - 1)
    return (number % SAMPLE_EVERY < SAMPLE_RUN) | (number - top < SAMPLE_RUN)


class RankRows:
    """Takes the collective spans of one rank in the order in which they ended."""

    def __init__(self, store: Store, block_rows: int = BLOCK_ROWS) -> None:
        self._store, self._size = store, block_rows
        self._waiting: list[tuple[Int, Int, Int]] = []
        self._count = 0
        self._pending: tuple[Int, Int, Int] | None = None
        self._channels = Channels()
        self._blocks: list[Block] = []
        self._lowest: list[Int] = []
        self._totals: list[Int] = []
        self._samples: list[Int] = []
        self._left_out: dict[str, int] = {}
        self._leaves, self._barriers = LeaveSample(), LeaveSample((BARRIER,))
        self._why_lost = ""

    def add(self, spans: Int, come: Int, go: Int) -> None:
        """Take int64[7, n] spans and int64[K, n] what had been spent at their start and end."""
        self._waiting.append((spans, come, go))
        self._count += spans.shape[1]
        if self._count < self._size:
            return
        tables = tuple(np.concatenate(parts, axis=1) for parts in zip(*self._waiting))
        begin = 0
        while self._count - begin >= self._size:
            self._take(*(table[:, begin : begin + self._size] for table in tables))
            begin += self._size
        self._waiting = [tuple(table[:, begin:].copy() for table in tables)]  # type: ignore[list-item]
        self._count -= begin

    def finish(self) -> RankOperations | None:
        """Return what there is; None when there were no operations."""
        if self._count:
            self._take(*(np.concatenate(parts, axis=1) for parts in zip(*self._waiting)))
        self._waiting, self._count = [], 0
        if self._pending is not None:
            self._leave_out("wait-not-seen", self._pending[0].shape[1])
        if not self._channels.found and not self._left_out:
            return None
        c = len(self._channels.found)
        lowest = np.full((len(self._blocks) + 1, c), NEVER)
        counts = np.zeros(c, np.int64)
        for number, (one, total) in enumerate(zip(self._lowest, self._totals)):
            lowest[number, : one.size] = one
            counts[: total.size] += total
        lowest = np.minimum.accumulate(lowest[::-1])[::-1].copy()
        samples = np.concatenate([np.zeros((3, 0), np.int64), *self._samples], axis=1)
        channels = np.array(self._channels.found, np.int64).reshape(-1, 4)
        blocks = tuple(self._blocks)
        if self._why_lost:
            blocks, lowest = (), lowest[-1:]
        return RankOperations(
            channels, counts, blocks, lowest, samples, dict(self._left_out),
            self._leaves.leaves(), self._barriers.leaves(), self._why_lost,
        )  # fmt: skip

    def _leave_out(self, reason: str, count: int) -> None:
        if count:
            self._left_out[reason] = self._left_out.get(reason, 0) + count

    def _take(self, spans: Int, come: Int, go: Int) -> None:
        if self._why_lost:
            return
        if self._pending is not None or (spans[HOW] >> FORM_SHIFT & FORM_MASK).any():
            spans, come, go = self._whole(spans, come, go)
        stay = spans[END] - spans[START]
        turned, nameless = (spans[STOOD] < 0) | (spans[STOOD] > stay), spans[NUMBER] < 0
        if turned.any() or nameless.any():
            self._leave_out("backwards", int(np.count_nonzero(turned)))
            self._leave_out("number-unknown", int(np.count_nonzero(nameless & ~turned)))
            fits = ~(turned | nameless)
            spans, come, go, stay = spans[:, fits], come[:, fits], go[:, fits], stay[fits]
        if not spans.shape[1]:
            return
        kind = spans[HOW] & 255
        way = np.where((kind == SEND) | (kind == RECV), kind, 0)
        peer = np.where(way > 0, (spans[HOW] >> 16 & 0xFFFFFFFF) - 1, -1)
        channel = self._channels.of(spans[GROUP], peer, way, spans[START], spans[NUMBER])
        self._note(channel, spans)
        more = go - come
        had, moved = np.flatnonzero(come.any(axis=1)), np.flatnonzero(more.any(axis=1))
        shown = spans[HOW] & (255 | ON_DEVICE)
        head = (spans[START], stay, spans[STOOD], spans[NUMBER], spans[SIZE], shown)
        data = packed(np.concatenate([np.stack([*head, channel]), come[had], more[moved]]))
        place = self._store.put(data)
        if place is None:
            self._why_lost = self._store.why_full
            self._blocks = []
            return
        self._blocks.append(Block(spans.shape[1], place, len(data), had, moved))

    def _whole(self, spans: Int, come: Int, go: Int) -> tuple[Int, Int, Int]:
        """Put issues and waits of asynchronous operations together, also with earlier issues."""
        if self._pending is not None:
            early = self._pending
            spans, come, go = (
                np.concatenate(pair, axis=1) for pair in zip(early, (spans, come, go))
            )
        begin, end = halves(spans)
        left = np.ones(spans.shape[1], np.bool_)
        left[begin] = left[end] = False
        issue = (spans[HOW] >> FORM_SHIFT & FORM_MASK) == ISSUE
        self._leave_out("issue-not-seen", int(np.count_nonzero(left & ~issue)))
        waiting = np.flatnonzero(left & issue)
        self._leave_out("wait-not-seen", waiting.size - waiting[-PENDING_MOST:].size)
        waiting = waiting[-PENDING_MOST:]
        self._pending = (
            (spans[:, waiting], come[:, waiting], go[:, waiting]) if waiting.size else None
        )
        out = spans[:, end]
        out[[START, SIZE]] = spans[:, begin][[START, SIZE]]
        return out, come[:, begin], go[:, end]

    def _note(self, channel: Int, spans: Int) -> None:
        """Keep of a block what must be known before any is read."""
        lowest = np.full(len(self._channels.found), NEVER)
        np.minimum.at(lowest, channel, spans[NUMBER])
        self._lowest.append(lowest)
        self._totals.append(np.bincount(channel, minlength=lowest.size))
        kind = spans[HOW] & 255
        stood = np.where(spans[HOW] >> FORM_SHIFT & FORM_MASK, 0, kind)  # 0 is no kind
        for sample in (self._leaves, self._barriers):
            sample.add(stood, spans[GROUP], spans[NUMBER], spans[START], spans[END])
        some = np.flatnonzero(sampled(spans[NUMBER]) & (kind != SEND) & (kind != RECV))
        if some.size:
            taken = (channel[some], spans[NUMBER, some], spans[END, some])
            self._samples.append(np.stack(taken))


def halves(spans: Int) -> tuple[Int, Int]:
    """Return for each whole operation the span that begins it and the one that ends it.

    Of blocking operations that is the same one. In the order of ending.
    """
    form = spans[HOW] >> FORM_SHIFT & FORM_MASK
    which = spans[HOW] & ~(FORM_MASK << FORM_SHIFT)
    order = np.lexsort((spans[END], which, spans[NUMBER], spans[GROUP]))
    key = spans[[GROUP, NUMBER]][:, order]
    same = (key[:, 1:] == key[:, :-1]).all(axis=0) & (which[order][1:] == which[order][:-1])
    kind = form[order]
    pair = np.flatnonzero(same & (kind[:-1] == ISSUE) & (kind[1:] == WAIT))
    plain = np.flatnonzero(form == BLOCKING)
    begin = np.concatenate([plain, order[pair]])
    end = np.concatenate([plain, order[pair + 1]])
    turn = np.argsort(end, kind="stable")
    return begin[turn], end[turn]


def read_block(data: bytes, block: Block, slot: Int, out: Int) -> None:
    """Fill int64[7 + 2 * slots, n] with a block: its rows, then spent on coming and on going.

    `slot` says for each category which of those rows is its own.
    """
    table = unpacked(data)
    middle = (out.shape[0] - HEAD_ROWS) // 2 + HEAD_ROWS
    had = block.come.size + HEAD_ROWS
    out[:HEAD_ROWS] = table[:HEAD_ROWS]
    out[HEAD_ROWS:] = 0
    out[HEAD_ROWS + slot[block.come]] = out[middle + slot[block.come]] = table[HEAD_ROWS:had]
    out[middle + slot[block.go]] += table[had:]
