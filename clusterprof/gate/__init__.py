"""Runs against rules and against each other: pass, fail, or cannot tell (docs/gate.md)."""

from __future__ import annotations

from clusterprof.gate.alike import FIELDS, allowed
from clusterprof.gate.judge import judge
from clusterprof.gate.rules import (
    AGGREGATES,
    AnyRule,
    Change,
    Level,
    OnInconclusive,
    Operator,
    Policy,
    Rule,
    at_levels,
    insist_on_rules,
    max_stall,
    min_util,
    parse_any,
    parse_change,
    parse_rule,
)
from clusterprof.gate.verdict import Moved, Outcome, RuleResult, Verdict

__all__ = [
    "AGGREGATES",
    "FIELDS",
    "AnyRule",
    "Change",
    "Level",
    "Moved",
    "OnInconclusive",
    "Operator",
    "Outcome",
    "Policy",
    "Rule",
    "RuleResult",
    "Verdict",
    "allowed",
    "at_levels",
    "insist_on_rules",
    "judge",
    "max_stall",
    "min_util",
    "parse_any",
    "parse_change",
    "parse_rule",
]
