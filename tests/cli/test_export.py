"""`clusterprof export` as the command line runs it, with the real analysis behind it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterprof.cli.app import main
from clusterprof.output.exporters.registry import EXPORTERS
from tests.support import perfetto_packets as wire
from tests.support.small_run import write_recordings

OLD = Path(__file__).parents[1] / "recordings" / "dlrm-8rank"


@dataclass
class Done:
    """What a command left behind."""

    returncode: int
    stdout: bytes
    stderr: bytes


Export = Callable[..., Done]


@pytest.fixture
def export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Export:
    """Return the command, run in a folder of its own; a process for each would cost a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERPROF_PROFILE", raising=False)

    def run(*words: str) -> Done:
        code = main(["export", *words])
        return Done(code, *capsysbinary.readouterr())

    return run


def test_exporter_names_are_unique() -> None:
    assert len({exporter.name for exporter in EXPORTERS}) == len(EXPORTERS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "--to"),
        (["x", "--to", "perfeto"], "--to 'perfeto' is unknown; did you mean 'perfetto'?"),
        (["x", "--to", "csv"], "6 tables need a folder"),
        (["x", "--to", "csv", "--table", "smaples"], "did you mean 'samples'"),
        (["x", "--to", "perfetto", "--table", "spans"], "--table is for parquet, csv, json"),
        (["x", "--to", "otlp"], "--endpoint http://HOST:4318"),
        (["x", "--to", "otlp", "--endpoint", "nowhere"], "is not an address"),
        (["x", "--to", "json", "--endpoint", "http://x"], "--endpoint is for otlp"),
        (["x", "--to", "otlp", "--endpoint", "http://x", "-o", "y"], "writes no file"),
    ],
)
def test_invalid_export_arguments_exit_with_2(
    words: list[str], message: str, tmp_path: Path, export: Export
) -> None:
    done = export(*words)
    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_recording_exits_with_5_and_leaves_no_file(
    tmp_path: Path, export: Export
) -> None:
    done = export("gone", "--to", "perfetto", "-o", "x.pftrace")
    assert done.returncode == 5
    assert list(tmp_path.iterdir()) == []


def test_a_real_analysis_gives_a_trace_of_all_ranks(tmp_path: Path, export: Export) -> None:
    done = export(str(OLD), "--to", "perfetto", "-o", "run.pftrace")
    assert (done.returncode, done.stdout) == (0, b"")
    trace = wire.read_trace((tmp_path / "run.pftrace").read_bytes())
    ranks = sorted(name for name in trace.processes if name.startswith("rank"))
    assert [name.split(" · ")[0] for name in ranks] == [f"rank {n}" for n in range(8)]
    steps = {track for track, *_ in trace.slices if track.endswith("| steps")}
    assert len(steps) == 8


def test_tables_of_a_real_analysis_sum_to_the_windows(tmp_path: Path, export: Export) -> None:
    write_recordings(tmp_path / "run")
    done = export("run", "--to", "csv", "-o", "tables/")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    with (tmp_path / "tables/ledger.csv").open(newline="") as file:
        ledger = list(csv.DictReader(file))
    ranks = {(row["node"], row["rank"]) for row in ledger if row["rank"]}
    assert ranks == {("node-a", "0"), ("node-b", "1")}
    shown = export("run", "--to", "openmetrics").stdout.decode()
    assert shown.endswith("# EOF\n")
    for rank in "01":
        parts = {"unmeasured", "outside", "productive", "lost"}
        whole = sum(
            int(r["duration_ns"]) for r in ledger if r["rank"] == rank and r["part"] in parts
        )
        observed = [
            float(line.rsplit(" ", 1)[1])
            for line in shown.splitlines()
            if line.startswith("clusterprof_observed_gpu_seconds_total{")
            and f'rank="{rank}"' in line
        ]
        assert len(observed) == 4
        assert sum(observed) == pytest.approx(whole / 1e9, abs=1e-9)


def test_json_export_writes_lines_to_stdout(tmp_path: Path, export: Export) -> None:
    write_recordings(tmp_path / "run")
    done = export("run", "--to", "json", "--table", "spans")
    assert done.returncode == 0
    assert {json.loads(line)["table"] for line in done.stdout.splitlines()} == {"spans"}


def test_a_closed_stdout_pipe_ends_export_without_an_error(tmp_path: Path) -> None:
    write_recordings(tmp_path / "run")
    run = [sys.executable, "-m", "clusterprof", "export", "run", "--to", "json"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        run,
        cwd=tmp_path,
        env=environ,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_textfile_is_replaced_atomically_with_default_permissions(
    tmp_path: Path, export: Export
) -> None:
    write_recordings(tmp_path / "run")
    target = tmp_path / "clusterprof.prom"
    target.write_text("old\n")
    done = export("run", "--to", "openmetrics", "-o", str(target))
    assert (done.returncode, done.stderr) == (0, b"")
    text = target.read_text()
    assert "# TYPE clusterprof_observed_gpu_seconds_total counter\n" in text
    assert "# EOF" not in text
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clusterprof.prom", "run"]


def test_an_unwritable_path_is_a_single_line_error(tmp_path: Path, export: Export) -> None:
    write_recordings(tmp_path / "run")
    done = export("run", "--to", "openmetrics", "-o", "missing/x.om")
    assert done.returncode == 2
    assert done.stderr.decode() == (
        "clusterprof: cannot write missing/x.om: no such file or directory\n"
    )
    full = export("run", "--to", "openmetrics", "-o", "/dev/full")
    assert full.returncode == 1
    assert full.stderr.decode() == "clusterprof: cannot write /dev/full: no space left on device\n"
