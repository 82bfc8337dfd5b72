"""Where results go: a file that is whole or not there, or a stdout that may be full or gone.

with replacing(Path("report.html")) as file:
    file.write(b"...")                 # report.html is what it was until this ends well
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from clusterprof.errors import ClusterprofError, OutputFailed, UsageError

# The path was well chosen, and what was to be written did not fit or was lost on its way.
_LATER = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE))


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
        raise _failed(str(path), error) from None


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file, or raise and leave what was there; see `replacing`."""
    with replacing(path) as file:
        file.write(data)


def write_stdout(text: str) -> None:
    """Write to stdout, letters that its encoding lacks spelled out; raises OutputFailed."""
    if sys.stdout is None:
        raise OutputFailed("cannot write to stdout: it is closed")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _failed("to stdout", error) from None


def flush_stdout() -> None:
    """Send what was written on its way; raises OutputFailed when it does not get there."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _failed("to stdout", error) from None


def give_up_stdout() -> None:
    """Let nothing more be written at exit: it would fail again, and say so in a traceback."""
    if sys.stdout is None:
        return
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def is_of_stdout(error: OSError) -> bool:
    """True for an error that names no file and is one of a disk that is full or fails."""
    return error.filename is None and error.errno in _LATER


def _failed(where: str, error: OSError | ValueError) -> ClusterprofError:
    number = error.errno if isinstance(error, OSError) else None
    reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
    message = f"cannot write {where}: {reason}"
    if number in _LATER or where == "to stdout":
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
