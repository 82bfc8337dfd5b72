"""A choice of the operations that the ranks of one clock took part in, to align clocks by.

What stands in a sample is decided by the operation alone, so that every node keeps the same ones
without knowing of the others; it is bounded, however long the recording.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.collectives import mixed
from clusterprof.timeline.model import Int

MOST = 4096
"""Operations of one clock that are kept."""
# all_reduce, all_gather, reduce_scatter, all_to_all, barrier, gradients: nobody leaves before all
# have come. A broadcast's source does.
_SYNCHRONISING = np.array([1, 2, 3, 8, 9, 12])
_BARRIER = np.array([9])


class LeaveSample:
    """When the ranks of one clock came to a choice of operations, and when the first left."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._limit = np.iinfo(np.int64).max
        self.key = np.zeros(0, np.int64)
        self.come_ns = np.zeros(0, np.int64)
        """Of the last rank."""
        self.leave_ns = np.zeros(0, np.int64)
        """Of the first rank."""

    def add(self, job: int, whole: Mapping[str, Int], host_waits: bool = True) -> None:
        """Take operations of one rank as `collectives.whole_spans` returns them, any block.

        `host_waits`: False where a device waits instead of the host, in all but barriers.
        """
        kinds = _SYNCHRONISING if host_waits else _BARRIER
        fits = np.isin(whole["operation"], kinds) & (whole["source"] == whole["leaver"])
        fits &= whole["group"] != 0
        group, sequence = whole["group"][fits], whole["sequence"][fits]
        key = mixed(np.full(group.size, job), group, sequence)
        kept = key <= self._limit
        self._merge(key[kept], whole["arrive_ns"][fits][kept], whole["leave_ns"][fits][kept])
        while self.key.size > self._most:
            self._limit //= 2
            self._take(self.key <= self._limit)

    def _merge(self, key: Int, come_ns: Int, leave_ns: Int) -> None:
        keys, row = np.unique(np.concatenate([self.key, key]), return_inverse=True)
        come = np.full(keys.size, np.iinfo(np.int64).min)
        leave = np.full(keys.size, np.iinfo(np.int64).max)
        np.maximum.at(come, row, np.concatenate([self.come_ns, come_ns]))
        np.minimum.at(leave, row, np.concatenate([self.leave_ns, leave_ns]))
        self.key, self.come_ns, self.leave_ns = keys, come, leave

    def _take(self, rows: NDArray[np.bool_]) -> None:
        self.key, self.come_ns = self.key[rows], self.come_ns[rows]
        self.leave_ns = self.leave_ns[rows]

    def sound(self) -> tuple[Int, Int, Int]:
        """Return key, come and leave; without numbers that stood for several operations."""
        once = self.leave_ns >= self.come_ns
        return self.key[once], self.come_ns[once], self.leave_ns[once]
