"""The one place where errors become messages and exit codes.

`record` is read without typer: every rank of a job runs it, and typer alone costs 0.3 s of CPU.
All other commands, and every help, are in commands.py.
"""

from __future__ import annotations

import os
import sys

from clusterprof.errors import EXIT_CRASH, EXIT_OK, ClusterprofError

EXIT_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(words)
        sys.stdout.flush()
        return code if isinstance(code, int) else EXIT_OK
    except ClusterprofError as error:
        _print_error(error.message, error.remedy)
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader went away (`| head`); nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CRASH


def _run(words: list[str]) -> object:
    if words[:1] == ["record"]:
        from clusterprof.recorder.options import read_record

        asked = read_record(words[1:])
        if asked is not None:
            from clusterprof.cli import recording

            recording.run(asked)
    from clusterprof.cli import commands

    return commands.run(words)


def _print_error(message: str, remedy: str = "") -> None:
    from clusterprof.cli.common import print_error

    print_error(message, remedy)
