"""Requests to a file server queue on this machine.

## What it sees

Lost time in which the host waited for a batch and the loading thread was blocked on a network
mount, whose requests waited longer for a free slot than for the server.

## Why the GPU waits

A mount has a limited number of requests in flight (NFS: `sunrpc.tcp_max_slot_table_entries`,
session slots, one connection; Lustre: `max_rpcs_in_flight` per target; CIFS: credits). With many
workers, or many small reads, the next request waits on the client until another one returns. The
server may be idle during that time.

## How it decides

Its share is the time the loading thread was blocked on the mount, times the part of the requests'
time that passed on this machine. This part is taken over reads and requests for names and
attributes during exactly those waits. NFS counts it: the time from request to result
(`nfs.execute_ns_total`) minus the round trip (`nfs.rtt_ns_total`). Lustre and CIFS count round
trips only, and report how much is waiting: the integral of that over the waits is the waiting time
(`lustre.pending_read_bytes` in RPCs of the mean size, if RPCs took the last slot of their target;
`cifs.waiting_count`). A part below a fifth is left to `storage-remote` or `storage-metadata`,
whichever is larger.

## What to do

Give the mount more connections (NFS `nconnect=8`, CIFS `multichannel`), more slots (Lustre
`max_rpcs_in_flight`), larger requests (`rsize`, `max_pages_per_rpc`) or stripes over more targets,
and read fewer, larger records. To check: the time from request to result falls to the round trip.

## Where it is blind

The counters belong to the mount: they include other jobs on this machine that use it. They are read
once a second; the queues of Lustre and CIFS are sampled as often, not accumulated. File systems in
user space have no such counters. Without counters of an NFS mount only the family `storage` is
reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof import signals
from clusterprof.analysis.detectors.base import Claims, limit_to_reads, measure_claimed_growth
from clusterprof.analysis.detectors.storage.evidence import (
    describe_read_latency,
    get_read_breakdown,
)
from clusterprof.analysis.timeline.model import DataWaitBreakdown, Float, LostTime, Rank
from clusterprof.report.model import Cause, Evidence, Grade


class StorageClientQueue:
    """Claims the part of time on a network mount in which requests waited for a slot."""

    cause = Cause(
        "storage-client-queue",
        "storage",
        "Requests to a file server queue on this machine",
        "Mount with nconnect and more RPC slots, and read fewer, larger records",
        precedence=440,
        tone=2,
        hidden_cost="batch",
        manual_check=(
            "`nfsiostat 1 MOUNT`: `avg exe` far above `avg RTT`; `mountstats --rpc MOUNT`: "
            "backlog. Lustre: `lctl get_param osc.*.rpc_stats`, the last rows of `rpcs in flight`. "
            "CIFS: `/proc/fs/cifs/DebugData`, requests waiting for credits."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a wait for a slot."""

        blocked_at_least_ratio: float = 0.02
        """A smaller share of a segment is noise of the clocks it is measured with."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim blocked time in the proportion in which requests waited on the client."""
        share = limit_to_reads(lost, breakdown.remote_io)
        share[share < limits.blocked_at_least_ratio] = 0.0
        reading = get_read_breakdown(rank, lost, breakdown)
        share *= reading.queue_ratio * (1 - reading.remote_cold_ratio)
        if not share.any():
            return Claims(share, "A")
        kind, mount = reading.kind, reading.mount
        note = "of the requests' time, was spent waiting on this machine, not for the server"
        evidence = [Evidence(f"{kind}.queued_ratio", reading.queue_ratio, "ratio", note)]
        evidence += describe_read_latency(rank, lost, share, kind, mount)
        if kind == "nfs":
            evidence += _describe_nfs_queue(rank, lost, share, mount)
        elif kind == "lustre":
            evidence += _describe_lustre_limit(rank, lost, share, mount)
        grade: Grade = "A" if kind == "nfs" else "B"  # a queue sampled once a second
        return Claims(share, grade, tuple(evidence), mount)


def _describe_nfs_queue(rank: Rank, lost: LostTime, share: Float, mount: str) -> list[Evidence]:
    evidence = []
    reads = measure_claimed_growth(rank, signals.NFS_OPS.name, f"{mount}:READ", lost, share)
    rtt_ns = measure_claimed_growth(rank, signals.NFS_RTT.name, f"{mount}:READ", lost, share)
    if reads and rtt_ns is not None:
        note = "of that the read was in transfer and at the server"
        evidence.append(Evidence("nfs.read_rtt_ns", rtt_ns / reads, "ns", note))
    sends = measure_claimed_growth(rank, signals.NFS_SENDS.name, mount, lost, share)
    for signal, name, note in (
        (signals.NFS_SLOTS_USED, "nfs.slots_used_count", "slots were in use when one was sent"),
        (signals.NFS_BACKLOG, "nfs.backlog_count", "waited for a slot during that time"),
    ):
        length = measure_claimed_growth(rank, signal.name, mount, lost, share)
        if sends and length is not None:
            evidence.append(Evidence(name, length / sends, "count", note))
    return evidence


def _describe_lustre_limit(rank: Rank, lost: LostTime, share: Float, mount: str) -> list[Evidence]:
    at_limit = measure_claimed_growth(rank, signals.LUSTRE_AT_LIMIT.name, mount, lost, share)
    rpcs = measure_claimed_growth(rank, signals.LUSTRE_RPCS.name, f"{mount}:read", lost, share)
    if not rpcs or at_limit is None:
        return []
    note = "of the read RPCs took the last slot of their target"
    return [Evidence("lustre.rpcs_at_limit_ratio", min(1.0, at_limit / rpcs), "ratio", note)]
