"""Sample of the operations of one rank, for aligning the clocks of nodes.

Whether an operation is in the sample depends on the operation alone, so that every node
keeps the same ones without communication. The size is bounded, however long the
recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.collectives.operations import combine_labels
from clusterprof.analysis.timeline.model import Int
from clusterprof.probe import layout

MAX_LEAVES = 4096
"""Limit of the operations of one rank that are kept."""
_MAX_PENDING_LEAVES = 1024
# No member leaves these before all have arrived. A broadcast's source does.
_SYNCHRONIZING_KINDS = (
    layout.ALL_REDUCE,
    layout.ALL_GATHER,
    layout.REDUCE_SCATTER,
    layout.ALL_TO_ALL,
    layout.BARRIER,
    layout.GRADIENTS,
)


class LeaveTimeSamples(NamedTuple):
    """Arrival and leave times of sampled operations, sorted by key."""

    limit: int
    """All operations with keys up to this one are in the sample."""
    key: Int
    arrive_ns: Int
    leave_ns: Int


_NO_ROWS = np.zeros(0, np.int64)
NO_LEAVES = LeaveTimeSamples(0, _NO_ROWS, _NO_ROWS, _NO_ROWS)


class LeaveTimeSampler:
    """Samples the operations of one rank, block by block."""

    def __init__(self, kinds: Sequence[int] = _SYNCHRONIZING_KINDS) -> None:
        self._fits = np.isin(np.arange(256), np.array(kinds))
        self._limit = int(np.iinfo(np.int64).max)
        self._table = np.zeros((3, 0), np.int64)
        self._new: list[Int] = []
        self._count = 0

    def add(self, kind: Int, group: Int, number: Int, arrive_ns: Int, leave_ns: Int) -> None:
        """Add operations in which the rank blocked from arrival to leave; int64[n], any order."""
        rows = np.flatnonzero(self._fits[kind] & (group != 0))
        if not rows.size:
            return
        key = combine_labels(group[rows], number[rows])
        is_sampled = key <= self._limit
        if not is_sampled.any():
            return
        rows = rows[is_sampled]
        self._new.append(np.stack([key[is_sampled], arrive_ns[rows], leave_ns[rows]]))
        self._count += rows.size
        if self._count >= _MAX_PENDING_LEAVES:
            self._settle()

    def leaves(self) -> LeaveTimeSamples:
        """Return the sample so far, sorted by key."""
        self._settle()
        return LeaveTimeSamples(self._limit, *self._table)

    def _settle(self) -> None:
        table = np.concatenate([self._table, *self._new], axis=1)
        self._new, self._count = [], 0
        while table.shape[1] > MAX_LEAVES:
            self._limit //= 2
            table = table[:, table[0] <= self._limit]
        self._table = table


def combine_leaves(samples: Sequence[tuple[int, LeaveTimeSamples]]) -> tuple[Int, Int, Int]:
    """Combine samples of several (job, rank) on one clock.

    Returns key, last arrival and first leave, int64[m] each. Times in ns. Leaves out
    operations that some rank may have dropped from its sample, and keys that stood for
    several operations.
    """
    no_rows = np.zeros(0, np.int64)
    limit = min((leaves.limit for _, leaves in samples), default=0)
    keys, arrivals, leave = [no_rows], [no_rows], [no_rows]
    for job, leaves in samples:
        rows = leaves.key <= limit
        keys.append(combine_labels(np.full(int(rows.sum()), job), leaves.key[rows]))
        arrivals.append(leaves.arrive_ns[rows])
        leave.append(leaves.leave_ns[rows])
    key, row = np.unique(np.concatenate(keys), return_inverse=True)
    last = np.full(key.size, np.iinfo(np.int64).min)
    first = np.full(key.size, np.iinfo(np.int64).max)
    np.maximum.at(last, row, np.concatenate(arrivals))
    np.minimum.at(first, row, np.concatenate(leave))
    consistent: NDArray[np.bool_] = first >= last
    return key[consistent], last[consistent], first[consistent]
