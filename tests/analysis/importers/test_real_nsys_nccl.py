"""Other people's files, with the answers that were known before: `known.json` beside them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.importers.nccl.text_logs import read_text
from clusterprof.analysis.importers.nsys.importer import Nsys
from clusterprof.analysis.importers.workloads.megatron import MegatronPipeline
from clusterprof.analysis.pipeline import analyze
from tests.support.import_results import (
    import_folder,
    list_ranks,
    list_readings,
    list_spans,
    load_known_answers,
    require_folder,
)

MS = 1_000_000


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Nsight Systems profile of two H100, unpacked."""
    packed = require_folder("nsys-sqlite") / "mfu_2gpu_before.sqlite.gz"
    path = tmp_path_factory.mktemp("nsys") / "mfu.sqlite"
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


def test_idle_time_of_two_h100_matches_known_values(profile: Path) -> None:
    stated = load_known_answers("nsys-sqlite")["traces"]["mfu_2gpu_before.sqlite"]
    (node,), (account,), _ = import_folder(Nsys(), profile)
    assert sorted(list_ranks(node).values()) == [(0, None, "gpu0"), (1, None, "gpu1")]
    result, busy = list_spans(node), list_readings(node)
    for rank, pid in ((0, 144), (1, 145)):
        expected = stated["devices"][str(rank)]
        ((start, end, *_),) = result[f"{pid} step"]
        assert (end - start) / MS == pytest.approx(expected["span_ms"], abs=1e-9)
        readings = busy[f"gpu.busy_ns_total gpu{rank}"]
        worked = readings[-1][1] - readings[0][1]
        assert worked / MS == pytest.approx(expected["busy_any_ms"], abs=1e-9)
        operations = np.array(result[f"{pid} exposed_collective"])
        assert len(operations) == expected["nccl_kernels"]
        # Nothing else ran meanwhile: all of it is exposed.
        assert operations[:, 3].sum() / MS == pytest.approx(expected["nccl_union_ms"], abs=1e-9)
    read_of = account.read
    assert read_of["kernels"] == sum(device["kernels"] for device in stated["devices"].values())
    assert read_of["copies"] == sum(device["memcpys"] for device in stated["devices"].values())
    assert read_of["fills"] == sum(device["memsets"] for device in stated["devices"].values())
    assert read_of["CUDA calls"] == stated["runtime_calls"]
    assert read_of["NVTX ranges"] == stated["nvtx_events"]


def test_lost_time_of_two_h100_matches_known_values(profile: Path) -> None:
    report = analyze(profile)
    felt = {rank.rank: rank for rank in report.ranks}
    stated = load_known_answers("nsys-sqlite")["traces"]["mfu_2gpu_before.sqlite"]["devices"]
    for rank in (0, 1):
        expected = stated[str(rank)]
        lost_ms = expected["idle_any_ms"] + expected["nccl_union_ms"]
        assert felt[rank].lost_ns / MS == pytest.approx(lost_ms, abs=1e-9)
    assert any("8.7% of it idle" in note for note in report.notes)
    assert any("10.5% of it idle" in note for note in report.notes)


@pytest.mark.parametrize("name", ["aws_allreduce_1.txt", "aws_allreduce_2.txt"])
def test_real_nccl_tests_tables_match_known_values(name: str) -> None:
    stated = load_known_answers("nccl-tests")["files"][name]
    log = read_text(iter((require_folder("nccl-tests") / name).read_bytes().splitlines()))
    last = log.rows[-1]
    assert len(log.rows) == stated["rows"]
    assert log.tables[0].average_gbps == stated["avg_bus_bandwidth_GBps"]
    assert stated["largest"] == {
        "bytes": last.bytes,
        "time_us": last.time_us,
        "algbw": last.algorithm_gbps,
        "busbw": last.bus_gbps,
    }


def test_bubbles_of_four_real_stages_match_known_values() -> None:
    stated = load_known_answers("megatronapp-pipeline")["files"]["pp-iter10.json"]
    path = require_folder("megatronapp-pipeline") / "pp-iter10.json.gz"
    (node,), (account,), _ = import_folder(MegatronPipeline(), path)
    busy = list_readings(node)
    for stage in range(4):
        expected = stated["stages"][f"pp{stage}.tid0"]
        worked = busy[f"gpu.busy_ns_total stage{stage}"][-1][1]
        assert worked == expected["busy_us"] * 1000
        bubble = 100 * (1 - worked / (stated["iteration_us"] * 1000))
        assert bubble == pytest.approx(expected["bubble_pct"], abs=0.006)
    assert account.notes[-1].startswith("stage 3 does 1.6 times the work of the median stage")
    report = analyze(path)
    first = report.findings[0]
    assert first.cause.id == "sync-imbalance"
    assert first.culprits[0].rank == 3
    lost = {rank.rank: rank for rank in report.ranks}
    for stage, share in enumerate((0.53, 0.55, 0.54, 0.25)):
        ledger = lost[stage]
        assert ledger.lost_ns / ledger.in_step_ns == pytest.approx(share, abs=0.005)
