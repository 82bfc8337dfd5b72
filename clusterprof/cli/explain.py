"""`clusterprof explain CAUSE`: show how a cause is detected, its blind spots, and what to
do.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from clusterprof.cli import common
from clusterprof.errors import UsageError

_UNATTRIBUTED = "unattributed"
_UNATTRIBUTED_TITLE = "Lost time without sufficient evidence for any cause"
_UNATTRIBUTED_PAGE = (
    "Not a cause but the remainder: lost device time that nothing in the recording explains."
    "\nA report lists the reasons, and under *Not seen* what would have to be recorded to"
    "\nexplain more; `clusterprof doctor` shows how to enable that."
)


_WHERE_PAGE = """\
# where: the line of code in which the time of a finding was lost

    WHERE  train.py:42 in augment → PIL/Image.py:2450 resize: 71 % ± 4 of it

While the job runs, Python stacks of the training thread and of the data workers are sampled. A
sample that falls into lost device time carries a part of it: samples of the training thread, or
of the worker whose batch was awaited. Lines are those of the rank that caused the loss.

* The first line is the innermost one of your own code: outside the standard library and outside
  installed packages. Behind the arrow is the line of a library that it called.
* 71 % is the line's part of the time lost to this finding. ± 4 is half of the 95 % interval,
  from the number of samples. Lines below their error may be chance.
* "in the data loader's transform Resize" is the stage of the loader in which the line ran.
* "more than its peers": the lines in which the late rank spends time that the others do not
  spend.
* A sample sees Python code only. Time in C code counts for the Python line that called it.

There is no WHERE where no stack was sampled during the loss. `analyze --by line` sums all
findings, `--json` has all lines, `explain flame-graph` explains the chart of the HTML report.
"""
_FLAME_GRAPH_PAGE = """\
# flame-graph: the chart of lost device time by stack in the HTML report

Each box is a line of code. The box above it is the line that called it, the boxes below it are
what it called. The width is lost device time while the line ran, in the line or in what it
called. It is not CPU time: code that runs while the device computes has no width. Order from
left to right is by size, not by time.

* Read from the top: follow the widest boxes down until a box of your own code (strong color).
  It is the place to change. Pale boxes are libraries. The color is that of the cause that lost
  most in the box.
* A click, or Enter, shows only what is below a box. Escape shows everything. Arrow keys move.
* Cause and rank filter the graph, and so does a cause or node that is chosen elsewhere on the
  page.
* "Compare with others" shows a rank and the mean of all other ranks of the job together. Red:
  the rank lost more there. Blue: less. Gray: the same.
* The search marks boxes by function or file, and prints their part of the graph.
* "stack not known" is lost time in which no stack could be read.

`export --to speedscope` and `--to collapsed` write the same stacks for other viewers.
"""
_LIFE_PAGE = """\
# life: the wall time of all devices, from submission to the last record, over all restarts

    clusterprof analyze first/ second/ --section life --queued-at 2026-01-31T12:00:00

* in the queue: from submission to the start of the job; not known unless it is stated.
* starting up, starting up again: to the first step of an attempt, and what its first steps lost to
  compiling and warm-up.
* down between attempts: from the last record of a rank to its next start.
* hung, after the last step, not measured: as in the ledger.
* checkpoints; evaluation, logging: what steps lost to them, and all of them after the last step.
  Evaluations that have a span count in full.
* lost to other causes: the rest of the time lost in steps; the findings name the causes.
* training done again: productive time of steps that a later attempt did again, because they came
  after its checkpoint. Known from the counter of Adam, or from `clusterprof.step(number)`.
* training: productive time of all other steps.

The parts add up to wall time times devices, to the nanosecond. What is not known has no time, but a
reason; it is inside another part then.
"""
_TOPICS = {"where": _WHERE_PAGE, "flame-graph": _FLAME_GRAPH_PAGE, "life": _LIFE_PAGE}
"""Parts of a report that have a page; the first line of a page is its title."""


def _complete_name(incomplete: str) -> list[str]:
    from clusterprof.analysis.advice.pages import CAUSES_WITH_PAGE

    ids = [known.id for known in CAUSES_WITH_PAGE]
    return common.complete_from((*ids, *_TOPICS))(incomplete)


def explain(
    cause: Annotated[
        str | None,
        typer.Argument(
            metavar="CAUSE",
            help="A cause, a family of causes, a metric, a name of evidence, a gate rule, where,"
            " flame-graph, or life."
            " Default: list all.",
            autocompletion=_complete_name,
        ),
    ] = None,
) -> None:
    """Print the page of a cause, a metric or a part of a report, or list all causes."""
    common.write_result(_find_page(cause), None)


def _find_page(wanted: str | None) -> str:
    from clusterprof.analysis.advice.evidence_names import build_evidence_page, list_evidence_names
    from clusterprof.analysis.advice.pages import (
        CAUSES_WITH_PAGE,
        build_cause_page,
        build_family_page,
        build_metric_page,
        format_cause_list,
        list_metric_names,
    )

    if wanted is None:
        titles = [page.partition("\n")[0][2:].split(": ", 1) for page in _TOPICS.values()]
        topics = "".join(f"  {name:<21} {title}\n" for name, title in titles)
        rest = f"{_UNATTRIBUTED}:\n  {_UNATTRIBUTED_TITLE}\n"
        return f"{format_cause_list()}{rest}parts of a report:\n{topics}"
    if wanted.lower() in _TOPICS:
        return _TOPICS[wanted.lower()]
    if wanted == _UNATTRIBUTED:
        return f"# {wanted}: {_UNATTRIBUTED_TITLE}\n\n{_UNATTRIBUTED_PAGE}\n"
    ids = [known.id for known in CAUSES_WITH_PAGE]
    families = list(dict.fromkeys(known.family for known in CAUSES_WITH_PAGE))
    if wanted in ids:
        return build_cause_page(wanted)
    if wanted in families:
        return build_family_page(wanted)
    metric = build_metric_page(re.split(r"[<>=]", wanted, maxsplit=1)[0].strip())
    if metric is not None:
        return metric
    evidence = build_evidence_page(wanted)
    if evidence is not None:
        return evidence
    from clusterprof.config import format_suggestion

    hint = format_suggestion(
        wanted,
        [
            *(*ids, *families, *_TOPICS, _UNATTRIBUTED),
            *(*list_metric_names(), *list_evidence_names()),
        ],
    )
    raise UsageError(f"unknown cause {wanted!r}{hint}", "`clusterprof explain` lists all causes")
