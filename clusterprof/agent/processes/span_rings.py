"""One ring of spans, read from outside the process that writes it (docs/design.md, section 4).

Whatever stands in the ring was written by somebody else's process: lengths are checked against
the file, slots are computed from masked numbers, every record is copied before it is judged, and
what does not hold is counted as dropped. Nothing in it can make the reader fail.
"""

from __future__ import annotations

import fcntl
import mmap
import operator
import os
import stat
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from clusterprof.errors import Unavailable
from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Spans

CAPACITY_AT_MOST = 16_384
RECORDS_AT_MOST = 8_000  # in one drain, of one process: 10,000 per second
_KIND_AT_MOST = layout.FIRST_USER_KIND + layout.NAMES_CAPACITY - 1
_AHEAD_AT_MOST_NS = 1_000_000_000  # an end later than now by more than this is no time at all
_FIELDS = layout.RECORD_BYTES // 8
_UNDER_WAY_BYTES = layout.UNDER_WAY.size
UNDER_WAY_NS = 5_000_000_000
"""After this time an operation that has not ended is worth a word."""
_DROPPED_AT_MOST = 2**53


@dataclass(slots=True)
class Ring:
    """An open ring; `seen` is the newest sequence number already taken."""

    pid: int
    ticks: int
    descriptor: int
    memory: mmap.mmap | None
    capacity: int
    seen: int = 0
    ready: int = 0
    looked: int = 0
    dropped: int = 0
    ended: bool = False
    refused: str = ""
    judged_ns: int = 0
    """Beginning of the operation under way that was looked at last."""

    def look(self) -> None:
        """Note how far the writer is; what it had written at the look before may be taken."""
        self.ready = self.looked
        self.looked = self._counter(layout.WRITTEN_OFFSET)

    def start_at_the_end(self) -> None:
        """Leave what an earlier recorder has already taken."""
        self.seen = self.ready = self.looked = self._counter(layout.WRITTEN_OFFSET)

    def switched_off(self) -> bool:
        """Return whether the probe in the process has disabled itself."""
        return self._counter(layout.SWITCHED_OFF_OFFSET) == 1

    def take(self, now_ns: int) -> list[Spans]:
        """Return the spans since the last call; several when records between them are missing."""
        newest = self._counter(layout.WRITTEN_OFFSET) if self.ended else self.ready
        if self.refused or newest == self.seen:
            return self._leftover()
        if newest < self.seen or newest >= 2**62:
            self.refused = "its sequence number ran backwards or out of range"
            return self._leftover()
        first = max(self.seen + 1, newest - min(self.capacity, RECORDS_AT_MOST) + 1)
        self._drop(first - self.seen - 1)
        self.seen = newest
        records = self._copy(first, newest)
        if not self.ended:
            # The writer may have come round meanwhile: the slots it has reached hold anything.
            whole = self._counter(layout.WRITTEN_OFFSET) + 2 - self.capacity
            if whole > first:
                lost = min(whole, newest + 1) - first
                del records[: lost * _FIELDS]
                self._drop(lost)
                first += lost
        runs = list(self._runs(records, first, now_ns))
        return runs or self._leftover()

    def under_way(self, now_ns: int, final: bool) -> dict[str, int] | None:
        """Return what operation began a while ago and has not ended; each one once.

        `final`: nothing comes any more, so one that has just begun counts too.
        """
        began = layout.UNDER_WAY.unpack(self._bytes(layout.UNDER_WAY_OFFSET, _UNDER_WAY_BYTES))
        start_ns, group, number, size, operation = began
        long_ns = 0 if final else UNDER_WAY_NS
        if not 0 < start_ns <= now_ns - long_ns or start_ns == self.judged_ns:
            return None
        self.judged_ns = start_ns
        newest = self._counter(layout.WRITTEN_OFFSET)
        if 0 < newest < 2**62:
            records = self._copy(max(1, newest - self.capacity + 1), newest)
            if start_ns in records[1::_FIELDS]:
                return None  # its span is there
        return {
            "pid": self.pid, "started_ticks": self.ticks, "start_ns": start_ns, "group": group,
            "number": number, "bytes": size, "operation": operation,
        }  # fmt: skip

    def close(self) -> None:
        """Give the ring up."""
        if self.memory is not None:
            self.memory.close()
        os.close(self.descriptor)

    def _runs(self, records: array[int], first: int, now_ns: int) -> Iterator[Spans]:
        if _all_good(records, first, now_ns):
            yield self._spans(records, first)
            return
        run: array[int] = array("q")
        run_first = first
        for index in range(len(records) // _FIELDS):
            record = records[index * _FIELDS : (index + 1) * _FIELDS]
            if _all_good(record, first + index, now_ns):
                if not run:
                    run_first = first + index
                run.extend(record)
                continue
            if run:
                yield self._spans(run, run_first)
                run = array("q")
            self._drop(1)
        if run:
            yield self._spans(run, run_first)

    def _spans(self, records: array[int], first: int) -> Spans:
        columns = {name: records[i::_FIELDS] for i, name in enumerate(SPAN_FIELDS, start=1)}
        dropped, self.dropped = self.dropped, 0
        names = {}
        if max(columns["kind"]) >= layout.FIRST_USER_KIND:
            for kind in sorted({k for k in columns["kind"] if k >= layout.FIRST_USER_KIND}):
                names[kind] = self._name(kind - layout.FIRST_USER_KIND)
        return Spans(self.pid, self.ticks, first, dropped, names, columns)

    def _leftover(self) -> list[Spans]:
        """At the end of a process say what was dropped, even if nothing else is left to say."""
        if not self.dropped or not (self.ended or self.refused):
            return []
        dropped, self.dropped = self.dropped, 0
        empty = {name: array("q") for name in SPAN_FIELDS}
        return [Spans(self.pid, self.ticks, self.seen + 1, dropped, {}, empty)]

    def _copy(self, first: int, last: int) -> array[int]:
        records: array[int] = array("q")
        begin, count = (first - 1) % self.capacity, last - first + 1
        head = min(count, self.capacity - begin)
        for slot, length in ((begin, head), (0, count - head)):
            offset = layout.RECORDS_OFFSET + slot * layout.RECORD_BYTES
            records.frombytes(self._bytes(offset, length * layout.RECORD_BYTES))
        return records

    def _name(self, slot: int) -> str:
        offset = layout.NAMES_OFFSET + slot * layout.NAME_BYTES
        text = self._bytes(offset, layout.NAME_BYTES).split(b"\0", 1)[0]
        return text.decode("utf-8", "replace") or f"user-{slot}"

    def _counter(self, offset: int) -> int:
        return int(layout.COUNTER.unpack(self._bytes(offset, 8))[0])

    def _drop(self, count: int) -> None:
        self.dropped = min(self.dropped + count, _DROPPED_AT_MOST)

    def _bytes(self, offset: int, length: int) -> bytes:
        if self.memory is not None:
            return self.memory[offset : offset + length]
        try:
            data = os.pread(self.descriptor, length, offset)
        except OSError:
            data = b""
        # A file that somebody shortened: zeros are no valid record and are counted as dropped.
        return data.ljust(length, b"\0")


def open_ring(path: str, pid: int, ticks: int, memory_file: bool) -> Ring:
    """Open the ring of a process; raise `Unavailable` with the reason when it is not one.

    The descriptor of another process is looked at before it is opened: opening a terminal or a
    FIFO would be an act upon the job.
    """
    try:
        if memory_file and not os.readlink(path).startswith("/memfd:"):
            raise Unavailable("failed", "not a memory file")
        _check(os.stat(path, follow_symlinks=memory_file))
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags if memory_file else flags | os.O_NOFOLLOW)
    except OSError as error:
        raise Unavailable("failed", error.strerror or "cannot be opened") from error
    try:
        size = _check(os.fstat(descriptor))
        header = layout.HEADER.unpack(os.pread(descriptor, layout.HEADER.size, 0))
        magic, record_bytes, capacity, header_pid, names, header_ticks, _, _ = header
        if magic != layout.MAGIC or record_bytes != layout.RECORD_BYTES:
            raise Unavailable("failed", "not a ring of this version")
        if names != layout.NAMES_CAPACITY or (header_pid, header_ticks) != (pid, ticks):
            raise Unavailable("failed", "the header is of another process")
        needed = layout.RECORDS_OFFSET + capacity * layout.RECORD_BYTES
        if not 0 < capacity <= CAPACITY_AT_MOST or size < needed:
            raise Unavailable("failed", f"{capacity} records do not fit {size} bytes")
        memory = mmap.mmap(descriptor, needed, prot=mmap.PROT_READ) if _sealed(descriptor) else None
    except (OSError, ValueError, struct.error) as error:
        os.close(descriptor)
        raise Unavailable("failed", str(error)) from error
    except BaseException:
        os.close(descriptor)
        raise
    return Ring(pid, ticks, descriptor, memory, capacity)


def _check(info: os.stat_result) -> int:
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        raise Unavailable("denied", "not a file of this user")
    if not layout.RECORDS_OFFSET < info.st_size <= 2 * CAPACITY_AT_MOST * layout.RECORD_BYTES:
        raise Unavailable("failed", f"{info.st_size} bytes are no ring")
    return info.st_size


def _sealed(descriptor: int) -> bool:
    """Only what can never shrink is mapped: a page that went away would be a SIGBUS for us."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _all_good(records: array[int], first: int, now_ns: int) -> bool:
    count = len(records) // _FIELDS
    if not count:
        return False
    start, end, kind = records[1::_FIELDS], records[2::_FIELDS], records[3::_FIELDS]
    return (
        records[0::_FIELDS] == array("q", range(first, first + count))
        and min(start) > 0
        and max(end) <= now_ns + _AHEAD_AT_MOST_NS
        and all(map(operator.le, start, end))
        and min(kind) > 0
        and max(kind) <= _KIND_AT_MOST
    )
