"""Waits for the device that a pause asks for: they go with it.

Who saves or logs first waits until its device has worked everything off; then the device waits for
the host twice, for the pause and for the launches behind it. The second part is `h2d-sync`, and
without the pause nobody had synchronised.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clusterprof.attribution.partial import SHARE
from clusterprof.probe import layout
from clusterprof.timeline.model import Int, Lost, Rank

PAUSES = ("checkpoint", "eval-host")
SYNC = "h2d-sync"
_MOST = 1
"""Waits for its device of a step that only pauses; one that asks more often does so for itself."""


def asked_for(rank: Rank, lost: Lost, shares: Mapping[str, Int]) -> dict[str, Int]:
    """Return pause -> int64[n]: what was lost to `SYNC` in steps whose one wait for the device was
    the pause's: it has most of what both lost there. `shares` are in 1/SHARE."""
    table = rank.main.spans.get(layout.STEP)
    pauses = [name for name in PAUSES if name in shares and shares[name].any()]
    synced = shares.get(SYNC)
    if synced is None or not synced.any() or not pauses or table is None:
        return {}
    steps, of = np.unique(lost.step, return_inverse=True)
    synced_ns = np.rint(lost.lost_ns * (synced / SHARE))
    paused = np.stack([np.bincount(of, lost.lost_ns * (shares[name] / SHARE)) for name in pauses])
    few = (_waits(rank, steps) <= _MOST) & (steps >= 0)
    chief = np.where(few & (paused.max(axis=0) > np.bincount(of, synced_ns)), paused.argmax(0), -1)
    out = {
        name: np.where(chief[of] == at, synced_ns, 0).astype(np.int64)
        for at, name in enumerate(pauses)
    }
    return {name: ns for name, ns in out.items() if ns.any()}


def _waits(rank: Rank, steps: Int) -> Int:
    """Return int64[n]: how often the host waited for its device in each step, outside saves."""
    table, spans = rank.main.spans[layout.STEP], rank.main.spans.get(layout.SYNC)
    if spans is None or not spans.start_ns.size:
        return np.zeros(steps.size, np.int64)
    row = np.searchsorted(table.start_ns, spans.start_ns, side="right") - 1
    inside = (row >= 0) & (spans.start_ns < table.end_ns[np.maximum(row, 0)])
    save = rank.main.spans.get(layout.CHECKPOINT)
    if save is not None and save.start_ns.size:
        at = np.searchsorted(save.start_ns, spans.start_ns, side="right") - 1
        inside &= (at < 0) | (spans.start_ns >= save.end_ns[np.maximum(at, 0)])
    number, count = table.a[row[inside]], np.maximum(spans.b[inside], 1)
    order = np.searchsorted(steps, number)
    known = (order < steps.size) & (steps[np.minimum(order, steps.size - 1)] == number)
    return np.bincount(order[known], count[known], steps.size).astype(np.int64)
