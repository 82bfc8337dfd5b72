"""What goes over the network interfaces, and what TCP had to send again.

Columns: bytes, drops, errors, link speed and changes of the carrier of every interface that is up
or has carried traffic, the loopback left out; of every bond how many of its members are up; then
the three `tcp.*` of our network namespace. The link speed is read when the collector opens: it
takes the network stack's lock, and an interface that comes up opens it anew.

What a bond carried is what its members carried: the header says who is whose member, and an
analysis counts one of the two. A member that is down, or goes down, is an event `bond-member-down`
(bond, nic), one that comes back `bond-member-up`.

## Source

`/proc/net/{dev,snmp,netstat}` and `/sys/class/net/*/{speed,carrier_changes}`
(docs.kernel.org/networking/statistics, networking/snmp_counter).

## Privilege

None.

## Cost

Three files of our network namespace and one for each interface, once a second.

## Where it is blind

RDMA bypasses it: see `rdma`. Who sent is not told; `sockets` has the job's own connections. In a
container only its own interfaces are seen, and their speed may be made up (virtual interfaces: not
said). Drops inside switches appear as retransmissions here or at the peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.linux.bonding import Bond, bonds
from clusterprof.linux.held import HeldFile, MissingFile, hold
from clusterprof.linux.netdev import (
    HEADER_LINES,
    LONGEST_RECORD,
    is_up,
    link_bytes_per_second,
    parse_interface,
)
from clusterprof.linux.snmp import NetstatParser, SnmpParser
from clusterprof.signals import Signal

_NIC: tuple[Signal, ...] = (
    signals.NET_RECEIVE,
    signals.NET_TRANSMIT,
    signals.NET_RECEIVE_DROPS,
    signals.NET_TRANSMIT_DROPS,
    signals.NET_ERRORS,
    signals.NET_LINK_SPEED,
    signals.NET_CARRIER_CHANGES,
)
_TCP: tuple[Signal, ...] = (
    signals.TCP_SEGMENTS,
    signals.TCP_RETRANSMITS,
    signals.TCP_TIMEOUTS,
)
_NOT_COUNTED = Unavailable("absent", "this kernel does not count it", "")


class NetworkCollector:
    """Traffic, drops and errors of every network interface, and TCP's retransmissions."""

    name: ClassVar[str] = "network"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._roots = context.roots
        self._bonds: list[Bond] = []
        self._down: dict[str, list[str]] = {}  # by bond: members last known to be down
        self._events: list[tuple[str, dict[str, str]]] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the counters, choose the interfaces and read the speed of their links."""
        net = self._roots.proc / "net"
        self._dev = HeldFile(net / "dev", longest_record=LONGEST_RECORD)
        self._snmp = hold(net / "snmp")
        self._netstat = hold(net / "netstat")
        self._parse_snmp, self._parse_netstat = SnmpParser(), NetstatParser()
        lines = self._dev.read().split(b"\n")
        self._count = len(lines)
        # line, name, link speed, carrier_changes
        self._nics: list[tuple[int, str, int | Unavailable, HeldFile | MissingFile]] = []
        self._asleep: list[tuple[int, bytes]] = []  # interfaces left out: line number, line
        for number, line in enumerate(lines[HEADER_LINES:], HEADER_LINES):
            if not line:
                continue
            nic, traffic = parse_interface(line)
            if nic == "lo":
                continue
            if is_up(self._roots, nic) or traffic.receive_bytes + traffic.transmit_bytes > 0:
                changes = hold(self._roots.sys / "class/net" / nic / "carrier_changes")
                speed = link_bytes_per_second(self._roots, nic)
                self._nics.append((number, nic, speed, changes))
            else:
                self._asleep.append((number, line))
        self._bonds = bonds(self._roots, [nic for _, nic, _, _ in self._nics])
        columns = [(signal, nic) for _, nic, _, _ in self._nics for signal in _NIC]
        columns += [(signals.NET_BOND_MEMBERS_UP, bond.name) for bond in self._bonds]
        return columns + [(signal, "") for signal in _TCP]

    def sample(self) -> Sequence[Value]:
        """Return bytes, packets and segments since boot, and each link's speed."""
        lines = self._dev.read().split(b"\n")
        if len(lines) != self._count:
            raise DevicesChanged
        for number, line in self._asleep:
            if lines[number] != line:
                raise DevicesChanged
        values: list[Value] = []
        for number, nic, speed, changes in self._nics:
            name, traffic = parse_interface(lines[number])
            if name != nic:
                raise DevicesChanged
            values += traffic
            values.append(speed)
            values.append(_number(changes))
        if any(bond.changed() for bond in self._bonds):
            raise DevicesChanged
        values += [self._members_up(bond) for bond in self._bonds]
        return values + self._sample_tcp()

    def events(self) -> list[tuple[str, dict[str, str]]]:
        """Return which members of bonds have gone down or come back since the last call."""
        taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        """Close all files."""
        held = (self._dev, self._snmp, self._netstat, *(nic[3] for nic in self._nics))
        for one in (*held, *self._bonds):
            one.close()

    def _members_up(self, bond: Bond) -> Value:
        try:
            down = bond.down()
        except Unavailable as reason:
            return reason
        before = self._down.get(bond.name, [])
        self._down[bond.name] = down
        for nic in sorted({*before, *down}):
            if (nic in before) != (nic in down):
                kind = "bond-member-down" if nic in down else "bond-member-up"
                self._events.append((kind, {"bond": bond.name, "nic": nic}))
        return len(bond.members) - len(down)

    def _sample_tcp(self) -> list[Value]:
        values: list[Value] = []
        try:
            values += [
                _NOT_COUNTED if v is None else v for v in self._parse_snmp(self._snmp.read())
            ]
        except Unavailable as reason:
            values += [reason, reason]
        try:
            timeouts = self._parse_netstat(self._netstat.read())
            values.append(_NOT_COUNTED if timeouts is None else timeouts)
        except Unavailable as reason:
            values.append(reason)
        return values


def _number(held: HeldFile | MissingFile) -> Value:
    try:
        return int(held.read())
    except Unavailable as reason:
        return reason
