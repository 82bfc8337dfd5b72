"""`clusterprof demo`: record a job on emulated accelerators, and compare the report with
the truth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from clusterprof.cli import common
from clusterprof.cli.common import NO_COLOR, WIDTH, declare_option

_SCENARIOS = ("storage", "cpu", "mixed", "checkpoint", "network", "straggler", "clean")


def demo(
    scenario: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"The fault: {', '.join(_SCENARIOS[:-1])} or {_SCENARIOS[-1]}.",
            autocompletion=common.complete_from(_SCENARIOS),
        ),
    ] = "storage",
    keep: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="DIR", help="Folder in which to keep the recording and the ground truth."
        ),
    ] = None,
    width: Annotated[int, declare_option(WIDTH)] = 0,
    no_color: Annotated[bool, declare_option(NO_COLOR)] = False,
) -> None:
    """Record and analyze a small job with a known fault; needs no GPU."""
    from clusterprof.demo.run import format_truth_comparison, run_scenario

    result = run_scenario(scenario, keep)
    renderer = common.build_renderer("terminal", common.load_profile(None), width, no_color)
    common.write_result(
        renderer.render(result.report) + "\n" + format_truth_comparison(result), None
    )
