"""What one record says for all later time: who a process is, what a group or a device is.

A reader that begins in the middle of a recording would not know; here the last word of each kind
is kept, however long ago it was said, until the process it is about has gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clusterprof.probe.layout import (
    DATA_WAIT,
    FETCH,
    HOOK_NOTE,
    LOADER_START,
    OPTIMIZER,
    STEP,
    WORKER_START,
)
from clusterprof.trace.schema import SPAN_FIELDS, Event, Record, Spans
from clusterprof.trace.spanframes import PackedSpans, unfold

_NAMED_BY: dict[str, tuple[str, ...]] = {
    "process-registered": ("pid", "started_ticks", "role"),
    "process-exited": ("pid", "started_ticks"),
    "group-announced": ("pid", "group"),
    "device-appeared": ("id",),
    "device-owner": ("device",),
    "device-used": ("pid",),
}
_MARKS = (LOADER_START, WORKER_START, HOOK_NOTE)
_MARKS_OF_ONE = 16  # the latest of each kind of a process
_LAST_ONE = (STEP, DATA_WAIT, OPTIMIZER, FETCH)  # say what a process is, however long ago
_PROCESSES_AT_MOST = 10_000
_EVENTS_AT_MOST = 100_000
_KIND = SPAN_FIELDS.index("kind")

_KEPT = (*_MARKS, *_LAST_ONE)
_FRAMES_AT_ONCE = 64  # a minute of them

_Whose = tuple[int, int]
_Part = tuple[_Whose, int, dict[int, str], int]
"""Rows of a process: whose, the sequence number of the first, names of kinds, how many."""
_Row = tuple[int, dict[int, str], np.ndarray]
"""Its sequence number, names of kinds, and its fields."""


class Lasting:
    """The last word of everything that holds on; forgets processes that are gone."""

    def __init__(self) -> None:
        self._events: dict[tuple[Any, ...], Event] = {}
        self._marks: dict[_Whose, dict[int, list[_Row]]] = {}
        self._registered: set[_Whose] = set()
        self._heard: dict[_Whose, None] = {}

    @staticmethod
    def holds(event: Event) -> bool:
        """True for an event that holds for all later time."""
        return event.kind in _NAMED_BY

    def saw(self, event: Event, again: bool = False) -> None:
        """Take an event; one that is seen `again`, long after it was written, replaces nothing."""
        names = _NAMED_BY.get(event.kind)
        if names is None or len(self._events) >= _EVENTS_AT_MOST:
            return
        key = (event.kind, *(_plain(event.attributes.get(name)) for name in names))
        if again and key in self._events:
            return
        self._events.pop(key, None)  # it goes to the end: what was said last counts
        self._events[key] = event
        if event.kind == "process-registered":
            self._registered.add(_whose(event.attributes))

    def heard(self, spans: Spans | PackedSpans) -> None:
        """Note who has marked spans."""
        parts: Iterable[Any] = spans.parts if isinstance(spans, PackedSpans) else (spans,)
        self._heard.update({(part.pid, part.started_ticks): None for part in parts})

    def unknown(self) -> bool:
        """True while somebody marks spans who never registered, as far as was read."""
        return any(one not in self._registered for one in self._heard)

    def take(self, records: Iterable[Record | PackedSpans]) -> None:
        """Keep the marks of spans that are about to be forgotten."""
        frames: list[PackedSpans] = []
        for record in records:
            if isinstance(record, PackedSpans):
                if dict(record.constants).get(_KIND, STEP) in _KEPT:
                    frames.append(record)
            elif isinstance(record, Spans):
                self._unfold(frames)
                table = np.array([record.columns[name] for name in SPAN_FIELDS], np.int64)
                whose = (record.pid, record.started_ticks)
                self._keep([(whose, record.first_sequence, record.names, table.shape[1])], table)
            if len(frames) >= _FRAMES_AT_ONCE:
                self._unfold(frames)
        self._unfold(frames)

    def forget(self, before_ns: int) -> None:
        """Forget processes that had ended by then, and what was said of them."""
        gone = {
            _whose(event.attributes)
            for event in self._events.values()
            if event.kind == "process-exited" and event.t_ns < before_ns
        }
        if gone:
            pids = {pid for pid, _ in gone}
            self._events = {
                key: event
                for key, event in self._events.items()
                if _whose(event.attributes) not in gone
                and not (event.kind == "group-announced" and event.attributes.get("pid") in pids)
            }
            for one in gone:
                self._marks.pop(one, None)
                self._heard.pop(one, None)

    def records(self, since_ns: int) -> Iterator[Record]:
        """Yield everything that holds at `since_ns`, what was said earlier as if said then."""
        for event in self._events.values():
            yield event if event.t_ns >= since_ns else replace(event, t_ns=since_ns)
        for whose, marks in self._marks.items():
            for some in marks.values():
                yield from (_spans(whose, one) for one in some)

    def _unfold(self, frames: list[PackedSpans]) -> None:
        """Keep what matters of some frames, and empty the list."""
        if not frames:
            return
        table = np.empty((len(SPAN_FIELDS), sum(one.rows for one in frames)), np.int64)
        unfold(frames, table)
        parts = [
            ((part.pid, part.started_ticks), part.first_sequence, part.names, part.rows)
            for one in frames
            for part in one.parts
        ]
        self._keep(parts, table)
        frames.clear()

    def _keep(self, parts: Sequence[_Part], table: np.ndarray) -> None:
        """Keep what matters of the rows of some processes, part after part."""
        ends = np.cumsum([part[-1] for part in parts])
        rows = np.flatnonzero(np.isin(table[_KIND], _KEPT))
        owners = np.searchsorted(ends, rows, side="right").tolist()
        latest: dict[tuple[_Whose, int], tuple[int, int]] = {}
        for row, kind, owner in zip(rows.tolist(), table[_KIND, rows].tolist(), owners):
            if kind in _MARKS:
                kept = self._kept_of(parts[owner][0], kind)
                kept.append(_one(parts[owner], table, row, int(ends[owner])))
                del kept[:-_MARKS_OF_ONE]
            else:
                latest[parts[owner][0], kind] = row, owner
        for (whose, kind), (row, owner) in latest.items():
            self._kept_of(whose, kind)[:] = [_one(parts[owner], table, row, int(ends[owner]))]
        while len(self._marks) > _PROCESSES_AT_MOST:
            del self._marks[next(iter(self._marks))]

    def _kept_of(self, whose: _Whose, kind: int) -> list[_Row]:
        return self._marks.setdefault(whose, {}).setdefault(kind, [])


def _one(part: _Part, table: np.ndarray, row: int, end: int) -> _Row:
    """Return a row of a part that ends at `end` in the table."""
    _, sequence, names, rows = part
    return sequence + row - (end - rows), names, table[:, row].copy()


def _spans(whose: _Whose, row: _Row) -> Spans:
    sequence, names, values = row
    columns = {name: values[at : at + 1] for at, name in enumerate(SPAN_FIELDS)}
    return Spans(*whose, sequence, 0, names, columns)


def _whose(attributes: Any) -> _Whose:
    return _plain(attributes.get("pid")), _plain(attributes.get("started_ticks"))


def _plain(value: Any) -> Any:
    """Return what can be a key, whatever stands in a recording."""
    return value if isinstance(value, str | int) else repr(value)
