"""Activity of one task: /proc/<pid>/{stat,io}, …/task/<tid>/{stat,schedstat,wchan}.

https://docs.kernel.org/filesystems/proc.html, https://docs.kernel.org/scheduler/sched-stats.html

    stat        41 (pt data) D 40 …     name, state, parent, faults, clock ticks of CPU time, …
    schedstat   4731093441 92034419 812 ns on a CPU, ns waiting for one, times it was scheduled
    wchan       folio_wait_bit_common   kernel function it sleeps in; "0" = running, or hidden
    io          rchar: 1948 …           bytes requested, and bytes that reached a block device

The files of a task are opened once and read with `pread`, at half the cost of reopening them. An
open descriptor stays bound to its task, so a reused pid is never mistaken for the old task.

The row of a thread is built from the fewest reads that keep it correct. A thread that did not run
since its last row is unchanged, so reading `schedstat` alone (0.4 µs; `stat` and `wchan` cost 1 to
1.5 µs each) is enough to repeat its row. `wchan` is read once per sustained sleep, and once more
if it was "0": since Linux 6.12 a sleeping thread can stay queued for a while. A thread that sleeps
anew in every tick is read at most twice a second; the main thread of a process in every tick.

Sampling only reads. The readings of many threads are parsed later in one batch: the first
instructions after a sleep miss the processor's caches and cost several times as much as repeated
ones.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from os import pread
from typing import NamedTuple, Protocol

from clusterprof.agent.linux.files import parse_integers

NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_GONE_ERRNOS = (errno.ESRCH, errno.ENOENT)
_FRESH_NS = 20_000_000  # the collectors of one tick run within this time
_READ_BYTES = 1024
# characters of `io` that are neither digits nor line ends
_WORDS = b"abcdefghijklmnopqrstuvwxyz_: "
# Words of `stat` after the name, which may contain any character, so count from its last ")".
# Field numbers of proc(5) are these plus 3; there are at least 40 since Linux 2.6.18.
_STATE, _PARENT, _MAJOR_FAULTS, _USER, _SYSTEM = 0, 1, 9, 11, 12
_THREADS, _STARTED, _RSS, _PROCESSOR, _BLOCK_IO = 17, 19, 21, 36, 39


class Stat(NamedTuple):
    """The used fields of one `stat` line; a tuple, because it is built often."""

    name: str
    state: int
    """ord() of the letter: R running or ready, S sleeping, D uninterruptible sleep, Z zombie."""
    parent_pid: int
    major_faults: int
    user_ns: int
    system_ns: int
    threads: int
    started_ticks: int
    rss_bytes: int
    block_io_ns: int
    """Time waiting for block devices; always 0 when the kernel does not account delays."""


class TaskIo(NamedTuple):
    """Data a process read and wrote; `*_bytes` is traffic of block devices."""

    read_chars: int
    write_chars: int
    read_bytes: int
    write_bytes: int


def parse_stat(data: bytes) -> Stat:
    """Parse one `stat` line of a process or of a thread."""
    end = data.rindex(b")")
    words = data[end + 2 :].split(None, 40)
    return Stat(
        data[data.index(b"(") + 1 : end].decode("utf-8", "replace"),
        words[_STATE][0],
        int(words[_PARENT]),
        int(words[_MAJOR_FAULTS]),
        int(words[_USER]) * NS_PER_TICK,
        int(words[_SYSTEM]) * NS_PER_TICK,
        int(words[_THREADS]),
        int(words[_STARTED]),
        int(words[_RSS]) * PAGE_BYTES,
        int(words[_BLOCK_IO]) * NS_PER_TICK,
    )


def parse_process_stat(data: bytes) -> tuple[bytes, int, int, int, int]:
    """Parse a process's row: (name, parent_pid, threads, started_ticks, rss_bytes).

    Parses the same line as `parse_stat`, but splits it only as far as these
    fields.
    """
    end = data.rindex(b")")
    words = data[end + 2 :].split(None, _RSS + 1)
    return (
        data[data.index(b"(") + 1 : end],
        int(words[_PARENT]),
        int(words[_THREADS]),
        int(words[_STARTED]),
        int(words[_RSS]) * PAGE_BYTES,
    )


def parse_thread_stat(data: bytes) -> tuple[int, int, int, int, int]:
    """Parse the changing fields: (state, user_ns, system_ns, block_io_ns, major_faults).

    Parses the same line as `parse_stat`; it is read ten times a second per
    thread.
    """
    words = data[data.rindex(b")") + 2 :].split(None, _BLOCK_IO + 1)
    return (
        words[_STATE][0],
        int(words[_USER]) * NS_PER_TICK,
        int(words[_SYSTEM]) * NS_PER_TICK,
        int(words[_BLOCK_IO]) * NS_PER_TICK,
        int(words[_MAJOR_FAULTS]),
    )


def parse_thread_prefix(data: bytes) -> tuple[bytes, tuple[int, int, int, int, int]]:
    """Return the line up to the CPU times, and the changing fields with block_io_ns = -1.

    A line with an equal prefix has equal fields; the line is split only a third as far as by
    `parse_thread_stat`.
    """
    state, *words = data[data.rindex(b")") + 2 :].split(None, _SYSTEM + 1)
    user, system, major_faults = words[_USER - 1], words[_SYSTEM - 1], words[_MAJOR_FAULTS - 1]
    facts = int(user) * NS_PER_TICK, int(system) * NS_PER_TICK, -1, int(major_faults)
    return data[: len(data) - len(words[-1])], (state[0], *facts)


def parse_processor(data: bytes) -> int:
    """Parse the CPU that a task runs on or last ran on, from its `stat` line."""
    return int(data[data.rindex(b")") + 2 :].split(None, _PROCESSOR + 1)[_PROCESSOR])


def parse_io(data: bytes) -> TaskIo:
    """Parse `/proc/<pid>/io`."""
    # rchar: N wchar: N syscr: N syscw: N read_bytes: N write_bytes: N cancelled_write_bytes: N
    read_chars, write_chars, _, _, read_bytes, write_bytes, *_ = parse_integers(
        data.translate(None, _WORDS)
    )
    return TaskIo(read_chars, write_chars, read_bytes, write_bytes)


def parse_wchan(data: bytes) -> str:
    """Return the kernel function without compiler suffixes; "" = none, or hidden."""
    name = data.split(b".", 1)[0].decode("ascii", "replace")
    return "" if name == "0" else name


def is_block_io_accounted(setting: bytes | None) -> bool | None:
    """Return whether `block_io_ns` is counted, from /proc/sys/kernel/task_delayacct.

    None = the file is missing (before Linux 5.14 there was only a boot parameter): then any value
    above zero proves that it is.
    """
    return None if setting is None else setting.strip() == b"1"


class DescriptorBudget:
    """A limit on open files; beyond it files are opened for every read.

    The soft limit of open files is 1,024 on most machines, and the recorder itself needs some.
    """

    __slots__ = ("limit", "open_count")

    def __init__(self, limit: int = 512) -> None:
        self.limit = limit
        self.open_count = 0


class StatLineSource(Protocol):
    """A reader of the `stat` line of a process's main thread."""

    line: bytes
    """The newest line."""
    line_ns: int
    """When it was read."""


