"""What fixing each finding, and each of its culprits, would save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from clusterprof.analysis.attribution.wait_for.blame import IMBALANCE, SLOW_COMPUTE
from clusterprof.analysis.findings.comparisons import CHIEF_RATIO
from clusterprof.report.impact import CauseImpact, Impact
from clusterprof.report.model import Culprit, Finding

CulpritSavings = Callable[[Finding, Culprit], int | None]
"""Savings of the job in ns if one culprit of a finding is fixed; None = not known."""
MIN_EXTRA_RATIO = 1.02
"""Savings over lost time from which the difference is explained."""


def with_savings(
    findings: Sequence[Finding], job_impact: Impact, estimate: CulpritSavings | None = None
) -> tuple[Finding, ...]:
    """Return the findings with the savings of fixing them.

    job_impact: has one line per finding, in their order. estimate: returns what fixing one culprit
    saves, where ranks met in several groups.

    Raises: ValueError when the number of lines differs.
    """
    return tuple(
        _with_finding_savings(
            finding if estimate is None else _replay_culprits(finding, estimate, job_impact.gpus),
            impact,
            job_impact.gpus,
            estimate is not None,
        )
        for finding, impact in zip(findings, job_impact.causes, strict=True)
    )


def _replay_culprits(finding: Finding, estimate: CulpritSavings, gpus: int) -> Finding:
    """Replace what fixing one culprit saves by the replay in which it alone is fixed.

    In a pipeline the next late rank limits nothing: with uneven work only the replay knows. Of
    several main culprits each alone saves little, and the sum of these is not what all save.
    """
    is_work = finding.cause.id in (SLOW_COMPUTE, IMBALANCE)
    first_ns, *others_ns = [culprit.caused_ns for culprit in finding.culprits] or [0]
    has_several = any(ns >= CHIEF_RATIO * first_ns for ns in others_ns)

    def with_replay(culprit: Culprit) -> Culprit:
        saved_ns = None if is_work and has_several else estimate(finding, culprit)
        if saved_ns is not None:
            return replace(culprit, recoverable_ns=saved_ns * gpus)
        return replace(culprit, recoverable_ns=None) if is_work else culprit

    return replace(finding, culprits=tuple(map(with_replay, finding.culprits)))


def _with_finding_savings(
    finding: Finding, impact: CauseImpact, gpus: int, replayed: bool
) -> Finding:
    if impact.saved_ns is None:
        return replace(finding, recoverable_ns=None) if impact.is_unknowable else finding
    saved_ns = max(impact.saved_ns, 0) * gpus
    culprits = tuple(
        _cap_culprit_savings(culprit, saved_ns, len(finding.culprits))
        for culprit in finding.culprits
    )
    why_more = (
        _explain_extra_savings(finding, gpus)
        if saved_ns > MIN_EXTRA_RATIO * finding.lost_ns
        else ""
    )
    if why_more and len(culprits) > 1 and not replayed:
        # Of one of several culprits attribution knows only the waiting time. Next to these savings
        # fixing the culprit of nearly all of it would seem to save less than it caused.
        culprits = tuple(replace(culprit, recoverable_ns=None) for culprit in culprits)
    return replace(
        finding, recoverable_ns=saved_ns, culprits=culprits, why_savings_exceed_loss=why_more
    )


def _explain_extra_savings(finding: Finding, gpus: int) -> str:
    """Explain savings beyond the lost time: every device benefits from an earlier end."""
    if finding.cause.id in (SLOW_COMPUTE, IMBALANCE) and finding.culprits:
        rank = finding.culprits[0].rank
        first_ns, *others_ns = (culprit.caused_ns for culprit in finding.culprits)
        is_only = not others_ns or others_ns[0] < CHIEF_RATIO * first_ns
        if rank is not None and is_only:
            return f"rank {rank} also finishes sooner"
        return "the late ranks also finish sooner"
    text = f"all {gpus:,} devices finish sooner, including those that lost nothing"
    return text if gpus > 1 else ""


def _cap_culprit_savings(culprit: Culprit, saved_ns: int, count: int) -> Culprit:
    """Cap the savings of one culprit at those of its cause; a single culprit saves just these."""
    if culprit.recoverable_ns is None:
        return culprit
    return replace(
        culprit, recoverable_ns=saved_ns if count == 1 else min(culprit.recoverable_ns, saved_ns)
    )
