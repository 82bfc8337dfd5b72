"""Add advice to every finding, from the context of the rank that caused most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterprof.analysis.advice.context import AdviceContext, CodePath, Machine, RankSetup
from clusterprof.analysis.advice.registry import explain_withheld, select_advice
from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.rank.claims import collect_evidence
from clusterprof.analysis.attribution.taxonomy import FAMILIES
from clusterprof.analysis.attribution.wait_for.totals import WORK_WAIT_TOTALS
from clusterprof.analysis.detectors.cross_rank import PEER_CAUSES
from clusterprof.analysis.detectors.registry import DETECTORS
from clusterprof.analysis.findings.comparisons import with_worker_counts
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.node.setup import NodeSetup, ProcessSetup, detect_launcher
from clusterprof.analysis.timeline.code_locations import split_at_own_line
from clusterprof.report.impact import RankUtilization
from clusterprof.report.model import Evidence, Finding, Report
from clusterprof.util.source_calls import SourceReader

_LEAF_CAUSES = {detector.cause.id for detector in DETECTORS} | {cause.id for cause in PEER_CAUSES}
_FAMILY_SOURCES: dict[str, tuple[str, ...]] = {
    "storage": ("mounts", "nfs", "lustre", "cifs", "disk", "threads", "processes"),
    "cpu": ("threads", "processes", "pressure", "cgroup", "placement", "runqueue"),
    "network": ("network", "ethtool", "rdma", "tcp", "sockets"),
    "launch": ("threads", "processes"),
    "device": ("gpu_nvidia", "gpu_amd", "gpu_intel", "gpu"),
}
"""Family -> collectors, and first words of signals, that distinguish its causes."""
_MIN_OTHER_RATIO = 0.25
"""Loss of another cause, in parts of the finding's own, from which it matters for the advice."""
_NodeRank = tuple[NodeResult, RankResult]


def with_advice(report: Report, nodes: Sequence[NodeResult]) -> Report:
    """Return the report with advice for each finding."""
    ranked = [(node, rank) for node in nodes for rank in node.ranks]
    paths = _list_code_paths(report)
    findings = []
    for finding in with_worker_counts(report.findings, nodes):
        context = build_advice_context(finding, report, nodes, ranked)
        context = replace(context, code=paths.get(finding.cause.id, ()))
        findings.append(
            replace(
                finding, advice=select_advice(context), withheld_advice=explain_withheld(context)
            )
        )
    return replace(report, findings=tuple(findings))


def _list_code_paths(report: Report) -> dict[str, tuple[CodePath, ...]]:
    """List the stacks of each cause, from the user's line inward, with their shares."""
    if report.code is None:
        return {}
    totals: dict[str, int] = {}
    for time in report.code.stacks:
        totals[time.cause] = totals.get(time.cause, 0) + time.lost_ns
    started_ns = report.fingerprint.started_at_ns if report.fingerprint is not None else None
    reader = SourceReader(started_ns or 0)
    paths: dict[str, list[CodePath]] = {}
    for time in report.code.stacks:
        split = split_at_own_line([report.code.places[index] for index in time.places])
        if split is None or not totals[time.cause]:
            continue
        code_location, called = split
        # Only a stack that ends in the user's line may be in a built-in function.
        calls = (
            ()
            if called
            else reader.list_calls(code_location.file, code_location.line, code_location.function)
        )
        share = time.lost_ns / totals[time.cause]
        path = CodePath(code_location, tuple(called), share, time.samples, calls)
        paths.setdefault(time.cause, []).append(path)
    return {cause: tuple(code_paths) for cause, code_paths in paths.items()}


def build_advice_context(
    finding: Finding, report: Report, nodes: Sequence[NodeResult], ranked: Sequence[_NodeRank]
) -> AdviceContext:
    """Build the context that recommendations for one finding may examine."""
    cause = finding.cause
    main_rank = _find_main_rank(finding, ranked)
    node = main_rank[0] if main_rank is not None else _find_node(finding, nodes)
    is_family = cause.id in FAMILIES and cause.id not in _LEAF_CAUSES
    evidence = finding.evidence if main_rank is None else _collect_evidence(finding, main_rank[1])
    other_causes = (
        other_finding.cause.id
        for other_finding in report.findings
        if other_finding is not finding
        and other_finding.lost_ns >= _MIN_OTHER_RATIO * finding.lost_ns
    )
    return AdviceContext(
        finding=finding,
        evidence=evidence,
        setup=RankSetup() if main_rank is None else _build_setup(finding, main_rank, report),
        machine=_build_machine(node, main_rank),
        ranks=max(1, len(ranked)),
        nodes=max(1, len(nodes)),
        has_probe=main_rank[1].marked
        if main_rank is not None
        else all(rank.marked for _, rank in ranked),
        has_host_names=all(node.facts.has_host_name for node in nodes),
        is_window=report.is_window_only,
        is_family=is_family,
        saves_nothing=_saves_nothing(finding, report),
        other_causes=frozenset(other_causes),
        missing_signals=_list_missing_signals(cause.family, main_rank) if is_family else (),
        coverage_gaps=_list_relevant_gaps(cause.family, report),
    )


