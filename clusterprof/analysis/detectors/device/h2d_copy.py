"""Copies to the GPU delay the step.

## What it sees

Lost time in which the training process was copying from host memory to the GPU.

## Why the GPU waits

A copy from pageable memory goes through a staging buffer and blocks the host until it is done, so
no kernel is launched during the copy. A copy on the compute stream cannot overlap with computation.

## How it decides

Its share is the whole of a lost segment inside a copy that the probe recorded. A copy that did not
block the host is still running when its span ends: lost time in the step behind it counts too, for
as long as its bytes take over a link of 25 GB/s (16 lanes of PCIe 4.0).

## What to do

Set `pin_memory=True` in the loader and `non_blocking=True` in `.to()`; copy the next batch on a
separate stream while the present one computes.

## Where it is blind

Copies that a library makes in native code have no span. Copies that did not block and had to wait
for the computation before them end later than assumed here. `.item()` and printing a tensor
synchronize without copying much: that is `h2d-sync`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.detectors.base import Claims, compute_claimed_mean, select_phases
from clusterprof.analysis.timeline.intervals import find_overlaps, measure_overlap, merge_intervals
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_H2D,
    DataWaitBreakdown,
    Float,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.series import compute_mean
from clusterprof.analysis.timeline.spans import H2dSpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence, Grade

LINK_BYTES_PER_SECOND = 25_000_000_000
"""Rate of copies from pinned memory (16 lanes of PCIe 4.0); a faster link would be done sooner."""

_MAX_ISSUE_NS = 200_000
"""A call that only issues a copy returns within this time."""
_MAX_STAGING_BYTES_PER_SECOND = 100_000_000_000
"""No processor copies pageable memory into a pinned buffer faster than this."""


class H2dCopy:
    """Claims the time inside recorded copies to the GPU."""

    cause = Cause(
        "h2d-copy",
        "h2d",
        "Copies to the GPU delay the step",
        "Use pin_memory=True and non_blocking=True, and copy the next batch ahead",
        precedence=310,
        hidden_cost="interval",
        trace_spans=(layout.H2D,),
        manual_check=(
            "`nsys profile` of some steps: `cudaMemcpyAsync` of pageable memory, or copies while "
            "no kernel runs. `loader.pin_memory`, and `non_blocking=True` in `.to()`."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a copy."""

        copy_at_least_ns: int = 0
        """A shorter lost segment is left unattributed; 0 = none is too short."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim every lost segment inside a copy."""
        inside = select_phases(lost, PHASE_H2D)
        copies = rank.main.get_spans(H2dSpans)
        inside &= lost.end_ns - lost.start_ns >= limits.copy_at_least_ns
        share = np.where(inside, 1.0, _estimate_pending_copies(lost, copies))
        inside = share > 0
        if not inside.any():
            return Claims(share, "B")
        evidence = []
        if copies is not None:
            blocking = _compute_blocking_ratio(copies, lost, share > 0)
            evidence.append(
                Evidence("h2d.blocking_ratio", blocking, "ratio", "of the copies blocked the host")
            )
        grade: Grade = "B"
        series = rank.chunk.series.get((signals.GPU_PCIE_RECEIVE.name, rank.device))
        if series is not None:
            rate = compute_claimed_mean(
                lost, share, compute_mean(series, lost.start_ns, lost.end_ns)
            )
            grade = "A" if rate > 0 else "B"
            evidence.append(
                Evidence(
                    "gpu.pcie_receive_bytes_per_second",
                    rate,
                    "bytes/s",
                    "were received over the bus in that time",
                )
            )
        return Claims(share, grade, tuple(evidence))


def _find_blocking_copies(copies: H2dSpans) -> NDArray[np.bool_]:
    """Find the copies for which the host had to wait: bool[n].

    A copy from pageable memory blocks whatever `non_blocking` asks for: the driver first moves the
    bytes through a pinned buffer. One from pinned memory is only issued, whatever its size.
    """
    length_ns = copies.end_ns - copies.start_ns
    staged_ns = copies.bytes * (1e9 / _MAX_STAGING_BYTES_PER_SECOND)
    waited = length_ns >= np.maximum(staged_ns, _MAX_ISSUE_NS)
    return np.asarray((copies.non_blocking != 1) | waited, np.bool_)


def _compute_blocking_ratio(copies: H2dSpans, lost: LostTime, claimed: NDArray[np.bool_]) -> float:
    """Compute the share of the copies in claimed time that blocked the host.

    claimed: bool[n]. All copies count where none overlaps the claimed time.
    """
    blocked = _find_blocking_copies(copies)
    times = merge_intervals((lost.start_ns[claimed], lost.end_ns[claimed]))
    inside = measure_overlap((copies.start_ns, copies.end_ns), times) > 0
    return float(np.mean(blocked[inside] if inside.any() else blocked))


def _estimate_pending_copies(lost: LostTime, spans: H2dSpans | None) -> Float:
    """Estimate the share of each segment in steps in which non-blocking copies may run."""
    share = np.zeros(lost.start_ns.size)
    if spans is None:
        return share
    inside = select_phases(lost, PHASE_COMPUTE) & (lost.step >= 0)
    nonblocking = np.flatnonzero(~_find_blocking_copies(spans) & (spans.bytes > 0))
    if not nonblocking.size or not inside.any():
        return share
    begins = spans.end_ns[nonblocking]
    ends = begins + (spans.bytes[nonblocking] * (1e9 / LINK_BYTES_PER_SECOND)).astype(np.int64)
    copies = merge_intervals((begins, ends))
    segments = lost.start_ns[inside], lost.end_ns[inside]
    overlap_rows = find_overlaps(segments, copies)
    covered = np.bincount(
        overlap_rows.segment, overlap_rows.end_ns - overlap_rows.start_ns, segments[0].size
    )
    share[inside] = np.minimum(1.0, covered / np.maximum(lost.lost_ns[inside], 1))
    return share
