"""The data path opens more than it reads.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
blocked on a network mount that was mostly asked for names and attributes.

## Why the GPU waits

Every file costs a round trip each to look it up, to open it and to check its attributes, before the
first byte is read. With one sample to a file, that is most of the time, whatever the bandwidth.

## How it decides

Its share is the time the loading thread was blocked on the mount, times the part of the requests'
time that names and attributes spent at the server, during exactly those waits: LOOKUP, OPEN, CLOSE,
ACCESS, GETATTR and READDIR of NFS; all RPCs to metadata servers of Lustre, reads of data they hold
aside (`lustre.rpc_ns_total` of kind metadata); CREATE, CLOSE and queries of CIFS. A part below a
fifth is left to `storage-remote` or `storage-client-queue`, whichever is larger.

## What to do

Pack samples into large records (tar shards, record files), or keep an index instead of listing
folders. Longer attribute caching (`actimeo`, `nocto` for data nobody writes) saves the checks.

## Where it is blind

The counters are the mount's, and read once a second. CIFS keeps time only where the kernel was
built to; file systems in user space keep nothing. The size of a file on Lustre comes from its
object servers and counts as neither. A local file system answers from the same disk as it reads,
and counts no opens: there many small files show as `storage-local`, with small requests as
evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.detectors.base import Claims, waited
from clusterprof.detectors.storage import reading_of
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.model import Feeding, Lost, Rank


class StorageMetadata:
    """Claims the part of time on a network mount that names and attributes took."""

    cause = Cause(
        "storage-metadata",
        "storage",
        "The data path opens more than it reads",
        "Pack small files into large records, and index them once",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts as a wait for names and attributes."""

        blocked_at_least_ratio: float = 0.02
        """A smaller part of a piece is noise of the clocks behind it."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim blocked time in the proportion of requests for names and attributes."""
        share = waited(lost, feeding.remote_io)
        share[share < limits.blocked_at_least_ratio] = 0.0
        reading = reading_of(rank, lost, feeding)
        share *= reading.metadata_ratio * (1 - reading.cold_ratio)
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
