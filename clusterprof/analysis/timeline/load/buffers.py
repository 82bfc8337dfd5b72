"""Spans of all processes that have been read and not yet handed out.

Each span is handed out in the chunk in which it ended; one that came too late for its chunk, in the
next. With it go the spans of the last `REACH_NS`, the last fetch, wait and step of its process, and
the marks that hold for all later time. All processes are sorted in one go: by process and kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe.layout import (
    BACKWARD,
    COLLECTIVE,
    DATA_WAIT,
    EXPOSED,
    FETCH,
    FIRST_USER_KIND,
    FORWARD,
    HOOK_NOTE,
    KIND_NAMES,
    LOADER_START,
    OPTIMIZER,
    STEP,
    WORKER_START,
)
from clusterprof.timeline.model import Int, SpanTable
from clusterprof.trace.schema import SPAN_FIELDS, Spans
from clusterprof.trace.spanframes import PackedSpans, unfold

REACH_NS = 2_000_000_000
LASTING = (LOADER_START, WORKER_START, HOOK_NOTE)
LAST_ONE = (FETCH, DATA_WAIT, STEP, OPTIMIZER)  # say what a process is, however long ago
TRAINING = (DATA_WAIT, STEP, OPTIMIZER, EXPOSED, LOADER_START)  # a process with these trains
# Of these and of a user's own kinds a training process needs no more than when it was seen; of
# collective operations those of a group that is known, which can be laid beside other ranks'.
_UNREAD = (FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE)
FETCH_NAME = KIND_NAMES[FETCH]
_KIND, _END = SPAN_FIELDS.index("kind"), SPAN_FIELDS.index("end_ns")
_GROUP = SPAN_FIELDS.index("a")  # of a collective operation
_SEQUENCE = len(SPAN_FIELDS)
_MOST = 128  # kinds there can be; a foreign or impossible span counts as this one and goes
_TABLE_ORDER = [*map(SPAN_FIELDS.index, ("start_ns", "end_ns", "a", "b", "c", "d")), _SEQUENCE]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Spans and the number under which each one's process is kept here."""

    table: Int
    """int64[8, n]: SPAN_FIELDS and the sequence number."""
    owner: Int


@dataclass(frozen=True, slots=True)
class ChunkSpans:
    """The spans of one chunk."""

    of: dict[int, dict[int, SpanTable]]
    """By pid, then kind, sorted by start."""
    last_end_ns: dict[int, int]
    """By pid: when the last of them ended."""


