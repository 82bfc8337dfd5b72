"""What the page draws from: one JSON document, small whatever the size of the job.

Ranks have a column per quantity. What is drawn over time has a *row* per rank, or per node where
there are more ranks than can be looked at (`rows.py`), and its numbers are bytes (`planes.py`).
Amounts in words come from Python and are exact; what the page reads out of a chart is rounded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from clusterprof.findings import UNATTRIBUTED, Finding, Report
from clusterprof.history import WAITING
from clusterprof.renderers import whose
from clusterprof.renderers.html.palette import colour
from clusterprof.renderers.html.planes import history_of, packed
from clusterprof.renderers.html.rows import Rows, rows_of
from clusterprof.renderers.text_safety import safe_text

_NAME = 80  # characters of a name of a machine
_TITLES = {
    UNATTRIBUTED: "lost without sufficient evidence of a cause",
    WAITING: "waiting for other ranks: whose fault it was stands in the findings",
}
_MOST_CULPRITS = 64  # of a finding, marked in charts
_OF_A_FINDING = 4  # of them with a row of their own
_MOST_CHARACTERS = 1_700_000  # of the document
_SPARSE = 3  # values that are not nothing take so much room as all would with one each
_FULL = 65535


def block(report: Report) -> str:
    """Return the document as JSON that cannot end the script element it stands in."""
    text = _json(document(report))
    for character in "<>&":  # all else that could matter is not ASCII, and escaped already
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def document(report: Report) -> dict[str, Any]:
    """Return the document as plain values."""
    names = node_names(report)
    number_of = {name: at for at, name in enumerate(names)}
    nodes = [number_of[rank.node] for rank in report.ranks]
    causes = cause_ids(report)
    chiefs = [_chiefs(finding, report) for finding in report.findings]
    rows = rows_of(nodes, len(names), _worth_a_row(report, chiefs))
    made = {
        "version": 1,
        "causes": _causes(report, causes),
        "nodes": [_name(name) for name in names],
        "ranks": _ranks(report, nodes),
        "felt": _matrix([rank.buckets for rank in report.ranks], causes),
        "caused": _matrix([rank.caused for rank in report.ranks], causes),
        "compared": any(rank.caused for rank in report.ranks),
        "findings": [
            {
                "cause": causes.index(finding.cause.id),
                "outside": finding.outside_steps,
                "culprits": some[:_MOST_CULPRITS],
                "culprit_count": len(some),
            }
            for finding, some in zip(report.findings, chiefs)
        ],
        "rows": {"by": rows.by, "first": rows.first, "last": rows.last, "rank": rows.rank},
    }
    room = (_MOST_CHARACTERS - len(_json(made))) * 3 // 4  # four characters are three bytes
    made["history"] = history_of(report, causes, rows, room)
    return made


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def node_names(report: Report) -> list[str]:
    """Return the nodes that have ranks, in the order of their first."""
    return list(dict.fromkeys(rank.node for rank in report.ranks))


def cause_ids(report: Report) -> list[str]:
    """Return every cause of any chart, that which cost most first, the nameless ones last."""
    sums: dict[str, int] = {finding.cause.id: 0 for finding in report.findings}
    for rank in report.ranks:
        for cause, ns in rank.buckets:
            sums[cause] = sums.get(cause, 0) + ns
    if report.history is not None:
        for one in report.history.ranks:
            for cause, _ in one.lost:
                sums.setdefault(cause, 0)
        for wait in report.history.waits:
            if wait.cause:
                sums.setdefault(wait.cause, 0)
    last = {WAITING: 1, UNATTRIBUTED: 2}
    return sorted(sums, key=lambda cause: (last.get(cause, 0), -sums[cause], cause))


def _causes(report: Report, ids: Sequence[str]) -> list[dict[str, Any]]:
    about = {finding.cause.id: finding.cause for finding in report.findings}
    found = []
    for cause in ids:
        known = about.get(cause)
        family, tone = colour(cause, known.family if known else "")
        title = known.title if known else _TITLES.get(cause, "")
        found.append(
            {"id": _name(cause), "family": family, "tone": tone, "title": safe_text(title)}
        )
    return found


def _ranks(report: Report, nodes: Sequence[int]) -> dict[str, Any]:
    ranks = report.ranks
    return {
        "node": list(nodes),
        "rank": [rank.rank for rank in ranks],
        "pid": [rank.pid if rank.rank is None else 0 for rank in ranks],
        "lost_ns": _floats([rank.lost_ns for rank in ranks]),
        "caused_ns": _floats([sum(ns for _, ns in rank.caused) for rank in ranks]),
        "in_step_ns": _floats([rank.in_step_ns for rank in ranks]),
    }


def _matrix(buckets: Sequence[Sequence[tuple[str, int]]], causes: Sequence[str]) -> dict[str, Any]:
    """Return ns by cause and rank in 16 bits, of the largest; with "ranks" where few have any."""
    number_of = {cause: at for at, cause in enumerate(causes)}
    ns = np.zeros((len(causes), len(buckets)))
    for rank, of_rank in enumerate(buckets):
        for cause, amount in of_rank:
            if cause in number_of:
                ns[number_of[cause], rank] += amount
    largest = float(ns.max()) if ns.size else 0.0
    if largest <= 0:
        return {"full_ns": 0, "causes": []}
    scaled = np.rint(ns / largest * _FULL).astype("<u2")
    scaled[(scaled == 0) & (ns > 0)] = 1  # little is not nothing
    found: list[dict[str, Any]] = []
    for at, values in enumerate(scaled):
        some = np.flatnonzero(values)
        if len(some) * _SPARSE > len(buckets):
            found.append({"cause": at, "bytes": packed(values)})
        elif len(some):
            found.append({"cause": at, "ranks": some.tolist(), "bytes": packed(values[some])})
    return {"full_ns": round(largest), "causes": found}


def _floats(ns: Sequence[int]) -> str:
    return packed(np.array(ns, dtype="<f8"))


def _chiefs(finding: Finding, report: Report) -> list[int]:
    """Return the places of a finding's chief culprits in `Report.ranks`."""
    places = {(rank.node, rank.rank, rank.device): at for at, rank in enumerate(report.ranks)}
    keys = ((one.node, one.rank, one.device) for one in whose.chief_culprits(finding))
    found = (places.get(key) for key in keys)
    return [place for place in found if place is not None]


def _worth_a_row(report: Report, chiefs: Sequence[Sequence[int]]) -> list[int]:
    """Return ranks that are drawn by themselves even where nodes are: culprits, then those of the
    longest waits."""
    wanted = [at for some in chiefs for at in some[:_OF_A_FINDING]]
    waits = report.history.waits if report.history is not None else ()
    for wait in sorted(waits, key=lambda one: -one.duration_ns)[: Rows.EXTRA]:
        wanted += [wait.victim] if wait.culprit is None else [wait.culprit, wait.victim]
    return [at for at in dict.fromkeys(wanted) if 0 <= at < len(report.ranks)][: Rows.EXTRA]


def _name(name: str) -> str:
    return safe_text(name, _NAME)
