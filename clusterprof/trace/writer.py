"""Writes one node's recording, and keeps its temper when the disk does not.

    writer = RecordingWriter(out / node_key, header, clock)
    writer.append(*columns, *rows, *spans)     # what belongs to one second, in one call
    writer.close()

Records given in one call share frames (several processes' spans in one), so the recorder hands
over everything it has once a second. A full, read-only, lost or failing disk never reaches the
caller: frames wait in memory, the oldest are dropped and counted, and the recording goes on where
it ended once the disk lets it, with an event and a gap that say what is missing.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from clusterprof.trace.encode import Encoder
from clusterprof.trace.frame import HEAD_BYTES, MAX_PAYLOAD_BYTES
from clusterprof.trace.schema import Clock, Event, Gap, Header, Record
from clusterprof.trace.segments import SegmentFolder

MAX_FRAME_BYTES = HEAD_BYTES + MAX_PAYLOAD_BYTES

SEGMENT_BYTES = 64 << 20
SEGMENT_NS = 600_000_000_000
MAX_BYTES = 2 << 30
BUFFER_BYTES = 16 << 20
_RETRY_NS = 1_000_000_000
_LOOK_NS = 1_000_000_000  # between two looks at the free space
_SAME_FILE_LATER = frozenset({errno.ENOSPC, errno.EDQUOT})  # the file is whole and may grow again


class RecordingWriter:
    """Appends records to the segments of one node; nothing but wrong records makes it raise."""

    def __init__(
        self,
        folder: Path,
        header: Header | Callable[[], Header],
        clock: Callable[[], Clock],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        segment_ns: int = SEGMENT_NS,
        max_bytes: int = MAX_BYTES,
        keep_free_bytes: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        sync_ns: int | None = None,
    ) -> None:
        """Create the folder and the first segment, header and clock in it.

        Raises CannotStart when the folder cannot be made, or belongs to or is open to others.
        `keep_free_bytes`: writing stops when less is left on the file system; None = 1 GiB or
        5 %, whichever is more. `sync_ns`: fdatasync that often; None = leave it to the kernel.
        """
        self._folder = SegmentFolder(folder)
        self._header = header
        self._clock = clock
        self._segment_bytes = min(segment_bytes, max(1, max_bytes // 4))
        self._segment_ns = segment_ns
        self._max_bytes = max_bytes
        if keep_free_bytes is None:
            keep_free_bytes = self._folder.keep_free_bytes()
        self._keep_free_bytes = keep_free_bytes
        self._buffer_bytes = buffer_bytes
        self._sync_ns = sync_ns
        self._encoder = Encoder()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._segment = ""
        self._fd = -1
        self._size = 0  # of the segment, up to the end of its last whole frame
        self._opened_ns = self._synced_ns = self._tried_ns = 0
        self._looked_ns = -_LOOK_NS
        self._trouble = ""
        self._trouble_since_ns = 0
        self._unreported = 0  # frames dropped since the recording last said how many
        self._segments_dropped = 0
        self.bytes_written = 0
        self.frames_dropped = 0
        self._drain(clock().monotonic_ns)

    @property
    def trouble(self) -> str:
        """Why nothing reaches the disk at the moment; "" when all is well."""
        return self._trouble

    def append(self, *records: Record) -> None:
        """Write records; those of one kind that follow each other share a frame.

        Raises ValueError when a record is not what the schema says, and nothing else.
        """
        now_ns = self._clock().monotonic_ns
        if not self._trouble and self._rotation_due(now_ns):
            self._drain(now_ns)  # first the new segment, so that the frames define their layouts
        for frame in self._encoder.frames(records):
            self._wait(frame)
        if not self._trouble or now_ns - self._tried_ns >= _RETRY_NS:
            self._drain(now_ns)

    def close(self) -> None:
        """Write what still waits, as far as the disk allows, and release the files."""
        now_ns = self._clock().monotonic_ns
        self._drain(now_ns)
        if self._trouble:
            self._drain(now_ns)  # there is no later
        self.frames_dropped += len(self._waiting)
        self._waiting.clear()
        self._close_segment()
        self._folder.close()

    def _wait(self, frame: bytes) -> None:
        """Put a frame at the end of what is to be written; make room for it at the front."""
        if len(frame) > MAX_FRAME_BYTES:
            self._count_dropped()
            return
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        while self._waiting_bytes > self._buffer_bytes:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._count_dropped()

    def _count_dropped(self) -> None:
        self.frames_dropped += 1
        self._unreported += 1

    def _drain(self, now_ns: int) -> None:
        """Write what waits; on an error leave the rest waiting and remember the trouble."""
        self._tried_ns = now_ns
        try:
            self._look_for_room(now_ns)
            if self._rotation_due(now_ns):
                self._open_segment(now_ns)
            while self._waiting:
                if self._size >= self._segment_bytes:
                    self._open_segment(now_ns)
                self._write(self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
            self._report(now_ns)
            if self._sync_ns is not None and now_ns - self._synced_ns >= self._sync_ns:
                self._synced_ns = now_ns
                os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error, now_ns)

    def _look_for_room(self, now_ns: int) -> None:
        """Stop before the disk is full for everybody; go on only when there is room to spare."""
        if not self._keep_free_bytes or now_ns - self._looked_ns < _LOOK_NS:
            return
        floor = self._keep_free_bytes + (self._keep_free_bytes // 20 if self._trouble else 0)
        free = self._folder.free_bytes()
        if free < floor:
            raise OSError(errno.ENOSPC, f"{free} bytes are free, {floor} are left to others")
        self._looked_ns = now_ns

    def _rotation_due(self, now_ns: int) -> bool:
        return (
            self._fd < 0
            or self._size >= self._segment_bytes
            or now_ns - self._opened_ns >= self._segment_ns
        )

    def _open_segment(self, now_ns: int) -> None:
        """Begin the next segment with a header and a clock; drop old ones when over the cap."""
        self._close_segment()
        notes: list[Record] = []
        while self._folder.total_bytes + self._segment_bytes > self._max_bytes:
            dropped = self._folder.drop_oldest()
            if dropped is None:
                break
            self._segments_dropped += 1
            told = {"segment": dropped[0], "bytes": dropped[1], "total": self._segments_dropped}
            notes.append(Event(now_ns, "segment-dropped", told))
        self._segment, self._fd = self._folder.create()
        self._size = 0
        header = self._header() if callable(self._header) else self._header
        try:
            for frame in self._encoder.frames([header, self._clock(), *notes]):
                self._write(frame)
        except OSError:
            self._close_segment()
            self._folder.remove(self._segment)  # a segment without its header is none
            raise
        self._opened_ns = now_ns
        self._encoder.define_again()

    def _write(self, frame: bytes) -> None:
        """Append one frame, or leave the file at the end of the last whole one and raise."""
        rest = memoryview(frame)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]  # a second turn only to learn the error
        except OSError:
            self._cut()
            raise
        self._size += len(frame)
        self.bytes_written += len(frame)
        self._folder.grew(self._segment, self._size)

    def _cut(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._close_segment()  # a torn frame stays behind; readers step over it

    def _fail(self, error: OSError, now_ns: int) -> None:
        """Remember why the disk refused, and say so in the recording when it can be said."""
        if error.errno not in _SAME_FILE_LATER:
            self._close_segment()
        if self._trouble:
            return
        self._trouble = error.strerror or str(error)
        self._trouble_since_ns = now_ns
        name = errno.errorcode.get(error.errno or 0, "")
        told = {"error": name, "message": self._trouble}
        for frame in self._encoder.frames([Event(now_ns, "disk-full", told)]):
            self._wait(frame)

    def _report(self, now_ns: int) -> None:
        """After trouble, and after frames were dropped, write down what is missing."""
        if not self._trouble and not self._unreported:
            return
        since_ns = self._trouble_since_ns if self._trouble else now_ns
        notes: list[Record] = []
        if self._trouble:
            told = {
                "since_ns": since_ns,
                "message": self._trouble,
                "frames_dropped": self._unreported,
                "total": self.frames_dropped,
            }
            notes.append(Event(now_ns, "disk-resumed", told))
        if self._unreported:
            message = f"{self._unreported} frames were dropped: {self._trouble or 'too large'}"
            notes.append(
                Gap(
                    since_ns,
                    "recording",
                    "",
                    "",
                    "failed",
                    message,
                    "free some space, or record to another folder",
                )
            )
        for frame in self._encoder.frames(notes):
            self._write(frame)
        self._trouble = ""
        self._unreported = 0
        self._encoder.define_again()  # the definitions may have been among what was dropped

    def _close_segment(self) -> None:
        if self._fd >= 0:
            try:
                os.close(self._fd)
            except OSError:
                pass  # NFS reports a failed write here; the frames after it tell
            self._fd = -1
