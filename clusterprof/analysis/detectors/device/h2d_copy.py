"""Copies to the GPU hold the step up.

## What it sees

Lost time in which the training process was copying from host memory to the GPU.

## Why the GPU waits

A copy from pageable memory goes through a staging buffer and blocks the host until it is done, so
that no kernel is launched meanwhile. A copy on the stream of the computation cannot overlap with
it.

## How it decides

Its share is the whole of a lost piece inside a copy that the probe has marked. A copy that did not
block the host is still under way when its mark ends: so is what is lost in the step behind it, for
as long as its bytes take over a link of 25 GB/s (16 lanes of PCIe 4.0).

## What to do

Set `pin_memory=True` in the loader and `non_blocking=True` in `.to()`; copy the next batch on a
stream of its own while the present one computes.

## Where it is blind

Copies that a library makes in native code carry no mark. Copies that did not block and had to wait
for the computation before them end later than is reckoned here. `.item()` and printing a tensor
synchronise without a copy worth the name: that is `h2d-sync`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import Claims, in_phase, mean_over
from clusterprof.findings import Cause, Evidence, Grade
from clusterprof.probe import layout
from clusterprof.timeline.intervals import overlaps, union
from clusterprof.timeline.model import (
    PHASE_COMPUTE,
    PHASE_H2D,
    Feeding,
    Float,
    Lost,
    Rank,
    SpanTable,
)
from clusterprof.timeline.series import mean

LINK_BYTES_PER_SECOND = 25_000_000_000
"""Of copies from pinned memory; a faster link would be done sooner."""


class H2dCopy:
    """Claims the time inside marked copies to the GPU."""

    cause = Cause(
        "h2d-copy",
        "h2d",
        "Copies to the GPU hold the step up",
        "Use pin_memory=True and non_blocking=True, and copy the next batch ahead",
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a copy counts."""

        copy_at_least_ns: int = 0
        """A shorter lost piece is left unattributed; 0 = none is too short."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim every lost piece inside a copy."""
        inside = in_phase(lost, PHASE_H2D)
        table = rank.main.spans.get(layout.H2D)
        inside &= lost.end_ns - lost.start_ns >= limits.copy_at_least_ns
        share = np.where(inside, 1.0, _under_way(lost, table))
        inside = share > 0
        if not inside.any():
            return Claims(share, "B")
        evidence = []
        if table is not None:
            blocking = float(np.mean(table.b != 1))
            evidence.append(
                Evidence("h2d.blocking_ratio", blocking, "ratio", "of the copies blocked the host")
            )
        grade: Grade = "B"
        series = rank.chunk.series.get((signals.GPU_PCIE_RECEIVE.name, rank.device))
        if series is not None:
            rate = mean_over(lost, share, mean(series, lost.start_ns, lost.end_ns))
            grade = "A" if rate > 0 else "B"
            evidence.append(
                Evidence(
                    "gpu.pcie_receive_bytes_per_second",
                    rate,
                    "bytes/s",
                    "went over the bus meanwhile",
                )
            )
        return Claims(share, grade, tuple(evidence))


def _under_way(lost: Lost, table: SpanTable | None) -> Float:
    """float64[n]: the part of each piece in steps in which copies that did not block may go on."""
    share = np.zeros(lost.start_ns.size)
    if table is None:
        return share
    inside = in_phase(lost, PHASE_COMPUTE) & (lost.step >= 0)
    free = np.flatnonzero((table.b == 1) & (table.a > 0))
    if not free.size or not inside.any():
        return share
    begins = table.end_ns[free]
    ends = begins + (table.a[free] * (1e9 / LINK_BYTES_PER_SECOND)).astype(np.int64)
    copies = union((begins, ends))
    pieces = lost.start_ns[inside], lost.end_ns[inside]
    parts = overlaps(pieces, copies)
    covered = np.bincount(parts.piece, parts.end_ns - parts.start_ns, pieces[0].size)
    share[inside] = np.minimum(1.0, covered / np.maximum(lost.lost_ns[inside], 1))
    return share
