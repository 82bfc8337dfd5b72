"""GPU memory is allocated and freed within steps.

## What it sees

Lost time inside steps, outside any wait, while PyTorch's allocator went to the driver for memory,
or ran out of it and tried again.

## Why the GPU waits

`cudaMalloc` and `cudaFree` go through the driver, and freeing waits for the device. Memory that is
nearly full, shapes that change, or `torch.cuda.empty_cache()` in the loop make steps pay for that
again and again; normally the allocator's cache serves them all.

## How it decides

The probe reads the allocator's counters about once a second; a lost piece goes by the reading that
covers it, or by the one before, if that is no older than two seconds. Allocation counts as churn
when an allocation had to be tried again after a flush of the cache, or when as many blocks were
both got from the driver and given back as there were steps. The share of a lost piece in such a
second is what the main thread did not spend in user code: in the driver, or waiting for it.

## What to do

Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, take `empty_cache()` out of the loop, pad or
bucket shapes, and leave some memory free: a smaller batch may be faster.

## Where it is blind

How long a call of the driver took is not measured, only that there were some. Allocators other
than PyTorch's own tell nothing, and torch before 2.2 counts only what was tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.detectors.base import Claims, in_phase, main_thread
from clusterprof.findings import Cause, Evidence
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_COMPUTE, Feeding, Lost, Rank, SpanTable

_OLD_NS = 2_000_000_000  # as far back and ahead as a chunk is sure to reach


class LaunchAlloc:
    """Claims time in the driver while the allocator's cache does not serve."""

    cause = Cause(
        "launch-alloc",
        "launch",
        "GPU memory is allocated and freed within steps",
        "Use expandable segments, and take empty_cache() out of the loop",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When the allocator churns."""

        retries_at_least_count: int = 1
        """Allocations tried again between two readings."""
        blocks_per_step_at_least_count: float = 1.0
        """Blocks both got from the driver and given back, in a step."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim what the main thread did not spend in user code, while the allocator churned."""
        share = np.zeros(lost.start_ns.size)
        inside = in_phase(lost, PHASE_COMPUTE) & (lost.step != 0)
        table = rank.main.spans.get(layout.ALLOCATOR)
        if table is None or not inside.any():
            return Claims(share, "B")
        churns = _churns(rank, table, limits)
        inside &= _while(table, lost, churns)
        if not inside.any():
            return Claims(share, "B")
        user = main_thread(rank, "user_ns", lost, inside)
        delay = np.nan_to_num(main_thread(rank, "run_delay_ns", lost, inside))
        share = np.where(inside & ~np.isnan(user), np.clip(1 - user - delay, 0.0, 1.0), 0.0)
        evidence = [
            Evidence(name, float(np.maximum(column[churns], 0).sum()), "count", note)
            for name, column, note in (
                ("allocator.retries_total", table.a, "allocations were tried again"),
                ("allocator.mallocs_total", table.b, "blocks were got from the driver"),
                ("allocator.frees_total", table.c, "blocks were given back to it"),
            )
        ]
        return Claims(share, "B", tuple(evidence) if share.any() else ())


def _while(table: SpanTable, lost: Lost, churns: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool[n]: which pieces the reading that covers them calls churn, else the last one before."""
    after = np.searchsorted(table.end_ns, lost.start_ns, side="right")
    there = np.minimum(after, table.end_ns.size - 1)
    covered = (after < table.end_ns.size) & (table.start_ns[there] <= lost.start_ns)
    covered &= table.end_ns[there] - lost.start_ns < _OLD_NS
    row = np.where(covered, there, after - 1)
    recent = (row >= 0) & (lost.start_ns - table.end_ns[np.maximum(row, 0)] < _OLD_NS)
    return np.asarray(recent & churns[np.maximum(row, 0)], np.bool_)


def _churns(rank: Rank, table: SpanTable, limits: LaunchAlloc.Limits) -> NDArray[np.bool_]:
    """bool[n]: between which readings the allocator's cache did not serve."""
    churns = table.a >= limits.retries_at_least_count
    steps = rank.main.spans.get(layout.STEP)
    if steps is not None and steps.end_ns.size:
        ends = np.sort(steps.end_ns)
        count = np.searchsorted(ends, table.end_ns, "right")
        count = count - np.searchsorted(ends, table.start_ns, "right")
        blocks = np.minimum(table.b, table.c)
        churns = churns | ((count > 0) & (blocks >= limits.blocks_per_step_at_least_count * count))
    return np.asarray(churns, np.bool_)
