"""What is noted while blame passes block after block, and what the report asks of it later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from clusterprof.attribution.blame import NOBODY, OWN, Blamed
from clusterprof.attribution.blame_books import Books
from clusterprof.attribution.blame_gains import Gains
from clusterprof.attribution.blame_stretches import Stretches
from clusterprof.attribution.blame_tail import FEWEST_STEPS, SlowSteps
from clusterprof.attribution.blame_victims import Victims
from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import RankBooks
from clusterprof.engine.metrics import quantile
from clusterprof.engine.node import NodeResult
from clusterprof.findings import Tail
from clusterprof.persistence import Persistence
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations

_NOT_ENOUGH = f"fewer than {FEWEST_STEPS} steps were seen"
_NOT_SLOW = "no rank kept the others waiting in them, or they took hardly longer than the rest"


class Witness:
    """A watcher of blame; ranks are numbered as in the books of all nodes."""

    def __init__(self, books: Sequence[tuple[NodeResult, RankBooks]], summed: Books) -> None:
        """`summed` is told by its own what is blamed."""
        self._summed = summed
        self._ranks = [one for _, one in books]
        begin_ns = np.array([node.loaded.first_ns for node, _ in books], np.int64)
        keys = [node.facts.key for node, _ in books]
        causes = len(summed.causes)
        self._stretches = Stretches(causes, begin_ns, [keys.index(key) for key in keys])
        self._victims = Victims(len(books))
        self._gains = Gains(_job_sizes(self._ranks), causes)
        self._slow = _slow_steps(self._ranks)

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        self._stretches.add(ops, blamed)
        self._victims.add(ops, blamed)
        self._gains.add(ops, blamed)
        for slow in self._slow:
            slow.add(ops, blamed)

    def persistence(self, leaves: Collection[str]) -> Persistence | None:
        """Say how the culprits of some causes change over the run."""
        return self._stretches.persistence(self._numbers(leaves))

    def victims(self, at: int) -> int | None:
        """Return how many others waited for a rank."""
        return self._victims.of(at)

    def recoverable_ns(self, at: int, leaves: Collection[str], own_ns: int) -> int:
        """Return what all ranks win when one culprit, that lost `own_ns` itself, is in time."""
        steps = self._ranks[at].ledger.steps
        return self._gains.of(at, self._numbers(leaves), own_ns, steps)

    def all_recoverable_ns(self, leaves: Collection[str]) -> int | None:
        """Return what all ranks win without some causes of lost time; None where it is not known.

        Work is none of these: without it there would be no job.
        """
        if not set(leaves).isdisjoint(OWN):
            return None
        steps = [one.ledger.steps for one in self._ranks]
        return self._gains.of_causes(self._numbers(leaves), steps)

    def nobodys(self) -> dict[str, int]:
        """Return cause -> ns in operations that is nobody's doing."""
        column = self._summed.caused_ns[NOBODY]
        return {cause: int(ns) for cause, ns in zip(self._summed.causes, column) if ns}

    def tail(self, lengths: Mapping[int, int]) -> Tail:
        """Say how long steps take and who set the slow ones; `lengths`: ns -> steps, all ranks."""
        p50, p99 = (quantile(lengths, share) for share in (0.5, 0.99))
        counts: dict[int, int] = {}
        for slow in self._slow:
            for rank, steps in slow.set_by(p50 or 0.0).items():
                counts[rank] = counts.get(rank, 0) + steps
        order = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
        looked_at = sum(slow.length_ns.size for slow in self._slow)
        why = "" if counts else _NOT_SLOW if looked_at else _NOT_ENOUGH
        return Tail(
            steps=sum(slow.count for slow in self._slow),
            slow=looked_at,
            p50_ns=None if p50 is None else int(p50),
            p99_ns=None if p99 is None else int(p99),
            set_by=tuple(
                (self._ranks[at].ledger.node, self._ranks[at].ledger.rank, steps)
                for at, steps in order
            ),
            why_missing=why,
        )

    def _numbers(self, leaves: Collection[str]) -> list[int]:
        families = {one for one in leaves if one in ("network", "synchronization")}
        return [
            number
            for number, cause in enumerate(self._summed.causes)
            if cause in leaves or (cause in CAUSES and CAUSES[cause].family in families)
        ]


def _job_sizes(ranks: Sequence[RankBooks]) -> Int:
    """Return for each rank how many of its job were recorded."""
    jobs = [one.job for one in ranks]
    counts = Counter(jobs)
    return np.array([counts[job] for job in jobs], np.int64)


def _slow_steps(ranks: Sequence[RankBooks]) -> list[SlowSteps]:
    """Take the rank with most steps of each job, and of these the first."""
    chosen: dict[int, int] = {}
    for at, one in enumerate(ranks):
        if one.operations is None:
            continue
        best = chosen.setdefault(one.job, at)
        if one.ledger.steps > ranks[best].ledger.steps:
            chosen[one.job] = at
    return [
        SlowSteps(at, ranks[at].partial.slowest, ranks[at].ledger.steps, len(ranks))
        for at in chosen.values()
    ]
