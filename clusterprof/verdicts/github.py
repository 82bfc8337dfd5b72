"""A verdict for GitHub Actions: annotations of the run, and the summary of the step.

GitHub shows ten annotations of a step and drops the rest without a word, and loses a summary above
1 MiB as a whole. So there are ten at most, the last of them a count, and the summary is cut with a
notice at 900 KiB, what other commands of the step wrote included.
"""

from __future__ import annotations

from clusterprof.gate import RuleResult, Verdict
from clusterprof.renderers.text_safety import safe_text

MOST_ANNOTATIONS = 10
SUMMARY_BYTES = 900 << 10
_NOTICE = "\n\n*clusterprof: cut here, a step's summary may have no more than 900 KiB*\n"


def workflow_commands(verdict: Verdict) -> str:
    """Return a workflow command per rule that failed or cannot be told; "" when all passed."""
    told = [one for one in verdict.results if one.outcome != "pass"]
    told.sort(key=lambda one: (one.rule.level != "error", one.outcome != "fail"))
    room = MOST_ANNOTATIONS if len(told) <= MOST_ANNOTATIONS else MOST_ANNOTATIONS - 1
    lines = [_annotation(one, verdict) for one in told[:room]]
    if len(told) > room:
        kind = "error" if verdict.exit_code else "warning"
        lines.append(
            _command(kind, "clusterprof gate", f"{len(told) - room} more rules: see the log")
        )
    return "".join(line + "\n" for line in lines)


def summary(markdown: str, already: int = 0) -> str:
    """Return what may be appended to a summary that has `already` so many bytes; "" for nothing."""
    data = markdown.encode()
    room = SUMMARY_BYTES - already
    if len(data) <= room:
        return markdown
    room -= len(_NOTICE.encode())
    if room <= 0:
        return ""
    head = data[:room].decode("utf-8", "ignore")
    return head[: head.rfind("\n") + 1] + _NOTICE


def _annotation(result: RuleResult, verdict: Verdict) -> str:
    kind = "warning"
    if result.rule.level == "error" and (result.outcome == "fail" or verdict.exit_code):
        kind = "error"
    message = f"{result.wanted}: {result.outcome}: {result.why}"
    return _command(kind, f"clusterprof gate: {result.metric}", message)


def _command(kind: str, title: str, message: str) -> str:
    return f"::{kind} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    shown = safe_text(text, 1000)
    return shown.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
