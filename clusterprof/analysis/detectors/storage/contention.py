"""Other processes keep the disk busy.

## What it sees

Lost time in which the host waited for a batch and the loading thread was blocked on a local disk,
while much of the traffic of that disk did not belong to the job.

## Why the GPU waits

A disk serves all requests. A copy, a backup, another job's data or its checkpoint on the same node
takes bandwidth and lengthens the queue in which the reads of this job wait.

## How it decides

Its share is the time the loading thread was blocked on the disk, times the share of foreign bytes,
if that is at least 0.4. A disk that had requests for less time than the thread was blocked delayed
it for no more than that. Foreign bytes are those that the busiest disk transferred in those waits
and a second around them, but that no process of the job can have transferred (`/proc/<pid>/io`
against `/proc/diskstats`). Doubtful traffic counts as the job's: everything it wrote recently, and
everything that went to swap. The rest stays with `storage-local`.

## What to do

Find the other process (`iotop`, `pidstat -d`), and move it: to another disk, another node, another
hour. Give the job's cgroup a weight (`io.weight`), or its data a disk of its own.

## Where it is blind

Nothing is claimed if `/proc/<pid>/io` of a process of the job may not be read, or if the job read
most of its data from another disk than the busiest. Other clients of the same file server cannot be
seen from here: that is `storage-remote`. A second job inside the same recording counts as the job.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.analysis.detectors.base import Claims, limit_to_reads
from clusterprof.analysis.detectors.storage.evidence import get_read_breakdown
from clusterprof.analysis.timeline.model import DataWaitBreakdown, LostTime, Rank
from clusterprof.report.model import Cause, Evidence


class StorageContention:
    """Claims the part of waits for a disk that processes outside the job kept busy."""

    cause = Cause(
        "storage-contention",
        "storage",
        "Other processes keep the disk busy",
        "Find who else uses the disk, and move it or the data elsewhere",
        precedence=420,
        can_be_node_fault=True,
        hidden_cost="batch",
        manual_check=(
            "`sudo iotop -oPa` or `pidstat -d 1`: who reads and writes besides the job, and "
            "`iostat -x 1`: how busy the disk is. Stop the other process: the waits must "
            "disappear."
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
        """Claim blocked time in the proportion of other processes' bytes."""
        share = limit_to_reads(lost, breakdown.block_io)
        share[share < limits.blocked_at_least_ratio] = 0.0
        reading = get_read_breakdown(rank, lost, breakdown)
        other_traffic = reading.other_traffic
        share *= other_traffic.ratio * (1 - reading.cold_ratio)
        if not share.any():
            return Claims(share, "B")
        note = "of the disk's traffic around those waits did not belong to the job"
        busy = "of that time, the disk had requests to work on"
        evidence = (
            Evidence("disk.others_ratio", other_traffic.ratio, "ratio", note),
            Evidence(
                "disk.others_bytes_total", other_traffic.other_bytes, "bytes", "not the job's"
            ),
            Evidence("disk.busy_ratio", other_traffic.busy_ratio, "ratio", busy),
        )
        return Claims(share, "B", evidence, other_traffic.disk)
