"""Darshan: reads of every rank, and what is refused. The package's own reader is stood in for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from tests.support.trace_imports import MS, import_files, list_ranks, list_readings, list_spans

BEGUN_NS = 1_600_000_000 * 1_000_000_000


class Records(list[dict[str, Any]]):
    """Records of a module, as pydarshan returns them."""

    def to_numpy(self) -> list[dict[str, Any]]:
        return list(self)

    def to_df(self) -> dict[str, dict[str, Any]]:
        columns = {key: Column(row[key] for row in self) for key in self[0]}
        return {"counters": columns, "fcounters": columns}


class Column(list[float]):
    def sum(self) -> float:
        return sum(self)


def read(start_s: float, end_s: float, size: int) -> dict[str, float]:
    return {"offset": 0, "length": size, "start_time": start_s, "end_time": end_s}


def record(rank: int, host: str, reads: list[dict[str, float]], writes: int = 0) -> dict[str, Any]:
    segments = [read(0, 1, 1)] * writes
    return {
        "id": 5,
        "rank": rank,
        "hostname": host,
        "read_segments": reads,
        "write_segments": segments,
    }


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "job.darshan"
    path.write_bytes(b"3.41\0\0\0\0")
    return path


def install(monkeypatch: pytest.MonkeyPatch, records: dict[str, Records]) -> None:
    """Install a package darshan whose log has these records."""

    class Report:
        metadata = {  # noqa: RUF012
            "job": {
                "start_time_sec": 1_600_000_000,
                "start_time_nsec": 0,
                "run_time": 2.0,
                "nprocs": 3,
            }
        }
        name_records = {5: "/lustre/data/a.npz"}  # noqa: RUF012

        def __init__(self, path: str, read_all: bool) -> None:
            self.records: dict[str, Records] = {}
            self.modules = records

        def mod_read_all_records(self, name: str) -> None:
            self.records[name] = records[name]

        mod_read_all_dxt_records = mod_read_all_records

    module = ModuleType("darshan")
    module.DarshanReport = Report  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "darshan", module)


def test_reads_of_a_rank_become_data_waits_without_a_device(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = Records(
        [
            record(0, "node-a", [read(0.1, 0.3, 1000), read(0.2, 0.4, 500)]),
            record(0, "node-a", [read(1.0, 1.5, 24)], writes=2),
            record(2, "node-b", [read(0.5, 0.6, 7), read(-1, 0.2, 9)]),
        ]
    )
    install(monkeypatch, {"DXT_POSIX": traced, "POSIX": Records()})
    nodes, (account,) = import_files([log])
    assert [(node.name, node.wall_minus_own_ns) for node in nodes] == [
        ("node-a", BEGUN_NS),
        ("node-b", BEGUN_NS),
    ]
    assert list_ranks(nodes[0]) == [(1, 0, 3, "unseen-0")]
    assert list_ranks(nodes[1]) == [(3, 2, 3, "unseen-2")]
    assert list_spans(nodes[0], 1) == {
        "step": [(0, 2000, 1, 2, -1, -1)],
        "data_wait": [(100, 400, -1, 0, -1, -1), (1000, 1500, -1, 0, -1, -1)],
        "loading": [(100, 400, 300 * MS, 0, 1500, 2), (1000, 1500, 500 * MS, 0, 24, 2)],
    }
    assert list_readings(nodes[0], "gpu.busy_ns_total", "unseen-0") == {}
    assert account.skipped == {"writes": 2, "reads without a usable time": 1}
    assert account.notes == [
        "reads took 0.900 s of 4.000 s of all ranks (22.5%) for 0.0 MB; longest on rank 0: 0.800 s",
        "whether an accelerator waited for its reads is not in the log",
    ]
    assert account.answers == account.notes[:1]


def test_a_log_of_writes_alone_is_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"DXT_POSIX": Records([record(0, "node-a", [], writes=3)])})
    with pytest.raises(CannotImportError, match="traces 3 writes and no read; only reads"):
        import_files([log])


def test_totals_without_times_are_refused_and_stated(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = {"POSIX_F_READ_TIME": 1.25, "POSIX_BYTES_READ": 3e6}
    install(monkeypatch, {"POSIX": Records([totals, totals])})
    with pytest.raises(CannotImportError) as caught:
        import_files([log])
    assert caught.value.message == (
        "job.darshan: the log has totals only (POSIX: 2.500 s in reads of 6.0 MB, all ranks);"
        " record with DXT_ENABLE_IO_TRACE=1 to get the time of every read"
    )


def test_a_missing_darshan_package_is_reported_with_the_install_command(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "darshan", None)
    with pytest.raises(CannotImportError) as caught:
        import_files([log])
    assert caught.value.message == (
        "job.darshan: a Darshan log, and the package darshan is not installed:"
        " pip install 'clusterprof[darshan]'"
    )
