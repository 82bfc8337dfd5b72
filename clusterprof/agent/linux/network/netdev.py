"""/proc/net/dev and /sys/class/net: traffic, state and speed of network interfaces.

https://docs.kernel.org/networking/statistics.html, Documentation/ABI/testing/sysfs-class-net

    Inter-|   Receive                                                |  Transmit
     face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop …
      eth0: 70016809    1929    0    0    0     0          0         0   150499    1163    0    0

`speed` is in megabits per second, -1 where unknown, and EINVAL while the link is down. Reading it
takes the network stack's lock, so it must not be read in a fast tick.

/proc/net/snmp and /proc/net/netstat: TCP counters since boot.

https://docs.kernel.org/networking/snmp_counter.html

    Tcp: RtoAlgorithm … InSegs OutSegs RetransSegs InErrs OutRsts InCsumErrors
    Tcp: 1 … 57252008 54915039 227 5 1003 0

Linux counts first transmissions in OutSegs (net/ipv4/tcp_output.c), as RFC 1213 requires, and
retransmissions in RetransSegs: all segments are the sum.

/sys/class/net/<bond>/bonding: the members of a bond, and which of them are down.

https://docs.kernel.org/networking/bonding.html

    bond0/bonding/mode                       802.3ad 4
    bond0/bonding/slaves                     ens2f0 ens3f0
    ens3f0/bonding_slave/mii_status          down
    ens3f0/bonding_slave/state               backup

Reading `slaves` takes the network stack's lock, so it is read once; the bond's folder also lists
the members, as links `lower_<name>`. The counters of a bond are the sums of its members' counters,
so counting both would count all traffic twice. A team device has no such files; its members are
`lower` in the header.

SIOCETHTOOL: driver statistics of a network card.

https://docs.kernel.org/networking/statistics.html, include/uapi/linux/ethtool.h. These are the
values that `ethtool -S` prints; they need no privilege.

    ETHTOOL_GSSET_INFO   how many statistics there are
    ETHTOOL_GSTRINGS     their names, 32 bytes each
    ETHTOOL_GSTATS       their values, 64 bits each

Each driver uses its own names. The kernel holds the network stack's lock while the driver reads the
card, so this is for a thread that may wait (`agent.linux.reader_threads`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from clusterprof.agent.linux.files import (
    ColumnFinder,
    MissingFile,
    OpenFile,
    OpenFolder,
    Roots,
    open_file,
    read_file_once,
    read_text,
)
from clusterprof.agent.linux.network.netlink import ROUTE
from clusterprof.errors import Unavailable, convert_os_error

HEADER_LINES = 2
LONGEST_RECORD = 512  # bytes: a name and 16 numbers of 20 digits
_BYTES_PER_MEGABIT = 125_000


class NetDev(NamedTuple):
    """Traffic of one interface since it was brought up."""

    receive_bytes: int
    transmit_bytes: int
    receive_drops: int
    transmit_drops: int
    errors: int
    """Of both directions."""


def parse_interface(line: bytes) -> tuple[str, NetDev]:
    """Parse name and counters of one line below the header."""
    name, _, numbers = line.partition(b":")  # old kernels print no space after the colon
    row = numbers.split(None, 12)
    traffic = NetDev(
        int(row[0]), int(row[8]), int(row[3]), int(row[11]), int(row[2]) + int(row[10])
    )
    return name.strip().decode(), traffic


def is_interface_up(roots: Roots, nic: str) -> bool | None:
    """Return whether the interface is up; None when sysfs does not report it."""
    try:
        state = read_file_once(roots.sys / "class/net" / nic / "operstate").strip()
    except Unavailable:
        return None
    return None if state == b"unknown" else state == b"up"


def read_link_bytes_per_second(roots: Roots, nic: str) -> int | Unavailable:
    """Return the negotiated link speed in bytes per second, or the reason why it is unknown."""
    path = roots.sys / "class/net" / nic / "speed"
    try:
        megabits = int(read_file_once(path, "mount sysfs at /sys"))
    except Unavailable as reason:
        if reason.kind != "failed":
            return reason
        return Unavailable("absent", f"{path}: the link is down", "")  # the kernel returns EINVAL
    if megabits <= 0:  # -1 unknown; 0 from some virtual drivers
        return Unavailable("absent", f"{path}: the driver does not report the speed of {nic}", "")
    return megabits * _BYTES_PER_MEGABIT


class TcpSegments(NamedTuple):
    """TCP segments of the network namespace; None where the kernel does not count them."""

    sent: int | None
    """Retransmissions included."""
    retransmitted: int | None


class SnmpParser:
    """Parses TCP segment counts in successive readings of /proc/net/snmp."""

    def __init__(self) -> None:
        self._find = ColumnFinder(b"Tcp: ", b"OutSegs", b"RetransSegs")

    def __call__(self, data: bytes) -> TcpSegments:
        """Return the segments since boot."""
        first, again = self._find(data)
        return TcpSegments(None if first is None or again is None else first + again, again)


class NetstatParser:
    """Parses TCP timeouts in successive readings of /proc/net/netstat."""

    def __init__(self) -> None:
        self._find = ColumnFinder(b"TcpExt: ", b"TCPTimeouts")

    def __call__(self, data: bytes) -> int | None:
        """Return how often a retransmission timer expired since boot."""
        return self._find(data)[0]


MAX_MEMBERS = 32
UP = "up"


def read_bond_mode(roots: Roots, nic: str) -> str:
    """Return the mode of a bond ("802.3ad", "active-backup", …); "" for another interface."""
    words = read_text(roots.sys / "class/net" / nic / "bonding/mode").split()
    return words[0] if words else ""


def list_bond_members(roots: Roots, bond: str) -> list[str]:
    """Return the members of a bond, sorted; [] for another interface."""
    names = read_text(roots.sys / "class/net" / bond / "bonding/slaves").split()
    return sorted(names)[:MAX_MEMBERS]


def is_bond_member_up(roots: Roots, member: str) -> bool | None:
    """Return whether the bond considers a member's link up; None when it does not report it."""
    status = read_text(roots.sys / "class/net" / member / "bonding_slave/mii_status")
    return status == UP if status else None


