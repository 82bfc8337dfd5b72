"""Others keep the disk busy that the data path waits for.

## What it sees

Lost time in which the host waited for a batch, the thread that was making that batch was blocked on
a local disk, and much of what that disk moved meanwhile was not moved by the job.

## Why the GPU waits

A disk serves whoever asks. A copy, a backup, another job's data or its checkpoint on the same node
takes the bandwidth and lengthens the queue that the reads of this job stand in.

## How it decides

Its share is the time the loading thread was blocked on the disk, times the part of the bytes that
the busiest disk moved in those waits and a second around them and no process of the job can have
moved (`/proc/<pid>/io` against `/proc/diskstats`), if that is at least 0.4. What is doubtful
counts as the job's: all it wrote lately, all that went to swap. The rest stays with
`storage-local`.

## What to do

Find who it is (`iotop`, `pidstat -d`), and move it: to another disk, another node, another hour.
Give the job's cgroup a weight (`io.weight`), or its data a disk that nobody else uses.

## Where it is blind

Nothing is claimed where `/proc/<pid>/io` of a process of the job may not be read, or where the job
read most of its data from another disk than the busiest. Others on the same file server are not
seen from here: that is `storage-remote`. A second job inside the same recording is the job too.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.detectors.base import Claims, waited
from clusterprof.detectors.storage import reading_of
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.model import Feeding, Lost, Rank


class StorageContention:
    """Claims the part of waits for a disk that others kept busy."""

    cause = Cause(
        "storage-contention",
        "storage",
        "Others keep the disk busy that the data path waits for",
        "Find who else uses the disk, and move it or the data elsewhere",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts as a wait for the disk."""

        blocked_at_least_ratio: float = 0.02
        """A smaller part of a piece is noise of the clocks behind it."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim blocked time in the proportion of others' bytes."""
        share = waited(lost, feeding.block_io)
        share[share < limits.blocked_at_least_ratio] = 0.0
        reading = reading_of(rank, lost, feeding)
        others = reading.others
        share *= others.ratio * (1 - reading.cold_ratio)
        if not share.any():
            return Claims(share, "B")
        note = "of what the disk moved around those waits, others moved"
        busy = "of that time, the disk had requests to work on"
        evidence = (
            Evidence("disk.others_ratio", others.ratio, "ratio", note),
            Evidence("disk.others_bytes_total", others.other_bytes, "bytes", "moved by others"),
            Evidence("disk.busy_ratio", others.busy_ratio, "ratio", busy),
        )
        return Claims(share, "B", evidence, others.disk)
