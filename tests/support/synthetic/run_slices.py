"""Blame synthetic jobs in one piece or in slices, as the analysis does, and compare the results."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from clusterprof.analysis.attribution.network.transfer_time import TransferTotals
from clusterprof.analysis.attribution.wait_for.blame import TRANSFER, list_causes
from clusterprof.analysis.attribution.wait_for.time_bins import WaitTimeBins
from clusterprof.analysis.attribution.wait_for.totals import (
    SavingsTotals,
    SlowSteps,
    VictimCounts,
    WaitTotals,
)
from clusterprof.analysis.attribution.wait_for.waits_without_culprit import Jitter, PipelineBubbles
from clusterprof.analysis.cross_rank import slice_plan
from clusterprof.analysis.cross_rank.observers import CulpritSums, LongWaitObserver, WhatIfObserver
from clusterprof.analysis.cross_rank.run_slices import BlameColumns, BlameSums, blame_in_slices
from clusterprof.analysis.cross_rank.slice_plan import JobSlices, plan_slices
from clusterprof.analysis.spill import IN_MEMORY
from clusterprof.analysis.timeline.collectives import cuts
from clusterprof.analysis.timeline.collectives.matching import ClockOffset, RankEntry
from clusterprof.analysis.timeline.collectives.rows import RankRowBuilder
from tests.support.synthetic.jobs import CATEGORIES, MS, Job
from tests.support.synthetic.matching import CollectiveSpans
from tests.support.synthetic.spans import make_spans

COLUMNS = BlameColumns(tuple(range(len(CATEGORIES))), ())
STEP_NS = 60 * MS


class InMemory:
    """A store that returns the data itself as their place."""

    why_full = ""

    def put(self, data: bytes) -> bytes:
        """Return the data."""
        return data


def make_entries(
    job: Job,
    block_rows: int,
    keep: Callable[[CollectiveSpans], CollectiveSpans] = lambda spans: spans,
    ahead_ns: Sequence[int] = (),
    job_number: int = 0,
    first_rank: int = 0,
) -> list[RankEntry]:
    """Return the ranks of a job as their nodes' analyses would have stored them.

    keep: drops or changes spans of all ranks. ahead_ns: by how much the clock of each rank is
    ahead.
    """
    spans = keep(make_spans(job, job.ops.arrive_ns, job.ops.leave_ns, job.ops.leave_ns))
    entries = []
    for rank in range(job.ranks):
        own = spans.take(np.flatnonzero(spans.rank == rank))
        own = own.take(np.argsort(own.leave_ns, kind="stable"))
        rows = RankRowBuilder(InMemory(), block_rows)
        code = own.operation | (own.peer + 1) << 16
        off = ahead_ns[rank] if ahead_ns else 0
        head = (own.arrive_ns + off, own.leave_ns + off, own.group, own.sequence, own.bytes)
        spent = job.spent[own.source].T
        rows.add(np.stack([*head, code, own.blocked_ns]), spent, spent)
        result = rows.finish()
        if result is not None:
            entries.append(RankEntry(first_rank + rank, rank, job_number, ClockOffset(), result))
    return entries


def make_sums(ranks: int, jobs: Sequence[int], history: bool = True) -> BlameSums:
    """Return sums without operations; two ranks share a node."""
    causes = list_causes(CATEGORIES)
    node = np.arange(ranks) // 2
    results: Any = [SimpleNamespace(history=None, operations=None, job=0)] * ranks
    size = np.bincount(jobs)[list(jobs)]
    steps = {at * STEP_NS: STEP_NS for at in range(0, 4000, 3)}
    what_if = WhatIfObserver(jobs, CATEGORIES)
    what_if.begin(COLUMNS.used, COLUMNS.used)
    return BlameSums(
        totals=WaitTotals(ranks, CATEGORIES),
        transfers=TransferTotals(node, causes.index(TRANSFER)),
        bubbles=PipelineBubbles(ranks, CATEGORIES),
        jitter=Jitter(ranks, CATEGORIES),
        culprits=CulpritSums(
            WaitTimeBins(len(causes), np.zeros(ranks, np.int64), node.tolist()),
            VictimCounts(ranks),
            SavingsTotals(size, len(causes)),
            [SlowSteps(0, steps, None, ranks)],
        ),
        long_waits=LongWaitObserver(results, causes) if history else None,
        what_if=what_if,
    )


def plan_job_slices(
    entries: Sequence[RankEntry], rows: int, first_rows: int = 70
) -> list[JobSlices]:
    """Plan slices of about this many rows of a rank."""
    with (
        patch.object(slice_plan, "SLICE_ROWS", rows),
        patch.object(slice_plan, "FIRST_SLICE_ROWS", first_rows),
        patch.object(slice_plan, "MAX_FIRST_SLICE_ROWS", first_rows + 30),
    ):
        return plan_slices(entries, {})


def sample_all_cuts() -> Any:
    """Return a context in which every possible cut is sampled."""
    return patch.object(cuts, "FIRST_STRIDE", 1)


def _copy(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301, what the test has pickled itself


class TaskRunner:
    """Runs tasks like a pool of workers: arguments are pickled, the order is random."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.rounds: list[int] = []

    def __call__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        results: dict[int, bytes] = {}
        for at in self._random.permutation(len(items)).tolist():
            results[at] = pickle.dumps(function(_copy(pickle.dumps(items[at]))))
        self.rounds.append(len(items))
        return iter([_copy(results[at]) for at in range(len(items))])


