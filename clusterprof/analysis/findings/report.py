"""Build the report from the results of all ranks.

Report the savings of a fix from the replay, in device time, where there is one.

    impact      the job would end 10 s sooner     of 8 devices
    finding     fixing only this saves 80 s       of device time

Savings by the sums of attribution (analysis.attribution.what_if,
analysis.attribution.wait_for.totals)
are reported only where nothing could be replayed: these sums ignore what hides behind what.

Summarize the recorded part of the job: number of ranks, devices, coverage.

It also builds the fingerprint of a run: the facts that decide whether two runs are comparable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from clusterprof.analysis.advice.context import MIN_JUDGED_NS
from clusterprof.analysis.attribution.accumulator import sum_field
from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.rank.step_blocks import REPORTED, SAMPLES, TOKENS
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.cross_rank.wait_totals import (
    CulpritTotals,
    compute_culprit_totals,
    sum_unblamed_waits,
)
from clusterprof.analysis.findings.advice import with_advice
from clusterprof.analysis.findings.code import build_code
from clusterprof.analysis.findings.comparisons import (
    list_named_groups,
    with_comparisons,
    with_culprit_groups,
    with_onsets,
    with_read_counts,
    with_work_evidence,
)
from clusterprof.analysis.findings.coverage import (
    describe_driver_errors,
    describe_failed_ranks,
    list_coverage_gaps,
)
from clusterprof.analysis.findings.efficiency_metrics import get_storage_au
from clusterprof.analysis.findings.findings import build_findings, with_imbalance_in_turn
from clusterprof.analysis.findings.impact import (
    SavingsModel,
    build_impact,
    collect_leaves,
    list_impact_metrics,
)
from clusterprof.analysis.findings.life import build_life
from clusterprof.analysis.findings.metrics import build_metrics, build_step_stats
from clusterprof.analysis.findings.savings import CulpritSavings, with_savings
from clusterprof.analysis.findings.utilization import build_device_utilization
from clusterprof.analysis.node.analyze import NodeResult, list_ranks
from clusterprof.analysis.node.observations import merge_node_notes
from clusterprof.analysis.node.selection import WHOLE_RUN, PartOfRun, with_part_note
from clusterprof.report.aggregate import list_processes
from clusterprof.report.history import History, SlowStepSummary
from clusterprof.report.model import (
    CoverageGap,
    Culprit,
    Finding,
    JobFacts,
    RankLedger,
    Report,
    RunFingerprint,
)
from clusterprof.trace.reader import SkippedInput
from clusterprof.units import format_quantity

_ONLY_DURATIONS = "durations alone were compared"


def build_job_facts(
    nodes: Sequence[NodeResult], clock_bound_ns: int | None = None, clock_why: str = ""
) -> JobFacts:
    """Build the facts of the job for the header of the report."""
    ranks = [rank for node in nodes for rank in node.ranks]
    window_ns = sum(rank.ledger.window_ns for rank in ranks)
    seen_ns = window_ns - sum(rank.ledger.unmeasured_ns for rank in ranks)
    owners = [node for node in nodes for _ in node.ranks]
    processes = list_processes([rank.ledger for rank in ranks], [node.facts for node in nodes])
    first_windows = {key: row for row, key in reversed(list(enumerate(processes)))}
    devices = {
        _get_device_key(owners[first_windows[key]], rank)
        for rank, key in zip(ranks, processes)
        if _is_measured(rank)
    }
    sizes: dict[int, int | None] = {}  # by job: equal on all its ranks
    for rank, key in zip(ranks, processes):
        job = ranks[first_windows[key]].job  # of a second window, that of the first
        sizes[job] = sizes.get(job) or rank.job_position.world_size
    known_sizes = [size for size in sizes.values() if size is not None]
    return JobFacts(
        world_size=sum(known_sizes) if known_sizes and len(known_sizes) == len(sizes) else None,
        gpus=len(devices),
        coverage_ratio=seen_ns / window_ns if window_ns > 0 else None,
        clock_bound_ns=clock_bound_ns,
        why_clocks_not_aligned=""
        if len(nodes) < 2 or clock_bound_ns is not None
        else clock_why or _ONLY_DURATIONS,
        too_little_seen=explain_too_little_seen([rank.ledger for rank in ranks]),
        is_window_only=_is_window_only(nodes),
        has_time_unit=all(node.facts.has_time_unit for node in nodes if node.ranks),
        name=_find_common_text(node.loaded.header.launcher.get("job") for node in nodes),
        user=_find_common_text(_list_variables(nodes, "SLURM_JOB_USER")),
        account=_find_common_text(_list_variables(nodes, "SLURM_JOB_ACCOUNT"))
        or _find_common_text(_list_variables(nodes, "K8S_NAMESPACE")),
    )


def _list_variables(nodes: Sequence[NodeResult], name: str) -> list[object]:
    """List the values of a launcher variable: of the recorders, and of the ranks."""
    recorders = [node.loaded.header.launcher.get("variables") for node in nodes]
    sources = [*recorders, *(rank.launcher_variables for node in nodes for rank in node.ranks)]
    return [source.get(name) for source in sources if isinstance(source, Mapping)]


def _find_common_text(values: Iterable[object]) -> str:
    """Return the text common to all nonempty values; "" if there is none or they differ."""
    texts = {value for value in values if isinstance(value, str) and value}
    return texts.pop() if len(texts) == 1 else ""


_MAX_UNOBSERVED_RATIO = 0.5


def explain_too_little_seen(ranks: Sequence[RankLedger]) -> str:
    """Explain why too little was seen to judge a job; "" if enough was seen."""
    longest_ns = max((rank.in_step_ns for rank in ranks), default=0)
    in_step_ns = sum(rank.in_step_ns for rank in ranks)
    unobserved_ns = sum(rank.unobserved_ns for rank in ranks)
    if not ranks:
        return "no training process was recorded"
    if not longest_ns:
        stepped = any(rank.steps for rank in ranks)
        return "no device was measured inside the steps" if stepped else "no steps were seen"
    if longest_ns < MIN_JUDGED_NS:
        return f"only {format_quantity(longest_ns, 'ns')} inside steps"
    if all(rank.steps == 1 for rank in ranks):
        return "a single step"
    if unobserved_ns > _MAX_UNOBSERVED_RATIO * in_step_ns:
        part = format_quantity(unobserved_ns / in_step_ns, "ratio")
        return f"no device, and what the host did is not known for {part} of the time in steps"
    return ""


def _is_window_only(nodes: Sequence[NodeResult]) -> bool:
    """Return whether all ranks are from traces of a window of the job."""
    return any(node.ranks for node in nodes) and all(
        node.facts.is_window for node in nodes if node.ranks
    )


def _is_measured(rank: RankResult) -> bool:
    """Return whether the device of a rank has at least one reading where it was looked at."""
    ledger = rank.ledger
    return bool(ledger.device) and not (ledger.unmeasured_ns and not ledger.in_step_ns)


def _get_device_key(node: NodeResult, rank: RankResult) -> tuple[str, str]:
    """Return a key unique to a device: its UUID, else its id on its node."""
    device = rank.ledger.device
    return ("" if device.startswith(("GPU-", "MIG-")) else node.facts.key), device


def build_fingerprint(nodes: Sequence[NodeResult], job: JobFacts) -> RunFingerprint:
    """Build the fingerprint of a run; a fact that no recording has is left unknown."""
    ranks = [rank for node in nodes for rank in node.ranks]
    headers = [node.loaded.header for node in nodes]
    started = [
        int(header.started["realtime_ns"]) for header in headers if "realtime_ns" in header.started
    ]
    frameworks = {
        (name, version)
        for node in nodes
        for event in node.loaded.events
        if event.kind == "process-registered"
        for name, _, version in _parse_frameworks(event.attributes.get("frameworks"))
    }
    batch_size, tokens = _compute_medians_per_step(ranks)
    return RunFingerprint(
        started_at_ns=min((ns for ns in started if ns > 0), default=None),
        recordings=tuple(sorted(node.facts.key for node in nodes)),
        gpu_models=tuple(sorted(_count_models(nodes).items())),
        nodes=len({node.facts.boot_id or node.facts.key for node in nodes}) or None,
        world_size=job.world_size,
        batch_size=batch_size,
        tokens=tokens,
        measured_by=tuple(sorted({rank.ledger.source for rank in ranks})),
        frameworks=tuple(sorted(frameworks)),
        drivers=_sort_distinct(
            str(device.get("driver") or "") for header in headers for device in header.devices
        ),
        recorder=_sort_distinct(header.versions.get("clusterprof", "") for header in headers),
        restarts=len({(rank.job, rank.job_position.restart) for rank in ranks}) - 1 if ranks else 0,
    )


def _parse_frameworks(frameworks: object) -> list[tuple[str, str, str]]:
    """Parse the imported frameworks of a process: "torch 2.13.0, jax 0.10.2".

    Returns (name, " ", version) of each.
    """
    words = frameworks.split(", ") if isinstance(frameworks, str) else []
    return [parts for parts in (word.partition(" ") for word in words) if parts[2]]


def _count_models(nodes: Sequence[NodeResult]) -> Counter[str]:
    """Count the devices of each model that the ranks used."""
    out: Counter[str] = Counter()
    counted = set()
    for node in nodes:
        names = {
            str(device.get("id")): str(device.get("name") or "")
            for device in node.loaded.header.devices
        }
        for rank in node.ranks:
            device = rank.ledger.device
            node_device = (node.facts.boot_id or node.facts.key, device)
            if device and node_device not in counted:
                counted.add(node_device)
                out[names.get(device, "")] += 1
    return Counter({name: count for name, count in out.items() if name})


def _compute_medians_per_step(ranks: Sequence[RankResult]) -> list[float | None]:
    """Compute the medians over ranks of samples and tokens per step; None = not reported."""
    values: tuple[list[float], list[float]] = ([], [])
    for rank in ranks:
        sums = None if rank.blocks is None else rank.blocks.sums  # unpacked once for both
        counted = 0 if sums is None else int(sums[REPORTED].sum())
        if sums is not None and counted:
            for row, per_step in zip((SAMPLES, TOKENS), values):
                per_step.append(int(sums[row].sum()) / counted)
    return [float(median(per_step)) or None if per_step else None for per_step in values]


def _sort_distinct(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({word for word in words if word}))


_SUMMED_FIELDS = (
    "window_ns",
    "unmeasured_ns",
    "outside_ns",
    "in_step_ns",
    "productive_ns",
    "lost_ns",
)
"""Fields of the report that are sums over all ranks."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a report states about a run besides the results of its ranks."""

    left_out: Sequence[SkippedInput] = ()
    """Recordings that were not analyzed."""
    site: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the site, from its profile."""
    notes: tuple[str, ...] = ()
    """Notes on the input files."""
    history: History | None = None
    """Lost time over the run; None when it was not requested."""
    part: PartOfRun = WHOLE_RUN
    """The part of the run that was analyzed."""
    answers: tuple[str, ...] = ()
    """What imported files say about the question they are made for."""
    queued_at_ns: int | None = None
    """When the job was submitted, ns since 1970; None = as its recordings state."""


@dataclass(frozen=True, slots=True)
class ReportState:
    """A report in the making, and what its passes read."""

    report: Report
    across: JobState
    ranks: tuple[RankResult, ...]
    """The ranks of all nodes in order, as `report.ranks`."""
    totals: Sequence[CulpritTotals]
    """By rank: time that it caused to be lost."""
    context: RunContext


def build_report(title: str, across: JobState, context: RunContext | None = None) -> Report:
    """Merge the results of all nodes, in their order, into one report.

    Raises: UsageError when the requested part of the run contains no time inside steps.
    """
    state = _begin_report(title, across, context or RunContext())
    for apply_pass in REPORT_PASSES:
        state = apply_pass(state)
    return state.report


def _begin_report(title: str, across: JobState, context: RunContext) -> ReportState:
    """Begin a report with the ledgers of all ranks and their sums."""
    ranks = tuple(list_ranks(across.nodes))
    totals = compute_culprit_totals(ranks)
    ledgers = tuple(rank.ledger for rank in ranks)
    if across.observer is not None:
        ledgers = tuple(
            replace(ledger, caused=tuple(total.total.items()))
            for ledger, total in zip(ledgers, totals)
        )
    sums = {name: sum(getattr(ledger, name) for ledger in ledgers) for name in _SUMMED_FIELDS}
    reasons = _sum_amounts(rank.reasons for rank in ranks)
    outside = _sum_amounts(ledger.outside_buckets for ledger in ledgers)
    report = Report(
        title=title,
        emulated=any(rank.emulated for rank in ranks),
        nodes=tuple(node.facts for node in across.nodes),
        ranks=ledgers,
        **sums,
        findings=(),
        unattributed_ns=sum(reasons.values()),
        unattributed_reasons=_sort_by_amount(reasons),
        outside_buckets=_sort_by_amount(outside),
        metrics=(),
        coverage_gaps=(),
        lost_without_culprit=()
        if across.observer is None
        else _sort_by_amount(sum_unblamed_waits(ranks)),
        causes=CAUSES,
    )
    return ReportState(report, across, ranks, totals, context)


def _with_report(state: ReportState, **changes: Any) -> ReportState:
    return replace(state, report=replace(state.report, **changes))


def add_findings(state: ReportState) -> ReportState:
    """Add a finding for each cause of lost time."""
    sums = state.report.in_step_ns, state.report.window_ns
    imported = any("importer" in node.loaded.header.versions for node in state.across.nodes)
    findings = build_findings(state.ranks, state.totals, state.across.observer, *sums, imported)
    if _is_window_only(state.across.nodes):  # what came before the first step is no start-up
        findings = tuple(finding for finding in findings if not finding.outside_steps)
    return _with_report(state, findings=findings)


def add_network_evidence(state: ReportState) -> ReportState:
    """Add the evidence of network counters to the findings about transfers."""
    findings = state.across.network.with_network_evidence(state.report.findings)
    return _with_report(state, findings=tuple(findings))


def insert_job_findings(state: ReportState) -> ReportState:
    """Insert hangs and restarts before the other findings outside steps."""
    findings = state.report.findings
    inside = [finding for finding in findings if not finding.outside_steps]
    outside = [finding for finding in findings if finding.outside_steps]
    return _with_report(state, findings=(*inside, *state.across.findings, *outside))


def add_work_evidence(state: ReportState) -> ReportState:
    """Add the time and batch size per step to findings about a rank's own work."""
    report = state.report
    return _with_report(
        state, findings=with_work_evidence(report.findings, report.ranks, state.ranks)
    )


