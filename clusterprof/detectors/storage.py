"""What time spent on reading is made of: shared by the causes of the family storage.

The time a loading thread was blocked on reads is first split by what the reads were for, then, over
a network, by where its requests spent their time:

    read bytes       |==== read before, evicted since ====|==== new ====|     storage-cold-cache
    NFS, request     |== waits for a slot ==|== LOOKUP … ==|== READ ==|
    to result          storage-client-queue   -metadata      storage-remote

A small part is not told apart from the largest: counters are the mount's, not the thread's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import grown, waited
from clusterprof.timeline.model import Feeding, Float, Lost, Rank

METADATA = frozenset(
    ("GETATTR", "LOOKUP", "ACCESS", "OPEN", "OPEN_NOATTR", "CLOSE", "READDIR", "READDIRPLUS")
)
PAGE_BYTES = 4096
COLD_FROM_RATIO = 0.3
"""Fewer of the bytes read are what any full page cache evicts and reads again."""
PART_FROM_RATIO = 0.2
"""A smaller part of the requests' time stays with the largest one."""
_READING = "reading"  # name in `Lost.shared`


@dataclass(frozen=True, slots=True)
class Reading:
    """How the reads behind the waits of a stretch divide; `queue + metadata <= 1`."""

    cold_ratio: float
    """Of the bytes read: read before and evicted since. 0 when small or unknown."""
    queue_ratio: float
    """Of the requests' time: waiting on this machine for a slot. 0 when small or unknown."""
    metadata_ratio: float
    """Of the requests' time: at the server for names and attributes."""
    mount: str
    """Where the requests took longest; "" when no NFS counter rose."""
    operations: float
    """Requests for names and attributes."""
    unknown: bool
    """True where NFS is mounted and its counters were not recorded."""


def reading_of(rank: Rank, lost: Lost, feeding: Feeding) -> Reading:
    """Return how the reads during data waits divide; worked out once for all detectors."""
    known = lost.shared.get(_READING)
    if known is None or known[0] is not feeding:
        known = lost.shared[_READING] = feeding, _reading(rank, lost, feeding)
    return known[1]  # type: ignore[no-any-return]


def _reading(rank: Rank, lost: Lost, feeding: Feeding) -> Reading:
    remote = waited(lost, feeding.remote_io)
    share = remote + waited(lost, feeding.block_io + feeding.reading_cpu)
    if not share.any():
        return Reading(0.0, 0.0, 0.0, "", 0.0, False)
    cold = _cold_ratio(rank, lost, share)
    names = [device for name, device in rank.chunk.series if name == signals.NFS_EXECUTE.name]
    if not remote.any():
        return Reading(cold, 0.0, 0.0, "", 0.0, False)
    by_mount: dict[str, float] = {}
    queue = metadata = operations = 0.0
    for device in names:
        mount, _, operation = device.rpartition(":")
        if operation != "READ" and operation not in METADATA:
            continue
        whole = grown(rank, signals.NFS_EXECUTE.name, device, lost, remote) or 0.0
        rtt = grown(rank, signals.NFS_RTT.name, device, lost, remote)
        server = whole if rtt is None else min(rtt, whole)
        by_mount[mount] = by_mount.get(mount, 0.0) + whole
        queue += whole - server
        if operation in METADATA:
            metadata += server
            operations += grown(rank, signals.NFS_OPS.name, device, lost, remote) or 0.0
    whole = sum(by_mount.values())
    if whole <= 0:
        return Reading(cold, 0.0, 0.0, "", 0.0, not names and _nfs_is_mounted(rank))
    parts = _without_small(np.array([queue, metadata, whole - queue - metadata]) / whole)
    mount = max(sorted(by_mount), key=lambda name: by_mount[name])
    return Reading(cold, float(parts[0]), float(parts[1]), mount, operations, False)


def _without_small(parts: Float) -> Float:
    small = parts < PART_FROM_RATIO
    out = np.where(small, 0.0, parts)
    out[int(np.argmax(parts))] += float(parts[small].sum())
    return out


def _cold_ratio(rank: Rank, lost: Lost, share: Float) -> float:
    """Pages read again after an eviction, of all bytes that disks and NFS mounts read."""
    refaults = grown(rank, signals.MEMORY_REFAULTS.name, "", lost, share)
    read = 0.0
    for name, device in rank.chunk.series:
        if name in (signals.DISK_READ_BYTES.name, signals.NFS_READ_BYTES.name):
            read += grown(rank, name, device, lost, share) or 0.0
    if not refaults or read <= 0:
        return 0.0
    ratio = min(1.0, refaults * PAGE_BYTES / read)
    return ratio if ratio >= COLD_FROM_RATIO else 0.0


def _nfs_is_mounted(rank: Rank) -> bool:
    mounts = rank.chunk.header.host.get("mounts") or ()
    types = [str(one.get("type", "")) for one in mounts if isinstance(one, dict)]
    return any(one.startswith("nfs") for one in types)
