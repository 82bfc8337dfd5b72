"""Forge recordings: frames that are valid by length and checksum, and hold other contents.

Anybody who can hand over a recording can write such frames. Three kinds: bytes of a payload are
changed; values of a frame's header become numbers far away, other types, or are missing; records
are decoded, changed (times, values, ranks, pids) and encoded again as the recorder would.
"""

from __future__ import annotations

import random
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clusterprof.trace import frame
from clusterprof.trace.decoder import Decoder
from clusterprof.trace.encoder import Encoder
from clusterprof.trace.schema import Clock, Columns, Event, Gap, Header, Rows, Spans

HEAD = struct.Struct("<4sIIBBBB")
NUMBERS = (0, -1, 1 << 62, -(1 << 62), (1 << 63) - 1, 1 << 31, 10**9, 10**18, 3, 1e308, -0.5)
WORDS = ("", "=cmd|1", "\x1b[2J", "../../etc/passwd", "<script>", "x" * 5000, "1e999", "\ud800")
DAY_NS = 86_400 * 10**9
SHIFTS_NS = (30 * DAY_NS, -30 * DAY_NS, 3600 * 10**9, 10**12, -(10**12), 10**18)
"""By how much a time is moved, ns."""
WHOLE = (0, -1, 1 << 62, -(1 << 62), (1 << 63) - 1, -(1 << 63), 1 << 31, 10**9, 10**15, 3)
Frame = tuple[int, int, int, bytes]
"""kind, schema, codec, payload."""


def forge_bytes(segment: bytes, draw: random.Random) -> bytes:
    """Change bytes of a frame and set its checksum right."""
    frames = read_raw_frames(segment)
    if not frames:
        return segment
    at = draw.randrange(len(frames))
    kind, schema, codec, payload = frames[at]
    data = bytearray(payload)
    for _ in range(draw.choice((1, 2, 8)) if data else 0):
        data[draw.randrange(len(data))] = draw.randrange(256)
    frames[at] = kind, schema, codec, bytes(data)
    return join_raw_frames(frames)


def forge_values(segment: bytes, draw: random.Random) -> bytes:
    """Change values in the header of a frame: a number far away, another type, nothing."""
    frames = read_raw_frames(segment)
    if not frames:
        return segment
    at = draw.randrange(len(frames))
    kind, schema, codec, payload = frames[at]
    size = int.from_bytes(payload[:4], "little")
    try:
        header = msgspec.msgpack.decode(payload[4 : 4 + size])
    except (msgspec.DecodeError, ValueError):
        return segment
    for _ in range(draw.choice((1, 1, 3))):
        header = replace_value(header, draw)
    encoded = msgspec.msgpack.encode(header)
    body = len(encoded).to_bytes(4, "little") + encoded + payload[4 + size :]
    frames[at] = kind, schema, codec, body
    return join_raw_frames(frames)


