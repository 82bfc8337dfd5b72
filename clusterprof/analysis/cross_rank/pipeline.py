"""Compare the ranks of all nodes: one pass after the other over the state of the job.

    results of ranks ──> CROSS_RANK_PASSES ──> results with causes of their waits
    node by node         one after the other    findings, notes, coverage gaps

`CROSS_RANK_PASSES` is the whole order. A pass takes a JobState and returns a changed copy.
A pass that needs something an earlier one could not provide returns its state unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clusterprof.analysis.cross_rank.hang_findings import (
    attribute_common_pauses,
    attribute_hangs,
    attribute_unmarked_hangs,
)
from clusterprof.analysis.cross_rank.implicit_collectives import (
    apply_implicit_barriers,
    blame_unrecorded_peers,
    find_jobs_with_network_faults,
    measure_unverified_busy_time,
    revert_suspected_busy_wait,
)
from clusterprof.analysis.cross_rank.run_slices import RunMap
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.cross_rank.wait_totals import align_cause_ids
from clusterprof.analysis.cross_rank.waits import attribute_waits, blame_starved_transfers
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.importers.nccl.flight_recorder import Dump
from clusterprof.analysis.job.clock_sync import align_node_clocks
from clusterprof.analysis.job.ranks import assign_jobs, attribute_restarts
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.spill import IN_MEMORY, SpillLocation


def identify_jobs(state: JobState) -> JobState:
    """Decide which ranks belong to one job, and leave out duplicate recordings."""
    assignment = assign_jobs(state.nodes)
    return replace(
        state,
        nodes=assignment.nodes,
        jobs=assignment.jobs,
        notes=(*state.notes, *assignment.notes),
        coverage_gaps=(*state.coverage_gaps, *assignment.coverage_gaps),
    )


def link_restarts(state: JobState) -> JobState:
    """Link each restarted rank to its earlier incarnation, and report the time lost between."""
    restarts = attribute_restarts(state.nodes, state.jobs)
    return replace(state, nodes=restarts.nodes, findings=(*state.findings, *restarts.findings))


def align_clocks(state: JobState) -> JobState:
    """Align the clocks of all nodes, by marked operations: ends of steps are too inexact."""
    return replace(state, clock=align_node_clocks(state.nodes))


def find_network_faults(state: JobState) -> JobState:
    """Find the jobs whose network shows a fault, which may have made transfers slower."""
    return replace(state, faulty_jobs=find_jobs_with_network_faults(state.nodes, state.limits))


def move_hangs_first(state: JobState) -> JobState:
    """Put the findings on hangs before all others."""
    return replace(state, findings=(*state.hang_findings, *state.findings), hang_findings=())


CROSS_RANK_PASSES: tuple[Callable[[JobState], JobState], ...] = (
    # Who is who, and at what time.
    identify_jobs,
    link_restarts,
    align_clocks,
    # Who waited for whom in operations, and why; where none were marked, in steps.
    find_network_faults,
    measure_unverified_busy_time,
    apply_implicit_barriers,
    attribute_waits,
    blame_starved_transfers,
    blame_unrecorded_peers,
    revert_suspected_busy_wait,  # after the waits have had their chance to confirm it
    # What all ranks of a job did together.
    attribute_common_pauses,
    attribute_hangs,
    attribute_unmarked_hangs,  # of the time that the marked hangs have left
    # How it is reported.
    align_cause_ids,
    move_hangs_first,
)
"""The cross-rank analysis, in order."""


def analyze_across_ranks(
    nodes: Iterable[NodeResult],
    spill: SpillLocation = IN_MEMORY,
    limits: Mapping[str, Any] | None = None,
    run_map: RunMap = map,
    dumps: Sequence[Dump] = (),
) -> JobState:
    """Match the operations of all ranks and attribute the waiting time in them to causes.

    spill: where the analysis of the nodes has stored the operations. When they cannot be
    read back, all waiting time stays "peers": compared with only part of the ranks, the
    others would count as unknown. limits: bound limits object per cause id; None = the
    defaults. run_map: applies a module-level function to items that can be pickled, and yields
    the results in their order. dumps: of the flight recorder, to compare the waits with.
    """
    state = JobState(tuple(nodes), spill, limits or build_limits({}), run_map, tuple(dumps))
    for apply_pass in CROSS_RANK_PASSES:
        state = apply_pass(state)
    return state
