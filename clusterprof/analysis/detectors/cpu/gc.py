"""Python collects garbage.

## What it sees

Lost time in which the training process was inside Python's garbage collector and was not waiting
for a worker, or in which the worker that it waited for was.

## Why the GPU waits

A full collection visits every object that may be part of a cycle. With millions of objects it takes
hundreds of milliseconds, in which no kernel is launched and no batch is loaded.

## How it decides

The interpreter reports the start and end of every collection. Its share is the whole of a lost
segment inside a collection. A collection during a wait for a worker costs nothing by itself; that
time counts as the wait, unless the process loads its data itself. A collection in the worker that
owns the awaited batch delays that batch: its part of the worker's CPU time counts.

## What to do

After building model and data set, call `gc.collect()` and `gc.freeze()`. Then switch automatic
collection off and call `gc.collect()` every few hundred steps, at the same step on all ranks. In a
worker of a loader: the same in `worker_init_fn`, or after the data set has built its index.

## Where it is blind

Collections of a worker that carries no probe count as its compute time. Freeing a large structure
by reference counts is not a collection and is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    limit_to_data_wait,
    select_phases,
    sum_claimed_ns,
)
from clusterprof.analysis.timeline.data_wait.fetches import estimate_collection_share
from clusterprof.analysis.timeline.model import PHASE_GC, DataWaitBreakdown, LostTime, Rank
from clusterprof.probe import layout
from clusterprof.report.model import UNKNOWN_RESOURCE, Cause, Evidence, ResourceFacts


class CpuGc:
    """Claims the time inside Python's garbage collector."""

    cause = Cause(
        "cpu-gc",
        "cpu",
        "Python collects garbage",
        "Freeze long-lived objects with gc.freeze() and collect at planned steps only",
        precedence=560,
        tone=1,
        hidden_cost="interval",
        trace_spans=(layout.GC,),
        manual_check=(
            "`gc.callbacks` or `gc.set_debug(gc.DEBUG_STATS)` in the training process: how long "
            "collections take and when. With `gc.disable()` for some steps the pauses must "
            "disappear."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a collection."""

        collection_at_least_ns: int = 0
        """A shorter lost segment is left unattributed; 0 = none is too short."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim every lost segment inside a collection, and waits for a worker that collects."""
        inside = select_phases(lost, PHASE_GC)
        inside &= lost.end_ns - lost.start_ns >= limits.collection_at_least_ns
        share = inside.astype(float)
        collecting = limit_to_data_wait(
            lost, estimate_collection_share(rank, lost.start_ns, lost.end_ns, breakdown)
        )
        pid, resource, facts = rank.pid, "", UNKNOWN_RESOURCE
        evidence = []
        if sum_claimed_ns(lost, collecting) > sum_claimed_ns(lost, share):
            pids = np.unique(breakdown.worker_pid[collecting > 0])
            pid = int(pids[0])
            if pids.size == 1:
                resource, facts = f"worker pid {pid}", ResourceFacts("worker", pid=pid)
            note = "of the waits, the worker of the loader collected garbage"
            ratio = compute_claimed_mean(lost, collecting)
            evidence.append(Evidence("worker.collecting_ratio", ratio, "ratio", note))
        table = rank.chunk.processes[pid].spans.get(layout.GC)
        share = share + collecting
        if share.any() and table is not None:
            length = float((table.end_ns - table.start_ns).mean())
            evidence.append(Evidence("gc.mean_ns", length, "ns", "a collection took on average"))
        return Claims(share, "A", tuple(evidence), resource, facts)
