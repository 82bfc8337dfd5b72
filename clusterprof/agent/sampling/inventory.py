"""The hardware and system of the node: the part of the header that does not change.

Unknown facts are left out, never guessed: an analysis treats an absent key as unknown.

Network interfaces and RDMA devices of the node, for the header: their fixed properties.

No address of any kind is kept, neither of the machine nor of its peers. Interfaces with
a hardware device come first, so that the limit on entries never cuts the cards of a
node with hundreds of virtual interfaces.

The layout of a node's cards for the header: rails, ports near GPUs, GPUDirect.

    rails      [{"ports": ["mlx5_0/1", "mlx5_3/1"], "link_layer": "InfiniBand"}]
               ports of equal kind, over which a job's traffic should spread evenly
    gpu_nics   [{"gpu": "0000:1b:00.0", "numa_node": 0, "nics": ["mlx5_0"], "path": "switch"}]
               the RDMA devices nearest to each GPU; network cards on a node without RDMA
    gpudirect  {"module": "nvidia_peermem", "dma_buf": true}
               how an RDMA card reaches the memory of NVIDIA GPUs; "" = no module is loaded

Reads only sysfs and /proc, never a card's firmware. The path is the PCI distance: both
below one "switch" (or port of the root complex), one "root" complex, one "numa" node,
or different nodes ("system"). Virtual machines often show no PCI tree; then the path is
left out.

docs.kernel.org/PCI, docs.nvidia.com "GPUDirect RDMA" (nvidia-peermem; DMA-BUF needs the
open kernel modules and Linux 5.12), Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import clusterprof
from clusterprof.agent.launch import identity
from clusterprof.agent.linux import psutil_host
from clusterprof.agent.linux.cpu import describe_topology, find_accelerator_nodes
from clusterprof.agent.linux.files import Roots, list_folder, read_int, read_text
from clusterprof.agent.linux.network import netdev
from clusterprof.agent.linux.network.rdma import CXI_PORT, get_device_folder, list_slingshot_cards
from clusterprof.agent.linux.storage.disks import find_mount, parse_mountinfo
from clusterprof.trace.schema import SCHEMA_VERSION
from clusterprof.trace.schema import Clock as ClockRecord

MAX_NICS = 128
MAX_HCAS = 64
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_LOWER_PREFIX = "lower_"
_VIRTUAL_BUSES = ("virtio", "vmbus", "xen")


def list_network_interfaces(sys: Path, proc: Path) -> list[dict[str, Any]]:
    """Return one entry per network interface, hardware first.

    name, link_bytes_per_second, state, mtu, kind ("bond", "vlan", "bridge", "tun", …;
    absent for a card), driver, pci, numa_node, physical (based on hardware), master (the
    bond or bridge it belongs to), lower (the interfaces below a bond, bridge or vlan),
    default_route: true where it has one; for a bond also mode and, if any, down (members
    whose link is down).
    """
    folder = sys / "class/net"
    default = _list_default_route_interfaces(proc)
    interfaces = []
    folders = [nic for nic in list_folder(folder) if nic.is_dir()]  # bonding_masters is a file
    folders.sort(key=lambda nic: not (nic / "device").exists())
    for nic in folders[:MAX_NICS]:
        entry = _describe_nic(nic)
        if nic.name in default:
            entry["default_route"] = True
        interfaces.append(entry)
    return interfaces


def list_rdma_devices(sys: Path) -> list[dict[str, Any]]:
    """Return one entry per RDMA device and per Slingshot card.

    name, driver, pci, numa_node, netdevs (the network interfaces of the card), and `ports`
    with port, link_layer and netdev.
    """
    devices = [_describe_hca(hca) for hca in list_folder(sys / "class/infiniband")]
    roots = Roots(sys=sys)
    devices += [
        _describe_slingshot(card, get_device_folder(roots, card))
        for card in list_slingshot_cards(roots)
    ]
    return devices[:MAX_HCAS]


def _describe_nic(nic: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": nic.name}
    megabits = read_int(nic / "speed")
    if megabits is not None and megabits > 0:  # -1 = unknown to the driver
        entry["link_bytes_per_second"] = megabits * 125_000
    state = read_text(nic / "operstate")
    if state:
        entry["state"] = state
    mtu = read_int(nic / "mtu")
    if mtu is not None:
        entry["mtu"] = mtu
    kind = _read_interface_kind(nic)
    if kind:
        entry["kind"] = kind
    entry["physical"] = _is_physical(nic)
    entry.update(_describe_device(nic / "device"))
    if (nic / "master").is_symlink():
        entry["master"] = os.path.basename(os.readlink(nic / "master"))
    lower = sorted(
        e.name[len(_LOWER_PREFIX) :] for e in list_folder(nic) if e.name.startswith(_LOWER_PREFIX)
    )
    if lower:
        entry["lower"] = lower[:MAX_NICS]
    entry.update(_describe_bond(nic))
    return entry


def _describe_bond(nic: Path) -> dict[str, Any]:
    roots = Roots(sys=nic.parents[2])
    mode = netdev.read_bond_mode(roots, nic.name)
    if not mode:
        return {}
    members = netdev.list_bond_members(roots, nic.name)
    down = [member for member in members if netdev.is_bond_member_up(roots, member) is False]
    return {"mode": mode, "down": down} if down else {"mode": mode}


def _is_physical(nic: Path, depth: int = 3) -> bool:
    """Return whether a NIC is on a real bus or based on one that is (bond, VLAN).

    The link speed that other interfaces report is invented.
    https://docs.kernel.org/ABI/testing/sysfs-class-net: `device`, `lower_<name>`.
    """
    if (nic / "device").exists():
        bus, driver = (
            os.path.basename(os.path.realpath(nic / "device" / name))
            for name in ("subsystem", "driver")
        )
        return bus not in _VIRTUAL_BUSES and driver != "vmxnet3"
    return depth > 0 and any(
        _is_physical(lower, depth - 1) for lower in nic.glob(f"{_LOWER_PREFIX}*")
    )


def _read_interface_kind(nic: Path) -> str:
    for line in read_text(nic / "uevent").splitlines():
        if line.startswith("DEVTYPE="):
            return line[len("DEVTYPE=") :]
    return "tun" if (nic / "tun_flags").exists() else ""


def _describe_hca(hca: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": hca.name, **_describe_device(hca / "device")}
    netdevs = [nic.name for nic in list_folder(hca / "device/net")]
    if netdevs:
        entry["netdevs"] = netdevs
    entry["ports"] = list(_list_ports(hca / "ports"))
    return entry


def _describe_slingshot(card: str, device: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": card, **_describe_device(device)}
    port = {"port": CXI_PORT, "link_layer": "Slingshot"}
    netdevs = [nic.name for nic in list_folder(device / "net")]
    if netdevs:
        entry["netdevs"] = netdevs
        port["netdev"] = netdevs[0]
    entry["ports"] = [port]
    return entry


def _list_ports(folder: Path) -> Iterator[dict[str, Any]]:
    for port in list_folder(folder):
        entry: dict[str, Any] = {"port": port.name}
        layer = read_text(port / "link_layer")
        if layer:
            entry["link_layer"] = layer
        # The interface of the first global identifier belongs to the port.
        netdev = read_text(port / "gid_attrs/ndevs/0")
        if netdev:
            entry["netdev"] = netdev
        yield entry


def _describe_device(device: Path) -> dict[str, Any]:
    """Return driver, PCI address and NUMA node of the device of an interface."""
    entry: dict[str, Any] = {}
    if not device.exists():
        return entry
    driver = device / "driver"
    if driver.is_symlink():
        entry["driver"] = os.path.basename(os.readlink(driver))
    # A virtio device is below its PCI device; a device on no bus has no PCI component.
    parts = [part for part in os.path.realpath(device).split("/") if _PCI.fullmatch(part)]
    if parts:
        entry["pci"] = parts[-1]
    node = read_int(device / "numa_node")
    if node is None:
        node = read_int(Path(os.path.realpath(device)).parent / "numa_node")
    if node is not None and node >= 0:  # -1 = unknown to the machine
        entry["numa_node"] = node
    return entry


def _list_default_route_interfaces(proc: Path) -> set[str]:
    """Return the interfaces of IPv4 and IPv6 default routes."""
    interfaces = set()
    for line in read_text(proc / "net/route").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == "00000000" and words[7] == "00000000":
            interfaces.add(words[0])
    for line in read_text(proc / "net/ipv6_route").splitlines():
        words = line.split()
        if len(words) == 10 and words[0] == "0" * 32 and words[1] == "00":
            interfaces.add(words[9])
    return interfaces - {"lo"}


PCI_PATHS = ("switch", "root", "numa", "system")
MAX_GPUS = 64
NVIDIA_VENDOR_ID = "0x10de"
PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
_GPU_VENDORS = (NVIDIA_VENDOR_ID, "0x1002", "0x1da3")  # NVIDIA, AMD, Habana
_INTEL, _INTEL_CLASSES = "0x8086", ("0x0380", "0x0302")  # no display controllers
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_DMA_BUF_SINCE = (5, 12)
_Entries = Sequence[Mapping[str, Any]]


class PciPosition(NamedTuple):
    """The position of a card: its PCI path below the host bridge, and its NUMA node."""

    name: str
    pci_path: tuple[str, ...]
    numa_node: int | None


def describe_fabric(roots: Roots, nics: _Entries, hcas: _Entries) -> dict[str, Any]:
    """Return `rails`, `gpu_nics` and `gpudirect` for the header; empty keys are left out."""
    gpus = list(_list_gpus(roots))
    cards = _locate_cards(roots, nics, hcas) if gpus else []
    near = [
        nearest
        for nearest in (_find_nearest_cards(_locate_card(roots, gpu.name), cards) for gpu in gpus)
        if nearest
    ]
    near_gpu = {nic for entry in near if entry["path"] in PCI_PATHS[:2] for nic in entry["nics"]}
    fabric = {
        "rails": list(_find_rails(roots, nics, hcas, near_gpu)),
        "gpu_nics": near,
        "gpudirect": _read_gpudirect(roots, gpus) if hcas else {},
    }
    return {key: value for key, value in fabric.items() if value}


def measure_pci_distance(first: PciPosition, second: PciPosition) -> tuple[int, int]:
    """Return (index in PCI paths, minus the common components); smaller means nearer.

    (number of paths, 0) when neither PCI nor NUMA nodes are known.
    """
    differing = (n for n, (a, b) in enumerate(zip(first.pci_path, second.pci_path)) if a != b)
    common = next(differing, min(len(first.pci_path), len(second.pci_path)))
    if common > 1:
        return 0, -common
    if (
        common == 1
        and len(first.pci_path) > 1 < len(second.pci_path)
        and not _is_flat_tree(first, second)
    ):
        return 1, 0
    if first.numa_node is None or second.numa_node is None:
        return len(PCI_PATHS), 0
    return (2, 0) if first.numa_node == second.numa_node else (3, 0)


def _is_flat_tree(first: PciPosition, second: PciPosition) -> bool:
    """Return whether both cards are directly on the host bridge, as in many virtual machines."""
    return len(first.pci_path) == 2 and len(second.pci_path) == 2


def _list_gpus(roots: Roots) -> Iterator[Path]:
    """Yield graphics processors and accelerators on PCI, except display controllers."""
    count = 0
    for device in list_folder(roots.sys / "bus/pci/devices"):
        kind = read_text(device / "class")
        if not kind.startswith((_DISPLAY, _ACCELERATOR)):
            continue
        vendor = read_text(device / "vendor")
        if vendor in _GPU_VENDORS or (vendor == _INTEL and kind.startswith(_INTEL_CLASSES)):
            count += 1
            if count <= MAX_GPUS:
                yield device


def _locate_card(roots: Roots, pci: str, name: str = "") -> PciPosition:
    device = roots.sys / "bus/pci/devices" / pci
    components = os.path.realpath(device).split("/")
    top = next(
        (i for i, part in enumerate(components) if _HOST_BRIDGE.fullmatch(part)), len(components)
    )
    node = read_int(device / "numa_node")
    return PciPosition(
        name or pci, tuple(components[top:]), node if node is not None and node >= 0 else None
    )


def _locate_cards(roots: Roots, nics: _Entries, hcas: _Entries) -> list[PciPosition]:
    """Locate the RDMA devices, or the network cards of a node without RDMA devices."""
    cards = [card for card in hcas if card.get("pci")] or [
        nic for nic in nics if nic.get("physical") and nic.get("pci")
    ]
    return [_locate_card(roots, str(card["pci"]), str(card["name"])) for card in cards]


def _find_nearest_cards(gpu: PciPosition, cards: Sequence[PciPosition]) -> dict[str, Any]:
    """Return the cards nearest to one GPU; {} when there are none or the distance is unknown."""
    distances = [(measure_pci_distance(gpu, card), card.name) for card in cards]
    nearest = min((path for path, _ in distances), default=None)
    if nearest is None or nearest[0] == len(PCI_PATHS):
        return {}
    entry: dict[str, Any] = {"gpu": gpu.name}
    if gpu.numa_node is not None:
        entry["numa_node"] = gpu.numa_node
    entry["nics"] = [name for path, name in distances if path == nearest]
    entry["path"] = PCI_PATHS[nearest[0]]
    return entry


def _find_rails(
    roots: Roots, nics: _Entries, hcas: _Entries, near_gpu: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield groups of at least two ports of equal cards.

    Cards near a GPU form groups of their own. Members of a bond are left out: the bond
    already spreads its traffic.
    """
    ports_by_model: dict[tuple[Any, ...], list[str]] = {}
    rdma_netdevs = {nic for hca in hcas for nic in hca.get("netdevs", ())}
    bonded = {nic["name"] for nic in nics if "master" in nic}
    for hca in hcas:
        for port in hca.get("ports", ()):
            if port.get("netdev") in bonded:
                continue
            kind = _describe_model(roots, hca, hca["name"] in near_gpu)
            key = (str(port.get("link_layer", "")), *kind)
            ports_by_model.setdefault(key, []).append(f"{hca['name']}/{port['port']}")
    for nic in nics:
        if nic.get("physical") and nic.get("pci") and not {"master", "kind"} & set(nic):
            if nic["name"] in rdma_netdevs or nic.get("state") != "up":
                continue
            key = (
                "",
                *_describe_model(roots, nic, False),
                nic.get("link_bytes_per_second"),
                nic.get("mtu"),
            )
            ports_by_model.setdefault(key, []).append(str(nic["name"]))
    for key, ports in ports_by_model.items():
        if len(ports) > 1 and key[1]:
            entry: dict[str, Any] = {"ports": sorted(ports, key=_split_numbers)}
            if key[0]:
                entry["link_layer"] = key[0]
            yield entry


