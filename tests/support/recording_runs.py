"""Real recordings for tests: run `record`, wait for its recorder, read what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterprof.agent.launch.election import build_run_dir_path, choose_base
from clusterprof.agent.launch.identity import LAUNCHER_VARIABLES, read_short_boot_id
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import NoRecording
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Event, Record

PYTHON = sys.executable
RECORD = [PYTHON, "-m", "clusterprof", "record"]
MIN_QUESTIONS = 40
PATIENCE_S = 20.0

# Becomes each command in a fork of one process, so that 256 of them cost seconds, not minutes.
LAUNCHER = """
import os, signal, sys
from pathlib import Path
from clusterprof.agent.launch.launcher import LaunchRequest, record_command
from clusterprof.agent.options import Plan

def start(*command):
    child = os.fork()
    if child == 0:
        request = LaunchRequest(command, Path(sys.argv[1]), Plan, "off")
        record_command(request, os.environ, lambda line: None)
    return child

def status_of(*command):
    return os.waitpid(start(*command), 0)[1]
"""
# One recorder for all of them, as long as this lives.
HOLD = 'holder = start("/bin/sleep", "60")\n'
LET_GO = "\nos.kill(holder, 9)\n"


def make_environment(job: str = "", **more: str) -> dict[str, str]:
    """Return an environment without launcher variables, with `job` as Slurm job id."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("CLUSTERPROF", "PYTHONPATH"))
    }
    return {**clean, **({"SLURM_JOB_ID": job} if job else {}), **more}


def make_job_id(name: str) -> str:
    """Make a job id that no other test, and no other test run, uses."""
    return f"test-{name}-{os.getpid()}-{time.monotonic_ns()}"


def get_run_dir(job: str) -> Path:
    """Return the run directory of a job while it is being recorded."""
    return build_run_dir_path(choose_base(os.environ), read_short_boot_id(Roots()), job)


def record(
    out: Path, *command: str, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `clusterprof record -o OUT OPTIONS -- COMMAND` to its end and wait for the recorder."""
    done = subprocess.run(
        [*RECORD, "-o", str(out), *options, "--", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )
    if out.exists():
        wait_for_end(out)
    return done


def wait_until(what: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Return the first true value of `what()`; fail after a timeout.

    Calls `what` for at most a fifth of the time, as many calls read a whole recording. On a busy
    machine, where each call is slow, the timeout ends only after MIN_QUESTIONS calls.
    """
    end, asked = time.monotonic() + patience_s, 0
    while (began := time.monotonic()) < end or asked < MIN_QUESTIONS:
        asked += 1
        with suppress(NoRecording):  # not yet
            value = what()
            if value:
                return value
        time.sleep(max(0.01, 4 * (time.monotonic() - began)))
    code = getattr(what, "__code__", None)
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else str(what)
    raise AssertionError(f"{place}: not true within {patience_s:g} s, asked {asked} times")


def read_records(out: Path) -> list[Record]:
    """Return all records of the only node of a recording."""
    (folder,) = list_node_folders(out)
    return list(NodeReader(folder))


def list_events(out: Path, kind: str) -> list[Event]:
    """Return the events of one kind."""
    return [item for item in read_records(out) if isinstance(item, Event) and item.kind == kind]


def wait_for_end(out: Path) -> None:
    """Wait until the recorder of a recording with one node has written its stop event."""
    wait_until(lambda: list_events(out, "recorder-stopped"))


def wait_for_recording(out: Path) -> Path:
    """Wait until a recording has begun; return its node's folder."""
    return Path(wait_until(lambda: next(iter(out.glob("*/000001.cpf")), None))).parent


def list_files(folder: Path, suffix: str = "") -> list[Path]:
    """List the files below a folder, sorted, while a recorder makes and removes folders in it."""
    walked = os.walk(folder)  # leaves out what is gone, where rglob raises
    paths = [Path(parent, name) for parent, _, names in walked for name in names]
    return sorted(path for path in paths if path.name.endswith(suffix) and path.is_file())


def find_recorder_pid(job: str) -> int:
    """Return the pid of the recorder of a job, once it records."""
    file = get_run_dir(job) / "agent.pid"
    return int(wait_until(lambda: file.exists() and file.read_text().split())[0])


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie.

    The first thread can be one before the others have ended; nobody can wait for the process then.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def list_counter_options(folder: Path) -> list[str]:
    """List the options of `record` that read a GPU's performance counters too."""
    path = folder / "counters.yaml"
    path.write_text("extends: default\nsampling: {gpm: true}\n")
    return ["--profile", str(path)]


def run_launcher(out: Path, job: str, body: str, hold: bool = True) -> str:
    """Run `body` behind the launcher; return what it printed."""
    body = textwrap.dedent(body)
    code = LAUNCHER + (HOLD + body + LET_GO if hold else body)
    return subprocess.run(
        [PYTHON, "-c", code, str(out)],
        env=make_environment(job),
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    ).stdout
