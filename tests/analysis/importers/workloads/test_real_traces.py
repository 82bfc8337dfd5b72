"""Real traces of other people, where they are to be had: what is known of them comes out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from tests.support.import_results import read_span_table
from tests.support.trace_imports import SHARED, import_files, list_ranks

S = 1e9


def files(folder: str, pattern: str) -> list[Path]:
    """Files of a folder of real data."""
    result = sorted((SHARED / folder).glob(pattern))
    if not result:
        pytest.skip(f"{folder} is not here")
    return result


def table(node: NodeTables, pid: int) -> np.ndarray:
    """All spans of a process."""
    return read_span_table(node._spans[pid])


def seconds(spans: np.ndarray, kind: int) -> float:
    """How long spans of a kind are together."""
    mine = spans[:, spans[2] == kind]
    return float((mine[1] - mine[0]).sum()) / S


def test_dftracer_loading_of_every_rank_matches_known_values() -> None:
    (node,), _ = import_files(files("dftracer-dlio-8rank", "*.pfw.gz"))
    known = json.loads((SHARED / "dftracer-dlio-8rank" / "known.json").read_text())["per_rank"]
    assert node.name == "corona171"
    assert [(rank, world) for _, rank, world, _ in list_ranks(node)] == [(r, 8) for r in range(8)]
    for pid, rank, _, _ in list_ranks(node):
        spans, truth = table(node, pid), known[f"trace-{rank}-of-8.pfw"]
        loading = spans[:, spans[2] == layout.LOADING]
        assert seconds(spans, layout.LOADING) == pytest.approx(truth["dataset_getitem_s"])
        # posix_io_s leaves out some looks at files: 4 ms of 16 s
        assert loading[3].sum() / S == pytest.approx(truth["posix_io_s"], rel=5e-4)
        assert loading[5].sum() == truth["bytes_read"]
        assert set(loading[6]) == {2}  # Lustre
        steps = spans[:, spans[2] == layout.STEP]
        window_s = (steps[1].max() - steps[0].min()) / S
        # What follows the last step of an epoch, and its checkpoint, are in no step.
        assert window_s == pytest.approx(truth["train_s"], rel=2e-3)
        waits = seconds(spans, layout.DATA_WAIT) / window_s
        assert truth["getitem_share_of_train_pct"] / 100 <= waits < 0.37
        assert seconds(spans, layout.LOADING) / window_s == pytest.approx(
            truth["getitem_share_of_train_pct"] / 100, rel=3e-3
        )


def test_mlperf_storage_waits_match_the_listed_times() -> None:
    paths = files("mlperf-storage", "hpe_unet3d_h100_run1/*.json*")
    nodes, accounts = import_files(paths)
    known = json.loads((SHARED / "mlperf-storage" / "known.json").read_text())
    run = known["runs"]["hpe_unet3d_h100_run1"]
    assert [node.name for node in nodes] == run["rollup"]["hosts"]
    first = waited = took = 0.0
    for node in nodes:
        for pid, rank, world, _ in list_ranks(node):
            assert world == 15
            spans = table(node, pid)
            epochs = run["per_rank"][f"rank{rank:02d}"]["epochs"].values()
            load_s = sum(epoch["load_s"] for epoch in epochs)
            assert seconds(spans, layout.DATA_WAIT) == pytest.approx(load_s, abs=1e-3)
            waits = spans[:, (spans[2] == layout.DATA_WAIT) & (spans[6] == 1)]
            assert (waits[1] - waits[0]).sum() / S == pytest.approx(
                sum(epoch["first_load_s"] for epoch in epochs), abs=1e-3
            )
            first += (waits[1] - waits[0]).sum() / S
            waited += seconds(spans, layout.DATA_WAIT)
            took += seconds(spans, layout.STEP)
    assert 100 * waited / took == pytest.approx(run["rollup"]["load_share_of_proc_pct"], abs=5e-4)
    assert 100 * first / waited == pytest.approx(
        run["rollup"]["first_batch_share_of_load_pct"], abs=5e-3
    )
    notes = [note for account in accounts for note in account.notes]
    assert any("(AU): 91.23 %" in note for note in notes)
    value = {metric.name: metric.value for metric in analyze(paths).metrics}["au_ratio"] or 0.0
    # 0.1 of a point: the file times blocks on rank 0 only
    assert 100 * value == pytest.approx(run["metric"]["train_au_mean_percentage"], abs=0.1)


def test_dlio_sample_gives_two_ranks_and_a_disk() -> None:
    (node,), accounts = import_files(files("dlio-sample", "[!RkR]*.json")[:])
    assert [rank for _, rank, _, _ in list_ranks(node)] == [0, 1]
    assert {column.device for column in node._columns if column.signal.startswith("disk.")} == {
        "vda"
    }
    notes = [note for account in accounts for note in account.notes]
    # 29.07 of 263.72 s; 26.81 s of them in the first batches: plain sums of the lists
    assert any(note.startswith("waiting for data took 11.02 %") for note in notes)
    assert any("92.2 % of that for the first batch" in note for note in notes)


def test_mllog_names_the_slow_instance_and_the_cold_epochs() -> None:
    paths = files("mllog", "*/result_*.txt.gz")
    nodes, accounts = import_files(paths)
    known = json.loads((SHARED / "mllog" / "known.json").read_text())["logs"]
    assert len(nodes) == len(paths) == 16
    slow = [a.path.name for a in accounts if any("the slowest of" in note for note in a.notes)]
    assert slow == ["result_3.txt.gz"]
    for node, account in zip(nodes, accounts):
        truth = known[f"{account.path.parent.name}/{account.path.name[:-3]}"]
        spans = table(node, 1)
        length = truth.get("epoch_s") or truth["block_s"]
        assert seconds(spans, layout.STEP) == pytest.approx(length["sum"])
        assert int((spans[2] == layout.STEP).sum()) == length["n"]
        assert seconds(spans, layout.EVAL) == pytest.approx(truth["eval_s"]["sum"])
        cold = any("cold caches" in note for note in account.notes)
        assert cold == ("cosmoflow" in account.path.parent.name)
        staged = [note for note in account.notes if note.startswith("staging")]
        if truth["staging_s"]:
            assert float(staged[0].split()[2]) == pytest.approx(truth["staging_s"], abs=0.06)
        else:
            assert staged == []


def test_slowdown_of_the_straggling_job_matches_the_published_value() -> None:
    report = analyze(files("straggler-bytedance", "timeline-ST.json.gz"))
    known = json.loads((SHARED / "straggler-bytedance" / "known.json").read_text())["jobs"]["ST"]
    values = {metric.name: metric.value for metric in report.metrics}
    assert values["yardstick.slowdown_factor"] == pytest.approx(
        known["blocking_slowdown"], rel=0.02
    )


def test_stage_work_of_the_straggling_job_matches_known_values() -> None:
    (node,), _ = import_files(files("straggler-bytedance", "timeline-ST.json.gz"))
    known = json.loads((SHARED / "straggler-bytedance" / "known.json").read_text())["jobs"]["ST"]
    work: dict[int, list[float]] = {}
    for pid, rank, world, _ in list_ranks(node):
        assert (world, rank) == (8, pid - 1)
        spans = table(node, pid)
        assert int((spans[2] == layout.STEP).sum()) == known["steps"]
        mean = sum(seconds(spans, kind) for kind in (layout.FORWARD, layout.BACKWARD)) / 256
        work.setdefault((pid - 1) // 2, []).append(mean)
    truth = known["computed_by_us"]["mean_compute_duration_by_stage"]
    for stage, means in work.items():
        assert np.mean(means) == pytest.approx(truth[str(stage)], rel=1e-3)
