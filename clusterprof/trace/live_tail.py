"""Follow the end of a node's growing recording, at a cost that does not grow with it.

    tail = NodeTail(folder)
    tail.poll(60 * 10**9)       # repeatedly: only new data is read
    tail.records(since_ns)      # the persistent state, then what was recorded since

A segment ends after ten minutes, so the first poll reads at most two segments, and of
older ones only frame heads and events. A file that shrinks, vanishes or holds invalid
data is not an error: what can be read is used, and the rest is tried again at the next
poll.

It also keeps the persistent state of a recording: which process, process group or device is which.

A reader that begins in the middle of a recording lacks these records. The latest of
each kind is kept, however old, until its process has ended.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clusterprof.probe.layout import (
    DATA_WAIT,
    FETCH,
    HOOK_NOTE,
    LOADER_START,
    OPTIMIZER,
    STEP,
    WORKER_START,
)
from clusterprof.trace import frame
from clusterprof.trace.decoder import Decoder, PackedSpans, UnknownLayoutError, decode_span_frames
from clusterprof.trace.plausibility import CONFIRMATIONS, MAX_JUMP_NS, TimeFilter
from clusterprof.trace.reader import DamageCounter, Scanner
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Event, Header, Record, Rows, Spans
from clusterprof.trace.segments import is_segment

_EVENT_KEYS: dict[str, tuple[str, ...]] = {
    "process-registered": ("pid", "started_ticks", "role"),
    "process-exited": ("pid", "started_ticks"),
    "group-announced": ("pid", "group"),
    "device-appeared": ("id",),
    "device-owner": ("device",),
    "device-used": ("pid",),
}
_MARK_KINDS = (LOADER_START, WORKER_START, HOOK_NOTE)
_MAX_MARKS_PER_KIND = 16  # the latest of each kind per process
_LAST_SPAN_KINDS = (STEP, DATA_WAIT, OPTIMIZER, FETCH)  # the last span identifies the process
_MAX_PROCESSES = 10_000
_MAX_EVENTS = 100_000
_KIND_ROW = SPAN_FIELDS.index("kind")

_KEPT_KINDS = (*_MARK_KINDS, *_LAST_SPAN_KINDS)
_FRAMES_PER_BATCH = 64  # frames of about a minute

_Process = tuple[int, int]
_Part = tuple[_Process, int, dict[int, str], int]
"""Rows of a process: its identity, the first sequence number, names of kinds, number of
rows.
"""
_Row = tuple[int, dict[int, str], np.ndarray]
"""Sequence number, names of kinds, and the span's fields, int64[7]."""


