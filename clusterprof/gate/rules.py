"""Parse the rules of a gate: on a number, on a change, and the policy for giving a
verdict.

    gpu.busy_ratio >= 70%       stall.storage <= 5%       warn: step.p95_ns < 250 ms
    step.p50_ns: +5%            stall.storage_ratio: +2pt          gpu.busy_ratio: -3pt

The first line tests one run; the second compares it with baselines: more than 5 %
longer, 2 points more, 3 points less is a failure.

It also splits a metric into numerator and denominator per block of steps, from which its noise is
estimated.

It also finds the metrics that rules may name: those of the report, of its impact, and derived ones.

step.p90_ns, step.mean_ns      any percentile of the steps of all ranks
gpu.busy_ratio.p10             over 20 equal time bins of the run: 90 % were higher
stall.storage_ratio.max        the worst of these bins
lost.ratio.rank_max            the worst rank
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from clusterprof.errors import UsageError
from clusterprof.report.families import get_cause_prefix
from clusterprof.report.history import StepStats, compute_lower_edge_ns
from clusterprof.report.model import UNATTRIBUTED, Metric, RankLedger, Report
from clusterprof.units import UNIT_SUFFIXES, infer_unit, parse_quantity

Operator = Literal[">=", "<=", ">", "<", "=="]
Direction = Literal["+", "-", "±"]
Level = Literal["off", "warn", "error"]
OnInconclusive = Literal["fail", "warn", "pass"]
Aggregate = Literal["median", "pessimistic", "optimistic"]
LEVELS: tuple[Level, ...] = ("off", "warn", "error")
AGGREGATES: tuple[Aggregate, ...] = ("median", "pessimistic", "optimistic")

_MAX_RULE_CHARACTERS = 1_000
_NAME = r"[A-Za-z][\w.-]*"
_LEVEL = re.compile(r"\s*(off|warn|error)\s*:\s*(.*)", re.ASCII | re.DOTALL)
_RULE = re.compile(rf"\s*({_NAME})\s*(>=|<=|==|>|<)\s*(\S.*?)\s*", re.ASCII)
_CHANGE = re.compile(rf"\s*({_NAME})\s*:\s*(\+-|[+\-±])\s*(\S.*?)\s*")
_POINTS = re.compile(r"(.*\d)\s*(?:pt|pts|pp|points?)", re.ASCII)
_STALL_LIMIT = re.compile(r"\s*([a-z][a-z0-9-]*)\s*=\s*(\S+)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rule:
    """One assertion: a metric, an operator and a limit."""

    metric: str
    """Name as written; the unit suffix may be left out ("stall.storage")."""
    operator: Operator
    limit: float
    """In canonical units when `unit` is given, else as written."""
    unit: str
    """Unit written after the limit; "" when there was none."""
    text: str
    """The rule as the user wrote it."""
    level: Level = "error"
    """What a failure means: nothing (off), a warning, or a failed gate."""


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """One rule on how far a metric may differ from the baselines."""

    metric: str
    direction: Direction
    """+ it may not grow by more, - it may not shrink by more, ± both."""
    limit: float
    """At least 0: a ratio of the baseline for "%", points as a ratio for "pt", else in `unit`."""
    unit: str
    """"%", "pt", a canonical unit, or "" for a plain number."""
    text: str
    level: Level = "error"


AnyRule = Rule | ChangeRule


@dataclass(frozen=True, slots=True)
class Policy:
    """When a verdict may be given at all, and how several runs are combined."""

    min_steps: int = 20
    """Steps that every rank must have completed."""
    min_coverage_ratio: float = 0.9
    """Share of the time for which the needed samples must exist, on every rank."""
    max_damaged_bytes: int = 64 << 10
    """Unreadable bytes allowed on all nodes together; a killed recorder leaves less."""
    max_dropped_spans: int = 100
    """Spans produced but not stored, allowed on all nodes together."""
    min_ranks_ratio: float = 1.0
    """Share of the job's ranks that must have been recorded, where the world size is known."""
    on_inconclusive: OnInconclusive = "fail"
    """What "cannot tell" means for the exit code: fail = 4; warn and pass = 0."""
    aggregate: Aggregate = "median"
    """Which of several candidate runs a rule on a number is tested against."""
    between_runs_ratio: float = 0.005
    """Assumed standard deviation of step time between runs of one job, until baselines and
    repeats show it.
    """
    allow_unlike: tuple[str, ...] = ()
    """Fields in which candidate and baselines may differ (see gate.preconditions)."""


