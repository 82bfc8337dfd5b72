"""/sys/class/drm and /sys/class/kfd: the cards of the node, their PCI device and its link.

Documentation/gpu/drm-uapi.rst; the PCI files are those of Documentation/ABI/testing/sysfs-bus-pci.

    card1/device/uevent                 DRIVER=amdgpu, PCI_ID=1002:74A1, PCI_SLOT_NAME=0000:05:00.0
    card1/device/numa_node              1; -1 = the firmware does not report it
    card1/device/current_link_speed     32.0 GT/s PCIe
    card1/device/power/runtime_status   active; reading would wake a suspended device

/sys/class/kfd: AMD's compute devices, their location, and the processes that use them.

drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c. A partitioned device has one node for
each partition, all with its bus and device number (`location_id` is bus << 8 | device << 3 |
function; drivers have put the partition's number into different bits of the rest, so the order of
the nodes is used instead).

    topology/nodes/1/gpu_id        4711               0 = a CPU
    topology/nodes/1/properties    location_id 1280 … domain 0 … unique_id 13479 …
    topology/nodes/1/io_links/0/properties   type 2 (PCIe), node_to 0
    proc/<pid>/vram_<gpu_id>       bytes of device memory the process holds

Processes are listed there by their pid in the first PID namespace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof.agent.linux.files import (
    MissingFile,
    Roots,
    list_folder,
    open_file,
    read_int,
    read_text,
)
from clusterprof.errors import DevicesChanged, Unavailable, convert_os_error

MAX_CARDS = 32
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h
_CARD = re.compile(r"card\d+")
# Gigatransfers per second of a lane -> PCIe generation.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}


class Card(NamedTuple):
    """One graphics card: its DRM node, its driver and its location."""

    name: str
    """Of the DRM node: "card1"."""
    folder: Path
    """Of the card; `folder / "device"` is the PCI device."""
    driver: str
    pci: str
    """Address in lower case: "0000:05:00.0"."""
    pci_id: str
    """Vendor and device in lower case: "1002:74a1"."""
    numa_node: int | None


def list_cards(roots: Roots, drivers: Collection[str]) -> list[Card]:
    """Return the cards of these drivers, sorted by PCI address.

    Raises: Unavailable ("absent") when there is no /sys/class/drm or no matching card.
    """
    folder = roots.sys / "class/drm"
    try:
        names = sorted(entry.name for entry in folder.iterdir() if _CARD.fullmatch(entry.name))
    except OSError as error:
        raise convert_os_error(error, str(folder)) from None
    cards = [
        card for name in names if (card := _read_card(folder / name)) and card.driver in drivers
    ]
    if not cards:
        raise Unavailable("absent", f"no device of the driver {' or '.join(sorted(drivers))}")
    return sorted(cards, key=lambda card: card.pci)[:MAX_CARDS]


def _read_card(folder: Path) -> Card | None:
    """Read a card's facts; None when it is no PCI device (virtual, or a partition)."""
    facts = dict(
        line.split("=", 1)
        for line in read_text(folder / "device/uevent").splitlines()
        if "=" in line
    )
    pci = facts.get("PCI_SLOT_NAME", "").lower()
    if not pci:
        return None
    node = read_int(folder / "device/numa_node")
    return Card(
        folder.name,
        folder,
        facts.get("DRIVER", ""),
        pci,
        facts.get("PCI_ID", "").lower(),
        node if node is not None and node >= 0 else None,
    )


class DeviceFile:
    """One open file of a device: a number, or the reason why there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = open_file(path)

    def read(self) -> bytes:
        """Return the content of the file.

        Raises: Unavailable when it cannot be read.
        """
        try:
            return self._held.read()
        except Unavailable as reason:
            if reason.kind == "absent":  # one wording for all devices, so that it is reported once
                message = f"the driver does not report {self.path.name}"
                raise Unavailable("absent", message) from None
            if reason.kind == "denied" and not isinstance(self._held, MissingFile):
                # The file could be opened, so the driver refuses; it is not a permission problem.
                message = f"{self.path}: the driver refuses; the device may be in a reset"
                raise Unavailable("failed", message) from None
            raise

    def number(self, minimum: int = 0, maximum: int = 1 << 62) -> int | Unavailable:
        """Return the number in the file, or the reason why there is none within these bounds."""
        try:
            content = self.read()
        except Unavailable as reason:
            return reason
        try:
            value = int(content)
        except ValueError:
            return Unavailable("failed", f"{self.path}: {_format_content(content)} is not a number")
        if not minimum <= value <= maximum:
            return Unavailable("failed", f"{self.path}: impossible value {value}")
        return value

    def close(self) -> None:
        """Close the file."""
        self._held.close()


def scale_value(value: int | Unavailable, factor: float) -> float | Unavailable:
    """Convert a number to another unit; a reason is returned unchanged."""
    return value if isinstance(value, Unavailable) else value * factor


def _format_content(content: bytes) -> str:
    return repr(content[:40].decode(errors="replace").strip())


def build_inventory_entry(card: Card, index: int, vendor: str, link: bool = True) -> dict[str, Any]:
    """Build the header entry of a card; its "id" is the PCI address.

    link: include the maximum generation and width of the PCIe link.
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
            "pcie_generation_max": read_link_generation(card, "max"),
            "pcie_width_max": read_link_width(card, "max"),
        }
        entry |= {k: value for k, value in highest.items() if not isinstance(value, Unavailable)}
    return entry


