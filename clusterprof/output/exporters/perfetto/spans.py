"""Export spans as slices: each rank is a process, its threads are nested, its steps a
track.

rank 3 · gpu-a04             process; its pid stands for (node, pid), since pids repeat
  main thread  4711          phases, nested; crossing spans are put on "main thread (2)"
  worker 0     4720          activity of the dataloader's worker
  steps                      step 12, step 13, …
  device stood still         the exposed part of waits, by stream events

It also assigns spans of one thread to lanes on which spans nest or are disjoint, but never cross.

a |-----------|             lane 0    a contains c
c    |----|
b          |-------|        lane 1    b crosses a, so it needs another lane
"""

from __future__ import annotations

from clusterprof.output.exporters.base import RunNode
from clusterprof.output.exporters.perfetto.packets import Packets, encode_event, encode_varints
from clusterprof.output.exporters.processes import (
    UNKNOWN_VALUE,
    VALUE_NAMES,
    ProcessDirectory,
    SpanProcess,
    decode_peer,
    format_span_name,
)
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.probe import layout
from clusterprof.trace.schema import Spans

MAX_LANE_SPANS = 4096
"""Spans a lane tracks individually; older ones are merged into the time they cover."""


class Lanes:
    """Assigns lanes to spans given in the order in which they ended, as in recordings."""

    def __init__(self) -> None:
        self._lanes: list[list[tuple[int, int]]] = []

    def assign_lane(self, start_ns: int, end_ns: int) -> int:
        """Return the number of the first lane on which the span crosses no other."""
        for number, lane in enumerate(self._lanes):
            if _insert_span(lane, start_ns, end_ns):
                return number
        self._lanes.append([(start_ns, end_ns)])
        return len(self._lanes) - 1


def _insert_span(lane: list[tuple[int, int]], start_ns: int, end_ns: int) -> bool:
    """Insert the span into the lane if it fits; the lane keeps the outermost spans, by time."""
    index = len(lane)
    while index and lane[index - 1][0] > start_ns and lane[index - 1][1] <= end_ns:
        index -= 1  # inside the new span
    if index and lane[index - 1][1] > start_ns:
        return False  # crossing, enclosing (it was recorded late), or begun at the same instant
    lane[index:] = [(start_ns, end_ns)]
    if len(lane) > MAX_LANE_SPANS:
        half = MAX_LANE_SPANS // 2
        lane[:half] = [(lane[0][0], lane[half - 1][1])]
    return True


HOST_ORDER = 1 << 30  # order of the host's process: after all ranks
_OTHER_ORDER = 1 << 29
_TRACK_OF_KIND = {
    layout.STEP: "steps",
    layout.EXPOSED: "device idle",
    layout.EXPOSED_COLLECTIVE: "device idle in collectives",
    layout.ALLOCATOR: "allocator",
    layout.DEBUG_MODES: "debugging",
}
_HIDDEN_KINDS = frozenset({layout.HOOK_NOTE})


class ProcessTracks:
    """The process tracks of a trace: one per rank, one for the host, one for each other
    process.
    """

    def __init__(self, node: RunNode, packets: Packets) -> None:
        self._node = node
        self._name = escape_text(node.name, 100)
        self._packets = packets

    def host_track(self) -> int:
        """Return the track of the whole node."""
        return self._packets.process("host", f"host {self._name}", HOST_ORDER)

    def process_track(self, process: SpanProcess) -> tuple[object, int]:
        """Return the identity and track of the rank that a process is or works for."""
        rank = process.rank
        if rank is not None:
            return self.rank_track(rank.index)
        identity = ("other", process.pid, process.started_ticks)
        number = "" if process.global_rank is None else f"rank {process.global_rank} · "
        title = f"{number}pid {process.pid} · {self._name}"
        return identity, self._packets.process(identity, title, _OTHER_ORDER)

    def rank_track(self, rank_index: int) -> tuple[object, int]:
        """Return the identity and track of the rank at an index of the report."""
        run_rank = next(rank for rank in self._node.ranks if rank.index == rank_index)
        identity = ("rank", run_rank.pid, run_rank.started_ticks)
        title = f"rank {run_rank.rank}" if run_rank.rank is not None else f"pid {run_rank.pid}"
        emulated = " · EMULATED GPU" if run_rank.emulated else ""
        order = run_rank.rank if run_rank.rank is not None else _OTHER_ORDER
        return identity, self._packets.process(identity, f"{title} · {self._name}{emulated}", order)


