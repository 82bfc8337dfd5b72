"""The step waits for its data.

## What it sees

Lost time in which the host waited for a batch, in a trace of another tool that was imported: a
profiler marks the wait, and nobody looked at the threads, disks and connections behind it.

## Why the GPU waits

The batch was not there when the step needed it: its files were being read, it was being decoded or
augmented, no worker had begun with it, or there are no workers.

## How it decides

Its share is the part of the wait that no reading and no computing of the loading thread explains.
Recordings of our own never need it: they have samples of the threads that load.

## What to do

Learn which it is: `clusterprof record -- CMD` for a minute shares the same wait out among disks,
servers, CPUs and the loader's set-up. Where the trace says that the training process loads by
itself, give it workers first.

## Where it is blind

It knows that the data were late, and nothing of why. A wait that is hidden behind work of the
device costs nothing and is not claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.detectors.base import Claims, in_phase, mean_over
from clusterprof.findings import Cause, Evidence
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_DATA_WAIT, Feeding, Lost, Rank
from clusterprof.timeline.traced import is_imported, loading_shares


class InputWait:
    """Claims waits for data of which an imported trace shows nothing but that they were."""

    cause = Cause(
        "input-wait",
        "input",
        "The step waits for its data",
        "Record a minute with clusterprof to learn what the loader waits for",
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a wait counts."""

        unseen_at_least_ratio: float = 0.02
        """A smaller part of a wait that nothing explains is noise of the trace's clock."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim what is left of waits for data in an imported recording."""
        share = np.zeros(lost.start_ns.size)
        if not is_imported(rank.chunk):
            return Claims(share, "B")
        inside = in_phase(lost, PHASE_DATA_WAIT)
        seen = loading_shares(rank, lost.start_ns, lost.end_ns)
        known = sum(seen.values()) if seen is not None else 0.0
        share = np.where(inside, 1.0 - known, 0.0)
        share[share < limits.unseen_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "B")
        waits = rank.main.spans.get(layout.DATA_WAIT)
        evidence = [
            Evidence("input.unseen_ratio", mean_over(lost, share), "ratio",
                     "of the waits for data, the trace does not show what the loader did"),
        ]  # fmt: skip
        own = int((waits.b == 0).sum()) if waits is not None else 0
        if waits is not None and own == waits.b.size:
            note = "dataloader workers: the training process loads by itself"
            evidence.append(Evidence("loader.workers_count", 0.0, "count", note))
        return Claims(share, "A", tuple(evidence))  # the mark, and the device that stood still
