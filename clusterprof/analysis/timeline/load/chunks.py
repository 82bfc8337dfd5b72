"""Load a node's recording as a stream of chunks: numpy columns for up to 200 s each.

    load = NodeLoader(folder)
    for chunk in load.chunks():
        ...
    load.facts().damage

A chunk is closed once the recording has passed its end by `SLACK_NS`, because processes
report their spans once a second and frames may be slightly out of order. Memory is that
of two chunks, independent of the length of the recording. A silence of many chunks
becomes one long chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from clusterprof.analysis.timeline.load.buffers import (
    ColumnBuffer,
    Key,
    get_row_times,
    merge_series,
)
from clusterprof.analysis.timeline.load.processes import DeviceUsers, ProcessBuffer
from clusterprof.analysis.timeline.model import Chunk, Series
from clusterprof.analysis.timeline.stacks import STACKS_DEFINED, StackTree
from clusterprof.trace.decoder import PackedSpans, decode_span_frames
from clusterprof.trace.reader import Damage, NodeReader
from clusterprof.trace.schema import (
    SPAN_FIELDS,
    Clock,
    Columns,
    Event,
    Gap,
    Header,
    Record,
    Rows,
    Spans,
)

CHUNK_NS = 200_000_000_000
"""Length of a chunk, ns: a third of the time is saved against 60 s, most of it calls per rank and
chunk; 300 s would save 3 % more and take 60 MiB more.
"""
SLACK_NS = 3_000_000_000
SILENCE_CHUNKS = 3
MAX_CHUNK_ROWS = (600_000, 50_000)
"""Number of values and spans at which a chunk ends early; the second value is for imported
traces, which are dense.
"""
BRIEF_RATIO, MAX_BRIEF_NS = 0.05, 10_000_000_000
"""A column that was missing for less of the recording, and for less time, was measured."""
GapKey = tuple[str, str, str]
"""Collector, signal and device of a gap."""
MAX_EVENTS = 10_000  # kept for the facts of a node


class Reader(Protocol):
    """Source of a node's records."""

    @property
    def damage(self) -> Damage:
        """Return the damage found so far."""
        ...

    def packed(self) -> Iterator[list[Record | PackedSpans]]:
        """Yield the records, some of them in packed groups."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedNode:
    """Facts about a node, complete once its recording has been read."""

    header: Header
    first_ns: int
    last_ns: int
    """First and last instant of any record; equal if there was none."""
    damage: Damage
    """Parts of the recording that could not be read."""
    dropped_spans: int
    """Spans that were produced but not stored, as counted by the recorder."""
    gaps: tuple[Gap, ...]
    """The last gap of each collector and column: what is missing, and why. Gaps that ended are left
    out where the column was hardly ever missing (BRIEF_RATIO, MAX_BRIEF_NS)."""
    events: tuple[Event, ...]
    """All events except registrations and exits of processes, and definitions of stacks."""
    stacks: StackTree = field(default_factory=StackTree, compare=False)
    """The stacks that samples of its processes refer to."""


class NodeLoader:
    """Reads one node's folder chunk by chunk; `facts()` is complete after the last chunk."""

    def __init__(
        self,
        folder: Path,
        chunk_ns: int = CHUNK_NS,
        reader: Reader | None = None,
        max_rows: int = 0,
        rejects_late_ends: bool = False,
    ) -> None:
        """Take the folder of a node (`trace.reader.node_folders`) without opening it.

        reader: source of records instead of the folder. max_rows: of a chunk, 0 = the default.
        rejects_late_ends: of a reader, too, spans that end long after its last record are refused.
        """
        folder_reader = NodeReader(folder)
        self._reader: Reader = reader or folder_reader
        self._folder_reader = folder_reader if reader is None else None
        rejects_late_ends = rejects_late_ends or reader is None
        self._assembly = _ChunkBuilder(chunk_ns, folder.name, max_rows, rejects_late_ends)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks in order of time; can be called once."""
        return self._assembly.chunks(self._reader.packed())

    @property
    def read_bytes(self) -> int:
        """Return the number of bytes of the folder read so far.

        0 if records come from another reader.
        """
        return 0 if self._folder_reader is None else self._folder_reader.read_bytes

    def facts(self) -> LoadedNode:
        """Return the facts collected so far."""
        builder = self._assembly
        first_ns = builder.first_ns if builder.first_ns is not None else 0
        return LoadedNode(
            header=builder.header,
            first_ns=first_ns,
            last_ns=max(builder.latest_ns or first_ns, first_ns),
            damage=_add_refused_values(self._reader.damage, builder.refused),
            dropped_spans=builder.dropped_spans,
            gaps=tuple(builder.list_lasting_gaps()),
            events=tuple(builder.kept_events),
            stacks=builder.build_stack_tree(),
        )


def _add_refused_values(damage: Damage, refused: int) -> Damage:
    """Return the damage with spans and values that no process and no signal has."""
    if not refused:
        return damage
    records = damage.implausible_records + refused
    example = damage.implausible_example or "a span or a value"
    return replace(damage, implausible_records=records, implausible_example=example)


def _make_empty_header(key: str) -> Header:
    node = {"key": key, "hostname": key, "display": key, "boot_id": "", "kernel": ""}
    return Header(node, {}, {}, [], {}, {}, {}, [])


def _find_first_start(spans: PackedSpans) -> int:
    """Find the earliest start of the last process in a frame."""
    table = np.empty((len(SPAN_FIELDS), spans.rows), np.int64)
    decode_span_frames([spans], table)
    rows = next(part.rows for part in reversed(spans.parts) if part.rows)
    return int(np.min(table[0, spans.rows - rows :]))


class _ChunkBuilder:
    """Sorts records into buffers and cuts chunks from them."""

    def __init__(
        self, chunk_ns: int, key: str, max_rows: int = 0, rejects_late_ends: bool = False
    ) -> None:
        self._chunk_ns, self._max_rows = chunk_ns, max_rows
        self.header = _make_empty_header(key)
        self.first_ns: int | None = None
        self.latest_ns: int | None = None
        self.dropped_spans = 0
        self.gaps: dict[GapKey, Gap] = {}
        self.kept_events: list[Event] = []
        self._columns: dict[str, list[ColumnBuffer]] = {}
        self._processes = ProcessBuffer(rejects_late_ends)
        self._users = DeviceUsers()
        self._events: list[Event] = []
        self._open_gaps: list[Gap] = []
        self._missing_since: dict[GapKey, int] = {}
        self._missing_ns: dict[GapKey, int] = {}
        self._rows = 0

    def chunks(self, frames: Iterable[Sequence[Record | PackedSpans]]) -> Iterator[Chunk]:
        start_ns: int | None = None
        end_ns, first = 0, True
        for records in frames:
            for record in records:
                self._add(record)
            if start_ns is None:
                start_ns = self._find_start()
                if start_ns is None:
                    continue
                end_ns = start_ns + self._chunk_ns
            max_rows = self._max_rows or MAX_CHUNK_ROWS["importer" in self.header.versions]
            if self._rows > max_rows and self.latest_ns is not None:
                end_ns = max(start_ns + 1, min(end_ns, self.latest_ns - SLACK_NS - 1))
            while self.latest_ns is not None and self.latest_ns > end_ns + SLACK_NS:
                self._rows = 0
                yield self._cut(start_ns, end_ns, first, last=False)
                first = False
                start_ns, end_ns = end_ns, self._next_end(end_ns)
        if start_ns is None:
            return
        end_ns = max(start_ns, (self.latest_ns if self.latest_ns is not None else start_ns) + 1)
        yield self._cut(start_ns, end_ns, first, last=True)

    @property
    def refused(self) -> int:
        """Return the number of spans and values refused so far."""
        values = sum(buffer.refused for buffer in chain.from_iterable(self._columns.values()))
        return self._processes.refused_spans + values

    def build_stack_tree(self) -> StackTree:
        """Build the table of all stacks defined so far."""
        return self._processes.stacks.build_table()

    def _find_start(self) -> int | None:
        """Return the start in the header, else the first record, of which some may arrive late."""
        started = self.header.started.get("monotonic_ns")
        if started is not None and (self.first_ns is None or started <= self.first_ns):
            return int(started)
        return self.first_ns

    def _next_end(self, start_ns: int) -> int:
        """Return the end of the next chunk; a long silence becomes one chunk."""
        chunks_ahead = ((self.latest_ns or start_ns) - SLACK_NS - start_ns) // self._chunk_ns
        return start_ns + self._chunk_ns * (chunks_ahead if chunks_ahead > SILENCE_CHUNKS else 1)

    def _add(self, record: Record | PackedSpans) -> None:
        if isinstance(record, Columns):
            self._column_buffer(record).add(record)
            self._rows += len(record.t_ns) * len(record.signals)
            if len(record.t_ns):
                self._extend_range(int(record.t_ns[0]), int(record.t_ns[-1]))
        elif isinstance(record, Rows):
            self._processes.add_rows(record)
            t_ns = get_row_times(record)
            if len(t_ns):
                self._extend_range(int(t_ns[0]), int(t_ns[-1]))
        elif isinstance(record, PackedSpans):
            self.dropped_spans += sum([part.dropped for part in record.parts])
            self._processes.add_spans(record)
            self._rows += record.rows
            if self.latest_ns is None:
                self.first_ns = _find_first_start(record)
        elif isinstance(record, Spans):
            self.dropped_spans += record.dropped
            self._processes.add_spans(record)
            if self.latest_ns is None and len(record.columns["end_ns"]):
                self.first_ns = int(np.min(record.columns["start_ns"]))
        elif isinstance(record, Header):
            self._add_header(record)
        elif isinstance(record, Clock):
            self._extend_range(record.monotonic_ns, record.monotonic_ns)
        elif isinstance(record, Event):
            self._add_event(record)
        else:
            self._extend_range(record.t_ns, record.t_ns)
            self.gaps[record.collector, record.signal, record.device] = record
            self._open_gaps.append(record)

    def _column_buffer(self, record: Columns) -> ColumnBuffer:
        """Return the buffer for this set of columns; a collector has one for each set."""
        buffers = self._columns.setdefault(record.collector, [])
        for buffer in buffers:
            if buffer.matches(record):
                return buffer
        buffers.append(ColumnBuffer(record.signals, record.devices))
        return buffers[-1]

    def _add_header(self, header: Header) -> None:
        """Apply the header of a segment; devices that appeared earlier stay."""
        ids = {device.get("id") for device in header.devices}
        appeared = [device for device in self.header.devices if device.get("id") not in ids]
        self.header = replace(header, devices=self._users.with_users([*header.devices, *appeared]))

    def _add_event(self, event: Event) -> None:
        if event.kind == STACKS_DEFINED:  # names alone, which no time belongs to
            self._processes.add_event(event)
            return
        self._extend_range(event.t_ns, event.t_ns)
        self._events.append(event)
        if event.kind in ("process-registered", "process-exited"):
            self._processes.add_event(event)
            return
        if event.kind == "device-appeared":
            ids = {device.get("id") for device in self.header.devices}
            if event.attributes.get("id") not in ids:
                devices = [*self.header.devices, dict(event.attributes)]
                self.header = replace(self.header, devices=devices)
        if event.kind == "device-appeared" or self._users.observe(event):
            self.header = replace(self.header, devices=self._users.with_users(self.header.devices))
        if len(self.kept_events) < MAX_EVENTS:
            self.kept_events.append(event)

    def _extend_range(self, first_ns: int, last_ns: int) -> None:
        if self.first_ns is None or first_ns < self.first_ns:
            self.first_ns = first_ns
        if self.latest_ns is None or last_ns > self.latest_ns:
            self.latest_ns = last_ns

    def _cut(self, start_ns: int, end_ns: int, first: bool, last: bool) -> Chunk:
        series: dict[Key, Series] = {}
        for buffer in chain.from_iterable(self._columns.values()):
            merge_series(series, buffer.take(start_ns, end_ns).items())
        events = tuple(e for e in self._events if e.t_ns < end_ns or last)
        self._events = [e for e in self._events if e.t_ns >= end_ns and not last]
        gaps = tuple(gap for gap in self._open_gaps if gap.t_ns < end_ns)
        self._open_gaps = self._still_open(series, end_ns)
        processes, wchan_names = self._processes.take(start_ns, end_ns, last)
        return Chunk(
            header=self.header,
            start_ns=start_ns,
            end_ns=end_ns,
            first=first,
            last=last,
            series=series,
            processes=processes,
            wchan_names=wchan_names,
            events=events,
            gaps=gaps,
            stacks=self.build_stack_tree(),
        )

    def _still_open(self, series: dict[Key, Series], end_ns: int) -> list[Gap]:
        """List the gaps still open in the next chunk: no value of their column followed them.

        Sums how long the columns of the others were missing.
        """
        open_gaps: dict[GapKey, Gap] = {}
        seen_ns: dict[GapKey, int] = {}  # the first value that followed
        for gap in self._open_gaps:
            key = gap.collector, gap.signal, gap.device
            if gap.t_ns < seen_ns.get(key, gap.t_ns):
                continue  # another reason in the same gap
            since_ns = self._missing_since.setdefault(key, gap.t_ns)
            value_ns = _find_next_value(series.get((gap.signal, gap.device)), gap.t_ns, end_ns)
            if value_ns is None:
                open_gaps[key] = gap
                continue
            seen_ns[key] = value_ns
            self._missing_ns[key] = self._missing_ns.get(key, 0) + value_ns - since_ns
            del self._missing_since[key]
        return list(open_gaps.values())

    def list_lasting_gaps(self) -> Iterator[Gap]:
        """Yield the last gap of each column, except of those that were hardly ever missing."""
        whole_ns = (self.latest_ns or 0) - (self.first_ns or 0)
        brief_ns = min(BRIEF_RATIO * whole_ns, MAX_BRIEF_NS)
        for key, gap in self.gaps.items():
            if key in self._missing_since or self._missing_ns.get(key, 0) > brief_ns:
                yield gap


def _find_next_value(readings: Series | None, t_ns: int, end_ns: int) -> int | None:
    """Find the time of the first value after an instant and before another; None = none."""
    if readings is None or t_ns >= end_ns:
        return None
    follows = (readings.t_ns > t_ns) & (readings.t_ns < end_ns) & ~np.isnan(readings.values)
    return int(readings.t_ns[follows][0]) if follows.any() else None
