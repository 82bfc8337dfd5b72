"""SIOCETHTOOL: what a network card's driver counts beside what every interface counts.

https://docs.kernel.org/networking/statistics.html, include/uapi/linux/ethtool.h. What
`ethtool -S` prints; anybody may ask.

    ETHTOOL_GSSET_INFO   how many statistics there are
    ETHTOOL_GSTRINGS     their names, 32 bytes each
    ETHTOOL_GSTATS       their values, 64 bits each

Each driver has names of its own. The kernel holds the network stack's lock while the driver reads
the card, so this is for a thread that may wait (`aside`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Sequence

from clusterprof.errors import Unavailable, unavailable_from_os_error
from clusterprof.linux.netlink import ROUTE
from clusterprof.linux.roots import Roots

CARDS_AT_MOST = 32
_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_STATS = 1  # ETH_SS_STATS
_NAME_BYTES = 32
_IFREQ = struct.Struct("=16sQ16x")
_SSET_INFO = struct.Struct("=IIQI4x")
_STATISTICS_AT_MOST = 1 << 17
# The kernel writes as many values as the driver has *then*: twice as many as there were a moment
# ago, and as many again as queues that could be added, fit.
_SPARE = 1 << 13


def cards(roots: Roots) -> list[str]:
    """Return the interfaces that a device stands behind, in order; not bridges, veth, loopback."""
    folder = roots.sys / "class/net"
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise unavailable_from_os_error(error, str(folder), "mount sysfs at /sys") from None
    return [name for name in names if os.path.exists(folder / name / "device")][:CARDS_AT_MOST]


class Statistics:
    """Asks drivers for their statistics; raises `Unavailable` where they have none."""

    def __init__(self) -> None:
        # Any socket will do; one of this family leads nowhere but to the kernel.
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, ROUTE)
        self._socket.bind((0, 0))
        self._buffer = array("Q")

    def count(self, nic: str) -> int:
        """Return how many statistics the driver has now."""
        request = array("B", _SSET_INFO.pack(_GSSET_INFO, 0, 1 << _STATS, 0))
        self._ask(nic, request)
        _, _, mask, count = _SSET_INFO.unpack(request)
        if not mask or not 0 < count <= _STATISTICS_AT_MOST:
            raise Unavailable("absent", f"the driver of {nic} keeps no statistics of its own", "")
        return int(count)

    def names(self, nic: str) -> list[str]:
        """Return the names of the statistics, in the order of their values."""
        room = 2 * self.count(nic) + _SPARE
        request = array("B", struct.pack("=III", _GSTRINGS, _STATS, 0) + bytes(room * _NAME_BYTES))
        self._ask(nic, request)
        count = struct.unpack_from("=I", request, 8)[0]
        return [
            bytes(request[12 + index * _NAME_BYTES : 12 + (index + 1) * _NAME_BYTES])
            .split(b"\0", 1)[0]
            .decode(errors="replace")
            .strip()
            for index in range(count)
        ]

    def values(self, nic: str, indices: Sequence[int], count: int) -> list[int] | None:
        """Return the values at these indices; None when there are no longer `count` of them."""
        now = self.count(nic)
        if now != count:
            return None
        room = 1 + 2 * now + _SPARE
        if len(self._buffer) < room:
            self._buffer = array("Q", bytes(8 * room))
        self._buffer[0] = struct.unpack("=Q", struct.pack("=II", _GSTATS, now))[0]
        self._ask(nic, self._buffer)
        _, written = struct.unpack("=II", struct.pack("=Q", self._buffer[0]))
        if written != count:
            return None
        return [self._buffer[1 + index] for index in indices]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _ask(self, nic: str, request: array[int]) -> None:
        name = nic.encode()
        if len(name) > 15:
            raise Unavailable("absent", f"{nic} is not the name of an interface", "")
        try:
            fcntl.ioctl(self._socket, _SIOCETHTOOL, _IFREQ.pack(name, request.buffer_info()[0]))
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                message = f"the driver of {nic} keeps no statistics of its own"
                raise Unavailable("absent", message, "") from None
            raise unavailable_from_os_error(error, f"statistics of {nic} (ethtool)") from None
