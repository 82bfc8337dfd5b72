"""Traffic of the network interfaces, and TCP retransmissions.

Driver counters of network cards: pause frames, congestion marks, drops at the port.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.files import MissingFile, OpenFile, open_file
from clusterprof.agent.linux.network.netdev import (
    HEADER_LINES,
    LONGEST_RECORD,
    Bond,
    EthtoolStatistics,
    NetstatParser,
    SnmpParser,
    is_interface_up,
    list_network_cards,
    open_bonds,
    parse_interface,
    read_link_bytes_per_second,
)
from clusterprof.agent.linux.reader_threads import BackgroundReader
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import Signal

_NIC_COLUMNS: tuple[Signal, ...] = (
    signals.NET_RECEIVE,
    signals.NET_TRANSMIT,
    signals.NET_RECEIVE_DROPS,
    signals.NET_TRANSMIT_DROPS,
    signals.NET_ERRORS,
    signals.NET_LINK_SPEED,
    signals.NET_CARRIER_CHANGES,
)
_TCP_COLUMNS: tuple[Signal, ...] = (
    signals.TCP_SEGMENTS,
    signals.TCP_RETRANSMITS,
    signals.TCP_TIMEOUTS,
)
_NOT_COUNTED = Unavailable("absent", "this kernel does not count it", "")


class NetworkCollector:
    """Traffic of the network interfaces, and TCP retransmissions.

    Columns: bytes, drops, errors, link speed and carrier changes of every interface that is
    up or has carried traffic, except the loopback; for every bond the number of members
    that are up; then the three `tcp.*` signals of our network namespace. The link speed is
    read when the collector opens, because that takes the network stack's lock; an interface
    that comes up reopens the collector.

    The traffic of a bond is also the traffic of its members: the header lists the members,
    and an analysis counts one of the two. A member that is down, or goes down, is an event
    `bond-member-down` (bond, nic), one that comes back `bond-member-up`.

    ## Source

    `/proc/net/{dev,snmp,netstat}` and `/sys/class/net/*/{speed,carrier_changes}`
    (docs.kernel.org/networking/statistics, networking/snmp_counter).

    ## Privilege

    None.

    ## Cost

    Three files of our network namespace and one for each interface, once a second.

    ## Where it is blind

    RDMA bypasses these counters: see `rdma`. It does not show which process sent; `sockets`
    has the job's own connections. In a container only its own interfaces are visible, and
    the speed of virtual interfaces may be missing or fictitious. Drops inside switches
    appear as retransmissions here or at the peer.
    """

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
        self._dev = OpenFile(net / "dev", longest_record=LONGEST_RECORD)
        self._snmp = open_file(net / "snmp")
        self._netstat = open_file(net / "netstat")
        self._parse_snmp, self._parse_netstat = SnmpParser(), NetstatParser()
        lines = self._dev.read().split(b"\n")
        self._count = len(lines)
        # line, name, link speed, carrier_changes
        self._nics: list[tuple[int, str, int | Unavailable, OpenFile | MissingFile]] = []
        self._asleep: list[tuple[int, bytes]] = []  # interfaces left out: line number, line
        for number, line in enumerate(lines[HEADER_LINES:], HEADER_LINES):
            if not line:
                continue
            nic, traffic = parse_interface(line)
            if nic == "lo":
                continue
            if (
                is_interface_up(self._roots, nic)
                or traffic.receive_bytes + traffic.transmit_bytes > 0
            ):
                changes = open_file(self._roots.sys / "class/net" / nic / "carrier_changes")
                speed = read_link_bytes_per_second(self._roots, nic)
                self._nics.append((number, nic, speed, changes))
            else:
                self._asleep.append((number, line))
        self._bonds = open_bonds(self._roots, [nic for _, nic, _, _ in self._nics])
        columns = [(signal, nic) for _, nic, _, _ in self._nics for signal in _NIC_COLUMNS]
        columns += [(signals.NET_BOND_MEMBERS_UP, bond.name) for bond in self._bonds]
        return columns + [(signal, "") for signal in _TCP_COLUMNS]

    def sample(self) -> Sequence[Value]:
        """Return bytes, packets and segments since boot, and each link's speed.

        Raises: DevicesChanged when interfaces or bond members changed.
        """
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
            values.append(_read_number(changes))
        if any(bond.has_changed() for bond in self._bonds):
            raise DevicesChanged
        values += [self._members_up(bond) for bond in self._bonds]
        return values + self._sample_tcp()

    def events(self) -> list[tuple[str, dict[str, str]]]:
        """Return the bond members that went down or came back since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all files."""
        files = (self._dev, self._snmp, self._netstat, *(nic[3] for nic in self._nics))
        for resource in (*files, *self._bonds):
            resource.close()

    def _members_up(self, bond: Bond) -> Value:
        try:
            down = bond.list_down_members()
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


def _read_number(file: OpenFile | MissingFile) -> Value:
    try:
        return int(file.read())
    except Unavailable as reason:
        return reason


_US = 1000
_INT64 = 1 << 63
_OUT_OF_RANGE = Unavailable("failed", "the driver's counter does not fit 63 bits", "")


class _Rule(NamedTuple):
    """One signal and the names of the statistics that it consists of."""

    signal: Signal
    direction: str
    parts: re.Pattern[str]
    """Names that are summed."""
    whole: re.Pattern[str] | None = None
    """Several names for one count; the largest is added."""
    factor: int = 1
    spare: re.Pattern[str] | None = None
    """Names that are summed where none of `parts` exists: counters kept per queue only."""


def _build_pause_rule(direction: str) -> _Rule:
    d = direction
    parts = (
        rf"{d}_prio\d_pause|{d}_pause_frames|{d}_pfc_frames|{d}_pause|port_{d}_pause"
        rf"|(port\.)?link_xoff_{d}(\.nic)?|(port\.)?{d}_priority_\d_xoff(\.nic)?"
        rf"|{d}_flow_control_xoff|{d}_pb_\d+_pxoff|frames_{d}_pause|frames_{d}_pripause"
        rf"|{d}_pause_prio_\d"
    )
    whole_pattern = rf"{d}_pause_ctrl_phy|{d}_global_pause"
    return _Rule(signals.NET_PAUSE_FRAMES, d, re.compile(parts), re.compile(whole_pattern))


def _build_pause_duration_rule(direction: str) -> _Rule:
    d = direction
    parts = (
        rf"{d}_prio\d_pause_duration|{d}_global_pause_duration|{d}_pause_duration"
        rf"|pfc_pri\d_{d}_duration_us|{d}_pause_duration_prio_\d"
    )
    return _Rule(signals.NET_PAUSED, d, re.compile(parts), factor=_US)


ETHTOOL_RULES: tuple[_Rule, ...] = (
    _build_pause_rule("rx"),
    _build_pause_rule("tx"),
    _build_pause_duration_rule("rx"),
    _build_pause_duration_rule("tx"),
    _Rule(signals.NET_ECN_MARKED, "", re.compile(r"rx_ecn_mark|rx_prio\d_marked")),
    _Rule(signals.NET_CNP, "", re.compile(r"rx_cnp_pkts|rp_cnp_handled")),
    _Rule(
        signals.NET_DISCARDS_PHY,
        "",
        re.compile(
            r"[rt]x_discards_phy|[rt]x_stat_discard|(port\.)?rx_dropped\.nic|port\.rx_dropped"
            r"|(port\.)?tx_dropped_link_down(\.nic)?"
        ),
    ),
    _Rule(
        signals.NET_OUT_OF_BUFFER,
        "",
        re.compile(
            r"rx_out_of_buffer|rx_total_(ring|oom)_discards|rx_no_buffer_count|rx_hw_drop_overruns"
            r"|rx_no_buffers_posted\[\d+\]|port_rx_nodesc_drops"
        ),
        spare=re.compile(r"queue_\d+_rx_empty_rx_ring|rx\d+_hw_drop_overruns"),
    ),
    _Rule(
        signals.NET_SHAPED,
        "",
        re.compile(r"(bw_in|bw_out|pps)_allowance_exceeded|[rt]x_hw_ratelimit_packets"),
        spare=re.compile(r"[rt]x\d+_hw_ratelimit_packets"),
    ),
)

# The priority is the digit in the name: mlx5, mlx4, bnxt_en, ice and i40e, ixgbe.
_PRIORITY_PATTERNS = {
    d: re.compile(
        rf"{d}_prio(\d)_pause|{d}_pause_prio_(\d)|{d}_pfc_ena_frames_pri(\d)"
        rf"|(?:port\.)?{d}_priority_(\d)_xoff(?:\.nic)?|{d}_pb_(\d)_pxoff"
    )
    for d in ("rx", "tx")
}


class EthtoolColumn(NamedTuple):
    """One column of one card and the statistics that it consists of."""

    signal: Signal
    device: str
    parts: tuple[int, ...]
    whole: tuple[int, ...]
    factor: int

    def value(self, numbers: dict[int, int]) -> Value:
        """Compute the value from the statistics by index."""
        total = sum(numbers[index] for index in self.parts)
        total += max((numbers[index] for index in self.whole), default=0)
        total *= self.factor
        return total if total < _INT64 else _OUT_OF_RANGE


def build_columns(nic: str, names: Sequence[str]) -> list[EthtoolColumn]:
    """Build the columns of a card from the names of its statistics."""
    columns = []
    for rule in ETHTOOL_RULES:
        parts = _find_matches(rule.parts, names) or _find_matches(rule.spare, names)
        whole_names = _find_matches(rule.whole, names)
        if parts or whole_names:
            device = f"{nic} {rule.direction}".rstrip()
            columns.append(EthtoolColumn(rule.signal, device, parts, whole_names, rule.factor))
    return columns + _build_priority_columns(nic, names)


def _find_matches(pattern: re.Pattern[str] | None, names: Sequence[str]) -> tuple[int, ...]:
    if pattern is None:
        return ()
    return tuple(i for i, name in enumerate(names) if pattern.fullmatch(name))


def _build_priority_columns(nic: str, names: Sequence[str]) -> list[EthtoolColumn]:
    """Build the columns per priority; cards report the priorities that use pause frames."""
    indices: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        for direction, pattern in _PRIORITY_PATTERNS.items():
            match = pattern.fullmatch(name)
            if match:
                number = next(group for group in match.groups() if group)
                indices.setdefault(f"{nic} {direction} {number}", []).append(index)
    signal = signals.NET_PRIORITY_PAUSE_FRAMES
    return [
        EthtoolColumn(signal, device, tuple(indices[device]), (), 1) for device in sorted(indices)
    ]


class _Card(NamedTuple):
    nic: str
    statistics: int
    """Number of statistics of its driver."""
    indices: tuple[int, ...]
    columns: tuple[EthtoolColumn, ...]


class EthtoolCollector:
    """Driver counters of network cards: pause frames, congestion marks, drops at the port.

    Columns: for every interface backed by a device, those of these signals that its driver
    counts, from the names that `ethtool -S` prints. Known drivers are mlx5, mlx4, bnxt_en,
    ice, i40e, ixgbe, ionic, sfc, ena, gve and virtio_net. Pause frames are split by
    direction: "<nic> rx" were received, so the card had to stop sending; "<nic> tx" were
    sent, so this machine received data too slowly. A count that a driver keeps both for all
    priorities and for each is counted once; single priorities appear also as "<nic> rx 3".

        mlx5          rx_prio3_pause, rx_discards_phy, rx_out_of_buffer, rx_ecn_mark,
        rx_prio3_marked
        bnxt_en       rx_pfc_ena_frames_pri3, rx_stat_discard, rx_total_ring_discards
        ice, i40e     rx_priority_3_xoff.nic, rx_dropped.nic
        ena           bw_in_allowance_exceeded, …: limits of the instance size
        gve           rx_no_buffers_posted[0]
        virtio_net    rx_hw_ratelimit_packets, rx_hw_drop_overruns, where the host provides them

    Reading takes the network stack's lock and queries the card's firmware, so a thread
    reads every 2 s, and less often when a reading takes more than 10 ms; a value carries
    the time of its reading.

    ## Source

    The ioctl SIOCETHTOOL with ETHTOOL_GSTATS (`ethtool -S`); names are those of the drivers
    (docs.kernel.org/networking/statistics and device_drivers/ethernet).

    ## Privilege

    None; the interface must be in the recorder's network namespace.

    ## Cost

    A thread reads every 2 s, and less often where a reading takes more than 10 ms;
    during that time it waits for the card's firmware and holds the network stack's lock.

    ## Where it is blind

    Drivers with other names than those known here, and virtual cards, have no columns. It
    does not show which connection was paused.
    """

    name: ClassVar[str] = "ethtool"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(
        self,
        context: Context,
        clock: Callable[[], int] = time.monotonic_ns,
        statistics: Callable[[], Any] = EthtoolStatistics,
        **waits: Any,
    ) -> None:
        self._roots = context.roots
        self._open_statistics = statistics
        self.sampled_ns = 0
        """When the values that `sample()` returned were read."""
        self._reader = BackgroundReader(self._read, clock, **waits)
        self._cards: list[_Card] | None = None
        self._first: tuple[int, list[Value]] | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Read the statistics' names of every card, and once their values.

        Raises: Unavailable when no card has any of the counters.
        """
        self._cards = None
        self._nics = list_network_cards(self._roots)
        self._listed = _list_interfaces(self._roots)
        self._first = self._reader.first()
        assert self._cards is not None
        columns = [column for card in self._cards for column in card.columns]
        if not columns:
            self.close()
            message = "no network card here counts pause frames, congestion marks or port drops"
            raise Unavailable("absent", message, "")
        return [(column.signal, column.device) for column in columns]

    def sample(self) -> Sequence[Value]:
        """Return the values read since the last call.

        Raises: NothingNew when there are none.
        """
        reading = self._first or self._reader.take()
        self._first = None
        if reading is None:
            raise NothingNew
        self.sampled_ns, values = reading
        return values

    def close(self) -> None:
        """End the thread."""
        self._reader.close()

    def _read(self) -> list[Value]:
        """Read every card, in the thread; in the first reading also the names."""
        if _list_interfaces(self._roots) != self._listed:
            raise DevicesChanged
        statistics = self._open_statistics()
        try:
            if self._cards is None:
                self._cards = [_read_card_layout(statistics, nic) for nic in self._nics]
            values: list[Value] = []
            for card in self._cards:
                values += _read_card_values(statistics, card)
            return values
        finally:
            statistics.close()


def _read_card_layout(statistics: Any, nic: str) -> _Card:
    try:
        names = statistics.names(nic)
    except Unavailable:
        return _Card(nic, 0, (), ())
    columns = tuple(build_columns(nic, names))
    indices = {index for column in columns for index in (*column.parts, *column.whole)}
    return _Card(nic, len(names), tuple(sorted(indices)), columns)


def _read_card_values(statistics: Any, card: _Card) -> list[Value]:
    if not card.columns:
        return []
    try:
        numbers = statistics.values(card.nic, card.indices, card.statistics)
    except Unavailable as why:
        return [why] * len(card.columns)
    if numbers is None:
        raise DevicesChanged  # queues were added or removed, and the names with them
    by_index = dict(zip(card.indices, numbers))
    return [column.value(by_index) for column in card.columns]


def _list_interfaces(roots: Any) -> list[str]:
    try:
        return sorted(os.listdir(roots.sys / "class/net"))
    except OSError:
        return []
