"""TCP statistics of the job's connections: round trips, retransmissions, bytes in flight.

Columns: the `tcp.job_*` signals of every network interface through which a connection of the job
leaves: the interface that has its local address. Connections within the machine are left out, also
those between two of its own addresses. The processes are those of the job's tree; a connection
belongs to the job when one of them has it open (`/proc/<pid>/fd`). No address is recorded.

Counters sum what each connection has counted since it was first seen (since its start
if it is younger than the recording) and keep the counts of closed connections; the
activity of a connection after its last sample is lost. Round-trip times are medians
over the connections that delivered data since the last sample, or over all when none
did.

The machine's connections are listed every 3 s, less often where that takes long, and in
parts. At most 128 connections of the job are queried in a tick, fewer when that takes
more than 0.5 ms; the others follow in the next ticks. The kernel may load its module
`tcp_diag` for the first list.

## Source

NETLINK_SOCK_DIAG with INET_DIAG_INFO (`struct tcp_info` of include/uapi/linux/tcp.h),
and `/proc/<pid>/fd` of the job.

## Privilege

The job's user, or root, in the job's network namespace; a seccomp profile may forbid
netlink.

## Cost

Listing every 3 s, less often where a node has very many connections; at most 128
connections of the job in a tick, for 0.5 ms or a little more.

## Where it is blind

Connections that live less than 3 s may be missed; the activity of a connection after
its last sample is lost. RDMA, UDP (QUIC) and Unix sockets are not included. It does not
show which operation used a connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.network.netlink import (
    ESTABLISHED,
    UNKNOWN,
    Connections,
    ConnectionState,
    map_addresses_to_interfaces,
)
from clusterprof.agent.linux.network.sockets import JobConnection, JobSockets
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.signals import Signal

COUNTERS: tuple[tuple[Signal, str], ...] = (
    (signals.TCP_JOB_RETRANSMITS, "retransmits"),
    (signals.TCP_JOB_ECN_MARKED, "ecn_marked"),
    (signals.TCP_JOB_BUSY, "busy_ns"),
    (signals.TCP_JOB_RWND_LIMITED, "rwnd_limited_ns"),
    (signals.TCP_JOB_SNDBUF_LIMITED, "sndbuf_limited_ns"),
    (signals.TCP_JOB_ACKED, "acked_bytes"),
    (signals.TCP_JOB_RECEIVED, "received_bytes"),
)
"""Signals that are summed, and the fields of `TcpInfo` that they sum."""
GAUGES: tuple[Signal, ...] = (
    signals.TCP_JOB_CONNECTIONS,
    signals.TCP_JOB_UNSENT,
    signals.TCP_JOB_UNREAD,
    signals.TCP_JOB_LOST,
    signals.TCP_JOB_RTT,
    signals.TCP_JOB_MIN_RTT,
    signals.TCP_JOB_DELIVERY,
)
_MAX_PER_TICK, _BATCH_CONNECTIONS = 128, 32
_TICK_NS = 500_000  # time limit for queries; one more batch of 32 may exceed it
_MAX_PROCESSES = 512
_WRAP = {"retransmits": 1 << 32, "ecn_marked": 1 << 32}
_GET_COUNTERS = attrgetter(*(field for _, field in COUNTERS))
_ACKED = [field for _, field in COUNTERS].index("acked_bytes")
_NOT_REPORTED = Unavailable("absent", "this kernel does not report it for a connection", "")
_NOT_MEASURED = Unavailable("absent", "no connection of the job has measured it", "")
_OTHER_NAMESPACE = Unavailable(
    "absent",
    "the job's processes are in another network namespace than the recorder",
    "start the recorder within the job's container or pod",
)


class SocketsCollector:
    """Round trips, retransmissions and queues of the job's own TCP connections."""

    name: ClassVar[str] = "sockets"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(
        self,
        context: Context,
        clock: Callable[[], int] = time.monotonic_ns,
        connect: Callable[[], Connections] = Connections,
        addresses: Callable[[], dict[bytes, str]] = map_addresses_to_interfaces,
    ) -> None:
        self._context = context
        self._clock = clock
        self._connect = connect
        self._connections: Connections | None = None
        self._finder = JobSockets(context.roots, addresses)
        self._known: dict[int, JobConnection] = {}
        self._read: dict[int, _ConnectionReading] = {}
        self._nics: dict[str, _NicTotals] = {}  # survives open(): its totals only grow
        # process -> whether it is in our network namespace
        self._in_our_namespace: dict[int, bool] = {}
        self._turn = 0
        # whether processes in another namespace were reported
        self._reported_other_namespace = False
        self._events: list[tuple[str, dict[str, Any]]] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the kernel's list and return the columns of the interfaces seen so far.

        Raises: Unavailable when the kernel does not list connections.
        """
        self._connections = self._connections or self._connect()
        self._columns = tuple(self._nics)
        kinds = [*GAUGES, *(signal for signal, _ in COUNTERS)]
        return [(signal, nic) for nic in self._columns for signal in kinds]

    def sample(self) -> Sequence[Value]:
        """Search for connections, query the known ones, and sum by interface.

        Raises: Unavailable when they cannot be read, DevicesChanged when an interface was
        added.
        """
        if self._connections is None:
            self._connections = self._connect()
        try:
            pids = self._processes()
            self._finder.search(self._connections, pids, self._known, self._clock)
            if pids and self._finder.denied == len(pids):
                remedy = "run as the job's user or as root"
                raise Unavailable("denied", "the job's open files are not readable", remedy)
            self._query(self._connections)
        except Unavailable:
            self.close()  # answers to earlier requests may still be in the sockets
            raise
        if tuple(self._nics) != self._columns:
            raise DevicesChanged
        by_nic: dict[str, list[_ConnectionReading]] = {nic: [] for nic in self._columns}
        for read in self._read.values():
            by_nic[read.nic].append(read)
        return [
            value
            for nic in self._columns
            for value in (*_compute_gauges(by_nic[nic]), *self._nics[nic].values())
        ]

    def close(self) -> None:
        """Close the kernel's list; the totals are kept for the next `open()`."""
        if self._connections is not None:
            self._connections.close()
            self._connections = None
            self._finder.restart()

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return events that the recording reports once."""
        events, self._events = self._events, []
        return events

    def _processes(self) -> list[int]:
        """Return the job's processes that share our network namespace; raise Unavailable."""
        wanted = dict.fromkeys((*self._context.job_pids(), *self._context.readings.pids()))
        pids = list(wanted)[:_MAX_PROCESSES]
        for pid in pids:
            if pid not in self._in_our_namespace:
                self._in_our_namespace[pid] = self._is_in_our_namespace(pid)
        self._in_our_namespace = {pid: self._in_our_namespace[pid] for pid in pids}
        local_pids = [pid for pid in pids if self._in_our_namespace[pid]]
        if pids and not local_pids:
            raise _OTHER_NAMESPACE
        return local_pids

    def _is_in_our_namespace(self, pid: int) -> bool:
        proc = self._context.roots.proc
        try:
            is_local = os.readlink(f"{proc}/{pid}/ns/net") == os.readlink(f"{proc}/self/ns/net")
        except OSError:
            return True  # access is denied: its connections are found or not
        if not is_local and not self._reported_other_namespace:
            self._reported_other_namespace = True
            self._events.append(
                ("connections-unseen", {"pid": pid, "why": _OTHER_NAMESPACE.message})
            )
        return is_local

    def _query(self, connections: Connections) -> None:
        connections_by_inode = list(self._known.items())
        if len(connections_by_inode) > _BATCH_CONNECTIONS:
            turn = self._turn % len(connections_by_inode)
            connections_by_inode = (connections_by_inode[turn:] + connections_by_inode[:turn])[
                :_MAX_PER_TICK
            ]
        ends_ns = self._clock() + _TICK_NS
        for begin in range(0, len(connections_by_inode), _BATCH_CONNECTIONS):
            self._query_batch(connections, connections_by_inode[begin : begin + _BATCH_CONNECTIONS])
            self._turn += _BATCH_CONNECTIONS
            if self._clock() >= ends_ns:
                break  # the remaining connections come first in the next tick

    def _query_batch(
        self, connections: Connections, batch: Sequence[tuple[int, JobConnection]]
    ) -> None:
        for (inode, connection), state in zip(
            batch, connections.query([connection.listed for _, connection in batch])
        ):
            is_open = state is not None and state.state == ESTABLISHED
            # A connection that waits after its end (TIME_WAIT) has lost its counters.
            if state is not None and (is_open or state.info != UNKNOWN):
                self._add_reading(inode, connection, state)
            if not is_open:
                del self._known[inode]
                self._read.pop(inode, None)

    def _add_reading(self, inode: int, connection: JobConnection, state: ConnectionState) -> None:
        nic = self._nics.get(connection.nic)
        if nic is None:
            nic = self._nics[connection.nic] = _NicTotals()
        read = self._read.get(inode)
        if read is None or read.id != connection.listed.id:
            read = self._read[inode] = _ConnectionReading(connection)
        read.state = state
        counters = _GET_COUNTERS(state.info)
        before = (
            read.counters
            if read.counters is not None
            else counters
            if connection.existed_before
            else _ZERO
        )
        read.made_progress = counters[_ACKED] is None or counters[_ACKED] != before[_ACKED]
        if counters != before or None in counters:
            nic.add(counters, before)
        read.counters = counters


