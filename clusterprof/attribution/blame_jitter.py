"""Waits for work that only varies: nobody's, and no cause.

    rank 0   |== 100 ==|-- 3 --|  |== 103 ==|       |== 98 ===|-- 4 --|
    rank 1   |== 103 ==|          |== 99 ===|- 4 -| |== 102 ==|             in turn, for nothing

Blame charges every wait for work to the work of the last to come. As far as that one works more
than the other in operation after operation (its level, `blame_spread`), or had an event of its own,
it stays charged. The rest is jitter, and stays without a cause; but where differences are large or
lean to one side, work is uneven, and that is `sync-imbalance`.

Asked of `WINDOW` operations of a team at a time, whatever the blocks. Messages are not asked: what
the order of a pipeline makes of jitter is a bubble (`blame_bubbles`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.attribution.blame import IMBALANCE, SLOW_COMPUTE, UNKNOWN_LESS, Blamed, causes
from clusterprof.attribution.blame_rows import is_pair
from clusterprof.attribution.blame_spread import EVENT, Seats, judged
from clusterprof.timeline.model import Float, Int
from clusterprof.timeline.operations import Operations

WINDOW = 64
_SETTLED_AT = 1 << 16
"""Rows that wait for their windows to fill before these are looked for."""
_ROW = ("team", "ordinal", "rank", "less", "awaited", "imbalance", "slow", "period")


class Jitter:
    """Adds up what of the waits for work is moved, block by block."""

    def __init__(self, ranks: int, categories: Sequence[str]) -> None:
        names = causes(categories)
        self._work = names.index(IMBALANCE), names.index(SLOW_COMPUTE)
        self._ranks = ranks
        self.felt_ns = np.zeros((ranks, 2), np.int64)
        """[rank, cause]: what leaves imbalance and slow compute (-, of imbalance: may come)."""
        self.caused_ns = np.zeros((ranks, 2), np.int64)
        self._teams: dict[int, tuple[int, int]] = {}
        """Team -> operations so far, when its lowest rank left the last of them."""
        self._rows: list[Int] = []
        self._count, self._kept = 0, 0

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        if not ops.team.size:
            return
        chosen = ~is_pair(ops.operation) & (np.diff(ops.first) > 1) & (blamed.last >= 0)
        row_op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
        ordinal, period = self._numbered(ops, chosen)
        work = np.zeros((2, row_op.size), np.int64)
        direct = blamed.culprit == blamed.last[row_op[blamed.row]]
        for line, cause in zip(work, self._work):
            some = np.flatnonzero(direct & (blamed.cause == cause))
            np.add.at(line, blamed.row[some], blamed.ns[some])
        rows = np.flatnonzero(chosen[row_op] & (blamed.less_work_ns != UNKNOWN_LESS))
        op = row_op[rows]
        table = np.stack([
            ops.team[op], ordinal[op], ops.rank[rows], blamed.less_work_ns[rows], blamed.last[op],
            work[0, rows], work[1, rows], period[op],
        ])  # fmt: skip
        self._rows.append(table)
        self._count += rows.size
        if self._count > max(_SETTLED_AT, 2 * self._kept):
            self._settle(whole=True)

    def done(self) -> Jitter:
        """Settle what is left; call it once, at the end."""
        if self._rows:
            self._settle(whole=False)
        return self

    def moved_ns(self, at: int) -> int:
        """Return how much of what a rank felt is jitter."""
        return int(self.felt_ns[at].sum())

    def felt(self, at: int) -> dict[str, int]:
        """Return what to add to the causes a rank felt."""
        return self._added(self.felt_ns[at])

    def caused(self, at: int) -> dict[str, int]:
        """Return what to add to the causes it is charged for: jitter is nobody's."""
        return self._added(self.caused_ns[at])

    def _added(self, ns: Int) -> dict[str, int]:
        pairs = zip((IMBALANCE, SLOW_COMPUTE), ns.tolist())
        return {cause: -amount for cause, amount in pairs if amount}

    def _numbered(self, ops: Operations, chosen: np.ndarray) -> tuple[Int, Int]:
        """Return of each operation its number in its team, and the time since the one before."""
        ordinal, period = np.zeros((2, ops.team.size), np.int64)
        leave = ops.leave_ns[ops.first[:-1]]
        for at in np.flatnonzero(chosen).tolist():
            team = int(ops.team[at])
            count, last = self._teams.get(team, (0, -1))
            ordinal[at], period[at] = count, max(int(leave[at]) - last, 0) if count else -1
            self._teams[team] = count + 1, int(leave[at])
        return ordinal, period

    def _settle(self, whole: bool) -> None:
        """Judge windows, of a stream that goes on only whole ones; the others are kept."""
        table = np.concatenate(self._rows, axis=1)
        team, ordinal = table[0], table[1]
        window = ordinal // WINDOW
        if whole:
            teams, at = np.unique(team, return_inverse=True)
            done = np.array([self._teams[one][0] // WINDOW for one in teams.tolist()], np.int64)
            ready = window < done[at]
            self._rows, table, window = [table[:, ~ready]], table[:, ready], window[ready]
        else:
            self._rows = []
        self._count = self._kept = sum(one.shape[1] for one in self._rows)
        if table.shape[1]:
            self._judge(table, window)

    def _judge(self, table: Int, window: Int) -> None:
        ranks = self._ranks
        order = np.lexsort((table[2], table[1], table[0]))
        table, window = table[:, order], window[order]
        team, ordinal, rank, less, awaited, imbalance, slow, period = table
        opens = np.append(True, (team[1:] != team[:-1]) | (ordinal[1:] != ordinal[:-1]))
        operation = np.cumsum(opens) - 1
        wid = np.cumsum(np.append(True, (team[1:] != team[:-1]) | (window[1:] != window[:-1]))) - 1
        count = int(wid[-1]) + 1
        known = opens & (period >= 0)
        length = np.bincount(wid[known], period[known], count) / np.maximum(
            np.bincount(wid[known], minlength=count), 1
        )
        told = judged(Seats(wid, operation, rank, -less.astype(np.float64)), count, ranks, length)
        usual = told.level(wid, awaited, ranks) - told.level(wid, rank, ranks)
        uneven = told.uneven[wid]
        most = np.where(uneven, np.inf, EVENT * told.spread_ns[wid])
        ratio = _random(less, usual, most)
        gone = np.rint((imbalance + slow) * ratio).astype(np.int64)
        from_slow = np.minimum(gone, slow)
        # Of uneven work what is random becomes imbalance.
        from_imbalance = np.where(uneven, -from_slow, gone - from_slow)
        for column, ns in enumerate((from_imbalance, from_slow)):
            np.add.at(self.felt_ns[:, column], rank, ns)
            np.add.at(self.caused_ns[:, column], awaited, ns)


def _random(less: Int, usual_ns: Float, most_ns: Float) -> Float:
    """Return which part of each difference is random: beyond the usual one, and no event."""
    less = np.maximum(less, 0)
    beyond = less - np.clip(usual_ns, 0, less)
    beyond[beyond > most_ns] = 0
    return beyond / np.maximum(less, 1)
