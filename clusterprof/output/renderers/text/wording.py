"""Sentences shared by all text outputs: verdict, warnings, evidence, confidence, coverage gaps.

Every foreign string passes through `escape_text` here. Numbers are rounded here and nowhere
earlier. Confidence has the kind of evidence where there is room:

    98 %: a marker and a counter agree (grade A)
"""

from __future__ import annotations

import math

from clusterprof.output.renderers.text import culprits
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.impact import list_utilization_sums
from clusterprof.report.model import (
    UNATTRIBUTED,
    CoverageGap,
    Evidence,
    Finding,
    RankLedger,
    Report,
)
from clusterprof.units import format_quantity

_HOUR_NS = 3600 * 10**9
# a loss below this share of the in-step time is not worth a reader's day
_NEGLIGIBLE_LOSS_RATIO = 0.01
_MODERATE_LOSS_RATIO = 0.1  # up to this, a loss in small parts is no verdict of its own either
_SMALL_PART_RATIO = 0.05
_SMALL_LOSS_RATIO = 0.03  # a loss without a main cause up to this size is no verdict of its own
# a larger share of the recorded time outside steps gets a sentence in the verdict
_NOTABLE_OUTSIDE_RATIO = 0.05
_MIN_COST = 0.01  # in any currency; a smaller amount would be printed as "0.00"
_NOTABLE_UNMEASURED_RATIO = 0.01  # a smaller share appears in the ledger only, without a warning
_MAX_IMBALANCES = 3
_BY_HAND = "verify-by-hand"  # advice that checks one cause, not what is unknown
_GPU_TIME_UNITS = (
    ("hours", 3600, 5400),
    ("minutes", 60, 90),
    ("seconds", 1, 0.1),
    ("milliseconds", 1e-3, 1e-3),
    ("microseconds", 1e-6, 1e-6),
)
"""Unit of device time, its seconds, and the seconds from which it is used."""
# of the preferred unit; smaller amounts are written in their own unit
_MIN_IN_PREFERRED_UNIT = 0.01

_KEPT_BUSY = "The accelerators were kept busy"
NO_SIGNIFICANT_LOSS = "Nothing to fix: the accelerators were kept busy."
_MAY_HAVE_WAITED = (
    "Not known: the accelerators were busy, but nothing recorded distinguishes work from waiting"
    " for other ranks in collectives (see Not seen)."
)
_NOTHING_MEASURED = (
    "No device was measured and no host wait was recorded, so it is not known how busy the"
    " accelerators were."
)
_HOST_ONLY = "The host hardly waited. No device was measured, so device utilization is unknown."
_NOTABLE_UNOBSERVED_RATIO = 0.01  # of the time in steps; with more, what was seen is no bound
LEGEND = (
    "confidence: how certain the cause is, not how large. gain: device time saved by fixing this"
    " cause only."
)


def format_gpu_time(ns: int, preferred_unit: str = "") -> str:
    """Format device time in GPU-seconds, GPU-minutes or GPU-hours.

    ns: device time in nanoseconds.
    preferred_unit: such as "GPU-hours"; "" for the unit that suits the amount.
    """
    seconds = ns / 1e9
    for unit, size, from_seconds in _GPU_TIME_UNITS:
        value = seconds / size
        if seconds >= from_seconds or (
            preferred_unit == f"GPU-{unit}" and value >= _MIN_IN_PREFERRED_UNIT
        ):
            in_seconds = unit == "seconds" or preferred_unit
            digits = 0 if value >= 100 else 1 if value >= 10 or not in_seconds else 2
            return f"{value:,.{digits}f} GPU-{unit}"
    return f"{ns:,} GPU-nanoseconds"


def format_share(part_ns: int, whole_ns: int) -> str:
    """Format a part as a percentage of a whole; "0.0 %" if the whole is zero."""
    return format_quantity(part_ns / whole_ns if whole_ns else 0.0, "ratio")


def is_measured(rank: RankLedger) -> bool:
    """Return whether the lost time of a rank was measured; where it was not, 0 is no result."""
    return bool(rank.device) or rank.lost_ns > 0


def is_device_measured(report: Report) -> bool:
    """Return whether the device time of any rank was measured or emulated."""
    return report.emulated or any(
        rank.device and rank.source != "host-spans" for rank in report.ranks
    )


def format_rank_share(rank: RankLedger) -> str:
    """Format the lost share of a rank's time in steps; "-" if it was not measured."""
    return format_share(rank.lost_ns, rank.in_step_ns) if is_measured(rank) else "-"


