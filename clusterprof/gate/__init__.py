"""Gate runs against rules and compare them with baselines.

The outcome is pass, fail or cannot tell (docs/gate.md).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from clusterprof.gate.judge import judge_runs
from clusterprof.gate.preconditions import COMPARED_FIELDS, validate_allowed_fields
from clusterprof.gate.rules import (
    AGGREGATES,
    AnyRule,
    ChangeRule,
    Level,
    OnInconclusive,
    Operator,
    Policy,
    Rule,
    parse_any_rule,
    parse_change,
    parse_max_stall,
    parse_min_utilization,
    parse_rule,
    require_rules,
    with_levels,
)
from clusterprof.gate.verdict import MetricChange, Outcome, RuleResult, Verdict

__all__ = [
    "AGGREGATES",
    "COMPARED_FIELDS",
    "AnyRule",
    "ChangeRule",
    "Level",
    "MetricChange",
    "OnInconclusive",
    "Operator",
    "Outcome",
    "Policy",
    "Rule",
    "RuleResult",
    "Verdict",
    "judge_runs",
    "parse_any_rule",
    "parse_change",
    "parse_max_stall",
    "parse_min_utilization",
    "parse_rule",
    "require_rules",
    "validate_allowed_fields",
    "with_levels",
]


class _CallablePackage(ModuleType):
    """Lets `clusterprof.gate(run, rules)` be called although it is a package (clusterprof.api)."""

    def __call__(self, *arguments: Any, **options: Any) -> Verdict:
        verdict: Verdict = importlib.import_module("clusterprof.api").gate(*arguments, **options)
        return verdict


sys.modules[__name__].__class__ = _CallablePackage
