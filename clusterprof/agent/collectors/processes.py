"""I/O and memory of every process of the job, from its `stat` and `io`.

Where the job's processes may run and last ran: affinity, cpuset, NUMA nodes, last CPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.linux.processes import (
    STATUS_BYTES,
    ProcessTree,
    explain_invisible_processes,
    parse_allowed,
)
from clusterprof.agent.linux.threads import (
    DescriptorBudget,
    StringTable,
    TaskFile,
    TaskIo,
    open_task_file,
    parse_io,
    parse_process_stat,
    parse_processor,
    read_file_start,
)

PROCESS_COLUMNS = (
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
"""Names of the values of a row, all int64, in order; -1 = not available."""

_THOROUGH_SEARCH_NS = 5_000_000_000
_UNKNOWN_IO = TaskIo(-1, -1, -1, -1)
_MAX_SCRIPT_BYTES = 40
_MODULE = re.compile(rb"[A-Za-z_][\w.]*")
_SCRIPT_READS = 4
"""Rows of a new process in which its command line is read: it may execute another program yet."""


class ProcessesCollector:
    """I/O and memory of every process of the job, from its `stat` and `io`.

    One row per process and tick. The times of its threads are in the table `threads`; this
    table has the per-process counters of the kernel: bytes requested, and bytes that
    reached a block device.

    Both files are read in every tick; unchanged content is not parsed again, because
    parsing costs as much as reading. The `stat` line is that of the main thread, which has
    the same facts about its process as /proc/<pid>/stat but does not sum the times of its
    threads; when the collector `threads` has read it in this tick, it is not read again.

    A process is named as the kernel names it. The name of a Python process is followed by that
    of its script or module, from its command line, of which nothing else is kept.

    ## Source

    `/proc/<pid>/task/<pid>/stat` and `/proc/<pid>/io` (docs.kernel.org/filesystems/proc,
    section 3.3); `/proc/<pid>/cmdline` four times per process.

    ## Privilege

    The job's user, or root: `io` is readable only for a user who may trace the process.

    ## Cost

    Two reads for each process, one where `threads` has read its `stat` in this tick.

    ## Where it is blind

    `read_bytes` count data that came from a block device: data from the network or the page
    cache is in `read_chars` only, and data read through a mapping in `read_bytes` only.
    Bytes that a process writes are counted when they reach the cache, not the disk.
    """

    name: ClassVar[str] = "processes"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 500_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._context = context
        self._clock = clock

    def open(self) -> Sequence[str]:
        """Start with an empty tree; the first `sample()` finds the processes."""
        self._descriptors = DescriptorBudget(192)
        self._tree = ProcessTree(self._context.roots, self._descriptors)
        self._open: dict[int, _Process] = {}
        self._names = StringTable()
        self._pids: list[int] = []
        self._searches = 1
        self._unsearched = True
        self._thorough_ns = -_THOROUGH_SEARCH_NS
        return PROCESS_COLUMNS

    def sample(self) -> Sequence[tuple[int, ...]]:
        """Return the rows of this tick.

        Raises: Unavailable ("denied") when /proc hides the job.
        """
        now_ns = self._clock()
        self._search(now_ns)
        rows = []
        for pid, process in list(self._open.items()):
            try:
                stat = self._context.readings.take(pid, now_ns)
                rows.append((now_ns, pid, *process.build_row(stat, self._names)))
            except OSError:
                self._remove_process(pid)
        return rows

    def strings(self) -> dict[str, Sequence[str]]:
        """Return the process names that the column `name` refers to."""
        return {"name": self._names.all}

    def close(self) -> None:
        """Close every descriptor."""
        for pid in list(self._open):
            self._remove_process(pid)
        self._tree.close()

    def _search(self, now_ns: int) -> None:
        job_pids = self._context.readings.pids()
        if job_pids:  # the collector `threads` searches the process tree too, and more often
            for pid in job_pids:
                if pid not in self._open:
                    self._add_process(pid)
            return
        pids = list(self._context.job_pids())
        if self._tree.has_new_tasks():
            # The kernel counts a child a moment before its parent's `children` lists it, and only a
            # thorough search finds children of threads other than the main thread.
            self._searches, self._unsearched = 2, True
        thorough = self._unsearched and now_ns - self._thorough_ns >= _THOROUGH_SEARCH_NS
        if pids == self._pids and not self._searches and not thorough:
            return
        for pid in self._tree.refresh(pids, thorough):
            if pid not in self._open:
                self._add_process(pid)
        if pids and not self._open:
            invisible = explain_invisible_processes(self._context.roots, pids)
            if invisible is not None:
                raise invisible
        self._pids = pids
        self._searches = max(0, self._searches - 1)
        if thorough:
            self._thorough_ns, self._unsearched = now_ns, False

    def _add_process(self, pid: int) -> None:
        try:
            self._open[pid] = _Process(f"{self._context.roots.proc}/{pid}", pid, self._descriptors)
        except OSError:
            self._tree.forget(pid)

    def _remove_process(self, pid: int) -> None:
        self._open.pop(pid).close()
        self._tree.forget(pid)


class _Process:
    """The open files of one process and their last content."""

    __slots__ = (
        *("_facts", "_folder", "_io", "_io_data", "_io_file", "_name", "_reads"),
        *("_stat_data", "_stat_file"),
    )

    def __init__(self, folder: str, pid: int, descriptors: DescriptorBudget) -> None:
        self._folder = folder
        self._reads = 0
        self._stat_file = TaskFile(f"{folder}/task/{pid}/stat", descriptors)
        # Only a user who may trace a process may read its I/O, so `io` can be denied when `stat` is
        # not.
        self._io_file = open_task_file(f"{folder}/io", descriptors)
        self._stat_data = self._io_data = b""
        self._io = _UNKNOWN_IO
        self._name = (b"", -1)
        self._facts: tuple[int, ...] = ()

    def build_row(self, stat: bytes | None, names: StringTable) -> tuple[int, ...]:
        """Build the row from `parent_pid` on.

        stat: the line if it was just read by another collector.
        Raises: OSError when the process has ended.
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
        if name != self._name[0] or self._reads < _SCRIPT_READS:
            self._reads += 1
            script = _read_script(self._folder) if name.startswith(b"python") else b""
            command = b" ".join(filter(None, (name, script)))
            self._name = (name, names.index(command.decode("utf-8", "replace")))
        self._stat_data = stat
        self._facts = (parent_pid, started_ticks, rss_bytes, *self._io, threads, self._name[1])
        return self._facts

    def close(self) -> None:
        """Close both files."""
        self._stat_file.close()
        if self._io_file is not None:
            self._io_file.close()


