"""Read which functions a line of a Python file calls, and whether it polls.

    42    total += loss.item()          "loss.item"
    50    while not os.path.exists(path):
    51        time.sleep(0.01)          "time.sleep", polls for something that others do
    60    while time.time() < end:
    61        time.sleep(0.01)          "time.sleep", waits for a time

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
IN_POLL = " in a poll"
"""End of the name of a sleep in a loop that only waits for others: the sleep costs nothing."""
_SLEEPS = frozenset({"sleep", "sched_yield"})
_CLOCKS = frozenset({"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "now"})


@dataclass(frozen=True, slots=True)
class _Source:
    """Calls and functions of a file: first line, last line and name of each."""

    calls: tuple[tuple[int, int, str], ...] = ()
    functions: tuple[tuple[int, int, str], ...] = ()
    polls: tuple[tuple[int, int], ...] = ()
    """First and last line of each loop that only waits until others have done something."""
    lines: int = 0
    """Number of lines; 0 if the file could not be read."""

    def list_calls(self, line: int, function: str) -> tuple[str, ...]:
        """List the calls on a line, if the innermost function around it has this name."""
        if not self.has_line(line, function):
            return ()
        polls = any(first <= line <= last for first, last in self.polls)
        calls = [
            f"{name}{IN_POLL}" if polls and name.rpartition(".")[2] in _SLEEPS else name
            for first, last, name in self.calls
            if first <= line <= last
        ]
        return tuple(calls[:_MAX_CALLS])

    def has_line(self, line: int, function: str) -> bool:
        """Return whether a line is in a function with this name, the innermost around it."""
        around = [(first, name) for first, last, name in self.functions if first <= line <= last]
        return max(around, default=(0, "<module>"))[1] == function


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
            name = function.rpartition(".")[2]
            self._lines[key] = self._read(path).list_calls(line, name)
        return self._lines[key]

    def is_in_poll(self, path: str, line: int, function: str) -> bool | None:
        """Return whether a line is in a loop that only waits for others; None if it is not known.

        function: qualified or plain name of the function around it.
        """
        source = self._read(path)
        if not source.lines or not source.has_line(line, function.rpartition(".")[2]):
            return None
        return any(first <= line <= last for first, last in source.polls)

    def _read(self, path: str) -> _Source:
        if path not in self._sources:
            is_full = len(self._sources) >= MAX_FILES
            self._sources[path] = _Source() if is_full else _read_source(path, self.before_ns)
        return self._sources[path]


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
    calls, functions, polls = [], [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.append((node.lineno, node.end_lineno or 0, _name_callee(node.func)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.lineno, node.end_lineno or 0, node.name))
        elif isinstance(node, ast.While) and _is_poll(node):
            polls.append((node.lineno, node.end_lineno or 0))
    lines = text.count(b"\n") + 1
    return _Source(tuple(calls), tuple(functions), tuple(polls), lines)


def _is_poll(loop: ast.While) -> bool:
    """Return whether a loop does nothing until a condition holds that is no time of a clock."""
    exits: list[ast.AST] = [] if isinstance(loop.test, ast.Constant) else [loop.test]
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and _ends_loop(node.body + node.orelse):
            exits.append(node.test)
        elif isinstance(node, ast.Try) and _ends_loop(node.body):  # tried until it succeeds
            exits += [item for item in node.body if not isinstance(item, ast.Break)]
    names = {node.id for end in exits for node in ast.walk(end) if isinstance(node, ast.Name)}
    counted = {
        node.target.id
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    return any(_asks_others(end, counted) for end in exits) and all(
        _is_idle(item, names) for item in loop.body
    )


def _asks_others(condition: ast.AST, counted: set[str]) -> bool:
    """Return whether others can fulfill a condition: it asks no clock, and is no count of the loop.

    counted: variables that the loop itself counts.
    """
    nodes = list(ast.walk(condition))
    if _CLOCKS & set(_list_called_names(condition)):
        return False
    if any(isinstance(node, ast.Call | ast.Attribute | ast.Subscript) for node in nodes):
        return True
    return not any(isinstance(node, ast.Name) and node.id in counted for node in nodes)


def _ends_loop(body: list[ast.stmt]) -> bool:
    return any(isinstance(item, ast.Break | ast.Return) for item in body)


def _is_idle(item: ast.stmt, names: set[str]) -> bool:
    """Return whether a statement of a loop only sleeps, or looks whether the loop may end.

    names: variables in the conditions on which it ends.
    """
    match item:
        case ast.Pass() | ast.Continue() | ast.Break() | ast.Return() | ast.Raise():
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return _name_callee(function).rpartition(".")[2] in _SLEEPS
        case ast.Assign(targets=targets):
            assigned_names = {node.id for node in targets if isinstance(node, ast.Name)}
            return bool(assigned_names & names) or not _list_called_names(item)
        case ast.AugAssign():
            return not _list_called_names(item)
        case ast.If(body=body, orelse=other):
            return all(_is_idle(inner, names) for inner in body + other)
        case ast.Try(body=body, handlers=handlers, orelse=other):
            inside = [*body, *other, *(inner for handler in handlers for inner in handler.body)]
            return all(_is_idle(inner, names) for inner in inside)
    return False


def _list_called_names(tree: ast.AST) -> list[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [_name_callee(function).rpartition(".")[2] for function in calls]


def _name_callee(node: ast.expr) -> str:
    """Return the name of what is called: "loss.item", "().item" of the result of a call."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "()")
    return ".".join(parts[::-1])
