"""Breakdown of the time spent on reading, shared by the causes of the storage family.

The time a loading thread was blocked on reads is first split by the purpose of the reads. On a
local disk it is then split by who kept the disk busy (`analysis.detectors.storage.evidence`); over
a network, by where the requests spent their time:

    read bytes       |==== read before, evicted since ====|==== new ====|     storage-cold-cache
    request to       |== waits for a slot ==|== LOOKUP … ==|== READ ==|
    result             storage-client-queue   -metadata      storage-remote

NFS counts all three. Lustre and CIFS count the time between sending and the reply; for requests
waiting to be sent they report only the present number. Its integral over time is the waiting time
(Little's law): half a second with three requests waiting is 1.5 seconds of waiting.

A small part is merged with the largest one: counters belong to the mount, not to the thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.analysis.detectors.base import (
    find_busiest_device,
    limit_to_data_wait,
    limit_to_reads,
    measure_claimed_growth,
)
from clusterprof.analysis.timeline import series
from clusterprof.analysis.timeline.data_wait.blocked import get_remote_type
from clusterprof.analysis.timeline.host_resources import find_bottom_disks
from clusterprof.analysis.timeline.model import (
    Chunk,
    DataWaitBreakdown,
    Float,
    Int,
    LostTime,
    Process,
    Rank,
)
from clusterprof.report.model import Evidence
from clusterprof.signals import Signal

MIN_OTHERS_RATIO = 0.4
"""A smaller fraction may be the job's own: reads half a second earlier or later than counted."""
MIN_JOB_RATIO = 0.7
"""A disk that gave less than this part of what the job read is not the one it waits for."""
MARGIN_NS = 1_000_000_000
"""Time around each wait that is included, in ns: processes are read only twice a second."""


@dataclass(frozen=True, slots=True)
class OtherTraffic:
    """Bytes that processes outside the job transferred on a disk; ratio 0 if small or unknown."""

    ratio: float
    disk: str
    other_bytes: float
    """Lower bound of the bytes that did not belong to the job."""
    busy_ratio: float
    """Fraction of that time in which the disk had requests."""


NO_OTHER_TRAFFIC = OtherTraffic(0.0, "", 0.0, 0.0)
"""Result if other traffic is small or unknown."""


def measure_other_traffic(rank: Rank, lost: LostTime, share: Float) -> OtherTraffic:
    """Measure other traffic on the disk around the segments of which a share is claimed.

    share: float64[n].
    """
    chunk = rank.chunk
    rows = np.flatnonzero(share > 0)
    start, end = _expand_windows(chunk, lost.start_ns[rows], lost.end_ns[rows])
    job_read, job_written = _sum_job_reads(chunk, start, end), _sum_job_writes(chunk)
    if job_read is None or job_written is None:
        return NO_OTHER_TRAFFIC
    disks = sorted(find_bottom_disks(chunk))
    read = {
        disk: _measure_increase(chunk, signals.DISK_READ_BYTES, disk, start, end) for disk in disks
    }
    busy = {disk: _measure_increase(chunk, signals.DISK_BUSY, disk, start, end) for disk in disks}
    disk = max(disks, key=lambda name: busy[name], default="")
    if not disk or busy[disk] <= 0:
        return NO_OTHER_TRAFFIC
    elsewhere = sum(amount for name, amount in read.items() if name != disk)
    disk_written = _measure_increase(chunk, signals.DISK_WRITE_BYTES, disk, start, end)
    transferred = read[disk] + disk_written
    if transferred <= 0 or elsewhere > job_read / 2:
        return NO_OTHER_TRAFFIC
    other_bytes = max(0.0, read[disk] - job_read) + max(0.0, disk_written - job_written)
    for signal in (signals.MEMORY_SWAP_IN, signals.MEMORY_SWAP_OUT):
        other_bytes -= _measure_increase(chunk, signal, "", start, end)
    ratio = other_bytes / transferred * _measure_awaited_ratio(rank, disk, lost, share)
    if ratio < MIN_OTHERS_RATIO:
        return NO_OTHER_TRAFFIC
    length_ns = float((end - start).sum())
    return OtherTraffic(min(1.0, ratio), disk, other_bytes, min(1.0, busy[disk] / length_ns))


