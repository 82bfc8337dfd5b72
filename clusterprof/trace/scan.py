"""Finds the whole frames in a file of bytes that nobody vouches for.

A frame counts when its checksum holds. After anything else the search goes on one byte later for
the next magic whose frame holds, so that a length that lies swallows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from clusterprof.trace import frame

_CHUNK_BYTES = 1 << 20
_SEARCH_BYTES = 64 << 20
_SEARCH_FACTOR = 16


@dataclass(frozen=True, slots=True)
class Damage:
    """What the last reading of a node had to leave out."""

    damaged_bytes: int = 0
    """Skipped before, between or after whole frames."""
    damaged_places: int = 0
    """How many stretches those bytes form."""
    torn_tail_bytes: int = 0
    """At the end of a file: a frame that was being written when the recorder stopped."""
    frames_read: int = 0
    unknown_frames: int = 0
    """Whole frames that this version cannot understand, or that make no sense."""

    @property
    def whole(self) -> bool:
        """True when nothing was left out."""
        return not (self.damaged_places or self.torn_tail_bytes or self.unknown_frames)


class Count:
    """Damage while it is being counted; one for all segments of a node."""

    def __init__(self) -> None:
        self.damaged_bytes = self.damaged_places = self.torn_tail_bytes = 0
        self.frames_read = self.unknown_frames = 0
        self.bytes_read = self.bytes_searched = 0

    def damage(self) -> Damage:
        """Return what was counted so far."""
        return Damage(
            self.damaged_bytes,
            self.damaged_places,
            self.torn_tail_bytes,
            self.frames_read,
            self.unknown_frames,
        )

    def may_search(self, size: int) -> bool:
        """Say whether the checksum of another candidate of this size may be tried.

        A hostile file full of heads that announce megabytes would otherwise cost hours; damage
        that happens by itself never comes near the limit.
        """
        if self.bytes_searched + size > _SEARCH_BYTES + _SEARCH_FACTOR * self.bytes_read:
            return False
        self.bytes_searched += size
        return True


class Scanner:
    """One file, front to back, holding one frame and a chunk in memory."""

    def __init__(self, file: BinaryIO, count: Count) -> None:
        self._file = file
        self._count = count
        self._data = bytearray()
        self._at = 0  # in the data: where the next frame should begin

    def frames(self) -> Iterator[frame.Frame]:
        """Yield the whole frames; what lies between them is counted."""
        skipped = 0  # bytes since the end of the last whole frame
        torn = False  # what was skipped looks like a frame that was never finished
        while self._reach(1):
            size = self._frame_here(searching=skipped > 0)
            if size > 0:
                if skipped:
                    self._count.damaged_places += 1
                    self._count.damaged_bytes += skipped
                    skipped = 0
                payload_bytes = size - frame.HEAD_BYTES
                try:
                    found = frame.unpack(self._data, self._at, payload_bytes)
                except frame.FrameError:
                    self._count.unknown_frames += 1
                else:
                    yield found
                self._at += size
                continue
            if not skipped:
                torn = size == _UNFINISHED
            skipped += self._skip()
        if torn and skipped:
            self._count.torn_tail_bytes += skipped
        elif skipped:
            self._count.damaged_places += 1
            self._count.damaged_bytes += skipped

    def _frame_here(self, searching: bool) -> int:
        """Return the size of the whole frame here; else _NO_FRAME or _UNFINISHED."""
        have = self._reach(frame.HEAD_BYTES)
        if have < frame.HEAD_BYTES:
            start = bytes(self._data[self._at : self._at + len(frame.MAGIC)])
            return _UNFINISHED if frame.MAGIC.startswith(start) else _NO_FRAME
        payload_bytes = frame.payload_length(self._data, self._at)
        if payload_bytes is None:
            return _NO_FRAME
        size = frame.HEAD_BYTES + payload_bytes
        if self._reach(size) < size:
            return _UNFINISHED
        if searching and not self._count.may_search(size):
            return _NO_FRAME
        return size if frame.checksum_holds(self._data, self._at, payload_bytes) else _NO_FRAME

    def _skip(self) -> int:
        """Go to the next place where a frame might begin; return how far that was."""
        found = self._data.find(frame.MAGIC, self._at + 1)
        if found < 0:
            # The magic may lie across the end of what was read.
            found = max(self._at + 1, len(self._data) - len(frame.MAGIC) + 1)
        skipped = found - self._at
        self._at = found
        return skipped

    def _reach(self, wanted: int) -> int:
        """Return how many bytes there are from here on, having read to get `wanted`."""
        have = len(self._data) - self._at
        if have >= wanted:
            return have
        if self._at:
            del self._data[: self._at]
            self._at = 0
        while len(self._data) < wanted:
            chunk = self._file.read(max(_CHUNK_BYTES, wanted - len(self._data)))
            if not chunk:
                break
            self._data += chunk
            self._count.bytes_read += len(chunk)
        return len(self._data)


_NO_FRAME = 0
_UNFINISHED = -1
