"""`clusterprof dump PATH...`: any recording, damaged or growing, as JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clusterprof.cli import common


def dump(
    path: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Recordings, nodes' folders, or files of them."),
    ],
) -> None:
    """Print what a recording holds, as JSON lines."""
    from clusterprof.trace.dump import dump as lines_of

    for line in lines_of(*path):
        common.write_line(line)
