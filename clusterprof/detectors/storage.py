"""What time spent on reading is made of: shared by the causes of the family storage.

The time a loading thread was blocked on reads is first split by what the reads were for, then, on a
local disk, by who kept it busy (`storage_others`) and, over a network, by where its requests spent
their time:

    read bytes       |==== read before, evicted since ====|==== new ====|     storage-cold-cache
    request to       |== waits for a slot ==|== LOOKUP … ==|== READ ==|
    result             storage-client-queue   -metadata      storage-remote

NFS counts all three. Lustre and CIFS count the time between sending and the reply; of what waits to
be sent they tell how much it is now. Summed over time that is the time it waited (Little's law):
half a second with three requests waiting is a second and a half of waiting.

A small part is not told apart from the largest: counters are the mount's, not the thread's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import grown, waited
from clusterprof.detectors.storage_others import NOBODY, Others, others_of
from clusterprof.findings import Evidence
from clusterprof.signals import Signal
from clusterprof.timeline import series
from clusterprof.timeline.disks import undermost
from clusterprof.timeline.model import Feeding, Float, Lost, Rank

METADATA = frozenset(
    ("GETATTR", "LOOKUP", "ACCESS", "OPEN", "OPEN_NOATTR", "CLOSE", "READDIR", "READDIRPLUS")
)
CIFS_METADATA = frozenset(("CREATE", "CLOSE", "QUERY_INFO", "QUERY_DIRECTORY"))
PAGE_BYTES = 4096
COLD_FROM_RATIO = 0.3
"""Fewer of the bytes read are what any full page cache evicts and reads again."""
PART_FROM_RATIO = 0.2
"""A smaller part of the requests' time stays with the largest one."""
FETCHED = (signals.NFS_READ_BYTES, signals.LUSTRE_FETCHED_BYTES, signals.CIFS_READ_BYTES)
"""Bytes that came from file servers."""
READ_SIZE_NOTE = "a read asked for on average"
_READING = "reading"  # name in `Lost.shared`


@dataclass(frozen=True, slots=True)
class Reading:
    """How the reads behind the waits of a stretch divide; `queue + metadata <= 1`."""

    cold_ratio: float
    """Of the bytes read: read before and evicted since. 0 when small or unknown."""
    others: Others
    """Of the bytes a local disk moved: those that others moved."""
    queue_ratio: float
    """Of the requests' time: waiting on this machine for a slot. 0 when small or unknown."""
    metadata_ratio: float
    """Of the requests' time: at the server for names and attributes."""
    mount: str
    """Where the requests took longest; "" when no counter of a mount rose."""
    operations: float
    """Requests for names and attributes."""
    unknown: bool
    """True where NFS is mounted and its counters were not recorded."""
    kind: str = ""
    """nfs, lustre or cifs: what `mount` is of."""


@dataclass(frozen=True, slots=True)
class _Spent:
    """Time of the requests to one mount, in ns summed over requests."""

    kind: str
    mount: str
    queue_ns: float
    metadata_ns: float
    read_ns: float
    operations: float

    @property
    def whole_ns(self) -> float:
        return self.queue_ns + self.metadata_ns + self.read_ns


def reading_of(rank: Rank, lost: Lost, feeding: Feeding) -> Reading:
    """Return how the reads during data waits divide; worked out once for all detectors."""
    known = lost.shared.get(_READING)
    if known is None or known[0] is not feeding:
        known = lost.shared[_READING] = feeding, _reading(rank, lost, feeding)
    return known[1]  # type: ignore[no-any-return]


