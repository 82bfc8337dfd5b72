"""Spans of a recording as slices: each rank a process, its threads nested, its steps on their own.

rank 3 · gpu-a04             process; its pid stands for (node, pid), real ones repeat
  main thread  4711          phases, nested; what crosses another lies on "main thread (2)"
  worker 0     4720          what the dataloader's worker did
  steps                      step 12, step 13, …
  device stood still         the exposed part of waits, by stream events
"""

from __future__ import annotations

from clusterprof.exporters.base import RunNode
from clusterprof.exporters.lanes import Lanes
from clusterprof.exporters.perfetto_packets import Packets, event
from clusterprof.exporters.protobuf import varints
from clusterprof.exporters.span_words import UNKNOWN_OF, VALUES, peer_of, span_name
from clusterprof.exporters.who import Person, Who
from clusterprof.probe import layout
from clusterprof.renderers.text_safety import safe_text
from clusterprof.trace.schema import Spans

HOST_ORDER = 1 << 30  # of processes: behind all ranks
_OTHER_ORDER = 1 << 29
_OWN_TRACK = {
    layout.STEP: "steps",
    layout.EXPOSED: "device stood still",
    layout.EXPOSED_COLLECTIVE: "device stood still in collectives",
    layout.ALLOCATOR: "allocator",
}
_NOT_SHOWN = frozenset({layout.HOOK_NOTE})


class Groups:
    """The processes of a trace: one per rank, one for the host, one for each other process."""

    def __init__(self, node: RunNode, packets: Packets) -> None:
        self._node = node
        self._name = safe_text(node.name, 100)
        self._packets = packets

    def host(self) -> int:
        """Return the track of what belongs to the whole node."""
        return self._packets.process("host", f"host {self._name}", HOST_ORDER)

    def of(self, person: Person) -> tuple[object, int]:
        """Return the process of the rank that somebody is or works for, and its track."""
        rank = person.rank
        if rank is not None:
            return self.rank(rank.place)
        who = ("other", person.pid, person.started_ticks)
        number = "" if person.global_rank is None else f"rank {person.global_rank} · "
        title = f"{number}pid {person.pid} · {self._name}"
        return who, self._packets.process(who, title, _OTHER_ORDER)

    def rank(self, place: int) -> tuple[object, int]:
        """Return the process of the rank at a place of the report, and its track."""
        rank = next(one for one in self._node.ranks if one.place == place)
        who = ("rank", rank.pid, rank.started_ticks)
        title = f"rank {rank.rank}" if rank.rank is not None else f"pid {rank.pid}"
        emulated = " · EMULATED GPU" if rank.emulated else ""
        order = rank.rank if rank.rank is not None else _OTHER_ORDER
        return who, self._packets.process(who, f"{title} · {self._name}{emulated}", order)


class SpanWriter:
    """Turns the spans of one node into packets, record by record."""

    def __init__(self, node: RunNode, packets: Packets, groups: Groups, who: Who) -> None:
        self._node = node
        self._packets = packets
        self._groups = groups
        self._who = who
        self._lanes: dict[tuple[int, int, str], Lanes] = {}
        self._tails: dict[tuple[int, str], bytes] = {}
        self._tracks: dict[tuple[int, int, str, int], int] = {}
        self._names: dict[tuple[int, int], dict[int, str]] = {}

    def packets_of(self, spans: Spans) -> list[bytes]:
        """Return the packets of one record, without those that `Packets.told` holds."""
        if not len(spans.columns["start_ns"]):
            return []
        names = self._names.setdefault((spans.pid, spans.started_ticks), {})
        names.update(spans.names)
        start = spans.columns["start_ns"]
        end = spans.columns["end_ns"]
        begins = varints(self._node.common_ns(start))
        ends = varints(self._node.common_ns(end))
        person = self._who.of(spans.pid, spans.started_ticks)
        out: list[bytes] = []
        rows = zip(
            start.tolist(), end.tolist(), begins, ends,
            *(spans.columns[name].tolist() for name in ("kind", "a", "b", "c", "d")),
        )  # fmt: skip
        for start_ns, end_ns, begin, finish, kind, *values in rows:
            if kind in _NOT_SHOWN or end_ns < start_ns:
                continue
            name = span_name(kind, values[3], names)
            own = _OWN_TRACK.get(kind, "")
            if end_ns == start_ns:
                track = self._track(person, own, 0)
                notes = self._annotations(kind, values)
                out.append(event(begin, self._packets.instant(track, name, *notes)))
                continue
            lane = self._lane(person, own, start_ns, end_ns)
            track = self._track(person, own, lane)
            out.append(event(begin, self._begin(track, kind, name, values)))
            out.append(event(finish, self._end(track)))
        return out

    def _begin(self, track: int, kind: int, name: str, values: list[int]) -> bytes:
        notes = self._annotations(kind, values)
        if kind == layout.STEP and values[0] >= 0:
            return self._packets.begin_once(track, f"step {values[0]}", *notes)
        if notes:
            return self._packets.begin(track, name, *notes)
        tail = self._tails.get((track, name))
        if tail is None:
            tail = self._tails[track, name] = self._packets.begin(track, name)
        return tail

    def _end(self, track: int) -> bytes:
        tail = self._tails.get((track, ""))
        if tail is None:
            tail = self._tails[track, ""] = self._packets.end(track)
        return tail

    def _annotations(self, kind: int, values: list[int]) -> list[bytes]:
        words = VALUES.get(kind)
        if words is None:
            return []
        unknown = UNKNOWN_OF.get(kind, -1)
        found = [
            self._packets.annotated(word, value)
            for word, value in zip(words, values)
            if word and value not in (-1, unknown)
        ]
        peer = peer_of(kind, values[3])
        return found if peer is None else [*found, self._packets.annotated("peer_rank", peer)]

    def _lane(self, person: Person, own: str, start_ns: int, end_ns: int) -> int:
        key = person.pid, person.started_ticks, own
        lanes = self._lanes.get(key)
        if lanes is None:
            lanes = self._lanes[key] = Lanes()
        return lanes.place(start_ns, end_ns)

    def _track(self, person: Person, own: str, lane: int) -> int:
        key = person.pid, person.started_ticks, own, lane
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._named(person, own, lane)
        return track

    def _named(self, person: Person, own: str, lane: int) -> int:
        who, parent = self._groups.of(person)
        if person.role == "worker":
            number = f" {person.number}" if person.number >= 0 else ""
            title = f"worker{number}"
        else:
            title = "main thread"
        if own:
            title = own if person.role != "worker" else f"{title}: {own}"
        elif not lane:
            return self._packets.thread(who, person.pid, title)
        if person.role == "worker" and not own:
            title += f" pid {person.pid}"
        return self._packets.child(parent, title if not lane else f"{title} ({lane + 1})")
