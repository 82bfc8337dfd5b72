"""Judge one rule on a change: candidates against baselines, within what chance explains.

                      -2 %      0      +2 %     +4 %     +6 %
limit +5 %                                          |
passes                        |----x----|           |
fails                                               | |---x---|
cannot tell                               |-----x---+---|   interval holds the limit

It also estimates how far a metric may be off by chance: block bootstrap within runs, spread between
runs.

Two kinds of variance are added. Within a run neighboring steps resemble each other, so
sequences of consecutive blocks are drawn, not single steps:

    blocks      0 1 2 3 4 5 6 7 8 9
    drawn       4 5 6 | 0 1 2 | 8 9 0 | 4        500 times, with a fixed seed

Runs of one job also differ from each other (nodes, neighbors, caches). Baselines and
repeats show by how much; until there are some, a prior from the policy counts as much
as `PRIOR_RUNS` runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from clusterprof.errors import UsageError
from clusterprof.gate.rules import (
    ChangeRule,
    Policy,
    estimate_step_quantile_ns,
    find_metric,
    select_ratio_columns,
)
from clusterprof.gate.verdict import MetricChange, Outcome, RuleResult
from clusterprof.report.history import BINS_PER_OCTAVE, StepStats
from clusterprof.report.model import Metric, Report
from clusterprof.units import format_quantity

DRAWS = 500
MIN_BLOCKS = 10
"""Blocks needed to estimate a variance; with fewer it is unknown."""
PRIOR_RUNS = 6
CONFIDENCE = 0.95
POWER_Z = 1.6448536269514722
"""Standard errors beyond the detection limit at which a change is detected with a power of
95 %.
"""
_SEED = 20_260_101

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One metric of one run and its variance within the run."""

    value: float
    variance: float
    """Variance of the value, or of its logarithm, within the run."""
    steps: int
    """Steps of the rank with the fewest."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Estimated difference between candidates and baselines, with its uncertainty."""

    estimate: float
    """Difference of values, or of logarithms."""
    error: float
    """Its standard error."""
    quantile: float
    """Half width of the 95 % interval in standard errors, by Student's t."""
    between_runs: float
    """Standard deviation between runs used for the estimate."""
    runs: tuple[int, int]
    """Candidates and baselines."""
    steps: int
    """Steps of the shortest run."""
    within_variance: float
    """The part of error**2 that more steps would reduce."""

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.estimate - self.quantile * self.error

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.estimate + self.quantile * self.error

    def smallest_detectable(self, limit: float) -> float:
        """Return the smallest true difference that would be detected beyond a limit in 95 % of
        runs.
        """
        return limit + (self.quantile + POWER_Z) * self.error

    def steps_needed(self, limit: float) -> int | None:
        """Return the steps each run needs to separate this difference from a limit.

        None when no number of steps would suffice.
        """
        gap = abs(self.estimate - limit) / self.quantile
        allowed_variance = gap**2 - (self.error**2 - self.within_variance)
        if allowed_variance <= 0 or self.within_variance <= 0:
            return None
        needed = self.steps * self.within_variance / allowed_variance
        return math.ceil(needed) if needed < 1e9 else None


def sample_metric(name: str, steps: StepStats | None) -> Float | None:
    """Return a metric in `DRAWS` bootstrap samples of a run, float64[DRAWS].

    None when the metric is not known per block, or there are fewer than `FEWEST_BLOCKS`
    blocks.
    """
    if steps is None or steps.blocks < MIN_BLOCKS:
        return None
    drawn = sample_block_weights(steps.blocks)
    if name.startswith("step.p"):
        return _sample_quantiles(
            steps, float(name.removeprefix("step.p").removesuffix("_ns")), drawn
        )
    columns = select_ratio_columns(name, steps)
    return None if columns is None else sample_ratio(*columns)


def sample_ratio(numerator: Sequence[int], denominator: Sequence[int]) -> Float | None:
    """Return the ratio of the sums of two columns in `DRAWS` bootstrap samples,
    float64[DRAWS].

    above, below: numerator and denominator per block. None when a sampled denominator is 0.
    """
    drawn = sample_block_weights(len(denominator))
    sums = [drawn @ np.array(column, np.float64) for column in (numerator, denominator)]
    return _scale_spread(sums[0] / sums[1], len(denominator)) if (sums[1] > 0).all() else None


