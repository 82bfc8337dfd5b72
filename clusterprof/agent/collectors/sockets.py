"""What TCP says of the job's own connections: round trips, segments sent again, bytes in the way.

Columns: the `tcp.job_*` signals of every network interface that a connection of the job goes out
by: the interface that has its local address. Connections within the machine are left out, also
those between two addresses of its own. The processes are those of the job's tree, and a connection
is theirs when one of them has it open (`/proc/<pid>/fd`). No address is recorded.

Counters add up what each connection counted since it was first seen (since its beginning, when it
is younger than the recording) and keep what closed ones had; what a connection did after its last
sample is lost with it. Round-trip times are medians over the connections that got data through
since the last sample, or over all when none did.

Listing the machine's connections is done every 3 s, less often where it takes long, and in pieces;
at most 128 connections of the job are asked in a tick, fewer when that takes more than 0.5 ms, and
then it is the others' turn. The kernel may load its module `tcp_diag` for the first list.

## Source

NETLINK_SOCK_DIAG with INET_DIAG_INFO (`struct tcp_info` of include/uapi/linux/tcp.h), and
`/proc/<pid>/fd` of the job.

## Privilege

The job's user, or root, in the job's network namespace; a seccomp profile may forbid netlink.

## Cost

Listing every 3 s, less often where a node has very many; of the job at most 128 connections in a
tick, for 0.5 ms or a little more.

## Where it is blind

Connections that live less than 3 s may be missed; what one did after its last sample is lost with
it. RDMA, UDP (QUIC) and Unix sockets are not in it. Which operation used a connection is not told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.linux.addresses import local_addresses
from clusterprof.linux.job_sockets import Found, JobSockets
from clusterprof.linux.sock_diag import ESTABLISHED, Connections, Told
from clusterprof.linux.tcp_info import UNKNOWN
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
"""Signals that add up, and the fields of `TcpInfo` they add up."""
GAUGES: tuple[Signal, ...] = (
    signals.TCP_JOB_CONNECTIONS,
    signals.TCP_JOB_UNSENT,
    signals.TCP_JOB_UNREAD,
    signals.TCP_JOB_LOST,
    signals.TCP_JOB_RTT,
    signals.TCP_JOB_MIN_RTT,
    signals.TCP_JOB_DELIVERY,
)
_AT_A_TICK, _AT_ONCE = 128, 32
_TICK_NS = 500_000  # for asking; another 32 may come to it
_PROCESSES_AT_MOST = 512
_WRAP = {"retransmits": 1 << 32, "ecn_marked": 1 << 32}
_COUNTED = attrgetter(*(field for _, field in COUNTERS))
_ACKED = [field for _, field in COUNTERS].index("acked_bytes")
_NOT_TOLD = Unavailable("absent", "this kernel does not tell it of a connection", "")
_NOT_MEASURED = Unavailable("absent", "no connection of the job has measured it", "")
_ELSEWHERE = Unavailable(
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
        addresses: Callable[[], dict[bytes, str]] = local_addresses,
    ) -> None:
        self._context = context
        self._clock = clock
        self._connect = connect
        self._kernel: Connections | None = None
        self._finder = JobSockets(context.roots, addresses)
        self._known: dict[int, Found] = {}
        self._read: dict[int, _Read] = {}
        self._nics: dict[str, _Nic] = {}  # outlives open(): its totals only grow
        self._homes: dict[int, bool] = {}  # process -> is it in our network namespace
        self._turn = 0
        self._said = False  # that some processes are elsewhere
        self._events: list[tuple[str, dict[str, Any]]] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the kernel's list and return the columns of the interfaces seen so far."""
        self._kernel = self._kernel or self._connect()
        self._columns = tuple(self._nics)
        kinds = [*GAUGES, *(signal for signal, _ in COUNTERS)]
        return [(signal, nic) for nic in self._columns for signal in kinds]

    def sample(self) -> Sequence[Value]:
        """Look for connections, ask those that are known, and add up by interface."""
        if self._kernel is None:
            self._kernel = self._connect()
        try:
            pids = self._processes()
            self._finder.look(self._kernel, pids, self._known, self._clock)
            if pids and self._finder.denied == len(pids):
                remedy = "run as the job's user or as root"
                raise Unavailable("denied", "the job's open files may not be seen", remedy)
            self._ask(self._kernel)
        except Unavailable:
            self.close()  # answers to what was asked may still be in the sockets
            raise
        if tuple(self._nics) != self._columns:
            raise DevicesChanged
        by_nic: dict[str, list[_Read]] = {nic: [] for nic in self._columns}
        for read in self._read.values():
            by_nic[read.nic].append(read)
        return [
            value
            for nic in self._columns
            for value in (*_gauges(by_nic[nic]), *self._nics[nic].values())
        ]

    def close(self) -> None:
        """Close the kernel's list; what was added up is kept for the next `open()`."""
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None
            self._finder.restart()

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what the recording should say once."""
        events, self._events = self._events, []
        return events

    def _processes(self) -> list[int]:
        """Return the job's processes that share our network namespace; raises Unavailable."""
        wanted = dict.fromkeys((*self._context.job_pids(), *self._context.readings.pids()))
        pids = list(wanted)[:_PROCESSES_AT_MOST]
        for pid in pids:
            if pid not in self._homes:
                self._homes[pid] = self._is_home(pid)
        self._homes = {pid: self._homes[pid] for pid in pids}
        home = [pid for pid in pids if self._homes[pid]]
        if pids and not home:
            raise _ELSEWHERE
        return home

    def _is_home(self, pid: int) -> bool:
        proc = self._context.roots.proc
        try:
            home = os.readlink(f"{proc}/{pid}/ns/net") == os.readlink(f"{proc}/self/ns/net")
        except OSError:
            return True  # may not be told: its connections are found or they are not
        if not home and not self._said:
            self._said = True
            self._events.append(("connections-unseen", {"pid": pid, "why": _ELSEWHERE.message}))
        return home

    def _ask(self, kernel: Connections) -> None:
        known = list(self._known.items())
        if len(known) > _AT_ONCE:
            turn = self._turn % len(known)
            known = (known[turn:] + known[:turn])[:_AT_A_TICK]
        ends_ns = self._clock() + _TICK_NS
        for begin in range(0, len(known), _AT_ONCE):
            self._ask_some(kernel, known[begin : begin + _AT_ONCE])
            self._turn += _AT_ONCE
            if self._clock() >= ends_ns:
                break  # the others come first in the next tick

    def _ask_some(self, kernel: Connections, known: Sequence[tuple[int, Found]]) -> None:
        for (inode, found), told in zip(known, kernel.ask([found.listed for _, found in known])):
            lives = told is not None and told.state == ESTABLISHED
            # One that waits after its end (TIME_WAIT) has forgotten what it counted.
            if told is not None and (lives or told.info != UNKNOWN):
                self._take(inode, found, told)
            if not lives:
                del self._known[inode]
                self._read.pop(inode, None)

    def _take(self, inode: int, found: Found, told: Told) -> None:
        nic = self._nics.get(found.nic)
        if nic is None:
            nic = self._nics[found.nic] = _Nic()
        read = self._read.get(inode)
        if read is None or read.id != found.listed.id:
            read = self._read[inode] = _Read(found)
        read.told = told
        now = _COUNTED(told.info)
        before = read.counters if read.counters is not None else now if found.was_there else _ZERO
        read.moved = now[_ACKED] is None or now[_ACKED] != before[_ACKED]
        if now != before or None in now:
            nic.add(now, before)
        read.counters = now


