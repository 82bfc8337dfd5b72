"""Render a verdict as plain text, and in one line for a job's comment.

It also renders a verdict as one JSON document (RFC 8259); keys are only added.

It also renders a comparison of two runs as text that fits a terminal, as Markdown, and as JSON.

It also renders a verdict as Markdown: for a comment on a pull request, or the summary of a step.

The first line is a hidden comment by which a bot finds the comment to update. A second
gate on one pull request uses another name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from clusterprof.gate import ChangeRule, RuleResult, Verdict
from clusterprof.gate.compare import MIN_DIFFERENCE_RATIO, Comparison, ComparisonRow
from clusterprof.output.renderers.text import wording
from clusterprof.output.renderers.text.safety import (
    count_columns,
    escape_comment,
    escape_markdown,
    escape_text,
    fit_to_width,
    wrap_text,
)
from clusterprof.output.renderers.text.safety import escape_markdown as md
from clusterprof.report.model import Report
from clusterprof.units import format_quantity

MAX_LINE_LENGTH = 200
"""Characters: Slurm keeps longer comments, but `squeue` shows hardly any."""
_OUTCOME_CAPITALS = {"pass": "PASSED", "fail": "FAILED", "cannot tell": "CANNOT TELL"}
_MAX_NAMED_RULES = 2
_INDENT = " " * 8  # of the continuation lines of a rule, as wide as its outcome


def render_verdict_text(verdict: Verdict, width: int = 0) -> str:
    """Render the lines of a verdict, the outcome first; lines longer than `width` are wrapped.

    width: 0 leaves every line whole, so that a log can be searched for it.
    """
    lines = [escape_text(line, 1000) for line in verdict.lines]
    if width <= len(_INDENT):
        return "".join(f"{line}\n" for line in lines)
    return "".join(f"{part}\n" for line in lines for part in _wrap_line(line, width))


def _wrap_line(line: str, width: int) -> list[str]:
    if count_columns(line) <= width:
        return [line]
    start = line[: len(line) - len(line.lstrip())]
    first, *further_lines = wrap_text(line, width - len(_INDENT))
    return [start + first, *(_INDENT + part for part in further_lines)]


def format_job_comment(verdict: Verdict, report: Report) -> str:
    """Summarize a verdict in one line: outcome, failed rules, device utilization and main
    cause.

    ASCII only, at most `MAX_LINE_LENGTH` characters, without a line end.
    """
    total = len(verdict.results)
    text = (
        f"clusterprof: {_OUTCOME_CAPITALS[verdict.outcome]}, {total}"
        f" {'rule' if total == 1 else 'rules'}"
    )
    failed = [result for result in verdict.results if result.outcome == verdict.outcome != "pass"]
    if failed:
        named = ", ".join(result.metric for result in failed[:_MAX_NAMED_RULES])
        suffix = (
            f" and {len(failed) - _MAX_NAMED_RULES} more" if len(failed) > _MAX_NAMED_RULES else ""
        )
        text += f" ({named}{suffix})"
    busy = next(
        (metric.value for metric in report.metrics if metric.name == "gpu.busy_ratio"), None
    )
    if busy is not None:
        text += f"; busy {100 * busy:.0f}%"
    if report.in_step_ns:
        text += f"; lost {100 * report.lost_ns / report.in_step_ns:.0f}%"
        largest = report.main_cause
        if largest is None and wording.has_significant_loss(report):
            text += ", cause not known"
        if largest is not None:
            text += f", most {largest.cause.id} {100 * largest.share_ratio:.0f}%"
            if largest.culprits:
                first = largest.culprits[0]
                text += f" ({' '.join(word for word in (first.node, first.resource) if word)})"
    if verdict.emulated:
        text += "; EMULATED"
    return escape_comment(text, MAX_LINE_LENGTH)


SCHEMA_VERSION = 1


def render_verdict_json(verdict: Verdict) -> str:
    """Render the JSON document of a verdict."""
    document = {
        "format": "clusterprof-gate",
        "schema_version": SCHEMA_VERSION,
        "title": escape_text(verdict.title, 4096),
        "emulated": verdict.emulated,
        "outcome": verdict.outcome,
        "exit_code": verdict.exit_code,
        "rules": convert_results(verdict.results),
        "doubts": [escape_text(text, 4096) for text in verdict.unmet_preconditions],
        "notes": [escape_text(text, 4096) for text in verdict.notes],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def convert_results(results: tuple[RuleResult, ...]) -> list[dict[str, Any]]:
    """Convert the result of every rule to JSON values."""
    return [_convert_result(result) for result in results]


def _convert_result(result: RuleResult) -> dict[str, Any]:
    rule, metric_change = result.rule, result.change
    change = isinstance(rule, ChangeRule)
    return {
        "rule": escape_text(rule.text, 4096),
        "kind": "change" if change else "number",
        "level": rule.level,
        "metric": escape_text(result.metric, 4096),
        "operator": rule.direction if isinstance(rule, ChangeRule) else rule.operator,
        "limit": result.limit,
        "limit_unit": rule.unit if change else result.unit,
        "value": convert_number(result.value),
        "unit": escape_text(result.unit),
        "outcome": result.outcome,
        "why": escape_text(result.why, 4096),
        "change": None
        if metric_change is None
        else {
            "baseline": convert_number(metric_change.baseline),
            "estimate": convert_number(metric_change.estimate),
            "low": convert_number(metric_change.low),
            "high": convert_number(metric_change.high),
            "relative": metric_change.relative,
            "found_from": convert_number(metric_change.smallest_detectable),
            "steps": metric_change.steps,
            "steps_needed": metric_change.steps_needed,
            "candidates": metric_change.runs[0],
            "baselines": metric_change.runs[1],
        },
    }


def convert_number(value: float | None) -> float | None:
    """Return a finite number, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


