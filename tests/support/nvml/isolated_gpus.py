"""An isolated collector on simulated GPUs, ticked as the recorder's loop does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.isolation.collector import IsolatedCollector
from clusterprof.agent.linux.files import Roots
from tests.support.nvml.simulated import Scenario, build_library, make_environment
from tests.support.recording_runs import is_alive

SECOND_NS = 1_000_000_000
LIVENESS_SECONDS = 20.0


class MovableClock:
    """The machine's clock plus an offset that a test sets."""

    def __init__(self) -> None:
        self.shift_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.shift_ns


class IsolatedGpuRig:
    """An isolated collector on two simulated GPUs."""

    def __init__(self, folder: Path, *flags: str, grace_ns: int = 0) -> None:
        self.scenario = Scenario(folder / "scenario", devices=2, gpm=True)
        self.clock = MovableClock()
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.pids: set[int] = set()
        self.collector = IsolatedCollector(
            "gpu_nvidia",
            Context(Roots(), None, lambda: []),
            environment=make_environment(build_library(folder / "lib", *flags), self.scenario),
            clock=self.clock,
            # Not "auto": how long a reading takes here is this machine's doing.
            options=("--grace-ns", str(grace_ns), "--gpm", "on"),
        )

    def tick(self) -> list[Any]:
        """Make one turn of the recorder's loop."""
        values = list(self.collector.sample())
        self.seen += self.collector.events()
        if self.collector.pid is not None:
            self.pids.add(self.collector.pid)
        return values

    def tick_until(self, enough: Callable[[list[Any]], Any]) -> list[Any]:
        """Tick until the values or the events are as wanted."""
        end = time.monotonic() + LIVENESS_SECONDS
        while time.monotonic() < end:
            values = self.tick()
            if enough(values):
                return values
            time.sleep(0.02)
        raise AssertionError(f"never came: {self.seen} {values}")

    def list_event_kinds(self) -> list[str]:
        return [kind for kind, _ in self.seen]


def wait_for_exit(pids: set[int]) -> None:
    """Wait until the helper processes have ended by themselves."""
    end = time.monotonic() + LIVENESS_SECONDS
    while time.monotonic() < end and any(is_alive(pid) for pid in pids):
        time.sleep(0.02)
    assert [pid for pid in pids if is_alive(pid)] == []
