"""`clusterprof explain CAUSE`: show how a cause is detected, its blind spots, and what to
do.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from clusterprof.cli import common
from clusterprof.errors import UsageError
from clusterprof.report.model import Cause

UNATTRIBUTED_CAUSE = Cause(
    "unattributed",
    "unattributed",
    "Lost time without sufficient evidence for any cause",
    "Not a cause but the remainder: lost device time that nothing in the recording explains."
    "\nA report lists the reasons, and under *Not seen* what would have to be recorded to"
    "\nexplain more; `clusterprof doctor` shows how to enable that.",
)


def explain(
    cause: Annotated[
        str | None,
        typer.Argument(
            metavar="CAUSE",
            help="A cause, a family of causes, a metric, or a gate rule. Default: list all causes.",
        ),
    ] = None,
) -> None:
    """Print the page of a cause or a metric, or list all causes."""
    common.write_result(_find_page(cause), None)


def _find_page(wanted: str | None) -> str:
    from clusterprof.analysis.advice.pages import (
        CAUSES_WITH_PAGE,
        build_cause_page,
        build_family_page,
        build_metric_page,
        format_cause_list,
        list_metric_names,
    )

    if wanted is None:
        return format_cause_list() + f"{UNATTRIBUTED_CAUSE.family}:\n  {UNATTRIBUTED_CAUSE.title}\n"
    if wanted == UNATTRIBUTED_CAUSE.id:
        return f"# {wanted}: {UNATTRIBUTED_CAUSE.title}\n\n{UNATTRIBUTED_CAUSE.advice}\n"
    ids = [known.id for known in CAUSES_WITH_PAGE]
    families = list(dict.fromkeys(known.family for known in CAUSES_WITH_PAGE))
    if wanted in ids:
        return build_cause_page(wanted)
    if wanted in families:
        return build_family_page(wanted)
    metric = build_metric_page(re.split(r"[<>=]", wanted, maxsplit=1)[0].strip())
    if metric is not None:
        return metric
    from clusterprof.config import format_suggestion

    hint = format_suggestion(wanted, [*ids, *families, UNATTRIBUTED_CAUSE.id, *list_metric_names()])
    raise UsageError(f"unknown cause {wanted!r}{hint}", "`clusterprof explain` lists all causes")