def _reading(rank: Rank, lost: Lost, feeding: Feeding) -> Reading:
    remote = waited(lost, feeding.remote_io)
    local = waited(lost, feeding.block_io)
    share = remote + waited(lost, feeding.block_io + feeding.reading_cpu)
    if not share.any():
        return Reading(0.0, NOBODY, 0.0, 0.0, "", 0.0, False)
    cold = _cold_ratio(rank, lost, share)
    others = others_of(rank, lost, local) if local.any() else NOBODY
    if not remote.any():
        return Reading(cold, others, 0.0, 0.0, "", 0.0, False)
    spent = [*_nfs(rank, lost, remote), *_lustre(rank, lost, remote), *_cifs(rank, lost, remote)]
    by_mount: dict[tuple[str, str], float] = {}
    for one in spent:
        by_mount[one.kind, one.mount] = by_mount.get((one.kind, one.mount), 0.0) + one.whole_ns
    whole = sum(by_mount.values())
    if whole <= 0:
        told = any(name == signals.NFS_EXECUTE.name for name, _ in rank.chunk.series)
        return Reading(cold, others, 0.0, 0.0, "", 0.0, not told and _nfs_is_mounted(rank))
    by_part = [
        sum(one.queue_ns for one in spent),
        sum(one.metadata_ns for one in spent),
        sum(one.read_ns for one in spent),
    ]
    parts = _without_small(np.array(by_part) / whole)
    kind, mount = max(sorted(by_mount), key=lambda name: by_mount[name])
    operations = sum(one.operations for one in spent)
    queue, metadata = float(parts[0]), float(parts[1])
    return Reading(cold, others, queue, metadata, mount, operations, False, kind)


def _nfs(rank: Rank, lost: Lost, share: Float) -> Iterator[_Spent]:
    for device in _devices(rank, signals.NFS_EXECUTE):
        mount, _, operation = device.rpartition(":")
        if operation != "READ" and operation not in METADATA:
            continue
        whole = grown(rank, signals.NFS_EXECUTE.name, device, lost, share) or 0.0
        rtt = grown(rank, signals.NFS_RTT.name, device, lost, share)
        server = whole if rtt is None else min(rtt, whole)
        if operation == "READ":
            yield _Spent("nfs", mount, whole - server, 0.0, server, 0.0)
        else:
            done = grown(rank, signals.NFS_OPS.name, device, lost, share) or 0.0
            yield _Spent("nfs", mount, whole - server, server, 0.0, done)


def _lustre(rank: Rank, lost: Lost, share: Float) -> Iterator[_Spent]:
    for device in _devices(rank, signals.LUSTRE_RPC_TIME):
        mount, _, kind = device.rpartition(":")
        ns = grown(rank, signals.LUSTRE_RPC_TIME.name, device, lost, share) or 0.0
        done = grown(rank, signals.LUSTRE_RPCS.name, device, lost, share) or 0.0
        if kind == "metadata":
            yield _Spent("lustre", mount, 0.0, ns, 0.0, done)
        elif kind == "read":
            queue_ns = 0.0
            # Pages are pending for an instant before every RPC: they only queue at the limit.
            full = grown(rank, signals.LUSTRE_AT_LIMIT.name, mount, lost, share)
            fetched = grown(rank, signals.LUSTRE_FETCHED_BYTES.name, mount, lost, share)
            if full and fetched and done:
                pending = held(rank, signals.LUSTRE_PENDING, mount, lost, share)
                queue_ns = pending / (fetched / done)
            yield _Spent("lustre", mount, queue_ns, 0.0, ns, 0.0)


def _cifs(rank: Rank, lost: Lost, share: Float) -> Iterator[_Spent]:
    for device in _devices(rank, signals.CIFS_OP_TIME):
        server, _, operation = device.rpartition(":")
        ns = grown(rank, signals.CIFS_OP_TIME.name, device, lost, share) or 0.0
        if operation == "READ":
            queue_ns = held(rank, signals.CIFS_WAITING, server, lost, share)
            yield _Spent("cifs", server, queue_ns, 0.0, ns, 0.0)
        elif operation in CIFS_METADATA:
            yield _Spent("cifs", server, 0.0, ns, 0.0, 0.0)
    for device in _devices(rank, signals.CIFS_OPS):  # counted by share, not by server
        share_name, _, operation = device.rpartition(":")
        if operation in CIFS_METADATA:
            done = grown(rank, signals.CIFS_OPS.name, device, lost, share) or 0.0
            yield _Spent("cifs", share_name, 0.0, 0.0, 0.0, done)


