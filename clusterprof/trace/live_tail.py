"""The end of a node's growing recording: what was recorded lately, at a cost that does not grow.

    tail = NodeTail(folder)
    tail.look(60 * 10**9)       # again and again: only what has come since is read
    tail.records(since_ns)      # what holds for all time, then what was recorded since

A segment ends after ten minutes, so the first look reads at most that much, and of older segments
the heads of frames and the events. A file that shrinks, vanishes or holds nonsense is no error:
what can be read is, and the rest is looked at again the next time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from clusterprof.trace import frame
from clusterprof.trace.decode import Decoder, UnknownLayoutError
from clusterprof.trace.lasting import Lasting
from clusterprof.trace.scan import Count, Scanner
from clusterprof.trace.schema import Clock, Columns, Event, Header, Record, Rows, Spans
from clusterprof.trace.segments import is_segment
from clusterprof.trace.spanframes import PackedSpans

State = Literal["recording", "ended", "gone"]
_OLDER_AT_ONCE = 8  # segments in which one look searches for registrations
_RECENT_AT_MOST = 100_000  # frames; a hostile recording has no more than these in memory
_EVENT_BYTES = 1 << 20


class NodeTail:
    """Follows one node's folder; nothing is opened before the first look."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of a node, or a single segment of it."""
        self.folder = folder
        self.header: Header | None = None
        self.latest_ns: int | None = None
        """Last instant of any record, on the node's clock."""
        self.state: State = "gone"
        self.why_ended = ""
        self.trouble = ""
        """Why the recorder cannot write at the moment, by its last word."""
        self.damaged_bytes = 0
        """Of what was read here."""
        self._clock: Clock | None = None
        self._lasting = Lasting()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._decoder = Decoder()
        self._segment, self._offset = "", 0
        self._recent: deque[tuple[int, Record | PackedSpans]] = deque()
        self._older: list[Path] = []

    def look(self, keep_ns: int) -> bool:
        """Read what has come; forget what is older than `keep_ns`; return whether anything came."""
        segments = self._segments()
        names = [path.name for path in segments]
        if not segments:
            self.state = "gone"
            return False
        if self._segment not in names:
            self._begin_anew()
            came = self._first(segments, keep_ns)
        else:
            came = False
            for path in segments[names.index(self._segment) :]:
                for found in self._read(path):
                    came = True
                    self._add(found)
        if came or self.state == "gone":
            self.state = "ended" if self.why_ended else "recording"
        if self.latest_ns is not None:
            self._forget(self.latest_ns - keep_ns)
        self._search_older()
        return came

    def records(self, since_ns: int) -> Iterator[list[Record | PackedSpans]]:
        """Yield a header, then what a reader from the start would know, then what was recorded
        since; a registration of long ago is told as one of `since_ns`."""
        if self.header is not None:
            started = {**self.header.started, "monotonic_ns": since_ns}
            yield [replace(self.header, started=started)]
        yield [*self._lasting.records(since_ns)]
        for t_ns, record in self._recent:
            if t_ns >= since_ns and not _stands(record):
                yield [record]

    def realtime_ns(self) -> int | None:
        """Return what people's clocks showed at the last record, by the node's own."""
        clock = self._clock
        if self.latest_ns is None or clock is None:
            return None
        return clock.realtime_ns + self.latest_ns - clock.monotonic_ns

    # --- the files ------------------------------------------------------------------------------

    def _segments(self) -> list[Path]:
        if self.folder.is_file():
            return [self.folder]
        try:
            names = [name for name in os.listdir(self.folder) if is_segment(name)]
        except OSError:
            return []
        return [self.folder / name for name in sorted(names, key=lambda name: (len(name), name))]

    def _read(self, path: Path) -> list[frame.Frame]:
        """Return the whole frames that have come; what is unfinished is read again next time."""
        if path.name != self._segment:
            self._segment, self._offset = path.name, 0
        count, frames, damaged = Count(), [], 0
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # another file by the same name
                    self._offset = 0
                if size == self._offset:
                    return []
                file.seek(self._offset)
                for found in Scanner(file, count).frames():
                    frames.append(found)
                    damaged = count.damaged_bytes
        except OSError:
            pass  # it was removed, or is on a disk in trouble: the next look tells
        unfinished = count.torn_tail_bytes + count.damaged_bytes - damaged
        if unfinished > frame.MAX_PAYLOAD_BYTES + frame.HEAD_BYTES:
            unfinished, damaged = 0, damaged + unfinished  # no frame is that long
        self._offset += count.bytes_read - unfinished
        self.damaged_bytes += damaged
        return frames

    def _first(self, segments: Sequence[Path], keep_ns: int) -> bool:
        """Read the newest segment, and the one before when that reaches not far enough back."""
        frames: list[frame.Frame] = []
        for path in segments[-2:]:
            frames += self._read(path)
        for one in frames:
            self._decoder.learn(one)
        self._older = [*segments[:1], *segments[1:-2]] if len(segments) > 2 else []
        at = self._first_after(frames, keep_ns)
        for one in frames[:at]:
            if one.kind in (frame.KIND_HEADER, frame.KIND_CLOCK, frame.KIND_EVENT):
                self._add(one)
        spans = (one for one in frames[:at] if one.kind == frame.KIND_SPANS)
        self._lasting.take(record for one in spans for record in self._decoded(one))
        for one in frames[at:]:
            self._add(one)
        return bool(frames)

    def _first_after(self, frames: Sequence[frame.Frame], keep_ns: int) -> int:
        """Return the place of the first frame that is needed, by few of those that tell a time."""
        timed = [at for at, one in enumerate(frames) if one.kind == frame.KIND_COLUMNS]
        latest_ns = self._time_of(frames[timed[-1]]) if timed else None
        if latest_ns is None:
            return 0
        low, high = 0, len(timed) - 1
        while low < high:
            middle = (low + high) // 2
            t_ns = self._time_of(frames[timed[middle]])
            if t_ns is None or t_ns >= latest_ns - keep_ns:
                high = middle
            else:
                low = middle + 1
        # What belongs to one second was written in one go, samples after all but rows and spans.
        return timed[low - 1] if low else 0

    def _time_of(self, found: frame.Frame) -> int | None:
        times = [int(one.t_ns[-1]) for one in self._decoded(found)
                 if isinstance(one, Columns) and len(one.t_ns)]  # fmt: skip
        return max(times, default=None)

    def _search_older(self) -> None:
        """Look for registrations in older segments while somebody is unknown, the oldest first and
        then back from the newest."""
        for _ in range(_OLDER_AT_ONCE):
            if not self._older or not self._lasting.unknown():
                return
            path = self._older.pop(0)
            if len(self._older) > 1:
                self._older.insert(0, self._older.pop())
            for event in events_in(path):
                self._lasting.saw(event, again=True)

    # --- what they hold -------------------------------------------------------------------------

    def _decoded(self, found: frame.Frame) -> list[Record | PackedSpans]:
        try:
            return self._decoder.packed(found)
        except (frame.FrameError, UnknownLayoutError):
            return []

    def _add(self, found: frame.Frame) -> None:
        for record in self._decoded(found):
            t_ns = _latest_of(record)
            if t_ns is not None and (self.latest_ns is None or t_ns > self.latest_ns):
                self.latest_ns = t_ns
            self._note(record)
            if self.latest_ns is not None:
                self._recent.append((self.latest_ns, record))
        while len(self._recent) > _RECENT_AT_MOST:
            self._recent.popleft()

    def _note(self, record: Record | PackedSpans) -> None:
        if isinstance(record, Header):
            self.header = record
        elif isinstance(record, Clock):
            self._clock = record
        elif isinstance(record, Event):
            if record.kind == "recorder-stopped":
                self.why_ended = str(record.attributes.get("reason", "")) or "the recorder stopped"
            elif record.kind in ("disk-full", "disk-resumed"):
                full = record.kind == "disk-full"
                self.trouble = str(record.attributes.get("message", "")) if full else ""
            self._lasting.saw(record)
        elif isinstance(record, PackedSpans | Spans):
            self._lasting.heard(record)

    def _forget(self, before_ns: int) -> None:
        gone = []
        while self._recent and self._recent[0][0] < before_ns:
            gone.append(self._recent.popleft()[1])
        self._lasting.take(record for record in gone if isinstance(record, PackedSpans | Spans))
        self._lasting.forget(before_ns)


