"""`clusterprof analyze RUN...`: show where the device time went, and why device time was
lost.

This module declares the options for typer; `cli.runs` parses usual command lines without
it, and runs the analysis. A test keeps both consistent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from clusterprof.cli import common, runs
from clusterprof.cli.runs import TIME_HELP

_JOBS = typer.Option(min=1, metavar="N", help="Number of processes that analyze the nodes.")
_WIDTH = typer.Option(min=0, metavar="N", help="Columns of the output; 0 = terminal width.")


def analyze(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help=common.RUN_HELP)],
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help=", ".join(common.FORMATS) + ".")
    ] = "terminal",
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", metavar="FILE", help="Write to this file.")  # noqa: UP045
    ] = None,
    profile: Annotated[
        Optional[str], typer.Option(metavar="NAME", help="Name of a shipped profile, or a file.")  # noqa: UP045
    ] = None,
    jobs: Annotated[int, _JOBS] = 1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 6 if any input could not be read.")
    ] = False,
    width: Annotated[int, _WIDTH] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="Print without colors.")] = False,
    by: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="WHAT", help="Add a table by node, rank, cause, step or time. Repeatable."
        ),
    ] = None,
    top: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, metavar="N", help="Rows in these tables and in the table of ranks."),
    ] = None,
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help=f"Analyze only the time from here on: {TIME_HELP}"),
    ] = None,
    until: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="Analyze only the time before this."),
    ] = None,
    steps: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="A:B", help="Analyze only steps A to B - 1 of every rank."),
    ] = None,
) -> None:
    """Show where the GPU time of a recording went, and why."""
    runs.run_analysis(
        run,
        format_,
        as_json,
        output,
        profile,
        jobs,
        strict,
        width,
        no_color,
        by,
        top,
        since,
        until,
        steps,
    )