class SharedStatLines:
    """`stat` lines that one collector has just read and another one needs too.

    A `stat` line is the most expensive reading of a task. The main thread's line contains all facts
    of its process that are not times (parent, threads, memory, name), so it is not read a second
    time.
    """

    __slots__ = ("_readers",)

    def __init__(self) -> None:
        self._readers: dict[int, StatLineSource] = {}

    def share(self, pid: int, reader: StatLineSource) -> None:
        """Register the reader of the line of a process's main thread."""
        self._readers[pid] = reader

    def take(self, pid: int, now_ns: int) -> bytes | None:
        """Return the line if it was read less than 20 ms ago; None otherwise."""
        reader = self._readers.get(pid)
        if reader is None or now_ns - reader.line_ns > _FRESH_NS:
            return None
        return reader.line or None

    def forget(self, pid: int) -> None:
        """Remove a process that has ended."""
        self._readers.pop(pid, None)

    def pids(self) -> list[int]:
        """Return the processes of the job's tree that have a registered reader."""
        return list(self._readers)


class TaskFile:
    """One kernel file of one task, kept open if the limit allows."""

    __slots__ = ("_descriptors", "fd", "path")

    def __init__(self, path: str, descriptors: DescriptorBudget) -> None:
        """Open `path`.

        Raises: OSError when it cannot be opened.
        """
        self.path = path
        self._descriptors = descriptors
        self.fd = -1
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if descriptors.open_count < descriptors.limit:
            descriptors.open_count += 1
            self.fd = fd
        else:
            os.close(fd)

    def read(self, size: int = _READ_BYTES) -> bytes:
        """Return the current content of the file.

        Raises: OSError when it cannot be read (ESRCH: the task has ended).
        """
        if self.fd >= 0:
            return os.pread(self.fd, size, 0)
        return read_file_start(self.path, size)

    def close(self) -> None:
        """Close the descriptor if it is open; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._descriptors.open_count -= 1


def read_file_start(path: str, size: int = _READ_BYTES) -> bytes:
    """Read the start of a file that is read too rarely to stay open.

    Raises: OSError when it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def open_task_file(path: str, descriptors: DescriptorBudget) -> TaskFile | None:
    """Open a file of a task; return None when it is missing or unreadable."""
    try:
        return TaskFile(path, descriptors)
    except OSError:
        return None


