"""Which part of the time that transfers took the hosts took, not the network.

    transfers 50    movers of rank 0 used a CPU for 4 of it, and waited for one for 2
                    movers of rank 1                       3                        9
    hosts' part     12 of 50: who moves data most slowly holds all others up

A mended network leaves that; of it the waits for a CPU go with what took the CPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.movers import DELAYED, ON_CPU, hosted_ns

DELAYS = ("cpu-contention", "cpu-throttled")
"""Causes that a wait for a CPU goes with, as the others of the same job do."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """Parts of the time in transfers, of the rank whose host took most of it."""

    at_work: float = 0.0
    delayed: float = 0.0

    @property
    def whole(self) -> float:
        """What no network takes away."""
        return self.at_work + self.delayed

    def delayed_by(self, leaves: Collection[str], felt: Mapping[str, int]) -> float:
        """Return the part in which a CPU was waited for because of some causes; `felt`: what was
        lost to each."""
        every = sum(felt.get(name, 0) for name in DELAYS)
        mine = sum(felt.get(name, 0) for name in DELAYS if name in leaves)
        return self.delayed * mine / every if every else 0.0


def hosted(books: Sequence[RankBooks]) -> Hosted:
    """Return the parts of one job; none where no thread is known that moves its data."""
    found = [Hosted()]
    for one in books:
        moved_ns = sum(ns for id_, ns in one.felt.items() if _of_network(id_))
        if moved_ns <= 0:
            continue
        totals = one.partial.totals
        delayed = hosted_ns(totals, DELAYED, moved_ns) / moved_ns
        at_work = min(hosted_ns(totals, ON_CPU, moved_ns) / moved_ns, 1.0 - delayed)
        found.append(Hosted(at_work, delayed))
    return max(found, key=lambda one: one.whole)


def _of_network(id_: str) -> bool:
    return id_ in CAUSES and CAUSES[id_].family == "network"
