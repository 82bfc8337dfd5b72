"""How long the rank that is waited for works in a step, beside those that wait: the evidence behind
`sync-slow-compute` and `sync-imbalance`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median_low

from clusterprof.attribution.blame import IMBALANCE, SLOW_COMPUTE
from clusterprof.findings import Culprit, Evidence, Finding, RankLedger
from clusterprof.units import human

WORKED = "step.worked_ns"


def with_work(found: Iterable[Finding], ledgers: Sequence[RankLedger]) -> tuple[Finding, ...]:
    """Add to findings about a rank's work what it worked in a step and what the others did."""
    return tuple(_shown(one, ledgers) for one in found)


def _shown(finding: Finding, ledgers: Sequence[RankLedger]) -> Finding:
    if finding.cause.id not in (IMBALANCE, SLOW_COMPUTE) or not finding.culprits:
        return finding
    chief = finding.culprits[0]
    late = [one for one in ledgers if one.steps and _is(one, chief)]
    waited = [
        one.productive_ns / one.steps
        for one in ledgers
        if one.steps and not _is(one, chief) and dict(one.buckets).get(finding.cause.id, 0) > 0
    ]
    if len(late) != 1 or chief.rank is None or not waited:
        return finding
    own_ns, usual_ns = late[0].productive_ns / late[0].steps, median_low(waited)
    if own_ns <= usual_ns:
        return finding  # late now and then, or by turns: means over all steps say nothing
    note = f"a step of rank {chief.rank}; of those waiting {human(usual_ns, 'ns')}"
    return replace(finding, evidence=(Evidence(WORKED, own_ns, "ns", note), *finding.evidence))


def _is(ledger: RankLedger, culprit: Culprit) -> bool:
    return (ledger.node, ledger.rank) == (culprit.node, culprit.rank)
