"""Data of one node from a foreign file: collected as numpy tables, yielded as records.

    node = NodeTables("dgx-07", "kineto", wall_minus_own_ns=0)
    node.add_device("gpu0", vendor="nvidia", name="H100")
    node.add_rank(pid=4711, rank=3, world_size=8, device="gpu0")
    node.add_spans(4711, layout.STEP, start_ns, end_ns, a=numbers, b=2)
    group = compute_group_number([0, 1])
    node.add_collectives(4711, start_ns, end_ns, group, number, exposed_ns=exposed_ns)
    node.add_busy_time("gpu0", start_ns, end_ns, from_ns, until_ns)     # exact intervals
    node.add_series("gpu.busy_ratio", "gpu0", t_ns, values)
    header, records = node.header(), node.records()

Times are int64 ns of one clock per node with any zero; they must not be negative. Tables may be
added in any order. Records are yielded in order of time, one second at
a time, as the recorder writes them.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from clusterprof.analysis.importers.core.columns import (
    BusyCounter,
    ImportedSpans,
    OrderedSpans,
    SignalColumn,
    Stream,
    build_streams,
    list_unread_times,
    merge_streams,
    pack_column,
)
from clusterprof.analysis.importers.core.columns import Float as Float
from clusterprof.analysis.importers.core.columns import Int as Int
from clusterprof.probe import layout
from clusterprof.signals import GPU_BUSY, GPU_BUSY_TIME
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
MAX_RANKS = 1 << 17
_DAY_NS = 86_400 * SLICE_NS
MAX_DURATION_NS = 100 * _DAY_NS
"""Largest time from the first to the last attributed instant, in ns: 100 days. A float holds whole
ns up to 104 days.
"""
UNKNOWN_HOST = "unknown-host"
"""Name shown for a node whose hostname the file does not record."""
STARTED_TICKS = 1  # one incarnation per pid: foreign files do not record when a process began


def compute_group_number(ranks_or_name: Sequence[int] | str) -> int:
    """Compute a stable 63-bit number of a process group from its ranks, or from its name."""
    name = (
        ranks_or_name
        if isinstance(ranks_or_name, str)
        else ",".join(map(str, sorted(ranks_or_name)))
    )
    digest = hashlib.blake2b(name.encode("utf-8", "replace")).digest()[:8]
    return int.from_bytes(digest, "little") & 0x7FFFFFFFFFFFFFFF


def number_groups(members: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Number the groups of a job by name, as the probe does: by their members.

    Of groups with the same members all but the first have their name in the number, too: each
    counts its own operations.
    """
    numbers: dict[str, int] = {}
    for name, ranks in members.items():
        number = compute_group_number(ranks)
        if number in numbers.values():
            number = compute_group_number(f"{','.join(map(str, sorted(ranks)))}:{name}")
        numbers[name] = number
    return numbers


