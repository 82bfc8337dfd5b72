"""/sys/devices/system/cpu and …/node: which CPUs share a core, a package, a NUMA node.

https://docs.kernel.org/admin-guide/cputopology.html, Documentation/ABI/testing/sysfs-devices-node

    cpu/online                            0-127
    cpu/cpu0/topology/thread_siblings_list   0,64     hyper-threads of one core
    cpu/cpu0/topology/physical_package_id    0
    cpu/cpu0/topology/core_id                0        a number within the package
    node/node0/cpulist                       0-31,64-95

What the kernel does not show (a container without /sys, ids of -1) is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from clusterprof.cpulists import cpulist, parse_cpulist
from clusterprof.linux.numastat import numa_nodes
from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import entries, number, text

_CPUS_AT_MOST = 4096
_ACCELERATORS = ("0x03", "0x12")


class Cpu(NamedTuple):
    """Where one CPU sits."""

    number: int
    package: int
    """-1 = the kernel does not say."""
    core: int
    """Within its package; -1 = the kernel does not say."""
    siblings: str
    """CPUs of the same core, itself among them, as a list; "" = the kernel does not say."""


def online_cpus(roots: Roots) -> frozenset[int]:
    """Return the CPUs that are online; empty where that is not shown.

    Without the list, every CPU that has a folder and does not say that it is off.
    """
    folder = roots.sys / "devices/system/cpu"
    listed = _listed(text(folder / "online"))
    if listed:
        return listed
    found = [path for path in folder.glob("cpu*") if path.name[3:].isdecimal()]
    return frozenset(int(path.name[3:]) for path in found if text(path / "online") != "0")


def cpus(roots: Roots) -> list[Cpu]:
    """Return the CPUs that are online, by number."""
    found = []
    for one in sorted(online_cpus(roots))[:_CPUS_AT_MOST]:
        folder = cpu_folder(roots, one) / "topology"
        package, core = number(folder / "physical_package_id"), number(folder / "core_id")
        siblings = text(folder / "thread_siblings_list") or text(folder / "core_cpus_list")
        found.append(
            Cpu(one, -1 if package is None else package, -1 if core is None else core, siblings)
        )
    return found


def cpu_folder(roots: Roots, cpu: int) -> Path:
    """Return the folder of one CPU."""
    return roots.sys / "devices/system/cpu" / f"cpu{cpu}"


def topology(roots: Roots) -> dict[str, Any]:
    """Return for the header: `online`, `cores` (where CPUs share one), `packages`, `nodes`.

    All are lists of CPUs as the kernel writes them; `nodes` is by the number of the NUMA node.
    """
    found = cpus(roots)
    if not found:
        return {}
    facts: dict[str, Any] = {"online": cpulist(one.number for one in found)}
    cores = list(dict.fromkeys(one.siblings for one in found))
    if "" not in cores and len(cores) < len(found):
        facts["cores"] = cores
    packages = sorted({one.package for one in found if one.package >= 0})
    if packages:
        facts["packages"] = {
            str(number): cpulist(one.number for one in found if one.package == number)
            for number in packages
        }
    nodes = {node.name[4:]: text(node / "cpulist") for node in numa_nodes(roots)}
    nodes = {name: listed for name, listed in nodes.items() if _listed(listed)}
    if nodes:
        facts["nodes"] = nodes
    return facts


def accelerator_nodes(roots: Roots) -> dict[str, int]:
    """Return the NUMA node of every PCI device that shows, computes or accelerates, by address.

    Of the classes 03 (display) and 12 (processing accelerator); those whose node the firmware does
    not say (-1) are left out. Documentation/ABI/testing/sysfs-bus-pci
    """
    found = {}
    for device in entries(roots.sys / "bus/pci/devices"):
        if text(device / "class").startswith(_ACCELERATORS):
            node = number(device / "numa_node")
            if node is not None and node >= 0:
                found[device.name.lower()] = node
    return found


def _listed(listed: str) -> frozenset[int]:
    try:
        return parse_cpulist(listed)
    except ValueError:
        return frozenset()
