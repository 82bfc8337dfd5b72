"""The data path waits for a network file system.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
blocked on NFS, Lustre, CIFS, or a file system in user space.

## Why the GPU waits

Each read or lookup costs a round trip to a server that many jobs share. Small files make a round
trip each for lookup, open and read, whatever the bandwidth.

## How it decides

It looks at the worker that owned the awaited batch (the main thread when it loads itself). Its
share is the part of that thread's time in which it slept in the kernel function of a network or
user-space file system, as `wchan` names it. Of an NFS mount that is the part in which reads were on
their way and at the server; what requests waited on this machine is `storage-client-queue`, what
names and attributes took is `storage-metadata`. Evidence for NFS is what the mount did in those
intervals: bytes, and the mean time from request to result.

## What to do

Stage the data on a local disk, or pack small files into large records. Read ahead further, and ask
whoever runs the server or the path to it: the round trips are theirs.

## Where it is blind

Memory-mapped files fault rather than read. Lustre keeps counters that are not read yet; a file
system in user space has none: there queues and metadata are not told from reads. Where an NFS
mount's own counters were not recorded only the family `storage` is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import Claims, busiest, grown, mean_over, waited
from clusterprof.detectors.storage import reading_of
from clusterprof.findings import Cause, Evidence, Grade
from clusterprof.timeline.model import Feeding, Lost, Rank


class StorageRemote:
    """Claims the time in which the awaited batch was blocked on a network file system."""

    cause = Cause(
        "storage-remote",
        "storage",
        "The data path waits for a network file system",
        "Stage the data on a local disk, or pack small files into large records",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts as a wait for a remote file system."""

        blocked_at_least_ratio: float = 0.02
        """A smaller part of a piece is noise of the clocks behind it."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim time of the critical thread blocked in a remote file system."""
        share = waited(lost, feeding.remote_io)
        share[share < limits.blocked_at_least_ratio] = 0.0
        reading = reading_of(rank, lost, feeding)
        share *= (1 - reading.queue_ratio - reading.metadata_ratio) * (1 - reading.cold_ratio)
        np.maximum(share, 0.0, out=share)
        if not share.any():
            return Claims(share, "B")
        mount, read_bytes = busiest(rank, signals.NFS_READ_BYTES.name, lost, share)
        evidence = [
            Evidence(
                "worker.remote_ratio",
                mean_over(lost, share),
                "ratio",
                "of the waits, the loading thread was blocked on the file system",
            ),
        ]
        grade: Grade = "C" if reading.unknown else "B"
        if read_bytes > 0:
            grade = "A"
            evidence.append(
                Evidence(
                    "nfs.read_bytes_total",
                    read_bytes,
                    "bytes",
                    "received from the server during those waits",
                )
            )
            operation = f"{mount}:READ"
            count = grown(rank, signals.NFS_OPS.name, operation, lost, share)
            time_ns = grown(rank, signals.NFS_EXECUTE.name, operation, lost, share)
            if count and time_ns is not None:
                evidence.append(
                    Evidence(
                        "nfs.read_latency_ns",
                        time_ns / count,
                        "ns",
                        "a read took from request to result",
                    )
                )
        return Claims(share, grade, tuple(evidence), mount)
