"""Export signals of a recording as counter tracks: a fixed selection, in readable units.

A counter is shown as its growth between two readings, over the time between them. A
value that could not be read is left out: a slice on the track "not measured" shows how
long, and why.

Export lost time and waits between ranks, as the analysis found them.

    rank 0   lost time    |storage|unattributed|        one block per time bin and cause
             waits        |== waits for rank 3 ==|
                                                 | flow: victim to culprit
    rank 3   late         |== late: storage =====x

A block is as long as the time lost in its time bin; when exactly it was lost within the
bin the spans show, not the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterprof import signals
from clusterprof.output.exporters.base import Run, RunNode
from clusterprof.output.exporters.perfetto.packets import (
    Packets,
    compute_id,
    encode_counter_value,
    encode_event,
    encode_varint,
    encode_varints,
)
from clusterprof.output.exporters.perfetto.spans import Lanes, ProcessTracks
from clusterprof.output.exporters.tables import GapReasons
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.history import History, RankHistory, Wait
from clusterprof.signals.signal import Signal
from clusterprof.trace.schema import Columns


@dataclass(frozen=True, slots=True)
class CounterStyle:
    """Title, unit and scale of a counter track."""

    title: str
    unit: str
    factor: float
    """Multiplies the value; for a counter, its growth per nanosecond."""


_PERCENT, _PER_SECOND = 100.0, 1e9
COUNTER_STYLES: dict[Signal, CounterStyle] = {
    signals.GPU_BUSY_TIME: CounterStyle("GPU busy", "%", _PERCENT),
    signals.GPU_BUSY: CounterStyle("GPU utilization", "%", _PERCENT),
    signals.GPU_SM_ACTIVE: CounterStyle("SM active", "%", _PERCENT),
    signals.GPU_TENSOR_ACTIVE: CounterStyle("tensor cores active", "%", _PERCENT),
    signals.GPU_MEMORY_BANDWIDTH: CounterStyle("GPU memory bandwidth", "%", _PERCENT),
    signals.GPU_MEMORY_USED: CounterStyle("GPU memory used", "B", 1),
    signals.GPU_POWER: CounterStyle("GPU power", "W", 1),
    signals.GPU_SM_CLOCK: CounterStyle("SM clock", "Hz", 1),
    signals.GPU_PCIE_RECEIVE: CounterStyle("PCIe to the GPU", "B/s", 1),
    signals.CORE_BUSY: CounterStyle("core busy", "%", _PERCENT),
    signals.GPU_DUTY_CYCLE: CounterStyle("duty cycle", "%", _PERCENT),
    signals.PRESSURE_CPU_SOME: CounterStyle("pressure: CPU", "%", _PERCENT),
    signals.PRESSURE_IO_SOME: CounterStyle("pressure: I/O", "%", _PERCENT),
    signals.PRESSURE_IO_FULL: CounterStyle("pressure: I/O, all tasks", "%", _PERCENT),
    signals.PRESSURE_MEMORY_SOME: CounterStyle("pressure: memory", "%", _PERCENT),
    signals.CGROUP_THROTTLED: CounterStyle("throttled by the CPU quota", "%", _PERCENT),
    signals.CPU_IOWAIT: CounterStyle("CPUs idle waiting for I/O", "CPUs", 1),
    signals.CPU_RUNNABLE: CounterStyle("runnable tasks", "tasks", 1),
    signals.MEMORY_AVAILABLE: CounterStyle("memory available", "B", 1),
    signals.DISK_READ_BYTES: CounterStyle("disk read", "B/s", _PER_SECOND),
    signals.DISK_WRITE_BYTES: CounterStyle("disk write", "B/s", _PER_SECOND),
    signals.DISK_BUSY: CounterStyle("disk busy", "%", _PERCENT),
    signals.NFS_READ_BYTES: CounterStyle("NFS read", "B/s", _PER_SECOND),
    signals.LUSTRE_FETCHED_BYTES: CounterStyle("Lustre read", "B/s", _PER_SECOND),
    signals.CIFS_READ_BYTES: CounterStyle("CIFS read", "B/s", _PER_SECOND),
    signals.NET_RECEIVE: CounterStyle("network receive", "B/s", _PER_SECOND),
    signals.NET_TRANSMIT: CounterStyle("network send", "B/s", _PER_SECOND),
    signals.RDMA_RECEIVE: CounterStyle("RDMA receive", "B/s", _PER_SECOND),
    signals.RDMA_TRANSMIT: CounterStyle("RDMA send", "B/s", _PER_SECOND),
}
_STYLE_BY_NAME = {signal.name: shown for signal, shown in COUNTER_STYLES.items()}
_NODE_ONLY = frozenset({signals.CPU_IOWAIT.name})  # too many tracks
_NODE_DEVICES = ("", "all", "cgroup")


class _Track:
    """State of one signal of one device while its readings are encoded."""

    __slots__ = ("gap_since_ns", "head", "last", "last_ns", "shown", "zero")

    def __init__(self) -> None:
        self.head = b""
        """Encoded start of its values; empty while the track only had zeros, which creates no
        track.
        """
        self.zero = b""
        """Time of the first 0, while there was nothing else."""
        self.last: float | None = None
        """The last reading."""
        self.last_ns = 0
        self.shown: float | None = None
        """The last value that was written."""
        self.gap_since_ns: int | None = None
        """Since when nothing could be read."""


class CounterWriter:
    """Encodes the samples of one node as packets, record by record."""

    def __init__(
        self, node: RunNode, packets: Packets, groups: ProcessTracks, reasons: GapReasons
    ) -> None:
        self._node = node
        self._packets = packets
        self._groups = groups
        self._reasons = reasons
        self._tracks: dict[tuple[str, str, str], _Track] = {}
        self._gap_lanes: dict[int, Lanes] = {}
        self._owner_index: dict[str, int | None] = {}
        for rank in node.ranks:
            is_known = rank.device in self._owner_index
            self._owner_index[rank.device] = None if is_known else rank.index  # shared: the host's

    def encode_record(self, columns: Columns) -> list[bytes]:
        """Return the packets of one record; descriptors wait in `Packets.pending`."""
        chosen = [
            index
            for index, (signal, device) in enumerate(zip(columns.signals, columns.devices))
            if signal in _STYLE_BY_NAME and (signal not in _NODE_ONLY or device in _NODE_DEVICES)
        ]
        if not chosen or not len(columns.t_ns):
            return []
        stamps = encode_varints(self._node.common_ns(columns.t_ns))
        times = columns.t_ns.tolist()
        out: list[bytes] = []
        for index in chosen:
            values, mask = columns.values[index].tolist(), columns.masks[index]
            key = columns.collector, columns.signals[index], columns.devices[index]
            out += self._encode_values(key, times, stamps, values, mask)
        return out

    def _encode_values(
        self,
        key: tuple[str, str, str],
        times: list[int],
        stamps: list[bytes],
        values: list[float],
        mask: bytes | None,
    ) -> list[bytes]:
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = _Track()
        factor, is_counter = _STYLE_BY_NAME[key[1]].factor, key[1].endswith("_total")
        out: list[bytes] = []
        for row, (t_ns, stamp, value) in enumerate(zip(times, stamps, values)):
            if (mask is not None and mask[row]) or value != value:
                if track.gap_since_ns is None and track.last is not None:
                    track.gap_since_ns = track.last_ns
                continue
            if track.gap_since_ns is not None:
                out += self._encode_gap(key, track.gap_since_ns, t_ns)
                track.gap_since_ns = None
            elif is_counter and track.last is not None and t_ns > track.last_ns:
                growth = value - track.last
                if growth >= 0:
                    rate = growth / (t_ns - track.last_ns) * factor
                    previous_stamp = stamps[row - 1] if row else self._encode_time(track.last_ns)
                    out += self._encode_change(track, key, previous_stamp, rate)
                else:
                    out += self._encode_gap(key, track.last_ns, t_ns, "the counter was reset")
            if not is_counter:
                out += self._encode_change(track, key, stamp, value * factor)
            track.last, track.last_ns = value, t_ns
        return out

    def finish(self) -> list[bytes]:
        """Return the gaps still open at the end of the recording."""
        out: list[bytes] = []
        latest = max((track.last_ns for track in self._tracks.values()), default=0)
        for key, track in self._tracks.items():
            if track.gap_since_ns is not None and track.gap_since_ns < latest:
                out += self._encode_gap(key, track.gap_since_ns, latest)
        return out

    def _encode_change(
        self, track: _Track, key: tuple[str, str, str], stamp: bytes, value: float
    ) -> list[bytes]:
        """Encode a value if it differs from the previous one; a track keeps its value until the
        next.
        """
        if value == track.shown:
            return []
        track.shown = value
        if track.head:
            return [encode_counter_value(stamp, track.head, value)]
        if not value:
            track.zero = stamp
            return []
        track.head = self._build_head(key[1], key[2])
        zero = [encode_counter_value(track.zero, track.head, 0.0)] if track.zero else []
        return [*zero, encode_counter_value(stamp, track.head, value)]

    def _encode_time(self, t_ns: int) -> bytes:
        return encode_varint(self._node.instant_ns(t_ns))

    def _build_head(self, signal: str, device: str) -> bytes:
        shown = _STYLE_BY_NAME[signal]
        title = shown.title
        if device not in _NODE_DEVICES or device == "cgroup":
            title += f" · {escape_text(device, 60)}"
        about = f"{signal}: {signals.BY_NAME[signal].doc}"
        return self._packets.counter_head(
            self._packets.counter(self._choose_parent(signal, device), title, shown.unit, about)
        )

    def _choose_parent(self, signal: str, device: str) -> int:
        index = self._owner_index.get(device) if signal.startswith("gpu.") and device else None
        return self._groups.host_track() if index is None else self._groups.rank_track(index)[1]

    def _encode_gap(
        self, key: tuple[str, str, str], start_ns: int, end_ns: int, reason: str = ""
    ) -> list[bytes]:
        """Encode a time without readings as a slice with its reason."""
        if end_ns <= start_ns:
            return []
        collector, signal, device = key
        parent = self._choose_parent(signal, device)
        lane = self._gap_lanes.setdefault(parent, Lanes()).assign_lane(start_ns, end_ns)
        number = f" ({lane + 1})" if lane else ""
        track = self._packets.child(parent, f"not measured{number}")
        reason = reason or self._reasons.find(collector, signal, device)
        why = self._packets.annotation("why", reason)
        device_note = self._packets.annotation("device", escape_text(device, 100))
        begin = self._packets.begin(track, signal, device_note, why)
        return [
            encode_event(self._encode_time(start_ns), begin),
            encode_event(self._encode_time(end_ns), self._packets.end(track)),
        ]


LOST_TRACK, WAITS_TRACK, LATE_TRACK = "lost time", "waits for ranks", "late for others"
_DESCRIPTIONS = {
    LOST_TRACK: "Lost device time by cause. A block is as long as the time lost in its time bin"
    " of the run; within the bin the blocks follow each other.",
    WAITS_TRACK: "The longest waits of this rank for another one.",
    LATE_TRACK: "Other ranks waited for this rank to arrive.",
}


def iterate_wait_packets(
    run: Run, node: RunNode, packets: Packets, groups: ProcessTracks
) -> Iterator[list[bytes]]:
    """Yield the packets of one node's ranks, a few at a time; nothing without a history."""
    history = run.report.history
    if history is None:
        return
    start_ns = run.start_ns()
    places = {rank.index for rank in node.ranks}
    for rank_index in sorted(places):
        if rank_index < len(history.ranks):
            track = packets.child(
                groups.rank_track(rank_index)[1], LOST_TRACK, _DESCRIPTIONS[LOST_TRACK]
            )
            yield from _encode_lost_time(
                history, history.ranks[rank_index], start_ns, packets, track
            )
    for rank_index in sorted(places):
        rank_waits = [
            wait for wait in history.waits if wait.victim == rank_index and wait.duration_ns > 0
        ]
        yield _encode_waits(rank_waits, run, start_ns, packets, groups, rank_index)
        late = [
            wait for wait in history.waits if wait.culprit == rank_index and wait.duration_ns > 0
        ]
        yield _encode_late_slices(late, run, start_ns, packets, groups, rank_index)


