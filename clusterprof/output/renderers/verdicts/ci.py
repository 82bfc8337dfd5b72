"""Render a verdict for GitHub Actions: annotations of the run, and the summary of the
step.

GitHub shows ten annotations of a step and silently drops the rest, and it drops a
summary above 1 MiB entirely. So at most ten are written, the last of them a count, and
the summary is cut with a notice at 900 KiB, including what other commands of the step
wrote.

It also renders metrics as OpenMetrics text, for GitLab's metrics reports and other readers.

GitLab compares values as strings, so numbers are rounded to four digits: noise in the
fifth digit must not appear as a change. Only known values are written.

It also renders a verdict as JUnit XML, which GitLab, Jenkins and others show as tests: one per
rule.

A rule that cannot be decided is a failure where the gate fails closed, else skipped; a
failed rule of level "warn" is skipped with its reason. Values are properties of the
test.
"""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as Tree

from clusterprof.gate import ChangeRule, RuleResult, Verdict
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.model import Report

MAX_ANNOTATIONS = 10
MAX_SUMMARY_BYTES = 900 << 10
_NOTICE = "\n\n*clusterprof: truncated here; a step's summary is limited to 900 KiB*\n"


def format_workflow_commands(verdict: Verdict) -> str:
    """Format a workflow command per rule that failed or cannot be decided; "" when all passed."""
    failed = [result for result in verdict.results if result.outcome != "pass"]
    failed.sort(key=lambda result: (result.rule.level != "error", result.outcome != "fail"))
    room = MAX_ANNOTATIONS if len(failed) <= MAX_ANNOTATIONS else MAX_ANNOTATIONS - 1
    lines = [_format_annotation(result, verdict) for result in failed[:room]]
    if len(failed) > room:
        kind = "error" if verdict.exit_code else "warning"
        lines.append(
            _format_command(
                kind, "clusterprof gate", f"{len(failed) - room} more rules: see the log"
            )
        )
    return "".join(line + "\n" for line in lines)


def trim_step_summary(markdown: str, used_bytes: int = 0) -> str:
    """Return the part of a summary that still fits after `used_bytes` bytes; "" if nothing fits."""
    data = markdown.encode()
    room = MAX_SUMMARY_BYTES - used_bytes
    if len(data) <= room:
        return markdown
    room -= len(_NOTICE.encode())
    if room <= 0:
        return ""
    head = data[:room].decode("utf-8", "ignore")
    return head[: head.rfind("\n") + 1] + _NOTICE


def _format_annotation(result: RuleResult, verdict: Verdict) -> str:
    kind = "warning"
    if result.rule.level == "error" and (result.outcome == "fail" or verdict.exit_code):
        kind = "error"
    message = f"{result.requirement}: {result.outcome}: {result.why}"
    return _format_command(kind, f"clusterprof gate: {result.metric}", message)


def _format_command(kind: str, title: str, message: str) -> str:
    return f"::{kind} title={_escape_property(title)}::{_escape_message(message)}"


def _escape_message(text: str) -> str:
    shown = escape_text(text, 1000)
    return shown.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_message(text).replace(":", "%3A").replace(",", "%2C")


SIGNIFICANT_DIGITS = 4


def render_gitlab_metrics(report: Report, verdict: Verdict) -> str:
    """Render every exact metric that has a value, in base units, and the number of rules by
    outcome.
    """
    values: dict[str, float] = {}
    for metric in report.metrics:
        if metric.value is not None and math.isfinite(metric.value) and metric.bound == "exact":
            name, value = _convert_metric(metric.name, metric.value)
            values.setdefault(name, value)
    lines = []
    for name, value in values.items():
        lines += [f"# TYPE {name} gauge", f"{name} {format_rounded(value)}"]
    lines.append("# TYPE clusterprof_gate_rules gauge")
    for outcome in ("pass", "fail", "cannot tell"):
        count = sum(result.outcome == outcome for result in verdict.results)
        lines.append(f'clusterprof_gate_rules{{outcome="{outcome}"}} {count}')
    return "\n".join((*lines, "# EOF")) + "\n"