def compare_culprits(state: ReportState) -> ReportState:
    """Name the group that the culprits of findings are, and compare them with the other ranks."""
    grouped = with_culprit_groups(state.report.findings, state.across.nodes, state.ranks)
    compared = with_comparisons(grouped, state.ranks)
    return _with_report(state, findings=tuple(map(with_imbalance_in_turn, compared)))


def add_read_counts(state: ReportState) -> ReportState:
    """Add the number of reads to evidence with the size of reads."""
    return _with_report(state, findings=tuple(with_read_counts(state.report.findings, state.ranks)))


def add_code(state: ReportState) -> ReportState:
    """Add the lines of code in which the time was lost."""
    report, nodes = state.report, state.across.nodes
    tables = [node.loaded.stacks for node in nodes for _ in node.ranks]
    findings, code = build_code(
        report.findings, state.ranks, tables, state.totals, report.lost_without_culprit
    )
    return _with_report(state, findings=findings, code=code)


def add_metrics(state: ReportState) -> ReportState:
    """Add the metrics, the utilization of devices and the blocks of steps."""
    utilization = build_device_utilization(state.ranks)
    return _with_report(
        state,
        metrics=tuple(
            build_metrics(
                state.ranks, state.report.nodes, utilization, get_storage_au(state.across.nodes)
            )
        ),
        device_utilization=utilization,
        steps=build_step_stats(state.ranks),
        slow_step_summary=_summarize_slow_steps(state.across, state.ranks),
    )


