"""Write one node's recording, and survive a failing disk.

    writer = RecordingWriter(out / node_key, header, clock)
    writer.append(*columns, *rows, *spans)     # the records of one second, in one call
    writer.close()

Records given in one call share frames (the spans of several processes in one), so the recorder
hands over everything once a second. A full, read-only, lost or failing disk never affects the
caller: frames wait in memory, the oldest are dropped and counted, and the recording continues where
it ended once the disk recovers, with an event and a gap that state what is missing.
"""

from __future__ import annotations

import errno
import os
import resource
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from clusterprof.trace.encoder import Encoder
from clusterprof.trace.frame import HEAD_BYTES, MAX_PAYLOAD_BYTES
from clusterprof.trace.schema import Clock, Event, Gap, Header, Record
from clusterprof.trace.segments import PRIVATE_MODE, SegmentFolder

MAX_FRAME_BYTES = HEAD_BYTES + MAX_PAYLOAD_BYTES

SEGMENT_BYTES = 64 << 20
SEGMENT_NS = 600_000_000_000
MAX_BYTES = 2 << 30
BUFFER_BYTES = 16 << 20
_RETRY_INTERVAL_NS = 1_000_000_000
_SPACE_CHECK_INTERVAL_NS = 1_000_000_000  # between two checks of the free space
_RETRYABLE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})  # the file may grow again later


