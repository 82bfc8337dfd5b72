"""Stopwatches of the training script: a line per step, because a rank may be killed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from loading import read_run_delay_ns

now_ns = time.monotonic_ns


class Stopwatch:
    """Writes `FOLDER/rank-<rank>.life-<restart>.jsonl`."""

    def __init__(self, folder: str, rank: int, header: dict) -> None:
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        path = os.path.join(folder, f"rank-{rank}.life-{life}.jsonl")
        self.file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
        self.phases: list = []
        """[start_ns, end_ns, name, ns without a CPU]"""
        self.operations: list = []
        """[kind, peer, number, come_ns, left_ns]"""
        self.injected: list = []
        """[start_ns, end_ns, cause]"""
        self._write_line({"life": int(life), "started_ns": _read_start_ns(), **header})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, delay = now_ns(), read_run_delay_ns()
        try:
            yield
        finally:
            self.phases.append([start, now_ns(), name, read_run_delay_ns() - delay])

    def step(self, number: int, began_ns: int, items: list, log: list) -> None:
        """Write what happened since the line before."""
        ended_ns = now_ns()
        line = {"step": number, "began_ns": began_ns, "ended_ns": ended_ns, "items": items}
        line["delay_ns"] = read_run_delay_ns()
        for name in ("phases", "operations", "injected"):
            mine = getattr(self, name)
            line[name], mine[:] = list(mine), []
        # The last entry of a device's log may still grow.
        whole = len(log) - (number >= 0)
        line["log"] = log[:whole]
        del log[:whole]
        self._write_line(line)

    def _write_line(self, line: dict) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def _read_start_ns() -> int:
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
