"""Whose bytes a local disk moved while the job waited for it: the job's own, or others'.

The kernel says what each disk moved and what each process of the job moved, not from which disk:

    the disk moved            |====== the job's, at most ======|======== others', at least =======|

Processes are read twice a second, and waits are shorter, so both are asked for the waits and a
second around each. What the job read is taken off what the disk read. What it wrote may reach a
disk half a minute later, so all that it wrote in the chunk is taken off what the disk wrote
meanwhile, and what went to and from swap is nobody's. The disk is the one that was busy longest,
and only where at least half of what the job read cannot have come from the other disks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.signals import Signal
from clusterprof.timeline import series
from clusterprof.timeline.disks import undermost
from clusterprof.timeline.model import Chunk, Float, Int, Lost, Process, Rank

OTHERS_FROM_RATIO = 0.4
"""Less may be the job's own: what it read half a second earlier or later than its counters say."""
AROUND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Others:
    """What others moved of all a disk moved; ratio 0 when small or unknown."""

    ratio: float
    disk: str
    other_bytes: float
    """At least so many were not the job's."""
    busy_ratio: float
    """Part of that time in which the disk had requests."""


NOBODY = Others(0.0, "", 0.0, 0.0)


def others_of(rank: Rank, lost: Lost, share: Float) -> Others:
    """Return who kept the disk busy around the pieces of which a share is claimed."""
    chunk = rank.chunk
    rows = np.flatnonzero(share > 0)
    start, end = _around(chunk, lost.start_ns[rows], lost.end_ns[rows])
    mine, written = _job_read(chunk, start, end), _job_wrote(chunk)
    if mine is None or written is None:
        return NOBODY
    disks = sorted(undermost(chunk))
    read = {disk: _moved(chunk, signals.DISK_READ_BYTES, disk, start, end) for disk in disks}
    busy = {disk: _moved(chunk, signals.DISK_BUSY, disk, start, end) for disk in disks}
    disk = max(disks, key=lambda name: busy[name], default="")
    if not disk or busy[disk] <= 0:
        return NOBODY
    elsewhere = sum(amount for name, amount in read.items() if name != disk)
    wrote = _moved(chunk, signals.DISK_WRITE_BYTES, disk, start, end)
    moved = read[disk] + wrote
    if moved <= 0 or elsewhere > mine / 2:
        return NOBODY
    other = max(0.0, read[disk] - mine) + max(0.0, wrote - written)
    for signal in (signals.MEMORY_SWAP_IN, signals.MEMORY_SWAP_OUT):
        other -= _moved(chunk, signal, "", start, end)
    ratio = other / moved
    if ratio < OTHERS_FROM_RATIO:
        return NOBODY
    length_ns = float((end - start).sum())
    return Others(min(1.0, ratio), disk, other, min(1.0, busy[disk] / length_ns))


def _around(chunk: Chunk, start: Int, end: Int) -> tuple[Int, Int]:
    """The pieces with a second around each, as stretches that do not overlap."""
    low = np.maximum(start - AROUND_NS, np.minimum(start, chunk.start_ns))
    high = np.minimum(end + AROUND_NS, np.maximum(end, chunk.end_ns))
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    first = np.concatenate([[True], low[1:] > high[:-1]])
    last = np.concatenate([first[1:], [True]])
    return low[first], high[last]


def _moved(chunk: Chunk, signal: Signal, device: str, start: Int, end: Int) -> float:
    readings = chunk.series.get((signal.name, device))
    if readings is None or not readings.t_ns.size:
        return 0.0
    low = np.clip(start, readings.t_ns[0], readings.t_ns[-1])
    high = np.clip(end, readings.t_ns[0], readings.t_ns[-1])
    return float(np.nansum(series.rise(readings, low, high)))


def _job_read(chunk: Chunk, start: Int, end: Int) -> float | None:
    """Bytes all processes of the job read from devices; None where one of them is unknown."""
    total = 0.0
    seen = False
    for process in chunk.processes.values():
        io = process.io
        if io is None or not io.t_ns.size:
            if _works(process):
                return None
            continue
        seen = True
        first, last = io.t_ns[0], io.t_ns[-1]
        low, high = np.clip(start, first, last), np.clip(end, first, last)
        total += float(series.rise_of(io.t_ns, io.read_bytes, low, high).sum())
        born = chunk.first or first > chunk.start_ns + AROUND_NS
        if born and (start < first).any():  # what its first reading holds may be of these waits
            total += float(io.read_bytes[0])
    return total if seen and not np.isnan(total) else None


def _works(process: Process) -> bool:
    return bool(process.spans or process.threads)


def _job_wrote(chunk: Chunk) -> float | None:
    """Bytes the job wrote in the whole chunk; None when one of its processes is unknown."""
    total = 0.0
    for process in chunk.processes.values():
        if process.io is None or not process.io.t_ns.size:
            continue  # what it read is unknown too: nothing is claimed
        growth, bad = series.differences(process.io.write_bytes)
        if bad.any():
            return None
        total += float(growth.sum())
    return total
