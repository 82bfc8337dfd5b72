"""Settle the claims of detectors: each lost nanosecond goes to one cause or reason.

Claims are shares of lost intervals. They are served in the precedence of the taxonomy;
each gets at most what the earlier ones left, and unclaimed time stays unattributed with
a reason:

    claims on 100 ns   checkpoint 0    storage-local 0.6    cpu-preprocess 0.7    rest
    settled                 0               60                    40               0

Without the probe there are no spans, and only few detectors apply: see
analysis.attribution.rank.unprobed_rank.

A trace of kernels has no samples of threads, disks or memory. A detector that looks for these in it
finds none and would claim 0.0 %: its cause counts as not measured, which is not zero.

The cause of a slow read depends on the kind of its file system. A tracer of system calls often has
only a path, so what the loading thread read from there goes to the storage family, after all
causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE, Accumulator
from clusterprof.analysis.attribution.lines.lost_time_by_stack import StackTimeSums
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.rank.history import HistoryBuilder, with_segment_totals
from clusterprof.analysis.attribution.rank.host_activity import sum_cpu_time_in_pauses
from clusterprof.analysis.attribution.rank.lost_time import SegmentAccount
from clusterprof.analysis.attribution.rank.step_blocks import ImplicitSteps, StepBlocks
from clusterprof.analysis.attribution.rank.time_spent import TimeSpent
from clusterprof.analysis.attribution.rank.unprobed_rank import (
    ON_CPU,
    attribute_to_families,
    split_unmarked_waits,
    subtract_sleep,
)
from clusterprof.analysis.attribution.taxonomy import CAUSES, PRECEDENCE, STARTUP
from clusterprof.analysis.detectors.awaited_work import (
    ACTIVE_COLUMNS,
    AwaitedWork,
    find_awaited_work,
    find_feeders,
)
from clusterprof.analysis.detectors.base import (
    Claims,
    Detector,
    list_host_functions,
    measure_host_work,
    select_phases,
)
from clusterprof.analysis.detectors.phases.blocked_files import estimate_read_shares
from clusterprof.analysis.detectors.registry import DETECTORS
from clusterprof.analysis.timeline.data_wait.blocked import RUNNABLE, SHARE_NAMES
from clusterprof.analysis.timeline.data_wait.samples import (
    compute_loading_shares,
    has_traced_threads,
    is_imported,
)
from clusterprof.analysis.timeline.data_wait.split import split_data_wait
from clusterprof.analysis.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    SOURCE_DEVICE_SAMPLES,
    SOURCE_HOST_SPANS,
    SOURCE_STREAM_EVENTS,
    DataWaitBreakdown,
    Int,
    LostTime,
    Rank,
)
from clusterprof.probe import layout
from clusterprof.report.model import Evidence, ResourceKind

MISSING_TRACE_DATA = "samples or marks for it"
"""The missing input of these causes, as a report prints it: what a native recording would
contain.
"""


def find_unmeasured_causes(rank: Rank, claimed: Mapping[str, bool]) -> Iterable[str]:
    """Return causes whose detectors looked for data that an imported trace cannot contain.

    claimed: cause -> whether any time was claimed for it. Empty for a native recording, and
    where threads were sampled.
    """
    if not is_imported(rank.chunk) or any(
        process.threads for process in (rank.main, *rank.workers)
    ):
        return ()
    span_kinds = set(rank.main.spans)
    return [
        id_
        for id_, is_claimed in claimed.items()
        if not (
            is_claimed
            or CAUSES[id_].always_traced
            or span_kinds.intersection(CAUSES[id_].trace_spans)
        )
    ]


READ_FAMILY = "storage"
"""The family that file reads on unknown storage are claimed for."""
_EVIDENCE = (
    READ_FAMILY,
    "loading.reading_ratio",
    "ratio",
    "of the waits, the loading thread was reading a file, according to the trace",
)
_EVIDENCE_SCALE_OF_READS = 1000  # as evidence is stored


def attribute_unlocated_reads(rank: Rank, lost: LostTime, unclaimed: Int) -> Int | None:
    """Attribute unclaimed lost time to file reads on unknown storage; None without such reads.

    unclaimed: int64[n]. Returns int64[n], in 1/SHARE_SCALE.
    """
    shares = compute_loading_shares(rank, lost.start_ns, lost.end_ns)
    if shares is None or not shares["elsewhere"].any():
        return None
    wanted = np.where(select_phases(lost, PHASE_DATA_WAIT), shares["elsewhere"], 0.0)
    share = np.minimum(np.rint(wanted * SHARE_SCALE).astype(np.int64), unclaimed)
    return share if share.any() else None


def with_read_claims(accumulator: Accumulator, lost: LostTime, share: Int) -> Accumulator:
    """Return the accumulator with the claim of reads on unknown storage and its evidence.

    share: int64[n], in 1/SHARE_SCALE.
    """
    amount = lost.lost_ns * share
    claimed = dict(accumulator.claimed)
    for source in np.unique(lost.source).tolist():
        units = int(amount[lost.source == source].sum())
        if units:
            claimed[READ_FAMILY, "B", int(source)] = units
    total = int(amount.sum())
    length = max(int(lost.lost_ns[share > 0].sum()), 1)
    weight = max(1, total // SHARE_SCALE)
    evidence = {
        **accumulator.evidence,
        _EVIDENCE: round(total / SHARE_SCALE / length * _EVIDENCE_SCALE_OF_READS) * weight,
    }
    return replace(
        accumulator,
        claimed=claimed,
        evidence=evidence,
        weights={**accumulator.weights, _EVIDENCE: weight},
    )


NO_SIGNAL, EVAL, BLOCKED = "no-signal", "evaluation", "blocked-unknown"
WITH_PEERS = "peers"  # in an operation with other ranks: all ranks together show who was late
PEERS_UNKNOWN = "peers-unknown"  # a rank was late for an unobserved reason
JITTER = "jitter"  # work that varies at random from step to step
ON_HOST = "on-host"  # the host computed; "on-host:NAME" if it is known in which function
BATCH_TRANSFER = "hand-over"  # the batch was ready and in transfer to the main process
_SOURCES = (SOURCE_STREAM_EVENTS, SOURCE_DEVICE_SAMPLES, SOURCE_HOST_SPANS)
_SHARE_COLUMNS = tuple(
    field.name
    for field in fields(DataWaitBreakdown)
    if field.name not in ("identified", "worker_pid")
)
_NAMES = "names of signals"
_MAX_FUNCTIONS_NAMED = 3
EVIDENCE_SCALE = 1000  # evidence is stored in thousandths of its unit


def settle_segment(
    rank: Rank,
    segment: Segment,
    lost: LostTime,
    account: SegmentAccount,
    limits: Mapping[str, Any],
    time_spent: TimeSpent,
    implicit_steps: ImplicitSteps,
    blocks: StepBlocks,
    history: HistoryBuilder | None = None,
    code: StackTimeSums | None = None,
) -> Accumulator:
    """Return what a settled segment adds: its time, its steps, and its lost time by cause.

    limits: bound limits object per cause id. time_spent, implicit_steps, blocks, history
    and code are updated with the attributed time.
    """
    breakdown = compute_data_wait_breakdown(rank, lost)
    on_cpu = np.zeros(lost.start_ns.size, np.int64)
    if rank.marked:
        accumulator, shares, unclaimed = _attribute_by_detectors(rank, lost, breakdown, limits)
        time_spent.add(rank, segment, lost, shares)
    else:
        accumulator, shares, unclaimed, on_cpu = _attribute_by_families(
            rank, lost, breakdown, limits
        )
    may_wait = unclaimed - on_cpu
    accumulator, waiting = split_unmarked_waits(accumulator, rank, lost, may_wait, NO_SIGNAL)
    implicit_steps.add(rank, segment, lost, shares, waiting)
    if history is not None:
        history.add(rank, segment, lost, shares, (unclaimed, waiting), account)
    blocks.add(rank, segment, lost, shares, account)
    if code is not None:
        code.add(rank, segment, lost, shares, unclaimed, breakdown)
    return with_segment_totals(accumulator, rank, segment, lost, account)


def _attribute_by_families(
    rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Mapping[str, Any]
) -> tuple[Accumulator, dict[str, Int], Int, Int]:
    """Apply the detectors that need no spans, and attribute the rest by co-occurrence.

    Also returns the shares, what is left of each interval, and the part of that in which the main
    thread was on a CPU: int64[n], in 1/SHARE_SCALE.
    """
    accumulator, detector_shares, unclaimed = _attribute_by_detectors(rank, lost, breakdown, limits)
    shares: dict[str, Int] = {}
    families = attribute_to_families(lost, rank)
    on_cpu = families.pop(ON_CPU, np.zeros(lost.start_ns.size, np.int64))
    for name, share in families.items():
        shares[name] = np.minimum(share, unclaimed)
        unclaimed = unclaimed - shares[name]
    on_cpu = np.minimum(on_cpu, unclaimed)
    claimed = {
        (name, "C", source): units
        for name, share in shares.items()
        for source in _SOURCES
        if (units := int((lost.lost_ns * share)[lost.source == source].sum()))
    }
    by_reason = {NO_SIGNAL: unclaimed - on_cpu, ON_CPU: on_cpu}
    unexplained = {
        reason: units
        for reason, share in by_reason.items()
        if (units := int((lost.lost_ns * share).sum()))
    }
    needing_spans = {
        detector.cause.id for detector in DETECTORS if "spans" in detector.needs
    }  # reported once for all
    missing = {key: n for key, n in accumulator.missing.items() if key[0] not in needing_spans}
    claimed = {**accumulator.claimed, **claimed}
    accumulator = replace(accumulator, claimed=claimed, unexplained=unexplained, missing=missing)
    totals = sum_cpu_time_in_pauses(lost, shares.get("cpu", 0) + on_cpu)
    return replace(accumulator, totals=totals), {**detector_shares, **shares}, unclaimed, on_cpu


def compute_data_wait_breakdown(rank: Rank, lost: LostTime) -> DataWaitBreakdown:
    """Compute what the critical thread did in each lost interval.

    For a rank with marks only intervals in data waits are evaluated, and of those in steps the time
    in which the main thread waited for another process of the job, or was blocked in reads.
    """
    n = lost.start_ns.size
    rows = (lost.phase == PHASE_DATA_WAIT).nonzero()[0] if rank.marked else np.arange(n)
    measured = split_data_wait(rank, lost.start_ns[rows], lost.end_ns[rows]) if rows.size else None
    measured = _correct_feeders(rank, lost, rows, measured)
    if measured is not None and rows.size == n:
        return measured
    shares = np.zeros((len(_SHARE_COLUMNS), n))  # columns are contiguous
    out: dict[str, Any] = dict(zip(_SHARE_COLUMNS, shares))
    out["unknown"][:] = 1.0
    out["worker_pid"] = np.zeros(n, np.int64)
    out["identified"] = np.zeros(n, np.bool_)
    if measured is not None:
        for name, column in out.items():
            column[rows] = getattr(measured, name)
    _add_awaited_work(out, find_awaited_work(rank, lost))
    reads = estimate_read_shares(rank, lost) if rank.marked else None
    if reads is not None:
        out["block_io"] += reads[0]
        out["remote_io"] += reads[1]
        out["unknown"] -= reads[0] + reads[1]
    return DataWaitBreakdown(**out)


def _correct_feeders(
    rank: Rank, lost: LostTime, rows: Int, measured: DataWaitBreakdown | None
) -> DataWaitBreakdown | None:
    """Return the breakdown of waits for data with the processes that make the batches.

    rows: int64[m], the waits. Where no span says who makes a batch, the busiest process was taken;
    bytes show it better.
    """
    if measured is None or measured.identified.all():
        return measured
    feeders = find_feeders(rank, lost)
    if feeders is None:
        return measured
    guessed = ~measured.identified
    activity = feeders.activity[rows]
    columns = {
        name: np.where(guessed, activity[:, SHARE_NAMES.index(name)], getattr(measured, name))
        for name in _SHARE_COLUMNS
    }
    unexplained = 1.0 - activity[:, ACTIVE_COLUMNS].sum(axis=1)
    columns["unknown"] = np.where(guessed, unexplained, measured.unknown)
    pids = np.where(guessed, feeders.pids[0], measured.worker_pid)
    identified = measured.identified | guessed
    return DataWaitBreakdown(**columns, identified=identified, worker_pid=pids)


def _add_awaited_work(columns: Mapping[str, Any], works: Sequence[AwaitedWork]) -> None:
    """Add what awaited processes did to the breakdown of lost segments inside steps.

    columns: the fields of a `DataWaitBreakdown`; changed in place. What takes output delays the
    step as logging does: only its time without a CPU counts here.
    """
    for work in works:
        room = np.minimum(work.share, columns["unknown"])
        for column in (RUNNABLE,) if work.takes_output else ACTIVE_COLUMNS:
            amount = room * work.activity[:, column]
            columns[SHARE_NAMES[column]][:] += amount
            columns["unknown"][:] -= amount
        rows = (room > 0) & (columns["worker_pid"] == 0)
        if work.tid or not work.takes_output:  # else the line that hands over is of use
            columns["worker_pid"][rows] = work.pids[0]


def find_available_inputs(rank: Rank) -> frozenset[str]:
    """Return which inputs that detectors may need this rank's chunk has."""
    threads = any(process.threads for process in (rank.main, *rank.workers))
    threads = threads or has_traced_threads(rank)
    have = {"spans": rank.marked, "threads": threads, "device": bool(rank.device)}
    names: frozenset[str] | None = rank.chunk.shared.get(_NAMES)
    if names is None:
        names = rank.chunk.shared[_NAMES] = frozenset(name for name, _ in rank.chunk.series)
    return names | {word for word, available in have.items() if available}


