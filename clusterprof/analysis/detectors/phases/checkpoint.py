"""Training stands still for a checkpoint.

## What it sees

Lost time in which the training process was saving a checkpoint.

## Why the GPU waits

A synchronous save copies the state to the host, serialises it and writes it, all before the next
step may begin.

## How it decides

Its share is the whole of a lost piece inside a save that the probe has marked. The phase beats the
resource: a save that waits for the disk is a checkpoint, not storage.

## What to do

Snapshot to host memory and write in the background (asynchronous checkpointing), write to a local
disk first, shard the state over the ranks, or save less often.

## Where it is blind

Formats written without `torch.save` and without a mark (`clusterprof.span("checkpoint")`) look like
part of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.detectors.base import Claims, in_phase
from clusterprof.findings import Cause, Evidence
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_CHECKPOINT, Feeding, Lost, Rank


class Checkpoint:
    """Claims the time inside marked saves."""

    cause = Cause(
        "checkpoint",
        "checkpoint",
        "Training stands still for a checkpoint",
        "Save asynchronously: snapshot to host memory, write in the background",
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a save counts."""

        save_at_least_ns: int = 0
        """A shorter lost piece is left unattributed; 0 = none is too short."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim every lost piece inside a save."""
        inside = in_phase(lost, PHASE_CHECKPOINT)
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