_MAX_HEADLINE_CAUSES = 3
_COLORS = {"more": "\x1b[31m", "less": "\x1b[32m"}
_RESET = "\x1b[0m"
_NAME_COLUMNS, _TIME_COLUMNS, _RANGE_COLUMNS = 21, 8, 18


def render_comparison_text(comparison: Comparison, width: int = 80, color: bool = False) -> str:
    """Render headline, table and remarks, in at most `width` columns where possible."""
    lines: list[str] = []
    for sentence in write_headline(comparison):
        lines += wrap_text(escape_text(sentence, 600), width)
    lines.append("")
    for label, report in (("A, the baseline: ", comparison.a), ("B, the candidate:", comparison.b)):
        room = width - len(label) - 3
        lines.append(f"  {label} {fit_to_width(escape_text(report.title), room).rstrip()}")
    lines.append("")
    unit, ns = _choose_unit(comparison)
    lines += _format_table(comparison, f"{unit} per step", ns, color)
    lines += wrap_text(write_legend(comparison), width)
    changed = _select_changed_rows(comparison)
    lines += [""] if changed else []
    for row in changed:
        subject = f"{row.name}: {row.title}" if row.title else row.name
        culprit = f" ({row.culprit})" if row.culprit else ""
        first, *further_lines = wrap_text(escape_text(subject + culprit, 400), width - 2) or [""]
        lines += [first, *(f"  {line}" for line in further_lines)]
    remarks = [
        *(
            ("unlike: " if mismatch.blocks_verdict else "note: ") + mismatch.text
            for mismatch in comparison.mismatches
        )
    ]
    for text in (*remarks, *comparison.unmet_preconditions):
        lines += ["", *wrap_text(escape_text(text, 1000), width)]
    out = "\n".join(lines) + "\n"
    return (
        out if comparison.verdict is None else f"{out}\n{render_verdict_text(comparison.verdict)}"
    )


def render_comparison_markdown(comparison: Comparison) -> str:
    """Render the comparison as Markdown."""
    return "\n".join(_iterate_comparison_lines(comparison)) + "\n"


