"""`clusterprof gate RUN...`: pass (0), fail (3) or cannot tell (4) by rules.

It also writes verdicts to stdout, to files, and to the files that a CI runner reads.

It also builds the rules and policy of a gate from its command line and a profile.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clusterprof.cli import common, runs
from clusterprof.cli.common import (
    AS_JSON,
    JOBS,
    OUTPUT,
    OptionalNumber,
    OptionalText,
    declare_option,
)
from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from clusterprof.config import Profile
    from clusterprof.gate import AnyRule, Policy, Verdict
    from clusterprof.report.model import Report


_FORMATS = ("plain", "json", "markdown", "junit")
_Texts = Optional[list[str]]  # noqa: UP045
_File = Optional[Path]  # noqa: UP045
_Files = Optional[list[Path]]  # noqa: UP045

_Run = typer.Argument(metavar="RUN...", readable=False, help=runs.RUN_OR_REPORT_HELP)
_Assert = typer.Option(
    "--assert",
    metavar="RULE",
    help="A rule: 'gpu.busy_ratio >= 70%', or for a change 'step.p50_ns: +5%'. Put 'warn:' before"
    " it for a warning. Repeatable.",
)
_MaxStall = typer.Option(
    metavar="CAUSE=LIMIT",
    help="storage=5%: fail if more of the step time is lost to it. Repeatable.",
)
_MinUtil = typer.Option(
    metavar="LIMIT", help="70%: fail if the devices are busy for less of the step time."
)
_Level = typer.Option(
    metavar="METRIC=LEVEL", help="Level of the rules of a metric: off, warn or error. Repeatable."
)
_Repeat = typer.Option(
    readable=False, metavar="RUN", help="Another run of the same job. Repeatable."
)
_Aggregate = typer.Option(
    metavar="HOW", help="How to combine several runs: median, pessimistic or optimistic."
)
_Baseline = typer.Option(
    readable=False, metavar="RUN", help="Baseline run for rules on changes. Repeatable."
)
_AllowUnlike = typer.Option(
    metavar="FIELD", help="Compare although the runs differ in this field. Repeatable."
)
_MinSteps = typer.Option(min=0, metavar="N", help="With fewer steps the result is: cannot tell.")
_MinCoverage = typer.Option(
    min=0, max=1, metavar="RATIO", help="With less of the time sampled the result is: cannot tell."
)
_OnInconclusive = typer.Option(
    metavar="RESULT", help="If it cannot tell: fail (exit 4), warn or pass (exit 0)."
)
_Format = typer.Option(
    "--format",
    metavar="FORMAT",
    help="plain, json, markdown or junit.",
    autocompletion=common.complete_from(("plain", "json", "markdown", "junit")),
)
_Profile = typer.Option(metavar="NAME", help="Shipped profile (ci), or a file.")
_Markdown = typer.Option(metavar="FILE", help="Also write a Markdown comment.")
_GitlabMetrics = typer.Option(metavar="FILE", help="Also write GitLab metrics.")
_OneLine = typer.Option(
    "--one-line", help="Print one line of ASCII, for the comment of a Slurm job."
)
_Github = typer.Option(
    "--github", help="Write annotations to stderr and a summary to GITHUB_STEP_SUMMARY."
)


def gate(
    run: Annotated[list[Path], _Run],
    assertions: Annotated[_Texts, _Assert] = None,
    max_stall: Annotated[_Texts, _MaxStall] = None,
    min_util: Annotated[OptionalText, _MinUtil] = None,
    level: Annotated[_Texts, _Level] = None,
    repeat: Annotated[_Files, _Repeat] = None,
    aggregate: Annotated[OptionalText, _Aggregate] = None,
    baseline: Annotated[_Files, _Baseline] = None,
    allow_unlike: Annotated[_Texts, _AllowUnlike] = None,
    profile: Annotated[OptionalText, _Profile] = None,
    min_steps: Annotated[Optional[int], _MinSteps] = None,  # noqa: UP045
    min_coverage: Annotated[Optional[float], _MinCoverage] = None,  # noqa: UP045
    on_inconclusive: Annotated[OptionalText, _OnInconclusive] = None,
    format_: Annotated[str, _Format] = "plain",
    as_json: Annotated[bool, declare_option(AS_JSON)] = False,
    one_line: Annotated[bool, _OneLine] = False,
    output: Annotated[_File, declare_option(OUTPUT)] = None,
    junit: Annotated[_File, typer.Option(metavar="FILE", help="Also write JUnit XML.")] = None,
    markdown: Annotated[_File, _Markdown] = None,
    gitlab_metrics: Annotated[_File, _GitlabMetrics] = None,
    github: Annotated[bool, _Github] = False,
    jobs: Annotated[int, declare_option(JOBS)] = 1,
    scheduler: Annotated[OptionalText, declare_option(common.SCHEDULER)] = None,
    scheduler_file: Annotated[OptionalText, declare_option(common.SCHEDULER_FILE)] = None,
    workers: Annotated[OptionalNumber, declare_option(common.WORKERS)] = None,
) -> None:
    """Check a run against rules, alone or against baselines.

    Exit status: 0 = passed, 3 = failed, 4 = cannot tell.
    """
    from clusterprof.gate import judge_runs

    with common.report_errors_as_json(as_json or format_ == "json"):
        format_name = common.choose_format(format_, as_json, _FORMATS)
        settings = common.load_profile(profile)
        cluster = common.choose_cluster(scheduler, scheduler_file, workers)
        requested = RequestedRules(assertions or [], max_stall or [], min_util, level or [])
        rules = build_rules(requested, settings, bool(baseline))
        policy = build_policy(
            settings,
            min_steps=min_steps,
            min_coverage_ratio=min_coverage,
            on_inconclusive=on_inconclusive,
            aggregate=aggregate,
            allow_unlike=tuple(allow_unlike) if allow_unlike else None,
        )
        how = (settings, jobs, cluster)
        report = runs.load_run(run, *how)
        repeats, baselines = runs.load_runs(repeat, *how), runs.load_runs(baseline, *how)
        verdict = judge_runs(report, rules, policy, repeats, baselines)
        output_form = "one-line" if one_line else format_name
        is_screen = output is None and common.is_terminal(sys.stdout)
        width = common.measure_terminal_columns() if is_screen else 0
        text = render_verdict(output_form, verdict, report, width)
        common.write_result(text + format_next_step(output_form, verdict, run), output)
        files = {"junit": junit, "markdown": markdown, "gitlab-metrics": gitlab_metrics}
        write_verdict_files(files, verdict, report, github)
    raise typer.Exit(verdict.exit_code)


SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def render_verdict(form: str, verdict: Verdict, report: Report, width: int = 0) -> str:
    """Render a verdict in one form; text is wrapped at `width` columns (0 = not wrapped)."""
    from clusterprof.output.renderers.verdicts import ci, documents

    if form == "json":
        return documents.render_verdict_json(verdict)
    if form == "junit":
        return ci.render_junit(verdict)
    if form == "markdown":
        return documents.render_verdict_markdown(verdict, report)
    if form == "gitlab-metrics":
        return ci.render_gitlab_metrics(report, verdict)
    if form == "one-line":
        return documents.format_job_comment(verdict, report) + "\n"
    return documents.render_verdict_text(verdict, width)


def format_next_step(form: str, verdict: Verdict, run: Sequence[Path]) -> str:
    """Return the command that explains a failed gate; "" for a stored report, which has the
    reasons.
    """
    if form != "plain" or verdict.outcome != "fail" or not all(path.is_dir() for path in run):
        return ""
    from clusterprof.output.renderers.text.safety import escape_text

    named = " ".join(shlex.quote(str(path)) for path in run)
    return f"Why, and what to do: clusterprof analyze {escape_text(named, 400)}\n"


def write_verdict_files(
    files: Mapping[str, Path | None], verdict: Verdict, report: Report, github: bool
) -> None:
    """Write a verdict in each form into its file, and the output that GitHub reads."""
    for form, path in files.items():
        if path is not None:
            common.write_result(render_verdict(form, verdict, report), path)
    if github:
        from clusterprof.output.renderers.verdicts.ci import format_workflow_commands
        from clusterprof.output.renderers.verdicts.documents import render_verdict_markdown

        # GitHub reads workflow commands on stderr too, so that stdout stays one document.
        sys.stderr.write(format_workflow_commands(verdict))
        sys.stderr.flush()
        _append_summary(render_verdict_markdown(verdict, report))


def _append_summary(text: str) -> None:
    """Append to the file that GitHub names; does nothing without one."""
    from clusterprof.output.renderers.verdicts.ci import trim_step_summary

    name = os.environ.get(SUMMARY_VARIABLE, "")
    if not name:
        return
    path = Path(name)
    try:
        used_bytes = path.stat().st_size if path.exists() else 0
        with open(path, "a", encoding="utf-8") as file:
            file.write(trim_step_summary(text, used_bytes))
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"cannot write {SUMMARY_VARIABLE}={name}: {reason}") from None


_RULE_KEYS = ("assertions", "regressions")
DEFAULT_CHANGE_RULES = ("step.p50_ns: +5%", "lost.ratio: +3pt")
"""Rules of a gate that is given baselines and no rule: steps may not become longer, nor lose more.

