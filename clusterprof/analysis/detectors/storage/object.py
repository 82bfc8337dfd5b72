"""The data path waits for an object store.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch slept in a
receive on a TCP connection: S3, HTTP, the hub of a data set, a database.

## Why the GPU waits

Each object costs a request, and often a new connection, to a server that many share. One request at
a time gives no more than one object per round trip, whatever the bandwidth.

## How it decides

It looks at the worker that owned the awaited batch (the main thread when it loads itself), inside
its fetches: there nobody talks to other ranks. Its share is the part of that thread's time in which
it slept in a receive (`wchan`), or polled while the node received data and no loader had a process
of its own to wait for. Evidence is what the job's connections, else the interfaces of the node,
received in exactly those waits.

## What to do

Stage the data on a local disk, or pack it into large objects. Fetch several objects at once,
further ahead, over connections that are kept open. Ask for a store nearer to the job.

## Where it is blind

A client that fetches in threads of its own (s3fs, asyncio) leaves the loading thread on a lock:
that time is "blocked on something unseen". Where `wchan` may not be read nothing is claimed. Bytes
received are those of all connections, those to other ranks among them.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof import signals
from clusterprof.detectors.base import Claims, busiest, mean_over, waited
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.model import Feeding, Lost, Rank


class StorageObject:
    """Claims the time in which the awaited batch came over a TCP connection."""

    cause = Cause(
        "storage-object",
        "storage",
        "The data path waits for an object store",
        "Stage the data on a local disk, or fetch larger objects, several at once",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts as a wait for an object store."""

        asleep_at_least_ratio: float = 0.02
        """A smaller part of a piece is noise of the clocks behind it."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim time of the critical thread asleep in a receive."""
        share = waited(lost, feeding.socket)
        share[share < limits.asleep_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        evidence = [
            Evidence(
                "worker.socket_ratio",
                mean_over(lost, share),
                "ratio",
                "of the waits, the loading thread slept in a receive",
            )
        ]
        nic = ""
        for signal in (signals.TCP_JOB_RECEIVED, signals.NET_RECEIVE):
            nic, received = busiest(rank, signal.name, lost, share)
            if received > 0:
                note = "received during those waits"
                evidence.append(Evidence(signal.name, received, "bytes", note))
                break
        return Claims(share, "B", tuple(evidence), nic)
