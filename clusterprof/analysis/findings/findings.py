"""Build findings: the time lost to each cause on all ranks, and the culprits.

A rank is the culprit of its own loss and of that of the ranks that waited for it; what it lost
waiting for others belongs to those. A transfer has no culprit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterprof.analysis.advice.synchronization import is_late_in_turn
from clusterprof.analysis.attribution.accumulator import Accumulator, merge_accumulators
from clusterprof.analysis.attribution.confidence import (
    MAX_CONFIDENCE,
    Visibility,
    choose_main_grade,
    estimate_confidence,
)
from clusterprof.analysis.attribution.ledger import STARTUP, Bucket, RankResult
from clusterprof.analysis.attribution.rank.claims import collect_evidence
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.attribution.wait_for.blame import IMBALANCE, TRANSFER
from clusterprof.analysis.attribution.what_if import compute_common_ns, compute_recoverable_ns
from clusterprof.analysis.cross_rank.observers import CulpritObserver
from clusterprof.analysis.cross_rank.wait_totals import CulpritTotals
from clusterprof.report.model import (
    UNKNOWN_RESOURCE,
    Culprit,
    Evidence,
    Finding,
    Persistence,
    RankLedger,
    ResourceFacts,
)

# Loss below this part of the time in steps is in the ledger but makes no finding.
MIN_FINDING_RATIO = 0.01
_MAX_EVIDENCE = 3
_STARTUP_CONFIDENCE = MAX_CONFIDENCE  # start-up was right in every job of the corpus, marked or not
_MIN_WAITED_RATIO = 0.1  # of a finding: with less waiting its trend over the run says nothing


def build_findings(
    ranks: Sequence[RankResult],
    totals: Sequence[CulpritTotals],
    observer: CulpritObserver | None,
    in_step_ns: int,
    window_ns: int,
    is_imported: bool = False,
) -> tuple[Finding, ...]:
    """Build the findings inside steps, then start-up, which lies outside.

    The causes of the family that lost most come first, then all others, largest first.

    ranks: results of all ranks; totals: their culprit totals, in their order. observer: None where
    operations were not matched. is_imported: the trace is of another tool.
    """
    is_matched = observer is not None or len(ranks) == 1
    visibility: Visibility | None = (
        "imported" if is_imported else classify_visibility(ranks, is_matched)
    )
    by_id: dict[str, list[tuple[RankResult, Bucket]]] = {}
    for rank in ranks:
        for bucket in rank.buckets:
            by_id.setdefault(bucket.id, []).append((rank, bucket))
    unknown_ns = sum(ns for rank in ranks for _, ns in rank.reasons)
    unknown_ratio = unknown_ns / max(sum(rank.ledger.lost_ns for rank in ranks), 1)
    findings = [
        _build_finding(id_, lines, ranks, totals, observer, in_step_ns, unknown_ratio, visibility)
        for id_, lines in by_id.items()
        if _is_large(lines, in_step_ns)
    ]
    family_ns: dict[str, int] = {}
    for finding in findings:
        family = finding.cause.family
        family_ns[family] = family_ns.get(family, 0) + finding.lost_ns
    # The family that lost most comes first: its causes can share what another has alone.
    largest = max(findings, key=lambda f: (family_ns[f.cause.family], f.lost_ns), default=None)
    leading_family = largest.cause.family if largest is not None else ""
    findings.sort(
        key=lambda finding: (
            finding.cause.family != leading_family,
            -finding.lost_ns,
            finding.cause.id,
        )
    )
    return (*findings, *_build_outside_findings(ranks, window_ns))


def classify_visibility(ranks: Sequence[RankResult], is_matched: bool) -> Visibility | None:
    """Classify what was seen of the recorded jobs; of several kinds the one that shows least.

    None if no device of a rank was measured, which no job of the corpus has.
    is_matched: operations of different ranks were matched, or there is a single rank.
    """
    by_job: dict[tuple[str | None, str], set[int | None]] = {}
    for rank in ranks:
        by_job.setdefault((rank.job_position.job, rank.job_position.rendezvous), set()).add(
            rank.job_position.rank
        )
    if not all(rank.ledger.source in ("stream-events", "device-samples") for rank in ranks):
        return None
    for rank in ranks:
        recorded = by_job[rank.job_position.job, rank.job_position.rendezvous]
        if (
            rank.job_position.world_size is not None
            and len(recorded) < rank.job_position.world_size
        ):
            return "partial"
    if not all(rank.marked for rank in ranks):
        return "unmarked"
    if not is_matched:
        return "unmatched"
    sampled = any(rank.ledger.source == "device-samples" and not rank.emulated for rank in ranks)
    return "driver" if sampled else "hooked"


def _is_large(lines: Sequence[tuple[RankResult, Bucket]], in_step_ns: int) -> bool:
    lost_ns = sum(bucket.lost_ns for _, bucket in lines)
    return 0 < lost_ns >= MIN_FINDING_RATIO * in_step_ns


def _build_finding(
    id_: str,
    lines: list[tuple[RankResult, Bucket]],
    ranks: Sequence[RankResult],
    totals: Sequence[CulpritTotals],
    observer: CulpritObserver | None,
    in_step_ns: int,
    unknown_ratio: float,
    visibility: Visibility | None,
) -> Finding:
    lost_ns = sum(bucket.lost_ns for _, bucket in lines)
    grades: dict[str, int] = {}
    for _, bucket in lines:
        for grade, units in bucket.by_grade.items():
            grades[grade] = grades.get(grade, 0) + units
    sure_ns = sum(bucket.confidence_ratio * bucket.lost_ns for _, bucket in lines)
    bounded = sum(bucket.lost_ns for _, bucket in lines if bucket.upper_bound)
    upper_bound = 2 * bounded > lost_ns
    leaves: Sequence[str] = sorted({leaf for _, bucket in lines for leaf in bucket.causes})
    partials = [rank.accumulator for rank, _ in lines]
    # Last arrival and leaving of each operation are marks, on every rank and in every step.
    marked = sum(rank.ledger.steps for rank, _ in lines) if id_ == TRANSFER else 0
    combined = merge_accumulators(
        *(Accumulator(evidence=partial.evidence, weights=partial.weights) for partial in partials)
    )
    waited_ns = sum(total.others_ns.get(id_, 0) for total in totals)
    blamed = leaves if observer is None else observer.find_blamed_leaves(leaves, waited_ns)
    culprits = _build_culprits(id_, blamed, ranks, totals, observer)
    gain_ns = compute_recoverable_ns(lost_ns, upper_bound, any(rank.has_peers for rank, _ in lines))
    if observer is not None and not upper_bound:
        alone_ns = sum(culprit.recoverable_ns or 0 for culprit in culprits)
        own_ns = [total.own_ns.get(id_, 0) for total in totals]
        gain_ns = limit_savings(
            observer.all_recoverable_ns(blamed), alone_ns + compute_common_ns(own_ns), lost_ns
        )
    return Finding(
        cause=CAUSES[id_],
        lost_ns=lost_ns,
        share_ratio=lost_ns / in_step_ns if in_step_ns else 0.0,
        recoverable_ns=gain_ns,
        confidence_ratio=estimate_confidence(
            sure_ns / lost_ns, lost_ns, marked, unknown_ratio, visibility
        )
        if lost_ns
        else 0.0,
        grade=choose_main_grade(grades),
        upper_bound=upper_bound,
        outside_steps=False,
        culprits=culprits,
        evidence=_select_evidence(combined, leaves),
        persistence=_evaluate_persistence(culprits, blamed, observer, lost_ns),
    )


def _build_culprits(
    id_: str,
    leaves: Sequence[str],
    ranks: Sequence[RankResult],
    totals: Sequence[CulpritTotals],
    observer: CulpritObserver | None,
) -> tuple[Culprit, ...]:
    """Build the culprits of a cause, largest first."""
    culprits = []
    for rank_index, (rank, total) in enumerate(zip(ranks, totals)):
        own_ns, others_ns = total.own_ns.get(id_, 0), total.others_ns.get(id_, 0)
        if own_ns + others_ns <= 0:
            continue
        culprit = replace(_build_culprit(rank, leaves), own_ns=own_ns)
        if observer is not None:
            culprit = replace(
                culprit,
                others_ns=others_ns,
                victims=observer.victim_count(rank_index) if others_ns else 0,
                recoverable_ns=observer.recoverable_ns(rank_index, leaves, own_ns),
            )
        culprits.append((own_ns + others_ns, rank, culprit))
    culprits.sort(key=lambda line: (-line[0], _get_identity(line[1].ledger)))
    return tuple(culprit for _, _, culprit in culprits)


def limit_savings(all_ns: int | None, least_ns: int, lost_ns: int) -> int | None:
    """Limit what fixing a cause saves to what it lost, ns; None = not known.

    all_ns: the savings, where they could be computed; 0 is an answer. least_ns: what is saved at
    least; 0 says nothing.
    """
    known_ns = all_ns if all_ns is not None else least_ns or None
    return None if known_ns is None else min(known_ns, lost_ns)


def _get_identity(ledger: RankLedger) -> tuple[str, int, int]:
    return ledger.node, -1 if ledger.rank is None else ledger.rank, ledger.pid


def _build_culprit(rank: RankResult, leaves: Sequence[str]) -> Culprit:
    ledger = rank.ledger
    units, facts = dict[str, int](), {"": UNKNOWN_RESOURCE}
    for (cause, text, kind, name, pid), amount in rank.accumulator.resources.items():
        if cause in leaves:
            units[text] = amount
            facts[text] = ResourceFacts(kind, name, None if pid < 0 else pid)
    resource = max(sorted(units), key=lambda text: units[text], default="")
    return Culprit(
        ledger.node, ledger.rank, ledger.device, resource, resource_facts=facts[resource]
    )


def _evaluate_persistence(
    culprits: Sequence[Culprit],
    leaves: Sequence[str],
    observer: CulpritObserver | None,
    lost_ns: int,
) -> Persistence | None:
    waited_ns = sum(culprit.others_ns or 0 for culprit in culprits)
    if observer is None or waited_ns < _MIN_WAITED_RATIO * lost_ns:
        return None
    return observer.persistence(leaves)


def _select_evidence(combined: Accumulator, leaves: Sequence[str]) -> tuple[Evidence, ...]:
    evidence = [item for leaf in leaves for item in collect_evidence(combined, leaf)]
    return tuple(evidence[:_MAX_EVIDENCE])


def _build_outside_findings(ranks: Sequence[RankResult], window_ns: int) -> list[Finding]:
    """Build the finding about start-up, the only cause outside the steps known here."""
    lines = [(rank, dict(rank.ledger.outside_buckets).get(STARTUP, 0)) for rank in ranks]
    lines = sorted(
        (line for line in lines if line[1]), key=lambda p: (-p[1], _get_identity(p[0].ledger))
    )
    startup_ns = sum(ns for _, ns in lines)
    if not startup_ns:
        return []
    counted = all(rank.marked and not rank.ledger.unmeasured_ns for rank, _ in lines)
    marked = all(rank.marked for rank, _ in lines)
    finding = Finding(
        cause=CAUSES[STARTUP],
        lost_ns=startup_ns,
        share_ratio=startup_ns / window_ns if window_ns else 0.0,
        recoverable_ns=None,
        confidence_ratio=_STARTUP_CONFIDENCE,
        grade="A" if counted else "B" if marked else "C",
        upper_bound=False,
        outside_steps=True,
        culprits=tuple(_build_culprit(rank, ()) for rank, _ in lines),
        evidence=(
            Evidence(
                "startup.longest_ns",
                float(lines[0][1]),
                "ns",
                "time from the first record of the process to its first step, in the slowest rank",
            ),
        ),
    )
    return [finding]


def with_imbalance_in_turn(finding: Finding) -> Finding:
    """Return the finding; an imbalance whose culprits change has a title and advice of its own."""
    if finding.cause.id != IMBALANCE or not is_late_in_turn(finding):
        return finding
    cause = replace(
        finding.cause,
        title="Ranks take longer for their work in turn, as with batches of different length",
        advice="Give all ranks batches of equal length or tokens in each step",
    )
    return replace(finding, cause=cause)
