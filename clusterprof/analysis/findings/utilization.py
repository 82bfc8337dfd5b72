"""Summarize device utilization during device work, and advise on under-used devices.

Under-used device time is no lost time and is not ranked among its causes. The advice follows from
measurements while a device was working:

    SM activity < 0.5            likely ineffective (NVIDIA on DCGM's metric)
      DRAM or tensor cores busy  none: memory bandwidth or tensor cores are the limit
      now and then nearly full   only a part of each step is small: fuse that part
      memory free >= 30 %        a larger batch
      main thread on a CPU       kernel launches: torch.compile, CUDA graphs
      none of these              torch.compile, or free memory for a larger batch
    not recorded                 a larger batch "may be" due, where power is low and
                                 half the memory is free
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from clusterprof.analysis.attribution.confidence import compute_confidence_score
from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.rank import utilization
from clusterprof.report.impact import (
    AdviceCode,
    DeviceUtilization,
    RankUtilization,
    UtilizationAdvice,
    UtilizationLevels,
)

LOW_SM_ACTIVITY_RATIO = 0.5
"""SM activity during device work below which advice is given."""
HIGH_SM_ACTIVITY_RATIO = 0.7
"""90th percentile of SM activity from which only a part of each step is small."""
DRAM_BUSY_RATIO, TENSOR_BUSY_RATIO = 0.5, 0.3
"""Share of DRAM bandwidth, and of tensor core time, from which the device is at its limit."""
MIN_FREE_MEMORY_RATIO = 0.3
"""Part of device memory never in use from which a larger batch fits."""
LAUNCH_BOUND_RATIO = 0.8
"""Part of its time outside marked waits from which the main thread is always launching."""
LOW_POWER_RATIO, LARGE_FREE_MEMORY_RATIO = 0.4, 0.5
"""Weaker signs: power between idle and its limit; part of device memory never in use."""
MIN_WORK_NS = 1_000_000_000
ZERO_READING = "zero-reading"
NOT_MEASURED = "no accelerator was measured inside steps"

ADVICE_TEXTS: Mapping[AdviceCode, str] = {
    "larger-batch": "Raise the batch size while at most 80 % of the memory is used",
    "fewer-launches": "Launch less and larger work: torch.compile, CUDA graphs, fused optimizers",
    "larger-kernels": "Memory is nearly full: fuse operations with torch.compile, or make room for"
    " a larger batch (activation checkpointing, sharded optimizer states)",
    "uneven-step": "Part of each step fills the device and part does not: fuse the small operations"
    " (torch.compile, fused optimizers), overlap communication with computation",
    "memory-bound": "Nothing to gain from a larger batch: the rate of the device's memory is the"
    " limit",
    "tensor-bound": "Nothing to gain from a larger batch: its tensor cores are busy",
}
"""Code of an advice -> its text."""


def build_device_utilization(ranks: Sequence[RankResult]) -> DeviceUtilization:
    """Build the utilization ledger of all ranks' devices, and the advice."""
    pairs = [
        (rank, _build_rank_utilization(rank))
        for rank in ranks
        if rank.accumulator.utilization.get((utilization.BUSY, 0), 0)
    ]
    fills = tuple(replace(fill, advice=_choose_advice_codes(fill)) for _, fill in pairs)
    reasons: dict[str, int] = {}
    for fill in fills:
        for reason, ns in fill.reasons:
            reasons[reason] = reasons.get(reason, 0) + ns
    peers = any(rank.has_peers for rank, _ in pairs)
    return DeviceUtilization(
        busy_ns=sum(fill.busy_ns for fill in fills),
        lost_ns=sum(fill.lost_ns for fill in fills),
        well_used_ns=sum(fill.well_used_ns for fill in fills),
        under_used_ns=sum(fill.under_used_ns for fill in fills),
        unmeasured_ns=sum(fill.unmeasured_ns for fill in fills),
        reasons=_sort_by_amount(reasons),
        ranks=fills,
        advice=_build_advice(fills, peers),
        why_missing="" if fills else NOT_MEASURED,
    )


def _build_rank_utilization(rank: RankResult) -> RankUtilization:
    sums, ledger = rank.accumulator.utilization, rank.ledger
    work, active = (sums.get((signal, 0), 0) for signal in (utilization.WORK, utilization.ACTIVE))
    unmeasured = {why: ns for why in utilization.UNMEASURED if (ns := sums.get((why, 0), 0))}
    if not sums.get((utilization.SM_KNOWN, 0), 0) and utilization.NO_READING in unmeasured:
        missing = unmeasured.pop(utilization.NO_READING)  # a column without a single reading
        unmeasured[utilization.NO_SM_ACTIVITY] = (
            unmeasured.get(utilization.NO_SM_ACTIVITY, 0) + missing
        )
    if work >= MIN_WORK_NS and not active:
        # Kernels need a multiprocessor: a driver that reports none measures nothing.
        unmeasured[ZERO_READING], work = work, 0
    filled = min(work, active)
    return RankUtilization(
        node=ledger.node,
        rank=ledger.rank,
        pid=ledger.pid,
        device=ledger.device,
        busy_ns=sums.get((utilization.BUSY, 0), 0),
        lost_ns=sums.get((utilization.LOST, 0), 0),
        well_used_ns=filled,
        under_used_ns=work - filled,
        unmeasured_ns=sum(unmeasured.values()),
        reasons=_sort_by_amount(unmeasured),
        levels=_build_levels(sums, filled, work),
    )


