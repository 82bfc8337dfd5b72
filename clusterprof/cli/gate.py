"""`clusterprof gate RUN...`: pass (0), fail (3) or cannot tell (4) by rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clusterprof.cli import common, runs

if TYPE_CHECKING:
    pass

_FORMATS = ("plain", "json", "markdown", "junit")


def gate(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help=runs.RUN_HELP)],
    assertions: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--assert",
            help="A rule: 'gpu.busy_ratio >= 70%', or on a change 'step.p50_ns: +5%'; with"
            " 'warn:' before it for a warning. Repeatable.",
        ),
    ] = None,
    max_stall: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="storage=5%: no more of the time in steps is lost to it. Repeatable."),
    ] = None,
    min_util: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="70%: devices are busy for no less of the time in steps."),
    ] = None,
    level: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="METRIC=off, warn or error: for rules on it. Repeatable."),
    ] = None,
    repeat: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(metavar="RUN", help="One more run of the same. Repeatable."),
    ] = None,
    aggregate: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of several runs: median, pessimistic or optimistic."),
    ] = None,
    baseline: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(metavar="RUN", help="What rules on changes compare with. Repeatable."),
    ] = None,
    allow_unlike: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="FIELD", help="Compare although the runs differ in it. Repeatable."),
    ] = None,
    profile: Annotated[
        Optional[str], typer.Option(help="Shipped profile (ci), or a file.")  # noqa: UP045
    ] = None,
    min_steps: Annotated[
        Optional[int], typer.Option(min=0, help="Fewer steps: cannot tell.")  # noqa: UP045
    ] = None,
    min_coverage: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0, max=1, help="A smaller share of time with samples: cannot tell."),
    ] = None,
    on_inconclusive: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="When it cannot tell: fail (exit 4), warn or pass (exit 0)."),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="plain, json, markdown or junit.")
    ] = "plain",
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    one_line: Annotated[
        bool, typer.Option("--one-line", help="One line of ASCII, for a job's comment.")
    ] = False,
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", help="Write to this file.")  # noqa: UP045
    ] = None,
    junit: Annotated[
        Optional[Path], typer.Option(help="Write JUnit XML to this file too.")  # noqa: UP045
    ] = None,
    markdown: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write a pull request's comment to this file too."),
    ] = None,
    gitlab_metrics: Annotated[
        Optional[Path], typer.Option(help="Write GitLab's metrics to this file too.")  # noqa: UP045
    ] = None,
    github: Annotated[
        bool,
        typer.Option("--github", help="Annotations on stderr, and GITHUB_STEP_SUMMARY."),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the nodes.")] = 1,
) -> None:
    """Test a run, by itself or beside baselines: exit 0 passed, 3 failed, 4 cannot tell."""
    from clusterprof.cli import gate_outputs, gate_rules
    from clusterprof.gate import judge

    with common.errors_also_as_json(as_json or format_ == "json"):
        chosen = common.chosen_format(format_, as_json, _FORMATS)
        settings = common.load_profile(profile)
        shorthands = gate_rules.Asked(assertions or [], max_stall or [], min_util, level or [])
        rules = gate_rules.rules_of(shorthands, settings, bool(baseline))
        policy = gate_rules.policy_of(
            settings,
            min_steps=min_steps,
            min_coverage_ratio=min_coverage,
            on_inconclusive=on_inconclusive,
            aggregate=aggregate,
            allow_unlike=tuple(allow_unlike) if allow_unlike else None,
        )
        report = runs.report_of(run, settings, jobs)
        more, before = (
            [runs.report_of([path], settings, jobs) for path in paths or []]
            for paths in (repeat, baseline)
        )
        verdict = judge(report, rules, policy, more, before)
        form = "one-line" if one_line else chosen
        common.write_result(gate_outputs.written(form, verdict, report), output)
        files = {"junit": junit, "markdown": markdown, "gitlab-metrics": gitlab_metrics}
        gate_outputs.write_files(files, verdict, report, github)
    raise typer.Exit(verdict.exit_code)