def find_missing_inputs(available: frozenset[str], detector: Detector) -> tuple[str, ...]:
    """Return which inputs a detector needs that are not available."""
    return tuple([need for need in detector.needs if need not in available])


def _attribute_by_detectors(
    rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Mapping[str, Any]
) -> tuple[Accumulator, dict[str, Int], Int]:
    claims: dict[str, Claims] = {}
    missing: dict[tuple[str, str], int] = {}
    available = find_available_inputs(rank)
    for detector in DETECTORS:
        id_ = detector.cause.id
        absent = find_missing_inputs(available, detector)
        if absent:
            missing.update({(id_, need): 1 for need in absent})
        claim = None if absent else detector.claim(rank, lost, breakdown, limits[id_])
        if claim is not None:
            claims[id_] = claim
        elif not absent:
            missing[(id_, "")] = 1
    if STARTUP in claims:
        share = subtract_sleep(rank, lost, claims[STARTUP].share)
        claims[STARTUP] = replace(claims[STARTUP], share=share)
    shares, unclaimed = allocate_claims(
        {id_: claim.share for id_, claim in claims.items()}, lost.lost_ns.size
    )
    unlocated = attribute_unlocated_reads(rank, lost, unclaimed)
    unclaimed = unclaimed if unlocated is None else unclaimed - unlocated
    inferred = (lost.phase == PHASE_DATA_WAIT) & ~breakdown.identified
    inferred &= not is_imported(rank.chunk)  # no thread was sampled: the mark is all there is
    unmeasured = find_unmeasured_causes(
        rank, {id_: id_ in shares for id_ in sorted(claims, key=_get_precedence)}
    )
    missing.update({(id_, MISSING_TRACE_DATA): 1 for id_ in unmeasured})
    accumulator = Accumulator(
        claimed=_sum_claims(lost, claims, shares, inferred),
        unexplained=_sum_unexplained(rank, lost, unclaimed, breakdown),
        evaluated={id_: 1 for id_ in claims if id_ not in unmeasured},
        missing=missing,
    )
    accumulator = _with_evidence(accumulator, claims)
    if unlocated is not None:
        accumulator, shares = (
            with_read_claims(accumulator, lost, unlocated),
            {**shares, READ_FAMILY: unlocated},
        )
    return accumulator, shares, unclaimed


