"""A stdout that may be full, closed or gone."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from clusterprof.errors import OutputFailed
from clusterprof.wholefile import LATER, failed


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
        raise failed("to stdout", error) from None


def flush_stdout() -> None:
    """Send what was written on its way; raises OutputFailed when it does not get there."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise failed("to stdout", error) from None


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
    return error.filename is None and error.errno in LATER
