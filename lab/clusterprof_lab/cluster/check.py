"""Compare the report on a simulated cluster with its truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterprof.report.model import Finding, RankLedger, Report
from clusterprof_lab.cluster.plan import CAUSES, OF_NODES, ClusterPlan, Fault
from clusterprof_lab.truth import Truth

_MIN_FOUND_RATIO = 0.5
"""Least part of the true time of a fault that a right finding has."""


@dataclass(frozen=True, slots=True)
class FaultCheck:
    """What became of one injected fault."""

    fault: Fault
    truth_ns: int
    found_ns: int
    """By findings of its causes with a right culprit first."""
    culprit: str
    """Culprit named first by the largest finding of its causes: a rank or a node."""
    right: bool
    """True if that culprit is right and at least half of the time was found."""


@dataclass(frozen=True, slots=True)
class Check:
    """How a report compares with the truth."""

    ranks: int
    residual_ns: int
    """Largest sum by which any rank's ledger does not add up; 0 = all add up."""
    steps_residual_ns: int
    """Largest difference of a rank's time in steps to the true one."""
    lost_ratio: float
    """Reported over true lost time, all ranks."""
    faults: tuple[FaultCheck, ...]

    @property
    def right(self) -> bool:
        """True if all sums are exact and every fault has its culprit."""
        return not self.residual_ns and all(check.right for check in self.faults)


def check_report(report: Report, truth: Truth, plan: ClusterPlan) -> Check:
    """Compare a report with the truth of a cluster.

    Every rank must be there, its time in steps must be productive or lost, and its lost time the
    sum of its causes, to the nanosecond.
    """
    places = {place.rank: place for place in truth.places}
    missing = len(places) - len({ledger.rank for ledger in report.ranks} & places.keys())
    residuals = [_compute_residual_ns(ledger) for ledger in report.ranks]
    residuals.append(abs(report.lost_ns - sum(ledger.lost_ns for ledger in report.ranks)))
    caused = sum(ns for ledger in report.ranks for _, ns in ledger.caused)
    residuals.append(
        abs(report.lost_ns - caused - sum(ns for _, ns in report.lost_without_culprit))
    )
    steps = [
        abs(ledger.in_step_ns - places[ledger.rank].in_step_ns)
        for ledger in report.ranks
        if ledger.rank in places
    ]
    lost_ns = sum(row.ns for row in truth.lost)
    return Check(
        len(report.ranks),
        max(residuals) + missing,
        max(steps, default=0),
        report.lost_ns / max(1, lost_ns),
        tuple(check_fault(report.findings, truth, plan, fault) for fault in plan.faults),
    )


def _compute_residual_ns(ledger: RankLedger) -> int:
    """Return by how much a rank's sums differ, ns."""
    return max(
        abs(ledger.in_step_ns - ledger.productive_ns - ledger.lost_ns),
        abs(ledger.lost_ns - sum(ns for _, ns in ledger.buckets)),
        abs(ledger.outside_ns - sum(ns for _, ns in ledger.outside_buckets)),
    )


def check_fault(
    findings: Sequence[Finding], truth: Truth, plan: ClusterPlan, fault: Fault
) -> FaultCheck:
    """Find out whether a fault was named with its culprit, and how much of it."""
    causes, struck = CAUSES[fault.kind], plan.find_fault_ranks(fault)
    culprit = None if fault.kind == "slow-link" else struck[0]
    wanted_ns = sum(
        row.ns for row in truth.lost if (row.cause, row.culprit) == (causes[0], culprit)
    )
    node = truth.places[struck[0]].node
    found_ns, first = 0, ""
    for finding in findings:
        if finding.cause.id not in causes or finding.outside_steps:
            continue
        named = finding.culprits[0] if finding.culprits else None
        if named is not None and named.rank is None:
            label, is_right = named.node, named.node == node and fault.kind in OF_NODES
        else:
            label = "" if named is None else f"rank {named.rank}"
            is_right = named is not None and named.rank in struck
        first = first or label or "nobody"
        found_ns += finding.lost_ns if is_right else 0
    is_found = found_ns >= _MIN_FOUND_RATIO * wanted_ns
    return FaultCheck(fault, wanted_ns, found_ns, first, found_ns > 0 and is_found)
