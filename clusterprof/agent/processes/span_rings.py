"""One ring of spans, read from outside the process that writes it
(docs/design/recording-format.md).

The content of a ring was written by another process: lengths are checked against the
file, slots are computed from masked numbers, every record is copied before it is
validated, and invalid records are counted as dropped. No content of a ring can make the
reader fail.

All rings of the job: found, opened at once, drained, closed when their process has ended.

The recorder holds its own descriptor of each ring, so that no span of a killed process
is lost.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterprof.agent.launch.election import read_small_json
from clusterprof.agent.processes.registry import AnnouncementFolder, ExitWatcher
from clusterprof.agent.processes.stack_definitions import MAX_LOG_BYTES, StackDefinitions
from clusterprof.errors import Unavailable
from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Event, Record, Spans

MAX_CAPACITY = 16_384
MAX_RECORDS_PER_DRAIN = 8_000  # records of one drain of one process: 10,000 per second
_MAX_KIND = layout.FIRST_USER_KIND + layout.NAMES_CAPACITY - 1
_MAX_AHEAD_NS = 1_000_000_000  # an end time later than now by more than this is invalid
_FIELD_COUNT = layout.RECORD_BYTES // 8
_UNDER_WAY_BYTES = layout.UNDER_WAY.size
LONG_OPERATION_NS = 5_000_000_000
"""An operation that has not ended after this time, ns, is reported."""
_MAX_DROPPED = 2**53


# Not of the job's own work, or written for as long as a process lives.
_OTHER_KINDS = frozenset(
    (
        *(layout.STACK_SAMPLE, layout.STACK_SAMPLER, layout.INTERPRETER_WAIT, layout.GC),
        *(layout.HOOK_NOTE, layout.ALLOCATOR, layout.WORKER_START, layout.LOADER_START),
        *(layout.FETCH, layout.SYNC, layout.EXPOSED, layout.EXPOSED_COLLECTIVE, layout.DEBUG_MODES),
    )
)


@dataclass(slots=True)
class RankProgress:
    """What a process has marked so far; times are CLOCK_MONOTONIC ns."""

    pid: int
    started_ticks: int
    first_ns: int = 0
    last_ns: int = 0
    """Ends of its first and last span of work; 0 = it has marked none."""
    longest_pause_ns: int = 0
    """Longest time between two looks at which there was progress."""
    steps: int = 0
    waits_since_ns: int = 0
    """Start of the operation it has been in for seconds; 0 = it is in none."""
    step_ns: int = 0
    operation_ns: int = 0
    """Time in its steps, and in operations with other ranks; only if `measures_work`."""
    measures_work: bool = False
    is_rank: bool = False
    """Whether it has ever ended a step or an operation with other ranks."""

    def add(self, spans: Spans) -> None:
        """Add a block of spans."""
        kinds, ends = spans.columns["kind"], spans.columns["end_ns"]
        for index in range(len(kinds) - 1, -1, -1):
            if kinds[index] not in _OTHER_KINDS:
                end_ns = ends[index]
                self.first_ns = self.first_ns or end_ns
                if self.last_ns:
                    self.longest_pause_ns = max(self.longest_pause_ns, end_ns - self.last_ns)
                self.last_ns = max(self.last_ns, end_ns)
                break
        else:
            return
        steps = kinds.count(layout.STEP)
        self.steps += steps
        if self.measures_work:
            self._add_work(spans)
        if steps or layout.COLLECTIVE in kinds:
            self.waits_since_ns = 0  # an operation that failed has no span, but a step ended
            self.is_rank = True

    def _add_work(self, spans: Spans) -> None:
        """Add time in steps and in operations: on the host, or on the device that waited."""
        columns = spans.columns
        for kind, start_ns, end_ns, b, d in zip(
            *(columns[name] for name in ("kind", "start_ns", "end_ns", "b", "d"))
        ):
            if kind == layout.STEP:
                self.step_ns += end_ns - start_ns
            elif kind == layout.EXPOSED_COLLECTIVE:
                self.operation_ns += b
            elif kind == layout.COLLECTIVE:
                form = d >> layout.FORM_SHIFT & layout.FORM_MASK
                if form != layout.ISSUE and not d & layout.OTHER_THREAD:
                    self.operation_ns += end_ns - start_ns


@dataclass(slots=True)
class Ring:
    """An open ring; `last_taken` is the newest sequence number already taken."""

    pid: int
    ticks: int
    descriptor: int
    memory: mmap.mmap | None
    capacity: int
    last_taken: int = 0
    takeable: int = 0
    last_written: int = 0
    dropped: int = 0
    ended: bool = False
    refusal: str = ""
    checked_start_ns: int = 0
    """Start of the unfinished operation that was checked last, ns."""
    log_bytes: int = 0
    """Size of the log of definitions behind the records; 0 = there is none."""
    log_written: int = 0
    log_takeable: int = 0
    definitions: StackDefinitions = field(default_factory=StackDefinitions)
    progress: RankProgress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = RankProgress(self.pid, self.ticks)

    def look(self) -> None:
        """Note how far the writer is; records written before the previous look can now be taken."""
        self.takeable = self.last_written
        self.last_written = self._counter(layout.WRITTEN_OFFSET)
        if self.log_bytes:
            self.log_takeable = self.log_written
            self.log_written = self._counter(layout.LOG_WRITTEN_OFFSET)

    def skip_to_end(self) -> None:
        """Skip the records that an earlier recorder has taken."""
        self.last_taken = self.takeable = self.last_written = self._counter(layout.WRITTEN_OFFSET)

    def switched_off(self) -> bool:
        """Return whether the probe in the process has disabled itself."""
        return self._counter(layout.SWITCHED_OFF_OFFSET) == 1

    def take(self, now_ns: int) -> list[Spans]:
        """Return the spans since the last call; several blocks where records are missing."""
        newest = self._counter(layout.WRITTEN_OFFSET) if self.ended else self.takeable
        if self.refusal or newest == self.last_taken:
            return self._report_dropped()
        if newest < self.last_taken or newest >= 2**62:
            self.refusal = "its sequence number ran backwards or out of range"
            return self._report_dropped()
        first = max(self.last_taken + 1, newest - min(self.capacity, MAX_RECORDS_PER_DRAIN) + 1)
        self._drop(first - self.last_taken - 1)
        self.last_taken = newest
        records = self._copy(first, newest)
        if not self.ended:
            # The writer may have wrapped around meanwhile and overwritten the oldest slots.
            first_intact = self._counter(layout.WRITTEN_OFFSET) + 2 - self.capacity
            if first_intact > first:
                lost = min(first_intact, newest + 1) - first
                del records[: lost * _FIELD_COUNT]
                self._drop(lost)
                first += lost
        runs = list(self._split_valid_runs(records, first, now_ns))
        for spans in runs:
            self.progress.add(spans)
        return runs or self._report_dropped()

    def take_definitions(self, repeat: bool = False) -> dict[str, Any] | None:
        """Return the definitions of stacks since the last call, None when there are none.

        repeat: all definitions so far. What was written before the previous look can be taken.
        """
        if not self.log_bytes:
            return None
        newest = self._counter(layout.LOG_WRITTEN_OFFSET) if self.ended else self.log_takeable
        begin = self.definitions.read_bytes
        if begin < newest <= self.log_bytes:
            offset = layout.RECORDS_OFFSET + self.capacity * layout.RECORD_BYTES + begin
            self.definitions.add(self._bytes(offset, newest - begin))
        defined = self.definitions.list_all() if repeat else self.definitions.take_new()
        return (
            None if defined is None else {"pid": self.pid, "started_ticks": self.ticks, **defined}
        )

    @property
    def size(self) -> int:
        """Bytes of the records and the log."""
        return self.capacity * layout.RECORD_BYTES + self.log_bytes

    def under_way(self, now_ns: int, final: bool) -> dict[str, int] | None:
        """Return the operation that began a while ago and has not ended, once per operation.

        final: the process writes nothing more, so an operation that has just begun counts too.
        """
        began = layout.UNDER_WAY.unpack(self._bytes(layout.UNDER_WAY_OFFSET, _UNDER_WAY_BYTES))
        start_ns, group, number, size, operation = began
        long_ns = 0 if final else LONG_OPERATION_NS
        if not 0 < start_ns <= now_ns - long_ns or start_ns == self.checked_start_ns:
            return None
        self.checked_start_ns = start_ns
        newest = self._counter(layout.WRITTEN_OFFSET)
        if 0 < newest < 2**62:
            records = self._copy(max(1, newest - self.capacity + 1), newest)
            if start_ns in records[1::_FIELD_COUNT]:
                return None  # the operation has ended
        self.progress.waits_since_ns = start_ns
        return {
            "pid": self.pid,
            "started_ticks": self.ticks,
            "start_ns": start_ns,
            "group": group,
            "number": number,
            "bytes": size,
            "operation": operation,
        }

    def close(self) -> None:
        """Unmap and close the ring."""
        if self.memory is not None:
            self.memory.close()
        os.close(self.descriptor)

    def _split_valid_runs(self, records: array[int], first: int, now_ns: int) -> Iterator[Spans]:
        if _is_valid_run(records, first, now_ns):
            yield self._spans(records, first)
            return
        run: array[int] = array("q")
        run_first = first
        for index in range(len(records) // _FIELD_COUNT):
            record = records[index * _FIELD_COUNT : (index + 1) * _FIELD_COUNT]
            if _is_valid_run(record, first + index, now_ns):
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
        columns = {name: records[i::_FIELD_COUNT] for i, name in enumerate(SPAN_FIELDS, start=1)}
        dropped, self.dropped = self.dropped, 0
        names = {}
        if max(columns["kind"]) >= layout.FIRST_USER_KIND:
            for kind in sorted({k for k in columns["kind"] if k >= layout.FIRST_USER_KIND}):
                names[kind] = self._name(kind - layout.FIRST_USER_KIND)
        return Spans(self.pid, self.ticks, first, dropped, names, columns)

    def _report_dropped(self) -> list[Spans]:
        """Report the dropped records at the end of a process, even when no span is left."""
        if not self.dropped or not (self.ended or self.refusal):
            return []
        dropped, self.dropped = self.dropped, 0
        empty = {name: array("q") for name in SPAN_FIELDS}
        return [Spans(self.pid, self.ticks, self.last_taken + 1, dropped, {}, empty)]

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
        self.dropped = min(self.dropped + count, _MAX_DROPPED)

    def _bytes(self, offset: int, length: int) -> bytes:
        if self.memory is not None:
            return self.memory[offset : offset + length]
        try:
            data = os.pread(self.descriptor, length, offset)
        except OSError:
            data = b""
        # The file was shortened: zeros are no valid record and are counted as dropped.
        return data.ljust(length, b"\0")


def open_ring(path: str, pid: int, ticks: int, memory_file: bool) -> Ring:
    """Open the ring of a process.

    The descriptor of another process is checked before it is opened: opening a terminal or
    a FIFO could affect the job.
    Raises: Unavailable with the reason when it is not a valid ring of that process.
    """
    try:
        if memory_file and not os.readlink(path).startswith("/memfd:"):
            raise Unavailable("failed", "not a memory file")
        _check_file(os.stat(path, follow_symlinks=memory_file))
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags if memory_file else flags | os.O_NOFOLLOW)
    except OSError as error:
        raise Unavailable("failed", error.strerror or "cannot be opened") from error
    except ValueError:  # with a NUL or half a surrogate pair
        raise Unavailable("failed", "no file can have its name") from None
    try:
        size = _check_file(os.fstat(descriptor))
        header = layout.HEADER.unpack(os.pread(descriptor, layout.HEADER.size, 0))
        magic, record_bytes, capacity, header_pid, names, header_ticks, _, _ = header
        if magic != layout.MAGIC or record_bytes != layout.RECORD_BYTES:
            raise Unavailable("failed", "not a ring of this version")
        if names != layout.NAMES_CAPACITY or (header_pid, header_ticks) != (pid, ticks):
            raise Unavailable("failed", "the header is of another process")
        needed = layout.RECORDS_OFFSET + capacity * layout.RECORD_BYTES
        if not 0 < capacity <= MAX_CAPACITY or size < needed:
            raise Unavailable("failed", f"{capacity} records do not fit {size} bytes")
        log_bytes = _read_log_bytes(descriptor, size - needed)
        needed += log_bytes
        memory = (
            mmap.mmap(descriptor, needed, prot=mmap.PROT_READ) if _is_sealed(descriptor) else None
        )
    except (OSError, ValueError, struct.error) as error:
        os.close(descriptor)
        raise Unavailable("failed", str(error)) from error
    except BaseException:
        os.close(descriptor)
        raise
    return Ring(pid, ticks, descriptor, memory, capacity, log_bytes=log_bytes)


def _read_log_bytes(descriptor: int, available: int) -> int:
    """Read the size of the log of definitions; 0 when there is none, or it does not fit."""
    log_bytes = layout.COUNTER.unpack(os.pread(descriptor, 8, layout.LOG_BYTES_OFFSET))[0]
    return int(log_bytes) if log_bytes <= min(available, MAX_LOG_BYTES) else 0


def _check_file(info: os.stat_result) -> int:
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        raise Unavailable("denied", "not a file of this user")
    if not layout.RECORDS_OFFSET < info.st_size <= 2 * MAX_CAPACITY * layout.RECORD_BYTES:
        raise Unavailable("failed", f"{info.st_size} bytes are no ring")
    return info.st_size


def _is_sealed(descriptor: int) -> bool:
    """Return whether the file can never shrink; only then is it mapped, to rule out SIGBUS."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _is_valid_run(records: array[int], first: int, now_ns: int) -> bool:
    count = len(records) // _FIELD_COUNT
    if not count:
        return False
    start, end, kind = records[1::_FIELD_COUNT], records[2::_FIELD_COUNT], records[3::_FIELD_COUNT]
    return (
        records[0::_FIELD_COUNT] == array("q", range(first, first + count))
        and min(start) > 0
        and max(end) <= now_ns + _MAX_AHEAD_NS
        and all(map(operator.le, start, end))
        and min(kind) > 0
        and max(kind) <= _MAX_KIND
    )