class PersistentState:
    """The latest persistent record of each kind; processes that ended are discarded."""

    def __init__(self) -> None:
        self._events: dict[tuple[Any, ...], Event] = {}
        self._marks: dict[_Process, dict[int, list[_Row]]] = {}
        self._registered: set[_Process] = set()
        self._span_processes: dict[_Process, None] = {}

    @staticmethod
    def is_persistent(event: Event) -> bool:
        """Return whether an event holds for all later time."""
        return event.kind in _EVENT_KEYS

    def add_event(self, event: Event, is_old: bool = False) -> None:
        """Add an event. is_old: it is from an older segment and must not replace a newer one."""
        names = _EVENT_KEYS.get(event.kind)
        if names is None or len(self._events) >= _MAX_EVENTS:
            return
        key = (event.kind, *(_convert_key(event.attributes.get(name)) for name in names))
        if is_old and key in self._events:
            return
        self._events.pop(key, None)  # the latest statement moves to the end
        self._events[key] = event
        if event.kind == "process-registered":
            self._registered.add(_get_process(event.attributes))

    def add_processes(self, spans: Spans | PackedSpans) -> None:
        """Remember which processes have written spans."""
        parts: Iterable[Any] = spans.parts if isinstance(spans, PackedSpans) else (spans,)
        self._span_processes.update({(part.pid, part.started_ticks): None for part in parts})

    def has_unregistered(self) -> bool:
        """Return whether a process has written spans without a registration read so far."""
        return any(process not in self._registered for process in self._span_processes)

    def keep_spans(self, records: Iterable[Record | PackedSpans]) -> None:
        """Keep the marks among spans that are about to be discarded."""
        frames: list[PackedSpans] = []
        for record in records:
            if isinstance(record, PackedSpans):
                if dict(record.constants).get(_KIND_ROW, STEP) in _KEPT_KINDS:
                    frames.append(record)
            elif isinstance(record, Spans):
                self._decode_spans(frames)
                table = np.array([record.columns[name] for name in SPAN_FIELDS], np.int64)
                process = (record.pid, record.started_ticks)
                self._keep_rows(
                    [(process, record.first_sequence, record.names, table.shape[1])], table
                )
            if len(frames) >= _FRAMES_PER_BATCH:
                self._decode_spans(frames)
        self._decode_spans(frames)

    def forget(self, before_ns: int) -> None:
        """Discard processes that ended before this time, with their events and marks."""
        ended = {
            _get_process(event.attributes)
            for event in self._events.values()
            if event.kind == "process-exited" and event.t_ns < before_ns
        }
        if ended:
            pids = {pid for pid, _ in ended}
            self._events = {
                key: event
                for key, event in self._events.items()
                if _get_process(event.attributes) not in ended
                and not (event.kind == "group-announced" and event.attributes.get("pid") in pids)
            }
            for process in ended:
                self._marks.pop(process, None)
                self._span_processes.pop(process, None)

    def records(self, since_ns: int) -> Iterator[Record]:
        """Yield everything that holds at `since_ns`; earlier events are yielded with that time."""
        for event in self._events.values():
            yield event if event.t_ns >= since_ns else replace(event, t_ns=since_ns)
        for process, marks in self._marks.items():
            for rows in marks.values():
                yield from (_build_spans(process, row) for row in rows)

    def _decode_spans(self, frames: list[PackedSpans]) -> None:
        """Decode frames, keep the relevant rows, and empty the list."""
        if not frames:
            return
        table = np.empty((len(SPAN_FIELDS), sum(encoded.rows for encoded in frames)), np.int64)
        decode_span_frames(frames, table)
        parts = [
            ((part.pid, part.started_ticks), part.first_sequence, part.names, part.rows)
            for encoded in frames
            for part in encoded.parts
        ]
        self._keep_rows(parts, table)
        frames.clear()

    def _keep_rows(self, parts: Sequence[_Part], table: np.ndarray) -> None:
        """Keep the relevant rows of processes, part after part."""
        ends = np.cumsum([part[-1] for part in parts])
        rows = np.flatnonzero(np.isin(table[_KIND_ROW], _KEPT_KINDS))
        owners = np.searchsorted(ends, rows, side="right").tolist()
        latest: dict[tuple[_Process, int], tuple[int, int]] = {}
        for row, kind, owner in zip(rows.tolist(), table[_KIND_ROW, rows].tolist(), owners):
            if kind in _MARK_KINDS:
                buffer = self._get_kept(parts[owner][0], kind)
                buffer.append(_build_row(parts[owner], table, row, int(ends[owner])))
                del buffer[:-_MAX_MARKS_PER_KIND]
            else:
                latest[parts[owner][0], kind] = row, owner
        for (process, kind), (row, owner) in latest.items():
            self._get_kept(process, kind)[:] = [
                _build_row(parts[owner], table, row, int(ends[owner]))
            ]
        while len(self._marks) > _MAX_PROCESSES:
            del self._marks[next(iter(self._marks))]

    def _get_kept(self, process: _Process, kind: int) -> list[_Row]:
        return self._marks.setdefault(process, {}).setdefault(kind, [])


def _build_row(part: _Part, table: np.ndarray, row: int, end: int) -> _Row:
    """Return a row of a part that ends at `end` in the table."""
    _, sequence, names, rows = part
    return sequence + row - (end - rows), names, table[:, row].copy()


def _build_spans(process: _Process, row: _Row) -> Spans:
    sequence, names, values = row
    columns = {name: values[at : at + 1] for at, name in enumerate(SPAN_FIELDS)}
    return Spans(*process, sequence, 0, names, columns)


