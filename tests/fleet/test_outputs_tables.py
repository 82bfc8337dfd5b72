"""Tables for other programs have the rows of the ledger."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from clusterprof.errors import UsageError
from clusterprof.fleet.database import Ledger, Price, Source, open_ledger
from clusterprof.fleet.outputs import FLEET_TABLES, export_ledger
from clusterprof.output.exporters.base import Output
from tests.support.fleet_jobs import S, make_entry


def export(
    folder: Path, form: str, output: Path | None, *names: str, is_folder: bool = True
) -> bytes:
    stdout = io.BytesIO()
    with open_ledger(folder / "fleet.db") as ledger:
        fill(ledger)
        export_ledger(ledger, form, Output(output, stdout, is_folder), list(names))
    return stdout.getvalue()


def fill(ledger: Ledger) -> None:
    ledger.put(make_entry(1, ["a", "b"], ["b"]), Source("1", "1", 1), Price(36, "EUR"))
    ledger.put(make_entry(2, ["c"], user="=1+1", started_ns=None), Source("2", "1", 1))


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_export_writes_a_file_per_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(tmp_path, "csv", out)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{name}.csv" for name in FLEET_TABLES
    )
    jobs = read_csv(out / "jobs.csv")
    assert [(job["lost_ns"], job["lost_cost"], job["currency"]) for job in jobs] == [
        (str(100 * S), "1.0", "EUR"),
        (str(30 * S), "", ""),
    ]
    assert jobs[1]["user"] == "'=1+1" and jobs[1]["started_ns"] == ""
    causes = read_csv(out / "causes.csv")
    assert sum(int(row["lost_ns"]) for row in causes) == 130 * S
    nodes = read_csv(out / "nodes.csv")
    assert [(row["node"], row["is_culprit"]) for row in nodes] == [
        *(("a", "false"), ("b", "true"), ("c", "false"))
    ]
    assert {row["resource"] for row in read_csv(out / "culprits.csv")} == {"/data", ""}


def test_a_single_table_is_written_to_stdout(tmp_path: Path) -> None:
    text = export(tmp_path, "csv", None, "nodes", is_folder=False).decode()
    assert text.splitlines()[0].startswith("job,node,switch,ranks,window_ns")
    assert len(text.splitlines()) == 4


def test_parquet_export_has_the_rows_of_the_ledger(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export(tmp_path, "parquet", tmp_path / "out")
    jobs = parquet.read_table(tmp_path / "out/jobs.parquet").to_pylist()
    assert [job["lost_ns"] for job in jobs] == [100 * S, 30 * S]
    assert jobs[1]["started_ns"] is None and jobs[0]["is_emulated"] is False
    nodes = parquet.read_table(tmp_path / "out/nodes.parquet").to_pylist()
    assert sum(node["lost_ns"] for node in nodes) == 130 * S


def test_unknown_tables_and_a_missing_folder_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown table 'job'; did you mean 'jobs'"):
        export(tmp_path, "csv", tmp_path / "out", "job")
    with pytest.raises(UsageError, match="4 tables need a folder"):
        export(tmp_path, "csv", tmp_path / "one.csv", is_folder=False)
