"""Stacks of an imported trace: calls as intervals, or samples, become samples of stacks.

    train.py: main       |-----------------------------------|      stack 1
      data.py: augment       |------------|                         stack 2: in 1
        PIL: resize             |-----|                             stack 3: in 2
    stretches            1   2  3     2   1
    samples              .   .  .  .  .   .   .   .   .   .   .

A stretch is a time in which the stack does not change. It becomes one sample in its middle that
stands for its length; long stretches become several. Short stretches are drawn at random instead,
each in proportion to its length, so many short calls keep their share of the time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.node_tables import STARTED_TICKS, NodeTables
from clusterprof.probe import layout

Int = NDArray[np.int64]
MAX_FRAMES = 64
"""Most frames of a stack; the innermost are kept."""
MAX_STACKS = (1 << 15) - 1
"""Number of stacks of one process; samples of further ones have no known stack."""
MAX_SAMPLES = 200_000
"""Number of samples of one process: about 3 MB in a recording."""
MAX_CALLS = 500_000
"""Number of calls of one process that are kept: 16 MB of memory."""
MIN_STRETCH_NS = 50_000
"""Stretches shorter than this many ns are drawn at random."""
MAX_STRETCH_NS = 10_000_000
"""Longest time in ns for which a sample stands; more if there would be too many samples."""
MAX_NAME_CHARACTERS = 1024
BUILT_IN_FILE, MODULE_FILE, RANGE_FILE = "<built-in>", "<nn.Module>", "<nvtx>"
TRACER_FILE = "<dftracer>"
"""Files of functions that have none: built-in, of a module of PyTorch, ranges, traced calls."""
_ROWS_PER_EVENT = 8192
_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1


@dataclass(slots=True)
class ImportedStacks:
    """Files, places and stacks of one process by their numbers; stack 0 is not known."""

    _files: dict[str, int] = field(default_factory=dict)
    _places: dict[tuple[int, int, str], int] = field(default_factory=dict)
    _stacks: dict[tuple[int, int], int] = field(default_factory=dict)
    _chains: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    """By stack number: its places, outermost first."""

    def is_full(self) -> bool:
        """Return whether there is no room for more places."""
        return len(self._places) >= MAX_STACKS

    def add_place(self, file: str, line: int, function: str) -> int:
        """Return the number of a place, adding it if it is new. line: 0 = not known."""
        number = self._files.setdefault(_clean_text(file), len(self._files))
        key = number, line, _clean_text(function)
        return self._places.setdefault(key, len(self._places))

    def add_stack(self, parent: int, place: int) -> int:
        """Return the number of the stack in which `parent` calls `place`; 0 if the table is full.

        parent: number of a stack, 0 = none.
        """
        known = self._stacks.get((parent, place))
        if known is not None:
            return known
        chain = (*self._chains[parent], place)
        if len(chain) > MAX_FRAMES:
            return self.add_frames(chain[-MAX_FRAMES:])
        if len(self._chains) > MAX_STACKS:
            return 0
        self._chains.append(chain)
        number = self._stacks[parent, place] = len(self._chains) - 1
        return number

    def add_frames(self, places: Sequence[int]) -> int:
        """Return the number of a stack, given as places from the outermost; 0 if it is unknown."""
        stack = 0
        for place in places[-MAX_FRAMES:]:
            stack = self.add_stack(stack, place)
            if not stack:
                return 0
        return stack

    def list_definitions(self, pid: int) -> list[dict[str, Any]]:
        """List the attributes of the events that define all stacks."""
        files = list(self._files)
        places = [[file, line, line, name] for file, line, name in self._places]
        stacks = [[parent, place] for parent, place in self._stacks]
        events = []
        for low in range(0, max(len(files), len(places), len(stacks)), _ROWS_PER_EVENT):
            rows = slice(low, low + _ROWS_PER_EVENT)
            events.append(
                {
                    "pid": pid,
                    "started_ticks": STARTED_TICKS,
                    "files": [low, files[rows]],
                    "places": [low, places[rows]],
                    "stacks": [low + 1, stacks[rows]],
                }
            )
        return events


def _clean_text(text: str) -> str:
    """Return text that can be written: without halves of surrogate pairs, not too long."""
    return text[:MAX_NAME_CHARACTERS].encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class FunctionCalls:
    """Calls of one thread: n rows, sorted by start, the longer first; times in ns."""

    start: Int
    end: Int
    parent: Int
    """Row of the call around it; -1 for none."""
    depth: Int
    """Number of calls around it."""


def nest_calls(start: Int, end: Int) -> tuple[FunctionCalls, Int]:
    """Nest the calls of one thread, given in any order; int64[n] each, ns.

    Calls that do not nest by some ns, as rounding makes them, are trimmed to the outer one. Returns
    the calls and the row of each in what was given, int64[n].
    """
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    parent, depth = _find_parents(start, end)
    for level in range(1, int(depth.max(initial=0)) + 1):  # from the outside inwards
        rows = np.flatnonzero(depth == level)
        end[rows] = np.minimum(end[rows], end[parent[rows]])
    return FunctionCalls(start, end, parent, depth), order


def _find_parents(start: Int, end: Int) -> tuple[Int, Int]:
    """Find the call around each call, -1 for none, and how many calls are around it.

    start, end: int64[n], ns, sorted by start, the longer first.
    """
    depth = np.arange(start.size) - np.searchsorted(np.sort(end), start, side="right")
    depth = np.maximum(depth, 0)
    parent = np.full(start.size, -1, np.int64)
    outer = np.flatnonzero(depth == 0)
    for level in range(1, int(depth.max(initial=0)) + 1):
        rows = np.flatnonzero(depth == level)
        parent[rows] = outer[np.maximum(np.searchsorted(outer, rows) - 1, 0)]
        outer = rows
    return parent, depth


def find_innermost_calls(calls: FunctionCalls) -> tuple[Int, Int]:
    """Find in which call the thread was at each instant.

    Returns int64[m] each: times (ns) at which that may change, and the row of the innermost call
    from then on, -1 outside of all.
    """
    rows = np.arange(calls.start.size)
    at = np.concatenate([calls.start, calls.end])
    inside = np.concatenate([rows, calls.parent])
    is_start = np.repeat([True, False], calls.start.size)
    rank = np.concatenate([calls.depth, -calls.depth])
    edges = np.lexsort((rank, is_start, at))
    return at[edges], inside[edges]


@dataclass(frozen=True, slots=True)
class Stretches:
    """Times in which the stack of one thread did not change: n rows, int64, sorted, disjoint."""

    start: Int
    end: Int
    stack: Int


NO_STRETCHES = Stretches(*(np.zeros(0, np.int64) for _ in range(3)))


def build_stretches(
    table: ImportedStacks, start: Int, end: Int, place: Int, window: tuple[int, int]
) -> Stretches:
    """Build the stretches of one thread from its calls, given in any order.

    start, end, place: int64[n], ns and numbers of places; calls of an unknown place (-1) are left
    out. window: from when to when, ns.
    """
    is_inside = (place >= 0) & (end > window[0]) & (start < window[1])
    start, end = np.maximum(start[is_inside], window[0]), np.minimum(end[is_inside], window[1])
    if not start.size:
        return NO_STRETCHES
    calls, order = nest_calls(start, end)
    stack = _number_stacks(table, calls, place[is_inside][order])
    edges, inside = find_innermost_calls(calls)
    lasting = np.flatnonzero((np.diff(edges) > 0) & (inside[:-1] >= 0))
    begin, until, number = edges[lasting], edges[lasting + 1], stack[inside[lasting]]
    opens = np.concatenate([[True], (begin[1:] > until[:-1]) | (number[1:] != number[:-1])])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], begin.size) - 1
    return Stretches(begin[first], until[last], number[first])


def _number_stacks(table: ImportedStacks, calls: FunctionCalls, place: Int) -> Int:
    """Return the number of the stack of each call, int64[n]. place: int64[n]."""
    stack = np.zeros(place.size, np.int64)
    for level in range(int(calls.depth.max(initial=0)) + 1):
        rows = np.flatnonzero(calls.depth == level)
        outer = stack[calls.parent[rows]] if level else np.zeros(rows.size, np.int64)
        pairs, inverse = np.unique(outer << _PLACE_BITS | place[rows], return_inverse=True)
        numbers = [
            table.add_stack(pair >> _PLACE_BITS, pair & _PLACE_MASK)
            if not level or pair >> _PLACE_BITS
            else 0
            for pair in pairs.tolist()
        ]
        stack[rows] = np.array(numbers, np.int64)[inverse]
    return stack


class CallLog:
    """Calls of the functions of one process, as they are read from a file."""

    def __init__(self) -> None:
        self.table = ImportedStacks()
        self._rows = array("q")

    def add(self, thread: int, start_ns: int, end_ns: int, file: str, function: str) -> bool:
        """Add a call; return whether there was room. Short calls are left to their callers."""
        if end_ns - start_ns < MIN_STRETCH_NS:
            return True
        if len(self._rows) >= 4 * MAX_CALLS or self.table.is_full():
            return False
        self._rows.extend((thread, start_ns, end_ns, self.table.add_place(file, 0, function)))
        return True

    def draw_samples(self, window: tuple[int, int]) -> tuple[Int, Int, Int]:
        """Draw samples of the thread with most time in functions, as `draw_samples` does.

        window: from when to when, ns.
        """
        thread, start, end, place = np.array(self._rows, np.int64).reshape(-1, 4).T
        if not thread.size:
            return draw_samples(NO_STRETCHES)
        threads, number = np.unique(thread, return_inverse=True)
        on_busiest = number == np.bincount(number, end - start, minlength=threads.size).argmax()
        stretches = build_stretches(
            self.table, start[on_busiest], end[on_busiest], place[on_busiest], window
        )
        return draw_samples(stretches)


def draw_samples(stretches: Stretches, max_samples: int = MAX_SAMPLES) -> tuple[Int, Int, Int]:
    """Draw samples from the stretches of a thread: time (ns), stack and interval (ns), int64[n]."""
    shortest, longest = MIN_STRETCH_NS, MAX_STRETCH_NS
    length = stretches.end - stretches.start
    while _count_samples(length, shortest, longest) > max_samples:
        shortest, longest = 2 * shortest, 2 * longest
    t_ns, stack, interval = _draw_samples(stretches, shortest, longest)
    order = np.argsort(t_ns, kind="stable")
    return t_ns[order], stack[order], interval[order]


def _count_samples(length_ns: Int, shortest_ns: int, longest_ns: int) -> int:
    """Count the samples of stretches of these lengths, int64[n], ns."""
    is_short = length_ns < shortest_ns
    divided = int((-(-length_ns[~is_short] // longest_ns)).sum())
    return divided - (-int(length_ns[is_short].sum()) // shortest_ns)


def _draw_samples(stretches: Stretches, shortest_ns: int, longest_ns: int) -> tuple[Int, Int, Int]:
    """Draw one sample per `shortest_ns` of short stretches, and divide the long ones evenly."""
    start, length = stretches.start, stretches.end - stretches.start
    is_short = length < shortest_ns
    parts = -(-length[~is_short] // longest_ns)
    row = np.repeat(np.flatnonzero(~is_short), parts)
    part = np.arange(row.size) - np.repeat(np.cumsum(parts) - parts, parts)
    count = np.repeat(parts, parts)
    quotient, remainder = length[row] // count, length[row] % count  # a product could be too large
    begin, until = (
        start[row] + quotient * edge + remainder * edge // count for edge in (part, part + 1)
    )
    t_ns, interval = (begin + until) // 2, until - begin
    short = np.flatnonzero(is_short)
    passed = np.cumsum(length[short])
    total = int(passed[-1]) if passed.size else 0
    slots = np.minimum(shortest_ns, total - np.arange(0, total, shortest_ns))
    points = np.arange(0, total, shortest_ns) + slots * _make_fractions(slots.size)
    drawn = short[np.minimum(np.searchsorted(passed, points, side="right"), short.size - 1)]
    middle = (start[drawn] + stretches.end[drawn]) // 2
    return (
        np.concatenate([t_ns, middle]),
        stretches.stack[np.concatenate([row, drawn])],
        np.concatenate([interval, slots]),
    )


def _make_fractions(count: int) -> NDArray[np.float64]:
    """Make numbers in [0, 1) that look random and are always the same: float64[count].

    Source: splitmix64 (Steele et al., OOPSLA 2014). numpy.random would take longer to import.
    """
    bits = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits >> np.uint64(11)).astype(np.float64) / (1 << 53)


def add_stack_samples(
    node: NodeTables, pid: int, table: ImportedStacks, threads: Sequence[tuple[Int, Int, Int]]
) -> int:
    """Add the samples of the threads of a process, and what their stacks are.

    threads: time (ns), stack and interval (ns) of the samples, int64[n] each, of the thread that
    trains, then of others. Returns the number of samples.
    """
    samples = [samples for samples in threads if samples[0].size]
    if not samples:
        return 0
    first_ns = min(int(t_ns[0]) for t_ns, _, _ in samples)
    for attributes in table.list_definitions(pid):
        node.add_event(first_ns, "stacks-defined", **attributes)
    for thread, (t_ns, stack, interval) in enumerate(threads):
        node.add_spans(pid, layout.STACK_SAMPLE, t_ns, t_ns, stack, interval, thread, 0)
    return sum(t_ns.size for t_ns, _, _ in samples)
