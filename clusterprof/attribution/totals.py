"""What a settled stretch holds besides its causes: its time, its waits, its steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.lost import Account
from clusterprof.attribution.movers import moved_by_hosts
from clusterprof.attribution.partial import SLOWEST, Partial
from clusterprof.attribution.regions import Region
from clusterprof.probe import layout
from clusterprof.timeline.intervals import clip, total, union
from clusterprof.timeline.model import (
    PHASE_PERHAPS,
    SOURCE_HOST_SPANS,
    Int,
    Lost,
    Rank,
    SpanTable,
)


def completed(part: Partial, rank: Rank, region: Region, lost: Lost, account: Account) -> Partial:
    """Return a partial with the time and the steps of its region added."""
    length = region.end_ns - region.start_ns
    first_lost = int(lost.lost_ns[(lost.step == 0) & (lost.phase != PHASE_PERHAPS)].sum())
    totals = {
        **part.totals,
        "in_step": length - account.unmeasured_ns,
        "unmeasured": account.unmeasured_ns,
        "measured": account.measured_ns,
        "busy": account.measured_ns - account.idle_ns,
        "lost": int(lost.lost_ns.sum()),
        "host_lost": int(lost.lost_ns[lost.source == SOURCE_HOST_SPANS].sum()),
        "first_step_lost": first_lost,
        "stream_pieces": account.stream_pieces,
        **({"not_asked": account.not_asked_ns} if account.not_asked_ns else {}),
        **moved_by_hosts(rank, region),
    }
    steps = rank.main.spans.get(layout.STEP)
    lengths: dict[int, int] = {}
    long: dict[int, int] = {}
    if steps is not None:
        ended = (steps.end_ns > region.start_ns) & (steps.end_ns <= region.end_ns)
        start, end = distinct(steps.start_ns[ended], steps.end_ns[ended])
        lengths = _counted(three_digits(end - start))
        totals.update(_brought(steps, ended))
        most = np.argsort(start - end, kind="stable")[:SLOWEST]
        long = dict(zip(start[most].tolist(), (end - start)[most].tolist()))
        first = steps.a == 0
        if first.any():
            warm_up = union((steps.start_ns[first], steps.end_ns[first]))
            totals["first_step"] = total(clip(warm_up, region.start_ns, region.end_ns))
    waits = rank.main.spans.get(layout.DATA_WAIT)
    if waits is not None:
        inside = clip(union((waits.start_ns, waits.end_ns)), region.start_ns, region.end_ns)
        totals["wait"] = total(inside)
    return replace(part, totals=totals, steps=lengths, slowest=long, fill=account.fill)


def _brought(steps: SpanTable, ended: NDArray[np.bool_]) -> dict[str, int]:
    """Return samples and tokens of the steps that ended, and of how many steps they are known."""
    out: dict[str, int] = {}
    which = np.unique(steps.a[ended], return_index=True)[1]
    for name, column in (("samples", steps.c), ("tokens", steps.d)):
        held = column[ended][which]
        known = held >= 0
        out[name] = int(held[known].sum())
        out[f"{name}_steps"] = int(np.count_nonzero(known))
        out[f"{name}_unknown_steps"] = int(np.count_nonzero(~known))
    return out


_SCALES = np.array([1, 1, *(10**n for n in range(17))])  # by the digits before the last


def _counted(values: Int) -> dict[int, int]:
    """How often each value occurs, in rising order."""
    ordered = np.sort(values)
    edges = [0, *((ordered[1:] != ordered[:-1]).nonzero()[0] + 1).tolist(), ordered.size]
    return {int(ordered[low]): high - low for low, high in pairwise(edges) if high > low}


def distinct(start_ns: Int, end_ns: Int) -> tuple[Int, Int]:
    """Return spans, sorted by start, without those that stand there twice."""
    keep = np.ones(start_ns.size, np.bool_)
    keep[1:] = (start_ns[1:] != start_ns[:-1]) | (end_ns[1:] != end_ns[:-1])
    return (start_ns, end_ns) if keep.all() else (start_ns[keep], end_ns[keep])


def three_digits(ns: Int) -> Int:
    """Round to three significant digits, so that a histogram of steps stays small.

    132_456_789 -> 132_000_000
    """
    digits = np.log10(np.maximum(ns, 1)).astype(np.int64)
    scale = _SCALES[digits]
    return (ns + scale // 2) // scale * scale
