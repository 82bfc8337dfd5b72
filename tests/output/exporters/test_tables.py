"""Tables of a recording and its report, against rows done by hand; hostile names in all of them."""

from __future__ import annotations

import csv
import io
import json
import sys
import unicodedata
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.errors import UsageError
from clusterprof.output.exporters.base import Output
from clusterprof.output.exporters.tables import TABLES
from clusterprof.output.exporters.tabular import Csv, JsonLines, Parquet, escape_formula
from clusterprof.trace.schema import Clock, Columns, Header
from clusterprof.trace.writer import RecordingWriter
from tests.support.hostile_names import HOSTILE
from tests.support.small_run import MS, S, make_report, make_run, make_time_ns, write_recordings


def text_of(exporter: Csv | JsonLines, folder: Path) -> str:
    stdout = io.BytesIO()
    exporter.export(make_run(write_recordings(folder / "run"), make_report()), Output(None, stdout))
    return stdout.getvalue().decode()


def test_samples_become_rows_and_missing_values_state_a_reason(tmp_path: Path) -> None:
    lines = text_of(Csv(["samples"], ["gpu.*"]), tmp_path).split("\r\n")
    gpu = "node-a,gpu_nvidia,GPU-a"
    assert lines == [
        "node,collector,device,signal,unit,t_ns,value,why_missing",
        f"{gpu},gpu.busy_ns_total,ns,{make_time_ns(1)},0,",
        f"{gpu},gpu.busy_ns_total,ns,{make_time_ns(1.1)},50000000,",
        f"{gpu},gpu.busy_ns_total,ns,{make_time_ns(1.2)},,failed: timed out",
        f"{gpu},gpu.busy_ns_total,ns,{make_time_ns(1.3)},150000000,",
        f"{gpu},gpu.power_watts,watts,{make_time_ns(1)},300.0,",
        f"{gpu},gpu.power_watts,watts,{make_time_ns(1.1)},300.0,",
        f"{gpu},gpu.power_watts,watts,{make_time_ns(1.2)},400.0,",
        f"{gpu},gpu.power_watts,watts,{make_time_ns(1.3)},90.0,",
        "",
    ]


def test_span_rows_name_node_rank_and_process(tmp_path: Path) -> None:
    rows = list(csv.reader(io.StringIO(text_of(Csv(["spans"]), tmp_path), newline="")))
    assert [row[:9] for row in rows[1:]] == [
        ["node-a", "0", "201", "worker", "worker_start", "16", str(make_time_ns(0.5)), "0", "1"],
        ["node-a", "0", "201", "worker", "fetch", "2", str(make_time_ns(1)), "300000000", "2"],
        ["node-a", "0", "100", "rank", "data_wait", "1", str(make_time_ns(1)), "400000000", "1"],
        ["node-a", "0", "100", "rank", "forward", "9", str(make_time_ns(1.4)), "200000000", "2"],
        ["node-a", "0", "100", "rank", "tokenise", "64", str(make_time_ns(1.5)), "300000000", "3"],
        ["node-a", "0", "100", "rank", "step", "3", str(make_time_ns(1)), "1000000000", "4"],
        ["node-b", "1", "100", "rank", "checkpoint", "5", str(make_time_ns(1)), "1000000000", "1"],
        ["node-b", "1", "100", "rank", "step", "3", str(make_time_ns(1)), "1100000000", "2"],
    ]
    assert rows[0][9:14] == ["value_names", "value_1", "value_2", "value_3", "value_4"]
    assert rows[2][9] == "items user_cpu_ns system_cpu_ns read_bytes"
    assert rows[2][10:] == ["8", "5", "6", "4096", ""]


def test_ledger_rows_sum_per_rank_in_json_lines(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in text_of(JsonLines(["ledger"]), tmp_path).splitlines()]
    assert lines[0] == {
        "table": "ledger",
        "node": "node-a",
        "rank": 0,
        "pid": 100,
        "device": "GPU-a",
        "emulated": False,
        "source": "stream-events",
        "part": "unmeasured",
        "cause": "",
        "duration_ns": 0,
    }
    of_rank_1 = [
        (line["part"], line["cause"], line["duration_ns"]) for line in lines if line["rank"] == 1
    ]
    assert of_rank_1 == [
        ("unmeasured", "", 0),
        ("productive", "", 650 * MS),
        ("lost", "storage-local", 300 * MS),
        ("lost", "unattributed", 50 * MS),
        ("caused", "storage-local", 600 * MS),
        ("caused", "unattributed", 50 * MS),
    ]
    assert sum(ns for part, _, ns in of_rank_1 if part != "caused") == S


