"""The data path waits for a local disk.

## What it sees

Lost time in which the host waited for a batch and the loading thread read from a local block
device.

## Why the GPU waits

A batch cannot be decoded before its bytes have arrived. If reading takes longer than the step
computes, and the prefetched batches are used up, every step ends with the GPU waiting for the disk.

## How it decides

It examines the worker that owned the awaited batch (the main thread if it loads the data itself).
Its share is the part of that thread's time in which it was blocked on a block device, or in the
kernel on behalf of reads from one. The evidence is the disk's activity in exactly those intervals:
bytes, mean latency and size of a read (increase of `disk.read_ns_total` and of bytes over increase
of `disk.reads_total`), the part of the time it had requests outstanding, and how many on average.
Reads of a few KiB are many small files, or random access. A volume is named with the disks below
it. Traffic of other processes on the disk is `storage-contention`; reading pages again that had
been in memory is `storage-cold-cache`.

## What to do

Stage the data on the fastest local disk, and read it in large sequential records rather than in
small files. Give the page cache enough memory to hold the data set, if possible. More workers and a
longer prefetch hide latency, but not a lack of bandwidth: if the disk is busy all the time, only
fewer bytes or a faster disk help.

## Where it is blind

File systems in user space and network mounts are `storage-remote`. Delay accounting is off by
default on recent kernels; blocked time is then classified by thread state and bytes read, which
takes a thread sleeping in a separate storage driver for "blocked on something unseen".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    limit_to_data_wait,
    limit_to_reads,
    measure_claimed_growth,
)
from clusterprof.analysis.detectors.storage.evidence import (
    READ_SIZE_NOTE,
    count_reads,
    find_awaited_disk,
    get_read_breakdown,
)
from clusterprof.analysis.timeline.host_resources import find_disks_below
from clusterprof.analysis.timeline.model import DataWaitBreakdown, Float, LostTime, Rank
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence, Grade, ResourceFacts


class StorageLocal:
    """Claims the time in which the awaited batch was being read from a local disk."""

    cause = Cause(
        "storage-local",
        "storage",
        "The data path waits for a local disk",
        "Stage the data on a faster disk, or read it in large sequential records",
        precedence=410,
        can_be_node_fault=True,
        hidden_cost="batch",
        trace_spans=(layout.LOADING,),
        manual_check=(
            "`iostat -x 1` on the node while it trains: `%util`, `r_await` and `rareq-sz` of the "
            "disk; `cat /proc/PID/stack` (root) of a worker, or `ps -o stat,wchan PID`: state D in "
            "`folio_wait` or `io_schedule`. Then run a few steps on data that is in memory "
            "(`vmtouch -t`): the waits must disappear."
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
        """Claim blocked and reading time of the critical thread."""
        reading = get_read_breakdown(rank, lost, breakdown)
        share = limit_to_reads(lost, breakdown.block_io) + limit_to_data_wait(
            lost, breakdown.reading_cpu
        )
        share[share < limits.blocked_at_least_ratio] = 0.0
        other_share = limit_to_reads(lost, breakdown.block_io) * reading.other_traffic.ratio
        share = np.maximum(share - other_share, 0.0) * (1 - reading.cold_ratio)
        if not share.any():
            return Claims(share, "B")
        disk, read_bytes = find_awaited_disk(rank, lost, share)
        evidence = [
            Evidence(
                "worker.blocked_ratio",
                compute_claimed_mean(lost, share),
                "ratio",
                "of the waits, the loading thread was reading or blocked on the disk",
            )
        ]
        grade: Grade = "B"
        if read_bytes > 0:
            grade = "A"
            note = "read from the disk during those waits"
            total = Evidence("disk.read_bytes_total", read_bytes, "bytes", note)
            # The size of reads decides which advice helps, so it precedes the amount read.
            evidence += [*_describe_read_size(rank, disk, lost, share, read_bytes), total]
            evidence += _describe_requests(rank, disk, lost, share)
            if below := find_disks_below(rank.chunk, disk):
                text, facts = f"{disk} ({', '.join(below)})", ResourceFacts(name=disk)
                return Claims(share, grade, tuple(evidence), text, facts)
        return Claims(share, grade, tuple(evidence), disk)


def _describe_read_size(
    rank: Rank, disk: str, lost: LostTime, share: Float, read_bytes: float
) -> Iterator[Evidence]:
    reads = measure_claimed_growth(rank, signals.DISK_READS.name, disk, lost, share)
    if reads:
        yield Evidence("disk.read_size_bytes", read_bytes / reads, "bytes", READ_SIZE_NOTE)


def _describe_requests(rank: Rank, disk: str, lost: LostTime, share: Float) -> Iterator[Evidence]:
    """Describe the latency, size and number of the disk's requests."""
    reads = measure_claimed_growth(rank, signals.DISK_READS.name, disk, lost, share)
    time_ns = measure_claimed_growth(rank, signals.DISK_READ_TIME.name, disk, lost, share)
    if reads and time_ns is not None:
        yield Evidence("disk.read_latency_ns", time_ns / reads, "ns", "a read took on average")
    if reads:
        yield from count_reads("disk", reads, lost, share)
    length_ns = float(np.sum((lost.end_ns - lost.start_ns)[share > 0]))
    busy_ns = measure_claimed_growth(rank, signals.DISK_BUSY.name, disk, lost, share)
    queue_ns = measure_claimed_growth(rank, signals.DISK_QUEUE.name, disk, lost, share)
    if busy_ns is not None and length_ns > 0:
        note = "of those waits, the disk had requests to work on"
        yield Evidence("disk.busy_ratio", min(1.0, busy_ns / length_ns), "ratio", note)
    if queue_ns is not None and length_ns > 0:
        note = "requests in the disk queue on average"
        yield Evidence("disk.queue_count", queue_ns / length_ns, "count", note)