def _scale_spread(drawn: Float, blocks: int) -> Float:
    """Correct the bootstrap spread, which is too small because few sequences are drawn."""
    middle = drawn.mean()
    return middle + (drawn - middle) * math.sqrt(blocks / (blocks - _choose_draw_length(blocks)))


def _choose_draw_length(blocks: int) -> int:
    return max(1, round(blocks ** (1 / 3)))


@lru_cache(maxsize=8)
def sample_block_weights(blocks: int) -> Float:
    """Return how often each block is drawn in each sample, float64[DRAWS, blocks].

    Sequences of consecutive blocks wrap around at the end of the run.
    """
    length = _choose_draw_length(blocks)
    stretches = -(-blocks // length)
    random = np.random.default_rng(_SEED)
    start = random.integers(0, blocks, (DRAWS, stretches))
    columns = (start[:, :, None] + np.arange(length)).reshape(DRAWS, -1)[:, :blocks] % blocks
    out = np.zeros((DRAWS, blocks))
    np.add.at(out, (np.arange(DRAWS)[:, None], columns), 1)
    return out


def _sample_quantiles(steps: StepStats, percent: float, drawn: Float) -> Float | None:
    bins = sorted({bin_ for block in steps.lengths for bin_, _ in block})
    if not bins:
        return None
    index_of = {bin_: index for index, bin_ in enumerate(bins)}
    table = np.zeros((steps.blocks, len(bins)))
    for row, block in enumerate(steps.lengths):
        for bin_, count in block:
            table[row, index_of[bin_]] = count
    reached = np.cumsum(drawn @ table, axis=1)
    target = percent / 100 * reached[:, -1]
    index = np.minimum((reached < target[:, None]).sum(axis=1), len(bins) - 1)
    rows = np.arange(len(index))
    before = np.where(index > 0, reached[rows, index - 1], 0.0)
    inside = (target - before) / np.maximum(reached[rows, index] - before, 1.0)
    low = 2.0 ** (np.array(bins, np.float64)[index] / BINS_PER_OCTAVE)
    return _scale_spread(low * (1 + inside * (2 ** (1 / BINS_PER_OCTAVE) - 1)), steps.blocks)


def estimate_difference(
    ours: Sequence[Sample], theirs: Sequence[Sample], prior: float, logarithms: bool
) -> Difference:
    """Estimate the difference between candidates and baselines.

    prior: assumed standard deviation between runs, in the measure of the variances.
    logarithms: compare logarithms of the values; variances are then of logarithms.
    """
    values = [
        np.array([math.log(sample.value) if logarithms else sample.value for sample in samples])
        for samples in (ours, theirs)
    ]
    variances = [np.array([sample.variance for sample in samples]) for samples in (ours, theirs)]
    freedom = sum(len(group) - 1 for group in values)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in values)
    # The spread of runs includes the variance within them, which is added separately below.
    within_squares = sum(float(group.mean()) * (len(group) - 1) for group in variances)
    between = (PRIOR_RUNS * prior**2 + max(0.0, squares - within_squares)) / (PRIOR_RUNS + freedom)
    within = sum(float(group.sum()) / len(group) ** 2 for group in variances)
    between_variance = between * sum(1 / len(group) for group in variances)
    return Difference(
        estimate=float(values[0].mean() - values[1].mean()),
        error=math.sqrt(within + between_variance),
        quantile=compute_t_quantile(PRIOR_RUNS + freedom),
        between_runs=math.sqrt(between),
        runs=(len(ours), len(theirs)),
        steps=min(sample.steps for sample in (*ours, *theirs)),
        within_variance=within,
    )


@lru_cache(maxsize=64)
def compute_t_quantile(freedom: int) -> float:
    """Return how many standard errors hold 95 % by Student's t, given the degrees of freedom."""
    wanted = 1 - (1 - CONFIDENCE) / 2
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_t_cdf(middle, freedom) < wanted else (low, middle)
    return (low + high) / 2