def add_impact(state: ReportState) -> ReportState:
    """Add what the findings cost, and what the job would save without each."""
    report = state.report
    impact = build_impact(state.ranks, state.across, report.findings, state.context.site)
    return _with_report(
        state,
        findings=with_savings(report.findings, impact, _find_culprit_savings(state)),
        metrics=(*report.metrics, *list_impact_metrics(impact)),
        impact=impact,
    )


def _find_culprit_savings(state: ReportState) -> CulpritSavings | None:
    """Find what fixing one culprit saves, from the replay that the impact comes from."""
    model, leaves = SavingsModel(state.ranks, state.across.what_if), collect_leaves(state.ranks)
    numbers: dict[tuple[str, int | None], list[int]] = {}
    for number, rank in enumerate(state.ranks):
        numbers.setdefault((rank.ledger.node, rank.ledger.rank), []).append(number)

    def estimate(finding: Finding, culprit: Culprit) -> int | None:
        places, id_ = numbers.get((culprit.node, culprit.rank), []), finding.cause.id
        if len(places) != 1:
            return None
        return model.estimate_culprit(places[0], id_, leaves.get(id_, ())).ns

    return estimate if model.has_groups else None


def describe_job(state: ReportState) -> ReportState:
    """Add the facts of the job and the fingerprint of the run."""
    across = state.across
    job = build_job_facts(across.nodes, across.clock_bound_ns, across.clock_reason)
    return _with_report(
        state,
        job=job,
        fingerprint=build_fingerprint(across.nodes, job),
        groups=list_named_groups(across.nodes),
    )


