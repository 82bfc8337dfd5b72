"""What one record says for all later time: who a process is, what a group or a device is.

A reader that begins in the middle of a recording would not know; here the last word of each kind
is kept, however long ago it was said, until the process it is about has gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

_Whose = tuple[int, int]


class Lasting:
    """The last word of everything that holds on; forgets processes that are gone."""

    def __init__(self) -> None:
        self._events: dict[tuple[Any, ...], Event] = {}
        self._marks: dict[_Whose, dict[int, list[Spans]]] = {}
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
        for record in records:
            if isinstance(record, PackedSpans):
                for spans in _unfolded(record):
                    self._keep(spans)
            elif isinstance(record, Spans):
                self._keep(record)

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
        for marks in self._marks.values():
            for some in marks.values():
                yield from some

    def _keep(self, spans: Spans) -> None:
        kinds = np.asarray(spans.columns["kind"])
        for kind in set(kinds.tolist()).intersection((*_MARKS, *_LAST_ONE)):
            most = _MARKS_OF_ONE if kind in _MARKS else 1
            marks = self._marks.setdefault((spans.pid, spans.started_ticks), {})
            kept = marks.setdefault(kind, [])
            kept += [_one(spans, row) for row in np.flatnonzero(kinds == kind)[-most:].tolist()]
            del kept[:-most]
        while len(self._marks) > _PROCESSES_AT_MOST:
            del self._marks[next(iter(self._marks))]


def _one(spans: Spans, row: int) -> Spans:
    columns = {name: np.array(column[row : row + 1]) for name, column in spans.columns.items()}
    return replace(spans, first_sequence=spans.first_sequence + row, dropped=0, columns=columns)


def _unfolded(record: PackedSpans) -> Iterator[Spans]:
    constants = {row: value for row, value in record.constants}
    if constants.get(_KIND, STEP) not in (*_MARKS, *_LAST_ONE):
        return
    table = np.empty((len(SPAN_FIELDS), record.rows), np.int64)
    unfold([record], table)
    first = 0
    for part in record.parts:
        some = table[:, first : first + part.rows]
        first += part.rows
        columns = {name: some[at] for at, name in enumerate(SPAN_FIELDS)}
        yield Spans(part.pid, part.started_ticks, part.first_sequence, 0, part.names, columns)


def _whose(attributes: Any) -> _Whose:
    return _plain(attributes.get("pid")), _plain(attributes.get("started_ticks"))


def _plain(value: Any) -> Any:
    """Return what can be a key, whatever stands in a recording."""
    return value if isinstance(value, str | int) else repr(value)
