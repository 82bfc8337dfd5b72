"""`clusterprof gate RUN...`: pass (0), fail (3) or cannot tell (4) by rules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from clusterprof.cli import common, runs

_FORMATS = ("plain", "json", "markdown", "junit")
_Text = Optional[str]  # noqa: UP045
_Texts = Optional[list[str]]  # noqa: UP045
_File = Optional[Path]  # noqa: UP045
_Files = Optional[list[Path]]  # noqa: UP045

_Assert = typer.Option(
    "--assert",
    help="A rule: 'gpu.busy_ratio >= 70%', or on a change 'step.p50_ns: +5%'; with 'warn:' before"
    " it for a warning. Repeatable.",
)
_MaxStall = typer.Option(help="storage=5%: no more of the time in steps is lost to it. Repeatable.")
_MinUtil = typer.Option(help="70%: devices are busy for no less of the time in steps.")
_Level = typer.Option(help="METRIC=off, warn or error: for rules on it. Repeatable.")
_Repeat = typer.Option(metavar="RUN", help="One more run of the same. Repeatable.")
_Aggregate = typer.Option(help="Of several runs: median, pessimistic or optimistic.")
_Baseline = typer.Option(metavar="RUN", help="What rules on changes compare with. Repeatable.")
_AllowUnlike = typer.Option(
    metavar="FIELD", help="Compare although the runs differ in it. Repeatable."
)
_MinSteps = typer.Option(min=0, help="Fewer steps: cannot tell.")
_MinCoverage = typer.Option(min=0, max=1, help="A smaller share of time with samples: cannot tell.")
_OnInconclusive = typer.Option(help="When it cannot tell: fail (exit 4), warn or pass (exit 0).")
_Format = typer.Option("--format", help="plain, json, markdown or junit.")
_OneLine = typer.Option("--one-line", help="One line of ASCII, for a job's comment.")
_Github = typer.Option("--github", help="Annotations on stderr, and GITHUB_STEP_SUMMARY.")


def gate(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help=runs.RUN_HELP)],
    assertions: Annotated[_Texts, _Assert] = None,
    max_stall: Annotated[_Texts, _MaxStall] = None,
    min_util: Annotated[_Text, _MinUtil] = None,
    level: Annotated[_Texts, _Level] = None,
    repeat: Annotated[_Files, _Repeat] = None,
    aggregate: Annotated[_Text, _Aggregate] = None,
    baseline: Annotated[_Files, _Baseline] = None,
    allow_unlike: Annotated[_Texts, _AllowUnlike] = None,
    profile: Annotated[_Text, typer.Option(help="Shipped profile (ci), or a file.")] = None,
    min_steps: Annotated[Optional[int], _MinSteps] = None,  # noqa: UP045
    min_coverage: Annotated[Optional[float], _MinCoverage] = None,  # noqa: UP045
    on_inconclusive: Annotated[_Text, _OnInconclusive] = None,
    format_: Annotated[str, _Format] = "plain",
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    one_line: Annotated[bool, _OneLine] = False,
    output: Annotated[_File, typer.Option("-o", "--output", help="Write to this file.")] = None,
    junit: Annotated[_File, typer.Option(help="Write JUnit XML to this file too.")] = None,
    markdown: Annotated[_File, typer.Option(help="Write a comment's Markdown too.")] = None,
    gitlab_metrics: Annotated[_File, typer.Option(help="Write GitLab's metrics too.")] = None,
    github: Annotated[bool, _Github] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the nodes.")] = 1,
) -> None:
    """Test a run, by itself or beside baselines: exit 0 passed, 3 failed, 4 cannot tell."""
    from clusterprof.cli import gate_outputs, gate_rules
    from clusterprof.gate import judge

    with common.errors_also_as_json(as_json or format_ == "json"):
        chosen = common.chosen_format(format_, as_json, _FORMATS)
        settings = common.load_profile(profile)
        asked = gate_rules.Asked(assertions or [], max_stall or [], min_util, level or [])
        rules = gate_rules.rules_of(asked, settings, bool(baseline))
        policy = gate_rules.policy_of(
            settings,
            min_steps=min_steps,
            min_coverage_ratio=min_coverage,
            on_inconclusive=on_inconclusive,
            aggregate=aggregate,
            allow_unlike=tuple(allow_unlike) if allow_unlike else None,
        )
        report = runs.report_of(run, settings, jobs)
        more, before = (runs.reports_of(paths, settings, jobs) for paths in (repeat, baseline))
        verdict = judge(report, rules, policy, more, before)
        form = "one-line" if one_line else chosen
        width = common.columns() if output is None and common.is_terminal(sys.stdout) else 0
        text = gate_outputs.written(form, verdict, report, width)
        common.write_result(text + gate_outputs.what_next(form, verdict, run), output)
        files = {"junit": junit, "markdown": markdown, "gitlab-metrics": gitlab_metrics}
        gate_outputs.write_files(files, verdict, report, github)
    raise typer.Exit(verdict.exit_code)
