"""The first screen as data, independent of the renderer: what a reader needs within half a minute.

    Lost           39.0 % of GPU time in steps: 3.8 of 9.7 GPU-minutes.
    Main cause     The data path waits for a local disk: 3.3 min, 34.5 %.
    Where          node-a ranks 0-1 (vda)
    Evidence       91.2 % of the fetch in block I/O
    Try next       Pack samples into large records and read these in order.
    Expected gain  About 3.1 min of GPU time, 32.1 %.
    Confidence     95 % (high): a marker and a counter agree.

Causes with their shares, the loss over time, and what was not measured follow.
A job whose devices were not measured is described by the time of its training loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clusterprof.output.renderers.text import advice, code, culprits, summary, trend, wording
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.model import Advice, Evidence, Finding, Report
from clusterprof.units import format_quantity

LABELS = (
    "Lost",
    "Main cause",
    "Where",
    "Evidence",
    "Try next",
    "Expected gain",
    "Confidence",
    "Busiest line",
)
"""Labels of the rows, in their order."""
NOT_KNOWN = "not known"
_MAX_CAUSES, _MAX_EVIDENCE, _MAX_GAP_NAMES = 5, 2, 3
_HIGH_CONFIDENCE_RATIO, _MEDIUM_CONFIDENCE_RATIO = 0.85, 0.6
_MIN_SHOWN_RATIO = 0.0005
"""A smaller part of the time in steps would read 0.0 %."""
_WAITS_FOR_RANKS = ("peers-unknown", "peers", "jitter")
"""Reasons of time without a cause that lie in another rank."""
_MIN_PLACE_RATIO = 0.5
"""Part of the other time without a cause, in which hosts were at one place."""
_MIN_OTHER_RATIO = 0.01
"""A gain that is larger by this part of the time in steps than the cause itself is explained."""
_MIN_SENTENCE_WORDS = 6
"""A note with fewer words ("of the fetch") needs the name of what was measured before it."""
_UNIT_SUFFIXES = ("_ratio", "_ns", "_bytes", "_count")


@dataclass(frozen=True, slots=True)
class ScreenRow:
    """A labeled row."""

    label: str
    """One of `LABELS`; "" continues the row above."""
    text: str
    """Sentences, safe to print."""
    change: Advice | None = None
    """The recommendation whose change is to be printed instead of `text`, with whole commands."""


@dataclass(frozen=True, slots=True)
class ScreenCause:
    """A cause in the ranking."""

    name: str
    """Cause id, or words for the rest."""
    lost_ns: int
    share_ratio: float
    """Part of the time in steps, 0 to 1."""


@dataclass(frozen=True, slots=True)
class FirstScreen:
    """All that the first screen shows."""

    title: str
    scope: str
    """Nodes, ranks, steps, recorded time."""
    warnings: tuple[str, ...]
    rows: tuple[ScreenRow, ...]
    whole: str
    """What shares refer to: "GPU time in steps", or "step time"."""
    causes: tuple[ScreenCause, ...]
    """Largest first; the part without a known cause among them."""
    bins: tuple[trend.TimeBin, ...]
    """Loss over the run; empty without a history."""
    trend: str
    """The loss over the run in words; "" when it is not known."""
    gaps: str
    """What was not measured, and why."""
    more: tuple[str, ...]
    """Commands and options that show more."""


def build_first_screen(
    report: Report, price_per_hour: float | None = None, currency: str = "USD", bins: int = 60
) -> FirstScreen:
    """Build the first screen of a report.

    bins: the largest number of time bins of the run.
    """
    course = trend.detect_trend(report)
    finding = summary.find_summary_finding(report)
    explained = (f"clusterprof explain {escape_text(finding.cause.id, 60)}",) if finding else ()
    is_restarted = report.life is not None and len(report.life.attempts) > 1
    life = ("--section life",) if is_restarted else ()
    return FirstScreen(
        escape_text(report.title),
        summary.describe_scope(report),
        tuple(_list_warnings(report)),
        (*_build_rows(report, price_per_hour, currency), *_build_work_row(report)),
        "GPU time in steps" if wording.is_device_measured(report) else "step time",
        tuple(_rank_causes(report)),
        tuple(trend.split_run(report, bins)),
        trend.summarize_trend(course) if course is not None else "",
        _describe_gaps(report),
        ("--full", *life, "--format html -o report.html", *explained),
    )


def format_evidence_in_words(item: Evidence) -> str:
    """Format a piece of evidence without the name of its metric, as far as its note allows."""
    value, note = wording.format_evidence_value(item), escape_text(item.note)
    is_sentence = len(note.split()) >= _MIN_SENTENCE_WORDS
    if item.unit == "ratio" and note.startswith("of ") and is_sentence:
        return f"{value} {note}"
    name = escape_text(item.name, 60)
    for suffix in _UNIT_SUFFIXES:
        name = name.removesuffix(suffix)
    name = name.replace(".", " ").replace("_", " ")
    if note.startswith("of "):
        return f"{name}: {value} {note}"
    return f"{name}: {value}" + (f" ({note})" if note else "")


def _list_warnings(report: Report) -> Iterator[str]:
    """Yield warnings; without a device, what shares refer to instead of bounds of GPU time."""
    if not wording.is_device_measured(report):
        if report.in_step_ns:
            yield (
                "No GPU was measured: shares are of step time, and what the training thread"
                " computes counts as work."
            )
        yield from wording.list_warnings(report, with_bounds=False)
        return
    yield from wording.list_warnings(report)


def _build_rows(report: Report, price: float | None, currency: str) -> Iterator[ScreenRow]:
    if not report.ranks or not report.in_step_ns:
        yield ScreenRow("Lost", _describe_unknown_loss(report))
        yield ScreenRow("Try next", _describe_how_to_see_more(report))
        return
    yield ScreenRow("Lost", _describe_loss(report, price, currency))
    first = summary.find_summary_finding(report)
    if not wording.has_significant_loss(report):
        yield ScreenRow("Main cause", _describe_no_loss(report))
        return
    if report.main_cause is None:
        yield ScreenRow("Main cause", wording.describe_unknown_cause(report))
        if wording.has_small_parts_only(report):
            return
        unknown = code.describe_unknown_where(report)
        late = culprits.describe_late_ranks(report)
        places = [*([late] if late else []), *([unknown] if unknown else _list_host_places(report))]
        for number, text in enumerate(places):
            yield ScreenRow("" if number else "Where", f"{text}.")
        location = "that line" if unknown else "the host there" if places else ""
        hint = wording.describe_what_would_tell(report, location)
        yield ScreenRow("Try next", f"{hint}.")
        if first is not None:
            yield ScreenRow("", f"Largest known cause: {_describe_cause(first, report)}")
        if places:
            return  # the place of a smaller cause would be taken for its own
    else:
        group = _describe_group(report, report.main_cause)
        yield ScreenRow("Main cause", _describe_cause(report.main_cause, report) + group)
    if first is None:
        return
    yield from _locate_cause(report, first)
    if first.evidence:
        evidence = "; ".join(map(format_evidence_in_words, first.evidence[:_MAX_EVIDENCE]))
        yield ScreenRow("Evidence", evidence)
    if report.main_cause is not None:
        yield from _advise(report, first)
    grade = wording.GRADES.get(first.grade, f"grade {first.grade}")
    certain = f"{wording.format_confidence(first)} ({_name_confidence(first)}): {grade}."
    yield ScreenRow("Confidence", certain)


def _list_host_places(report: Report) -> list[str]:
    """List where hosts were for most of the time without a cause that is not a wait; at most one.

    That it is the largest reason is said already, as the cause.
    """
    reasons = [item for item in report.unattributed_reasons if item[0] not in _WAITS_FOR_RANKS]
    code, ns = next(iter(reasons), ("", 0))
    if not code.startswith("on-host:") or code == report.unattributed_reasons[0][0]:
        return []
    if ns < _MIN_PLACE_RATIO * sum(ns for _, ns in reasons):
        return []
    return [f"{format_quantity(ns, 'ns')}: {wording.describe_unattributed_reason(code)}"]


def _build_work_row(report: Report) -> Iterator[ScreenRow]:
    """Yield where a job without a device works: what its steps spend there counts as no loss."""
    if report.in_step_ns and (text := code.describe_work(report)):
        yield ScreenRow("Busiest line", text)


def _has_no_steps(report: Report) -> bool:
    return bool(report.ranks) and not any(rank.steps for rank in report.ranks)


def _describe_unknown_loss(report: Report) -> str:
    if _has_no_steps(report) and not wording.is_device_measured(report):
        return "Not known. No steps of a training loop were seen, and no GPU was measured."
    return f"Not known. {wording.describe_verdict(report)}"


def _describe_how_to_see_more(report: Report) -> str:
    """Describe what makes a job visible: marks of its steps, or what doctor says."""
    if _has_no_steps(report):
        return (
            "Call clusterprof.step() at the end of each step of the training loop, and record"
            " again. The steps of PyTorch optimizers are seen without it."
        )
    if report.answers:
        return (
            "What the files say stands above. To see where the time goes, record the job:"
            " clusterprof record -- COMMAND"
        )
    return "Run clusterprof doctor to see what can be recorded on this node, then record again."


def _describe_loss(report: Report, price: float | None, currency: str) -> str:
    if wording.is_device_measured(report):
        money = wording.describe_cost(report, price, currency)
        return wording.describe_total_loss(report, was_lost="") + (f" {money}" if money else "")
    if not any(map(wording.is_measured, report.ranks)):
        return "Not known. Neither an accelerator nor a wait of the training loop was measured."
    part = wording.format_share(report.lost_ns, report.in_step_ns)
    text = f"The training loop waited for {part} of step time"
    if report.has_time_unit:
        lost, in_step = (format_quantity(ns, "ns") for ns in (report.lost_ns, report.in_step_ns))
        summed = ", all ranks added up" if len(report.ranks) > 1 else ""
        text += f": {lost} of {in_step}{summed}"
    text += "."
    unseen = wording.format_share(report.unobserved_ns, report.in_step_ns)
    return f"{text} {unseen} was not observed." if wording.is_unbounded(report) else text


def _describe_no_loss(report: Report) -> str:
    if wording.is_device_measured(report) or report.too_little_seen:
        return wording.describe_no_loss(report)
    return "None: the training loop hardly waited, as far as it was observed."


def _describe_cause(finding: Finding, report: Report) -> str:
    part = format_quantity(finding.share_ratio, "ratio")
    title = wording.format_title(finding)
    at_most = "at most " if finding.upper_bound and wording.is_device_measured(report) else ""
    if not report.has_time_unit:
        return f"{title}: {at_most}{part}."
    if not wording.is_device_measured(report):
        return f"{title}: {at_most}{format_quantity(finding.lost_ns, 'ns')}, {part}."
    unit = wording.format_gpu_time(report.in_step_ns).split()[-1]
    return f"{title}: {at_most}{wording.format_gpu_time(finding.lost_ns, unit)}, {part}."


def _describe_group(report: Report, finding: Finding) -> str:
    """Say why a finding comes first although another lost more: its group lost most."""
    findings = wording.select_in_step_findings(report)
    if all(member.lost_ns <= finding.lost_ns for member in findings):
        return ""
    group = [member for member in findings if member.cause.family == finding.cause.family]
    share = format_quantity(sum(member.share_ratio for member in group), "ratio")
    names = ", ".join(escape_text(member.cause.id, 60) for member in group)
    return f" Related causes lost most together, {share}: {names}."


def _locate_cause(report: Report, finding: Finding) -> Iterator[ScreenRow]:
    """Yield the line of code, then the culprits and how they differ from the other ranks."""
    line = code.describe_where(report, finding)
    comparison = culprits.describe_peer_comparison(finding)
    everywhere = "All ranks alike" if len(report.ranks) > 1 else ""
    names = culprits.summarize_main_culprits(finding) if finding.culprits else everywhere
    onset = culprits.describe_onset(finding)
    if not onset and len(finding.culprits) < len(report.ranks):
        onset = culprits.summarize_persistence(finding)
    text = f"{names}: {comparison}" if comparison else names
    text = f"{text}; {onset}" if onset else text
    if line and len(report.ranks) == 1 and text == report.ranks[0].node:
        text = ""  # there is no other place
    texts = [item for item in (line, text) if item]
    yield from (ScreenRow("" if index else "Where", text) for index, text in enumerate(texts))


def _advise(report: Report, finding: Finding) -> Iterator[ScreenRow]:
    """Yield the first recommendation, its change, and what it would save."""
    step = advice.describe_first_step(finding)
    if not finding.advice:
        step = f"No recommendation fits; see: clusterprof explain {escape_text(finding.cause.id)}"
    sentences = [step, *advice.list_withheld_advice(finding)]
    yield ScreenRow(
        "Try next",
        " ".join(text if text[-1] in ".!?" else f"{text}." for text in sentences if text),
    )
    if finding.advice and finding.advice[0].change:
        change = advice.capitalize_change(finding.advice[0])
        yield ScreenRow("", advice.escape_change(change), change)
    yield ScreenRow("Expected gain", _describe_gain(report, finding))


def _describe_gain(report: Report, finding: Finding) -> str:
    """Describe once how much sooner the job would end, else the time that ranks would save."""
    impacts = report.impact.causes if report.impact is not None else ()
    saved = next((item.saved_ns for item in impacts if item.cause == finding.cause.id), None)
    job_ns = report.impact.job_ns if report.impact is not None else None
    bounded = finding.upper_bound or finding.cause.id == summary.TRANSFER_CAUSE
    begin = "At most " if bounded else "About "
    if saved and job_ns:
        part = format_quantity(saved / job_ns, "ratio")
        period = "the recorded window" if report.is_window_only else "the time in steps"
        amount = f"{format_quantity(saved, 'ns')}, " if report.has_time_unit else ""
        more_ratio = saved / job_ns - finding.lost_ns / max(report.in_step_ns, 1)
        suffix = "; other losses end with it" if more_ratio >= _MIN_OTHER_RATIO else ""
        return f"{begin}{amount}{part} of {period}{suffix}."
    if finding.recoverable_ns is None:
        return "Not known."
    part = format_quantity(finding.recoverable_ns / report.in_step_ns, "ratio")
    period = "GPU time" if wording.is_device_measured(report) else "step time"
    return f"{begin}{format_quantity(finding.recoverable_ns, 'ns')}, {part} of {period}."


def _name_confidence(finding: Finding) -> str:
    if finding.confidence_ratio >= _HIGH_CONFIDENCE_RATIO:
        return "high"
    return "medium" if finding.confidence_ratio >= _MEDIUM_CONFIDENCE_RATIO else "low"


def _rank_causes(report: Report) -> list[ScreenCause]:
    """Rank the causes by lost time; what has no known cause is one of them."""
    if not report.in_step_ns:
        return []
    findings = wording.select_in_step_findings(report)
    amounts = [(escape_text(item.cause.id, 60), item.lost_ns) for item in findings[:_MAX_CAUSES]]
    remaining_ns = sum(item.lost_ns for item in findings[_MAX_CAUSES:])
    remaining_ns += sum(ns for _, ns in wording.list_small_causes(report))
    amounts += [(NOT_KNOWN, report.unattributed_ns)] if report.unattributed_ns else []
    amounts.sort(key=lambda item: -item[1])
    amounts += (
        [("smaller causes", remaining_ns)]
        if remaining_ns >= _MIN_SHOWN_RATIO * report.in_step_ns
        else []
    )
    return [ScreenCause(name, ns, ns / report.in_step_ns) for name, ns in amounts]


def _describe_gaps(report: Report) -> str:
    """Say what was not measured and why, first what failed; how many more reasons there are."""
    gaps = wording.list_coverage_gaps(report, _MAX_GAP_NAMES, failed_first=True)
    hidden_count = wording.count_coverage_gaps(report) - 1
    if hidden_count < 0:
        return "nothing."
    suffix = f" {format_quantity(hidden_count, 'count')} more: --full." if hidden_count else ""
    return f"{gaps[0]}{suffix}"
