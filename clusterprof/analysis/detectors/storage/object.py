"""The data path waits for an object store.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch slept in a
receive on a TCP connection: S3, HTTP, the hub of a data set, a database.

## Why the GPU waits

Each object costs a request, and often a new connection, to a shared server. One request at a time
gives no more than one object per round trip, at any bandwidth.

## How it decides

It examines the worker that owned the awaited batch (the main thread if it loads the data itself),
inside its fetches: there no thread communicates with other ranks. Its share is the part of that
thread's time in which it slept in a receive (`wchan`), or polled while the node received data and
no loader had a child process to wait for. The evidence is the bytes that the job's connections,
else the interfaces of the node, received in exactly those waits.

## What to do

Stage the data on a local disk, or pack it into large objects. Fetch several objects at once,
further ahead, over connections that are kept open. Use a store nearer to the job.

## Where it is blind

A client that fetches in its own threads (s3fs, asyncio) leaves the loading thread on a lock: that
time is "blocked on something unseen". If `wchan` may not be read nothing is claimed. Bytes received
include those of all connections, also to other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof import signals
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    find_busiest_device,
    limit_to_data_wait,
)
from clusterprof.analysis.timeline.model import DataWaitBreakdown, LostTime, Rank
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence


class StorageObject:
    """Claims the time in which the awaited batch came over a TCP connection."""

    cause = Cause(
        "storage-object",
        "storage",
        "The data path waits for an object store",
        "Stage the data on a local disk, or fetch larger objects, several at once",
        precedence=460,
        tone=2,
        hidden_cost="batch",
        trace_spans=(layout.LOADING,),
        manual_check=(
            "`ss -tni` on the node: connections to the store, their `rtt` and how much came; `ps "
            "-o stat,wchan PID` of a worker: `sk_wait_data`. Time one object with `curl -w "
            "'%{time_total} %{speed_download}'`."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a wait for an object store."""

        asleep_at_least_ratio: float = 0.02
        """A smaller share of a segment is noise of the clocks it is measured with."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim time of the critical thread asleep in a receive."""
        share = limit_to_data_wait(lost, breakdown.socket)
        share[share < limits.asleep_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        evidence = [
            Evidence(
                "worker.socket_ratio",
                compute_claimed_mean(lost, share),
                "ratio",
                "of the waits, the loading thread slept in a receive",
            )
        ]
        nic = ""
        for signal in (signals.TCP_JOB_RECEIVED, signals.NET_RECEIVE):
            nic, received = find_busiest_device(rank, signal.name, lost, share)
            if received > 0:
                note = "received during those waits"
                evidence.append(Evidence(signal.name, received, "bytes", note))
                break
        return Claims(share, "B", tuple(evidence), nic)
