"""Tables of step times as parquet say what they say as CSV; skipped where pyarrow is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.workloads.step_times import StepTimes
from clusterprof.analysis.pipeline import analyze_with_details

pyarrow = pytest.importorskip("pyarrow")
ROWS = [(rank, step, 2.0 if rank == 2 else 1.0) for step in range(1, 21) for rank in range(4)]


def written(path: Path, **columns: list[object]) -> Path:
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_parquet_table_gives_the_report_of_the_same_csv(tmp_path: Path) -> None:
    rank, step, took = (list(value) for value in zip(*ROWS))
    table = written(tmp_path / "steps.parquet", rank=rank, step=step, duration_s=took)
    text = tmp_path / "steps.csv"
    lines = ["rank,step,duration_s", *(f"{r},{s},{t}" for r, s, t in ROWS)]
    text.write_text("\n".join(lines) + "\n")
    of_table, of_text = analyze_with_details([table]).report, analyze_with_details([text]).report
    assert of_table.lost_ns == of_text.lost_ns == 20 * 3 * 1_000_000_000  # three wait 1 s a step
    assert of_table.findings[0].culprits[0].rank == 2
    assert of_table.ranks == of_text.ranks


def test_a_table_of_other_columns_is_not_recognised(tmp_path: Path) -> None:
    (source,) = open_sources(written(tmp_path / "other.parquet", a=[1], b=[2]))
    assert not StepTimes().recognizes(source.head, source.path)


def test_a_damaged_parquet_table_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "steps.parquet", rank=[0], step=[1], duration_s=[1.0])
    data = path.read_bytes()
    path.write_bytes(data[:-8] + b"\xff" * 4 + data[-4:])
    (source,) = open_sources(path)
    with pytest.raises(CannotImportError, match="damaged parquet file"):
        list(StepTimes().nodes([source], [Account(path)]))
