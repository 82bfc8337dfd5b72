"""The definitions of a process's stacks, read from the log behind the records of its ring.

The log was written by another process: each entry is checked before it counts, and an entry that
is not valid ends the reading of this log. docs/design/recording-format.md has the entries.
"""

from __future__ import annotations

import struct
from typing import Any

from clusterprof.probe import layout

MAX_LOG_BYTES = 1 << 20
_ENTRIES = {
    layout.FILE_TAG[0]: layout.FILE_ENTRY,
    layout.FUNCTION_TAG[0]: layout.FUNCTION_ENTRY,
    layout.PLACE_TAG[0]: layout.PLACE_ENTRY,
    layout.STACK_TAG[0]: layout.STACK_ENTRY,
}
_MAX_TEXT_BYTES = 4 * layout.MAX_PATH_CHARACTERS
_MAX_LINE = 2**31 - 1


class StackDefinitions:
    """The stacks defined so far in the log of one process.

    Files, functions and places count from 0, stacks from 1 with the parent 0 = no caller.
    """

    def __init__(self) -> None:
        self.read_bytes = 0
        """Bytes of the log that are read."""
        self.is_invalid = False
        """True from the first entry that is not valid: nothing more is read."""
        self._files: list[str] = []
        self._functions: list[tuple[int, int, str]] = []
        self._places: list[list[Any]] = []
        self._stacks: list[list[int]] = []
        self._taken = (0, 0, 0)

    def add(self, log: bytes) -> None:
        """Read the complete entries at the start of `log`, which continues what was read before."""
        offset = 0
        while not self.is_invalid and offset < len(log):
            entry = _ENTRIES.get(log[offset])
            if entry is None:
                self.is_invalid = True
                break
            end = offset + entry.size
            if end > len(log):
                break
            _, *values = entry.unpack_from(log, offset)
            text = ""
            if entry in (layout.FILE_ENTRY, layout.FUNCTION_ENTRY):
                begin, end = end, end + values.pop()
                if end > len(log):
                    break
                text = log[begin:end].decode("utf-8", "replace")
            self.is_invalid = not self._define(entry, values, text, end - offset)
            offset = end
        self.read_bytes += offset

    def _define(self, entry: struct.Struct, values: list[int], text: str, size: int) -> bool:
        """Add one definition; return False when it refers to an undefined entry."""
        if size > _MAX_TEXT_BYTES + layout.FUNCTION_ENTRY.size:
            return False
        if entry is layout.FILE_ENTRY:
            self._files.append(text[: layout.MAX_PATH_CHARACTERS])
            return True
        if entry is layout.FUNCTION_ENTRY:
            file, line = values
            name = text[: layout.MAX_NAME_CHARACTERS]
            self._functions.append((file, line, name))
            return file < len(self._files) and line <= _MAX_LINE
        if entry is layout.PLACE_ENTRY:
            function, line = values
            if function >= len(self._functions) or line > _MAX_LINE:
                return False
            file, first_line, name = self._functions[function]
            self._places.append([file, first_line, line, name])
            return True
        parent, location = values
        if parent > len(self._stacks) or location >= len(self._places):
            return False
        self._stacks.append([parent, location])
        return True

    def take_new(self) -> dict[str, Any] | None:
        """Return what was defined since the last call, None when nothing was."""
        begin, self._taken = self._taken, self._count()
        return self._list_since(begin) if begin != self._taken else None

    def list_all(self) -> dict[str, Any] | None:
        """Return all definitions that were taken, None when there are none."""
        self._taken = self._count()
        return self._list_since((0, 0, 0)) if any(self._taken) else None

    def _count(self) -> tuple[int, int, int]:
        return len(self._files), len(self._places), len(self._stacks)

    def _list_since(self, begin: tuple[int, int, int]) -> dict[str, Any]:
        files, places, stacks = begin
        return {
            "files": [files, self._files[files:]],
            "places": [places, self._places[places:]],
            "stacks": [stacks + 1, self._stacks[stacks:]],
        }
