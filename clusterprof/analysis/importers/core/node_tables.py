"""What one foreign file says of one node, gathered as numpy tables, given out as records of ours.

    node = NodeTables("dgx-07", "kineto", wall_minus_own_ns=0)
    node.device("gpu0", vendor="nvidia", name="H100")
    node.rank(pid=4711, rank=3, world_size=8, device="gpu0")
    node.spans(4711, layout.STEP, start_ns, end_ns, a=numbers, b=2)
    node.collectives(4711, start_ns, end_ns, group_number([0, 1]), number, exposed_ns=exposed_ns)
    node.busy("gpu0", start_ns, end_ns)         # exact intervals: `gpu.busy_ns_total` at each edge
    node.series("gpu.busy_ratio", "gpu0", t_ns, values)
    header, records = node.header(), node.records()

Times are int64 ns of one clock per node, whatever its zero; they may not be negative. Tables may be
added in any order; records come in order of time, a second at a time, as a recorder writes them.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from clusterprof.importers.columns import Busy, Column, narrow, streams_of
from clusterprof.importers.columns import Float as Float
from clusterprof.importers.columns import Int as Int
from clusterprof.importers.slices import Stream, in_slices
from clusterprof.importers.span_tables import SpansInOrder, SpanTable
from clusterprof.probe import layout
from clusterprof.signals import GPU_BUSY_TIME
from clusterprof.trace.schema import (
    SCHEMA_VERSION,
    SPAN_FIELDS,
    Clock,
    Event,
    Header,
    Record,
    Spans,
)

SLICE_NS = 1_000_000_000
RANKS_AT_MOST = 1 << 17
_DAY_NS = 86_400 * SLICE_NS
SPAN_AT_MOST_NS = 100 * _DAY_NS
"""From the first to the last of what is attributed; a float holds whole ns up to 104 days."""
UNKNOWN_HOST = "unknown-host"
"""How a node is called whose name the file does not say."""
_STARTED_TICKS = 1  # one life per pid: foreign files do not say when a process began


def group_number(who: Sequence[int] | str) -> int:
    """Return the number of a process group: by its ranks; where they are not known, by its name."""
    name = who if isinstance(who, str) else ",".join(map(str, sorted(who)))
    first = hashlib.blake2b(name.encode("utf-8", "replace")).digest()[:8]
    return int.from_bytes(first, "little") & 0x7FFFFFFFFFFFFFFF


class NodeTables:
    """One node of an imported job; `source` is the name of the importer."""

    def __init__(
        self, name: str, source: str, wall_minus_own_ns: int | None = None, key: str = ""
    ) -> None:
        """`name`: the host as people know it, "" unknown; `key` tells nodes of one name apart."""
        self.name = name
        self.key = key or name or source
        self.shown = ""  # what people read where the host's name is not known
        self.source = source
        self.wall_minus_own_ns = wall_minus_own_ns
        """Wall clock less the clock of these times; None = not known."""
        self.job: str | None = None
        self.host: dict[str, Any] = {}
        """For the header: mounts, nics, hcas, … as a recording has them, when known."""
        self.versions: dict[str, str] = {}
        self._devices: dict[str, dict[str, Any]] = {}
        self._ranks: dict[int, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        self._spans: dict[int, SpanTable] = {}
        self._names: dict[int, dict[int, str]] = {}
        self._columns: list[Column | Busy] = []
        self._events: list[Event] = []

    # Who and what

    def device(self, id_: str, **facts: Any) -> None:
        """Add an accelerator, or facts of one: vendor, name, uuid, memory_bytes, …"""
        self._devices.setdefault(id_, {"id": id_}).update(facts)

    def rank(
        self,
        pid: int,
        rank: int | None = None,
        world_size: int | None = None,
        device: str = "",
        local_rank: int | None = None,
    ) -> None:
        """Add a training process and its accelerator; numbers that no job has are not known."""
        if world_size is not None and not 0 < world_size <= RANKS_AT_MOST:
            world_size = None
        if rank is not None and not 0 <= rank < RANKS_AT_MOST:
            rank = world_size = None
        self._ranks[pid] = {
            "pid": pid, "started_ticks": _STARTED_TICKS, "role": "python", "device": device,
            "rank": rank, "world_size": world_size, "node_local_rank": local_rank,
            "node_number": None, "restart": None, "variables": {},
        }  # fmt: skip

    def group(self, pid: int, group: int, ranks: Sequence[int]) -> None:
        """Say which global ranks a process group has; pid is one of its processes."""
        if ranks and len(ranks) <= RANKS_AT_MOST and 0 <= min(ranks) <= max(ranks) < RANKS_AT_MOST:
            self._groups.append({"pid": pid, "group": group, "ranks": sorted(map(int, ranks))})

    def event(self, t_ns: int, kind: str, **attributes: Any) -> None:
        """Add an event of a recording (`trace.schema.Event`)."""
        self._events.append(Event(int(t_ns), kind, attributes))

    # What happened when

    def spans(
        self,
        pid: int,
        kind: int,
        start_ns: ArrayLike,
        end_ns: ArrayLike,
        a: ArrayLike = 0,
        b: ArrayLike = 0,
        c: ArrayLike = 0,
        d: ArrayLike = 0,
    ) -> int:
        """Add spans of one kind; return the row of the first, by which a measure may refer to it.

        What each of a to d means: docs/design.md, section 4.
        """
        table = self._spans.setdefault(pid, SpanTable())
        return table.add(start_ns, end_ns, kind, a, b, c, d)

    def named_spans(self, pid: int, name: str, start_ns: ArrayLike, end_ns: ArrayLike) -> None:
        """Add spans under a name of the user's own; at most 64 names of a process are kept."""
        names = self._names.setdefault(pid, {})
        kind = next((known for known, word in names.items() if word == name), None)
        if kind is None:
            if len(names) >= layout.NAMES_CAPACITY:
                return
            kind = layout.FIRST_USER_KIND + len(names)
            names[kind] = name
        self.spans(pid, kind, start_ns, end_ns)

    def collectives(
        self,
        pid: int,
        start_ns: ArrayLike,
        end_ns: ArrayLike,
        group: ArrayLike,
        number: ArrayLike,
        bytes_: ArrayLike = -1,
        operation: ArrayLike = layout.OTHER_OPERATION,
        exposed_ns: ArrayLike | None = None,
        peer: ArrayLike = -1,
    ) -> None:
        """Add operations with other ranks: when this rank came to each, and when it left it.

        Of a device's timeline: when its kernel began and ended. `number` counts the operations of
        a group from 0, alike on all members; `operation` is one of `layout.ALL_REDUCE` and its
        like; `exposed_ns`: how long the device did nothing else; without it, the host waited.
        """
        form = np.asarray(operation, np.int64) | layout.BLOCKING << layout.FORM_SHIFT
        form = form | (np.asarray(peer, np.int64) + 1) << layout.PEER_SHIFT
        start = np.asarray(start_ns, np.int64)
        first = self.spans(pid, layout.COLLECTIVE, start, end_ns, group, number, bytes_, form)
        if exposed_ns is not None:
            rows = first + np.arange(start.size)
            self.spans(pid, layout.EXPOSED_COLLECTIVE, start, end_ns, rows, exposed_ns)

    def busy(self, device: str, start_ns: Int, end_ns: Int, from_ns: int, until_ns: int) -> None:
        """Say when a device was at work: sorted, disjoint intervals within [from_ns, until_ns].

        They become the counter `gpu.busy_ns_total`, read at every edge: exact everywhere.
        """
        start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
        took, name = narrow(end - start), GPU_BUSY_TIME.name
        self._columns.append(Busy(name, device, start, took, int(from_ns), int(until_ns)))

    def series(self, signal: str, device: str, t_ns: ArrayLike, values: ArrayLike) -> None:
        """Add readings of one of our signals, sorted by time; NaN = not available."""
        t, v = np.asarray(t_ns, np.int64), np.asarray(values)
        if v.dtype.kind != "f":
            self._columns.append(Column(signal, device, t, v.astype(np.int64), None))
            return
        missing = np.isnan(v)
        mask = missing if missing.any() else None
        self._columns.append(Column(signal, device, t, v.astype(np.float64), mask))

    # As records

    def bounds_ns(self) -> tuple[int, int]:
        """Return the first and the last instant of anything; (0, 0) of nothing."""
        found = [event.t_ns for event in self._events]
        for column in self._columns:
            if isinstance(column, Busy):
                found += column.bounds_ns()
            elif column.t_ns.size:
                found += (int(column.t_ns[0]), int(column.t_ns[-1]))
        for table in self._spans.values():
            found += table.bounds_ns()
        return min(found, default=0), max(found, default=0)

    def header(self) -> Header:
        """Return the first record. Raises CannotImportError for times that no job has."""
        first_ns, last_ns = self.bounds_ns()
        if self._spans and last_ns - first_ns > SPAN_AT_MOST_NS:
            from clusterprof.importers.base import CannotImportError  # it names this module

            days = (last_ns - first_ns) // _DAY_NS
            raise CannotImportError(
                f"what it shows of one process lies {days:,} days apart", "look at its times"
            )
        node = {"key": self.key, "hostname": self.name, "boot_id": "", "kernel": "",
                "display": self.name or self.shown or UNKNOWN_HOST}  # fmt: skip
        started = {"monotonic_ns": first_ns, "boottime_ns": first_ns}
        if self.wall_minus_own_ns is not None:
            started["realtime_ns"] = first_ns + self.wall_minus_own_ns
        versions = {"schema": str(SCHEMA_VERSION), "importer": self.source, **self.versions}
        return Header(
            node, started, {"mounts": [], **self.host}, list(self._devices.values()),
            {"job": self.job or "imported", "variables": {}}, versions, {}, [],
        )  # fmt: skip

    def records(self) -> Iterator[list[Record]]:
        """Yield all other records, what belongs to one second together, in order of time."""
        first_ns, last_ns = self.bounds_ns()
        opening: list[Record] = []
        if self.wall_minus_own_ns is not None:
            opening.append(Clock(first_ns, first_ns, first_ns + self.wall_minus_own_ns))
        for said in self._ranks.values():
            said = {**said, "job": self.job}
            opening.append(Event(first_ns, "process-registered", said))
        opening += [Event(first_ns, "group-announced", said) for said in self._groups]
        yield opening
        yield from in_slices(self._streams(), first_ns, SLICE_NS)
        yield [Event(last_ns, "recorder-stopped", {"reason": "end of what was imported"})]

    def _streams(self) -> list[Stream]:
        """Events, series and spans, each in order of time."""
        streams: list[Stream] = [_Events(sorted(self._events, key=lambda event: event.t_ns))]
        streams += streams_of(self.source, self._columns)
        for pid, spans in self._spans.items():
            streams.append(_Spans(pid, spans.in_order(), self._names.get(pid, {})))
        return streams


@dataclass(slots=True)
class _Events:
    events: list[Event]

    def next_ns(self, after_ns: int) -> list[int]:
        row = bisect_left(self.events, after_ns, key=_when)
        return [self.events[row].t_ns] if row < len(self.events) else []

    def records(self, low_ns: int, high_ns: int) -> list[Event]:
        a, b = (bisect_left(self.events, t, key=_when) for t in (low_ns, high_ns))
        return self.events[a:b]


def _when(event: Event) -> int:
    return event.t_ns


@dataclass(slots=True)
class _Spans:
    pid: int
    spans: SpansInOrder
    names: dict[int, str]

    def next_ns(self, after_ns: int) -> list[int]:
        return self.spans.next_ns(after_ns)

    def records(self, low_ns: int, high_ns: int) -> Iterator[Spans]:
        first, table = self.spans.between(low_ns, high_ns)
        columns = {name: array("q", row.tobytes()) for name, row in zip(SPAN_FIELDS, table)}
        names = dict(self.names) if first == 0 else {}
        yield Spans(self.pid, _STARTED_TICKS, first + 1, 0, names, columns)
