"""All recommendations, and the order in which they are given.

The lists start with what gains most, as far as gains are published. Of those that fit a run the
first few are given, and of these the one with the least effort comes first: it is soon tried, and
whether the waits disappear shows whether the cause was right.
"""

from __future__ import annotations

from clusterprof.analysis.advice import cpu, device, network, phases, storage, synchronization
from clusterprof.analysis.advice.base import ExclusionRule, Recommender
from clusterprof.analysis.advice.code_lines import select_line_advice
from clusterprof.analysis.advice.context import AdviceContext
from clusterprof.analysis.advice.diagnose import (
    DEBUG_RECOMMENDATIONS,
    DIAGNOSES,
    FOLLOW_MANUAL_CHECK,
    SWITCH_OFF_DEBUGGING,
)
from clusterprof.report.model import EFFORTS, Advice

MAX_ADVICE = 4
"""Limit of the advice about one finding: few readers would read a fifth."""

RECOMMENDATIONS: tuple[Recommender, ...] = (
    *DEBUG_RECOMMENDATIONS,
    *storage.MOUNT_RECOMMENDATIONS,
    *storage.STORAGE_RECOMMENDATIONS,
    *storage.FALLBACK_RECOMMENDATIONS,
    *phases.DIVISION_RECOMMENDATIONS,
    *cpu.CPU_RECOMMENDATIONS,
    *cpu.CPU_TIME_RECOMMENDATIONS,
    *phases.INPUT_RECOMMENDATIONS,
    *phases.AWAITED_RECOMMENDATIONS,
    *device.COPY_RECOMMENDATIONS,
    *device.NATIVE_RECOMMENDATIONS,
    *device.LAUNCH_RECOMMENDATIONS,
    *phases.PHASE_RECOMMENDATIONS,
    *network.PATH_RECOMMENDATIONS,
    *network.TRANSFER_RECOMMENDATIONS,
    *network.FAULT_RECOMMENDATIONS,
    *synchronization.SYNCHRONIZATION_RECOMMENDATIONS,
)

NOTHING_LOST = ExclusionRule(
    "nothing-lost",
    "nothing was lost to the cause (a wait that the queue of the device hid costs nothing)",
    lambda s: s.finding.lost_ns <= 0 or s.saves_nothing,
)
"""Excludes every recommendation."""


_EFFORT_ORDER = {effort: at for at, effort in enumerate(EFFORTS)}


def list_recommendations(cause: str) -> tuple[Recommender, ...]:
    """List the recommendations for a cause, least effort first."""
    return tuple(
        sorted(
            _select_by_cause(cause), key=lambda recommendation: _EFFORT_ORDER[recommendation.effort]
        )
    )


def _select_by_cause(cause: str) -> list[Recommender]:
    """Select the recommendations for a cause, largest gain first."""
    return [recommendation for recommendation in RECOMMENDATIONS if cause in recommendation.causes]


def select_advice(context: AdviceContext) -> tuple[Advice, ...]:
    """Select the advice for a finding, best first; empty if no recommendation fits.

    If the cause is too uncertain, or only its family is known, diagnostic steps are given instead;
    for a cause without any recommendation its manual check. Advice for a known call in the code
    comes first if much of the time passed through it; before it, modes for debugging that were on,
    as nothing measured with them is of use.
    """
    if NOTHING_LOST.holds(context):
        return ()
    debugging = None
    if context.cause in SWITCH_OFF_DEBUGGING.causes:
        debugging = SWITCH_OFF_DEBUGGING.advise(context)
    general = _select_other_advice(context)
    if debugging is None:
        return general
    remaining = [advice for advice in general if advice.id != debugging.id]
    return (debugging, *remaining)[:MAX_ADVICE]


def _select_other_advice(context: AdviceContext) -> tuple[Advice, ...]:
    general = _select_general_advice(context)
    if context.is_brief:
        return general
    lines = select_line_advice(context)
    if not lines:
        return general
    replaced = {id_ for line in lines for id_ in line.replaces if line.is_first}
    remaining = [advice for advice in general if advice.id not in replaced]
    first = [line.advice for line in lines if line.is_first]
    last = [line.advice for line in lines if not line.is_first]
    return (*first, *remaining, *last)[:MAX_ADVICE]


def _select_general_advice(context: AdviceContext) -> tuple[Advice, ...]:
    """Select the advice for the cause of a finding, whatever line it was lost in."""
    if not context.is_certain:
        diagnoses = DIAGNOSES
        advice_list = [
            advice for diagnosis in diagnoses if (advice := diagnosis.advise(context)) is not None
        ]
        return tuple(advice_list[:2])
    recommendations = _select_by_cause(context.cause) or [FOLLOW_MANUAL_CHECK]
    fit = [
        (recommendation, advice)
        for recommendation in recommendations
        if (advice := recommendation.advise(context)) is not None
    ][:MAX_ADVICE]
    fit.sort(key=lambda pair: _get_effort_key(pair[0], context))
    return tuple(advice for _, advice in fit)


def explain_withheld(context: AdviceContext) -> tuple[str, ...]:
    """Explain why recommendations that a reader may expect are not given in this run."""
    if NOTHING_LOST.holds(context) or not context.is_certain:
        return ()
    has_workers = context.value("loader.workers_count") != 0
    sentences = []
    for recommendation in _select_by_cause(context.cause):
        rule = next((rule for rule in recommendation.unless if rule.holds(context)), None)
        text = recommendation.withheld_text
        if recommendation.needs_workers and not has_workers:
            continue  # there are none
        if text and rule is not None and rule.why is not None:
            sentences.append(f"{text}: {rule.why(context)}")
    return tuple(dict.fromkeys(sentences))


def _get_effort_key(recommendation: Recommender, context: AdviceContext) -> tuple[int, bool]:
    """Return a sort key: least effort first, then those that evidence of this run supports."""
    return _EFFORT_ORDER[recommendation.effort], not any(
        context.find_evidence(ending) for ending in recommendation.evidence_names
    )
