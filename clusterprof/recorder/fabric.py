"""How the cards of a node lie to each other, for the header: rails, ports near GPUs, GPUDirect.

    rails      [{"ports": ["mlx5_0/1", "mlx5_3/1"], "link_layer": "InfiniBand"}]
               ports that are alike, over which a job's traffic should spread evenly
    gpu_nics   [{"gpu": "0000:1b:00.0", "numa_node": 0, "nics": ["mlx5_0"], "path": "switch"}]
               the RDMA devices nearest to each GPU, or the network cards of a node without any
    gpudirect  {"module": "nvidia_peermem", "dma_buf": true}
               how an RDMA card reaches the memory of NVIDIA GPUs; "" = no module is loaded

Only what sysfs and /proc tell at once is read, no card's firmware. A path is by PCI: both below one
"switch" (or port of the root complex), one "root" complex, one "numa" node, or another one
("system"). Virtual machines often show no such tree; then a path is left out.

docs.kernel.org/PCI, docs.nvidia.com "GPUDirect RDMA" (nvidia-peermem; DMA-BUF wants the open kernel
modules and Linux 5.12), Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import entries, number, text

PATHS = ("switch", "root", "numa", "system")
GPUS_AT_MOST = 64
NVIDIA = "0x10de"
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
_VENDORS = (NVIDIA, "0x1002", "0x1da3")  # NVIDIA, AMD, Habana
_INTEL, _INTEL_CLASSES = "0x8086", ("0x0380", "0x0302")  # not the display of a desktop
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_DMA_BUF_SINCE = (5, 12)
_Entries = Sequence[Mapping[str, Any]]


class Place(NamedTuple):
    """Where a card is: the parts of its way down from the host bridge, and its NUMA node."""

    name: str
    way: tuple[str, ...]
    numa_node: int | None


def told(roots: Roots, nics: _Entries, hcas: _Entries) -> dict[str, Any]:
    """Return `rails`, `gpu_nics` and `gpudirect` of the header, without what is not there."""
    gpus = list(_gpus(roots))
    cards = _places(roots, nics, hcas) if gpus else []
    near = [one for one in (_near(_place(roots, gpu.name), cards) for gpu in gpus) if one]
    beside = {nic for entry in near if entry["path"] in PATHS[:2] for nic in entry["nics"]}
    found = {
        "rails": list(_rails(roots, nics, hcas, beside)),
        "gpu_nics": near,
        "gpudirect": _gpudirect(roots, gpus) if hcas else {},
    }
    return {key: value for key, value in found.items() if value}


def path_between(one: Place, other: Place) -> tuple[int, int]:
    """Return (index in PATHS, minus the common steps): the smaller, the nearer.

    (len(PATHS), 0) when neither PCI nor NUMA nodes tell.
    """
    apart = (n for n, (a, b) in enumerate(zip(one.way, other.way)) if a != b)
    common = next(apart, min(len(one.way), len(other.way)))
    if common > 1:
        return 0, -common
    if common == 1 and len(one.way) > 1 < len(other.way) and not _flat(one, other):
        return 1, 0
    if one.numa_node is None or other.numa_node is None:
        return len(PATHS), 0
    return (2, 0) if one.numa_node == other.numa_node else (3, 0)


def _flat(one: Place, other: Place) -> bool:
    """True where both hang on the host bridge itself, as all cards of many virtual machines do."""
    return len(one.way) == 2 and len(other.way) == 2


def _gpus(roots: Roots) -> Iterator[Path]:
    """Graphics processors and accelerators on PCI, not the display of the board's controller."""
    count = 0
    for device in entries(roots.sys / "bus/pci/devices"):
        kind = text(device / "class")
        if not kind.startswith((_DISPLAY, _ACCELERATOR)):
            continue
        vendor = text(device / "vendor")
        if vendor in _VENDORS or (vendor == _INTEL and kind.startswith(_INTEL_CLASSES)):
            count += 1
            if count <= GPUS_AT_MOST:
                yield device


