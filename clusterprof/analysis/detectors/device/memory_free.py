"""Memory is freed or pinned within steps.

## What it sees

Idle time of the device inside steps while the host was in calls that return memory to the driver:
`cudaFree`, `hipFree`, `cuMemUnmap`, `cuMemRelease`, `cudaHostUnregister`, or in
`torch.cuda.empty_cache()`, or in calls that pin memory of the host: `cudaHostRegister`,
`cudaHostAlloc`, `hipHostMalloc`.

## Why the GPU waits

Freeing memory waits for all work of the device, and nothing can be launched until it returns.
Unmapping takes the driver milliseconds for large blocks. What was freed is allocated again in the
next step. Pinning locks each page of a buffer: about a quarter of a second for a gigabyte.

## How it decides

An imported trace of a profiler has each call, with its time; its share is the part of the idle time
inside them. In a recording of clusterprof, `torch.cuda.empty_cache()` is marked while it runs. If
blocks are both obtained and returned in every step, and no call was marked, it is `launch-alloc`.
If 50 blocks or more per step are returned, the evidence says which part of those obtained they are:
nearly all of them where the allocator does not keep any.

## What to do

Take `torch.cuda.empty_cache()` out of the loop. Let the allocator keep its blocks
(`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or `max_split_size_mb` against fragmentation),
and keep pinned buffers instead of registering and unregistering them. Pin a buffer once, before the
first step, and use it again for each copy.

If nearly all blocks are returned at once, the allocator's cache is off
(`PYTORCH_NO_CUDA_MEMORY_CACHING`, `PYTORCH_NO_HIP_MEMORY_CACHING`, an allocator of one's own): no
option of the cache helps then.

## Where it is blind

How long other allocators than PyTorch's take to free is seen in traces only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import Claims, measure_host_work, sum_claimed_ns
from clusterprof.analysis.timeline.model import DataWaitBreakdown, LostTime, Rank
from clusterprof.analysis.timeline.spans import AllocatorSpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence


class MemoryFree:
    """Claims idle time in which the host returned memory to the driver, or pinned memory."""

    cause = Cause(
        "memory-free",
        "launch",
        "Memory is freed or pinned within steps",
        "Take empty_cache() out of the loop, let the allocator keep its blocks, pin buffers once",
        precedence=220,
        tone=3,
        hidden_cost="interval",
        trace_spans=(layout.HOST_WORK, layout.STARVED),
        manual_check=(
            "`nsys profile`: `cudaFree` or `cuMemUnmap` within steps; "
            "`torch.cuda.memory_stats()`: `num_device_free` rises; `grep -rn empty_cache` in the "
            "code."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for freeing memory."""

        freeing_at_least_ratio: float = 0.0
        """A smaller share of a segment is left unattributed; 0 = none is too small."""
        uncached_frees_per_step_at_least_count: float = 50.0
        """Blocks returned to the driver per step from which it is reported which part of all blocks
        they are: an allocator that keeps its blocks flushes some dozens once, not in each step."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim lost time in which the host was in calls that free or pin memory."""
        share = measure_host_work(rank, lost, layout.FREEING_MEMORY, layout.PINNING_MEMORY)
        share[share < limits.freeing_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "A")
        evidence = []
        for activity, name, action in (
            (layout.FREEING_MEMORY, "freeing", "returned memory to the driver"),
            (layout.PINNING_MEMORY, "pinning", "pinned memory of the host"),
        ):
            part = measure_host_work(rank, lost, activity)
            if part.any():
                ratio = min(sum_claimed_ns(lost, part) / sum_claimed_ns(lost, share), 1.0)
                note = f"of that time, the host {action}"
                evidence.append(Evidence(f"host.{name}_ratio", ratio, "ratio", note))
        evidence[1:1] = _measure_returned_blocks(rank, limits)
        return Claims(share, "A", tuple(evidence))


def _measure_returned_blocks(rank: Rank, limits: MemoryFree.Limits) -> list[Evidence]:
    """Measure which part of the blocks from the driver went back to it, where they are many.

    An allocator that keeps its blocks returns few, and not in each step.
    """
    readings, steps = rank.main.get_spans(AllocatorSpans), rank.main.spans.get(layout.STEP)
    if readings is None or steps is None or not steps.end_ns.size:
        return []
    obtained, returned = (
        float(np.maximum(column, 0).sum()) for column in (readings.mallocs, readings.frees)
    )
    if returned < limits.uncached_frees_per_step_at_least_count * steps.end_ns.size:
        return []
    ratio = min(returned / max(obtained, returned), 1.0)
    note = "of the blocks that were obtained from the driver were returned to it at once"
    return [Evidence("allocator.returned_ratio", ratio, "ratio", note)]
