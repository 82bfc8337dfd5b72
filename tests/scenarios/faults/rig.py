"""Recorded jobs for faults: started, watched, ended, and their recordings checked."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path

from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Columns, Record, Rows, Spans
from tests.scenarios.faults.model import NotPossible
from tests.support.nvml.simulated import Scenario, build_library
from tests.support.nvml.simulated import make_environment as nvml_environment
from tests.support.recording_runs import (
    PYTHON,
    RECORD,
    find_recorder_pid,
    get_run_dir,
    is_alive,
    make_environment,
    make_job_id,
    wait_until,
)

PATIENCE_S = 60.0
EXIT_CODE = 7
MODULUS = (1 << 61) - 1

# Computes a number in steps of 2 ms, each in a span of the real probe, until a file says to end.
# The page of memory holds how many steps it has done, and the file what it computed.
TRAINER = """
import mmap, os, sys, time
try:
    import _clusterprof_probe as probe
    probe.prepare()
    span = probe.span
except ImportError:  # this job is not recorded
    from contextlib import nullcontext as span
stop, answer, page = sys.argv[1:4]
with open(page, "r+b") as file:
    done = mmap.mmap(file.fileno(), 8)
steps, value, end = 0, 1, time.monotonic() + 90
while time.monotonic() < end and not os.path.exists(stop):
    with span("work"):
        value = value * 6364136223846793005 % ((1 << 61) - 1)
        time.sleep(0.002)
    steps += 1
    done[:8] = steps.to_bytes(8, "little")
with open(answer, "w") as file:
    file.write("%d %d" % (steps, value))
sys.exit(7)
"""


class RecordedJob:
    """A job below `clusterprof record`, whose result is known in advance."""

    def __init__(
        self,
        folder: Path,
        number: int,
        options: Sequence[str] = (),
        program: str = TRAINER,
        prefix: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """Start it. prefix: command before `clusterprof record`. variables: of its environment."""
        self.folder, self.out = folder, folder / "out"
        self.job = make_job_id(f"fault{number}")
        self._stop, self._answer, self._page = (
            folder / name for name in ("stop", "answer", "page")
        )
        self._page.write_bytes(bytes(8))
        arguments = [str(path) for path in (self._stop, self._answer, self._page)]
        command = [*prefix, *RECORD, "-o", str(self.out), *options, "--", PYTHON, "-c", program]
        self._errors = (folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            [*command, *arguments],
            env=make_environment(self.job, **variables),
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    @property
    def steps(self) -> int:
        """Steps that the job has done."""
        return int.from_bytes(self._page.read_bytes(), "little")

    @property
    def messages(self) -> str:
        """What was printed to stderr."""
        return (self.folder / "stderr").read_text(errors="replace")

    def wait_for_steps(self, steps: int = 1) -> None:
        """Wait until the job has done so many steps."""
        wait_until(lambda: self.steps >= steps or self.process.poll() is not None, PATIENCE_S)
        assert self.steps >= steps, f"the job ended: {self.process.returncode}, {self.messages}"

    def wait_for_rings(self) -> None:
        """Wait until the recorder may see spans of the job."""
        wait_until(lambda: list(get_run_dir(self.job).glob("rings/*.json")), PATIENCE_S)

    def find_recorder(self) -> int:
        """Return the pid of the recorder, once it records."""
        return find_recorder_pid(self.job)

    def end(self) -> None:
        """Let the job end, and check that its exit status and result are its own."""
        self._stop.touch()
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError("the job did not end") from None
        assert status == EXIT_CODE, f"exit status {status}: {self.messages[-500:]}"
        steps, value = map(int, self._answer.read_text().split())
        assert value == pow(6364136223846793005, steps, MODULUS), "the result is another"
        assert "Traceback" not in self.messages, self.messages[-500:]

    def close(self) -> None:
        """Kill what may still run."""
        for pid in (self.process.pid, *self._list_recorders()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._errors.close()

    def __enter__(self) -> RecordedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _list_recorders(self) -> list[int]:
        with suppress(OSError, ValueError, IndexError):
            return [int((get_run_dir(self.job) / "agent.pid").read_text().split()[0])]
        return []


def read_recording(out: Path) -> tuple[list[Record], NodeReader]:
    """Return the records of the only node of a recording, and their reader."""
    (folder,) = list_node_folders(out)
    reader = NodeReader(folder)
    return list(reader), reader


def list_times(records: Sequence[Record], collector: str = "cpu") -> list[int]:
    """Return when the rows of a collector were taken, ns."""
    return [
        int(t)
        for record in records
        for t in (
            record.t_ns
            if isinstance(record, Columns) and record.collector == collector
            else record.columns[0]
            if isinstance(record, Rows) and record.table == collector
            else ()
        )
    ]


def count_spans(records: Sequence[Record], kind: int) -> tuple[int, int]:
    """Return how many spans of a kind were recorded, and how many of all were dropped."""
    spans = [record for record in records if isinstance(record, Spans)]
    kept = sum(int((value == kind).sum()) for record in spans for value in [record.columns["kind"]])
    return kept, sum(record.dropped for record in spans)


def find_largest_gap_s(times: Sequence[int]) -> float:
    """Return the longest time without a sample, s."""
    ordered = sorted(times)
    return max((b - a for a, b in pairwise(ordered)), default=0) / 1e9


def wait_until_gone(pid: int, patience_s: float = PATIENCE_S) -> float:
    """Wait until a process is gone; return how long that took, s."""
    began = time.monotonic()
    wait_until(lambda: not is_alive(pid), patience_s)
    return time.monotonic() - began


def read_cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, s; 0 for a process that is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def list_children(pid: int) -> list[int]:
    """Return the children of a process, of all its threads."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, file.read_text().split())
    return children


def draw_pause(number: int, low_s: float, high_s: float) -> float:
    """Return a random time, the same for the same trial, s."""
    return random.Random(number).uniform(low_s, high_s)


_SHIM_SOURCE = Path(__file__).parent / "failing_calls.c"


@cache
def build_libraries() -> Path:
    """Compile the simulated driver and the failing calls; return their folder.

    Raises: NotPossible without a C compiler.
    """
    folder = Path(tempfile.mkdtemp(prefix="clusterprof-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if shutil.which("gcc") is None:
        raise NotPossible("there is no gcc")
    build_library(folder)
    shim = folder / "failing_calls.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wno-nonnull"]
    subprocess.run([*command, "-o", str(shim), str(_SHIM_SOURCE), "-ldl"], check=True)
    folder.chmod(0o755)
    return folder


def simulate_driver(folder: Path, devices: int = 2) -> tuple[Scenario, dict[str, str]]:
    """Return the scenario of a simulated driver, and the variables that let a job find it."""
    scenario = Scenario(folder / "scenario", devices=devices)
    found_by = nvml_environment(build_libraries() / "libnvidia-ml.so.1", scenario)
    return scenario, {name: found_by[name] for name in ("LD_LIBRARY_PATH", "FAKENVML_CTL")}


def fail_calls(folder: Path, **settings: object) -> dict[str, str]:
    """Return the variables with which calls of the recorder fail; see failing_calls.c."""
    log = folder / "failed-calls"
    log.touch()
    variables = {name: str(value) for name, value in settings.items()}
    preload = str(build_libraries() / "failing_calls.so")
    return {"LD_PRELOAD": preload, "FAULT_LOG": str(log), **variables}


def count_failed_calls(folder: Path) -> int:
    """Return how many calls failed or were delayed."""
    return (folder / "failed-calls").stat().st_size
