"""From a recording to its advice: for whom it is, and out of which numbers it was filled."""

from __future__ import annotations

from pathlib import Path

from clusterprof.report.model import Finding, Report
from tests.support.reduced_recordings import Step, make_cluster, record_and_analyze, remove_signals

SLOW, FAST = [Step(decode=0.5)] * 20, [Step(decode=0.05)] * 20


def finding(report: Report, cause: str) -> Finding:
    return next(item for item in report.findings if item.cause.id == cause)


def test_advice_is_for_the_node_of_the_rank_that_was_late(tmp_path: Path) -> None:
    """Rank 1 decodes; rank 0 waits for it in the collective and needs no advice."""
    report = record_and_analyze(make_cluster(FAST, SLOW), tmp_path)
    tested_finding = finding(report, "cpu-preprocess")
    late = tested_finding.culprits[0]
    assert late.rank == 1
    assert [advice_item.id for advice_item in tested_finding.advice] == [
        "more-workers",
        "prepare-on-gpu",
        "prepare-ahead",
    ]
    assert all(
        advice_item.what.startswith(f"On {late.node}, rank 1: ")
        for advice_item in tested_finding.advice
    )
    assert "worker.on_cpu_ratio" in tested_finding.advice[0].because
    assert "processes that make batches: 1" in tested_finding.advice[0].because
    assert finding(report, "startup").advice == ()  # 1 s, once
    transfer = finding(report, "net-transfer")
    assert transfer.share_ratio > 0.1  # at its usual pace, and much
    # one operation of 1000 bytes a step: nothing to cut, to put together, or to measure a rate by
    assert [advice_item.id for advice_item in transfer.advice] == [
        "accumulate-gradients",
        "send-less",
    ]


def test_a_finding_without_probe_spans_advises_recording_with_the_probe(tmp_path: Path) -> None:
    report = record_and_analyze(remove_signals(make_cluster(SLOW, SLOW), "spans"), tmp_path)
    (stated,) = (item for item in report.findings if not item.outside_steps)
    assert stated.cause.id == stated.cause.family  # a family: nothing is mended because of it
    assert [advice_item.id for advice_item in stated.advice] == [
        "record-with-probe",
        "verify-by-hand",
    ]
    assert all(advice_item.diagnose for advice_item in stated.advice)
