"""Felt and caused, rank by rank: two views of the same lost nanoseconds.

felt by a rank        where its device stood still: the buckets of its ledger
caused by a rank      what it lost by itself + what all ranks lost standing still for it

sum of felt  =  sum of caused  +  what is nobody's (transfers, ranks that were not recorded)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clusterprof.attribution.blame import UNKNOWN
from clusterprof.attribution.ledger import RankBooks, called
from clusterprof.attribution.local import JITTER, PEERS_UNKNOWN
from clusterprof.attribution.spent import OTHER
from clusterprof.engine.node import NodeResult
from clusterprof.findings import UNATTRIBUTED

Amounts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Doing:
    """What one rank caused, by id of cause, in ns."""

    own: Amounts
    """What it lost by itself: of its ledger what it did not lose waiting for others."""
    others: Amounts
    """What ranks lost in operations waiting for it."""

    @property
    def both(self) -> dict[str, int]:
        """Return own and others together, the largest first."""
        sums = {id_: self.own.get(id_, 0) + self.others.get(id_, 0) for id_ in self._ids()}
        return dict(sorted(((k, v) for k, v in sums.items() if v), key=lambda p: (-p[1], p[0])))

    def _ids(self) -> list[str]:
        return list(dict.fromkeys((*self.own, *self.others)))


def agreed(nodes: Sequence[NodeResult]) -> tuple[NodeResult, ...]:
    """Let causes for which ranks waited for each other bear one name in all their ledgers.

    One rank may be sure of a leaf where another would say the family: what is felt under the one
    name would be caused under the other.
    """
    books = [one for node in nodes for one in node.books]
    between = {cause for one in books for cause in (*one.felt, *one.caused)}
    names = {cause: id_ for cause, id_ in names_of(books).items() if cause in between}
    return tuple(
        replace(node, books=tuple(
            called(one, names) if _differs(one, names) else one for one in node.books
        ))
        for node in nodes
    )  # fmt: skip


def _differs(one: RankBooks, names: Mapping[str, str]) -> bool:
    own = {leaf: bucket.id for bucket in one.buckets for leaf in bucket.leaves}
    claimed = {cause for cause, _, _ in one.partial.claimed}
    return any(own.get(cause) != id_ for cause, id_ in names.items() if cause in claimed)


def doings_of(books: Sequence[RankBooks]) -> list[Doing]:
    """Return for each rank what it caused."""
    names = names_of(books)
    return [Doing(_own(one), renamed(one.caused, names)) for one in books]


def nobodys(books: Sequence[RankBooks]) -> dict[str, int]:
    """Return what was felt in operations and nobody caused, as the ledgers name it."""
    names = names_of(books)
    out: dict[str, int] = {}
    for one in books:
        for id_, ns in renamed(one.felt, names).items():
            out[id_] = out.get(id_, 0) + ns
        out[UNATTRIBUTED] = out.get(UNATTRIBUTED, 0) + _without_cause(one)
        for id_, ns in renamed(one.caused, names).items():
            out[id_] = out.get(id_, 0) - ns
    return {id_: ns for id_, ns in out.items() if ns}


def _without_cause(one: RankBooks) -> int:
    """Felt in operations for no cause; of jitter nobody is charged."""
    return sum(ns for reason, ns in one.reasons if reason in (PEERS_UNKNOWN, JITTER))


def renamed(amounts: Amounts, names: Mapping[str, str]) -> dict[str, int]:
    """Add causes up under the ids by which they are reported."""
    out: dict[str, int] = {}
    for cause, ns in amounts.items():
        id_ = names.get(cause, UNATTRIBUTED)
        out[id_] = out.get(id_, 0) + ns
    return out


def names_of(books: Sequence[RankBooks]) -> dict[str, str]:
    """Return cause -> the id under which most ranks' time of it is reported; one id for each."""
    sizes: dict[str, dict[str, int]] = {}
    for one in books:
        for bucket in one.buckets:
            for leaf in bucket.leaves:
                of_leaf = sizes.setdefault(leaf, {})
                of_leaf[bucket.id] = of_leaf.get(bucket.id, 0) + bucket.lost_ns
    names = {leaf: max(sorted(of), key=lambda id_: of[id_]) for leaf, of in sizes.items()}
    return {cause: id_ for cause, id_ in names.items() if cause not in (OTHER, UNKNOWN)}


def _own(one: RankBooks) -> dict[str, int]:
    own = {
        bucket.id: bucket.lost_ns - sum(one.felt.get(leaf, 0) for leaf in bucket.leaves)
        for bucket in one.buckets
    }
    named = {leaf for bucket in one.buckets for leaf in bucket.leaves}
    # waited for without a cause, or for one that was too unsure to be named
    felt = sum(ns for leaf, ns in one.felt.items() if leaf not in named)
    felt += _without_cause(one)
    own[UNATTRIBUTED] = sum(ns for _, ns in one.reasons) - felt
    return {id_: ns for id_, ns in own.items() if ns}