class SpanBuffer:
    """Takes spans of any process in frames, gives those of a chunk by process and kind."""

    def __init__(self) -> None:
        self._frames: list[Spans | PackedSpans] = []
        # Of each part of each frame: whose it is, how many spans, the first one's sequence number.
        self._owners: list[int] = []
        self._sizes: list[int] = []
        self._firsts: list[int] = []
        self._number: dict[int, int] = {}  # pid -> the number of its rows
        self._ticks: dict[int, int] = {}
        self._named: dict[int, set[int]] = {}  # number -> its kinds that are called "fetch"
        self._next = 0
        none = np.zeros((_SEQUENCE + 1, 0), np.int64)
        self._waiting = self._recent = _Rows(none, none[0])
        # One piece of memory for every chunk: fresh pages cost more than the copying.
        self._scratch = np.zeros((_SEQUENCE + 1, 1 << 14), np.int64)

    def add(self, spans: Spans | PackedSpans) -> None:
        """Take one frame; a process id that was given anew starts afresh."""
        self._frames.append(spans)
        parts: Sequence[Any] = spans.parts if isinstance(spans, PackedSpans) else (spans,)
        ticks, numbers = self._ticks, self._number
        for part in parts:
            if ticks.get(part.pid) != part.started_ticks:
                self._begin(part.pid, part.started_ticks)
            number = numbers[part.pid]
            self._owners.append(number)
            self._sizes.append(part.rows if part is not spans else _count(spans))
            self._firsts.append(part.first_sequence)
            if part.names and FETCH_NAME in part.names.values():
                kinds = {kind for kind, name in part.names.items() if name == FETCH_NAME}
                self._named[number] = self._named.get(number, set()) | kinds

    def _begin(self, pid: int, started_ticks: int) -> None:
        self._drop(pid)
        self._ticks[pid] = started_ticks
        self._number[pid] = self._next
        self._next += 1

    def _drop(self, pid: int) -> None:
        self._named.pop(self._number.pop(pid, -1), None)
        self._ticks.pop(pid, None)

    def started_ticks(self, pid: int) -> int | None:
        """Return which process of that id the spans are of; None when there are none."""
        return self._ticks.get(pid)

    def forget(self, seen: set[int]) -> None:
        """Drop processes that are not among those seen and have nothing to hand out."""
        waiting = set(self._waiting.owner.tolist())
        for pid in [p for p, n in self._number.items() if p not in seen and n not in waiting]:
            self._drop(pid)

    def take(self, end_ns: int, last: bool) -> ChunkSpans:
        """Return the spans of a chunk."""
        pids = list(self._number)
        numbers = [self._number[pid] for pid in pids]
        rows = self._joined()
        table = rows.table
        place = np.full(self._next + 1, -1, np.int32)
        place[numbers] = np.arange(len(pids))
        owner = place[rows.owner]
        for number, kinds in self._named.items():
            self._name_fetches(table, rows.owner == number, kinds)
        kind = np.clip(table[_KIND], -1, _MOST).astype(np.int16)
        kind[(kind < 0) | (owner < 0) | (table[_END] < table[0])] = _MOST
        late = np.flatnonzero(table[_END] >= end_ns) if not last else np.zeros(0, np.int64)
        self._waiting = _picked(rows, late[owner[late] >= 0])
        kind[late] = _MOST
        table, groups, bounds = _grouped(table, np.maximum(owner, 0), kind, len(pids))
        self._recent = self._kept(table, groups, bounds, np.array(numbers, np.int64), end_ns)
        found: dict[int, dict[int, SpanTable]] = {pid: {} for pid in pids}
        ends: dict[int, int] = {}
        tables = _span_tables(table, bounds)
        latest = np.maximum.reduceat(table[_END], bounds[:-1]).tolist() if groups else []
        for (process, of_kind), one, end in zip(groups, tables, latest):
            pid = pids[process]
            found[pid][of_kind] = one
            ends[pid] = max(ends.get(pid, end), end)
        return ChunkSpans(found, ends)

    def _name_fetches(self, table: Int, own: NDArray[np.bool_], kinds: set[int]) -> None:
        """A user's span called "fetch" is one that did not measure CPU time and bytes."""
        rows = own & np.isin(table[_KIND], list(kinds))
        table[_KIND, rows] = FETCH
        for name in "abcd":
            table[SPAN_FIELDS.index(name), rows] = -1

    def _kept(
        self,
        table: Int,
        groups: list[tuple[int, int]],
        bounds: Int,
        numbers: Int,
        end_ns: int,
    ) -> _Rows:
        """What the next chunk gets of this one."""
        keep = table[_END] >= end_ns - REACH_NS
        for (_, kind), low, high in zip(groups, bounds[:-1].tolist(), bounds[1:].tolist()):
            if kind in LASTING:
                keep[low:high] = True
            elif kind in LAST_ONE:
                keep[high - 1] = True
        process = np.repeat([process for process, _ in groups], np.diff(bounds))
        rows = np.flatnonzero(keep)
        return _Rows(table[:, rows], numbers[process[rows].astype(np.int64)])

    def _joined(self) -> _Rows:
        """What was handed out lately, what waited, and what came, in shared memory."""
        frames, self._frames = self._frames, []
        owners, sizes, firsts = self._owners, self._sizes, self._firsts
        self._owners, self._sizes, self._firsts = [], [], []
        before = self._recent.owner.size
        waiting = before + self._waiting.owner.size
        count = waiting + sum(sizes)
        if count > self._scratch.shape[1]:
            self._scratch = np.zeros((_SEQUENCE + 1, count + count // 4), np.int64)
        table = self._scratch[:, :count]
        table[:, :before] = self._recent.table
        table[:, before:waiting] = self._waiting.table
        new = table[:, waiting:]
        _write(frames, new[:_SEQUENCE])
        first = np.array(firsts, np.int64)
        at = np.cumsum([0, *sizes[:-1]])
        new[_SEQUENCE] = np.arange(new.shape[1])
        new[_SEQUENCE] += np.repeat(first - at[: first.size], sizes)
        came = np.repeat(np.array(owners, np.int64), sizes)
        return _Rows(table, np.concatenate([self._recent.owner, self._waiting.owner, came]))


def _count(one: Spans | PackedSpans) -> int:
    """How many spans a frame holds."""
    return one.rows if isinstance(one, PackedSpans) else len(one.columns["start_ns"])


def _write(frames: Iterable[Spans | PackedSpans], table: Int) -> None:
    past = 0
    for packed, some in groupby(frames, lambda one: isinstance(one, PackedSpans)):
        run = list(some)
        first, past = past, past + sum(map(_count, run))
        if packed:
            unfold([one for one in run if isinstance(one, PackedSpans)], table[:, first:past])
            continue
        for row, name in enumerate(SPAN_FIELDS):
            columns = [one.columns[name] for one in run if isinstance(one, Spans)]
            np.concatenate(columns, out=table[row, first:past])


def _picked(rows: _Rows, chosen: Int) -> _Rows:
    return _Rows(rows.table[:, chosen], rows.owner[chosen])


def _grouped(
    table: Int, owner: Int, kind: Int, processes: int
) -> tuple[Int, list[tuple[int, int]], Int]:
    """Sort by process and kind, in order of arrival; return (process, kind) of each group and where
    the groups begin and end. Kind `_MOST` is left out."""
    kinds = np.flatnonzero(np.bincount(kind, minlength=_MOST + 1)[:_MOST])
    width = len(kinds) + 1
    # Two bytes are sorted by counting.
    size = np.int16 if processes * width < 1 << 15 else np.int64
    dense = np.full(_MOST + 1, len(kinds), size)
    dense[kinds] = np.arange(len(kinds))
    key = owner.astype(size)
    key *= size(width)
    key += dense[kind]
    key[kind == _MOST] = processes * width
    sizes = np.bincount(key, minlength=processes * width + 1)[:-1]
    order = np.argsort(key, kind="stable")[: int(sizes.sum())]
    some = np.flatnonzero(sizes)
    groups = [(at // width, int(kinds[at % width])) for at in some.tolist()]
    order, bounds = _thinned(table, order, groups, sizes[some].tolist())
    return np.take(table, order, axis=1), groups, bounds


def _thinned(
    table: Int, order: Int, groups: list[tuple[int, int]], sizes: list[int]
) -> tuple[Int, Int]:
    """Keep of what nobody reads the first, the last and the latest to arrive: half of all spans."""
    workers = {process for process, kind in groups if kind == WORKER_START}
    trains = {process for process, kind in groups if kind in TRAINING} - workers
    rows: list[Int] = []
    past = 0
    for (process, kind), size in zip(groups, sizes):
        first, past = past, past + size
        own = order[first:past]
        if process in trains and (kind in _UNREAD or kind >= FIRST_USER_KIND):
            edges = {int(table[0, own].argmin()), int(table[_END, own].argmax()), size - 1}
            keep = np.zeros(size, np.bool_) if kind != COLLECTIVE else table[_GROUP, own] != 0
            keep[list(edges)] = True
            own = own[keep]
        rows.append(own)
    bounds = np.concatenate([[0], np.cumsum([own.size for own in rows])]).astype(np.int64)
    return np.concatenate([order[:0], *rows]), bounds


def _span_tables(table: Int, bounds: Int) -> list[SpanTable]:
    """One table per group, sorted by start."""
    start = table[0]
    back = np.flatnonzero(start[1:] < start[:-1]) + 1
    group = np.searchsorted(bounds, back, side="right") - 1
    unsorted = set(group[bounds[group] != back].tolist())
    found = []
    edges = bounds.tolist()
    for index, (low, high) in enumerate(pairwise(edges)):
        one = table[:, low:high]
        if index in unsorted:
            one = one[:, np.argsort(one[0], kind="stable")]
        found.append(SpanTable(*[one[row] for row in _TABLE_ORDER]))
    return found
