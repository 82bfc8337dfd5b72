"""Analyses of recordings made by hand, and checks that hold for every report."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clusterprof.analysis.pipeline import analyze
from clusterprof.report.history import WAITING_FOR_RANKS
from clusterprof.report.model import Report
from tests.support.recordings import Script, write_recording


def check_conservation(report: Report) -> None:
    """The law of findings.py, for every rank and in all."""
    for ledger in report.ranks:
        assert ledger.window_ns == ledger.unmeasured_ns + ledger.outside_ns + ledger.in_step_ns
        assert ledger.in_step_ns == ledger.productive_ns + ledger.lost_ns
        assert ledger.lost_ns == sum(ns for _, ns in ledger.buckets)
        assert ledger.outside_ns == sum(ns for _, ns in ledger.outside_buckets)
        assert min(ns for _, ns in (*ledger.buckets, *ledger.outside_buckets, ("", 0))) >= 0
        assert min(ledger.unmeasured_ns, ledger.productive_ns, ledger.lost_ns) >= 0
    for name in (
        "window_ns",
        "unmeasured_ns",
        "outside_ns",
        "in_step_ns",
        "productive_ns",
        "lost_ns",
    ):
        assert getattr(report, name) == sum(getattr(ledger, name) for ledger in report.ranks)
    if any(ledger.caused for ledger in report.ranks):
        caused = sum(ns for ledger in report.ranks for _, ns in ledger.caused)
        assert report.lost_ns == caused + sum(ns for _, ns in report.lost_without_culprit)
        assert min(ns for ledger in report.ranks for _, ns in ledger.caused) >= 0
    unattributed = sum(dict(ledger.buckets)["unattributed"] for ledger in report.ranks)
    assert report.unattributed_ns == unattributed
    assert report.unattributed_ns == sum(ns for _, ns in report.unattributed_reasons)
    assert report.outside_ns == sum(ns for _, ns in report.outside_buckets)
    if report.life is not None:
        times = [part.ns or 0 for part in report.life.parts]
        assert sum(times) == report.life.total_ns == report.life.wall_ns * report.life.devices
        assert min(times, default=0) >= 0


def analyze_script(script: Script, tmp_path: Path, **options) -> Report:
    write_recording(script, tmp_path / "node-1")
    report = analyze(tmp_path, **options)
    check_conservation(report)
    return report


def analyze_metrics(report: Report) -> dict[str, float | None]:
    return {metric.name: metric.value for metric in report.metrics}


def check_history(report: Report) -> None:
    """The laws at the top of `clusterprof/history.py`."""
    history = report.history
    assert history is not None
    for rank, ledger in zip(history.ranks, report.ranks, strict=True):
        lost = np.array([ns for _, ns in rank.lost] or [(0,) * history.bin_count])
        assert sum(rank.in_step_ns) == ledger.in_step_ns
        assert int(lost.sum()) == ledger.lost_ns
        assert (lost >= 0).all()
        assert (lost.sum(axis=0) <= np.array(rank.in_step_ns)).all()
        assert max(rank.in_step_ns, default=0) <= history.bin_ns
        buckets, lost_by_cause = dict(ledger.buckets), {name: sum(ns) for name, ns in rank.lost}
        waited = lost_by_cause.pop(WAITING_FOR_RANKS, 0)
        assert all(ns <= buckets[name] for name, ns in lost_by_cause.items())
        assert waited == ledger.lost_ns - sum(lost_by_cause.values())
