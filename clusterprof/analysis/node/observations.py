"""Record how each rank's recording ended: last operation, last span, thread state.

It also writes notes on a node's host: bound workers, distant GPUs, full shared memory, heat, bad
links.

No lost time is attributed to these conditions; each is noted once, for all nodes alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterprof import signals
from clusterprof.analysis.node.last_code_position import (
    MAX_WORKERS,
    LastCodePosition,
    StepsBetweenOperations,
)
from clusterprof.analysis.node.link_trends import LinkTrends
from clusterprof.analysis.timeline import series
from clusterprof.analysis.timeline.host_resources import (
    CpuTopology,
    combine_allowed_cpus,
    get_cpu_topology,
    is_loader_process,
)
from clusterprof.analysis.timeline.load.ranks import (
    JobPosition,
    get_global_rank,
    parse_job_position,
)
from clusterprof.analysis.timeline.model import Chunk, Process
from clusterprof.analysis.timeline.spans import CollectiveSpans
from clusterprof.probe import layout
from clusterprof.units import format_quantity
from clusterprof.util.ranges import format_cpulist, format_host_list

TAIL_NS = 10_000_000_000
_MIN_STATE_SAMPLES = 5  # samples that determine a thread's last state
_UNDER_WAY = "operation-under-way"


@dataclass(frozen=True, slots=True)
class OperationUnderWay:
    """An operation that a rank began and had not left a few seconds later."""

    start_ns: int
    group: int
    number: int
    """Number in its group; -1 = the next operation of the group."""
    operation: int
    """Kind, form and peer (docs/design/waits-between-ranks.md)."""


@dataclass(frozen=True, slots=True)
class LeftOperation:
    """An operation that the host of a rank left; on a device it may still be running."""

    number: int
    start_ns: int
    end_ns: int
    operation: int


@dataclass(slots=True)
class RankEnding:
    """How one rank's process ended; times are ns on its node's clock."""

    pid: int
    started_ticks: int
    job_position: JobPosition
    last_record_ns: int = 0
    """Time of its last sample or span."""
    last_span_ns: int = 0
    """End of its last span of work; 0 = it had none."""
    longest_operation_ns: int = 0
    """Longest of its operations that ended."""
    reached: dict[int, LeftOperation] = field(default_factory=dict)
    """By group: the last operation that its host left."""
    last_began_ns: int = 0
    """When the last operation that it left had begun."""
    last_begun: OperationUnderWay | None = None
    exited: Mapping[str, Any] | None = None
    """Attributes of its `process-exited` event; None without one."""
    exited_ns: int = 0
    state: str = ""
    """Most common state of its main thread at the end, a letter of /proc; "" = unknown."""
    on_cpu_ratio: float | None = None
    wchan: str = ""
    last_line: LastCodePosition | None = None
    """Where its training thread was last; None until it marked a span."""
    workers: tuple[LastCodePosition, ...] = ()
    """The same of its data loader's workers that lived to the end."""
    steps: StepsBetweenOperations = field(default_factory=StepsBetweenOperations)

    @property
    def under_way(self) -> OperationUnderWay | None:
        """Return the operation that it never left; None = it left every operation."""
        if self.last_begun is None or self.last_begun.start_ns <= self.last_began_ns:
            return None
        return self.last_begun


@dataclass(frozen=True, slots=True)
class FailedExit:
    """A process that ended with an exit status or by a signal."""

    pid: int
    started_ticks: int
    t_ns: int
    """On its node's clock."""
    status: int
    """Exit status; 0 = ended by the signal."""
    signal: int


_MAX_FAILED_EXITS = 4096


