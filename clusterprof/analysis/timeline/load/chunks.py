"""A node's recording as a stream of chunks: numpy columns for about 60 s at a time.

    load = NodeLoad(folder)
    for chunk in load.chunks():
        ...
    load.facts().damage

A chunk is closed once the recording has gone `SLACK_NS` past its end, because processes report
their spans once a second and frames may be slightly out of order. Memory is that of two chunks,
however long the recording; silence for many chunks becomes one long chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from clusterprof.timeline.buffers import ColumnBuffer, Key, merge, times_of
from clusterprof.timeline.device_users import DeviceUsers
from clusterprof.timeline.model import Chunk, Series
from clusterprof.timeline.processes import ProcessBuffer
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.scan import Damage
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
from clusterprof.trace.spanframes import PackedSpans, unfold

CHUNK_NS = 60_000_000_000
SLACK_NS = 3_000_000_000
SILENCE_CHUNKS = 3
ROWS_AT_MOST = (150_000, 50_000)
"""Values and spans that make a chunk end early; the second of imported traces: they are dense."""
MOST_EVENTS = 10_000  # of those kept for the facts


class Reader(Protocol):
    """What a node's records come from."""

    @property
    def damage(self) -> Damage:
        """What could not be read so far."""
        ...

    def packed(self) -> Iterator[list[Record | PackedSpans]]:
        """Yield the records, some of them together."""
        ...


@dataclass(frozen=True, slots=True)
class NodeLoaded:
    """What is known of a node once its recording has been read."""

    header: Header
    first_ns: int
    last_ns: int
    """First and last instant of any record; equal when there was none."""
    damage: Damage
    """What could not be read."""
    dropped_spans: int
    """Spans that were produced and not stored, as the recorder counted them."""
    gaps: tuple[Gap, ...]
    """The last gap of each collector and column: what was not seen, and why."""
    events: tuple[Event, ...]
    """All but registrations and exits of processes."""


def chunks(folder: Path, chunk_ns: int = CHUNK_NS) -> Iterator[Chunk]:
    """Yield one node's recording in chunks; never raises for what the bytes are."""
    return NodeLoad(folder, chunk_ns).chunks()


def chunks_of(records: Iterable[Record], chunk_ns: int = CHUNK_NS) -> Iterator[Chunk]:
    """Yield the chunks of records that are in memory."""
    return _Assembly(chunk_ns, "").chunks([record] for record in records)


