"""Findings: what was lost to each cause anywhere, and whose cause it was.

A rank's own loss and that of the ranks that stood still for it are its doing; what it lost waiting
for others is theirs. A transfer is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterprof.attribution.blame import TRANSFER
from clusterprof.attribution.confidence import AT_MOST, calibrated, main_grade
from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.gain import common_ns, recoverable_ns
from clusterprof.attribution.ledger import STARTUP, Bucket, RankBooks
from clusterprof.attribution.local import evidence_of
from clusterprof.attribution.partial import Partial, merge
from clusterprof.engine.caused import Doing
from clusterprof.engine.witness import Witness
from clusterprof.findings import Culprit, Evidence, Finding, RankLedger
from clusterprof.persistence import Persistence

# Less than this part of the time inside steps is in the ledger and no finding.
FINDING_AT_LEAST_RATIO = 0.01
_MOST_EVIDENCE = 3
_STARTUP_CONFIDENCE = AT_MOST  # was right in every job of the corpus, marked or not
_WAITED_RATIO = 0.1  # of a finding: with less waiting nothing is said about how it changes


def findings_of(
    books: Sequence[RankBooks],
    doings: Sequence[Doing],
    witness: Witness | None,
    in_step_ns: int,
    window_ns: int,
) -> tuple[Finding, ...]:
    """Return the findings inside steps, largest first, then start-up, which lies outside."""
    by_id: dict[str, list[tuple[RankBooks, Bucket]]] = {}
    for one in books:
        for bucket in one.buckets:
            by_id.setdefault(bucket.id, []).append((one, bucket))
    found = [
        _finding(id_, lines, books, doings, witness, in_step_ns)
        for id_, lines in by_id.items()
        if _large(lines, in_step_ns)
    ]
    found.sort(key=lambda one: (-one.lost_ns, one.cause.id))
    return (*found, *_outside_findings(books, window_ns))


def _large(lines: Sequence[tuple[RankBooks, Bucket]], in_step_ns: int) -> bool:
    lost_ns = sum(bucket.lost_ns for _, bucket in lines)
    return 0 < lost_ns >= FINDING_AT_LEAST_RATIO * in_step_ns


def _finding(
    id_: str,
    lines: list[tuple[RankBooks, Bucket]],
    books: Sequence[RankBooks],
    doings: Sequence[Doing],
    witness: Witness | None,
    in_step_ns: int,
) -> Finding:
    lost_ns = sum(bucket.lost_ns for _, bucket in lines)
    grades: dict[str, int] = {}
    for _, bucket in lines:
        for grade, units in bucket.by_grade.items():
            grades[grade] = grades.get(grade, 0) + units
    sure = sum(bucket.confidence_ratio * bucket.lost_ns for _, bucket in lines)
    bounded = sum(bucket.lost_ns for _, bucket in lines if bucket.upper_bound)
    upper_bound = 2 * bounded > lost_ns
    leaves = sorted({leaf for _, bucket in lines for leaf in bucket.leaves})
    told = [one.partial for one, _ in lines]
    # The last to come and the leaving of each operation are marks, of every rank and step.
    marked = sum(one.ledger.steps for one, _ in lines) if id_ == TRANSFER else 0
    whole = merge(*(Partial(evidence=one.evidence, weights=one.weights) for one in told))
    culprits = _culprits(id_, leaves, books, doings, witness)
    gain_ns = recoverable_ns(lost_ns, upper_bound, any(one.has_peers for one, _ in lines))
    if witness is not None and not upper_bound:
        alone_ns = sum(culprit.recoverable_ns or 0 for culprit in culprits)
        own_ns = [one.own.get(id_, 0) for one in doings]
        all_ns = witness.all_recoverable_ns(leaves)
        if all_ns is None:
            all_ns = alone_ns + common_ns(own_ns)
        gain_ns = min(all_ns, lost_ns) or None
    return Finding(
        cause=CAUSES[id_],
        lost_ns=lost_ns,
        share_ratio=lost_ns / in_step_ns if in_step_ns else 0.0,
        recoverable_ns=gain_ns,
        confidence_ratio=calibrated(sure / lost_ns, lost_ns, marked) if lost_ns else 0.0,
        grade=main_grade(grades),
        upper_bound=upper_bound,
        outside_steps=False,
        culprits=culprits,
        evidence=_evidence(whole, leaves),
        persistence=_persistence(culprits, leaves, witness, lost_ns),
    )


def _culprits(
    id_: str,
    leaves: Sequence[str],
    books: Sequence[RankBooks],
    doings: Sequence[Doing],
    witness: Witness | None,
) -> tuple[Culprit, ...]:
    """Whose cause it was, largest first."""
    found = []
    for at, (one, doing) in enumerate(zip(books, doings)):
        own_ns, others_ns = doing.own.get(id_, 0), doing.others.get(id_, 0)
        if own_ns + others_ns <= 0:
            continue
        culprit = replace(_culprit(one, leaves), own_ns=own_ns)
        if witness is not None:
            culprit = replace(
                culprit,
                others_ns=others_ns,
                victims=witness.victims(at) if others_ns else 0,
                recoverable_ns=witness.recoverable_ns(at, leaves, own_ns),
            )
        found.append((own_ns + others_ns, one, culprit))
    found.sort(key=lambda line: (-line[0], _identity(line[1].ledger)))
    return tuple(culprit for _, _, culprit in found)


def _identity(ledger: RankLedger) -> tuple[str, int, int]:
    return ledger.node, -1 if ledger.rank is None else ledger.rank, ledger.pid


def _culprit(books: RankBooks, leaves: Sequence[str]) -> Culprit:
    ledger = books.ledger
    units = {
        resource: amount
        for (cause, resource), amount in books.partial.resources.items()
        if cause in leaves
    }
    resource = max(sorted(units), key=lambda name: units[name], default="")
    return Culprit(ledger.node, ledger.rank, ledger.device, resource)


def _persistence(
    culprits: Sequence[Culprit], leaves: Sequence[str], witness: Witness | None, lost_ns: int
) -> Persistence | None:
    waited_ns = sum(culprit.others_ns or 0 for culprit in culprits)
    if witness is None or waited_ns < _WAITED_RATIO * lost_ns:
        return None
    return witness.persistence(leaves)


def _evidence(whole: Partial, leaves: list[str]) -> tuple[Evidence, ...]:
    found = [item for leaf in leaves for item in evidence_of(whole, leaf)]
    return tuple(found[:_MOST_EVIDENCE])


def _outside_findings(books: Sequence[RankBooks], window_ns: int) -> list[Finding]:
    """Start-up is the one cause known outside the steps."""
    lines = [(one, dict(one.ledger.outside_buckets).get(STARTUP, 0)) for one in books]
    lines = sorted(
        (line for line in lines if line[1]), key=lambda p: (-p[1], _identity(p[0].ledger))
    )
    startup_ns = sum(ns for _, ns in lines)
    if not startup_ns:
        return []
    marked = all(one.marked for one, _ in lines)
    finding = Finding(
        cause=CAUSES[STARTUP],
        lost_ns=startup_ns,
        share_ratio=startup_ns / window_ns if window_ns else 0.0,
        recoverable_ns=None,
        confidence_ratio=_STARTUP_CONFIDENCE,
        grade="A" if marked else "C",
        upper_bound=False,
        outside_steps=True,
        culprits=tuple(_culprit(one, ()) for one, _ in lines),
        evidence=(
            Evidence(
                "startup.longest_ns",
                float(lines[0][1]),
                "ns",
                "from the process's first record to its first step, in the slowest rank",
            ),
        ),
    )
    return [finding]