class SpanWriter:
    """Encodes the spans of one node as packets, record by record."""

    def __init__(
        self, node: RunNode, packets: Packets, groups: ProcessTracks, processes: ProcessDirectory
    ) -> None:
        self._node = node
        self._packets = packets
        self._groups = groups
        self._processes = processes
        self._lanes: dict[tuple[int, int, str], Lanes] = {}
        self._tails: dict[tuple[int, str], bytes] = {}
        self._tracks: dict[tuple[int, int, str, int], int] = {}
        self._names: dict[tuple[int, int], dict[int, str]] = {}

    def encode_record(self, spans: Spans) -> list[bytes]:
        """Return the packets of one record; descriptors wait in `Packets.pending`."""
        if not len(spans.columns["start_ns"]):
            return []
        names = self._names.setdefault((spans.pid, spans.started_ticks), {})
        names.update(spans.names)
        start = spans.columns["start_ns"]
        end = spans.columns["end_ns"]
        begins = encode_varints(self._node.common_ns(start))
        ends = encode_varints(self._node.common_ns(end))
        process = self._processes.find(spans.pid, spans.started_ticks)
        out: list[bytes] = []
        rows = zip(
            start.tolist(),
            end.tolist(),
            begins,
            ends,
            *(spans.columns[name].tolist() for name in ("kind", "a", "b", "c", "d")),
        )
        for start_ns, end_ns, begin, finish, kind, *values in rows:
            if kind in _HIDDEN_KINDS or end_ns < start_ns:
                continue
            name = format_span_name(kind, values[3], names)
            own_track = _TRACK_OF_KIND.get(kind, "")
            if end_ns == start_ns:
                track = self._get_track(process, own_track, 0)
                notes = self._encode_annotations(kind, values)
                out.append(encode_event(begin, self._packets.instant(track, name, *notes)))
                continue
            lane = self._assign_lane(process, own_track, start_ns, end_ns)
            track = self._get_track(process, own_track, lane)
            out.append(encode_event(begin, self._encode_begin(track, kind, name, values)))
            out.append(encode_event(finish, self._encode_end(track)))
        return out

    def _encode_begin(self, track: int, kind: int, name: str, values: list[int]) -> bytes:
        notes = self._encode_annotations(kind, values)
        if kind == layout.STEP and values[0] >= 0:
            return self._packets.begin_once(track, f"step {values[0]}", *notes)
        if notes:
            return self._packets.begin(track, name, *notes)
        tail = self._tails.get((track, name))
        if tail is None:
            tail = self._tails[track, name] = self._packets.begin(track, name)
        return tail

    def _encode_end(self, track: int) -> bytes:
        tail = self._tails.get((track, ""))
        if tail is None:
            tail = self._tails[track, ""] = self._packets.end(track)
        return tail

    def _encode_annotations(self, kind: int, values: list[int]) -> list[bytes]:
        words = VALUE_NAMES.get(kind)
        if words is None:
            return []
        unknown = UNKNOWN_VALUE.get(kind, -1)
        annotations = [
            self._packets.annotation(word, value)
            for word, value in zip(words, values)
            if word and value not in (-1, unknown)
        ]
        peer = decode_peer(kind, values[3])
        return (
            annotations
            if peer is None
            else [*annotations, self._packets.annotation("peer_rank", peer)]
        )

    def _assign_lane(self, process: SpanProcess, own_track: str, start_ns: int, end_ns: int) -> int:
        key = process.pid, process.started_ticks, own_track
        lanes = self._lanes.get(key)
        if lanes is None:
            lanes = self._lanes[key] = Lanes()
        return lanes.assign_lane(start_ns, end_ns)

    def _get_track(self, process: SpanProcess, own_track: str, lane: int) -> int:
        key = process.pid, process.started_ticks, own_track, lane
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._create_track(process, own_track, lane)
        return track

    def _create_track(self, process: SpanProcess, own_track: str, lane: int) -> int:
        identity, parent = self._groups.process_track(process)
        if process.role == "worker":
            number = f" {process.worker_number}" if process.worker_number >= 0 else ""
            title = f"worker{number}"
        else:
            title = "main thread"
        if own_track:
            title = own_track if process.role != "worker" else f"{title}: {own_track}"
        elif not lane:
            return self._packets.thread(identity, process.pid, title)
        if process.role == "worker" and not own_track:
            title += f" pid {process.pid}"
        return self._packets.child(parent, title if not lane else f"{title} ({lane + 1})")
