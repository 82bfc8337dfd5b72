"""The one place where errors become messages and exit codes.

`record` is read without typer: every rank of a job runs it, and typer alone costs 0.3 s of CPU.
So is `analyze` where nothing is unusual about its words. All other commands, and every help, are
in commands.py.
"""

from __future__ import annotations

import os
import sys

from clusterprof.cli.output import flush_stdout, give_up_stdout, is_of_stdout
from clusterprof.errors import EXIT_CRASH, EXIT_OK, ClusterprofError, OutputFailed

EXIT_INTERRUPTED = 130
_START_NO_PROGRAM = frozenset({"analyze", "gate", "compare", "export"})


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(words)
        flush_stdout()
        return code if isinstance(code, int) else EXIT_OK
    except ClusterprofError as error:
        if isinstance(error, OutputFailed):
            give_up_stdout()
        _print_error(error.message, error.remedy)
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader went away (`| head`); nothing may be written at exit either
        give_up_stdout()
        return EXIT_CRASH
    except OSError as error:
        if not is_of_stdout(error):
            raise
        give_up_stdout()  # the help was printed by typer, to a disk that is full
        _print_error(f"cannot write to stdout: {(error.strerror or '').lower()}")
        return EXIT_CRASH


def _run(words: list[str]) -> object:
    if words[:1] == ["record"]:
        from clusterprof.recorder.options import read_record

        asked = read_record(words[1:])
        if asked is not None:
            from clusterprof.cli import recording

            recording.run(asked)
    if words and words[0] in _START_NO_PROGRAM:
        # numpy's library of matrices starts a thread for every core, each of which spins for a
        # while, and nothing here multiplies any; a job's own processes must not be told this
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if words[:1] == ["analyze"]:
        from clusterprof.cli import analysing

        plain = analysing.asked_plainly(words[1:])
        if plain is not None:
            analysing.run(**plain)
            return EXIT_OK
    from clusterprof.cli import commands

    return commands.run(words)


def _print_error(message: str, remedy: str = "") -> None:
    from clusterprof.cli.common import print_error

    print_error(message, remedy)