def _measure_awaited_ratio(rank: Rank, disk: str, lost: LostTime, share: Float) -> float:
    """Measure which part of the blocked time a disk can explain: it delays while it has requests.

    A throttle above the disk (a limit of the cgroup, a slow volume) delays without it. share:
    float64[n], the part of each segment in which the thread was blocked.
    """
    busy_ns = measure_claimed_growth(rank, signals.DISK_BUSY.name, disk, lost, share)
    blocked_ns = float(np.sum(share * (lost.end_ns - lost.start_ns)))
    return 1.0 if busy_ns is None else min(1.0, busy_ns / max(blocked_ns, 1.0))


def find_awaited_disk(rank: Rank, lost: LostTime, share: Float) -> tuple[str, float]:
    """Find the disk that the claimed segments waited for, and the bytes read from it there.

    The disk whose bytes around them were nearest to those that the job read, as others may read
    more from another one, or from the disk below a volume; of disks that gave less than the job
    read, that with most bytes. share: float64[n].
    """
    name = signals.DISK_READ_BYTES.name
    disk, read_bytes = find_busiest_device(rank, name, lost, share)
    rows = np.flatnonzero(share > 0)
    windows = _expand_windows(rank.chunk, lost.start_ns[rows], lost.end_ns[rows])
    job_read = _sum_job_reads(rank.chunk, *windows) if read_bytes > 0 else 0.0
    if not job_read:
        return disk, read_bytes
    around = {
        device: _measure_increase(rank.chunk, signals.DISK_READ_BYTES, device, *windows)
        for device in _list_devices(rank, signals.DISK_READ_BYTES)
    }
    enough = [device for device in around if around[device] >= MIN_JOB_RATIO * job_read]
    nearest = min(enough, key=lambda device: abs(around[device] - job_read), default=disk)
    if around[nearest] < MIN_OTHERS_RATIO * around[disk]:
        disk = nearest
    return disk, measure_claimed_growth(rank, name, disk, lost, share) or 0.0


def _expand_windows(chunk: Chunk, start: Int, end: Int) -> tuple[Int, Int]:
    """Expand the segments by one second on each side and merge them into disjoint windows."""
    low = np.maximum(start - MARGIN_NS, np.minimum(start, chunk.start_ns))
    high = np.minimum(end + MARGIN_NS, np.maximum(end, chunk.end_ns))
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    first = np.concatenate([[True], low[1:] > high[:-1]])
    last = np.concatenate([first[1:], [True]])
    return low[first], high[last]


def _measure_increase(chunk: Chunk, signal: Signal, device: str, start: Int, end: Int) -> float:
    readings = chunk.series.get((signal.name, device))
    if readings is None or not readings.t_ns.size:
        return 0.0
    low = np.clip(start, readings.t_ns[0], readings.t_ns[-1])
    high = np.clip(end, readings.t_ns[0], readings.t_ns[-1])
    return float(np.nansum(series.compute_increase(readings, low, high)))


def _sum_job_reads(chunk: Chunk, start: Int, end: Int) -> float | None:
    """Sum the bytes that all processes of the job read from devices.

    None if one of them is unknown.
    """
    total = 0.0
    is_known = False
    for process in chunk.processes.values():
        io = process.io
        if io is None or not io.t_ns.size:
            if _has_activity(process):
                return None
            continue
        is_known = True
        first, last = io.t_ns[0], io.t_ns[-1]
        low, high = np.clip(start, first, last), np.clip(end, first, last)
        total += float(series.compute_column_increase(io.t_ns, io.read_bytes, low, high).sum())
        started_here = chunk.first or first > chunk.start_ns + MARGIN_NS
        if (
            started_here and (start < first).any()
        ):  # its first reading may contain bytes of these waits
            total += float(io.read_bytes[0])
    return total if is_known and not np.isnan(total) else None


def _has_activity(process: Process) -> bool:
    return bool(process.spans or process.threads)