def get_descriptor(file: TaskFile | None) -> int:
    """Return the descriptor of an open file, -1 for a file that is not open."""
    return -1 if file is None else file.fd


def is_task_gone(error: OSError) -> bool:
    """Return whether the error means that the task has ended."""
    return error.errno in _GONE_ERRNOS


COLUMNS = (
    "t_ns",
    "pid",
    "tid",
    "state",
    "on_cpu_ns_total",
    "run_delay_ns_total",
    "user_ns_total",
    "system_ns_total",
    "block_io_delay_ns_total",
    "major_faults_total",
    "wchan",
    "name",
)
"""Names of the values of a row, all int64, in order; -1 = not available."""

Row = tuple[int, ...]

_WCHAN_NS = 500_000_000
_SLEEPING, _BLOCKED = ord("S"), ord("D")
_STATES_WITH_WCHAN = (_SLEEPING, _BLOCKED)
_EMPTY_SCHEDSTAT = b"0 0 0\n"  # the kernel does not keep these times
_STAT_BYTES = 479  # nearly always sufficient, and fits Python's own small-block allocator


class StringTable:
    """Numbers strings in the order of their first appearance."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, word: str) -> int:
        """Return the number of a string; a new string gets the next number."""
        number = self._index.get(word)
        if number is None:
            number = self._index[word] = len(self.all)
            self.all.append(word)
        return number


class SharedThreadState:
    """State shared by all threads: whether block I/O delays are accounted, and the kernel functions
    and names (of threads other than main threads) seen so far.
    """

    __slots__ = ("_places", "block_io", "names", "wchans")

    def __init__(self, block_io: bool | None) -> None:
        self.block_io = block_io
        self.names = StringTable()
        self.wchans = StringTable()
        self._places: dict[bytes, int] = {b"": -1}

    def index_wchan(self, wchan: bytes) -> int:
        """Return the number of the kernel function in a `wchan`, -1 for none."""
        number = self._places.get(wchan)
        if number is None:
            word = parse_wchan(wchan)
            number = self._places[wchan] = self.wchans.index(word) if word else -1
        return number


ThreadReading = tuple["Thread", bytes | None, bytes, bytes]
"""The bytes read of a thread at one tick, parsed later by `Thread.row`:
the thread, its `schedstat` (None = the kernel keeps none), its `stat` (empty = it did not run since
the previous reading, so nothing else changed), and its `wchan` (empty = not read).
"""


class Thread:
    """The open files of one thread, their last content, and the row built from it."""

    __slots__ = (
        "_asked",
        "_asked_ns",
        "_asked_times",
        "_base",
        "_comm",
        "_descriptors",
        "_facts",
        "_name",
        "_place",
        "_prefix",
        "_repeated_times",
        "_schedstat",
        "_stat",
        "_stat_fd",
        "_times",
        "_times_fd",
        "_wchan",
        "_wchan_fd",
        "has_open_files",
        "line",
        "line_ns",
        "pid",
        "ran_ns",
        "state",
        "tid",
    )

    def __init__(self, proc: str, pid: int, tid: int, descriptors: DescriptorBudget) -> None:
        self.pid, self.tid, self.state, self.ran_ns = pid, tid, 0, 0
        self.line, self.line_ns = b"", 0  # the newest `stat`, and when it was read
        self.has_open_files = False  # the main thread of a process, with all its files open
        self._base = f"{proc}/{pid}/task/{tid}"
        self._descriptors = descriptors
        self._stat: TaskFile | None = TaskFile(f"{self._base}/stat", descriptors)
        self._schedstat = open_task_file(f"{self._base}/schedstat", descriptors)
        self._wchan: TaskFile | None = None
        # Descriptors of open files, -1 otherwise; kept here because a tick must touch little
        # memory.
        self._stat_fd, self._wchan_fd = self._stat.fd, -1
        self._times_fd = get_descriptor(self._schedstat)
        self._times: bytes | None = None
        self._asked, self._asked_ns, self._place = b"", -_WCHAN_NS, b""  # wchan
        self._asked_times: bytes | None = None
        self._repeated_times: bytes | None = None
        self._comm, self._name = b"", -1
        self._prefix = b"?"
        self._facts = (0, 0, 0, 0, 0)

    def read(self, now_ns: int) -> ThreadReading:
        """Read the files that may have changed.

        Raises: OSError when the thread has ended.
        """
        times: bytes | None
        times = pread(self._times_fd, 128, 0) if self._times_fd >= 0 else self._read_times()
        if times == _EMPTY_SCHEDSTAT:
            times = None
        if times is not None and times == self._times and self.state == _SLEEPING:
            if self._asked_times != times:
                self._update_wchan(now_ns, True)
            elif self._asked == b"0":
                self._repeat_wchan()
            return self, times, b"", self._asked
        if times != self._times or times is None:
            self.ran_ns = now_ns
        self._times = times
        stat = pread(self._stat_fd, _STAT_BYTES, 0) if self._stat_fd >= 0 else b""
        if not stat or len(stat) == _STAT_BYTES:
            stat = self._read_stat()
        self.line, self.line_ns = stat, now_ns
        self.state = stat[stat.rindex(b")") + 2]
        self._place = b""
        if self.state in _STATES_WITH_WCHAN:
            self._update_wchan(now_ns, False)
            files = (self._stat_fd, self._times_fd, self._wchan_fd)
            self.has_open_files = self.pid == self.tid and times is not None and min(files) >= 0
        return self, times, stat, self._place

    def row(
        self,
        now_ns: int,
        reading: ThreadReading,
        on_cpu: int,
        delay: int,
        shared: SharedThreadState,
    ) -> Row:
        """Build the row of a reading; the readings of one thread must be passed in order."""
        _, _, stat, wchan = reading
        # CPU time is counted in ticks of 10 ms: the rest of the line rarely changes.
        if stat and (shared.block_io is not False or not stat.startswith(self._prefix)):
            self._parse_stat(stat, shared)
        state, user, system, block_io, faults = self._facts
        wchan_index = shared.index_wchan(wchan) if state in _STATES_WITH_WCHAN else -1
        return (
            now_ns,
            self.pid,
            self.tid,
            state,
            on_cpu,
            delay,
            user,
            system,
            block_io,
            faults,
            wchan_index,
            self._name,
        )

    def _parse_stat(self, stat: bytes, shared: SharedThreadState) -> None:
        if self.pid != self.tid:
            self._update_name(stat, shared.names)
        if shared.block_io is False:
            self._prefix, self._facts = parse_thread_prefix(stat)
            return
        state, user, system, block_io, faults = parse_thread_stat(stat)
        if shared.block_io is None and block_io > 0:
            shared.block_io = True
        self._facts = (state, user, system, block_io if shared.block_io else -1, faults)

    def _update_name(self, stat: bytes, names: StringTable) -> None:
        """Update the thread's name, which may be set soon after its start."""
        comm = stat[stat.index(b"(") + 1 : stat.rindex(b")")]
        if comm != self._comm:
            self._comm = comm
            self._name = names.index(comm.decode(errors="replace"))

    def has_run(self) -> bool:
        """Return whether the thread ran on a CPU since its last row, or has ended."""
        try:
            times = self._read_times()
        except OSError:
            return True
        return times is None or times != self._times

    def close_sampling_files(self) -> None:
        """Close the files that are needed only for rows in every tick."""
        for file in (self._stat, self._wchan):
            if file is not None:
                file.close()
        self._stat = self._wchan = None
        self._stat_fd = self._wchan_fd = -1
        self.has_open_files = False

    def close(self) -> None:
        """Close all descriptors."""
        self.close_sampling_files()
        if self._schedstat is not None:
            self._schedstat.close()
            self._times_fd = -1

    def _read_stat(self) -> bytes:
        if self._stat is None:
            self._stat = TaskFile(f"{self._base}/stat", self._descriptors)
            self._stat_fd = self._stat.fd
        return self._stat.read()

    def _read_times(self) -> bytes | None:
        if self._schedstat is None:
            return None
        times = self._schedstat.read(128)
        return None if times == _EMPTY_SCHEDSTAT else times

    def _update_wchan(self, now_ns: int, asleep_still: bool) -> None:
        """Update where the thread sleeps, reading it only when it may have changed."""
        if self._times is None or self._asked_times != self._times:
            at_once = asleep_still or self.state == _BLOCKED or self.pid == self.tid
            if not at_once and now_ns - self._asked_ns < _WCHAN_NS:
                return
            if self._wchan is None:
                self._wchan = open_task_file(f"{self._base}/wchan", self._descriptors)
                self._wchan_fd = get_descriptor(self._wchan)
            self._asked = self._wchan.read(128) if self._wchan is not None else b""
            self._asked_ns, self._asked_times = now_ns, self._times
        self._place = self._asked

    def _repeat_wchan(self) -> None:
        if self._repeated_times != self._times and self._wchan is not None:
            self._asked, self._repeated_times = self._wchan.read(128), self._times


