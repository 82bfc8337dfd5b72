"""Jobs under the probe, and a reader of rings that shares no code with the recorder."""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.launch import launcher
from tests.support import job_python

LIVENESS_SECONDS = 120

DATA_WAIT, FETCH, STEP, H2D, CHECKPOINT, GC, OPTIMIZER, EXPOSED = range(1, 9)
LOADER_START, HOOK_NOTE, WORKER_START, EXPOSED_COLLECTIVE = 14, 15, 16, 17
INTERPRETER_WAIT, STACK_SAMPLE, STACK_SAMPLER = 24, 25, 26


@dataclass(frozen=True)
class Span:
    """One record of a ring."""

    sequence: int
    start_ns: int
    end_ns: int
    kind: int
    a: int
    b: int
    c: int
    d: int


@dataclass(frozen=True)
class Ring:
    """What lies in a ring: header, names, and the records that are whole."""

    pid: int
    capacity: int
    started_ticks: int
    written: int
    switched_off: int
    names: dict[int, str]
    spans: list[Span]
    log: bytes = b""
    """The log of definitions, as far as it is written."""

    def of(self, kind: int) -> list[Span]:
        return [span for span in self.spans if span.kind == kind]


def parse_ring(data: bytes, with_gc: bool = False) -> Ring:
    """Read a ring by the offsets of docs/design/recording-format.md.

    Collections of the interpreter come when they like, the last as it ends: only on demand. Waits
    for its lock come when the machine is busy, and are left out too.
    """
    assert data[:8] == b"CPRING1\n"
    size, capacity, pid, names_capacity = struct.unpack_from("<IIII", data, 8)
    assert (size, names_capacity) == (64, 64)
    ticks, written, off = struct.unpack_from("<QQQ", data, 24)
    names = {}
    for slot in range(64):
        text = data[64 + 48 * slot : 64 + 48 * (slot + 1)].rstrip(b"\0").decode()
        if text:
            names[64 + slot] = text
    spans = []
    for sequence in range(max(1, written - capacity + 1), written + 1):
        at = 4096 + 64 * ((sequence - 1) % capacity)
        span = Span(*struct.unpack_from("<Qqqqqqqq", data, at))
        if span.sequence == sequence and (with_gc or span.kind not in (GC, INTERPRETER_WAIT)):
            spans.append(span)
    log_bytes, log_written = struct.unpack_from("<QQ", data, 48)
    log = data[4096 + 64 * capacity :]
    assert len(log) == log_bytes
    return Ring(pid, capacity, ticks, written, off, names, spans, log[:log_written])


def list_stacks(log: bytes) -> list[list[tuple[str, str, int, int]]]:
    """Read a log of definitions by docs/design/recording-format.md.

    Returns per stack number its frames from the outermost: path, function, first line, line.
    """
    files, functions, places, stacks = [], [], [], [[]]  # type: ignore[var-annotated]
    while log:
        if log[:1] == b"F":
            (size,) = struct.unpack_from("<H", log, 1)
            files.append(log[3 : 3 + size].decode())
            log = log[3 + size :]
        elif log[:1] == b"N":
            file, first, size = struct.unpack_from("<HIH", log, 1)
            functions.append((files[file], log[9 : 9 + size].decode(), first))
            log = log[9 + size :]
        elif log[:1] == b"P":
            function, line = struct.unpack_from("<HI", log, 1)
            places.append((*functions[function], line))
            log = log[7:]
        else:
            assert log[:1] == b"S"
            parent, place = struct.unpack_from("<HH", log, 1)
            stacks.append([*stacks[parent], places[place]])
            log = log[5:]
    return stacks