def _split_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places mlx5_3 before mlx5_10."""
    return [
        (int(part or 0), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def _describe_model(roots: Roots, card: Mapping[str, Any], near_gpu: bool) -> tuple[Any, ...]:
    device = roots.sys / "bus/pci/devices" / str(card.get("pci", "none"))
    model = f"{read_text(device / 'vendor')}:{read_text(device / 'device')}"
    return (card.get("driver", ""), model, near_gpu)


def _read_gpudirect(roots: Roots, gpus: Sequence[Path]) -> dict[str, Any]:
    """Return how RDMA cards can reach the memory of NVIDIA GPUs; {} without NVIDIA GPUs."""
    if not any(read_text(gpu / "vendor") == NVIDIA_VENDOR_ID for gpu in gpus):
        return {}
    entry: dict[str, Any] = {}
    try:
        lines = (roots.proc / "modules").read_text(errors="replace").splitlines()
    except OSError:
        pass  # the modules are unknown, which differs from none being loaded
    else:
        loaded = {line.split(" ", 1)[0] for line in lines}
        entry["module"] = next((name for name in PEER_MEMORY_MODULES if name in loaded), "")
    version = read_text(roots.proc / "driver/nvidia/version")
    release = re.match(r"(\d+)\.(\d+)", read_text(roots.proc / "sys/kernel/osrelease"))
    if version and release:
        supports_dma_buf = (int(release[1]), int(release[2])) >= _DMA_BUF_SINCE
        entry["dma_buf"] = supports_dma_buf and "Open Kernel Module" in version
    return entry


_PSEUDO_FILESYSTEMS = frozenset(
    [
        "autofs",
        "binfmt_misc",
        "bpf",
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "devtmpfs",
        "efivarfs",
        "fusectl",
        "hugetlbfs",
        "mqueue",
        "nsfs",
        "proc",
        "pstore",
        "rpc_pipefs",
        "securityfs",
        "selinuxfs",
        "sysfs",
        "tracefs",
    ]
)
_MAX_MOUNTS = 256
_MAX_DISKS = 256
_SECTOR_BYTES = 512


def build_node_identity(
    roots: Roots, start: ClockRecord, environ: Mapping[str, str]
) -> dict[str, str]:
    """Build the header's `node`: key, hostname, display, boot_id, kernel."""
    return {
        "key": identity.build_node_key(roots, start.realtime_ns),
        "hostname": identity.get_hostname(),
        "display": identity.get_display_name(environ),
        "boot_id": identity.read_boot_id(roots),
        "kernel": os.uname().release,
    }