class EndingTracker:
    """Tracks every process with a rank, chunk by chunk."""

    def __init__(self) -> None:
        self._endings: dict[tuple[int, int], RankEnding] = {}
        self._failed: list[FailedExit] = []
        self._workers: dict[int, LastCodePosition] = {}  # by pid, as long as they live

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Pass chunks through, and record what they show."""
        for chunk in chunks:
            self._observe(chunk)
            yield chunk
            del chunk  # else it stays while the next one is read

    def _observe(self, chunk: Chunk) -> None:
        self._update_workers(chunk)
        for process in chunk.processes.values():
            if process.registration.get("role") == "python":
                self._update(chunk, process)
        for event in chunk.events:
            self._apply_event(event.kind, event.attributes, event.t_ns)

    def endings(self) -> tuple[RankEnding, ...]:
        """Return how each process ended, by rank and pid."""
        return tuple(
            sorted(
                self._endings.values(),
                key=lambda ending: (ending.job_position.rank or 0, ending.pid),
            )
        )

    def failed_exits(self) -> tuple[FailedExit, ...]:
        """Return the processes that failed, with a rank or without, in order of time."""
        return tuple(self._failed)

    def _update(self, chunk: Chunk, process: Process) -> None:
        job_position = parse_job_position(process.registration)
        if job_position.rank is None:
            return
        key = process.pid, process.started_ticks
        ending = self._endings.setdefault(key, RankEnding(*key, job_position))
        ending.job_position = job_position
        if ending.last_line is None:
            ending.last_line = LastCodePosition(process.pid)
        ending.last_line.update(process)
        ending.last_span_ns = ending.last_line.last_span_ns
        ending.steps.update(process)
        for kind, table in process.spans.items():
            if kind == layout.COLLECTIVE and table.end_ns.size:
                ending.longest_operation_ns = max(
                    ending.longest_operation_ns, int((table.end_ns - table.start_ns).max())
                )
                ending.last_began_ns = max(ending.last_began_ns, int(table.start_ns.max()))
                operations = CollectiveSpans.from_table(table)
                for group in np.unique(operations.group).tolist():
                    rows = np.flatnonzero(operations.group == group)
                    row = rows[np.argmax(table.end_ns[rows])]
                    columns = operations.number, table.start_ns, table.end_ns, operations.code
                    ending.reached[group] = LeftOperation(*(int(column[row]) for column in columns))
        newest_ns = max(ending.last_span_ns, ending.last_line.last_sample_ns)
        ending.last_record_ns = max(ending.last_record_ns, newest_ns)
        ending.workers = tuple(
            self._workers[other.pid]
            for other in chunk.processes.values()
            if other.parent_pid == process.pid and other.pid in self._workers
        )[:MAX_WORKERS]
        thread = process.threads.get(process.pid)
        if thread is None or not thread.t_ns.size:
            return
        ending.last_record_ns = max(ending.last_record_ns, int(thread.t_ns[-1]))
        rows = thread.t_ns > thread.t_ns[-1] - TAIL_NS
        if int(rows.sum()) < _MIN_STATE_SAMPLES:
            return
        ending.state = chr(_find_most_common(thread.state[rows]))
        t_ns, on_cpu = thread.t_ns[rows], thread.on_cpu_ns[rows]
        if on_cpu[0] >= 0 and t_ns[-1] > t_ns[0]:
            ending.on_cpu_ratio = float(on_cpu[-1] - on_cpu[0]) / float(t_ns[-1] - t_ns[0])
        wchan = _find_most_common(thread.wchan[rows])
        names = chunk.wchan_names
        ending.wchan = names[wchan] if 0 <= wchan < len(names) and names[wchan] != "0" else ""

    def _update_workers(self, chunk: Chunk) -> None:
        """Update where the workers of data loaders were last; ended ones are dropped."""
        workers = {}
        for process in chunk.processes.values():
            if process.stacks is not None and is_loader_process(process):
                line = self._workers.get(process.pid) or LastCodePosition(process.pid)
                line.update(process)
                workers[process.pid] = line
            elif process.pid in self._workers:
                workers[process.pid] = self._workers[process.pid]
        self._workers = workers

    def _apply_event(self, kind: str, attributes: Mapping[str, Any], t_ns: int) -> None:
        if kind == "process-exited" and len(self._failed) < _MAX_FAILED_EXITS:
            numbers = ("pid", "started_ticks", "exit_code", "signal")
            pid, ticks, status, signal = (int(attributes.get(name) or 0) for name in numbers)
            if status or signal:
                self._failed.append(FailedExit(pid, ticks, t_ns, status, signal))
        ending = self._endings.get((attributes.get("pid", -1), attributes.get("started_ticks", -1)))
        if ending is None:
            return
        if kind == "process-exited":
            ending.exited, ending.exited_ns = attributes, t_ns
        elif kind == _UNDER_WAY:
            ending.last_begun = OperationUnderWay(
                *(
                    int(attributes.get(name, 0))
                    for name in ("start_ns", "group", "number", "operation")
                )
            )


def _find_most_common(values: np.ndarray) -> int:
    distinct, count = np.unique(values, return_counts=True)
    return int(distinct[np.argmax(count)])


_MIN_FULL_RATIO = 0.95
_MIN_REMOTE_RATIO = 0.5
_MIN_PLACEMENT_SAMPLES = 3
_MIN_THROTTLED_RATIO = 0.01
_MAX_BOUND_NOTES = 16  # of one kind on one node
_SHM_REMEDY = (
    "workers die of a bus error when it is full: give the container more (docker run --shm-size,"
    " a memory-backed emptyDir) or load fewer batches ahead"
)


class HostNotes:
    """Collects notes on one node while its chunks pass through."""

    def __init__(self) -> None:
        self._bound: dict[int, str] = {}  # by pid of the training process
        self._looks: Counter[tuple[str, str, int]] = Counter()
        self._far: Counter[tuple[str, str, int]] = Counter()
        self._full = (0.0, "")
        self._hot_ns: Counter[str] = Counter()
        self._seen_ns = 0
        self._links = LinkTrends()

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Pass chunks through, and record what they show."""
        for chunk in chunks:
            self._observe(chunk)
            yield chunk
            del chunk  # else it stays while the next one is read

    def _observe(self, chunk: Chunk) -> None:
        cpus = get_cpu_topology(chunk)
        self._note_bound(chunk, cpus)
        self._note_far(chunk, cpus)
        self._note_full(chunk)
        self._note_hot(chunk)
        self._links.observe(chunk)

    def notes(self) -> tuple[str, ...]:
        """Return the notes, each without the name of the node."""
        notes = list(self._bound.values())[:_MAX_BOUND_NOTES]
        for (name, device, node), samples in sorted(self._looks.items()):
            remote_ratio = self._far[name, device, node] / max(samples, 1)
            if samples >= _MIN_PLACEMENT_SAMPLES and remote_ratio >= _MIN_REMOTE_RATIO:
                notes.append(
                    f"{name} ran on another NUMA node than its accelerator {device} (node {node})"
                    f" {remote_ratio:.0%} of the time: bind it to CPUs of node {node}"
                )
        if self._full[1]:
            notes.append(self._full[1])
        for package, hot_ns in sorted(self._hot_ns.items()):
            if hot_ns >= _MIN_THROTTLED_RATIO * self._seen_ns > 0:
                notes.append(
                    f"the CPUs of {package} were throttled by heat for"
                    f" {format_quantity(hot_ns, 'ns')} of {format_quantity(self._seen_ns, 'ns')}:"
                    " check the node's cooling"
                )
        return tuple(dict.fromkeys((*notes, *self._links.describe_links())))

    def _note_bound(self, chunk: Chunk, cpus: CpuTopology) -> None:
        """Note workers that may run on fewer CPUs than there are workers."""
        loaders: dict[int, list[Process]] = {}
        for process in chunk.processes.values():
            if is_loader_process(process) and process.placement is not None:
                loaders.setdefault(process.parent_pid, []).append(process)
        for pid, workers in loaders.items():
            allowed = combine_allowed_cpus(workers, cpus)
            cores = cpus.count_cores(allowed)
            if not allowed or len(allowed) == len(cpus.online) or len(workers) <= cores:
                continue
            cpu_count = f"{len(allowed)} of {len(cpus.online)} CPUs"
            if cores < len(allowed):
                cpu_count += f", {cores} cores,"
            self._bound[pid] = (
                f"{len(workers)} dataloader workers of"
                f" {_format_process_name(chunk.processes.get(pid), pid)} may"
                f" run on {cpu_count} only (CPU {format_cpulist(allowed)}): give the job more (srun"
                " --cpus-per-task, the container's cpuset) or undo a binding (--cpu-bind, taskset)"
            )

    def _note_far(self, chunk: Chunk, cpus: CpuTopology) -> None:
        """Count on which NUMA nodes the processes of an accelerator ran."""
        if len(cpus.nodes) < 2:
            return
        for device in chunk.header.devices:
            node = _find_numa_node(device, chunk.header.host)
            if node is None:
                continue
            for process in _find_device_users(chunk, device):
                if process.placement is None:
                    continue
                key = (_format_process_name(process, process.pid), str(device.get("id")), node)
                nodes = [
                    cpus.find_numa_node(cpu) for cpu in process.placement.observed_cpus.tolist()
                ]
                self._looks[key] += sum(ran_on is not None for ran_on in nodes)
                self._far[key] += sum(ran_on not in (None, node) for ran_on in nodes)

    def _note_full(self, chunk: Chunk) -> None:
        for (name, folder), used in chunk.series.items():
            size = chunk.series.get((signals.SHM_SIZE.name, folder))
            if name != signals.SHM_USED.name or size is None:
                continue
            size_bytes = size.values
            if len(size_bytes) != len(used.values) or not (size_bytes > 0).any():
                continue
            ratios = np.where(size_bytes > 0, used.values, np.nan) / np.where(
                size_bytes > 0, size_bytes, 1.0
            )
            if np.isnan(ratios).all():
                continue
            row = int(np.nanargmax(ratios))
            if ratios[row] >= max(_MIN_FULL_RATIO, self._full[0]):
                used_bytes, total_bytes = (
                    format_quantity(used.values[row], "bytes"),
                    format_quantity(size_bytes[row], "bytes"),
                )
                self._full = (
                    ratios[row],
                    f"{folder} was full ({used_bytes} of {total_bytes}): {_SHM_REMEDY}",
                )

    def _note_hot(self, chunk: Chunk) -> None:
        self._seen_ns += chunk.end_ns - chunk.start_ns
        for (name, package), readings in chunk.series.items():
            if name == signals.CPU_THROTTLED.name:
                growth, _ = series.compute_differences(readings.values)
                inside = readings.t_ns[1:] > chunk.start_ns
                self._hot_ns[package] += int(growth[inside].sum())


