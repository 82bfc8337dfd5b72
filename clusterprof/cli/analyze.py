"""`clusterprof analyze RUN...`: where the device time went, and why what was lost was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from clusterprof.cli import analysing, common
from clusterprof.cli.part import TIME_HELP


def analyze(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help=common.RUN_HELP)],
    format_: Annotated[
        str, typer.Option("--format", help="One of: " + ", ".join(common.FORMATS) + ".")
    ] = "terminal",
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", help="Write to this file.")  # noqa: UP045
    ] = None,
    profile: Annotated[
        Optional[str], typer.Option(help="Shipped profile, or a file.")  # noqa: UP045
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the nodes.")] = 1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 6 when anything could not be read.")
    ] = False,
    width: Annotated[int, typer.Option(min=0, help="Columns; 0 = the terminal's.")] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="Without colours.")] = False,
    by: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A table by node, rank, cause, step or time; several times."),
    ] = None,
    top: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Rows of those tables, and of that of ranks."),
    ] = None,
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help=f"Only from then on: {TIME_HELP}"),
    ] = None,
    until: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="Only up to then."),
    ] = None,
    steps: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="A:B", help="Only steps A to B - 1 of every rank."),
    ] = None,
) -> None:
    """Say where the GPU time of a recording went, and why."""
    analysing.run(
        run, format_, as_json, output, profile, jobs, strict, width, no_color, by, top,
        since, until, steps,
    )  # fmt: skip
