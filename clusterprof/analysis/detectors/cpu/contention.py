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

A read that takes long because its reader, long woken, is not given a CPU counts here and not for
the disk, however slow the file system looks to the program.

Where affinity or a cpuset leaves processes of the rank fewer CPUs than they would have kept busy
and than the node has, the culprit is called `affinity`: eight workers that were bound to one CPU
need eight and get one. Time stolen by a hypervisor, from 2 % on, and time of the kernel's own
threads (ksoftirqd, kworker, …), from a tenth of a CPU on, are evidence.

## What to do

Ask for more cores, or use fewer workers and fewer library threads (`OMP_NUM_THREADS`) than there
are cores for this job. Pin the job to cores of its own. Find the neighbour. With `affinity`: look
at `srun --cpus-per-task` and `--cpu-bind` (Slurm 22.05 and later do not hand `--cpus-per-task` of
`sbatch` on to `srun`), `taskset`, `numactl`, and the container's cpuset.

## Where it is blind

It cannot say who was on the CPU. Waiting for the interpreter's lock is no run delay and shows as
"blocked on something unseen". Affinity is that of each process's main thread. Two hyper-threads of
a core count as two CPUs, though both busy do little more than one: then nobody waits, and the work
itself takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.detectors.base import (
    Claims,
    busiest,
    cpus_left,
    grown,
    held_back,
    mean_over,
    pressure,
    runnable,
)
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.crowding import Crowd, crowd_of
from clusterprof.timeline.model import Feeding, Float, Lost, Rank


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
        stolen_at_least_ratio: float = 0.02
        """With less of the node's CPU time stolen by a hypervisor nothing is said of it."""
        kernel_at_least_ratio: float = 0.1
        """With less of one CPU taken by the kernel's own threads nothing is said of them."""

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
        rows = np.flatnonzero(share > 0)
        crowd = crowd_of(rank, int(lost.start_ns[rows].min()), int(lost.end_ns[rows].max()))
        if crowd is not None and crowd.bound:
            evidence = (waiting, *_needed(crowd), *pressed)
            return Claims(share, grade, evidence, _affinity(crowd))
        others = [
            *_stolen(rank, lost, share, limits.stolen_at_least_ratio),
            *_kernel(rank, lost, share, limits.kernel_at_least_ratio),
        ]
        return Claims(share, grade, (waiting, *others, *pressed))


def _needed(crowd: Crowd) -> list[Evidence]:
    """What affinity left, against what would have been used."""
    kept_busy = "CPUs would have been kept busy"
    return [
        Evidence("job.cpus_needed_count", crowd.needed, "count", kept_busy),
        cpus_left(len(crowd.allowed), crowd.cores, crowd.online),
    ]


def _affinity(crowd: Crowd) -> str:
    who = f"{crowd.workers} workers" if crowd.workers > 1 else "threads"
    return f"affinity: {who} on {len(crowd.allowed)} of {crowd.online} CPUs"


def _stolen(rank: Rank, lost: Lost, share: Float, at_least_ratio: float) -> list[Evidence]:
    """The part of the node's CPU time that a hypervisor gave to somebody else."""
    parts = [
        grown(rank, signal.name, "all", lost, share) or 0.0
        for signal in (
            signals.CPU_STEAL, signals.CPU_USER, signals.CPU_SYSTEM, signals.CPU_IDLE,
            signals.CPU_IOWAIT,
        )
    ]  # fmt: skip
    ratio = parts[0] / sum(parts) if parts[0] > 0 else 0.0
    if ratio < at_least_ratio:
        return []
    note = "of the node's CPU time, the hypervisor gave to others"
    return [Evidence("cpu.steal_ratio", ratio, "ratio", note)]


def _kernel(rank: Rank, lost: Lost, share: Float, at_least_ratio: float) -> list[Evidence]:
    """What the busiest kind of the kernel's own threads took meanwhile."""
    family, ns = busiest(rank, signals.KERNEL_CPU.name, lost, share)
    ratio = ns / max(1.0, float(np.sum((lost.end_ns - lost.start_ns)[share > 0])))
    if not family or ratio < at_least_ratio:
        return []
    note = f"of one CPU was taken by the kernel's {family} threads"
    return [Evidence("kernel.cpu_ratio", ratio, "ratio", note)]