def _encode_lost_time(
    history: History, rank: RankHistory, start_ns: int, packets: Packets, track: int
) -> Iterator[list[bytes]]:
    for stretch in range(history.bin_count):
        at_ns = start_ns + stretch * history.bin_ns
        out: list[bytes] = []
        for cause, lost in rank.lost:
            lost_ns = lost[stretch]
            if lost_ns > 0:
                out.append(
                    encode_event(
                        encode_varint(at_ns), packets.begin(track, escape_text(cause, 100))
                    )
                )
                at_ns += lost_ns
                out.append(encode_event(encode_varint(at_ns), packets.end(track)))
        if out:
            yield out


def compute_flow_id(run: Run, wait: Wait) -> int:
    """Compute the id of one wait's arrow, equal in the files of both nodes."""
    victim_rank = run.find_rank(wait.victim)
    identity = (victim_rank[0].key, victim_rank[1].pid) if victim_rank else ("", wait.victim)
    return compute_id(63, "flow", *identity, wait.start_ns)


def _encode_waits(
    waits: Sequence[Wait],
    run: Run,
    start_ns: int,
    packets: Packets,
    groups: ProcessTracks,
    rank_index: int,
) -> list[bytes]:
    lanes, out = Lanes(), []
    for wait in sorted(waits, key=lambda wait: (wait.start_ns + wait.duration_ns, -wait.start_ns)):
        begin_ns = start_ns + wait.start_ns
        end_ns = begin_ns + wait.duration_ns
        lane = lanes.assign_lane(begin_ns, end_ns)
        title = f"{WAITS_TRACK} ({lane + 1})" if lane else WAITS_TRACK
        track = packets.child(groups.rank_track(rank_index)[1], title, _DESCRIPTIONS[WAITS_TRACK])
        culprit = None if wait.culprit is None else run.find_rank(wait.culprit)
        notes = [] if wait.step is None else [packets.annotation("step", wait.step)]
        if culprit is not None:
            notes.append(packets.annotation("culprit_node", escape_text(culprit[0].name, 100)))
        culprit_text = f" for {_format_rank(run, wait.culprit)}"
        if wait.culprit is None and wait.cause:  # no culprit: data transfer, for example
            culprit_text = ""
        name = f"waits{culprit_text}" + (f": {escape_text(wait.cause, 100)}" if wait.cause else "")
        flows = [compute_flow_id(run, wait)] if culprit is not None else []
        out.append(
            encode_event(encode_varint(begin_ns), packets.begin(track, name, *notes, flows=flows))
        )
        out.append(encode_event(encode_varint(end_ns), packets.end(track)))
    return out


