"""A report against rules: passed, failed, or cannot tell; three outcomes, never two.

    gpu.busy_ratio >= 70%        stall.storage <= 5%        step.p95_ns < 250 ms

What was not measured, too short, poorly covered, damaged, known only as "at most" on the wrong side
of a limit, or could be hidden in what is unattributed is *cannot tell*, and fails closed unless the
policy says otherwise. A rule that
failed with certainty outweighs one that cannot be told. No rules at all is a usage error: a gate
that asks nothing would pass everything.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from clusterprof.errors import EXIT_GATE_CANNOT_TELL, EXIT_GATE_FAILED, EXIT_OK, UsageError
from clusterprof.findings import Metric, Report
from clusterprof.units import SUFFIXES, human, parse_quantity

Operator = Literal[">=", "<=", ">", "<", "=="]
Outcome = Literal["pass", "fail", "cannot tell"]
OnInconclusive = Literal["fail", "warn", "pass"]

_RULE = re.compile(r"\s*([A-Za-z][\w.-]*)\s*(>=|<=|==|>|<)\s*(\S.*?)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rule:
    """One assertion: a metric, an operator and a limit."""

    metric: str
    """Name as written; the unit suffix may be left out ("stall.storage")."""
    operator: Operator
    limit: float
    """In canonical units when `unit` is given, else as written."""
    unit: str
    """Unit written behind the limit; "" when none was."""
    text: str
    """The rule as the user wrote it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When a verdict may be given at all."""

    min_steps: int = 20
    """Steps that every rank must have made."""
    min_coverage_ratio: float = 0.9
    """Share of the time for which the needed samples must exist, for every rank."""
    max_damaged_bytes: int = 64 << 10
    """Bytes of all nodes that could not be read; a killed recorder leaves less."""
    max_dropped_spans: int = 100
    """Spans of all nodes that were produced and not stored."""
    on_inconclusive: OnInconclusive = "fail"
    """What "cannot tell" means to the exit code: fail = 4; warn and pass = 0."""


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What became of one rule."""

    rule: Rule
    metric: str
    """Full name of the metric that was tested."""
    unit: str
    value: float | None
    """None when there is none; see `why`."""
    limit: float
    """In the metric's unit."""
    outcome: Outcome
    why: str
    """Half a sentence, for people."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code, the lines that explain it (verdict first), and the results behind them."""

    exit_code: int
    outcome: Outcome
    lines: tuple[str, ...]
    results: tuple[RuleResult, ...]
    doubts: tuple[str, ...] = field(default=())
    """Why no rule could be told at all; empty when the recording is good enough."""


def parse_rule(text: str) -> Rule:
    """Read `METRIC OPERATOR LIMIT`; raise UsageError with an example when it is not one."""
    match = _RULE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"the rule {text!r} is not METRIC OPERATOR LIMIT",
            "for example: 'gpu.busy_ratio >= 70%' with one of >= <= > < ==",
        )
    try:
        limit, unit = parse_quantity(match[3])
    except ValueError as error:
        raise UsageError(f"the rule {text!r}: {error}") from None
    return Rule(match[1], match[2], limit, unit, text)  # type: ignore[arg-type]


def judge(report: Report, rules: Sequence[Rule], policy: Policy) -> Verdict:
    """Test every rule against the report's metrics; raise UsageError for what cannot be meant."""
    insist_on_rules(rules)
    doubts = _doubts(report, policy)
    results = tuple(_judge_one(rule, report, doubts) for rule in rules)
    outcomes = {result.outcome for result in results}
    outcome: Outcome = "pass"
    exit_code = EXIT_OK
    if "fail" in outcomes:
        outcome, exit_code = "fail", EXIT_GATE_FAILED
    elif "cannot tell" in outcomes:
        outcome = "cannot tell"
        exit_code = EXIT_GATE_CANNOT_TELL if policy.on_inconclusive == "fail" else EXIT_OK
    lines = (_headline(outcome, exit_code, results, report, policy), *map(_line, results))
    return Verdict(exit_code, outcome, lines + tuple(f"  {d}" for d in doubts), results, doubts)


def insist_on_rules(rules: Sequence[Rule]) -> None:
    """Raise UsageError when there are no rules: such a gate would pass everything."""
    if not rules:
        raise UsageError(
            "the gate has no rules, and would pass everything",
            "give --assert 'gpu.busy_ratio >= 70%', or --profile ci",
        )


# --- one rule -----------------------------------------------------------------------------------


def _judge_one(rule: Rule, report: Report, doubts: tuple[str, ...]) -> RuleResult:
    metric = _find(rule, report.metrics)
    limit = _limit(rule, metric)
    value = metric.value
    outcome: Outcome = "cannot tell"
    if value is None or not math.isfinite(value):
        why = metric.why_missing or "it was not measured"
        value = None
    elif doubts:
        why = f"is {_shown(metric)}, but the recording is too poor for a verdict"
    else:
        hidden = _hidden(metric, report)
        outcome = _compare(*_range(value, metric.bound, hidden), rule.operator, limit)
        why = f"is {_shown(metric)}"
        if value != limit and human(value, metric.unit) == human(limit, metric.unit):
            why += f" ({value:g}, the limit {limit:g})"  # else it reads "is 70.0 %, failed 70.0 %"
        if outcome == "cannot tell" and metric.bound != "exact":
            why += ", because no device was measured"
        elif outcome == "cannot tell":
            why += f", and another {human(hidden, 'ratio')} is lost without a known cause"
    return RuleResult(rule, metric.name, metric.unit, value, limit, outcome, why)


