"""Marked waits of the host for its device, and what the training thread did outside them.

A counter of the thread says how much it ran between two readings, not when. While it waits for the
device it mostly sleeps, so what it ran is placed outside those waits:

    readings      |------------- 100 ms, 40 of them on a CPU -------------|
    waits         |---- 50 ms ----|
    outside them                  |----------- 50 ms, 40 on a CPU --------|

A driver may poll instead of sleeping. Samples of the thread's state in those waits show for which
part of them it runs; that part of the counter stays inside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.intervals import EMPTY, Pair
from clusterprof.analysis.timeline.model import Float, Int, Process, Rank, ThreadTable
from clusterprof.analysis.timeline.series import compute_differences
from clusterprof.analysis.timeline.spans import SyncSpans

_MIN_WAITED_RATIO = 0.5
"""A span may stand for several waits; one that waited for less of its length is not a wait."""
_MIN_STATES = 4
"""Fewer samples in waits do not show whether the thread polls in them."""
_RUNNING = ord("R")
_MAX_AFTER_NS = 100_000
"""What begins this soon after a wait follows it, ns."""

Bools = NDArray[np.bool_]


class _Waits(NamedTuple):
    """Time waited before each edge of the spans: int64[2 n] and float64[2 n], ns."""

    edge_ns: Int
    waited_ns: Float

    def measure_before(self, t_ns: Int) -> Float:
        """Measure the time waited before each instant: float64[n], ns."""
        return np.asarray(np.interp(t_ns, self.edge_ns, self.waited_ns), np.float64)


def select_device_waits(process: Process) -> Pair:
    """Select the spans in which the training thread mostly waited for its device.

    Returns int64[n] starts and ends, ns, in order of start.
    """
    syncs = process.get_spans(SyncSpans)
    if syncs is None or not syncs.start_ns.size:
        return EMPTY
    mostly = syncs.waited_ns >= _MIN_WAITED_RATIO * (syncs.end_ns - syncs.start_ns)
    start_ns, end_ns = syncs.start_ns[mostly], syncs.end_ns[mostly]
    order = np.argsort(start_ns, kind="stable")
    return start_ns[order], end_ns[order]


def find_samples_in_waits(process: Process, t_ns: Int) -> NDArray[np.bool_]:
    """Find the instants at which the training thread waited for its device: bool[n]."""
    start_ns, end_ns = select_device_waits(process)
    if not start_ns.size:
        return np.zeros(t_ns.size, np.bool_)
    row = np.searchsorted(start_ns, t_ns, side="right") - 1
    return np.asarray((row >= 0) & (t_ns < end_ns[np.maximum(row, 0)]), np.bool_)


def find_drained_rows(process: Process, start_ns: Int, end_ns: Int, chosen: Bools) -> Bools:
    """Find the rows that follow a marked wait for the device, whose queue was empty then: bool[n].

    A row begins where such a wait ends, or continues a row that does. start_ns, end_ns: int64[n],
    in order of time. chosen: bool[n], the rows that may count; others end what follows a wait.
    """
    no_rows = np.zeros(start_ns.size, np.bool_)
    waits = select_device_waits(process)
    if not waits[0].size or not start_ns.size:
        return no_rows
    chosen = chosen & ~find_samples_in_waits(process, (start_ns + end_ns) // 2)
    wait_end_ns = np.maximum.accumulate(waits[1])
    row = np.searchsorted(wait_end_ns, start_ns, side="right") - 1
    after_ns = start_ns - wait_end_ns[np.maximum(row, 0)]
    follows = chosen & (row >= 0) & (after_ns <= _MAX_AFTER_NS)
    continues = no_rows.copy()
    continues[1:] = chosen[1:] & chosen[:-1] & (start_ns[1:] == end_ns[:-1])
    so_far = np.cumsum(follows)
    first = np.maximum.accumulate(np.where(continues, 0, np.arange(start_ns.size)))
    return np.asarray(chosen & (so_far > so_far[first] - follows[first]), np.bool_)


def measure_device_sync(rank: Rank, start_ns: Int, end_ns: Int) -> Float:
    """Measure how long the host was in marked waits for the device: float64[n], ns.

    start_ns, end_ns: int64[n].
    """
    waits = _sum_waits(rank.main)
    if waits is None:
        return np.zeros(start_ns.size)
    return waits.measure_before(end_ns) - waits.measure_before(start_ns)


def measure_increase_outside_waits(
    rank: Rank, column: str, start_ns: Int, end_ns: Int
) -> Float | None:
    """Measure by how much a counter of the training thread rose outside marked waits.

    column: of its `ThreadTable`, ns. start_ns, end_ns: int64[n]. Returns float64[n], ns, where the
    counter was not read as if it had not risen; None without marked waits or samples of the thread.
    """
    thread, waits = rank.main.threads.get(rank.pid), _sum_waits(rank.main)
    if waits is None or thread is None or len(thread.t_ns) < 2:
        return None
    growth = compute_differences(getattr(thread, column))[0]
    waited_ns = waits.measure_before(thread.t_ns)
    outside_ns = thread.t_ns - waited_ns
    polled_ns = np.zeros(growth.size)
    if column in ("on_cpu_ns", "user_ns"):
        polled_ns = _estimate_polling_ratio(rank.main, thread) * np.diff(waited_ns)
    outside_growth = np.clip(growth - polled_ns, 0.0, np.diff(outside_ns))
    so_far = np.concatenate([[0.0], np.cumsum(outside_growth)])
    first, last = (t - waits.measure_before(t) for t in (start_ns, end_ns))
    return np.asarray(np.interp(last, outside_ns, so_far) - np.interp(first, outside_ns, so_far))


def _sum_waits(process: Process) -> _Waits | None:
    """Sum the time waited up to each edge of the spans; None without any."""
    syncs = process.get_spans(SyncSpans)
    if syncs is None or not syncs.start_ns.size:
        return None
    order = np.argsort(syncs.start_ns, kind="stable")
    start, length = syncs.start_ns[order], (syncs.end_ns - syncs.start_ns)[order]
    edges = np.stack([start, start + length], axis=1).ravel()
    so_far = np.cumsum(np.minimum(syncs.waited_ns[order], length).astype(np.float64))
    before = np.append(0.0, so_far[:-1])
    return _Waits(edges, np.stack([before, so_far], axis=1).ravel())


def _estimate_polling_ratio(process: Process, thread: ThreadTable) -> float:
    """Estimate for which part of its waits for the device the thread runs, 0 to 1."""
    states = thread.state[find_samples_in_waits(process, thread.t_ns)]
    return float(np.mean(states == _RUNNING)) if states.size >= _MIN_STATES else 0.0
