"""Read which functions a line of a Python file calls.

    42    total += loss.item()          "loss.item"

Built-in functions have no Python frame, so a sampled stack ends with the line that called them. The
path comes from a recording and is not trusted: only regular files of limited size are read, only if
they are older than the recording and the line is in the function that was sampled.
"""

from __future__ import annotations

import ast
import os
import stat
import warnings
from dataclasses import dataclass, field

MAX_FILE_BYTES = 1 << 20
MAX_FILES = 32
_MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class _Source:
    """Calls and functions of a file: first line, last line and name of each."""

    calls: tuple[tuple[int, int, str], ...] = ()
    functions: tuple[tuple[int, int, str], ...] = ()

    def list_calls(self, line: int, function: str) -> tuple[str, ...]:
        """List the calls on a line, if the innermost function around it has this name."""
        around = [(first, name) for first, last, name in self.functions if first <= line <= last]
        if max(around, default=(0, "<module>"))[1] != function:
            return ()
        calls = [name for first, last, name in self.calls if first <= line <= last]
        return tuple(calls[:_MAX_CALLS])


@dataclass
class SourceReader:
    """Reads the calls of source lines; each file once."""

    before_ns: int
    """Files changed after this instant (ns since 1970) are not read."""
    _sources: dict[str, _Source] = field(default_factory=dict)
    _lines: dict[tuple[str, int, str], tuple[str, ...]] = field(default_factory=dict)

    def list_calls(self, path: str, line: int, function: str) -> tuple[str, ...]:
        """List the names of the functions that a line calls ("loss.item"), in order.

        function: qualified or plain name of the function around it. Empty where it cannot be read.
        """
        key = path, line, function
        if key not in self._lines:
            if path not in self._sources:
                is_full = len(self._sources) >= MAX_FILES
                self._sources[path] = _Source() if is_full else _read_source(path, self.before_ns)
            name = function.rpartition(".")[2]
            self._lines[key] = self._sources[path].list_calls(line, name)
        return self._lines[key]


def _read_source(path: str, before_ns: int) -> _Source:
    """Read and parse a Python file; empty if it is none, or not that of the recording."""
    if not os.path.isabs(path) or not path.endswith(".py") or "\0" in path:
        return _Source()
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            is_small = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES
            if not is_small or status.st_mtime_ns >= before_ns:
                return _Source()
            text = os.read(file, MAX_FILE_BYTES)
        finally:
            os.close(file)
        return _parse_source(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return _Source()


def _parse_source(text: bytes) -> _Source:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the file
        tree = ast.parse(text)
    calls, functions = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.append((node.lineno, node.end_lineno or 0, _name_callee(node.func)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.lineno, node.end_lineno or 0, node.name))
    return _Source(tuple(calls), tuple(functions))


def _name_callee(node: ast.expr) -> str:
    """Return the name of what is called: "loss.item", "().item" of the result of a call."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "()")
    return ".".join(parts[::-1])
