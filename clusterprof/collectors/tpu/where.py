"""Which TPU chips a node has, told by the PCI bus, without asking anybody."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterprof.errors import Unavailable
from clusterprof.linux.programs import find
from clusterprof.linux.tree import entries, number, text

TOOL = "tpu-info"
PCI = "/sys/bus/pci/devices"
_GOOGLE = "0x1ae0"
# PCI device ids of tpu_info/device.py; v2 and v3 share 0x0027 and differ in the subsystem.
_NAMES = {
    "0x005e": "TPU v4", "0x0063": "TPU v5e", "0x0062": "TPU v5p", "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}  # fmt: skip
_OLD, _OLD_NAMES = "0x0027", {"0x004e": "TPU v2", "0x004f": "TPU v3"}


def chips(folder: str = PCI) -> list[dict[str, Any]]:
    """Return name, pci_bus_id and, where it is told, numa_node of each chip, by address."""
    out = []
    for device in entries(Path(folder)):
        if text(device / "vendor") != _GOOGLE:
            continue
        kind = text(device / "device")
        name = _NAMES.get(kind)
        if kind == _OLD:
            name = _OLD_NAMES.get(text(device / "subsystem_device"))
        if name is None:
            continue  # a network card of the same maker
        chip: dict[str, Any] = {"name": name, "pci_bus_id": device.name}
        numa = number(device / "numa_node")
        if numa is not None and numa >= 0:
            chip["numa_node"] = numa
        out.append(chip)
    return out


def inventory(count: int, found: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """Return the header's entries of `count` chips; places only when the bus shows as many."""
    places = found if len(found) == count else [{} for _ in range(count)]
    return [
        {"id": f"tpu-{index}", "vendor": "google", "index": index, "emulated": False,
         "tells_busy": False, **place, **more}
        for index, place in enumerate(places)
    ]  # fmt: skip


def why_absent(environ: Mapping[str, str], folder: str = PCI) -> Unavailable | None:
    """Say why this node has no TPU to be asked; None when it may have one."""
    if find(TOOL, environ) or any(os.path.exists(f"/dev/accel{n}") for n in range(2)):
        return None
    return None if chips(folder) else Unavailable("absent", "no TPU on the PCI bus")