def is_unbounded(report: Report) -> bool:
    """Return whether notable time was not observed: what was seen of the loss is no bound."""
    return report.unobserved_ns > _NOTABLE_UNOBSERVED_RATIO * report.in_step_ns


def is_upper_bound(report: Report) -> bool:
    """Return whether the lost time of any rank or finding is only an upper bound."""
    return not is_unbounded(report) and _has_upper_bounds(report)


def is_lower_bound(report: Report) -> bool:
    """Return whether devices may have waited unseen: the loss can be larger than what was seen."""
    return any(
        metric.name == "lost.ratio" and metric.bound == "at least" for metric in report.metrics
    )


def _has_upper_bounds(report: Report) -> bool:
    return any(rank.source == "host-spans" and rank.lost_ns for rank in report.ranks) or any(
        finding.upper_bound for finding in report.findings
    )


def sum_buckets(report: Report) -> dict[str, int]:
    """Sum the in-step buckets of all ranks by cause, including "unattributed" (nanoseconds)."""
    sums: dict[str, int] = {UNATTRIBUTED: 0}
    for rank in report.ranks:
        for cause, ns in rank.buckets:
            sums[cause] = sums.get(cause, 0) + ns
    return sums


def list_small_causes(report: Report) -> list[tuple[str, int]]:
    """List (cause, ns) of causes that are too small for a finding, largest first."""
    reported = {finding.cause.id for finding in select_in_step_findings(report)} | {UNATTRIBUTED}
    small = [
        (cause, ns) for cause, ns in sum_buckets(report).items() if ns and cause not in reported
    ]
    return sorted(small, key=lambda bucket: (-bucket[1], bucket[0]))


def describe_verdict(report: Report) -> str:
    """Describe what cost most, how much, and who caused it; for one rank, what it lost."""
    if not report.ranks:
        return (
            f"No training process was recorded: nothing can be said about"
            f" {_get_gpu_time_noun(report)}."
        )
    if report.in_step_ns == 0:
        theirs = "its" if len(report.ranks) == 1 else "their"
        why = "No steps were recorded"
        if any(rank.steps for rank in report.ranks):
            why = "No device was measured inside the steps"
        return f"{why}: it is not known how the job used {theirs} {_get_gpu_time_noun(report)}."
    if not _can_lead_with_cause(report):
        return describe_total_loss(report)
    first = select_in_step_findings(report)[0]
    part, total = _format_part_and_whole(first.lost_ns, report.in_step_ns, report)
    total = name_time_unit(total, report)
    at_most = "at most " if first.upper_bound else ""
    ratio = format_share(first.lost_ns, report.in_step_ns)
    name = escape_text(first.cause.id, 60)
    cost = f"{at_most}{part} of {total} ({ratio})" if report.has_time_unit else f"{at_most}{ratio}"
    return (
        f"{format_title(first)} ({name}). This cost the most: {cost},"
        f" {culprits.describe_blame(first)}."
    )


def describe_main_cause(report: Report) -> str:
    """Describe the line below the verdict: the main cause, or the total, or that none is."""
    if not report.ranks or report.in_step_ns == 0:
        return ""
    if _can_lead_with_cause(report):
        return f"In total {describe_total_loss(report, starts_sentence=False)}"
    if not has_significant_loss(report):
        return describe_no_loss(report)
    first = report.main_cause
    if first is None:
        return describe_unknown_cause(report)
    part = format_share(first.lost_ns, report.lost_ns)
    where = f", mostly on {culprits.format_culprit(first.culprits[0])}" if first.culprits else ""
    return f"Mainly {escape_text(first.cause.id, 60)}: {part} of the loss{where}."


def describe_no_loss(report: Report) -> str:
    """Describe that hardly anything was lost, or why that cannot be judged."""
    if report.too_little_seen:
        return describe_too_little_seen(report)
    if is_lower_bound(report):
        return _MAY_HAVE_WAITED
    if all(rank.device for rank in report.ranks if rank.in_step_ns):
        if report.lost_ns > _NEGLIGIBLE_LOSS_RATIO * report.in_step_ns:
            part = format_share(report.lost_ns, report.in_step_ns)
            return f"{_KEPT_BUSY}; {part} was lost, mostly without a known cause."
        return NO_SIGNIFICANT_LOSS
    has_seen = report.lost_ns or not is_unbounded(report)
    return _HOST_ONLY if has_seen else _NOTHING_MEASURED