def _sum_job_writes(chunk: Chunk) -> float | None:
    """Sum the bytes that the job wrote in the whole chunk.

    None if one of its processes is unknown.
    """
    total = 0.0
    for process in chunk.processes.values():
        if process.io is None or not process.io.t_ns.size:
            continue  # its reads are unknown too, so nothing is claimed
        growth, unusable = series.compute_differences(process.io.write_bytes)
        if unusable.any():
            return None
        total += float(growth.sum())
    return total


NFS_METADATA = frozenset(
    ("GETATTR", "LOOKUP", "ACCESS", "OPEN", "OPEN_NOATTR", "CLOSE", "READDIR", "READDIRPLUS")
)
CIFS_METADATA = frozenset(("CREATE", "CLOSE", "QUERY_INFO", "QUERY_DIRECTORY"))
_DEFAULT_PAGE_BYTES = 4096
"""Of hosts whose recording does not say how large their pages are: 64 KiB on some arm64 kernels."""
MIN_COLD_RATIO = 0.3
"""A smaller fraction of the bytes read is normal: any full page cache evicts and reads that again.
"""
MIN_PART_RATIO = 0.2
"""A smaller part of the requests' time is added to the largest part."""
SERVER_READ_SIGNALS = (
    signals.NFS_READ_BYTES,
    signals.LUSTRE_FETCHED_BYTES,
    signals.CIFS_READ_BYTES,
)
"""Signals of the bytes that came from file servers."""
READ_SIZE_NOTE = "a read requested on average"
_BREAKDOWN_KEY = "reading"  # key in `Lost.shared`


@dataclass(frozen=True, slots=True)
class ReadBreakdown:
    """How the reads during data waits divide; `queue_ratio + metadata_ratio <= 1`."""

    cold_ratio: float
    """Fraction of the bytes read that had been read before and evicted. 0 if small or unknown."""
    remote_cold_ratio: float
    """The same for reads from mounts: the bytes of one without counters are those that calls
    requested beyond the bytes from devices.
    """
    other_traffic: OtherTraffic
    """Bytes that a local disk transferred for processes outside the job."""
    queue_ratio: float
    """Fraction of the requests' time spent waiting on this machine for a slot. 0 if small or
    unknown.
    """
    metadata_ratio: float
    """Fraction of the requests' time spent at the server for names and attributes."""
    mount: str
    """Mount whose requests took longest; "" if no counter of a mount rose."""
    operations: float
    """Number of requests for names and attributes."""
    unknown: bool
    """True if NFS is mounted but its counters were not recorded."""
    kind: str = ""
    """File system of `mount`: nfs, lustre or cifs."""


@dataclass(frozen=True, slots=True)
class _RequestTime:
    """Time of the requests to one mount, in ns summed over requests."""

    kind: str
    mount: str
    queue_ns: float
    metadata_ns: float
    read_ns: float
    operations: float

    @property
    def total_ns(self) -> float:
        return self.queue_ns + self.metadata_ns + self.read_ns


def get_read_breakdown(rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown) -> ReadBreakdown:
    """Return how the reads during data waits divide; computed once for all detectors."""
    cached = lost.shared.get(_BREAKDOWN_KEY)
    if cached is None or cached[0] is not breakdown:
        cached = lost.shared[_BREAKDOWN_KEY] = (
            breakdown,
            _build_read_breakdown(rank, lost, breakdown),
        )
    return cached[1]  # type: ignore[no-any-return]


