"""The host launches work too slowly.

## What it sees

Lost time inside a step, outside any wait, in which the main thread was busy on a CPU: the next
kernel was due, but the main thread had not launched it yet.

## Why the GPU waits

Each operation costs the host 5 to 20 µs of Python and driver time. If kernels are shorter than
that, the queue runs dry, and the GPU waits for the next launch, thousands of times in a step.

## How it decides

The device must have been measured as idle in that window. Its share is the part of the main
thread's time spent on a CPU, if that and the time in which it waited for a CPU are at least the
limit. A main thread that slept or was blocked
is not evidence of slow launching.

## What to do

Raise the batch size as far as memory allows. Fuse operations with `torch.compile`, or replay steps
as CUDA graphs. Move logging and metrics out of the step.

## Where it is blind

Between two device samples the order of idle and busy is unknown: kernel rates, which would decide
it, are not recorded. An imported trace of kernels does show it: its share is the time in which the
next kernel had not been launched yet. Anything else that keeps the main thread computing inside the
step, such as a metric on the CPU, looks alike and has the same remedy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    measure_main_thread,
    select_phases,
)
from clusterprof.analysis.timeline.data_wait.samples import allocate_span_amounts
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, DataWaitBreakdown, LostTime, Rank
from clusterprof.analysis.timeline.spans import StarvedSpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence


class LaunchBound:
    """Claims idle device time in steps in which the main thread was busy."""

    cause = Cause(
        "launch-bound",
        "launch",
        "The host launches work too slowly",
        "Raise the batch size, or fuse operations with torch.compile or CUDA graphs",
        precedence=730,
        hidden_cost="interval",
        trace_spans=(layout.STARVED,),
        manual_check=(
            "`nsys profile` or torch.profiler: gaps between kernels, and a launching thread "
            "without pause; `top -H -p PID`: the main thread near 100 %. Twice the batch must take "
            "less than twice the time."
        ),
    )
    needs = ("spans", "threads", "device")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a step bound by launching."""

        active_at_least_ratio: float = 0.5
        """Share of the segment in which the main thread must have been on a CPU or ready for it."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim time of the main thread on a CPU inside steps."""
        gaps = rank.main.get_spans(StarvedSpans)
        if gaps is not None:
            return _measure_traced_gaps(gaps, lost)
        inside = select_phases(lost, PHASE_COMPUTE) & (lost.step != 0)
        if not inside.any():
            return Claims(np.zeros(inside.size), "B")
        on_cpu = np.nan_to_num(measure_main_thread(rank, "on_cpu_ns", lost, inside))
        runnable = np.nan_to_num(measure_main_thread(rank, "run_delay_ns", lost, inside))
        share = np.where(on_cpu + runnable >= limits.active_at_least_ratio, on_cpu, 0.0)
        evidence = (
            Evidence(
                "thread.on_cpu_ratio",
                compute_claimed_mean(lost, share),
                "ratio",
                "of that time, the main thread was busy on a CPU",
            ),
        )
        return Claims(share, "B", evidence)


def _measure_traced_gaps(gaps: StarvedSpans, lost: LostTime) -> Claims:
    """Claim the time in which a trace of kernels shows an idle device and no launched kernel."""
    inside = select_phases(lost, PHASE_COMPUTE)
    late, launching, synced, memory, copying = allocate_span_amounts(
        gaps,
        lost.start_ns,
        lost.end_ns,
        late=None,
        launching=gaps.launching_ns,
        synced=gaps.synced_ns,
        memory=gaps.memory_ns,
        copying=gaps.copying_ns,
    )
    share = np.where(inside, np.minimum(late / np.maximum(lost.lost_ns, 1), 1.0), 0.0)
    late = np.maximum(late, 1.0)
    ratios = (
        ("host.launching_ratio", launching, "of that time, the host was in operators and launches"),
        ("host.synchronising_ratio", synced, "of it, the host waited for the device"),
        ("host.allocating_ratio", memory, "of it, the host allocated or freed device memory"),
        ("host.copying_ratio", copying, "of it, the host copied to the device"),
    )
    evidence = tuple(
        Evidence(name, compute_claimed_mean(lost, share, np.minimum(ns / late, 1.0)), "ratio", note)
        for name, ns, note in ratios
        if ns.any()
    )
    return Claims(share, "A", evidence)
