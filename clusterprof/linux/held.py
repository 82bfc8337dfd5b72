"""Kernel files kept open and read again and again with `pread`.

Opening and closing a file under /proc costs more than reading it (2.2 times the floor against
1.1; see bench/README.md), so whatever is read at every tick goes through here.

A file that the kernel writes in one go (stat, meminfo, netstat, everything in /sys) is whole when
a `pread` returned less than it was asked for. One that it writes record by record (diskstats,
vmstat, mountstats) stops before the record that no longer fits its page, so only a reading that
leaves room for the longest record is whole. https://docs.kernel.org/filesystems/seq_file.html
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from clusterprof.errors import Unavailable, unavailable_from_os_error

_FIRST_BYTES = 8192
_PAGE_BYTES = 4096  # of the kernel's own buffer: this or larger
LONG_RECORDS = _PAGE_BYTES  # records of any length: read on until nothing comes
_REOPEN = {errno.ESTALE, errno.ENODEV}
Meaning = TypeVar("Meaning")


class HeldFile:
    """One kernel file with its descriptor held; every `read()` gives its content of now.

    Raises `Unavailable` when it cannot be opened or read. A file that went away and came back
    (ESTALE, ENODEV: a removed cgroup, a remounted file system) is opened anew once per read.
    """

    __slots__ = ("_fd", "_remedy", "_size", "_whole", "path", "short")

    def __init__(
        self, path: Path | str, absent_remedy: str = "", *, longest_record: int = 0
    ) -> None:
        """Open `path`; `longest_record` is in bytes, 0 for a file that is written in one go."""
        self.path = str(path)
        self._remedy = absent_remedy
        self._size = _FIRST_BYTES
        self._whole = _PAGE_BYTES - longest_record if longest_record else _FIRST_BYTES
        self.short = True  # one `pread` has always been enough
        self._fd = -1
        self._fd = self._open()

    def read(self) -> bytes:
        """Return the whole file as it is now."""
        try:
            data = os.pread(self._fd, self._size, 0)
            return data if len(data) < self._whole else self._rest(data)
        except OSError as error:
            # Without a descriptor an earlier reopening has failed: try again.
            if error.errno not in _REOPEN and self._fd >= 0:
                raise unavailable_from_os_error(error, self.path, self._remedy) from None
        self.close()
        self._fd = self._open()
        try:
            return self._rest(os.pread(self._fd, self._size, 0))
        except OSError as error:
            raise unavailable_from_os_error(error, self.path, self._remedy) from None

    @property
    def once(self) -> tuple[int, int, int] | None:
        """What one `pread` takes: descriptor, bytes, and the length from which it is not whole.

        None when the file is not open, or has not always been whole so.
        """
        return (self._fd, self._size, self._whole) if self.short and self._fd >= 0 else None

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unavailable_from_os_error(error, self.path, self._remedy) from None

    def __del__(self) -> None:
        self.close()  # a collector whose open() failed half-way is never closed

    def _rest(self, data: bytes) -> bytes:
        """Read on until the kernel says that there is nothing more."""
        self.short = self.short and len(data) < self._whole
        chunks = [data]
        length = len(data)
        while data:
            data = os.pread(self._fd, self._size, length)
            chunks.append(data)
            length += len(data)
        if length >= self._size:  # next time in one call, where the kernel allows it
            if self._whole == self._size:
                self._whole = 2 * length
            self._size = 2 * length
        return b"".join(chunks)


class MissingFile:
    """Stands where a `HeldFile` could not be opened: every `read()` raises the reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: Unavailable) -> None:
        self.reason = reason

    def read(self) -> bytes:
        """Raise the reason, without the traceback that would grow with every raise."""
        raise self.reason.with_traceback(None)

    def close(self) -> None:
        """Do nothing."""


def hold(
    path: Path | str, absent_remedy: str = "", *, longest_record: int = 0
) -> HeldFile | MissingFile:
    """Open a file, or keep the reason why it could not be opened for whoever reads it."""
    try:
        return HeldFile(path, absent_remedy, longest_record=longest_record)
    except Unavailable as reason:
        return MissingFile(reason)


class Parsed(Generic[Meaning]):
    """A held file and what its last reading meant: what reads as it did is not parsed again."""

    __slots__ = ("_data", "_meaning", "_parse", "held")

    def __init__(self, held: HeldFile | MissingFile, parse: Callable[[bytes], Meaning]) -> None:
        self.held = held
        self._parse = parse
        self._data: bytes | None = None
        self._meaning: Meaning

    def read(self) -> Meaning:
        """Return what the file means now; raises what reading and parsing raise."""
        return self.meaning(self.held.read())

    def meaning(self, data: bytes) -> Meaning:
        """Return what a reading means that was taken before; raises what parsing raises."""
        if data != self._data:
            self._meaning = self._parse(data)
            self._data = data
        return self._meaning

    def close(self) -> None:
        """Close the file."""
        self.held.close()


def read_all(files: Sequence[HeldFile | MissingFile]) -> list[bytes | Unavailable]:
    """Return the content of every file, in place of one that cannot be read the reason."""
    contents: list[bytes | Unavailable] = []
    for file in files:
        try:
            contents.append(file.read())
        except Unavailable as reason:
            contents.append(reason)
    return contents


class HeldFolder:
    """A folder that is asked again and again whether it has changed, by its descriptor.

    Walking to it by its path costs three times as much, and ten times when nothing of the path is
    in the processor's caches: the first thing after a sleep.
    """

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self._fd = -1

    def changed_ns(self) -> int | None:
        """Return when something last came or went, None while there is no such folder."""
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            found = os.fstat(self._fd)
        except OSError:
            return None
        if not found.st_nlink:  # removed: another may come in its place
            self.close()
            return None
        return found.st_mtime_ns

    def close(self) -> None:
        """Close the descriptor; the next question opens it again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def read_once(path: Path | str, absent_remedy: str = "") -> bytes:
    """Open, read whole and close a file that is not worth holding; may raise `Unavailable`."""
    held = HeldFile(path, absent_remedy, longest_record=LONG_RECORDS)
    try:
        return held.read()
    finally:
        held.close()
