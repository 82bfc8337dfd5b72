"""Copies without a hook, memory that is freed, and warm-up, in recordings of synthetic jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof_lab.scenario import Trial, load_corpus
from clusterprof_lab.synth.make import make_trial


@pytest.mark.parametrize(
    ("scenario", "cause"),
    [
        ("h2d-unhooked", "h2d-copy-bound"),
        ("launch-memory-freed", "memory-free"),
        ("startup-warm-up", "warm-up"),
    ],
)
def test_a_fault_of_the_corpus_is_found(scenario: str, cause: str, tmp_path: Path) -> None:
    chosen = next(item for item in load_corpus() if item.id == scenario)
    make_trial(Trial(chosen, "medium", 0, "dev"), tmp_path / "run", 2)
    report = analyze(tmp_path / "run" / "recording")
    finding = report.findings[0]
    assert finding.cause.id == cause
    # Of the loss, nine tenths are the fault's (15 to 30 % of the steps).
    assert finding.lost_ns > 0.7 * report.lost_ns
    assert 0.14 < finding.share_ratio < 0.32
