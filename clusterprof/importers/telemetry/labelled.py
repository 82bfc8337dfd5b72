"""Which of our columns a name with labels belongs to: `DCGM_FI_DEV_GPU_UTIL{gpu="0",…}`."""

from __future__ import annotations

from collections.abc import Mapping

from clusterprof.importers.telemetry.amd_names import EXPORTER, OMNISTAT
from clusterprof.importers.telemetry.dcgm_names import FIELDS, XID
from clusterprof.importers.telemetry.gathered import Meaning
from clusterprof.importers.telemetry.node_names import CPU, CPU_MODES, PLAIN

HOST_LABELS = (
    "Hostname", "hostname", "nodename", "node", "kubernetes_node", "host", "instance", "target",
)  # fmt: skip
"""The first that is there names the host."""
_NO_DISKS = ("dm-", "md", "loop", "ram", "zram", "nbd", "fd", "sr")  # of others, or no disks at all
_DISK, _NIC = "node_disk_", "node_network_"


_KNOWN = frozenset({*FIELDS, *PLAIN, *OMNISTAT, *EXPORTER, CPU, XID})


def is_known(name: str) -> bool:
    """Say whether a name means something to us."""
    return name in _KNOWN


def host_of(labels: Mapping[str, str]) -> tuple[str, str]:
    """Return the host a series is of, "" unknown, and the address it was read at, without port."""
    address = _without_port(labels.get("instance", ""))
    for label in HOST_LABELS:
        if labels.get(label):
            return _without_port(labels[label]), address
    return "", address


def meaning_of(name: str, labels: Mapping[str, str]) -> tuple[Meaning, str] | None:
    """Return what a series means and the device it is of; None for what we have no signal for."""
    found = FIELDS.get(name) or OMNISTAT.get(name) or EXPORTER.get(name)
    if found is not None:
        if labels.get("location", "edge") not in ("edge", "hotspot", "junction", "0"):
            return None  # Omnistat's temperature of the memory
        return found, gpu_of(labels)
    if name == CPU:
        mode = CPU_MODES.get(labels.get("mode", ""))
        return (mode, labels["cpu"]) if mode and labels.get("cpu") else None
    if name not in PLAIN:
        return None
    meaning, label = PLAIN[name]
    if not label:
        return meaning, ""
    parts = [labels.get(one, "") for one in label.split("/")]
    device = "/".join(parts)
    other = name.startswith(_DISK) and device.startswith(_NO_DISKS)
    other = other or (name.startswith(_NIC) and device == "lo")
    return (meaning, device) if all(parts) and not other else None


def gpu_of(labels: Mapping[str, str]) -> str:
    """Return the identity of a GPU: its UUID, else its number; of a part of it (MIG) with that."""
    uuid = next((labels[one] for one in ("UUID", "uuid", "gpu_uuid") if labels.get(one)), "")
    index = next((labels[one] for one in ("gpu", "card", "gpu_id") if labels.get(one)), "")
    device = uuid or (f"gpu{index}" if index.isdecimal() else index)
    part = labels.get("GPU_I_ID", "")
    return f"{device} MIG {part}" if part else device


def _without_port(address: str) -> str:
    head, colon, port = address.rpartition(":")
    return head if colon and port.isdecimal() else address
