"""Python collects garbage in the training process.

## What it sees

Lost time in which the training process was inside Python's garbage collector and was not waiting
for a worker.

## Why the GPU waits

A full collection visits every object that may be part of a cycle. With millions of objects it takes
hundreds of milliseconds, in which no kernel is launched and no batch is loaded.

## How it decides

The interpreter reports the start and end of every collection. Its share is the whole of a lost
segment inside a collection. A collection during a wait for a worker costs nothing by itself; that
time counts as the wait, unless the process loads its data itself.

## What to do

After building model and data set, call `gc.collect()` and `gc.freeze()`. Then switch automatic
collection off and call `gc.collect()` every few hundred steps, at the same step on all ranks.

## Where it is blind

Collections inside dataloader workers count as compute time of the worker. Freeing a large structure
by reference counts is not a collection and is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import Claims, select_phases
from clusterprof.analysis.timeline.model import PHASE_GC, DataWaitBreakdown, LostTime, Rank
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence


class CpuGc:
    """Claims the time inside Python's garbage collector."""

    cause = Cause(
        "cpu-gc",
        "cpu",
        "Python collects garbage in the training process",
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
        """Claim every lost segment inside a collection."""
        inside = select_phases(lost, PHASE_GC)
        if not inside.any():
            return Claims(np.zeros(inside.size), "A")
        inside &= lost.end_ns - lost.start_ns >= limits.collection_at_least_ns
        evidence = []
        table = rank.main.spans.get(layout.GC)
        if inside.any() and table is not None:
            length = float((table.end_ns - table.start_ns).mean())
            evidence.append(Evidence("gc.mean_ns", length, "ns", "a collection took on average"))
        return Claims(inside.astype(float), "A", tuple(evidence))