class RecordingWriter:
    """Appends records to the segments of one node; only invalid records make it raise."""

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
        mode: int = PRIVATE_MODE,
    ) -> None:
        """Create the folder and the first segment, with header and clock.

        keep_free_bytes: writing stops when less is free on the file system; None = 1 GiB or 5
        %, whichever is more. sync_ns: interval of fdatasync; None = left to the kernel.
        mode: of the folder; files have it without the right to execute.
        Raises: CannotStart when the folder cannot be created, or is open to other users.
        """
        self._folder = SegmentFolder(folder, mode)
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
        self._digest = sha256()
        self._size = 0  # of the segment, up to the end of its last whole frame
        self._first_bytes = 0  # of the segment: its header and clock
        self._opened_ns = self._synced_ns = self._attempted_ns = 0
        self._space_checked_ns = -_SPACE_CHECK_INTERVAL_NS
        self._trouble = ""
        self._trouble_since_ns = 0
        self._unreported = 0  # frames dropped since the last report in the recording
        self._segments_dropped = 0
        self.bytes_written = 0
        self.frames_dropped = 0
        self._drain(clock().monotonic_ns)

    @property
    def trouble(self) -> str:
        """Why nothing reaches the disk at the moment; "" while writing works."""
        return self._trouble

    @property
    def segment(self) -> str:
        """Name of the segment that is written to."""
        return self._segment

    def append(self, *records: Record) -> None:
        """Write records; consecutive ones of one kind share a frame.

        Raises: ValueError when a record does not match the schema, and nothing else.
        """
        now_ns = self._clock().monotonic_ns
        if not self._trouble and self._rotation_due(now_ns):
            self._drain(now_ns)  # open the segment first: its frames define their layouts
        for frame in self._encoder.frames(records):
            self._enqueue(frame)
        if not self._trouble or now_ns - self._attempted_ns >= _RETRY_INTERVAL_NS:
            self._drain(now_ns)

    def close(self) -> None:
        """Write the waiting frames, as far as the disk allows, and release the files."""
        now_ns = self._clock().monotonic_ns
        self._drain(now_ns)
        if self._trouble:
            self._drain(now_ns)  # the last attempt
        self.frames_dropped += len(self._waiting)
        self._waiting.clear()
        self._close_segment(is_complete=True)
        self._folder.close()

    def _enqueue(self, frame: bytes) -> None:
        """Append a frame to the queue; drop frames at its front when the buffer is full."""
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
        """Write the queued frames; on an error keep the rest queued and remember the reason."""
        self._attempted_ns = now_ns
        try:
            self._check_free_space(now_ns)
            if self._rotation_due(now_ns):
                self._open_segment(now_ns)
            while self._waiting:
                if self._size >= self._segment_bytes:
                    self._open_segment(now_ns)
                if not self._write_where_it_fits(self._waiting[0], now_ns):
                    self._count_dropped()
                self._waiting_bytes -= len(self._waiting.popleft())
            self._report(now_ns)
            if self._sync_ns is not None and now_ns - self._synced_ns >= self._sync_ns:
                self._synced_ns = now_ns
                os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error, now_ns)

    def _check_free_space(self, now_ns: int) -> None:
        """Stop before the file system is full for all users; continue only with space to spare."""
        if not self._keep_free_bytes or now_ns - self._space_checked_ns < _SPACE_CHECK_INTERVAL_NS:
            return
        floor = self._keep_free_bytes + (self._keep_free_bytes // 20 if self._trouble else 0)
        free_bytes = self._folder.free_bytes()
        if free_bytes < floor:
            raise OSError(errno.ENOSPC, f"{free_bytes} bytes are free, {floor} are left to others")
        self._space_checked_ns = now_ns

    def _rotation_due(self, now_ns: int) -> bool:
        return (
            self._fd < 0
            or self._size >= self._segment_bytes
            or now_ns - self._opened_ns >= self._segment_ns
        )

    def _open_segment(self, now_ns: int) -> None:
        """Open the next segment with a header and a clock; remove old ones when over the size
        limit.
        """
        self._close_segment(is_complete=True)
        notes: list[Record] = []
        while self._folder.total_bytes + self._segment_bytes > self._max_bytes:
            dropped = self._folder.drop_oldest()
            if dropped is None:
                break
            self._segments_dropped += 1
            attributes = {
                "segment": dropped[0],
                "bytes": dropped[1],
                "total": self._segments_dropped,
            }
            notes.append(Event(now_ns, "segment-dropped", attributes))
        self._segment, self._fd = self._folder.create()
        self._size, self._digest = 0, sha256()
        header = self._header() if callable(self._header) else self._header
        try:
            for frame in self._encoder.frames([header, self._clock(), *notes]):
                self._write(frame)
        except OSError:
            self._close_segment()
            self._folder.remove(self._segment)  # a segment without its header is useless
            raise
        self._opened_ns, self._first_bytes = now_ns, self._size
        self._encoder.reset_layouts()

    def _write_where_it_fits(self, frame: bytes, now_ns: int) -> bool:
        """Write a frame, where files are limited in size (RLIMIT_FSIZE) into the next segment.

        Returns False for a frame that no segment has room for behind its header.
        """
        try:
            self._write(frame)
            return True
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY and self._first_bytes + len(frame) > limit:
            return False
        self._open_segment(now_ns)
        self._write(frame)
        return True

    def _write(self, frame: bytes) -> None:
        """Append one frame, or truncate the file to the last whole frame and raise."""
        remaining = memoryview(frame)
        try:
            while remaining:
                written = os.write(self._fd, remaining)
                remaining = remaining[written:]  # a second write only to learn the error
        except OSError:
            self._truncate()
            raise
        self._digest.update(frame)
        self._size += len(frame)
        self.bytes_written += len(frame)
        self._folder.set_size(self._segment, self._size)

    def _truncate(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._close_segment()  # a torn frame remains; readers skip it

    def _fail(self, error: OSError, now_ns: int) -> None:
        """Remember why the disk failed, and queue an event that says so."""
        if error.errno not in _RETRYABLE_ERRNOS:
            self._close_segment()
        if self._trouble:
            return
        self._trouble = error.strerror or str(error)
        self._trouble_since_ns = now_ns
        name = errno.errorcode.get(error.errno or 0, "")
        attributes = {"error": name, "message": self._trouble}
        for frame in self._encoder.frames([Event(now_ns, "disk-full", attributes)]):
            self._enqueue(frame)

    def _report(self, now_ns: int) -> None:
        """After a disk failure or dropped frames, record what is missing."""
        if not self._trouble and not self._unreported:
            return
        since_ns = self._trouble_since_ns if self._trouble else now_ns
        notes: list[Record] = []
        if self._trouble:
            attributes = {
                "since_ns": since_ns,
                "message": self._trouble,
                "frames_dropped": self._unreported,
                "total": self.frames_dropped,
            }
            notes.append(Event(now_ns, "disk-resumed", attributes))
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
        self._encoder.reset_layouts()  # the definitions may be among the dropped frames

    def _close_segment(self, is_complete: bool = False) -> None:
        """Close the segment; list the digest of a complete one, which is not changed any more."""
        if self._fd < 0:
            return
        try:
            os.close(self._fd)
        except OSError:
            is_complete = False  # NFS reports a failed write here; the frames' checksums show it
        self._fd = -1
        if is_complete:
            self._folder.append_digest(self._segment, self._digest.hexdigest())
