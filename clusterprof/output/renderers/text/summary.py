"""The verdict as a summary: loss, cause, culprits, evidence, next step and what it saves.

    Lost           27.2 % of GPU time inside steps: 7.46 of 27.4 GPU-seconds.
    Main cause     A bad link slows the data down: 5.95 s, 21.7 % (confidence 93 %).
    Ranks          node0 (eth0)
    Where          train.py:42 in augment → PIL/Image.py:2450 resize: 71 % ± 4 of it
    Evidence       tcp.retransmit_ratio 0.2 % (of the segments were sent again)
    Try next       Drain the named link, then reseat or replace cable, transceiver or port
    Expected gain  About 5.90 s of GPU time; the job ends 2.95 s sooner (21.5 %).

Every line can be read alone; the whole takes half a minute.

Header of a job report: what was recorded, on which nodes, and the clock alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from clusterprof.output.renderers.text import advice, code, culprits, wording
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.aggregate import list_processes
from clusterprof.report.model import Finding, NodeFacts, Report
from clusterprof.units import format_quantity
from clusterprof.util.ranges import format_host_list

CHANGE = "Change:"
"""Word before the change of the first recommendation."""
TRANSFER_CAUSE = "net-transfer"
"""Cause id of data transfer; part of it always remains, so savings are an upper bound."""
_NOTABLE_SAVING_RATIO = 0.01  # of the job's time; a smaller saving is not mentioned


class SummaryRow(NamedTuple):
    """A labeled line of the summary."""

    label: str
    """"" continues the row above."""
    text: str
    is_change: bool = False
    """True if the text is the change of the first recommendation."""


def build_summary(report: Report, price_per_hour: float | None, currency: str) -> list[SummaryRow]:
    """Build the rows of the summary; [] without ranks or time inside steps."""
    if not report.ranks or not report.in_step_ns:
        return []
    money = wording.describe_cost(report, price_per_hour, currency)
    loss = wording.describe_total_loss(report, was_lost="") + (f" {money}" if money else "")
    lines = [SummaryRow("Lost", loss)]
    outside = wording.describe_time_outside_steps(report)
    if outside:
        lines.append(SummaryRow("", outside))
    if not wording.has_significant_loss(report):
        return [*lines, SummaryRow("Try next", wording.describe_no_loss(report))]
    first = report.main_cause
    if first is None:
        lines.append(SummaryRow("Main cause", wording.describe_unknown_cause(report)))
        lines.append(SummaryRow("Try next", wording.describe_what_would_tell(report)))
        findings = wording.select_in_step_findings(report)
        if not findings:
            return lines
        first = findings[0]
        lines.append(SummaryRow("Known cause", _describe_cause(first)))
    else:
        lines.append(SummaryRow("Main cause", _describe_cause(first)))
    culprit_text = _describe_culprits(first, len(report.ranks))
    if culprit_text:
        lines.append(SummaryRow("Ranks", culprit_text))
    where = code.describe_where(report, first)
    if where:
        lines.append(SummaryRow("Where", where))
    lines.append(SummaryRow("Evidence", ""))
    if report.main_cause is None:
        return lines
    return [*lines, *_describe_next_step(report, first)]


def find_summary_finding(report: Report) -> Finding | None:
    """Find the finding that the summary is about; None if there is none."""
    findings = wording.select_in_step_findings(report)
    return report.main_cause or (findings[0] if findings else None)


def find_main_line(report: Report) -> str:
    """Find the line of code that the summary names; "" where it names none."""
    rows = build_summary(report, None, "")
    return next((row.text for row in rows if row.label == "Where"), "")


def _describe_cause(first: Finding) -> str:
    part = format_quantity(first.share_ratio, "ratio")
    return (
        f"{wording.format_title(first)}: {wording.format_lost_time(first)}, {part}"
        f" (confidence {wording.format_confidence(first)})."
    )


def _describe_culprits(first: Finding, ranks: int) -> str:
    """Describe the culprits, the ranks that waited, and whether culprits change over time."""
    if not first.culprits:
        return "No single rank: all ranks are affected alike." if ranks > 1 else ""
    chief = first.culprits[0]
    comparison = culprits.describe_peer_comparison(first)
    parts = [culprits.summarize_main_culprits(first) + (f": {comparison}" if comparison else "")]
    if len(culprits.select_main_culprits(first)) == 1 and chief.victims and chief.others_ns:
        noun = "rank" if chief.victims == 1 else "ranks"
        subject = f"{chief.victims:,} other {noun}"
        if first.peer_comparison is not None and (
            first.peer_comparison.compared_kind,
            first.peer_comparison.peer_count,
        ) == ("rank", chief.victims):  # the comparison just named these ranks
            subject = "which" if chief.victims == 1 else "these"
        parts.append(f"{subject} lost {format_quantity(chief.others_ns, 'ns')} waiting for it")
    # An onset implies that the culprits are the same from then on.
    parts.append(culprits.describe_onset(first) or culprits.summarize_persistence(first))
    return "; ".join(part for part in parts if part)


def _describe_next_step(report: Report, first: Finding) -> list[SummaryRow]:
    """Describe the first thing to do, advice that was withheld, the change, and what it saves."""
    text = advice.describe_first_step(first)
    if not text:
        return []
    sentences = [text, *advice.list_withheld_advice(first)]
    if len(sentences) > 1:
        text = " ".join(_ensure_full_stop(sentence) for sentence in sentences)
    lines = [SummaryRow("Try next", text)]
    recommendation = first.advice[0] if first.advice else None
    if recommendation is not None and recommendation.change:
        change = f"{CHANGE} {escape_text(recommendation.change, 400)}"
        lines.append(SummaryRow("", change, is_change=True))
    wins = describe_fix_savings(report, first)
    return [*lines, SummaryRow("Expected gain", wins)] if wins else lines


def _ensure_full_stop(text: str) -> str:
    return text if text[-1] in ".!?" else f"{text}."


def describe_fix_savings(report: Report, first: Finding) -> str:
    """Describe what fixing a finding saves in device time and job time; "" if it is not known."""
    if first.recoverable_ns is None or not report.in_step_ns:
        return ""
    at_most = "At most " if first.upper_bound or first.cause.id == TRANSFER_CAUSE else "About "
    text = f"{at_most}{format_quantity(first.recoverable_ns, 'ns')} of GPU time"
    job_impact = report.impact
    impacts = (
        []
        if job_impact is None
        else [impact for impact in job_impact.causes if impact.cause == first.cause.id]
    )
    saved = impacts[0].saved_ns if impacts else None
    job_ns = job_impact.job_ns if job_impact is not None else None
    if saved and job_ns and saved >= _NOTABLE_SAVING_RATIO * job_ns:
        # Share of job time, because a share of device time depends on each rank's work.
        part = format_quantity(saved / job_ns, "ratio")
        if report.is_window_only:
            return f"{text}: {part} of the recorded window."
        text = f"{text}; the job ends {format_quantity(saved, 'ns')} sooner ({part})"
    else:
        text = f"{text}, {format_quantity(first.recoverable_ns / report.in_step_ns, 'ratio')}"
    extra_savings = wording.explain_extra_savings(first)
    return f"{text}. That is {extra_savings}." if extra_savings else f"{text}."


def select_answers(report: Report, max_answers: int) -> list[str]:
    """Return the first answers of imported files, and how many more there are."""
    answers = [escape_text(f"{text}.", 400) for text in report.answers[:max_answers]]
    hidden_count = len(report.answers) - len(answers)
    return (
        [*answers, f"{format_count(hidden_count, 'more answer')}: --full."]
        if hidden_count
        else answers
    )


def describe_scope(report: Report) -> str:
    """Describe what was recorded: nodes, ranks, accelerators, steps, time and coverage."""
    if not report.nodes:
        return "no recording"
    steps = max((rank.steps for rank in report.ranks), default=0)
    longest = max((node.duration_ns for node in report.nodes), default=0)
    parts = [
        format_count(_count_machines(report), _get_node_noun(report)),
        _format_rank_count(report),
    ]
    if report.job is not None and report.job.gpus:
        parts.append(format_count(report.job.gpus, "GPU"))
    parts.append(format_count(steps, "step"))
    if not report.has_time_unit:
        return ", ".join(parts)
    parts.append(f"{format_quantity(longest, 'ns')} recorded")
    if report.job is not None and report.job.coverage_ratio is not None:
        covered = format_quantity(report.job.coverage_ratio, "ratio")
        parts[-1] = f"{format_quantity(longest, 'ns')} ({covered} covered)"
    return ", ".join(parts)


def describe_nodes(report: Report) -> str:
    """Describe the nodes and their clock alignment; "" for a single node or process."""
    if len(report.nodes) < 2 or len(set(list_processes(report.ranks, report.nodes))) == 1:
        return ""
    hosts = escape_text(format_host_list(escape_text(node.name, 60) for node in report.nodes), 600)
    hosts += "" if any(node.has_host_name for node in report.nodes) else " (hosts unknown)"
    return (
        f"{hosts}; {describe_clock_alignment(report)}"
        if describe_clock_alignment(report)
        else hosts
    )


def describe_clock_alignment(report: Report) -> str:
    """Describe how closely the clocks of several nodes were aligned, or why they were not."""
    job = report.job
    if job is None or len(report.nodes) < 2:
        return ""
    if job.clock_bound_ns is None:
        why = f": {escape_text(job.why_clocks_not_aligned)}" if job.why_clocks_not_aligned else ""
        return f"clocks not aligned{why}"
    return f"clocks aligned within {format_quantity(job.clock_bound_ns, 'ns')}"


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: "1 node", "2 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _get_node_noun(report: Report) -> str:
    """Return "node", or "trace" if no host is named: the number of machines is unknown."""
    named = any(node.has_host_name for node in report.nodes)
    return "node" if named or not report.nodes else "trace"


def _count_machines(report: Report) -> int:
    """Count the machines; one machine may have several recordings."""
    return len(
        {
            (node.name, node.boot_id or ("" if node.has_host_name else node.key))
            for node in report.nodes
        }
    )


def _format_rank_count(report: Report) -> str:
    size = report.job.world_size if report.job is not None else None
    count = len(set(list_processes(report.ranks, report.nodes)))
    if size is None or size <= count:
        return format_count(count, "rank")
    return f"{count:,} of {format_count(size, 'rank')}"


def describe_recordings(report: Report, alone: int, recorded: str = "") -> list[str]:
    """Describe how completely each node was recorded.

    With more than `alone` nodes, all nodes without damaged or dropped data share one line.
    """
    if len(report.nodes) <= alone:
        return [_describe_recording([node], recorded) for node in report.nodes]
    undamaged = [node for node in report.nodes if not node.damaged_bytes and not node.dropped_spans]
    torn = [node for node in report.nodes if node.damaged_bytes or node.dropped_spans]
    return [
        _describe_recording(group, recorded)
        for group in ([undamaged] if undamaged else []) + [[node] for node in torn]
    ]


def _describe_recording(nodes: Sequence[NodeFacts], recorded: str) -> str:
    names = escape_text(format_host_list(escape_text(node.name) for node in nodes), 600)
    times = [
        format_quantity(node.duration_ns, "ns")
        for node in _find_extremes(nodes, lambda n: n.duration_ns)
    ]
    costs = [node for node in nodes if node.recorder_cpu_ratio is not None]
    percents = [
        f"{100 * (node.recorder_cpu_ratio or 0.0):.2f}"
        for node in _find_extremes(costs, lambda n: n.recorder_cpu_ratio or 0.0)
    ]
    spent = f"{' to '.join(dict.fromkeys(percents))} % of one core" if percents else "unknown"
    damaged = sum(node.damaged_bytes for node in nodes)
    dropped = sum(node.dropped_spans for node in nodes)
    return (
        f"{names}: {' to '.join(dict.fromkeys(times))}{recorded}; recorder {spent};"
        f" unreadable {format_quantity(damaged, 'bytes')}; dropped spans {dropped:,}"
    )


def _find_extremes(
    nodes: Sequence[NodeFacts], get_value: Callable[[NodeFacts], float]
) -> list[NodeFacts]:
    """Return the nodes with the smallest and the largest value."""
    return [min(nodes, key=get_value), max(nodes, key=get_value)] if nodes else []
