"""Signals of a recording as counter tracks: a chosen set, in units that people read.

Of a counter the growth between two readings is shown, over the time between them. What could not
be read is no value: a slice on the track "not measured" says how long, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof import signals
from clusterprof.exporters.base import RunNode
from clusterprof.exporters.lanes import Lanes
from clusterprof.exporters.perfetto_packets import Packets, counted, event
from clusterprof.exporters.perfetto_spans import Groups
from clusterprof.exporters.protobuf import varint, varints
from clusterprof.exporters.reasons import Reasons
from clusterprof.renderers.text_safety import safe_text
from clusterprof.signals.made import Signal
from clusterprof.trace.schema import Columns


@dataclass(frozen=True, slots=True)
class Shown:
    """How a signal is drawn."""

    title: str
    unit: str
    factor: float
    """Of the value; of a counter's growth per nanosecond."""


_PERCENT, _PER_SECOND = 100.0, 1e9
CHOSEN: dict[Signal, Shown] = {
    signals.GPU_BUSY_TIME: Shown("GPU busy", "%", _PERCENT),
    signals.GPU_BUSY: Shown("GPU utilisation", "%", _PERCENT),
    signals.GPU_SM_ACTIVE: Shown("SM active", "%", _PERCENT),
    signals.GPU_TENSOR_ACTIVE: Shown("tensor cores active", "%", _PERCENT),
    signals.GPU_MEMORY_BANDWIDTH: Shown("GPU memory bandwidth", "%", _PERCENT),
    signals.GPU_MEMORY_USED: Shown("GPU memory used", "B", 1),
    signals.GPU_POWER: Shown("GPU power", "W", 1),
    signals.GPU_SM_CLOCK: Shown("SM clock", "Hz", 1),
    signals.GPU_PCIE_RECEIVE: Shown("PCIe to the GPU", "B/s", 1),
    signals.CORE_BUSY: Shown("core busy", "%", _PERCENT),
    signals.GPU_DUTY_CYCLE: Shown("duty cycle", "%", _PERCENT),
    signals.PRESSURE_CPU_SOME: Shown("pressure: CPU", "%", _PERCENT),
    signals.PRESSURE_IO_SOME: Shown("pressure: I/O", "%", _PERCENT),
    signals.PRESSURE_IO_FULL: Shown("pressure: I/O, all tasks", "%", _PERCENT),
    signals.PRESSURE_MEMORY_SOME: Shown("pressure: memory", "%", _PERCENT),
    signals.CGROUP_THROTTLED: Shown("held back by the CPU quota", "%", _PERCENT),
    signals.CPU_IOWAIT: Shown("CPUs idle for I/O", "CPUs", 1),
    signals.CPU_RUNNABLE: Shown("runnable tasks", "tasks", 1),
    signals.MEMORY_AVAILABLE: Shown("memory available", "B", 1),
    signals.DISK_READ_BYTES: Shown("disk read", "B/s", _PER_SECOND),
    signals.DISK_WRITE_BYTES: Shown("disk write", "B/s", _PER_SECOND),
    signals.DISK_BUSY: Shown("disk busy", "%", _PERCENT),
    signals.NFS_READ_BYTES: Shown("NFS read", "B/s", _PER_SECOND),
    signals.LUSTRE_FETCHED_BYTES: Shown("Lustre read", "B/s", _PER_SECOND),
    signals.CIFS_READ_BYTES: Shown("CIFS read", "B/s", _PER_SECOND),
    signals.NET_RECEIVE: Shown("network receive", "B/s", _PER_SECOND),
    signals.NET_TRANSMIT: Shown("network send", "B/s", _PER_SECOND),
    signals.RDMA_RECEIVE: Shown("RDMA receive", "B/s", _PER_SECOND),
    signals.RDMA_TRANSMIT: Shown("RDMA send", "B/s", _PER_SECOND),
}
_BY_NAME = {signal.name: shown for signal, shown in CHOSEN.items()}
_NODE_ONLY = frozenset({signals.CPU_IOWAIT.name})  # of every core it would be a forest of tracks
_ALL = ("", "all", "cgroup")


class _Track:
    """One signal of one device, while its readings pass by."""

    __slots__ = ("front", "hole_ns", "last", "last_ns", "shown", "zero")

    def __init__(self) -> None:
        self.front = b""
        """What its values begin with; a track that is never anything but 0 is not made."""
        self.zero = b""
        """Time of the first 0, while there was nothing else."""
        self.last: float | None = None
        """The last reading."""
        self.last_ns = 0
        self.shown: float | None = None
        """The last value that was written."""
        self.hole_ns: int | None = None
        """Since when nothing could be read."""


