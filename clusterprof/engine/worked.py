"""How long the rank that is waited for works in a step, beside those that wait: the evidence behind
`sync-slow-compute` and `sync-imbalance`.

A rank that was slow from its first step on cannot be told from one with more to do by its time. How
many samples or tokens its steps held, where the job says it, tells a reader more: as many as the
others', and it is no larger batch (though longer sequences may be).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

from clusterprof.attribution.blame import IMBALANCE, SLOW_COMPUTE
from clusterprof.attribution.ledger import RankBooks
from clusterprof.engine.yardsticks import KNOWN_AT_LEAST_RATIO
from clusterprof.findings import Culprit, Evidence, Finding, RankLedger
from clusterprof.units import human

WORKED = "step.worked_ns"
HELD = ("samples", "tokens")


def with_work(
    found: Iterable[Finding], ledgers: Sequence[RankLedger], books: Sequence[RankBooks] = ()
) -> tuple[Finding, ...]:
    """Add to findings about a rank's work what it worked in a step, and what its steps held, beside
    the others'. `books` of the ledgers, in their order, know what steps held."""
    held = [_held(one) for one in books] or [{} for _ in ledgers]
    return tuple(_shown(one, ledgers, held) for one in found)


def _held(one: RankBooks) -> dict[str, float]:
    """Samples and tokens in a step, where nearly all steps say it."""
    totals, found = one.partial.totals, {}
    for what in HELD:
        known, unknown = totals.get(f"{what}_steps", 0), totals.get(f"{what}_unknown_steps", 0)
        if known and totals.get(what) and known >= KNOWN_AT_LEAST_RATIO * (known + unknown):
            found[what] = totals[what] / known
    return found


def _shown(
    finding: Finding, ledgers: Sequence[RankLedger], held: Sequence[Mapping[str, float]]
) -> Finding:
    if finding.cause.id not in (IMBALANCE, SLOW_COMPUTE) or not finding.culprits:
        return finding
    chief = finding.culprits[0]
    pairs = [pair for pair in zip(ledgers, held) if pair[0].steps]
    late = [pair for pair in pairs if _is(pair[0], chief)]
    waited = [
        pair
        for pair in pairs
        if not _is(pair[0], chief) and dict(pair[0].buckets).get(finding.cause.id, 0) > 0
    ]
    if len(late) != 1 or chief.rank is None or not waited:
        return finding
    own_ns, usual_ns = _worked(late[0][0]), median_low(_worked(one) for one, _ in waited)
    if own_ns <= usual_ns:
        return finding  # late now and then, or by turns: means over all steps say nothing
    note = f"a step of rank {chief.rank}; of those waiting {human(usual_ns, 'ns')}"
    told = [Evidence(WORKED, own_ns, "ns", note)]
    for what, own in late[0][1].items():
        others = [some[what] for _, some in waited if what in some]
        if others:
            note = (
                f"{what} in a step of rank {chief.rank}; of those waiting {median_low(others):,.0f}"
            )
            told.append(Evidence(f"step.{what}_count", own, "count", note))
    return replace(finding, evidence=(*told, *finding.evidence))


def _worked(ledger: RankLedger) -> float:
    return ledger.productive_ns / ledger.steps


def _is(ledger: RankLedger, culprit: Culprit) -> bool:
    return (ledger.node, ledger.rank) == (culprit.node, culprit.rank)
