"""Convert a report of clusterprof to an `Answer`.

The families of a report are those of the corpus. Culprits of the run as a whole are ranks, ordered
by what all ranks lost because of them, summed over everything the report blames on a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from clusterprof import __version__
from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import UNATTRIBUTED, Finding, RankLedger, Report
from clusterprof_lab.answer import Answer, NamedCause
from clusterprof_lab.families import FAMILIES, FAMILY_OF

TOOL = "clusterprof"
STRUCTURAL = "net-transfer"
"""Any transfer takes time, which is no fault: its gain is not added."""
GAIN_FROM_RATIO = 0.03
"""Share of the in-step time; gains of smaller findings are not added."""
BLAMED_RATIO = 0.25
"""A rank is blamed if it caused at least this part of what the first one caused."""


def analyze_recording(recording: Path) -> Answer:
    """Analyze a recording in this process."""
    return make_answer(analyze(recording))


def make_answer(report: Report) -> Answer:
    """Convert a report to an answer."""
    families = dict.fromkeys(FAMILIES, 0)
    for id_, ns in sum_buckets_ns(report).items():
        family = find_family(id_, report)
        families[family] = families.get(family, 0) + ns
    whole = max(report.in_step_ns, 1)
    inside = [finding for finding in report.findings if not finding.outside_steps]
    large = [finding for finding in inside if finding.share_ratio >= GAIN_FROM_RATIO]
    gain_ns = _estimate_gain_ns(report, large)
    return Answer(
        tool=f"{TOOL} {__version__}",
        causes=tuple(_make_named_cause(finding) for finding in report.findings),
        family_ratio={name: ns / whole for name, ns in families.items()},
        culprits=_list_blamed(report),
        residual_ns=compute_residual_ns(report),
        lost_ratio=report.lost_ns / whole,
        gain_ratio=None if gain_ns is None else gain_ns / whole,
    )


def _estimate_gain_ns(report: Report, large: Sequence[Finding]) -> int | None:
    """Return what fixing the large findings wins together, and no more than fixing all does."""
    gains = [
        finding.recoverable_ns
        for finding in large
        if finding.recoverable_ns is not None and finding.cause.id != STRUCTURAL
    ]
    job_impact = report.impact
    if len(gains) > 1 and job_impact is not None and job_impact.saved_ns is not None:
        return min(sum(gains), job_impact.saved_ns * job_impact.gpus)
    return sum(gains) if gains else None


def sum_buckets_ns(report: Report) -> dict[str, int]:
    """Return in-step lost time of all ranks by id of cause, family or "unattributed"."""
    out: dict[str, int] = {UNATTRIBUTED: 0}
    for rank in report.ranks:
        for id_, ns in rank.buckets:
            out[id_] = out.get(id_, 0) + ns
    return out


def find_family(id_: str, report: Report) -> str:
    """Return the group of a bucket: of the corpus, else as the report's own findings say."""
    if id_ in FAMILIES:
        return id_
    if id_ in FAMILY_OF:
        return FAMILY_OF[id_]
    named = {finding.cause.id: finding.cause.family for finding in report.findings}
    return named.get(id_, UNATTRIBUTED)


def compute_residual_ns(report: Report) -> int:
    """Return parent less the sum of its children, at the level where it is largest.

    Levels: each rank, the job as the sum of its ranks, findings and reasons as sums over ranks,
    and victim time against culprit time.
    """
    gaps = [gap for rank in report.ranks for gap in _compute_rank_residual(rank)]
    for name in (
        "window_ns",
        "unmeasured_ns",
        "outside_ns",
        "in_step_ns",
        "productive_ns",
        "lost_ns",
    ):
        gaps.append(getattr(report, name) - sum(getattr(rank, name) for rank in report.ranks))
    victim_ns = sum_buckets_ns(report)
    gaps.append(report.lost_ns - sum(victim_ns.values()))
    gaps.append(report.unattributed_ns - victim_ns[UNATTRIBUTED])
    gaps.append(report.unattributed_ns - sum(ns for _, ns in report.unattributed_reasons))
    gaps.append(report.outside_ns - sum(ns for _, ns in report.outside_buckets))
    gaps += [
        finding.lost_ns - victim_ns.get(finding.cause.id, 0)
        for finding in report.findings
        if not finding.outside_steps
    ]
    gaps += _victim_less_culprit(report, victim_ns)
    return max(map(abs, gaps), default=0)


def _compute_rank_residual(rank: RankLedger) -> Iterable[int]:
    yield rank.window_ns - rank.unmeasured_ns - rank.outside_ns - rank.in_step_ns
    yield rank.in_step_ns - rank.productive_ns - rank.lost_ns
    yield rank.lost_ns - sum(ns for _, ns in rank.buckets)
    yield rank.outside_ns - sum(ns for _, ns in rank.outside_buckets)


def _victim_less_culprit(report: Report, victim_ns: dict[str, int]) -> Iterable[int]:
    if not any(rank.caused for rank in report.ranks) and not report.lost_without_culprit:
        return  # ranks were not compared: nothing is said about who caused what
    left = dict(victim_ns)
    for id_, ns in (
        *(line for rank in report.ranks for line in rank.caused),
        *report.lost_without_culprit,
    ):
        left[id_] = left.get(id_, 0) - ns
    yield sum(left.values())
    yield from left.values()


def _make_named_cause(finding: Finding) -> NamedCause:
    leaf = (
        None
        if finding.cause.id in FAMILIES and finding.cause.id not in FAMILY_OF
        else finding.cause.id
    )
    ranks = tuple(who.rank for who in finding.culprits if who.rank is not None)
    return NamedCause(
        family=FAMILY_OF.get(finding.cause.id, finding.cause.family),
        leaf=leaf,
        share_ratio=finding.share_ratio,
        confidence_ratio=finding.confidence_ratio,
        culprits=ranks,
        outside_steps=finding.outside_steps,
    )


def _list_blamed(report: Report) -> tuple[int, ...]:
    """Return ranks by what all lost because of them; of a hang, who caused it."""
    hung = [
        finding
        for finding in report.findings
        if finding.outside_steps and finding.cause.family == "fail"
    ]
    if hung:  # whatever was slow before it stood still
        ranks = [who.rank for finding in hung for who in finding.culprits if who.rank is not None]
        return tuple(dict.fromkeys(ranks))
    caused: dict[int, int] = {}
    for finding in report.findings:
        for who in finding.culprits:
            if who.rank is not None and not finding.outside_steps:
                ns = who.caused_ns
                caused[who.rank] = caused.get(who.rank, 0) + ns
    order = sorted(caused, key=lambda rank: (-caused[rank], rank))
    return tuple(rank for rank in order if caused[rank] >= BLAMED_RATIO * caused[order[0]])