def _stands(record: Record | PackedSpans) -> bool:
    """True for what `Lasting` tells already."""
    return isinstance(record, Header) or (isinstance(record, Event) and Lasting.holds(record))


def _latest_of(record: Record | PackedSpans) -> int | None:
    if isinstance(record, Columns):
        return int(record.t_ns[-1]) if len(record.t_ns) else None
    if isinstance(record, Rows | Spans | PackedSpans | Header):
        return None
    return record.monotonic_ns if isinstance(record, Clock) else record.t_ns


def events_in(path: Path) -> Iterator[Event]:
    """Yield the events of a segment; of its other frames only the heads are read.

    Stops at the first damage: what is searched for here may be missing.
    """
    decoder = Decoder()
    try:
        with path.open("rb", buffering=0) as file:
            descriptor, at = file.fileno(), 0
            while len(head := os.pread(descriptor, frame.HEAD_BYTES, at)) == frame.HEAD_BYTES:
                size = frame.payload_length(head, 0)
                if size is None:
                    return
                if _kind(head) == frame.KIND_EVENT and size <= _EVENT_BYTES:
                    whole = os.pread(descriptor, frame.HEAD_BYTES + size, at)
                    yield from _events(decoder, whole, size)
                at += frame.HEAD_BYTES + size
    except OSError:
        return


def _kind(head: bytes) -> int:
    return int(frame.HEAD.unpack_from(head, 0)[3])


def _events(decoder: Decoder, whole: bytes, size: int) -> Iterator[Event]:
    if len(whole) < frame.HEAD_BYTES + size or not frame.checksum_holds(whole, 0, size):
        return
    try:
        found: Sequence[Any] = decoder.packed(frame.unpack(whole, 0, size))
    except frame.FrameError:
        return
    yield from (one for one in found if isinstance(one, Event))
