"""A verdict as Markdown: for a comment on a pull request, or the summary of a step.

The first line is a comment that nobody sees, by which a bot finds the comment to update. A second
gate of the same pull request gives itself another name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from clusterprof.findings import Report
from clusterprof.gate import RuleResult, Verdict
from clusterprof.renderers.text_safety import markdown_text as md
from clusterprof.units import human

_WORDS = {"pass": "passed", "fail": "failed", "cannot tell": "cannot tell"}
_MARKS = {"pass": "✅", "fail": "❌", "cannot tell": "❔"}
_MOST_CAUSES = 5
_MOST_NAMED = 2


def marker(name: str = "gate") -> str:
    """Return the comment by which this verdict is found again."""
    return f"<!-- clusterprof:{re.sub(r'[^a-zA-Z0-9._]+', '_', name) or 'gate'} -->"


def markdown(verdict: Verdict, report: Report, name: str = "gate") -> str:
    """Return the whole comment."""
    return "\n".join(_lines(verdict, report, name)) + "\n"


def _lines(verdict: Verdict, report: Report, name: str) -> Iterator[str]:
    yield marker(name)
    mark = _MARKS[verdict.outcome]
    yield f"### {mark} clusterprof gate {_WORDS[verdict.outcome]}: {md(verdict.title)}"
    if verdict.emulated:
        yield from ("", "> **Warning** accelerators are emulated")
    yield from ("", "| | rule | is | |", "|---|---|---:|---|")
    for result in sorted(verdict.results, key=lambda one: one.outcome == "pass"):
        yield _row(result)
    for text in verdict.doubts:
        yield from ("", f"> {md(text, 1000)}")
    causes = [one for one in report.findings if not one.outside_steps][:_MOST_CAUSES]
    if causes:
        share = report.lost_ns / report.in_step_ns if report.in_step_ns else 0.0
        yield from (
            "",
            f"**{human(share, 'ratio')} of the time in steps was lost**, most of it to:",
        )
        yield ""
    for one in causes:
        names = (
            " ".join(word for word in (culprit.node, culprit.resource) if word)
            for culprit in one.culprits
        )
        whose = ", ".join(list(dict.fromkeys(names))[:_MOST_NAMED])
        where = f" ({md(whose)})" if whose else ""
        cause = f"{md(one.cause.id)}: {md(one.cause.title)}"
        yield f"- {human(one.share_ratio, 'ratio')} {cause}{where}"
    for text in verdict.notes:
        yield from ("", md(text, 1000))


def _row(result: RuleResult) -> str:
    warns = result.rule.level == "warn" and result.outcome != "pass"
    mark = "⚠️" if warns else _MARKS[result.outcome]
    value = "" if result.value is None else human(result.value, result.unit)
    why = result.why if result.outcome != "cannot tell" else f"cannot tell: {result.why}"
    return f"| {mark} | {md(result.wanted)} | {md(value)} | {md(why, 1000)} |"
