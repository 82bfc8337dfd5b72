"""How many reads there were, beside how large they are: what speaks for larger records, or against.

    disk.read_size_bytes 64.0 KiB (a read asked for on average; 16,000 a second, 1,860 in the waits
    of a step)

Reads are counted at the disk or mount while a rank waited; what it reads ahead of its need is not
among them, and what others read from it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.local import evidence_of
from clusterprof.engine.yardsticks import KNOWN_AT_LEAST_RATIO
from clusterprof.findings import Evidence, Finding

SIZE, TOTAL, PER_SECOND = ".read_size_bytes", ".reads_total", ".reads_per_second_count"
_FEW = 10  # a step: of fewer a tenth says something


def with_reads(found: Iterable[Finding], books: Sequence[RankBooks]) -> Iterator[Finding]:
    """Yield findings whose evidence has the size of reads with how many there were."""
    for one in found:
        told = _told(one, books)
        if told:
            noted = (_noted(item, told) for item in one.evidence)
            one = replace(one, evidence=tuple(noted))
        yield one


def _noted(item: Evidence, told: str) -> Evidence:
    return replace(item, note=f"{item.note}; {told}") if item.name.endswith(SIZE) else item


def _told(finding: Finding, books: Sequence[RankBooks]) -> str:
    """Say how many reads there were, a second and a step of the rank that caused most."""
    if not finding.culprits or not any(item.name.endswith(SIZE) for item in finding.evidence):
        return ""
    chief = finding.culprits[0]
    for one in books:
        if (one.ledger.node, one.ledger.rank) == (chief.node, chief.rank) and one.ledger.steps:
            return _of_rank(one, finding.cause.id)
    return ""


def _of_rank(one: RankBooks, cause: str) -> str:
    counted = {item.name: item.value for item in evidence_of(one.partial, cause)}
    said = [f"{_amount(n)} a second" for name, n in counted.items() if name.endswith(PER_SECOND)]
    for name, reads in counted.items():
        if name.endswith(TOTAL):
            said.append(f"{_amount(reads / one.ledger.steps)} in the waits of a step")
            held = _samples(one)
            if held:
                said.append(f"{_amount(reads / one.ledger.steps / held)} a sample")
    return ", ".join(said)


def _samples(one: RankBooks) -> float:
    """How many samples a step held, where nearly all steps say it; 0 unknown."""
    totals = one.partial.totals
    known, unknown = totals.get("samples_steps", 0), totals.get("samples_unknown_steps", 0)
    if not known or known < KNOWN_AT_LEAST_RATIO * (known + unknown):
        return 0.0
    return totals.get("samples", 0) / known


def _amount(count: float) -> str:
    return f"{count:,.1f}" if count < _FEW else f"{count:,.0f}"