def read_main_threads(
    threads: Iterable[Thread], now_ns: int
) -> tuple[list[ThreadReading], list[Thread]]:
    """Read main threads of processes; return the readings and the threads that have ended.

    Most files of a tick are read here: a thread whose files are all open costs one read, and two
    more when it ran. Its state is parsed only once it stops running.
    """
    readings: list[ThreadReading] = []
    ended: list[Thread] = []
    for thread in threads:
        try:
            if not thread.has_open_files:
                readings.append(thread.read(now_ns))
                continue
            times = pread(thread._times_fd, 128, 0)
            if times == thread._times:
                if not thread.state:
                    thread.state = thread.line[thread.line.rindex(b")") + 2]
                if thread.state == _SLEEPING:
                    if thread._asked == b"0":
                        thread._repeat_wchan()
                    readings.append((thread, times, b"", thread._asked))
                    continue
            stat = pread(thread._stat_fd, _STAT_BYTES, 0)
            if len(stat) == _STAT_BYTES:
                stat = thread._read_stat()
            thread._asked = wchan = pread(thread._wchan_fd, 128, 0)
            thread._times, thread.line, thread.line_ns, thread.state = times, stat, now_ns, 0
            readings.append((thread, times, stat, wchan))
        except OSError as error:
            if is_task_gone(error):
                ended.append(thread)
    return readings, ended


def build_rows(
    now_ns: int, readings: Sequence[ThreadReading], shared: SharedThreadState
) -> list[Row]:
    """Build the rows of all readings of one tick."""
    try:
        numbers = parse_integers(b"".join([reading[1] or b"-1 -1 -1\n" for reading in readings]))
        times = zip(readings, numbers[::3], numbers[1::3], strict=True)
        return [
            reading[0].row(now_ns, reading, on_cpu, delay, shared)
            for reading, on_cpu, delay in times
        ]
    except ValueError:  # another kernel's format of `schedstat`: parse each by itself
        return [
            reading[0].row(now_ns, reading, *_parse_schedstat(reading[1]), shared)
            for reading in readings
        ]


def _parse_schedstat(schedstat: bytes | None) -> tuple[int, int]:
    if schedstat is None:
        return -1, -1
    on_cpu, delay = schedstat.split(None, 2)[:2]
    return int(on_cpu), int(delay)