def blame_job(
    jobs: Sequence[JobSlices], ranks: int, run_map: Any = map, numbers: Sequence[int] = ()
) -> tuple[BlameSums, dict[str, int]]:
    """Blame planned jobs; numbers: job of each rank, all 0 if empty."""
    sums = make_sums(ranks, numbers or [0] * ranks)
    unmatched = blame_in_slices(jobs, sums, COLUMNS, ranks, IN_MEMORY, run_map)
    return sums, unmatched


def list_exact_results(sums: BlameSums) -> dict[str, Any]:
    """List what does not depend on where the run was cut."""
    totals, transfers, bins = sums.totals, sums.transfers, sums.culprits.time_bins
    ranks = len(totals.victim_ns)
    cell_ns = transfers.sum_cell_ns().tolist()
    out: dict[str, Any] = {
        name: getattr(totals, name).tolist()
        for name in ("victim_ns", "culprit_ns", "recoverable_ns", "late_peers", "last_arrivals")
    }
    out["cells"] = {
        cell.key: (cell.operations, cell.bytes, cell.durations, ns)
        for cell, ns in zip(transfers.cells, cell_ns)
    }
    out["transfer_ns"] = transfers.victim_ns.tolist()
    out["victims"] = [sums.culprits.victims.count_victims(rank) for rank in range(ranks)]
    out["bins"] = bins.length_ns, [bins.persistence([cause]) for cause in range(len(totals.causes))]
    out["slow"] = [slow.find_culprit_per_step(0.01) for slow in sums.culprits.slow]
    out["savings_of_causes"] = sums.culprits.savings.cause_ns.tolist()
    if sums.long_waits is not None:
        out["long"] = sums.long_waits.longest(range(ranks))
    return out


def list_all_results(sums: BlameSums) -> dict[str, Any]:
    """List all results, those too that are measured between cuts only."""
    savings = sums.culprits.savings
    what_if = {
        job: (s.length_ns.tolist(), s.savings_ns.tolist(), s.skipped, s.several_groups, s.culprits)
        for job, s in sums.what_if.savings().items()
    }
    return {
        **list_exact_results(sums),
        "bubbles": (sums.bubbles.victim_ns.tolist(), sums.bubbles.culprit_ns.tolist()),
        "jitter": (sums.jitter.victim_ns.tolist(), sums.jitter.culprit_ns.tolist()),
        "savings": [getattr(savings, n).tolist() for n in ("others_ns", "own_ns", "all_ns")],
        "what_if": what_if,
        "unreplayed": sums.what_if.unreplayed_ns(0),
    }