MAX_RINGS = 1024
MAX_RING_BYTES = 16 << 20  # of rings open at one time: 8 ranks with 16 workers each, with a reserve
_REPEATED_PER_TAKE = 8  # rings whose definitions are repeated at one time


class SpanRings:
    """The rings of a run directory: opens their files and makes `spans` records."""

    def __init__(self, run_dir: Path, proc: str = "/proc", skip_old: bool = False) -> None:
        self._folder = run_dir / "rings"
        self._proc = proc
        self._exit_watcher = ExitWatcher(proc)
        self._rings: dict[str, Ring] = {}  # file name -> open ring
        self._bytes = 0
        self._announcements = AnnouncementFolder(str(self._folder), 4 * MAX_RINGS)
        self._skip_old = skip_old
        self._switched_off: set[str] = set()
        self._pending: list[Record] = []
        self._repeated: list[str] = []  # rings whose definitions are still to be repeated
        self.measures_work = False
        """Whether the progress of ranks says how long they work by themselves."""
        self.ended_ns = 0
        """When a rank was last seen to have ended, ns; 0 = none has."""

    def look(self, now_ns: int) -> None:
        """Find new rings and note how far each writer is; cheap when nothing is new."""
        self._scan(now_ns)
        self._skip_old = False
        for ring in self._rings.values():
            ring.look()

    def take(self, now_ns: int, final: bool = False) -> list[Record]:
        """Return the complete spans, and the events of the rings."""
        ended = set()
        for pidfd, pid, ticks in self._exit_watcher.ended():
            os.close(pidfd)
            ended.add((pid, ticks))
        records, self._pending = self._pending, []
        for name, ring in list(self._rings.items()):
            ring.ended = (ring.pid, ring.ticks) in ended
            records.extend(ring.take(now_ns))
            records.extend(_take_definitions(ring, now_ns))
            under_way = ring.under_way(now_ns, final or ring.ended)
            if under_way is not None:
                records.append(Event(now_ns, "operation-under-way", under_way))
            if ring.switched_off() and name not in self._switched_off:
                self._switched_off.add(name)
                records.append(Event(now_ns, "probe-switched-off", {"pid": ring.pid}))
            if ring.refusal:
                records.append(self._make_refusal(now_ns, name, ring.refusal))
            if ring.ended or ring.refusal:
                if ring.ended and ring.progress.is_rank:
                    self.ended_ns = now_ns
                self._forget(name, ring)
        for name in self._repeated[:_REPEATED_PER_TAKE]:
            if name in self._rings:
                records.extend(_take_definitions(self._rings[name], now_ns, repeat=True))
        del self._repeated[:_REPEATED_PER_TAKE]
        return records

    def repeat_definitions(self) -> None:
        """Record all definitions of stacks again in the next seconds.

        Called when a segment begins: the segments before it may be deleted.
        """
        self._repeated = list(self._rings)

    def finish(self, now_ns: int) -> list[Record]:
        """Return all remaining spans, also of running processes; the recorder is stopping."""
        self._scan(now_ns)
        for ring in self._rings.values():
            ring.look()
            ring.look()
        return self.take(now_ns, final=True)

    def list_progress(self) -> list[RankProgress]:
        """List what the living ranks have marked so far."""
        return [ring.progress for ring in self._rings.values() if ring.progress.is_rank]

    def close(self) -> None:
        """Close all rings; their processes may continue to write and are not affected."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        self._exit_watcher.close()

    def _scan(self, now_ns: int) -> None:
        for name in self._announcements.fresh() or ():
            if name in self._rings:  # the process has executed another program
                self._pending.extend(self._end(name, self._rings[name], now_ns))
            self._open(name, now_ns)

    def _open(self, name: str, now_ns: int) -> None:
        announced = read_small_json(str(self._folder / name))
        try:
            ring = self._open_announced(announced)
        except Unavailable as reason:
            self._pending.append(self._make_refusal(now_ns, name, reason.message))
            return
        size = ring.size
        if len(self._rings) >= MAX_RINGS or self._bytes + size > MAX_RING_BYTES:
            ring.close()
            self._pending.append(self._make_refusal(now_ns, name, "too many rings are open"))
            return
        if not self._exit_watcher.watch(ring.pid, ring.ticks):
            ring.ended = True  # it exited meanwhile: our descriptor still has its spans
            self._pending.extend(ring.take(now_ns))
            self._pending.extend(_take_definitions(ring, now_ns))
            ring.close()
            self._unlink(name)
            return
        if self._skip_old:
            ring.skip_to_end()
        ring.progress.measures_work = self.measures_work
        self._rings[name] = ring
        self._bytes += size

    def _open_announced(self, announced: dict[str, Any] | None) -> Ring:
        if announced is None:
            raise Unavailable("failed", "its announcement is no small JSON object of ours")
        pid, ticks = announced.get("pid"), announced.get("started_ticks")
        descriptor, path = announced.get("fd"), announced.get("path")
        if type(pid) is not int or type(ticks) is not int or pid <= 0:
            raise Unavailable("failed", "its announcement names no process")
        if type(descriptor) is int and descriptor >= 0:
            return open_ring(f"{self._proc}/{pid}/fd/{descriptor}", pid, ticks, memory_file=True)
        if isinstance(path, str):
            # Only a file in this folder, whatever path the announcement contains.
            ring_path = str(self._folder / os.path.basename(path))
            return open_ring(ring_path, pid, ticks, memory_file=False)
        raise Unavailable("failed", "its announcement names neither descriptor nor file")

    def _end(self, name: str, ring: Ring, now_ns: int) -> list[Record]:
        ring.ended = True
        records: list[Record] = [*ring.take(now_ns), *_take_definitions(ring, now_ns)]
        ring.close()
        self._bytes -= ring.size
        del self._rings[name]
        return records

    def _forget(self, name: str, ring: Ring) -> None:
        ring.close()
        self._bytes -= ring.size
        del self._rings[name]
        if ring.ended:
            self._unlink(name)

    def _unlink(self, name: str) -> None:
        for path in (self._folder / name, self._folder / (name.removesuffix("json") + "ring")):
            try:
                os.unlink(path)
            except OSError:
                pass

    def _make_refusal(self, now_ns: int, name: str, reason: str) -> Event:
        return Event(now_ns, "ring-refused", {"ring": name[:64], "reason": reason[:200]})


def _take_definitions(ring: Ring, now_ns: int, repeat: bool = False) -> list[Event]:
    defined = ring.take_definitions(repeat)
    return [] if defined is None else [Event(now_ns, "stacks-defined", defined)]
