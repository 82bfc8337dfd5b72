"""Felt and caused bear one name, however sure each rank is of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from test_peers import recorded
from test_whose import measured

from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.partial import SHARE, Partial
from clusterprof.engine import peers
from clusterprof.engine.caused import agreed, doings_of, nobodys
from clusterprof.engine.node import NodeResult


def weak(one: RankBooks) -> RankBooks:
    """The same books with evidence that carries a family and no leaf."""
    claimed = {(cause, "C", source): units for (cause, _, source), units in
               one.partial.claimed.items()}  # fmt: skip
    unexplained = dict(one.partial.unexplained)
    assert sum(claimed.values()) + sum(unexplained.values()) == one.ledger.lost_ns * SHARE
    partial: Partial = replace(one.partial, claimed=claimed)
    return peers.charged(one, partial, one.felt, one.caused)


def test_one_rank_says_the_family_and_the_other_the_leaf(tmp_path: Path, monkeypatch) -> None:
    # Rank 1 loses 0.2 s of each step to its loader, rank 0 waits for it; rank 0's books are weak.
    seen: list[tuple[NodeResult, ...]] = []
    monkeypatch.setattr(peers, "agreed", lambda nodes: seen.append(nodes) or agreed(nodes))
    recorded(measured((0.0, 0.3), (0.2, 0.3)), tmp_path)
    [nodes] = seen
    first, second = nodes
    nodes = (replace(first, books=tuple(weak(one) for one in first.books)), second)
    books = [one for node in nodes for one in node.books]
    assert {b.id for b in books[0].buckets} == {"cpu", "network", "storage"}
    assert {b.id for b in books[1].buckets} == {"cpu-preprocess", "net-transfer", "storage-local"}

    books = [one for node in agreed(nodes) for one in node.books]
    first_ids, second_ids = ({b.id for b in one.buckets} for one in books)
    assert first_ids == second_ids == {"cpu", "net-transfer", "storage"}  # as large: the cautious
    sums: dict[str, int] = dict(nobodys(books))
    for doing in doings_of(books):
        for id_, ns in doing.both.items():
            sums[id_] = sums.get(id_, 0) + ns
    for one in books:
        for bucket in one.buckets:
            sums[bucket.id] -= bucket.lost_ns
    assert {ns for id_, ns in sums.items() if id_ != "unattributed"} == {0}
