"""/sys/class/kfd: AMD's compute devices, where they are, and which process uses them.

drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c. A device that is partitioned has one
node for each partition, all with its bus and device number (`location_id` is bus << 8 | device << 3
| function; drivers have put the partition's number into different bits of the rest, so the order of
the nodes tells it).

    topology/nodes/1/gpu_id        4711               0 = a CPU
    topology/nodes/1/properties    location_id 1280 … domain 0 … unique_id 13479 …
    topology/nodes/1/io_links/0/properties   type 2 (PCIe), node_to 0
    proc/<pid>/vram_<gpu_id>       bytes of device memory the process holds

Processes have the numbers of the first PID namespace there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import entries, number, text

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h


class Node(NamedTuple):
    """One device, or one partition of one."""

    gpu_id: int
    pci: str
    """Address without the function: "0000:05:00"."""
    partition: int
    """0, 1, … among the nodes of the same card."""
    unique_id: int
    """0 = not told."""
    numa_node: int | None
    """That of the CPUs it is linked to, as KFD numbers them."""


def nodes(roots: Roots) -> list[Node]:
    """Return the GPU nodes in their order; [] without the driver."""
    folders = entries(roots.sys / "class/kfd/kfd/topology/nodes")
    folders.sort(key=lambda folder: (len(folder.name), folder.name))
    cpus = {int(f.name) for f in folders if f.name.isdigit() and not number(f / "gpu_id")}
    seen: dict[str, int] = {}
    found = []
    for folder in folders:
        gpu_id = number(folder / "gpu_id")
        if not gpu_id:
            continue
        facts = _properties(folder)
        place = facts.get("location_id", 0)
        pci = f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}"
        partition = seen[pci] = seen.get(pci, -1) + 1
        numa_node = _linked_cpus(folder, cpus)
        found.append(Node(gpu_id, pci, partition, facts.get("unique_id", 0), numa_node))
    return found


def pids_mean_the_same(roots: Roots) -> bool:
    """True when the recorder's process numbers are those of the first PID namespace."""
    try:
        return os.readlink(roots.proc / "self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def held_bytes(roots: Roots, pid: int, gpu_id: int) -> int | None:
    """Return the device memory a process holds; None when the driver does not say."""
    return number(roots.sys / f"class/kfd/kfd/proc/{pid}/vram_{gpu_id}")


def users(roots: Roots, gpu_id: int) -> int | None:
    """Return how many processes hold memory of the device; None without the driver's list."""
    folder = roots.sys / "class/kfd/kfd/proc"
    if not folder.is_dir():
        return None
    return sum(bool(number(process / f"vram_{gpu_id}")) for process in entries(folder))


def _properties(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in text(folder / "properties").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _linked_cpus(folder: Path, cpus: set[int]) -> int | None:
    for link in entries(folder / "io_links"):
        to = _properties(link).get("node_to")
        if to in cpus:
            return to
    return None
