"""Kernel files kept open and read again and again with `pread`.

Opening and closing a file under /proc costs more than reading it (2.2 times the floor against
1.1; see bench/README.md), so whatever is read at every tick goes through here.

The kernel hands out most multi-record files a page at a time: a `pread` that returned little is
the whole file, one that filled almost a page may not be. Files with long records (mountstats)
can stop anywhere, and ask for `to_end=True`. https://docs.kernel.org/filesystems/seq_file.html
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from clusterprof.errors import Unavailable, unavailable_from_os_error

_FIRST_BYTES = 8192
_SURELY_WHOLE = 4096 - 512  # one page, less the longest record of the files read without to_end
_REOPEN = {errno.ESTALE, errno.ENODEV, errno.EBADF}


class HeldFile:
    """One kernel file with its descriptor held; every `read()` gives its content of now.

    Raises `Unavailable` when it cannot be opened or read. A file that went away and came back
    (ESTALE, ENODEV: a removed cgroup, a remounted file system) is opened anew once per read.
    """

    __slots__ = ("_fd", "_remedy", "_size", "_to_end", "path")

    def __init__(self, path: Path | str, absent_remedy: str = "", *, to_end: bool = False) -> None:
        self.path = str(path)
        self._remedy = absent_remedy
        self._to_end = to_end
        self._size = _FIRST_BYTES
        self._fd = -1
        self._fd = self._open()

    def read(self) -> bytes:
        """Return the whole file as it is now."""
        try:
            data = os.pread(self._fd, self._size, 0)
            if self._to_end or len(data) > _SURELY_WHOLE:
                return self._rest(data)
            return data
        except OSError as error:
            if error.errno not in _REOPEN:
                raise unavailable_from_os_error(error, self.path, self._remedy) from None
        self.close()
        self._fd = self._open()
        try:
            return self._rest(os.pread(self._fd, self._size, 0))
        except OSError as error:
            raise unavailable_from_os_error(error, self.path, self._remedy) from None

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unavailable_from_os_error(error, self.path, self._remedy) from None

    def __del__(self) -> None:
        self.close()  # a collector whose open() failed half-way is never closed

    def _rest(self, data: bytes) -> bytes:
        """Read on until the kernel says that there is nothing more."""
        chunks = [data]
        length = len(data)
        while data:
            data = os.pread(self._fd, self._size, length)
            chunks.append(data)
            length += len(data)
        if length >= self._size:
            self._size = 2 * length  # next time in one call, where the kernel allows it
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


def hold(path: Path | str, absent_remedy: str = "") -> HeldFile | MissingFile:
    """Open a file, or keep the reason why it could not be opened for whoever reads it."""
    try:
        return HeldFile(path, absent_remedy)
    except Unavailable as reason:
        return MissingFile(reason)


def read_once(path: Path | str, absent_remedy: str = "") -> bytes:
    """Open, read whole and close a file that is not worth holding; may raise `Unavailable`."""
    held = HeldFile(path, absent_remedy, to_end=True)
    try:
        return held.read()
    finally:
        held.close()
