"""Requests to every disk, and how long they waited.

Columns: the eight `disk.*` signals of every whole disk, device its kernel name ("vda",
"nvme0n1"). Left out are partitions (part of their disk) and virtual devices without any
I/O so far (loop, ram, zram, nbd, floppy and optical drives). A disk that appears,
disappears or starts I/O changes the columns.

The kernel keeps the four times as 32-bit milliseconds. The collector extends them
beyond a wrap (every 49.7 days of waiting). A disk that was unplugged and plugged in
again restarts at zero, which its 64-bit counts show.

## Source

`/proc/diskstats` (docs.kernel.org/admin-guide/iostats).

## Privilege

None.

## Cost

One read for all disks; unchanged lines are not parsed.

## Where it is blind

It does not show whose requests they were; file servers are not disks. A device that
serves requests in parallel is not saturated when it is busy all the time. The time of
discards and flushes is left out. A multipath NVMe head counts nothing before Linux 6.4
(its paths do).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, FileCollector, Value
from clusterprof.agent.linux.files import OpenFile
from clusterprof.agent.linux.storage.disks import (
    LONGEST_RECORD,
    DiskStats,
    is_partition,
    list_disk_names,
    parse_disk,
)
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.signals import Signal

_DISK_COLUMNS: tuple[Signal, ...] = (
    signals.DISK_READ_BYTES,
    signals.DISK_READS,
    signals.DISK_READ_TIME,
    signals.DISK_WRITE_BYTES,
    signals.DISK_WRITES,
    signals.DISK_WRITE_TIME,
    signals.DISK_BUSY,
    signals.DISK_QUEUE,
)
_VIRTUAL_PREFIXES = ("loop", "ram", "zram", "nbd", "fd", "sr")
_MS = 1_000_000
_WRAP = 1 << 32


class DiskCollector(FileCollector):
    """Requests, bytes and time of every disk."""

    name: ClassVar[str] = "disk"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context) -> None:
        self._path = context.roots.proc / "diskstats"

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open /proc/diskstats and choose the disks."""
        self._file = OpenFile(self._path, longest_record=LONGEST_RECORD)
        self.open_files = [self._file]
        lines = self._file.read().split(b"\n")
        names = list_disk_names(lines)
        disk_names = set(names)
        self._count = len(lines)
        self._data = b""
        self._values: list[Value] = []
        self._disks: list[_Disk] = []
        self._asleep: list[tuple[int, bytes]] = []  # virtual devices: line number, line
        for number, name in enumerate(names):
            if not name or is_partition(name, disk_names):
                continue
            stats = parse_disk(lines[number])
            if stats.reads + stats.writes == 0 and name.startswith(_VIRTUAL_PREFIXES):
                self._asleep.append((number, lines[number]))
            else:
                self._disks.append(_Disk(number, name, stats))
        return [(signal, disk.name) for disk in self._disks for signal in _DISK_COLUMNS]

    def parse(self, contents: Sequence[bytes | Unavailable]) -> Sequence[Value]:
        """Return counts, bytes and times of every disk since boot.

        Raises: Unavailable when the file could not be read, DevicesChanged when the disks
        changed.
        """
        (data,) = contents
        if isinstance(data, Unavailable):
            raise data.with_traceback(None)
        if data == self._data:  # no disk had a request
            return self._values
        lines = data.split(b"\n")
        if len(lines) != self._count:
            raise DevicesChanged
        for number, line in self._asleep:
            if lines[number] != line:
                raise DevicesChanged
        values: list[Value] = []
        for disk in self._disks:
            values += disk.values(lines[disk.number])
        self._data, self._values = data, values
        return values

    def close(self) -> None:
        """Close /proc/diskstats."""
        self._file.close()


class _Disk:
    """One disk: its line in the file, and the wraps of each of its times."""

    __slots__ = ("_carry_ms", "_last", "_line", "_marker", "_values", "name", "number")

    def __init__(self, number: int, name: str, stats: DiskStats) -> None:
        self.number = number
        self.name = name
        self._marker = b" " + name.encode() + b" "
        self._last = stats
        self._carry_ms = [0, 0, 0, 0]  # read, write, busy, queue
        self._line = b""
        self._values: list[Value] = []

    def values(self, line: bytes) -> list[Value]:
        if line == self._line:  # this disk had no request
            return self._values
        if self._marker not in line:
            raise DevicesChanged
        current, last, carry = parse_disk(line), self._last, self._carry_ms
        reads, read_bytes, read_ms, writes, write_bytes, write_ms, busy_ms, queue_ms = current
        if (
            read_ms < last.read_ms
            or write_ms < last.write_ms
            or busy_ms < last.busy_ms
            or queue_ms < last.queue_ms
        ):
            self._unwrap(current)
        self._last, self._line = current, line
        self._values = [
            read_bytes,
            reads,
            (read_ms + carry[0]) * _MS,
            write_bytes,
            writes,
            (write_ms + carry[1]) * _MS,
            (busy_ms + carry[2]) * _MS,
            (queue_ms + carry[3]) * _MS,
        ]
        return self._values

    def _unwrap(self, current: DiskStats) -> None:
        last, carry = self._last, self._carry_ms
        if current.reads < last.reads or current.writes < last.writes:
            carry[:] = (0, 0, 0, 0)  # another disk, or this disk plugged in again
            return
        times = ("read_ms", "write_ms", "busy_ms", "queue_ms")
        for index, name in enumerate(times):
            if getattr(current, name) < getattr(last, name):
                carry[index] += _WRAP
