"""Encode packets of a Perfetto trace (protos/perfetto/trace of google/perfetto), as far as
needed.

One node is one packet sequence. Its id and the ids of its tracks and processes are
hashes of the node's key, and it defines its own names, so that files of several nodes
can be concatenated (`cat`). Times are on the common clock, ns since 1970: the trace's
clock is REALTIME, and clock snapshots give the node's own clock (64).

Encode protocol buffers, as far as an exporter needs them.

field_number << 3 | 0    varint: 7 bits a byte, lowest first, high bit = more follow
field_number << 3 | 1    eight bytes, little-endian
field_number << 3 | 2    length as a varint, then so many bytes
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.model import Int

_MIN_NINE_BYTES = 1 << 56  # a varint has nine bytes from here to 2**63


def encode_varint(value: int) -> bytes:
    """Encode an integer of up to 64 bits as a varint; negative ones as their two's complement."""
    return _SHORT[value] if 0 <= value < _SHORT_LIMIT else _encode_long_varint(value)


def _encode_long_varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_SHORT_LIMIT = 1 << 14  # values of up to two bytes: tags, lengths, most values
_SHORT = [_encode_long_varint(value) for value in range(_SHORT_LIMIT)]


def encode_number(field: int, value: int) -> bytes:
    """Encode a field of type int, uint, bool or enum."""
    return encode_varint(field << 3) + encode_varint(value)


def encode_fixed64(field: int, value: int) -> bytes:
    """Encode a field of type fixed64."""
    return encode_varint(field << 3 | 1) + struct.pack("<Q", value & (1 << 64) - 1)


def encode_message(field: int, *parts: bytes) -> bytes:
    """Encode a field that holds a message made of fields, or bytes."""
    body = b"".join(parts)
    return encode_varint(field << 3 | 2) + encode_varint(len(body)) + body


def encode_text(field: int, value: str) -> bytes:
    """Encode a field of type string."""
    return encode_message(field, value.encode("utf-8", "replace"))


def encode_varints(values: Int) -> list[bytes]:
    """Encode integers int64[n] as varints, one bytes object each; current timestamps in bulk."""
    if not values.size:
        return []
    if int(values.min()) < _MIN_NINE_BYTES:
        return [encode_varint(value) for value in values.tolist()]
    data = encode_nine_byte_varints(values).tobytes()
    return [data[offset : offset + 9] for offset in range(0, len(data), 9)]


def encode_nine_byte_varints(values: Int) -> NDArray[np.uint8]:
    """Encode int64[n] from 2**56 to below 2**63 as nine-byte varints, uint8[n, 9]."""
    shifts = np.arange(0, 63, 7, dtype=np.int64)
    out = (values[:, None] >> shifts & 0x7F).astype(np.uint8)
    out[:, :8] |= 0x80
    return out


# TracePacket
CLOCK_SNAPSHOT, TIMESTAMP, SEQUENCE, TRACK_EVENT, INTERNED, FLAGS = 6, 8, 10, 11, 12, 13
TRACK_DESCRIPTOR, FIRST_PACKET = 60, 87
# values of FLAGS: names are reset; earlier names are referenced
SEQUENCE_CLEARED, STATE_NEEDED = 1, 2
# TrackEvent
ANNOTATION, TYPE, NAME_IID, TRACK, NAME, DOUBLE, FLOW, FLOW_ENDS = 4, 9, 10, 11, 23, 44, 47, 48
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
REALTIME, OWN_CLOCK = 1, 64
_EXPLICIT = 1  # processes are ordered explicitly, by rank
_PACKET = b"\x0a"  # field 1 of Trace
_TIMESTAMP_TAG = encode_varint(TIMESTAMP << 3)
_DOUBLE_TAG = encode_varint(DOUBLE << 3 | 1)
_EVENT_TAG = encode_varint(TRACK_EVENT << 3 | 2)
_ANNOTATION_TAG = encode_varint(ANNOTATION << 3 | 2)
_INT_TAG = encode_varint(4 << 3)


def encode_packet(*parts: bytes) -> bytes:
    """Encode one packet from its fields."""
    body = b"".join(parts)
    return _PACKET + encode_varint(len(body)) + body


def encode_event(stamp: bytes, tail: bytes) -> bytes:
    """Encode an event from its time as a varint and the tail that `Packets` made."""
    return encode_packet(_TIMESTAMP_TAG, stamp, tail)