def held(rank: Rank, signal: Signal, device: str, lost: Lost, share: Float) -> float:
    """Return the integral of a gauge over the claimed pieces, in its unit times ns; 0 unknown."""
    readings = rank.chunk.series.get((signal.name, device))
    rows = np.flatnonzero(share > 0)
    if readings is None or not rows.size:
        return 0.0
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    return float(np.nansum(series.mean(readings, start, end) * (end - start)))


def read_latency(rank: Rank, lost: Lost, share: Float, kind: str, mount: str) -> list[Evidence]:
    """Return what a read took on average, as far as the file system counts it."""
    if kind == "cifs" or not mount:
        return []  # time is the server's, reads are the share's
    if kind == "lustre":
        rpcs = grown(rank, signals.LUSTRE_RPCS.name, f"{mount}:read", lost, share)
        ns = grown(rank, signals.LUSTRE_RPC_TIME.name, f"{mount}:read", lost, share)
        note = "a read RPC took from sending to the reply"
        return (
            [Evidence("lustre.read_rpc_ns", ns / rpcs, "ns", note)]
            if rpcs and ns is not None
            else []
        )
    reads = grown(rank, signals.NFS_OPS.name, f"{mount}:READ", lost, share)
    ns = grown(rank, signals.NFS_EXECUTE.name, f"{mount}:READ", lost, share)
    note = "a read took from request to result"
    if not reads or ns is None:
        return []
    found = [Evidence("nfs.read_latency_ns", ns / reads, "ns", note)]
    read_bytes = grown(rank, signals.NFS_READ_BYTES.name, mount, lost, share)
    if read_bytes:
        found.append(Evidence("nfs.read_size_bytes", read_bytes / reads, "bytes", READ_SIZE_NOTE))
        found += reads_counted("nfs", reads, lost, share)
    return found


def reads_counted(kind: str, reads: float, lost: Lost, share: Float) -> list[Evidence]:
    """Return how many reads there were during the claimed pieces, in all and in a second."""
    length_ns = float(np.sum((lost.end_ns - lost.start_ns)[share > 0]))
    found = [Evidence(f"{kind}.reads_total", reads, "count", "reads during those waits")]
    if length_ns > 0:
        note = "reads in a second of those waits"
        found.append(
            Evidence(f"{kind}.reads_per_second_count", reads / length_ns * 1e9, "count", note)
        )
    return found


def _devices(rank: Rank, signal: Signal) -> list[str]:
    return sorted(device for name, device in rank.chunk.series if name == signal.name)


def _without_small(parts: Float) -> Float:
    small = parts < PART_FROM_RATIO
    out = np.where(small, 0.0, parts)
    out[int(np.argmax(parts))] += float(parts[small].sum())
    return out


def _cold_ratio(rank: Rank, lost: Lost, share: Float) -> float:
    """Pages read again after an eviction, of all bytes that disks and file servers gave."""
    refaults = grown(rank, signals.MEMORY_REFAULTS.name, "", lost, share)
    read = 0.0
    disks, mounts = undermost(rank.chunk), {signal.name for signal in FETCHED}
    for name, device in rank.chunk.series:
        if name in mounts or (name == signals.DISK_READ_BYTES.name and device in disks):
            read += grown(rank, name, device, lost, share) or 0.0
    if not refaults or read <= 0:
        return 0.0
    ratio = min(1.0, refaults * PAGE_BYTES / read)
    return ratio if ratio >= COLD_FROM_RATIO else 0.0


def _nfs_is_mounted(rank: Rank) -> bool:
    mounts = rank.chunk.header.host.get("mounts") or ()
    types = [str(one.get("type", "")) for one in mounts if isinstance(one, dict)]
    return any(one.startswith("nfs") for one in types)