class _ConnectionReading:
    """One connection and its last state."""

    __slots__ = ("counters", "id", "made_progress", "nic", "state")

    def __init__(self, connection: JobConnection) -> None:
        self.id = connection.listed.id
        self.nic = connection.nic
        self.counters: Sequence[int | None] | None = None
        self.state: ConnectionState
        self.made_progress = False


class _NicTotals:
    """Totals of all connections through one interface, including closed ones."""

    def __init__(self) -> None:
        self._totals: list[int | None] = [0] * len(COUNTERS)

    def add(self, current: Sequence[int | None], before: Sequence[int | None]) -> None:
        """Add the growth of one connection's counters since its previous reading."""
        for index, (_, field) in enumerate(COUNTERS):
            later, earlier, total = current[index], before[index], self._totals[index]
            if later is None or earlier is None or total is None:
                self._totals[index] = None
            else:
                rise = later - earlier
                wrap = _WRAP.get(field, 0)
                self._totals[index] = total + (rise % wrap if wrap else max(0, rise))

    def values(self) -> list[Value]:
        """Return the totals in the order of `COUNTERS`."""
        return [_NOT_REPORTED if total is None else total for total in self._totals]


def _compute_gauges(reads: Sequence[_ConnectionReading]) -> list[Value]:
    """Compute the gauges over the connections through one interface."""
    infos = [read.state.info for read in reads]
    moving = [read.state.info for read in reads if read.made_progress]
    lost = [info.lost_segments for info in infos]
    rates = [info.delivery_bytes_per_second for info in moving]
    return [
        len(reads),
        sum(read.state.unsent_bytes for read in reads),
        sum(read.state.unread_bytes for read in reads),
        _sum_known(lost),
        _compute_median([info.rtt_ns for info in moving or infos]),
        _compute_median([info.min_rtt_ns for info in moving or infos]),
        _sum_known(rates),
    ]


def _sum_known(values: Sequence[int | None]) -> Value:
    known_values = [value for value in values if value is not None]
    return _NOT_REPORTED if len(known_values) < len(values) else sum(known_values)


def _compute_median(values: Sequence[int | None]) -> Value:
    known_values = sorted(value for value in values if value is not None)
    return known_values[len(known_values) // 2] if known_values else _NOT_MEASURED


_ZERO = (0,) * len(COUNTERS)
