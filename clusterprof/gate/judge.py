"""Judge runs against rules: pass, fail or cannot tell; three outcomes, never two.

    gpu.busy_ratio >= 70%        stall.storage <= 5%        step.p95_ns < 250 ms

The outcome is *cannot tell* for a metric that was not measured, is too short, poorly
covered or damaged, is known only as "at most" on the wrong side of a limit, or may hide
in unattributed time. It fails closed unless the policy says otherwise. A rule that
certainly failed outweighs one that cannot be decided. A gate without rules is a usage
error: it would pass everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterprof.errors import UsageError
from clusterprof.gate.preconditions import Mismatch, check_preconditions, find_mismatches
from clusterprof.gate.regression import judge_change
from clusterprof.gate.rules import (
    AnyRule,
    ChangeRule,
    Operator,
    Policy,
    Rule,
    bound_hidden_ratio,
    find_metric,
    require_rules,
)
from clusterprof.gate.verdict import Outcome, RuleResult, Verdict, summarize_results
from clusterprof.report.model import Metric, Report
from clusterprof.units import format_quantity


def judge_runs(
    report: Report,
    rules: Sequence[AnyRule],
    policy: Policy,
    repeats: Sequence[Report] = (),
    baselines: Sequence[Report] = (),
) -> Verdict:
    """Judge every active rule and return the verdict.

    repeats: further runs of the same job as `report`. baselines: runs that rules on changes
    compare these with.
    Raises: UsageError without an active rule, for a rule on a change without baselines, for
    baselines without such a rule, and for an unknown metric or unit.
    """
    require_rules(rules)
    runs = (report, *repeats)
    names = [run.title if len(runs) > 1 else "" for run in runs]
    unmet_preconditions = [
        [_label_message(name, text) for text in check_preconditions(run, policy)]
        for name, run in zip(names, runs)
    ]
    active_rules = [rule for rule in rules if rule.level != "off"]
    change_rules = [rule for rule in active_rules if isinstance(rule, ChangeRule)]
    refused, notes = _check_baselines(runs, baselines, policy, bool(change_rules))
    results = []
    for rule in active_rules:
        if isinstance(rule, ChangeRule):
            reasons = [text for texts in unmet_preconditions for text in texts] + refused
            results.append(judge_change(rule, runs, baselines, policy, bool(reasons)))
        else:
            results.append(
                _judge_number_rule(
                    rule, runs, [bool(texts) for texts in unmet_preconditions], policy
                )
            )
    all_reasons = dict.fromkeys(text for texts in (*unmet_preconditions, refused) for text in texts)
    return summarize_results(
        report, results, policy, tuple(all_reasons), tuple(dict.fromkeys(notes))
    )


def _check_baselines(
    runs: Sequence[Report], baselines: Sequence[Report], policy: Policy, has_change_rules: bool
) -> tuple[list[str], list[str]]:
    """Return why runs and baselines may not be compared, and notes on those that may."""
    if not baselines:
        if has_change_rules:
            raise UsageError(
                "a rule on a change needs a run to compare with",
                "give --baseline RUN, once or several times",
            )
        return [], []
    if not has_change_rules:
        raise UsageError(
            "a baseline is given, and no rule on a change",
            "for example: --assert 'step.p50_ns: +5%'",
        )
    refused: list[str] = []
    notes: list[str] = []
    for theirs in baselines:
        name = f"baseline {theirs.title}"
        refused += [_label_message(name, text) for text in check_preconditions(theirs, policy)]
        for run in runs:
            for mismatch in find_mismatches(run, theirs, policy.allow_unlike):
                (refused if mismatch.blocks_verdict else notes).append(
                    _label_message(name, _format_mismatch(mismatch))
                )
    refused += _find_duplicate_recordings([*runs, *baselines])
    return refused, notes


def _format_mismatch(mismatch: Mismatch) -> str:
    if not mismatch.blocks_verdict:
        return f"note: {mismatch.text}"
    if mismatch.field == "recording":
        return mismatch.text
    return f"unlike: {mismatch.text} (--allow-unlike {mismatch.field})"


def _find_duplicate_recordings(reports: Sequence[Report]) -> list[str]:
    """Report recordings given twice: they would seem to agree better than separate runs do."""
    path_of: dict[str, str] = {}
    for report in reports:
        for name in report.fingerprint.recordings if report.fingerprint is not None else ():
            if name in path_of:
                return [f"{report.title} and {path_of[name]} are the same recording"]
            path_of[name] = report.title
    return []


def _label_message(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text


# --- one rule on a number -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MetricReading:
    """One metric of one run, with the range in which its true value lies."""

    metric: Metric
    value: float | None
    low: float
    high: float
    hidden: float
    inconclusive: bool


def _judge_number_rule(
    rule: Rule, runs: Sequence[Report], inconclusive: Sequence[bool], policy: Policy
) -> RuleResult:
    readings = [
        _read_metric(rule, run, is_inconclusive) for run, is_inconclusive in zip(runs, inconclusive)
    ]
    results = [_judge_reading(rule, reading) for reading in readings]
    if len(results) == 1:
        return results[0]
    measured = [
        (result.value, reading)
        for result, reading in zip(results, readings)
        if result.value is not None
    ]
    values = sorted(value for value, _ in measured)
    spread = ", ".join(format_quantity(value, results[0].unit) for value in values)
    if len(measured) < len(runs) or any(inconclusive):
        which = next(
            i for i, result in enumerate(results) if result.value is None or inconclusive[i]
        )
        why = f"{len(runs) - len(measured)} of {len(runs)} runs give no value: {results[which].why}"
        if len(measured) == len(runs):
            why = f"{results[which].why} ({runs[which].title})"
        certain = results[which]
        return replace(certain, value=None, outcome="cannot tell", why=why)
    chosen = _select_aggregate(
        rule.operator, [reading for _, reading in measured], policy.aggregate
    )
    result = _judge_reading(rule, chosen)
    return replace(result, why=f"{result.why} ({policy.aggregate} of {spread})")


def _select_aggregate(
    operator: Operator, readings: Sequence[_MetricReading], how: str
) -> _MetricReading:
    """Return the run that represents all of them: the worst for the rule, the best or the
    median.

    For an even number of runs the median is the worse of the two middle ones.
    """
    sign = -1 if operator in ("<=", "<") else 1
    worst_first = sorted(readings, key=lambda reading: sign * (reading.value or 0.0))
    if operator == "==":
        return worst_first[(len(readings) - 1) // 2]
    index = {"pessimistic": 0, "median": (len(readings) - 1) // 2, "optimistic": len(readings) - 1}[
        how
    ]
    return worst_first[index]


def _read_metric(rule: Rule, report: Report, inconclusive: bool) -> _MetricReading:
    metric = find_metric(rule.metric, report, rule.text)
    value = metric.value
    if value is None or not math.isfinite(value):
        return _MetricReading(metric, None, math.nan, math.nan, 0.0, inconclusive)
    hidden = bound_hidden_ratio(metric, report)
    return _MetricReading(
        metric, value, *_bound_value(value, metric.bound, hidden), hidden, inconclusive
    )


_MAY_HAVE_WAITED = ", because busy devices may have waited for other ranks"


def _judge_reading(rule: Rule, reading: _MetricReading) -> RuleResult:
    metric, value, hidden = reading.metric, reading.value, reading.hidden
    limit = _resolve_limit(rule, metric)
    outcome: Outcome = "cannot tell"
    if value is None:
        why = metric.why_missing or "it was not measured"
    elif reading.inconclusive:
        why = f"is {_format_reading(metric)}, but the recording does not meet the preconditions"
    else:
        outcome = _compare_range(reading.low, reading.high, rule.operator, limit)
        why = f"is {_format_reading(metric)}"
        if value != limit and format_quantity(value, metric.unit) == format_quantity(
            limit, metric.unit
        ):
            why += f" ({value:g}, the limit {limit:g})"  # else: "is 70.0 %, failed 70.0 %"
        if outcome == "cannot tell" and metric.bound != "exact":
            is_lower = (metric.bound == "at least") != (metric.name == "productive.ratio")
            why += _MAY_HAVE_WAITED if is_lower else ", because no device was measured"
        elif outcome == "cannot tell":
            why += f", and another {format_quantity(hidden, 'ratio')} is lost without a known cause"
    return RuleResult(rule, metric.name, metric.unit, value, limit, outcome, why)


def _bound_value(value: float, bound: str, hidden: float) -> tuple[float, float]:
    """Return the lowest and highest possible true value."""
    lowest = -math.inf if bound == "at most" else round(value, 12)
    # rounded, so that 10 % and 20 % are 30 % and not 0.30000000000000004
    return lowest, math.inf if bound == "at least" else round(value + hidden, 12)


def _compare_range(lowest: float, highest: float, operator: Operator, limit: float) -> Outcome:
    """Compare a range with a limit: a rule passes or fails only if every value in the range
    does.

    "At most 8 %" certainly satisfies <= 10 % and certainly violates >= 9 %; <= 5 % cannot
    be decided.
    """
    passes, fails = {
        ">=": (lowest >= limit, highest < limit),
        ">": (lowest > limit, highest <= limit),
        "<=": (highest <= limit, lowest > limit),
        "<": (highest < limit, lowest >= limit),
        "==": (lowest == limit == highest, not lowest <= limit <= highest),
    }[operator]
    return "pass" if passes else "fail" if fails else "cannot tell"


def _resolve_limit(rule: Rule, metric: Metric) -> float:
    """Return the limit in the metric's unit.

    Raises: UsageError for a unit that does not fit, or a ratio above 1 without "%".
    """
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


def _format_reading(metric: Metric) -> str:
    assert metric.value is not None
    value = format_quantity(metric.value, metric.unit)
    return value if metric.bound == "exact" else f"{metric.bound} {value}"
