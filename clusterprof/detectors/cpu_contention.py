"""There are more threads than CPUs.

## What it sees

Lost time in which the thread that the GPU depended on was ready to run and had no CPU: the worker
that was making the awaited batch, or the main thread while it launches work. Other ranks that wait
for such a rank in an operation wait for the same.

## Why the GPU waits

Somebody else was on the CPU: other workers of the job, its own library threads, a neighbour on the
node, or a hypervisor. The loader looks slow, and no part of its own work is.

## How it decides

Its share is the part of that thread's time that the scheduler counted as "runnable, not running"
(`/proc/<pid>/task/<tid>/schedstat`, second number), less the part in which the CPU quota of the
cgroup had run out, which is `cpu-throttled`. Evidence is the pressure on the CPU in those
intervals.

## What to do

Ask for more cores, or use fewer workers and fewer library threads (`OMP_NUM_THREADS`) than there
are cores for this job. Pin the job to cores of its own. Find the neighbour.

## Where it is blind

It cannot say who was on the CPU. Waiting for the interpreter's lock is no run delay and shows as
"blocked on something unseen".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import Claims, held_back, mean_over, pressure, runnable
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.model import Feeding, Lost, Rank


class CpuContention:
    """Claims the time in which the critical thread was ready and had no CPU."""

    cause = Cause(
        "cpu-contention",
        "cpu",
        "There are more threads than CPUs",
        "Give the job more cores, or run fewer workers and library threads on those it has",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a delay counts as contention."""

        runnable_at_least_ratio: float = 0.02
        """A smaller part of a piece is what every scheduler costs."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim run delay that the quota does not explain."""
        delay = runnable(rank, lost, feeding)
        share = np.maximum(delay - held_back(rank, lost, delay > 0), 0.0)
        share[share < limits.runnable_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        waiting = Evidence(
            "thread.runnable_ratio",
            mean_over(lost, share),
            "ratio",
            "of that time, the thread was ready to run and had no CPU",
        )
        note = "of that time, some task of the node waited for a CPU"
        grade, pressed = pressure(rank, signals.PRESSURE_CPU_SOME, lost, share, note)
        return Claims(share, grade, (waiting, *pressed))
