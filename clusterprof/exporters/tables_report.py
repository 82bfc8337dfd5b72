"""The tables that are made of the report: the ledger of every rank, and the findings."""

from __future__ import annotations

import math
from typing import Any

from clusterprof.exporters.base import Run
from clusterprof.findings import Finding, RankLedger
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human

_LONG = 4096
_UNMEASURED, _OUTSIDE, _PRODUCTIVE, _LOST = "unmeasured", "outside", "productive", "lost"
_CAUSED = "caused"


def ledger(run: Run) -> list[tuple[Any, ...]]:
    """Return a row per rank, part and cause.

    Per rank the parts unmeasured, outside, productive and lost add up to its window; `caused` tells
    of the same lost time whose cause it was, and is no further part of it.
    """
    emulated = {rank.place: rank.emulated for node in run.nodes for rank in node.ranks}
    rows: list[tuple[Any, ...]] = []
    for place, rank in enumerate(run.report.ranks):
        who = (
            safe_text(rank.node, _LONG), rank.rank, rank.pid, safe_text(rank.device, _LONG),
            emulated.get(place, run.report.emulated), safe_text(rank.source, _LONG),
        )  # fmt: skip
        rows += [(*who, part, safe_text(cause, _LONG), ns) for part, cause, ns in _parts(rank)]
    whole = run.report.emulated
    rows += [
        ("", None, None, "", whole, "", _CAUSED, safe_text(cause, _LONG), ns)
        for cause, ns in run.report.nobody
    ]
    return rows


def _parts(rank: RankLedger) -> list[tuple[str, str, int]]:
    return [
        (_UNMEASURED, "", rank.unmeasured_ns),
        (_PRODUCTIVE, "", rank.productive_ns),
        *((_OUTSIDE, cause, ns) for cause, ns in rank.outside_buckets),
        *((_LOST, cause, ns) for cause, ns in rank.buckets),
        *((_CAUSED, cause, ns) for cause, ns in rank.caused),
    ]


def findings(run: Run) -> list[tuple[Any, ...]]:
    """Return a row per finding, with its first culprit, in the order of the report."""
    return [_finding(one) for one in run.report.findings]


def _finding(one: Finding) -> tuple[Any, ...]:
    cause, first = one.cause, one.culprits[0] if one.culprits else None
    evidence = "; ".join(
        f"{item.name} {human(item.value, item.unit)} {item.note}".strip() for item in one.evidence
    )
    advice = one.advice[0].what if one.advice else cause.advice
    return (
        *(safe_text(word, _LONG) for word in (cause.id, cause.family, cause.title)),
        one.lost_ns, _number(one.share_ratio), one.recoverable_ns, _number(one.confidence_ratio),
        safe_text(one.grade, _LONG), one.upper_bound, one.outside_steps,
        safe_text(first.node, _LONG) if first else "",
        first.rank if first else None,
        safe_text(first.device, _LONG) if first else "",
        safe_text(first.resource, _LONG) if first else "",
        len(one.culprits), safe_text(evidence, _LONG), safe_text(advice, _LONG),
    )  # fmt: skip


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
