"""A profiler's trace beside our recording of the same rank: the recording, with exact device times.

Samples say how long a device stood still between two looks; a trace of kernels says when. Where a
trace lies within what we recorded of the same rank, by their wall clocks, the counter
`gpu.busy_ns_total` of the rank's device takes the trace's course there and goes on as before:

    samples     0 ........ 40 ........ 90 ........ 130          ms at work so far
    trace                    |=--==-=|                          what the device did meanwhile
    refined     0 ........ 40 41 41 43 44 .. 86 ... 126

All else of the trace is left out, for the recording has it too, and from nearer by.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.signals import GPU_BUSY_TIME
from clusterprof.timeline.identity import place_of
from clusterprof.timeline.load import NodeLoad
from clusterprof.timeline.model import Float, Int
from clusterprof.timeline.ranks import ranks_of
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Columns, Event, Header, Record, Rows, Spans
from clusterprof.trace.whole import write_node
from clusterprof.units import human

_BUSY = GPU_BUSY_TIME.name


@dataclass(frozen=True, slots=True)
class Trace:
    """What an imported node knows of the device of one rank."""

    folder: Path
    rank: int
    wall_ns: Int
    """Times of its readings by the wall clock, sorted."""
    busy_ns: Float


@dataclass(frozen=True, slots=True)
class Course:
    """What a device's counter shows with a trace laid into it."""

    t_ns: Int
    """Edges of the trace on the clock of the recording."""
    busy_ns: Float
    """The counter there."""
    shift_ns: float
    """What later readings are higher by."""

    def read(self, t_ns: Int, values: Float) -> Float:
        """Return the counter at some of its readings."""
        within = np.interp(t_ns, self.t_ns, self.busy_ns)
        late = np.where(t_ns > self.t_ns[-1], values + self.shift_ns, within)
        return np.where(t_ns < self.t_ns[0], values, late)


def refined(
    nodes: Sequence[Path], imported: Sequence[Path], place: Path
) -> tuple[list[Path], list[Path], list[str]]:
    """Return the nodes, some of them in copies below `place`, what is left of the imported ones,
    and what a reader should know. Raises OSError when a copy cannot be written."""
    traces = [trace for folder in imported for trace in _traces(folder)]
    out, used, notes = [], set(), []
    for number, folder in enumerate(nodes):
        courses: dict[str, Course] = {}
        for device, (rank, own) in _devices(folder, {one.rank for one in traces}).items():
            for trace in traces:
                course = _course(trace, folder, device) if trace.rank == rank else None
                if course is None or trace.folder in used:
                    continue
                courses[device] = course
                used.add(trace.folder)
                from_, until = (human(t - own, "ns") for t in (course.t_ns[0], course.t_ns[-1]))
                notes.append(
                    f"rank {rank}: from {from_} to {until} of the recording, device times are"
                    " those of its imported trace"
                )
        if courses:
            copy = place / f"refined-{number:04d}"
            _copied(folder, copy, courses)
        out.append(copy if courses else folder)
    return out, [folder for folder in imported if folder not in used], notes


def _traces(folder: Path) -> Iterator[Trace]:
    """The ranks of an imported node with a rank, a wall clock and an exact device."""
    header, ranks = None, {}
    readings: dict[str, list[tuple[Int, Float]]] = {}
    for record in NodeReader(folder):
        if isinstance(record, Header):
            header = record
        elif isinstance(record, Event) and record.kind == "process-registered":
            number = place_of(record.attributes).rank
            if number is not None:
                ranks[number] = str(record.attributes.get("device") or "")
        elif isinstance(record, Columns):
            for row, name in enumerate(record.signals):
                if name == _BUSY:
                    read = np.asarray(record.t_ns), np.asarray(record.values[row], np.float64)
                    readings.setdefault(record.devices[row], []).append(read)
    if header is None or "realtime_ns" not in header.started:
        return
    ahead_ns = header.started["realtime_ns"] - header.started["monotonic_ns"]
    for rank, device in ranks.items():
        if device in readings:
            t_ns = np.concatenate([t for t, _ in readings[device]]) + ahead_ns
            yield Trace(folder, rank, t_ns, np.concatenate([v for _, v in readings[device]]))


