"""Where the operations of ranks are kept until those of all nodes are there.

    small recordings   in memory
    others             a file in the folder for temporary files (`TMPDIR`), which has no name

A file without a name goes when the last process that has it open ends, however it ends: nothing of
it can be left behind. Worker processes find it below /proc, where every process shows what it has
open; where there is no /proc it has a name, and is removed at the end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SMALL_BYTES = 4 << 20
"""Of a recording: up to this the operations in it are small too, and touch no disk."""
MOST_IN_MEMORY_BYTES = 8 << 20
"""Of one node, where no file can be written."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where data may be put; a worker process can be told it."""

    address: str = ""
    """Path of the file; "" = in memory."""
    in_memory_bytes: int = 1 << 40
    """Of one node, while there is no file or when it takes nothing more."""
    why: str = ""
    """Why there is no file although there should be one."""


IN_MEMORY = Place()


@contextmanager
def spilled(folders: Sequence[Path]) -> Iterator[Place]:
    """Say where the operations in these recordings go; they are gone when this ends."""
    if bytes_of(folders) <= SMALL_BYTES:
        yield IN_MEMORY
        return
    with ExitStack() as stack:
        try:
            place = _file(stack)
        except OSError as error:
            place = Place("", MOST_IN_MEMORY_BYTES, str(error))
        yield place


def _file(stack: ExitStack) -> Place:
    nameless = tempfile.TemporaryFile(prefix="clusterprof-")  # noqa: SIM115
    stack.enter_context(nameless)
    address = f"/proc/{os.getpid()}/fd/{nameless.fileno()}"
    if os.path.exists(address):
        return Place(address, MOST_IN_MEMORY_BYTES)
    named = tempfile.NamedTemporaryFile(prefix="clusterprof-")  # noqa: SIM115
    stack.enter_context(named)
    return Place(named.name, MOST_IN_MEMORY_BYTES)


def bytes_of(folders: Sequence[Path]) -> int:
    """Return the size of recordings: folders of nodes, or single segments."""
    total = 0
    for folder in folders:
        for one in folder.iterdir() if folder.is_dir() else (folder,):
            try:
                total += one.stat().st_size
            except OSError:  # gone meanwhile; reading it will say so
                continue
    return total


@dataclass
class Shelf:
    """Takes the data of one node: into the file, else into memory as far as it goes."""

    place: Place
    why_full: str = ""
    _file: int = field(default=-1, init=False)
    _in_memory: int = field(default=0, init=False)
    _why_no_file: str = field(default="", init=False)

    def __enter__(self) -> Shelf:
        self._why_no_file = self.place.why
        if self.place.address:
            try:
                # Each write of each process goes to the end as a whole, and says where that was.
                self._file = os.open(self.place.address, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            except OSError as error:
                self._why_no_file = str(error)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def put(self, data: bytes) -> int | bytes | None:
        """Return the offset in the file, or the data itself; None when there is no room left."""
        if self._file >= 0:
            try:
                written = os.write(self._file, data)
                if written == len(data):
                    return os.lseek(self._file, 0, os.SEEK_CUR) - written
                self._why_no_file = "the disk is full"
            except OSError as error:
                self._why_no_file = error.strerror or str(error)
            self.__exit__()
        self._in_memory += len(data)
        if self._in_memory <= self.place.in_memory_bytes:
            return data
        self.why_full = f"{tempfile.gettempdir()}: {self._why_no_file}"
        return None


class Reader:
    """Gives data back that shelves have taken."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._file = -1

    def __enter__(self) -> Reader:
        if self._place.address:
            self._file = os.open(self._place.address, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def get(self, place: int | bytes, length: int) -> bytes:
        """Return the data; raises OSError when it cannot be read as a whole."""
        if isinstance(place, bytes):
            return place
        data = os.pread(self._file, length, place)
        if len(data) != length:
            raise OSError(f"{len(data)} of {length} bytes could be read back")
        return data
