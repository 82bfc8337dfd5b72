"""Requests to a file server queue on this machine.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
blocked on a network mount whose requests waited longer for a free slot than for the server.

## Why the GPU waits

A mount has a limited number of requests under way (NFS: `sunrpc.tcp_max_slot_table_entries`,
session slots, one connection; Lustre: `max_rpcs_in_flight` per target; CIFS: credits). With many
workers, or many small reads, the next request waits on the client until another one returns. The
server may be idle meanwhile.

## How it decides

Its share is the time the loading thread was blocked on the mount, times the part of the requests'
time that passed on this machine, over reads and requests for names and attributes during exactly
those waits. NFS counts it: the time from request to result (`nfs.execute_ns_total`) less the round
trip (`nfs.rtt_ns_total`). Lustre and CIFS count round trips only, and tell how much waits: that,
summed over the waits, is the time it waited (`lustre.pending_read_bytes` in RPCs of the mean size,
where RPCs took the last place of their target; `cifs.waiting_count`). A part below a fifth is left
to `storage-remote` or `storage-metadata`, whichever is larger.

## What to do

Give the mount more connections (NFS `nconnect=8`, CIFS `multichannel`), more slots (Lustre
`max_rpcs_in_flight`), larger requests (`rsize`, `max_pages_per_rpc`) or stripes over more targets,
and read fewer, larger records. The check: time from request to result falls to the round trip.

## Where it is blind

The counters are the mount's: other jobs on this machine that use the same mount are in them. They
are read once a second; queues of Lustre and CIFS are looked at as often, not added up. File systems
in user space keep no such counters. Without counters of an NFS mount only the family `storage` is
said.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof import signals
from clusterprof.detectors.base import Claims, grown, waited
from clusterprof.detectors.storage import read_latency, reading_of
from clusterprof.findings import Cause, Evidence, Grade
from clusterprof.timeline.model import Feeding, Float, Lost, Rank


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
        kind, mount = reading.kind, reading.mount
        note = "of the requests' time, they waited on this machine and not for the server"
        evidence = [Evidence(f"{kind}.queued_ratio", reading.queue_ratio, "ratio", note)]
        evidence += read_latency(rank, lost, share, kind, mount)
        if kind == "nfs":
            evidence += _nfs(rank, lost, share, mount)
        elif kind == "lustre":
            evidence += _lustre(rank, lost, share, mount)
        grade: Grade = "A" if kind == "nfs" else "B"  # a queue looked at once a second
        return Claims(share, grade, tuple(evidence), mount)


def _nfs(rank: Rank, lost: Lost, share: Float, mount: str) -> list[Evidence]:
    found = []
    reads = grown(rank, signals.NFS_OPS.name, f"{mount}:READ", lost, share)
    rtt_ns = grown(rank, signals.NFS_RTT.name, f"{mount}:READ", lost, share)
    if reads and rtt_ns is not None:
        note = "of that it was on its way and at the server"
        found.append(Evidence("nfs.read_rtt_ns", rtt_ns / reads, "ns", note))
    sends = grown(rank, signals.NFS_SENDS.name, mount, lost, share)
    for signal, name, note in (
        (signals.NFS_SLOTS_USED, "nfs.slots_used_count", "slots were in use when one was sent"),
        (signals.NFS_BACKLOG, "nfs.backlog_count", "waited for a slot meanwhile"),
    ):
        length = grown(rank, signal.name, mount, lost, share)
        if sends and length is not None:
            found.append(Evidence(name, length / sends, "count", note))
    return found


def _lustre(rank: Rank, lost: Lost, share: Float, mount: str) -> list[Evidence]:
    full = grown(rank, signals.LUSTRE_AT_LIMIT.name, mount, lost, share)
    rpcs = grown(rank, signals.LUSTRE_RPCS.name, f"{mount}:read", lost, share)
    if not rpcs or full is None:
        return []
    note = "of the read RPCs took the last place their target had"
    return [Evidence("lustre.rpcs_at_limit_ratio", min(1.0, full / rpcs), "ratio", note)]
