"""Training stands still for a checkpoint.

## What it sees

Lost time in which the training process was saving a checkpoint.

## Why the GPU waits

A synchronous save copies the state to the host, serializes it and writes it before the next step
may begin.

## How it decides

Its share is the whole of a lost segment inside a save that has a span. The phase takes precedence
over the resource: a save that waits for the disk is a checkpoint, not storage.

## What to do

Snapshot to host memory and write in the background (asynchronous checkpointing), write to a local
disk first, shard the state over the ranks, or save less often.

## Where it is blind

Formats written without `torch.save` and without a span (`clusterprof.span("checkpoint")`) look like
part of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import Claims, select_phases
from clusterprof.analysis.timeline.model import PHASE_CHECKPOINT, DataWaitBreakdown, LostTime, Rank
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence


class Checkpoint:
    """Claims the time inside saves that have a span."""

    cause = Cause(
        "checkpoint",
        "checkpoint",
        "Training stands still for a checkpoint",
        "Save asynchronously: snapshot to host memory, write in the background",
        precedence=120,
        hidden_cost="pause",
        trace_spans=(layout.CHECKPOINT,),
        manual_check=(
            "time `torch.save` (or your own save) around its call; `nvidia-smi dmon -s u`: no use "
            "of the GPU meanwhile."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a save."""

        save_at_least_ns: int = 0
        """A shorter lost segment is left unattributed; 0 = none is too short."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim every lost segment inside a save."""
        inside = select_phases(lost, PHASE_CHECKPOINT)
        if not inside.any():
            return Claims(np.zeros(inside.size), "A")
        inside &= lost.end_ns - lost.start_ns >= limits.save_at_least_ns
        evidence = []
        table = rank.main.spans.get(layout.CHECKPOINT)
        if inside.any() and table is not None:
            length = float((table.end_ns - table.start_ns).mean())
            evidence.append(Evidence("checkpoint.mean_ns", length, "ns", "a save took on average"))
            known = table.a[table.a >= 0]
            if known.size:
                evidence.append(
                    Evidence(
                        "checkpoint.mean_bytes",
                        float(known.mean()),
                        "bytes",
                        "a save wrote on average",
                    )
                )
        return Claims(inside.astype(float), "A", tuple(evidence))
