"""The CPU quota of the job runs out.

## What it sees

Lost time in which the thread that the GPU depended on was ready to run, and the cgroup's CPU quota
had run out.

## Why the GPU waits

A container limit of, say, 8 CPUs means 800 ms of CPU time per 100 ms. Workers that together use it
up early stand still until the next period begins, all of them at once, with idle CPUs beside them.

## How it decides

Its share is the part of the critical thread's time that was "runnable, not running" and in which
`cgroup.throttled_ns_total` rose: the smaller of the two.

## What to do

Raise or remove the CPU limit (in Kubernetes: `resources.limits.cpu`), or run no more workers and
library threads than the quota has CPUs.

## Where it is blind

Quotas of a parent cgroup that is not visible inside the container. The kernel adds throttled time
up over CPUs, so that with many threads the part can be overestimated; it never exceeds the thread's
own delay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import Claims, grown, held_back, mean_over, runnable
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.model import Feeding, Lost, Rank


class CpuThrottled:
    """Claims the time in which the critical thread was held back by the CPU quota."""

    cause = Cause(
        "cpu-throttled",
        "cpu",
        "The CPU quota of the job runs out",
        "Raise or remove the job's CPU limit, or run fewer workers and library threads",
    )
    needs = ("spans", "threads", signals.CGROUP_THROTTLED.name)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a delay counts as throttling."""

        throttled_at_least_ratio: float = 0.02
        """A smaller part of a piece is ignored."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim run delay that the quota explains."""
        delay = runnable(rank, lost, feeding)
        share = np.minimum(delay, held_back(rank, lost, delay > 0))
        share[share < limits.throttled_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        evidence = [
            Evidence(
                "thread.held_back_ratio",
                mean_over(lost, share),
                "ratio",
                "of that time, the thread was ready to run and the quota was used up",
            ),
        ]
        periods = grown(rank, signals.CGROUP_THROTTLED_PERIODS.name, "", lost, share)
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
