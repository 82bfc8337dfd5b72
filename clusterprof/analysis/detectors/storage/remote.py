"""The data path waits for a network file system.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
blocked on NFS, Lustre, CIFS, or a file system in user space.

## Why the GPU waits

Each read or lookup costs a round trip to a server that many jobs share. Small files need one round
trip each for lookup, open and read, at any bandwidth.

## How it decides

It examines the worker that owned the awaited batch (the main thread if it loads the data itself).
Its share is the part of that thread's time in which it slept in the kernel function of a network or
user-space file system, as named by `wchan`, or waited for pages of files that no disk of the node
can have been reading for the job then: too few requests in flight, or too few bytes. For NFS,
Lustre and CIFS it is the part in which reads were in transfer and at the server; waiting of
requests on this machine is `storage-client-queue`, and time for names and attributes is `storage-
metadata`. The evidence is the activity of the mount in those intervals: bytes, the mean time of a
read, retransmissions. A target of Lustre is named if a request to it took three times as long as
requests to the others.

## What to do

Stage the data on a local disk, or pack small files into large records. Read further ahead, and
contact the operators of the server or of the path to it: the round trips are theirs.

## Where it is blind

Memory-mapped files fault instead of reading. Most counters of Lustre are for root only; CIFS
records no time unless its kernel was built for it; a file system in user space has no counters at
all: there queues and metadata cannot be distinguished from reads. If an NFS mount's own counters
were not recorded only the family `storage` is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    limit_to_reads,
    measure_claimed_growth,
)
from clusterprof.analysis.detectors.storage.evidence import (
    compute_gauge_integral,
    describe_read_latency,
    find_most_read_mount,
    get_read_breakdown,
)
from clusterprof.analysis.timeline.model import DataWaitBreakdown, Float, LostTime, Rank
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence, Grade, ResourceFacts

SLOW_TARGET_RATIO = 3
"""Time of a request over that of other targets; smaller ratios are normal within one file system.
"""


class StorageRemote:
    """Claims the time in which the awaited batch was blocked on a network file system."""

    cause = Cause(
        "storage-remote",
        "storage",
        "The data path waits for a network file system",
        "Stage the data on a local disk, or pack small files into large records",
        precedence=430,
        can_be_node_fault=True,
        tone=1,
        hidden_cost="batch",
        trace_spans=(layout.LOADING,),
        manual_check=(
            "`nfsiostat 1 MOUNT` (NFS: `avg RTT`), `lctl get_param osc.*.rpc_stats` (Lustre), "
            "`/proc/fs/cifs/Stats`; `ps -o stat,wchan PID` of a worker: `rpc_wait`, `cl_sync_io`. "
            "Read one file with `dd iflag=direct`: that is the rate the server gives one reader."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a wait for a remote file system."""

        blocked_at_least_ratio: float = 0.02
        """A smaller share of a segment is noise of the clocks it is measured with."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim time of the critical thread blocked in a remote file system."""
        share = limit_to_reads(lost, breakdown.remote_io)
        share[share < limits.blocked_at_least_ratio] = 0.0
        reading = get_read_breakdown(rank, lost, breakdown)
        share *= (1 - reading.queue_ratio - reading.metadata_ratio) * (
            1 - reading.remote_cold_ratio
        )
        np.maximum(share, 0.0, out=share)
        if not share.any():
            return Claims(share, "B")
        kind, mount, read_bytes = find_most_read_mount(rank, lost, share)
        note = "of the waits, the loading thread was blocked on the file system"
        evidence = [
            Evidence("worker.remote_ratio", compute_claimed_mean(lost, share), "ratio", note)
        ]
        grade: Grade = "C" if reading.unknown else "B"
        if read_bytes > 0:
            grade = "A"
            note = "received from the server during those waits"
            evidence.append(Evidence(f"{kind}.read_bytes_total", read_bytes, "bytes", note))
            evidence += describe_read_latency(rank, lost, share, kind, mount)
            evidence += _describe_retransmissions(rank, lost, share, kind, mount)
            if kind == "lustre" and (slow := _find_slow_target(rank, lost, share)):
                text, facts = f"{mount} ({slow})", ResourceFacts(name=mount)
                return Claims(share, grade, tuple(evidence), text, facts)
        return Claims(share, grade, tuple(evidence), mount)


def _describe_retransmissions(
    rank: Rank, lost: LostTime, share: Float, kind: str, mount: str
) -> Iterator[Evidence]:
    """Describe requests that were sent again, and targets without a connection."""
    if kind == "nfs":
        for signal, note in (
            (signals.NFS_RETRANSMITS, "reads were sent more than once"),
            (signals.NFS_TIMEOUTS, "reads timed out and were started again"),
        ):
            repeats = measure_claimed_growth(rank, signal.name, f"{mount}:READ", lost, share)
            if repeats:
                yield Evidence(signal.name, repeats, "count", note)
    elif kind == "lustre":
        timeouts = measure_claimed_growth(rank, signals.LUSTRE_TIMEOUTS.name, mount, lost, share)
        if timeouts:
            note = "requests were given up and sent again"
            yield Evidence(signals.LUSTRE_TIMEOUTS.name, timeouts, "count", note)
        length_ns = float(np.sum((lost.end_ns - lost.start_ns)[share > 0]))
        unconnected = compute_gauge_integral(
            rank, signals.LUSTRE_UNCONNECTED, mount, lost, share
        ) / max(length_ns, 1.0)
        if unconnected > 0:
            note = "targets had no connection"
            yield Evidence(signals.LUSTRE_UNCONNECTED.name, unconnected, "count", note)


def _find_slow_target(rank: Rank, lost: LostTime, share: Float) -> str:
    """Find the target whose requests took three times as long as those of the others.

    "" if none.
    """
    spent: dict[str, tuple[float, float]] = {}
    for name, target in rank.chunk.series:
        if name == signals.LUSTRE_TARGET_RPCS.name:
            rpcs = measure_claimed_growth(rank, name, target, lost, share) or 0.0
            ns = (
                measure_claimed_growth(rank, signals.LUSTRE_TARGET_TIME.name, target, lost, share)
                or 0.0
            )
            if rpcs > 0 and "-OST" in target:
                spent[target] = rpcs, ns
    if len(spent) < 2:
        return ""
    slowest = max(sorted(spent), key=lambda target: spent[target][1] / spent[target][0])
    rpcs, ns = spent.pop(slowest)
    other_mean_ns = sum(rpcs_and_ns[1] for rpcs_and_ns in spent.values()) / sum(
        rpcs_and_ns[0] for rpcs_and_ns in spent.values()
    )
    return slowest if ns / rpcs >= SLOW_TARGET_RATIO * other_mean_ns else ""
