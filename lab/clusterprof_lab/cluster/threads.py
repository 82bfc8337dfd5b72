"""The threads of a node's ranks and loaders, ten times a second, as the collector lists them."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from clusterprof.agent.linux.threads import COLUMNS
from clusterprof.trace.schema import Rows
from clusterprof_lab.cluster.plan import SECOND_NS, ClusterPlan
from clusterprof_lab.cluster.window import (
    TICK_NS,
    NodeWindow,
    get_pid,
    get_worker_pid,
    sum_disjoint,
)
from clusterprof_lab.synth.activity_counters import find_place
from clusterprof_lab.synth.record_node import JIFFY_NS

Int = NDArray[np.int64]
Float = NDArray[np.float64]

_PLACES = [find_place(doing, "") for doing in ("user", "idle", "peer", "block-io")]
_AT_WORK, _IDLE, _IN_OPERATION, _READING = range(4)
_STATES = np.array([ord(place.state) for place in _PLACES])
_FUNCTIONS = tuple(place.wchan for place in _PLACES[1:])
_HZ = SECOND_NS // TICK_NS


class Threads:
    """The counters of the job's threads on one node; `sample` must be called in order of time."""

    def __init__(self, plan: ClusterPlan) -> None:
        """Start all counters at zero."""
        self._plan = plan
        self._totals: dict[tuple[int, int], tuple[float, float]] = {}

    def sample(self, window: NodeWindow, idle_ns: Float) -> Int:
        """Return int64[columns, ticks, threads] of a window, t_ns in true time.

        idle_ns: float64[ranks, ticks], ns: for how long each rank's device had been idle.
        """
        blocks = [self._sample_main(window, i, idle_ns[i]) for i in range(self._plan.per_node)]
        blocks += [self._sample_worker(window, *key) for key in window.pieces]
        return np.stack(blocks, axis=2)

    def _sample_main(self, window: NodeWindow, local: int, idle_ns: Float) -> Int:
        start, end = window.list_idle(local)
        waits = 1 + len(window.operations)
        at = np.maximum(np.searchsorted(start, window.t_ns, side="right") - 1, 0)
        inside = (window.t_ns >= start[at]) & (window.t_ns < end[at])
        doing = np.where(at % waits == 0, _IDLE, _IN_OPERATION)
        doing = np.where(inside, doing, _AT_WORK)
        none = np.zeros(len(window.t_ns))
        return _make_thread_rows(window, get_pid(local), doing, window.t_ns - idle_ns, none)

    def _sample_worker(self, window: NodeWindow, local: int, worker: int) -> Int:
        edges = np.clip(window.pieces[local, worker][2], window.begin_ns, window.end_ns)
        sums, before = [], self._totals.get((local, worker), (0.0, 0.0))
        for low, high in ((edges[:, :-1:2], edges[:, 1::2]), (edges[:, 1::2], edges[:, 2::2])):
            flat = low.reshape(-1), high.reshape(-1)
            sums.append((sum_disjoint(*flat, window.t_ns), float((flat[1] - flat[0]).sum())))
        (reading, read), (decoding, decoded) = sums
        self._totals[local, worker] = before[0] + read, before[1] + decoded
        flat_edges = edges.reshape(-1)
        at = np.searchsorted(flat_edges, window.t_ns, side="right") - 1
        place = at % edges.shape[1]
        doing = np.where(place % 2 == 0, _READING, _AT_WORK)
        doing = np.where((at < 0) | (place == edges.shape[1] - 1), _IDLE, doing)
        pid = get_worker_pid(local, worker)
        return _make_thread_rows(window, pid, doing, before[1] + decoding, before[0] + reading)


def _make_thread_rows(
    window: NodeWindow, pid: int, doing: Int, on_cpu_ns: Float, blocked_ns: Float
) -> Int:
    """Return a thread's rows, int64[columns, ticks]; the rest is by tick, times in ns."""
    rows = np.zeros((len(COLUMNS), len(window.t_ns)), np.int64)
    rows[0], rows[1], rows[2], rows[3] = window.t_ns, pid, pid, _STATES[doing]
    rows[4] = np.rint(on_cpu_ns)
    rows[6] = on_cpu_ns // JIFFY_NS * JIFFY_NS
    rows[8] = blocked_ns // JIFFY_NS * JIFFY_NS
    rows[10], rows[11] = doing - 1, -1
    return rows


def cut_threads(rows: Int, second: int, clock_ns: int) -> Rows:
    """Return one second of int64[columns, ticks, threads], on the node's clock in ns."""
    part = rows[:, second * _HZ : (second + 1) * _HZ].reshape(len(rows), -1).copy()
    part[0] += clock_ns
    columns = [array("q", column.tobytes()) for column in part]
    return Rows("threads", COLUMNS, columns, {"wchan": _FUNCTIONS, "name": ()})
