"""Network interfaces and RDMA devices of the node, for the header: what does not change.

No address of any kind is kept, neither the machine's nor its peers'. Interfaces with a device
behind them come first, so that a node with hundreds of virtual ones still names its cards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterprof.linux import bonding
from clusterprof.linux.cxi import PORT, cards, device_of
from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import entries, number, text

NICS_AT_MOST = 128
HCAS_AT_MOST = 64
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_LOWER = "lower_"
_VIRTUAL_BUSES = ("virtio", "vmbus", "xen")


def nics(sys: Path, proc: Path) -> list[dict[str, Any]]:
    """Return one entry per network interface, cards first.

    name, link_bytes_per_second, state, mtu, kind ("bond", "vlan", "bridge", "tun", …; none of a
    card), driver, pci, numa_node, physical (there is hardware below it), master (the bond or bridge
    it belongs to), lower (what a bond, bridge or vlan stands on), default_route: true where there
    is one; of a bond mode and, where there are any, down (members whose link is down).
    """
    folder = sys / "class/net"
    default = _default_routes(proc)
    out = []
    found = [nic for nic in entries(folder) if nic.is_dir()]  # bonding_masters is a file
    found.sort(key=lambda nic: not (nic / "device").exists())
    for nic in found[:NICS_AT_MOST]:
        entry = _nic(nic)
        if nic.name in default:
            entry["default_route"] = True
        out.append(entry)
    return out


def hcas(sys: Path) -> list[dict[str, Any]]:
    """Return one entry per RDMA device and per Slingshot card.

    name, driver, pci, numa_node, netdevs (the network interfaces of the same card), and `ports`
    with port, link_layer and netdev.
    """
    found = [_hca(hca) for hca in entries(sys / "class/infiniband")]
    roots = Roots(sys=sys)
    found += [_slingshot(card, device_of(roots, card)) for card in cards(roots)]
    return found[:HCAS_AT_MOST]


def _nic(nic: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": nic.name}
    megabits = number(nic / "speed")
    if megabits is not None and megabits > 0:  # -1 = unknown to the driver
        entry["link_bytes_per_second"] = megabits * 125_000
    state = text(nic / "operstate")
    if state:
        entry["state"] = state
    mtu = number(nic / "mtu")
    if mtu is not None:
        entry["mtu"] = mtu
    kind = _kind(nic)
    if kind:
        entry["kind"] = kind
    entry["physical"] = _physical(nic)
    entry.update(_device(nic / "device"))
    if (nic / "master").is_symlink():
        entry["master"] = os.path.basename(os.readlink(nic / "master"))
    lower = sorted(e.name[len(_LOWER) :] for e in entries(nic) if e.name.startswith(_LOWER))
    if lower:
        entry["lower"] = lower[:NICS_AT_MOST]
    entry.update(_bond(nic))
    return entry


def _bond(nic: Path) -> dict[str, Any]:
    roots = Roots(sys=nic.parents[2])
    mode = bonding.mode(roots, nic.name)
    if not mode:
        return {}
    members = bonding.members(roots, nic.name)
    down = [member for member in members if bonding.is_up(roots, member) is False]
    return {"mode": mode, "down": down} if down else {"mode": mode}


def _physical(nic: Path, deep: int = 3) -> bool:
    """True for a NIC on a real bus and what is laid over one (bond, VLAN); others make speeds up.

    https://docs.kernel.org/ABI/testing/sysfs-class-net: `device`, `lower_<name>`.
    """
    if (nic / "device").exists():
        bus, driver = (
            os.path.basename(os.path.realpath(nic / "device" / name))
            for name in ("subsystem", "driver")
        )
        return bus not in _VIRTUAL_BUSES and driver != "vmxnet3"
    return deep > 0 and any(_physical(one, deep - 1) for one in nic.glob(f"{_LOWER}*"))


def _kind(nic: Path) -> str:
    for line in text(nic / "uevent").splitlines():
        if line.startswith("DEVTYPE="):
            return line[len("DEVTYPE=") :]
    return "tun" if (nic / "tun_flags").exists() else ""


def _hca(hca: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": hca.name, **_device(hca / "device")}
    netdevs = [nic.name for nic in entries(hca / "device/net")]
    if netdevs:
        entry["netdevs"] = netdevs
    entry["ports"] = list(_ports(hca / "ports"))
    return entry


def _slingshot(card: str, device: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": card, **_device(device)}
    port = {"port": PORT, "link_layer": "Slingshot"}
    netdevs = [nic.name for nic in entries(device / "net")]
    if netdevs:
        entry["netdevs"] = netdevs
        port["netdev"] = netdevs[0]
    entry["ports"] = [port]
    return entry


def _ports(folder: Path) -> Iterator[dict[str, Any]]:
    for port in entries(folder):
        entry: dict[str, Any] = {"port": port.name}
        layer = text(port / "link_layer")
        if layer:
            entry["link_layer"] = layer
        # The interface of the first global identifier: the port's own.
        netdev = text(port / "gid_attrs/ndevs/0")
        if netdev:
            entry["netdev"] = netdev
        yield entry


def _device(device: Path) -> dict[str, Any]:
    """Return driver, PCI address and NUMA node of what stands behind an interface."""
    entry: dict[str, Any] = {}
    if not device.exists():
        return entry
    driver = device / "driver"
    if driver.is_symlink():
        entry["driver"] = os.path.basename(os.readlink(driver))
    # A virtio device hangs below its PCI device; what is on no bus has no such part.
    parts = [part for part in os.path.realpath(device).split("/") if _PCI.fullmatch(part)]
    if parts:
        entry["pci"] = parts[-1]
    node = number(device / "numa_node")
    if node is None:
        node = number(Path(os.path.realpath(device)).parent / "numa_node")
    if node is not None and node >= 0:  # -1 = the machine does not say
        entry["numa_node"] = node
    return entry


def _default_routes(proc: Path) -> set[str]:
    """Return the interfaces of IPv4 and IPv6 default routes."""
    found = set()
    for line in text(proc / "net/route").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == "00000000" and words[7] == "00000000":
            found.add(words[0])
    for line in text(proc / "net/ipv6_route").splitlines():
        words = line.split()
        if len(words) == 10 and words[0] == "0" * 32 and words[1] == "00":
            found.add(words[9])
    return found - {"lo"}
