"""Estimate the host overhead of transfers, which no better network removes.

Threads of a communication library that sleep until data arrive
(COMM_THREAD_NAMES) use a CPU for transfers, or wait for one. For each
window between two samples of the process both are known, and for how long the rank was
in operations. Over all windows

    used = idle rate * length + rate * time in operations   least squares, rates >= 0

and so this part of the transfer time is host overhead:

    used - idle rate * (length of all windows - transfer time)   at most the latter

Threads that poll use a CPU without transferring; they are no evidence and not listed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.rank.device_activity import get_sample_times
from clusterprof.analysis.timeline.collectives.operations import (
    apply_device_times,
    find_device_waits,
)
from clusterprof.analysis.timeline.intervals import measure_overlap, merge_intervals
from clusterprof.analysis.timeline.model import Rank
from clusterprof.analysis.timeline.series import compute_column_increase
from clusterprof.analysis.timeline.spans import CollectiveSpans

COMM_THREAD_NAMES = ("gloo_tcp_loop", "pt_gloo_runloop")
"""Names of communication threads that sleep until data arrive."""
ON_CPU, DELAYED = "movers_on_cpu", "movers_delayed"
_LENGTH, _INSIDE = "movers_length", "movers_inside"
_LL, _LX, _XX = "movers_ll", "movers_lx", "movers_xx"
_US = 1000
"""Products are of microseconds, so that they fit into 64-bit integers."""


def sum_comm_thread_time(rank: Rank, segment: Segment) -> dict[str, int]:
    """Sum CPU time and delay of communication threads in a segment, for `totals`.

    In us and us * us; {} without communication threads.
    """
    spans = rank.main.get_spans(CollectiveSpans)
    comm_threads = [
        thread for thread in rank.main.threads.values() if thread.name in COMM_THREAD_NAMES
    ]
    if spans is None or not comm_threads:
        return {}
    times = get_sample_times(rank)  # also edges of segments: where they are cut changes nothing
    times = times if times.size else comm_threads[0].t_ns
    inside = times[(times > segment.start_ns) & (times < segment.end_ns)]
    edges = np.concatenate([[segment.start_ns], inside, [segment.end_ns]]).astype(np.int64)
    windows = edges[:-1], edges[1:]
    spans = apply_device_times(spans, find_device_waits(rank.main))
    sums = {
        _LENGTH: windows[1] - windows[0],
        _INSIDE: measure_overlap(windows, merge_intervals((spans.start_ns, spans.end_ns))),
    }
    for name, column in ((ON_CPU, "on_cpu_ns"), (DELAYED, "run_delay_ns")):
        used = [
            compute_column_increase(thread.t_ns, getattr(thread, column), *windows)
            for thread in comm_threads
        ]
        sums[name] = np.nan_to_num(np.stack(used)).sum(axis=0).astype(np.int64)
    sums = {name: ns // _US for name, ns in sums.items()}
    length, x = sums[_LENGTH], sums.pop(_INSIDE)
    sums |= {_LL: length * length, _LX: length * x, _XX: x * x}
    for name in (ON_CPU, DELAYED):
        sums |= {f"{name}_l": sums[name] * length, f"{name}_x": sums[name] * x}
    return {name: int(us.sum()) for name, us in sums.items()}


def estimate_host_overhead_ns(totals: Mapping[str, int], quantity: str, transfer_ns: int) -> float:
    """Estimate how much of a rank's transfer time was host overhead.

    quantity: ON_CPU, communication threads used a CPU, or
    DELAYED, they waited for one. Returns ns, 0 if unknown.
    """
    length = float(totals.get(_LENGTH, 0))
    if not length or transfer_ns <= 0:
        return 0.0
    transfer_us = transfer_ns / _US
    idle = _fit_idle_rate(totals, quantity)
    used = totals.get(quantity, 0) - idle * length
    return float(min(max(used, 0.0) + min(idle, 1.0) * transfer_us, transfer_us)) * _US


def _fit_idle_rate(totals: Mapping[str, int], quantity: str) -> float:
    """Return the rate outside operations of the best fit in which neither rate is below 0."""
    ll, lx, xx = (float(totals.get(name, 0)) for name in (_LL, _LX, _XX))
    gl, gx = float(totals.get(f"{quantity}_l", 0)), float(totals.get(f"{quantity}_x", 0))
    det = ll * xx - lx * lx
    if det <= 0:  # in operations all the time, or never
        return 0.0
    idle, rate = (gl * xx - gx * lx) / det, (gx * ll - gl * lx) / det
    if rate < 0:
        return gl / ll
    return max(idle, 0.0)