def describe_too_little_seen(report: Report) -> str:
    """Describe that too little was seen to judge the job; "" if enough was seen."""
    why = escape_text(report.too_little_seen, 200)
    return f"Too little was seen to judge the job: {why}." if why else ""


def describe_unknown_cause(report: Report) -> str:
    """Describe that more was lost for an unknown reason than to the largest cause."""
    part = format_share(report.unattributed_ns, report.lost_ns)
    reasons = [describe_unattributed_reason(code) for code, _ in report.unattributed_reasons[:1]]
    why = f" ({reasons[0]})" if reasons else ""
    if has_small_parts_only(report):
        share = format_share(report.unattributed_ns, report.in_step_ns)
        return (
            "No main cause: the loss is small and spread out. The largest part,"
            f" {share}, has no known cause{why}."
        )
    return f"Not known: {part} of the loss has no known cause{why}."


def has_small_parts_only(report: Report) -> bool:
    """Return whether little was lost, in parts of which each is small."""
    findings = select_in_step_findings(report)
    parts = (report.unattributed_ns, *(finding.lost_ns for finding in findings))
    return (
        report.lost_ns <= _MODERATE_LOSS_RATIO * report.in_step_ns
        and max(parts) <= _SMALL_PART_RATIO * report.in_step_ns
    )


_NO_SIGNAL = "no-signal"
_RECORD_HOST = "To learn the cause: record the job with clusterprof, which samples its host, too"


def describe_what_would_tell(report: Report, location: str = "") -> str:
    """Describe what would make an unknown cause known; place: where most of the time went."""
    is_imported = all(node.recorder_cpu_ratio is None for node in report.nodes)
    if is_imported and any(code == _NO_SIGNAL for code, _ in report.unattributed_reasons[:1]):
        return _RECORD_HOST
    remedies = [
        item.remedy for item in report.coverage_gaps if item.remedy and item.kind != "absent"
    ]
    finding = next((f for f in select_in_step_findings(report) if f.advice), None)
    if remedies:
        count = len(set(remedies)) - 1
        suffix = f"; {count:,} more under Not seen" if count else ""
        return f"To learn the cause: {escape_text(remedies[0], 300).rstrip('.')}{suffix}"
    if location:
        return f"To learn the cause: see what {location} does or waits for"
    if finding is not None and finding.advice[0].diagnose and finding.advice[0].id != _BY_HAND:
        return f"To learn the cause: {_lower_first(escape_text(finding.advice[0].what, 300))}"
    if is_imported:
        return _RECORD_HOST
    return "To learn the cause: see Unattributed, with --full"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def has_significant_loss(report: Report) -> bool:
    """Return whether more than a hundredth of the time inside steps was lost.

    Without a main cause, whether more than three hundredths were.
    """
    has_cause = report.main_cause is not None
    ratio = _NEGLIGIBLE_LOSS_RATIO if has_cause else _SMALL_LOSS_RATIO
    return report.lost_ns > ratio * report.in_step_ns


def _can_lead_with_cause(report: Report) -> bool:
    """Return whether the verdict of a multi-rank job can start with one cause."""
    several = len(report.ranks) > 1
    return several and has_significant_loss(report) and report.main_cause is not None


def describe_total_loss(
    report: Report, starts_sentence: bool = True, was_lost: str = " was lost"
) -> str:
    """Describe how much of the time inside steps was lost, or that it was not measured.

    starts_sentence: capitalize the first word. was_lost: words after "inside steps".
    """
    if not any(is_measured(rank) for rank in report.ranks):
        return (
            f"{'Not' if starts_sentence else 'not'} measured: neither an accelerator nor a host"
            " wait."
        )
    part, total = _format_part_and_whole(report.lost_ns, report.in_step_ns, None)
    total = name_time_unit(total, report)
    ratio = format_share(report.lost_ns, report.in_step_ns)
    at_most = "at most " if is_upper_bound(report) else ""
    at_most = "at least " if is_lower_bound(report) else at_most
    at_most = at_most.capitalize() if starts_sentence else at_most
    amount = f": {part} of {total}" if report.has_time_unit else ""
    unobserved = format_share(report.unobserved_ns, report.in_step_ns)
    suffix = f"; {unobserved} was not observed" if is_unbounded(report) else ""
    whole_time = "step time"
    if is_device_measured(report):
        has_steps = any(rank.steps for rank in report.ranks)
        whole_time = _get_gpu_time_noun(report) + (" inside steps" if has_steps else "")
    return f"{at_most}{ratio} of {whole_time}{was_lost}{amount}{suffix}."


