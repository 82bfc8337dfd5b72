"""The data path waits for a local disk.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch read from
a local block device.

## Why the GPU waits

A batch cannot be decoded before its bytes have arrived. When reading takes longer than the step
computes, and the batches fetched ahead are used up, every step ends with the GPU waiting for the
disk.

## How it decides

It looks at the worker that owned the awaited batch (the main thread when it loads itself). Its
share is the part of that thread's time in which it was blocked on a block device, or in the kernel
on behalf of reads from one. Evidence is what the disk did in exactly those intervals: bytes,
mean latency and size of a read (rise of `disk.read_ns_total` and of bytes over rise of
`disk.reads_total`), the part of the time it had requests outstanding, and how many on average.
Reads of a few KiB are many small files, or random access. A volume is named with the disks under
it. What others kept the disk busy with is `storage-contention`, reading pages again that had been
in memory `storage-cold-cache`.

## What to do

Stage the data on the fastest local disk, and read it in large sequential records rather than in
small files. Give the page cache enough memory to hold the data set, if it can. More workers and a
longer prefetch hide latency, but not a lack of bandwidth: when the disk is busy all the time, only
fewer bytes or a faster disk help.

## Where it is blind

File systems in user space and network mounts are `storage-remote`. Delay accounting is off by
default on recent kernels; blocked time is then told apart by thread state and bytes read, which
takes a thread sleeping in a storage driver of its own for "blocked on something unseen".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import Claims, busiest, grown, mean_over, waited
from clusterprof.detectors.storage import READ_SIZE_NOTE, reading_of, reads_counted
from clusterprof.findings import Cause, Evidence, Grade
from clusterprof.timeline.disks import under
from clusterprof.timeline.model import Feeding, Float, Lost, Rank


class StorageLocal:
    """Claims the time in which the awaited batch was being read from a local disk."""

    cause = Cause(
        "storage-local",
        "storage",
        "The data path waits for a local disk",
        "Stage the data on a faster disk, or read it in large sequential records",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts as a wait for the disk."""

        blocked_at_least_ratio: float = 0.02
        """A smaller part of a piece is noise of the clocks behind it."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim blocked and reading time of the critical thread."""
        reading = reading_of(rank, lost, feeding)
        share = waited(lost, feeding.block_io + feeding.reading_cpu)
        share[share < limits.blocked_at_least_ratio] = 0.0
        others = waited(lost, feeding.block_io) * reading.others.ratio
        share = np.maximum(share - others, 0.0) * (1 - reading.cold_ratio)
        if not share.any():
            return Claims(share, "B")
        disk, read_bytes = busiest(rank, signals.DISK_READ_BYTES.name, lost, share)
        evidence = [
            Evidence(
                "worker.blocked_ratio",
                mean_over(lost, share),
                "ratio",
                "of the waits, the loading thread was reading or blocked on the disk",
            ),
        ]
        grade: Grade = "B"
        if read_bytes > 0:
            grade = "A"
            note = "read from the disk during those waits"
            total = Evidence("disk.read_bytes_total", read_bytes, "bytes", note)
            # How large reads are decides what helps: it stands before how much was read.
            evidence += [*_size(rank, disk, lost, share, read_bytes), total]
            evidence += _how(rank, disk, lost, share)
            below = under(rank.chunk, disk)
            disk = f"{disk} ({', '.join(below)})" if below else disk
        return Claims(share, grade, tuple(evidence), disk)


def _size(rank: Rank, disk: str, lost: Lost, share: Float, read_bytes: float) -> Iterator[Evidence]:
    reads = grown(rank, signals.DISK_READS.name, disk, lost, share)
    if reads:
        yield Evidence("disk.read_size_bytes", read_bytes / reads, "bytes", READ_SIZE_NOTE)


def _how(rank: Rank, disk: str, lost: Lost, share: Float) -> Iterator[Evidence]:
    """How long, how large and how many the disk's requests were."""
    reads = grown(rank, signals.DISK_READS.name, disk, lost, share)
    time_ns = grown(rank, signals.DISK_READ_TIME.name, disk, lost, share)
    if reads and time_ns is not None:
        yield Evidence("disk.read_latency_ns", time_ns / reads, "ns", "a read took on average")
    if reads:
        yield from reads_counted("disk", reads, lost, share)
    length_ns = float(np.sum((lost.end_ns - lost.start_ns)[share > 0]))
    busy_ns = grown(rank, signals.DISK_BUSY.name, disk, lost, share)
    queue_ns = grown(rank, signals.DISK_QUEUE.name, disk, lost, share)
    if busy_ns is not None and length_ns > 0:
        note = "of those waits, the disk had requests to work on"
        yield Evidence("disk.busy_ratio", min(1.0, busy_ns / length_ns), "ratio", note)
    if queue_ns is not None and length_ns > 0:
        note = "requests stood at the disk on average"
        yield Evidence("disk.queue_count", queue_ns / length_ns, "count", note)
