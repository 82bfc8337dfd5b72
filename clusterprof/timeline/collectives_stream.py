"""The operations of all ranks in blocks, read from where each rank's rows are kept.

Every rank's next rows are read as long as nothing of it waits; where operations wait for a member,
that member's rows are read. So ranks go on together however far apart their clocks are, and what is
in memory depends on the number of ranks, not on the hours. The cut changes no operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from clusterprof.timeline.collectives_directory import Directory, Person, directory
from clusterprof.timeline.collectives_window import settle
from clusterprof.timeline.model import Int
from clusterprof.timeline.operation_rows import (
    ARRIVE,
    BLOCK_ROWS,
    CHANNEL,
    HEAD_ROWS,
    NEVER,
    SEQUENCE,
    STAY,
    read_block,
)
from clusterprof.timeline.operations import Operations

WAITING_MOST_ROWS = 1 << 20
"""Rows that may wait for members; beyond that nothing is waited for."""
WAITING_MOST_BLOCKS = 6
"""The same, in blocks of each rank."""
FEW_ROWS = 1024
"""A rank of which not more wait is read on."""
Get = Callable[[int | bytes, int], bytes]


class Stretch(NamedTuple):
    """Some operations with what each member had spent when it came and when it left."""

    operations: Operations
    at_arrive: Int
    """int64[n, categories]."""
    at_leave: Int


class Stream:
    """Reads, matches, and hands on; `unmatched` is complete when everything has been handed on."""

    def __init__(
        self,
        people: Sequence[Person],
        announced: Mapping[tuple[int, int], Int],
        categories: Sequence[int],
        get: Get,
    ) -> None:
        """`categories` are those of spent time that are handed on; `get` gives back stored data."""
        self._people, self._get = people, get
        self._book: Directory = directory(people, announced)
        most = max((int(c) for c in categories), default=-1)
        self._slot = np.full(most + 1, -1)
        self._slot[list(categories)] = np.arange(len(categories))
        self._rows = HEAD_ROWS + 2 * len(categories)
        self._read = np.zeros(len(people), np.int64)
        self._blocks = np.array([len(one.operations.blocks) for one in people], np.int64)
        lowest = [one.operations.lowest[0] for one in people]
        self._unread = np.concatenate([*lowest, np.zeros(0, np.int64)])
        self._table = np.zeros((self._rows, 0), np.int64)
        self._held = np.zeros(len(people), np.int64)
        self._passed = np.zeros(self._book.team.size, np.int64)
        self.unmatched = dict(self._book.unmatched)
        for one in people:
            self._count(one.operations.left_out)

    def _count(self, reasons: Mapping[str, int]) -> None:
        for reason, count in reasons.items():
            self.unmatched[reason] = self.unmatched.get(reason, 0) + count

    def stretches(self, most_rows: int) -> Iterator[Stretch]:
        """Yield all operations in an order in which every rank left them.

        Stretches have up to `most_rows` rows, or one operation.
        """
        wanted = np.ones(len(self._people), np.bool_)
        while (self._read < self._blocks).any():
            yield from self._cut(*self._settled(wanted), most_rows)
            wanted = self._wanted
        assert not self._table.shape[1]

    def _settled(self, wanted: np.ndarray) -> tuple[Operations, Int]:
        self._load(wanted & (self._read < self._blocks))
        book, table = self._book, self._table
        who = np.repeat(np.arange(len(self._people)), self._held)
        rank = np.array([one.rank for one in self._people])[who]
        when_ns = _on_one_clock(table[ARRIVE] + table[STAY], self._held, self._people)
        coming = np.full(book.team.size, NEVER)
        good = book.channel >= 0
        np.minimum.at(coming, book.channel[good], self._unread[good])
        found = settle(table, rank, when_ns, book, coming)
        most = max(WAITING_MOST_ROWS, WAITING_MOST_BLOCKS * self._blocks.size * BLOCK_ROWS)
        if np.count_nonzero(found.waiting) > most:
            found = settle(table, rank, when_ns, book, np.full(coming.size, NEVER))
            channel = book.channel[table[CHANNEL]]
            np.maximum.at(self._passed, channel, table[SEQUENCE] + 1)
        self._count(found.unmatched)
        rows = np.flatnonzero(found.waiting)
        self._table = table[:, rows]
        self._held = np.bincount(who[rows], minlength=len(self._people))
        farthest = np.full(book.team.size, -1)
        np.maximum.at(farthest, *found.open)
        awaited = good.copy()
        awaited[good] = self._unread[good] <= farthest[book.channel[good]]
        sums = np.concatenate([[0], np.cumsum(awaited)])
        least = max(int(self._held.min(initial=NEVER)), FEW_ROWS)
        self._wanted = (np.diff(sums[book.base]) > 0) | (self._held <= least)
        return found.operations, table

    def _load(self, wanted: np.ndarray) -> None:
        """Put the next block of each of these ranks behind what waits of it."""
        book = self._book
        blocks = [
            one.operations.blocks[int(at)] if more else None
            for one, at, more in zip(self._people, self._read, wanted)
        ]
        new = np.array([0 if block is None else block.rows for block in blocks], np.int64)
        sizes = self._held + new
        ends = np.cumsum(sizes)
        table = np.empty((self._rows, int(ends[-1]) if ends.size else 0), np.int64)
        old = np.cumsum(self._held) - self._held
        for number, block in enumerate(blocks):
            begin, held = int(ends[number] - sizes[number]), int(self._held[number])
            if held:
                table[:, begin : begin + held] = self._table[:, old[number] : old[number] + held]
            if block is None:
                continue
            out = table[:, begin + held : int(ends[number])]
            read_block(self._get(block.place, block.length), block, self._slot, out)
            out[CHANNEL] += book.base[number]
            self._read[number] += 1
            lowest = self._people[number].operations.lowest[self._read[number]]
            self._unread[book.base[number] : book.base[number + 1]] = lowest
        self._table, self._held = self._good(table, sizes)

    def _good(self, table: Int, sizes: Int) -> tuple[Int, Int]:
        """Leave out the rows of channels that are, and those that come after all was given up."""
        channel = self._book.channel[table[CHANNEL]]
        keep = channel >= 0
        if self._passed.any():
            late = keep & (table[SEQUENCE] < self._passed[channel])
            self._count({"too-late": int(np.count_nonzero(late))} if late.any() else {})
            keep &= ~late
        if keep.all():
            return table, sizes
        who = np.repeat(np.arange(sizes.size), sizes)
        return table[:, keep], np.bincount(who[keep], minlength=sizes.size)

    def _cut(self, ops: Operations, table: Int, most_rows: int) -> Iterator[Stretch]:
        middle = HEAD_ROWS + (self._rows - HEAD_ROWS) // 2
        at = 0
        while at < ops.team.size:
            end = int(np.searchsorted(ops.first, ops.first[at] + most_rows, side="right")) - 1
            end = max(end, at + 1)
            part = ops.cut(at, end)
            come, go = table[HEAD_ROWS:middle, part.source], table[middle:, part.source]
            yield Stretch(part, come.T, go.T)
            at = end


def _on_one_clock(t_ns: Int, rows: Int, people: Sequence[Person]) -> Int:
    """Put times forward; `rows` of them are of each person, one after the other."""
    since_ns, shift_ns = np.array([(one.ahead.since_ns, one.ahead.shift_ns) for one in people]).T
    drift = np.array([one.ahead.drift for one in people])
    if not drift.any():
        return t_ns + np.repeat(shift_ns, rows)
    more = (t_ns - np.repeat(since_ns, rows)) * np.repeat(drift, rows)
    return t_ns + np.repeat(shift_ns, rows) + more.astype(np.int64)
