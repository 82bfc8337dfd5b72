"""The healthy beside the guilty, from the books of ranks made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from clusterprof.analysis.attribution.accumulator import Accumulator
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.findings.comparisons import compare_finding
from clusterprof.report.model import Culprit, Finding, PeerComparison
from tests.support.reports import make_clean_report

MS = 1_000_000
STEPS = 10


def books(rank: int, cause: str, node: str = "a", asked: bool = True, **more: Any) -> Any:
    """Ten steps of one rank; `work` in ms a step, `read` in ms that one took."""
    work, read, waited = more.get("work", 50), more.get("read"), more.get("waited", 0)
    ledger = replace(
        make_clean_report().ranks[0],
        node=node,
        rank=rank,
        steps=STEPS,
        productive_ns=STEPS * work * MS,
        buckets=((cause, waited * MS),) if waited else (),
    )
    key = (cause, "disk.read_latency_ns", "ns", "a read took on average")
    evidence = {} if read is None else {key: round(read * MS * 1000)}
    accumulator = Accumulator(evaluated={cause: 1} if asked else {}, evidence=evidence)
    return SimpleNamespace(ledger=ledger, accumulator=accumulator)


def finding(cause: str, *culprits: Culprit) -> Finding:
    return Finding(CAUSES[cause], 300 * MS, 0.1, None, 0.9, "B", False, False, culprits)


def guilty(rank: int | None, own_ms: int, others_ms: int = 0, node: str = "a") -> Culprit:
    return Culprit(node, rank, "", "", own_ms * MS, others_ms * MS)


def test_a_late_rank_is_compared_with_the_median_waiting_rank() -> None:
    # 96, 98 and 99 wait; 40 does not: the middle of the three.
    cause = "sync-imbalance"
    collected = [books(0, cause, work=148)]
    collected += [books(n, cause, work=w, waited=9) for n, w in ((1, 99), (2, 96), (3, 98))]
    collected.append(books(4, cause, work=40))
    comparison = compare_finding(finding(cause, guilty(0, 0, 900)), collected)
    assert comparison == PeerComparison(
        "step.worked_ns", "ns", 148.0 * MS, 98.0 * MS, 3, "rank", "of work a step"
    )


def test_read_latency_is_compared_with_other_nodes() -> None:
    cause = "storage-local"
    collected = [
        books(0, cause, read=12),
        books(1, cause, "b", read=0.4),
        books(2, cause, "c", read=5),
    ]
    comparison = compare_finding(finding(cause, guilty(0, 500)), collected)
    assert comparison == PeerComparison(
        "disk.read_latency_ns", "ns", 12 * MS, 0.4 * MS, 2, "node", "a read"
    )


def test_lost_time_per_step_is_compared_without_other_readers() -> None:
    # rank 0 lost 416 ms in 10 steps, rank 1 nothing, rank 2 was not asked, rank 3 is no culprit
    cause = "storage-local"
    collected = [books(0, cause, read=12), books(1, cause, read=11), books(2, cause, asked=False)]
    comparison = compare_finding(finding(cause, guilty(0, 416), guilty(1, 2)), collected)
    assert comparison == PeerComparison(
        "step.own_lost_ns", "ns", 41.6 * MS, 0.2 * MS, 1, "rank", "lost to it in a step"
    )


def test_a_comparison_needs_a_healthy_rank_and_a_difference() -> None:
    cause = "storage-local"
    two = [books(0, cause), books(1, cause)]
    assert compare_finding(finding(cause, guilty(0, 400), guilty(1, 390)), two) is None  # all alike
    assert compare_finding(finding(cause, guilty(0, 400)), two[:1]) is None
    assert compare_finding(finding(cause), two) is None
    assert compare_finding(finding(cause, guilty(None, 400)), two) is None
    unasked = [books(0, cause), books(1, cause, asked=False)]
    assert compare_finding(finding(cause, guilty(0, 400)), unasked) is None
    late = [books(0, "sync-imbalance", work=55), books(1, "sync-imbalance", work=50, waited=9)]
    assert compare_finding(finding("sync-imbalance", guilty(0, 0, 90)), late) is None  # 1.1 times
