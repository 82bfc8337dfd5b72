"""Where verdicts go: stdout, files, and what a CI runner reads."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.cli import common
from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from clusterprof.findings import Report
    from clusterprof.gate import Verdict

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def written(form: str, verdict: Verdict, report: Report, width: int = 0) -> str:
    """Return a verdict in one of its forms; text for a terminal of `width` columns (0 = none)."""
    from clusterprof.verdicts import gitlab, json_, junit, markdown, text

    if form == "json":
        return json_.gate_json(verdict)
    if form == "junit":
        return junit.junit(verdict)
    if form == "markdown":
        return markdown.markdown(verdict, report)
    if form == "gitlab-metrics":
        return gitlab.metrics(report, verdict)
    if form == "one-line":
        return text.one_line(verdict, report) + "\n"
    return text.plain(verdict, width)


def what_next(form: str, verdict: Verdict, run: Sequence[Path]) -> str:
    """Say below a failed gate where the reasons stand; "" of a stored report, which has them."""
    if form != "plain" or verdict.outcome != "fail" or not all(path.is_dir() for path in run):
        return ""
    from clusterprof.renderers.text_safety import safe_text

    named = " ".join(shlex.quote(str(path)) for path in run)
    return f"Why, and what to do: clusterprof analyze {safe_text(named, 400)}\n"


def write_files(
    files: Mapping[str, Path | None], verdict: Verdict, report: Report, github: bool
) -> None:
    """Write a verdict in each form into its file, and what GitHub reads."""
    for form, path in files.items():
        if path is not None:
            common.write_result(written(form, verdict, report), path)
    if github:
        from clusterprof.verdicts.github import workflow_commands
        from clusterprof.verdicts.markdown import markdown

        # GitHub reads commands on stderr too, and stdout stays one document.
        sys.stderr.write(workflow_commands(verdict))
        sys.stderr.flush()
        _append_summary(markdown(verdict, report))


def _append_summary(text: str) -> None:
    """Append to the file that GitHub names; without one nothing is done."""
    from clusterprof.verdicts.github import summary

    name = os.environ.get(SUMMARY_VARIABLE, "")
    if not name:
        return
    path = Path(name)
    try:
        already = path.stat().st_size if path.exists() else 0
        with open(path, "a", encoding="utf-8") as file:
            file.write(summary(text, already))
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"cannot write {SUMMARY_VARIABLE}={name}: {reason}") from None
