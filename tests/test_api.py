"""The Python interface on two recordings: tables, files, the gate, the view for notebooks."""

from __future__ import annotations

from pathlib import Path

import pytest

import clusterprof
from clusterprof.errors import UsageError

RECORDINGS = Path(__file__).parent / "recordings"


@pytest.fixture(scope="module")
def report() -> clusterprof.RunReport:
    return clusterprof.analyze(RECORDINGS / "dlrm-8rank")


def test_api_tables_match_the_report(report: clusterprof.RunReport) -> None:
    findings = report.list_columns("findings")
    assert findings["cause"][:3] == ["cpu-gc", "net-transfer", "h2d-copy"]
    assert (findings["node"][0], findings["rank"][0]) == ("gpu-b", 7)
    ledger = report.list_columns("ledger")
    inside = [ns for ns, is_in in zip(ledger["lost_ns"], ledger["in_steps"]) if is_in]
    assert sum(inside) == report.lost_ns
    assert report.list_columns("ranks")["lost_ns"] == [rank.lost_ns for rank in report.ranks]
    assert {len(column) for column in report.list_columns("evidence").values()} == {
        sum(len(finding.evidence) for finding in report.findings)
    }


@pytest.mark.parametrize("table", ["findings", "lines", "evidence", "ranks", "ledger", "metrics"])
def test_every_data_frame_library_receives_every_table(
    report: clusterprof.RunReport, table: str
) -> None:
    columns = report.list_columns(table)
    rows = len(next(iter(columns.values())))
    for library in ("pyarrow", "pandas", "polars"):
        pytest.importorskip(library)
    arrow, frame, polars = report.to_arrow(table), report.to_pandas(table), report.to_polars(table)
    assert arrow.column_names == list(frame.columns) == polars.columns == list(columns)
    assert (arrow.num_rows, len(frame), polars.height) == (rows, rows, rows)


def test_the_api_gate_gives_the_verdict_of_the_command(report: clusterprof.RunReport) -> None:
    unknown = report.gate(["stall.storage_ratio <= 10%"])  # no device was measured
    failed = clusterprof.gate(RECORDINGS / "h200" / "sleep", ["stall.eval_ratio <= 10%"])
    assert (unknown.outcome, failed.outcome, failed.exit_code) == ("cannot tell", "fail", 3)


@pytest.mark.parametrize(
    ("suffix", "begin"),
    [(".html", "<!doctype"), (".md", "#"), (".json", "{"), (".txt", "Recording: ")],
)
def test_the_file_suffix_selects_the_format(
    report: clusterprof.RunReport, suffix: str, begin: str, tmp_path: Path
) -> None:
    saved = report.save(tmp_path / f"report{suffix}")
    assert saved.read_text(encoding="utf-8").lstrip().startswith(begin)


def test_a_notebook_shows_the_first_screen_without_scripts(report: clusterprof.RunReport) -> None:
    page = report._repr_html_()
    assert page.startswith("<div") and "<script" not in page and "Main cause" in page
    assert page.isascii() and "gpu-b rank 7" in page
    assert "Main cause" in repr(report) and len(repr(report).splitlines()) <= 40


def test_hostile_names_are_escaped_in_notebook_html() -> None:
    import dataclasses

    hostile = dataclasses.replace(
        clusterprof.analyze(RECORDINGS / "dlrm-8rank"), title="<script>alert(1)</script>"
    )
    assert "<script" not in hostile._repr_html_()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.list_columns("nodes"), "unknown table 'nodes'"),
        (lambda r: r.render("pdf"), "unknown form 'pdf'"),
        (lambda r: r.save("report.pdf"), "unknown suffix '.pdf'"),
        (lambda r: r.gate([]), "no rules"),
        (lambda r: clusterprof.analyze(RECORDINGS, jobs=0), "jobs=0"),
        (lambda r: clusterprof.analyze(RECORDINGS, part=3), "part=3"),  # type: ignore[arg-type]
    ],
)
def test_invalid_arguments_raise_a_named_usage_error(
    report: clusterprof.RunReport, call: object, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        call(report)  # type: ignore[operator]
