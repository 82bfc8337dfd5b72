"""`record --export`: real processes that are recorded although another one asked for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterprof.agent.launch.attach_and_export import format_exports
from clusterprof.agent.launch.election import find_run_dir, is_recorder_running
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Event, Header, Record, Spans
from tests.support.recording_runs import (
    RECORD,
    get_run_dir,
    make_environment,
    make_job_id,
    read_records,
    wait_for_end,
)

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, pathlib, time
import clusterprof
run_dir = pathlib.Path(os.environ.get("CLUSTERPROF_RUN_DIR", "/nowhere"))
end = time.monotonic() + 20
while run_dir.exists() and not (run_dir / "agent.pid").exists() and time.monotonic() < end:
    time.sleep(0.05)  # on a busy machine the recorder starts late
with clusterprof.span("work"):
    time.sleep(0.3)

def has_ring():  # or there is no recorder
    try:
        pid = (run_dir / "agent.pid").read_text().split()[0]
        return "clusterprof-ring" in pathlib.Path(f"/proc/{pid}/maps").read_text()
    except (OSError, IndexError):
        return not run_dir.exists()

while not has_ring() and time.monotonic() < end:
    time.sleep(0.05)  # it opens the ring late, too; with this process the ring is gone
print("done", flush=True)
"""


def own_slurm_job() -> str:
    """Return a job id of digits, as Slurm's are, that no other test has."""
    return f"{os.getpid()}{time.monotonic_ns() % 10**8:08d}"


def registrations(records: list[Record], role: str) -> list[int]:
    return [
        record.attributes["pid"]
        for record in records
        if isinstance(record, Event)
        and record.kind == "process-registered"
        and record.attributes["role"] == role
    ]


def run_shell(
    text: str, folder: Path, timeout_s: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        ["sh", "-c", text],
        cwd=folder,
        env=make_environment(PYTHONPATH=str(ROOT), **variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


EXPORT = shlex.join([*RECORD, "--export"])


def test_programs_started_after_eval_are_recorded_with_spans(tmp_path: Path) -> None:
    job = make_job_id("eval")
    done = run_shell(
        f'eval "$({EXPORT} sh --pid $$ -o run)"; echo "$$"; {sys.executable} train.py; exit 7',
        tmp_path,
        SLURM_JOB_ID=job,
    )
    shell_pid, line = done.stdout.splitlines()
    assert (done.returncode, line) == (7, "done"), done.stderr
    assert "recording to run" in done.stderr
    wait_for_end(tmp_path / "run")
    records = read_records(tmp_path / "run")
    assert registrations(records, "command") == [int(shell_pid)]
    assert len(registrations(records, "python")) == 1
    assert any(isinstance(record, Spans) and "work" in record.names.values() for record in records)
    assert not get_run_dir(job).exists()


def test_a_slurm_task_recorded_by_the_prolog_ends_the_recording(tmp_path: Path) -> None:
    """As Slurm does it: the process waits for the prolog, takes its lines, and calls exec."""
    task = f"""
import os, subprocess, sys
lines = subprocess.run([*{RECORD!r}, "--export", "slurm", "--pid", str(os.getpid()), "-o", "run"],
                       capture_output=True, text=True, check=True).stdout.splitlines()
for line in lines:
    word, _, assignment = line.partition(" ")
    assert word == "export", line
    name, _, value = assignment.partition("=")
    os.environ[name] = value
os.execv(sys.executable, [sys.executable, "train.py"])
"""
    (tmp_path / "task.py").write_text(task)
    job = make_job_id("task")
    done = run_shell(f"exec {sys.executable} task.py", tmp_path, SLURM_JOB_ID=job)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    wait_for_end(tmp_path / "run")
    records = read_records(tmp_path / "run")
    # One process: registered for it by the prolog, and by the probe once it runs the program.
    assert registrations(records, "command") == registrations(records, "python")
    header = next(record for record in records if isinstance(record, Header))
    assert header.launcher["job"] == job


def test_steps_of_a_recorded_batch_script_join_the_recording(tmp_path: Path) -> None:
    job = own_slurm_job()
    step = shlex.join([*RECORD, "-o", "elsewhere", "--", sys.executable, "train.py"])
    done = run_shell(
        f'eval "$({EXPORT} sh --pid $$ -o run)"; SLURM_STEP_ID=0 {step}', tmp_path, SLURM_JOB_ID=job
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert f"this job is recorded already, to {tmp_path / 'run'}" in done.stderr
    wait_for_end(tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists()
    (folder,) = list_node_folders(tmp_path / "run")
    python = [
        record.attributes["job"]
        for record in NodeReader(folder)
        if isinstance(record, Event)
        and record.kind == "process-registered"
        and record.attributes["role"] == "python"
    ]
    assert python == [f"{job}.0"]


def test_steps_of_an_unrecorded_batch_script_have_separate_recorders() -> None:
    environ = {"SLURM_JOB_ID": "1"}
    job = own_slurm_job()
    assert find_run_dir(environ, f"{job}.0") == get_run_dir(f"{job}.0")
    batch = get_run_dir(job)
    batch.mkdir(mode=0o700)
    try:
        assert not is_recorder_running(batch)
        (batch / "agent.pid").write_text(f"{os.getpid()} 1\n")  # another process had this pid
        assert find_run_dir(environ, f"{job}.0") == get_run_dir(f"{job}.0")
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        (batch / "agent.pid").write_text(f"{os.getpid()} {ticks}\n")
        assert find_run_dir(environ, f"{job}.0") == batch
        assert find_run_dir(environ, f"{job}.0-restart2") == get_run_dir(f"{job}.0-restart2")
    finally:
        (batch / "agent.pid").unlink()
        batch.rmdir()


def test_exports_are_formatted_for_shell_and_slurm() -> None:
    variables = {"A": "it's a $HOME", "B": "two\nlines"}
    shell = "export A='it'\"'\"'s a $HOME'\nexport B='two\nlines'\n"
    assert format_exports(variables, "sh") == shell
    assert format_exports(variables, "slurm") == "export A=it's a $HOME\n"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--export sh", 2, "give --pid PID and no command"),
        ("--export sh --pid 1 -- true", 2, "give --pid PID and no command"),
        ("--export csh --pid 1", 2, "choose sh or slurm"),
        ("--export sh --pid 999999999", 125, "there is no such process"),
    ],
)
def test_usage_errors_print_nothing_to_stdout(
    options: str, code: int, message: str, tmp_path: Path
) -> None:
    done = run_shell(f"{shlex.join(RECORD)} {options}", tmp_path)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_process_of_another_user_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen(["setpriv", "--reuid=65534", "--clear-groups", "sleep", "30"]) as other:
        try:
            time.sleep(0.2)  # until it has become that user
            done = run_shell(f"{EXPORT} sh --pid {other.pid} -o run", tmp_path)
        finally:
            other.kill()
    assert (done.returncode, done.stdout) == (125, "")
    assert "belongs to the user 65534" in done.stderr and "run this command as" in done.stderr
    assert not (tmp_path / "run").exists()
