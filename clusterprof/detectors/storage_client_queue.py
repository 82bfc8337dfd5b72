"""Requests to a file server queue on this machine.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
blocked on an NFS mount whose requests waited longer for a free slot than for the server.

## Why the GPU waits

A mount has a limited number of requests under way (`sunrpc.tcp_max_slot_table_entries`, session
slots of NFS 4.1, one connection). With many workers, or many small reads, the next request waits
on the client until another one returns. The server may be idle meanwhile.

## How it decides

Its share is the time the loading thread was blocked on the mount, times the part of the requests'
time from request to result (`nfs.execute_ns_total`) that was not the round trip
(`nfs.rtt_ns_total`), over reads and requests for names and attributes during exactly those waits. A
part below a fifth is left to `storage-remote` or `storage-metadata`, whichever is larger.

## What to do

Give the mount more connections (`nconnect=8`) and more slots, a larger `rsize`, and read fewer,
larger records. The check: time from request to result falls to the round trip.

## Where it is blind

The counters are the mount's: other jobs on this machine that use the same mount are in them. They
are read once a second. Lustre, CIFS and file systems in user space keep no such counters here.
Without counters of an NFS mount only the family `storage` is said.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof import signals
from clusterprof.detectors.base import Claims, grown, waited
from clusterprof.detectors.storage import reading_of
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.model import Feeding, Lost, Rank


class StorageClientQueue:
    """Claims the part of time on a network mount in which requests waited for a slot."""

    cause = Cause(
        "storage-client-queue",
        "storage",
        "Requests to a file server queue on this machine",
        "Mount with nconnect and more RPC slots, and read fewer, larger records",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts as a wait for a slot."""

        blocked_at_least_ratio: float = 0.02
        """A smaller part of a piece is noise of the clocks behind it."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim blocked time in the proportion in which requests waited on the client."""
        share = waited(lost, feeding.remote_io)
        share[share < limits.blocked_at_least_ratio] = 0.0
        reading = reading_of(rank, lost, feeding)
        share *= reading.queue_ratio * (1 - reading.cold_ratio)
        if not share.any():
            return Claims(share, "A")
        evidence = [
            Evidence(
                "nfs.queued_ratio",
                reading.queue_ratio,
                "ratio",
                "of the requests' time, they waited on this machine and not for the server",
            )
        ]
        operation = f"{reading.mount}:READ"
        count = grown(rank, signals.NFS_OPS.name, operation, lost, share)
        for signal, name, note in (
            (signals.NFS_EXECUTE, "nfs.read_latency_ns", "a read took from request to result"),
            (signals.NFS_RTT, "nfs.read_rtt_ns", "of that it was on its way and at the server"),
        ):
            time_ns = grown(rank, signal.name, operation, lost, share)
            if count and time_ns is not None:
                evidence.append(Evidence(name, time_ns / count, "ns", note))
        return Claims(share, "A", tuple(evidence), reading.mount)
