"""`clusterprof compare A B`: which cause made steps longer or shorter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from clusterprof.cli import common, runs

_FORMATS = ("terminal", "plain", "markdown", "json")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The run before: recording or report.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The run after.")],
    fail_on: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A rule such as 'step.p50_ns: +5%': exit 3 or 4 as gate. Repeatable."),
    ] = None,
    allow_unlike: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="FIELD", help="The runs may differ in it. Repeatable."),
    ] = None,
    profile: Annotated[
        Optional[str], typer.Option(help="Shipped profile, or a file.")  # noqa: UP045
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="terminal, plain, markdown or json.")
    ] = "terminal",
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", help="Write to this file.")  # noqa: UP045
    ] = None,
    width: Annotated[int, typer.Option(min=0, help="Columns; 0 = the terminal's.")] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="Without colours.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the nodes.")] = 1,
) -> None:
    """Say which cause changed from run A to run B, and whether chance explains it."""
    from clusterprof.cli.gate_rules import policy_of
    from clusterprof.gate import parse_change
    from clusterprof.gate.compare import compare as compared
    from clusterprof.verdicts import comparison

    with common.errors_also_as_json(as_json or format_ == "json"):
        chosen = common.chosen_format(format_, as_json, _FORMATS)
        settings = common.load_profile(profile)
        rules = [parse_change(text) for text in fail_on or []]
        policy = policy_of(settings, allow_unlike=tuple(allow_unlike) if allow_unlike else None)
        before, after = (runs.report_of([path], settings, jobs) for path in (a, b))
        found = compared(before, after, rules, policy)
        if chosen == "json":
            text = comparison.comparison_json(found)
        elif chosen == "markdown":
            text = comparison.markdown(found)
        else:
            color = chosen == "terminal" and not no_color and output is None and common.has_color()
            text = comparison.terminal(found, width or common.columns(), color)
        common.write_result(text, output)
    raise typer.Exit(0 if found.verdict is None else found.verdict.exit_code)