class NodeLoad:
    """Reads one node's folder chunk by chunk; `facts()` is complete after the last chunk."""

    def __init__(
        self, folder: Path, chunk_ns: int = CHUNK_NS, reader: Reader | None = None, most: int = 0
    ) -> None:
        """Take the folder of a node (`trace.reader.node_folders`); nothing is opened yet.

        `reader`: where records come from instead; `most`: rows of a chunk, 0 = ROWS_AT_MOST.
        """
        whole = NodeReader(folder)
        self._reader: Reader = reader or whole
        self._whole = whole if reader is None else None
        self._assembly = _Assembly(chunk_ns, folder.name, most)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks in order of time; once."""
        return self._assembly.chunks(self._reader.packed())

    @property
    def read_bytes(self) -> int:
        """How many bytes of the folder were read so far; 0 when records come from elsewhere."""
        return 0 if self._whole is None else self._whole.read_bytes

    def facts(self) -> NodeLoaded:
        """Return what was read so far."""
        done = self._assembly
        first_ns = done.first_ns if done.first_ns is not None else 0
        return NodeLoaded(
            header=done.header,
            first_ns=first_ns,
            last_ns=max(done.latest_ns or first_ns, first_ns),
            damage=self._reader.damage,
            dropped_spans=done.dropped_spans,
            gaps=tuple(done.gaps.values()),
            events=tuple(done.kept_events),
        )


def _no_header(key: str) -> Header:
    node = {"key": key, "hostname": key, "display": key, "boot_id": "", "kernel": ""}
    return Header(node, {}, {}, [], {}, {}, {}, [])


def _first_ns(spans: PackedSpans) -> int:
    """The earliest start of the last process in a frame."""
    table = np.empty((len(SPAN_FIELDS), spans.rows), np.int64)
    unfold([spans], table)
    rows = next(part.rows for part in reversed(spans.parts) if part.rows)
    return int(np.min(table[0, spans.rows - rows :]))


class _Assembly:
    """Sorts records into buffers and cuts chunks from them."""

    def __init__(self, chunk_ns: int, key: str, most: int = 0) -> None:
        self._chunk_ns, self._most = chunk_ns, most
        self.header = _no_header(key)
        self.first_ns: int | None = None
        self.latest_ns: int | None = None
        self.dropped_spans = 0
        self.gaps: dict[tuple[str, str, str], Gap] = {}
        self.kept_events: list[Event] = []
        self._columns: dict[str, list[ColumnBuffer]] = {}
        self._processes = ProcessBuffer()
        self._users = DeviceUsers()
        self._events: list[Event] = []
        self._open_gaps: list[Gap] = []
        self._rows = 0

    def chunks(self, frames: Iterable[Sequence[Record | PackedSpans]]) -> Iterator[Chunk]:
        start_ns: int | None = None
        end_ns, first = 0, True
        for records in frames:
            for record in records:
                self._add(record)
            if start_ns is None:
                start_ns = self._started()
                if start_ns is None:
                    continue
                end_ns = start_ns + self._chunk_ns
            most = self._most or ROWS_AT_MOST["importer" in self.header.versions]
            if self._rows > most and self.latest_ns is not None:
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

    def _started(self) -> int | None:
        """The header says when; else the first record does, some of which may come late."""
        started = self.header.started.get("monotonic_ns")
        if started is not None and (self.first_ns is None or started <= self.first_ns):
            return int(started)
        return self.first_ns

    def _next_end(self, start_ns: int) -> int:
        """The end of the next chunk; a long silence is passed over in one."""
        ahead = ((self.latest_ns or start_ns) - SLACK_NS - start_ns) // self._chunk_ns
        return start_ns + self._chunk_ns * (ahead if ahead > SILENCE_CHUNKS else 1)

    def _add(self, record: Record | PackedSpans) -> None:
        if isinstance(record, Columns):
            self._column_buffer(record).add(record)
            self._rows += len(record.t_ns) * len(record.signals)
            if len(record.t_ns):
                self._saw(int(record.t_ns[0]), int(record.t_ns[-1]))
        elif isinstance(record, Rows):
            self._processes.add_rows(record)
            t_ns = times_of(record)
            if len(t_ns):
                self._saw(int(t_ns[0]), int(t_ns[-1]))
        elif isinstance(record, PackedSpans):
            self.dropped_spans += sum([part.dropped for part in record.parts])
            self._processes.add_spans(record)
            self._rows += record.rows
            if self.latest_ns is None:
                self.first_ns = _first_ns(record)
        elif isinstance(record, Spans):
            self.dropped_spans += record.dropped
            self._processes.add_spans(record)
            if self.latest_ns is None and len(record.columns["end_ns"]):
                self.first_ns = int(np.min(record.columns["start_ns"]))
        elif isinstance(record, Header):
            self._add_header(record)
        elif isinstance(record, Clock):
            self._saw(record.monotonic_ns, record.monotonic_ns)
        elif isinstance(record, Event):
            self._add_event(record)
        else:
            self._saw(record.t_ns, record.t_ns)
            self.gaps[record.collector, record.signal, record.device] = record
            self._open_gaps.append(record)

    def _column_buffer(self, record: Columns) -> ColumnBuffer:
        """A collector has a buffer for every set of columns it had."""
        buffers = self._columns.setdefault(record.collector, [])
        for buffer in buffers:
            if buffer.holds(record):
                return buffer
        buffers.append(ColumnBuffer(record.signals, record.devices))
        return buffers[-1]

    def _add_header(self, header: Header) -> None:
        """Every segment begins with one; devices that appeared meanwhile stay."""
        known = {device.get("id") for device in header.devices}
        more = [device for device in self.header.devices if device.get("id") not in known]
        self.header = replace(header, devices=self._users.named([*header.devices, *more]))

    def _add_event(self, event: Event) -> None:
        self._saw(event.t_ns, event.t_ns)
        self._events.append(event)
        if event.kind in ("process-registered", "process-exited"):
            self._processes.add_event(event)
            return
        if event.kind == "device-appeared":
            known = {device.get("id") for device in self.header.devices}
            if event.attributes.get("id") not in known:
                devices = [*self.header.devices, dict(event.attributes)]
                self.header = replace(self.header, devices=devices)
        if event.kind == "device-appeared" or self._users.saw(event):
            self.header = replace(self.header, devices=self._users.named(self.header.devices))
        if len(self.kept_events) < MOST_EVENTS:
            self.kept_events.append(event)

    def _saw(self, first_ns: int, last_ns: int) -> None:
        if self.first_ns is None or first_ns < self.first_ns:
            self.first_ns = first_ns
        if self.latest_ns is None or last_ns > self.latest_ns:
            self.latest_ns = last_ns

    def _cut(self, start_ns: int, end_ns: int, first: bool, last: bool) -> Chunk:
        series: dict[Key, Series] = {}
        for buffer in chain.from_iterable(self._columns.values()):
            merge(series, buffer.take(start_ns, end_ns).items())
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
        )

    def _still_open(self, series: dict[Key, Series], end_ns: int) -> list[Gap]:
        """Gaps that the next chunk begins with: no value of their column came after them."""
        latest = {(gap.collector, gap.signal, gap.device): gap for gap in self._open_gaps}
        open_gaps = []
        for gap in latest.values():
            found = series.get((gap.signal, gap.device))
            if found is not None and gap.t_ns < end_ns:
                after = (found.t_ns > gap.t_ns) & (found.t_ns < end_ns)
                if not np.isnan(found.values[after]).all():
                    continue
            open_gaps.append(gap)
        return open_gaps
