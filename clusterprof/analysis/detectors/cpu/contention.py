"""Threads wait for a free CPU.

## What it sees

Lost time in which the thread that the GPU depended on was ready to run but had no CPU: the worker
that was making the awaited batch, or the main thread while it launched work. Time in which other
ranks wait in an operation for this rank counts too.

## Why the GPU waits

Another thread was on the CPU: other workers of the job, its own library threads, another job on the
node, or a hypervisor. The loader looks slow although none of its own work is slow.

## How it decides

Its share is the part of that thread's time that the scheduler counted as "runnable, not running"
(`/proc/<pid>/task/<tid>/schedstat`, second number), without the
part in which the CPU quota of the cgroup had run out. That part is `cpu-throttled`. The evidence is
the CPU pressure in those intervals. Where no device was measured, such time of the training thread
is lost wherever it lies in a step.

A read that takes long because its reader, although woken, gets no CPU counts here and not as
storage, however slow the file system looks to the program.

If affinity or a cpuset allows processes of the rank fewer CPUs than they would have kept busy and
than the node has, the culprit is called `affinity`: eight workers bound to one CPU need eight and
get one. Time stolen by a hypervisor, from 2 % on, and time of the kernel's own threads (ksoftirqd,
kworker, …), from a tenth of a CPU on, are evidence.

## What to do

Request more cores, or use fewer workers and fewer library threads (`OMP_NUM_THREADS`) than there
are cores for this job. Pin the job to cores of its own. Find the other job. With `affinity`: check
`srun --cpus-per-task` and `--cpu-bind` (Slurm 22.05 and later do not pass `--cpus-per-task` of
`sbatch` on to `srun`), `taskset`, `numactl`, and the container's cpuset.

## Where it is blind

It cannot say which thread was on the CPU. Waiting for the interpreter's lock is not run delay and
shows as "blocked on something unseen". Affinity is that of each process's main thread. Two
hyper-threads of a core count as two CPUs, although both busy do little more work than one: then no
thread waits, and the work itself takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.analysis.detectors.awaited_work import list_awaited_work
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    describe_allowed_cpus,
    find_busiest_device,
    measure_claimed_growth,
    measure_pressure,
    measure_runnable,
    measure_throttling,
    sum_claimed_ns,
)
from clusterprof.analysis.timeline.host_resources import CpuSetLoad, find_tightest_cpu_set
from clusterprof.analysis.timeline.model import (
    SOURCE_HOST_SPANS,
    DataWaitBreakdown,
    Float,
    LostTime,
    Rank,
)
from clusterprof.report.model import Cause, Evidence, ResourceFacts


class CpuContention:
    """Claims the time in which the critical thread was runnable and had no CPU."""

    cause = Cause(
        "cpu-contention",
        "cpu",
        "Threads wait for a free CPU",
        "Give the job more cores, or run fewer workers and library threads on those it has",
        precedence=530,
        can_be_node_fault=True,
        tone=1,
        hidden_cost="batch",
        manual_check=(
            "`cat /proc/TID/schedstat` of the loading thread twice: the second number, nanoseconds "
            "ready without a CPU, rises; `vmstat 1`: `r` above the number of CPUs; `taskset -cp "
            "PID`: which CPUs it may use."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for contention."""

        runnable_at_least_ratio: float = 0.02
        """A smaller share of a segment is normal scheduling delay."""
        stolen_at_least_ratio: float = 0.02
        """If less of the node's CPU time is stolen by a hypervisor, it is not reported."""
        kernel_at_least_ratio: float = 0.1
        """If the kernel's own threads take less of one CPU, they are not reported."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim run delay that the CPU quota does not explain."""
        delay = measure_runnable(rank, lost, breakdown)
        # Without a device the time in which the thread did not run is the loss itself.
        scale = (lost.end_ns - lost.start_ns) / np.maximum(lost.lost_ns, 1)
        delay = np.where(lost.source == SOURCE_HOST_SPANS, np.minimum(delay * scale, 1.0), delay)
        share = np.maximum(delay - measure_throttling(rank, lost, delay > 0), 0.0)
        share[share < limits.runnable_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        waiting = Evidence(
            "thread.runnable_ratio",
            compute_claimed_mean(lost, share),
            "ratio",
            "of that time, the thread was ready to run and had no CPU",
        )
        note = "of that time, some task of the node waited for a CPU"
        grade, pressure_evidence = measure_pressure(
            rank, signals.PRESSURE_CPU_SOME, lost, share, note
        )
        rows = np.flatnonzero(share > 0)
        cpu_set = find_tightest_cpu_set(
            rank, int(lost.start_ns[rows].min()), int(lost.end_ns[rows].max())
        )
        if cpu_set is not None and cpu_set.is_limiting:
            evidence = (waiting, *_list_needed_cpus(cpu_set), *pressure_evidence)
            text, facts = _describe_affinity(cpu_set), ResourceFacts("cpu-set")
            return Claims(share, grade, evidence, text, facts)
        other_evidence = [
            *_measure_stolen_time(rank, lost, share, limits.stolen_at_least_ratio),
            *_measure_kernel_threads(rank, lost, share, limits.kernel_at_least_ratio),
        ]
        starved = [
            work
            for work in list_awaited_work(rank, lost)
            if 2 * sum_claimed_ns(lost, work.runnable_share) > sum_claimed_ns(lost, share)
        ]
        evidence = (waiting, *other_evidence, *pressure_evidence)
        if not starved:
            return Claims(share, grade, evidence)
        return Claims(share, grade, evidence, starved[0].resource, starved[0].resource_facts)


def _list_needed_cpus(cpu_set: CpuSetLoad) -> list[Evidence]:
    """List the CPUs that would have been used and the CPUs that affinity allows, as evidence."""
    kept_busy = "CPUs would have been kept busy"
    return [
        Evidence("job.cpus_needed_count", cpu_set.needed, "count", kept_busy),
        describe_allowed_cpus(len(cpu_set.allowed), cpu_set.cores, cpu_set.online),
    ]


def _describe_affinity(cpu_set: CpuSetLoad) -> str:
    threads = f"{cpu_set.workers} workers" if cpu_set.workers > 1 else "threads"
    return f"affinity: {threads} on {len(cpu_set.allowed)} of {cpu_set.online} CPUs"


def _measure_stolen_time(
    rank: Rank, lost: LostTime, share: Float, at_least_ratio: float
) -> list[Evidence]:
    """Measure the part of the node's CPU time that a hypervisor gave to other guests."""
    parts = [
        measure_claimed_growth(rank, signal.name, "all", lost, share) or 0.0
        for signal in (
            signals.CPU_STEAL,
            signals.CPU_USER,
            signals.CPU_SYSTEM,
            signals.CPU_IDLE,
            signals.CPU_IOWAIT,
        )
    ]
    ratio = parts[0] / sum(parts) if parts[0] > 0 else 0.0
    if ratio < at_least_ratio:
        return []
    note = "of the node's CPU time, the hypervisor gave to other guests"
    return [Evidence("cpu.steal_ratio", ratio, "ratio", note)]


def _measure_kernel_threads(
    rank: Rank, lost: LostTime, share: Float, at_least_ratio: float
) -> list[Evidence]:
    """Measure the CPU time of the busiest kind of kernel thread in the claimed segments."""
    family, ns = find_busiest_device(rank, signals.KERNEL_CPU.name, lost, share)
    ratio = ns / max(1.0, float(np.sum((lost.end_ns - lost.start_ns)[share > 0])))
    if not family or ratio < at_least_ratio:
        return []
    note = f"of one CPU was taken by the kernel's {family} threads"
    return [Evidence("kernel.cpu_ratio", ratio, "ratio", note)]
