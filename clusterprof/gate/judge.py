"""Runs against rules: passed, failed, or cannot tell; three outcomes, never two.

    gpu.busy_ratio >= 70%        stall.storage <= 5%        step.p95_ns < 250 ms

What was not measured, too short, poorly covered, damaged, known only as "at most" on the wrong side
of a limit, or could be hidden in what is unattributed is *cannot tell*, and fails closed unless the
policy says otherwise. A rule that
failed with certainty outweighs one that cannot be told. No rules at all is a usage error: a gate
that asks nothing would pass everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterprof.errors import UsageError
from clusterprof.findings import Metric, Report
from clusterprof.gate.alike import Unlike, unlike
from clusterprof.gate.changes import judge_change
from clusterprof.gate.doubts import doubts_of
from clusterprof.gate.measures import find, hidden_of
from clusterprof.gate.rules import AnyRule, Change, Operator, Policy, Rule, insist_on_rules
from clusterprof.gate.verdict import Outcome, RuleResult, Verdict, verdict_of
from clusterprof.units import human


def judge(
    report: Report,
    rules: Sequence[AnyRule],
    policy: Policy,
    repeats: Sequence[Report] = (),
    baselines: Sequence[Report] = (),
) -> Verdict:
    """Test every rule that is in force; raise UsageError for what cannot be meant.

    `repeats` are more runs of what `report` is a run of; `baselines` what rules on changes compare
    these with. Without baselines such a rule is a UsageError.
    """
    insist_on_rules(rules)
    runs = (report, *repeats)
    names = [one.title if len(runs) > 1 else "" for one in runs]
    doubts = [
        [_of(name, text) for text in doubts_of(one, policy)] for name, one in zip(names, runs)
    ]
    asked = [rule for rule in rules if rule.level != "off"]
    compares = [rule for rule in asked if isinstance(rule, Change)]
    refused, notes = _compared(runs, baselines, policy, bool(compares))
    results = []
    for rule in asked:
        if isinstance(rule, Change):
            every = [text for some in doubts for text in some] + refused
            results.append(judge_change(rule, runs, baselines, policy, bool(every)))
        else:
            results.append(_judge_runs(rule, runs, [bool(some) for some in doubts], policy))
    told = dict.fromkeys(text for some in (*doubts, refused) for text in some)
    return verdict_of(report, results, policy, tuple(told), tuple(dict.fromkeys(notes)))


def _compared(
    runs: Sequence[Report], baselines: Sequence[Report], policy: Policy, asked: bool
) -> tuple[list[str], list[str]]:
    """Say why nothing may be compared, and what should be known of what is."""
    if not baselines:
        if asked:
            raise UsageError(
                "a rule on a change needs a run to compare with",
                "give --baseline RUN, once or several times",
            )
        return [], []
    if not asked:
        raise UsageError(
            "a baseline is given, and no rule on a change",
            "for example: --assert 'step.p50_ns: +5%'",
        )
    refused: list[str] = []
    notes: list[str] = []
    for theirs in baselines:
        name = f"baseline {theirs.title}"
        refused += [_of(name, text) for text in doubts_of(theirs, policy)]
        for run in runs:
            for one in unlike(run, theirs, policy.allow_unlike):
                (refused if one.refused else notes).append(_of(name, _told(one)))
    refused += _twice([*runs, *baselines])
    return refused, notes


def _told(one: Unlike) -> str:
    if not one.refused:
        return f"note: {one.text}"
    if one.field == "recording":
        return one.text
    return f"unlike: {one.text} (--allow-unlike {one.field})"


def _twice(reports: Sequence[Report]) -> list[str]:
    """Runs that count as several and are one would seem to agree better than runs do."""
    seen: dict[str, str] = {}
    for report in reports:
        for name in report.likeness.recordings if report.likeness is not None else ():
            if name in seen:
                return [f"{report.title} and {seen[name]} are the same recording"]
            seen[name] = report.title
    return []


def _of(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text


# --- one rule on a number -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Read:
    """One metric of one run."""

    metric: Metric
    value: float | None
    low: float
    high: float
    hidden: float
    poor: bool


def _judge_runs(
    rule: Rule, runs: Sequence[Report], poor: Sequence[bool], policy: Policy
) -> RuleResult:
    read = [_read(rule, run, is_poor) for run, is_poor in zip(runs, poor)]
    results = [_judge_one(rule, one) for one in read]
    if len(results) == 1:
        return results[0]
    known = [(result.value, one) for result, one in zip(results, read) if result.value is not None]
    values = sorted(value for value, _ in known)
    spread = ", ".join(human(value, results[0].unit) for value in values)
    if len(known) < len(runs) or any(poor):
        which = next(i for i, one in enumerate(results) if one.value is None or poor[i])
        why = f"of {len(runs)} runs {len(runs) - len(known)} say nothing: {results[which].why}"
        if len(known) == len(runs):
            why = f"{results[which].why} ({runs[which].title})"
        certain = results[which]
        return replace(certain, value=None, outcome="cannot tell", why=why)
    chosen = _aggregated(rule.operator, [one for _, one in known], policy.aggregate)
    result = _judge_one(rule, chosen)
    return replace(result, why=f"{result.why} ({policy.aggregate} of {spread})")


def _aggregated(operator: Operator, read: Sequence[_Read], how: str) -> _Read:
    """Return the run that stands for all: the worst for the rule, the best, or the middle one.

    Of an even number the middle one that is worse.
    """
    sign = -1 if operator in ("<=", "<") else 1
    worst_first = sorted(read, key=lambda one: sign * (one.value or 0.0))
    if operator == "==":
        return worst_first[(len(read) - 1) // 2]
    at = {"pessimistic": 0, "median": (len(read) - 1) // 2, "optimistic": len(read) - 1}[how]
    return worst_first[at]


def _read(rule: Rule, report: Report, poor: bool) -> _Read:
    metric = find(rule.metric, report, rule.text)
    value = metric.value
    if value is None or not math.isfinite(value):
        return _Read(metric, None, math.nan, math.nan, 0.0, poor)
    hidden = hidden_of(metric, report)
    return _Read(metric, value, *_range(value, metric.bound, hidden), hidden, poor)


def _judge_one(rule: Rule, one: _Read) -> RuleResult:
    metric, value, hidden = one.metric, one.value, one.hidden
    limit = _limit(rule, metric)
    outcome: Outcome = "cannot tell"
    if value is None:
        why = metric.why_missing or "it was not measured"
    elif one.poor:
        why = f"is {_shown(metric)}, but the recording is too poor for a verdict"
    else:
        outcome = _compare(one.low, one.high, rule.operator, limit)
        why = f"is {_shown(metric)}"
        if value != limit and human(value, metric.unit) == human(limit, metric.unit):
            why += f" ({value:g}, the limit {limit:g})"  # else it reads "is 70.0 %, failed 70.0 %"
        if outcome == "cannot tell" and metric.bound != "exact":
            why += ", because no device was measured"
        elif outcome == "cannot tell":
            why += f", and another {human(hidden, 'ratio')} is lost without a known cause"
    return RuleResult(rule, metric.name, metric.unit, value, limit, outcome, why)


def _range(value: float, bound: str, hidden: float) -> tuple[float, float]:
    """Return between which numbers the truth lies."""
    lowest = -math.inf if bound == "at most" else round(value, 12)
    # rounded, so that 10 % and 20 % are 30 % and not 0.30000000000000004
    return lowest, math.inf if bound == "at least" else round(value + hidden, 12)


def _compare(lowest: float, highest: float, operator: Operator, limit: float) -> Outcome:
    """Compare a range: a rule passes or fails only when every number of the range does.

    "At most 8 %" is <= 10 % for certain, is not >= 9 % for certain, and nothing can be said about
    <= 5 %.
    """
    passes, fails = {
        ">=": (lowest >= limit, highest < limit),
        ">": (lowest > limit, highest <= limit),
        "<=": (highest <= limit, lowest > limit),
        "<": (highest < limit, lowest >= limit),
        "==": (lowest == limit == highest, not lowest <= limit <= highest),
    }[operator]
    return "pass" if passes else "fail" if fails else "cannot tell"


def _limit(rule: Rule, metric: Metric) -> float:
    """Return the limit in the metric's unit, or refuse one that cannot be meant."""
    if rule.unit not in ("", metric.unit):
        raise UsageError(
            f"the rule {rule.text!r}: {metric.name} is in {metric.unit}, not in {rule.unit}"
        )
    share = metric.unit == "ratio" and "slowdown" not in metric.name
    if share and rule.unit == "" and abs(rule.limit) > 1:
        # "stall.storage <= 5" would pass whatever happens
        raise UsageError(
            f"the rule {rule.text!r}: {metric.name} is a ratio from 0 to 1",
            f"write {rule.limit:g}% or {rule.limit / 100:g}",
        )
    return rule.limit


def _shown(metric: Metric) -> str:
    assert metric.value is not None
    value = human(metric.value, metric.unit)
    return value if metric.bound == "exact" else f"{metric.bound} {value}"
