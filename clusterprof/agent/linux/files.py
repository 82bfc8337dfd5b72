"""Read files of the kernel: once, or again and again from a file that stays open.

The mount points of procfs and sysfs are parameters, so that tests can use a fixture folder. Folders
and small files that are read once read as empty when they are missing.

**Files that stay open** are read with `pread`. Opening and closing a file under /proc costs more
than reading it (2.2 times the floor against 1.1; see bench/README.md), so every file that is read
in each tick goes through this module.

The kernel writes some files in one piece (stat, meminfo, netstat, everything in /sys): such a
reading is complete when `pread` returned fewer bytes than requested. It writes others record by
record (diskstats, vmstat, mountstats) and stops before the record that no longer fits its page:
such a reading is complete only if it leaves room for the longest record.
Source: https://docs.kernel.org/filesystems/seq_file.html

**Numbers** in the kernel's "name value" texts are found without splitting the text. A collector
reads the same file repeatedly, and its words rarely move: only when a number before them gains a
digit. Each finder therefore remembers where it found its words and looks there first; a search of 4
KB costs six times as much.

**inotify** reports files that are moved into a folder, without polling. Python has no binding, so
this module calls the C library. Only complete files are reported: those written under another name
and then renamed (IN_MOVED_TO), as every file in a run directory is.
Source: https://man7.org/linux/man-pages/man7/inotify.7.html
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from clusterprof.errors import Unavailable, convert_os_error


@dataclass(frozen=True, slots=True)
class Roots:
    """The mount points of procfs and sysfs."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