def render_comparison_json(comparison: Comparison) -> str:
    """Render the comparison as one JSON document; keys are only added."""
    verdict = comparison.verdict
    document = {
        "format": "clusterprof-compare",
        "schema_version": SCHEMA_VERSION,
        "a": escape_text(comparison.a.title, 4096),
        "b": escape_text(comparison.b.title, 4096),
        "says": [escape_text(text, 4096) for text in write_headline(comparison)],
        "step": _convert_row(comparison.step),
        "parts": [_convert_row(row) for row in comparison.rows],
        "unlike": [
            {
                "field": mismatch.field,
                "refused": mismatch.blocks_verdict,
                "text": escape_text(mismatch.text, 4096),
            }
            for mismatch in comparison.mismatches
        ],
        "doubts": [escape_text(text, 4096) for text in comparison.unmet_preconditions],
        "outcome": None if verdict is None else verdict.outcome,
        "exit_code": 0 if verdict is None else verdict.exit_code,
        "rules": [] if verdict is None else convert_results(verdict.results),
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def write_headline(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on how the step changed and which causes changed it."""
    step = comparison.step
    if step.significance in ("more", "less"):
        share = step.difference_ns / step.a_ns if step.a_ns else 0.0
        longer = "longer" if step.difference_ns > 0 else "shorter"
        yield f"A step is {_format_size(step.difference_ns)} {longer} in B ({100 * share:+.1f} %)."
    elif step.significance == "the same":
        yield f"A step takes as long in B as in A ({_format_signed(step.difference_ns)})."
    else:
        why = (
            "is within chance"
            if step.significance == "within chance"
            else "cannot be judged: few steps"
        )
        yield f"The difference of a step ({_format_signed(step.difference_ns)}) {why}."
    changed = _select_changed_rows(comparison)
    blamed = changed[:_MAX_HEADLINE_CAUSES]
    if blamed:
        parts = [f"{row.name} {_format_signed(row.difference_ns)}" for row in blamed]
        suffix = f" and {len(changed) - len(blamed)} more" if len(changed) > len(blamed) else ""
        yield f"What changed: {', '.join(parts)}{suffix}."
    else:
        yield "No cause changed by more than chance explains."
    refused = [mismatch.field for mismatch in comparison.mismatches if mismatch.blocks_verdict]
    if refused:
        yield f"Caution: the runs differ in {', '.join(refused)}, see below."


def write_legend(comparison: Comparison) -> str:
    """Explain the significance words that occur in the rows."""
    words = {row.significance for row in (comparison.step, *comparison.rows)}
    sentences = []
    if words & {"more", "less"}:
        sentences.append("more, less: beyond what chance explains.")
    if "within chance" in words:
        sentences.append("within chance: possibly no difference at all.")
    if "the same" in words:
        sentences.append(
            f"the same: apart by less than {200 * MIN_DIFFERENCE_RATIO:.0f} % of a step."
        )
    if "cannot tell" in words:
        sentences.append("cannot tell: too few steps to estimate chance.")
    return " ".join(sentences)


def _select_changed_rows(comparison: Comparison) -> list[ComparisonRow]:
    return [row for row in comparison.rows if row.significance in ("more", "less")]


def _choose_unit(comparison: Comparison) -> tuple[str, float]:
    """Return the unit in which the table's times are easy to compare, and its length in ns."""
    longest = max(comparison.step.a_ns, comparison.step.b_ns)
    return ("s", 1e9) if longest >= 1e10 else ("ms", 1e6) if longest >= 1e7 else ("µs", 1e3)


def _format_table(comparison: Comparison, unit: str, ns: float, color: bool) -> list[str]:
    """Format the head and the rows; a column is as wide as its longest number and a space."""
    rows = (comparison.step, *comparison.rows)
    cells = [_format_cells(row, ns) for row in rows]
    widths = [
        max(least, *(len(row_cells[column]) + 1 for row_cells in cells))
        for column, least in enumerate((*(_TIME_COLUMNS,) * 3, _RANGE_COLUMNS))
    ]
    head = ("A", "B", "B - A", "95 % interval")
    lines = [f"{unit:<{_NAME_COLUMNS}}{_align_right(head, widths)}"]
    for row, row_cells in zip(rows, cells):
        name = fit_to_width(escape_text(row.name), _NAME_COLUMNS - 1)
        start = _COLORS.get(row.significance, "") if color else ""
        significance = f"{start}{row.significance}{_RESET if start else ''}"
        lines.append(f"{name} {_align_right(row_cells, widths)}  {significance}")
    return lines


def _format_cells(row: ComparisonRow, ns: float) -> tuple[str, str, str, str]:
    low, high = row.low_ns, row.high_ns
    has_range = low is not None and high is not None
    interval = f"{low / ns:+.2f} to {high / ns:+.2f}" if has_range else ""  # type: ignore[operator]
    times = (f"{row.a_ns / ns:.2f}", f"{row.b_ns / ns:.2f}", f"{row.difference_ns / ns:+.2f}")
    return *times, interval


def _align_right(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths))


def _iterate_comparison_lines(comparison: Comparison) -> Iterator[str]:
    md = escape_markdown
    yield "<!-- clusterprof:compare -->"
    yield "### clusterprof: what changed"
    for sentence in write_headline(comparison):
        yield from ("", md(sentence, 600))
    yield from (
        "",
        f"A: {md(comparison.a.title)}, B: {md(comparison.b.title)}; times per step of a rank",
        "",
    )
    yield "| | A | B | B - A | 95 % interval | | culprit |"
    yield "|---|---:|---:|---:|---:|---|---|"
    for row in (comparison.step, *comparison.rows):
        bold = "**" if row.significance in ("more", "less") else ""
        cells = (
            f"{bold}{md(row.name)}{bold}",
            format_quantity(row.a_ns, "ns"),
            format_quantity(row.b_ns, "ns"),
        )
        remainder = (
            _format_signed(row.difference_ns),
            _format_interval(row),
            row.significance,
            md(row.culprit),
        )
        yield f"| {' | '.join((*cells, *remainder))} |"
    yield from ("", md(write_legend(comparison), 600))
    for mismatch in comparison.mismatches:
        yield from (
            "",
            f"> {'unlike' if mismatch.blocks_verdict else 'note'}: {md(mismatch.text, 600)}",
        )
    for text in comparison.unmet_preconditions:
        yield from ("", f"> {md(text, 600)}")
    if comparison.verdict is not None:
        yield ""
        yield from (f"- {md(line.strip(), 1000)}" for line in comparison.verdict.lines)


def _convert_row(row: ComparisonRow) -> dict[str, Any]:
    return {
        "name": escape_text(row.name, 4096),
        "title": escape_text(row.title, 4096),
        "a_ns": convert_number(row.a_ns),
        "b_ns": convert_number(row.b_ns),
        "difference_ns": convert_number(row.difference_ns),
        "low_ns": convert_number(row.low_ns),
        "high_ns": convert_number(row.high_ns),
        "says": row.significance,
        "whose": escape_text(row.culprit, 4096),
    }


def _format_interval(row: ComparisonRow) -> str:
    if row.low_ns is None or row.high_ns is None:
        return ""
    return f"{_format_signed(row.low_ns)} to {_format_signed(row.high_ns)}"


def _format_size(ns: float) -> str:
    return format_quantity(abs(ns), "ns")


def _format_signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{_format_size(ns)}"


_OUTCOME_WORDS = {"pass": "passed", "fail": "failed", "cannot tell": "cannot tell"}
_OUTCOME_MARKS = {"pass": "✅", "fail": "❌", "cannot tell": "❔"}
_MAX_CAUSES = 5


_MARKER = "<!-- clusterprof:gate -->"
"""Hidden comment by which a verdict is found again."""


def render_verdict_markdown(verdict: Verdict, report: Report) -> str:
    """Render the whole Markdown comment of a verdict."""
    return "\n".join(_iterate_verdict_lines(verdict, report)) + "\n"


def _iterate_verdict_lines(verdict: Verdict, report: Report) -> Iterator[str]:
    yield _MARKER
    mark = _OUTCOME_MARKS[verdict.outcome]
    yield f"### {mark} clusterprof gate {_OUTCOME_WORDS[verdict.outcome]}: {md(verdict.title)}"
    if verdict.emulated:
        yield from ("", "> **Warning** accelerators are emulated")
    yield from ("", "| | rule | is | |", "|---|---|---:|---|")
    for result in sorted(verdict.results, key=lambda result: result.outcome == "pass"):
        yield _format_result_row(result)
    for text in verdict.unmet_preconditions:
        yield from ("", f"> {md(text, 1000)}")
    causes = [finding for finding in report.findings if not finding.outside_steps][:_MAX_CAUSES]
    if causes or wording.has_significant_loss(report):
        share = wording.format_share(report.lost_ns, report.in_step_ns)
        why = "most of it to:"
        if report.main_cause is None:
            unknown = wording.format_share(report.unattributed_ns, report.lost_ns)
            why = f"{unknown} of it without a known cause" + (". Known:" if causes else ".")
        yield from ("", f"**{share} of the time in steps was lost**, {why}", "")
    for finding in causes:
        names = (
            " ".join(word for word in (culprit.node, culprit.resource) if word)
            for culprit in finding.culprits
        )
        culprits = ", ".join(list(dict.fromkeys(names))[:_MAX_NAMED_RULES])
        where = f" ({md(culprits)})" if culprits else ""
        cause = f"{md(finding.cause.id)}: {md(finding.cause.title)}"
        yield f"- {format_quantity(finding.share_ratio, 'ratio')} {cause}{where}"
    for text in verdict.notes:
        yield from ("", md(text, 1000))


def _format_result_row(result: RuleResult) -> str:
    warns = result.rule.level == "warn" and result.outcome != "pass"
    mark = "⚠️" if warns else _OUTCOME_MARKS[result.outcome]
    value = "" if result.value is None else format_quantity(result.value, result.unit)
    why = result.why if result.outcome != "cannot tell" else f"cannot tell: {result.why}"
    return f"| {mark} | {md(result.requirement)} | {md(value)} | {md(why, 1000)} |"