def _get_gpu_time_noun(report: Report) -> str:
    if report.ranks and not is_device_measured(report):
        return "step time"
    return "emulated GPU time" if report.emulated else "GPU time"


def name_time_unit(text: str, report: Report) -> str:
    """Name the unit of a time after what was measured: "GPU-seconds", or "rank-seconds"."""
    return text if is_device_measured(report) else text.replace(" GPU-", " rank-")


def _format_part_and_whole(part_ns: int, whole_ns: int, several: Report | None) -> tuple[str, str]:
    """Format two amounts of device time; the unit appears once if both share it."""
    total = format_gpu_time(whole_ns)
    if not part_ns:
        return "0", total
    part = format_gpu_time(part_ns, total.split()[1] if several else "")
    if part.split()[1] != total.split()[1]:
        part = format_gpu_time(part_ns, total.split()[1])
    if part.split()[1] == total.split()[1]:
        part = part.split()[0]
    emulated = several is not None and several.emulated
    return part, total.replace(" GPU", " emulated GPU") if emulated else total


def describe_cost(report: Report, price_per_hour: float | None, currency: str) -> str:
    """Describe what the loss cost; "" if no price is known or the GPUs are emulated.

    A price in the report takes precedence; `price_per_hour` serves reports without one.
    """
    cost = None
    if report.impact is not None:
        price_per_hour, currency = report.impact.price_per_gpu_hour, report.impact.currency
        cost = report.impact.lost_cost
    elif price_per_hour is not None and not report.emulated:
        cost = report.lost_ns / _HOUR_NS * price_per_hour
    if cost is None or price_per_hour is None or cost < _MIN_COST:
        return ""
    about = "at most" if is_upper_bound(report) else "about"
    unit = escape_text(currency, 12)
    return f"That is {about} {cost:,.2f} {unit} at {price_per_hour:,.2f} {unit} per GPU-hour."


def describe_time_outside_steps(report: Report) -> str:
    """Describe how much device time was outside steps; "" if it was little."""
    if report.selection_text or report.outside_ns <= _NOTABLE_OUTSIDE_RATIO * report.window_ns:
        return ""
    causes = sorted(report.outside_buckets, key=lambda bucket: -bucket[1])[:2]
    names = {"startup": "before the first step"} if report.is_window_only else {}
    named = ", ".join(
        f"{escape_text(names.get(cause, cause), 60)} {format_quantity(ns, 'ns')}"
        for cause, ns in causes
    )
    part = format_share(report.outside_ns, report.window_ns)
    return f"{part} of the recorded device time was outside steps: {named}."


def list_warnings(report: Report, with_bounds: bool = True) -> list[str]:
    """List what a reader must know before trusting any number, most important first.

    with_bounds: say how far the loss is a bound, and how much device time was not measured.
    """
    notes = (escape_text(note, 400) for note in report.failures)
    lines = [f"{note[:1].upper()}{note[1:]}." for note in notes]
    if report.selection_text:
        lines.append(f"ONLY A PART of the run: {escape_text(report.selection_text)}.")
    if report.emulated:
        lines.append("EMULATED ACCELERATORS: no GPU was measured; device times are emulated.")
    unmeasured = [rank for rank in report.ranks if rank.source == "host-spans" and rank.lost_ns]
    if report.too_little_seen and has_significant_loss(report):
        lines.append(f"TOO LITTLE SEEN to judge the job: {escape_text(report.too_little_seen)}.")
    if not report.has_time_unit:
        lines.append("NO UNIT of time is stated: only shares hold, all durations are relative.")
    if with_bounds and is_unbounded(report) and report.lost_ns and not report.too_little_seen:
        lines.append(
            "LOSS UNCERTAIN: no device was measured, and parts of the host activity were not"
            " recorded. The real loss can be larger or smaller."
        )
    if with_bounds and is_upper_bound(report):
        count = len(unmeasured)
        scope = "" if count == len(report.ranks) else f" for {count} of the ranks"
        lines.append(
            f'UPPER BOUND: no device was measured{scope}; losses marked "at most" may be smaller.'
        )
    if with_bounds and report.unmeasured_ns > _NOTABLE_UNMEASURED_RATIO * report.window_ns:
        part = format_share(report.unmeasured_ns, report.window_ns)
        lines.append(f"NOT MEASURED: {part} of the device time: not counted as busy or idle.")
    damaged = sum(node.damaged_bytes for node in report.nodes)
    dropped = sum(node.dropped_spans for node in report.nodes)
    if damaged or dropped:
        lines.append(
            f"DAMAGED: {format_quantity(damaged, 'bytes')} of the recording could not be read,"
            f" {dropped:,} spans were dropped; the rest was used."
        )
    if any(node.altered_segments for node in report.nodes):
        lines.append("CHANGED: files of the recording are not as the recorder closed them.")
    errors = list_imbalances(report)[:_MAX_IMBALANCES]
    return lines + [f"THE LEDGER DOES NOT BALANCE, please report it: {error}" for error in errors]


