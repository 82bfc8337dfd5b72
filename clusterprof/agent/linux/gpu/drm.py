"""/sys/class/drm: the graphics cards of the node, their PCI device and its link.

Documentation/gpu/drm-uapi.rst; the PCI files are those of Documentation/ABI/testing/sysfs-bus-pci.

    card1/device/uevent                 DRIVER=amdgpu, PCI_ID=1002:74A1, PCI_SLOT_NAME=0000:05:00.0
    card1/device/numa_node              1; -1 = the firmware does not say
    card1/device/current_link_speed     32.0 GT/s PCIe
    card1/device/power/runtime_status   active; a suspended one would be woken by a reading
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof.errors import DevicesChanged, Unavailable, unavailable_from_os_error
from clusterprof.linux.held import MissingFile, hold
from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import entries, number, text

CARDS_AT_MOST = 32
_CARD = re.compile(r"card\d+")
# Gigatransfers per second of a lane -> generation.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}


class Card(NamedTuple):
    """One graphics card: its node, its driver and where it is."""

    name: str
    """Of the node: "card1"."""
    folder: Path
    """Of the card; `folder / "device"` is the PCI device."""
    driver: str
    pci: str
    """Address in lower case: "0000:05:00.0"."""
    pci_id: str
    """Vendor and device in lower case: "1002:74a1"."""
    numa_node: int | None


def cards(roots: Roots, drivers: Collection[str]) -> list[Card]:
    """Return the cards of these drivers in the order of their PCI addresses.

    Raises Unavailable (absent) when there is no /sys/class/drm or no such card.
    """
    folder = roots.sys / "class/drm"
    try:
        names = sorted(entry.name for entry in folder.iterdir() if _CARD.fullmatch(entry.name))
    except OSError as error:
        raise unavailable_from_os_error(error, str(folder)) from None
    found = [card for name in names if (card := _card(folder / name)) and card.driver in drivers]
    if not found:
        raise Unavailable("absent", f"no device of the driver {' or '.join(sorted(drivers))}")
    return sorted(found, key=lambda card: card.pci)[:CARDS_AT_MOST]


def _card(folder: Path) -> Card | None:
    """Read what the card is; None when it is no PCI device (a virtual one, a partition)."""
    facts = dict(
        line.split("=", 1) for line in text(folder / "device/uevent").splitlines() if "=" in line
    )
    pci = facts.get("PCI_SLOT_NAME", "").lower()
    if not pci:
        return None
    node = number(folder / "device/numa_node")
    return Card(
        folder.name,
        folder,
        facts.get("DRIVER", ""),
        pci,
        facts.get("PCI_ID", "").lower(),
        node if node is not None and node >= 0 else None,
    )


class Attribute:
    """One file of a device, held open: a number, or the reason why there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = hold(path)

    def read(self) -> bytes:
        """Return the content; raises Unavailable."""
        try:
            return self._held.read()
        except Unavailable as reason:
            if reason.kind == "absent":  # worded alike for all devices, so that it is said once
                message = f"the driver does not tell {self.path.name}"
                raise Unavailable("absent", message) from None
            if reason.kind == "denied" and not isinstance(self._held, MissingFile):
                # It could be opened, so this is the driver's word and not a permission.
                message = f"{self.path}: the driver refuses; the device may be in a reset"
                raise Unavailable("failed", message) from None
            raise

    def number(self, least: int = 0, most: int = 1 << 62) -> int | Unavailable:
        """Return the number in the file, or why there is none in these bounds."""
        try:
            content = self.read()
        except Unavailable as reason:
            return reason
        try:
            value = int(content)
        except ValueError:
            return Unavailable("failed", f"{self.path}: {_shown(content)} is no number")
        if not least <= value <= most:
            return Unavailable("failed", f"{self.path}: impossible value {value}")
        return value

    def close(self) -> None:
        """Close the file."""
        self._held.close()


def scaled(value: int | Unavailable, factor: float) -> float | Unavailable:
    """Return a number in another unit, or the reason for none as it is."""
    return value if isinstance(value, Unavailable) else value * factor


def _shown(content: bytes) -> str:
    return repr(content[:40].decode(errors="replace").strip())


def inventory_entry(card: Card, index: int, vendor: str, link: bool = True) -> dict[str, Any]:
    """Return for the header what is known of any card; "id" is its PCI address.

    `link`: name what the PCIe link can do at most.
    """
    entry: dict[str, Any] = {
        "id": card.pci,
        "vendor": vendor,
        "index": index,
        "emulated": False,
        "pci_bus_id": card.pci,
        "pci_id": card.pci_id,
        "driver": card.driver,
    }
    if card.numa_node is not None:
        entry["numa_node"] = card.numa_node
    if link:
        highest = {
            "pcie_generation_max": link_generation(card, "max"),
            "pcie_width_max": link_width(card, "max"),
        }
        entry |= {k: value for k, value in highest.items() if not isinstance(value, Unavailable)}
    return entry


def link_generation(card: Card, which: str = "current") -> int | Unavailable:
    """Return the PCIe generation of the link now, or its highest (`which` = "max")."""
    path = card.folder / "device" / f"{which}_link_speed"
    word = text(path).partition(" ")[0]
    try:
        return _GENERATIONS[float(word)]
    except (ValueError, KeyError):
        return Unavailable("absent", "the speed of the PCIe link is not told")


def link_width(card: Card, which: str = "current") -> int | Unavailable:
    """Return the PCIe lanes of the link now, or the most it can have."""
    path = card.folder / "device" / f"{which}_link_width"
    lanes = number(path)
    if lanes is None or not 0 < lanes <= 32:
        return Unavailable("absent", "the width of the PCIe link is not told")
    return lanes


def asleep(card: Card) -> bool:
    """True when the device is suspended: reading its counters would wake it.

    Raises DevicesChanged when the device has gone.
    """
    if not os.path.exists(card.folder / "device/uevent"):
        raise DevicesChanged(f"{card.pci} is gone")
    return text(card.folder / "device/power/runtime_status") == "suspended"


def hwmon(card: Card, name: str) -> Path | None:
    """Return the folder of the device's own sensors, by the name they have; None without any."""
    for folder in entries(card.folder / "device/hwmon"):
        if text(folder / "name") == name:
            return folder
    return None
