"""Add blame up: felt where it was waited, caused by whom; two views of the same nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.attribution.blame import IMBALANCE, NOBODY, SLOW_COMPUTE, TRANSFER, Blamed, causes
from clusterprof.attribution.blame_rows import is_pair
from clusterprof.timeline.model import Float, Int
from clusterprof.timeline.operations import Operations


class Books:
    """Sums over all blocks: integers, so that the order of blocks does not matter."""

    def __init__(self, ranks: int, categories: Sequence[str]) -> None:
        self.causes = causes(categories)
        shape = (ranks, len(self.causes))
        self.felt_ns = np.zeros(shape, np.int64)
        """[rank, cause]: time in operations by what kept the rank there."""
        self.caused_ns = np.zeros((ranks + 1, len(self.causes)), np.int64)
        """[culprit, cause]; the last row is `NOBODY`, whom transfers are charged to."""
        self.recoverable_ns = np.zeros_like(self.caused_ns)
        """Of `caused_ns`: what waiting ends when that culprit alone comes with the second last."""
        self.co_late = np.zeros(ranks, np.int64)
        """How many others were late in the operations to which a rank came last."""
        self.last = np.zeros(ranks, np.int64)
        """To how many operations a rank came last."""

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        rank, row = ops.rank, blamed.row
        self.felt_ns += _summed(rank[row], blamed.cause, blamed.ns, self.felt_ns.shape)
        self.caused_ns += _summed(blamed.culprit, blamed.cause, blamed.ns, self.caused_ns.shape)
        moved = self.causes.index(TRANSFER)
        moved_ns = np.bincount(rank, weights=blamed.transfer_ns, minlength=len(self.felt_ns))
        self.felt_ns[:, moved] += moved_ns.astype(np.int64)
        self.caused_ns[NOBODY, moved] += int(blamed.transfer_ns.sum())
        wait = ops.blocked_ns - blamed.transfer_ns
        gain = np.minimum(np.repeat(blamed.recoverable_ns, np.diff(ops.first)), wait)
        part = (gain / np.maximum(wait, 1))[row]
        part[blamed.culprit < 0] = 0.0
        gain = np.rint(blamed.ns * part)
        self.recoverable_ns += _summed(blamed.culprit, blamed.cause, gain, self.caused_ns.shape)
        known = blamed.last >= 0
        np.add.at(self.last, blamed.last[known], 1)
        np.add.at(self.co_late, blamed.last[known], blamed.co_late[known])

    def culprits(self, role: Int | None = None) -> list[tuple[int, int]]:
        """Return (rank, ns caused), most first; without what nobody is charged for.

        Of work only what a rank caused beyond the middle of its peers (those of the same `role`,
        see `roles`) counts: that all ranks of a stage keep the next one waiting is how a pipeline
        is built, and nobody's fault.
        """
        total = self.caused_ns[:-1].sum(axis=1)
        if role is not None:
            columns = [self.causes.index(IMBALANCE), self.causes.index(SLOW_COMPUTE)]
            work = self.caused_ns[:-1, columns].sum(axis=1)
            for one in np.unique(role):
                peers = np.flatnonzero(role == one)
                usual = int(np.sort(work[peers])[(peers.size - 1) // 2])
                total[peers] -= np.minimum(work[peers], usual)
        order = np.argsort(-total, kind="stable")
        return [(int(rank), int(total[rank])) for rank in order if total[rank]]


def roles(ops: Operations, ranks: int) -> Int:
    """Return for each rank a label of those who do the same work: the team it met most often.

    Pairs that send and receive are neighbours, not peers. -1 = met nobody but them.
    """
    size = np.diff(ops.first)
    labels, team = np.unique(ops.team, return_inverse=True)
    row_team = np.repeat(np.where(is_pair(ops.operation), -1, team), size)
    met = row_team >= 0
    code, count = np.unique(ops.rank[met] * labels.size + row_team[met], return_counts=True)
    order = np.argsort(count, kind="stable")
    out = np.full(ranks, -1, np.int64)
    out[code[order] // labels.size] = code[order] % labels.size
    return out


def _summed(who: Int, cause: Int, ns: Int | Float, shape: tuple[int, ...]) -> Int:
    """Sum into a table; row -1 is the last. Floats are exact up to 2**53 ns (104 days) a cell."""
    cell = np.where(who < 0, shape[0] - 1, who) * shape[1] + cause
    sums = np.bincount(cell, weights=ns, minlength=shape[0] * shape[1])
    return sums.astype(np.int64).reshape(shape)
