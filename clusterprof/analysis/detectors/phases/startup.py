"""The job is starting up.

## What it sees

Time before the first step, reported outside the steps, and lost time in the first step: workers
that did not exist yet, compilation, warm-up.

## Why the GPU waits

Importing, building the model, loading a checkpoint, starting workers and compiling kernels happen
once, and nothing trains during that time.

## How it decides

Outside the steps it is the time from the first record of the process to the first wait for data or
the first step. Inside steps, three parts count: the part of a wait of the first step in which the
worker did not exist; lost time of the first step outside any wait; and the whole of a lost segment
inside a compilation in one of the first ten steps. If
waits for data have no spans, no time is known to be outside such waits. If operations with other
ranks have no spans, a sleeping main thread may wait for another rank that is starting: that time is
not claimed here, but decided from all ranks.

## What to do

Use a prebuilt image, keep the compile cache, load checkpoints in parallel. For short jobs, a warm
pool of machines saves the start-up time.

## Where it is blind

Compilers other than `torch.compile` are seen only if they have spans. A recording that was attached
later has no start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    limit_to_data_wait,
    select_phases,
)
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_NONE,
    PHASE_STARTUP,
    DataWaitBreakdown,
    LostTime,
    Rank,
)
from clusterprof.probe.layout import DATA_WAIT
from clusterprof.report.model import Cause, Evidence


class Startup:
    """Claims the lost time of the first step caused by work that happens once."""

    cause = Cause(
        "startup",
        "startup",
        "The job is starting up",
        "Use a prebuilt image and a compile cache, and load checkpoints in parallel",
        precedence=110,
        always_traced=True,
        manual_check=(
            "`python -X importtime TRAIN.py` up to the first step; timestamps of the first lines "
            "of the log; `TORCH_LOGS=+dynamo` for compilation."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits of the start-up phase."""

        first_steps_count: int = 1
        """Number of steps that count as warm-up."""
        compiling_steps_count: int = 10
        """Number of first steps in which compilation belongs to start-up; later it is
        `launch-recompile`.
        """

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim compilation, warm-up of the first step, and time in which workers started."""
        first = (lost.step >= 0) & (lost.step < limits.first_steps_count)
        compiled = select_phases(lost, PHASE_STARTUP) & (lost.step < limits.compiling_steps_count)
        in_step_zero = lost.step == 0
        if not (first.any() or in_step_zero.any() or compiled.any()):
            return Claims(np.zeros(first.size), "B")
        share = np.where(in_step_zero, limit_to_data_wait(lost, breakdown.no_worker), 0.0)
        outside_waits = select_phases(lost, PHASE_COMPUTE, PHASE_NONE)
        if _has_data_wait_spans(rank):
            share[first & outside_waits] = 1.0
        share[compiled] = 1.0
        evidence = (
            Evidence(
                "startup.share_ratio",
                compute_claimed_mean(lost, share),
                "ratio",
                "of that lost time of the first step was work that happens once",
            ),
        )
        return Claims(share, "B", evidence if share.any() else ())


def _has_data_wait_spans(rank: Rank) -> bool:
    """Return whether waits for data have spans, so that time outside every wait is known."""
    return rank.main.spans.get(DATA_WAIT) is not None
