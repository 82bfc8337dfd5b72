"""The CPU quota of the job runs out.

## What it sees

Lost time in which the thread that the GPU depended on was ready to run, and the cgroup's CPU quota
had run out.

## Why the GPU waits

A container limit of, for example, 8 CPUs means 800 ms of CPU time per 100 ms. Workers that together
use it up early all stop until the next period begins, although CPUs are idle.

## How it decides

Its share is the part of the critical thread's time that was "runnable, not running" and in which
`cgroup.throttled_ns_total` rose: the smaller of the two.

## What to do

Raise or remove the CPU limit (in Kubernetes: `resources.limits.cpu`), or run no more workers and
library threads than the quota has CPUs.

## Where it is blind

Quotas of a parent cgroup that is not visible inside the container. The kernel sums throttled time
over CPUs, so with many threads the part can be overestimated; it never exceeds the thread's own
delay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    measure_claimed_growth,
    measure_runnable,
    measure_throttling,
)
from clusterprof.analysis.timeline.model import DataWaitBreakdown, LostTime, Rank
from clusterprof.report.model import Cause, Evidence


class CpuThrottled:
    """Claims the time in which the CPU quota stopped the critical thread."""

    cause = Cause(
        "cpu-throttled",
        "cpu",
        "The CPU quota of the job runs out",
        "Raise or remove the job's CPU limit, or run fewer workers and library threads",
        precedence=520,
        tone=3,
        hidden_cost="batch",
        always_traced=True,
        manual_check=(
            "`cat cpu.stat` of the job's cgroup twice: `nr_throttled` and `throttled_usec` rise; "
            "`cat cpu.max`: quota and period."
        ),
    )
    needs = ("spans", "threads", signals.CGROUP_THROTTLED.name)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for throttling."""

        throttled_at_least_ratio: float = 0.02
        """A smaller share of a segment is ignored."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim run delay that the CPU quota explains."""
        delay = measure_runnable(rank, lost, breakdown)
        share = np.minimum(delay, measure_throttling(rank, lost, delay > 0))
        share[share < limits.throttled_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        evidence = [
            Evidence(
                "thread.held_back_ratio",
                compute_claimed_mean(lost, share),
                "ratio",
                "of that time, the thread was ready to run and the quota was used up",
            )
        ]
        periods = measure_claimed_growth(
            rank, signals.CGROUP_THROTTLED_PERIODS.name, "", lost, share
        )
        if periods:
            evidence.append(
                Evidence(
                    "cgroup.throttled_periods_total",
                    periods,
                    "count",
                    "quota periods ran out during that time",
                )
            )
        return Claims(share, "A", tuple(evidence))
