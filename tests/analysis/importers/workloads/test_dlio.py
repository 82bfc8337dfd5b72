"""DLIO and MLPerf Storage: steps, waits, the emulated accelerator, iostat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.findings.efficiency_metrics import NO_BENCHMARK
from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.workloads.dlio import AU_FACT
from clusterprof.analysis.pipeline import analyze
from tests.support.trace_imports import (
    MS,
    SEEDS,
    import_files,
    list_ranks,
    list_readings,
    list_spans,
)

RUN = sorted((SEEDS / "dlio" / "run").iterdir())
ORIGIN = 1_704_067_200_000 * MS  # 2024-01-01 00:00:00 UTC


def test_a_folder_is_imported_as_a_job_of_two_hosts() -> None:
    nodes, accounts = import_files(RUN)
    assert [(node.name, list_ranks(node)) for node in nodes] == [
        ("node-a", [(1, 0, 2, "emulated-0")]),
        ("node-b", [(2, 1, 2, "emulated-1")]),
    ]
    assert list_spans(nodes[0], 1, ORIGIN) == {
        "step": [
            (1000, 3000, 1, 2, -1, -1),
            (3000, 4500, 2, 2, -1, -1),
            (4500, 6000, 3, 2, -1, -1),
            (10500, 13500, 4, 2, -1, -1),
            (13500, 14750, 5, 2, -1, -1),
        ],
        "data_wait": [
            (1000, 2000, 1, -1, -1, 1),
            (3000, 3500, 2, -1, -1, 0),
            (4500, 4750, 3, -1, -1, 0),
            (10500, 12500, 4, -1, -1, 1),
            (13500, 13750, 5, -1, -1, 0),
        ],
        "epoch": [(1000, 6000, 0, 0, 0, 0), (10500, 14750, 0, 0, 0, 0)],
    }
    busy = list_readings(nodes[0], "gpu.busy_ns_total", "emulated-0", ORIGIN)
    assert busy == {
        1000: 0,
        2000: 0,
        3000: 1000 * MS,
        3500: 1000 * MS,
        4500: 2000 * MS,
        4750: 2000 * MS,
        5750: 3000 * MS,
        12500: 3000 * MS,
        13500: 4000 * MS,
        13750: 4000 * MS,
        14750: 5000 * MS,
    }
    values = dict(zip((path.name for path in RUN), accounts))
    assert values["0_output.json"].notes == [
        "DLIO sleeps instead of computing: its emulated accelerators count as busy then",
        # 4 + 2.75 s of 9.25 + 7.75; the first batches 3 + 1.5 of them
        "waiting for data took 39.71 % of the listed steps; 66.7 % of that for the first batch of"
        " an epoch",
        "published accelerator utilization (AU): 55.00 % of whole epochs; of the listed steps"
        " 58.8 % are computation",
        "2.5 s of the epochs lie outside the listed steps: they follow the last step of each",
    ]
    assert values["1_output.json"].skipped == {"evaluations": 1}


def test_the_utilization_follows_the_rule_of_the_benchmark() -> None:
    # Computation over the time of the block, both without the first step. Rank 0: 2 of 6 - 2 s and
    # 1 of 5 - 3 s; rank 1: 2 of 6 - 1.5 s and 1 of 5 - 2 s.
    nodes, _ = import_files(RUN)
    ratios = [node.header().devices[0][AU_FACT] for node in nodes]
    assert ratios == [pytest.approx([0.5, 0.5]), pytest.approx([2 / 4.5, 1 / 3])]


def test_utilization_excludes_the_first_batch_and_needs_block_times(tmp_path: Path) -> None:
    output, epochs = tmp_path / "0_output.json", tmp_path / "per_epoch_stats.json"

    def ratios(first_s: float, end_s: int = 30, compute: object = None) -> object:
        steps = {"load": [first_s - 1, 0.0, 0.0], "proc": [first_s, 1.0, 1.0], "compute": [1.0] * 3}
        steps["compute"] = steps["compute"] if compute is None else compute  # type: ignore[assignment]
        output.write_text(json.dumps({"1": {k: {"block1": v} for k, v in steps.items()}}))
        times = {"start": "2024-01-01T00:00:00", "end": f"2024-01-01T00:00:{end_s:02d}"}
        epochs.write_text(json.dumps({"1": {"block1": times}}))
        (node,), _ = import_files([output, epochs])
        return node.header().devices[0].get(AU_FACT)

    assert ratios(first_s=26) == pytest.approx([2 / 4])  # 30 - 26 s
    assert ratios(first_s=6, end_s=10) == pytest.approx([2 / 4])
    assert ratios(first_s=6, end_s=7) is None  # two steps of 1 s do not fit into 1 s
    assert ratios(first_s=6, compute=[]) is None
    epochs.write_text("{}")
    (node,), _ = import_files([output])
    assert AU_FACT not in node.header().devices[0]


def test_benchmark_utilization_is_reported_only_for_benchmark_runs(tmp_path: Path) -> None:
    report = analyze(RUN)
    values = {metric.name: metric for metric in report.metrics}
    # the mean of the epochs of both ranks
    assert values["au_ratio"].value == pytest.approx((0.5 + (2 / 4.5 + 1 / 3) / 2) / 2)
    assert report.impact is not None
    assert report.impact.efficiency_metrics[-1][:2] == (
        "MLPerf Storage AU",
        values["au_ratio"].value,
    )
    other = tmp_path / "steps.csv"
    other.write_text("rank,step,duration_s\n" + "".join(f"0,{step},1\n" for step in range(9)))
    values = {metric.name: metric for metric in analyze(other).metrics}
    assert (values["au_ratio"].value, values["au_ratio"].why_missing) == (None, NO_BENCHMARK)


def test_iostat_output_becomes_disk_counters_of_its_host() -> None:
    nodes, _ = import_files(RUN)
    expected = {
        "disk.read_bytes_total": {1000: 0, 2000: 3 << 20, 4000: 5 << 20},
        "disk.reads_total": {1000: 0, 2000: 10, 4000: 50},
        "disk.read_ns_total": {1000: 0, 2000: 25 * MS, 4000: 65 * MS},
        "disk.busy_ns_total": {1000: 0, 2000: 400 * MS, 4000: 600 * MS},
        "disk.queue_ns_total": {1000: 0, 2000: 500 * MS, 4000: 1000 * MS},
    }
    for signal, readings in expected.items():
        assert list_readings(nodes[0], signal, "vda", ORIGIN) == readings
        assert list_readings(nodes[1], signal, "vda", ORIGIN) == {}


def test_blocks_without_wall_times_are_placed_in_sequence() -> None:
    (node,), (account,) = import_files([RUN[0]])
    assert node.wall_minus_own_ns is None
    assert [span[:2] for span in list_spans(node, 1)["step"]] == [
        (0, 2000),
        (2000, 3500),
        (3500, 5000),
        (5000, 8000),
        (8000, 9250),
    ]
    assert account.notes[-1] == "no times of day: blocks are placed one after the other"


def test_invalid_steps_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "3_output.json"
    load = [1.0, None, -1.0, 1e300, 10**400, "x", 0.5]
    text = json.dumps({"1": {"load": {"block1": load}, "proc": {"block1": [2.0] * 6}}, "x": [1]})
    path.write_text(text.replace('"x": [1]', '"2": {"load": 1, "proc": NaN}'))
    (node,), (account,) = import_files([path])
    assert list_ranks(node) == [(4, 3, 1, "emulated-3")]
    assert list_spans(node, 4)["step"] == [(0, 2000, 1, 2, -1, -1)]
    assert account.skipped == {
        "steps without a valid time": 5,
        "load or step times without a counterpart": 1,
        "epochs without load times": 1,
    }
    assert "without compute times, all of a step except loading counts as computation" in (
        account.notes
    )


def test_missing_output_files_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text((SEEDS / "dlio" / "run" / "summary.json").read_text())
    nodes, (account,) = import_files([path])  # its figures are an answer, without a rank
    assert nodes == []
    assert [answer.partition(":")[0] for answer in account.answers] == [
        "published accelerator utilization (AU)"
    ]
    path = tmp_path / "per_epoch_stats.json"
    path.write_text((SEEDS / "dlio" / "run" / "per_epoch_stats.json").read_text())
    with pytest.raises(CannotImportError, match=r"<rank>_output\.json is needed"):
        import_files([path])
    path = tmp_path / "summary.json"
    path.write_text('{"1": {"load": {"block1": [1.0, 2')
    with pytest.raises(CannotImportError, match="no steps of any rank"):
        import_files([path])
