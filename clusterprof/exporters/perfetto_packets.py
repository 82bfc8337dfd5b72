"""Packets of a Perfetto trace (protos/perfetto/trace of google/perfetto), as far as we write them.

One node is one packet sequence. Its id, the ids of its tracks and of its processes are hashes of
the node's key, and its names are told by itself, so that files of several nodes can be put one
behind the other (`cat`). Times are those of the clock of all nodes, as ns since 1970: the trace's
clock is REALTIME, and snapshots say what the node's own clock (64) showed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from clusterprof.exporters.protobuf import fixed, message, number, text, varint

# TracePacket
CLOCK_SNAPSHOT, TIMESTAMP, SEQUENCE, TRACK_EVENT, INTERNED, FLAGS = 6, 8, 10, 11, 12, 13
TRACK_DESCRIPTOR, FIRST_PACKET = 60, 87
CLEARED, NEEDED = 1, 2  # of FLAGS: names begin anew; names told before are used
# TrackEvent
ANNOTATION, TYPE, NAME_IID, TRACK, NAME, DOUBLE, FLOW, FLOW_ENDS = 4, 9, 10, 11, 23, 44, 47, 48
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
REALTIME, OWN_CLOCK = 1, 64
_EXPLICIT = 1  # order of processes: by their rank
_PACKET = b"\x0a"  # field 1 of Trace
_STAMP = varint(TIMESTAMP << 3)
_DOUBLE_TAG = varint(DOUBLE << 3 | 1)
_EVENT_TAG = varint(TRACK_EVENT << 3 | 2)
_ANNOTATION_TAG = varint(ANNOTATION << 3 | 2)
_INT_TAG = varint(4 << 3)


def packet(*parts: bytes) -> bytes:
    """Return one packet made of fields."""
    body = b"".join(parts)
    return _PACKET + varint(len(body)) + body


def event(stamp: bytes, tail: bytes) -> bytes:
    """Return an event: its time as a varint, and all the rest as `Packets` made it."""
    return packet(_STAMP, stamp, tail)


def hashed(bits: int, *words: object) -> int:
    """Return a number of so many bits that stands for these words wherever they are met."""
    digest = blake2b("\0".join(map(str, words)).encode("utf-8", "replace"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") & (1 << bits) - 1) or 1


class Packets:
    """The packet sequence of one node; what must be told before it is used waits in `told`."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.told: list[bytes] = []
        """Packets to write before what was returned last."""
        self._sequence = number(SEQUENCE, hashed(32, key, "sequence"))
        self._front = self._sequence + number(FLAGS, NEEDED)
        self._names: dict[tuple[int, str], int] = {}
        self._known: set[int] = set()
        self._begun: dict[tuple[int, str], bytes] = {}
        self._annotated: dict[str, bytes] = {}
        order = message(TRACK_DESCRIPTOR, number(1, 0), number(19, _EXPLICIT))
        self.told.append(packet(self._sequence, number(FLAGS, CLEARED), number(FIRST_PACKET, 1)))
        self.told.append(packet(self._sequence, order))

    def clock(self, common_ns: int, own_ns: int) -> None:
        """Tell what the node's own clock showed at a time of all nodes."""
        clocks = [
            message(1, number(1, clock), number(2, ns))
            for clock, ns in ((REALTIME, common_ns), (OWN_CLOCK, own_ns))
        ]
        snapshot = message(CLOCK_SNAPSHOT, *clocks, number(2, REALTIME))
        self.told.append(packet(number(TIMESTAMP, common_ns), self._sequence, snapshot))

    # --- tracks ------------------------------------------------------------------------------

    def process(self, who: object, name: str, order: int) -> int:
        """Return the track of a process; `order` says where it stands among all of them."""
        described = message(3, number(1, self._pid(who)), text(6, name))
        return self._track(("process", who), described, number(12, order))

    def thread(self, who: object, tid: int, name: str) -> int:
        """Return the track of a thread of a process that was named before."""
        described = message(4, number(1, self._pid(who)), number(2, tid), text(5, name))
        return self._track(("thread", who, tid), number(5, self._id("process", who)), described)

    def child(self, parent: int, name: str, about: str = "") -> int:
        """Return a track of its own below another."""
        described = (text(2, name), number(15, 2), *((text(14, about),) if about else ()))
        return self._track(("child", parent, name), number(5, parent), *described)

    def counter(self, parent: int, name: str, unit: str, about: str) -> int:
        """Return a track of numbers below another."""
        described = text(2, name), text(14, about), message(8, text(6, unit))
        return self._track(("counter", parent, name), number(5, parent), *described)

    def _pid(self, who: object) -> int:
        """Numbers of processes repeat from node to node; this one does not."""
        return hashed(31, self.key, "pid", who)

    def _id(self, *words: object) -> int:
        return hashed(56, self.key, *words)

    def _track(self, words: tuple[object, ...], *described: bytes) -> int:
        track = self._id(*words)
        if track not in self._known:
            self._known.add(track)
            descriptor = message(TRACK_DESCRIPTOR, number(1, track), *described)
            self.told.append(packet(self._sequence, descriptor))
        return track

    # --- tails of events ---------------------------------------------------------------------

    def begin(self, track: int, name: str, *annotations: bytes, flows: Sequence[int] = ()) -> bytes:
        """Return the begin of a slice; `name` is told once. Flows begin here."""
        head = self._begun.get((track, name))
        if head is None:
            head = number(TYPE, BEGIN) + number(TRACK, track) + self._name(2, name, NAME_IID)
            self._begun[track, name] = head
        body = b"".join((head, *annotations, *[fixed(FLOW, flow) for flow in flows]))
        return b"".join((self._front, _EVENT_TAG, varint(len(body)), body))

    def begin_once(self, track: int, name: str, *annotations: bytes) -> bytes:
        """Return the begin of a slice whose name hardly comes again."""
        return self._event(BEGIN, track, text(NAME, name), *annotations)

    def end(self, track: int) -> bytes:
        """Return the end of the slice that began last on a track."""
        return self._event(END, track)

    def instant(
        self, track: int, name: str, *annotations: bytes, flows: Sequence[int] = ()
    ) -> bytes:
        """Return something without a length. Flows end here."""
        ids = [fixed(FLOW_ENDS, flow) for flow in flows]
        return self._event(INSTANT, track, self._name(2, name, NAME_IID), *annotations, *ids)

    def value(self, track: int) -> bytes:
        """Return what stands before the eight bytes of a counter's value."""
        fields = number(TYPE, COUNTER) + number(TRACK, track) + _DOUBLE_TAG
        return self._front + _EVENT_TAG + varint(len(fields) + 8) + fields

    def annotated(self, name: str, value: int | str) -> bytes:
        """Return a name and a value that the viewer shows beside a slice."""
        head = self._annotated.get(name)
        if head is None:
            head = self._annotated[name] = self._name(3, name, 1)
        what = _INT_TAG + varint(value) if isinstance(value, int) else text(6, value)
        body = head + what
        return _ANNOTATION_TAG + varint(len(body)) + body

    def _event(self, kind: int, track: int, *more: bytes) -> bytes:
        return self._front + message(TRACK_EVENT, number(TYPE, kind), number(TRACK, track), *more)

    def _name(self, table: int, name: str, field: int) -> bytes:
        """Return the field that refers to a name, which is told when it is new."""
        known = self._names.get((table, name))
        if known is None:
            known = self._names[table, name] = len(self._names) + 1
            entry = message(table, number(1, known), text(2, name))
            self.told.append(packet(self._front, message(INTERNED, entry)))
        return number(field, known)


def counted(stamp: bytes, front: bytes, value: float) -> bytes:
    """Return one value of a counter; `front` is what `Packets.value` gave."""
    return event(stamp, front + struct.pack("<d", value))
