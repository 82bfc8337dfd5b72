"""The options of a recording: of `clusterprof record` and of `python -m clusterprof.agent`.

Both read them with argparse: what a command line needs to be pretty costs each rank of a job 0.3 s
of CPU time. Whatever cannot be meant is a `UsageError` that names the nearest option.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from clusterprof.errors import UsageError


class Option(NamedTuple):
    """One option that takes a value."""

    flags: tuple[str, ...]
    metavar: str
    help: str
    type: Callable[[str], Any] = str


OUT = Option(("-o", "--out"), "DIR", "Default: clusterprof-out/<job>.", Path)
PROFILE = Option(("--profile",), "NAME", "Profile: a shipped one by name, or a file.")
DURATION = Option(("--duration",), "TIME", "Stop recording after this time (90s, 10m, 2h).")
HZ = Option(("--hz",), "N", "Samples per second; slow sources keep their own rate.", float)
INJECT = Option(("--inject",), "auto|off|strict", "Whether Pythons of the job report spans.")
PID = Option(("--pid",), "PID", "Attach to a running process (no spans).", int)
KEEP_FREE = Option(("--keep-free",), "SIZE", "Pause writing when less disk than this is left.")

OF_RECORD = (OUT, PROFILE, DURATION, HZ, INJECT, PID, KEEP_FREE)
GPU_EVENTS = ("--gpu-events", "--no-gpu-events")
HELP = ("-h", "--help")


class Parser(argparse.ArgumentParser):
    """An argparse that raises `UsageError`, and knows the nearest option to a mistyped one."""

    def __init__(self, prog: str, **more: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **more)

    def take(self, option: Option) -> None:
        """Add an option of the definitions above."""
        self.add_argument(*option.flags, metavar=option.metavar, help=option.help, type=option.type)

    def read(self, words: Sequence[str] | None) -> argparse.Namespace:
        """Return the values; raise `UsageError` for what is unknown or no value."""
        values, unknown = self.parse_known_args(words)
        if unknown:
            raise self.no_such(unknown[0])
        return values

    def no_such(self, word: str) -> UsageError:
        """Return the error that says which option is the nearest."""
        if not word.startswith("-"):
            return UsageError(f"unexpected argument: {word!r}", self._see())
        name = word.partition("=")[0]
        return UsageError(f"no such option: {name}{nearest(name, self._known())}", self._see())

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving."""
        raise UsageError(message, self._see())

    def _known(self) -> list[str]:
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [flag for action in shown for flag in action.option_strings]

    def _see(self) -> str:
        return f"see: {self.prog} --help"


class Asked(NamedTuple):
    """What a command line of `record` asks for; None = not said."""

    command: Sequence[str]
    out: Path | None = None
    profile: str | None = None
    duration: str | None = None
    hz: float | None = None
    inject: str = "auto"
    pid: int | None = None
    gpu_events: bool = True
    keep_free: str | None = None


def read_record(words: Sequence[str]) -> Asked | None:
    """Return what the words after `record` ask for, None when it is help.

    The first word that is no option begins the command, which is handed over as it stands.
    """
    parser = Parser("clusterprof record", add_help=False)
    for option in OF_RECORD:
        parser.take(option)
    parser.add_argument("--gpu-events", action=argparse.BooleanOptionalAction, default=True)
    parser.set_defaults(inject="auto")
    options, command = _split(words)
    if options is None:
        return None
    return Asked(command, **vars(parser.read(options)))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean …?' when a known word is close, else ''."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _split(words: Sequence[str]) -> tuple[list[str] | None, Sequence[str]]:
    """Return the options as `--name=value`, and the command; (None, ()) when help is asked for."""
    long = {flag: option.flags[-1] for option in OF_RECORD for flag in option.flags}
    options: list[str] = []
    rest = list(words)
    while rest:
        word = rest[0]
        if word == "--":
            return options, rest[1:]
        if word in HELP:
            return None, ()
        if not word.startswith("-") or word == "-":
            break
        del rest[0]
        if word in long:
            if not rest:
                raise UsageError(f"option {word} needs a value", "see: clusterprof record --help")
            # `-o -x` names a folder "-x": joined, argparse does not take it for an option
            options.append(f"{long[word]}={rest.pop(0)}")
        else:
            options.append(word)
    return options, rest