def add_life(state: ReportState) -> ReportState:
    """Add the life of the job over its restarts; a part of a run has none."""
    if not state.context.part.whole:
        return state
    return _with_report(state, life=build_life(state.across, state.context.queued_at_ns))


def report_coverage(state: ReportState) -> ReportState:
    """Add coverage gaps and notes on data quality to the report."""
    across, ranks, context = state.across, state.ranks, state.context
    # Ranks that had stood still were ended by somebody: that failure comes second.
    failures = (*across.hang_notes, *describe_failed_ranks(across.nodes))
    return _with_report(
        state,
        coverage_gaps=(
            *_report_unmatched_operations(across),
            *list_coverage_gaps(across.nodes, ranks, across.unmatched, context.left_out),
            *across.coverage_gaps,
        ),
        notes=(
            *failures,
            *_build_notes(ranks),
            *describe_driver_errors(across.nodes),
            *merge_node_notes([(node.facts.name, node.notes) for node in across.nodes]),
            *across.notes,
            *_describe_copies(context.left_out),
            *context.notes,
        ),
        failures=failures,
    )


def add_advice(state: ReportState) -> ReportState:
    """Add advice to each finding; it reads the whole report."""
    return replace(state, report=with_advice(state.report, state.across.nodes))


def add_history(state: ReportState) -> ReportState:
    """Add what happened when, and the note of the part that was analyzed."""
    report = replace(state.report, history=state.context.history, answers=state.context.answers)
    return replace(state, report=with_part_note(report, state.context.part))


