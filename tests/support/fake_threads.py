"""Threads in hand-made /proc folders, and the collector that reads them."""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.threads import ThreadsCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.threads import COLUMNS

TICK_NS = 100_000_000
LIVENESS_SECONDS = 20.0
Row = namedtuple(
    "Row", "t_ns pid tid state on_cpu run_delay user system block_io major_faults wchan name"
)


class ThreadRig:
    """A collector over processes of ours, and a clock that the test moves."""

    def __init__(self, roots: Roots, pids: Sequence[int] = ()) -> None:
        self.pids = list(pids)
        self.now_ns = 0
        context = Context(roots, None, lambda: self.pids)
        self.collector = ThreadsCollector(context, clock=lambda: self.now_ns)
        assert tuple(self.collector.open()) == COLUMNS

    def tick(self) -> list[Row]:
        rows = [Row(*row) for row in self.collector.sample()]
        assert {row.t_ns for row in rows} <= {self.now_ns}
        self.now_ns += TICK_NS
        return rows

    def tick_until(self, enough: Callable[[list[Row]], Any]) -> list[Row]:
        end = time.monotonic() + LIVENESS_SECONDS
        while time.monotonic() < end:
            rows = self.tick()
            if enough(rows):
                return rows
            time.sleep(0.01)
        raise AssertionError(f"never came: {rows}")

    def list_wait_places(self) -> Sequence[str]:
        return self.collector.strings()["wchan"]


STAT = "{tid} (w) {state} 1 1 1 0 -1 0 0 0 {faults} 0 {user} {system} 0 0 20 0 1 0 100 0 0"
STAT += " 0" * 17 + " {block} 0 0\n"


class FakeThread:
    """The files of one thread in a folder that stands for /proc."""

    def __init__(self, proc: Path, pid: int, tid: int) -> None:
        self.folder = proc / str(pid) / "task" / str(tid)
        self.folder.mkdir(parents=True)
        self.tid = tid
        if pid == tid:
            (self.folder / "children").write_text("")
            (proc / str(pid) / "stat").write_text("exists")

    def set_state(
        self, state: str = "S", times: str = "", wchan: str = "0", **numbers: int
    ) -> None:
        fields = {"faults": 0, "user": 0, "system": 0, "block": 0, **numbers}
        (self.folder / "stat").write_text(STAT.format(tid=self.tid, state=state, **fields))
        (self.folder / "wchan").write_text(wchan)
        if times:
            (self.folder / "schedstat").write_text(f"{times}\n")
