"""What a gate is asked: rules on a number, rules on a change, and when a verdict may be given.

    gpu.busy_ratio >= 70%       stall.storage <= 5%       warn: step.p95_ns < 250 ms
    step.p50_ns: +5%            stall.storage_ratio: +2pt          gpu.busy_ratio: -3pt

The first line tests one run; the second compares it with baselines: more than 5 % longer, 2 points
more, 3 points less is a failure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from clusterprof.errors import UsageError
from clusterprof.units import parse_quantity

Operator = Literal[">=", "<=", ">", "<", "=="]
Direction = Literal["+", "-", "±"]
Level = Literal["off", "warn", "error"]
OnInconclusive = Literal["fail", "warn", "pass"]
Aggregate = Literal["median", "pessimistic", "optimistic"]
LEVELS: tuple[Level, ...] = ("off", "warn", "error")
AGGREGATES: tuple[Aggregate, ...] = ("median", "pessimistic", "optimistic")

_NAME = r"[A-Za-z][\w.-]*"
_LEVEL = re.compile(r"\s*(off|warn|error)\s*:\s*(.*)", re.ASCII | re.DOTALL)
_RULE = re.compile(rf"\s*({_NAME})\s*(>=|<=|==|>|<)\s*(\S.*?)\s*", re.ASCII)
_CHANGE = re.compile(rf"\s*({_NAME})\s*:\s*(\+-|[+\-±])\s*(\S.*?)\s*")
_POINTS = re.compile(r"(.*\d)\s*(?:pt|pts|pp|points?)", re.ASCII)
_STALL = re.compile(r"\s*([a-z][a-z0-9-]*)\s*=\s*(\S+)\s*", re.ASCII)


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
    level: Level = "error"
    """What its failure means: nothing, a warning, or a failed gate."""


@dataclass(frozen=True, slots=True)
class Change:
    """One rule on how far a metric may move from the baselines."""

    metric: str
    direction: Direction
    """+ it may not grow by more, - it may not shrink by more, ± neither."""
    limit: float
    """At least 0: a ratio of the baseline for "%", points as a ratio for "pt", else in `unit`."""
    unit: str
    """"%", "pt", a canonical unit, or "" for a plain number."""
    text: str
    level: Level = "error"


AnyRule = Rule | Change


@dataclass(frozen=True, slots=True)
class Policy:
    """When a verdict may be given at all, and how runs are put together."""

    min_steps: int = 20
    """Steps that every rank must have made."""
    min_coverage_ratio: float = 0.9
    """Share of the time for which the needed samples must exist, for every rank."""
    max_damaged_bytes: int = 64 << 10
    """Bytes of all nodes that could not be read; a killed recorder leaves less."""
    max_dropped_spans: int = 100
    """Spans of all nodes that were produced and not stored."""
    min_ranks_ratio: float = 1.0
    """Share of the job's ranks that must have been recorded, where the job told how many it has."""
    on_inconclusive: OnInconclusive = "fail"
    """What "cannot tell" means to the exit code: fail = 4; warn and pass = 0."""
    aggregate: Aggregate = "median"
    """Which of several runs of the candidate a rule on a number is held against."""
    between_runs_ratio: float = 0.005
    """By how much runs of one job are taken to differ from each other (standard deviation of step
    time), until baselines and repeats show it."""
    allow_unlike: tuple[str, ...] = ()
    """Fields in which candidate and baselines may differ (`gate.alike`)."""


def parse_rule(text: str) -> Rule:
    """Read `METRIC OPERATOR LIMIT`; raise UsageError with an example when it is not one."""
    level, rest = _leveled(text)
    match = _RULE.fullmatch(rest)
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


def parse_change(text: str) -> Change:
    """Read `METRIC: +LIMIT` (+, - or ±; %, pt or a unit); raise UsageError when it is not one."""
    level, rest = _leveled(text)
    match = _CHANGE.fullmatch(rest)
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
            raise UsageError(f"the rule {text!r}: points have no other unit")
        limit, unit = limit / 100, "pt"
    elif unit == "ratio":
        unit = "%"
    if not limit > 0 or match[3].startswith(("+", "-")):
        raise UsageError(f"the rule {text!r}: the limit of a change must be above 0")
    return Change(match[1], direction, limit, unit, text, level)


def parse_any(text: str) -> AnyRule:
    """Read a rule of either kind."""
    return parse_change(text) if _CHANGE.fullmatch(_leveled(text)[1]) else parse_rule(text)


def max_stall(text: str) -> Rule:
    """Read `CAUSE=LIMIT` as the rule that the cause's share is no larger."""
    match = _STALL.fullmatch(text)
    if match is None:
        raise UsageError(f"--max-stall {text!r} is not CAUSE=LIMIT", "for example: storage=5%")
    return parse_rule(f"stall.{match[1]} <= {match[2]}")


def min_util(text: str) -> Rule:
    """Read a ratio as the rule that devices are busy for no less of the time."""
    return parse_rule(f"gpu.busy_ratio >= {text.strip()}")


def at_levels(rules: Sequence[AnyRule], levels: Sequence[str]) -> tuple[AnyRule, ...]:
    """Return the rules with levels given as `METRIC=LEVEL`; UsageError for one that hits none."""
    out = list(rules)
    for text in levels:
        metric, equals, level = (part.strip() for part in text.partition("="))
        if not equals or level not in LEVELS:
            raise UsageError(f"--level {text!r} is not METRIC=off, METRIC=warn or METRIC=error")
        hit = [at for at, one in enumerate(out) if one.metric == metric]
        if not hit:
            known = ", ".join(dict.fromkeys(one.metric for one in out))
            raise UsageError(f"--level {text!r}: no rule is on {metric!r}", f"rules are on {known}")
        for at in hit:
            out[at] = replace(out[at], level=level)  # type: ignore[arg-type]
    return tuple(out)


def insist_on_rules(rules: Sequence[AnyRule]) -> None:
    """Raise UsageError when no rule is in force: such a gate would pass everything."""
    if all(rule.level == "off" for rule in rules):
        raise UsageError(
            "the gate has no rules, and would pass everything",
            "give --assert 'gpu.busy_ratio >= 70%', or --profile ci",
        )


def _leveled(text: str) -> tuple[Level, str]:
    match = _LEVEL.fullmatch(text)
    return (match[1], match[2]) if match else ("error", text)  # type: ignore[return-value]
