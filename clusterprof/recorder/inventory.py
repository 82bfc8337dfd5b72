"""What the node is made of: the part of the header that does not change.

Missing facts are left out, never guessed: an analysis treats an absent key as unknown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import clusterprof
from clusterprof.linux.mountinfo import mount_of, parse_mountinfo
from clusterprof.linux.roots import Roots
from clusterprof.linux.topology import accelerator_nodes, topology
from clusterprof.linux.tree import entries, number, text
from clusterprof.recorder import fabric, identity, links
from clusterprof.trace.schema import SCHEMA_VERSION
from clusterprof.trace.schema import Clock as ClockRecord

# fmt: off
_PSEUDO = frozenset((
    "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts",
    "devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore",
    "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs",
))
# fmt: on
_MOUNTS_AT_MOST = 256
_DISKS_AT_MOST = 256
_SECTOR_BYTES = 512


def node_identity(roots: Roots, start: ClockRecord, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the header's `node`: key, hostname, display, boot_id, kernel."""
    return {
        "key": identity.node_key(roots, start.realtime_ns),
        "hostname": identity.hostname(),
        "display": identity.display_name(environ),
        "boot_id": identity.boot_id(roots),
        "kernel": os.uname().release,
    }


def host_inventory(roots: Roots) -> dict[str, Any]:
    """Return the header's `host`: cpus, memory_bytes, disks, nics, hcas, mounts, and `fabric`'s."""
    host: dict[str, Any] = {
        "cpus": _cpus(roots),
        "disks": list(_disks(roots))[:_DISKS_AT_MOST],
        "nics": links.nics(roots.sys, roots.proc),
        "hcas": links.hcas(roots.sys),
        "mounts": _mounts(roots),
    }
    host.update(fabric.told(roots, host["nics"], host["hcas"]))
    for line in text(roots.proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            host["memory_bytes"] = int(line.split()[1]) * 1024
    return host


def versions() -> dict[str, str]:
    """Return the versions the header states; the drivers' come from their collectors."""
    return {
        "clusterprof": clusterprof.__version__,
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "schema": str(SCHEMA_VERSION),
    }


def _cpus(roots: Roots) -> dict[str, Any]:
    model, count = "", 0
    for line in text(roots.proc / "cpuinfo").splitlines():
        if line.startswith("processor"):
            count += 1
        elif line.startswith("model name") and not model:
            model = line.partition(":")[2].strip()
    cpus: dict[str, Any] = {"count": count or os.cpu_count() or 0}
    if model:
        cpus["model"] = model
    cpus |= topology(roots)
    nodes = accelerator_nodes(roots)
    if nodes:
        cpus["accelerators"] = nodes
    return cpus


def _disks(roots: Roots) -> Iterator[dict[str, Any]]:
    for disk in entries(roots.sys / "class/block"):
        size = number(disk / "size")
        if not size:
            continue  # an unused loop or ram device
        entry: dict[str, Any] = {"name": disk.name, "size_bytes": size * _SECTOR_BYTES}
        device = text(disk / "dev")
        if device:
            entry["device"] = device
        if (disk / "partition").exists():
            entry["partition_of"] = os.path.basename(os.path.dirname(os.path.realpath(disk)))
        under = [one.name for one in entries(disk / "slaves")] or _backing(disk, roots)
        if under:
            entry["on"] = under  # device-mapper, md, bcache, loop; a partition is named as one
        rotational = number(disk / "queue/rotational")
        if rotational is not None:
            entry["rotational"] = bool(rotational)
        yield entry


def _backing(disk: Path, roots: Roots) -> list[str]:
    """Return the device that holds the file of a loop device; [] for others and unknown ones."""
    file = text(disk / "loop/backing_file")
    if not file:
        return []
    try:
        mount = mount_of(parse_mountinfo((roots.proc / "self/mountinfo").read_bytes()), file)
    except OSError:
        return []
    blocks = entries(roots.sys / "class/block")
    return [one.name for one in blocks if mount and text(one / "dev") == mount.device]


def _mounts(roots: Roots) -> list[dict[str, str]]:
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
        if mount.type not in _PSEUDO
    ][:_MOUNTS_AT_MOST]
