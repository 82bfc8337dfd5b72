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
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes for the nodes.")] = 1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 6 when anything could not be read.")
    ] = False,
    width: Annotated[int, typer.Option(min=0, help="Columns; 0 = the terminal's.")] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="Without colors.")] = False,
    by: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Add a table by node, rank, cause, step or time. Repeatable."),
    ] = None,
    top: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Rows in these tables and in the table of ranks."),
    ] = None,
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help=f"Analyze only from this time on: {TIME_HELP}"),
    ] = None,
    until: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="Analyze only up to this time."),
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
