"""Runs are found, read once, read again when they changed; one that is broken stops no other."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import AnalysisRequest
from clusterprof.errors import NoRecording
from clusterprof.fleet.database import open_ledger
from clusterprof.fleet.intake import (
    GROWTH_FACTOR,
    Intake,
    Run,
    find_runs,
    read_in_processes,
    update_ledger,
)
from clusterprof.output.renderers.json import Json
from tests.support.gate_runs import draw_step_lengths, make_run

RECORDING = Path(__file__).parents[1] / "recordings/v1"
REQUEST = AnalysisRequest()


def write_report(path: Path, number: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Json().render(make_run(f"job-{number}", draw_step_lengths(20), started=number)))
    return path


def take(
    db: Path, *paths: Path, request: AnalysisRequest = REQUEST, **options: bool
) -> tuple[Intake, list[str]]:
    read: list[str] = []
    with open_ledger(db) as ledger:
        intake = update_ledger(ledger, find_runs(paths), request, on_run=read.append, **options)
    return intake, [Path(path).name for path in read]


def count_jobs(db: Path) -> int:
    with open_ledger(db, False) as ledger:
        return int(ledger.connection.execute("SELECT count(*) FROM jobs").fetchone()[0])


def test_recordings_and_reports_are_found_at_any_depth(tmp_path: Path) -> None:
    shutil.copytree(RECORDING, tmp_path / "ada/2026/job-1")
    shutil.copytree(RECORDING, tmp_path / "ada/2026/job-1/4712")  # another job inside its folder
    shutil.copytree(next(RECORDING.iterdir()), tmp_path / "ben/node-1")
    write_report(tmp_path / "ben/report.json")
    (tmp_path / "ben/other.json").write_text('{"format": "something else"}')
    (tmp_path / "ben/notes.txt").write_text("no report")
    (tmp_path / "loop").symlink_to(tmp_path)
    names = {run_.path.relative_to(tmp_path).as_posix() for run_ in find_runs([tmp_path])}
    assert names == {"ada/2026/job-1", "ada/2026/job-1/4712", "ben", "ben/report.json"}
    assert len(list(find_runs([tmp_path, tmp_path / "ben"]))) == 4  # each once


def test_a_missing_path_or_a_foreign_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no report")
    for path in (tmp_path / "gone", tmp_path / "notes.txt"):
        with pytest.raises(NoRecording) as caught:
            list(find_runs([path]))
        assert caught.value.remedy


def test_unchanged_runs_are_not_read_again(tmp_path: Path) -> None:
    db = tmp_path / "fleet.db"
    report = write_report(tmp_path / "runs/a.json")
    shutil.copytree(RECORDING, tmp_path / "runs/job")
    runs = tmp_path / "runs"
    assert take(db, runs)[0] == Intake(added=2)
    intake, read = take(db, runs)
    assert intake == Intake(unchanged=2) and read == []
    write_report(report, 7)
    intake, read = take(db, runs)
    assert read == ["a.json"] and (intake.added, intake.unchanged) == (1, 1)
    assert count_jobs(db) == 3  # the report is of another job now
    assert take(db, runs, read_again=True)[0].replaced == 2


def test_a_grown_recording_is_replaced(tmp_path: Path) -> None:
    job = tmp_path / "job"
    shutil.copytree(RECORDING, job)
    segment = next(job.rglob("*.cpf"))
    whole = segment.read_bytes()
    segment.write_bytes(whole[: len(whole) // 2])
    db = tmp_path / "fleet.db"
    assert take(db, job)[0].added == 1
    segment.write_bytes(whole)
    assert take(db, job)[0].replaced == 1 and count_jobs(db) == 1


def test_a_watched_recording_is_reread_after_growing_by_a_quarter(tmp_path: Path) -> None:
    job = tmp_path / "job"
    shutil.copytree(RECORDING, job)
    db = tmp_path / "fleet.db"
    assert take(db, tmp_path, is_watched=True)[0].added == 1
    size = sum(path.stat().st_size for path in job.rglob("*.cpf"))
    segment = sorted(job.rglob("*.cpf"))[0]
    whole = segment.read_bytes()
    segment.write_bytes(whole + b"\0" * 10)  # it has just been written
    assert take(db, tmp_path, is_watched=True)[0].unchanged == 1
    segment.write_bytes(whole + b"\0" * int(size * (GROWTH_FACTOR - 1) + 10))
    assert take(db, tmp_path, is_watched=True)[0].replaced == 1
    segment.write_bytes(whole + b"\0" * 10)
    old_s = time.time() - 3600
    for path in job.rglob("*.cpf"):
        os.utime(path, (old_s, old_s))
    assert take(db, tmp_path, is_watched=True)[0].replaced == 1  # it has ended


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_broken_run_does_not_stop_the_other_runs(tmp_path: Path, jobs: int) -> None:
    runs = tmp_path / "runs"
    good = write_report(runs / "a.json")
    broken = write_report(runs / "b.json", 2)
    broken.write_text(broken.read_text().replace('"lost_ns": 0', '"lost_ns": 1', 1))
    (runs / "c/node-1").mkdir(parents=True)
    (runs / "c/node-1/000001.cpf").write_bytes(b"no recording")
    db = tmp_path / "fleet.db"
    intake, read = take(db, runs, request=AnalysisRequest(jobs=jobs))
    assert intake.added == 1 and sorted(read) == ["a.json", "b.json", "c"]
    assert [Path(path).name for path, _ in sorted(intake.failed)] == ["b.json", "c"]
    assert "does not add up" in dict(intake.failed)[str(broken)]
    write_report(broken, 2)
    intake, read = take(db, runs)
    assert intake.added == 1 and sorted(read) == ["b.json", "c"]  # what failed is tried again
    assert take(db, runs, is_watched=True)[1] == []  # but not every minute
    assert good.exists() and count_jobs(db) == 2


def test_a_job_keeps_its_entry_when_its_report_breaks(tmp_path: Path) -> None:
    db = tmp_path / "fleet.db"
    report = write_report(tmp_path / "runs/a.json")
    take(db, report.parent)
    report.write_text(report.read_text()[:5000])
    assert len(take(db, report.parent)[0].failed) == 1
    assert count_jobs(db) == 1


def kill_some(run_: Run) -> str:
    """Stands for an analysis: the memory ends for one run, while others are being read."""
    if run_.path.name == "c":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    return run_.path.name


def test_a_killed_reader_process_does_not_stop_the_other_runs() -> None:
    runs = [Run(Path(name), "", 0, 0.0, 0, True) for name in "abcdef"]
    results = {run_.path.name: result for run_, result in read_in_processes(kill_some, runs, 2)}
    assert "was killed" in str(results.pop("c"))
    assert results == {name: name for name in "abdef"}
