"""Data is read again that the page cache had evicted.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch read, from
a local disk or over NFS, pages that had been in memory not long before.

## Why the GPU waits

A data set that is read in every epoch is served from memory if it fits. When the memory limit of
the job, or its neighbours, leave too little for the page cache, each epoch pays for the disk again.

## How it decides

The kernel remembers what it evicted lately: a page that comes back too soon is a refault
(`memory.refaults_total`). Its share is the time the loading thread was reading or blocked on reads,
times refaulted bytes over all bytes that disks and mounts read during those waits, if that is
at least 0.3. The rest stays with `storage-local` or the causes of a network file system. Evidence
is also how much of what the loaders asked for the cache did not have (bytes read from devices and
file servers over bytes read by calls, `/proc/<pid>/io`), and what a sample cost: a data set that is
cached needs nothing after its first epoch.

## What to do

Raise the memory limit of the job by what the data set lacks, keep less else in memory (workers,
pinned buffers), shard the data over nodes, or cache decoded samples on a local disk.

## Where it is blind

The counter is of the whole node, in pages of 4 KiB. A data set much larger than memory is evicted
for longer than the kernel remembers, which is no refault, and no cache would have held it. Network
and user-space file systems that do not use the page cache never refault. The first epoch reads
everything once, and is never cold by this rule. Bytes per sample are not compared between epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import Claims, busiest, grown, waited
from clusterprof.detectors.storage import PAGE_BYTES, reading_of
from clusterprof.findings import Cause, Evidence
from clusterprof.probe import layout
from clusterprof.timeline import series
from clusterprof.timeline.model import Feeding, Float, Lost, Rank


class StorageColdCache:
    """Claims the part of reading that a larger page cache would have saved."""

    cause = Cause(
        "storage-cold-cache",
        "storage",
        "Data is read again that the page cache had evicted",
        "Give the page cache room: raise the job's memory limit, or shard the data over nodes",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts as a wait for the disk."""

        blocked_at_least_ratio: float = 0.02
        """A smaller part of a piece is noise of the clocks behind it."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim reading time in the proportion of refaulted bytes."""
        share = waited(lost, feeding.block_io + feeding.reading_cpu + feeding.remote_io)
        share[share < limits.blocked_at_least_ratio] = 0.0
        share *= reading_of(rank, lost, feeding).cold_ratio
        if not share.any():
            return Claims(share, "B")
        pages = grown(rank, signals.MEMORY_REFAULTS.name, "", lost, share) or 0.0
        disk, read_bytes = busiest(rank, signals.DISK_READ_BYTES.name, lost, share)
        evidence = [
            Evidence(
                "memory.refaulted_bytes_total",
                pages * PAGE_BYTES,
                "bytes",
                "had been in memory and were read again",
            ),
            Evidence(
                "disk.read_bytes_total",
                read_bytes,
                "bytes",
                "read from the disk during those waits",
            ),
        ]
        missed = _missed_ratio(rank, lost, share)
        if missed is not None:
            note = "of the bytes the loaders asked for, the page cache did not have"
            evidence.append(Evidence("page_cache.missed_ratio", missed, "ratio", note))
        per_sample = _sample_bytes(rank, lost, share)
        if per_sample is not None:
            note = "were read for each sample; a data set that is cached needs none after an epoch"
            evidence.append(Evidence("loader.sample_read_bytes", per_sample, "bytes", note))
        return Claims(share, "B", tuple(evidence), disk)


def _sample_bytes(rank: Rank, lost: Lost, share: Float) -> float | None:
    """Bytes that fetches read from devices per sample, from the first to the last claimed wait."""
    rows = np.flatnonzero(share > 0)
    start, end = lost.start_ns[rows].min(), lost.end_ns[rows].max()
    samples = read_bytes = 0
    for process in (rank.main, *rank.workers):
        fetches = process.spans.get(layout.FETCH)
        if fetches is not None:
            inside = (fetches.end_ns > start) & (fetches.end_ns <= end) & (fetches.d >= 0)
            samples += int(fetches.a[inside].sum())
            read_bytes += int(fetches.d[inside].sum())
    return read_bytes / samples if samples > 0 else None


def _missed_ratio(rank: Rank, lost: Lost, share: Float) -> float | None:
    """Bytes the rank's processes had to wait for, of those they asked for; None when unknown."""
    rows = np.flatnonzero(share > 0)
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    asked = fetched = 0.0
    for process in (rank.main, *rank.workers):
        io = process.io
        if io is None or not io.t_ns.size:
            continue
        chars = series.rise_of(io.t_ns, io.read_chars, start, end)
        read = series.rise_of(io.t_ns, io.read_bytes, start, end)
        known = ~np.isnan(chars + read)
        asked += float(chars[known].sum())
        fetched += float(read[known].sum())
    return min(1.0, fetched / asked) if asked > 0 else None