def read_link_generation(card: Card, which: str = "current") -> int | Unavailable:
    """Return the current or highest (`which` = "max") PCIe generation of the link."""
    path = card.folder / "device" / f"{which}_link_speed"
    word = read_text(path).partition(" ")[0]
    try:
        return _GENERATIONS[float(word)]
    except (ValueError, KeyError):
        return Unavailable("absent", "the speed of the PCIe link is not reported")


def read_link_width(card: Card, which: str = "current") -> int | Unavailable:
    """Return the current or highest (`which` = "max") number of PCIe lanes of the link."""
    path = card.folder / "device" / f"{which}_link_width"
    lanes = read_int(path)
    if lanes is None or not 0 < lanes <= 32:
        return Unavailable("absent", "the width of the PCIe link is not reported")
    return lanes


def is_asleep(card: Card) -> bool:
    """Return whether the device is suspended: reading its counters would wake it.

    Raises: DevicesChanged when the device is gone.
    """
    if not os.path.exists(card.folder / "device/uevent"):
        raise DevicesChanged(f"{card.pci} is gone")
    return read_text(card.folder / "device/power/runtime_status") == "suspended"


def find_hwmon_folder(card: Card, name: str) -> Path | None:
    """Find the sensor folder of the device by the sensors' name; None without any."""
    for folder in list_folder(card.folder / "device/hwmon"):
        if read_text(folder / "name") == name:
            return folder
    return None


class KfdNode(NamedTuple):
    """One device, or one partition of a device."""

    gpu_id: int
    pci: str
    """Address without the function: "0000:05:00"."""
    partition: int
    """0, 1, … among the nodes of the same card."""
    unique_id: int
    """0 = not reported."""
    numa_node: int | None
    """Node of the CPUs it is linked to, in KFD's numbering."""


def list_gpu_nodes(roots: Roots) -> list[KfdNode]:
    """Return the GPU nodes in the kernel's order; [] without the driver."""
    folders = list_folder(roots.sys / "class/kfd/kfd/topology/nodes")
    folders.sort(key=lambda folder: (len(folder.name), folder.name))
    cpus = {int(f.name) for f in folders if f.name.isdigit() and not read_int(f / "gpu_id")}
    last_partition: dict[str, int] = {}
    nodes = []
    for folder in folders:
        gpu_id = read_int(folder / "gpu_id")
        if not gpu_id:
            continue
        facts = _read_properties(folder)
        location = facts.get("location_id", 0)
        pci = f"{facts.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
        partition = last_partition[pci] = last_partition.get(pci, -1) + 1
        numa_node = _find_linked_cpu_node(folder, cpus)
        nodes.append(KfdNode(gpu_id, pci, partition, facts.get("unique_id", 0), numa_node))
    return nodes


def is_in_first_pid_namespace(roots: Roots) -> bool:
    """Return whether the recorder's pids match KFD's: it runs in the first PID namespace."""
    try:
        return os.readlink(roots.proc / "self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def read_process_memory_bytes(roots: Roots, pid: int, gpu_id: int) -> int | None:
    """Read the device memory a process holds, in bytes; None = not reported."""
    return read_int(roots.sys / f"class/kfd/kfd/proc/{pid}/vram_{gpu_id}")


def count_processes(roots: Roots, gpu_id: int) -> int | None:
    """Count the processes that hold memory of the device; None without the driver's list."""
    folder = roots.sys / "class/kfd/kfd/proc"
    if not folder.is_dir():
        return None
    return sum(bool(read_int(process / f"vram_{gpu_id}")) for process in list_folder(folder))


def _read_properties(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_text(folder / "properties").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _find_linked_cpu_node(folder: Path, cpus: set[int]) -> int | None:
    for link in list_folder(folder / "io_links"):
        to = _read_properties(link).get("node_to")
        if to in cpus:
            return to
    return None