def allocate_claims(
    claims: Mapping[str, NDArray[np.float64]], n: int
) -> tuple[dict[str, Int], Int]:
    """Allocate each interval to claims in order of precedence; also return the rest.

    claims: float64[n] per cause, 0 to 1, NaN = unknown, claims nothing.
    Returns int64[n] per cause that gets any, and the rest, in 1/SHARE_SCALE; per row
    they add up to exactly that.
    """
    unclaimed = np.full(n, SHARE_SCALE, np.int64)
    shares: dict[str, Int] = {}
    for id_ in sorted(claims, key=_get_precedence):
        if not claims[id_].any():
            continue
        # A number takes precedence over NaN in `fmax`: an unknown share claims nothing.
        wanted = np.rint(np.minimum(np.fmax(claims[id_], 0.0), 1.0) * SHARE_SCALE).astype(np.int64)
        share = np.minimum(wanted, unclaimed)
        if share.any():
            shares[id_] = share
            unclaimed = unclaimed - share
    return shares, unclaimed


def _get_precedence(id_: str) -> int:
    return PRECEDENCE.index(id_)


def _sum_claims(
    lost: LostTime,
    claims: Mapping[str, Claims],
    shares: Mapping[str, Int],
    inferred: NDArray[np.bool_],
) -> dict[tuple[str, str, int], int]:
    """Sum per cause, grade and source; a share whose thread was inferred is graded C."""
    out: dict[tuple[str, str, int], int] = {}
    sources = [source for source in _SOURCES if (lost.source == source).any()]
    uncertain = bool(inferred.any())
    for id_, share in shares.items():
        amount = lost.lost_ns * share
        for source in sources:
            rows = amount if len(sources) == 1 else np.where(lost.source == source, amount, 0)
            doubtful = int(rows[inferred].sum()) if uncertain else 0
            of_grade = {grade: 0 for grade in (claims[id_].grade, max("C", claims[id_].grade))}
            of_grade[claims[id_].grade] += int(rows.sum()) - doubtful
            of_grade[max("C", claims[id_].grade)] += doubtful
            out.update({(id_, grade, source): n for grade, n in of_grade.items() if n})
    return out


