"""Marks in the text of a change what a reader pastes as it is.

    f"{run('lctl get_param osc.*.rpc_stats')} (root)"

becomes the text without marks, and beside it the command: outputs keep it whole.
"""

from __future__ import annotations

import re

_BEGIN, _END = "\x02", "\x03"
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
_MARKS = str.maketrans("", "", _BEGIN + _END)


def run(command: str) -> str:
    """Mark a command or an edit inside the text of a change."""
    return f"{_BEGIN}{command.translate(_MARKS)}{_END}"


def unmarked(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a text without marks, and the commands that were marked in it."""
    commands = tuple(match[1] for match in _MARKED.finditer(text))
    return text.translate(_MARKS), commands
