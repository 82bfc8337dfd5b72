"""The C program and the prototype next to a running recorder: which files they read, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sample_cost import KERNEL_FILES, LEFT_OUT, PER_PROCESS, list_open_files

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.registry import select_collectors
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import Unavailable

PROTOTYPE_HZ = 10
FULL_SAMPLE = (
    "stat",
    "meminfo",
    "vmstat",
    "diskstats",
    "loadavg",
    "net/dev",
    "net/snmp",
    "net/netstat",
    "pressure/cpu",
    "pressure/io",
    "pressure/memory",
)
"""What one full sample reads of the host."""


def list_files_by_rate(job: list[int], hz: int) -> list[tuple[int, list[str]]]:
    """Return the kernel files of all collectors, by their interval at this rate."""
    by_rate: dict[int, set[str]] = {}
    fast_ns = 1_000_000_000 // hz
    context = Context(Roots(), None, lambda: job)
    for kind in select_collectors(Roots(), use_portable=False):
        collector: Any = kind(context)
        if collector.name in LEFT_OUT:
            continue
        before = set(list_open_files())
        try:
            collector.open()
            collector.sample()
        except Unavailable:
            continue
        held = [path for path in list_open_files() if path not in before]
        own_ns = collector.interval_ns
        interval_ns = fast_ns if own_ns <= 100_000_000 else max(own_ns, fast_ns)
        by_rate.setdefault(interval_ns, set()).update(held)
        collector.close()
    known = (path for paths in by_rate.values() for path in paths)
    assert all(path.startswith(KERNEL_FILES) for path in known)
    return sorted((interval_ns, sorted(paths)) for interval_ns, paths in by_rate.items())


def list_sample_files(job: list[int]) -> list[str]:
    """Return the files of one full sample: of the host, and four of each process."""
    host = (f"/proc/{name}" for name in FULL_SAMPLE)
    mine = (f"/proc/{pid}/{name}" for pid in job for name in PER_PROCESS)
    return [path for path in (*host, *mine) if os.access(path, os.R_OK)]


class PacedReader:
    """The C program, reading the same files at the same rate, until it is closed."""

    def __init__(self, program: Path, paths: list[str], interval_ns: int) -> None:
        self._process = subprocess.Popen(
            [str(program), "raw"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write("\n".join(paths) + f"\n\n1000000 {interval_ns}\n")
        self._process.stdin.flush()
        self.pid = self._process.pid

    def close(self) -> None:
        """End it in the middle."""
        self._process.kill()
        self._process.communicate()


class Prototype:
    """The prototype, reading a full sample at 10 Hz, until it is closed."""

    def __init__(self, folder: Path, paths: list[str]) -> None:
        program = Path(__file__).parent / "_paced_prototype.py"
        bare = [sys.executable, "-S", "-E", str(program)]
        self._process = subprocess.Popen([*bare, str(folder / "prototype"), *paths])
        self.pid = self._process.pid

    def close(self) -> None:
        """End it in the middle."""
        self._process.kill()
        self._process.wait()