@dataclass
class RingWatcher:
    """Opens the rings of a run directory as they are announced, and holds on to them.

    with RingWatcher(run_dir) as watcher: …; then watcher.read_rings(), of dead processes, too.
    """

    run_dir: Path
    _held: dict[str, mmap.mmap] = field(default_factory=dict)
    _earlier: set[str] = field(default_factory=set)
    """Rings that another watcher of the run directory has held."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> RingWatcher:
        self._earlier = {path.stem for path in (self.run_dir / "rings").glob("*.json.held")}
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.read_announcements()

    def read_announcements(self) -> None:
        for path in (self.run_dir / "rings").glob("*.json"):
            if path.name in self._held or path.name in self._earlier:
                continue
            ring = json.loads(path.read_text())
            where = ring["path"] or f"/proc/{ring['pid']}/fd/{ring['fd']}"
            try:
                fd = os.open(where, os.O_RDONLY)
            except OSError:
                continue
            self._held[path.name] = mmap.mmap(fd, ring["bytes"], prot=mmap.PROT_READ)
            os.close(fd)
            path.with_name(f"{path.name}.held").touch()  # see UNTIL_HELD

    def read_rings(self, with_gc: bool = False) -> list[Ring]:
        return [parse_ring(bytes(memory), with_gc) for memory in self._held.values()]

    def read_ring(self, pid: int) -> Ring:
        (result,) = [ring for ring in self.read_rings() if ring.pid == pid]
        return result


def install_probe(
    run_dir: Path, gpu_events: bool = True, stacks: launcher.StackPaths | None = None
) -> Path:
    """Make a run directory with the probe in it."""
    run_dir.mkdir(mode=0o700)
    launcher.install_probe(run_dir, gpu_events=gpu_events, strict=False, stacks=stacks)
    return run_dir


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without anything of ours or of the test session."""
    dropped = ("PYTHONPATH", "PYTHONSTARTUP", "CLUSTERPROF_", "RANK", "LOCAL_RANK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return {**kept, "UNTIL_HELD": _HELD, **more}


def run_python(
    *command: str,
    run_dir: Path | None,
    cwd: Path | None = None,
    seconds: float = LIVENESS_SECONDS,
    **environ: str,
) -> subprocess.CompletedProcess[bytes]:
    """Run a Python with these arguments, with the probe of `run_dir` or without."""
    env = clean_environment(**environ)
    if run_dir is not None:
        env = launcher.with_probe_path(run_dir, env)
    python, pipe = [job_python.PYTHON, *command], subprocess.PIPE
    with subprocess.Popen(
        python, env=env, cwd=cwd, stdout=pipe, stderr=pipe, start_new_session=True
    ) as job:
        try:
            out, err = job.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)  # its forked children too
            raise
    out, printed = job_python.drop_framework_logs(out), job_python.drop_framework_logs(err)
    return subprocess.CompletedProcess(python, job.returncode, out, printed)


def collect_output(result: subprocess.CompletedProcess[bytes]) -> tuple[int, bytes, bytes]:
    """Collect all output that the user who started the job sees."""
    return result.returncode, result.stdout, result.stderr


def record_code(
    code: str, run_dir: Path, *arguments: str, with_gc: bool = False, **environ: str
) -> list[Ring]:
    """Run `code` under the probe and return the rings of all its processes."""
    with RingWatcher(run_dir) as watcher:
        # The job ends on a line of ours so that its ring has been opened before it is gone.
        result = run_python("-c", code + WAIT, *arguments, run_dir=run_dir, **environ)
    errors = b""
    if job_python.IS_ANOTHER and result.stderr:  # another version warns of other things
        errors = run_python("-c", code + WAIT, *arguments, run_dir=None, **environ).stderr
    assert (result.returncode, result.stderr) == (0, errors), result.stderr.decode()
    return watcher.read_rings(with_gc)


# What a job ends on, or a child of it that leaves on its own: its ring has been opened by then, on
# a busy machine too. The words are in the environment, as they are longer than some jobs.
UNTIL_HELD = "exec(__import__('os').environ['UNTIL_HELD'])"
WAIT = f"\n{UNTIL_HELD}\n"
_HELD = """
import os as _os, time as _time
def _until_held():
    folder = _os.path.join(_os.environ.get("CLUSTERPROF_RUN_DIR", "/nowhere"), "rings")
    end = _time.perf_counter() + 60
    while _time.perf_counter() < end:
        try:
            names = _os.listdir(folder)
        except OSError:
            return
        own = [name for name in names if name.startswith("%d." % _os.getpid())]
        if all(name + ".held" in names for name in own if name.endswith(".json")):
            return
        _time.sleep(0.005)
_until_held()
"""


def select_long_values(*values: Any) -> list[Any]:
    """Return parameter values that only `make test-long` runs."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