def merge_node_notes(node_notes: Sequence[tuple[str, Sequence[str]]]) -> tuple[str, ...]:
    """Merge the notes of all nodes, (name, notes) each; equal notes become one."""
    nodes_by_note: dict[str, list[str]] = {}
    for name, notes in node_notes:
        for note in notes:
            nodes_by_note.setdefault(note, []).append(name)
    return tuple(f"{format_host_list(names)}: {note}" for note, names in nodes_by_note.items())


def _find_numa_node(device: Mapping[str, Any], host: Mapping[str, Any]) -> int | None:
    """Find an accelerator's NUMA node by its entry or its PCI address; None = unknown.

    NVML writes the PCI domain with eight digits and capital letters, the kernel with four.
    """
    node = device.get("numa_node")
    cpus = host.get("cpus")
    nodes = cpus.get("accelerators") if isinstance(cpus, dict) else None
    if not isinstance(node, int) and isinstance(nodes, dict):
        domain, _, bus = str(device.get("pci_bus_id", "")).lower().partition(":")
        node = nodes.get(f"{domain[-4:]}:{bus}")
    return node if isinstance(node, int) and node >= 0 else None


def _find_device_users(chunk: Chunk, device: Mapping[str, Any]) -> list[Process]:
    names = {device.get("id"), device.get("uuid")} - {None, ""}
    pids = {device.get("pid"), *(device.get("users") or ())}
    return [
        process
        for process in chunk.processes.values()
        if process.pid in pids or process.registration.get("device") in names
    ]


def _format_process_name(process: Process | None, pid: int) -> str:
    rank = get_global_rank(process.registration) if process is not None else None
    return f"process {pid}" if rank is None else f"rank {rank}"
