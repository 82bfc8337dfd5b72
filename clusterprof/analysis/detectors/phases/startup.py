"""The job is starting up.

## What it sees

Time before the first step, reported outside the steps; and inside steps the lost time of the first
one: workers that did not exist yet, compilation, warm-up.

## Why the GPU waits

Importing, building the model, loading a checkpoint, starting workers and compiling kernels happen
once, and nothing trains meanwhile.

## How it decides

Outside the steps it is the time from the first record of the process to the first wait for data
or the first step. Inside, its share is the part of a wait of the first step in which the worker did
not exist, lost time of the first step outside any wait, and the whole of a lost piece inside a
compilation in one of the first ten steps. Where no wait for data is marked, nothing is outside the
waits for sure. Where operations with other ranks are not marked, a main thread that sleeps may wait
for another that starts: that is not claimed, but asked of all ranks.

## What to do

Use a prebuilt image, keep the compile cache, load checkpoints in parallel. For short jobs start-up
is what a warm pool of machines saves.

## Where it is blind

Compilers other than `torch.compile` are seen only where they are marked. A recording that was
attached later has no start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.detectors.base import Claims, in_phase, mean_over, waited
from clusterprof.findings import Cause, Evidence
from clusterprof.probe.layout import DATA_WAIT
from clusterprof.timeline.model import (
    PHASE_COMPUTE,
    PHASE_NONE,
    PHASE_STARTUP,
    Feeding,
    Lost,
    Rank,
)


class Startup:
    """Claims what the first step loses to things that happen once."""

    cause = Cause(
        "startup",
        "startup",
        "The job is starting up",
        "Use a prebuilt image and a compile cache, and load checkpoints in parallel",
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """What still counts as the start."""

        first_steps_count: int = 1
        """So many steps are warm-up."""
        compiling_steps_count: int = 10
        """Compilation in so many steps belongs to the start; later it is `launch-recompile`."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim compilation, warm-up of the first step, and workers that were being started."""
        first = (lost.step >= 0) & (lost.step < limits.first_steps_count)
        compiled = in_phase(lost, PHASE_STARTUP) & (lost.step < limits.compiling_steps_count)
        very_first = lost.step == 0
        if not (first.any() or very_first.any() or compiled.any()):
            return Claims(np.zeros(first.size), "B")
        share = np.where(very_first, waited(lost, feeding.no_worker), 0.0)
        outside_waits = in_phase(lost, PHASE_COMPUTE, PHASE_NONE)
        if _waits_known(rank):
            share[first & outside_waits] = 1.0
        share[compiled] = 1.0
        evidence = (
            Evidence(
                "startup.share_ratio",
                mean_over(lost, share),
                "ratio",
                "of those pieces of the first step happened once",
            ),
        )
        return Claims(share, "B", evidence if share.any() else ())


def _waits_known(rank: Rank) -> bool:
    """Return whether lost time outside every wait is known to be: waits for data were marked."""
    return rank.main.spans.get(DATA_WAIT) is not None