def _build_read_breakdown(
    rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown
) -> ReadBreakdown:
    remote = limit_to_reads(lost, breakdown.remote_io)
    local = limit_to_reads(lost, breakdown.block_io)
    share = (
        remote
        + limit_to_reads(lost, breakdown.block_io)
        + limit_to_data_wait(lost, breakdown.reading_cpu)
    )
    if not share.any():
        return ReadBreakdown(0.0, 0.0, NO_OTHER_TRAFFIC, 0.0, 0.0, "", 0.0, False)
    cold = _estimate_cold_ratio(rank, lost, share)
    remote_cold = 0.0
    if remote.any():
        remote_cold = _estimate_cold_ratio(rank, lost, remote, from_mount=True)
    other_traffic = measure_other_traffic(rank, lost, local) if local.any() else NO_OTHER_TRAFFIC
    if not remote.any():
        return ReadBreakdown(cold, remote_cold, other_traffic, 0.0, 0.0, "", 0.0, False)
    spent = [
        *_measure_nfs_requests(rank, lost, remote),
        *_measure_lustre_requests(rank, lost, remote),
        *_measure_cifs_requests(rank, lost, remote),
    ]
    by_mount: dict[tuple[str, str], float] = {}
    for requests in spent:
        by_mount[requests.kind, requests.mount] = (
            by_mount.get((requests.kind, requests.mount), 0.0) + requests.total_ns
        )
    total_ns = sum(by_mount.values())
    if total_ns <= 0:
        has_counters = any(name == signals.NFS_EXECUTE.name for name, _ in rank.chunk.series)
        return ReadBreakdown(
            cold,
            remote_cold,
            other_traffic,
            0.0,
            0.0,
            "",
            0.0,
            not has_counters and _has_nfs_mount(rank),
        )
    by_part = [
        sum(requests.queue_ns for requests in spent),
        sum(requests.metadata_ns for requests in spent),
        sum(requests.read_ns for requests in spent),
    ]
    parts = _merge_small_parts(np.array(by_part) / total_ns)
    kind, mount = max(sorted(by_mount), key=lambda name: by_mount[name])
    operations = sum(requests.operations for requests in spent)
    queue, metadata = float(parts[0]), float(parts[1])
    return ReadBreakdown(
        cold, remote_cold, other_traffic, queue, metadata, mount, operations, False, kind
    )


def _measure_nfs_requests(rank: Rank, lost: LostTime, share: Float) -> Iterator[_RequestTime]:
    for device in _list_devices(rank, signals.NFS_EXECUTE):
        mount, _, operation = device.rpartition(":")
        if operation != "READ" and operation not in NFS_METADATA:
            continue
        execute_ns = (
            measure_claimed_growth(rank, signals.NFS_EXECUTE.name, device, lost, share) or 0.0
        )
        rtt_ns = measure_claimed_growth(rank, signals.NFS_RTT.name, device, lost, share)
        server_ns = execute_ns if rtt_ns is None else min(rtt_ns, execute_ns)
        if operation == "READ":
            yield _RequestTime("nfs", mount, execute_ns - server_ns, 0.0, server_ns, 0.0)
        else:
            operations = (
                measure_claimed_growth(rank, signals.NFS_OPS.name, device, lost, share) or 0.0
            )
            yield _RequestTime("nfs", mount, execute_ns - server_ns, server_ns, 0.0, operations)


def _measure_lustre_requests(rank: Rank, lost: LostTime, share: Float) -> Iterator[_RequestTime]:
    for device in _list_devices(rank, signals.LUSTRE_RPC_TIME):
        mount, _, kind = device.rpartition(":")
        ns = measure_claimed_growth(rank, signals.LUSTRE_RPC_TIME.name, device, lost, share) or 0.0
        operations = (
            measure_claimed_growth(rank, signals.LUSTRE_RPCS.name, device, lost, share) or 0.0
        )
        if kind == "metadata":
            yield _RequestTime("lustre", mount, 0.0, ns, 0.0, operations)
        elif kind == "read":
            queue_ns = 0.0
            # Pages are pending for an instant before every RPC: they queue only at the limit.
            at_limit = measure_claimed_growth(
                rank, signals.LUSTRE_AT_LIMIT.name, mount, lost, share
            )
            fetched = measure_claimed_growth(
                rank, signals.LUSTRE_FETCHED_BYTES.name, mount, lost, share
            )
            if at_limit and fetched and operations:
                pending = compute_gauge_integral(rank, signals.LUSTRE_PENDING, mount, lost, share)
                queue_ns = pending / (fetched / operations)
            yield _RequestTime("lustre", mount, queue_ns, 0.0, ns, 0.0)


