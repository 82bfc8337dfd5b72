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
user-space file system, as `wchan` names it. Of NFS, Lustre and CIFS that is the part in which reads
were on their way and at the server; what requests waited on this machine is `storage-client-queue`,
what names and attributes took is `storage-metadata`. Evidence is what the mount did in those
intervals: bytes, the mean time of a read, what had to be sent again. A target of Lustre is named
where a request to it took three times as long as to the others.

## What to do

Stage the data on a local disk, or pack small files into large records. Read ahead further, and ask
whoever runs the server or the path to it: the round trips are theirs.

## Where it is blind

Memory-mapped files fault rather than read. Most counters of Lustre are for root only; CIFS keeps no
time unless its kernel was built to; a file system in user space has no counters at all: there
queues and metadata are not told from reads. Where an NFS mount's own counters were not recorded
only the family `storage` is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import Claims, busiest, grown, mean_over, waited
from clusterprof.detectors.storage import FETCHED, held, read_latency, reading_of
from clusterprof.findings import Cause, Evidence, Grade
from clusterprof.timeline.model import Feeding, Float, Lost, Rank

SLOW_TARGET_TIMES = 3
"""Less is what disks of one file system differ by on a good day."""


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
        kind, mount, read_bytes = _most_read(rank, lost, share)
        note = "of the waits, the loading thread was blocked on the file system"
        evidence = [Evidence("worker.remote_ratio", mean_over(lost, share), "ratio", note)]
        grade: Grade = "C" if reading.unknown else "B"
        if read_bytes > 0:
            grade = "A"
            note = "received from the server during those waits"
            evidence.append(Evidence(f"{kind}.read_bytes_total", read_bytes, "bytes", note))
            evidence += read_latency(rank, lost, share, kind, mount)
            evidence += _sent_again(rank, lost, share, kind, mount)
            if kind == "lustre" and (slow := _slow_target(rank, lost, share)):
                mount = f"{mount} ({slow})"
        return Claims(share, grade, tuple(evidence), mount)


def _most_read(rank: Rank, lost: Lost, share: Float) -> tuple[str, str, float]:
    """The kind and name of the mount that most bytes came from, and how many."""
    best = ("", "", 0.0)
    for signal in FETCHED:
        mount, read_bytes = busiest(rank, signal.name, lost, share)
        if read_bytes > best[2]:
            best = (signal.name.partition(".")[0], mount, read_bytes)
    return best


def _sent_again(rank: Rank, lost: Lost, share: Float, kind: str, mount: str) -> Iterator[Evidence]:
    """What had to be sent again, and targets that were not there."""
    if kind == "nfs":
        for signal, note in (
            (signals.NFS_RETRANSMITS, "reads were sent more than once"),
            (signals.NFS_TIMEOUTS, "reads were not answered for so long that they began anew"),
        ):
            again = grown(rank, signal.name, f"{mount}:READ", lost, share)
            if again:
                yield Evidence(signal.name, again, "count", note)
    elif kind == "lustre":
        timeouts = grown(rank, signals.LUSTRE_TIMEOUTS.name, mount, lost, share)
        if timeouts:
            note = "requests were given up and sent again"
            yield Evidence(signals.LUSTRE_TIMEOUTS.name, timeouts, "count", note)
        length_ns = float(np.sum((lost.end_ns - lost.start_ns)[share > 0]))
        gone = held(rank, signals.LUSTRE_UNCONNECTED, mount, lost, share) / max(length_ns, 1.0)
        if gone > 0:
            note = "targets had no connection"
            yield Evidence(signals.LUSTRE_UNCONNECTED.name, gone, "count", note)


def _slow_target(rank: Rank, lost: Lost, share: Float) -> str:
    """The target whose requests took three times as long as those of the others; "" if none."""
    spent: dict[str, tuple[float, float]] = {}
    for name, target in rank.chunk.series:
        if name == signals.LUSTRE_TARGET_RPCS.name:
            rpcs = grown(rank, name, target, lost, share) or 0.0
            ns = grown(rank, signals.LUSTRE_TARGET_TIME.name, target, lost, share) or 0.0
            if rpcs > 0 and "-OST" in target:
                spent[target] = rpcs, ns
    if len(spent) < 2:
        return ""
    slowest = max(sorted(spent), key=lambda target: spent[target][1] / spent[target][0])
    rpcs, ns = spent.pop(slowest)
    others = sum(one[1] for one in spent.values()) / sum(one[0] for one in spent.values())
    return slowest if ns / rpcs >= SLOW_TARGET_TIMES * others else ""
