"""What every process of the job reads, writes and holds in memory, from its `stat` and `io`.

One row per process and tick. The times of its threads are in the table `threads`; here is what
the kernel counts per process: bytes asked for and bytes that reached a block device.

Both files are known at every tick; what reads as it did last time is not parsed again, and parsing
cost as much as reading. The `stat` is that of the main thread, which says the same of its process
as /proc/<pid>/stat without adding up the times of its threads; when the collector `threads` has
read it in this tick, it is not read again.

## Source

`/proc/<pid>/task/<pid>/stat` and `/proc/<pid>/io` (docs.kernel.org/filesystems/proc, section 3.3).

## Privilege

The job's user, or root: `io` is shown to who may trace the process.

## Cost

Two reads for each process, one where `threads` has read its `stat` in the same tick.

## Where it is blind

`read_bytes` are those that reached a block device: what came over the network, or out of the page
cache, is in `read_chars` only, and what was read through a mapping in `read_bytes` only. Bytes that
a process writes are counted when they reach the cache, not the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from clusterprof.collectors.base import Context
from clusterprof.linux.processes import ProcessTree, why_invisible
from clusterprof.linux.task import (
    Descriptors,
    TaskFile,
    TaskIo,
    hold,
    parse_io,
    parse_process_stat,
)
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
_UNKNOWN_IO = TaskIo(-1, -1, -1, -1)


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
        self._open: dict[int, _Process] = {}
        self._names = Strings()
        self._pids: list[int] = []
        self._searches = 1
        self._unsearched = True
        self._thorough_ns = -_THOROUGH_NS
        return COLUMNS

    def sample(self) -> Sequence[tuple[int, ...]]:
        """Return the rows of this tick; raises Unavailable (denied) when /proc hides the job."""
        now_ns = self._clock()
        self._search(now_ns)
        rows = []
        for pid, process in list(self._open.items()):
            try:
                stat = self._context.readings.take(pid, now_ns)
                rows.append((now_ns, pid, *process.facts(stat, self._names)))
            except OSError:
                self._forget(pid)
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
        known = self._context.readings.pids()
        if known:  # the collector `threads` searches the same tree, and oftener
            for pid in known:
                if pid not in self._open:
                    self._admit(pid)
            return
        pids = list(self._context.job_pids())
        if self._tree.born():
            # The kernel counts a child a moment before its parent's `children` names it, and only
            # a thorough search finds those of threads.
            self._searches, self._unsearched = 2, True
        thorough = self._unsearched and now_ns - self._thorough_ns >= _THOROUGH_NS
        if pids == self._pids and not self._searches and not thorough:
            return
        for pid in self._tree.refresh(pids, thorough):
            if pid not in self._open:
                self._admit(pid)
        if pids and not self._open:
            invisible = why_invisible(self._context.roots, pids)
            if invisible is not None:
                raise invisible
        self._pids = pids
        self._searches = max(0, self._searches - 1)
        if thorough:
            self._thorough_ns, self._unsearched = now_ns, False

    def _admit(self, pid: int) -> None:
        try:
            self._open[pid] = _Process(f"{self._context.roots.proc}/{pid}", pid, self._descriptors)
        except OSError:
            self._tree.forget(pid)

    def _forget(self, pid: int) -> None:
        self._open.pop(pid).close()
        self._tree.forget(pid)


class _Process:
    """The held files of one process, and what they said last."""

    __slots__ = ("_facts", "_io", "_io_data", "_io_file", "_name", "_stat_data", "_stat_file")

    def __init__(self, folder: str, pid: int, descriptors: Descriptors) -> None:
        self._stat_file = TaskFile(f"{folder}/task/{pid}/stat", descriptors)
        # Only who may trace a process may see its I/O, so `io` can be denied where `stat` is not.
        self._io_file = hold(f"{folder}/io", descriptors)
        self._stat_data = self._io_data = b""
        self._io = _UNKNOWN_IO
        self._name = (b"", -1)
        self._facts: tuple[int, ...] = ()

    def facts(self, stat: bytes | None, names: Strings) -> tuple[int, ...]:
        """Return the row from `parent_pid` on; raises OSError when the process has ended.

        `stat`: the line if somebody has just read it.
        """
        if stat is None:
            stat = self._stat_file.read()
        try:
            io = self._io_file.read() if self._io_file is not None else b""
        except OSError:
            io = b""
        if stat == self._stat_data and io == self._io_data:
            return self._facts
        if io != self._io_data:
            self._io = parse_io(io) if io else _UNKNOWN_IO
            self._io_data = io
        name, parent_pid, threads, started_ticks, rss_bytes = parse_process_stat(stat)
        if name != self._name[0]:
            self._name = (name, names.index(name.decode("utf-8", "replace")))
        self._stat_data = stat
        self._facts = (
            parent_pid, started_ticks, rss_bytes, *self._io, threads, self._name[1],
        )  # fmt: skip
        return self._facts

    def close(self) -> None:
        """Close both files."""
        self._stat_file.close()
        if self._io_file is not None:
            self._io_file.close()
