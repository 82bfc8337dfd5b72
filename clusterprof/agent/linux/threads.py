"""The row of one thread, made from as few reads of its kernel files as is honest.

A thread that was not on a CPU since its last row is still where it was, so `schedstat` alone
(0.4 µs; `stat` and `wchan` cost 1 to 1.5 µs each) writes its row again. `wchan` is asked once per
sleep that lasts; a thread that sleeps anew in every tick is asked at most twice a second, the
first one of a process, for which others wait, in every tick.

A look only reads. What was read is understood later, many looks at once: the first instructions
after a sleep find nothing in the processor's caches and cost several times what they cost again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import pread

from clusterprof.linux.fields import integers
from clusterprof.linux.task import (
    Descriptors,
    TaskFile,
    fd_of,
    hold,
    is_gone,
    parse_thread_prefix,
    parse_thread_stat,
    parse_wchan,
)

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
"""Names of the values of a row, all int64, in their order; -1 = not available."""

Row = tuple[int, ...]

_WCHAN_NS = 500_000_000
_SLEEPING, _BLOCKED = ord("S"), ord("D")
_PLACED = (_SLEEPING, _BLOCKED)
_NO_TIMES = b"0 0 0\n"  # the kernel does not keep them
_STAT_BYTES = 479  # nearly always enough, and as much as Python takes from its own small blocks


class Strings:
    """Numbers strings in the order of their first appearance."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, word: str) -> int:
        """Return the number of a string, giving it the next one if it is new."""
        found = self._index.get(word)
        if found is None:
            found = self._index[word] = len(self.all)
            self.all.append(word)
        return found


class Shared:
    """What all threads have in common: whether block I/O delays are accounted, and the kernel
    functions and names (of threads other than the main ones) that were seen."""

    __slots__ = ("_places", "block_io", "names", "wchans")

    def __init__(self, block_io: bool | None) -> None:
        self.block_io = block_io
        self.names = Strings()
        self.wchans = Strings()
        self._places: dict[bytes, int] = {b"": -1}

    def place(self, wchan: bytes) -> int:
        """Return the number of the kernel function in a `wchan`, -1 for none."""
        found = self._places.get(wchan)
        if found is None:
            word = parse_wchan(wchan)
            found = self._places[wchan] = self.wchans.index(word) if word else -1
        return found


Look = tuple["Thread", bytes | None, bytes, bytes]
"""What was read of a thread at one tick, for `Thread.row` to understand later: the thread, its
`schedstat` (None = the kernel keeps none), its `stat` (empty = it was not on a CPU since the look
before, and all else is as it was), and its `wchan` (empty = nobody asked)."""


