"""Collect for advice how the ranks of a node were set up, and what the node leaves them.

It also reads from the chunks while they pass through: data loaders as the probe saw them, CPUs that
the affinity allows, quota and limit of the job's cgroup, the least available memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterprof import signals
from clusterprof.analysis.advice.context import Disk, LoaderSettings, Machine, Mount
from clusterprof.analysis.timeline.data_wait.split import count_live_workers
from clusterprof.analysis.timeline.host_resources import (
    CpuTopology,
    combine_allowed_cpus,
    get_cpu_topology,
    is_loader_process,
)
from clusterprof.analysis.timeline.model import Chunk, Process
from clusterprof.analysis.timeline.spans import (
    DataWaitSpans,
    DebugModeSpans,
    LoaderStartSpans,
    StepSpans,
)
from clusterprof.probe import layout

ProcessKey = tuple[int, int]  # pid, started_ticks
_COUNTER_SIGNALS = (
    signals.CGROUP_PERIODS,
    signals.CGROUP_THROTTLED_PERIODS,
    signals.CGROUP_MEMORY_HIGH,
)
_MAX_CPU_USERS = 4
_ProcessName = tuple[str, int]  # name, pid
_DEBUG_MODES = (
    layout.TORCH_PROFILER,
    layout.ANOMALY_DETECTION,
    layout.LINE_TRACING,
    layout.PYTHON_PROFILER,
    layout.BLOCKING_LAUNCHES,
    layout.COLLECTIVE_CHECKS,
)
_TRAINING_SPANS = {layout.DATA_WAIT, layout.STEP, layout.LOADER_START}


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """Setup of one training process."""

    loader: LoaderSettings | None = None
    cpus: frozenset[int] = frozenset()
    """CPUs that it and its workers may run on; empty = unknown."""
    cores: int | None = None
    workers: int | None = None
    """Workers of its loader by the loader's settings, else the most worker processes seen."""
    has_framework: bool = True
    """False if a trace shows nothing of PyTorch or another framework."""
    has_xla: bool = False
    """True if XLA compiled and ran its programs, as in a profile of JAX."""
    has_optimizer: bool = False
    """True if steps of an optimizer or backward passes were seen."""
    debug_mode_ratios: Mapping[int, float] = field(default_factory=dict)
    """Part of the time in steps in which a mode for debugging was on, by its bit in `layout`."""


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """Setup of a node and of its training processes."""

    machine: Machine = field(default_factory=lambda: Machine(""))
    ranks: Mapping[ProcessKey, ProcessSetup] = field(default_factory=dict)


@dataclass(slots=True)
class _RankObservations:
    """What was observed so far of one training process."""

    waited_ns: dict[int, int] = field(default_factory=dict)  # key: workers of the loader waited for
    # the latest, by number of workers
    loaders: dict[int, LoaderSettings] = field(default_factory=dict)
    cpus: frozenset[int] = frozenset()
    cores: int | None = None
    most_workers: int = 0
    has_framework: bool = True
    has_xla: bool = False
    has_optimizer: bool = False
    in_steps_ns: int = 0
    debug_ns: dict[int, int] = field(default_factory=dict)  # by mode


