"""Start a training job on this machine or on nodes, recorded or not, and wait for its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from clusterprof.errors import NoRecording
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof_lab.real.job import PORT, make_environment
from clusterprof_lab.real.node import Node

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
ENOUGH_S = 150.0
HANG_S = 16.0
"""A hung job is ended when none of its ranks has finished a step for so long."""
_RECORDER_ENDS_WITHIN_S = 20.0
_KTHREADD = 2
"""Its descendants are threads of the kernel."""
# Enters each control group named before `--`, then becomes what comes after it.
_ENTER = (
    'for file in "$@"; do shift; [ "$file" = -- ] && break; echo 0 >"$file" || exit 126; done; '
    'exec "$@"'
)


@dataclass
class Placement:
    """Where ranks run: a node, or this machine."""

    node: Node | None
    ranks: int
    words: Sequence[str] = ()
    """Options of the script."""
    groups: Sequence[Path] = ()
    """Control groups that the ranks enter."""
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    """How often torchrun may restart failed ranks."""


@dataclass(frozen=True)
class JobResult:
    """The exit status of a job, and whether it was asked to end."""

    exit_codes: tuple[int, ...]
    ended_ns: int
    disturbed_ratio: float


def make_command(
    placements: Sequence[Placement], placement: Placement, out: Path | None, run_id: str
) -> list[str]:
    """Make the command line of one placement."""
    record = (
        [] if out is None else ["-m", "clusterprof", "record", "-o", str(out), "--", sys.executable]
    )
    first = placements[0].node
    if first is None:
        meet = ["--standalone"]
    else:
        meet = [
            f"--nnodes={len(placements)}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={first.name}:{PORT}",
            f"--rdzv-id={run_id}",
        ]
    torchrun = [
        "-m",
        "torch.distributed.run",
        *meet,
        f"--nproc-per-node={placement.ranks}",
        f"--max-restarts={placement.restarts}",
        str(SCRIPT),
        *placement.words,
    ]
    groups = [str(group / "cgroup.procs") for group in placement.groups]
    enter = ["sh", "-c", _ENTER, "sh", *groups, "--"] if groups else []
    return [*enter, sys.executable, *record, *torchrun]


def start_job(
    placements: Sequence[Placement], out: Path | None, run_id: str, log: Path
) -> list[subprocess.Popen[Any]]:
    """Start a job on all its placements; the output of each goes into a file."""
    running = []
    for number, placement in enumerate(placements):
        with (log / f"output-{number}.txt").open("w") as file:
            options = {
                "env": {**make_environment(), **placement.environment},
                "stdout": file,
                "stderr": file,
            }
            words = make_command(placements, placement, out, run_id)
            if placement.node is None:
                running.append(subprocess.Popen(words, start_new_session=True, **options))
            else:
                running.append(placement.node.start(*words, folder=Path.cwd(), **options))
    return running


def wait_for_job(
    running: Sequence[subprocess.Popen[Any]], folder: Path, hangs: bool
) -> tuple[int, ...]:
    """Wait for the end of a job; one that hangs is asked to end, as a scheduler does."""
    end = time.monotonic() + ENOUGH_S
    while any(process.poll() is None for process in running):
        late = time.monotonic() > end
        if late or (hangs and _measure_silence_s(folder) > HANG_S):
            for process in running:
                if process.poll() is None:
                    process.terminate()
                    process.wait(timeout=60)
            if late:
                raise RuntimeError(f"the job did not end in {ENOUGH_S:.0f} s: see {folder}")
        time.sleep(0.1)
    return tuple(int(process.returncode) for process in running)


def _measure_silence_s(folder: Path) -> float:
    times = [path.stat().st_mtime for path in folder.glob("rank-*.jsonl")]
    return time.time() - max(times) if times else 0.0


class MachineLoad:
    """The part of the machine's CPU time that other processes took since this was created.

    Neither the job nor its fault are strangers: hogs, file servers, a flow on the link are started
    by this process too, and kernel threads and interrupts serve them.
    """

    def __init__(self) -> None:
        self._before = _read_cpu_s()

    def disturbed_ratio(self) -> float:
        """Return CPU time that was not ours, of all there was."""
        busy, whole, own = (now - then for now, then in zip(_read_cpu_s(), self._before))
        return float(max(0.0, busy - own) / whole) if whole > 0 else 0.0


def _read_cpu_s() -> tuple[float, float, float]:
    """Return seconds of all CPUs: busy, in all, and busy for this process, its kin and the kernel.

    The time of a process that has ended and was waited for is included in its parent's (proc(5),
    `cutime`).
    """
    all_of = psutil.cpu_times()
    whole = sum(all_of) - all_of.guest - all_of.guest_nice  # these two are in user and nice
    busy = whole - all_of.idle - all_of.iowait
    processes = {
        process.pid: process.info
        for process in psutil.process_iter(["ppid", "cpu_times"])
        if process.info["cpu_times"] is not None
    }
    own = float(all_of.irq + all_of.softirq)
    for pid in processes:
        if _is_ours(pid, processes):
            own += sum(processes[pid]["cpu_times"][:4])  # user, system, and of children both
    return busy, whole, own


def _is_ours(pid: int, processes: Mapping[int, Any]) -> bool:
    """Return whether a process is this one, or descends from it or from the kernel's own."""
    while pid in processes:
        if pid in (os.getpid(), _KTHREADD):
            return True
        pid = processes[pid]["ppid"]
    return False


def wait_for_recording(out: Path, nodes: int) -> None:
    """Wait until the recorders of so many nodes have said that they stopped."""
    end = time.monotonic() + _RECORDER_ENDS_WITHIN_S
    while count_stopped_recorders(out) < nodes:
        if time.monotonic() > end:
            raise RuntimeError(f"the recorder does not end: {out}")
        time.sleep(0.2)


def count_stopped_recorders(out: Path) -> int:
    """Return how many recorders have said in a recording that they stopped."""
    try:
        folders = list_node_folders(out)
    except NoRecording:
        return 0
    return sum(
        any(getattr(record, "kind", "") == "recorder-stopped" for record in NodeReader(folder))
        for folder in folders
    )


def get_failure_output(folder: Path) -> str:
    """Return the end of what the job printed."""
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("output-*.txt"))]
    return "\n".join(text[-1500:] for text in texts)
