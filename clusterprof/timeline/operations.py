"""Collective operations with their members: what matching yields and blame reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Int

SEND, RECV = 10, 11
_ODD = np.uint64(0x9E3779B97F4A7C15)


def mixed(*columns: Int) -> Int:
    """Return one label for each combination of values (64 bits of a mixing function)."""
    out = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        out = (out ^ column.astype(np.uint64)) * _ODD
        out ^= out >> np.uint64(32)
    return (out >> np.uint64(1)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Operations:
    """m operations in an order in which every member left them, n member rows in all.

    Rows of operation i are `first[i]:first[i + 1]`, sorted by rank. Times are each rank's own.
    """

    first: Int
    """int64[m + 1]."""
    team: Int
    """Label of the set of members, the same in every block: (job, group), or a pair that sends."""
    operation: Int
    """Kind of the operation (docs/design.md, section 12)."""
    bytes: Int
    """The most that a member brought; -1 unknown."""
    complete: NDArray[np.bool_]
    """True when every member of the group was seen."""
    rank: Int
    """Process of each row: 0 … ranks - 1 over all jobs and restarts."""
    arrive_ns: Int
    leave_ns: Int
    blocked_ns: Int
    """How long the rank stood still for it: leave - arrive, less for asynchronous operations."""
    source: Int
    """Row of the table that was matched."""
    on_device: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """True for rows whose times are those of a device, which came to the operation later than
    that, by nobody knows how much. Of no length: none."""

    def cut(self, begin: int, end: int) -> Operations:
        """Return operations `begin` to `end`."""
        low, high = int(self.first[begin]), int(self.first[end])
        rows = slice(low, high)
        return Operations(
            self.first[begin : end + 1] - low,
            self.team[begin:end],
            self.operation[begin:end],
            self.bytes[begin:end],
            self.complete[begin:end],
            self.rank[rows],
            self.arrive_ns[rows],
            self.leave_ns[rows],
            self.blocked_ns[rows],
            self.source[rows],
            self.on_device[rows],
        )
