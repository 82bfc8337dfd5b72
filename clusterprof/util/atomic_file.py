"""Files that are whole or as they were: written beside their name, renamed at the end.

with replacing(Path("report.html")) as file:
    file.write(b"...")                 # report.html is what it was until this ends well
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

LATER = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE))
"""The path was well chosen, and what was to be written did not fit or was lost on its way."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file that takes the place of `path` when the block ends well, and vanishes when not.

    Written beside it and renamed, so that nobody ever sees half of it. Devices, pipes, and files in
    folders that take no new ones are written in place. Raises UsageError for a path that cannot be
    written, OutputFailed when the disk is full or fails.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        mode = _mode(target)
        beside = _beside(target) if mode is None or stat.S_ISREG(mode) else None
        if beside is None:
            with open(target, "wb") as file:
                yield file
            return
        try:
            with beside[1] as file:
                if mode is not None:
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
                yield file
            os.replace(beside[0], target)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside[0])
            raise
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise failed(str(path), error) from None


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file, or raise and leave what was there; see `replacing`."""
    with replacing(path) as file:
        file.write(data)


def failed(where: str, error: OSError | ValueError) -> ClusterprofError:
    """Return what to raise for an error of the system: `where` could not be written."""
    number = error.errno if isinstance(error, OSError) else None
    reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
    message = f"cannot write {where}: {reason}"
    if number in LATER or where == "to stdout":
        return OutputFailed(message)
    return UsageError(message)


def _mode(target: Path) -> int | None:
    try:
        return os.stat(target).st_mode
    except FileNotFoundError:
        return None


def _beside(target: Path) -> tuple[Path, BinaryIO] | None:
    """Create a file next to the target; None where the folder takes no new ones."""
    beside = target.with_name(f".{target.name[:200]}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with suppress(FileNotFoundError):
            os.unlink(beside)  # left by a process that was killed, and had our number
        return beside, os.fdopen(os.open(beside, flags, 0o666), "wb")
    except PermissionError:
        if not target.exists():
            raise
        return None
