"""The loader is set up too small.

## What it sees

Lost time in which the host waited for a batch, and the worker that owned it had not been given it
yet, was only just being started, or was making a dear batch that idle workers could have made
ahead.

## Why the GPU waits

With few workers or a short prefetch nobody works ahead: while the GPU computes, the loader rests,
and when it is asked, the GPU rests. Workers that are not persistent are started anew in every
epoch.

## How it decides

Its share is the part of the wait in which the owning worker was between two fetches without work,
and, after the first step, the part in which it did not exist. Neither a disk nor a CPU held anybody
up then. Where workers rest for more than half of the time, the part in which the batch was being
computed counts too, as far as four batches ahead per worker would have saved it: what these took to
make, by all workers together, against the time in which they were used.

## What to do

Raise `num_workers` towards the number of cores per GPU, `prefetch_factor` to 2 to 4, and set
`persistent_workers=True`.

## Where it is blind

With `num_workers=0` the main process loads between steps by construction; what it does while
loading is then named instead (reading, computing). A batch that is ready and on its way to the main
process is not claimed: it shows as "hand-over" under Unattributed. Loaders other than PyTorch's are
seen only as far as spans are marked for them. Batches that are dear because of a slow disk count
for the disk, however idle the workers are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.detectors.base import Claims, computing, mean_over, waited
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.model import Feeding, Float, Lost, Rank


class CpuLoaderConfig:
    """Claims the time in which nobody worked on the awaited batch."""

    cause = Cause(
        "cpu-loader-config",
        "cpu",
        "The loader is set up too small",
        "Raise num_workers and prefetch_factor, and keep workers with persistent_workers=True",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts against the set-up of the loader."""

        idle_at_least_ratio: float = 0.02
        """A smaller part of a piece is the ordinary hand-over of a batch."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim time in which the owning worker had nothing to do with the batch."""
        absent = np.where(lost.step == 0, 0.0, feeding.no_worker)
        _, spared = computing(rank, lost, feeding)
        idle = waited(lost, feeding.no_work + absent)
        share = idle + spared
        share[share < limits.idle_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        evidence = (
            Evidence(
                "worker.without_work_ratio",
                mean_over(lost, share, idle),
                "ratio",
                "of the waits, no worker was working on the awaited batch",
            ),
            *_not_ahead(lost, share, spared),
            Evidence(
                "loader.workers_count",
                float(len(rank.workers)),
                "count",
                "dataloader workers of the rank",
            ),
        )
        return Claims(share, "B", evidence)


def _not_ahead(lost: Lost, share: Float, spared: Float) -> list[Evidence]:
    """Say it only where it is so."""
    if not spared.any():
        return []
    ratio = mean_over(lost, share, spared)
    note = "of the waits, the batch would have been ready had idle workers worked further ahead"
    return [Evidence("worker.not_ahead_ratio", ratio, "ratio", note)]
