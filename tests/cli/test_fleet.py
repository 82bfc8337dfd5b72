"""`clusterprof fleet` as a user runs it: real processes, real recordings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterprof.output.renderers.json import Json
from tests.support.commands import make_environment, run_command
from tests.support.gate_runs import draw_step_lengths, make_run

RECORDING = Path(__file__).parents[1] / "recordings/v1"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A recording and three reports."""
    folder = tmp_path / "runs"
    shutil.copytree(RECORDING, folder / "job")
    for number in range(3):
        report = make_run(f"job-{number}", draw_step_lengths(20), 0.1 * number, started=number + 1)
        (folder / f"{number}.json").write_text(Json().render(report))
    return folder


def test_fleet_adds_jobs_and_prints_the_ledger(runs: Path, tmp_path: Path) -> None:
    done = run_command("fleet", "runs", "--db", "fleet.db", "--no-color", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 added, 0 replaced, 0 unchanged" in done.stderr
    assert done.stdout.startswith("clusterprof fleet  fleet.db\n4 jobs")
    again = run_command("fleet", "runs", "--db", "fleet.db", "--no-color", cwd=tmp_path)
    assert "0 added, 0 replaced, 4 unchanged" in again.stderr and again.stdout == done.stdout
    shown = run_command("fleet", "--db", "fleet.db", "--no-color", cwd=tmp_path)
    assert shown.stdout == done.stdout and shown.stderr == ""


@pytest.mark.parametrize("form", ["plain", "markdown", "json", "html"])
def test_every_format_is_written_to_a_file(runs: Path, tmp_path: Path, form: str) -> None:
    line = ("fleet", "runs", "--db", "fleet.db", "--format", form, "-o", "out")
    done = run_command(*line, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    text = (tmp_path / "out").read_text()
    assert {"json": '"format": "clusterprof-fleet"', "html": "<!doctype html>"}.get(
        form, "Weeks"
    ) in text


def test_a_price_is_applied_and_jobs_are_filtered(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("facts: {gpu_price_per_hour: 3600, currency: EUR}\n")
    line = ("fleet", "runs", "--db", "fleet.db", "--json", "--profile", "./site.yaml")
    document = json.loads(run_command(*line, cwd=tmp_path).stdout)
    # an hour costs 3,600, so a second costs 1
    assert document["sums"]["lost_cost"] == pytest.approx(document["sums"]["lost_ns"] / 1e9)
    assert document["currency"] == "EUR"
    chosen = run_command(
        *("fleet", "--db", "fleet.db", "--json", "--since", "1970-01-01T00:00:02"),
        *("--until", "1970-01-01T00:00:04"),
        cwd=tmp_path,
    )
    assert json.loads(chosen.stdout)["sums"]["jobs"] == 2


def test_fleet_exports_tables_as_csv(runs: Path, tmp_path: Path) -> None:
    line = ("fleet", "runs", "--db", "fleet.db", "--to", "csv", "-o", "out/")
    assert run_command(*line, cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("causes.csv", "culprits.csv", "jobs.csv", "nodes.csv")
    ]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "fleet needs the file of its ledger"),
        (("--db", "gone.db"), 5, "there is no ledger"),
        (("gone", "--db", "new.db"), 5, "gone: no such file or directory"),
        (("--db", "runs/0.json"), 2, "is no ledger"),
        (("--db", "x.db", "--to", "xlsx"), 2, "--to 'xlsx' is unknown"),
        (("--db", "x.db", "--table", "jobs"), 2, "--table is for an export"),
        (("--db", "x.db", "--format", "pdf"), 2, "unknown format 'pdf'"),
        (("--db", "x.db", "--since", "soon"), 2, "--since 'soon' is not a date"),
        (("--db", "x.db", "--every", "0.1s"), 2, "--every '0.1s'"),
        (("runs", "--db", "no/folder/x.db"), 2, "cannot open the ledger"),
    ],
)
def test_usage_errors_are_reported_without_a_traceback(
    runs: Path, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    done = run_command("fleet", *words, cwd=tmp_path)
    assert done.returncode == code and message in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_an_unreadable_report_is_named_and_strict_exits_with_6(runs: Path, tmp_path: Path) -> None:
    broken = runs / "1.json"
    broken.write_text(broken.read_text()[:3000])
    done = run_command("fleet", "runs", "--db", "fleet.db", "--strict", cwd=tmp_path)
    assert done.returncode == 6 and f"{broken}: is not a report" in done.stderr
    assert "3 added, 0 replaced, 0 unchanged, 1 could not be read" in done.stderr
    assert "Not read" in done.stdout and "3 jobs" in done.stdout


def count_jobs(db: Path) -> int:
    try:
        connection = sqlite3.connect(f"file:{db}?mode=ro", uri=True)
        try:
            return int(connection.execute("SELECT count(*) FROM jobs").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error:
        return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_watch_reads_new_runs_until_a_signal(
    runs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """A report that appears is added, and the page is written anew; then it ends as asked."""
    db, page = tmp_path / "fleet.db", tmp_path / "fleet.html"
    line = [sys.executable, "-m", "clusterprof", "fleet", "--watch", str(runs), "--every", "1s"]
    process = subprocess.Popen(
        [*line, "--db", str(db), "--format", "html", "-o", str(page)],
        cwd=Path(__file__).parents[2],
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: page.exists() and count_jobs(db) == 4)
        report = Json().render(make_run("new", draw_step_lengths(20), started=99))
        (runs / ".new").write_text(report)
        os.rename(runs / ".new", runs / "new.json")
        wait_until(lambda: ">5</strong><span>jobs<" in page.read_text())
        process.send_signal(number)
        out, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0 and out == "" and "1 added" in errors
    assert count_jobs(db) == 5


def wait_until(is_done: object, patience_s: float = 60) -> None:
    end = time.monotonic() + patience_s
    while not is_done():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_two_concurrent_fleet_processes_store_every_job(runs: Path, tmp_path: Path) -> None:
    """Both write into one ledger; each waits for the other."""
    db = str(tmp_path / "fleet.db")
    halves = [
        [str(runs / "0.json"), str(runs / "1.json")],
        [str(runs / "2.json"), str(runs / "job")],
    ]
    line = [sys.executable, "-m", "clusterprof", "fleet"]
    processes = [
        subprocess.Popen(
            [*line, *half, "--db", db],
            cwd=Path(__file__).parents[2],
            env=make_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for half in halves
    ]
    for process in processes:
        assert process.communicate(timeout=120) is not None and process.returncode == 0
    assert count_jobs(Path(db)) == 4
