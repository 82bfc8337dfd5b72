"""The links that the job's ranks can use: NICs, RDMA ports, and what variables select of them.

`NCCL_IB_HCA` and `NCCL_SOCKET_IFNAME` (NCCL User Guide, "Environment Variables") list
prefixes of names; a leading "=" requires whole names, "^" excludes. An RDMA device may
be followed by a colon and a port. The files of /sys/class/infiniband are described in
`agent.linux.network.rdma`.

The file systems that the job uses: working folder, home, temporary files, shared memory, data.

The mount of a path is looked up in our own mount table; a server is never contacted.
Free space is read of local file systems only. Only mount options that affect speed are
shown; an option that may contain a person's name or a secret never is.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from clusterprof.agent.doctor.environment import ADMIN, JOB, USER, SuggestedChange
from clusterprof.agent.linux.files import Roots, read_file_once, read_text
from clusterprof.agent.linux.storage.disks import Mount, find_mount, parse_mountinfo
from clusterprof.agent.sampling import inventory
from clusterprof.errors import Unavailable

_VARIABLE_PREFIXES = (
    "NCCL_",
    "RCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "TP_SOCKET_IFNAME",
    "UCX_",
    "FI_",
    "MASTER_",
    "HCCL_",
    "CCL_",
    "OMPI_MCA_btl",
    "OMPI_MCA_pml",
    "SHARP_",
)
_VALUE_CHARACTERS = 256
_MAX_VARIABLES = 64
_BYTES_PER_GIGABIT = 125_000_000
_RATE = re.compile(r"([\d.]+) Gb/sec")
_UNLIMITED = "unlimited"
_SMALL_MEMLOCK_BYTES = 1 << 30


def read_job_fabric(
    roots: Roots, environ: Mapping[str, str], exists: Callable[[str], bool] = os.path.exists
) -> dict[str, Any]:
    """Return the network links of the node, and which of them the job's variables select.

    variables; nics (name, state, link_bytes_per_second, driver, numa_node, master,
    default_route, chosen); ports (name, state, link_layer, link_bytes_per_second,
    numa_node, netdevs, chosen); peermem: whether nvidia-peermem is loaded; verbs: whether
    /dev/infiniband exists; memlock_bytes: how much memory may be registered, None =
    unlimited.
    """
    nics = [
        {key: nic[key] for key in _NIC_KEYS if key in nic}
        for nic in inventory.list_network_interfaces(roots.sys, roots.proc)
        if nic.get("physical") or nic.get("default_route")
    ]
    ports = list(_list_rdma_ports(roots))
    variables = {
        name: environ[name][:_VALUE_CHARACTERS]
        for name in sorted(environ)
        if name.startswith(_VARIABLE_PREFIXES)
    }
    for nic in nics:
        nic["chosen"] = is_chosen(nic["name"], variables.get("NCCL_SOCKET_IFNAME"))
    for port in ports:
        port["chosen"] = is_chosen(port["name"], variables.get("NCCL_IB_HCA"))
    out: dict[str, Any] = {
        "variables": dict(list(variables.items())[:_MAX_VARIABLES]),
        "nics": nics,
        "ports": ports,
    }
    if (roots.sys / "module").is_dir():
        out["peermem"] = (roots.sys / "module/nvidia_peermem").is_dir()
    if ports:
        out["verbs"] = exists("/dev/infiniband")
    limit = _read_memlock_limit(roots)
    if limit is not None:
        out["memlock_bytes"] = None if limit == _UNLIMITED else int(limit)
    return out


_NIC_KEYS = (
    "name",
    "state",
    "link_bytes_per_second",
    "kind",
    "driver",
    "pci",
    "numa_node",
    "master",
    "mtu",
    "default_route",
)


def _list_rdma_ports(roots: Roots) -> Iterable[dict[str, Any]]:
    for hca in inventory.list_rdma_devices(roots.sys):
        for port in hca["ports"]:
            folder = roots.sys / "class/infiniband" / hca["name"] / "ports" / port["port"]
            entry: dict[str, Any] = {"name": f"{hca['name']}:{port['port']}"}
            entry["state"] = read_text(folder / "state").partition(": ")[2] or "unknown"
            rate = _RATE.match(read_text(folder / "rate"))
            if rate is not None and entry["state"] == "ACTIVE":
                entry["link_bytes_per_second"] = round(float(rate[1]) * _BYTES_PER_GIGABIT)
            entry |= {key: port[key] for key in ("link_layer", "netdev") if key in port}
            entry |= {key: hca[key] for key in ("driver", "pci", "numa_node") if key in hca}
            yield entry


def is_chosen(name: str, words: str | None) -> bool | None:
    """Return whether NCCL's list selects a device; None when there is no list.

    name: "eth0", or "mlx5_0:1" with its port.
    """
    if not words:
        return None
    excludes = words.startswith("^")
    exact = words.removeprefix("^").startswith("=")
    listed = words.removeprefix("^").removeprefix("=").split(",")
    device, _, port = name.partition(":")
    matched = False
    for word in (word.strip() for word in listed):
        wanted, _, wanted_port = word.partition(":")
        matches = device == wanted if exact else bool(wanted) and device.startswith(wanted)
        matched = matched or (matches and (not wanted_port or not port or wanted_port == port))
    return matched != excludes


def _read_memlock_limit(roots: Roots) -> str | None:
    for line in read_text(roots.proc / "self/limits").splitlines():
        if line.startswith("Max locked memory"):
            words = line.split()
            if words[3] == _UNLIMITED or words[3].isdigit():
                return words[3]
    return None


def find_fabric_changes(
    fabric: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]
) -> list[SuggestedChange]:
    """Return suggested changes for problems that keep the ranks from the available links."""
    variables = fabric["variables"]
    out = [
        SuggestedChange("fabric", message, f"unset {name}", USER)
        for name, value, message in (
            ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_DISABLE=1: GPUs of a node use host memory"),
            ("NCCL_SHM_DISABLE", "1", "NCCL_SHM_DISABLE=1: ranks of a node use the network"),
        )
        if variables.get(name) == value
    ]
    up = [port for port in fabric["ports"] if port["state"] == "ACTIVE"]
    down = [port for port in fabric["ports"] if port["state"] not in ("ACTIVE", "unknown")]
    if up and variables.get("NCCL_IB_DISABLE") == "1":
        message = f"NCCL_IB_DISABLE=1 though {_format_up_ports(up)}: traffic goes over TCP"
        out.append(SuggestedChange("fabric", message, "unset NCCL_IB_DISABLE", USER))
    out += _check_device_lists(fabric, variables, up)
    if up and fabric.get("verbs") is False:
        message = f"{_format_up_ports(up)}, and /dev/infiniband is not in the container"
        remedy = "docker run --device=/dev/infiniband; in Kubernetes an RDMA device plugin"
        out.append(SuggestedChange("fabric", message, remedy, JOB))
    memlock = fabric.get("memlock_bytes")
    if up and memlock is not None and memlock < _SMALL_MEMLOCK_BYTES:
        message = f"only {memlock >> 10:,} KiB of memory may be locked: RDMA registers its buffers"
        remedy = "docker run --ulimit memlock=-1; under Slurm LimitMEMLOCK=infinity of slurmd"
        out.append(SuggestedChange("fabric", message, remedy, ADMIN))
    nvidia = any(device["collector"] == "gpu_nvidia" for device in devices)
    if up and nvidia and fabric.get("peermem") is False:
        message = "nvidia-peermem is not loaded: without DMA-BUF RDMA goes through host memory"
        remedy = "modprobe nvidia-peermem, or open kernel modules on Linux 5.12 or later (DMA-BUF)"
        out.append(SuggestedChange("fabric", message, remedy, ADMIN))
    if up and down:
        names = ", ".join(str(port["name"]) for port in down)
        message = f"RDMA ports that are not up: {names}"
        out.append(SuggestedChange("fabric", message, "check their cables and the switch", ADMIN))
    return out


def _format_up_ports(ports: Sequence[Any]) -> str:
    return "1 RDMA port is up" if len(ports) == 1 else f"{len(ports)} RDMA ports are up"


def _check_device_lists(
    fabric: Mapping[str, Any], variables: Mapping[str, str], up: Sequence[Mapping[str, Any]]
) -> list[SuggestedChange]:
    """Return suggested changes for variables that select links that do not exist or are down."""
    out = []
    if up and not any(port["chosen"] in (True, None) for port in up):
        words = variables["NCCL_IB_HCA"]
        message = f"NCCL_IB_HCA={words} matches none of the ports that are up"
        names = ",".join(dict.fromkeys(str(port["name"]).partition(":")[0] for port in up))
        out.append(SuggestedChange("fabric", message, f"set NCCL_IB_HCA={names}", USER))
    nics = [nic for nic in fabric["nics"] if nic.get("state") != "down"]
    if nics and not any(nic["chosen"] in (True, None) for nic in nics):
        words = variables["NCCL_SOCKET_IFNAME"]
        message = f"NCCL_SOCKET_IFNAME={words} matches none of the interfaces that are up"
        names = ",".join(str(nic["name"]) for nic in nics)
        out.append(
            SuggestedChange("fabric", message, f"set NCCL_SOCKET_IFNAME to one of {names}", USER)
        )
    return out


_SHOWN_OPTIONS = frozenset(
    (
        "ro",
        "sync",
        "soft",
        "softerr",
        "hard",
        "noac",
        "vers",
        "nfsvers",
        "proto",
        "nconnect",
        "max_connect",
        "rsize",
        "wsize",
        "actimeo",
        "acregmin",
        "acregmax",
        "acdirmin",
        "acdirmax",
        "lookupcache",
        "fsc",
        "local_lock",
        "timeo",
        "retrans",
        "flock",
        "localflock",
        "lazystatfs",
        "cache",
        "multichannel",
        "max_channels",
        "size",
        "nr_inodes",
        "huge",
        "direct_io",
        "kernel_cache",
        "max_read",
        "nobarrier",
        "dax",
    )
)
_MEMORY_FILE_SYSTEMS = frozenset(("tmpfs", "ramfs"))
_LOCAL_FILE_SYSTEMS = _MEMORY_FILE_SYSTEMS | {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "overlay",
}
_NFS_TYPES = ("nfs", "nfs4")
_SIZE_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TIMEOUT_S = 1.0
_SMALL_SHM_BYTES = 1 << 30
_SMALL_TMP_BYTES = 1 << 30


def describe_file_systems(
    roots: Roots,
    environ: Mapping[str, str],
    cwd: str,
    paths: Sequence[str],
    resolve_path: Callable[[str], str] = os.path.realpath,
    read_statvfs: Callable[[str], Any] = os.statvfs,
) -> list[dict[str, Any]]:
    """Return one entry per location: what, path, point, type, server or source, options, size.

    `problem` states why something is unknown. size_bytes and free_bytes: of local file
    systems only.
    """
    places = [("working folder", cwd), ("HOME", environ.get("HOME", ""))]
    places += [("TMPDIR", environ.get("TMPDIR") or "/tmp"), ("shared memory", "/dev/shm")]
    places += [("data", path) for path in paths]
    try:
        mounts = parse_mountinfo(read_file_once(roots.proc / "self/mountinfo"))
    except Unavailable as reason:
        return [
            {"what": purpose, "path": path, "problem": reason.message}
            for purpose, path in places
            if path
        ]
    return [
        _describe_file_system(purpose, path, mounts, resolve_path, read_statvfs)
        for purpose, path in places
        if path
    ]


def _describe_file_system(
    purpose: str,
    path: str,
    mounts: list[Mount],
    resolve_path: Callable[[str], str],
    read_statvfs: Callable[[str], Any],
) -> dict[str, Any]:
    entry: dict[str, Any] = {"what": purpose, "path": path}
    real_path = run_with_timeout(_TIMEOUT_S, lambda: resolve_path(path))
    if real_path is None:
        entry["problem"] = "the path does not answer"
    mount = find_mount(mounts, real_path or os.path.normpath(path))
    if mount is None:
        entry.setdefault("problem", "its mount is not in the mount table of this process")
        return entry
    entry |= {"point": mount.point, "type": mount.type}
    source = mount.source.rpartition("@")[2] if mount.type not in ("lustre",) else mount.source
    server = _parse_server(mount.type, source)
    if server:
        entry["server"] = server
    if source not in ("none", mount.type):
        entry["source"] = source
    entry["options"] = [
        option
        for option in dict.fromkeys(mount.options)
        if option.partition("=")[0] in _SHOWN_OPTIONS
    ]
    if size_limit := parse_size_option(mount):
        entry["size_bytes"] = size_limit
    if mount.type in _LOCAL_FILE_SYSTEMS and real_path is not None:
        info = run_with_timeout(_TIMEOUT_S, lambda: read_statvfs(real_path))
        if info is not None:
            entry["size_bytes"] = info.f_blocks * info.f_frsize
            entry["free_bytes"] = info.f_bavail * info.f_frsize
    return entry


def parse_size_option(mount: Mount) -> int | None:
    """Return the size limit of a tmpfs from its options, in bytes; None = not given."""
    for option in mount.options:
        name, _, value = option.partition("=")
        if mount.type == "tmpfs" and name == "size" and value[:-1].isdigit():
            return int(value[:-1]) * _SIZE_UNITS.get(value[-1], 1)
    return None


def run_with_timeout(seconds: float, call: Callable[[], Any]) -> Any:
    """Run a call in a thread and return its result; None when it fails or exceeds the time.

    seconds: the time limit. A thread that hangs in a dead file server cannot be stopped; as
    a daemon thread it does not keep this process from exiting.
    """
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except OSError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _parse_server(type_: str, source: str) -> str:
    if type_ in _NFS_TYPES or type_ in (
        "ceph",
        "glusterfs",
        "fuse.glusterfs",
        "beegfs",
        "fuse.sshfs",
    ):
        return source.rpartition(":/")[0]
    if type_ == "lustre":
        return source.rpartition(":/")[0]
    if type_ in ("cifs", "smb3"):
        return source.removeprefix("//").partition("/")[0]
    return ""


def find_file_system_changes(
    entries: Sequence[Mapping[str, Any]], launchers: Sequence[str]
) -> list[SuggestedChange]:
    """Return suggested changes for file systems that slow the job down or are too small."""
    out: list[SuggestedChange] = []
    for entry in entries:
        purpose, path, type_ = entry["what"], entry["path"], entry.get("type", "")
        if "problem" in entry:
            continue
        size = entry.get("size_bytes")
        if purpose == "shared memory" and size is not None and size < _SMALL_SHM_BYTES:
            message = f"{path} has {size >> 20:,} MiB: dataloader workers pass batches through it"
            remedy = "docker run --shm-size or --ipc=host; outside a container, remount it larger"
            if "Kubernetes" in launchers:
                remedy = "an emptyDir with medium: Memory mounted at /dev/shm"
            out.append(SuggestedChange("files", message, remedy, JOB))
        if purpose == "TMPDIR" and _is_remote(type_):
            message = f"temporary files ({path}) go to a server ({type_})"
            out.append(SuggestedChange("files", message, "set TMPDIR to a local folder", USER))
        if purpose == "TMPDIR" and entry.get("free_bytes", _SMALL_TMP_BYTES) < _SMALL_TMP_BYTES:
            message = f"{path} has {entry['free_bytes'] >> 20:,} MiB left"
            out.append(
                SuggestedChange("files", message, "set TMPDIR to a folder with more room", USER)
            )
        options = {option.partition("=")[0]: option for option in entry.get("options", ())}
        if type_ in _NFS_TYPES and "noac" in options:
            message = f"{entry['point']} is mounted noac: every stat and open asks the server"
            out.append(SuggestedChange("files", message, "mount it without noac", ADMIN))
        if type_ in _NFS_TYPES and "proto=tcp" in options.values() and "nconnect" not in options:
            message = f"{entry['point']} ({purpose}) has one TCP connection to its server"
            remedy = "mount it with nconnect=8 (Linux 5.3 or later), or over RDMA"
            out.append(SuggestedChange("files", message, remedy, ADMIN))
        if "sync" in options:
            message = f"{entry['point']} is mounted sync: every write waits for the disk"
            out.append(SuggestedChange("files", message, "mount it without sync", ADMIN))
    return list(dict.fromkeys(out))


def _is_remote(type_: str) -> bool:
    return type_ in (*_NFS_TYPES, "lustre", "cifs", "smb3", "ceph", "beegfs", "gpfs", "fuse.sshfs")
