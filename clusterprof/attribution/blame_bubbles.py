"""Waits that the order of a pipeline makes, and nobody's work: bubbles.

    stage 0   |1|2|3|4|-- waits --|4|3|2|1|      each stage works for as long as the other,
    stage 1   waits |1|2|3|4|4|3|2|1| waits      and each waits for the other in every step

Blame charges a wait for a message to the work of the rank it comes from. Of ranks that worked alike
that is the schedule: over many steps one rank can have kept another waiting by its work for no
longer than it was busier than that one. What is beyond is a bubble, and nobody's.

Busy is all time between operations, so what else a rank was late with its messages for (a slow
disk, …) is taken off as far as it was charged for that. Asked of `STRETCH` operations per rank at
a time, whatever the blocks: a rank that was slow in one stretch and its neighbour in another do not
cancel out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clusterprof.attribution.blame import IMBALANCE, SLOW_COMPUTE, TRANSFER, Blamed, causes
from clusterprof.attribution.blame_rows import is_pair
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations

BUBBLE = "sync-bubble"
STRETCH = 64
_MERGED_AT = 1 << 16


class Bubbles:
    """Adds up bubbles, block by block; the cut into blocks changes no nanosecond."""

    def __init__(self, ranks: int, categories: Sequence[str]) -> None:
        names = causes(categories)
        self._work = names.index(IMBALANCE), names.index(SLOW_COMPUTE)
        self._transfer = names.index(TRANSFER)
        self._ranks, self._names = ranks, names
        self.felt_ns = np.zeros((ranks, len(names)), np.int64)
        """[rank, cause]: of the waits charged to work, what is a bubble; alike `caused_ns`."""
        self.caused_ns = np.zeros((ranks, len(names)), np.int64)
        self._operations = 0
        none = np.zeros(0, np.int64)
        self._charged: list[tuple[Int, Int]] = [(none, none)]
        self._begin_ns = np.full(ranks, -1, np.int64)
        self._latest_ns = np.full(ranks, -1, np.int64)
        self._blocked_ns = np.zeros(ranks, np.int64)

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        row_op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
        length = STRETCH * self._ranks
        at, entry = 0, 0
        while at < ops.team.size:
            end = min(ops.team.size, at + length - self._operations % length)
            low, high = int(ops.first[at]), int(ops.first[end])
            last = int(np.searchsorted(blamed.row, high))
            self._add(ops, blamed, row_op, slice(low, high), slice(entry, last))
            self._operations += end - at
            if self._operations % length == 0:
                self._settle()
            at, entry = end, last

    def done(self) -> Bubbles:
        """Settle what is left; call it once, at the end."""
        self._settle()
        return self

    def felt(self, at: int) -> dict[str, int]:
        """Return what to add to the causes a rank felt; the sum is 0."""
        return self._moved(self.felt_ns[at], gained=True)

    def caused(self, at: int) -> dict[str, int]:
        """Return what to add to the causes it is charged for: bubbles are nobody's."""
        return self._moved(self.caused_ns[at], gained=False)

    @staticmethod
    def added(ns: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
        """Return both together, without causes of which nothing is left."""
        both = {cause: ns.get(cause, 0) + more.get(cause, 0) for cause in (*ns, *more)}
        return {cause: amount for cause, amount in both.items() if amount}

    def _moved(self, ns: Int, gained: bool) -> dict[str, int]:
        out = {self._names[one]: -int(ns[one]) for one in self._work if ns[one]}
        if out and gained:
            out[BUBBLE] = int(ns.sum())
        return out

    def _add(
        self, ops: Operations, blamed: Blamed, row_op: Int, rows: slice, entries: slice
    ) -> None:
        rank = ops.rank[rows]
        new = rank[self._begin_ns[rank] < 0]
        if new.size:
            first = np.full(self._ranks, np.iinfo(np.int64).max)
            np.minimum.at(first, rank, ops.arrive_ns[rows])
            self._begin_ns[new] = self._latest_ns[new] = first[new]
        np.maximum.at(self._latest_ns, rank, ops.leave_ns[rows])
        np.add.at(self._blocked_ns, rank, ops.blocked_ns[rows])
        message = is_pair(ops.operation)[row_op[blamed.row[entries]]]
        if not message.any():
            return
        row, culprit, cause, ns = (
            column[entries][message]
            for column in (blamed.row, blamed.culprit, blamed.cause, blamed.ns)
        )
        some = (culprit >= 0) & (culprit != ops.rank[row]) & (cause != self._transfer)
        row, culprit, cause = row[some], culprit[some], cause[some]
        # 0 imbalance, 1 slow compute, 2 anything else
        kind = np.where(cause == self._work[0], 0, np.where(cause == self._work[1], 1, 2))
        key = (ops.rank[row] * self._ranks + culprit) * 3 + kind
        self._charged.append(_summed(key, ns[some]))
        if sum(keys.size for keys, _ in self._charged) > 2 * self._charged[0][0].size + _MERGED_AT:
            self._charged = [_summed(*(np.concatenate(c) for c in zip(*self._charged)))]

    def _settle(self) -> None:
        """Judge a stretch: what each rank was charged by another against who was busier."""
        keys, ns = (np.concatenate(column) for column in zip(*self._charged))
        busy = self._latest_ns - self._begin_ns - self._blocked_ns
        pairs, of_key = np.unique(keys // 3, return_inverse=True)
        table = np.zeros((pairs.size, 3), np.int64)
        np.add.at(table, (of_key, keys % 3), ns)
        rank, culprit = pairs // self._ranks, pairs % self._ranks
        more = np.maximum(busy[culprit] - busy[rank] - table[:, 2], 0)
        work = table[:, :2].sum(axis=1)
        bubble = np.maximum(work - more, 0)
        # A culprit that was in no operation meanwhile cannot be compared.
        bubble[self._latest_ns[culprit] <= self._begin_ns[culprit]] = 0
        first = np.floor(table[:, 0] * (bubble / np.maximum(work, 1))).astype(np.int64)
        first = np.clip(first, bubble - table[:, 1], np.minimum(bubble, table[:, 0]))
        for cause, part in zip(self._work, (first, bubble - first)):
            np.add.at(self.felt_ns[:, cause], rank, part)
            np.add.at(self.caused_ns[:, cause], culprit, part)
        none = np.zeros(0, np.int64)
        self._charged = [(none, none)]
        self._begin_ns = self._latest_ns.copy()
        self._blocked_ns[:] = 0


def _summed(key: Int, ns: Int) -> tuple[Int, Int]:
    keys, of_entry = np.unique(key, return_inverse=True)
    sums = np.zeros(keys.size, np.int64)
    np.add.at(sums, of_entry, ns)
    return keys, sums
