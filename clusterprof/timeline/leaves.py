"""A choice of the operations that one rank took part in, to align the clocks of nodes by.

What stands in a sample is decided by the operation alone, so that every node keeps the same ones
without knowing of the others; it is bounded, however long the recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe import layout
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import mixed

MOST = 4096
"""Operations of one rank that are kept."""
_PENDING = 1024
# Nobody leaves these before all have come. A broadcast's source does.
_SYNCHRONISING = (
    layout.ALL_REDUCE, layout.ALL_GATHER, layout.REDUCE_SCATTER, layout.ALL_TO_ALL, layout.BARRIER,
    layout.GRADIENTS,
)  # fmt: skip


class Leaves(NamedTuple):
    """When ranks came to a choice of operations and when they left, by falling choosiness."""

    limit: int
    """All operations with keys up to this one are there."""
    key: Int
    come_ns: Int
    leave_ns: Int


class LeaveSample:
    """Chooses among the operations of one rank, block by block."""

    def __init__(self, kinds: Sequence[int] = _SYNCHRONISING, most: int = MOST) -> None:
        self._most = most
        self._fits = np.isin(np.arange(256), np.array(kinds))
        self._limit = int(np.iinfo(np.int64).max)
        self._table = np.zeros((3, 0), np.int64)
        self._new: list[Int] = []
        self._count = 0

    def add(self, kind: Int, group: Int, number: Int, come_ns: Int, leave_ns: Int) -> None:
        """Take operations in which the rank stood from coming to leaving, in any order."""
        rows = np.flatnonzero(self._fits[kind] & (group != 0))
        if not rows.size:
            return
        key = mixed(group[rows], number[rows])
        kept = key <= self._limit
        if not kept.any():
            return
        rows = rows[kept]
        self._new.append(np.stack([key[kept], come_ns[rows], leave_ns[rows]]))
        self._count += rows.size
        if self._count >= _PENDING:
            self._settle()

    def leaves(self) -> Leaves:
        """Return what was chosen so far, by key."""
        self._settle()
        return Leaves(self._limit, *self._table)

    def _settle(self) -> None:
        table = np.concatenate([self._table, *self._new], axis=1)
        self._new, self._count = [], 0
        while table.shape[1] > self._most:
            self._limit //= 2
            table = table[:, table[0] <= self._limit]
        self._table = table


def brought_together(parts: Sequence[tuple[int, Leaves]]) -> tuple[Int, Int, Int]:
    """Return key, coming of the last and leaving of the first of several (job, ranks) of one clock.

    Without operations of which some rank may have dropped its own, and without numbers that stood
    for several operations.
    """
    none = np.zeros(0, np.int64)
    limit = min((one.limit for _, one in parts), default=0)
    keys, come, leave = [none], [none], [none]
    for job, one in parts:
        rows = one.key <= limit
        keys.append(mixed(np.full(int(rows.sum()), job), one.key[rows]))
        come.append(one.come_ns[rows])
        leave.append(one.leave_ns[rows])
    key, row = np.unique(np.concatenate(keys), return_inverse=True)
    last = np.full(key.size, np.iinfo(np.int64).min)
    first = np.full(key.size, np.iinfo(np.int64).max)
    np.maximum.at(last, row, np.concatenate(come))
    np.minimum.at(first, row, np.concatenate(leave))
    once: NDArray[np.bool_] = first >= last
    return key[once], last[once], first[once]
