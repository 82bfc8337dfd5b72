"""`clusterprof analyze RUN...`: where the device time went, and why what was lost was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from clusterprof.cli import common


def analyze(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help=common.RUN_HELP)],
    format_: Annotated[
        str, typer.Option("--format", help="terminal, plain, json, markdown or html.")
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
) -> None:
    """Say where the GPU time of a recording went, and why."""
    with common.errors_also_as_json(as_json or format_ == "json"):
        chosen = common.chosen_format(format_, as_json)
        common.refuse_terminal(chosen, output)
        settings = common.load_profile(profile)
        report = common.analyse_with(run, settings, jobs)
        renderer = common.renderer_for(chosen, settings, width, no_color or output is not None)
        common.write_result(renderer.render(report), output)
    if strict:
        common.insist_on_all(report)