def _read_script(folder: str) -> bytes:
    """Read which script or module a Python process runs; b"" if it has none, or it is hidden.

    Nothing else of the command line is kept: its arguments may be secret.
    """
    try:
        words = read_file_start(f"{folder}/cmdline").split(b"\0")[1:]
    except OSError:
        return b""
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else b""
        if word == b"-m":
            return b"-m " + after[:_MAX_SCRIPT_BYTES] if _MODULE.fullmatch(after) else b""
        if word == b"-c":  # as `multiprocessing` starts its processes
            return b"multiprocessing" if after.startswith(b"from multiprocessing") else b""
        if word == b"-" or (word and not word.startswith(b"-") and not _is_value(words, index)):
            name = word.rpartition(b"/")[2]
            return name[:_MAX_SCRIPT_BYTES] if name.endswith(b".py") else b""
    return b""


def _is_value(words: list[bytes], index: int) -> bool:
    """Return whether a word belongs to the option of Python before it."""
    return index > 0 and words[index - 1] in (b"-X", b"-W")


PLACEMENT_COLUMNS = ("t_ns", "pid", "processor", "cpus_allowed", "nodes_allowed")
"""Names of the values of a row, all int64, in order; -1 = not available."""

_MAX_PER_TICK = 64
_PLACEMENT_INTERVAL_NS = 2_000_000_000
_NEVER_NS = -_PLACEMENT_INTERVAL_NS


