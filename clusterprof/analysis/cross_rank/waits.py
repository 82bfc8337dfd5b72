"""Blame the time that ranks waited for each other in operations.

    results of ranks ──> operations matched ──> waits, transfers ──> results with causes
                         job, group, number     who arrived last, and why

The ledger of every rank keeps its sums: the time booked as "peers" becomes the causes
for which the rank waited there. Operations are read from where the analysis of each
node has stored them, and blamed slice by slice (analysis.cross_rank.run_slices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from clusterprof.analysis.attribution.accumulator import (
    SHARE_SCALE,
    Accumulator,
    merge_accumulators,
)
from clusterprof.analysis.attribution.ledger import RankResult, with_attributed_waits
from clusterprof.analysis.attribution.network.comm_threads import DELAYED, estimate_host_overhead_ns
from clusterprof.analysis.attribution.rank.claims import (
    EVIDENCE_SCALE,
    JITTER,
    PEERS_UNKNOWN,
    WITH_PEERS,
)
from clusterprof.analysis.attribution.rank.time_spent import CONTENTION, UNEXPLAINED
from clusterprof.analysis.attribution.taxonomy import CLAIMABLE_CAUSES
from clusterprof.analysis.attribution.wait_for.blame import (
    TRANSFER,
    UNKNOWN,
    UNKNOWN_PEER,
    WORK,
    list_causes,
)
from clusterprof.analysis.attribution.wait_for.flight_recorder import (
    FlightRecorderComparison,
    RankClock,
    build_issue_table,
    describe_comparison,
)
from clusterprof.analysis.attribution.wait_for.totals import (
    ALL_TO_ALL_TOTALS,
    WORK_WAIT_TOTALS,
    WaitTotals,
)
from clusterprof.analysis.attribution.wait_for.waits_without_culprit import Jitter, PipelineBubbles
from clusterprof.analysis.cross_rank.implicit_collectives import (
    cap_transfer,
    limit_transfer_ns,
    measure_sending_ns,
    subtract_waits_from_reasons,
    sum_by_family,
)
from clusterprof.analysis.cross_rank.network import (
    NetworkResult,
    TransferObserver,
    make_transfer_totals,
)
from clusterprof.analysis.cross_rank.observers import (
    CulpritObserver,
    LongWaitObserver,
    WhatIfObserver,
    make_culprit_sums,
)
from clusterprof.analysis.cross_rank.run_slices import BlameColumns, BlameSums, blame_in_slices
from clusterprof.analysis.cross_rank.slice_plan import plan_slices
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.job.clock_sync import NodeClockAlignment
from clusterprof.analysis.job.ranks import AMBIGUOUS_JOB, compute_wall_clock_offset_ns
from clusterprof.analysis.node.analyze import NodeResult, list_ranks, map_ranks, with_ranks
from clusterprof.analysis.timeline.collectives.matching import RankEntry
from clusterprof.analysis.timeline.collectives.rows import RankOperations, list_categories
from clusterprof.analysis.timeline.collectives.stream import return_freed_memory
from clusterprof.analysis.timeline.model import SOURCE_DEVICE_SAMPLES, SOURCE_HOST_SPANS, Int
from clusterprof.report.model import Grade

GROUP_ANNOUNCED = "group-announced"
CATEGORIES = (*CLAIMABLE_CAUSES, UNEXPLAINED, WORK)
_MARKED_GRADE: Grade = "B"  # durations of marked spans; no counter confirms them

_NumberedRank = tuple[int, NodeResult, RankResult]
"""Number of a rank over all nodes in order, its node, its result."""


def attribute_waits(state: JobState) -> JobState:
    """Attribute the time that ranks waited in operations to causes and culprit ranks.

    Where the operations cannot be read back, `not_compared` says why, and the waits stay
    without a cause.
    """
    if state.not_compared:
        return state
    with_operations = _select_ranks_with_operations(state.nodes)
    if not with_operations:
        return replace(state, notes=(*state.notes, *state.barriers.notes))
    lost = [
        rank.operations.why_lost for _, _, rank in with_operations if rank.operations is not None
    ]
    if any(lost):
        return replace(state, not_compared=max(lost))
    try:
        sums, unmatched = _observe_blame(state, with_operations)
    except OSError as error:
        return replace(state, not_compared=str(error))
    return_freed_memory()
    clock = _require_clock(state)
    recorded = describe_comparison(sums.recorded, state.dumps)
    network = TransferObserver(state.nodes, state.limits, sums.transfers).result()
    return_freed_memory()
    return replace(
        state,
        nodes=_with_attributed_waits(state, with_operations, sums, network),
        unmatched=unmatched,
        clock_bound_ns=clock.bound_ns,
        clock_reason=clock.reason,
        notes=(*state.notes, *clock.notes, *state.barriers.notes, *recorded),
        network=network,
        observer=CulpritObserver(list_ranks(state.nodes), sums.totals.causes, sums.culprits),
        long_waits=sums.long_waits,
        what_if=sums.what_if,
    )


def _require_clock(state: JobState) -> NodeClockAlignment:
    assert state.clock is not None, "clocks are aligned before waits are attributed"
    return state.clock


def _select_ranks_with_operations(nodes: Sequence[NodeResult]) -> list[_NumberedRank]:
    ranks = [(node, rank) for node in nodes for rank in node.ranks]
    return [
        (index, node, rank)
        for index, (node, rank) in enumerate(ranks)
        if rank.operations is not None and rank.job != AMBIGUOUS_JOB
    ]


# --- observing the blame ---


def _make_sums(nodes: Sequence[NodeResult], categories: Sequence[str]) -> BlameSums:
    """Make the sums without operations.

    categories: those in which time was spent, and work. There is a column of each of them for
    every rank, and most causes have no time at all.
    """
    ranks = list_ranks(nodes)
    causes = list_causes(categories)
    has_history = any(rank.history is not None for rank in ranks)
    numbered = [(node, rank) for node in nodes for rank in node.ranks]
    return BlameSums(
        totals=WaitTotals(len(ranks), categories),
        transfers=make_transfer_totals(nodes, categories),
        bubbles=PipelineBubbles(len(ranks), categories),
        jitter=Jitter(len(ranks), categories),
        culprits=make_culprit_sums(numbered, len(causes)),
        long_waits=LongWaitObserver(ranks, causes) if has_history else None,
        what_if=WhatIfObserver([rank.job for rank in ranks], CATEGORIES),
    )


def _observe_blame(
    state: JobState, with_operations: Sequence[_NumberedRank]
) -> tuple[BlameSums, Mapping[str, int]]:
    """Read and blame operations slice by slice; return the sums, and unmatched spans by reason.

    Raises: OSError when the operations cannot be read back.
    """
    entries = _build_rank_entries(with_operations, state.nodes, _require_clock(state))
    members = {**_read_group_members(with_operations), **state.barriers.members}
    blocks = [block for entry in entries for block in entry.operations.blocks]
    spent = list_categories(
        chain.from_iterable((block.arrive_categories, block.leave_categories) for block in blocks)
    )
    # Most categories have no time at all; work, the last one, is always requested.
    used = [*(c for c in spent if c < len(CATEGORIES) - 1), len(CATEGORIES) - 1]
    sums = _make_sums(state.nodes, [CATEGORIES[c] for c in used])
    hidden = sums.what_if.begin(used, spent)
    sums.recorded = _make_comparison(state, with_operations, entries)
    run_slices = plan_slices(entries, members)
    return_freed_memory()
    unmatched = blame_in_slices(
        run_slices,
        sums,
        BlameColumns(tuple(used), tuple(hidden)),
        len(list_ranks(state.nodes)),
        state.spill,
        state.run_map,
    )
    return sums, unmatched


def _make_comparison(
    state: JobState, with_operations: Sequence[_NumberedRank], entries: Sequence[RankEntry]
) -> FlightRecorderComparison | None:
    """Make the comparison with the dumps of the flight recorder; None if there are too few."""
    clocks = [
        RankClock(entry, compute_wall_clock_offset_ns(node), rank.first_ns, rank.last_ns)
        for entry, (_, node, rank) in zip(entries, with_operations)
    ]
    table = build_issue_table(state.dumps, clocks)
    return FlightRecorderComparison(table, len(list_ranks(state.nodes))) if table else None


def _build_rank_entries(
    with_operations: Sequence[_NumberedRank], nodes: Sequence[NodeResult], clock: NodeClockAlignment
) -> list[RankEntry]:
    number = {id(node): index for index, node in enumerate(nodes)}
    entries = []
    for index, node, rank in with_operations:
        operations: RankOperations = rank.operations  # type: ignore[assignment]
        name = index if rank.ledger.rank is None else rank.ledger.rank
        offset = clock.fit_offset(number[id(node)], rank.first_ns, rank.last_ns)
        entries.append(RankEntry(index, name, rank.job, offset, operations))
    return entries


def _read_group_members(with_operations: Sequence[_NumberedRank]) -> dict[tuple[int, int], Int]:
    """Return the global ranks of every announced group by (job, group), int64[members]."""
    jobs = {(node.facts.key, rank.ledger.pid): rank.job for _, node, rank in with_operations}
    members: dict[tuple[int, int], Int] = {}
    for node in {node.facts.key: node for _, node, _ in with_operations}.values():
        for event in node.loaded.events:
            if event.kind == GROUP_ANNOUNCED:
                attributes = event.attributes
                job = jobs.get((node.facts.key, attributes["pid"]))
                if job is not None and (job, attributes["group"]) not in members:
                    members[job, attributes["group"]] = np.array(attributes["ranks"], np.int64)
    return members


# --- moving the waits from "peers" to their causes ---


@dataclass(frozen=True, slots=True)
class _RankWaits:
    """The waits of one rank in operations, and the waits of others for it."""

    victim_ns: Mapping[str, int]
    """What the rank lost waiting, ns by cause."""
    culprit_ns: Mapping[str, int]
    """What all ranks lost waiting for it, ns by cause."""
    unknown_ns: int
    """Waits without a cause."""
    jitter_ns: int
    """Waits for arrivals that vary by chance."""
    totals: Mapping[str, int]
    """What is known of its all-to-all operations and of the waits for its work, for the
    accumulator.
    """

    @property
    def all_ns(self) -> int:
        """Return all waits of the rank."""
        return sum(self.victim_ns.values()) + self.unknown_ns + self.jitter_ns


def _with_attributed_waits(
    state: JobState,
    with_operations: Sequence[_NumberedRank],
    sums: BlameSums,
    network: NetworkResult,
) -> tuple[NodeResult, ...]:
    """Return the nodes with the waits of their ranks in operations moved to causes."""
    ranks, barriers = list_ranks(state.nodes), state.barriers
    limits_ns = limit_transfer_ns(
        ranks, state.faulty_jobs, barriers.common_wait_ns, measure_sending_ns(state.nodes)
    )
    complete_jobs = barriers.complete_jobs | {
        job.number for job in state.jobs if job.world_size and not job.missing
    }
    for index, _, rank in with_operations:
        waits = _measure_rank_waits(index, sums, network, rank.job in complete_jobs)
        if rank.job in barriers.jobs:
            waits = _generalize_step_waits(waits, limits_ns.get(rank.job))
            taken_ns = subtract_waits_from_reasons(
                rank, waits.victim_ns, waits.unknown_ns + waits.jitter_ns
            )
        else:
            taken_ns = {WITH_PEERS: -waits.all_ns}
        ranks[index] = _with_wait_causes(rank, waits, taken_ns, network.checked[index])
    return with_ranks(state.nodes, ranks)


def _measure_rank_waits(
    index: int, sums: BlameSums, network: NetworkResult, complete: bool
) -> _RankWaits:
    """Measure the waits of the rank with this number.

    complete: no rank of its job is missing; where one seems to be, its operations or steps could
    not be matched.
    """
    totals, bubbles, jitter = sums.totals, sums.bubbles, sums.jitter
    victim_ns = {c: int(ns) for c, ns in zip(totals.causes, totals.victim_ns[index]) if ns}
    culprit_ns = {c: int(ns) for c, ns in zip(totals.causes, totals.culprit_ns[index]) if ns}
    unknown_ns = sum(
        victim_ns.pop(name, 0)
        for name in (UNEXPLAINED, UNKNOWN, *((UNKNOWN_PEER,) if complete else ()))
    )
    victim_ns = network.with_transfer_causes(index, victim_ns)
    message_ns = min(network.get_message_excess_ns(index), victim_ns.get(TRANSFER, 0))
    victim_ns = bubbles.add_causes(victim_ns, {TRANSFER: -message_ns})
    unknown_ns += message_ns
    victim_ns = bubbles.add_causes(victim_ns, bubbles.victim_change(index))
    culprit_ns = bubbles.add_causes(culprit_ns, bubbles.culprit_change(index))
    return _RankWaits(
        victim_ns=bubbles.add_causes(victim_ns, jitter.victim_change(index)),
        culprit_ns=bubbles.add_causes(culprit_ns, jitter.culprit_change(index)),
        unknown_ns=unknown_ns,
        jitter_ns=jitter.jitter_ns(index),
        totals={
            name: int(column[index])
            for name, column in zip(
                (*ALL_TO_ALL_TOTALS, *WORK_WAIT_TOTALS),
                (*totals.all_to_all_bytes, *totals.work_wait_ns),
            )
            if column[index]
        },
    )


def _generalize_step_waits(waits: _RankWaits, max_transfer_ns: int | None) -> _RankWaits:
    """Return waits in steps by family of causes; max_transfer_ns: see limit_transfer_ns."""
    return replace(
        waits,
        victim_ns=cap_transfer(sum_by_family(waits.victim_ns), max_transfer_ns),
        culprit_ns=sum_by_family(waits.culprit_ns),
    )


def _with_wait_causes(
    rank: RankResult, waits: _RankWaits, taken_ns: Mapping[str, int], checked: Accumulator
) -> RankResult:
    """Return the result of a rank with its waits in operations attributed to causes.

    taken_ns: what each reason loses to the waits, negative. checked: the causes that the
    network counters of its node could have shown.
    """
    source = SOURCE_DEVICE_SAMPLES if rank.ledger.device else SOURCE_HOST_SPANS
    grade: Grade = _MARKED_GRADE if rank.marked else "C"
    left_ns = {**taken_ns}
    if waits.unknown_ns:
        left_ns[PEERS_UNKNOWN] = waits.unknown_ns
    if waits.jitter_ns:
        left_ns[JITTER] = waits.jitter_ns
    moved = Accumulator(
        claimed={(cause, grade, source): ns * SHARE_SCALE for cause, ns in waits.victim_ns.items()},
        unexplained={reason: ns * SHARE_SCALE for reason, ns in left_ns.items()},
        totals=waits.totals,
    )
    partial = merge_accumulators(rank.accumulator, moved, checked)
    unexplained = {reason: units for reason, units in partial.unexplained.items() if units}
    return with_attributed_waits(
        rank, replace(partial, unexplained=unexplained), waits.victim_ns, waits.culprit_ns
    )


# --- transfers whose threads had no CPU ---

_MIN_STARVED_RATIO = 0.02
"""Part of a rank's transfer time; less is the normal cost of every scheduler."""
_STARVED_NOTE = "of the transfers, the communication threads were ready to run and had no CPU"


