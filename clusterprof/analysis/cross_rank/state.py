"""State of the cross-rank analysis. Each pass returns an updated copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.cross_rank.network import NetworkResult
from clusterprof.analysis.cross_rank.observers import (
    CulpritObserver,
    LongWaitObserver,
    WhatIfObserver,
)
from clusterprof.analysis.cross_rank.run_slices import RunMap
from clusterprof.analysis.importers.nccl.flight_recorder import Dump
from clusterprof.analysis.job.clock_sync import NodeClockAlignment
from clusterprof.analysis.job.ranks import AMBIGUOUS_JOB, Job
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.spill import IN_MEMORY, SpillLocation
from clusterprof.analysis.timeline.model import Int
from clusterprof.report.model import CoverageGap, Finding


@dataclass(frozen=True, slots=True)
class ImplicitBarriers:
    """The jobs whose steps act as barriers in place of operations that were not marked."""

    jobs: frozenset[int] = frozenset()
    """Numbers of these jobs."""
    complete_jobs: frozenset[int] = frozenset()
    """Those of them of which all ranks were recorded."""
    members: Mapping[tuple[int, int], Int] = field(default_factory=dict)
    """Ranks of the whole world of each of these jobs by (job, group), int64[world]."""
    notes: tuple[str, ...] = ()
    common_wait_ns: Mapping[int, int] = field(default_factory=dict)
    """By job: time for which all ranks waited in every step, summed over steps, ns."""


@dataclass(frozen=True, slots=True)
class JobState:
    """All nodes of a recording, and the results that need the ranks of all nodes."""

    nodes: tuple[NodeResult, ...]
    """The nodes; waiting time in operations is attributed to causes in their ranks' results."""
    spill: SpillLocation = IN_MEMORY
    """Where the analysis of the nodes has stored the operations of their ranks."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Bound limits object per cause id."""
    run_map: RunMap = map
    """Runs the parts of passes that can be divided, in processes or not."""
    dumps: tuple[Dump, ...] = ()
    """Dumps of PyTorch's flight recorder, to compare the waits with."""
    jobs: tuple[Job, ...] = ()
    clock: NodeClockAlignment | None = None
    """Maps the times of every node to the common clock, in the order of `nodes`."""
    faulty_jobs: frozenset[int] = frozenset()
    """Numbers of the jobs whose network shows a fault."""
    barriers: ImplicitBarriers = field(default_factory=ImplicitBarriers)
    unmatched: Mapping[str, int] = field(default_factory=dict)
    """Reason (analysis.timeline.collectives.matching) -> left-out operation spans."""
    not_compared: str = ""
    """Why operations of different ranks were not matched at all; "" when they were."""
    clock_bound_ns: int | None = None
    """Largest error in ns of the common time of two nodes; None: see `clock_reason`."""
    clock_reason: str = "no operations of different ranks were matched"
    """What the bound does not hold for; "" when it holds for all nodes."""
    findings: tuple[Finding, ...] = ()
    """Findings about time outside the steps."""
    hang_findings: tuple[Finding, ...] = ()
    """Findings about hangs, until they are put before all others."""
    notes: tuple[str, ...] = ()
    """Sentences a reader must know."""
    hang_notes: tuple[str, ...] = ()
    """Notes on hangs, which are printed before all others."""
    coverage_gaps: tuple[CoverageGap, ...] = ()
    """Coverage gaps: what was not recorded."""
    network: NetworkResult = field(default_factory=NetworkResult)
    observer: CulpritObserver | None = None
    """Observed while waits were blamed; None where operations were not matched."""
    long_waits: LongWaitObserver | None = None
    """The longest waits; None where no history was requested or operations were not matched."""
    what_if: WhatIfObserver | None = None
    """Replays of the job without each cause; None where operations were not matched."""


def group_ranks_by_job(nodes: Sequence[NodeResult]) -> dict[int, list[RankResult]]:
    """Group the ranks of all nodes by the number of their job, without ambiguous ones."""
    by_job: dict[int, list[RankResult]] = {}
    for node in nodes:
        for rank in node.ranks:
            if rank.job != AMBIGUOUS_JOB:
                by_job.setdefault(rank.job, []).append(rank)
    return by_job