class Thread:
    """One thread's held files, what they said last, and the row made of that."""

    __slots__ = (
        "_asked", "_asked_ns", "_asked_times", "_base", "_comm", "_descriptors", "_facts", "_name",
        "_place", "_prefix", "_schedstat", "_stat", "_stat_fd", "_times", "_times_fd", "_wchan",
        "_wchan_fd", "line", "line_ns", "pid", "ran_ns", "settled", "state", "tid",
    )  # fmt: skip

    def __init__(self, proc: str, pid: int, tid: int, descriptors: Descriptors) -> None:
        self.pid, self.tid, self.state, self.ran_ns = pid, tid, 0, 0
        self.line, self.line_ns = b"", 0  # the newest `stat`, and when it was read
        self.settled = False  # the first thread of a process, all its files held
        self._base = f"{proc}/{pid}/task/{tid}"
        self._descriptors = descriptors
        self._stat: TaskFile | None = TaskFile(f"{self._base}/stat", descriptors)
        self._schedstat = hold(f"{self._base}/schedstat", descriptors)
        self._wchan: TaskFile | None = None
        # Of held files, -1 otherwise: a tick looks at nothing that is further away.
        self._stat_fd, self._times_fd, self._wchan_fd = self._stat.fd, fd_of(self._schedstat), -1
        self._times: bytes | None = None
        self._asked, self._asked_ns = b"", -_WCHAN_NS  # wchan
        self._asked_times: bytes | None = None
        self._place = b""
        self._comm, self._name = b"", -1
        self._prefix = b"?"
        self._facts = (0, 0, 0, 0, 0)

    def look(self, now_ns: int) -> Look:
        """Read what may have changed; raises OSError when the thread has ended."""
        times: bytes | None
        times = pread(self._times_fd, 128, 0) if self._times_fd >= 0 else self._read_times()
        if times == _NO_TIMES:
            times = None
        if times is not None and times == self._times and self.state == _SLEEPING:
            if self._asked_times != times:
                self._find_place(now_ns, True)
            self._place = self._asked
            return self, times, b"", self._place
        if times != self._times or times is None:
            self.ran_ns = now_ns
        self._times = times
        stat = pread(self._stat_fd, _STAT_BYTES, 0) if self._stat_fd >= 0 else b""
        if not stat or len(stat) == _STAT_BYTES:
            stat = self._read_stat()
        self.line, self.line_ns = stat, now_ns
        self.state = stat[stat.rindex(b")") + 2]
        self._place = b""
        if self.state in _PLACED:
            self._find_place(now_ns, False)
            files = (self._stat_fd, self._times_fd, self._wchan_fd)
            self.settled = self.pid == self.tid and times is not None and min(files) >= 0
        return self, times, stat, self._place

    def row(self, now_ns: int, look: Look, on_cpu: int, delay: int, shared: Shared) -> Row:
        """Return the row of a look; those of one thread are to come in their order."""
        _, _, stat, wchan = look
        # CPU time is counted in ticks of 10 ms: the line rarely says anything else.
        if stat and (shared.block_io is not False or not stat.startswith(self._prefix)):
            self._understand(stat, shared)
        state, user, system, block_io, faults = self._facts
        place = shared.place(wchan) if state in _PLACED else -1
        return (
            now_ns, self.pid, self.tid, state, on_cpu, delay, user, system, block_io, faults,
            place, self._name,
        )  # fmt: skip

    def _understand(self, stat: bytes, shared: Shared) -> None:
        if self.pid != self.tid:
            self._note_name(stat, shared.names)
        if shared.block_io is False:
            self._prefix, self._facts = parse_thread_prefix(stat)
            return
        state, user, system, block_io, faults = parse_thread_stat(stat)
        if shared.block_io is None and block_io > 0:
            shared.block_io = True
        self._facts = (state, user, system, block_io if shared.block_io else -1, faults)

    def _note_name(self, stat: bytes, names: Strings) -> None:
        """A thread is named by its creator or soon after it began: `4711 (pt_autograd_0) S …`."""
        comm = stat[stat.index(b"(") + 1 : stat.rindex(b")")]
        if comm != self._comm:
            self._comm = comm
            self._name = names.index(comm.decode(errors="replace"))

    def ran(self) -> bool:
        """True when the thread was on a CPU since its last row, or has ended."""
        try:
            times = self._read_times()
        except OSError:
            return True
        return times is None or times != self._times

    def rest(self) -> None:
        """Give back what is only needed for rows in every tick."""
        for held in (self._stat, self._wchan):
            if held is not None:
                held.close()
        self._stat = self._wchan = None
        self._stat_fd = self._wchan_fd = -1
        self.settled = False

    def close(self) -> None:
        """Close all descriptors."""
        self.rest()
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
        return None if times == _NO_TIMES else times

    def _find_place(self, now_ns: int, asleep_still: bool) -> None:
        """Fill in where the thread sleeps, asking no more often than it can have changed."""
        if self._times is None or self._asked_times != self._times:
            settled = asleep_still or self.state == _BLOCKED
            first = self.pid == self.tid
            if not (settled or first) and now_ns - self._asked_ns < _WCHAN_NS:
                return
            if self._wchan is None:
                self._wchan = hold(f"{self._base}/wchan", self._descriptors)
                self._wchan_fd = fd_of(self._wchan)
            self._asked = self._wchan.read(128) if self._wchan is not None else b""
            self._asked_ns, self._asked_times = now_ns, self._times
        self._place = self._asked


def look_at(threads: Iterable[Thread], now_ns: int) -> tuple[list[Look], list[Thread]]:
    """Look at first threads of processes; return what was read, and those that have ended.

    Here most of a tick's files are read: a thread that is settled costs one read, and two more
    when it ran. Its state is made out only once it stands still.
    """
    looks: list[Look] = []
    gone: list[Thread] = []
    for thread in threads:
        try:
            if not thread.settled:
                looks.append(thread.look(now_ns))
                continue
            times = pread(thread._times_fd, 128, 0)
            if times == thread._times:
                if not thread.state:
                    thread.state = thread.line[thread.line.rindex(b")") + 2]
                if thread.state == _SLEEPING:
                    looks.append((thread, times, b"", thread._asked))
                    continue
            stat = pread(thread._stat_fd, _STAT_BYTES, 0)
            if len(stat) == _STAT_BYTES:
                stat = thread._read_stat()
            thread._asked = wchan = pread(thread._wchan_fd, 128, 0)
            thread._times, thread.line, thread.line_ns, thread.state = times, stat, now_ns, 0
            looks.append((thread, times, stat, wchan))
        except OSError as error:
            if is_gone(error):
                gone.append(thread)
    return looks, gone


def rows_of(now_ns: int, looks: Sequence[Look], shared: Shared) -> list[Row]:
    """Return the rows of the looks of one tick."""
    try:
        numbers = integers(b"".join([look[1] or b"-1 -1 -1\n" for look in looks]))
        times = zip(looks, numbers[::3], numbers[1::3], strict=True)
        return [look[0].row(now_ns, look, on_cpu, delay, shared) for look, on_cpu, delay in times]
    except ValueError:  # another kernel's form of `schedstat`: each by itself
        return [look[0].row(now_ns, look, *_times_of(look[1]), shared) for look in looks]


def _times_of(schedstat: bytes | None) -> tuple[int, int]:
    if schedstat is None:
        return -1, -1
    on_cpu, delay = schedstat.split(None, 2)[:2]
    return int(on_cpu), int(delay)
