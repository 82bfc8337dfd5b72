"""What a job would have won without a cause: columns of spent time in, time of the job out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.attribution.blame import IMBALANCE, SLOW_COMPUTE, Blamed
from clusterprof.attribution.blame import causes as blame_causes
from clusterprof.attribution.hidden import EVERY, HIDDEN
from clusterprof.attribution.replay import Replay, Won
from clusterprof.attribution.spent import OTHER
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations


class Whatif:
    """Watches blame, and plays each block again without each cause."""

    def __init__(self, job: Sequence[int], categories: Sequence[str]) -> None:
        """`job`: of each rank; `categories`: of spent time, work being the last."""
        self._job, self._categories = job, tuple(categories)
        self.causes: tuple[str, ...] = ()
        """Those of which something was lost."""
        self._own: list[int] = []
        self._hidden: list[tuple[int, int]] = []
        self._every: int | None = None
        self._work = 0
        self._charged = (0, 0)
        self._replay: Replay | None = None
        self._begun_ns = np.full(len(job), -1, np.int64)
        """When the steps of each rank began, on its own clock."""

    def begin(self, columns: Sequence[int], spent: Sequence[int]) -> list[int]:
        """Take the categories that were spent on; return the further columns that are wanted."""
        names = [self._categories[c] for c in columns]
        self._own = [at for at, name in enumerate(names[:-1]) if name != OTHER]
        self.causes = tuple(names[at] for at in self._own)
        self._work = len(columns) - 1
        named = blame_causes(names)
        self._charged = named.index(IMBALANCE), named.index(SLOW_COMPUTE)
        hidden = [c for c in spent if c >= len(self._categories)]
        more = [HIDDEN[c - len(self._categories)] for c in hidden]
        self._hidden = [
            (self.causes.index(name), len(columns) + at)
            for at, name in enumerate(more)
            if name in self.causes
        ]
        self._every = len(columns) + more.index(EVERY) if EVERY in more else None
        job = np.asarray(self._job)
        _, which, count = np.unique(job, return_inverse=True, return_counts=True)
        self._replay = Replay(self._job, count[which], len(self.causes))
        return hidden

    def add(self, ops: Operations, blamed: Blamed, come: Int, go: Int) -> None:
        """Take a block with all columns."""
        assert self._replay is not None, "begin() comes first"
        self._note_first(ops, come)
        work = come[:, self._work], go[:, self._work]
        self._replay.add(ops, blamed, self._lost(come), self._lost(go), work, self._charged)

    def _note_first(self, ops: Operations, come: Int) -> None:
        new = np.flatnonzero(self._begun_ns[ops.rank] < 0)[::-1]
        began = ops.arrive_ns[new] - come[new, : self._work + 1].sum(axis=1)
        self._begun_ns[ops.rank[new]] = began  # of each rank the first row comes last

    def before_ns(self, job: int) -> int:
        """Return for how long the ranks of a job were in steps before what was played again."""
        if self._replay is None:
            return 0
        from_ns = self._replay.from_ns
        mine = (np.asarray(self._job) == job) & (from_ns >= 0) & (self._begun_ns >= 0)
        return int((from_ns - self._begun_ns)[mine].mean()) if mine.any() else 0

    def won(self) -> dict[int, Won]:
        """Return job -> what would have been won, by `causes` and the columns behind them."""
        return {} if self._replay is None else self._replay.won()

    def _lost(self, spent: Int) -> Int:
        """Return int64[n, causes + 1]: lost and hidden time by cause, and of all causes at once."""
        own = spent[:, self._own]
        every = own.sum(axis=1)
        if self._hidden:
            into, columns = (list(some) for some in zip(*self._hidden))
            hidden = spent[:, columns]
            own[:, into] += hidden  # own is a copy
        if self._every is not None:
            every += spent[:, self._every]
        return np.column_stack([own, every])