def _build_levels(sums: Mapping[tuple[str, int], int], filled: int, work: int) -> UtilizationLevels:
    means = {signal: _compute_share(sums, signal) for signal in utilization.MEAN_SIGNALS}
    totals = _get_histogram(sums, utilization.MEMORY_TOTAL)
    used_permille = _get_histogram(sums, utilization.MEMORY)
    size = max(totals) if totals else None
    return UtilizationLevels(
        sm_active_ratio=filled / work if work else None,
        sm_active_p90_ratio=_compute_p90(_get_histogram(sums, utilization.LEVEL)) if work else None,
        sm_occupancy_ratio=means["occupancy"],
        tensor_active_ratio=means["tensor"],
        dram_active_ratio=means["dram"],
        power_ratio=_estimate_power_ratio(sums),
        memory_used_bytes=size * max(used_permille) // 1000 if size is not None else None,
        memory_total_bytes=size,
        host_on_cpu_ratio=_compute_share(sums, utilization.HOST),
    )


def _compute_share(sums: Mapping[tuple[str, int], int], signal: str) -> float | None:
    """Compute the mean of a share over the time for which it is known."""
    mean = _compute_mean(sums, signal)
    return None if mean is None else min(1.0, mean)


def _compute_mean(sums: Mapping[tuple[str, int], int], signal: str) -> float | None:
    known_ns = sums.get((signal + utilization.KNOWN_SUFFIX, 0), 0)
    return sums.get((signal, 0), 0) / known_ns if known_ns else None


def _get_histogram(sums: Mapping[tuple[str, int], int], signal: str) -> dict[int, int]:
    return {level: ns for (name, level), ns in sums.items() if name == signal}


def _compute_p90(levels: Mapping[int, int]) -> float | None:
    """Compute the level that nine tenths of the time do not exceed, from percent to a ratio."""
    reached, total_ns = 0, sum(levels.values())
    for level in sorted(levels):
        reached += levels[level]
        if 10 * reached >= 9 * total_ns:
            return level / 100
    return None


def _estimate_power_ratio(sums: Mapping[tuple[str, int], int]) -> float | None:
    """Estimate power during device work between idle and the limit; idle parts are subtracted."""
    drawn, limit = (
        _compute_mean(sums, utilization.POWER),
        _compute_mean(sums, utilization.POWER_LIMIT),
    )
    if drawn is None or limit is None:
        return None
    idle_watts = _compute_mean(sums, utilization.IDLE_POWER) or 0.0
    busy = (
        sums.get((utilization.POWER_BUSY, 0), 0)
        / sums[utilization.POWER + utilization.KNOWN_SUFFIX, 0]
    )
    if limit <= idle_watts or busy <= 0:
        return None
    return min(1.0, max(0.0, (drawn - idle_watts) / busy / (limit - idle_watts)))


def _choose_advice_codes(fill: RankUtilization) -> tuple[str, ...]:
    """Choose the codes of the advice on one device."""
    levels = fill.levels
    if fill.busy_ns - fill.lost_ns < MIN_WORK_NS:
        return ()
    if not fill.is_measured:
        has_low_power = levels.power_ratio is not None and levels.power_ratio < LOW_POWER_RATIO
        room = levels.memory_free_ratio
        return (
            ("larger-batch",)
            if has_low_power and room is not None and room >= LARGE_FREE_MEMORY_RATIO
            else ()
        )
    if levels.sm_active_ratio is None or levels.sm_active_ratio >= LOW_SM_ACTIVITY_RATIO:
        return ()
    if (levels.dram_active_ratio or 0.0) >= DRAM_BUSY_RATIO:
        return ("memory-bound",)
    if (levels.tensor_active_ratio or 0.0) >= TENSOR_BUSY_RATIO:
        return ("tensor-bound",)
    if (levels.sm_active_p90_ratio or 0.0) >= HIGH_SM_ACTIVITY_RATIO:
        return ("uneven-step",)
    room = levels.memory_free_ratio
    codes = ["larger-batch"] if room is None or room >= MIN_FREE_MEMORY_RATIO else []
    if (levels.host_on_cpu_ratio or 0.0) >= LAUNCH_BOUND_RATIO:
        codes.append("fewer-launches")
    return tuple(codes or ["larger-kernels"])


def _build_advice(fills: Sequence[RankUtilization], peers: bool) -> tuple[UtilizationAdvice, ...]:
    """Build the advice, once for measured and once for inferred devices."""
    advice = []
    for code, text in ADVICE_TEXTS.items():
        for measured in (True, False):
            matching = [
                fill for fill in fills if code in fill.advice and fill.is_measured == measured
            ]
            if matching:
                advice.append(_format_advice(code, text, matching, measured, peers))
    return tuple(sorted(advice, key=lambda item: (-item.ranks, not item.measured)))


def _format_advice(
    code: AdviceCode, text: str, fills: Sequence[RankUtilization], measured: bool, peers: bool
) -> UtilizationAdvice:
    """Format one piece of advice with its confidence.

    Collective kernels that could not be identified have low activity too; and a larger batch is a
    guess while the amount of free memory is not known.
    """
    no_memory = code == "larger-batch" and any(
        fill.levels.memory_free_ratio is None for fill in fills
    )
    if no_memory:
        text += " (how much is free was not recorded)"
    if code in ("larger-batch", "fewer-launches", "larger-kernels") and peers and measured:
        text += "; kernels of collectives may be part of it"
    is_sure = measured and not no_memory and not peers
    known_ns = sum(fill.well_used_ns + fill.under_used_ns for fill in fills) if measured else 1
    unknown = sum(fill.unmeasured_ns for fill in fills) if measured else 0
    score = compute_confidence_score({"B" if is_sure else "C": max(known_ns, 1)}, unknown, 1.0)
    return UtilizationAdvice(code, text, measured, score, "B" if is_sure else "C", len(fills))


def _sort_by_amount(amounts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((k, ns) for k, ns in amounts.items() if ns), key=lambda p: (-p[1], p[0])))
