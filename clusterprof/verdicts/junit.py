"""A verdict as JUnit XML, which GitLab, Jenkins and others show as tests: one per rule.

A rule that cannot be told is a failure where the gate fails closed, else skipped; a failed rule of
level "warn" is skipped with its reason. Values are properties of the test.
"""

from __future__ import annotations

from xml.etree import ElementTree as Tree

from clusterprof.gate import Change, RuleResult, Verdict
from clusterprof.renderers.text_safety import safe_text

CLASS = "clusterprof.gate"


def junit(verdict: Verdict) -> str:
    """Return the XML document."""
    cases = [_case(result, verdict) for result in verdict.results]
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
        "time": "0",
    }
    root = Tree.Element("testsuites", {"name": "clusterprof gate", **counts})
    suite = Tree.SubElement(
        root, "testsuite", {"name": f"clusterprof gate {_text(verdict.title)}", **counts}
    )
    properties = Tree.SubElement(suite, "properties")
    _property(properties, "outcome", verdict.outcome)
    _property(properties, "emulated", str(verdict.emulated).lower())
    suite.extend(cases)
    out = Tree.SubElement(suite, "system-out")
    out.text = "\n".join(_text(line, 1000) for line in verdict.lines)
    Tree.indent(root)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n' + Tree.tostring(root, encoding="unicode") + "\n"
    )


def _case(result: RuleResult, verdict: Verdict) -> Tree.Element:
    case = Tree.Element(
        "testcase", {"classname": CLASS, "name": _text(result.rule.text), "time": "0"}
    )
    properties = Tree.SubElement(case, "properties")
    for name, value in _values(result):
        if value is not None:
            _property(properties, name, value)
    if result.outcome == "pass":
        return case
    closed = result.rule.level == "error" and (
        result.outcome == "fail" or verdict.on_inconclusive == "fail"
    )
    message = f"{result.wanted}: {result.outcome}: {result.why}"
    if not closed:
        Tree.SubElement(case, "skipped", {"message": _text(message, 1000)})
        return case
    kind = "failed" if result.outcome == "fail" else "cannot-tell"
    failure = Tree.SubElement(case, "failure", {"type": kind, "message": _text(message, 1000)})
    failure.text = "\n".join(_text(line, 1000) for line in (message, *verdict.doubts))
    return case


def _values(result: RuleResult) -> list[tuple[str, str | None]]:
    moved = result.moved
    rows: list[tuple[str, object]] = [
        ("metric", result.metric),
        ("value", result.value),
        ("unit", result.unit),
        ("limit", result.limit),
        ("level", result.rule.level),
        ("outcome", result.outcome),
    ]
    if isinstance(result.rule, Change) and moved is not None:
        rows += [
            ("baseline", moved.baseline),
            ("change", moved.estimate),
            ("change_low", moved.low),
            ("change_high", moved.high),
            ("found_from", moved.found_from),
            ("steps", moved.steps),
            ("steps_needed", moved.steps_needed),
        ]
    return [(name, None if value is None else _shown(value)) for name, value in rows]


def _shown(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else _text(str(value))


def _property(parent: Tree.Element, name: str, value: str) -> None:
    Tree.SubElement(parent, "property", {"name": name, "value": value})


def _text(text: str, limit: int = 400) -> str:
    # `safe_text` spells out whatever XML 1.0 has no character for.
    return safe_text(text, limit)