def list_folder(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted by name; [] when it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def read_text(path: Path) -> str:
    """Return a file's text without surrounding white space; "" when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def read_int(path: Path) -> int | None:
    """Return the integer in a file; None when the file is missing or holds no integer."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


_FIRST_BYTES = 8192
_PAGE_BYTES = 4096  # the kernel's own buffer is at least one page
LONG_RECORDS = _PAGE_BYTES  # records of any length: read until the kernel returns nothing
_REOPEN = {errno.ESTALE, errno.ENODEV}
Meaning = TypeVar("Meaning")


class OpenFile:
    """One kernel file with an open descriptor; every `read()` returns its current content.

    If the file disappeared and reappeared (ESTALE, ENODEV: a removed cgroup, a remounted file
    system), it is reopened once per read.
    Raises: Unavailable when the file cannot be opened or read.
    """

    __slots__ = ("_fd", "_remedy", "_size", "_whole", "fits_single_read", "path")

    def __init__(
        self, path: Path | str, absent_remedy: str = "", *, longest_record: int = 0
    ) -> None:
        """Open the file at `path`.

        longest_record: bytes of the longest record; 0 for a file that is written in one piece.
        """
        self.path = str(path)
        self._remedy = absent_remedy
        self._size = _FIRST_BYTES
        self._whole = _PAGE_BYTES - longest_record if longest_record else _FIRST_BYTES
        self.fits_single_read = True  # a single `pread` has always returned the whole file
        self._fd = -1
        self._fd = self._open()

    def read(self) -> bytes:
        """Return the whole current content of the file.

        Raises: Unavailable when it cannot be read.
        """
        try:
            data = os.pread(self._fd, self._size, 0)
            return data if len(data) < self._whole else self._rest(data)
        except OSError as error:
            # A missing descriptor means that an earlier reopening failed: try again.
            if error.errno not in _REOPEN and self._fd >= 0:
                raise convert_os_error(error, self.path, self._remedy) from None
        self.close()
        self._fd = self._open()
        try:
            return self._rest(os.pread(self._fd, self._size, 0))
        except OSError as error:
            raise convert_os_error(error, self.path, self._remedy) from None

    @property
    def single_read(self) -> tuple[int, int, int] | None:
        """Arguments of a single complete `pread`: descriptor, bytes, and the incomplete length.

        A reading of the last value or more bytes is not complete. None when the file is not open or
        did not always fit a single `pread`.
        """
        return (
            (self._fd, self._size, self._whole) if self.fits_single_read and self._fd >= 0 else None
        )

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise convert_os_error(error, self.path, self._remedy) from None

    def __del__(self) -> None:
        self.close()  # a collector whose open() failed half-way is never closed

    def _rest(self, data: bytes) -> bytes:
        """Read on until the kernel returns no more data."""
        self.fits_single_read = self.fits_single_read and len(data) < self._whole
        chunks = [data]
        length = len(data)
        while data:
            data = os.pread(self._fd, self._size, length)
            chunks.append(data)
            length += len(data)
        if length >= self._size:  # read in one call next time, where the kernel allows it
            if self._whole == self._size:
                self._whole = 2 * length
            self._size = 2 * length
        return b"".join(chunks)


class MissingFile:
    """Placeholder for a file that could not be opened; every `read()` raises the reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: Unavailable) -> None:
        self.reason = reason

    def read(self) -> bytes:
        """Raise the reason, without the traceback that would grow with every raise.

        Raises: Unavailable always.
        """
        raise self.reason.with_traceback(None)

    def close(self) -> None:
        """Do nothing."""


def open_file(
    path: Path | str, absent_remedy: str = "", *, longest_record: int = 0
) -> OpenFile | MissingFile:
    """Open a kernel file, or return a placeholder that raises the reason on every read.

    longest_record: bytes of the longest record; 0 for a file that is written in one piece.
    """
    try:
        return OpenFile(path, absent_remedy, longest_record=longest_record)
    except Unavailable as reason:
        return MissingFile(reason)


class ParsedFile(Generic[Meaning]):
    """An open file and its last parsed content; unchanged bytes are not parsed again."""

    __slots__ = ("_data", "_meaning", "_parse", "file")

    def __init__(
        self, open_file: OpenFile | MissingFile, parse: Callable[[bytes], Meaning]
    ) -> None:
        self.file = open_file
        self._parse = parse
        self._data: bytes | None = None
        self._meaning: Meaning

    def read(self) -> Meaning:
        """Read and parse the file; raise what reading and parsing raise."""
        return self.parse(self.file.read())

    def parse(self, data: bytes) -> Meaning:
        """Parse bytes that were read earlier; raise what parsing raises."""
        if data != self._data:
            self._meaning = self._parse(data)
            self._data = data
        return self._meaning

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_all_files(files: Sequence[OpenFile | MissingFile]) -> list[bytes | Unavailable]:
    """Return the content of every file, or the reason in place of a file that cannot be read."""
    contents: list[bytes | Unavailable] = []
    for file in files:
        try:
            contents.append(file.read())
        except Unavailable as reason:
            contents.append(reason)
    return contents


class OpenFolder:
    """A folder whose modification time is checked repeatedly through an open descriptor.

    Resolving the path each time costs three times as much, and ten times as much when no part of
    the path is in the processor's caches, as in the first call after a sleep.
    """

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self._fd = -1

    def read_mtime_ns(self) -> int | None:
        """Return when the folder last changed, in ns; None while it does not exist."""
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            status = os.fstat(self._fd)
        except OSError:
            return None
        if not status.st_nlink:  # removed: another folder may take its place
            self.close()
            return None
        return status.st_mtime_ns

    def close(self) -> None:
        """Close the descriptor; the next query opens the folder again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def read_file_once(path: Path | str, absent_remedy: str = "") -> bytes:
    """Open, read completely and close a file that is read too rarely to stay open.

    Raises: Unavailable when it cannot be opened or read.
    """
    file = OpenFile(path, absent_remedy, longest_record=LONG_RECORDS)
    try:
        return file.read()
    finally:
        file.close()


_COMMAS = bytes.maketrans(b" \n", b",,")
_numbers = msgspec.json.Decoder(list[int]).decode


def parse_integers(data: bytes) -> list[int]:
    """Parse integers that are separated and terminated by one space or newline each.

        parse_integers(b"4731093441 92034419 812 ")     [4731093441, 92034419, 812]

    They are decoded as a JSON array, which costs a third of calling int() for each. Raises:
    ValueError for any other text (two spaces, a leading zero, a word).
    """
    try:
        return _numbers(b"[%b]" % data.translate(_COMMAS)[:-1])
    except msgspec.DecodeError as error:
        raise ValueError(f"expected integers separated by single spaces: {data[:80]!r}") from error


class NumberFinder:
    """Finds the integers that follow given words, each word at the beginning of a line.

        find = NumberFinder(b"pswpin ", b"pgmajfault ")
        nr_free 7
        pgmajfault 507162            find(these two lines) returns [None, 507162]

    A word includes everything between it and the number, also spaces. `end` terminates a number: a
    newline, or " kB" in meminfo.
    """

    __slots__ = ("_end", "_places", "_words")

    def __init__(self, *words: bytes, end: bytes = b"\n") -> None:
        self._words = words
        self._end = end
        self._places = [0] * len(words)

    def __call__(self, data: bytes) -> list[int | None]:
        """Return one integer per word, None for a word that is not in the text."""
        values: list[int | None] = []
        places, end = self._places, self._end
        for index, word in enumerate(self._words):
            offset = places[index]
            if not data.startswith(word, offset) or (offset and data[offset - 1] != 10):
                offset = _find_line(data, word)
                if offset < 0:
                    values.append(None)
                    continue
                places[index] = offset
            offset += len(word)
            stop = data.find(end, offset)
            values.append(int(data[offset:] if stop < 0 else data[offset:stop]))
        return values


class ColumnFinder:
    """Finds values of a table that consists of a line of names and a line of values.

        find = ColumnFinder(b"TcpExt: ", b"TCPTimeouts")
        TcpExt: TWKilled TCPTimeouts
        TcpExt: 0 115                find(these two lines) returns [115]

    Both lines begin with the same word; names and values are separated by single spaces.
    """

    __slots__ = ("_at", "_header", "_indices", "_names", "_row")

    def __init__(self, row: bytes, *names: bytes) -> None:
        self._row = row
        self._names = names
        self._at = 0
        self._header = b""
        self._indices: list[int | None] = []

    def __call__(self, data: bytes) -> list[int | None]:
        """Return one integer per name, None for a missing name or a missing table."""
        if not self._header or not data.startswith(self._header, self._at):
            self._learn(data)
            if not self._header:
                return [None] * len(self._names)
        start = self._at + len(self._header)
        stop = data.find(b"\n", start)
        values = (data[start:] if stop < 0 else data[start:stop]).split(b" ")
        return [None if index is None else int(values[index]) for index in self._indices]

    def _learn(self, data: bytes) -> None:
        """Remember the line of names, newline included, and the indices of the wanted names."""
        self._header = b""
        self._at = _find_line(data, self._row)
        if self._at < 0:
            return
        stop = data.find(b"\n", self._at) + 1
        if not stop or not data.startswith(self._row, stop):
            return
        self._header = data[self._at : stop]
        names = self._header.rstrip(b"\n").split(b" ")
        self._indices = [names.index(name) if name in names else None for name in self._names]


def _find_line(data: bytes, word: bytes) -> int:
    """Return the offset of the line that begins with `word`, -1 when there is none."""
    if data.startswith(word):
        return 0
    offset = data.find(b"\n" + word)
    return offset if offset < 0 else offset + 1


_MOVED_TO, _ONLY_FOLDERS = 0x80, 0x0100_0000
_INOTIFY_READ_BYTES = 65536
_INOTIFY_REMEDY = "raise fs.inotify.max_user_instances"


class FolderWatch:
    """A descriptor that is readable while a file has arrived in one of the folders."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Watch folders.

        Raises: Unavailable when the system or its limits do not allow it.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            self.descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            add = libc.inotify_add_watch
        except AttributeError:
            raise Unavailable("absent", "the C library has no inotify", "") from None
        if self.descriptor < 0:
            raise Unavailable(
                "failed", f"inotify: {os.strerror(ctypes.get_errno())}", _INOTIFY_REMEDY
            )
        for folder in folders:
            if add(self.descriptor, os.fsencode(folder), _MOVED_TO | _ONLY_FOLDERS) < 0:
                reason = os.strerror(ctypes.get_errno())
                self.close()
                raise Unavailable("failed", f"inotify: {folder}: {reason}", _INOTIFY_REMEDY)

    def discard_events(self) -> None:
        """Discard the pending events; the caller lists the folders to find the new files."""
        try:
            os.read(self.descriptor, _INOTIFY_READ_BYTES)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