def compute_id(bits: int, *words: object) -> int:
    """Compute an id of so many bits that is the same for the same words in every file."""
    digest = blake2b("\0".join(map(str, words)).encode("utf-8", "replace"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") & (1 << bits) - 1) or 1


class Packets:
    """The packet sequence of one node; definitions wait in `pending` until they are written."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.pending: list[bytes] = []
        """Packets to write before those returned last."""
        self._sequence = encode_number(SEQUENCE, compute_id(32, key, "sequence"))
        self._head = self._sequence + encode_number(FLAGS, STATE_NEEDED)
        self._names: dict[tuple[int, str], int] = {}
        self._known: set[int] = set()
        self._begin_heads: dict[tuple[int, str], bytes] = {}
        self._annotation_heads: dict[str, bytes] = {}
        order = encode_message(TRACK_DESCRIPTOR, encode_number(1, 0), encode_number(19, _EXPLICIT))
        self.pending.append(
            encode_packet(
                self._sequence,
                encode_number(FLAGS, SEQUENCE_CLEARED),
                encode_number(FIRST_PACKET, 1),
            )
        )
        self.pending.append(encode_packet(self._sequence, order))

    def add_clock_snapshot(self, common_ns: int, own_ns: int) -> None:
        """Add a snapshot of the node's own clock at a common time."""
        clocks = [
            encode_message(1, encode_number(1, clock), encode_number(2, ns))
            for clock, ns in ((REALTIME, common_ns), (OWN_CLOCK, own_ns))
        ]
        snapshot = encode_message(CLOCK_SNAPSHOT, *clocks, encode_number(2, REALTIME))
        self.pending.append(
            encode_packet(encode_number(TIMESTAMP, common_ns), self._sequence, snapshot)
        )

    # --- tracks ------------------------------------------------------------------------------

    def process(self, identity: object, name: str, order: int) -> int:
        """Return the track of a process; `order` is its position among all processes."""
        descriptor = encode_message(3, encode_number(1, self._pid(identity)), encode_text(6, name))
        return self._track(("process", identity), descriptor, encode_number(12, order))

    def thread(self, identity: object, tid: int, name: str) -> int:
        """Return the track of a thread of a process that already has a track."""
        descriptor = encode_message(
            4, encode_number(1, self._pid(identity)), encode_number(2, tid), encode_text(5, name)
        )
        return self._track(
            ("thread", identity, tid), encode_number(5, self._id("process", identity)), descriptor
        )

    def child(self, parent: int, name: str, about: str = "") -> int:
        """Return a child track of another track."""
        descriptor = (
            encode_text(2, name),
            encode_number(15, 2),
            *((encode_text(14, about),) if about else ()),
        )
        return self._track(("child", parent, name), encode_number(5, parent), *descriptor)

    def counter(self, parent: int, name: str, unit: str, about: str) -> int:
        """Return a counter track below another track."""
        descriptor = (
            encode_text(2, name),
            encode_text(14, about),
            encode_message(8, encode_text(6, unit)),
        )
        return self._track(("counter", parent, name), encode_number(5, parent), *descriptor)

    def _pid(self, identity: object) -> int:
        """Return an id for a process: pids repeat between nodes, this id does not."""
        return compute_id(31, self.key, "pid", identity)

    def _id(self, *words: object) -> int:
        return compute_id(56, self.key, *words)

    def _track(self, words: tuple[object, ...], *descriptor: bytes) -> int:
        track = self._id(*words)
        if track not in self._known:
            self._known.add(track)
            track_field = encode_message(TRACK_DESCRIPTOR, encode_number(1, track), *descriptor)
            self.pending.append(encode_packet(self._sequence, track_field))
        return track

    # --- tails of events ---------------------------------------------------------------------

    def begin(self, track: int, name: str, *annotations: bytes, flows: Sequence[int] = ()) -> bytes:
        """Return the begin of a slice; `name` is interned. Flows begin here."""
        head = self._begin_heads.get((track, name))
        if head is None:
            head = (
                encode_number(TYPE, BEGIN)
                + encode_number(TRACK, track)
                + self._name(2, name, NAME_IID)
            )
            self._begin_heads[track, name] = head
        body = b"".join((head, *annotations, *[encode_fixed64(FLOW, flow) for flow in flows]))
        return b"".join((self._head, _EVENT_TAG, encode_varint(len(body)), body))

    def begin_once(self, track: int, name: str, *annotations: bytes) -> bytes:
        """Return the begin of a slice whose name rarely repeats."""
        return self._event(BEGIN, track, encode_text(NAME, name), *annotations)

    def end(self, track: int) -> bytes:
        """Return the end of the most recent slice of a track."""
        return self._event(END, track)

    def instant(
        self, track: int, name: str, *annotations: bytes, flows: Sequence[int] = ()
    ) -> bytes:
        """Return an instant event. Flows end here."""
        ids = [encode_fixed64(FLOW_ENDS, flow) for flow in flows]
        return self._event(INSTANT, track, self._name(2, name, NAME_IID), *annotations, *ids)

    def counter_head(self, track: int) -> bytes:
        """Return the bytes before a counter value's eight bytes."""
        fields = encode_number(TYPE, COUNTER) + encode_number(TRACK, track) + _DOUBLE_TAG
        return self._head + _EVENT_TAG + encode_varint(len(fields) + 8) + fields

    def annotation(self, name: str, value: int | str) -> bytes:
        """Return an annotation, a name and value that the viewer shows for a slice."""
        head = self._annotation_heads.get(name)
        if head is None:
            head = self._annotation_heads[name] = self._name(3, name, 1)
        value_bytes = (
            _INT_TAG + encode_varint(value) if isinstance(value, int) else encode_text(6, value)
        )
        body = head + value_bytes
        return _ANNOTATION_TAG + encode_varint(len(body)) + body

    def _event(self, kind: int, track: int, *fields: bytes) -> bytes:
        return self._head + encode_message(
            TRACK_EVENT, encode_number(TYPE, kind), encode_number(TRACK, track), *fields
        )

    def _name(self, table: int, name: str, field: int) -> bytes:
        """Return the field that refers to a name, and define the name when it is new."""
        number = self._names.get((table, name))
        if number is None:
            number = self._names[table, name] = len(self._names) + 1
            entry = encode_message(table, encode_number(1, number), encode_text(2, name))
            self.pending.append(encode_packet(self._head, encode_message(INTERNED, entry)))
        return encode_number(field, number)


def encode_counter_value(stamp: bytes, head: bytes, value: float) -> bytes:
    """Encode one value of a counter; `head` is the result of `Packets.counter_head`."""
    return encode_event(stamp, head + struct.pack("<d", value))
