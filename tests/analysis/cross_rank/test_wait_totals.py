"""Felt and caused bear one name, however sure each rank is of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE, Accumulator
from clusterprof.analysis.attribution.ledger import RankResult, with_attributed_waits
from clusterprof.analysis.cross_rank import pipeline
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.cross_rank.wait_totals import (
    align_cause_ids,
    compute_culprit_totals,
    sum_unblamed_waits,
)
from clusterprof.analysis.node.analyze import NodeResult
from tests.support.waiting_jobs import make_scripts_with_devices, record_and_analyze


def weak(result: RankResult) -> RankResult:
    """The same books with evidence that carries a family and no leaf."""
    claimed = {
        (cause, "C", source): units
        for (cause, _, source), units in result.accumulator.claimed.items()
    }
    unexplained = dict(result.accumulator.unexplained)
    assert sum(claimed.values()) + sum(unexplained.values()) == result.ledger.lost_ns * SHARE_SCALE
    partial: Accumulator = replace(result.accumulator, claimed=claimed)
    return with_attributed_waits(result, partial, result.victim_ns, result.culprit_ns)


def test_family_and_leaf_cause_ids_are_aligned_across_ranks(tmp_path: Path, monkeypatch) -> None:
    # Rank 1 loses 0.2 s of each step to its loader, rank 0 waits for it; rank 0's books are weak.
    seen: list[tuple[NodeResult, ...]] = []

    def observe_nodes(state: JobState) -> JobState:
        seen.append(state.nodes)
        return align_cause_ids(state)

    passes = [observe_nodes if p is align_cause_ids else p for p in pipeline.CROSS_RANK_PASSES]
    monkeypatch.setattr(pipeline, "CROSS_RANK_PASSES", tuple(passes))
    record_and_analyze(make_scripts_with_devices((0.0, 0.3), (0.2, 0.3)), tmp_path)
    [nodes] = seen
    first, second = nodes
    nodes = (replace(first, ranks=tuple(weak(rank) for rank in first.ranks)), second)
    books = [rank for node in nodes for rank in node.ranks]
    assert {b.id for b in books[0].buckets} == {"cpu", "network", "storage"}
    assert {b.id for b in books[1].buckets} == {"cpu-preprocess", "net-transfer", "storage-local"}

    books = [rank for node in align_cause_ids(JobState(nodes)).nodes for rank in node.ranks]
    first_ids, second_ids = ({b.id for b in result.buckets} for result in books)
    assert first_ids == second_ids == {"cpu", "net-transfer", "storage"}  # as large: the cautious
    sums: dict[str, int] = dict(sum_unblamed_waits(books))
    for doing in compute_culprit_totals(books):
        for id_, ns in doing.total.items():
            sums[id_] = sums.get(id_, 0) + ns
    for result in books:
        for bucket in result.buckets:
            sums[bucket.id] -= bucket.lost_ns
    assert {ns for id_, ns in sums.items() if id_ != "unattributed"} == {0}