class Bond:
    """A bond with open state files of its members."""

    def __init__(self, roots: Roots, name: str) -> None:
        """Open the state file of every member."""
        self.name = name
        self.members = list_bond_members(roots, name)
        net = roots.sys / "class/net"
        self._held: list[OpenFile | MissingFile] = [
            open_file(net / member / "bonding_slave/mii_status") for member in self.members
        ]
        self._folder = OpenFolder(net / name)
        self._since_ns = self._folder.read_mtime_ns()

    def has_changed(self) -> bool:
        """Return whether members were added or removed."""
        return self._folder.read_mtime_ns() != self._since_ns

    def list_down_members(self) -> list[str]:
        """Return the members that are down.

        Raises: Unavailable when the state of a member cannot be read.
        """
        states = [file.read().strip().decode("ascii", "replace") for file in self._held]
        return [member for member, state in zip(self.members, states) if state != UP]

    def close(self) -> None:
        """Close all files."""
        for file in (*self._held, self._folder):
            file.close()


def open_bonds(roots: Roots, nics: Iterable[str]) -> list[Bond]:
    """Open all bonds with members among these interfaces."""
    net = roots.sys / "class/net"
    bonds = [Bond(roots, nic) for nic in nics if os.path.isdir(net / nic / "bonding")]
    return [bond for bond in bonds if bond.members]


MAX_NETWORK_CARDS = 32
_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_STATS = 1  # ETH_SS_STATS
_NAME_BYTES = 32
_IFREQ = struct.Struct("=16sQ16x")
_SSET_INFO = struct.Struct("=IIQI4x")
_MAX_STATISTICS = 1 << 17
# The kernel writes as many values as the driver has at that moment: there is room for twice as
# many as a moment ago, and for queues that are added meanwhile.
_SPARE_VALUES = 1 << 13


def list_network_cards(roots: Roots) -> list[str]:
    """Return the interfaces backed by a device, sorted; without bridges, veth and loopback.

    Raises: Unavailable when sysfs cannot be read.
    """
    folder = roots.sys / "class/net"
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise convert_os_error(error, str(folder), "mount sysfs at /sys") from None
    return [name for name in names if os.path.exists(folder / name / "device")][:MAX_NETWORK_CARDS]


class EthtoolStatistics:
    """Reads statistics from drivers; methods raise `Unavailable` where a driver has none."""

    def __init__(self) -> None:
        # Any socket works; one of this family reaches only the kernel.
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, ROUTE)
        self._socket.bind((0, 0))
        self._buffer = array("Q")

    def count(self, nic: str) -> int:
        """Return the current number of statistics of the driver.

        Raises: Unavailable when it has none.
        """
        request = array("B", _SSET_INFO.pack(_GSSET_INFO, 0, 1 << _STATS, 0))
        self._request(nic, request)
        _, _, mask, count = _SSET_INFO.unpack(request)
        if not mask or not 0 < count <= _MAX_STATISTICS:
            raise Unavailable("absent", f"the driver of {nic} has no statistics of its own", "")
        return int(count)

    def names(self, nic: str) -> list[str]:
        """Return the names of the statistics, in the order of their values."""
        room = 2 * self.count(nic) + _SPARE_VALUES
        request = array("B", struct.pack("=III", _GSTRINGS, _STATS, 0) + bytes(room * _NAME_BYTES))
        self._request(nic, request)
        count = struct.unpack_from("=I", request, 8)[0]
        return [
            bytes(request[12 + index * _NAME_BYTES : 12 + (index + 1) * _NAME_BYTES])
            .split(b"\0", 1)[0]
            .decode(errors="replace")
            .strip()
            for index in range(count)
        ]

    def values(self, nic: str, indices: Sequence[int], count: int) -> list[int] | None:
        """Return the values at these indices; None if the driver no longer has `count` of them."""
        current_count = self.count(nic)
        if current_count != count:
            return None
        room = 1 + 2 * current_count + _SPARE_VALUES
        if len(self._buffer) < room:
            self._buffer = array("Q", bytes(8 * room))
        self._buffer[0] = struct.unpack("=Q", struct.pack("=II", _GSTATS, current_count))[0]
        self._request(nic, self._buffer)
        _, written = struct.unpack("=II", struct.pack("=Q", self._buffer[0]))
        if written != count:
            return None
        return [self._buffer[1 + index] for index in indices]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _request(self, nic: str, request: array[int]) -> None:
        name = nic.encode()
        if len(name) > 15:
            raise Unavailable("absent", f"{nic} is not the name of an interface", "")
        try:
            fcntl.ioctl(self._socket, _SIOCETHTOOL, _IFREQ.pack(name, request.buffer_info()[0]))
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                message = f"the driver of {nic} has no statistics of its own"
                raise Unavailable("absent", message, "") from None
            raise convert_os_error(error, f"statistics of {nic} (ethtool)") from None
