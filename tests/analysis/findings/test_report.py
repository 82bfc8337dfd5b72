"""From recordings to the facts of a report: onset, early ends, sizes of reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterprof.analysis.cross_rank.network import _choose_transfer_wording
from clusterprof.analysis.detectors.cross_rank import (
    TRANSFER_AT_LINK_RATE,
    TRANSFER_EXCESS,
    TRANSFER_STEADY,
    TRANSFER_STEADY_SLOW,
)
from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Evidence, Finding, Report
from tests.support.recordings import SECOND, Script, write_recording
from tests.support.reduced_recordings import BEGIN_S, TRANSFER_S, Step, make_cluster, remove_signals

MIB = 1 << 20
FAST, SLOW = Step(decode=0.02), Step(decode=0.5)


def analysed(scripts: list[Script], folder: Path) -> Report:
    for number, script in enumerate(scripts):
        write_recording(script, folder / f"node-{number}")
    return analyze(folder, history=True)


def finding(report: Report, cause: str) -> Finding:
    return next(item for item in report.findings if item.cause.id == cause)


def test_a_rank_that_becomes_slow_has_an_onset_step(tmp_path: Path) -> None:
    """Steps of 0.02 + 0.3 + transfer for the first 20 of 60, then 0.5 s of decoding."""
    report = analysed(make_cluster([FAST] * 60, [FAST] * 20 + [SLOW] * 40), tmp_path)
    since = finding(report, "cpu-preprocess").onset
    assert since is not None and report.history is not None
    assert (since.step, since.steps) == (20, 60)
    begins_ns = (BEGIN_S + 20 * (0.32 + TRANSFER_S)) * SECOND
    assert abs(since.run_ns - begins_ns) <= report.history.bin_ns
    assert finding(report, "net-transfer").onset is None
    assert report.history.ended == ()


def test_a_rank_that_is_slow_from_the_first_step_on_has_no_onset(tmp_path: Path) -> None:
    report = analysed(make_cluster([FAST] * 40, [SLOW] * 40), tmp_path)
    assert finding(report, "cpu-preprocess").onset is None


def test_a_rank_that_ends_early_is_reported_with_its_end(tmp_path: Path) -> None:
    """30 steps of 0.42 s, and 60: nobody waits for anybody."""
    short = remove_signals(make_cluster([FAST] * 30, [FAST] * 30), "collectives")[0]
    long = remove_signals(make_cluster([FAST] * 60, [FAST] * 60), "collectives")[1]
    report = analysed([short, long], tmp_path)
    assert report.history is not None
    ((rank, end_ns),) = report.history.ended
    assert report.ranks[rank].rank == 0
    ends_ns = (BEGIN_S + 30 * (0.32 + TRANSFER_S)) * SECOND
    assert end_ns == pytest.approx(ends_ns, abs=report.history.bin_ns)


def reading(size: int) -> list[Script]:
    """For 0.3 s of every step a worker reads, 100 times a second."""
    scripts = make_cluster([Step(read=0.3, decode=0.01)] * 40)
    scripts[0].network = {
        ("disk.reads_total", "vda"): 100,
        ("disk.read_bytes_total", "vda"): 100 * size,
        ("disk.read_ns_total", "vda"): SECOND,
    }
    return scripts


def test_small_reads_are_counted_and_packing_is_advised(tmp_path: Path) -> None:
    tested_finding = finding(analysed(reading(16 << 10), tmp_path), "storage-local")
    (size,) = (
        evidence_row
        for evidence_row in tested_finding.evidence
        if evidence_row.name == "disk.read_size_bytes"
    )
    assert size.value == pytest.approx(16 << 10)
    # counters are read ten times a second, and the wait is 0.31 s of 0.71: about 31
    assert size.note.startswith("a read requested on average; 100 a second, 3")
    assert size.note.endswith(" in the waits of a step")
    packed = next(
        advice_item for advice_item in tested_finding.advice if advice_item.id == "pack-records"
    )
    assert packed.what.endswith("read these in order; now the average read is 16.0 KiB")
    assert tested_finding.withheld_advice == ()


def test_packing_is_withheld_for_large_reads(tmp_path: Path) -> None:
    tested_finding = finding(analysed(reading(2 * MIB), tmp_path), "storage-local")
    assert "pack-records" not in [advice_item.id for advice_item in tested_finding.advice]
    assert tested_finding.withheld_advice == (
        "Larger records are not advised: the average read is 2.0 MiB already",
    )


def split(**more: Any) -> Any:
    return SimpleNamespace(**{"expected_ns": 90, "excess_ns": 10, "by_rate": False, **more})


def test_a_steadily_slow_transfer_is_not_called_usual() -> None:
    slow = (Evidence("network.path_ratio", 0.249, "ratio"),)
    fair = (Evidence("network.path_ratio", 0.25, "ratio"),)
    assert list(_choose_transfer_wording(split(), slow).values()) == [TRANSFER_STEADY_SLOW]
    assert list(_choose_transfer_wording(split(), fair).values()) == [TRANSFER_STEADY]
    assert list(_choose_transfer_wording(split(), ()).values()) == [TRANSFER_STEADY]  # not known
    assert list(_choose_transfer_wording(split(by_rate=True), slow).values()) == [
        TRANSFER_AT_LINK_RATE
    ]
    assert list(_choose_transfer_wording(split(excess_ns=91), slow).values()) == [TRANSFER_EXCESS]
