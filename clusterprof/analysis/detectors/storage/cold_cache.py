"""Data that the page cache had dropped is read from disk again.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch read, from
a local disk or over NFS, pages that had been in memory shortly before.

## Why the GPU waits

A data set that is read in every epoch is served from memory if it fits. If the memory limit of the
job, or other jobs on the node, leave too little for the page cache, each epoch pays for the disk
again.

## How it decides

The kernel remembers what it evicted recently: a page that returns too soon is a refault
(`memory.refaults_total`). Its share is the time the loading thread was reading or blocked on reads,
times refaulted bytes over all bytes that disks and mounts read during those waits, if that is at
least 0.3. A file system in user space counts no bytes: there refaulted bytes beyond those from
disks are compared with the bytes that calls requested beyond those from devices. The evidence says
which part of the reads a cache would save, and what the disk gave: if that is little, first reads
are as slow, and a faster disk saves more than a cache. The rest stays with `storage-local` or the
causes of a network file system. The evidence also includes the part of the requested bytes that the
cache did not hold (bytes read from devices and file servers over bytes read by calls,
`/proc/<pid>/io`), and the bytes read per sample: a cached data set reads nothing after its first
epoch.

## What to do

Raise the memory limit of the job by what the data set lacks, keep less other data in memory
(workers, pinned buffers), shard the data over nodes, or cache decoded samples on a local disk.

## Where it is blind

The counter covers the whole node, in pages of 4 KiB. A data set much larger than memory is evicted
for longer than the kernel remembers; that is not a refault, and no cache would have held it.
Network and user-space file systems that do not use the page cache never refault. The first epoch
reads everything once, and is never cold by this rule. Bytes per sample are not compared between
epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.analysis.detectors.base import (
    Claims,
    limit_to_data_wait,
    limit_to_reads,
    measure_claimed_growth,
    sum_claimed_ns,
)
from clusterprof.analysis.detectors.storage.evidence import (
    find_awaited_disk,
    find_most_read_mount,
    get_page_bytes,
    get_read_breakdown,
)
from clusterprof.analysis.timeline import series
from clusterprof.analysis.timeline.model import DataWaitBreakdown, Float, LostTime, Rank
from clusterprof.analysis.timeline.spans import FetchSpans
from clusterprof.report.model import Cause, Evidence


class StorageColdCache:
    """Claims the part of reading that a larger page cache would have saved."""

    cause = Cause(
        "storage-cold-cache",
        "storage",
        "Data that the page cache had dropped is read from disk again",
        "Give the page cache room: raise the job's memory limit, or shard the data over nodes",
        precedence=470,
        tone=1,
        hidden_cost="batch",
        manual_check=(
            "`grep workingset_refault /proc/vmstat` twice: it rises; `free -h`: how much is "
            "`buff/cache`; `cat memory.current memory.max` of the job's cgroup. Compare the data "
            "set's size with what is left."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a wait for the disk."""

        blocked_at_least_ratio: float = 0.02
        """A smaller share of a segment is noise of the clocks it is measured with."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim reading time in the proportion of refaulted bytes."""
        reading = get_read_breakdown(rank, lost, breakdown)
        remote = limit_to_reads(lost, breakdown.remote_io)
        share = limit_to_reads(lost, breakdown.block_io + breakdown.remote_io) - remote
        share = share + limit_to_data_wait(lost, breakdown.reading_cpu)
        is_small = share + remote < limits.blocked_at_least_ratio
        remote = np.where(is_small, 0.0, remote * reading.remote_cold_ratio)
        share = np.where(is_small, 0.0, share * reading.cold_ratio) + remote
        if not share.any():
            return Claims(share, "B")
        claimed, from_mount = sum_claimed_ns(lost, share), sum_claimed_ns(lost, remote)
        is_mount = from_mount > claimed / 2
        cold_ratio = reading.remote_cold_ratio if is_mount else reading.cold_ratio
        pages = measure_claimed_growth(rank, signals.MEMORY_REFAULTS.name, "", lost, share) or 0.0
        evidence = [
            Evidence(
                "memory.refaulted_ratio",
                cold_ratio,
                "ratio",
                "of the bytes read were read again after the page cache had dropped them",
            ),
            Evidence(
                "memory.refaulted_bytes_total",
                pages * get_page_bytes(rank),
                "bytes",
                "had been in memory and were read again",
            ),
        ]
        if is_mount:
            _, resource, _ = find_most_read_mount(rank, lost, share)
        else:
            resource, rates = _describe_disk(rank, lost, share)
            evidence[1:1] = rates[:1]
            evidence += rates[1:]
        missed = _compute_missed_ratio(rank, lost, share)
        if missed is not None:
            note = "of the bytes the loaders requested were not in the page cache"
            evidence.append(Evidence("page_cache.missed_ratio", missed, "ratio", note))
        per_sample = _compute_sample_bytes(rank, lost, share)
        if per_sample is not None:
            note = "were read for each sample; a data set that is cached needs none after an epoch"
            evidence.append(Evidence("loader.sample_read_bytes", per_sample, "bytes", note))
        return Claims(share, "B", tuple(evidence), resource)


def _describe_disk(rank: Rank, lost: LostTime, share: Float) -> tuple[str, list[Evidence]]:
    """Return the disk that most bytes came from, and what it gave in the claimed waits."""
    disk, read_bytes = find_awaited_disk(rank, lost, share)
    waited_ns = max(float((lost.end_ns - lost.start_ns)[share > 0].sum()), 1.0)
    rate, note = read_bytes / waited_ns * 1e9, "read from the disk during those waits"
    rate_note = "read from the disk in those waits, first reads included"
    return disk, [
        Evidence("disk.read_bytes_per_second", rate, "bytes/s", rate_note),
        Evidence("disk.read_bytes_total", read_bytes, "bytes", note),
    ]


def _compute_sample_bytes(rank: Rank, lost: LostTime, share: Float) -> float | None:
    """Compute the bytes per sample that fetches read, from the first to the last claimed wait."""
    rows = np.flatnonzero(share > 0)
    start, end = lost.start_ns[rows].min(), lost.end_ns[rows].max()
    samples = read_bytes = 0
    for process in (rank.main, *rank.workers):
        fetches = process.get_spans(FetchSpans)
        if fetches is not None:
            inside = (fetches.end_ns > start) & (fetches.end_ns <= end) & (fetches.read_bytes >= 0)
            samples += int(fetches.items[inside].sum())
            read_bytes += int(fetches.read_bytes[inside].sum())
    return read_bytes / samples if samples > 0 else None


def _compute_missed_ratio(rank: Rank, lost: LostTime, share: Float) -> float | None:
    """Compute which fraction of the requested bytes the page cache missed; None if unknown."""
    rows = np.flatnonzero(share > 0)
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    requested = fetched = 0.0
    for process in (rank.main, *rank.workers):
        io = process.io
        if io is None or not io.t_ns.size:
            continue
        chars = series.compute_column_increase(io.t_ns, io.read_chars, start, end)
        read = series.compute_column_increase(io.t_ns, io.read_bytes, start, end)
        measured = ~np.isnan(chars + read)
        requested += float(chars[measured].sum())
        fetched += float(read[measured].sum())
    return min(1.0, fetched / requested) if requested > 0 else None
