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
limit. A main thread that slept or was blocked is not evidence of slow launching, except for the
short sleeps of one that is busy nearly all the time: locks change hands between launches. Nor is
time in functions outside of PyTorch that keep the interpreter lock, as sampled stacks show it
(`cpu-preprocess` in a job without a data loader, else `eval-host`).

An imported trace of kernels shows each gap: its share is the part of the gap in which the host was
launching, in calls that launch work, in operators that contain such a call, in pauses of up to a
millisecond between two of these, or in operators and Python functions of the model and of PyTorch
that launched nothing between launches at most 20 ms apart, which the evidence names. In a longer
stretch, and in an operator that takes 1 ms without a launch, the host computes: that time has no
cause, and its reason names the operators. A gap in which the host did something else, or nothing
that the trace shows, is not slow launching.

## What to do

Raise the batch size as far as memory allows. Fuse operations with `torch.compile`, or replay steps
as CUDA graphs. Move logging and metrics out of the step.

## Where it is blind

Between two device samples the order of idle and busy is unknown: kernel rates, which would decide
it, are not recorded. Without stacks, anything else that keeps the main thread computing inside the
step, such as a metric on the CPU, looks alike; with stacks, only code that keeps releasing the
interpreter lock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    measure_host_work,
    measure_main_thread,
    name_host_functions,
    select_phases,
    sum_claimed_ns,
)
from clusterprof.analysis.detectors.pauses import measure_own_code
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
        busy_at_least_ratio: float = 0.8
        """From this share on its short sleeps between launches count as launching too."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim time of the main thread on a CPU inside steps."""
        gaps = rank.main.get_spans(StarvedSpans)
        if gaps is not None:
            return _measure_traced_gaps(rank, gaps, lost)
        inside = select_phases(lost, PHASE_COMPUTE) & (lost.step != 0)
        if not inside.any():
            return Claims(np.zeros(inside.size), "B")
        on_cpu = np.nan_to_num(measure_main_thread(rank, "on_cpu_ns", lost, inside))
        runnable = np.nan_to_num(measure_main_thread(rank, "run_delay_ns", lost, inside))
        active = on_cpu + runnable
        launching = np.where(active >= limits.busy_at_least_ratio, 1.0 - runnable, on_cpu)
        launching = np.maximum(launching - measure_own_code(rank, lost), 0.0)
        share = np.where(active >= limits.active_at_least_ratio, launching, 0.0)
        evidence = (
            Evidence(
                "thread.on_cpu_ratio",
                compute_claimed_mean(lost, share),
                "ratio",
                "of that time, the main thread was busy on a CPU",
            ),
        )
        return Claims(share, "B", evidence)


def _measure_traced_gaps(rank: Rank, gaps: StarvedSpans, lost: LostTime) -> Claims:
    """Claim the time in which a trace of kernels shows an idle device and no launched kernel."""
    inside = select_phases(lost, PHASE_COMPUTE)
    late, launching = allocate_span_amounts(
        gaps, lost.start_ns, lost.end_ns, late=None, launching=gaps.launching_ns
    )
    part = np.where(inside, launching / np.maximum(lost.lost_ns, 1), 0.0)
    in_model = measure_host_work(rank, lost, layout.RUNNING_MODEL)
    share = np.minimum(part + in_model, 1.0)
    ratio = compute_claimed_mean(lost, share, np.minimum(launching / np.maximum(late, 1.0), 1.0))
    note = "of those gaps, the host was launching, with pauses of at most a millisecond"
    evidence = [Evidence("host.launching_ratio", ratio, "ratio", note)]
    if in_model.any():
        evidence += name_host_functions(rank, lost, share, layout.RUNNING_MODEL)
        note = "of that time, the host was in operators and functions that launched nothing"
        ratio = sum_claimed_ns(lost, in_model) / max(sum_claimed_ns(lost, share), 1.0)
        evidence.append(Evidence("host.between_launches_ratio", min(ratio, 1.0), "ratio", note))
    return Claims(share, "A", tuple(evidence))
