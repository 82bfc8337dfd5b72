"""Fetches that did not measure themselves: CPU time and bytes from the samples of their process.

A loader that is not torch's may mark its fetches with `clusterprof.span("fetch")`. A worker does
next to nothing between two fetches, so what its counters rose by between two samples is shared out
over the fetches in between, in proportion to their time there.

    samples   |------ on_cpu rises by 60 ms ------|
    fetches     |== 40 ms ==|        |= 20 ms =|
    CPU              40                   20          never more than the fetch is long
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clusterprof.timeline import intervals, series
from clusterprof.timeline.model import Float, Int, Process, SpanTable


def filled(spans: SpanTable, process: Process) -> SpanTable:
    """Return the fetches with b, c and d from samples where they are -1; 0 where nothing is known.

    How much of the CPU time was in the kernel is only known for all fetches together.
    """
    if not (np.any(spans.b < 0) or np.any(spans.c < 0) or np.any(spans.d < 0)):
        return spans
    none = np.zeros(len(spans.start_ns))
    thread = process.threads.get(process.pid)
    cpu, system = none, 0.0
    if thread is not None:
        wall = (spans.end_ns - spans.start_ns).astype(np.float64)
        cpu = np.minimum(_shared(spans, thread.t_ns, thread.on_cpu_ns), wall)
        ticks = [float(series.differences(c)[0].sum()) for c in (thread.user_ns, thread.system_ns)]
        system = ticks[1] / sum(ticks) if sum(ticks) > 0 else 0.0
    read = none if process.io is None else _shared(spans, process.io.t_ns, process.io.read_bytes)
    measured = (spans.b >= 0) & (spans.c >= 0)
    return replace(
        spans,
        b=np.where(measured, spans.b, np.rint(cpu * (1 - system))).astype(np.int64),
        c=np.where(measured, spans.c, np.rint(cpu * system)).astype(np.int64),
        d=np.where(spans.d >= 0, spans.d, np.rint(read)).astype(np.int64),
    )


def _shared(spans: SpanTable, t_ns: Int, counter: Int) -> Float:
    """float64[n]: each fetch's part of the growth of a counter."""
    if len(t_ns) < 2:
        return np.zeros(len(spans.start_ns))
    growth, _ = series.differences(counter)
    parts = intervals.overlaps((spans.start_ns, spans.end_ns), (t_ns[:-1], t_ns[1:]))
    inside = (parts.end_ns - parts.start_ns).astype(np.float64)
    together = np.bincount(parts.interval, inside, minlength=len(growth))[parts.interval]
    part = growth[parts.interval] * inside / np.maximum(together, 1.0)
    return np.asarray(np.bincount(parts.piece, part, minlength=len(spans.start_ns)), np.float64)
