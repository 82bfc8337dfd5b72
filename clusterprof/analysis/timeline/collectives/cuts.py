"""Sample the operations after which the run of a rank may be cut.

    rank 0   ..| 40 |..........| 41 |......       41 is left before the rank arrives at any
    rank 1   ....| 40 |......|  41  |....         operation that it left later: nothing spans
                                  ^ cut           the cut

Which operations are in the sample depends on their numbers alone, so that all ranks keep the
same ones without communication. The size is bounded, however long the recording.
"""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.timeline.model import Int

FIRST_STRIDE = 16
"""Numbers of kept operations are multiples of this; it doubles when there are too many."""
MAX_CUTS = 256
"""Limit of the operations of one rank that are kept."""


class CutSampler:
    """Samples the possible cuts of one rank, block by block."""

    def __init__(self) -> None:
        self._stride = FIRST_STRIDE
        self._table = np.zeros((3, 0), np.int64)
        """Rows: channel, number, leave in ns."""

    def add(
        self, channel: Int, number: Int, arrive_ns: Int, leave_ns: Int, is_collective: np.ndarray
    ) -> None:
        """Add the next operations of the rank in the order in which it left them.

        All arrays [n]; int64, times in ns; is_collective: bool, no message between two ranks.
        """
        if not channel.size:
            return
        earliest_ns = np.minimum.accumulate(arrive_ns[::-1])[::-1]
        self._table = self._table[:, self._table[2] <= earliest_ns[0]]
        later_ns = np.append(earliest_ns[1:], np.iinfo(np.int64).max)
        rows = np.flatnonzero(
            (number & (self._stride - 1) == 0) & is_collective & (leave_ns <= later_ns)
        )
        samples = np.stack([channel[rows], number[rows], leave_ns[rows]])
        self._table = np.concatenate([self._table, samples], axis=1)
        while self._table.shape[1] > MAX_CUTS:
            self._stride *= 2
            self._table = self._table[:, self._table[1] & (self._stride - 1) == 0]

    def cuts(self) -> Int:
        """Return channel and number of the sampled operations, int64[2, m], in order of leaving."""
        return self._table[:2].copy()


def find_common_cuts(channel: Int, number: Int, ranks: int) -> tuple[int, Int]:
    """Find the operations that all ranks have sampled, all of one channel.

    channel, number: int64[n], operations sampled by any rank; channels as all ranks share them.
    Returns the channel with most of such operations, and their numbers, ascending; an empty array
    where there are none.
    """
    order = np.lexsort((number, channel))
    channel, number = channel[order], number[order]
    starts = np.flatnonzero(
        np.concatenate([[True], (channel[1:] != channel[:-1]) | (number[1:] != number[:-1])])[
            : channel.size
        ]
    )
    common = starts[np.diff(np.append(starts, channel.size)) == ranks]
    if not common.size:
        return -1, np.zeros(0, np.int64)
    channels, count = np.unique(channel[common], return_counts=True)
    most_frequent = int(channels[np.argmax(count)])
    return most_frequent, number[common[channel[common] == most_frequent]]