def _devices(folder: Path, wanted: set[int]) -> dict[str, tuple[int, int]]:
    """The device of each wanted rank of a node of ours, with the rank and when its chunk began."""
    if not wanted:
        return {}
    chunk = next(NodeLoad(folder).chunks(), None)
    if chunk is None:
        return {}
    found = [rank for rank in ranks_of(chunk) if rank.rank in wanted and rank.device]
    return {one.device: (one.rank or 0, chunk.start_ns) for one in found}


def _course(trace: Trace, folder: Path, device: str) -> Course | None:
    """Lay a trace into the counter of a device; None where they do not lie over each other."""
    t_parts, v_parts = [], []
    started: Mapping[str, Any] = {}
    for record in NodeReader(folder):
        if isinstance(record, Header):
            started = started or record.started
        elif isinstance(record, Columns):
            for row, name in enumerate(zip(record.signals, record.devices)):
                if name == (_BUSY, device):
                    t_parts.append(np.asarray(record.t_ns))
                    v_parts.append(np.asarray(record.values[row], np.float64))
    if not t_parts or "realtime_ns" not in started:
        return None
    t_ns, own = np.concatenate(t_parts), np.concatenate(v_parts)
    edges = trace.wall_ns - (started["realtime_ns"] - started["monotonic_ns"])
    if edges[0] < t_ns[0] or edges[-1] > t_ns[-1]:
        return None
    before, after = np.interp(edges[[0, -1]], t_ns, own)
    busy_ns = before + trace.busy_ns - trace.busy_ns[0]
    return Course(edges, busy_ns, float(busy_ns[-1] - after))


def _copied(folder: Path, copy: Path, courses: Mapping[str, Course]) -> None:
    reader = NodeReader(folder)
    header = next((record for record in reader if isinstance(record, Header)), None)
    assert header is not None  # a course was laid by its clock
    write_node(copy, header, _refined(reader, courses))


def _refined(reader: NodeReader, courses: Mapping[str, Course]) -> Iterator[list[Record]]:
    """The records of a node, with the readings of a trace among its own."""
    given = dict.fromkeys(courses, 0)
    for some in reader.frames():
        until_ns = max((_last_ns(record) for record in some), default=0)
        out: list[Record] = []
        for device, course in courses.items():
            row = int(course.t_ns.searchsorted(until_ns, side="right"))
            if row > given[device]:
                part = slice(given[device], row)
                times = array("q", course.t_ns[part].tobytes())
                values = array("d", course.busy_ns[part].tobytes())
                name = f"trace:{device}"
                out.append(Columns(name, [_BUSY], [device], times, [values], [None]))
                given[device] = row
        yield out + [_rewritten(record, courses) for record in some]


def _last_ns(record: Record) -> int:
    if isinstance(record, Columns):
        return int(record.t_ns[-1]) if len(record.t_ns) else 0
    return int(record.t_ns) if isinstance(record, Event) else 0


def _rewritten(record: Record, courses: Mapping[str, Course]) -> Record:
    """A record as the encoder takes it; readings of a device with a course follow that."""
    if isinstance(record, Columns):
        values = [np.asarray(column) for column in record.values]
        for row, (signal, device) in enumerate(zip(record.signals, record.devices)):
            if signal == _BUSY and device in courses:
                read = courses[device].read(record.t_ns, values[row].astype(np.float64))
                values[row] = np.rint(read).astype(values[row].dtype)
        masks = [None if mask is None else bytes(mask) for mask in record.masks]
        return replace(
            record, t_ns=_plain(record.t_ns), values=[_plain(v) for v in values], masks=masks
        )
    if isinstance(record, Rows):
        return replace(record, columns=[_plain(column) for column in record.columns])
    if isinstance(record, Spans):
        return replace(record, columns={k: _plain(v) for k, v in record.columns.items()})
    return record


def _plain(column: Any) -> array[Any]:
    column = np.ascontiguousarray(column)
    return array("d" if column.dtype.kind == "f" else "q", column.tobytes())
