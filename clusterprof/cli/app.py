"""Convert errors to messages and exit codes, in this one place; write to a stdout that may be
full, closed or broken.

`record` is parsed without typer: every rank of a job runs it, and typer alone costs 0.3
s of CPU. So is `analyze` for usual command lines. All other commands, and every help
text, are in cli.commands.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from clusterprof.errors import EXIT_CRASH, EXIT_OK, ClusterprofError, OutputFailed
from clusterprof.util.atomic_file import WRITE_ERRNOS, convert_write_error

EXIT_INTERRUPTED = 130
_COMMANDS_WITHOUT_JOB = frozenset({"analyze", "gate", "compare", "export", "fleet", "collect"})


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run_command(words)
        write_pending_stdout()
        return code if isinstance(code, int) else EXIT_OK
    except ClusterprofError as error:
        if isinstance(error, OutputFailed):
            close_stdout()
        _print_error(error.message, error.remedy)
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader has exited (`| head`); nothing may be written at exit either
        close_stdout()
        return EXIT_CRASH
    except OSError as error:
        if not is_stdout_error(error):
            raise
        close_stdout()  # typer printed the help to a disk that is full
        _print_error(f"cannot write to stdout: {(error.strerror or '').lower()}")
        return EXIT_CRASH


def _run_command(words: list[str]) -> object:
    if words[:1] == ["record"]:
        from clusterprof.agent.options import parse_record_arguments

        options = parse_record_arguments(words[1:])
        if options is not None:
            from clusterprof.cli import recording

            recording.run_record(options)
    if words and words[0] in _COMMANDS_WITHOUT_JOB:
        # OpenBLAS starts a thread for every core, each of which busy-waits for a while, and no
        # matrices are multiplied here; a job's own processes must not inherit this setting
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if words[:1] == ["analyze"]:
        from clusterprof.cli import runs

        arguments = runs.parse_plain_arguments(words[1:])
        if arguments is not None:
            runs.run_analysis(**arguments)
            return EXIT_OK
    from clusterprof.cli import commands

    return commands.run_command(words)


def _print_error(message: str, remedy: str = "") -> None:
    from clusterprof.cli.common import print_error

    print_error(message, remedy)


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