def _measure_cifs_requests(rank: Rank, lost: LostTime, share: Float) -> Iterator[_RequestTime]:
    for device in _list_devices(rank, signals.CIFS_OP_TIME):
        server, _, operation = device.rpartition(":")
        ns = measure_claimed_growth(rank, signals.CIFS_OP_TIME.name, device, lost, share) or 0.0
        if operation == "READ":
            queue_ns = compute_gauge_integral(rank, signals.CIFS_WAITING, server, lost, share)
            yield _RequestTime("cifs", server, queue_ns, 0.0, ns, 0.0)
        elif operation in CIFS_METADATA:
            yield _RequestTime("cifs", server, 0.0, ns, 0.0, 0.0)
    for device in _list_devices(rank, signals.CIFS_OPS):  # counted by share, not by server
        share_name, _, operation = device.rpartition(":")
        if operation in CIFS_METADATA:
            operations = (
                measure_claimed_growth(rank, signals.CIFS_OPS.name, device, lost, share) or 0.0
            )
            yield _RequestTime("cifs", share_name, 0.0, 0.0, 0.0, operations)


def compute_gauge_integral(
    rank: Rank, signal: Signal, device: str, lost: LostTime, share: Float
) -> float:
    """Compute the integral of a gauge over the claimed segments, in its unit times ns.

    0 unknown.

    share: float64[n].
    """
    readings = rank.chunk.series.get((signal.name, device))
    rows = np.flatnonzero(share > 0)
    if readings is None or not rows.size:
        return 0.0
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    return float(np.nansum(series.compute_mean(readings, start, end) * (end - start)))


def describe_read_latency(
    rank: Rank, lost: LostTime, share: Float, kind: str, mount: str
) -> list[Evidence]:
    """Describe the mean time of a read, as far as the file system counts it.

    share: float64[n].
    """
    if kind == "cifs" or not mount:
        return []  # time is counted by server, reads by share
    if kind == "lustre":
        rpcs = measure_claimed_growth(rank, signals.LUSTRE_RPCS.name, f"{mount}:read", lost, share)
        ns = measure_claimed_growth(
            rank, signals.LUSTRE_RPC_TIME.name, f"{mount}:read", lost, share
        )
        note = "a read RPC took from sending to the reply"
        return (
            [Evidence("lustre.read_rpc_ns", ns / rpcs, "ns", note)]
            if rpcs and ns is not None
            else []
        )
    reads = measure_claimed_growth(rank, signals.NFS_OPS.name, f"{mount}:READ", lost, share)
    ns = measure_claimed_growth(rank, signals.NFS_EXECUTE.name, f"{mount}:READ", lost, share)
    note = "a read took from request to result"
    if not reads or ns is None:
        return []
    evidence = [Evidence("nfs.read_latency_ns", ns / reads, "ns", note)]
    read_bytes = measure_claimed_growth(rank, signals.NFS_READ_BYTES.name, mount, lost, share)
    if read_bytes:
        evidence.append(
            Evidence("nfs.read_size_bytes", read_bytes / reads, "bytes", READ_SIZE_NOTE)
        )
        evidence += count_reads("nfs", reads, lost, share)
    return evidence


def count_reads(kind: str, reads: float, lost: LostTime, share: Float) -> list[Evidence]:
    """Count the reads during the claimed segments, in total and per second.

    share: float64[n].
    """
    length_ns = float(np.sum((lost.end_ns - lost.start_ns)[share > 0]))
    evidence = [Evidence(f"{kind}.reads_total", reads, "count", "reads during those waits")]
    if length_ns > 0:
        note = "reads in a second of those waits"
        evidence.append(
            Evidence(f"{kind}.reads_per_second_count", reads / length_ns * 1e9, "count", note)
        )
    return evidence


def _list_devices(rank: Rank, signal: Signal) -> list[str]:
    return sorted(device for name, device in rank.chunk.series if name == signal.name)


def _merge_small_parts(parts: Float) -> Float:
    small = parts < MIN_PART_RATIO
    out = np.where(small, 0.0, parts)
    out[int(np.argmax(parts))] += float(parts[small].sum())
    return out


