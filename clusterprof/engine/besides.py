"""The healthy beside the guilty: one number of the chief culprits, and the same of the others.

    rank 1  148 ms of work a step       the other 3 ranks  96 ms

Only what was measured on both sides: a rank on which a cause was not asked for is no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

from clusterprof.attribution.blame import IMBALANCE, SLOW_COMPUTE
from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.local import evidence_of
from clusterprof.beside import Beside
from clusterprof.findings import Culprit, Finding

LOST = "step.own_lost_ns"
WORKED = "step.worked_ns"
CHIEF_RATIO = 0.1
"""A culprit that caused less than this part of the first is no chief, and no example of health."""
TELLS_RATIO = 1.2
"""Numbers that differ by less say nothing."""
_READS: Mapping[str, str] = {
    "disk.read_latency_ns": "a read",
    "nfs.read_latency_ns": "a read",
    "cifs.read_latency_ns": "a read",
    "lustre.read_rpc_ns": "a read",
}


def with_besides(found: Iterable[Finding], books: Sequence[RankBooks]) -> tuple[Finding, ...]:
    """Return findings with the others' number where there is one; those that have it keep it."""
    return tuple(
        one if one.compared is not None else replace(one, compared=beside_of(one, books))
        for one in found
    )


def beside_of(finding: Finding, books: Sequence[RankBooks]) -> Beside | None:
    """Return what tells the chief culprits of a finding from the other ranks or nodes."""
    chiefs = _chiefs(finding)
    names = {(one.node, one.rank) for one in chiefs}
    if not chiefs or finding.outside_steps or any(one.rank is None for one in chiefs):
        return None
    stepped = [one for one in books if one.ledger.steps]
    guilty = [one for one in stepped if _name(one) in names]
    others = [one for one in stepped if _name(one) not in names]
    if len(guilty) != len(chiefs) or not others:
        return None
    if finding.cause.id in (IMBALANCE, SLOW_COMPUTE):
        waited = [one for one in others if dict(one.ledger.buckets).get(finding.cause.id, 0)]
        worked = [_worked_ns(one) for one in guilty], [_worked_ns(one) for one in waited]
        return _made(WORKED, "rank", "of work a step", *worked)
    return _reads(finding, guilty, others) or _lost(finding, chiefs, guilty, others)


def _chiefs(finding: Finding) -> list[Culprit]:
    """The culprits that caused a good part of what the first did."""
    caused = [(one.own_ns or 0) + (one.others_ns or 0) for one in finding.culprits]
    most = max(caused, default=0)
    pairs = zip(finding.culprits, caused)
    return [one for one, ns in pairs if ns > 0 and ns >= CHIEF_RATIO * most]


def _name(one: RankBooks) -> tuple[str, int | None]:
    return one.ledger.node, one.ledger.rank


def _worked_ns(one: RankBooks) -> float:
    return one.ledger.productive_ns / one.ledger.steps


def _reads(
    finding: Finding, guilty: Sequence[RankBooks], others: Sequence[RankBooks]
) -> Beside | None:
    """What a read took on the culprits' nodes and on the others, where both counted it."""
    nodes = {one.ledger.node for one in guilty}
    for name, note in _READS.items():
        here = _numbers(finding, name, guilty)
        there = _numbers(finding, name, [one for one in others if one.ledger.node not in nodes])
        if here and there:
            return _made(name, "node", note, list(here.values()), list(there.values()))
    return None


def _numbers(finding: Finding, name: str, some: Iterable[RankBooks]) -> dict[str, float]:
    """A number of the evidence, by node: the middle one of its ranks."""
    found: dict[str, list[float]] = {}
    for one in some:
        for item in evidence_of(one.partial, finding.cause.id):
            if item.name == name:
                found.setdefault(one.ledger.node, []).append(item.value)
    return {node: median_low(values) for node, values in found.items()}


def _lost(
    finding: Finding,
    chiefs: Sequence[Culprit],
    guilty: Sequence[RankBooks],
    others: Sequence[RankBooks],
) -> Beside | None:
    """What they lost to the cause by themselves in a step, and what others did who were asked."""
    own = {(one.node, one.rank): one.own_ns for one in finding.culprits}
    asked = [one for one in others if finding.cause.id in one.partial.asked]
    if not asked or any(not one.own_ns for one in chiefs):
        return None
    here, there = (
        [(own.get(_name(one)) or 0) / one.ledger.steps for one in some] for some in (guilty, asked)
    )
    bound = ", at most" if finding.upper_bound else ""
    return _made(LOST, "rank", f"lost to it in a step{bound}", here, there)


def _made(
    name: str, of: str, note: str, here: Sequence[float], there: Sequence[float]
) -> Beside | None:
    if not here or not there:
        return None
    value, others = median_low(here), median_low(there)
    if value < TELLS_RATIO * others or value <= 0:
        return None
    return Beside(name, "ns", value, others, len(there), of, note)  # type: ignore[arg-type]
