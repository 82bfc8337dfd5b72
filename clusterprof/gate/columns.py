"""What a metric is made of, block of steps by block: the ground on which its noise is judged."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterprof.stepstats import StepStats, lower_edge_ns

_STALL = re.compile(r"stall\.(.+)_ratio", re.ASCII)


def columns_of(name: str, steps: StepStats) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return numerator and denominator by block of a ratio; None when blocks do not tell it."""
    if name == "gpu.busy_ratio":
        return steps.busy_ns, steps.measured_ns
    if name == "lost.ratio":
        return steps.lost_ns, steps.in_step_ns
    if name in ("productive.ratio", "au_ratio"):
        kept = [all_ - lost for all_, lost in zip(steps.in_step_ns, steps.lost_ns)]
        return kept, steps.in_step_ns
    if name == "unattributed.ratio":
        return steps.of_causes({"unattributed"}), steps.in_step_ns
    if name == "step.mean_ns":
        return steps.step_ns, steps.steps
    match = _STALL.fullmatch(name)
    if match is None:
        return None
    families = {family for _, family, _ in steps.lost}
    if match[1] in families:
        return steps.of_family(match[1]), steps.in_step_ns
    return steps.of_causes({match[1]}), steps.in_step_ns


def quantile_ns(steps: StepStats, share: float) -> float | None:
    """Return the length that a share of the steps of all ranks does not exceed, within its bin by
    proportion; None without steps."""
    counts: dict[int, int] = {}
    for block in steps.lengths:
        for bin_, count in block:
            counts[bin_] = counts.get(bin_, 0) + count
    target, reached = share * sum(counts.values()), 0
    for bin_ in sorted(counts):
        count = counts[bin_]
        if reached + count >= target:
            low, high = lower_edge_ns(bin_), lower_edge_ns(bin_ + 1)
            return low + (high - low) * max(0.0, target - reached) / count
        reached += count
    return None