def get_page_bytes(rank: Rank) -> int:
    """Return how many bytes a page of the rank's host has."""
    size = rank.chunk.header.host.get("page_bytes")
    return size if isinstance(size, int) and size > 0 else _DEFAULT_PAGE_BYTES


def _estimate_cold_ratio(
    rank: Rank, lost: LostTime, share: Float, from_mount: bool = False
) -> float:
    """Estimate which fraction of all bytes from disks and file servers were pages read again.

    share: float64[n]. from_mount: these reads came from a mount.
    """
    refaults = measure_claimed_growth(rank, signals.MEMORY_REFAULTS.name, "", lost, share)
    disks, mounts = find_bottom_disks(rank.chunk), {signal.name for signal in SERVER_READ_SIGNALS}
    from_disks = from_servers = 0.0
    for name, device in rank.chunk.series:
        if name in mounts:
            from_servers += measure_claimed_growth(rank, name, device, lost, share) or 0.0
        elif name == signals.DISK_READ_BYTES.name and device in disks:
            from_disks += measure_claimed_growth(rank, name, device, lost, share) or 0.0
    refaulted, read = (refaults or 0.0) * get_page_bytes(rank), from_disks + from_servers
    if from_mount and from_servers <= 0:  # pages that came from a disk are not this mount's
        refaulted, read = refaulted - from_disks, _sum_uncounted_bytes(rank, lost, share)
    elif not _has_job_read(rank, lost, share, MIN_COLD_RATIO * read):
        return 0.0  # pages that others read again
    if refaulted <= 0 or read <= 0:
        return 0.0
    ratio = min(1.0, refaulted / read)
    return ratio if ratio >= MIN_COLD_RATIO else 0.0


def _has_job_read(rank: Rank, lost: LostTime, share: Float, least_bytes: float) -> bool:
    """Return whether the job read that many bytes around the claimed segments, or may have."""
    rows = np.flatnonzero(share > 0)
    if not rows.size:
        return False
    windows = _expand_windows(rank.chunk, lost.start_ns[rows], lost.end_ns[rows])
    job_read = _sum_job_reads(rank.chunk, *windows)
    return job_read is None or job_read >= least_bytes


def _sum_uncounted_bytes(rank: Rank, lost: LostTime, share: Float) -> float:
    """Sum what the rank's processes requested in the claimed segments beyond bytes from devices."""
    rows = np.flatnonzero(share > 0)
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    total = 0.0
    for process in (rank.main, *rank.workers):
        io = process.io
        if io is None or not io.t_ns.size:
            continue
        low, high = np.clip(start, io.t_ns[0], io.t_ns[-1]), np.clip(end, io.t_ns[0], io.t_ns[-1])
        requested, read = (
            series.compute_column_increase(io.t_ns, column, low, high)
            for column in (io.read_chars, io.read_bytes)
        )
        total += float(np.nansum(np.maximum(requested - read, 0.0)))
    return total


def find_most_read_mount(rank: Rank, lost: LostTime, share: Float) -> tuple[str, str, float]:
    """Find the kind and name of the mount that most bytes came from, and the number of bytes.

    Without any bytes: the only mounted file system in user space, which has no counters.
    """
    most_read = ("", "", 0.0)
    for signal in SERVER_READ_SIGNALS:
        mount, read_bytes = find_busiest_device(rank, signal.name, lost, share)
        if read_bytes > most_read[2]:
            most_read = (signal.name.partition(".")[0], mount, read_bytes)
    if most_read[1]:
        return most_read
    mounts = rank.chunk.header.host.get("mounts") or ()
    points = {str(m.get("point", "")) for m in mounts if get_remote_type(m).startswith("fuse")}
    return ("fuse", points.pop(), 0.0) if len(points) == 1 else most_read


def _has_nfs_mount(rank: Rank) -> bool:
    mounts = rank.chunk.header.host.get("mounts") or ()
    types = [str(mount.get("type", "")) for mount in mounts if isinstance(mount, dict)]
    return any(mount_type.startswith("nfs") for mount_type in types)