def date_causes(state: ReportState) -> ReportState:
    """Add the time at which causes began, where the history shows it."""
    return replace(state, report=with_onsets(state.report))


REPORT_PASSES: tuple[Callable[[ReportState], ReportState], ...] = (
    # The findings, from the causes to what they cost.
    add_findings,
    add_network_evidence,
    insert_job_findings,
    add_work_evidence,
    compare_culprits,
    add_read_counts,
    add_code,
    add_metrics,
    add_impact,
    # What the report covers.
    describe_job,
    add_life,
    report_coverage,
    # What is derived from the report itself.
    add_advice,
    add_history,
    date_causes,
)
"""How a report is put together, in order."""


def _report_unmatched_operations(across: JobState) -> tuple[CoverageGap, ...]:
    if not across.not_compared:
        return ()
    message = f"operations of different ranks could not be matched: {across.not_compared}"
    remedy = (
        "set TMPDIR to a folder with room for a quarter of the recordings' size, and analyze again"
    )
    return (CoverageGap("waits between ranks", "failed", message, remedy),)


def _summarize_slow_steps(across: JobState, ranks: Sequence[RankResult]) -> SlowStepSummary | None:
    if len(ranks) < 2 or across.observer is None:
        return None
    return across.observer.summarize_slow_steps(
        sum_field((rank.accumulator for rank in ranks), "steps")
    )


def _describe_copies(left_out: Sequence[SkippedInput]) -> tuple[str, ...]:
    return tuple(
        f"{folder.path} was left out: {folder.why}" for folder in left_out if folder.is_copy
    )


def _sum_amounts(lines: Iterable[Iterable[tuple[str, int]]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for pairs in lines:
        for id_, ns in pairs:
            out[id_] = out.get(id_, 0) + ns
    return out


def _sort_by_amount(amounts: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((k, ns) for k, ns in amounts.items() if ns), key=lambda p: (-p[1], p[0])))


def _build_notes(ranks: Sequence[RankResult]) -> tuple[str, ...]:
    notes = []
    if any(rank.emulated for rank in ranks):
        notes.append("accelerators are emulated: times are real, the devices are not")
    if any(rank.ledger.unobserved_ns for rank in ranks):
        notes.append(
            "lost time is no bound: no accelerator was measured, and what the host did outside its"
            " known waits was not recorded throughout"
        )
    elif any(rank.ledger.source == "host-spans" for rank in ranks):
        notes.append(
            "lost time is an upper bound: no accelerator was measured, so each wait of the host,"
            " its sleep and its time without a CPU count in full"
        )
    if any(not rank.marked and rank.ledger.device for rank in ranks):
        notes.append(
            "without the probe causes are inferred from co-occurrence, at family level only"
        )
    if any(not rank.marked and not rank.ledger.device for rank in ranks):
        notes.append("neither an accelerator nor the job was observed: its time is unmeasured")
    return tuple(notes)