def test_all_tables_fit_a_folder_or_a_json_lines_file(tmp_path: Path) -> None:
    result = make_run(write_recordings(tmp_path / "run"), make_report())
    Csv().export(result, Output(tmp_path / "out", io.BytesIO(), folder=True))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(
        f"{table.name}.csv" for table in TABLES
    )
    target = tmp_path / "all.jsonl"
    JsonLines().export(result, Output(target, io.BytesIO()))
    tables = [json.loads(line)["table"] for line in target.read_text().splitlines()]
    assert [(name, tables.count(name)) for name in dict.fromkeys(tables)] == [
        ("samples", 12),
        ("spans", 8),
        ("events", 3),
        ("gaps", 1),
        ("ledger", 12),
    ]
    assert list(tmp_path.glob(".*")) == []


def test_several_csv_tables_need_a_folder_and_known_names() -> None:
    with pytest.raises(UsageError, match="6 tables need a folder"):
        Csv().check(Output(None, io.BytesIO()))
    with pytest.raises(UsageError, match="unknown table 'smaples'; did you mean 'samples'"):
        JsonLines(["smaples"]).check(Output(None, io.BytesIO()))


def test_parquet_without_pyarrow_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="needs pyarrow") as error:
        Parquet().check(Output(tmp_path, io.BytesIO()))
    assert "clusterprof[arrow]" in error.value.remedy


def hostile_recording(folder: Path) -> Path:
    """One node with a device for every hostile string, in the collector's columns."""
    devices = list(dict.fromkeys(name[:300] for name in HOSTILE))
    devices = [name.encode("utf-8", "replace").decode() for name in devices]
    header = Header({"key": "k", "hostname": "h"}, {}, {}, [], {}, {}, {}, [])
    writer = RecordingWriter(folder / "k", header, lambda: Clock(S, S, S), keep_free_bytes=0)
    values = [array("q", [1]) for _ in devices]
    names = ["disk.reads_total"] * len(devices)
    writer.append(Columns("disk", names, devices, array("q", [S]), values, [None] * len(devices)))
    writer.close()
    return folder


def test_hostile_names_are_escaped_in_every_cell(tmp_path: Path) -> None:
    result = make_run(write_recordings(tmp_path / "plain"), make_report())
    node = replace(result.nodes[0], folder=hostile_recording(tmp_path / "bad") / "k", name="=cmd()")
    stdout = io.BytesIO()
    hostile = replace(result, nodes=(node,))
    Csv(["samples"]).export(hostile, Output(None, stdout))
    written = stdout.getvalue().decode()
    rows = list(csv.reader(io.StringIO(written, newline="")))
    assert len(rows) > 200
    assert {len(row) for row in rows} == {8}
    assert {row[0] for row in rows[1:]} == {"'=cmd()"}
    cells = [cell for row in rows[1:] for cell in row]
    assert [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))] == []
    unsafe = {c for c in written if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")}
    assert unsafe == {"\r", "\n"}
    lines = io.BytesIO()
    JsonLines(["samples"]).export(hostile, Output(None, lines))
    assert all(json.loads(line)["value"] == 1 for line in lines.getvalue().splitlines())


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", " =1", "'=1"])
def test_cells_that_look_like_formulas_are_quoted(text: str) -> None:
    assert escape_formula(text) == "'" + text
    assert escape_formula("a=1") == "a=1"


@pytest.mark.long
def test_pyarrow_reads_the_exported_parquet_tables(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    result = make_run(write_recordings(tmp_path / "run"), make_report())
    Parquet().export(result, Output(tmp_path / "out", io.BytesIO(), folder=True))
    samples = parquet.read_table(tmp_path / "out/samples.parquet").to_pylist()
    assert len(samples) == 12
    assert samples[2] == {
        "node": "node-a",
        "collector": "gpu_nvidia",
        "device": "GPU-a",
        "signal": "gpu.busy_ns_total",
        "unit": "ns",
        "t_ns": make_time_ns(1.2),
        "value": None,
        "why_missing": "failed: timed out",
    }
    ledger = parquet.read_table(tmp_path / "out/ledger.parquet").to_pylist()
    assert ledger[1]["duration_ns"] == 650 * MS
    assert {file.stem for file in (tmp_path / "out").iterdir()} == {t.name for t in TABLES}