def build_host_inventory(roots: Roots) -> dict[str, Any]:
    """Build the header's `host`: CPUs, memory, page size, disks, links, mounts and GPU paths."""
    host: dict[str, Any] = {
        "cpus": _describe_cpus(roots),
        "disks": list(_list_disks(roots))[:_MAX_DISKS],
        "nics": list_network_interfaces(roots.sys, roots.proc),
        "hcas": list_rdma_devices(roots.sys),
        "mounts": _list_mounts(roots),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
    }
    host.update(describe_fabric(roots, host["nics"], host["hcas"]))
    for line in read_text(roots.proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            host["memory_bytes"] = int(line.split()[1]) * 1024
    if "memory_bytes" not in host and not psutil_host.has_linux_proc(roots):
        memory_bytes = psutil_host.read_host_facts(roots).memory_bytes
        if isinstance(memory_bytes, int):
            host["memory_bytes"] = memory_bytes
    return host


def list_versions() -> dict[str, str]:
    """Return the header's versions; those of drivers come from their collectors."""
    return {
        "clusterprof": clusterprof.__version__,
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "schema": str(SCHEMA_VERSION),
    }


def _describe_cpus(roots: Roots) -> dict[str, Any]:
    model, count = "", 0
    for line in read_text(roots.proc / "cpuinfo").splitlines():
        if line.startswith("processor"):
            count += 1
        elif line.startswith("model name") and not model:
            model = line.partition(":")[2].strip()
    cpus: dict[str, Any] = {"count": count or os.cpu_count() or 0}
    if model:
        cpus["model"] = model
    cpus |= describe_topology(roots)
    nodes = find_accelerator_nodes(roots)
    if nodes:
        cpus["accelerators"] = nodes
    return cpus


def _list_disks(roots: Roots) -> Iterator[dict[str, Any]]:
    for disk in list_folder(roots.sys / "class/block"):
        size = read_int(disk / "size")
        if not size:
            continue  # an unused loop or ram device
        entry: dict[str, Any] = {"name": disk.name, "size_bytes": size * _SECTOR_BYTES}
        device = read_text(disk / "dev")
        if device:
            entry["device"] = device
        if (disk / "partition").exists():
            entry["partition_of"] = os.path.basename(os.path.dirname(os.path.realpath(disk)))
        lower_devices = [
            lower.name for lower in list_folder(disk / "slaves")
        ] or _find_backing_device(disk, roots)
        if lower_devices:
            entry["on"] = lower_devices  # device-mapper, md, bcache or loop
        rotational = read_int(disk / "queue/rotational")
        if rotational is not None:
            entry["rotational"] = bool(rotational)
        yield entry


def _find_backing_device(disk: Path, roots: Roots) -> list[str]:
    """Return the device that holds the file of a loop device; [] for all others."""
    file = read_text(disk / "loop/backing_file")
    if not file:
        return []
    try:
        mount = find_mount(parse_mountinfo((roots.proc / "self/mountinfo").read_bytes()), file)
    except OSError:
        return []
    blocks = list_folder(roots.sys / "class/block")
    return [block.name for block in blocks if mount and read_text(block / "dev") == mount.device]


def _list_mounts(roots: Roots) -> list[dict[str, str]]:
    try:
        data = (roots.proc / "self/mountinfo").read_bytes()
    except OSError:
        return []
    return [
        {
            "point": mount.point.encode(errors="replace").decode(),
            "type": mount.type,
            # A source may be user@host:/path or //user:password@host/share.
            "source": mount.source.rpartition("@")[2].encode(errors="replace").decode(),
            "device": mount.device,
        }
        for mount in parse_mountinfo(data)
        if mount.type not in _PSEUDO_FILESYSTEMS
    ][:_MAX_MOUNTS]