class _Read:
    """One connection and what it said last."""

    __slots__ = ("counters", "id", "moved", "nic", "told")

    def __init__(self, found: Found) -> None:
        self.id = found.listed.id
        self.nic = found.nic
        self.counters: Sequence[int | None] | None = None
        self.told: Told
        self.moved = False


class _Nic:
    """What all connections by one interface counted, the closed ones too."""

    def __init__(self) -> None:
        self._totals: list[int | None] = [0] * len(COUNTERS)

    def add(self, now: Sequence[int | None], before: Sequence[int | None]) -> None:
        """Add what one connection counted since it was asked before."""
        for index, (_, field) in enumerate(COUNTERS):
            later, earlier, total = now[index], before[index], self._totals[index]
            if later is None or earlier is None or total is None:
                self._totals[index] = None
            else:
                rise = later - earlier
                wrap = _WRAP.get(field, 0)
                self._totals[index] = total + (rise % wrap if wrap else max(0, rise))

    def values(self) -> list[Value]:
        """Return the totals in the order of COUNTERS."""
        return [_NOT_TOLD if total is None else total for total in self._totals]


def _gauges(reads: Sequence[_Read]) -> list[Value]:
    """Return the values of GAUGES over the connections by one interface."""
    infos = [read.told.info for read in reads]
    moving = [read.told.info for read in reads if read.moved]
    lost = [info.lost_segments for info in infos]
    rates = [info.delivery_bytes_per_second for info in moving]
    return [
        len(reads),
        sum(read.told.unsent_bytes for read in reads),
        sum(read.told.unread_bytes for read in reads),
        _sum(lost),
        _median([info.rtt_ns for info in moving or infos]),
        _median([info.min_rtt_ns for info in moving or infos]),
        _sum(rates),
    ]


def _sum(values: Sequence[int | None]) -> Value:
    known = [value for value in values if value is not None]
    return _NOT_TOLD if len(known) < len(values) else sum(known)


def _median(values: Sequence[int | None]) -> Value:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else _NOT_MEASURED


_ZERO = (0,) * len(COUNTERS)
