"""Python collects garbage in the training process.

## What it sees

Lost time in which the training process was inside Python's garbage collector, and was not waiting
for a worker at the same time.

## Why the GPU waits

A full collection visits every object that may be part of a cycle. With millions of them it takes
hundreds of milliseconds, in which no kernel is launched and no batch is loaded.

## How it decides

The interpreter itself reports the start and end of every collection. Its share is the whole of a
lost piece inside one. A collection during a wait for a worker costs nothing by itself and is left
to that wait, unless the process loads its data itself.

## What to do

After building model and data set, call `gc.collect()` and `gc.freeze()`. Then switch automatic
collection off and call `gc.collect()` every few hundred steps, at the same step on all ranks.

## Where it is blind

Collections inside dataloader workers count as computing of the worker. Freeing a large structure
by reference counts is no collection and reports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.detectors.base import Claims, in_phase
from clusterprof.findings import Cause, Evidence
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_GC, Feeding, Lost, Rank


class CpuGc:
    """Claims the time inside Python's garbage collector."""

    cause = Cause(
        "cpu-gc",
        "cpu",
        "Python collects garbage in the training process",
        "Freeze long-lived objects with gc.freeze() and collect at planned steps only",
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a collection counts."""

        collection_at_least_ns: int = 0
        """A shorter lost piece is left unattributed; 0 = none is too short."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim every lost piece inside a collection."""
        inside = in_phase(lost, PHASE_GC)
        if not inside.any():
            return Claims(np.zeros(inside.size), "A")
        inside &= lost.end_ns - lost.start_ns >= limits.collection_at_least_ns
        evidence = []
        table = rank.main.spans.get(layout.GC)
        if inside.any() and table is not None:
            length = float((table.end_ns - table.start_ns).mean())
            evidence.append(Evidence("gc.mean_ns", length, "ns", "a collection took on average"))
        return Claims(inside.astype(float), "A", tuple(evidence))
