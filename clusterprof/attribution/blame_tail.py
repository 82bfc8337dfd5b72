"""Who came last in the slow steps of a job: the tail of its step times has a cause of its own.

One rank per job is looked at, because in synchronous training a slow step is slow for all. Of its
slow steps the waits in its operations are added up by culprit; the culprit that caused most of them
set the step, if the others waited for it for a good part of what the step took longer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clusterprof.attribution.blame import Blamed
from clusterprof.timeline.operations import Operations

FEWEST_STEPS = 20
"""Of fewer steps nothing is said."""
SLOW_RATIO = 0.01
AT_LEAST = 3
"""Slow are the slowest hundredth of the steps, and at least the slowest few."""
SLOWER_RATIO = 1.05
"""… which took longer than the middle step by this factor."""
EXPLAINS_RATIO = 0.25
"""Of what a step took longer than the middle one: for so much of it the others must have waited."""


class SlowSteps:
    """The slow steps of one rank and who was waited for in each."""

    def __init__(self, rank: int, steps: Mapping[int, int], count: int | None, ranks: int) -> None:
        """`steps`: start -> length of its longest, by its own clock; `count`: how many it made,
        None to look at all of `steps`."""
        wanted = len(steps)
        if count is not None:
            wanted = max(AT_LEAST, round(SLOW_RATIO * count)) if count >= FEWEST_STEPS else 0
        order = sorted(steps.items(), key=lambda step: (-step[1], step[0]))[:wanted]
        order.sort()
        self.count = count or 0
        self.rank = self._rank = rank
        self._start_ns = np.array([start for start, _ in order], np.int64)
        self.length_ns = np.array([ns for _, ns in order], np.int64)
        self._caused_ns = np.zeros((len(order), ranks), np.int64)
        self._met = np.zeros(ranks, np.bool_)

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        mine = np.flatnonzero(ops.rank == self._rank)
        if not mine.size or not self.length_ns.size:
            return
        op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
        leave_ns = ops.leave_ns[mine]
        step = np.searchsorted(self._start_ns, leave_ns, side="left") - 1
        inside = step >= 0
        inside &= leave_ns <= self._start_ns[step] + self.length_ns[step]
        of_op = np.full(ops.team.size, -1)
        of_op[op[mine[inside]]] = step[inside]
        self._met[ops.rank[of_op[op] >= 0]] = True
        entry = of_op[op[blamed.row]]
        some = np.flatnonzero((entry >= 0) & (blamed.culprit >= 0))
        np.add.at(self._caused_ns, (entry[some], blamed.culprit[some]), blamed.ns[some])

    def set_by(self, usual_ns: float) -> dict[int, int]:
        """Return rank -> slow steps it set; `usual_ns` is the length of the middle step."""
        others = max(int(np.count_nonzero(self._met)) - 1, 1)
        out: dict[int, int] = {}
        for length_ns, caused_ns in zip(self.length_ns, self._caused_ns):
            if length_ns < SLOWER_RATIO * usual_ns:
                continue
            rank = int(np.argmax(caused_ns))
            waited_ns = caused_ns[rank] / others
            if waited_ns > 0 and waited_ns >= EXPLAINS_RATIO * (length_ns - usual_ns):
                out[rank] = out.get(rank, 0) + 1
        return out

    def last(self, at_least: float) -> dict[int, int]:
        """Return start of a step -> rank that kept the others waiting most in it, for this part of
        the step at least."""
        others = max(int(np.count_nonzero(self._met)) - 1, 1)
        out: dict[int, int] = {}
        for start_ns, length_ns, caused_ns in zip(
            self._start_ns.tolist(), self.length_ns.tolist(), self._caused_ns
        ):
            rank = int(np.argmax(caused_ns))
            if caused_ns[rank] >= max(at_least * length_ns * others, 1):
                out[start_ns] = rank
        return out
