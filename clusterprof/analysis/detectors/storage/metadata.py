"""Opening files takes longer than reading them.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
blocked on a network mount whose requests were mostly for names and attributes.

## Why the GPU waits

Every file costs one round trip each to look it up, to open it and to check its attributes, before
the first byte is read. With one sample per file that is most of the time, at any bandwidth.

## How it decides

Its share is the time the loading thread was blocked on the mount, times the part of the requests'
time that names and attributes spent at the server, during exactly those waits: LOOKUP, OPEN, CLOSE,
ACCESS, GETATTR and READDIR of NFS; all RPCs to metadata servers of Lustre, except reads of data
that they hold (`lustre.rpc_ns_total` of kind metadata); CREATE, CLOSE and queries of CIFS. A part
below a fifth is left to `storage-remote` or `storage-client-queue`, whichever is larger.

## What to do

Pack samples into large records (tar shards, record files), or keep an index instead of listing
folders. Longer attribute caching (`actimeo`, `nocto` for read-only data) saves the checks.

## Where it is blind

The counters belong to the mount and are read once a second. CIFS records time only if the kernel
was built for it; file systems in user space record nothing. The size of a file on Lustre comes from
its object servers and counts as neither. A local file system answers from the disk that it reads,
and counts no opens: there many small files show as `storage-local`, with small requests as
evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.analysis.detectors.base import Claims, limit_to_reads
from clusterprof.analysis.detectors.storage.evidence import get_read_breakdown
from clusterprof.analysis.timeline.model import DataWaitBreakdown, LostTime, Rank
from clusterprof.report.model import Cause, Evidence


class StorageMetadata:
    """Claims the part of time on a network mount spent on names and attributes."""

    cause = Cause(
        "storage-metadata",
        "storage",
        "Opening files takes longer than reading them",
        "Pack small files into large records, and index them once",
        precedence=450,
        tone=3,
        hidden_cost="batch",
        manual_check=(
            "`nfsstat -c` or `mountstats --rpc MOUNT` twice: LOOKUP, GETATTR, ACCESS and OPEN "
            "against READ; `strace -f -c -p WORKER`: openat, stat and close against read."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a wait for names and attributes."""

        blocked_at_least_ratio: float = 0.02
        """A smaller share of a segment is noise of the clocks it is measured with."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim blocked time in the proportion of requests for names and attributes."""
        share = limit_to_reads(lost, breakdown.remote_io)
        share[share < limits.blocked_at_least_ratio] = 0.0
        reading = get_read_breakdown(rank, lost, breakdown)
        share *= reading.metadata_ratio * (1 - reading.remote_cold_ratio)
        if not share.any():
            return Claims(share, "A")
        evidence = (
            Evidence(
                f"{reading.kind}.metadata_ratio",
                reading.metadata_ratio,
                "ratio",
                "of the requests' time went to names and attributes",
            ),
            Evidence(
                f"{reading.kind}.metadata_operations_total",
                reading.operations,
                "count",
                "lookups, opens and checks of attributes during those waits",
            ),
        )
        return Claims(share, "A", evidence, reading.mount)