def _place(roots: Roots, pci: str, name: str = "") -> Place:
    device = roots.sys / "bus/pci/devices" / pci
    parts = os.path.realpath(device).split("/")
    top = next((i for i, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), len(parts))
    node = number(device / "numa_node")
    return Place(name or pci, tuple(parts[top:]), node if node is not None and node >= 0 else None)


def _places(roots: Roots, nics: _Entries, hcas: _Entries) -> list[Place]:
    """Where the RDMA devices are, or the network cards of a node without any."""
    cards = [card for card in hcas if card.get("pci")] or [
        nic for nic in nics if nic.get("physical") and nic.get("pci")
    ]
    return [_place(roots, str(card["pci"]), str(card["name"])) for card in cards]


def _near(gpu: Place, cards: Sequence[Place]) -> dict[str, Any]:
    """The cards nearest to one GPU; {} where there is none, or nothing tells which."""
    found = [(path_between(gpu, card), card.name) for card in cards]
    nearest = min((path for path, _ in found), default=None)
    if nearest is None or nearest[0] == len(PATHS):
        return {}
    entry: dict[str, Any] = {"gpu": gpu.name}
    if gpu.numa_node is not None:
        entry["numa_node"] = gpu.numa_node
    entry["nics"] = [name for path, name in found if path == nearest]
    entry["path"] = PATHS[nearest[0]]
    return entry


def _rails(
    roots: Roots, nics: _Entries, hcas: _Entries, beside: set[str]
) -> Iterator[dict[str, Any]]:
    """Ports of the same kind of card, two at least: apart those that lie beside a GPU.

    Members of a bond are none: the bond spreads what goes over them.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    taken = {nic for hca in hcas for nic in hca.get("netdevs", ())}
    bonded = {nic["name"] for nic in nics if "master" in nic}
    for hca in hcas:
        for port in hca.get("ports", ()):
            if port.get("netdev") in bonded:
                continue
            kind = _kind(roots, hca, hca["name"] in beside)
            key = (str(port.get("link_layer", "")), *kind)
            alike.setdefault(key, []).append(f"{hca['name']}/{port['port']}")
    for nic in nics:
        if nic.get("physical") and nic.get("pci") and not {"master", "kind"} & set(nic):
            if nic["name"] in taken or nic.get("state") != "up":
                continue
            key = ("", *_kind(roots, nic, False), nic.get("link_bytes_per_second"), nic.get("mtu"))
            alike.setdefault(key, []).append(str(nic["name"]))
    for key, ports in alike.items():
        if len(ports) > 1 and key[1]:
            entry: dict[str, Any] = {"ports": sorted(ports, key=_natural)}
            if key[0]:
                entry["link_layer"] = key[0]
            yield entry


def _natural(name: str) -> list[tuple[int, str]]:
    """mlx5_3 before mlx5_10."""
    return [(int(part or 0), "") if part.isdecimal() else (-1, part)
            for part in re.split(r"(\d+)", name)]  # fmt: skip


def _kind(roots: Roots, card: Mapping[str, Any], beside: bool) -> tuple[Any, ...]:
    device = roots.sys / "bus/pci/devices" / str(card.get("pci", "none"))
    model = f"{text(device / 'vendor')}:{text(device / 'device')}"
    return (card.get("driver", ""), model, beside)


def _gpudirect(roots: Roots, gpus: Sequence[Path]) -> dict[str, Any]:
    """Which way RDMA cards have to the memory of NVIDIA GPUs; {} without such GPUs."""
    if not any(text(gpu / "vendor") == NVIDIA for gpu in gpus):
        return {}
    entry: dict[str, Any] = {}
    try:
        lines = (roots.proc / "modules").read_text(errors="replace").splitlines()
    except OSError:
        pass  # unknown, which is not the same as none
    else:
        loaded = {line.split(" ", 1)[0] for line in lines}
        entry["module"] = next((name for name in PEER_MODULES if name in loaded), "")
    version = text(roots.proc / "driver/nvidia/version")
    release = re.match(r"(\d+)\.(\d+)", text(roots.proc / "sys/kernel/osrelease"))
    if version and release:
        new = (int(release[1]), int(release[2])) >= _DMA_BUF_SINCE
        entry["dma_buf"] = new and "Open Kernel Module" in version
    return entry