def _sum_unexplained(
    rank: Rank, lost: LostTime, unclaimed: Int, breakdown: DataWaitBreakdown
) -> dict[str, int]:
    in_wait = lost.phase == PHASE_DATA_WAIT
    in_worker_wait = in_wait & (breakdown.worker_pid > 0)
    moving = np.rint(np.where(in_worker_wait, breakdown.delivery, 0.0) * SHARE_SCALE).astype(
        np.int64
    )
    moving = np.minimum(moving, unclaimed)
    amount = lost.lost_ns * (unclaimed - moving)
    by_phase = {
        EVAL: lost.phase == PHASE_EVAL,
        WITH_PEERS: lost.phase == PHASE_COLLECTIVE,
        BLOCKED: in_worker_wait,
    }
    out = {reason: int(amount[rows].sum()) for reason, rows in by_phase.items()}
    out.update(_sum_host_computation(rank, lost, unclaimed - moving))
    out[NO_SIGNAL] = int(amount.sum()) - sum(out.values())
    out[BATCH_TRANSFER] = int((lost.lost_ns * moving).sum())
    return {reason: units for reason, units in out.items() if units}


def _sum_host_computation(rank: Rank, lost: LostTime, unclaimed: Int) -> dict[str, int]:
    """Sum the unclaimed time in which the host of an imported trace computed, by function.

    unclaimed: int64[n]. Returns units of ns / SHARE_SCALE by reason.
    """
    share = measure_host_work(rank, lost, layout.COMPUTING_ON_HOST)
    remaining_units = np.minimum(np.rint(share * SHARE_SCALE).astype(np.int64), unclaimed)
    out = {}
    functions = list_host_functions(
        rank, lost, remaining_units > 0, layout.COMPUTING_ON_HOST, count=_MAX_FUNCTIONS_NAMED
    )
    for name, covered_ns in functions:
        ratio = np.minimum(covered_ns / np.maximum(lost.lost_ns, 1), 1.0)
        units = np.minimum(np.rint(ratio * SHARE_SCALE).astype(np.int64), remaining_units)
        out[f"{ON_HOST}:{name}"] = int((lost.lost_ns * units).sum())
        remaining_units = remaining_units - units
    return {**out, ON_HOST: int((lost.lost_ns * remaining_units).sum())}