def parse_rule(text: str) -> Rule:
    """Parse a rule `METRIC OPERATOR LIMIT`.

    Raises: UsageError with an example when the text is not such a rule.
    """
    level, expression = _split_level(text)
    match = _RULE.fullmatch(expression)
    if match is None:
        raise UsageError(
            f"the rule {text!r} is not METRIC OPERATOR LIMIT",
            "for example: 'gpu.busy_ratio >= 70%' with one of >= <= > < ==",
        )
    try:
        limit, unit = parse_quantity(match[3])
    except ValueError as error:
        raise UsageError(f"the rule {text!r}: {error}") from None
    return Rule(match[1], match[2], limit, unit, text, level)  # type: ignore[arg-type]


def parse_change(text: str) -> ChangeRule:
    """Parse a rule on a change, `METRIC: +LIMIT` (+, - or ±; %, pt or a unit).

    Raises: UsageError when the text is not such a rule.
    """
    level, expression = _split_level(text)
    match = _CHANGE.fullmatch(expression)
    if match is None:
        raise UsageError(
            f"the rule {text!r} is not METRIC: +LIMIT",
            "for example: 'step.p50_ns: +5%', 'stall.storage_ratio: +2pt', 'gpu.busy_ratio: -3pt'",
        )
    direction: Direction = "±" if match[2] in ("+-", "±") else match[2]  # type: ignore[assignment]
    points = _POINTS.fullmatch(match[3])
    try:
        limit, unit = parse_quantity(points[1] if points else match[3])
    except ValueError as error:
        raise UsageError(f"the rule {text!r}: {error}") from None
    if points:
        if unit:
            raise UsageError(f"the rule {text!r}: a limit in points takes no other unit")
        limit, unit = limit / 100, "pt"
    elif unit == "ratio":
        unit = "%"
    if not limit > 0 or match[3].startswith(("+", "-")):
        raise UsageError(f"the rule {text!r}: the limit of a change must be above 0")
    return ChangeRule(match[1], direction, limit, unit, text, level)


def parse_any_rule(text: str) -> AnyRule:
    """Parse a rule on a number or on a change."""
    return parse_change(text) if _CHANGE.fullmatch(_split_level(text)[1]) else parse_rule(text)


def parse_max_stall(text: str) -> Rule:
    """Parse `CAUSE=LIMIT` as the rule that the cause's share is at most the limit.

    Raises: UsageError when the text does not have this form.
    """
    match = _STALL_LIMIT.fullmatch(text)
    if match is None:
        raise UsageError(f"--max-stall {text!r} is not CAUSE=LIMIT", "for example: storage=5%")
    return parse_rule(f"stall.{match[1]} <= {match[2]}")


def parse_min_utilization(text: str) -> Rule:
    """Parse a ratio as the rule that devices are busy for at least this share of the time."""
    return parse_rule(f"gpu.busy_ratio >= {text.strip()}")


def with_levels(rules: Sequence[AnyRule], levels: Sequence[str]) -> tuple[AnyRule, ...]:
    """Return the rules with the levels given as `METRIC=LEVEL`.

    Raises: UsageError for an unknown level, or a metric without a rule.
    """
    out = list(rules)
    for text in levels:
        metric, equals, level = (part.strip() for part in text.partition("="))
        if not equals or level not in LEVELS:
            raise UsageError(f"--level {text!r} is not METRIC=off, METRIC=warn or METRIC=error")
        matches = [index for index, rule in enumerate(out) if rule.metric == metric]
        if not matches:
            metric_names = ", ".join(dict.fromkeys(rule.metric for rule in out))
            raise UsageError(
                f"--level {text!r}: no rule is on {metric!r}", f"rules are on {metric_names}"
            )
        for index in matches:
            out[index] = replace(out[index], level=level)  # type: ignore[arg-type]
    return tuple(out)


def require_rules(rules: Sequence[AnyRule]) -> None:
    """Require at least one active rule: a gate without rules would pass everything.

    Raises: UsageError when all rules are off.
    """
    if all(rule.level == "off" for rule in rules):
        raise UsageError(
            "the gate has no rules, so every run would pass",
            "give --assert 'gpu.busy_ratio >= 70%', or --profile ci, or --baseline EARLIER_RUN",
        )


def _split_level(text: str) -> tuple[Level, str]:
    if len(text) > _MAX_RULE_CHARACTERS:  # to match tens of thousands of spaces takes seconds
        raise UsageError(
            f"the rule {text[:40] + '…'!r} has {len(text):,} characters;"
            f" at most {_MAX_RULE_CHARACTERS:,} are read"
        )
    match = _LEVEL.fullmatch(text)
    return (match[1], match[2]) if match else ("error", text)  # type: ignore[return-value]


_STALL_METRIC = re.compile(r"stall\.(.+)_ratio", re.ASCII)


