"""Store the operations of ranks until those of all nodes are there.

    small recordings   in memory
    others             a folder in the temporary folder (`TMPDIR`), one file per node
    Dask               one array of bytes per node, kept by the worker that analyzed it

Every block has a location: the number of its writer and the offset in what that writer has
stored. So any process of the machine finds it in a file, and a worker of a cluster among
the blocks that it was sent.

The folder is removed at the end. Its owner holds a lock on it, which ends with the owner
however it ends: the next analysis removes the folders whose owners are gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SMALL_BYTES = 4 << 20
"""Size of recordings up to which their operations are small too, and stay in memory."""
MAX_IN_MEMORY_BYTES = 8 << 20
"""Operations of one node kept in memory where no file can be written, bytes."""
MAX_FREE_RATIO = 0.5
"""Part of the free space of the temporary folder that the operations may take."""
PREFIX = "clusterprof-spill-"
_LOCK_NAME = "owner"
_SETTLED_S = 10.0  # a younger folder may be one whose owner has yet to lock it
_CHECK_BYTES = 8 << 20  # written by a writer between two looks at the size of the folder
_OFFSET_BITS = 40  # of a location; above them stands the number of the writer
_MAX_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class SpillLocation:
    """Where operations are stored; can be sent to a worker process."""

    address: str = ""
    """Path of the folder; "" = in memory."""
    in_memory_bytes: int = 1 << 40
    """Limit per node while there is no folder, or when its disk takes no more."""
    why_no_file: str = ""
    """Why there is no folder although there should be one, or why nothing can be read back."""
    number: int = 0
    """Number of the writer; nodes count from 1, 0 writes what belongs to the whole job."""
    max_bytes: int = 1 << 62
    """Limit of the whole folder."""
    blocks: Mapping[int, NDArray[np.uint8]] | None = field(default=None, compare=False)
    """Blocks that were brought here, by location, uint8[bytes]; None = they are in the folder."""
    sink: bytearray | None = field(default=None, compare=False)
    """Takes what this writer stores; None = the folder does, or the caller."""

    def with_number(self, number: int) -> SpillLocation:
        """Return the location for the writer with this number."""
        return replace(self, number=number)


IN_MEMORY = SpillLocation()


@contextmanager
def open_spill(folders: Sequence[Path]) -> Iterator[SpillLocation]:
    """Open a location for the operations of these recordings; it is removed on exit."""
    if measure_size_bytes(folders) <= SMALL_BYTES:
        yield IN_MEMORY
        return
    with ExitStack() as stack:
        try:
            remove_stale_folders(Path(tempfile.gettempdir()))
            location = _create_folder(stack)
        except OSError as error:
            location = SpillLocation("", MAX_IN_MEMORY_BYTES, str(error))
        yield location


def _create_folder(stack: ExitStack) -> SpillLocation:
    folder = tempfile.mkdtemp(prefix=PREFIX)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    lock = os.open(os.path.join(folder, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    filesystem = os.statvfs(folder)
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    return SpillLocation(folder, MAX_IN_MEMORY_BYTES, max_bytes=int(MAX_FREE_RATIO * free_bytes))


def remove_stale_folders(parent: Path) -> None:
    """Remove the folders of this user whose owners are gone."""
    with os.scandir(parent) as entries:
        folders = [entry for entry in entries if entry.name.startswith(PREFIX)]
    for folder in folders:
        with suppress(OSError):  # another process removes it too
            status = folder.stat(follow_symlinks=False)
            is_own = folder.is_dir(follow_symlinks=False) and status.st_uid == os.geteuid()
            if is_own and time.time() - status.st_mtime >= _SETTLED_S:
                _remove_unlocked(folder.path)


def _remove_unlocked(folder: str) -> None:
    """Remove a folder unless its owner holds the lock.

    Raises: OSError when the owner does, or the folder cannot be read.
    """
    lock = os.open(os.path.join(folder, _LOCK_NAME), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


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


def _get_file_path(location: SpillLocation, number: int) -> str:
    return os.path.join(location.address, f"{number:06d}.blocks")


def split_location(location: int) -> tuple[int, int]:
    """Return the number of the writer and the offset, bytes."""
    return location >> _OFFSET_BITS, location & ((1 << _OFFSET_BITS) - 1)


@dataclass
class SpillWriter:
    """Stores the operations of one node: in its file or sink, else in memory up to a limit."""

    location: SpillLocation
    why_full: str = ""
    _file: int = field(default=-1, init=False)
    _in_memory: int = field(default=0, init=False)
    _unchecked: int = field(default=_CHECK_BYTES, init=False)
    _why_no_file: str = field(default="", init=False)

    def __enter__(self) -> SpillWriter:
        self._why_no_file = self.location.why_no_file
        if self.location.address:
            try:
                # Each write is appended as a whole; the file position afterwards gives its offset.
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(
                    _get_file_path(self.location, self.location.number), flags, 0o600
                )
            except OSError as error:
                self._why_no_file = str(error)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def put(self, data: bytes) -> int | bytes | None:
        """Store data; return its location, or the data itself; None = no room left."""
        if self.location.sink is not None:
            return self._put_in_sink(self.location.sink, data)
        if self._file >= 0:
            try:
                self._require_room(len(data))
                written = os.write(self._file, data)
                if written == len(data):
                    return self._locate(os.lseek(self._file, 0, os.SEEK_CUR) - written)
                self._why_no_file = "the disk is full"
            except OSError as error:
                self._why_no_file = error.strerror or str(error)
            self.__exit__()
        self._in_memory += len(data)
        if self._in_memory <= self.location.in_memory_bytes:
            return data
        self.why_full = f"{tempfile.gettempdir()}: {self._why_no_file}"
        return None

    def _put_in_sink(self, sink: bytearray, data: bytes) -> int | None:
        if len(sink) + len(data) > self.location.in_memory_bytes:
            self.why_full = f"more than {self.location.in_memory_bytes:,} bytes for one node"
            return None
        sink += data
        return self._locate(len(sink) - len(data))

    def _locate(self, offset: int) -> int:
        return self.location.number << _OFFSET_BITS | offset

    def _require_room(self, length: int) -> None:
        """Check the size of the folder now and then.

        Raises: OSError when it has reached its limit.
        """
        self._unchecked += length
        if self._unchecked >= _CHECK_BYTES:
            self._unchecked = 0
            if measure_size_bytes([Path(self.location.address)]) >= self.location.max_bytes:
                raise OSError(f"the limit of {self.location.max_bytes:,} bytes is reached")


class SpillReader:
    """Reads back what SpillWriter has stored."""

    def __init__(self, location: SpillLocation) -> None:
        self._location = location
        self._files: dict[int, int] = {}

    def __enter__(self) -> SpillReader:
        return self

    def __exit__(self, *raised: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def get(self, stored_block: int | bytes, length: int) -> bytes:
        """Read stored data back.

        Raises: OSError when it cannot be read as a whole.
        """
        if isinstance(stored_block, bytes):
            return stored_block
        blocks = self._location.blocks
        if blocks is not None:
            if stored_block not in blocks:
                raise OSError(self._location.why_no_file or "operations were not brought here")
            data = blocks[stored_block][:length].tobytes()
        else:
            number, offset = split_location(stored_block)
            data = os.pread(self._open(number), length, offset)
        if len(data) != length:
            raise OSError(f"{len(data)} of {length} bytes could be read back")
        return data

    def _open(self, number: int) -> int:
        if number not in self._files:
            if len(self._files) >= _MAX_OPEN_FILES:  # the one that was opened first is closed
                os.close(self._files.pop(next(iter(self._files))))
            path = _get_file_path(self._location, number)
            self._files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[number]
