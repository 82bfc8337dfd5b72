"""Process of a node that keeps the last minute of one node settled while somebody watches the job.

    recorder ──starts──> settler ──live-0.settled, live-1.settled──> clusterprof top

The recorder starts it in a process of its own when a viewer has left its mark, and it
ends when the mark expires or the recorder closes its pipe (stdin). It runs when a CPU
would be idle otherwise, and uses at most MAX_CPU_RATIO of one core: a node that costs
more is settled half as often, and a quarter, until viewers read its recording themselves.

Windows end at multiples of the period of the wall clock, so that those of all nodes fit
together. The newest two are kept, because not all nodes are ready at the same instant.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.settled_file import SettledNode, make_settings_key, write_settled
from clusterprof.analysis.live.window import KEEP_MORE_NS, WINDOW_NS, settle_window
from clusterprof.trace.live_files import SETTLED_NAMES, is_wanted, remove_live_files
from clusterprof.trace.live_tail import NodeTail

PERIOD_NS = 4_000_000_000
"""Time between two windows, ns: with a second until records are written, and half of one until
they are settled, data is at most 5 s old."""
MAX_PERIOD_NS = 4 * PERIOD_NS
"""Longest period, ns: viewers take windows that are up to 20 s old. A node that costs more than
MAX_CPU_RATIO even so is not settled."""
MAX_CPU_RATIO = 0.02
"""Largest share of one core."""
_POLL_S = 0.25
_REST_OF_BATCH_S = 0.2  # until the frames of a batch that has begun are written
_MAX_MEMORY_BYTES = 1 << 30
_OOM_SCORE_ADJUST = 1000  # the first process to be killed when memory is short


class WindowSettler:
    """Settles the window of one node again and again."""

    def __init__(self, folder: Path, limits: Mapping[str, Any], window_ns: int = WINDOW_NS) -> None:
        """Take the folder of a node; limits: bound limits object per cause id."""
        self.period_ns = PERIOD_NS
        self._tail = NodeTail(folder)
        self._limits, self._settings = limits, make_settings_key(limits)
        self._window_ns = window_ns
        self._end_ns = 0
        self._count = 0

    @property
    def segment(self) -> str:
        """Name of the segment that is being written."""
        return self._tail.segment

    @property
    def has_ended(self) -> bool:
        """Return whether the recorder has ended or the recording is gone."""
        return self._tail.state != "recording"

    def poll(self) -> None:
        """Read what was written since the last call."""
        self._tail.poll(self._window_ns + KEEP_MORE_NS)

    def is_due(self) -> bool:
        """Return whether records of the end of another window have been read."""
        return self._find_end_ns() > self._end_ns

    def settle(self) -> None:
        """Settle the newest window that is complete, and write it, unless the disk is full.

        Raises: OSError when it cannot be written.
        """
        tail, end_ns = self._tail, self._find_end_ns()
        realtime_ns = tail.realtime_ns()
        if tail.latest_ns is None or realtime_ns is None or tail.trouble:
            return
        until_ns = end_ns - (realtime_ns - tail.latest_ns)
        window = settle_window(tail, self._limits, until_ns - self._window_ns, until_ns)
        header = tail.header.node if tail.header is not None else {}
        settled = SettledNode(
            name=header.get("display") or header.get("hostname") or tail.folder.name,
            period_ns=self.period_ns,
            latest_ns=realtime_ns,
            damaged_bytes=tail.damaged_bytes,
            result=window.result,
            ranks=window.ranks,
        )
        name = SETTLED_NAMES[self._count % len(SETTLED_NAMES)]
        write_settled(tail.folder, name, settled, end_ns, self._window_ns, self._settings)
        self._end_ns = end_ns
        self._count += 1

    def adjust_period(self, cpu_ns: int) -> bool:
        """Choose the period so that `cpu_ns` per window is within the limit; False: it cannot be.

        It doubles at once, and is halved when that would use at most half of the limit.
        """
        while cpu_ns > MAX_CPU_RATIO * self.period_ns:
            if self.period_ns >= MAX_PERIOD_NS:
                return False
            self.period_ns *= 2
        if self.period_ns > PERIOD_NS and cpu_ns < MAX_CPU_RATIO * self.period_ns / 4:
            self.period_ns //= 2
        return True

    def _find_end_ns(self) -> int:
        realtime_ns = self._tail.realtime_ns()
        return 0 if realtime_ns is None else realtime_ns // self.period_ns * self.period_ns


def main(arguments: list[str]) -> int:
    """Settle the node of FOLDER until nobody watches; return the exit status.

    0: the mark has expired or the recording has ended. 1: the node costs too much, or its windows
    cannot be written: a new start would not help soon.
    """
    folder = Path(arguments[0])
    limit_process()
    settler = WindowSettler(folder, build_limits({}))
    try:
        return _run_settler(settler, folder)
    except (OSError, MemoryError):
        return 1
    finally:
        remove_live_files(folder)


def _run_settler(settler: WindowSettler, folder: Path) -> int:
    settler.poll()
    spent_ns = time.process_time_ns()  # starting and the first reading are not repeated
    while not settler.has_ended:
        if settler.is_due():
            if is_pipe_closed(_REST_OF_BATCH_S):
                break
            settler.poll()
            settler.settle()
            now_ns = time.process_time_ns()
            if not settler.adjust_period(now_ns - spent_ns):
                return 1
            spent_ns = now_ns
            if not is_wanted(folder, settler.segment):
                break
        if is_pipe_closed(_POLL_S):
            break
        settler.poll()
    return 0


def is_pipe_closed(seconds: float) -> bool:
    """Wait, at most until the recorder closes its end of the pipe; return whether it has."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 4096)


def limit_process() -> None:
    """Leave every CPU to others, be killed first when memory is short, and limit memory.

    Settings that the system refuses are left unchanged.
    """
    import resource

    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE_ADJUST))
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, hard))
