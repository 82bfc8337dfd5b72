"""`clusterprof compare A B`: show which cause made steps longer or shorter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from clusterprof.cli import common, runs
from clusterprof.cli.common import (
    AS_JSON,
    JOBS,
    NO_COLOR,
    OUTPUT,
    PROFILE,
    WIDTH,
    OptionalNumber,
    OptionalText,
    declare_option,
)

_FORMATS = ("terminal", "plain", "markdown", "json")

_A = typer.Argument(metavar="A", readable=False, help="Baseline: a recording or a report.")
_B = typer.Argument(metavar="B", readable=False, help="Candidate: a recording or a report.")


def compare(
    a: Annotated[Path, _A],
    b: Annotated[Path, _B],
    fail_on: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="RULE", help="'step.p50_ns: +5%': exit with 3 or 4 as `gate` does. Repeatable."
        ),
    ] = None,
    allow_unlike: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="FIELD", help="Compare although the runs differ in this field. Repeatable."
        ),
    ] = None,
    profile: Annotated[OptionalText, declare_option(PROFILE)] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="terminal, plain, markdown or json.")
    ] = "terminal",
    as_json: Annotated[bool, declare_option(AS_JSON)] = False,
    output: Annotated[
        Optional[Path], declare_option(OUTPUT)  # noqa: UP045
    ] = None,
    width: Annotated[int, declare_option(WIDTH)] = 0,
    no_color: Annotated[bool, declare_option(NO_COLOR)] = False,
    jobs: Annotated[int, declare_option(JOBS)] = 1,
    scheduler: Annotated[OptionalText, declare_option(common.SCHEDULER)] = None,
    scheduler_file: Annotated[OptionalText, declare_option(common.SCHEDULER_FILE)] = None,
    workers: Annotated[OptionalNumber, declare_option(common.WORKERS)] = None,
) -> None:
    """Show which causes changed from run A to run B, and by how much.

    Also shows whether each change is larger than the noise between steps and between runs.
    """
    from clusterprof.cli.gate import build_policy
    from clusterprof.gate import parse_change
    from clusterprof.gate.compare import compare_runs as compared
    from clusterprof.output.renderers.verdicts import documents

    with common.report_errors_as_json(as_json or format_ == "json"):
        format_name = common.choose_format(format_, as_json, _FORMATS)
        settings = common.load_profile(profile)
        cluster = common.choose_cluster(scheduler, scheduler_file, workers)
        rules = [parse_change(text) for text in fail_on or []]
        policy = build_policy(settings, allow_unlike=tuple(allow_unlike) if allow_unlike else None)
        before, after = (runs.load_run([path], settings, jobs, cluster) for path in (a, b))
        result = compared(before, after, rules, policy)
        if format_name == "json":
            text = documents.render_comparison_json(result)
        elif format_name == "markdown":
            text = documents.render_comparison_markdown(result)
        else:
            is_plain = format_name != "terminal" or no_color or output is not None
            color = not is_plain and common.has_color()
            columns = width or common.measure_terminal_columns()
            text = documents.render_comparison_text(result, columns, color)
        common.write_result(text, output)
    raise typer.Exit(0 if result.verdict is None else result.verdict.exit_code)
