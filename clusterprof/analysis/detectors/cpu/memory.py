"""The host is short of memory.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
blocked on memory: reclaim, swap, or a page fault that needed I/O.

## Why the GPU waits

When memory is used up, a thread that requests more has to free some first, and evicted pages are
read again. The loader runs at the speed of the swap device, or of the kernel's search for free
pages.

## How it decides

Its share is the part of the critical thread's time that was blocked in memory management: major
faults of that thread, or a kernel function of reclaim or swap in `wchan`. The evidence is the
memory pressure in those intervals, the bytes read back from swap, and how long kswapd ran.

## What to do

Raise the memory request, or use less memory: fewer workers, a shorter prefetch, no per-worker copy
of the data set's index. Check `/dev/shm` too: it counts as memory.

## Where it is blind

Time on the CPU in reclaim counts as compute time. Faults on a memory-mapped data file count as
reads if the thread reads from a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    limit_to_data_wait,
    measure_claimed_growth,
    measure_pressure,
)
from clusterprof.analysis.timeline.model import DataWaitBreakdown, Float, LostTime, Rank
from clusterprof.report.model import Cause, Evidence

_MIN_KSWAPD_RATIO = 0.05


class CpuMemory:
    """Claims the time in which the critical thread waited for memory."""

    cause = Cause(
        "cpu-memory",
        "cpu",
        "The host is short of memory",
        "Raise the memory request, or use fewer workers and a shorter prefetch",
        precedence=550,
        can_be_node_fault=True,
        tone=2,
        hidden_cost="batch",
        manual_check=(
            "`cat /proc/pressure/memory`; `vmstat 1`: `si` and `so`; `cat memory.current "
            "memory.max memory.events` of the job's cgroup."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a wait for memory."""

        blocked_at_least_ratio: float = 0.02
        """A smaller share of a segment is ignored."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim time of the critical thread in reclaim, swap or major faults."""
        share = limit_to_data_wait(lost, breakdown.memory)
        share[share < limits.blocked_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        waiting = Evidence(
            "worker.memory_ratio",
            compute_claimed_mean(lost, share),
            "ratio",
            "of the waits, the loading thread was blocked on memory",
        )
        note = "of that time, some task of the node waited for memory"
        grade, pressure_evidence = measure_pressure(
            rank, signals.PRESSURE_MEMORY_SOME, lost, share, note
        )
        return Claims(
            share, grade, (waiting, *pressure_evidence, *_describe_memory_source(rank, lost, share))
        )


def _describe_memory_source(rank: Rank, lost: LostTime, share: Float) -> list[Evidence]:
    """Describe how memory was freed in the claimed time: from swap, else by kswapd."""
    swapped = measure_claimed_growth(rank, signals.MEMORY_SWAP_IN.name, "", lost, share)
    if swapped:
        note = "were read back from swap during that time"
        return [Evidence(signals.MEMORY_SWAP_IN.name, swapped, "bytes", note)]
    freed = measure_claimed_growth(rank, signals.KERNEL_CPU.name, "kswapd", lost, share) or 0.0
    ratio = freed / max(1.0, float(np.sum((lost.end_ns - lost.start_ns)[share > 0])))
    if ratio < _MIN_KSWAPD_RATIO:
        return []
    return [Evidence("kernel.kswapd_ratio", ratio, "ratio", "of that time, kswapd ran")]
