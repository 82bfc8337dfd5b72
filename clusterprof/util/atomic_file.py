"""Write files atomically: into a temporary file in the same folder, renamed at the end.

with open_replacement(Path("report.html")) as file:
    file.write(b"...")      # report.html is unchanged until this block succeeds
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from clusterprof.errors import ClusterprofError, OutputFailed, UsageError

WRITE_ERRNOS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE))
"""errno values that mean the path was valid but the data did not fit or was lost while
writing.
"""


@contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block succeeds, and is removed when it fails.

    It is written to a temporary name and renamed, so that readers never see half of it.
    Devices, pipes, and files in folders without write permission are written in place.
    Raises: UsageError for a path that cannot be written, OutputFailed when the disk is full
    or fails.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        mode = _read_mode(target)
        temporary = _create_temporary(target) if mode is None or stat.S_ISREG(mode) else None
        if temporary is None:
            with open(target, "wb") as file:
                yield file
            return
        try:
            with temporary[1] as file:
                if mode is not None:
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
                yield file
            os.replace(temporary[0], target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary[0])
            raise
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise convert_write_error(str(path), error) from None


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file, or raise and leave the old content; see open_replacement.

    Raises: UsageError or OutputFailed when the file cannot be written.
    """
    with open_replacement(path) as file:
        file.write(data)


def convert_write_error(where: str, error: OSError | ValueError) -> ClusterprofError:
    """Return the exception to raise for a system error while writing `where`."""
    number = error.errno if isinstance(error, OSError) else None
    reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
    message = f"cannot write {where}: {reason}"
    if number in WRITE_ERRNOS or where == "to stdout":
        return OutputFailed(message)
    return UsageError(message)


def _read_mode(target: Path) -> int | None:
    try:
        return os.stat(target).st_mode
    except FileNotFoundError:
        return None


def _create_temporary(target: Path) -> tuple[Path, BinaryIO] | None:
    """Create a file next to the target; None where the folder takes no new ones."""
    path = target.with_name(f".{target.name[:200]}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)  # left by a killed process that had this pid
        return path, os.fdopen(os.open(path, flags, 0o666), "wb")
    except PermissionError:
        if not target.exists():
            raise
        return None