def list_imbalances(report: Report) -> list[str]:
    """List the sums of the ledger that differ when recomputed; [] if all hold to the ns."""
    buckets = sum_buckets(report)
    sums = [
        ("window", report.window_ns, report.unmeasured_ns + report.outside_ns + report.in_step_ns),
        ("in steps", report.in_step_ns, report.productive_ns + report.lost_ns),
        ("lost", report.lost_ns, sum(buckets.values())),
        ("unattributed of ranks", report.unattributed_ns, buckets[UNATTRIBUTED]),
        ("outside", report.outside_ns, sum(ns for _, ns in report.outside_buckets)),
        ("unattributed", report.unattributed_ns, sum(ns for _, ns in report.unattributed_reasons)),
        ("ranks", report.lost_ns, sum(rank.lost_ns for rank in report.ranks)),
    ]
    if any(rank.caused for rank in report.ranks):
        caused = sum(ns for rank in report.ranks for _, ns in rank.caused)
        sums.append(
            ("caused", report.lost_ns, caused + sum(ns for _, ns in report.lost_without_culprit))
        )
    sums += list_utilization_sums(report.device_utilization)
    sums += [
        (f"{escape_text(f.cause.id, 60)} of ranks", f.lost_ns, buckets.get(f.cause.id, 0))
        for f in select_in_step_findings(report)
    ]
    for rank in report.ranks:
        name = format_rank_name(rank)
        parts = rank.unmeasured_ns + rank.outside_ns + rank.in_step_ns
        sums += [
            (f"window of {name}", rank.window_ns, parts),
            (f"in steps of {name}", rank.in_step_ns, rank.productive_ns + rank.lost_ns),
            (f"lost of {name}", rank.lost_ns, sum(ns for _, ns in rank.buckets)),
            (f"outside of {name}", rank.outside_ns, sum(ns for _, ns in rank.outside_buckets)),
        ]
    return [f"{name} {a:,} ns is not {b:,} ns" for name, a, b in sums if a != b]


def select_in_step_findings(report: Report) -> list[Finding]:
    """Select the findings whose time lies inside steps, in the report's order."""
    return [finding for finding in report.findings if not finding.outside_steps]


def format_title(finding: Finding) -> str:
    return escape_text(finding.cause.title)


def format_lost_time(finding: Finding, at_most: str = "at most ") -> str:
    """Format the device time of a finding, with "at most" before an upper bound."""
    return (at_most if finding.upper_bound else "") + format_quantity(finding.lost_ns, "ns")


def explain_extra_savings(finding: Finding) -> str:
    """Explain why fixing a finding saves more than was lost to it; "" if it does not."""
    why = escape_text(finding.why_savings_exceed_loss, 200)
    return f"more than was lost: {why}" if why else ""


def describe_savings(finding: Finding) -> str:
    """Describe what fixing a finding saves, and why that can exceed what was lost."""
    extra = explain_extra_savings(finding)
    return format_recoverable_time(finding, "not known") + (f", {extra}" if extra else "")


def format_recoverable_time(finding: Finding, unknown: str) -> str:
    """Format the device time that fixing a finding saves; `unknown` if it is not known."""
    if finding.recoverable_ns is None:
        return unknown
    return format_quantity(finding.recoverable_ns, "ns")


def format_rank_name(rank: RankLedger) -> str:
    """Format the name of a rank for a heading: its number, or the process id without one."""
    return f"pid {rank.pid}" if rank.rank is None else f"rank {rank.rank}"


_SMALLEST_RATIO = 0.0005  # a smaller ratio would be printed as "0.0 %"


def format_evidence(item: Evidence, with_note: bool = True) -> str:
    """Format one piece of evidence: name, number and, with `with_note`, what it means."""
    note = f" ({escape_text(item.note)})" if item.note and with_note else ""
    return f"{escape_text(item.name, 60)} {format_evidence_value(item)}{note}"


