"""The data loader prefetches too little, or restarts its workers every epoch.

## What it sees

Lost time in which the host waited for a batch in one of three cases: the worker that owned the
batch had not received its task yet; it was only just starting; or it was making an expensive batch
that idle workers could have made ahead of time.

## Why the GPU waits

With few workers or a short prefetch the loader does not work ahead: while the GPU computes the
loader is idle, and when the loader is asked for a batch the GPU is idle. Workers that are not
persistent are started again in every epoch.

## How it decides

Its share is the part of the wait in which the owning worker was between two fetches without work
(`worker.without_work_ratio`), and, after the first step, the part in which the worker did not exist
yet (`worker.starting_ratio`). Neither a disk nor a CPU was
the limit then. If workers are idle for more than half of the time, the part in which the batch was
being computed counts too, as far as prefetching four batches per worker would have saved it. This
follows from the time that all workers together needed to make these batches, and the time in which
they were used.

## What to do

Raise `num_workers` towards the number of cores per GPU, `prefetch_factor` to 2 to 4, and set
`persistent_workers=True`.

## Where it is blind

With `num_workers=0` the main process always loads between steps; its activity while loading is then
named instead (reading, computing). A batch that is ready and in transfer to the main process is not
claimed: it shows as "hand-over" under Unattributed. Loaders other than PyTorch's are seen only as
far as spans are marked for them. Batches that are expensive because of a slow disk count as
storage, however idle the workers are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    estimate_compute_wait,
    limit_to_data_wait,
)
from clusterprof.analysis.timeline.data_wait.split import count_live_workers
from clusterprof.analysis.timeline.model import DataWaitBreakdown, Float, LostTime, Rank
from clusterprof.report.model import Cause, Evidence


class CpuLoaderConfig:
    """Claims the time in which no worker was working on the awaited batch."""

    cause = Cause(
        "cpu-loader-config",
        "cpu",
        "The data loader prefetches too little, or restarts its workers every epoch",
        "Raise num_workers and prefetch_factor, and keep workers with persistent_workers=True",
        precedence=540,
        tone=2,
        hidden_cost="interval",
        manual_check=(
            "`py-spy dump --pid WORKER`: workers idle in `index_queue.get`. Print "
            "`loader.num_workers`, `loader.prefetch_factor`, `loader.persistent_workers`; set "
            "twice as much for some steps."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a wait caused by the loader's configuration."""

        idle_at_least_ratio: float = 0.02
        """A smaller share of a segment is the normal handover of a batch."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim time in which the owning worker was not working on the batch."""
        absent = np.where(lost.step == 0, 0.0, breakdown.no_worker)
        _, avoidable = estimate_compute_wait(rank, lost, breakdown)
        idle = limit_to_data_wait(lost, breakdown.no_work)
        starting = limit_to_data_wait(lost, absent)
        share = idle + starting + avoidable
        share[share < limits.idle_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        without_work = Evidence(
            "worker.without_work_ratio",
            compute_claimed_mean(lost, share, idle),
            "ratio",
            "of the waits, no worker was working on the awaited batch",
        )
        waits = [without_work, *_describe_starting(lost, share, starting)]
        evidence = (
            *sorted(waits, key=lambda item: -item.value),
            *_describe_avoidable_waits(lost, share, avoidable),
            Evidence(
                "loader.workers_count",
                float(count_live_workers(rank.workers)),
                "count",
                "dataloader workers of the rank",
            ),
        )
        return Claims(share, "B", evidence)


def _describe_starting(lost: LostTime, share: Float, starting: Float) -> list[Evidence]:
    """Describe waits for workers that did not exist yet, after the first step."""
    if not starting.any():
        return []
    note = "of the waits, the worker did not exist yet or was starting"
    ratio = compute_claimed_mean(lost, share, starting)
    return [Evidence("worker.starting_ratio", ratio, "ratio", note)]


def _describe_avoidable_waits(lost: LostTime, share: Float, avoidable: Float) -> list[Evidence]:
    """Describe waits that a larger prefetch would have avoided, if there are any."""
    if not avoidable.any():
        return []
    ratio = compute_claimed_mean(lost, share, avoidable)
    note = "of the waits, the batch would have been ready had idle workers worked further ahead"
    return [Evidence("worker.not_ahead_ratio", ratio, "ratio", note)]
