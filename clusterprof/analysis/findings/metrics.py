"""Build the metrics a gate may test; an unmeasured metric is None with a reason.

It also sums the step blocks of all ranks, and fits the sums to those of the report.

What a rank lost by itself is known by block. The causes of its waits for others are known for the
run as a whole: they are spread over the blocks as its time without a cause of its own was.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from clusterprof.analysis.attribution.accumulator import Accumulator, merge_accumulators
from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.rank import utilization
from clusterprof.analysis.attribution.rank.step_blocks import (
    IDLE,
    LOST,
    MEASURED,
    ROWS,
    STEP_NS,
    STEPS,
    SUSPECTED,
    TIME,
    StepBlockTable,
    merge_keys,
    unpack_keys,
)
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.cross_rank.implicit_collectives import UNVERIFIED_BUSY
from clusterprof.analysis.detectors.cross_rank import NETWORK_LIMITS
from clusterprof.analysis.detectors.registry import DETECTORS
from clusterprof.analysis.findings.efficiency_metrics import NO_BENCHMARK
from clusterprof.analysis.timeline.model import Int
from clusterprof.report.history import StepStats
from clusterprof.report.impact import DeviceUtilization
from clusterprof.report.model import UNATTRIBUTED, Metric, NodeFacts
from clusterprof.units import format_quantity, infer_unit
from clusterprof.util.statistics import find_quantile

Bound = Literal["exact", "at most", "at least"]
_NO_STEPS = "no steps were recorded"
_NO_DEVICE = "no accelerator was measured inside steps"
_NO_SM_ACTIVITY = "no SM activity was recorded"
_MAX_UNOBSERVED_RATIO = 0.01  # of the time in steps: with more, a sum of all losses is no bound
_MAX_UNVERIFIED_RATIO = 0.01  # of the time in steps, busy: with more, a loss is a lower bound
_SUMS_OF_ALL_LOSSES = ("lost.ratio", "productive.ratio", "au_ratio", "unattributed.ratio")
_MIN_KNOWN_RATIO = 0.9  # of the time: a smaller part does not represent all of it


def build_metrics(
    ranks: Sequence[RankResult],
    nodes: Sequence[NodeFacts],
    utilization: DeviceUtilization,
    au: float | None = None,
) -> tuple[Metric, ...]:
    """Build every metric over all ranks, in a fixed order; au: AU of MLPerf Storage."""
    combined = merge_accumulators(*(rank.accumulator for rank in ranks))
    in_step_ns = sum(rank.ledger.in_step_ns for rank in ranks)
    lost_ns = sum(rank.ledger.lost_ns for rank in ranks)
    bounded = any(rank.ledger.source == "host-spans" for rank in ranks)
    buckets: dict[str, int] = {}
    for rank in ranks:
        for id_, ns in rank.ledger.buckets:
            buckets[id_] = buckets.get(id_, 0) + ns
    unverified_ns = combined.totals.get(UNVERIFIED_BUSY, 0)
    is_least = not bounded and unverified_ns > _MAX_UNVERIFIED_RATIO * in_step_ns
    upper: Bound = "at most" if bounded else "at least" if is_least else "exact"
    lower: Bound = "at least" if bounded else "at most" if is_least else "exact"
    metrics = (
        _compute_busy_ratio(combined),
        _compute_sm_active_ratio(combined),
        _compute_underuse_ratio(utilization),
        _build_ratio("lost.ratio", lost_ns, in_step_ns, upper),
        _build_ratio("productive.ratio", in_step_ns - lost_ns, in_step_ns, lower),
        _build_metric("au_ratio", au, NO_BENCHMARK),
        *_list_stall_metrics(ranks, combined, buckets, in_step_ns, upper),
        *_list_cross_rank_metrics(ranks, combined, buckets, in_step_ns, upper),
        _build_ratio("unattributed.ratio", buckets.get(UNATTRIBUTED, 0), in_step_ns, upper),
        _compute_data_wait_ratio(ranks, combined, in_step_ns),
        _compute_coverage_ratio(ranks),
        *_list_step_metrics(combined),
        _compute_recorder_cpu_ratio(nodes),
    )
    unobserved_ns = sum(rank.ledger.unobserved_ns for rank in ranks)
    if unobserved_ns <= _MAX_UNOBSERVED_RATIO * in_step_ns:
        return metrics
    part = format_quantity(unobserved_ns / in_step_ns, "ratio")
    why = f"neither device nor host was observed for {part} of the time in steps"
    return tuple(
        _build_metric(metric.name, None, why)
        if metric.value is not None
        and (metric.bound != "exact" or metric.name in _SUMS_OF_ALL_LOSSES)
        else metric
        for metric in metrics
    )


def _build_metric(name: str, value: float | None, why: str = "", bound: Bound = "exact") -> Metric:
    return Metric(name, value, _get_unit(name), why if value is None else "", bound)


def _get_unit(name: str) -> str:
    return infer_unit(name.replace(".", "_"))


def _build_ratio(name: str, portion: int, total: int, bound: Bound = "exact") -> Metric:
    return _build_metric(name, portion / total if total > 0 else None, _NO_STEPS, bound)


def _compute_busy_ratio(accumulator: Accumulator) -> Metric:
    measured, busy = accumulator.totals.get("measured", 0), accumulator.totals.get("busy", 0)
    return _build_metric("gpu.busy_ratio", busy / measured if measured > 0 else None, _NO_DEVICE)


def _compute_sm_active_ratio(accumulator: Accumulator) -> Metric:
    """Compute the share of the multiprocessors with work, mean over the time in steps."""
    active, known_ns = (
        accumulator.utilization.get((signal, 0), 0)
        for signal in (utilization.SM, utilization.SM_KNOWN)
    )
    return _build_known_ratio(
        "gpu.sm_active_ratio", active, known_ns, accumulator.totals.get("measured", 0)
    )


def _compute_underuse_ratio(utilization: DeviceUtilization) -> Metric:
    """Compute how much of the devices was left empty during device work."""
    known_ns = utilization.well_used_ns + utilization.under_used_ns
    return _build_known_ratio(
        "underfill.ratio",
        utilization.under_used_ns,
        known_ns,
        utilization.busy_ns - utilization.lost_ns,
    )


def _build_known_ratio(name: str, measured_ns: int, known_ns: int, whole_ns: int) -> Metric:
    """Build a ratio that was measured for most of the time, else why it is not known."""
    if known_ns > 0 and known_ns >= _MIN_KNOWN_RATIO * whole_ns:
        return _build_metric(name, measured_ns / known_ns)
    why = (
        f"SM activity is known for {format_quantity(known_ns / whole_ns, 'ratio')} of it"
        if known_ns
        else ""
    )
    return _build_metric(name, None, why or (_NO_SM_ACTIVITY if whole_ns > 0 else _NO_DEVICE))


def _list_stall_metrics(
    ranks: Sequence[RankResult],
    accumulator: Accumulator,
    buckets: Mapping[str, int],
    in_step_ns: int,
    bound: Bound,
) -> list[Metric]:
    """List one metric per family and cause; 0.0 only where a cause was checked and not found."""
    unmarked = any(not rank.marked for rank in ranks)
    out = []
    for family in dict.fromkeys(detector.cause.family for detector in DETECTORS):
        of_family = [detector.cause.id for detector in DETECTORS if detector.cause.family == family]
        part = sum(ns for id_, ns in buckets.items() if _get_family(id_) == family)
        # A leaf that lacks only a counter of its own leaves its time to a sibling.
        is_unmeasured = any(
            cause in of_family
            and cause not in accumulator.evaluated
            and need in ("spans", "threads", "device")
            for cause, need in accumulator.missing
        )
        is_checked = any(id_ in accumulator.evaluated for id_ in of_family) and not is_unmeasured
        by_family = unmarked and family in ("storage", "cpu")
        value = part / in_step_ns if in_step_ns > 0 and (is_checked or by_family) else None
        why = _NO_STEPS if in_step_ns <= 0 else _explain_missing(accumulator, of_family)
        least: Bound = "at least" if by_family and bound == "exact" else bound
        out.append(_build_metric(f"stall.{family}_ratio", value, why, least))
        is_vague = family not in of_family and buckets.get(family, 0) > 0
        out += [
            _build_leaf_metric(id_, accumulator, buckets, in_step_ns, bound, is_vague or unmarked)
            for id_ in of_family
            if id_ != family
        ]
    return out


def _list_cross_rank_metrics(
    ranks: Sequence[RankResult],
    accumulator: Accumulator,
    buckets: Mapping[str, int],
    in_step_ns: int,
    bound: Bound,
) -> list[Metric]:
    """List the metrics that only a comparison of ranks gives; None without operations."""
    has_waits = any(rank.victim_ns or rank.culprit_ns for rank in ranks)
    why = "no operations of different ranks could be matched" if in_step_ns > 0 else _NO_STEPS
    out = []
    for family in ("network", "synchronization"):
        part = sum(ns for id_, ns in buckets.items() if _get_family(id_) == family)
        value = part / in_step_ns if has_waits and in_step_ns > 0 else None
        out.append(_build_metric(f"stall.{family}_ratio", value, why, bound))
    for id_ in NETWORK_LIMITS:
        if has_waits and in_step_ns > 0:
            is_vague = buckets.get("network", 0) > 0
            out.append(_build_leaf_metric(id_, accumulator, buckets, in_step_ns, bound, is_vague))
        else:
            out.append(_build_metric(f"stall.{id_}_ratio", None, why))
    return out


def _build_leaf_metric(
    id_: str,
    accumulator: Accumulator,
    buckets: Mapping[str, int],
    in_step_ns: int,
    bound: Bound,
    is_vague: bool,
) -> Metric:
    name = f"stall.{id_}_ratio"
    if in_step_ns <= 0:
        return _build_metric(name, None, _NO_STEPS)
    if id_ not in accumulator.evaluated:
        return _build_metric(name, None, _explain_missing(accumulator, [id_]))
    if is_vague:
        return _build_metric(name, None, "some of it is known only at family level")
    return _build_metric(name, buckets.get(id_, 0) / in_step_ns, "", bound)


def _explain_missing(accumulator: Accumulator, ids: list[str]) -> str:
    needs = sorted({need for cause, need in accumulator.missing if cause in ids and need})
    return f"the recording has no {', '.join(needs)}" if needs else "no probe marked the job"


def _get_family(id_: str) -> str:
    return CAUSES[id_].family if id_ in CAUSES else id_


def _compute_data_wait_ratio(
    ranks: Sequence[RankResult], accumulator: Accumulator, in_step_ns: int
) -> Metric:
    """Compute the host time in waits for data, hidden by device work or not."""
    value = accumulator.totals.get("wait", 0) / in_step_ns if in_step_ns > 0 else None
    why = _NO_STEPS
    if not any(rank.marked for rank in ranks):
        value, why = None, "no probe marked the job"
    return _build_metric("data_wait.ratio", value, why)


def _compute_coverage_ratio(ranks: Sequence[RankResult]) -> Metric:
    window = sum(rank.ledger.window_ns for rank in ranks)
    measured_ns = window - sum(rank.ledger.unmeasured_ns for rank in ranks)
    why = "no training process was recorded"
    return _build_metric("coverage.ratio", measured_ns / window if window > 0 else None, why)


def _list_step_metrics(accumulator: Accumulator) -> list[Metric]:
    count = sum(accumulator.steps.values())
    p50, p95, p99 = (find_quantile(accumulator.steps, share) for share in (0.5, 0.95, 0.99))
    return [
        _build_metric("step.count", float(count)),
        _build_metric("step.p50_ns", p50, _NO_STEPS),
        _build_metric("step.p95_ns", p95, _NO_STEPS),
        _build_metric("step.p99_ns", p99, _NO_STEPS),
    ]


def _compute_recorder_cpu_ratio(nodes: Sequence[NodeFacts]) -> Metric:
    known_ratios = [
        node.recorder_cpu_ratio for node in nodes if node.recorder_cpu_ratio is not None
    ]
    why = "the recorder's own CPU time was not recorded"
    return _build_metric("recorder.cpu_ratio", max(known_ratios) if known_ratios else None, why)


_MIN_MEASURED_RATIO = 0.9


def build_step_stats(ranks: Sequence[RankResult]) -> StepStats | None:
    """Build the sums of all ranks by block of steps; None where no rank marked steps."""
    with_blocks = [(rank, rank.blocks) for rank in ranks if rank.blocks is not None]
    if not with_blocks:
        return None
    width = max(blocks.width for _, blocks in with_blocks)
    widened = [(rank, blocks.widen(width)) for rank, blocks in with_blocks]
    count = max(blocks.count_blocks() for _, blocks in widened)
    in_step, sums = np.zeros(count, np.int64), np.zeros((ROWS, count), np.int64)
    claims: dict[str, Int] = {}
    for rank, blocks in widened:
        rank_sums = blocks.sums
        columns = slice(0, rank_sums.shape[1])
        in_step[columns] += allocate_by_profile(
            rank.ledger.in_step_ns, _choose_block_time(rank_sums)
        )
        sums[:, columns] += rank_sums
        for cause, ns in blocks.lost.items():
            claims.setdefault(cause, np.zeros(count, np.int64))[columns] += ns
    # Ranks without a step have no time inside steps, or time without a block: it goes to the last.
    in_step[-1] += sum(rank.ledger.in_step_ns for rank in ranks) - int(in_step.sum())
    total = sum(rank.ledger.lost_ns for rank in ranks)
    lost = allocate_by_profile(
        total, _estimate_lost(total, sums[LOST], claims.pop(SUSPECTED, None))
    )
    causes = _allocate_causes(_sum_buckets(ranks), claims, lost)
    return StepStats(
        width=width,
        steps=_convert_to_tuple(sums[STEPS]),
        step_ns=_convert_to_tuple(sums[STEP_NS]),
        in_step_ns=_convert_to_tuple(in_step),
        measured_ns=_convert_to_tuple(sums[MEASURED]),
        busy_ns=_convert_to_tuple(sums[MEASURED] - sums[IDLE]),
        lost_ns=_convert_to_tuple(lost),
        lost=tuple(
            (cause, _get_cause_family(cause), _convert_to_tuple(ns)) for cause, ns in causes
        ),
        lengths=_build_length_histograms([blocks for _, blocks in widened], count),
    )


def allocate_by_profile(total: int, profile: Int) -> Int:
    """Allocate a total in proportion to a profile; whole numbers that add up to the total.

    7 over 1, 1 and 2 is 2, 2 and 3. profile: int64[n]; negative entries count as 0. Returns
    int64[n].
    """
    weights = np.maximum(profile, 0).astype(np.float64)
    if not weights.sum() > 0:
        weights = np.ones(profile.size)
    until = np.rint(np.cumsum(weights) / weights.sum() * abs(total)).astype(np.int64)
    until[-1] = abs(total)
    parts = np.diff(until, prepend=0)
    return parts if total >= 0 else -parts


def _choose_block_time(sums: Int) -> Int:
    """Choose the time of each block: measured time where samples have gaps, else step time.

    Steps divide time more finely than samples do, but only samples show how much was measured.
    sums: int64[ROWS, blocks] of a rank.
    """
    measured, time = sums[MEASURED], sums[TIME]
    return measured if 0 < measured.sum() < _MIN_MEASURED_RATIO * time.sum() else time


def _estimate_lost(total: int, sure: Int, suspected: Int | None) -> Int:
    """Estimate the lost time by block, with suspected loss as far as the total includes it."""
    missing_ns = total - int(sure.sum())
    if suspected is None or missing_ns <= 0:
        return sure
    return sure + allocate_by_profile(min(missing_ns, int(suspected.sum())), suspected)


def _sum_buckets(ranks: Iterable[RankResult]) -> Counter[str]:
    out: Counter[str] = Counter()
    for rank in ranks:
        out.update(dict(rank.ledger.buckets))
    return out


def _allocate_causes(
    buckets: Mapping[str, int], claims: Mapping[str, Int], lost: Int
) -> list[tuple[str, Int]]:
    """Allocate every bucket to the blocks with exact sums: (cause, ns by block)."""
    waited = lost - sum(claims.values(), np.zeros_like(lost))
    profiles: dict[str, Int] = {}
    by_family: dict[str, list[tuple[int, Int]]] = {}  # leaf causes reported by family
    for cause, ns in claims.items():
        claimed, reported = int(ns.sum()), buckets.get(cause, 0)
        profiles[cause] = allocate_by_profile(min(reported, claimed), ns)
        if reported < claimed:
            by_family.setdefault(_get_cause_family(cause), []).append((claimed - reported, ns))
    out = []
    for cause, total in buckets.items():
        own_ns = profiles.get(cause, np.zeros_like(lost))
        remaining_ns = total - int(own_ns.sum())
        for family_ns, profile in by_family.pop(cause, []):
            part = allocate_by_profile(min(family_ns, remaining_ns), profile)
            own_ns, remaining_ns = own_ns + part, remaining_ns - int(part.sum())
        if cause != UNATTRIBUTED:
            out.append((cause, own_ns + allocate_by_profile(remaining_ns, waited)))
    unexplained = lost - sum((ns for _, ns in out), np.zeros_like(lost))
    out.append((UNATTRIBUTED, allocate_by_profile(buckets.get(UNATTRIBUTED, 0), unexplained)))
    return sorted(out, key=lambda item: (-int(item[1].sum()), item[0]))


def _get_cause_family(cause: str) -> str:
    return CAUSES[cause].family if cause in CAUSES else cause


def _build_length_histograms(
    blocks: Sequence[StepBlockTable], n: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    keys = merge_keys(np.concatenate([part.keys for part in blocks], axis=1))
    block, bin_ = unpack_keys(keys)
    edges = np.searchsorted(block, np.arange(n + 1))
    pairs = list(zip(bin_.tolist(), keys[1].tolist()))
    return tuple(tuple(pairs[low:high]) for low, high in itertools.pairwise(edges))


def _convert_to_tuple(numbers: Int) -> tuple[int, ...]:
    return tuple(numbers.tolist())