def _compute_t_cdf(t: float, freedom: int) -> float:
    """Return the cumulative Student's t distribution at t >= 0, for whole degrees of freedom.

    Source: Abramowitz and Stegun 26.7.3.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom == 1:
        return 0.5 + angle / math.pi
    term = cosine if freedom % 2 else 1.0
    total = 0.0
    for k in range(2 + freedom % 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    if freedom % 2:
        return 0.5 + (angle + sine * total) / math.pi
    return 0.5 + sine * total / 2


MIN_BASELINES = 3
"""Baselines needed for a metric whose variance within a run is not known."""
_MAX_ADDED_RUNS = 20
_MAX_STEPS_FACTOR = 20  # times the steps seen: a longer recording is not worth suggesting
_PRODUCTIVE_METRICS = ("gpu.busy_ratio", "productive.ratio", "au_ratio", "gpu.sm_active_ratio")


def judge_change(
    rule: ChangeRule,
    runs: Sequence[Report],
    baselines: Sequence[Report],
    policy: Policy,
    inconclusive: bool,
) -> RuleResult:
    """Compare a metric of the candidate runs with the baselines under a rule on a change.

    poor: True if the recordings allow no conclusion; the outcome is then "cannot tell".
    Raises: UsageError when the limit's unit does not fit the metric.
    """
    ours = [find_metric(rule.metric, run, rule.text) for run in runs]
    theirs = [find_metric(rule.metric, run, rule.text) for run in baselines]
    metric = ours[0]
    _require_matching_unit(rule, metric)

    def result(
        outcome: Outcome, why: str, value: float | None = None, moved: MetricChange | None = None
    ) -> RuleResult:
        return RuleResult(rule, metric.name, metric.unit, value, rule.limit, outcome, why, moved)

    unknown = next((entry for entry in (*ours, *theirs) if not _is_number(entry.value)), None)
    if unknown is not None:
        which = "" if unknown in ours else "of a baseline "
        why = unknown.why_missing or "it was not measured"
        return result("cannot tell", f"{which}{why}", metric.value if len(ours) == 1 else None)
    logarithms = rule.unit == "%"
    samples = [
        [_estimate_sample(entry, run, logarithms) for entry, run in zip(metrics, reports)]
        for metrics, reports in ((ours, runs), (theirs, baselines))
    ]
    now, before = (sum(sample.value for sample in group) / len(group) for group in samples)
    if logarithms and any(sample.value <= 0 for group in samples for sample in group):
        why = "is 0 in one of the runs, so a change in % is undefined; give the limit in pt"
        return result("cannot tell", why, now)
    if any(math.isnan(sample.variance) for group in samples for sample in group):
        if len(baselines) < MIN_BASELINES:
            why = (
                f"is {format_quantity(now, metric.unit)}, was"
                f" {format_quantity(before, metric.unit)}; how it varies"
                f" within a run is not known: give {MIN_BASELINES} baselines or more"
            )
            return result("cannot tell", why, now)
        samples = [
            [Sample(sample.value, 0.0, sample.steps) for sample in group] for group in samples
        ]
    prior = _scale_prior(metric, before, policy.between_runs_ratio, logarithms)
    difference = estimate_difference(samples[0], samples[1], prior, logarithms)
    limits = _convert_limits(rule)
    moved = _build_metric_change(rule, difference, limits, before)
    outcome: Outcome = "cannot tell" if inconclusive else _decide_outcome(difference, limits)
    return result(
        outcome,
        _explain_outcome(metric, now, moved, difference, limits, outcome, inconclusive),
        now,
        moved,
    )


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _require_matching_unit(rule: ChangeRule, metric: Metric) -> None:
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


def _estimate_sample(metric: Metric, report: Report, logarithms: bool) -> Sample:
    """Estimate a metric of one run and its variance; NaN where blocks of steps do not give it."""
    assert metric.value is not None
    value, steps = metric.value, report.fewest_steps
    if metric.name.startswith("step.p") and report.steps is not None:
        share = float(metric.name.removeprefix("step.p").removesuffix("_ns")) / 100
        value = estimate_step_quantile_ns(report.steps, share) or value  # finer than three digits
    drawn = sample_metric(metric.name, report.steps)
    if drawn is None:
        return Sample(value, math.nan, steps)
    if not logarithms:
        return Sample(value, float(drawn.var()), steps)
    if value <= 0 or not (drawn > 0).all():
        # losses are rare: some of the drawn runs have none
        relative = float(drawn.var()) / value**2 if value > 0 else math.nan
        return Sample(value, relative, steps)
    import numpy as np

    return Sample(value, float(np.log(drawn).var()), steps)


def _scale_prior(metric: Metric, value: float, ratio: float, logarithms: bool) -> float:
    """Scale the assumed standard deviation between runs from step time to a metric.

    ratio: the standard deviation of step time, relative.

    A run that takes 1 % longer because it lost more has 1 % x (1 - share) more of that
    loss.
    """
    if metric.unit != "ratio":
        return ratio if logarithms else ratio * abs(value)
    points = ratio * (value if metric.name in _PRODUCTIVE_METRICS else max(0.0, 1 - value))
    return points / value if logarithms else points


def _convert_limits(rule: ChangeRule) -> tuple[float, float]:
    """Return the lower and upper limit of the change, as logarithms for "%"."""
    high = low = rule.limit
    if rule.unit == "%":
        high = math.log1p(rule.limit)
        low = -math.log1p(-rule.limit) if rule.limit < 1 else math.inf
    return (
        -low if rule.direction in "-±" else -math.inf,
        high if rule.direction in "+±" else math.inf,
    )


def _decide_outcome(difference: Difference, limits: tuple[float, float]) -> Outcome:
    low, high = limits
    if difference.low > high or difference.high < low:
        return "fail"
    return "pass" if low <= difference.low and difference.high <= high else "cannot tell"


def _find_nearest_limit(difference: Difference, limits: tuple[float, float]) -> float:
    """Return the limit nearest to the estimate."""
    return min(
        (limit for limit in limits if math.isfinite(limit)),
        key=lambda limit: abs(limit - difference.estimate),
    )


def _build_metric_change(
    rule: ChangeRule, difference: Difference, limits: tuple[float, float], before: float
) -> MetricChange:
    def shown(x: float) -> float:
        return math.expm1(x) if rule.unit == "%" else x

    nearest_limit = _find_nearest_limit(difference, limits)
    mirrored = math.copysign(difference.smallest_detectable(abs(nearest_limit)), nearest_limit)
    return MetricChange(
        baseline=before,
        estimate=shown(difference.estimate),
        low=shown(difference.low),
        high=shown(difference.high),
        relative=rule.unit == "%",
        smallest_detectable=shown(mirrored),
        steps=difference.steps,
        steps_needed=difference.steps_needed(nearest_limit),
        runs=difference.runs,
    )


def _explain_outcome(
    metric: Metric,
    now: float,
    moved: MetricChange,
    difference: Difference,
    limits: tuple[float, float],
    outcome: Outcome,
    inconclusive: bool,
) -> str:
    unit = "%" if moved.relative else metric.unit
    text = (
        f"is {format_quantity(now, metric.unit)}, was"
        f" {format_quantity(moved.baseline, metric.unit)}:"
        f" {format_signed(moved.estimate, unit)} ({format_signed(moved.low, unit)} to"
        f" {format_signed(moved.high, unit)})"
    )
    if inconclusive:
        return f"{text}, but the runs cannot be compared for a verdict"
    least = format_signed(moved.smallest_detectable, unit)
    if outcome != "cannot tell":
        return f"{text}; changes from {least} on are detected in 95 % of runs"
    return (
        f"{text}; only changes from {least} on are detected;"
        f" {_explain_needed_runs(moved, difference, limits)}"
    )


def _explain_needed_runs(
    moved: MetricChange, difference: Difference, limits: tuple[float, float]
) -> str:
    if moved.steps_needed is not None:
        return f"{moved.steps_needed:,} steps needed, {moved.steps:,} seen"
    ours, theirs = difference.runs
    gap = abs(difference.estimate - _find_nearest_limit(difference, limits))
    for added_runs in range(1, _MAX_ADDED_RUNS):
        for a, b in ((ours, theirs + added_runs), (ours + added_runs, theirs + added_runs)):
            room = (gap / compute_t_quantile(PRIOR_RUNS + a + b - 2)) ** 2
            room -= difference.between_runs**2 * (1 / a + 1 / b)
            steps = (
                math.ceil(difference.steps * difference.within_variance / room)
                if room > 0
                else math.inf
            )
            if steps <= _MAX_STEPS_FACTOR * difference.steps:
                repeats = f" and {a - ours} more --repeat" if a > ours else ""
                longer = f", with {steps:,} steps each ({moved.steps:,} seen)"
                runs = f"{b - theirs} more --baseline{repeats} needed"
                return runs + (longer if steps > difference.steps else "")
    return "it lies at the limit: neither more steps nor more runs are likely to decide it"


def format_signed(change: float, unit: str) -> str:
    """Format a change with its sign: "+5.1 %", "-2.0 pt", "+12.5 ms"."""
    sign = "-" if change < 0 else "+"
    if unit == "%":
        return f"{sign}{100 * abs(change):.1f} %"
    if unit == "ratio":
        return f"{sign}{100 * abs(change):.1f} pt"
    return f"{sign}{format_quantity(abs(change), unit)}"
