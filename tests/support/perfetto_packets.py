"""An independent decoder of Perfetto traces: protocol buffers, and the events that a viewer shows.

Written after protobuf's and Perfetto's documentation, not after the exporter, so that both cannot
be wrong together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def iterate_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value): ints, eight bytes as bytes, messages as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
        elif kind == 1:
            yield number, data[at : at + 8]
            at += 8
        else:
            assert kind == 2, f"wire type {kind}"
            size, at = _varint(data, at)
            assert at + size <= len(data)
            yield number, data[at : at + size]
            at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def last_value(data: bytes, number: int, default: Any = None) -> Any:
    """Return the last value of a field."""
    values = [value for key, value in iterate_fields(data) if key == number]
    return values[-1] if values else default


def list_values(data: bytes, number: int) -> list[Any]:
    """Return all values of a field."""
    return [value for key, value in iterate_fields(data) if key == number]


@dataclass
class Trace:
    """What a viewer would show."""

    slices: list[tuple[str, str, int, int, dict[str, Any]]] = field(default_factory=list)
    """(track, name, start, end, annotations), by end."""
    instants: list[tuple[str, str, int, dict[str, Any]]] = field(default_factory=list)
    values: list[tuple[str, int, float]] = field(default_factory=list)
    arrows: list[tuple[str, str]] = field(default_factory=list)
    """(slice it leaves, slice it comes to), each as "track > name"."""
    processes: dict[str, int] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    clocks: list[dict[int, int]] = field(default_factory=list)
    sequences: set[int] = field(default_factory=set)


def read_trace(data: bytes) -> Trace:
    """Read a trace as the trace processor does: names in order of the file, events by time."""
    trace, tracks = Trace(), {}
    names: dict[tuple[int, int, int], str] = {}
    events = []
    for number, packet in iterate_fields(data):
        assert number == 1
        sequence, flags = last_value(packet, 10), last_value(packet, 13, 0)
        assert sequence, "a packet without a sequence"
        if flags & 1:
            trace.sequences.add(sequence)
            names = {key: name for key, name in names.items() if key[0] != sequence}
        for table, entries in ((n, list_values(last_value(packet, 12, b""), n)) for n in (2, 3)):
            for entry in entries:
                names[sequence, table, last_value(entry, 1)] = last_value(entry, 2).decode()
        described = last_value(packet, 60)
        if described is not None and last_value(described, 1):
            tracks[last_value(described, 1)] = described
        snapshot = last_value(packet, 6)
        if snapshot is not None:
            assert last_value(snapshot, 2) == 1, "the trace's clock is REALTIME"
            trace.clocks.append(
                {last_value(c, 1): last_value(c, 2) for c in list_values(snapshot, 1)}
            )
        event = last_value(packet, 11)
        if event is not None:
            assert flags & 2 and sequence in trace.sequences
            assert last_value(event, 11) in tracks, "a track is declared before it is used"
            annotations = {
                names[sequence, 3, last_value(a, 1)]: _read_value(a) for a in list_values(event, 4)
            }
            inline = last_value(event, 23)
            name = (
                inline.decode()
                if inline
                else names.get((sequence, 2, last_value(event, 10, 0)), "")
            )
            events.append((last_value(packet, 8), len(events), event, name, annotations))
    _replay_events(trace, tracks, sorted(events))
    return trace


def _read_value(annotation: bytes) -> Any:
    text = last_value(annotation, 6)
    if text is not None:
        return text.decode()
    value = last_value(annotation, 4)
    return value - (1 << 64) if value >> 63 else value


def _replay_events(trace: Trace, tracks: dict[int, bytes], events: list[Any]) -> None:
    def path(track: int) -> str:
        described = tracks[track]
        process, thread = last_value(described, 3), last_value(described, 4)
        if process is not None:
            name = last_value(process, 6).decode()
            assert trace.processes.setdefault(name, last_value(process, 1)) == last_value(
                process, 1
            )
        elif thread is not None:
            name = last_value(thread, 5).decode()
        else:
            name = last_value(described, 2).decode()
        parent = last_value(described, 5)
        whole = f"{path(parent)} | {name}" if parent else name
        if thread is not None:
            trace.threads[whole] = last_value(thread, 2)
        counter = last_value(described, 8)
        if counter is not None:
            trace.units[whole] = last_value(counter, 6).decode()
        return whole

    open_: dict[int, list[Any]] = {}
    flows: dict[bytes, str] = {}
    for ts, _, event, name, notes in events:
        track, kind = last_value(event, 11), last_value(event, 9)
        where = path(track)
        if kind == 1:
            open_.setdefault(track, []).append((name, ts, notes))
            for flow in list_values(event, 47):
                assert flow not in flows
                flows[flow] = f"{where} > {name}"
        elif kind == 2:
            begun, start, popped = open_[track].pop()
            trace.slices.append((where, begun, start, ts, popped))
        elif kind == 3:
            trace.instants.append((where, name, ts, notes))
            trace.arrows += [(flows.pop(f), f"{where} > {name}") for f in list_values(event, 48)]
        else:
            assert kind == 4
            trace.values.append((where, ts, struct.unpack("<d", last_value(event, 44))[0]))
    assert [stack for stack in open_.values() if stack] == [], "slices without an end"
    assert flows == {}, "arrows without a head"
