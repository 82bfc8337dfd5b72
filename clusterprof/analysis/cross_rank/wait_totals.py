"""Sum each rank's lost time as victim and as culprit: two views of one total.

victim time of a rank     where its device stood still: the buckets of its ledger
culprit time of a rank    what it lost by itself + what all ranks lost waiting for it

sum of victim time  =  sum of culprit time  +  time without a culprit
                                               (transfers, unrecorded ranks)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clusterprof.analysis.attribution.ledger import RankResult, with_reported_ids
from clusterprof.analysis.attribution.rank.claims import JITTER, PEERS_UNKNOWN
from clusterprof.analysis.attribution.rank.time_spent import UNEXPLAINED
from clusterprof.analysis.attribution.wait_for.blame import UNKNOWN
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.node.analyze import list_ranks, map_ranks
from clusterprof.report.model import UNATTRIBUTED

Amounts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CulpritTotals:
    """Time that one rank caused to be lost, ns by cause id."""

    own_ns: Amounts
    """What it lost by itself: its ledger without its waits for others."""
    others_ns: Amounts
    """What other ranks lost in operations waiting for it."""

    @property
    def total(self) -> dict[str, int]:
        """Return the sum of `own_ns` and `others_ns` by cause id, largest first."""
        sums = {id_: self.own_ns.get(id_, 0) + self.others_ns.get(id_, 0) for id_ in self._ids()}
        return dict(sorted(((k, v) for k, v in sums.items() if v), key=lambda p: (-p[1], p[0])))

    def _ids(self) -> list[str]:
        return list(dict.fromkeys((*self.own_ns, *self.others_ns)))


def align_cause_ids(state: JobState) -> JobState:
    """Report each cause of waiting under one id in the ledgers of all ranks.

    One rank's data may prove a leaf cause where another's show only the family. Victim time
    would then stand under one id and culprit time under the other.
    """
    ranks = list_ranks(state.nodes)
    between = {cause for rank in ranks for cause in (*rank.victim_ns, *rank.culprit_ns)}
    names = {cause: id_ for cause, id_ in choose_reported_ids(ranks).items() if cause in between}

    def align_ids(rank: RankResult) -> RankResult:
        return with_reported_ids(rank, names) if _has_different_ids(rank, names) else rank

    return replace(state, nodes=map_ranks(state.nodes, align_ids))


def _has_different_ids(rank: RankResult, names: Mapping[str, str]) -> bool:
    id_of_cause = {leaf: bucket.id for bucket in rank.buckets for leaf in bucket.causes}
    claimed = {cause for cause, _, _ in rank.accumulator.claimed}
    return any(id_of_cause.get(cause) != id_ for cause, id_ in names.items() if cause in claimed)


def compute_culprit_totals(ranks: Sequence[RankResult]) -> list[CulpritTotals]:
    """Compute for each rank the time that it caused to be lost."""
    names = choose_reported_ids(ranks)
    return [
        CulpritTotals(_compute_own_loss(rank), sum_by_reported_id(rank.culprit_ns, names))
        for rank in ranks
    ]


def sum_unblamed_waits(ranks: Sequence[RankResult]) -> dict[str, int]:
    """Sum the waiting time in operations that has no culprit, ns by reported cause id."""
    names = choose_reported_ids(ranks)
    out: dict[str, int] = {}
    for rank in ranks:
        for id_, ns in sum_by_reported_id(rank.victim_ns, names).items():
            out[id_] = out.get(id_, 0) + ns
        out[UNATTRIBUTED] = out.get(UNATTRIBUTED, 0) + _sum_unexplained_waits(rank)
        for id_, ns in sum_by_reported_id(rank.culprit_ns, names).items():
            out[id_] = out.get(id_, 0) - ns
    return {id_: ns for id_, ns in out.items() if ns}


def _sum_unexplained_waits(rank: RankResult) -> int:
    """Sum the waiting time in operations without a cause; jitter has no culprit either."""
    return sum(ns for reason, ns in rank.reasons if reason in (PEERS_UNKNOWN, JITTER))


def sum_by_reported_id(amounts: Amounts, names: Mapping[str, str]) -> dict[str, int]:
    """Sum the amounts of causes under the ids by which they are reported."""
    out: dict[str, int] = {}
    for cause, ns in amounts.items():
        id_ = names.get(cause, UNATTRIBUTED)
        out[id_] = out.get(id_, 0) + ns
    return out


def choose_reported_ids(ranks: Sequence[RankResult]) -> dict[str, str]:
    """Choose for each cause the id under which most of its time is reported."""
    sizes: dict[str, dict[str, int]] = {}
    for rank in ranks:
        for bucket in rank.buckets:
            for leaf in bucket.causes:
                by_id = sizes.setdefault(leaf, {})
                by_id[bucket.id] = by_id.get(bucket.id, 0) + bucket.lost_ns
    names = {leaf: max(sorted(by_id), key=lambda id_: by_id[id_]) for leaf, by_id in sizes.items()}
    return {cause: id_ for cause, id_ in names.items() if cause not in (UNEXPLAINED, UNKNOWN)}


def _compute_own_loss(rank: RankResult) -> dict[str, int]:
    own_ns = {
        bucket.id: bucket.lost_ns - sum(rank.victim_ns.get(leaf, 0) for leaf in bucket.causes)
        for bucket in rank.buckets
    }
    named = {leaf for bucket in rank.buckets for leaf in bucket.causes}
    # waited for without a cause, or for one that was too uncertain to be named
    waited_ns = sum(ns for leaf, ns in rank.victim_ns.items() if leaf not in named)
    waited_ns += _sum_unexplained_waits(rank)
    own_ns[UNATTRIBUTED] = sum(ns for _, ns in rank.reasons) - waited_ns
    return {id_: ns for id_, ns in own_ns.items() if ns}
