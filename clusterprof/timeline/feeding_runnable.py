"""How long a thread was ready to run and had no CPU, inside each of its fetches.

`run_delay` is an integral read every 100 ms: exact between two samples, and nothing says where in
between. It can only have risen while the thread was not on a CPU, so the rise of a sample interval
is shared out over the off-CPU time of the fetches in it, and no fetch gets more than it has.

    samples      |--- rise 30 ms ---|
    fetches      |== 40 off ==|= 20 |      off-CPU time of the two inside the interval
    runnable          20         10

A wait for a CPU is booked when it *ends*, which may be long after it began (a quota's period): what
finds no room in its own fetches goes to the fetches within a second around it, and what finds none
there either to those within some seconds.
"""

from __future__ import annotations

import numpy as np

from clusterprof.timeline import intervals, series
from clusterprof.timeline.model import Float, Int, SpanTable, ThreadTable

WINDOWS_NS = (1_000_000_000, 4_000_000_000, 16_000_000_000)


def runnable_ns(spans: SpanTable, thread: ThreadTable, off_cpu: Float, weight: Float) -> Float:
    """Return float64[n]: runnable ns of each fetch, at most its `off_cpu` ns.

    `weight` says how likely the off-CPU time of each fetch was runnable, in comparison.
    """
    growth, bad = series.differences(thread.run_delay_ns)
    bins = thread.t_ns[:-1], thread.t_ns[1:]
    parts = intervals.overlaps((spans.start_ns, spans.end_ns), bins)
    if not len(parts.piece):
        return np.zeros_like(off_cpu)
    if bad.all():
        return _by_state(spans, thread, off_cpu)
    inside = (parts.end_ns - parts.start_ns).astype(np.float64)
    wall = np.maximum(spans.end_ns - spans.start_ns, 1)
    room = (weight * off_cpu / wall)[parts.piece] * inside
    given = growth[parts.interval] * _ratio(room, _sums(parts.interval, room, len(growth)))
    if bad.any():  # samples missing in between: as much as elsewhere in this chunk
        hole = bad[parts.interval]
        known = room[~hole].sum()
        given[hole] = room[hole] * (given[~hole].sum() / known if known > 0 else 0.0)
    asked = np.bincount(parts.piece, given, minlength=len(off_cpu)).astype(np.float64)
    taken = np.minimum(asked, off_cpu)
    over = given * _ratio(asked - taken, asked)[parts.piece]
    if over.any():
        length = np.maximum(bins[1] - bins[0], 1)
        covered = np.minimum(np.bincount(parts.interval, inside, minlength=len(length)) / length, 1)
        over *= covered[parts.interval]  # the rest of the interval may have waited too
        for window_ns in WINDOWS_NS:
            free = inside * ((off_cpu - taken) / wall)[parts.piece]
            more, over = _around(parts, bins[0], over, free, window_ns)
            taken += np.bincount(parts.piece, more, minlength=len(off_cpu))
    return np.minimum(taken, off_cpu)


def _around(
    parts: intervals.Overlaps, bin_start_ns: Int, over: Float, free: Float, window_ns: int
) -> tuple[Float, Float]:
    """What was over in each window, shared out over what is free there, and what is still over."""
    number = (bin_start_ns - bin_start_ns[0]) // window_ns
    window = np.concatenate([[0], np.cumsum(number[1:] > number[:-1])])[parts.interval]
    asked, room = (np.bincount(window, amount).astype(np.float64) for amount in (over, free))
    part = np.minimum(_ratio(asked, room), 1.0)
    return free * part[window], over * _ratio(np.maximum(asked - room, 0.0), asked)[window]


def _sums(where: Int, amount: Float, n: int) -> Float:
    """The sum of the group each row is in."""
    return np.asarray(np.bincount(where, amount, minlength=n), np.float64)[where]


def _ratio(part: Float, whole: Float) -> Float:
    """part / whole, 0 where there is no whole."""
    result: Float = np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)
    return result


def _by_state(spans: SpanTable, thread: ThreadTable, off_cpu: Float) -> Float:
    """Without run_delay: samples in state R beyond the CPU time used were waiting for a CPU."""
    inside = intervals.containing(thread.t_ns, (spans.start_ns, spans.end_ns)) >= 0
    states = thread.state[inside]
    known = states[states > 0]
    wall = float((spans.end_ns - spans.start_ns).sum())
    if not len(known) or not off_cpu.any():
        return np.zeros_like(off_cpu)
    waited = float(np.mean(known == ord("R"))) * wall - (wall - float(off_cpu.sum()))
    return off_cpu * min(1.0, max(0.0, waited) / float(off_cpu.sum()))