class PlacementCollector:
    """Where the job's processes may run and last ran: affinity, cpuset, NUMA nodes, last CPU.

    One row per process and reading: the list of CPUs that its affinity and its cpuset
    allow, the list of NUMA nodes whose memory it may use (`/proc/<pid>/status`), and the
    CPU on which its main thread last ran (`stat`, field 39). A new process is read
    immediately and every 2 s from then on, at most 64 in one tick, longest-waiting first.

    ## Source

    `/proc/<pid>/status` (Cpus_allowed_list, Mems_allowed_list) and field 39 of `stat`
    (docs.kernel.org/filesystems/proc).

    ## Privilege

    None for processes of the same user; processes of others are invisible under hidepid.

    ## Cost

    Two files of each process every 2 s, at most 64 processes in one tick.

    ## Where it is blind

    Affinities of single threads (OMP_PROC_BIND and the like) are not read. It shows where a
    process may allocate memory, not where its memory is.
    """

    name: ClassVar[str] = "placement"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 500_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._context = context
        self._clock = clock

    def open(self) -> Sequence[str]:
        """Start without any process; the collector `threads` provides them."""
        self._cpus, self._nodes = StringTable(), StringTable()
        self._read_ns: dict[int, int] = {}
        self._due_ns = _NEVER_NS
        return PLACEMENT_COLUMNS

    def sample(self) -> Sequence[tuple[int, ...]]:
        """Return the rows of this tick.

        Raises: Unavailable ("denied") when /proc hides the job.
        """
        now_ns = self._clock()
        pids = {*self._context.readings.pids(), *self._context.job_pids()}
        if now_ns < self._due_ns and pids == self._read_ns.keys():
            return []
        self._read_ns = {pid: self._read_ns.get(pid, _NEVER_NS) for pid in sorted(pids)}
        due = [
            pid
            for pid, looked_ns in self._read_ns.items()
            if now_ns - looked_ns >= _PLACEMENT_INTERVAL_NS
        ]
        turn = sorted(due, key=self._read_ns.__getitem__)[:_MAX_PER_TICK]
        rows = [row for pid in turn if (row := self._row(now_ns, pid)) is not None]
        if turn and not rows:
            invisible = explain_invisible_processes(self._context.roots, turn)
            if invisible is not None:
                raise invisible
        self._read_ns |= dict.fromkeys(turn, now_ns)
        self._due_ns = min(self._read_ns.values(), default=_NEVER_NS) + _PLACEMENT_INTERVAL_NS
        return rows

    def strings(self) -> dict[str, Sequence[str]]:
        """Return the lists that the columns `cpus_allowed` and `nodes_allowed` point to."""
        return {"cpus_allowed": self._cpus.all, "nodes_allowed": self._nodes.all}

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _row(self, now_ns: int, pid: int) -> tuple[int, ...] | None:
        folder = f"{self._context.roots.proc}/{pid}"
        try:
            cpus, nodes = parse_allowed(read_file_start(f"{folder}/status", STATUS_BYTES))
            stat = self._context.readings.take(pid, now_ns)
            processor = parse_processor(stat or read_file_start(f"{folder}/task/{pid}/stat"))
        except (OSError, ValueError, IndexError):
            return None  # the process has ended, or is hidden
        return (
            now_ns,
            pid,
            processor,
            _get_string_index(self._cpus, cpus),
            _get_string_index(self._nodes, nodes),
        )


def _get_string_index(strings: StringTable, word: str) -> int:
    return strings.index(word) if word else -1