The limits are those of the profile `ci`.
"""


@dataclass(frozen=True, slots=True)
class RequestedRules:
    """Rules as given on the command line."""

    assertions: Sequence[str]
    max_stall: Sequence[str]
    min_util: str | None
    levels: Sequence[str]


def build_rules(requested: RequestedRules, profile: Profile, compares: bool) -> tuple[AnyRule, ...]:
    """Build the profile's rules, then those of the command line; an error names its origin.

    compares: there are baselines; without them the profile's rules on changes are left out, with
    them and without any rule DEFAULT_CHANGE_RULES apply.
    Raises: UsageError when no rule is left, or a rule is invalid.
    """
    from clusterprof.gate import (
        parse_any_rule,
        parse_change,
        parse_max_stall,
        parse_min_utilization,
        require_rules,
        with_levels,
    )

    rules = [*_parse_profile_rules(profile, "assertions")]
    if compares:
        rules += _parse_profile_rules(profile, "regressions")
    rules += [parse_any_rule(text) for text in requested.assertions]
    rules += [parse_max_stall(text) for text in requested.max_stall]
    if requested.min_util is not None:
        rules.append(parse_min_utilization(requested.min_util))
    if compares and not rules:
        rules = [parse_change(text) for text in DEFAULT_CHANGE_RULES]
    if requested.levels:
        rules = list(with_levels(rules, requested.levels))
    require_rules(rules)  # checked before the analysis, which takes longer
    return tuple(rules)


def _parse_profile_rules(profile: Profile, key: str) -> Iterator[AnyRule]:
    from clusterprof.gate import parse_any_rule, parse_change

    for text in profile.values[f"gate.{key}"]:
        try:
            yield parse_change(text) if key == "regressions" else parse_any_rule(text)
        except UsageError as error:
            origin = profile.origins[f"gate.{key}"]
            raise UsageError(f"{origin}: {error.message}", error.remedy) from None


def build_policy(profile: Profile, **overrides: Any) -> Policy:
    """Build the profile's policy, overridden by the given values that are not None.

    Raises: UsageError for an unknown value or field.
    """
    from clusterprof.config import format_suggestion
    from clusterprof.gate import AGGREGATES, Policy, validate_allowed_fields

    values: dict[str, Any] = {
        name: value for name, value in profile.section("gate").items() if name not in _RULE_KEYS
    }
    values |= {name: value for name, value in overrides.items() if value is not None}
    for option, choices in (
        ("on_inconclusive", ("fail", "warn", "pass")),
        ("aggregate", AGGREGATES),
    ):
        word = values[option]
        if word not in choices:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} {word!r} is unknown{format_suggestion(word, choices)}")
    values["allow_unlike"] = validate_allowed_fields(values["allow_unlike"])
    return Policy(**values)
