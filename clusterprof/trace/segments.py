"""The files of one node's recording: 000001.cpf, 000002.cpf … in a folder that only we can read.

Every path is opened relative to a descriptor of the folder and never through a link, so that
nobody who may write beside us can make us write elsewhere.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from clusterprof.errors import CannotStart

SUFFIX = ".cpf"
_ELSEWHERE = "give another output folder"
_NAME = re.compile(r"[0-9]{6,9}\.cpf")


def is_segment(name: str) -> bool:
    """Say whether a file name is that of a segment."""
    return _NAME.fullmatch(name) is not None


def segment_name(number: int) -> str:
    """Return the file name of the segment with this number, from 1."""
    return f"{number:06d}{SUFFIX}"


class SegmentFolder:
    """An opened folder of segments: creates the next, drops the oldest, knows the total."""

    def __init__(self, path: Path) -> None:
        """Create or open the folder; raise CannotStart when it is not safely ours."""
        self._fd = _open_folder(path)
        self._path = path
        self._sizes: dict[str, int] = {}
        for name in sorted(os.listdir(self._fd), key=lambda name: (len(name), name)):
            if is_segment(name):
                self._sizes[name] = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_size
        self._number = max((int(name.removesuffix(SUFFIX)) for name in self._sizes), default=0)

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments, the one being written included."""
        return sum(self._sizes.values())

    def create(self) -> tuple[str, int]:
        """Create the next segment and return its name and descriptor; raises OSError."""
        name = segment_name(self._number + 1)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, 0o600, dir_fd=self._fd)
        except FileExistsError:
            self._number += 1  # whoever made it may keep it; the next try takes the next name
            raise
        self._number += 1
        self._sizes[name] = 0
        return name, descriptor

    def grew(self, name: str, size: int) -> None:
        """Note the size of a segment."""
        self._sizes[name] = size

    def remove(self, name: str) -> None:
        """Unlink a segment; one that somebody else removed is as good as removed."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        del self._sizes[name]
        if name == segment_name(self._number):
            self._number -= 1  # it came to nothing: the next one may have its name

    def drop_oldest(self) -> tuple[str, int] | None:
        """Remove the oldest segment; return its name and size, or None when there is none."""
        for name, size in self._sizes.items():
            self.remove(name)
            return name, size
        return None

    def free_bytes(self) -> int:
        """Bytes an ordinary user may still write to this file system; raises OSError."""
        room = os.fstatvfs(self._fd)
        return room.f_bavail * room.f_frsize

    def keep_free_bytes(self) -> int:
        """Return what a good neighbour leaves free: 1 GiB or 5 %, at most a quarter."""
        try:
            room = os.fstatvfs(self._fd)
        except OSError:
            return 1 << 30
        size = room.f_blocks * room.f_frsize
        return min(max(1 << 30, size // 20), size // 4)

    def close(self) -> None:
        """Release the folder."""
        os.close(self._fd)


def _open_folder(path: Path) -> int:
    """Open a folder that is ours alone, creating it and its parents when they do not exist."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_shared_parent(path.parent)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CannotStart(f"{path}: is a link or a file", _ELSEWHERE) from error
        raise CannotStart(f"{path}: {error.strerror}", _ELSEWHERE) from error
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise CannotStart(
            f"{path}: exists, and is open to other users",
            "give another output folder, or chmod 0700 and chown it",
        )
    return descriptor


def _refuse_shared_parent(parent: Path) -> None:
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CannotStart(
            f"{parent}: every user may replace what is in it",
            "give a folder that others cannot write to, or set its sticky bit",
        )