def select_ratio_columns(name: str, steps: StepStats) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return numerator and denominator of a ratio per block of steps.

    Both int[blocks], ns or steps. None when blocks of steps do not determine the metric.
    """
    if name == "gpu.busy_ratio":
        return steps.busy_ns, steps.measured_ns
    if name == "lost.ratio":
        return steps.lost_ns, steps.in_step_ns
    if name in ("productive.ratio", "au_ratio"):
        productive_ns = [
            in_step_ns - lost for in_step_ns, lost in zip(steps.in_step_ns, steps.lost_ns)
        ]
        return productive_ns, steps.in_step_ns
    if name == "unattributed.ratio":
        return steps.of_causes({"unattributed"}), steps.in_step_ns
    if name == "step.mean_ns":
        return steps.step_ns, steps.steps
    match = _STALL_METRIC.fullmatch(name)
    if match is None:
        return None
    families = {family for _, family, _ in steps.lost}
    if match[1] in families:
        return steps.of_family(match[1]), steps.in_step_ns
    return steps.of_causes({match[1]}), steps.in_step_ns


def estimate_step_quantile_ns(steps: StepStats, share: float) -> float | None:
    """Estimate the step length that a share of the steps of all ranks does not exceed, ns.

    Interpolated linearly within its bin. None without steps.
    """
    counts: dict[int, int] = {}
    for block in steps.lengths:
        for bin_, count in block:
            counts[bin_] = counts.get(bin_, 0) + count
    target, reached = share * sum(counts.values()), 0
    for bin_ in sorted(counts):
        count = counts[bin_]
        if reached + count >= target:
            low, high = compute_lower_edge_ns(bin_), compute_lower_edge_ns(bin_ + 1)
            return low + (high - low) * max(0.0, target - reached) / count
        reached += count
    return None


TIME_BINS = 20
_STEP_NAME = re.compile(r"step\.(mean|p(\d{1,2}(?:\.\d+)?))(?:_ns)?", re.ASCII)
_AGGREGATED_NAME = re.compile(r"(.+)\.(p\d{1,2}|min|max|rank_max|rank_min)", re.ASCII)
_NO_BLOCKS = "the report has no blocks of steps: no steps were marked, or an older version made it"
_NO_IMPACT = "it was not computed: set facts.gpu_price_per_hour in a profile"
_NO_RANK = "no rank has a time inside steps"
_FEW_RANKS = "the report lists {:,} of {:,} ranks: write it with --full, or give the recording"


def find_metric(name: str, report: Report, text: str) -> Metric:
    """Find the metric that a rule names, with or without its unit suffix.

    text: the rule, for the error message.
    Raises: UsageError for an unknown metric, or one that is not known per rank or per part
    of a run.
    """
    metrics = [*report.metrics, *_list_impact_metrics(report)]
    match = _match_metric_name(name, metrics)
    if isinstance(match, Metric):
        return match
    step = _STEP_NAME.fullmatch(name)
    if step is not None:
        return _compute_step_metric(step, report)
    part = _AGGREGATED_NAME.fullmatch(name)
    numerator_total = _match_metric_name(part[1], metrics) if part is not None else None
    if part is not None and isinstance(numerator_total, Metric):
        return _compute_aggregated_metric(numerator_total, part[2], report, text)
    names = {metric.name: _strip_unit_suffix(metric.name) for metric in metrics}
    close = match or difflib.get_close_matches(name, [*names, *names.values()], 3, 0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UsageError(
        f"the rule {text!r}: unknown metric {name!r}{hint}",
        f"known metrics: {', '.join(sorted(names)) or 'none in this report'}",
    )


def bound_hidden_ratio(metric: Metric, report: Report) -> float:
    """Return by how much a stall ratio may be too low: unattributed time may belong to the
    cause.
    """
    if not metric.name.startswith("stall.") or not report.in_step_ns:
        return 0.0
    part = _AGGREGATED_NAME.fullmatch(metric.name)
    if part is None:
        return report.unattributed_ns / report.in_step_ns
    if part[2].startswith("rank_"):
        return max(
            (_compute_rank_ratio("unattributed.ratio", rank) or 0.0 for rank in report.ranks),
            default=0,
        )
    assert report.steps is not None  # without steps there would be no such metric
    return max(_compute_bin_ratios(report.steps.of_causes({UNATTRIBUTED}), report.steps.in_step_ns))


def _match_metric_name(name: str, metrics: Sequence[Metric]) -> Metric | list[str]:
    """Return the metric with this name or stem, or the full names that share the stem."""
    by_name = {metric.name: metric for metric in metrics}
    if name in by_name:
        return by_name[name]
    candidates = [full_name for full_name in by_name if _strip_unit_suffix(full_name) == name]
    return by_name[candidates[0]] if len(candidates) == 1 else candidates


def _strip_unit_suffix(name: str) -> str:
    """Return a name without its unit suffix: "lost" for "lost.ratio" and for "lost_ratio"."""
    for suffix, _ in UNIT_SUFFIXES:
        for ending in (suffix, suffix.replace("_", ".", 1)):
            if name.endswith(ending):
                return name.removesuffix(ending)
    return name


def _compute_step_metric(match: re.Match[str], report: Report) -> Metric:
    name = f"step.{match[1]}_ns"
    if report.steps is None or not sum(report.steps.steps):
        return Metric(name, None, "ns", _NO_BLOCKS)
    if match[1] == "mean":
        return Metric(name, sum(report.steps.step_ns) / sum(report.steps.steps), "ns")
    return Metric(name, estimate_step_quantile_ns(report.steps, float(match[2]) / 100), "ns")


def _compute_aggregated_metric(metric: Metric, part: str, report: Report, text: str) -> Metric:
    name = f"{metric.name}.{part}"

    def unknown(why: str) -> Metric:
        return Metric(name, None, metric.unit, why)

    if metric.value is None:
        return unknown(metric.why_missing)
    if part.startswith("rank_"):
        if report.unlisted:
            return unknown(_FEW_RANKS.format(len(report.ranks), report.rank_count))
        ratios = [
            ratio
            for rank in report.ranks
            if (ratio := _compute_rank_ratio(metric.name, rank)) is not None
        ]
        if not ratios and any(rank.in_step_ns > 0 for rank in report.ranks):
            raise UsageError(f"the rule {text!r}: {metric.name} is not known per rank")
        value = (max if part == "rank_max" else min)(ratios) if ratios else None
        return Metric(name, value, metric.unit, "" if ratios else _NO_RANK, metric.bound)
    if report.steps is None:
        return unknown(_NO_BLOCKS)
    columns = select_ratio_columns(metric.name, report.steps)
    if columns is None:
        raise UsageError(f"the rule {text!r}: {metric.name} is not known for parts of a run")
    values = sorted(_compute_bin_ratios(*columns))
    if len(values) < TIME_BINS:
        return unknown(f"fewer than {TIME_BINS} time bins of the run have steps")
    share = {"min": 0.0, "max": 1.0}.get(part, float(part[1:]) / 100 if part[1:].isdigit() else 0)
    index = max(0, math.ceil(share * len(values)) - 1)
    return Metric(name, values[index], metric.unit, "", metric.bound)


def _compute_bin_ratios(numerator: Sequence[int], denominator: Sequence[int]) -> list[float]:
    """Compute the ratio in each of `TIME_BINS` bins with equally many blocks; empty bins are
    left out.
    """
    edges = [round(number * len(numerator) / TIME_BINS) for number in range(TIME_BINS + 1)]
    sums = [
        (sum(numerator[low:high]), sum(denominator[low:high]))
        for low, high in itertools.pairwise(edges)
    ]
    return [part / total for part, total in sums if total > 0]


def _compute_rank_ratio(name: str, rank: RankLedger) -> float | None:
    if rank.in_step_ns <= 0:
        return None
    if name in ("lost.ratio", "productive.ratio"):
        ns = rank.lost_ns if name == "lost.ratio" else rank.productive_ns
        return ns / rank.in_step_ns
    match = re.fullmatch(r"(?:stall\.(.+)_ratio|(unattributed)\.ratio)", name)
    if match is None:
        return None
    cause = match[1] or match[2]
    prefix = get_cause_prefix(cause)
    ns = sum(ns for id_, ns in rank.buckets if id_ == cause or id_.startswith(prefix))
    return ns / rank.in_step_ns


def _list_impact_metrics(report: Report) -> list[Metric]:
    """List the impact metrics (cost, throughput, efficiency) that the report has no metric
    for.
    """
    job_impact = report.impact
    money = job_impact.currency if job_impact is not None else "money"
    rows: list[tuple[str, float | None, str]] = [
        ("cost.lost", job_impact.lost_cost if job_impact else None, money),
        (
            "cost.per_million_tokens",
            job_impact.cost_per_million_tokens if job_impact else None,
            money,
        ),
        ("tokens_per_second", job_impact.tokens_per_second if job_impact else None, "tokens/s"),
        ("samples_per_second", job_impact.samples_per_second if job_impact else None, "samples/s"),
    ]
    why = dict.fromkeys((name for name, _, _ in rows), _NO_IMPACT if job_impact is None else "")
    for name, value, reason in job_impact.efficiency_metrics if job_impact is not None else ():
        rows.append((name, value, _infer_metric_unit(name)))
        why[name] = reason
    reported = {metric.name for metric in report.metrics}
    return [
        Metric(name, value, unit, (why[name] or "it is not known") if value is None else "")
        for name, value, unit in rows
        if name not in reported
    ]


def _infer_metric_unit(name: str) -> str:
    try:
        return infer_unit(name.replace(".", "_"))
    except ValueError:
        return "number"
