"""The page of a cause: how it is decided, recommendations, and how to verify it by hand.

Pages of the metrics of a report, which a gate can test: definition and manual check.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill, wrap

from clusterprof.analysis.advice.base import ExclusionRule
from clusterprof.analysis.advice.code_lines import (
    MIN_FIRST_SHARE,
    is_code_the_reason,
    list_known_calls,
)
from clusterprof.analysis.advice.diagnose import DIAGNOSES
from clusterprof.analysis.advice.registry import NOTHING_LOST, list_recommendations
from clusterprof.analysis.attribution.confidence import MIN_SCORE_TO_NAME
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.detectors.cross_rank import PEER_CAUSES
from clusterprof.analysis.detectors.pages import build_page as detector_page
from clusterprof.analysis.detectors.registry import DETECTORS
from clusterprof.report.model import EFFORTS, Cause
from clusterprof.units import infer_unit

CAUSES_WITH_PAGE: tuple[Cause, ...] = (*(detector.cause for detector in DETECTORS), *PEER_CAUSES)
"""Every cause that has a page."""


def build_cause_page(cause_id: str) -> str:
    """Build the page of one cause as Markdown.

    Raises: KeyError when there is no cause of that id.
    """
    text = detector_page(cause_id).rstrip("\n")
    body, mark, limits = text.partition("\n\nA profile changes limits under ")
    parts = [body, _format_recommendations(cause_id), _format_manual_check(cause_id)]
    return "\n\n".join(parts) + mark + limits + "\n"


def build_family_page(family: str) -> str:
    """Build the page of a family, shown when only the family of a cause could be determined.

    Raises: KeyError when no cause belongs to the family.
    """
    members = [cause for cause in CAUSES_WITH_PAGE if cause.family == family]
    if not members:
        raise KeyError(family)
    lines = [
        f"# {family}: a family of causes, reported if the cause itself cannot be determined",
        "",
        *(f"{cause.id:<21} {cause.title}" for cause in members),
        "",
        "## What to record to learn the cause",
        "",
    ]
    for diagnosis in DIAGNOSES:
        lines += [
            _wrap_text(f"* **{diagnosis.id}**: {diagnosis.what}: {diagnosis.how}."),
            *_format_exclusions(diagnosis.unless),
        ]
    return "\n".join(lines) + "\n"


def format_cause_list() -> str:
    """Format all causes by family, one line each."""
    families: dict[str, list[Cause]] = {}
    for cause in CAUSES_WITH_PAGE:
        families.setdefault(cause.family, []).append(cause)
    lines = []
    for family, causes in families.items():
        lines += [f"{family}:", *(f"  {cause.id:<21} {cause.title}" for cause in causes)]
    return "\n".join(lines) + "\n"


def _format_recommendations(cause_id: str) -> str:
    recommendations = list_recommendations(cause_id)
    lines = ["## Remedies, in the order to try them", ""]
    if not recommendations:
        return "\n".join(
            [*lines, _wrap_text(f"{CAUSES[cause_id].advice}. Verify the cause by hand first.")]
        )
    lines += [
        _wrap_text(
            f"A report fills in the values of its run. It recommends nothing if"
            f" {NOTHING_LOST.condition}. Below {MIN_SCORE_TO_NAME:.0%} confidence it"
            " recommends what to record next. Remedies with the least effort come first. Among"
            " remedies of equal effort, those that the evidence of the run supports come first."
        ),
        "",
    ]
    for recommendation in recommendations:
        lines.append(
            _wrap_text(f"* **{recommendation.id}**: {recommendation.what}: {recommendation.how}.")
        )
        facts = (
            ("effort", EFFORTS[recommendation.effort]),
            ("published gain", recommendation.published),
            ("side effect", recommendation.worse),
            ("it worked if", recommendation.expected_change),
        )
        lines += [_wrap_text(f"  * {label}: {fact}", "    ") for label, fact in facts if fact]
        lines += _format_exclusions(recommendation.unless)
    return "\n".join(lines + _format_line_advice(cause_id))


def _format_line_advice(cause_id: str) -> list[str]:
    """Format what a report advises where stacks show a known call; empty if there is none."""
    calls = list_known_calls(cause_id)
    if not calls:
        return []
    order = "first" if is_code_the_reason(cause_id) else "after these remedies"
    return [
        "",
        _wrap_text(
            f"Where the stacks show that {MIN_FIRST_SHARE:.0%} of the lost time or more passed"
            f" through a known call, the report names its line, and advises {order}:"
        ),
        "",
        *(_wrap_text(f"* **{call.id}** ({call.title}): {call.what}.") for call in calls),
    ]


def _format_exclusions(rules: Sequence[ExclusionRule]) -> list[str]:
    return [_wrap_text(f"  * not recommended if {rule.condition}", "    ") for rule in rules]


def _format_manual_check(cause_id: str) -> str:
    return f"## How to verify it by hand\n\n{_wrap_text(CAUSES[cause_id].manual_check)}"


def _wrap_text(text: str, hanging: str = "") -> str:
    """Wrap text at 100 characters without breaking words or commands."""
    hanging = hanging or ("  " if text.startswith("* ") else "")
    return "\n".join(
        wrap(text, 100, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    )


_STEPS = "mark the steps yourself (time.monotonic() around each) and sort their lengths"

METRIC_DESCRIPTIONS: dict[str, tuple[str, str]] = {
    "gpu.busy_ratio": (
        "Time in which at least one kernel was resident on the accelerators, over the time in steps"
        " that was measured. One kernel on one multiprocessor counts as busy, as does busy-waiting"
        " for a late rank.",
        "`nvidia-smi dmon -s u`: the mean of `sm` over the same minutes",
    ),
    "gpu.sm_active_ratio": (
        "Mean share of the multiprocessors that had work, over all time in steps.",
        "`dcgmi dmon -e 1002` (`SMACT`): its mean over the same minutes",
    ),
    "underfill.ratio": (
        "Share of the multiprocessors that was unused while a kernel was resident, over the time"
        " that was not lost (docs/underfill.md). None of it is idle time.",
        "`dcgmi dmon -e 1001,1002`: 1 - SMACT / GRACT",
    ),
    "lost.ratio": (
        "Device time inside steps that was lost (no kernel resident, busy-waiting, slowed),"
        " over the time in steps.",
        "1 - `productive.ratio`; torch.profiler over some steps shows the same gaps",
    ),
    "productive.ratio": (
        "Device time inside steps that was not lost, over the time in steps.",
        "1 - `lost.ratio`",
    ),
    "au_ratio": (
        "MLPerf Storage's accelerator utilization, by the rule of the benchmark: computation over"
        " the time of each block of an epoch, both without its first step. Known only from DLIO's"
        " output; elsewhere use `productive.ratio`.",
        "`train_au_mean_percentage` in the `summary.json` of the run",
    ),
    "unattributed.ratio": (
        "Lost time without sufficient evidence for any cause, over the time in steps.",
        "the lines under *Unattributed* add up to it",
    ),
    "data_wait.ratio": (
        "Time that the host waited for batches, over the time in steps. A wait that the queue of"
        " the device hides counts here but costs nothing: compare `stall.storage_ratio` and"
        " `stall.cpu_ratio`.",
        "time `next(iterator)` in the training loop",
    ),
    "coverage.ratio": (
        "Share of the recorded time of the ranks for which the required samples exist. With low"
        " coverage the result of a gate is: cannot tell.",
        "the *Not seen* section names what is missing",
    ),
    "step.count": ("Number of steps of all ranks.", "count them in the job's log, times the ranks"),
    "step.p50_ns": ("Median length of the steps of all ranks.", _STEPS),
    "step.p95_ns": ("95th percentile of the length of the steps of all ranks.", _STEPS),
    "step.p99_ns": ("99th percentile of the length of the steps of all ranks.", _STEPS),
    "recorder.cpu_ratio": (
        "CPU time of the recorder over the recorded time, on the node with the highest value;"
        " 1 = one core.",
        "`pidstat -p RECORDER 10` while it records",
    ),
}
"""Metric name -> definition, and how to verify it."""
_STALL_PREFIX, _RATIO_SUFFIX = "stall.", "_ratio"


def list_metric_names() -> list[str]:
    """List the names of all metrics that have a page."""
    stalls = (
        f"{_STALL_PREFIX}{id_}{_RATIO_SUFFIX}" for id_ in CAUSES if not id_.startswith("fail")
    )
    return [*METRIC_DESCRIPTIONS, *dict.fromkeys(stalls)]


def build_metric_page(written: str) -> str | None:
    """Build the page of a metric as Markdown; None if there is no metric of that name.

    The unit suffix of the name may be left out, as in a gate rule.
    """
    name = next(
        (
            candidate
            for candidate in list_metric_names()
            if written in (candidate, _strip_unit_suffix(candidate))
        ),
        None,
    )
    if name is None:
        return None
    about, by_hand = (
        METRIC_DESCRIPTIONS[name] if name in METRIC_DESCRIPTIONS else _describe_stall_metric(name)
    )
    unit = infer_unit(name.replace(".", "_"))
    limit = {"ns": "< 250 ms", "count": ">= 100"}.get(
        unit, "<= 10%" if _is_loss_metric(name) else ">= 70%"
    )
    tested = (
        f"To test it in a gate: `clusterprof gate RUN --assert '{name} {limit}'`. If it could not"
        " be measured, the report shows the reason and the gate cannot tell."
    )
    parts = (
        f"# {name}: a metric of the report, in {unit}",
        fill(about, 100),
        fill(tested, 100),
        "## How to verify it by hand",
        fill(f"{by_hand[:1].upper()}{by_hand[1:]}.", 100),
    )
    return "\n\n".join(parts) + "\n"


def _is_loss_metric(name: str) -> bool:
    return name.startswith(
        (_STALL_PREFIX, "lost", "unattributed", "data_wait", "underfill", "recorder")
    )


def _strip_unit_suffix(name: str) -> str:
    for suffix in ("_ratio", "_ns"):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def _describe_stall_metric(name: str) -> tuple[str, str]:
    id_ = name[len(_STALL_PREFIX) : -len(_RATIO_SUFFIX)]
    cause = CAUSES[id_]
    title = cause.title[:1].lower() + cause.title[1:]
    if not cause.manual_check:  # a family
        about = f"Device time in steps lost to all causes of the family {id_} ({title}), over the"
        return (
            f"{about} time in steps.",
            f"`clusterprof explain {id_}` lists its causes, and the page of each shows how",
        )
    about = (
        f"Device time in steps lost to `{id_}` ({title}), over the time in steps. Part of it may"
        " be lost by other ranks, which waited for the rank with the cause."
    )
    return about, cause.manual_check.rstrip(".")
