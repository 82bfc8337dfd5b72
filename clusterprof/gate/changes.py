"""One rule on a change: candidates beside baselines, within what chance explains.

                      -2 %      0      +2 %     +4 %     +6 %
limit +5 %                                          |
passes                        |----x----|           |
fails                                               | |---x---|
cannot tell                               |-----x---+---|        the interval holds the limit
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from clusterprof.errors import UsageError
from clusterprof.findings import Metric, Report
from clusterprof.gate.columns import quantile_ns
from clusterprof.gate.measures import find
from clusterprof.gate.noise import (
    PRIOR_RUNS,
    Difference,
    Sample,
    compared,
    draws,
    student,
)
from clusterprof.gate.rules import Change, Policy
from clusterprof.gate.verdict import Moved, Outcome, RuleResult
from clusterprof.units import human

FEWEST_BASELINES = 3
"""Of a number whose chance within a run is not known."""
_MOST_RUNS = 20
_LONGER = 20  # times: what nobody would record is not asked for
_PRODUCTIVE = ("gpu.busy_ratio", "productive.ratio", "au_ratio", "gpu.sm_active_ratio")


def judge_change(
    rule: Change,
    runs: Sequence[Report],
    baselines: Sequence[Report],
    policy: Policy,
    poor: bool,
) -> RuleResult:
    """Compare a metric of some runs with that of baselines; `poor`: nothing may be concluded."""
    ours = [find(rule.metric, run, rule.text) for run in runs]
    theirs = [find(rule.metric, run, rule.text) for run in baselines]
    metric = ours[0]
    _insist_on_unit(rule, metric)

    def result(outcome: Outcome, why: str, value: float | None = None, moved: Moved | None = None):  # type: ignore[no-untyped-def]
        return RuleResult(rule, metric.name, metric.unit, value, rule.limit, outcome, why, moved)

    unknown = next((one for one in (*ours, *theirs) if not _is_number(one.value)), None)
    if unknown is not None:
        which = "" if unknown in ours else "of a baseline "
        why = unknown.why_missing or "it was not measured"
        return result("cannot tell", f"{which}{why}", metric.value if len(ours) == 1 else None)
    logarithms = rule.unit == "%"
    samples = [
        [_sample(one, run, logarithms) for one, run in zip(some, reports)]
        for some, reports in ((ours, runs), (theirs, baselines))
    ]
    now, before = (sum(one.value for one in some) / len(some) for some in samples)
    if logarithms and any(one.value <= 0 for some in samples for one in some):
        why = "is 0 in one of the runs: a change in % of nothing means nothing, give it in pt"
        return result("cannot tell", why, now)
    if any(math.isnan(one.variance) for some in samples for one in some):
        if len(baselines) < FEWEST_BASELINES:
            why = (
                f"is {human(now, metric.unit)}, was {human(before, metric.unit)}; how it varies"
                f" within a run is not known: give {FEWEST_BASELINES} baselines or more"
            )
            return result("cannot tell", why, now)
        samples = [[Sample(one.value, 0.0, one.steps) for one in some] for some in samples]
    prior = _prior(metric, before, policy.between_runs_ratio, logarithms)
    found = compared(samples[0], samples[1], prior, logarithms)
    limits = _limits(rule)
    moved = _moved(rule, found, limits, before)
    outcome: Outcome = "cannot tell" if poor else _outcome(found, limits)
    return result(outcome, _why(metric, now, moved, found, limits, outcome, poor), now, moved)


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _insist_on_unit(rule: Change, metric: Metric) -> None:
    if (
        rule.unit == "%"
        or rule.unit == metric.unit
        or (rule.unit == "pt" and metric.unit == "ratio")
    ):
        return
    if rule.unit == "" and metric.unit not in ("ns", "bytes", "ratio"):
        return
    raise UsageError(
        f"the rule {rule.text!r}: {metric.name} is in {metric.unit}",
        "give the limit in %" + (" of it, or in pt" if metric.unit == "ratio" else ""),
    )


def _sample(metric: Metric, report: Report, logarithms: bool) -> Sample:
    """One number of one run; its variance is NaN where blocks of steps do not tell it."""
    assert metric.value is not None
    value, steps = metric.value, min((rank.steps for rank in report.ranks), default=0)
    if metric.name.startswith("step.p") and report.steps is not None:
        share = float(metric.name.removeprefix("step.p").removesuffix("_ns")) / 100
        value = quantile_ns(report.steps, share) or value  # finer than three digits
    drawn = draws(metric.name, report.steps)
    if drawn is None:
        return Sample(value, math.nan, steps)
    if not logarithms:
        return Sample(value, float(drawn.var()), steps)
    if value <= 0 or not (drawn > 0).all():
        # rare losses: some of the runs drawn have none
        relative = float(drawn.var()) / value**2 if value > 0 else math.nan
        return Sample(value, relative, steps)
    import numpy as np

    return Sample(value, float(np.log(drawn).var()), steps)


def _prior(metric: Metric, value: float, ratio: float, logarithms: bool) -> float:
    """Return how far runs are taken to differ in a metric when their step time does by `ratio`.

    A run that takes 1 % longer because it lost more has 1 % x (1 - share) more of that loss.
    """
    if metric.unit != "ratio":
        return ratio if logarithms else ratio * abs(value)
    points = ratio * (value if metric.name in _PRODUCTIVE else max(0.0, 1 - value))
    return points / value if logarithms else points


def _limits(rule: Change) -> tuple[float, float]:
    """Return between which changes a rule passes, in the measure in which they are compared."""
    high = low = rule.limit
    if rule.unit == "%":
        high = math.log1p(rule.limit)
        low = -math.log1p(-rule.limit) if rule.limit < 1 else math.inf
    return (
        -low if rule.direction in "-±" else -math.inf,
        high if rule.direction in "+±" else math.inf,
    )


def _outcome(found: Difference, limits: tuple[float, float]) -> Outcome:
    low, high = limits
    if found.low > high or found.high < low:
        return "fail"
    return "pass" if low <= found.low and found.high <= high else "cannot tell"


def _near(found: Difference, limits: tuple[float, float]) -> float:
    """The limit that is at stake: the nearer of the two."""
    return min(
        (limit for limit in limits if math.isfinite(limit)),
        key=lambda limit: abs(limit - found.estimate),
    )


def _moved(rule: Change, found: Difference, limits: tuple[float, float], before: float) -> Moved:
    def shown(x: float) -> float:
        return math.expm1(x) if rule.unit == "%" else x

    at = _near(found, limits)
    mirrored = math.copysign(found.found_from(abs(at)), at)
    return Moved(
        baseline=before,
        estimate=shown(found.estimate),
        low=shown(found.low),
        high=shown(found.high),
        relative=rule.unit == "%",
        found_from=shown(mirrored),
        steps=found.steps,
        steps_needed=found.steps_needed(at),
        runs=found.runs,
    )


def _why(
    metric: Metric,
    now: float,
    moved: Moved,
    found: Difference,
    limits: tuple[float, float],
    outcome: Outcome,
    poor: bool,
) -> str:
    unit = "%" if moved.relative else metric.unit
    text = (
        f"is {human(now, metric.unit)}, was {human(moved.baseline, metric.unit)}:"
        f" {signed(moved.estimate, unit)} ({signed(moved.low, unit)} to {signed(moved.high, unit)})"
    )
    if poor:
        return f"{text}, but the runs cannot be compared for a verdict"
    least = signed(moved.found_from, unit)
    if outcome != "cannot tell":
        return f"{text}; from {least} on found in 95 % of runs"
    return f"{text}; found only from {least} on; {_needed(moved, found, limits)}"


def _needed(moved: Moved, found: Difference, limits: tuple[float, float]) -> str:
    if moved.steps_needed is not None:
        return f"{moved.steps_needed:,} steps needed, {moved.steps:,} seen"
    ours, theirs = found.runs
    gap = abs(found.estimate - _near(found, limits))
    for more in range(1, _MOST_RUNS):
        for a, b in ((ours, theirs + more), (ours + more, theirs + more)):
            room = (gap / student(PRIOR_RUNS + a + b - 2)) ** 2
            room -= found.between**2 * (1 / a + 1 / b)
            steps = math.ceil(found.steps * found.within / room) if room > 0 else math.inf
            if steps <= _LONGER * found.steps:
                repeats = f" and {a - ours} more --repeat" if a > ours else ""
                longer = f", with {steps:,} steps each ({moved.steps:,} seen)"
                runs = f"{b - theirs} more --baseline{repeats} needed"
                return runs + (longer if steps > found.steps else "")
    return "it lies at the limit: neither more steps nor more runs are likely to tell it"


def signed(change: float, unit: str) -> str:
    """Write a change: "+5.1 %", "-2.0 pt", "+12.5 ms"."""
    sign = "-" if change < 0 else "+"
    if unit == "%":
        return f"{sign}{100 * abs(change):.1f} %"
    if unit == "ratio":
        return f"{sign}{100 * abs(change):.1f} pt"
    return f"{sign}{human(abs(change), unit)}"
