"""`Report.history` as bytes: shares of equal stretches of the run, by row and cause.

A byte is lost time over the time of the stretch: 255 is all of it, 1 is little but something. Where
the whole would be too large, neighbouring stretches are added up until it is not; sums over the run
come from the ledger and are not touched by any of this.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from clusterprof.findings import Report
from clusterprof.history import History, RankHistory
from clusterprof.renderers.html.rows import Rows
from clusterprof.renderers.text_safety import safe_text

MOST_BYTES = 900_000
"""Of all planes together, before base64 makes four of three."""
MOST_STRETCHES = 1200
MOST_MARKS = 40_000
_MOST_WAITS, _MOST_SLOW = 400, 50
_LEAST_BYTES = 16  # stretches, of the largest of jobs


def history_of(
    report: Report, causes: Sequence[str], rows: Rows, room: int = 1 << 30
) -> dict[str, Any]:
    """Return what the charts over time are drawn from, its planes in at most `room` bytes.

    {"why": reason} when there is nothing.
    """
    history = report.history
    if history is None:
        return {"why": "this analysis did not ask for what happened when"}
    if not history.ranks or history.stretches < 1 or history.stretch_ns < 1:
        return {"why": safe_text(history.why_missing or "no rank had steps", 400)}
    number_of = {cause: at for at, cause in enumerate(causes)}
    lost, in_step = _sums(history, rows, number_of)
    present = lost.any(axis=2)
    merge = _merge(int(present.sum()) + len(rows.rank), history.stretches, room)
    lost, in_step = _merged(lost, merge), _merged(in_step, merge)
    ranks = np.array([max(len(some), 1) for some in rows.members], dtype=float)
    full = ranks[:, None] * history.stretch_ns * merge
    everyone = [at for at, by in enumerate(rows.rank) if by < 0 or rows.by == "rank"]
    return {
        "why": safe_text(history.why_missing, 400),
        "started_at_ms": None if history.started_at_ns is None else history.started_at_ns // 10**6,
        "stretch_s": history.stretch_ns * merge / 1e9,
        "stretches": lost.shape[2],
        "span_s": history.stretch_ns * history.stretches / 1e9,
        "in_step": packed(_bytes(in_step, full)),
        "lost": [
            {"cause": cause, "rows": kept, "bytes": packed(_bytes(lost[kept, cause], full[kept]))}
            for cause in range(len(causes))
            if (kept := np.flatnonzero(present[:, cause]).tolist())
        ],
        "total": _total(lost[everyone], full[everyone]),
        "steps": _steps(history, rows),
        "step_every": history.step_every,
        "waits": _waits(history, number_of),
        "waits_left_out": max(len(history.waits) - _MOST_WAITS, 0),
        "slow_steps": _slow_steps(history, number_of),
    }


def _sums(history: History, rows: Rows, number_of: dict[str, int]) -> tuple[Any, Any]:
    """Add up lost ns by (row, cause, stretch), and ns in steps by (row, stretch)."""
    count = history.stretches
    lost = np.zeros((len(rows.rank), len(number_of), count))
    in_step = np.zeros((len(rows.rank), count))
    for row, members in enumerate(rows.members):
        for at in members:
            if at >= len(history.ranks):
                continue
            one = history.ranks[at]
            in_step[row] += _padded(one.in_step_ns, count)
            for cause, ns in one.lost:
                lost[row, number_of[cause]] += _padded(ns, count)
    return lost, in_step


def _padded(ns: Sequence[int], count: int) -> Any:
    found = np.zeros(count)
    some = np.asarray(ns[:count], dtype=float)
    found[: len(some)] = some
    return found


def _merge(planes: int, stretches: int, room: int) -> int:
    """Return how many stretches share a byte."""
    each = min(room, MOST_BYTES) // max(planes, 1)
    return -(-stretches // max(min(each, MOST_STRETCHES), _LEAST_BYTES))


def _merged(array: Any, merge: int) -> Any:
    if merge == 1:
        return array
    *head, count = array.shape
    short = -count % merge
    padded = np.concatenate([array, np.zeros((*head, short))], axis=-1)
    return padded.reshape(*head, -1, merge).sum(axis=-1)


def _bytes(ns: Any, full: Any) -> Any:
    shares = np.clip(ns / full, 0.0, 1.0)
    scaled = np.rint(shares * 255).astype(np.uint8)
    scaled[(scaled == 0) & (ns > 0)] = 1
    return scaled


def _total(lost: Any, full: Any) -> dict[str, Any]:
    """Return the shares of the whole job by cause and stretch, in 16 bits."""
    sums = lost.sum(axis=0)
    kept = np.flatnonzero(sums.any(axis=1))
    shares = np.clip(sums[kept] / full.sum(), 0.0, 1.0)
    return {"causes": kept.tolist(), "bytes": packed(np.rint(shares * 65535).astype("<u2"))}


def _steps(history: History, rows: Rows) -> list[dict[str, Any]]:
    """Return step marks of every row that is a rank, or of the rank with most of them for all."""
    span = history.stretch_ns * history.stretches
    some = [
        (row, history.ranks[at])
        for row, at in enumerate(rows.rank)
        if 0 <= at < len(history.ranks) and history.ranks[at].step_ends_ns
    ]
    if sum(len(one.step_ends_ns) for _, one in some) <= MOST_MARKS and rows.by == "rank":
        return [{"row": row, "bytes": _marks(one.step_ends_ns, span)} for row, one in some]
    most: RankHistory = max(history.ranks, key=lambda one: len(one.step_ends_ns))
    ends = most.step_ends_ns[:: -(-len(most.step_ends_ns) // MOST_MARKS) or 1]
    return [{"row": -1, "bytes": _marks(ends, span)}] if ends else []


def _marks(ends: Sequence[int], span: int) -> str:
    parts = np.clip(np.asarray(ends, dtype=float) / span, 0.0, 1.0)
    return packed(np.rint(parts * (2**32 - 1)).astype("<u4"))


def _waits(history: History, number_of: dict[str, int]) -> list[list[Any]]:
    """Return [start s, length s, victim, culprit or -1, cause or -1, step or null], by start."""
    count = len(history.ranks)
    longest = sorted(history.waits, key=lambda one: -one.duration_ns)[:_MOST_WAITS]
    return [
        [
            round(one.start_ns / 1e9, 6), round(one.duration_ns / 1e9, 6), one.victim,
            -1 if one.culprit is None or not 0 <= one.culprit < count else one.culprit,
            number_of.get(one.cause, -1), one.step,
        ]
        for one in sorted(longest, key=lambda one: one.start_ns)
        if 0 <= one.victim < count
    ]  # fmt: skip


def _slow_steps(history: History, number_of: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "step": one.number,
            "start_s": round(one.start_ns / 1e9, 6),
            "length_s": round(one.duration_ns / 1e9, 6),
            "rank": one.rank,
            "lost": [[number_of[cause], ns] for cause, ns in one.lost if cause in number_of],
        }
        for one in history.slow_steps[:_MOST_SLOW]
    ]


def packed(array: Any) -> str:
    """Return the bytes of an array in base64."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