def format_evidence_value(item: Evidence) -> str:
    """Format the number of a piece of evidence.

    A tiny ratio is not rounded to zero, and a number that is not finite becomes "not
    measured".
    """
    if not math.isfinite(item.value):
        return "not measured"
    if item.unit == "ratio" and 0 < item.value < _SMALLEST_RATIO:
        return f"below {format_quantity(2 * _SMALLEST_RATIO, 'ratio')}"
    return format_quantity(item.value, item.unit)


GRADES = {
    "A": "measured by two independent signals",
    "B": "measured by one signal",
    "C": "inferred from a correlation",
    "D": "assumed from prior knowledge; no direct evidence",
}


def format_confidence(finding: Finding) -> str:
    """Format the confidence in a cause as a percentage."""
    return f"{100 * finding.confidence_ratio:.0f} %"


def describe_evidence_grade(grade: str) -> str:
    """Describe a class of evidence, with the letter that JSON uses for it."""
    return f"{GRADES[grade]} (grade {grade})" if grade in GRADES else f"grade {grade}"


def describe_confidence(finding: Finding) -> str:
    """Describe the confidence in a cause and the evidence it rests on."""
    return f"{format_confidence(finding)}: {describe_evidence_grade(finding.grade)}"


_MAX_GAP_NAMES = 12


def list_coverage_gaps(
    report: Report, max_names: int = _MAX_GAP_NAMES, failed_first: bool = False
) -> list[str]:
    """List the coverage gaps and what would close them; one line per reason.

    What the machine does not have (no quota, no NFS) shares the last line: nothing is
    missed there. failed_first: what is merely absent comes after what failed.
    """
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    key = (lambda item: item.kind == "absent") if failed_first else (lambda item: False)
    for item in sorted(report.coverage_gaps, key=key):
        if not _is_feature_absent(item):
            reason = (item.kind, item.message, item.remedy)
            by_reason.setdefault(reason, []).append(escape_text(item.what, 80))
    lines = [_format_coverage_gap(names, max_names, *reason) for reason, names in by_reason.items()]
    not_there = [
        f"{escape_text(item.what, 80)} ({escape_text(item.message, 200)})"
        for item in report.coverage_gaps
        if _is_feature_absent(item)
    ]
    return [*lines, f"Not present: {'; '.join(not_there)}."] if not_there else lines


def count_coverage_gaps(report: Report) -> int:
    """Count the coverage gaps, without what the machine does not have."""
    return len(list_coverage_gaps(report)) - any(
        _is_feature_absent(item) for item in report.coverage_gaps
    )


def _is_feature_absent(item: CoverageGap) -> bool:
    return item.kind == "absent" and not item.remedy


def _format_coverage_gap(
    names: list[str], max_names: int, kind: str, message: str, remedy: str
) -> str:
    signals = ", ".join(names[:max_names])
    if len(names) > max_names:
        signals += f" and {len(names) - max_names:,} more"
    todo = f" What to do: {escape_text(remedy, 400)}." if remedy else ""
    return f"{signals}, {escape_text(kind, 20)}: {escape_text(message, 400).rstrip('.')}.{todo}"


_UNATTRIBUTED_REASONS = {
    "no-signal": "no signal shows what the host was doing",
    "on-host": "the host computed in functions or operators that launched nothing",
    "blocked-unknown": "the loading thread waited for a lock, a pipe or something not recorded",
    "hand-over": "the batch was ready and in transit from the worker to the main process",
    "evaluation": "the job evaluated its model",
    "peers": (
        "in operations with other ranks that could not be matched across ranks (too few ranks"
        " recorded, or too many operations)"
    ),
    "peers-unknown": "waiting for a rank that was late for an unknown reason",
    "on-cpu": "the main thread was on a CPU, and no mark shows what it computed",
    "asleep": "the main thread slept inside a step: waiting for ranks, or something unrecorded",
    "sending": "the main thread slept while its node sent data: waiting for ranks or for data",
    "spinning": "a kernel busy-waited: for other ranks in an operation that was not recorded",
    "jitter": "ranks waiting for each other in turn, because work varies from step to step",
    "low-confidence": "the evidence was too weak for a cause",
}


def describe_unattributed_reason(code: str) -> str:
    """Describe why lost time has no cause."""
    name = code.removeprefix("on-host:")
    if name != code:
        return f"the host was in {escape_text(name, 160)}, which launched nothing"
    return _UNATTRIBUTED_REASONS.get(code) or escape_text(code, 400)
