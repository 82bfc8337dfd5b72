"""The impact of the findings in sentences: time, money, efficiency metrics.

Foreign strings pass `escape_text`. Unknown values are left out.

Sentences about devices that are busy but under-used; lost time is not mentioned here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterprof.output.renderers.text import wording
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.impact import CauseImpact, DeviceUtilization, Impact, RankUtilization
from clusterprof.report.model import Report
from clusterprof.units import format_quantity
from clusterprof.util.ranges import format_number_list

IMPACT_SCOPE = ": the recorded steps with one cause fixed, and efficiency metrics"
IMPACT_HEADING = f"IMPACT{IMPACT_SCOPE}"
_MAX_CAUSES = 6
_NEGLIGIBLE_SAVING_RATIO = 0.001  # of the job's time; a smaller saving gets no line


def describe_impact(report: Report) -> list[str]:
    """Describe costs and savings per cause, rates and efficiency; [] if nothing is known."""
    job_impact = report.impact
    if job_impact is None or not job_impact.job_ns:
        return []
    return [
        *_describe_time_savings(job_impact),
        *_describe_rates(job_impact),
        *_describe_efficiency_metrics(job_impact),
    ]


def format_cost(amount: float, currency: str) -> str:
    """Format an amount of money: two decimals, or three digits for small amounts."""
    unit = escape_text(currency, 12)
    return f"{amount:,.2f} {unit}" if amount >= 0.1 or not amount else f"{amount:.3g} {unit}"


def format_time_saved(ns: int, low_ns: int | None, high_ns: int | None, job_ns: int) -> str:
    """Format how much sooner a job would end, with the bounds if they are known."""
    share = format_quantity(ns / job_ns, "ratio")
    if low_ns is None or high_ns is None:
        return f"{format_quantity(ns, 'ns')} sooner ({share})"
    bounds = f"{format_quantity(low_ns, 'ns')} to {format_quantity(high_ns, 'ns')}"
    return f"{format_quantity(ns, 'ns')} sooner ({share}; 95 %: {bounds})"


def _describe_time_savings(job_impact: Impact) -> Iterator[str]:
    job_ns = job_impact.job_ns or 0
    steps = f"The steps took {format_quantity(job_ns, 'ns')}"
    shown = [cause for cause in job_impact.causes if not cause.outside_steps][:_MAX_CAUSES]
    notable = [
        cause for cause in shown if (cause.saved_ns or 0) >= _NEGLIGIBLE_SAVING_RATIO * job_ns
    ]
    if not any(cause.saved_ns is not None for cause in shown):
        why = next((cause.why_missing for cause in shown if cause.why_missing), "")
        yield f"{steps}." + (
            f" What fixing would save is not known: {escape_text(why, 200)}." if why else ""
        )
        return
    if notable:
        yield f"{steps}; with one cause fixed and all else unchanged, they would end"
    for cause in notable:
        yield _describe_cause_impact(cause, job_impact)
    fixable = [cause for cause in notable if cause.cause != "net-transfer"]
    if job_impact.saved_ns is not None and len(fixable) > 1:
        saved = format_time_saved(
            job_impact.saved_ns, job_impact.saved_low_ns, job_impact.saved_high_ns, job_ns
        )
        yield f"all fixable causes: {saved} (not the sum: one cause can hide another)"
    for cause in shown:
        if cause.saved_ns is None:
            yield (
                f"{escape_text(cause.cause, 60)}: not known: {escape_text(cause.why_missing, 200)}"
            )


def _describe_cause_impact(cause: CauseImpact, job_impact: Impact) -> str:
    saved = format_time_saved(
        cause.saved_ns or 0, cause.saved_low_ns, cause.saved_high_ns, job_impact.job_ns or 1
    )
    line = f"{escape_text(cause.cause, 60)}: {saved}"
    if cause.lost_cost is not None:
        line += f"; lost {format_cost(cause.lost_cost, job_impact.currency)}"
    if cause.saved_cost is not None:
        line += f", fixing saves {format_cost(cause.saved_cost, job_impact.currency)}"
    return line


def _describe_rates(job_impact: Impact) -> Iterator[str]:
    for name, current, fixed in (
        ("tokens", job_impact.tokens_per_second, job_impact.tokens_per_second_if_fixed),
        ("samples", job_impact.samples_per_second, job_impact.samples_per_second_if_fixed),
    ):
        if current is not None:
            fixed_text = f", {_format_rate(fixed)} with all fixed" if fixed is not None else ""
            yield (
                f"{name} per second: {_format_rate(current)}{fixed_text} (summed over the ranks"
                f" that read them)"
            )
    cost, cheaper = job_impact.cost_per_million_tokens, job_impact.cost_per_million_tokens_if_fixed
    if cost is not None:
        fixed_text = (
            f", {format_cost(cheaper, job_impact.currency)} with all fixed"
            if cheaper is not None
            else ""
        )
        yield f"a million tokens cost {format_cost(cost, job_impact.currency)}{fixed_text}"


def _format_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _describe_efficiency_metrics(job_impact: Impact) -> Iterator[str]:
    known_metrics = [
        (escape_text(name, 60), value, text)
        for name, value, text in job_impact.efficiency_metrics
        if value is not None
    ]
    for name, value, text in known_metrics:
        yield f"{name} {value:.3f}: {escape_text(text, 300)}"


UTILIZATION_HEADING = "UNDER-USED DEVICES, separate from lost time"
_MAX_RANK_NAMES = 4  # ranks without a number from the launcher
_UNMEASURED_REASONS = {
    "no-sm-activity": "no SM activity was recorded",
    "no-reading": "readings of SM activity are missing",
    "perhaps-waiting": "the device may have waited for other ranks",
    "zero-reading": "SM activity reads 0 while kernels ran",
}


def describe_utilization(report: Report) -> list[str]:
    """Describe how much device time was under-used and what to do; [] if there is no advice."""
    utilization = report.device_utilization
    if utilization is None or not utilization.advice:
        return []
    groups: dict[tuple[tuple[str, ...], bool], list[RankUtilization]] = {}
    for rank in utilization.ranks:
        if rank.advice:
            groups.setdefault((rank.advice, rank.is_measured), []).append(rank)
    largest_first = sorted(groups.values(), key=lambda ranks: -len(ranks))
    return [
        _summarize_utilization(utilization),
        *(_describe_ranks(utilization, ranks, report) for ranks in largest_first),
    ]


def describe_unmeasured_reason(code: str) -> str:
    """Describe why the utilization of a device is not known."""
    return _UNMEASURED_REASONS.get(code) or escape_text(code, 200)


def _summarize_utilization(utilization: DeviceUtilization) -> str:
    """Summarize the utilization ledger in words."""
    at_work = utilization.busy_ns - utilization.lost_ns
    text = f"Kernels ran for {format_quantity(at_work, 'ns')}"
    known_ns = utilization.well_used_ns + utilization.under_used_ns
    if known_ns:
        part = format_quantity(utilization.under_used_ns / known_ns, "ratio")
        text += (
            f": {format_quantity(utilization.well_used_ns, 'ns')} well used and"
            f" {format_quantity(utilization.under_used_ns, 'ns')}"
            f" under-used ({part})"
        )
    if utilization.unmeasured_ns:
        why = ", ".join(describe_unmeasured_reason(code) for code, _ in utilization.reasons)
        text += f"; not known for {format_quantity(utilization.unmeasured_ns, 'ns')}: {why}"
    return f"{text}. None of this is idle time."


def _describe_ranks(
    utilization: DeviceUtilization, ranks: Sequence[RankUtilization], report: Report
) -> str:
    """Describe what ranks with equal advice did, what to do, and how certain that is."""
    codes, measured = ranks[0].advice, ranks[0].is_measured
    text = _format_rank_names(ranks) + ("" if measured else " may be under-used")
    text += f" ({', '.join(_describe_levels(ranks))}):"
    for advice in utilization.advice:
        if advice.code in codes and advice.measured == measured:
            certain = (
                f"{100 * advice.confidence_ratio:.0f} % sure:"
                f" {wording.describe_evidence_grade(advice.grade)}"
            )
            text += f" {escape_text(advice.text, 300)} ({certain})."
    if "fewer-launches" in codes and _has_launch_idle(report):
        text += " Idle time between launches is reported as the cause launch-bound."
    return text


def _has_launch_idle(report: Report) -> bool:
    return any(finding.cause.id == "launch-bound" for finding in report.findings)


def _describe_levels(ranks: Sequence[RankUtilization]) -> list[str]:
    """Describe what was measured while kernels ran: means; for memory the fullest rank."""
    words = []
    for label, name in (
        ("SM activity", "sm_active_ratio"),
        ("occupancy", "sm_occupancy_ratio"),
        ("tensor cores", "tensor_active_ratio"),
        ("memory rate", "dram_active_ratio"),
        ("power between idle and limit", "power_ratio"),
        ("main thread on a CPU", "host_on_cpu_ratio"),
    ):
        ratios = [ratio for rank in ranks if (ratio := getattr(rank.levels, name)) is not None]
        if ratios:
            words.append(f"{label} {format_quantity(sum(ratios) / len(ratios), 'ratio')}")
    rooms = [rank.levels for rank in ranks if rank.levels.memory_free_ratio is not None]
    if rooms:
        least_free = min(rooms, key=lambda levels: levels.memory_free_ratio or 0.0)
        used, total = least_free.memory_used_bytes or 0, least_free.memory_total_bytes or 0
        words.append(
            f"{format_quantity(used, 'bytes')} of {format_quantity(total, 'bytes')} memory used"
        )
    return words or ["nothing else was recorded"]


def _format_rank_names(ranks: Sequence[RankUtilization]) -> str:
    numbers = [rank.rank for rank in ranks if rank.rank is not None]
    if len(numbers) == len(ranks):
        return f"rank{'' if len(numbers) == 1 else 's'} {format_number_list(numbers)}"
    names = [f"pid {rank.pid} on {escape_text(rank.node, 60)}" for rank in ranks[:_MAX_RANK_NAMES]]
    hidden_count = len(ranks) - len(names)
    return ", ".join(names) + (f" and {hidden_count} more" if hidden_count > 0 else "")
