"""What a batch costs beyond the wait for it: hidden behind the work of the step before.

A wait for data is the end of a production that began long before. Without a cause all of its part
of that production is gone, the hidden one too, and the wait is shorter by as much:

    production of the batch    60 storage + 40 decoding = 100, of which 30 hidden behind the step
    wait 70                    42 storage + 28 decoding
    without storage            production 40, wait 10: 60 sooner, 42 of the wait and 18 hidden

Lost time is shared out as it was seen (42 and 28); only what a fix would win counts the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.hidden_syncs import asked_for
from clusterprof.attribution.partial import SHARE
from clusterprof.timeline.feeding_waits import distinct, fetches_of, waits_of
from clusterprof.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_DATA_WAIT,
    PHASE_SPINNING,
    Float,
    Int,
    Lost,
    Rank,
)

EVERY = "every cause"
HIDDEN = (
    "checkpoint",
    "eval-host",
    "h2d-copy",
    "h2d-sync",
    "launch-recompile",
    "launch-alloc",
    "launch-bound",
    "cpu-gc",
    "cpu-gil",
    "cpu-loader-config",
    "storage-local",
    "storage-contention",
    "storage-remote",
    "storage-client-queue",
    "storage-metadata",
    "storage-object",
    "storage-cold-cache",
    "cpu-preprocess",
    "cpu-throttled",
    "cpu-contention",
    "cpu-memory",
    "storage",
    "cpu",
    EVERY,
)
"""Causes that a production is made of, and all of them at once."""


IN_BATCHES = frozenset(HIDDEN[10:-1])
"""Those that batches are late for."""
CHIEF_RATIO = 0.5


def hidden_ns(rank: Rank, lost: Lost, shares: Mapping[str, Int]) -> dict[int, Int]:
    """Return number in `HIDDEN` -> ns of each piece: how much sooner it would have ended without
    the cause, beyond what it lost to it.

    `shares` are those of the pieces, in 1/SHARE; together with them no more than the piece.
    """
    asked = [(number, shares[cause]) for number, cause in enumerate(HIDDEN) if cause in shares]
    asked = [(number, share) for number, share in asked if share.any()]
    if not asked or not rank.marked:
        return {}
    longer = _longer(rank, lost)
    if longer is None:
        longer = np.ones(lost.lost_ns.size)
    closes, syncs = _closes(lost, shares), asked_for(rank, lost, shares)
    out, most = {}, np.zeros(lost.lost_ns.size)
    for number, share in asked:
        part = share / SHARE
        if HIDDEN[number] in IN_BATCHES:
            whole = np.minimum(part * longer, 1.0)
        else:  # what is left of a piece goes with all of its causes, and all of it with its chief
            whole = np.where(closes & (part >= CHIEF_RATIO), 1.0, part / _claimed(shares, closes))
        more = np.rint(lost.lost_ns * (whole - part))
        more = np.minimum(more + syncs.get(HIDDEN[number], 0), np.rint(lost.lost_ns * (1 - part)))
        most = np.maximum(most, more)
        if more.any():
            out[number] = more.astype(np.int64)
    # Together no more than the piece: most of what one closes others claim themselves.
    left = lost.lost_ns - np.rint(lost.lost_ns * (sum(shares.values()) / SHARE))
    most = np.minimum(most, left).astype(np.int64)
    if most.any():
        out[HIDDEN.index(EVERY)] = most
    return out


def _closes(lost: Lost, shares: Mapping[str, Int]) -> NDArray[np.bool_]:
    """Return where a piece that is no wait for data or other ranks closes with its causes."""
    out = np.isin(lost.phase, (PHASE_DATA_WAIT, PHASE_COLLECTIVE, PHASE_SPINNING), invert=True)
    claimed = sum(shares.values(), start=np.zeros(lost.lost_ns.size, np.int64))
    return out & (claimed >= CHIEF_RATIO * SHARE)


def _claimed(shares: Mapping[str, Int], closes: NDArray[np.bool_]) -> Float:
    """Return which part of each piece that closes its causes claimed; 1 of the others."""
    claimed = sum(shares.values(), start=np.zeros(closes.size, np.int64)) / SHARE
    return np.where(closes, claimed, 1.0)


def _longer(rank: Rank, lost: Lost) -> Float | None:
    """Return how many times as long as what was lost waiting for a batch its production took.

    1 where it is not known, and outside waits; None where it is nowhere.
    """
    waits = waits_of(rank)
    rows = np.flatnonzero(lost.phase == PHASE_DATA_WAIT)
    if not rows.size or not waits.start_ns.size:
        return None
    made_ns = np.zeros(waits.start_ns.size, np.int64)
    for pid in distinct(waits.pid):
        process = rank.chunk.processes.get(pid)
        spans = fetches_of(process) if process is not None else None
        if spans is None:
            continue
        mine = np.flatnonzero(waits.pid == pid)
        row = np.searchsorted(spans.end_ns, waits.end_ns[mine], side="right") - 1
        at = np.maximum(row, 0)
        awaited = (row >= 0) & (spans.end_ns[at] > waits.start_ns[mine])
        made_ns[mine] = np.where(awaited, spans.end_ns[at] - spans.start_ns[at], 0)
    if not made_ns.any():
        return None
    wait = np.searchsorted(waits.start_ns, lost.start_ns[rows], side="right") - 1
    at = np.maximum(wait, 0)
    inside = (wait >= 0) & (lost.start_ns[rows] < waits.end_ns[at])
    lost_ns = np.bincount(at[inside], lost.lost_ns[rows[inside]], waits.start_ns.size)
    out = np.ones(lost.lost_ns.size)
    times = made_ns[at] / np.maximum(lost_ns[at], 1.0)
    out[rows] = np.where(inside, np.maximum(times, 1.0), 1.0)
    return out


class Running:
    """Sums of `hidden_ns` over stretches, asked at times."""

    def __init__(self) -> None:
        self._sums = np.zeros(len(HIDDEN), np.int64)

    def add(self, lost: Lost, amounts: Mapping[int, Int], *times: Int) -> tuple[Int, ...]:
        """Take a stretch; return int64[len(HIDDEN), m] of all until each of some times in it."""
        out = tuple(np.repeat(self._sums[:, None], t_ns.size, axis=1) for t_ns in times)
        if not amounts:
            return out
        sums = {number: np.concatenate([[0], np.cumsum(ns)]) for number, ns in amounts.items()}
        start, length = lost.start_ns, np.maximum(lost.end_ns - lost.start_ns, 1)
        for t_ns, table in zip(times, out):
            row = np.searchsorted(start, t_ns, side="right") - 1
            at = np.maximum(row, 0)
            part = np.where(row < 0, 0.0, np.minimum((t_ns - start[at]) / length[at], 1.0))
            for number, ns in amounts.items():
                table[number] += sums[number][at] + np.floor(ns[at] * part).astype(np.int64)
        for number, ns in sums.items():
            self._sums[number] += ns[-1]
        return out
