"""The CPU is busy preparing data.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
computing: decoding, augmenting, tokenising, collating.

## Why the GPU waits

Preparing a batch costs more CPU time than the workers can give within the time of a step. Each
worker makes one batch at a time, so a step is served only as fast as all workers together compute.

## How it decides

It looks at the worker that owned the awaited batch (the main thread when it loads itself). Its
share is the part of that thread's time spent on a CPU, without the kernel's work on reads from a
device. The thread reports its own CPU time with each batch, beside the kernel's count of the same
thread. When a batch is ready and held up because the worker's interpreter is busy with the next
one, that counts too. Where workers rest for most of the time and would have made the batch ahead
had they been allowed to, it is `cpu-loader-config`. Where affinity or a cpuset leaves the rank
fewer CPUs than the node has, evidence says how many, and how many cores those are: two busy
hyper-threads do little more than one.

## What to do

If CPUs are free, add workers. If not, do the work once instead of every epoch (decode and resize
ahead, cache), use a cheaper transform, or move it to the GPU.

## Where it is blind

It cannot name the function; a sampling profiler can. Threads that a library starts inside the
worker (OpenCV, BLAS) count for the worker only while it waits for them on a CPU. The kernel tells
user from system time by ticks, scaled to the thread's whole life: a main thread that computed for
long and then loads by itself shows a part of its reads' CPU time here (measured: 1 to 4 points).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.detectors.base import Claims, computing, cpus_left, hand_over, mean_over
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.crowding import allowed_to, node_cpus
from clusterprof.timeline.model import Feeding, Lost, Rank


class CpuPreprocess:
    """Claims the time in which the awaited batch was being computed."""

    cause = Cause(
        "cpu-preprocess",
        "cpu",
        "The CPU is busy preparing data",
        "Add dataloader workers if CPUs are free, else prepare the data ahead or more cheaply",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts as a wait for computation."""

        on_cpu_at_least_ratio: float = 0.02
        """A smaller part of a piece is noise of the clocks behind it."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim time of the critical thread on a CPU in user code."""
        computed, spared = computing(rank, lost, feeding)
        share = computed - spared + hand_over(rank, lost, feeding, "user_ns")
        share[share < limits.on_cpu_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        pids = np.unique(feeding.worker_pid[(share > 0) & (feeding.worker_pid > 0)])
        evidence = (
            Evidence(
                "worker.on_cpu_ratio",
                mean_over(lost, share),
                "ratio",
                "of the waits, the loading thread was computing",
            ),
            *_workers(rank),
            *_cpus(rank),
        )
        resource = f"worker pid {int(pids[0])}" if pids.size == 1 else ""
        if _no_process_seen(rank):
            resource = f"loader of rank {rank.rank}"
        return Claims(share, "A", evidence, resource)


def _no_process_seen(rank: Rank) -> bool:
    """Of what was imported without workers neither their number nor their pids are known."""
    return not rank.workers and "importer" in rank.chunk.header.versions


def _workers(rank: Rank) -> list[Evidence]:
    if _no_process_seen(rank):
        return []
    count = float(len(rank.workers))
    return [Evidence("loader.workers_count", count, "count", "of the rank")]


def _cpus(rank: Rank) -> list[Evidence]:
    """Said only where there are fewer than the node has: more workers may find none free."""
    cpus = node_cpus(rank.chunk)
    allowed = allowed_to((rank.main, *rank.workers), cpus)
    if not allowed or allowed == cpus.online:
        return []
    return [cpus_left(len(allowed), cpus.cores_among(allowed), len(cpus.online))]
