"""What every process of the job reads, writes and holds in memory, from /proc/<pid>/{stat,io}.

One row per process and tick. The times of its threads are in the table `threads`; here is what
the kernel counts per process: bytes asked for and bytes that reached a block device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from clusterprof.collectors.base import Context
from clusterprof.linux.processes import ProcessTree, why_invisible
from clusterprof.linux.task import Descriptors, TaskFile, hold, parse_io, parse_stat
from clusterprof.linux.thread import Strings

COLUMNS = (
    "t_ns",
    "pid",
    "parent_pid",
    "started_ticks",
    "rss_bytes",
    "read_chars_total",
    "write_chars_total",
    "read_bytes_total",
    "write_bytes_total",
    "threads_count",
    "name",
)
"""Names of the values of a row, all int64, in their order; -1 = not available."""

_THOROUGH_NS = 5_000_000_000
_UNKNOWN_IO = (-1, -1, -1, -1)


class ProcessesCollector:
    """Parent, memory, I/O and number of threads of every process of the job."""

    name: ClassVar[str] = "processes"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 500_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._context = context
        self._clock = clock

    def open(self) -> Sequence[str]:
        """Start with an empty tree; the first `sample()` finds the processes."""
        self._descriptors = Descriptors(192)
        self._tree = ProcessTree(self._context.roots, self._descriptors)
        self._open: dict[int, tuple[TaskFile, TaskFile | None]] = {}  # stat, io
        self._names = Strings()
        self._pids: tuple[int, ...] = ()
        self._born = True
        self._thorough_ns = -_THOROUGH_NS
        return COLUMNS

    def sample(self) -> Sequence[tuple[int, ...]]:
        """Return the rows of this tick; raises Unavailable (denied) when /proc hides the job."""
        now_ns = self._clock()
        self._search(now_ns)
        rows = []
        for pid, (stat_file, io_file) in list(self._open.items()):
            try:
                stat = parse_stat(stat_file.read())
            except OSError:
                self._forget(pid)
                continue
            rows.append(
                (
                    now_ns,
                    pid,
                    stat.parent_pid,
                    stat.started_ticks,
                    stat.rss_bytes,
                    *_read_io(io_file),
                    stat.threads,
                    self._names.index(stat.name),
                )
            )
        return rows

    def strings(self) -> dict[str, Sequence[str]]:
        """Return the process names that the column `name` points to."""
        return {"name": self._names.all}

    def close(self) -> None:
        """Close every descriptor."""
        for pid in list(self._open):
            self._forget(pid)
        self._tree.close()

    def _search(self, now_ns: int) -> None:
        pids = tuple(self._context.job_pids())
        self._born = self._tree.born() or self._born
        if pids == self._pids and not self._born:
            return
        thorough = now_ns - self._thorough_ns >= _THOROUGH_NS
        for pid in self._tree.refresh(pids, thorough):
            if pid not in self._open:
                self._admit(pid)
        if pids and not self._open:
            invisible = why_invisible(self._context.roots, pids)
            if invisible is not None:
                raise invisible
        if thorough:
            self._thorough_ns = now_ns
        self._pids = pids
        self._born = not thorough  # what only a thorough search finds is still to be looked for

    def _admit(self, pid: int) -> None:
        path = f"{self._context.roots.proc}/{pid}"
        try:
            stat = TaskFile(f"{path}/stat", self._descriptors)
        except OSError:
            self._tree.forget(pid)
            return
        self._open[pid] = (stat, hold(f"{path}/io", self._descriptors))

    def _forget(self, pid: int) -> None:
        for held in self._open.pop(pid):
            if held is not None:
                held.close()
        self._tree.forget(pid)


def _read_io(held: TaskFile | None) -> tuple[int, int, int, int]:
    # Only who may trace a process may see its I/O, so `io` can be denied where `stat` is not.
    if held is None:
        return _UNKNOWN_IO
    try:
        return parse_io(held.read())
    except OSError:
        return _UNKNOWN_IO
