"""The CPU is busy preparing data.

## What it sees

Lost time in which the host waited for a batch, and the thread that was making that batch was
computing: decoding, augmenting, tokenizing, collating.

## Why the GPU waits

Preparing a batch costs more CPU time than the workers have within the time of a step. Each worker
makes one batch at a time, so batches arrive only as fast as all workers together compute.

## How it decides

It examines the worker that owned the awaited batch (the main thread if it loads the data itself).
Its share is the part of that thread's time spent on a CPU, without the kernel's work on reads from
a device. The thread reports its own CPU time with each batch, in addition to the kernel's count for
that thread. Time in which a finished batch is delayed because the worker's interpreter is busy with
the next one counts too, and so does time in which the training thread itself computes in the loader
while no worker works on the awaited batch: a sampler that draws the next indices, or the unpickling
of the batch. In a trace with stacks the time counts in which the training thread itself was in
functions that prepare data (by file and name: `preprocess`, `collate`, `torchvision`), and its
device had nothing to do. In a job without a known data loader, the time counts in which the
training thread computed and the GPU did nothing for whole samples, or in which sampled stacks show
functions outside of PyTorch that keep the interpreter lock (grade C). Where the training thread
waits inside a step for another process or thread of the job (a file, a pipe, a connection, a lock,
a loop that polls), what that computed counts: grade B if it works on request, or its output is what
the training process reads; C if it was the only one active in waits that are known to be for the
job. If workers are idle most of the time and a larger prefetch would have let them make the batch
ahead of time, it is `cpu-loader-config`. If affinity or a cpuset allows the rank fewer CPUs than
the node has, the evidence says how many, and how many cores those are: two busy hyper-threads do
little more work than one.

## What to do

If CPUs are free, add workers. If not, do the work once instead of in every epoch (decode and resize
ahead, cache), use a cheaper transform, or move it to the GPU. If one worker has most of the work
(`worker.balance_ratio`), divide the shards evenly. If the training thread computes itself
(`loader.own_work_ratio`), draw the indices of an epoch at once.

## Where it is blind

Without sampled stacks it cannot name the function. Threads that a library starts inside the
worker (OpenCV, BLAS) count for the worker only while it waits for them on a CPU. The kernel divides
user and system time by ticks, scaled to the thread's whole lifetime: a main thread that computed
for a long time and then loads data itself shows part of its reads' CPU time here (measured: 1 to 4
points).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.awaited_work import (
    BUSY,
    AwaitedWork,
    find_awaited_input,
    find_awaited_work,
)
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    describe_allowed_cpus,
    estimate_compute_wait,
    estimate_handover_delay,
    measure_host_work,
    name_host_functions,
    sum_claimed_ns,
)
from clusterprof.analysis.detectors.pauses import find_whole_pauses, has_loader, measure_own_code
from clusterprof.analysis.timeline.data_wait.split import count_live_workers, select_fetches
from clusterprof.analysis.timeline.host_resources import combine_allowed_cpus, get_cpu_topology
from clusterprof.analysis.timeline.model import DataWaitBreakdown, Float, Int, LostTime, Rank
from clusterprof.probe import layout
from clusterprof.report.model import UNKNOWN_RESOURCE, Cause, Evidence, Grade, ResourceFacts

_MIN_FETCHES = 16
"""Number of batches of a worker that show how much work it has."""


class CpuPreprocess:
    """Claims the time in which the awaited batch was being computed."""

    cause = Cause(
        "cpu-preprocess",
        "cpu",
        "The CPU is busy preparing data",
        "Add dataloader workers if CPUs are free, else prepare the data ahead or more cheaply",
        precedence=510,
        hidden_cost="batch",
        trace_spans=(layout.LOADING,),
        manual_check=(
            "`top -H -p WORKER`: its main thread near 100 % while the GPU waits; `py-spy record -d "
            "30 --pid WORKER` names the functions. Iterate the DataLoader alone, without a model: "
            "batches per second must be those of training."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a wait for computation."""

        on_cpu_at_least_ratio: float = 0.02
        """A smaller share of a segment is noise of the clocks it is measured with."""
        nothing_launched_at_least_ns: int = 90_000_000
        """Time for which the GPU must have nothing to do where the training loop itself prepares
        the data: less may be slow launching.
        """

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim time of the critical thread on a CPU in user code."""
        computed, avoidable = estimate_compute_wait(rank, lost, breakdown)
        share = computed - avoidable + estimate_handover_delay(rank, lost, breakdown, "user_ns")
        share[share < limits.on_cpu_at_least_ratio] = 0.0
        if not has_loader(rank):
            in_loop = np.maximum(
                find_whole_pauses(rank, lost, limits.nothing_launched_at_least_ns),
                measure_own_code(rank, lost),
            )
            # A loop that polls without a pause computes while it waits; all others sleep then.
            polls = any(work.wait_reason == BUSY for work in find_awaited_work(rank, lost))
            total_share = np.maximum(in_loop, share) if polls else np.minimum(in_loop + share, 1.0)
            if sum_claimed_ns(lost, in_loop) > sum_claimed_ns(lost, share):
                return _claim_training_loop(lost, total_share)
            share = total_share
        traced = measure_host_work(rank, lost, layout.PREPARING_DATA)
        if sum_claimed_ns(lost, traced) > sum_claimed_ns(lost, share):
            return _claim_traced_functions(rank, lost, share, traced)
        share = share + traced
        if not share.any():
            return Claims(share, "B")
        awaited = find_awaited_input(rank, lost)
        if awaited is not None and 2 * sum_claimed_ns(lost, awaited.active_share) > sum_claimed_ns(
            lost, share
        ):
            return _claim_awaited_process(lost, share, awaited)
        pids = np.unique(breakdown.worker_pid[(share > 0) & (breakdown.worker_pid > 0)])
        evidence = (
            Evidence(
                "worker.on_cpu_ratio",
                compute_claimed_mean(lost, share),
                "ratio",
                "of the waits, the loading thread was computing",
            ),
            *_describe_own_work(rank, lost, breakdown, share),
            *_count_workers(rank),
            *_measure_balance(rank),
            *_describe_affinity(rank),
        )
        return Claims(share, "A", evidence, *_name_loading_process(rank, pids))


def _name_loading_process(rank: Rank, pids: Int) -> tuple[str, ResourceFacts]:
    """Name the process that made the claimed batches; "" if several did, or it is not known."""
    if _has_unknown_workers(rank):
        return "" if rank.rank is None else f"loader of rank {rank.rank}", UNKNOWN_RESOURCE
    if pids.size != 1:
        return "", UNKNOWN_RESOURCE
    pid = int(pids[0])
    if pid == rank.pid:
        return f"training process pid {pid}", ResourceFacts("training-process", pid=pid)
    return f"worker pid {pid}", ResourceFacts("worker", pid=pid)


def _claim_training_loop(lost: LostTime, share: Float) -> Claims:
    """Claim what the training thread computed while the GPU had no work, in a job without a loader.

    That it prepares data is inferred, not seen.
    """
    note = "of that time the main thread computed and the GPU had no work; no data loader is known"
    ratio = compute_claimed_mean(lost, share)
    evidence = (Evidence("thread.on_cpu_ratio", ratio, "ratio", note),)
    return Claims(share, "C", evidence, "the training thread")


def _claim_awaited_process(lost: LostTime, share: Float, awaited: AwaitedWork) -> Claims:
    """Claim what another process or thread of the job computed while the step waited for it."""
    note = f"of that time the training thread waited for {awaited.resource}"
    waiting = Evidence(
        "awaited.waiting_ratio", compute_claimed_mean(lost, share, awaited.share), "ratio", note
    )
    ratio = compute_claimed_mean(lost, share, share / np.maximum(awaited.share, 1e-9))
    note = "of these waits that process or thread was computing"
    computing = Evidence("awaited.on_cpu_ratio", min(ratio, 1.0), "ratio", note)
    grade: Grade = "B" if awaited.is_sure else "C"
    evidence = (computing, waiting)
    return Claims(share, grade, evidence, awaited.resource, awaited.resource_facts)


def _claim_traced_functions(rank: Rank, lost: LostTime, share: Float, traced: Float) -> Claims:
    """Claim what functions of the training thread itself did, as a trace with stacks names them."""
    note = "of that time, the training thread itself was in functions that prepare data"
    ratio = compute_claimed_mean(lost, traced)
    evidence = (
        *name_host_functions(rank, lost, traced, layout.PREPARING_DATA),
        Evidence("host.preparing_ratio", ratio, "ratio", note),
    )
    return Claims(share + traced, "A", evidence, "the training thread")


def _has_unknown_workers(rank: Rank) -> bool:
    """Return whether worker count and pids are unknown, as in imported traces without workers."""
    return not rank.workers and "importer" in rank.chunk.header.versions


def _describe_own_work(
    rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, share: Float
) -> list[Evidence]:
    """Describe what the training thread itself computed in waits for its workers."""
    own_share = np.where(breakdown.worker_pid == rank.pid, share, 0.0)
    if not rank.workers or not own_share.any():
        return []
    note = "of the waits, the training thread itself computed in the loader, not a worker"
    ratio = compute_claimed_mean(lost, share, own_share)
    return [Evidence("loader.own_work_ratio", ratio, "ratio", note)]


def _measure_balance(rank: Rank) -> list[Evidence]:
    """Measure how evenly the workers of the loader share the work.

    Batches are awaited in turn, so the busiest worker sets the pace.
    """
    loads_ns = []
    for worker in rank.workers:
        fetches = select_fetches(worker)
        if fetches is None or fetches.start_ns.size < _MIN_FETCHES:
            continue
        cpu_ns = fetches.user_cpu_ns + fetches.system_cpu_ns
        if (fetches.user_cpu_ns < 0).any() or (fetches.system_cpu_ns < 0).any():
            return []
        loads_ns.append(float(cpu_ns.mean()))
    # Workers of finished epochs did another part of the data.
    if len(loads_ns) < 2 or len(loads_ns) != count_live_workers(rank.workers):
        return []
    ratio = sum(loads_ns) / len(loads_ns) / max(*loads_ns, 1.0)
    note = "load of the workers, the mean of all compared with the busiest"
    return [Evidence("worker.balance_ratio", ratio, "ratio", note)]


def _count_workers(rank: Rank) -> list[Evidence]:
    if _has_unknown_workers(rank):
        return []
    count = float(count_live_workers(rank.workers))
    return [Evidence("loader.workers_count", count, "count", "on this rank")]


def _describe_affinity(rank: Rank) -> list[Evidence]:
    """Describe the allowed CPUs if they are fewer than the node has.

    More workers may then find no free CPU.
    """
    topology = get_cpu_topology(rank.chunk)
    allowed = combine_allowed_cpus((rank.main, *rank.workers), topology)
    if not allowed or allowed == topology.online:
        return []
    return [
        describe_allowed_cpus(len(allowed), topology.count_cores(allowed), len(topology.online))
    ]
