"""Where the processes of a node may run, and ran, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from clusterprof.cpulists import parse_cpulist
from clusterprof.timeline.buffers import RowBuffer, groups
from clusterprof.timeline.model import Int, Placement
from clusterprof.trace.schema import Rows

_COLUMNS = ("t_ns", "pid", "processor", "cpus_allowed", "nodes_allowed")
_LISTS = ("cpus_allowed", "nodes_allowed")


class Placements:
    """Rows of the table `placement` that have been read and not yet handed out."""

    def __init__(self) -> None:
        self._rows = RowBuffer(_COLUMNS)
        self._lists: dict[str, tuple[frozenset[int], ...]] = dict.fromkeys(_LISTS, ())
        self._tables: Mapping[int, Mapping[str, Int]] = {}
        self._known: dict[int, Placement] = {}
        self._start_ns = self._end_ns = 0

    def add(self, rows: Rows) -> None:
        """Take a frame of the table."""
        self._rows.add(rows)
        for name in _LISTS:
            words = rows.strings.get(name, ())
            if len(words) > len(self._lists[name]):
                self._lists[name] = tuple(_parsed(word) for word in words)

    def turn(self, start_ns: int, end_ns: int) -> None:
        """Go on to the chunk between the two."""
        self._start_ns, self._end_ns = start_ns, end_ns
        self._tables = groups(self._rows.take(end_ns), "pid")

    def of(self, pid: int) -> Placement | None:
        """Return the placement of a process; what was seen last while nobody looked anew."""
        table = self._tables.get(pid)
        if table is not None:
            inside = (table["t_ns"] >= self._start_ns) & (table["t_ns"] < self._end_ns)
            cpus, nodes = (self._last(name, table) for name in _LISTS)
            ran_on = table["processor"][inside]
            self._known[pid] = Placement(cpus, nodes, ran_on[ran_on >= 0])
        elif pid in self._known:
            self._known[pid] = replace(self._known[pid], ran_on=np.zeros(0, np.int64))
        return self._known.get(pid)

    def forget(self, seen: set[int]) -> None:
        """Drop processes that were not in this chunk at all."""
        for pid in [pid for pid in self._known if pid not in seen]:
            del self._known[pid]

    def _last(self, name: str, table: Mapping[str, Int]) -> frozenset[int]:
        at = int(table[name][-1])
        return self._lists[name][at] if 0 <= at < len(self._lists[name]) else frozenset()


def _parsed(word: str) -> frozenset[int]:
    """The numbers of a list; none for what is no list, which then counts as unknown."""
    try:
        return parse_cpulist(str(word))
    except ValueError:
        return frozenset()