def _hidden(metric: Metric, report: Report) -> float:
    """Return by how much the truth may lie above a metric: what is unattributed may be this too."""
    if not metric.name.startswith("stall.") or not report.in_step_ns:
        return 0.0
    return report.unattributed_ns / report.in_step_ns


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


def _find(rule: Rule, metrics: Sequence[Metric]) -> Metric:
    """Return the metric a rule names, in full or without its unit suffix."""
    by_name = {metric.name: metric for metric in metrics}
    if rule.metric in by_name:
        return by_name[rule.metric]
    stems = {metric.name: _stem(metric.name) for metric in metrics}
    meant = [name for name, stem in stems.items() if stem == rule.metric]
    if len(meant) == 1:
        return by_name[meant[0]]
    close = meant or difflib.get_close_matches(rule.metric, [*by_name, *stems.values()], 3, 0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UsageError(
        f"the rule {rule.text!r}: there is no metric {rule.metric!r}{hint}",
        f"known are {', '.join(sorted(by_name)) or 'none in this report'}",
    )


def _stem(name: str) -> str:
    """Return a name without its unit: "lost" for "lost.ratio" and for "lost_ratio"."""
    for suffix, _ in SUFFIXES:
        for ending in (suffix, suffix.replace("_", ".", 1)):
            if name.endswith(ending):
                return name.removesuffix(ending)
    return name


def _limit(rule: Rule, metric: Metric) -> float:
    """Return the limit in the metric's unit, or refuse one that cannot be meant."""
    if rule.unit not in ("", metric.unit):
        raise UsageError(
            f"the rule {rule.text!r}: {metric.name} is in {metric.unit}, not in {rule.unit}"
        )
    if metric.unit == "ratio" and rule.unit == "" and abs(rule.limit) > 1:
        # "stall.storage <= 5" would pass whatever happens
        raise UsageError(
            f"the rule {rule.text!r}: {metric.name} is a ratio from 0 to 1",
            f"write {rule.limit:g}% or {rule.limit / 100:g}",
        )
    return rule.limit


# --- the whole recording ------------------------------------------------------------------------


def _doubts(report: Report, policy: Policy) -> tuple[str, ...]:
    """Say why a verdict on this recording would be worth nothing; nothing to say is good."""
    doubts: list[str] = []
    steps = min((rank.steps for rank in report.ranks), default=0)
    if steps < policy.min_steps:
        doubts.append(
            f"steps: {steps:,} of the rank with the fewest, {policy.min_steps:,} needed"
            " (record for longer, or lower --min-steps)"
        )
    covered = [rank.coverage_ratio for rank in report.ranks]
    # asked of each rank, not of the smallest: min() lets NaN slip past a comparison
    if not covered or not all(ratio >= policy.min_coverage_ratio for ratio in covered):
        coverage = min(covered, default=0.0)
        doubts.append(
            f"coverage: samples for {human(coverage, 'ratio')} of the time of the rank with the"
            f" least, {human(policy.min_coverage_ratio, 'ratio')} needed (see --min-coverage)"
        )
    damaged = sum(node.damaged_bytes for node in report.nodes)
    if damaged > policy.max_damaged_bytes:
        doubts.append(
            f"damage: {human(damaged, 'bytes')} of the recording could not be read,"
            f" {human(policy.max_damaged_bytes, 'bytes')} allowed"
        )
    dropped = sum(node.dropped_spans for node in report.nodes)
    if dropped > policy.max_dropped_spans:
        doubts.append(f"losses: {dropped:,} spans dropped, {policy.max_dropped_spans:,} allowed")
    return tuple(doubts)


# --- words --------------------------------------------------------------------------------------


def _headline(
    outcome: Outcome,
    exit_code: int,
    results: Sequence[RuleResult],
    report: Report,
    policy: Policy,
) -> str:
    total = len(results)
    count = sum(result.outcome == outcome for result in results)
    rules = "rule" if total == 1 else "rules"
    text = {
        "pass": f"gate PASSED: {total} {rules}",
        "fail": f"gate FAILED: {count} of {total} {rules}",
        "cannot tell": f"gate CANNOT TELL: {count} of {total} {rules}",
    }[outcome]
    if outcome == "cannot tell" and exit_code == EXIT_OK:
        text += f" (exit 0: --on-inconclusive {policy.on_inconclusive})"
    return text + (" · EMULATED accelerators" if report.emulated else "")


def _line(result: RuleResult) -> str:
    word = {"pass": "pass", "fail": "FAIL", "cannot tell": "????"}[result.outcome]
    limit = human(result.limit, result.unit)
    wanted = f"{result.metric} {result.rule.operator} {limit}"
    why = f"cannot tell: {result.why}" if result.outcome == "cannot tell" else result.why
    return f"  {word}  {wanted:<38}  {why}"


def _shown(metric: Metric) -> str:
    assert metric.value is not None
    value = human(metric.value, metric.unit)
    return value if metric.bound == "exact" else f"{metric.bound} {value}"
