"""`clusterprof demo`: the whole job on emulated accelerators, the report beside the truth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from clusterprof.cli import common


def demo(
    scenario: Annotated[
        str,
        typer.Option(
            help="Which fault: storage, cpu, mixed, checkpoint, network, straggler, or clean."
        ),
    ] = "storage",
    keep: Annotated[
        Optional[Path], typer.Option(help="Keep the recording and the truth here.")  # noqa: UP045
    ] = None,
    width: Annotated[int, typer.Option(min=0, help="Columns; 0 = the terminal's.")] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="Without colours.")] = False,
) -> None:
    """Do the whole job on emulated accelerators, in a minute."""
    from clusterprof.demo.beside import beside_truth
    from clusterprof.demo.run import run

    result = run(scenario, keep)
    renderer = common.renderer_for("terminal", common.load_profile(None), width, no_color)
    common.write_result(renderer.render(result.report) + "\n" + beside_truth(result), None)
