"""Create and list the segments of one node's recording: 000001.cpf, 000002.cpf … in a
private folder.

Every path is opened relative to a descriptor of the folder and never through a link, so
that another user with write access nearby cannot redirect the recording.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from clusterprof.errors import CannotStart

SUFFIX = ".cpf"
PRIVATE_MODE = 0o700
"""Mode of a folder that only its owner may use."""
_OTHER_FOLDER_HINT = "give another output folder"
_NAME = re.compile(r"[0-9]{6,9}\.cpf")


def is_segment(name: str) -> bool:
    """Return whether a file name is that of a segment."""
    return _NAME.fullmatch(name) is not None


def format_segment_name(number: int) -> str:
    """Return the file name of the segment with this number, from 1."""
    return f"{number:06d}{SUFFIX}"


class SegmentFolder:
    """An open folder of segments: creates the next, removes the oldest, and counts bytes."""

    def __init__(self, path: Path, mode: int = PRIVATE_MODE) -> None:
        """Create or open the folder.

        mode: of the folder; segments have it without the right to execute.
        Raises: CannotStart when it cannot be created, or is open to more users than `mode` says.
        """
        self._fd = _open_folder(path, mode)
        self._file_mode = mode & 0o666
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
        """Create the next segment and return its name and descriptor.

        Raises: OSError when it cannot be created.
        """
        name = format_segment_name(self._number + 1)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, self._file_mode, dir_fd=self._fd)
        except FileExistsError:
            self._number += 1  # the file is another writer's; the next attempt takes the next name
            raise
        self._number += 1
        self._sizes[name] = 0
        return name, descriptor

    def set_size(self, name: str, size: int) -> None:
        """Record the size of a segment."""
        self._sizes[name] = size

    def remove(self, name: str) -> None:
        """Remove a segment; one that is already gone counts as removed."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        del self._sizes[name]
        if name == format_segment_name(self._number):
            self._number -= 1  # the segment was not used: the next one may take its name

    def drop_oldest(self) -> tuple[str, int] | None:
        """Remove the oldest segment; return its name and size, or None when there is none."""
        for name, size in self._sizes.items():
            self.remove(name)
            return name, size
        return None

    def free_bytes(self) -> int:
        """Return the bytes an ordinary user may still write to this file system.

        Raises: OSError when they cannot be read.
        """
        filesystem = os.fstatvfs(self._fd)
        return filesystem.f_bavail * filesystem.f_frsize

    def keep_free_bytes(self) -> int:
        """Return how much space to leave free on the file system: 1 GiB or 5 %, at most a
        quarter."""
        try:
            filesystem = os.fstatvfs(self._fd)
        except OSError:
            return 1 << 30
        size = filesystem.f_blocks * filesystem.f_frsize
        return min(max(1 << 30, size // 20), size // 4)

    def close(self) -> None:
        """Release the folder."""
        os.close(self._fd)


def _open_folder(path: Path, mode: int) -> int:
    """Open a folder of ours, creating it and its parents when they do not exist."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_private_parent(path.parent)
        try:
            os.mkdir(path, mode)
        except FileExistsError:
            pass
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CannotStart(
                f"{path}: is a symbolic link or a file", _OTHER_FOLDER_HINT
            ) from error
        raise CannotStart(f"{path}: {error.strerror}", _OTHER_FOLDER_HINT) from error
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 & ~mode:
        os.close(descriptor)
        raise CannotStart(
            f"{path}: exists, and is open to other users",
            "give another output folder, or chmod 0700 and chown it",
        )
    return descriptor


def _require_private_parent(parent: Path) -> None:
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CannotStart(
            f"{parent}: every user may replace files in this folder",
            "give a folder that others cannot write to, or set its sticky bit",
        )
