"""The host is short of memory.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
blocked on memory: reclaim, swap, or a page fault that needed I/O.

## Why the GPU waits

When memory is used up, whoever asks for more has to free some first, and pages that were evicted
are read again. The loader runs at the speed of the swap device, or of the kernel's search for free
pages.

## How it decides

Its share is the part of the critical thread's time that was blocked in memory management: major
faults of that thread, or a kernel function of reclaim or swap in `wchan`. Evidence is the pressure
on memory in those intervals, what was read back from swap, and how long kswapd ran.

## What to do

Raise the memory request, or lower the use: fewer workers, a shorter prefetch, no per-worker copy of
the data set's index. Look at `/dev/shm` too: it counts as memory.

## Where it is blind

Time on the CPU in reclaim counts as computing. Faults on a memory-mapped data file count as reads
when the thread reads from a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import Claims, grown, mean_over, pressure, waited
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.model import Feeding, Float, Lost, Rank

_KSWAPD_FROM_RATIO = 0.05


class CpuMemory:
    """Claims the time in which the critical thread waited for memory."""

    cause = Cause(
        "cpu-memory",
        "cpu",
        "The host is short of memory",
        "Raise the memory request, or use fewer workers and a shorter prefetch",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts as a wait for memory."""

        blocked_at_least_ratio: float = 0.02
        """A smaller part of a piece is ignored."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim time of the critical thread in reclaim, swap or major faults."""
        share = waited(lost, feeding.memory)
        share[share < limits.blocked_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        waiting = Evidence(
            "worker.memory_ratio",
            mean_over(lost, share),
            "ratio",
            "of the waits, the loading thread was blocked on memory",
        )
        note = "of that time, some task of the node waited for memory"
        grade, pressed = pressure(rank, signals.PRESSURE_MEMORY_SOME, lost, share, note)
        return Claims(share, grade, (waiting, *pressed, *_found(rank, lost, share)))


def _found(rank: Rank, lost: Lost, share: Float) -> list[Evidence]:
    """How memory was found meanwhile: out of swap, else by kswapd. Said only where it was."""
    swapped = grown(rank, signals.MEMORY_SWAP_IN.name, "", lost, share)
    if swapped:
        note = "were read back from swap meanwhile"
        return [Evidence(signals.MEMORY_SWAP_IN.name, swapped, "bytes", note)]
    freed = grown(rank, signals.KERNEL_CPU.name, "kswapd", lost, share) or 0.0
    ratio = freed / max(1.0, float(np.sum((lost.end_ns - lost.start_ns)[share > 0])))
    if ratio < _KSWAPD_FROM_RATIO:
        return []
    return [Evidence("kernel.kswapd_ratio", ratio, "ratio", "of that time, kswapd ran")]
