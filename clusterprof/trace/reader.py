"""Reads one node's recording back: everything that is whole, whatever happened to the rest.

    for record in (reader := NodeReader(node_folders(path)[0])):
        ...
    reader.damage.damaged_places      # 0 in a healthy recording

The reader trusts no byte: a frame counts when its checksum holds, and after damage the next such
frame is searched for (`scan`). It holds one frame in memory at a time, and a recording that is
still being written reads up to its last whole frame.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import TypeVar

from clusterprof.errors import NoRecording
from clusterprof.trace import frame
from clusterprof.trace.decode import Decoder, UnknownLayoutError
from clusterprof.trace.scan import Count, Damage, Scanner
from clusterprof.trace.schema import Record
from clusterprof.trace.segments import SUFFIX, is_segment
from clusterprof.trace.spanframes import PackedSpans

_Kind = TypeVar("_Kind")


def node_folders(path: Path) -> tuple[Path, ...]:
    """Return the nodes of a recording: its sub-folders, or the one folder or segment given.

    Raises NoRecording with what was found instead.
    """
    if path.is_file():
        if path.name.endswith(SUFFIX):
            return (path,)
        raise NoRecording(
            f"{path}: not a recording (no {SUFFIX} file)",
            "give the folder that `clusterprof record` wrote",
        )
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise NoRecording(
            f"{path}: {(error.strerror or str(error)).lower()}",
            "give the folder that `clusterprof record` wrote",
        ) from error
    if any(map(is_segment, names)):
        return (path,)
    nodes = tuple(path / name for name in names if _segments(path / name))
    if not nodes:
        raise NoRecording(
            f"{path}: no recording in this folder (no {SUFFIX} files)",
            "give the folder that `clusterprof record` wrote",
        )
    return nodes


class NodeReader:
    """The records of one node, in the order in which they were written; can be iterated again."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of a node, or a single segment; nothing is opened yet."""
        self.path = folder
        self._count = Count()
        self._segment: tuple[int, FileIO | None] = (0, None)

    @property
    def damage(self) -> Damage:
        """What the last iteration left out so far; complete when it came to its end."""
        return self._count.damage()

    @property
    def read_bytes(self) -> int:
        """How far the last iteration has come: bytes of all segments so far."""
        before, file = self._segment
        return before + (0 if file is None or file.closed else file.tell())

    def __iter__(self) -> Iterator[Record]:
        for records in self.frames():
            yield from records

    def frames(self) -> Iterator[list[Record]]:
        """Yield the records of each frame together; never raises for what the bytes are."""
        return self._decoded(Decoder.records)

    def packed(self) -> Iterator[list[Record | PackedSpans]]:
        """Do what `frames` does, but leave for later what is done better for many frames."""
        return self._decoded(Decoder.packed)

    def _decoded(
        self, decode: Callable[[Decoder, frame.Frame], list[_Kind]]
    ) -> Iterator[list[_Kind]]:
        count = self._count = Count()
        decoder = Decoder()
        searched = False
        for found in self._scan(count):
            try:
                try:
                    records = decode(decoder, found)
                except UnknownLayoutError:
                    if searched:
                        raise
                    searched = True  # once: the definition may stand later, in any segment
                    for other in self._scan(Count()):
                        decoder.learn(other)
                    records = decode(decoder, found)
            except frame.FrameError:
                count.unknown_frames += 1
                continue
            count.frames_read += 1
            yield records

    def _scan(self, count: Count) -> Iterator[frame.Frame]:
        before = 0
        for segment in [self.path] if self.path.is_file() else _segments(self.path):
            try:
                with segment.open("rb", buffering=0) as file:
                    self._segment = before, file
                    yield from Scanner(file, count).frames()
                    before += file.tell()
                    self._segment = before, None
            except FileNotFoundError:
                continue  # dropped by the cap while we read; the recording itself says so
            except OSError:
                count.damaged_places += 1


def _segments(folder: Path) -> list[Path]:
    """Return the segments of a node in the order of their numbers; [] when it is none."""
    try:
        entries = [entry for entry in os.scandir(folder) if is_segment(entry.name)]
    except OSError:
        return []
    names = [entry.name for entry in entries if entry.is_file()]
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]