def _with_evidence(accumulator: Accumulator, claims: Mapping[str, Claims]) -> Accumulator:
    evidence: dict[tuple[str, str, str, str], int] = {}
    weights: dict[tuple[str, str, str, str], int] = {}
    resources: dict[tuple[str, str, ResourceKind, str, int], int] = {}
    for id_, claim in claims.items():
        units = sum(n for key, n in accumulator.claimed.items() if key[0] == id_)
        if not units:
            continue
        if claim.resource:
            facts = claim.resource_facts
            pid = -1 if facts.pid is None else facts.pid
            resources[(id_, claim.resource, facts.kind, facts.name, pid)] = units
        for item in claim.evidence:
            key = (id_, item.name, item.unit, item.note)
            weight = max(1, units // SHARE_SCALE)
            scaled = round(item.value * EVIDENCE_SCALE)
            evidence[key] = scaled if is_sum(item) else scaled * weight
            if not is_sum(item):
                weights[key] = weight
    return replace(accumulator, evidence=evidence, weights=weights, resources=resources)


def is_sum(item: Evidence) -> bool:
    """Return whether evidence adds up over time rather than being averaged."""
    return item.name.endswith("_total")


def collect_evidence(accumulator: Accumulator, cause_id: str) -> tuple[Evidence, ...]:
    """Return the merged evidence for a cause."""
    out = []
    for key, value in accumulator.evidence.items():
        id_, name, unit, note = key
        if id_ == cause_id:
            weight = accumulator.weights.get(key, 1)
            out.append(Evidence(name, value / weight / EVIDENCE_SCALE, unit, note))
    return tuple(out)
