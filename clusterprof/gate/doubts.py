"""Why a verdict on a recording would be worth nothing."""

from __future__ import annotations

from clusterprof.findings import Report
from clusterprof.gate.rules import Policy
from clusterprof.units import human


def doubts_of(report: Report, policy: Policy) -> tuple[str, ...]:
    """Say why a verdict on this recording would be worth nothing; nothing to say is good."""
    doubts: list[str] = []
    steps = min((rank.steps for rank in report.ranks), default=0)
    if steps < policy.min_steps:
        doubts.append(
            f"steps: {steps:,} of the rank with the fewest, {policy.min_steps:,} needed"
            " (record for longer, or lower --min-steps)"
        )
    covered = [rank.coverage_ratio for rank in report.ranks]
    # asked of each rank, not of the smallest: min() lets NaN slip past a comparison
    if not covered or not all(ratio >= policy.min_coverage_ratio for ratio in covered):
        coverage = min(covered, default=0.0)
        doubts.append(
            f"coverage: samples for {human(coverage, 'ratio')} of the time of the rank with the"
            f" least, {human(policy.min_coverage_ratio, 'ratio')} needed (see --min-coverage)"
        )
    damaged = sum(node.damaged_bytes for node in report.nodes)
    if damaged > policy.max_damaged_bytes:
        doubts.append(
            f"damage: {human(damaged, 'bytes')} of the recording could not be read,"
            f" {human(policy.max_damaged_bytes, 'bytes')} allowed"
        )
    dropped = sum(node.dropped_spans for node in report.nodes)
    if dropped > policy.max_dropped_spans:
        doubts.append(f"losses: {dropped:,} spans dropped, {policy.max_dropped_spans:,} allowed")
    missing = _missing_ranks(report, policy)
    if missing:
        doubts.append(missing)
    return tuple(doubts)


def _missing_ranks(report: Report, policy: Policy) -> str:
    world = report.job.world_size if report.job is not None else None
    if not world:
        return ""
    seen = len(report.ranks)  # of all jobs and lives, as the world is
    if seen >= policy.min_ranks_ratio * world:
        return ""
    return (
        f"ranks: {seen:,} of the job's {world:,} were recorded,"
        f" {human(policy.min_ranks_ratio, 'ratio')} needed (give the folders of all its nodes)"
    )