def _encode_late_slices(
    waits: Sequence[Wait],
    run: Run,
    start_ns: int,
    packets: Packets,
    groups: ProcessTracks,
    rank_index: int,
) -> list[bytes]:
    """Encode a slice while other ranks waited, with all arrows at its end, where the late rank
    arrives.
    """
    out = []
    for group in _group_overlapping(waits):
        begin_ns = start_ns + group[0].start_ns
        end_ns = start_ns + max(wait.start_ns + wait.duration_ns for wait in group)
        track = packets.child(
            groups.rank_track(rank_index)[1], LATE_TRACK, _DESCRIPTIONS[LATE_TRACK]
        )
        causes = dict.fromkeys(escape_text(wait.cause, 100) for wait in group if wait.cause)
        name = "late: " + (", ".join(causes) or "cause unknown")
        notes = [packets.annotation("ranks_that_waited", len({wait.victim for wait in group}))]
        flows = [
            compute_flow_id(run, wait) for wait in group if run.find_rank(wait.victim) is not None
        ]
        out.append(encode_event(encode_varint(begin_ns), packets.begin(track, name, *notes)))
        out.append(
            encode_event(encode_varint(end_ns), packets.instant(track, "arrives last", flows=flows))
        )
        out.append(encode_event(encode_varint(end_ns), packets.end(track)))
    return out


def _group_overlapping(waits: Sequence[Wait]) -> list[list[Wait]]:
    """Group waits that overlap, by start."""
    groups: list[list[Wait]] = []
    until_ns = -1
    for wait in sorted(waits, key=lambda wait: (wait.start_ns, wait.victim)):
        if not groups or wait.start_ns >= until_ns:
            groups.append([])
        groups[-1].append(wait)
        until_ns = max(until_ns, wait.start_ns + wait.duration_ns)
    return groups


def _format_rank(run: Run, rank_index: int | None) -> str:
    match = None if rank_index is None else run.find_rank(rank_index)
    if match is None:
        return "an unknown rank"
    rank = match[1]
    return f"rank {rank.rank}" if rank.rank is not None else f"pid {rank.pid}"
