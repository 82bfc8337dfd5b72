"""What happened when, in the JSON report: all ranks together, in equal stretches of the run.

Rank by rank it would be as long as the job is wide: `export --to parquet` and the HTML page have
that. So its size does not depend on the job: at most 240 stretches of 16 causes, 20 slow steps and
20 waits. Sums are exact: over the stretches they are the ledger's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from clusterprof.findings import Report
from clusterprof.history import WAITING, History
from clusterprof.renderers.course import Course, course_of
from clusterprof.renderers.json_values import number
from clusterprof.renderers.text_safety import safe_text

MOST_CAUSES, MOST_STEPS, MOST_WAITS = 16, 20, 20
MOST_ENDED = 64
OTHERS = "others"
"""The causes that cost least, together."""
_LONG = 200


def history(report: Report) -> dict[str, Any] | None:
    """Return the history as plain values; None when it was not worked out."""
    found = report.history
    if found is None:
        return None
    who = _who(report)
    longest = sorted(found.waits, key=lambda one: (-one.duration_ns, one.start_ns))[:MOST_WAITS]
    return {
        "started_at_ns": found.started_at_ns,
        "begin_ns": found.begin_ns,
        "stretch_ns": found.stretch_ns,
        "in_step_ns": _columns([rank.in_step_ns for rank in found.ranks], found.stretches),
        "lost": [{"cause": safe_text(cause, _LONG), "ns": ns} for cause, ns in _lost(found)],
        "slow_steps": [
            {
                "number": one.number,
                "start_ns": one.start_ns,
                "duration_ns": one.duration_ns,
                "last_to_come": who(one.rank),
                "lost": [
                    {"cause": safe_text(cause, _LONG), "ns": ns}
                    for cause, ns in one.lost[:MOST_CAUSES]
                ],
            }
            for one in found.slow_steps[:MOST_STEPS]
        ],
        "waits": [
            {
                "start_ns": one.start_ns,
                "duration_ns": one.duration_ns,
                "victim": who(one.victim),
                "culprit": who(one.culprit),
                "cause": safe_text(one.cause, _LONG),
                "step": one.step,
            }
            for one in sorted(longest, key=lambda one: one.start_ns)
        ],
        "course": _course(course_of(report)),
        "ended": [{"rank": who(at), "run_ns": ns} for at, ns in found.ended[:MOST_ENDED]],
        "why_missing": safe_text(found.why_missing, 400),
    }


def _course(found: Course | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "kind": found.kind,
        "start_ns": found.start_ns,
        "end_ns": found.end_ns,
        "level_ratio": number(found.level_ratio),
        "else_ratio": number(found.else_ratio),
    }


def _lost(found: History) -> list[tuple[str, list[int]]]:
    """Return (cause, lost ns of all ranks by stretch), the largest first, few of them."""
    rows: dict[str, list[tuple[int, ...]]] = {}
    for cause, ns in chain.from_iterable(rank.lost for rank in found.ranks):
        rows.setdefault(cause, []).append(ns)
    sums = [(cause, _columns(some, found.stretches)) for cause, some in rows.items()]
    sums.sort(key=lambda line: (-sum(line[1]), line[0] != WAITING, line[0]))
    if len(sums) <= MOST_CAUSES:
        return sums
    kept, rest = sums[: MOST_CAUSES - 1], sums[MOST_CAUSES - 1 :]
    return [*kept, (OTHERS, _columns([tuple(ns) for _, ns in rest], found.stretches))]


def _columns(rows: list[tuple[int, ...]], stretches: int) -> list[int]:
    return [sum(column) for column in zip(*rows)] if rows else [0] * stretches


def _who(report: Report) -> Callable[[int | None], dict[str, Any] | None]:
    def who(at: int | None) -> dict[str, Any] | None:
        if at is None or not 0 <= at < len(report.ranks):
            return None
        rank = report.ranks[at]
        return {"node": safe_text(rank.node, _LONG), "rank": rank.rank, "pid": rank.pid}

    return who
