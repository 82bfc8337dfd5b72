"""docs/commands.md: every command with its arguments and options, from the command files."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

PAGE = "docs/commands.md"
_HEAD = """# Commands

`clusterprof COMMAND --help` prints the same. Results go to stdout, everything else to stderr; what
exit codes mean stands in the [README](../README.md#exit-codes).
"""
_WORDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Asked:
    """An argument or option of a command."""

    names: tuple[str, ...]
    """Of an argument: its word in the usage line."""
    is_argument: bool
    is_flag: bool
    word: str
    """What stands behind an option."""
    default: str
    """"" when there is none to print."""
    help: str


def command_page(mark: str) -> str:
    """Return the page of all commands, in the order of `clusterprof --help`."""
    from clusterprof.cli.commands import COMMANDS

    parts = [mark + _HEAD]
    for name, command in COMMANDS.items():
        asked = list(asked_by(command))
        usage = [item.names[0] for item in asked if item.is_argument]
        parts.append(f"## {name}\n\n{' '.join((command.__doc__ or '').split())}\n")
        parts.append("    " + " ".join(["clusterprof", name, "[OPTIONS]", *usage]) + "\n")
        rows = ["| | default | meaning |", "|---|---|---|", *map(_row, asked)]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def asked_by(command: Callable[..., Any]) -> Iterator[Asked]:
    """Yield what a command file declares, in its order."""
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, info = typing.get_args(hints[name])[:2]
        required = parameter.default is inspect.Parameter.empty
        if isinstance(info, typer.models.ArgumentInfo):
            word = str(info.metavar or name.upper())
            shown = word if required or word.startswith("[") else f"[{word}]"
            yield Asked((shown,), True, False, "", "", info.help or "")
            continue
        flag = kind is bool
        # typer takes the first name that is given for a default, until it builds the command
        given = (info.default, *(info.param_decls or ()))
        names = tuple(item for item in given if isinstance(item, str)) or _spelled(name, flag)
        word = "" if flag else str(info.metavar or _WORDS.get(_bare(kind), "VALUE"))
        yield Asked(names, False, flag, word, _default(parameter, flag), info.help or "")


def _spelled(name: str, flag: bool) -> tuple[str, ...]:
    dashed = name.rstrip("_").replace("_", "-")
    return (f"--{dashed}", f"--no-{dashed}") if flag else (f"--{dashed}",)


def _bare(kind: Any) -> Any:
    """What one value is: of `Optional[Path]` and `list[Path]` a Path."""
    inner = [arg for arg in typing.get_args(kind) if arg is not types.NoneType]
    return _bare(inner[0]) if inner else kind


def _default(parameter: inspect.Parameter, flag: bool) -> str:
    value = parameter.default
    empty = value is inspect.Parameter.empty or value is None or value in ("", [], (), 0)
    return "" if empty or (flag and not value) else "on" if flag else str(value)


def _row(option: Asked) -> str:
    names = ", ".join(f"`{name}`" for name in option.names)
    if option.word:
        names = f"{names[:-1]} {option.word}`"
    return "| " + " | ".join(map(_cell, (names, option.default, option.help))) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
