"""/proc/net/dev and /sys/class/net: traffic of every network interface, state and speed of a NIC.

https://docs.kernel.org/networking/statistics.html, Documentation/ABI/testing/sysfs-class-net

    Inter-|   Receive                                                |  Transmit
     face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop …
      eth0: 70016809    1929    0    0    0     0          0         0   150499    1163    0    0

`speed` is in megabits per second, -1 where unknown, and EINVAL while the link is down. Reading
it takes the network stack's lock, so it is no file for a fast tick.
"""

from __future__ import annotations

from typing import NamedTuple

from clusterprof.errors import Unavailable
from clusterprof.linux.held import read_once
from clusterprof.linux.roots import Roots

HEADER_LINES = 2
LONGEST_RECORD = 512  # bytes: a name and 16 numbers of 20 digits
_BYTES_PER_MEGABIT = 125_000


class NetDev(NamedTuple):
    """What one interface received and sent since it came up."""

    receive_bytes: int
    transmit_bytes: int
    receive_drops: int
    transmit_drops: int
    errors: int
    """Both ways."""


def parse_interface(line: bytes) -> tuple[str, NetDev]:
    """Return name and numbers of one line below the header."""
    name, _, numbers = line.partition(b":")  # old kernels print no space after the colon
    row = numbers.split(None, 12)
    traffic = NetDev(
        int(row[0]), int(row[8]), int(row[3]), int(row[11]), int(row[2]) + int(row[10])
    )
    return name.strip().decode(), traffic


def is_up(roots: Roots, nic: str) -> bool | None:
    """Say whether the interface carries traffic now; None when sysfs does not tell."""
    try:
        state = read_once(roots.sys / "class/net" / nic / "operstate").strip()
    except Unavailable:
        return None
    return None if state == b"unknown" else state == b"up"


def link_bytes_per_second(roots: Roots, nic: str) -> int | Unavailable:
    """Return the speed the link was brought up at, or why it cannot be told."""
    path = roots.sys / "class/net" / nic / "speed"
    try:
        megabits = int(read_once(path, "mount sysfs at /sys"))
    except Unavailable as reason:
        if reason.kind != "failed":
            return reason
        return Unavailable("absent", f"{path}: the link is down", "")  # EINVAL, says the kernel
    if megabits <= 0:  # -1 unknown; 0 from some virtual drivers
        return Unavailable("absent", f"{path}: the driver does not say the speed of {nic}", "")
    return megabits * _BYTES_PER_MEGABIT
