"""Ranks that wait for each other: whose books the time stands in, and whose cause it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.cross_rank.waits import CATEGORIES
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.timeline.collectives.rows import HEAD_ROWS, read_block
from clusterprof.probe import layout
from tests.support.recordings import SECOND, write_recording
from tests.support.report_laws import analyze_metrics
from tests.support.waiting_jobs import (
    STEPS,
    TRANSFER_S,
    make_scripts,
    record_and_analyze,
    sum_rank_seconds,
)


def test_waiting_for_a_slow_loader_is_charged_to_its_causes(tmp_path: Path) -> None:
    # Rank 1 waits 0.2 s for data (half disk, half CPU) before its 0.3 s of work; rank 0 does not,
    # and so waits 0.2 s in the all-reduce; then both transfer for 0.1 s. The step takes 0.6 s.
    # In the first step it is what each lost since its steps began that is compared.
    report = record_and_analyze(make_scripts((0.0, 0.3), (0.2, 0.3)), tmp_path)
    assert [rank.in_step_ns for rank in report.ranks] == [36 * SECOND, 36 * SECOND]
    assert sum_rank_seconds(report, 0) == {
        "net-transfer": 6.0,
        "storage-local": 6.0,
        "cpu-preprocess": 6.0,
    }
    assert sum_rank_seconds(report, 1) == {
        "net-transfer": 6.0,
        "storage-local": 6.0,
        "cpu-preprocess": 6.0,
    }
    whose = {f.cause.id: [c.rank for c in f.culprits] for f in report.findings}
    assert whose["storage-local"] == whose["cpu-preprocess"] == [1]
    assert whose["net-transfer"] == []
    assert report.unattributed_reasons == ()
    assert analyze_metrics(report)["stall.storage_ratio"] == pytest.approx(12 / 72)
    assert analyze_metrics(report)["stall.network_ratio"] == pytest.approx(12 / 72)
    assert analyze_metrics(report)["stall.synchronization_ratio"] == 0.0


def test_a_rank_with_more_work_in_every_step_is_an_imbalance(tmp_path: Path) -> None:
    # 0.2 s of work more than the other, every time.
    report = record_and_analyze(make_scripts((0.0, 0.3), (0.0, 0.5)), tmp_path)
    seconds = sum_rank_seconds(report, 0)
    assert seconds["net-transfer"] == 6.0
    blamed = seconds.get("sync-imbalance", 0) + seconds.get("sync-slow-compute", 0)
    assert blamed + seconds.get("unattributed", 0) == pytest.approx(12.0, abs=0.001)
    assert seconds["sync-imbalance"] > 10
    assert sum_rank_seconds(report, 1) == {"net-transfer": 6.0}
    [imbalance] = [f for f in report.findings if f.cause.id == "sync-imbalance"]
    assert [culprit.rank for culprit in imbalance.culprits] == [1]


@pytest.mark.parametrize(
    ("sizes", "evidence"),
    [
        ((1_000_000, 3_000_000), [3_000_000]),
        ((3_000_000, 1_000_000), []),  # the rank that waits brings more
        ((2_000_000, 2_000_000), []),
    ],
)
def test_imbalance_evidence_shows_unequal_all_to_all_bytes(
    tmp_path: Path, sizes: tuple[int, int], evidence: list[int]
) -> None:
    # Rank 1 works 0.2 s more in every step; its bytes are 1.5 times the mean of 2 MB, or fewer.
    scripts = make_scripts((0.0, 0.3), (0.0, 0.5))
    for script, size in zip(scripts, sizes):
        script.main_spans = [
            (*span[:5], size, layout.ALL_TO_ALL) if span[0] == layout.COLLECTIVE else span
            for span in script.main_spans
        ]
    report = record_and_analyze(scripts, tmp_path)
    [imbalance] = [f for f in report.findings if f.cause.id == "sync-imbalance"]
    seen = {item.name: item for item in imbalance.evidence}
    assert [item.value for name, item in seen.items() if "all_to_all" in name] == evidence
    if evidence:
        assert "by rank 1, 1.5 times the mean of the ranks" in seen["step.all_to_all_bytes"].note


def test_equal_waits_of_all_ranks_stay_with_each_rank(tmp_path: Path) -> None:
    report = record_and_analyze(make_scripts((0.2, 0.3), (0.2, 0.3)), tmp_path)
    for rank in (0, 1):
        assert sum_rank_seconds(report, rank) == {
            "net-transfer": 6.0,
            "storage-local": 6.0,
            "cpu-preprocess": 6.0,
        }
    [storage] = [f for f in report.findings if f.cause.id == "storage-local"]
    assert sorted(culprit.rank for culprit in storage.culprits) == [0, 1]


def test_a_rank_recorded_alone_has_unknown_peer_waits(tmp_path: Path) -> None:
    report = record_and_analyze(make_scripts((0.0, 0.3), (0.2, 0.3))[:1], tmp_path)
    # 0.3 s of every step inside the all-reduce; the other member was not recorded
    assert sum_rank_seconds(report, 0) == {"sync-unknown-peer": 18.0}


def test_ranks_of_different_jobs_do_not_wait_for_each_other(tmp_path: Path) -> None:
    first, second = make_scripts((0.0, 0.3), (0.2, 0.3))
    second.variables["TORCHELASTIC_RUN_ID"] = "another job"
    report = record_and_analyze([first, second], tmp_path)
    assert sum_rank_seconds(report, 0) == {"sync-unknown-peer": 18.0}


def test_an_incarnation_before_a_restart_is_not_waited_for(tmp_path: Path) -> None:
    first, second = make_scripts((0.0, 0.3), (0.2, 0.3))
    second.variables["TORCHELASTIC_RESTART_COUNT"] = "1"
    report = record_and_analyze([first, second], tmp_path)
    assert sum_rank_seconds(report, 0) == {"sync-unknown-peer": 18.0}


def test_cutting_into_chunks_does_not_change_sums(tmp_path: Path) -> None:
    folder = write_recording(make_scripts((0.0, 0.3), (0.2, 0.3))[1], tmp_path / "node-1")
    whole, cut = (
        analyze_node(folder, build_limits({}), chunk_ns=ns) for ns in (10**12, 7 * SECOND)
    )
    tables = []
    for [item] in (whole.ranks, cut.ranks):
        [block] = item.operations.blocks
        table = np.zeros((HEAD_ROWS + 2 * len(CATEGORIES), STEPS), np.int64)
        read_block(block.location, block, np.arange(len(CATEGORIES)), table)
        tables.append(table)
    assert np.abs(tables[0] - tables[1]).max() <= 2
    assert np.array_equal(tables[0][[0, 1, 3, 4, 5, 6]], tables[1][[0, 1, 3, 4, 5, 6]])
    # by the end of step 10 rank 1 had waited 10 * 0.2 s for data and worked 10 * 0.3 s
    expected = dict(zip(("storage-local", "cpu-preprocess"), (1.0, 1.0)), work=3.0)
    row = tables[0][HEAD_ROWS + len(CATEGORIES) :, 9] / SECOND
    values = dict(zip(CATEGORIES, row.tolist()))
    assert {name: s for name, s in values.items() if s > 1e-6} == pytest.approx(expected)


def test_adjacent_operations_share_the_waited_time(tmp_path: Path) -> None:
    # The all-reduce of each step becomes two, of which the second begins as the first ends.
    scripts = make_scripts((0.0, 0.3), (0.0, 0.3))
    for script in scripts:
        whole = [span for span in script.main_spans if span[0] == layout.COLLECTIVE]
        for kind, come, leave, group, number, *rest in whole:
            script.main_spans.remove((kind, come, leave, group, number, *rest))
            middle = round(come + TRANSFER_S / 2, 6)
            script.main_spans += [
                (kind, come, middle, group, 2 * number, *rest),
                (kind, middle, leave, group, 2 * number + 1, *rest),
            ]
    report = record_and_analyze(scripts, tmp_path)
    assert [sum_rank_seconds(report, rank) for rank in (0, 1)] == [{"net-transfer": 6.0}] * 2
    assert [
        blind for blind in report.coverage_gaps if blind.what == "operations between ranks"
    ] == []