class CounterWriter:
    """Turns the samples of one node into packets, record by record."""

    def __init__(self, node: RunNode, packets: Packets, groups: Groups, reasons: Reasons) -> None:
        self._node = node
        self._packets = packets
        self._groups = groups
        self._reasons = reasons
        self._tracks: dict[tuple[str, str, str], _Track] = {}
        self._holes: dict[int, Lanes] = {}
        self._owner: dict[str, int | None] = {}
        for rank in node.ranks:
            known = rank.device in self._owner
            self._owner[rank.device] = None if known else rank.place  # several: the host's

    def packets_of(self, columns: Columns) -> list[bytes]:
        """Return the packets of one record, without those that `Packets.told` holds."""
        chosen = [
            index
            for index, (signal, device) in enumerate(zip(columns.signals, columns.devices))
            if signal in _BY_NAME and (signal not in _NODE_ONLY or device in _ALL)
        ]
        if not chosen or not len(columns.t_ns):
            return []
        stamps = varints(self._node.common_ns(columns.t_ns))
        times = columns.t_ns.tolist()
        out: list[bytes] = []
        for index in chosen:
            values, mask = columns.values[index].tolist(), columns.masks[index]
            key = columns.collector, columns.signals[index], columns.devices[index]
            out += self._values(key, times, stamps, values, mask)
        return out

    def _values(
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
        factor, counts = _BY_NAME[key[1]].factor, key[1].endswith("_total")
        out: list[bytes] = []
        for row, (t_ns, stamp, value) in enumerate(zip(times, stamps, values)):
            if (mask is not None and mask[row]) or value != value:
                if track.hole_ns is None and track.last is not None:
                    track.hole_ns = track.last_ns
                continue
            if track.hole_ns is not None:
                out += self._hole(key, track.hole_ns, t_ns)
                track.hole_ns = None
            elif counts and track.last is not None and t_ns > track.last_ns:
                growth = value - track.last
                if growth >= 0:
                    rate = growth / (t_ns - track.last_ns) * factor
                    before = stamps[row - 1] if row else self._stamp(track.last_ns)
                    out += self._changed(track, key, before, rate)
                else:
                    out += self._hole(key, track.last_ns, t_ns, "the counter began anew")
            if not counts:
                out += self._changed(track, key, stamp, value * factor)
            track.last, track.last_ns = value, t_ns
        return out

    def finish(self) -> list[bytes]:
        """Return what is still open at the end of the recording."""
        out: list[bytes] = []
        latest = max((one.last_ns for one in self._tracks.values()), default=0)
        for key, track in self._tracks.items():
            if track.hole_ns is not None and track.hole_ns < latest:
                out += self._hole(key, track.hole_ns, latest)
        return out

    def _changed(
        self, track: _Track, key: tuple[str, str, str], stamp: bytes, value: float
    ) -> list[bytes]:
        """A value that differs from the one before; a track keeps its value until the next."""
        if value == track.shown:
            return []
        track.shown = value
        if track.front:
            return [counted(stamp, track.front, value)]
        if not value:
            track.zero = stamp
            return []
        track.front = self._front(key[1], key[2])
        zero = [counted(track.zero, track.front, 0.0)] if track.zero else []
        return [*zero, counted(stamp, track.front, value)]

    def _stamp(self, t_ns: int) -> bytes:
        return varint(self._node.instant_ns(t_ns))

    def _front(self, signal: str, device: str) -> bytes:
        shown = _BY_NAME[signal]
        name = shown.title
        if device not in _ALL or device == "cgroup":
            name += f" · {safe_text(device, 60)}"
        about = f"{signal}: {signals.BY_NAME[signal].doc}"
        return self._packets.value(
            self._packets.counter(self._parent(signal, device), name, shown.unit, about)
        )

    def _parent(self, signal: str, device: str) -> int:
        place = self._owner.get(device) if signal.startswith("gpu.") and device else None
        return self._groups.host() if place is None else self._groups.rank(place)[1]

    def _hole(
        self, key: tuple[str, str, str], start_ns: int, end_ns: int, reason: str = ""
    ) -> list[bytes]:
        """A stretch without readings, as a slice with its reason."""
        if end_ns <= start_ns:
            return []
        collector, signal, device = key
        parent = self._parent(signal, device)
        lane = self._holes.setdefault(parent, Lanes()).place(start_ns, end_ns)
        number = f" ({lane + 1})" if lane else ""
        track = self._packets.child(parent, f"not measured{number}")
        reason = reason or self._reasons.of(collector, signal, device)
        why = self._packets.annotated("why", reason)
        of = self._packets.annotated("device", safe_text(device, 100))
        begin = self._packets.begin(track, signal, of, why)
        return [
            event(self._stamp(start_ns), begin),
            event(self._stamp(end_ns), self._packets.end(track)),
        ]