def blame_starved_transfers(state: JobState) -> JobState:
    """Attribute transfer time in which a rank's communication threads had no CPU to contention.

    A faster network would not shorten it.
    """
    return replace(state, nodes=map_ranks(state.nodes, _with_starved_transfers))


def _with_starved_transfers(rank: RankResult) -> RankResult:
    transfer_ns = rank.victim_ns.get(TRANSFER, 0)
    starved_ns = int(estimate_host_overhead_ns(rank.accumulator.totals, DELAYED, transfer_ns))
    if starved_ns <= _MIN_STARVED_RATIO * transfer_ns:
        return rank
    left_units = starved_ns * SHARE_SCALE
    moved: dict[tuple[str, str, int], int] = {}
    for (cause, grade, source), units in rank.accumulator.claimed.items():
        if cause == TRANSFER:
            part = min(units, left_units)
            moved[TRANSFER, grade, source] = -part
            moved[CONTENTION, grade, source] = part
            left_units -= part
    evidence = (CONTENTION, "comm_thread.runnable_ratio", "ratio", _STARVED_NOTE)
    change = Accumulator(
        claimed=moved,
        evidence={evidence: round(EVIDENCE_SCALE * starved_ns / transfer_ns) * starved_ns},
        weights={evidence: starved_ns},
    )
    victim_ns = {
        **rank.victim_ns,
        TRANSFER: transfer_ns - starved_ns,
        CONTENTION: rank.victim_ns.get(CONTENTION, 0) + starved_ns,
    }
    culprit_ns = {**rank.culprit_ns, CONTENTION: rank.culprit_ns.get(CONTENTION, 0) + starved_ns}
    return with_attributed_waits(
        rank, merge_accumulators(rank.accumulator, change), victim_ns, culprit_ns
    )
