"""`clusterprof explain CAUSE`: how a cause is decided, where it is blind, what to do about it."""

from __future__ import annotations

import re
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
        typer.Argument(
            metavar="CAUSE",
            help="Id of a cause or family, a metric, or a rule of a gate; without it all causes.",
        ),
    ] = None,
) -> None:
    """Print the page of a cause or a metric, or list all causes by family."""
    common.write_result(_page(cause), None)


def _page(wanted: str | None) -> str:
    from clusterprof.remedies.metrics import metric_names, metric_page
    from clusterprof.remedies.pages import LEAVES, family_page, listing, page

    if wanted is None:
        return listing() + f"{UNATTRIBUTED.family}:\n  {UNATTRIBUTED.title}\n"
    if wanted == UNATTRIBUTED.id:
        return f"# {wanted}: {UNATTRIBUTED.title}\n\n{UNATTRIBUTED.advice}\n"
    ids = [known.id for known in LEAVES]
    families = list(dict.fromkeys(known.family for known in LEAVES))
    if wanted in ids:
        return page(wanted)
    if wanted in families:
        return family_page(wanted)
    metric = metric_page(re.split(r"[<>=]", wanted, maxsplit=1)[0].strip())
    if metric is not None:
        return metric
    from clusterprof.profiles import nearest

    hint = nearest(wanted, [*ids, *families, UNATTRIBUTED.id, *metric_names()])
    raise UsageError(f"there is no cause {wanted!r}{hint}", "clusterprof explain lists all")