def find_rack(variables: object) -> str:
    """Find the leaf switch of a node in its launcher variables; "" when they state none.

    SLURM_TOPOLOGY_ADDR has the switches from the top down to the node, and
    SLURM_TOPOLOGY_ADDR_PATTERN what each is: "spine.leaf7.node12", "switch.switch.node".
    Source: https://slurm.schedmd.com/sbatch.html, output environment variables.
    """
    values = variables if isinstance(variables, Mapping) else {}
    address = str(values.get("SLURM_TOPOLOGY_ADDR", "")).split(".")
    kinds = str(values.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")).split(".")
    if len(address) != len(kinds) or kinds[-2:] != ["switch", "node"]:
        return ""
    return address[-2]


class SetupCollector:
    """Collects how a node and its ranks were set up."""

    def __init__(self) -> None:
        self._ranks: dict[ProcessKey, _RankObservations] = {}
        self._host: Mapping[str, Any] = {}
        self._launcher: Mapping[str, Any] = {}
        self._cpus: CpuTopology | None = None
        self._least: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._grown: dict[str, float] = {}
        self._connections: dict[str, int] = {}
        self._used_ns, self._job_ns = 0.0, 0.0
        self._sampled_ns = 0
        self._used_ns_of: dict[_ProcessName, float] = {}
        self._wanted_ns_of: dict[_ProcessName, float] = {}
        self._training: set[int] = set()  # pids of ranks and workers

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Pass chunks through, and record what they show."""
        for chunk in chunks:
            self._observe(chunk)
            yield chunk
            del chunk  # else it stays while the next one is read

    def _observe(self, chunk: Chunk) -> None:
        self._host, self._launcher = chunk.header.host, chunk.header.launcher
        self._cpus = get_cpu_topology(chunk)
        self._add_levels(chunk)
        self._add_cpu_time(chunk)
        for process in chunk.processes.values():
            if _TRAINING_SPANS & process.spans.keys() and not is_loader_process(process):
                self._add_rank(chunk, process, self._cpus)

    def result(self, name: str) -> NodeSetup:
        """Return the collected setup; `name` is the display name of the node."""
        ranks = {key: _build_rank_setup(observations) for key, observations in self._ranks.items()}
        return NodeSetup(self._build_machine(name), ranks)

    def _add_rank(self, chunk: Chunk, process: Process, cpus: CpuTopology) -> None:
        observations = self._ranks.setdefault(
            (process.pid, process.started_ticks), _RankObservations()
        )
        framework = process.registration.get("framework")
        observations.has_framework, observations.has_xla = framework != "none", framework == "xla"
        observations.has_optimizer |= bool(
            {layout.OPTIMIZER, layout.BACKWARD} & process.spans.keys()
        )
        _add_debug_modes(observations, process)
        waits = process.get_spans(DataWaitSpans)
        if waits is not None and waits.workers.size:
            for count in np.unique(waits.workers).tolist():
                rows = waits.workers == count
                ns = int((waits.end_ns[rows] - waits.start_ns[rows]).sum())
                observations.waited_ns[count] = observations.waited_ns.get(count, 0) + ns
        starts = process.get_spans(LoaderStartSpans)
        if starts is not None:
            for workers, pinned, prefetch, persistent in zip(
                starts.workers.tolist(),
                starts.pin_memory.tolist(),
                starts.prefetch_factor.tolist(),
                starts.persistent_workers.tolist(),
            ):
                if workers >= 0:
                    observations.loaders[workers] = LoaderSettings(
                        workers, prefetch or None, _parse_flag(pinned), _parse_flag(persistent)
                    )
        workers_of = [
            worker
            for worker in chunk.processes.values()
            if worker.parent_pid == process.pid and is_loader_process(worker)
        ]
        observations.most_workers = max(observations.most_workers, count_live_workers(workers_of))
        allowed = combine_allowed_cpus([process, *workers_of], cpus)
        if allowed:
            observations.cpus, observations.cores = allowed, cpus.count_cores(allowed)

    def _add_levels(self, chunk: Chunk) -> None:
        for signal in (signals.MEMORY_AVAILABLE,):
            values = _get_known_values(chunk, signal.name)
            if values.size:
                least = float(values.min())
                self._least[signal.name] = min(self._least.get(signal.name, least), least)
        for signal in (signals.CGROUP_QUOTA, signals.CGROUP_MEMORY_LIMIT):
            values = _get_known_values(chunk, signal.name)
            if values.size:
                self._last[signal.name] = float(values[-1])
        for signal in _COUNTER_SIGNALS:
            values = _get_known_values(chunk, signal.name)
            if values.size:
                growth = max(0.0, float(values[-1] - values[0]))
                self._grown[signal.name] = self._grown.get(signal.name, 0.0) + growth
        for (name, mount), readings in chunk.series.items():
            if name == signals.NFS_CONNECTIONS.name:
                measured = readings.values[~np.isnan(readings.values)]
                if measured.size:
                    self._connections[mount] = int(measured[-1])

    def _add_cpu_time(self, chunk: Chunk) -> None:
        """Add the CPU time used on the node and by the job; neither where one is unknown."""
        job_ns = 0.0
        for process in chunk.processes.values():
            key = process.name, process.pid
            if _TRAINING_SPANS & process.spans.keys() or is_loader_process(process):
                self._training.add(process.pid)
            threads = process.threads.values()
            used_ns = sum(_compute_growth(t.t_ns, t.on_cpu_ns, chunk) for t in threads)
            delay_ns = sum(_compute_growth(t.t_ns, t.run_delay_ns, chunk) for t in threads)
            self._used_ns_of[key] = self._used_ns_of.get(key, 0.0) + used_ns
            self._wanted_ns_of[key] = self._wanted_ns_of.get(key, 0.0) + used_ns + delay_ns
            job_ns += used_ns
        self._sampled_ns += chunk.end_ns - chunk.start_ns
        busy = [
            _compute_growth(readings.t_ns, readings.values, chunk)
            for signal in (signals.CPU_USER, signals.CPU_SYSTEM)
            if (readings := chunk.series.get((signal.name, "all"))) is not None
        ]
        if len(busy) == 2:
            self._used_ns += sum(busy)
            self._job_ns += job_ns

    def _build_machine(self, name: str) -> Machine:
        host, cpus = self._host, self._cpus
        periods = self._grown.get(signals.CGROUP_PERIODS.name, 0.0)
        throttled = self._grown.get(signals.CGROUP_THROTTLED_PERIODS.name, 0.0)
        least = self._least.get(signals.MEMORY_AVAILABLE.name)
        limit = self._last.get(signals.CGROUP_MEMORY_LIMIT.name)
        high = self._grown.get(signals.CGROUP_MEMORY_HIGH.name)
        memory = host.get("memory_bytes")
        return Machine(
            name,
            launcher=detect_launcher(self._launcher.get("variables") or {}),
            cpus=(len(cpus.online) or None) if cpus is not None else None,
            numa_nodes=(len(cpus.nodes) or None) if cpus is not None else None,
            memory_bytes=memory if isinstance(memory, int) else None,
            min_available_bytes=None if least is None else int(least),
            quota_cpus=self._last.get(signals.CGROUP_QUOTA.name),
            throttled_ratio=throttled / periods if periods > 0 else None,
            other_processes_cpu_ratio=self._others_cpu_ratio(),
            job_cpus_wanted=self._compute_wanted_cpus(),
            cpu_users=self._list_cpu_users(),
            busy_side_processes=self._list_cpu_users(self._training) if self._training else (),
            memory_limit_bytes=None if limit is None else int(limit),
            reclaims=None if high is None else int(high),
            mounts=tuple(self._list_mounts()),
            disks=tuple(_list_disks(host)),
            hcas=tuple(str(hca.get("name")) for hca in _list_entries(host, "hcas")),
        )

    def _compute_wanted_cpus(self) -> float | None:
        """Compute the CPUs that ranks and workers used or waited for; all processes if unknown."""
        wanted_ns = sum(
            ns
            for (_, pid), ns in self._wanted_ns_of.items()
            if pid in self._training or not self._training
        )
        return wanted_ns / self._sampled_ns if wanted_ns else None

    def _list_cpu_users(self, without: Container[int] = ()) -> tuple[tuple[str, int, float], ...]:
        users = [
            (name, pid, ns / self._sampled_ns)
            for (name, pid), ns in self._used_ns_of.items()
            if ns > 0 and pid not in without
        ]
        return tuple(sorted(users, key=lambda user: (-user[2], user[1]))[:_MAX_CPU_USERS])

    def _others_cpu_ratio(self) -> float | None:
        if self._used_ns <= 0 or self._job_ns <= 0 or self._job_ns > 1.1 * self._used_ns:
            return None  # unknown, or implausible
        return max(0.0, 1 - self._job_ns / self._used_ns)

    def _list_mounts(self) -> Iterable[Mount]:
        for mount in _list_entries(self._host, "mounts"):
            point = str(mount.get("point", ""))
            yield Mount(
                point,
                str(mount.get("type", "")),
                str(mount.get("source", "")),
                self._connections.get(point),
            )


def detect_launcher(variables: Mapping[str, Any]) -> str:
    """Detect the launcher of a job, as far as advice depends on it: slurm, kubernetes, or ""."""
    if any(name.startswith("SLURM_") for name in variables):
        return "slurm"
    kubernetes = ("K8S_NODE_NAME", "K8S_JOB_NAME", "JOBSET_NAME", "JOB_COMPLETION_INDEX")
    return "kubernetes" if any(name in variables for name in kubernetes) else ""


def _build_rank_setup(observations: _RankObservations) -> ProcessSetup:
    """Build the setup of a rank with the loader that was waited for longest.

    A loader whose settings are not known counts as no loader.
    """
    waited = sorted(observations.waited_ns.items(), key=lambda item: (-item[1], item[0]))
    if waited:
        loader = observations.loaders.get(waited[0][0])
    else:
        loader = observations.loaders[max(observations.loaders)] if observations.loaders else None
    workers = loader.workers if loader is not None else observations.most_workers or None
    ratios = {
        mode: min(ns / observations.in_steps_ns, 1.0)
        for mode, ns in sorted(observations.debug_ns.items())
        if ns and observations.in_steps_ns
    }
    return ProcessSetup(
        loader,
        observations.cpus,
        observations.cores,
        workers,
        observations.has_framework,
        observations.has_xla,
        observations.has_optimizer,
        ratios,
    )


def _add_debug_modes(observations: _RankObservations, process: Process) -> None:
    """Add the time in steps and in modes for debugging."""
    steps, readings = process.get_spans(StepSpans), process.get_spans(DebugModeSpans)
    if steps is not None:
        observations.in_steps_ns += int((steps.end_ns - steps.start_ns).sum())
    if readings is not None:
        length_ns = readings.end_ns - readings.start_ns
        for mode in _DEBUG_MODES:
            mode_ns = int(length_ns[readings.modes & mode != 0].sum())
            observations.debug_ns[mode] = observations.debug_ns.get(mode, 0) + mode_ns


def _parse_flag(flag: int) -> bool | None:
    return None if flag < 0 else bool(flag)


def _get_known_values(chunk: Chunk, name: str) -> Any:
    readings = chunk.series.get((name, ""))
    if readings is None:
        return np.zeros(0)
    return readings.values[~np.isnan(readings.values)]


def _compute_growth(t_ns: Any, values: Any, chunk: Chunk) -> float:
    """Compute the increase of a counter in a chunk, between its readings there."""
    rows = slice(*np.searchsorted(t_ns, (chunk.start_ns, chunk.end_ns)).tolist())
    inside = values[rows]
    measured = inside[inside >= 0]  # -1 and NaN are unknown
    return max(0.0, float(measured[-1] - measured[0])) if measured.size > 1 else 0.0


def _list_entries(host: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    entries = host.get(name)
    return (
        [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )


def _list_disks(host: Mapping[str, Any]) -> Iterable[Disk]:
    for disk in _list_entries(host, "disks"):
        if not disk.get("partition_of"):
            is_rotational, mounted_on = disk.get("rotational"), disk.get("on")
            yield Disk(
                str(disk.get("name", "")),
                is_rotational if isinstance(is_rotational, bool) else None,
                tuple(map(str, mounted_on)) if isinstance(mounted_on, list) else (),
            )