def _saves_nothing(finding: Finding, report: Report) -> bool:
    """Return whether the replay without a cause ends no sooner; False where there is none.

    That attribution adds up to no savings is no reason to keep the advice back: it is a minimum.
    """
    impacts = report.impact.causes if report.impact is not None else ()
    return any(
        item.saved_ns is not None and item.saved_ns <= 0
        for item in impacts
        if (item.cause, item.outside_steps) == (finding.cause.id, finding.outside_steps)
    )


def _find_main_rank(finding: Finding, ranked: Sequence[_NodeRank]) -> _NodeRank | None:
    """Find the rank that caused most; without a culprit only in a job of one rank."""
    if not finding.culprits:
        return ranked[0] if len(ranked) == 1 else None
    culprit = finding.culprits[0]
    if culprit.rank is None and not culprit.device and len(ranked) > 1:
        return None
    for node, rank in ranked:
        ledger = rank.ledger
        if (ledger.node, ledger.rank, ledger.device) == (
            culprit.node,
            culprit.rank,
            culprit.device,
        ):
            return node, rank
    return None


def _find_node(finding: Finding, nodes: Sequence[NodeResult]) -> NodeResult | None:
    if not finding.culprits:
        return nodes[0] if nodes else None
    name = finding.culprits[0].node
    return next((node for node in nodes if node.facts.name == name), None)


def _collect_evidence(finding: Finding, rank: RankResult) -> tuple[Evidence, ...]:
    """Collect all metrics of that rank, and those of the finding that the rank lacks."""
    id_ = finding.cause.id
    leaves = next((bucket.causes for bucket in rank.buckets if bucket.id == id_), (id_,))
    evidence = [
        item for leaf in leaves or (id_,) for item in collect_evidence(rank.accumulator, leaf)
    ]
    names = {item.name for item in evidence}
    return (*evidence, *(item for item in finding.evidence if item.name not in names))


def _build_setup(finding: Finding, main_rank: _NodeRank, report: Report) -> RankSetup:
    node, rank = main_rank
    ledger, own_ns = rank.ledger, finding.culprits[0].own_ns if finding.culprits else None
    setup = _get_rank_setup(node, rank)
    sharing_ranks = [
        neighbor_setup
        for neighbor in node.ranks
        if (neighbor_setup := _get_rank_setup(node, neighbor)).cpus & setup.cpus
    ]
    lost_ns = own_ns if own_ns is not None else dict(ledger.buckets).get(finding.cause.id)
    return RankSetup(
        loader=setup.loader,
        cpus_allowed=len(setup.cpus) or None,
        cores_allowed=setup.cores,
        ranks_sharing_cpus=max(1, len(sharing_ranks)),
        ranks_on_node=max(1, len(node.ranks)),
        gpu_memory_free_ratio=_find_free_memory_ratio(rank, report),
        step_ns=ledger.in_step_ns // ledger.steps if ledger.steps else None,
        steps=ledger.steps,
        has_device=bool(ledger.device),
        has_framework=setup.has_framework,
        has_xla=setup.has_xla,
        has_optimizer=setup.has_optimizer,
        debug_mode_ratios=setup.debug_mode_ratios,
        own_loss_ratio=lost_ns / ledger.in_step_ns if lost_ns and ledger.in_step_ns else None,
        message_wait_ratio=_compute_message_wait_ratio(rank),
    )


def _compute_message_wait_ratio(rank: RankResult) -> float:
    """Compute which part of the waits for a rank's work was in messages; 0 without waits."""
    in_messages, in_all = (rank.accumulator.totals.get(name, 0) for name in WORK_WAIT_TOTALS)
    return in_messages / in_all if in_all else 0.0


def _get_rank_setup(node: NodeResult, rank: RankResult) -> ProcessSetup:
    return node.setup.ranks.get((rank.ledger.pid, rank.started_ticks), ProcessSetup())


def _find_free_memory_ratio(rank: RankResult, report: Report) -> float | None:
    fills: tuple[RankUtilization, ...] = (
        report.device_utilization.ranks if report.device_utilization is not None else ()
    )
    ledger = rank.ledger
    for fill in fills:
        if (fill.node, fill.pid, fill.device) == (ledger.node, ledger.pid, ledger.device):
            return fill.levels.memory_free_ratio
    return None


def _build_machine(node: NodeResult | None, main_rank: _NodeRank | None) -> Machine:
    setup = node.setup if node is not None else NodeSetup()
    launcher = setup.machine.launcher or (
        detect_launcher(main_rank[1].launcher_variables) if main_rank else ""
    )
    return replace(setup.machine, launcher=launcher)


def _list_missing_signals(family: str, main_rank: _NodeRank | None) -> tuple[str, ...]:
    """List what the main culprit's recording lacks to distinguish causes of the family."""
    if main_rank is None or not main_rank[1].marked:
        return ()
    family_causes = {detector.cause.id for detector in DETECTORS if detector.cause.family == family}
    missing = {
        need for cause, need in main_rank[1].accumulator.missing if cause in family_causes and need
    }
    return tuple(sorted(missing))


def _list_relevant_gaps(family: str, report: Report) -> tuple[tuple[str, str], ...]:
    """List the coverage gaps that matter to the family, with their remedies."""
    family_sources = _FAMILY_SOURCES.get(family, ())
    return tuple(
        (gap.what, gap.remedy)
        for gap in report.coverage_gaps
        if gap.source in family_sources and gap.remedy
    )
