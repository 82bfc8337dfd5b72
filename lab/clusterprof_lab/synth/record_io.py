"""Disks, NFS mounts and the network, as threads of the job and of its neighbors use them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.errors import Unavailable
from clusterprof.signals import Signal
from clusterprof_lab.synth.interval_sums import limit_growth, measure_covered_ns, sum_amounts
from clusterprof_lab.synth.record_node import Column, round_to_unit
from clusterprof_lab.synth.recorder_view import RecorderView

Int = NDArray[np.int64]
Float = NDArray[np.float64]

MS = 1_000_000
LINK_BYTES_PER_SECOND = 25e9 / 8
NIC = "eth0"
_NO_ANSWER = Unavailable("absent", "no connection of the job has measured it", "")
_READ_BYTES = 131_072  # of one request, where the story does not count them
_PACKET_BYTES = 8_900


class IoRequests:
    """The requests of acts to a disk, mount or host; m rows."""

    def __init__(self, sight: RecorderView, wanted: Callable[[str, str], bool]) -> None:
        rows = [
            (
                track.start_ns[i],
                track.end_ns[i],
                act.resource,
                act.what,
                act.bytes,
                act.operations,
                act.queued_ns,
            )
            for track, picked in _select_requests(sight, wanted)
            for i in picked
            for act in (track.acts[i],)
        ]
        columns = list(zip(*rows)) or [()] * 7
        self.start_ns, self.end_ns = (np.array(c, np.int64) for c in columns[:2])
        self.resource, self.what = (np.array(c, np.str_) for c in columns[2:4])
        self.bytes, self.operations, self.queued_ns = (np.array(c, np.int64) for c in columns[4:])

    def sum_until(self, of: NDArray[np.bool_], amounts: Int | Float, t_ns: Int) -> Float:
        """Return float64[n]: the amount of these rows that was complete by each time."""
        return sum_amounts(self.start_ns[of], self.end_ns[of], amounts[of], t_ns)

    @property
    def length_ns(self) -> Int:
        """How long each took."""
        return self.end_ns - self.start_ns


def _select_requests(sight: RecorderView, wanted: Callable[[str, str], bool]):  # type: ignore[no-untyped-def]
    codes = [code for key, code in sight.codes.of.items() if wanted(*key)]
    for track in sight.everybody if codes else ():
        yield track, np.flatnonzero(np.isin(track.code, codes)).tolist()


def list_disks(sight: RecorderView) -> tuple[str, ...]:
    """Return the disks of a node; one that only an act or a signal names is one too."""
    named = sight.list_story_devices("disk.")
    for track in sight.everybody:
        named += [act.resource for act in track.acts if act.doing == "block-io" and act.resource]
    return tuple(dict.fromkeys([*sight.node.disks, *named]))


def make_disk_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """/proc/diskstats; a request without a disk's name is for the last one."""
    names = list_disks(sight)
    t_ns = sight.t_ns[ticks]
    asked = IoRequests(sight, lambda doing, what: doing == "block-io" or what in ("swap", "fault"))
    where = np.where(np.isin(asked.resource, names), asked.resource, names[-1])
    writes = np.isin(asked.what, ("write", "fsync"))
    columns = []
    for name in names:
        mine = where == name
        waits: dict[str, Float] = {}
        for of, kinds in ((mine & ~writes, _READS), (mine & writes, _WRITES)):
            guess = np.maximum(1, asked.bytes // _READ_BYTES)
            requests = np.where(asked.operations > 0, asked.operations, guess)
            amounts = (asked.bytes, requests, asked.length_ns)
            for signal, amount, unit in zip(kinds, amounts, (512, 1, MS)):
                total = asked.sum_until(of, amount, t_ns) + sight.compute_story_growth(
                    signal.name, name, ticks
                )
                waits[signal.name] = total
                columns.append(
                    Column(
                        signal, name, round_to_unit(sight.draw_initial_value(unit) + total, unit)
                    )
                )
        busy = measure_covered_ns(asked.start_ns[mine], asked.end_ns[mine], t_ns)
        busy = limit_growth(
            busy + sight.compute_story_growth(signals.DISK_BUSY.name, name, ticks), t_ns
        )
        queue = waits[signals.DISK_READ_TIME.name] + waits[signals.DISK_WRITE_TIME.name]
        queue = queue + sight.compute_story_growth(signals.DISK_QUEUE.name, name, ticks)
        for signal, total in ((signals.DISK_BUSY, busy), (signals.DISK_QUEUE, queue)):
            columns.append(
                Column(signal, name, round_to_unit(sight.draw_initial_value(MS) + total, MS))
            )
    return columns


_READS = (signals.DISK_READ_BYTES, signals.DISK_READS, signals.DISK_READ_TIME)
_WRITES = (signals.DISK_WRITE_BYTES, signals.DISK_WRITES, signals.DISK_WRITE_TIME)


_SLOTS = 64
# Drawn by chance; what came later begins at 0, so that earlier jobs stay as they were.
_BASED = (signals.NFS_READ_BYTES, signals.NFS_WRITE_BYTES, signals.NFS_BACKLOG)


def list_nfs_mounts(sight: RecorderView) -> list[str]:
    """Return the mount points of NFS file systems."""
    return [point for point, _, kind in sight.node.mounts if kind.startswith("nfs")]


def make_mount_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """/proc/self/mountstats: what each operation waited for a slot and for its reply."""
    points = list_nfs_mounts(sight)
    asked = IoRequests(sight, lambda doing, what: doing == "nfs")
    where = np.where(np.isin(asked.resource, points), asked.resource, (points or [""])[-1])
    columns: list[Column] = []
    for point in points:
        columns += _make_mount_columns(sight, ticks, asked, where == point, point)
    return columns


def _make_mount_columns(
    sight: RecorderView, ticks: Int, asked: IoRequests, mine: NDArray[np.bool_], point: str
) -> list[Column]:
    t_ns = sight.t_ns[ticks]
    what = np.where(asked.what == "", "READ", asked.what)
    requests = np.maximum(asked.operations, 1)
    # Requests of one act follow each other: together they took as long as the act.
    queued = np.minimum(asked.queued_ns, asked.length_ns)
    reply = asked.length_ns - queued
    backlog = np.where(queued > 0, requests * np.maximum(1, queued // np.maximum(reply, 1)), 0)
    in_use = requests * np.where(queued > 0, _SLOTS, 1)
    columns = []
    for signal, of, amount in (
        (signals.NFS_READ_BYTES, mine & (what == "READ"), asked.bytes),
        (signals.NFS_WRITE_BYTES, mine & (what == "WRITE"), asked.bytes),
        (signals.NFS_CONNECTIONS, mine, None),
        (signals.NFS_CONNECTS, mine, 0 * requests),
        (signals.NFS_SENDS, mine, requests),
        (signals.NFS_BAD_XIDS, mine, 0 * requests),
        (signals.NFS_SLOTS_USED, mine, in_use),
        (signals.NFS_BACKLOG, mine, backlog),
        (signals.NFS_SLOTS_MOST, mine, None),
        (signals.NFS_SENDING, mine, 0 * requests),
        (signals.NFS_PENDING, mine, in_use),
    ):
        if amount is None:  # one connection, whose slots have all been in use
            now = 1 if signal is signals.NFS_CONNECTIONS else _SLOTS
            columns.append(Column(signal, point, np.full(ticks.size, float(now))))
            continue
        total = asked.sum_until(of, amount, t_ns) + sight.compute_story_growth(
            signal.name, point, ticks
        )
        base = sight.draw_initial_value() if signal in _BASED else 0
        columns.append(Column(signal, point, round_to_unit(base + total, 1)))
    listed = [
        d.removeprefix(f"{point}:") for d in sight.list_story_devices("nfs.") if f"{point}:" in d
    ]
    for op in dict.fromkeys(["READ", "WRITE", *sorted(set(what[mine].tolist())), *listed]):
        of = mine & (what == op)
        device = f"{point}:{op}"
        for signal, amount, unit in (
            (signals.NFS_OPS, requests, 1),
            (signals.NFS_RETRANSMITS, 0 * requests, 1),
            (signals.NFS_QUEUE, queued, MS),
            (signals.NFS_RTT, reply, MS),
            (signals.NFS_EXECUTE, asked.length_ns, MS),
            (signals.NFS_TIMEOUTS, 0 * requests, 1),
        ):
            total = asked.sum_until(of, amount, t_ns) + sight.compute_story_growth(
                signal.name, device, ticks
            )
            base = 0 if signal is signals.NFS_TIMEOUTS else sight.draw_initial_value(unit)
            columns.append(Column(signal, device, round_to_unit(base + total, unit)))
    return columns


_LINK = (signals.NET_LINK_SPEED,)
_TRAFFIC = (
    signals.NET_RECEIVE,
    signals.NET_TRANSMIT,
    signals.NET_RECEIVE_DROPS,
    signals.NET_TRANSMIT_DROPS,
    signals.NET_ERRORS,
    signals.NET_LINK_SPEED,
    signals.NET_CARRIER_CHANGES,
)
_TCP = (signals.TCP_SEGMENTS, signals.TCP_RETRANSMITS, signals.TCP_TIMEOUTS)
_OF_NETWORK = tuple(signal.name for signal in _TRAFFIC)


def list_nics(sight: RecorderView) -> list[str]:
    """Return the network interfaces of a node, the job's own first."""
    return sight.list_story_devices(*_OF_NETWORK, "tcp.job_") or [NIC]


def make_network_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """/proc/net/dev, link speeds, and TCP's counters of the machine."""
    t_ns = sight.t_ns[ticks]
    asked = IoRequests(sight, lambda doing, what: doing in ("socket", "nfs"))
    all_of = np.ones(len(asked.bytes), np.bool_)
    received = asked.sum_until(all_of, asked.bytes, t_ns)
    columns = []
    for number, nic in enumerate(list_nics(sight)):
        for signal in _TRAFFIC:
            if signal is signals.NET_LINK_SPEED:
                speed = sight.get_story_gauge(signal.name, nic, ticks, LINK_BYTES_PER_SECOND)
                columns.append(Column(signal, nic, speed))
                continue
            total = sight.compute_story_growth(signal.name, nic, ticks)
            if number == 0 and signal is signals.NET_RECEIVE:
                total = total + received
            small = signal not in (signals.NET_RECEIVE, signals.NET_TRANSMIT)
            columns.append(
                Column(
                    signal,
                    nic,
                    round_to_unit(total + (2 if small else sight.draw_initial_value()), 1),
                )
            )
    sent = np.zeros(len(ticks))
    for nic in list_nics(sight):
        sent = (
            sent + sight.compute_story_growth(signals.NET_TRANSMIT.name, nic, ticks) / _PACKET_BYTES
        )
    for signal in _TCP:
        total = sight.compute_story_growth(signal.name, "", ticks)
        total = total + (sent if signal is signals.TCP_SEGMENTS else 0)
        columns.append(Column(signal, "", round_to_unit(sight.draw_initial_value() + total, 1)))
    return columns


_JOB_GAUGES: tuple[tuple[Signal, float | None], ...] = (
    (signals.TCP_JOB_CONNECTIONS, 8.0),
    (signals.TCP_JOB_UNSENT, 0.0),
    (signals.TCP_JOB_UNREAD, 0.0),
    (signals.TCP_JOB_LOST, 0.0),
    (signals.TCP_JOB_RTT, 60_000.0),
    (signals.TCP_JOB_MIN_RTT, 40_000.0),
    (signals.TCP_JOB_DELIVERY, None),
)
_JOB_COUNTERS = (
    signals.TCP_JOB_RETRANSMITS,
    signals.TCP_JOB_ECN_MARKED,
    signals.TCP_JOB_BUSY,
    signals.TCP_JOB_RWND_LIMITED,
    signals.TCP_JOB_SNDBUF_LIMITED,
    signals.TCP_JOB_ACKED,
    signals.TCP_JOB_RECEIVED,
)


def make_socket_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """The job's own TCP connections, by interface; none where the story has none."""
    columns = []
    for nic in sight.list_story_devices("tcp.job_"):
        for gauge, otherwise in _JOB_GAUGES:
            has_values = bool(sight.get_story_values(gauge.name, nic)) or otherwise is not None
            values = sight.get_story_gauge(gauge.name, nic, ticks, otherwise or 0.0)
            columns.append(Column(gauge, nic, values, None if has_values else _NO_ANSWER))
        for signal in _JOB_COUNTERS:
            columns.append(
                Column(
                    signal,
                    nic,
                    round_to_unit(sight.compute_story_growth(signal.name, nic, ticks), 1),
                )
            )
    return columns


def make_story_collector(*names: Signal) -> Callable[[RecorderView, Int], list[Column]]:
    """Return a collector of counters and gauges whose values are only in the story."""

    def collect(sight: RecorderView, ticks: Int) -> list[Column]:
        columns = []
        for device in sight.list_story_devices(*(signal.name for signal in names)):
            for signal in names:
                if signal.is_counter:
                    total = sight.draw_initial_value() + sight.compute_story_growth(
                        signal.name, device, ticks
                    )
                    columns.append(Column(signal, device, round_to_unit(total, 1)))
                elif sight.get_story_values(signal.name, device):
                    values = sight.get_story_gauge(signal.name, device, ticks, 0.0)
                    columns.append(Column(signal, device, values))
        return columns

    return collect


rdma = make_story_collector(
    signals.RDMA_RECEIVE,
    signals.RDMA_TRANSMIT,
    signals.RDMA_TRANSMIT_WAIT,
    signals.RDMA_CNP,
    signals.RDMA_CNP_SENT,
    signals.RDMA_ECN_MARKED,
    signals.RDMA_OUT_OF_SEQUENCE,
    signals.RDMA_RETRANSMITS,
    signals.RDMA_DISCARDS,
    signals.RDMA_LINK_DOWNED,
    signals.RDMA_SYMBOL_ERRORS,
    signals.RDMA_STATE,
    signals.RDMA_LINK_SPEED,
    signals.RDMA_LINK_WIDTH,
)
_ETHTOOL = (
    signals.NET_PAUSE_FRAMES,
    signals.NET_PAUSED,
    signals.NET_ECN_MARKED,
    signals.NET_CNP,
    signals.NET_DISCARDS_PHY,
    signals.NET_SHAPED,
)


def make_ethtool_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """What drivers count of their ports: the columns of which the story tells."""
    return [
        Column(
            signal,
            device,
            round_to_unit(
                sight.draw_initial_value() + sight.compute_story_growth(signal.name, device, ticks),
                1,
            ),
        )
        for signal in _ETHTOOL
        for device in sight.list_story_devices(signal.name)
    ]
