"""A verdict as one JSON document (RFC 8259); keys are only added."""

from __future__ import annotations

import json
import math
from typing import Any

from clusterprof.gate import Change, RuleResult, Verdict
from clusterprof.renderers.text_safety import safe_text

SCHEMA_VERSION = 1


def gate_json(verdict: Verdict) -> str:
    """Return the document."""
    document = {
        "format": "clusterprof-gate",
        "schema_version": SCHEMA_VERSION,
        "title": safe_text(verdict.title, 4096),
        "emulated": verdict.emulated,
        "outcome": verdict.outcome,
        "exit_code": verdict.exit_code,
        "rules": rules(verdict.results),
        "doubts": [safe_text(text, 4096) for text in verdict.doubts],
        "notes": [safe_text(text, 4096) for text in verdict.notes],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def rules(results: tuple[RuleResult, ...]) -> list[dict[str, Any]]:
    """Return what became of every rule."""
    return [_rule(result) for result in results]


def _rule(result: RuleResult) -> dict[str, Any]:
    rule, moved = result.rule, result.moved
    change = isinstance(rule, Change)
    return {
        "rule": safe_text(rule.text, 4096),
        "kind": "change" if change else "number",
        "level": rule.level,
        "metric": safe_text(result.metric, 4096),
        "operator": rule.direction if isinstance(rule, Change) else rule.operator,
        "limit": result.limit,
        "limit_unit": rule.unit if change else result.unit,
        "value": number(result.value),
        "unit": safe_text(result.unit),
        "outcome": result.outcome,
        "why": safe_text(result.why, 4096),
        "change": None
        if moved is None
        else {
            "baseline": number(moved.baseline),
            "estimate": number(moved.estimate),
            "low": number(moved.low),
            "high": number(moved.high),
            "relative": moved.relative,
            "found_from": number(moved.found_from),
            "steps": moved.steps,
            "steps_needed": moved.steps_needed,
            "candidates": moved.runs[0],
            "baselines": moved.runs[1],
        },
    }


def number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity; a number that is none is not known."""
    return value if value is not None and math.isfinite(value) else None
