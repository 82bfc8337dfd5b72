"""The row of one thread, made from as few reads of its kernel files as is honest.

A thread that was not on a CPU since its last row is still where it was, so `schedstat` alone
(0.4 µs; `stat` and `wchan` cost 1 to 1.5 µs each) writes its row again. `wchan` is asked once per
sleep that lasts; a thread that sleeps anew in every tick is asked at most twice a second, the
first one of a process, for which others wait, in every tick.
"""

from __future__ import annotations

from clusterprof.linux.task import (
    Descriptors,
    Readings,
    TaskFile,
    hold,
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
    and the names that threads other than the main ones have."""

    __slots__ = ("block_io", "names", "readings")

    def __init__(self, block_io: bool | None, readings: Readings) -> None:
        self.block_io = block_io
        self.readings = readings
        self.names = Strings()


class Thread:
    """One thread's held files and the row it last had."""

    __slots__ = (
        "_base", "_comm", "_descriptors", "_facts", "_name", "_place", "_schedstat", "_stat",
        "_times", "_wchan", "_wchan_index", "_wchan_ns", "_wchan_times", "pid", "ran_ns", "state",
        "tid",
    )  # fmt: skip

    def __init__(self, proc: str, pid: int, tid: int, descriptors: Descriptors) -> None:
        self.pid, self.tid, self.state, self.ran_ns = pid, tid, 0, 0
        self._base = f"{proc}/{pid}/task/{tid}"
        self._descriptors = descriptors
        self._stat: TaskFile | None = TaskFile(f"{self._base}/stat", descriptors)
        self._schedstat = hold(f"{self._base}/schedstat", descriptors)
        self._wchan: TaskFile | None = None
        self._times: bytes | None = None
        self._wchan_times: bytes | None = None
        self._wchan_index, self._wchan_ns = -1, -_WCHAN_NS
        self._facts: Row = ()
        self._place = -1
        self._comm, self._name = b"", -1

    def row(self, now_ns: int, shared: Shared, wchans: Strings) -> Row:
        """Read what changed and return the row; raises OSError when the thread has ended."""
        times = self._read_times()
        asleep_still = times is not None and times == self._times and self.state == _SLEEPING
        if asleep_still and self._wchan_times == times:
            return (now_ns, *self._facts, self._place, self._name)
        if not asleep_still:
            if times != self._times or times is None:
                self.ran_ns = now_ns
            self._times = times
            if self._stat is None:
                self._stat = TaskFile(f"{self._base}/stat", self._descriptors)
            stat = self._stat.read()
            if self.pid == self.tid:
                shared.readings.note(self.pid, now_ns, stat)
            else:
                self._note_name(stat, shared.names)
            self.state, user, system, block_io, faults = parse_thread_stat(
                stat, shared.block_io is not False
            )
            if shared.block_io is None and block_io > 0:
                shared.block_io = True
            if not shared.block_io:
                block_io = -1
            on_cpu, delay = (-1, -1) if times is None else map(int, times.split(None, 2)[:2])
            self._facts = (
                self.pid, self.tid, self.state, on_cpu, delay, user, system, block_io, faults,
            )  # fmt: skip
            self._place = -1
        if self.state in _PLACED:
            self._find_place(now_ns, asleep_still, wchans)
        return (now_ns, *self._facts, self._place, self._name)

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

    def close(self) -> None:
        """Close all descriptors."""
        self.rest()
        if self._schedstat is not None:
            self._schedstat.close()

    def _read_times(self) -> bytes | None:
        if self._schedstat is None:
            return None
        times = self._schedstat.read(128)
        return None if times == b"0 0 0\n" else times  # the kernel does not keep them

    def _find_place(self, now_ns: int, asleep_still: bool, wchans: Strings) -> None:
        """Fill in where the thread sleeps, asking no more often than it can have changed."""
        if self._times is None or self._wchan_times != self._times:
            settled = asleep_still or self.state == _BLOCKED
            first = self.pid == self.tid
            if not (settled or first) and now_ns - self._wchan_ns < _WCHAN_NS:
                return
            if self._wchan is None:
                self._wchan = hold(f"{self._base}/wchan", self._descriptors)
            place = parse_wchan(self._wchan.read(128)) if self._wchan is not None else ""
            self._wchan_index = wchans.index(place) if place else -1
            self._wchan_ns, self._wchan_times = now_ns, self._times
        self._place = self._wchan_index