def _get_process(attributes: Any) -> _Process:
    return _convert_key(attributes.get("pid")), _convert_key(attributes.get("started_ticks"))


def _convert_key(value: Any) -> Any:
    """Convert any value of a recording to one that can be a dictionary key."""
    return value if isinstance(value, str | int) else repr(value)


State = Literal["recording", "ended", "gone"]
_OLDER_SEGMENTS_PER_POLL = 8  # older segments that one poll searches for registrations
_MAX_RECENT_RECORDS = 100_000  # limits the memory that a hostile recording can take
_MAX_EVENT_BYTES = 1 << 20
_FOREVER_NS = 1 << 62


class NodeTail:
    """Follows one node's folder; nothing is opened before the first poll."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of a node, or a single segment of it."""
        self.folder = folder
        self.header: Header | None = None
        self.latest_ns: int | None = None
        """Time of the latest record, on the node's clock."""
        self.state: State = "gone"
        self.why_ended = ""
        self.trouble = ""
        """Why the recorder cannot write at the moment, as it last reported."""
        self.damaged_bytes = 0
        """Damaged bytes among those read here."""
        self._clock: Clock | None = None
        self._persistent = PersistentState()
        self._reset()

    @property
    def implausible_records(self) -> int:
        """Records among those read here whose times no other frame confirms."""
        return self._times.refused + self._times.unconfirmed

    def _reset(self) -> None:
        self._decoder = Decoder()
        self._times = TimeFilter(has_start=False)
        self._segment, self._offset = "", 0
        self._recent: deque[tuple[int, Record | PackedSpans]] = deque()
        self._older: list[Path] = []

    def poll(self, keep_ns: int) -> bool:
        """Read new data, discard data older than `keep_ns`, and return whether there was new
        data."""
        segments = self._segments()
        names = [path.name for path in segments]
        if not segments:
            self.state = "gone"
            return False
        if self._segment not in names:
            self._reset()
            has_new = self._read_first(segments, keep_ns)
        else:
            has_new = False
            for path in segments[names.index(self._segment) :]:
                for new_frame in self._read(path):
                    has_new = True
                    self._add(new_frame)
        if has_new or self.state == "gone":
            self.state = "ended" if self.why_ended else "recording"
        if self.latest_ns is not None:
            self.forget(self.latest_ns - keep_ns)
        self._search_older()
        return has_new

    def records(
        self, since_ns: int, until_ns: int | None = None
    ) -> Iterator[list[Record | PackedSpans]]:
        """Yield a header, then the persistent state, then what was recorded since `since_ns`.

        An earlier registration is yielded with the time `since_ns`. until_ns: what was written
        later is left out; None = nothing is.
        """
        last_ns = _FOREVER_NS if until_ns is None else until_ns
        if self.header is not None:
            started = {**self.header.started, "monotonic_ns": since_ns}
            yield [replace(self.header, started=started)]
        persistent = self._persistent.records(since_ns)
        yield [r for r in persistent if not isinstance(r, Event) or r.t_ns <= last_ns]
        for t_ns, record in self._recent:
            if since_ns <= t_ns <= last_ns and not _is_replayed(record):
                yield [record]

    def find_batch_end(self, t_ns: int, batch_ns: int) -> int:
        """Find where the batch of records that a time lies in has ended, ns.

        A recorder writes about once a second. batch_ns: longest time between the newest records
        of one batch; those of two lie further apart.
        """
        times = (kept_ns for kept_ns, _ in self._recent)
        return next((kept_ns for kept_ns in times if kept_ns >= t_ns), t_ns) + batch_ns

    def realtime_ns(self) -> int | None:
        """Return the node's wall clock at the last record, ns since 1970; None when it is not
        known.
        """
        clock = self._clock
        if self.latest_ns is None or clock is None:
            return None
        return clock.realtime_ns + self.latest_ns - clock.monotonic_ns

    @property
    def segment(self) -> str:
        """Name of the segment that was read last; "" before the first poll."""
        return self._segment

    # --- the files ------------------------------------------------------------------------------

    def _segments(self) -> list[Path]:
        if self.folder.is_file():
            return [self.folder]
        try:
            entries = [entry for entry in os.scandir(self.folder) if is_segment(entry.name)]
            names = [entry.name for entry in entries if entry.is_file()]  # a pipe would block
        except OSError:
            return []
        return [self.folder / name for name in sorted(names, key=lambda name: (len(name), name))]

    def _read(self, path: Path) -> list[frame.Frame]:
        """Return the new whole frames; an unfinished one is read again next time."""
        if path.name != self._segment:
            self._segment, self._offset = path.name, 0
        count, frames, damaged = DamageCounter(), [], 0
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # another file of this name
                    self._offset = 0
                if size == self._offset:
                    return []
                file.seek(self._offset)
                for new_frame in Scanner(file, count).frames():
                    frames.append(new_frame)
                    damaged = count.damaged_bytes
        except OSError:
            pass  # it was removed, or its disk fails: the next poll shows which
        unfinished = count.torn_tail_bytes + count.damaged_bytes - damaged
        if unfinished > frame.MAX_PAYLOAD_BYTES + frame.HEAD_BYTES:
            unfinished, damaged = 0, damaged + unfinished  # no frame is that long
        self._offset += count.bytes_read - unfinished
        self.damaged_bytes += damaged
        return frames

    def _read_first(self, segments: Sequence[Path], keep_ns: int) -> bool:
        """Read the newest segment, and the one before."""
        frames: list[frame.Frame] = []
        for path in segments[-2:]:
            frames += self._read(path)
        for read_frame in frames:
            self._decoder.add_layouts(read_frame)
        self._older = [*segments[:1], *segments[1:-2]] if len(segments) > 2 else []
        index = self._find_first_needed(frames, keep_ns)
        for read_frame in frames[:index]:
            if read_frame.kind in (frame.KIND_HEADER, frame.KIND_CLOCK, frame.KIND_EVENT):
                self._add(read_frame)
        spans = (read_frame for read_frame in frames[:index] if read_frame.kind == frame.KIND_SPANS)
        self._persistent.keep_spans(
            record for read_frame in spans for record in self._decode(read_frame)
        )
        for read_frame in frames[index:]:
            self._add(read_frame)
        return bool(frames)

    def _find_first_needed(self, frames: Sequence[frame.Frame], keep_ns: int) -> int:
        """Return the index of the first frame needed, by bisection over frames with times."""
        timed = [
            index
            for index, timed_frame in enumerate(frames)
            if timed_frame.kind == frame.KIND_COLUMNS
        ]
        sources = [frames[index] for index in timed]
        latest_ns = self._find_time(sources, len(sources) - 1) if timed else None
        if latest_ns is None:
            return 0
        low, high = 0, len(timed) - 1
        while low < high:
            middle = (low + high) // 2
            t_ns = self._find_time(sources, middle)
            if t_ns is None or t_ns >= latest_ns - keep_ns:
                high = middle
            else:
                low = middle + 1
        # The records of one second are written together, with samples before rows and spans only.
        return timed[low - 1] if low else 0

    def _find_time(self, sources: Sequence[frame.Frame], index: int) -> int | None:
        """Find the time of a frame of samples: the median of its last few, of which some may lie.

        As many frames as confirm a jump of the time outvote those that cannot.
        """
        times = [
            int(record.t_ns[-1])
            for source in sources[max(0, index - 2 * CONFIRMATIONS) : index + 1]
            for record in self._decode(source)
            if isinstance(record, Columns) and len(record.t_ns)
        ]
        return statistics.median_high(times) if times else None

    def _search_older(self) -> None:
        """Search older segments for registrations while a process is unknown.

        The oldest segment is searched first, then the others from the newest back.
        """
        for _ in range(_OLDER_SEGMENTS_PER_POLL):
            if not self._older or not self._persistent.has_unregistered():
                return
            path = self._older.pop(0)
            if len(self._older) > 1:
                self._older.insert(0, self._older.pop())
            for event in iterate_events(path):
                if event.t_ns <= (self.latest_ns or 0) + MAX_JUMP_NS:
                    self._persistent.add_event(event, is_old=True)

    # --- their records ---------------------------------------------------------------------------

    def _decode(self, source: frame.Frame) -> list[Record | PackedSpans]:
        try:
            return self._decoder.packed(source)
        except (frame.FrameError, UnknownLayoutError):
            return []

    def _add(self, source: frame.Frame) -> None:
        for records in self._times.filter_frame(self._decode(source)):
            self._add_records(records)
        while len(self._recent) > _MAX_RECENT_RECORDS:
            self._recent.popleft()

    def _add_records(self, records: Iterable[Record | PackedSpans]) -> None:
        for record in records:
            t_ns = _find_latest_time(record)
            if t_ns is not None and (self.latest_ns is None or t_ns > self.latest_ns):
                self.latest_ns = t_ns
            self._update_state(record)
            if self.latest_ns is not None:
                self._recent.append((self.latest_ns, record))

    def _update_state(self, record: Record | PackedSpans) -> None:
        if isinstance(record, Header):
            self.header = record
        elif isinstance(record, Clock):
            self._clock = record
        elif isinstance(record, Event):
            if record.kind == "recorder-stopped":
                self.why_ended = str(record.attributes.get("reason", "")) or "the recorder stopped"
            elif record.kind in ("disk-full", "disk-resumed"):
                is_disk_full = record.kind == "disk-full"
                self.trouble = str(record.attributes.get("message", "")) if is_disk_full else ""
            self._persistent.add_event(record)
        elif isinstance(record, PackedSpans | Spans):
            self._persistent.add_processes(record)

    def forget(self, before_ns: int) -> None:
        """Discard data of the time before an instant, but for what still holds."""
        expired = []
        while self._recent and self._recent[0][0] < before_ns:
            expired.append(self._recent.popleft()[1])
        self._persistent.keep_spans(
            record for record in expired if isinstance(record, PackedSpans | Spans)
        )
        self._persistent.forget(before_ns)