def replace_value(value: Any, draw: random.Random, depth: int = 0) -> Any:
    """Return the value with one thing in it replaced, somewhere below."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: replace_value(value[key], draw, depth + 1)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        if draw.random() < 0.1:
            return value[:at] + value[at + 1 :] if draw.random() < 0.5 else [*value, *value]
        return [*value[:at], replace_value(value[at], draw, depth + 1), *value[at + 1 :]]
    words = [word.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for word in WORDS]
    return draw.choice((*NUMBERS, *words, None, True, [], {}, [[]], {"": {}}))


def read_raw_frames(segment: bytes) -> list[Frame]:
    """Return the frames of a segment, without checks of what they hold."""
    frames, at = [], 0
    while at + HEAD.size <= len(segment):
        magic, size, checksum, kind, schema, codec, _ = HEAD.unpack_from(segment, at)
        rest = segment[at + 12 : at + HEAD.size + size]
        if magic != frame.MAGIC or zlib.crc32(rest) != checksum:
            break
        frames.append((kind, schema, codec, rest[4:]))
        at += HEAD.size + size
    return frames


def join_raw_frames(frames: Sequence[Frame]) -> bytes:
    """Return a segment of frames with valid lengths and checksums."""
    out = []
    for kind, schema, codec, payload in frames:
        rest = struct.pack("<BBBB", kind, schema, codec, 0) + payload
        out.append(struct.pack("<4sII", frame.MAGIC, len(payload), zlib.crc32(rest)) + rest)
    return b"".join(out)


# --- records ---


def forge_records(segment: bytes, draw: random.Random) -> bytes:
    """Decode the frames, change one to three records, and encode them as the recorder does."""
    decoder, records = Decoder(), []
    for kind, schema, codec, payload in read_raw_frames(segment):
        size = int.from_bytes(payload[:4], "little")
        source = frame.Frame(kind, schema, codec, payload[4 : 4 + size], payload[4 + size :])
        try:
            records += [convert_arrays(record) for record in decoder.records(source)]
        except frame.FrameError:
            continue
    if not records:
        return segment
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(len(records))
        records[at] = forge_record(records[at], draw)
    encoder, frames = Encoder(), []
    for record in records:
        try:
            frames += encoder.frames([record])
        except (ValueError, OverflowError, TypeError):
            continue  # not even our own encoder writes it
    return b"".join(frames)


def forge_record(record: Any, draw: random.Random) -> Any:
    """Return the record with a time or a value in it changed."""
    if isinstance(record, Columns):
        if draw.random() < 0.5 or not record.values:
            return replace(record, t_ns=_forge_array(record.t_ns, draw, is_time=True))
        at = draw.randrange(len(record.values))
        values = list(record.values)
        values[at] = _forge_array(values[at], draw)
        return replace(record, values=values)
    if isinstance(record, Rows):
        at = draw.randrange(len(record.columns))
        columns = list(record.columns)
        columns[at] = _forge_array(columns[at], draw, record.names[at] == "t_ns")
        return replace(record, columns=columns)
    if isinstance(record, Spans):
        name = draw.choice(list(record.columns))
        changed = _forge_array(record.columns[name], draw, name.endswith("_ns"))
        number = draw.choice(("pid", "started_ticks", "first_sequence", "dropped", ""))
        numbers = {number: draw.choice(WHOLE)} if number and draw.random() < 0.3 else {}
        return replace(record, columns={**record.columns, name: changed}, **numbers)
    if isinstance(record, Clock):
        name = draw.choice(("monotonic_ns", "boottime_ns", "realtime_ns"))
        return replace(record, **{name: _forge_whole(getattr(record, name), draw, is_time=True)})
    if isinstance(record, Event | Gap) and draw.random() < 0.4:
        return replace(record, t_ns=_forge_whole(record.t_ns, draw, is_time=True))
    if isinstance(record, Event):
        return replace(record, attributes=replace_value(record.attributes, draw))
    if isinstance(record, Header):
        name = draw.choice(("node", "started", "host", "devices", "launcher", "versions"))
        return replace(record, **{name: replace_value(getattr(record, name), draw)})
    return record


def convert_arrays(record: Any) -> Any:
    """Return a record that was read with its columns as the encoder takes them."""
    if isinstance(record, Columns):
        values = [to_array(column) for column in record.values]
        return replace(record, t_ns=to_array(record.t_ns), values=values)
    if isinstance(record, Rows):
        return replace(record, columns=[to_array(column) for column in record.columns])
    if isinstance(record, Spans):
        columns = {name: to_array(column) for name, column in record.columns.items()}
        return replace(record, columns=columns)
    return record


def to_array(column: Any) -> Any:
    """Return a column as array('q') or array('d')."""
    values = np.asarray(column)
    return array("d" if values.dtype.kind == "f" else "q", values.tolist())


def _forge_array(column: Any, draw: random.Random, is_time: bool = False) -> Any:
    changed = array(column.typecode, column)
    if not len(changed):
        return changed
    first = draw.randrange(len(changed))
    last = draw.choice((first + 1, len(changed)))
    for at in range(first, last):
        if changed.typecode == "d":
            changed[at] = draw.choice((1e308, -1e308, float("nan"), float("inf"), -1.0, 1e18))
        else:
            changed[at] = _forge_whole(changed[at], draw, is_time)
    return changed


def _forge_whole(value: int, draw: random.Random, is_time: bool) -> int:
    if is_time and draw.random() < 0.6:
        value += draw.choice(SHIFTS_NS)
        return max(-(1 << 63), min(value, (1 << 63) - 1))
    return draw.choice(WHOLE)


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    forge_values,
    forge_values,
    forge_records,
    forge_records,
    forge_bytes,
)


def forge_recording(run: Path, number: int) -> None:
    """Forge a copied recording: the same number makes the same changes."""
    draw = random.Random(number)
    segments = sorted(run.rglob("*.cpf"))
    for _ in range(draw.choice((1, 1, 2, 4))):
        mutate = draw.choice(MUTATIONS)
        path = draw.choice(segments)
        path.write_bytes(mutate(path.read_bytes(), draw))


def forge_segment(path: Path, draw: random.Random) -> None:
    """Forge a segment where it lies."""
    path.write_bytes(draw.choice(MUTATIONS)(path.read_bytes(), draw))