class NodeTables:
    """Tables of one node of an imported job; `source` is the name of the importer."""

    def __init__(
        self, name: str, source: str, wall_minus_own_ns: int | None = None, key: str = ""
    ) -> None:
        """Start empty tables.

        name: the hostname, empty if unknown. key: distinguishes nodes of the same name.
        wall_minus_own_ns: wall clock minus the clock of the tables' times, None if unknown.
        """
        self.name = name
        self.key = key or name or source
        self.display_name = ""  # name in the report if the hostname is not known
        self.source = source
        self.wall_minus_own_ns = wall_minus_own_ns
        """Wall clock minus the clock of these times in ns; None if unknown."""
        self.job: str | None = None
        self.is_window = False
        """True if the tables hold a window of the job, such as a few steps in a profiler."""
        self.has_time_unit = True
        """False if the file states no unit of time: the unit of the tables is a guess."""
        self.host: dict[str, Any] = {}
        """Host facts for the header, where known: mounts, nics, hcas, … as in a recording."""
        self.versions: dict[str, str] = {}
        self._devices: dict[str, dict[str, Any]] = {}
        self._ranks: dict[int, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        self._spans: dict[int, ImportedSpans] = {}
        self._names: dict[int, dict[int, str]] = {}
        self._columns: list[SignalColumn | BusyCounter] = []
        self._events: list[Event] = []

    # Devices, ranks and process groups

    def add_device(self, id_: str, **facts: Any) -> None:
        """Add an accelerator, or facts about it: vendor, name, uuid, memory_bytes, …"""
        self._devices.setdefault(id_, {"id": id_}).update(facts)

    def add_rank(
        self,
        pid: int,
        rank: int | None = None,
        world_size: int | None = None,
        device: str = "",
        local_rank: int | None = None,
    ) -> None:
        """Add a training process and its accelerator; impossible ranks become unknown."""
        if world_size is not None and not 0 < world_size <= MAX_RANKS:
            world_size = None
        if rank is not None and not 0 <= rank < MAX_RANKS:
            rank = world_size = None
        self._ranks[pid] = {
            "pid": pid,
            "started_ticks": STARTED_TICKS,
            "role": "python",
            "device": device,
            "rank": rank,
            "world_size": world_size,
            "node_local_rank": local_rank,
            "node_number": None,
            "restart": None,
            "variables": {},
        }

    def add_host_functions(self, pid: int, names: Sequence[str]) -> None:
        """Add the names of functions to which the `host_work` spans of a process refer."""
        self._ranks[pid]["host_functions"] = list(names)

    def mark_without_framework(self, pid: int) -> None:
        """Add that nothing of PyTorch or another framework was seen in a process."""
        self._ranks[pid]["framework"] = "none"

    def mark_as_xla(self) -> None:
        """Add that the programs of all processes so far were compiled by XLA."""
        for rank in self._ranks.values():
            rank["framework"] = "xla"

    def add_group(self, pid: int, group: int, ranks: Sequence[int], name: str = "") -> None:
        """Add the global ranks of a process group; `pid` is one of its processes.

        name: what the report calls it where all its ranks are alike slow ("stage 1").
        """
        if ranks and len(ranks) <= MAX_RANKS and 0 <= min(ranks) <= max(ranks) < MAX_RANKS:
            named = {"name": name} if name else {}
            members = sorted(map(int, ranks))
            self._groups.append({"pid": pid, "group": group, "ranks": members, **named})

    def add_event(self, t_ns: int, kind: str, **attributes: Any) -> None:
        """Add an event (`Event`) at `t_ns`."""
        self._events.append(Event(int(t_ns), kind, attributes))

    # Spans and series

    def add_spans(
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
        """Add spans of one kind and return the row of the first, which a measure can refer to.

        start_ns, end_ns: int64[n], ns. a, b, c, d: int64[n] or one number; their meaning depends on
        the kind (docs/design/recording-format.md).
        """
        table = self._spans.setdefault(pid, ImportedSpans())
        return table.add(start_ns, end_ns, kind, a, b, c, d)

    def add_named_spans(self, pid: int, name: str, start_ns: ArrayLike, end_ns: ArrayLike) -> None:
        """Add spans under a user-defined name; at most 64 names per process are kept.

        start_ns, end_ns: int64[n], ns.
        """
        names = self._names.setdefault(pid, {})
        kind = next((number for number, word in names.items() if word == name), None)
        if kind is None:
            if len(names) >= layout.NAMES_CAPACITY:
                return
            kind = layout.FIRST_USER_KIND + len(names)
            names[kind] = name
        self.add_spans(pid, kind, start_ns, end_ns)

    def add_collectives(
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
        """Add collective or point-to-point operations with the times this rank arrived and left.

        On a device timeline these are the start and end of the kernel. Arrays are int64[n]:
        start_ns, end_ns: ns. number: counts the operations of a group from 0, equally on all
        members.
        bytes_: message size, -1 unknown. operation: `layout.ALL_REDUCE` or a similar constant.
        exposed_ns: time during which the device did nothing else; None means that the host waited.
        peer: rank of the partner, -1 if none.
        """
        form = np.asarray(operation, np.int64) | layout.BLOCKING << layout.FORM_SHIFT
        form = form | (np.asarray(peer, np.int64) + 1) << layout.PEER_SHIFT
        start = np.asarray(start_ns, np.int64)
        first = self.add_spans(pid, layout.COLLECTIVE, start, end_ns, group, number, bytes_, form)
        if exposed_ns is not None:
            rows = first + np.arange(start.size)
            self.add_spans(pid, layout.EXPOSED_COLLECTIVE, start, end_ns, rows, exposed_ns)

    def add_busy_time(
        self, device: str, start_ns: Int, end_ns: Int, from_ns: int, until_ns: int
    ) -> None:
        """Add the busy intervals of a device as the counter `gpu.busy_ns_total`.

        start_ns, end_ns: int64[n], ns, sorted and disjoint, within [from_ns, until_ns].
        """
        start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
        duration, name = pack_column(end - start), GPU_BUSY_TIME.name
        self._columns.append(
            BusyCounter(name, device, start, duration, int(from_ns), int(until_ns))
        )

    def add_series(self, signal: str, device: str, t_ns: ArrayLike, values: ArrayLike) -> None:
        """Add readings of one of our signals, sorted by time.

        t_ns: int64[n], ns. values: int64[n] or float64[n] in the signal's unit; NaN means not
        available.
        """
        t, v = np.asarray(t_ns, np.int64), np.asarray(values)
        if v.dtype.kind != "f":
            self._columns.append(SignalColumn(signal, device, t, v.astype(np.int64), None))
            return
        missing = np.isnan(v)
        mask = missing if missing.any() else None
        self._columns.append(SignalColumn(signal, device, t, v.astype(np.float64), mask))

    def add_unmeasured_device(self, device: str, from_ns: int, until_ns: int) -> None:
        """Add a device that the file does not show: it is not known when it was busy.

        Without it, only the waits that the file shows would count as lost.
        """
        self.add_device(device)
        t_ns = list_unread_times(from_ns, until_ns, np.array([from_ns, until_ns], np.int64))
        self.add_series(GPU_BUSY.name, device, t_ns, np.full(t_ns.size, np.nan))  # unread

    # Conversion to records

    def bounds_ns(self) -> tuple[int, int]:
        """Return the first and last instant of all data in ns; (0, 0) if there is none."""
        times_ns = [event.t_ns for event in self._events]
        for column in self._columns:
            if isinstance(column, BusyCounter):
                times_ns += column.bounds_ns()
            elif column.t_ns.size:
                times_ns += (int(column.t_ns[0]), int(column.t_ns[-1]))
        for table in self._spans.values():
            times_ns += table.bounds_ns()
        return min(times_ns, default=0), max(times_ns, default=0)

    def header(self) -> Header:
        """Build the header record.

        Raises: CannotImportError when the times of a process are more than 100 days apart.
        """
        first_ns, last_ns = self.bounds_ns()
        if self._spans and last_ns - first_ns > MAX_DURATION_NS:
            from clusterprof.analysis.importers.core.base import CannotImportError

            days = (last_ns - first_ns) // _DAY_NS
            raise CannotImportError(
                f"the times of one process are {days:,} days apart", "check its timestamps"
            )
        node = {
            "key": self.key,
            "hostname": self.name,
            "boot_id": "",
            "kernel": "",
            "display": self.name or self.display_name or UNKNOWN_HOST,
            **({"covers": "window"} if self.is_window else {}),
            **({} if self.has_time_unit else {"time_unit": "unknown"}),
        }
        started = {"monotonic_ns": first_ns, "boottime_ns": first_ns}
        if self.wall_minus_own_ns is not None:
            started["realtime_ns"] = first_ns + self.wall_minus_own_ns
        versions = {"schema": str(SCHEMA_VERSION), "importer": self.source, **self.versions}
        return Header(
            node,
            started,
            {"mounts": [], **self.host},
            list(self._devices.values()),
            {"job": self.job or "imported", "variables": {}},
            versions,
            {},
            [],
        )

    def records(self) -> Iterator[list[Record]]:
        """Yield all other records in order of time, those of one second together."""
        first_ns, last_ns = self.bounds_ns()
        first_records: list[Record] = []
        if self.wall_minus_own_ns is not None:
            first_records.append(Clock(first_ns, first_ns, first_ns + self.wall_minus_own_ns))
        for attributes in self._ranks.values():
            attributes = {**attributes, "job": self.job}
            first_records.append(Event(first_ns, "process-registered", attributes))
        first_records += [
            Event(first_ns, "group-announced", attributes) for attributes in self._groups
        ]
        yield first_records
        yield from merge_streams(self._streams(), first_ns, SLICE_NS)
        yield [Event(last_ns, "recorder-stopped", {"reason": "end of what was imported"})]

    def _streams(self) -> list[Stream]:
        """List the streams of events, series and spans, each in order of time."""
        streams: list[Stream] = [_EventStream(sorted(self._events, key=lambda event: event.t_ns))]
        streams += build_streams(self.source, self._columns)
        for pid, spans in self._spans.items():
            streams.append(_SpanStream(pid, spans.in_order(), self._names.get(pid, {})))
        return streams


@dataclass(slots=True)
class _EventStream(Stream):
    events: list[Event]

    def next_ns(self, after_ns: int) -> list[int]:
        row = bisect_left(self.events, after_ns, key=_get_event_time)
        return [self.events[row].t_ns] if row < len(self.events) else []

    def records(self, low_ns: int, high_ns: int) -> list[Event]:
        a, b = (bisect_left(self.events, t, key=_get_event_time) for t in (low_ns, high_ns))
        return self.events[a:b]


def _get_event_time(event: Event) -> int:
    return event.t_ns


@dataclass(slots=True)
class _SpanStream(Stream):
    pid: int
    spans: OrderedSpans
    names: dict[int, str]

    def next_ns(self, after_ns: int) -> list[int]:
        return self.spans.next_ns(after_ns)

    def extend_slice(self, low_ns: int, high_ns: int) -> int:
        return self.spans.extend_slice(low_ns, high_ns)

    def records(self, low_ns: int, high_ns: int) -> Iterator[Spans]:
        first, table = self.spans.between(low_ns, high_ns)
        columns = {name: array("q", row.tobytes()) for name, row in zip(SPAN_FIELDS, table)}
        names = dict(self.names) if first == 0 else {}
        yield Spans(self.pid, STARTED_TICKS, first + 1, 0, names, columns)
