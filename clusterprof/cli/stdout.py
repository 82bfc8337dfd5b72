"""Write to a stdout that may be full, closed or broken."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from clusterprof.errors import OutputFailed
from clusterprof.util.atomic_file import WRITE_ERRNOS, convert_write_error


def write_stdout(text: str) -> None:
    """Write to stdout; characters its encoding lacks are escaped.

    Raises: OutputFailed when stdout is closed or cannot be written.
    """
    if sys.stdout is None:
        raise OutputFailed("cannot write to stdout: it is closed")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise convert_write_error("to stdout", error) from None


def write_pending_stdout() -> None:
    """Flush stdout.

    Raises: OutputFailed when the data cannot be written.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise convert_write_error("to stdout", error) from None


def close_stdout() -> None:
    """Redirect stdout to the null device, since a flush at exit would fail again with a
    traceback.
    """
    if sys.stdout is None:
        return
    with suppress(OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        os.close(null_device)


def is_stdout_error(error: OSError) -> bool:
    """Return whether an error names no file and means that a disk is full or fails."""
    return error.filename is None and error.errno in WRITE_ERRNOS
