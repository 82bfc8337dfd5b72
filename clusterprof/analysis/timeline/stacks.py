"""Number the Python stacks of all processes of a node alike.

    event `stacks-defined` of a process        node
    places   0 train.py:42 in augment          place 17
    stacks   1 = (root, place 0)               stack 23: its parent and its place

Workers forked from one process have the same stacks, so numbers of the node stay few while
processes come and go. Definitions come from the processes of the job and are not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterprof.analysis.timeline.spans import Int
from clusterprof.report.code import CodeLocation

STACKS_DEFINED = "stacks-defined"
MAX_NODE_STACKS = 1 << 17
"""Number of stacks of a node; samples of further ones have no known stack."""
MAX_PROCESS_STACKS = 1 << 15
"""Number of stacks of one process; imported traces need the most."""
MAX_DEPTH = 128
_MAX_NAME_CHARACTERS = 1024
_MAX_LINE = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class StackTree:
    """The stacks of a node as a tree: each is a code location, called from its parent."""

    locations: tuple[CodeLocation, ...] = ()
    parent: Int = field(default_factory=lambda: np.zeros(1, np.int64))
    """int64[n]: number of the calling stack, smaller than its own; 0 = called by none."""
    location: Int = field(default_factory=lambda: np.full(1, -1, np.int64))
    """int64[n]: index of the innermost location; -1 for stack 0, which is not known."""

    @property
    def has_paths(self) -> bool:
        """Return whether files have their whole paths: not hashed, nor cut to base names."""
        return any("/" in location.file for location in self.locations)

    def list_locations(self, stack: int) -> list[int]:
        """List the indices of the locations of a stack, outermost first."""
        indices = []
        while stack > 0:
            indices.append(int(self.location[stack]))
            stack = int(self.parent[stack])
        return indices[::-1]


@dataclass
class _ProcessNumbers:
    """The numbers that one process gave to files, places and stacks, and those of the node."""

    files: dict[int, str] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    stacks: dict[int, int] = field(default_factory=dict)
    depths: dict[int, int] = field(default_factory=dict)


class StackInterner:
    """Collects the definitions of all processes of a node."""

    def __init__(self) -> None:
        self._processes: dict[tuple[int, int], _ProcessNumbers] = {}
        self._places: dict[CodeLocation, int] = {}
        self._stacks: dict[tuple[int, int], int] = {}
        self._table = StackTree()

    def add(self, attributes: Mapping[str, Any]) -> None:
        """Add the definitions of one event; malformed ones are left out."""
        pid, ticks = attributes.get("pid"), attributes.get("started_ticks")
        if type(pid) is not int or type(ticks) is not int:
            return
        numbers = self._processes.setdefault((pid, ticks), _ProcessNumbers())
        for number, file in _read_list(attributes.get("files")):
            if isinstance(file, str):
                numbers.files.setdefault(number, file[:_MAX_NAME_CHARACTERS])
        for number, row in _read_list(attributes.get("places")):
            location = _parse_place(row, numbers.files)
            if location is not None:
                index = self._places.setdefault(location, len(self._places))
                numbers.places.setdefault(number, index)
        for number, row in _read_list(attributes.get("stacks")):
            self._add_stack(numbers, number, row)

    def _add_stack(self, numbers: _ProcessNumbers, number: int, row: Any) -> None:
        if not isinstance(row, list | tuple) or len(row) != 2 or number in numbers.stacks:
            return
        parent, place_number = row
        if type(parent) is not int or type(place_number) is not int or number < 1:
            return
        depth = numbers.depths.get(parent, 0) + 1
        if (parent and parent not in numbers.stacks) or place_number not in numbers.places:
            return
        key = numbers.stacks[parent] if parent else 0, numbers.places[place_number]
        is_full = len(self._stacks) >= MAX_NODE_STACKS and key not in self._stacks
        if is_full or depth > MAX_DEPTH or len(numbers.stacks) >= MAX_PROCESS_STACKS:
            return
        numbers.stacks[number] = self._stacks.setdefault(key, len(self._stacks) + 1)
        numbers.depths[number] = depth

    def translate(self, pid: int, ticks: int, stacks: Int) -> Int:
        """Return the node's numbers of stacks of a process: int64[n], 0 = not defined."""
        numbering = self._processes.get((pid, ticks))
        if numbering is None or not stacks.size:
            return np.zeros(stacks.size, np.int64)
        numbers, inverse = np.unique(stacks, return_inverse=True)
        mapped = [numbering.stacks.get(number, 0) for number in numbers.tolist()]
        return np.array(mapped, np.int64)[inverse]

    def build_table(self) -> StackTree:
        """Build the table of all stacks defined so far."""
        if self._table.parent.size != len(self._stacks) + 1:
            rows = np.array([(0, -1), *self._stacks], np.int64)
            locations = tuple(self._places)
            self._table = StackTree(locations, rows[:, 0].copy(), rows[:, 1].copy())
        return self._table


def _read_list(value: Any) -> list[tuple[int, Any]]:
    """Return (number, item) of a list that is stored with the number of its first item."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return []
    first, items = value
    if type(first) is not int or first < 0 or not isinstance(items, list | tuple):
        return []
    return list(enumerate(items, first))


def _parse_place(row: Any, files: Mapping[int, str]) -> CodeLocation | None:
    if not isinstance(row, list | tuple) or len(row) != 4:
        return None
    file, _, line, function = row
    if type(file) is not int or file not in files:
        return None
    if type(line) is not int or not isinstance(function, str):
        return None
    return CodeLocation(files[file], min(max(line, 0), _MAX_LINE), function[:_MAX_NAME_CHARACTERS])
