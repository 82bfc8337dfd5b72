"""/sys/class/cxi: Slingshot cards (Cassini), which are no RDMA devices of the kernel's.

HewlettPackard/shs-cxi-driver (cass_telem.c, cass_sysfs.c); "HPE Cassini Performance Counters User
Guide".

    cxi0/device/telemetry/hni_sts_rx_ok_octets   8812345678@1700000000.123456789
    cxi0/device/properties/speed                 200000       megabits per second
    cxi0/device/properties/link                  1            0 while it is down

A value is followed by the time of day at which it was read. Counters have up to 56 bits and begin
anew. A card has one port, here called 1. Without /sys/class/cxi (a container) the same files are
found by the card's network interface, hsn0/device.
"""

from __future__ import annotations

import os
from pathlib import Path

from clusterprof.errors import Unavailable, unavailable_from_os_error
from clusterprof.linux.infiniband import ACTIVE, DOWN, Counters, Link
from clusterprof.linux.roots import Roots
from clusterprof.linux.task import Descriptors

CARDS_AT_MOST = 16
PORT = "1"
_BYTES_PER_MEGABIT = 125_000
_LANES = Unavailable("absent", "the driver says no width", "")


def cards(roots: Roots) -> list[str]:
    """Return the Slingshot cards, in order, or else their interfaces; [] without any."""
    found = _names(roots.sys / "class/cxi")
    if not found:
        net = roots.sys / "class/net"
        found = [nic for nic in _names(net) if nic.startswith("hsn")]
        found = [nic for nic in found if os.path.isdir(net / nic / "device/telemetry")]
    return sorted(found, key=lambda name: (len(name), name))[:CARDS_AT_MOST]


def device_of(roots: Roots, card: str) -> Path:
    """Return the folder of a card's device."""
    kind = "net" if card.startswith("hsn") else "cxi"
    return roots.sys / "class" / kind / card / "device"


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


class CxiPort(Counters):
    """The telemetry of one Slingshot card."""

    def __init__(self, roots: Roots, card: str, descriptors: Descriptors) -> None:
        """Open the files that are there."""
        self._device = str(device_of(roots, card))
        super().__init__(f"{card}/{PORT}", [f"{self._device}/telemetry"], descriptors)

    @staticmethod
    def parse(text: bytes) -> int:
        """Return the number in front of the time of day; raises ValueError."""
        return int(text.partition(b"@")[0])

    def link(self) -> Link:
        """Return state and speed; the speed of a link that is not up means nothing."""
        try:
            state = ACTIVE if self._property("link") else DOWN
        except OSError as error:
            why = unavailable_from_os_error(error, f"{self._device}/properties/link")
            return Link(why, why, why)
        except ValueError:
            why = Unavailable("failed", f"{self._device}/properties/link: not understood", "")
            return Link(why, why, why)
        if state == DOWN:
            down = Unavailable("absent", f"the link of {self.name} is not up", "")
            return Link(state, down, down)
        try:
            megabits = self._property("speed")
        except (OSError, ValueError):
            megabits = 0
        if megabits <= 0:
            why = Unavailable("absent", f"the driver does not say the rate of {self.name}", "")
            return Link(state, why, _LANES)
        return Link(state, megabits * _BYTES_PER_MEGABIT, _LANES)

    def _property(self, name: str) -> int:
        with open(f"{self._device}/properties/{name}", "rb") as file:
            return int(file.read())
