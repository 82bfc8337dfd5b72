"""The metrics of a node: about 140 of devices, CPUs, disks, memory and network, at 10 Hz."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.signals import Signal
from clusterprof.trace.schema import Columns
from clusterprof_lab.cluster.plan import LINK_BYTES_PER_SECOND, SECOND_NS, ClusterPlan
from clusterprof_lab.cluster.window import TICK_NS, NodeWindow, sum_disjoint
from clusterprof_lab.synth.interval_sums import measure_covered_ns, sum_amounts

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Values = list[tuple[Signal, str, Float]]
Column = tuple[str, str, Literal["q", "d"], NDArray[Any]]
"""Signal, device, type code, and int64[ticks] or float64[ticks]."""

PORT, DISK = "mlx5_0/1", "vdb"
CPUS = 128
_HZ = SECOND_NS // TICK_NS
_READ_BYTES = 131_072
_ERRORS_PER_SECOND = 40
"""Symbol errors of a slow link."""
_INTEGER_UNITS = frozenset({"ns", "bytes", "count", "bits"})
_IDLE_DISKS = ("vda", "nvme1n1", "nvme2n1")
_CORES = 4
"""CPUs that are shown one by one."""
_PRESSURE = (
    signals.PRESSURE_CPU_SOME,
    signals.PRESSURE_IO_SOME,
    signals.PRESSURE_IO_FULL,
    signals.PRESSURE_MEMORY_SOME,
    signals.PRESSURE_MEMORY_FULL,
)
_MEMORY = (
    (signals.MEMORY_AVAILABLE, 400 << 30),
    (signals.MEMORY_CACHED, 100 << 30),
    (signals.MEMORY_DIRTY, 64 << 20),
    (signals.MEMORY_WRITEBACK, 0),
    (signals.MEMORY_SWAP_FREE, 0),
    (signals.MEMORY_MAJOR_FAULTS, 0),
    (signals.MEMORY_SWAP_IN, 0),
    (signals.MEMORY_SWAP_OUT, 0),
    (signals.MEMORY_RECLAIM_DIRECT, 0),
    (signals.MEMORY_REFAULTS, 0),
    (signals.MEMORY_OOM_KILLS, 0),
)
_QUIET_PORT = (
    signals.RDMA_TRANSMIT_WAIT,
    signals.RDMA_CNP,
    signals.RDMA_ECN_MARKED,
    signals.RDMA_OUT_OF_SEQUENCE,
    signals.RDMA_RETRANSMITS,
    signals.RDMA_DISCARDS,
    signals.RDMA_LINK_DOWNED,
)
_DISK = (
    signals.DISK_READ_BYTES,
    signals.DISK_READS,
    signals.DISK_READ_TIME,
    signals.DISK_BUSY,
    signals.DISK_QUEUE,
    signals.DISK_WRITE_BYTES,
    signals.DISK_WRITES,
    signals.DISK_WRITE_TIME,
)


class Metrics:
    """The counters of one node, window by window; `sample` must be called in order of time."""

    def __init__(self, plan: ClusterPlan, node: int) -> None:
        """Start all counters at zero."""
        self._plan, self._node = plan, node
        self._totals: dict[tuple[str, str], float] = {}
        self.idle_ns = np.zeros((plan.per_node, 0))
        """float64[ranks, ticks], ns: idle time of each device, in the last window."""

    def sample(self, window: NodeWindow) -> list[Column]:
        """Return every column at the ticks of a window."""
        values = self._sample_devices(window)
        reads, decodes = self._collect_pieces(window)
        values += self._sample_cpus(window, reads, decodes)
        values += self._sample_disks(window, reads)
        values += self._sample_network(window)
        quiet = [(signal, "", 0.0) for signal in _PRESSURE]
        quiet += [(signal, "", float(level)) for signal, level in _MEMORY]
        values += [(s, d, np.full(len(window.t_ns), level)) for s, d, level in quiet]
        return [_convert_column(*column) for column in values]

    def _grow(self, signal: Signal, device: str, growth: Float, whole: float) -> Float:
        """Continue a counter: growth in the window at each tick float64[n], and by its end."""
        before = self._totals.get((signal.name, device), 0.0)
        self._totals[signal.name, device] = before + whole
        return before + growth

    def _grow_from(
        self, signal: Signal, device: str, window: NodeWindow, start: Int, end: Int, amount: Float
    ) -> tuple[Signal, str, Float]:
        """Continue a counter that grows by amounts evenly over intervals, int64[n] ns each."""
        inside_start = np.clip(start, window.begin_ns, window.end_ns)
        inside_end = np.clip(end, window.begin_ns, window.end_ns)
        amount = amount * (inside_end - inside_start) / np.maximum(end - start, 1)
        growth = sum_amounts(inside_start, inside_end, amount, window.t_ns)
        return signal, device, self._grow(signal, device, growth, float(amount.sum()))

    def _sample_devices(self, window: NodeWindow) -> Values:
        plan, values = self._plan, []
        idle = np.zeros((plan.per_node, len(window.t_ns)))
        for local in range(plan.per_node):
            start, end = (
                np.clip(edge, window.begin_ns, window.end_ns) for edge in window.list_idle(local)
            )
            device = f"gpu-{local}"
            within = sum_disjoint(start, end, window.t_ns)
            whole = float((end - start).sum())
            idle[local] = self._grow(signals.GPU_BUSY_TIME, device, within, whole)
            busy = window.t_ns - idle[local]
            active = np.clip(np.diff(busy, prepend=busy[0] - TICK_NS * 0.5) / TICK_NS, 0, 1)
            values += [
                (signals.GPU_BUSY_TIME, device, busy),
                (signals.GPU_SM_ACTIVE, device, 0.8 * active),
                (signals.GPU_SM_CLOCK, device, np.full(len(busy), 1.755e9)),
                (signals.GPU_SM_CLOCK_MAX, device, np.full(len(busy), 1.98e9)),
                (signals.GPU_THROTTLE, device, np.zeros(len(busy))),
                (signals.GPU_MEMORY_USED, device, np.full(len(busy), float(64 << 30))),
                (signals.GPU_POWER, device, np.rint(120e3 + 500e3 * active) / 1e3),
            ]
        self.idle_ns = idle
        return values

    def _collect_pieces(self, window: NodeWindow) -> tuple[tuple[Int, Int], tuple[Int, Int]]:
        """Return when workers of the node read and when they decoded: start, end int64[n], ns."""
        edges = [entry[2] for entry in window.pieces.values()]
        if not edges:
            none = np.zeros(0, np.int64)
            return (none, none), (none, none)
        joined = np.concatenate(edges)
        reads = joined[:, :-1:2].reshape(-1), joined[:, 1::2].reshape(-1)
        return reads, (joined[:, 1::2].reshape(-1), joined[:, 2::2].reshape(-1))

    def _sample_cpus(
        self, window: NodeWindow, reads: tuple[Int, Int], decodes: tuple[Int, Int]
    ) -> Values:
        plan, t_ns = self._plan, window.t_ns
        mains = plan.per_node * t_ns - self.idle_ns.sum(axis=0)
        _, _, loaders = self._grow_from(
            signals.CPU_USER, "", window, *decodes, (decodes[1] - decodes[0]).astype(float)
        )
        _, _, blocked = self._grow_from(
            signals.CPU_IOWAIT, "", window, *reads, (reads[1] - reads[0]).astype(float)
        )
        user, none = mains + loaders, np.zeros(len(t_ns))
        values = [
            (signals.CPU_USER, "all", user),
            (signals.CPU_SYSTEM, "all", 0.02 * user),
            (signals.CPU_IDLE, "all", CPUS * t_ns - 1.02 * user - blocked),
            (signals.CPU_IOWAIT, "all", blocked),
            (signals.CPU_STEAL, "all", none),
            (signals.CPU_RUNNABLE, "", none + plan.per_node),
            (signals.CPU_BLOCKED, "", none),
        ]
        for core in range(_CORES):
            values += [
                (signal, str(core), values[i][2] / CPUS)
                for i, signal in enumerate(
                    (signals.CPU_USER, signals.CPU_SYSTEM, signals.CPU_IDLE, signals.CPU_IOWAIT)
                )
            ]
        return values

    def _sample_disks(self, window: NodeWindow, reads: tuple[Int, Int]) -> Values:
        start, end = reads
        length = (end - start).astype(np.float64)
        each = np.full(len(start), window.batch_bytes / 4)
        low, high = (np.clip(edge, window.begin_ns, window.end_ns) for edge in reads)
        busy = measure_covered_ns(low, high, window.t_ns)
        whole = measure_covered_ns(low, high, np.array([window.end_ns]))[0] if len(low) else 0.0
        values = [
            self._grow_from(signals.DISK_READ_BYTES, DISK, window, start, end, each),
            self._grow_from(signals.DISK_READS, DISK, window, start, end, each / _READ_BYTES),
            self._grow_from(signals.DISK_READ_TIME, DISK, window, start, end, length),
            self._grow_from(signals.DISK_QUEUE, DISK, window, start, end, length),
            (signals.DISK_BUSY, DISK, self._grow(signals.DISK_BUSY, DISK, busy, float(whole))),
        ]
        none = np.zeros(len(window.t_ns))
        values += [(signal, DISK, none) for signal in _DISK[5:]]
        values += [(signal, disk, none) for disk in _IDLE_DISKS for signal in _DISK]
        return values

    def _sample_network(self, window: NodeWindow) -> Values:
        """Grow the port's counters while data move between nodes."""
        plan, none = self._plan, np.zeros(len(window.t_ns))
        starts, ends, amounts = [], [], []
        for column, op in enumerate(window.operations):
            if op.scope == "inner" and plan.inner <= plan.per_node:
                continue
            ranks = slice(None) if op.scope in ("outer", "pair") else slice(0, 1)
            end = window.leave[:, ranks, column].reshape(-1)
            starts.append(end - op.due_ns)
            ends.append(end)
            amounts.append(np.full(len(end), op.size * (1.0 if op.scope == "pair" else 2.0)))
        moved = [np.concatenate(part) if part else np.zeros(0) for part in (starts, ends, amounts)]
        start, end = moved[0].astype(np.int64), moved[1].astype(np.int64)
        values = [
            self._grow_from(signal, PORT, window, start, end, moved[2])
            for signal in (signals.RDMA_RECEIVE, signals.RDMA_TRANSMIT)
        ]
        slow = any(f.kind == "slow-link" and f.place == self._node for f in plan.faults)
        errors = _ERRORS_PER_SECOND * window.t_ns / SECOND_NS if slow else none
        values += [
            (signals.RDMA_SYMBOL_ERRORS, PORT, errors),
            (signals.RDMA_LINK_SPEED, PORT, none + LINK_BYTES_PER_SECOND),
            (signals.RDMA_LINK_WIDTH, PORT, none + 4),
            (signals.RDMA_STATE, PORT, none + 4),
        ]
        return values + [(signal, PORT, none) for signal in _QUIET_PORT]


def cut_metrics(
    columns: Sequence[Column], window: NodeWindow, second: int, clock_ns: int
) -> Columns:
    """Return the samples of one second of a window, on the node's clock in ns."""
    rows = slice(second * _HZ, (second + 1) * _HZ)
    values = [array(code, column[rows].tobytes()) for _, _, code, column in columns]
    t_ns = array("q", (window.t_ns[rows] + clock_ns).tobytes())
    names, devices = [name for name, *_ in columns], [device for _, device, *_ in columns]
    return Columns("node", names, devices, t_ns, values, [None] * len(columns))


def _convert_column(signal: Signal, device: str, values: Float) -> Column:
    """Return a column as it is stored: float64[ticks] as int64 where the unit is a whole number."""
    if signal.unit in _INTEGER_UNITS:
        return signal.name, device, "q", np.rint(values).astype(np.int64)
    return signal.name, device, "d", np.asarray(values, np.float64)
