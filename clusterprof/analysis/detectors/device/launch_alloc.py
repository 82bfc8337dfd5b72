"""GPU memory is allocated and freed within steps.

## What it sees

Lost time inside steps, outside any wait, while PyTorch's allocator requested memory from the
driver, or ran out of memory and retried.

## Why the GPU waits

`cudaMalloc` and `cudaFree` go through the driver, and freeing waits for the device. Nearly full
memory, changing shapes, or `torch.cuda.empty_cache()` in the loop make steps pay for that again and
again; normally the allocator's cache serves all requests.

## How it decides

The probe reads the allocator's counters about once a second; a lost segment is judged by the
reading that covers it, or by the one before, if that is no older than two seconds. Allocation
counts as churn in two cases: an allocation had to be retried after a flush of the cache; or at
least one block per step was obtained from the driver and one returned to it. The share of a lost
segment in such a second is the time that the main thread did not spend in user code: in the driver,
or waiting for it.

An imported trace of a profiler has each call that allocates (`cudaMalloc`, `cuMemCreate`); its
share is the part of the idle time inside them.

## What to do

Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, remove `empty_cache()` from the loop, pad or
bucket shapes, and leave some memory free: a smaller batch may be faster.

## Where it is blind

How long a driver call took is not measured, only that there were some. Allocators other than
PyTorch's own report nothing, and torch before 2.2 counts only retries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    measure_host_work,
    measure_main_thread,
    select_phases,
)
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, DataWaitBreakdown, LostTime, Rank
from clusterprof.analysis.timeline.spans import AllocatorSpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence

_MAX_READING_AGE_NS = 2_000_000_000  # a chunk is certain to reach this far back and ahead


class LaunchAlloc:
    """Claims time in the driver while the allocator's cache does not serve the requests."""

    cause = Cause(
        "launch-alloc",
        "launch",
        "GPU memory is allocated and freed within steps",
        "Use expandable segments, and take empty_cache() out of the loop",
        precedence=720,
        tone=2,
        hidden_cost="interval",
        trace_spans=(layout.ALLOCATOR, layout.HOST_WORK),
        manual_check=(
            "`torch.cuda.memory_stats()`: `num_alloc_retries` and `num_device_alloc` rise in "
            "steps; `torch.cuda.memory_summary()`: how much is reserved and not allocated."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for allocator churn."""

        retries_at_least_count: int = 1
        """Allocations retried between two readings."""
        blocks_per_step_at_least_count: float = 1.0
        """Blocks both obtained from the driver and returned to it, per step."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim time of the main thread outside user code while the allocator churned."""
        share = measure_host_work(rank, lost, layout.ALLOCATING_MEMORY)
        if share.any():
            note = "of that time, the host was in calls that allocate memory of the device"
            ratio = compute_claimed_mean(lost, share)
            return Claims(share, "A", (Evidence("host.allocating_ratio", ratio, "ratio", note),))
        inside = select_phases(lost, PHASE_COMPUTE) & (lost.step != 0)
        readings = rank.main.get_spans(AllocatorSpans)
        if readings is None or not inside.any():
            return Claims(share, "B")
        churns = _find_churn(rank, readings, limits)
        inside &= _select_churning(readings, lost, churns)
        if not inside.any():
            return Claims(share, "B")
        user = measure_main_thread(rank, "user_ns", lost, inside)
        delay = np.nan_to_num(measure_main_thread(rank, "run_delay_ns", lost, inside))
        share = np.where(inside & ~np.isnan(user), np.clip(1 - user - delay, 0.0, 1.0), 0.0)
        evidence = [
            Evidence(name, float(np.maximum(column[churns], 0).sum()), "count", note)
            for name, column, note in (
                ("allocator.retries_total", readings.retries, "allocations were retried"),
                (
                    "allocator.mallocs_total",
                    readings.mallocs,
                    "blocks were obtained from the driver",
                ),
                ("allocator.frees_total", readings.frees, "blocks were returned to it"),
            )
        ]
        return Claims(share, "B", tuple(evidence) if share.any() else ())


def _select_churning(
    readings: AllocatorSpans, lost: LostTime, churns: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Select the segments whose covering reading, else the last before, shows churn: bool[n]."""
    after = np.searchsorted(readings.end_ns, lost.start_ns, side="right")
    reading_row = np.minimum(after, readings.end_ns.size - 1)
    covered = (after < readings.end_ns.size) & (readings.start_ns[reading_row] <= lost.start_ns)
    covered &= readings.end_ns[reading_row] - lost.start_ns < _MAX_READING_AGE_NS
    row = np.where(covered, reading_row, after - 1)
    recent = (row >= 0) & (
        lost.start_ns - readings.end_ns[np.maximum(row, 0)] < _MAX_READING_AGE_NS
    )
    return np.asarray(recent & churns[np.maximum(row, 0)], np.bool_)


def _find_churn(
    rank: Rank, readings: AllocatorSpans, limits: LaunchAlloc.Limits
) -> NDArray[np.bool_]:
    """Find the readings between which the allocator's cache did not serve the requests."""
    is_churn = readings.retries >= limits.retries_at_least_count
    steps = rank.main.spans.get(layout.STEP)
    if steps is not None and steps.end_ns.size:
        ends = np.sort(steps.end_ns)
        count = np.searchsorted(ends, readings.end_ns, "right")
        count = count - np.searchsorted(ends, readings.start_ns, "right")
        blocks = np.minimum(readings.mallocs, readings.frees)
        is_churn = is_churn | (
            (count > 0) & (blocks >= limits.blocks_per_step_at_least_count * count)
        )
    return np.asarray(is_churn, np.bool_)
