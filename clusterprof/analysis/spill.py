"""Store the operations of ranks until those of all nodes are there.

    small recordings   in memory
    others             a file without a name in the temporary folder (`TMPDIR`)

A file without a name disappears when the last process that has it open ends, however it
ends: nothing is left behind. Worker processes find it below /proc, where every process
shows its open files; where there is no /proc the file has a name and is removed at the
end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SMALL_BYTES = 4 << 20
"""Size of recordings up to which their operations are small too, and stay in memory."""
MAX_IN_MEMORY_BYTES = 8 << 20
"""Operations of one node kept in memory where no file can be written, bytes."""


@dataclass(frozen=True, slots=True)
class SpillLocation:
    """Where operations are stored; can be sent to a worker process."""

    address: str = ""
    """Path of the file; "" = in memory."""
    in_memory_bytes: int = 1 << 40
    """Limit per node while there is no file, or when the file takes no more."""
    why_no_file: str = ""
    """Why there is no file although there should be one."""


IN_MEMORY = SpillLocation()


@contextmanager
def open_spill(folders: Sequence[Path]) -> Iterator[SpillLocation]:
    """Open a location for the operations of these recordings; it is removed on exit."""
    if measure_size_bytes(folders) <= SMALL_BYTES:
        yield IN_MEMORY
        return
    with ExitStack() as stack:
        try:
            place = _create_file(stack)
        except OSError as error:
            place = SpillLocation("", MAX_IN_MEMORY_BYTES, str(error))
        yield place


def _create_file(stack: ExitStack) -> SpillLocation:
    nameless = tempfile.TemporaryFile(prefix="clusterprof-")  # noqa: SIM115
    stack.enter_context(nameless)
    address = f"/proc/{os.getpid()}/fd/{nameless.fileno()}"
    if os.path.exists(address):
        return SpillLocation(address, MAX_IN_MEMORY_BYTES)
    named = tempfile.NamedTemporaryFile(prefix="clusterprof-")  # noqa: SIM115
    stack.enter_context(named)
    return SpillLocation(named.name, MAX_IN_MEMORY_BYTES)


def measure_size_bytes(folders: Sequence[Path]) -> int:
    """Return the size of recordings in bytes: folders of nodes, or single segments."""
    total = 0
    for folder in folders:
        for file in folder.iterdir() if folder.is_dir() else (folder,):
            try:
                total += file.stat().st_size
            except OSError:  # gone meanwhile: reading it will report that
                continue
    return total


@dataclass
class SpillWriter:
    """Stores the operations of one node: in the file, else in memory up to a limit."""

    place: SpillLocation
    why_full: str = ""
    _file: int = field(default=-1, init=False)
    _in_memory: int = field(default=0, init=False)
    _why_no_file: str = field(default="", init=False)

    def __enter__(self) -> SpillWriter:
        self._why_no_file = self.place.why_no_file
        if self.place.address:
            try:
                # Each write is appended as a whole; the file position afterwards gives its offset.
                self._file = os.open(self.place.address, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            except OSError as error:
                self._why_no_file = str(error)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def put(self, data: bytes) -> int | bytes | None:
        """Store data; return its offset in the file, or the data itself; None = no room left."""
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


class SpillReader:
    """Reads back what SpillWriter has stored."""

    def __init__(self, place: SpillLocation) -> None:
        self._place = place
        self._file = -1

    def __enter__(self) -> SpillReader:
        if self._place.address:
            self._file = os.open(self._place.address, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def get(self, place: int | bytes, length: int) -> bytes:
        """Read stored data back.

        Raises: OSError when it cannot be read as a whole.
        """
        if isinstance(place, bytes):
            return place
        data = os.pread(self._file, length, place)
        if len(data) != length:
            raise OSError(f"{len(data)} of {length} bytes could be read back")
        return data
