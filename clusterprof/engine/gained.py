"""How much sooner a job would end without a cause, with bounds: the columns of the replay in, one
time per finding out.

The bounds are of a block bootstrap: the run is cut into stretches of steps, as many of them are
drawn anew with repetition, 400 times, and what was won is scaled to the length of the job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.attribution.blame import IMBALANCE, SLOW_COMPUTE, TRANSFER, UNKNOWN_PEER
from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.local import JITTER
from clusterprof.attribution.precedence import SPENT_ON
from clusterprof.attribution.replay import ALL, EXTRA, SHARED, WORK
from clusterprof.attribution.replay import TRANSFER as MOVED
from clusterprof.engine.hosted import hosted
from clusterprof.engine.whatif import Whatif
from clusterprof.timeline.model import Float, Int

DRAWS, SEED = 400, 6
FEWEST_STRETCHES = 5
"""With fewer no bounds are given."""
BUBBLE = "sync-bubble"
ONE_RANK = "its waits for ranks that were not recorded hide what fixing it would win"
NOT_LAID = "operations of its ranks were not laid side by side"
TWO_JOBS = "ranks of several jobs were recorded together"
NO_STEPS = "no steps were seen"
STRUCTURE = "it comes of the order of a pipeline, and no cause of lost time ends it"
UNSEEN = "it is of ranks that were not recorded"


@dataclass(frozen=True, slots=True)
class Saved:
    """A time with its bounds, or the reason why there is none."""

    ns: int | None
    low_ns: int | None = None
    high_ns: int | None = None
    why: str = ""


class Gained:
    """Answers what was asked of one recording."""

    def __init__(self, books: Sequence[RankBooks], whatif: Whatif | None) -> None:
        self.why = ""
        """Why nothing can be said of any cause; "" when something can."""
        self._felt, self._hosted = _felt(books), hosted(books)
        self.job_ns, lengths = _job_ns(books)
        self._names: tuple[str, ...] = ()
        self._teams = False
        self._length: Int = np.zeros(0, np.int64)
        self._sooner: Int = np.zeros((0, EXTRA), np.int64)
        if not self.job_ns:
            self.why = NO_STEPS
        elif len({one.place.job for one in books}) > 1:
            self.why = TWO_JOBS
        elif any(one.has_peers for one in books):
            self._of_many(books, whatif, lengths)
        else:
            self._of_one(books)

    def _of_many(
        self, books: Sequence[RankBooks], whatif: Whatif | None, lengths: Mapping[int, int]
    ) -> None:
        won = {} if whatif is None else whatif.won()
        if whatif is None or not won:
            alone = len({one.ledger.rank for one in books}) < 2
            self.why = ONE_RANK if alone else NOT_LAID
            return
        self._names = whatif.causes
        self._teams = any(one.teams for one in won.values())
        parts = []
        for job, one in won.items():
            length = one.length_ns.astype(np.float64)
            more_ns = max(lengths.get(job, 0) - int(length.sum()), 0)
            if not one.skipped:  # what was lost before the first operation is in it
                before_ns = min(more_ns, max(whatif.before_ns(job), 0))
                length[0] += before_ns
                more_ns -= before_ns
            # Of what was not played again, as behind the last operation, the same is said.
            scale = 1 + more_ns / max(float(length.sum()), 1.0)
            sooner = one.sooner_ns * scale
            if not one.skipped:  # behind the last operation no data are on their way
                sooner[:, MOVED] = one.sooner_ns[:, MOVED]
            parts.append((length * scale, sooner))
        self._length = np.concatenate([length for length, _ in parts])
        self._sooner = np.concatenate([sooner for _, sooner in parts])

    def _of_one(self, books: Sequence[RankBooks]) -> None:
        known = [one.own_steps for one in books if one.own_steps is not None]
        if not known or len({one.job for one in books}) < len(books):
            self.why = NO_STEPS if not known else NOT_LAID
            return
        self._names = SPENT_ON
        self._length = np.concatenate([length for length, _ in known])
        sooner = np.concatenate([sooner for _, sooner in known])
        self._sooner = np.pad(sooner, ((0, 0), (0, EXTRA - 1)))

    def without(self, id_: str, leaves: Collection[str]) -> Saved:
        """Say how much sooner the job would end without a cause; `leaves`: what it is made of."""
        if self.why:
            return Saved(None, why=self.why)
        if id_ == BUBBLE:
            return Saved(None, why=STRUCTURE)
        if id_ == UNKNOWN_PEER:
            return Saved(None, why=UNSEEN)
        return self._bounded(self._column(id_, leaves))

    def shared_out_ns(self) -> int | None:
        """Return how long the job would take were its work shared out evenly among ranks in
        several teams, as stages of a pipeline are; None where nothing can be said of that."""
        if self.why or not self._teams or not self.job_ns or not self._length.sum():
            return None
        won = float(self._sooner[:, SHARED].sum()) / float(self._length.sum())
        return round(self.job_ns * (1.0 - won)) if won < 1.0 else None

    def without_all(self, of: Sequence[tuple[str, Collection[str]]]) -> Saved:
        """Say the same with several fixed at once: (cause, what it is made of)."""
        if self.why:
            return Saved(None, why=self.why)
        own = {leaf for _, leaves in of for leaf in leaves if leaf in self._names}
        ns: Float = np.zeros(self._length.size)
        for leaf in own:
            ns = np.asarray(self._sooner[:, self._names.index(leaf)], np.float64)
        if len(own) > 1:
            ns = np.asarray(self._sooner[:, ALL], np.float64)
        moved = self._hosted.delayed_by(own, self._felt)
        for id_, leaves in of:
            if _of_network(id_):
                moved += self._moved_part(id_)
            elif own.isdisjoint(leaves) and id_ not in (BUBBLE, UNKNOWN_PEER):
                ns = ns + self._column(id_, leaves)
        ns = ns + self._sooner[:, MOVED] * min(moved, 1.0)
        return self._bounded(np.minimum(ns, self._length))

    def _column(self, id_: str, leaves: Collection[str]) -> Float:
        """Return float64[stretches]: how much sooner each would have passed."""
        if _of_network(id_):
            return np.asarray(self._sooner[:, MOVED] * self._moved_part(id_), np.float64)
        if (CAUSES[id_].family if id_ in CAUSES else id_) == "synchronization":
            varies = () if self._teams else (JITTER,)  # sums over stretches even it out
            names = (IMBALANCE, SLOW_COMPUTE, "synchronization", *varies)
            return np.asarray(self._sooner[:, WORK] * self._part(id_, names), np.float64)
        own = [self._names.index(leaf) for leaf in leaves if leaf in self._names]
        each = self._sooner[:, own].sum(axis=1).astype(np.float64)
        each = each if len(own) < 2 else np.minimum(each, self._sooner[:, ALL])
        return each + self._sooner[:, MOVED] * self._hosted.delayed_by(leaves, self._felt)

    def _moved_part(self, id_: str) -> float:
        """Return the part of all transfers that a cause of the network wins."""
        part = self._part(id_, [one for one in self._felt if one in CAUSES and _of_network(one)])
        # What other causes of the network claim is beyond what the transfers need already.
        return part * (1.0 - self._hosted.whole) if id_ == TRANSFER else part

    def _part(self, id_: str, of: Collection[str]) -> float:
        whole = sum(self._felt.get(name, 0) for name in of)
        return self._felt.get(id_, 0) / whole if whole else 0.0

    def _bounded(self, sooner: Float) -> Saved:
        whole, job_ns = float(self._length.sum()), self.job_ns or 0
        if whole <= 0:
            return Saved(None, why=NO_STEPS)
        ns = round(float(sooner.sum()) / whole * job_ns)
        if self._length.size < FEWEST_STRETCHES:
            return Saved(ns)
        drawn = np.random.default_rng(SEED).integers(0, sooner.size, (DRAWS, sooner.size))
        ratios = sooner[drawn].sum(axis=1) / np.maximum(self._length[drawn].sum(axis=1), 1)
        low, high = np.quantile(ratios, (0.025, 0.975)) * job_ns
        return Saved(ns, min(round(low), ns), max(round(high), ns))


def _of_network(id_: str) -> bool:
    return (CAUSES[id_].family if id_ in CAUSES else id_) == "network"


def _felt(books: Sequence[RankBooks]) -> dict[str, int]:
    """Return what all ranks lost by cause, and to work that varies."""
    out: dict[str, int] = {}
    for one in books:
        for id_, ns in (*one.ledger.buckets, *(p for p in one.reasons if p[0] == JITTER)):
            out[id_] = out.get(id_, 0) + ns
    return out


def _job_ns(books: Sequence[RankBooks]) -> tuple[int | None, dict[int, int]]:
    """Return how long the job was in its steps, its lives one after the other; and each life."""
    lengths: dict[int, int] = {}
    for one in books:
        in_steps = one.ledger.in_step_ns
        if in_steps:
            ns = in_steps + one.ledger.unmeasured_ns
            lengths[one.job] = max(ns, lengths.get(one.job, 0))
    return (sum(lengths.values()) or None), lengths