def _is_replayed(record: Record | PackedSpans) -> bool:
    """Return whether `PersistentState` already yields this record."""
    return isinstance(record, Header) or (
        isinstance(record, Event) and PersistentState.is_persistent(record)
    )


def _find_latest_time(record: Record | PackedSpans) -> int | None:
    if isinstance(record, Columns):
        return int(record.t_ns[-1]) if len(record.t_ns) else None
    if isinstance(record, Rows | Spans | PackedSpans | Header):
        return None
    return record.monotonic_ns if isinstance(record, Clock) else record.t_ns


def iterate_events(path: Path) -> Iterator[Event]:
    """Yield the events of a segment; of its other frames only the heads are read.

    Stops at the first damage: the events are optional.
    """
    decoder = Decoder()
    try:
        with path.open("rb", buffering=0) as file:
            descriptor, offset = file.fileno(), 0
            while len(head := os.pread(descriptor, frame.HEAD_BYTES, offset)) == frame.HEAD_BYTES:
                size = frame.read_payload_length(head, 0)
                if size is None:
                    return
                if _read_kind(head) == frame.KIND_EVENT and size <= _MAX_EVENT_BYTES:
                    data = os.pread(descriptor, frame.HEAD_BYTES + size, offset)
                    yield from _decode_events(decoder, data, size)
                offset += frame.HEAD_BYTES + size
    except OSError:
        return


def _read_kind(head: bytes) -> int:
    return int(frame.HEAD.unpack_from(head, 0)[3])


def _decode_events(decoder: Decoder, data: bytes, size: int) -> Iterator[Event]:
    if len(data) < frame.HEAD_BYTES + size or not frame.has_valid_checksum(data, 0, size):
        return
    try:
        records: Sequence[Any] = decoder.packed(frame.unpack_frame(data, 0, size))
    except frame.FrameError:
        return
    yield from (record for record in records if isinstance(record, Event))
