"""/proc/<pid>/{stat,io} and /proc/<pid>/task/<tid>/{stat,schedstat,wchan}: what one task does.

https://docs.kernel.org/filesystems/proc.html, https://docs.kernel.org/scheduler/sched-stats.html

    stat        41 (pt data) D 40 …     name, state, parent, faults, clock ticks of CPU time, …
    schedstat   4731093441 92034419 812 ns on a CPU, ns waiting for one, times it was given one
    wchan       folio_wait_bit_common   kernel function it sleeps in; "0" = runs, or not to be told
    io          rchar: 1948 …           bytes asked for, and bytes that reached a block device

The files of a task are opened once and read with `pread`: half the cost of opening them anew, and
a descriptor stays with its task, so that a reused number is never mistaken for the old task.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple, Protocol

from clusterprof.linux.fields import integers

NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_GONE = (errno.ESRCH, errno.ENOENT)
_JUST_NOW_NS = 20_000_000  # the collectors of one tick follow each other within this
_READ_BYTES = 1024
_WORDS = b"abcdefghijklmnopqrstuvwxyz_: "  # of `io`: what is not a number or the end of a line
# Words of `stat` behind the name, which may hold anything, so we count from its last ")".
# Field numbers of proc(5) are these plus 3; there are at least 40 since Linux 2.6.18.
_STATE, _PARENT, _MAJOR_FAULTS, _USER, _SYSTEM, _THREADS, _STARTED, _RSS = (
    0,
    1,
    9,
    11,
    12,
    17,
    19,
    21,
)
_PROCESSOR = 36
_BLOCK_IO = 39


class Stat(NamedTuple):
    """The fields of one `stat` line that are used; a tuple, because it is made often."""

    name: str
    state: int
    """ord() of the letter: R runs or is ready, S sleeps, D sleeps uninterruptibly, Z is dead."""
    parent_pid: int
    major_faults: int
    user_ns: int
    system_ns: int
    threads: int
    started_ticks: int
    rss_bytes: int
    block_io_ns: int
    """Waited for block devices; 0 for ever when the kernel does not account delays."""


class TaskIo(NamedTuple):
    """What a process read and wrote; `*_bytes` went to or came from block devices."""

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
    """Return (name, parent_pid, threads, started_ticks, rss_bytes): what a process's row holds.

    The same line as `parse_stat`, split no further than these need.
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
    """Return (state, user_ns, system_ns, block_io_ns, major_faults): the fields that change.

    The same line as `parse_stat`; this one is read ten times a second for every thread.
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
    """Return the line up to the CPU times, and what `parse_thread_stat` says, block_io_ns -1.

    A line that begins so again says the same; it is split a third as far.
    """
    state, *words = data[data.rindex(b")") + 2 :].split(None, _SYSTEM + 1)
    user, system, major_faults = words[_USER - 1], words[_SYSTEM - 1], words[_MAJOR_FAULTS - 1]
    facts = int(user) * NS_PER_TICK, int(system) * NS_PER_TICK, -1, int(major_faults)
    return data[: len(data) - len(words[-1])], (state[0], *facts)


def parse_processor(data: bytes) -> int:
    """Return the CPU a task runs or last ran on, from its `stat` line."""
    return int(data[data.rindex(b")") + 2 :].split(None, _PROCESSOR + 1)[_PROCESSOR])


def parse_io(data: bytes) -> TaskIo:
    """Parse `/proc/<pid>/io`."""
    # rchar: N wchar: N syscr: N syscw: N read_bytes: N write_bytes: N cancelled_write_bytes: N
    read_chars, write_chars, _, _, read_bytes, write_bytes, *_ = integers(
        data.translate(None, _WORDS)
    )
    return TaskIo(read_chars, write_chars, read_bytes, write_bytes)


def parse_wchan(data: bytes) -> str:
    """Return the kernel function without the compiler's suffixes; "" = none, or not to be told."""
    name = data.split(b".", 1)[0].decode("ascii", "replace")
    return "" if name == "0" else name


def block_io_accounted(setting: bytes | None) -> bool | None:
    """Say from /proc/sys/kernel/task_delayacct whether `block_io_ns` means anything.

    None = the file is missing (before Linux 5.14 there was only a boot parameter): then a value
    above zero anywhere proves it does.
    """
    return None if setting is None else setting.strip() == b"1"


class Descriptors:
    """A bounded number of open files; beyond it files are opened for every read.

    The soft limit of open files is 1,024 on most machines and the recorder needs some itself.
    """

    __slots__ = ("held", "limit")

    def __init__(self, limit: int = 512) -> None:
        self.limit = limit
        self.held = 0


class Lined(Protocol):
    """Whoever reads the `stat` of a process's first thread."""

    line: bytes
    """The newest one."""
    line_ns: int
    """When it was read."""


class Readings:
    """What a collector has just read of a process and another one wants to know too.

    A `stat` line is the dearest reading of a task. The main thread's line says of its process all
    that does not count time (parent, threads, memory, name), so it need not be read a second time.
    """

    __slots__ = ("_readers",)

    def __init__(self) -> None:
        self._readers: dict[int, Lined] = {}

    def share(self, pid: int, reader: Lined) -> None:
        """Say who reads the line of a process's main thread."""
        self._readers[pid] = reader

    def take(self, pid: int, now_ns: int) -> bytes | None:
        """Return the line if it has just been read."""
        reader = self._readers.get(pid)
        if reader is None or now_ns - reader.line_ns > _JUST_NOW_NS:
            return None
        return reader.line or None

    def forget(self, pid: int) -> None:
        """Drop a process that has ended."""
        self._readers.pop(pid, None)

    def pids(self) -> list[int]:
        """Return the processes of the job's tree that somebody reads."""
        return list(self._readers)


class TaskFile:
    """One kernel file of one task, opened once if the bound allows."""

    __slots__ = ("_descriptors", "fd", "path")

    def __init__(self, path: str, descriptors: Descriptors) -> None:
        """Open `path`; raises OSError when it cannot be, held or not."""
        self.path = path
        self._descriptors = descriptors
        self.fd = -1
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if descriptors.held < descriptors.limit:
            descriptors.held += 1
            self.fd = fd
        else:
            os.close(fd)

    def read(self, size: int = _READ_BYTES) -> bytes:
        """Return the content as it is now; raises OSError (ESRCH: the task is gone)."""
        if self.fd >= 0:
            return os.pread(self.fd, size, 0)
        return read_unheld(self.path, size)

    def close(self) -> None:
        """Close the descriptor if one is held; harmless when repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._descriptors.held -= 1


def read_unheld(path: str, size: int = _READ_BYTES) -> bytes:
    """Return the beginning of a file that is not worth holding; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def hold(path: str, descriptors: Descriptors) -> TaskFile | None:
    """Open a file that need not exist or be readable: None when it is not."""
    try:
        return TaskFile(path, descriptors)
    except OSError:
        return None


def fd_of(file: TaskFile | None) -> int:
    """Return the descriptor of a file that is held, -1 of one that is not."""
    return -1 if file is None else file.fd


def is_gone(error: OSError) -> bool:
    """True when the error says that the task has ended."""
    return error.errno in _GONE
