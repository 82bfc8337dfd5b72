"""Over which links the job's ranks will talk: NICs, RDMA ports, and what variables choose of them.

`NCCL_IB_HCA` and `NCCL_SOCKET_IFNAME` (NCCL User Guide, "Environment Variables") list beginnings of
names; "=" in front asks for whole names, "^" leaves out. An RDMA device may be followed by a colon
and a port. What the files of /sys/class/infiniband mean is told in `linux.infiniband`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import text
from clusterprof.recorder import links
from clusterprof.recorder.surroundings.change import ADMIN, JOB, YOU, Change

_PREFIXES = (
    "NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "TP_SOCKET_IFNAME", "UCX_", "FI_", "MASTER_",
    "HCCL_", "CCL_", "OMPI_MCA_btl", "OMPI_MCA_pml", "SHARP_",
)  # fmt: skip
_VALUE_CHARACTERS = 256
_VARIABLES_AT_MOST = 64
_GIGABIT_BYTES = 125_000_000
_RATE = re.compile(r"([\d.]+) Gb/sec")
_UNLIMITED = "unlimited"
_LITTLE_MEMLOCK_BYTES = 1 << 30


def read_fabric(
    roots: Roots, environ: Mapping[str, str], exists: Callable[[str], bool] = os.path.exists
) -> dict[str, Any]:
    """Return what there is to talk over, and what the job's variables make of it.

    variables; nics (name, state, link_bytes_per_second, driver, numa_node, master, default_route,
    chosen); ports (name, state, link_layer, link_bytes_per_second, numa_node, netdevs, chosen);
    peermem: whether nvidia-peermem is loaded; verbs: whether /dev/infiniband is there;
    memlock_bytes: how much memory may be registered, None = unlimited.
    """
    nics = [
        {key: nic[key] for key in _NIC_KEYS if key in nic}
        for nic in links.nics(roots.sys, roots.proc)
        if nic.get("physical") or nic.get("default_route")
    ]
    ports = list(_ports(roots))
    variables = {
        name: environ[name][:_VALUE_CHARACTERS]
        for name in sorted(environ)
        if name.startswith(_PREFIXES)
    }
    for nic in nics:
        nic["chosen"] = is_chosen(nic["name"], variables.get("NCCL_SOCKET_IFNAME"))
    for port in ports:
        port["chosen"] = is_chosen(port["name"], variables.get("NCCL_IB_HCA"))
    out: dict[str, Any] = {
        "variables": dict(list(variables.items())[:_VARIABLES_AT_MOST]),
        "nics": nics,
        "ports": ports,
    }
    if (roots.sys / "module").is_dir():
        out["peermem"] = (roots.sys / "module/nvidia_peermem").is_dir()
    if ports:
        out["verbs"] = exists("/dev/infiniband")
    limit = _memlock(roots)
    if limit is not None:
        out["memlock_bytes"] = None if limit == _UNLIMITED else int(limit)
    return out


_NIC_KEYS = (
    "name", "state", "link_bytes_per_second", "kind", "driver", "pci", "numa_node", "master", "mtu",
    "default_route",
)  # fmt: skip


def _ports(roots: Roots) -> Iterable[dict[str, Any]]:
    for hca in links.hcas(roots.sys):
        for port in hca["ports"]:
            folder = roots.sys / "class/infiniband" / hca["name"] / "ports" / port["port"]
            entry: dict[str, Any] = {"name": f"{hca['name']}:{port['port']}"}
            entry["state"] = text(folder / "state").partition(": ")[2] or "unknown"
            rate = _RATE.match(text(folder / "rate"))
            if rate is not None and entry["state"] == "ACTIVE":
                entry["link_bytes_per_second"] = round(float(rate[1]) * _GIGABIT_BYTES)
            entry |= {key: port[key] for key in ("link_layer", "netdev") if key in port}
            entry |= {key: hca[key] for key in ("driver", "pci", "numa_node") if key in hca}
            yield entry


def is_chosen(name: str, words: str | None) -> bool | None:
    """Return whether NCCL's list takes a device; None when there is no list.

    name: "eth0", or "mlx5_0:1" with its port.
    """
    if not words:
        return None
    leave_out = words.startswith("^")
    whole = words.removeprefix("^").startswith("=")
    listed = words.removeprefix("^").removeprefix("=").split(",")
    device, _, port = name.partition(":")
    hit = False
    for word in (word.strip() for word in listed):
        wanted, _, wanted_port = word.partition(":")
        same = device == wanted if whole else bool(wanted) and device.startswith(wanted)
        hit = hit or (same and (not wanted_port or not port or wanted_port == port))
    return hit != leave_out


def _memlock(roots: Roots) -> str | None:
    for line in text(roots.proc / "self/limits").splitlines():
        if line.startswith("Max locked memory"):
            words = line.split()
            if words[3] == _UNLIMITED or words[3].isdigit():
                return words[3]
    return None


def changes(fabric: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Say what keeps the ranks from the links that are there."""
    variables = fabric["variables"]
    out = [
        Change("fabric", message, f"unset {name}", YOU)
        for name, value, message in (
            ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_DISABLE=1: GPUs of a node talk through memory"),
            ("NCCL_SHM_DISABLE", "1", "NCCL_SHM_DISABLE=1: ranks of a node talk over the network"),
        )
        if variables.get(name) == value
    ]
    up = [port for port in fabric["ports"] if port["state"] == "ACTIVE"]
    down = [port for port in fabric["ports"] if port["state"] not in ("ACTIVE", "unknown")]
    if up and variables.get("NCCL_IB_DISABLE") == "1":
        message = f"NCCL_IB_DISABLE=1 though {_up(up)}: traffic goes over TCP"
        out.append(Change("fabric", message, "unset NCCL_IB_DISABLE", YOU))
    out += _of_lists(fabric, variables, up)
    if up and fabric.get("verbs") is False:
        message = f"{_up(up)}, and /dev/infiniband is not in the container"
        remedy = "docker run --device=/dev/infiniband; in Kubernetes an RDMA device plugin"
        out.append(Change("fabric", message, remedy, JOB))
    memlock = fabric.get("memlock_bytes")
    if up and memlock is not None and memlock < _LITTLE_MEMLOCK_BYTES:
        message = f"only {memlock >> 10:,} KiB of memory may be locked: RDMA registers its buffers"
        remedy = "docker run --ulimit memlock=-1; under Slurm LimitMEMLOCK=infinity of slurmd"
        out.append(Change("fabric", message, remedy, ADMIN))
    nvidia = any(one["collector"] == "gpu_nvidia" for one in devices)
    if up and nvidia and fabric.get("peermem") is False:
        message = "nvidia-peermem is not loaded: without DMA-BUF RDMA goes through host memory"
        remedy = "modprobe nvidia-peermem, or open kernel modules on Linux 5.12 or later (DMA-BUF)"
        out.append(Change("fabric", message, remedy, ADMIN))
    if up and down:
        told = ", ".join(str(port["name"]) for port in down)
        message = f"RDMA ports that are not up: {told}"
        out.append(Change("fabric", message, "look at their cables and at the switch", ADMIN))
    return out


def _up(ports: Sequence[Any]) -> str:
    return "1 RDMA port is up" if len(ports) == 1 else f"{len(ports)} RDMA ports are up"


def _of_lists(
    fabric: Mapping[str, Any], variables: Mapping[str, str], up: Sequence[Mapping[str, Any]]
) -> list[Change]:
    """Say where a variable lists what is not there, or what is down."""
    out = []
    if up and not any(port["chosen"] in (True, None) for port in up):
        words = variables["NCCL_IB_HCA"]
        message = f"NCCL_IB_HCA={words} takes none of the ports that are up"
        told = ",".join(dict.fromkeys(str(port["name"]).partition(":")[0] for port in up))
        out.append(Change("fabric", message, f"set NCCL_IB_HCA={told}", YOU))
    nics = [nic for nic in fabric["nics"] if nic.get("state") != "down"]
    if nics and not any(nic["chosen"] in (True, None) for nic in nics):
        words = variables["NCCL_SOCKET_IFNAME"]
        message = f"NCCL_SOCKET_IFNAME={words} takes none of the interfaces that are up"
        told = ",".join(str(nic["name"]) for nic in nics)
        out.append(Change("fabric", message, f"set NCCL_SOCKET_IFNAME to one of {told}", YOU))
    return out
