"""`clusterprof explain CAUSE`: how a cause is decided, where it is blind, what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterprof.cli import common
from clusterprof.errors import UsageError
from clusterprof.findings import Cause

UNATTRIBUTED = Cause(
    "unattributed",
    "unattributed",
    "Lost time without sufficient evidence for any cause",
    "Not a cause but the honest remainder: device time that was lost while nothing recorded says"
    "\nwhy. A report lists the reasons behind it, and under *Not seen* what would let it say"
    "\nmore; `clusterprof doctor` tells how to switch that on.",
)


def explain(
    cause: Annotated[
        str | None,
        typer.Argument(metavar="CAUSE", help="A cause's id; without it all are listed."),
    ] = None,
) -> None:
    """Print the page of a cause, or list all causes."""
    from clusterprof.detectors.peers import PEER_CAUSES
    from clusterprof.detectors.registry import DETECTORS

    causes = [*(detector.cause for detector in DETECTORS), *PEER_CAUSES]
    if cause is None:
        common.write_result(_listed(causes) + _listed([UNATTRIBUTED]), None)
    elif cause in {known.id for known in causes}:
        from clusterprof.detectors.pages import page

        common.write_result(page(cause).rstrip("\n") + "\n", None)
    elif cause == UNATTRIBUTED.id:
        common.write_result(f"# {cause}: {UNATTRIBUTED.title}\n\n{UNATTRIBUTED.advice}\n", None)
    elif members := [known for known in causes if known.family == cause]:
        heading = f"# {cause}: a family of causes, said when the cause itself cannot be told\n\n"
        common.write_result(heading + _listed(members), None)
    else:
        from clusterprof.profiles import nearest

        hint = nearest(cause, [known.id for known in (*causes, UNATTRIBUTED)])
        raise UsageError(f"there is no cause {cause!r}{hint}", "clusterprof explain lists all")


def _listed(causes: list[Cause]) -> str:
    return "".join(f"{cause.id:<20} {cause.title}\n" for cause in causes)
