"""Output of rocm-smi, CSV and JSON, in sweeps with and without times; every value by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.metrics.rocm_smi import RocmSmi
from clusterprof.analysis.importers.registry import find_importer
from clusterprof.analysis.pipeline import analyze
from tests.support.metric_imports import import_files

SEEDS = Path(__file__).parents[1] / "seeds" / "rocm_smi"
S = 1_000_000_000
T = 1_767_712_383 * S  # 2026-01-06 15:13:03 UTC
USED = "{} busy {}% of the time by {} readings"
SKIPPED = "values out of range or not available"


def test_each_repeated_table_head_starts_a_sweep(tmp_path: Path) -> None:
    (node,), (account,) = import_files(
        RocmSmi(), tmp_path, host3__csv=(SEEDS / "loop.csv").read_bytes()
    )
    assert (node.name, node.wall) == ("host3", False)
    assert node.devices == [{"id": "gpu0", "vendor": "amd"}, {"id": "gpu1", "vendor": "amd"}]
    assert node.series == {
        "gpu.busy_ratio gpu0": [(0, 0.97), (S, 0.12)],
        "gpu.busy_ratio gpu1": [(0, 0.0), (S, None)],
        "gpu.memory_busy_ratio gpu0": [(0, 0.41), (S, 0.04)],
        "gpu.memory_busy_ratio gpu1": [(0, 0.0), (S, 0.0)],
        "gpu.power_watts gpu0": [(0, 237.0), (S, 90.5)],
    }
    assert account.skipped == {SKIPPED: 3}  # the use of one, and twice the power of a second die
    assert account.notes == [
        "the file shows no times: its 2 sweeps are assumed a second apart, the default of the tool",
        USED.format("2 devices were", 27, "their") + " (from 0% to 54%)",
    ]


def test_json_documents_with_times_are_read(tmp_path: Path) -> None:
    (node,), (account,) = import_files(
        RocmSmi(), tmp_path, log__json=(SEEDS / "loop.json").read_bytes()
    )
    assert node.wall is True
    assert node.devices == [{"id": "gpu0", "vendor": "amd", "name": "AMD Instinct MI300X"}]
    assert node.series == {
        "gpu.busy_ratio gpu0": [(T, 0.97), (T + S, 0.19)],
        "gpu.power_watts gpu0": [(T, 612.0)],
        "gpu.sm_clock_hertz gpu0": [(T, 2.1e9)],
        "gpu.memory_total_bytes gpu0": [(T + S, 205_822_885_888.0)],
        "gpu.memory_used_bytes gpu0": [(T + S, 1_048_576.0)],
    }
    assert (account.skipped, account.notes) == ({}, [USED.format("1 device was", 58, "its")])


def test_broken_rows_are_counted_and_other_rows_read(tmp_path: Path) -> None:
    text = b"""WARNING: AMD GPU device(s) is/are in a low-power state
device,GPU use (%),Temperature (Sensor junction) (C),Temperature (Sensor edge) (C)
card0,7,N/A,40
card0,7
cardX,1,2,3
{"card0": {"GPU use (%)": "8"
"""
    (node,), (account,) = import_files(RocmSmi(), tmp_path, log=text)
    assert node.series == {
        "gpu.busy_ratio gpu0": [(0, 0.07)],
        "gpu.temperature_celsius gpu0": [(0, 40.0)],
    }
    assert account.skipped == {
        "lines that are not rows of a table": 1,
        "rows with more or fewer columns than the head": 1,
        "documents that are not JSON": 1,
        SKIPPED: 1,
    }


def test_device_readings_alone_give_no_findings(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_bytes((SEEDS / "loop.json").read_bytes())
    assert analyze(path).findings == ()


@pytest.mark.parametrize("head", [b"device,price\ncard0,3\n", b'{"card0": {"suit": "hearts"}}'])
def test_tables_of_other_devices_are_not_recognised(head: bytes) -> None:
    assert find_importer(head, Path("x.csv")) is None


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpus.csv"
    path.write_bytes(b"device,GPU use (%)\n")
    (source,) = open_sources(path)
    with pytest.raises(CannotImportError, match="no GPU readings"):
        list(RocmSmi().nodes([source], [Account(path)]))
