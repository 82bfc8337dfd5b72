"""Create and list the segments of one node's recording: 000001.cpf, 000002.cpf … in a
private folder.

SHA256SUMS beside them has the digest of each segment that the recorder has closed, in the format
of `sha256sum`. It is written once per segment and never read by the recorder, so a segment that
was changed later no longer agrees with it.

Every path is opened relative to a descriptor of the folder and never through a link, so
that another user with write access nearby cannot redirect the recording.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from clusterprof.errors import CannotStart
from clusterprof.trace.remote import RemotePath

SUFFIX = ".cpf"
DIGESTS_FILE = "SHA256SUMS"
PRIVATE_MODE = 0o700
"""Mode of a folder that only its owner may use."""
_OTHER_FOLDER_HINT = "give another output folder"
_NAME = re.compile(r"[0-9]{6,9}\.cpf")
_DIGEST_LINE = re.compile(rb"([0-9a-f]{64})  ([0-9]{6,9}\.cpf)")
_MAX_DIGESTS_BYTES = 8 << 20
"""About 100,000 segments; what follows in a larger file is not read."""


def is_segment(name: str) -> bool:
    """Return whether a file name is that of a segment."""
    return _NAME.fullmatch(name) is not None


def format_segment_name(number: int) -> str:
    """Return the file name of the segment with this number, from 1."""
    return f"{number:06d}{SUFFIX}"


def list_names(folder: Path) -> list[str]:
    """List the names in a folder in order.

    Raises: OSError when it cannot be listed.
    """
    if isinstance(folder, RemotePath):
        return [path.name for path in folder.iterdir()]
    return sorted(os.listdir(folder))


def list_segments(folder: Path) -> list[Path]:
    """List the segments of a node in numeric order; [] when the folder has none."""
    try:
        if isinstance(folder, RemotePath):
            names = [name for name in list_names(folder) if is_segment(name)]
        else:
            entries = [entry for entry in os.scandir(folder) if is_segment(entry.name)]
            names = [entry.name for entry in entries if entry.is_file()]
    except OSError:
        return []
    return [folder / name for name in sort_segments(names)]


def sort_segments(names: Iterable[str]) -> list[str]:
    """Sort the names of segments by number."""
    return sorted(names, key=lambda name: (len(name), name))


def read_digests(folder: Path) -> dict[str, str]:
    """Read the SHA-256 of each closed segment by its name; {} when the folder lists none."""
    path = folder / DIGESTS_FILE
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            lines = file.read(_MAX_DIGESTS_BYTES).split(b"\n")
    except OSError:
        return {}
    # a line that a full disk cut off lists nothing
    whole = [match for match in map(_DIGEST_LINE.fullmatch, lines) if match is not None]
    return {match[2].decode(): match[1].decode() for match in whole}


def find_missing_segments(digests: Collection[str], names: Sequence[str]) -> list[str]:
    """Find the listed segments that are gone, though older ones are there.

    The size limit removes the oldest ones, so those before the first are not missed.
    """
    listed = sort_segments({*digests, *names})
    first = listed.index(names[0]) if names else len(listed)
    present = set(names)
    return [name for name in listed[first:] if name not in present]


def merge_segments(folders: Sequence[Path]) -> list[Path]:
    """Replace several segments of one folder by the folder; `run/*/*.cpf` names them one by
    one.
    """
    parents = Counter(folder.parent for folder in folders if is_segment(folder.name))
    out: list[Path] = []
    for folder in folders:
        if is_segment(folder.name) and parents[folder.parent] > 1:
            folder = folder.parent
        if folder not in out:
            out.append(folder)
    return out


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
        for name in sort_segments(filter(is_segment, os.listdir(self._fd))):
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

    def append_digest(self, name: str, digest: str) -> None:
        """List the SHA-256 of a closed segment; when that fails, the segment stays unlisted."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(DIGESTS_FILE, flags | os.O_NONBLOCK, self._file_mode, dir_fd=self._fd)
        except OSError:
            return
        with suppress(OSError):
            os.write(file, f"{digest}  {name}\n".encode())
        with suppress(OSError):
            os.close(file)

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
