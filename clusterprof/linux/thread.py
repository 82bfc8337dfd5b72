"""The row of one thread, made from as few reads of its kernel files as is honest.

A thread that was not on a CPU since its last row is still where it was, so `schedstat` alone
(0.4 µs; `stat` and `wchan` cost 1 to 1.5 µs each) writes its row again. `wchan` is asked once per
sleep that lasts; a thread that sleeps anew in every tick is asked at most twice a second, the
first one of a process, for which others wait, in every tick.

A look only reads. What was read is understood later, many looks at once: the first instructions
after a sleep find nothing in the processor's caches and cost several times what they cost again.
"""

from __future__ import annotations

from os import pread

from clusterprof.linux.task import (
    Descriptors,
    Readings,
    TaskFile,
    fd_of,
    hold,
    parse_thread_stat,
    parse_wchan,
    thread_prefix,
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
    """What all threads have in common: whether block I/O delays are accounted, who reads along,
    and the kernel functions and names (of threads other than the main ones) that were seen."""

    __slots__ = ("_places", "block_io", "names", "readings", "wchans")

    def __init__(self, block_io: bool | None, readings: Readings) -> None:
        self.block_io = block_io
        self.readings = readings
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
before, and all else is as it was), and its `wchan` (empty = it does not sleep, or nobody asked)."""


class Thread:
    """One thread's held files, what they said last, and the row made of that."""

    __slots__ = (
        "_asked", "_asked_ns", "_asked_times", "_base", "_comm", "_descriptors", "_facts", "_name",
        "_place", "_prefix", "_schedstat", "_stat", "_stat_facts", "_stat_fd", "_times",
        "_times_fd", "_wchan", "_wchan_fd", "pid", "ran_ns", "state", "tid",
    )  # fmt: skip

    def __init__(self, proc: str, pid: int, tid: int, descriptors: Descriptors) -> None:
        self.pid, self.tid, self.state, self.ran_ns = pid, tid, 0, 0
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
        self._facts: Row = ()
        self._comm, self._name = b"", -1
        self._prefix = b"?"
        self._stat_facts = (0, 0, 0, 0, 0)

    def look(self, now_ns: int, readings: Readings) -> Look:
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
        self.state = stat[stat.rindex(b")") + 2]
        if self.pid == self.tid:
            readings.note(self.pid, now_ns, stat)
            if self.state == _SLEEPING and self._wchan_fd >= 0:
                self._asked = place = pread(self._wchan_fd, 128, 0)
                self._asked_ns, self._asked_times, self._place = now_ns, times, place
                return self, times, stat, place
        self._place = b""
        if self.state in _PLACED:
            self._find_place(now_ns, False)
        return self, times, stat, self._place

    def row(self, now_ns: int, look: Look, shared: Shared) -> Row:
        """Return the row of a look; those of one thread are to come in their order."""
        _, times, stat, wchan = look
        if stat:
            if self.pid != self.tid:
                self._note_name(stat, shared.names)
            # CPU time is counted in ticks of 10 ms: the line rarely says anything else.
            if shared.block_io is not False or not stat.startswith(self._prefix):
                self._stat_facts = parse_thread_stat(stat, shared.block_io is not False)
                self._prefix = thread_prefix(stat)
            state, user, system, block_io, faults = self._stat_facts
            if shared.block_io is None and block_io > 0:
                shared.block_io = True
            if not shared.block_io:
                block_io = -1
            on_cpu, delay = (-1, -1) if times is None else map(int, times.split(None, 2)[:2])
            self._facts = (
                self.pid, self.tid, state, on_cpu, delay, user, system, block_io, faults,
            )  # fmt: skip
        return (now_ns, *self._facts, shared.place(wchan), self._name)

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
