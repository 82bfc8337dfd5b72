"""The step waits for its data.

## What it sees

Lost time in which the host waited for a batch, in an imported trace of another tool: a profiler
recorded the wait, but nothing about the threads, disks and connections behind it.

## Why the GPU waits

The batch was not ready when the step needed it: its files were being read, it was being decoded or
augmented, no worker had started on it, or there are no workers.

## How it decides

Its share is the part of the wait that neither reading nor computing of the loading thread explains.
Clusterprof's own recordings never need it: they have samples of the threads that load.

## What to do

Find the cause: `clusterprof record -- CMD` for a minute divides the same wait among disks, servers,
CPUs and the loader's configuration. If the trace shows that the training process loads the data
itself, give it workers first.

## Where it is blind

It knows that the data were late, but not why. A wait that is hidden behind work of the device costs
nothing and is not claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    measure_host_work,
    name_host_functions,
    select_phases,
    sum_claimed_ns,
)
from clusterprof.analysis.timeline.data_wait.samples import compute_loading_shares, is_imported
from clusterprof.analysis.timeline.model import PHASE_DATA_WAIT, DataWaitBreakdown, LostTime, Rank
from clusterprof.analysis.timeline.spans import DataWaitSpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence


class InputWait:
    """Claims waits for data for which an imported trace shows no cause."""

    cause = Cause(
        "input-wait",
        "input",
        "The step waits for its data",
        "Record a minute with clusterprof to learn what the loader waits for",
        precedence=610,
        always_traced=True,
        manual_check=(
            "`py-spy dump --pid PID` of the training process while it waits: `_try_get_data` or "
            "`__next__` of the loader; `top -H -p WORKER`: near 100 % CPU is work, state D in `ps "
            "-o stat,wchan PID` is a disk or a server. Train some steps on one batch held in "
            "memory: the waits must disappear."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a wait."""

        unseen_at_least_ratio: float = 0.02
        """A smaller unexplained share of a wait is noise of the trace's clock."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim the unexplained part of waits for data in an imported recording."""
        share = np.zeros(lost.start_ns.size)
        if not is_imported(rank.chunk):
            return Claims(share, "B")
        inside = select_phases(lost, PHASE_DATA_WAIT)
        traced = compute_loading_shares(rank, lost.start_ns, lost.end_ns)
        traced_share = sum(traced.values()) if traced is not None else 0.0
        share = np.where(inside, 1.0 - traced_share, 0.0)
        share[share < limits.unseen_at_least_ratio] = 0.0
        reading = measure_host_work(rank, lost, layout.READING_DATA)
        if sum_claimed_ns(lost, reading) > sum_claimed_ns(lost, share):
            named = name_host_functions(rank, lost, reading, layout.READING_DATA)
            note = "of that time, the training thread itself read files"
            read = Evidence(
                "input.reading_ratio", compute_claimed_mean(lost, reading), "ratio", note
            )
            return Claims(share + reading, "A", (*named, read))
        share = share + reading
        if not share.any():
            return Claims(share, "B")
        waits = rank.main.get_spans(DataWaitSpans)
        evidence = [
            Evidence(
                "input.unseen_ratio",
                compute_claimed_mean(lost, share),
                "ratio",
                "of the waits for data, the trace does not show what the loader did",
            )
        ]
        main_process_waits = int((waits.worker_pid == 0).sum()) if waits is not None else 0
        if waits is not None and main_process_waits == waits.worker_pid.size:
            note = "dataloader workers: the training process loads by itself"
            evidence.append(Evidence("loader.workers_count", 0.0, "count", note))
        return Claims(share, "A", tuple(evidence))  # wait span and idle device
