"""Training stops for a checkpoint.

## What it sees

Lost time in which the training process was saving a checkpoint.

## Why the GPU waits

A synchronous save copies the state to the host, serializes it and writes it before the next step
may begin.

## How it decides

Its share is the whole of a lost segment inside a save that has a span. The phase takes
precedence over the resource: a save that waits for the disk is a checkpoint, not
storage. Without a span, or after its end (an `fsync` of the file that was saved), it is the
time in which the main thread slept in a kernel function of writing (`wchan`), if that
follows a save within 0.3 s, or if the process wrote 16 MiB or more during that time (64 MiB
in a block of less than 0.3 s); the grade of that is B.

## What to do

Snapshot to host memory and write in the background (asynchronous checkpointing), write to a local
disk first, shard the state over the ranks, or save less often.

## Where it is blind

What a save without a span computes and copies before it writes looks like part of a step:
mark it with `clusterprof.span("checkpoint")`. If `wchan` may not be read, blocked writes are
not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    select_phases,
    sum_claimed_ns,
)
from clusterprof.analysis.detectors.phases.blocked_files import (
    estimate_blocked_share,
    select_save_samples,
)
from clusterprof.analysis.timeline.model import PHASE_CHECKPOINT, DataWaitBreakdown, LostTime, Rank
from clusterprof.analysis.timeline.spans import CheckpointSpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence, Grade


class Checkpoint:
    """Claims the time inside saves that have a span."""

    cause = Cause(
        "checkpoint",
        "checkpoint",
        "Training stops for a checkpoint",
        "Save asynchronously: snapshot to host memory, write in the background",
        precedence=120,
        hidden_cost="pause",
        trace_spans=(layout.CHECKPOINT,),
        manual_check=(
            "time `torch.save` (or your own save) around its call; `nvidia-smi dmon -s u`: the GPU "
            "is idle during the save."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a save."""

        save_at_least_ns: int = 0
        """A shorter lost segment is left unattributed; 0 = none is too short."""
        blocked_at_least_ratio: float = 0.02
        """A smaller share of the segments blocked in writing saves is left unattributed."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim every lost segment inside a save."""
        inside = select_phases(lost, PHASE_CHECKPOINT)
        writing = estimate_blocked_share(
            rank, lost, select_save_samples(rank), limits.blocked_at_least_ratio
        )
        if not inside.any() and not writing.any():
            return Claims(np.zeros(inside.size), "A")
        inside &= lost.end_ns - lost.start_ns >= limits.save_at_least_ns
        evidence = []
        saves = rank.main.get_spans(CheckpointSpans)
        if inside.any() and saves is not None:
            # The file is often synced after the span of its save has ended.
            after_ns = sum_claimed_ns(lost, np.where(inside, 0.0, writing))
            length = float((saves.end_ns - saves.start_ns).sum() + after_ns) / saves.start_ns.size
            note = "a save took on average" + (", with the writes after it" if after_ns else "")
            evidence.append(Evidence("checkpoint.mean_ns", length, "ns", note))
            save_bytes = saves.bytes[saves.bytes >= 0]
            if save_bytes.size:
                evidence.append(
                    Evidence(
                        "checkpoint.mean_bytes",
                        float(save_bytes.mean()),
                        "bytes",
                        "a save wrote on average",
                    )
                )
        grade: Grade = "A"
        if writing.any():
            ratio = compute_claimed_mean(lost, writing)
            note = "of that time the main thread was blocked in writing a save"
            evidence.append(Evidence("thread.writing_ratio", ratio, "ratio", note))
            grade = "B" if sum_claimed_ns(lost, writing) > sum_claimed_ns(lost, inside) else "A"
        return Claims(np.maximum(inside, writing), grade, tuple(evidence))