def format_rounded(value: float) -> str:
    """Format a number with four significant digits, in one notation: 0.6103, 812300000,
    1.2e+15.
    """
    if value == 0:
        return "0"
    exact = float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    return (
        f"{exact:.0f}"
        if exact == int(exact) and abs(exact) < 1e15
        else f"{exact:.{SIGNIFICANT_DIGITS}g}"
    )


def _convert_metric(name: str, value: float) -> tuple[str, float]:
    """Return a Prometheus metric name and the value, nanoseconds converted to seconds."""
    flat = "clusterprof_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
    if flat.endswith("_ns"):
        return flat.removesuffix("_ns") + "_seconds", value / 1e9
    return flat, value


CLASS_NAME = "clusterprof.gate"


def render_junit(verdict: Verdict) -> str:
    """Render the JUnit XML document of a verdict."""
    cases = [_build_test_case(result, verdict) for result in verdict.results]
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
        "time": "0",
    }
    root = Tree.Element("testsuites", {"name": "clusterprof gate", **counts})
    suite = Tree.SubElement(
        root, "testsuite", {"name": f"clusterprof gate {_escape_text(verdict.title)}", **counts}
    )
    properties = Tree.SubElement(suite, "properties")
    _add_property(properties, "outcome", verdict.outcome)
    _add_property(properties, "emulated", str(verdict.emulated).lower())
    suite.extend(cases)
    out = Tree.SubElement(suite, "system-out")
    out.text = "\n".join(_escape_text(line, 1000) for line in verdict.lines)
    Tree.indent(root)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n' + Tree.tostring(root, encoding="unicode") + "\n"
    )


def _build_test_case(result: RuleResult, verdict: Verdict) -> Tree.Element:
    case = Tree.Element(
        "testcase", {"classname": CLASS_NAME, "name": _escape_text(result.rule.text), "time": "0"}
    )
    properties = Tree.SubElement(case, "properties")
    for name, value in _list_properties(result):
        if value is not None:
            _add_property(properties, name, value)
    if result.outcome == "pass":
        return case
    fails_gate = result.rule.level == "error" and (
        result.outcome == "fail" or verdict.on_inconclusive == "fail"
    )
    message = f"{result.requirement}: {result.outcome}: {result.why}"
    if not fails_gate:
        Tree.SubElement(case, "skipped", {"message": _escape_text(message, 1000)})
        return case
    kind = "failed" if result.outcome == "fail" else "cannot-tell"
    failure = Tree.SubElement(
        case, "failure", {"type": kind, "message": _escape_text(message, 1000)}
    )
    failure.text = "\n".join(
        _escape_text(line, 1000) for line in (message, *verdict.unmet_preconditions)
    )
    return case


def _list_properties(result: RuleResult) -> list[tuple[str, str | None]]:
    change = result.change
    rows: list[tuple[str, object]] = [
        ("metric", result.metric),
        ("value", result.value),
        ("unit", result.unit),
        ("limit", result.limit),
        ("level", result.rule.level),
        ("outcome", result.outcome),
    ]
    if isinstance(result.rule, ChangeRule) and change is not None:
        rows += [
            ("baseline", change.baseline),
            ("change", change.estimate),
            ("change_low", change.low),
            ("change_high", change.high),
            ("found_from", change.smallest_detectable),
            ("steps", change.steps),
            ("steps_needed", change.steps_needed),
        ]
    return [(name, None if value is None else _format_property(value)) for name, value in rows]


def _format_property(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else _escape_text(str(value))


def _add_property(parent: Tree.Element, name: str, value: str) -> None:
    Tree.SubElement(parent, "property", {"name": name, "value": value})


def _escape_text(text: str, limit: int = 400) -> str:
    # `safe_text` spells out characters that XML 1.0 cannot represent.
    return escape_text(text, limit)
