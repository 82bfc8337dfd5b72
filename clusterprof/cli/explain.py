"""`clusterprof explain CAUSE`: how a cause is decided, where it is blind, what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterprof.cli import common


def explain(
    cause: Annotated[
        str | None,
        typer.Argument(metavar="CAUSE", help="A cause's id; without it all are listed."),
    ] = None,
) -> None:
    """Print the page of a cause, or list all causes."""
    from clusterprof.detectors.registry import DETECTORS

    known = {detector.cause.id: detector.cause for detector in DETECTORS}
    if cause is None:
        lines = [f"{id_:<22} {found.title}\n" for id_, found in known.items()]
        common.write_result("".join(lines), None)
        return
    if cause not in known:
        from clusterprof.errors import UsageError
        from clusterprof.profiles import nearest

        raise UsageError(
            f"there is no cause {cause!r}{nearest(cause, known)}", "clusterprof explain lists all"
        )
    from clusterprof.detectors.pages import page

    common.write_result(page(cause).rstrip("\n") + "\n", None)
