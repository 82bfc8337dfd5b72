"""How the ranks of a node were set up, and what the node leaves them: gathered for advice.

Read off the chunks while they pass by: loaders as the probe found them, CPUs that affinity leaves,
quota and limit of the job's cgroup, the least memory that was to be had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterprof import signals
from clusterprof.probe import layout
from clusterprof.remedies.scene import Disk, Loader, Machine, Mount
from clusterprof.timeline.crowding import Cpus, allowed_to, is_loader, node_cpus
from clusterprof.timeline.model import Chunk, Process

Key = tuple[int, int]  # pid, started_ticks
_COUNTED = (
    signals.CGROUP_PERIODS,
    signals.CGROUP_THROTTLED_PERIODS,
    signals.CGROUP_MEMORY_HIGH,
)
_TRAINS = {layout.DATA_WAIT, layout.STEP, layout.LOADER_START}


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What is known of one training process."""

    loader: Loader | None = None
    cpus: frozenset[int] = frozenset()
    """What it and its workers may run on; empty = unknown."""
    cores: int | None = None
    workers: int | None = None
    """Of its loader, by its settings, else the processes that loaded for it at the most."""


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """A node, and the training processes that were seen on it."""

    machine: Machine = field(default_factory=lambda: Machine(""))
    ranks: Mapping[Key, RankSetup] = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    """What was seen so far of one training process."""

    waited_ns: dict[int, int] = field(default_factory=dict)  # by workers of the loader waited for
    loaders: dict[int, Loader] = field(default_factory=dict)  # the latest, by its workers
    cpus: frozenset[int] = frozenset()
    cores: int | None = None
    most_workers: int = 0


class Setups:
    """Gathers how a node and its ranks were set up."""

    def __init__(self) -> None:
        self._ranks: dict[Key, _Seen] = {}
        self._host: Mapping[str, Any] = {}
        self._launcher: Mapping[str, Any] = {}
        self._cpus: Cpus | None = None
        self._least: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._grown: dict[str, float] = {}
        self._connections: dict[str, int] = {}
        self._used_ns, self._job_ns = 0.0, 0.0

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Pass chunks through and note what they show."""
        for chunk in chunks:
            self._host, self._launcher = chunk.header.host, chunk.header.launcher
            self._cpus = node_cpus(chunk)
            self._levels(chunk)
            self._cpu_time(chunk)
            for process in chunk.processes.values():
                if _TRAINS & process.spans.keys() and not is_loader(process):
                    self._rank(chunk, process, self._cpus)
            yield chunk

    def done(self, name: str) -> NodeSetup:
        """Return what was gathered; `name` is the node's for display."""
        ranks = {key: _setup(seen) for key, seen in self._ranks.items()}
        return NodeSetup(self._machine(name), ranks)

    def _rank(self, chunk: Chunk, process: Process, cpus: Cpus) -> None:
        seen = self._ranks.setdefault((process.pid, process.started_ticks), _Seen())
        waits = process.spans.get(layout.DATA_WAIT)
        if waits is not None and waits.c.size:
            for count in np.unique(waits.c).tolist():
                rows = waits.c == count
                ns = int((waits.end_ns[rows] - waits.start_ns[rows]).sum())
                seen.waited_ns[count] = seen.waited_ns.get(count, 0) + ns
        begun = process.spans.get(layout.LOADER_START)
        if begun is not None:
            for workers, pinned, prefetch, persistent in zip(
                begun.a.tolist(), begun.b.tolist(), begun.c.tolist(), begun.d.tolist()
            ):
                if workers >= 0:
                    seen.loaders[workers] = Loader(
                        workers, prefetch or None, _told(pinned), _told(persistent)
                    )
        workers_of = [
            one
            for one in chunk.processes.values()
            if one.parent_pid == process.pid and is_loader(one)
        ]
        seen.most_workers = max(seen.most_workers, len(workers_of))
        allowed = allowed_to([process, *workers_of], cpus)
        if allowed:
            seen.cpus, seen.cores = allowed, cpus.cores_among(allowed)

    def _levels(self, chunk: Chunk) -> None:
        for signal in (signals.MEMORY_AVAILABLE,):
            values = _values(chunk, signal.name)
            if values.size:
                least = float(values.min())
                self._least[signal.name] = min(self._least.get(signal.name, least), least)
        for signal in (signals.CGROUP_QUOTA, signals.CGROUP_MEMORY_LIMIT):
            values = _values(chunk, signal.name)
            if values.size:
                self._last[signal.name] = float(values[-1])
        for signal in _COUNTED:
            values = _values(chunk, signal.name)
            if values.size:
                growth = max(0.0, float(values[-1] - values[0]))
                self._grown[signal.name] = self._grown.get(signal.name, 0.0) + growth
        for (name, mount), readings in chunk.series.items():
            if name == signals.NFS_CONNECTIONS.name:
                known = readings.values[~np.isnan(readings.values)]
                if known.size:
                    self._connections[mount] = int(known[-1])

    def _cpu_time(self, chunk: Chunk) -> None:
        """Add what was used of the node's CPUs, and by the job: neither where one is unknown."""
        busy = [
            _growth(readings.t_ns, readings.values, chunk)
            for signal in (signals.CPU_USER, signals.CPU_SYSTEM)
            if (readings := chunk.series.get((signal.name, "all"))) is not None
        ]
        if len(busy) < 2:
            return
        self._used_ns += sum(busy)
        for process in chunk.processes.values():
            for thread in process.threads.values():
                self._job_ns += _growth(thread.t_ns, thread.on_cpu_ns, chunk)

    def _machine(self, name: str) -> Machine:
        host, cpus = self._host, self._cpus
        periods = self._grown.get(signals.CGROUP_PERIODS.name, 0.0)
        throttled = self._grown.get(signals.CGROUP_THROTTLED_PERIODS.name, 0.0)
        least = self._least.get(signals.MEMORY_AVAILABLE.name)
        limit = self._last.get(signals.CGROUP_MEMORY_LIMIT.name)
        high = self._grown.get(signals.CGROUP_MEMORY_HIGH.name)
        memory = host.get("memory_bytes")
        return Machine(
            name,
            launcher=launcher_of(self._launcher.get("variables") or {}),
            cpus=(len(cpus.online) or None) if cpus is not None else None,
            numa_nodes=(len(cpus.nodes) or None) if cpus is not None else None,
            memory_bytes=memory if isinstance(memory, int) else None,
            available_least_bytes=None if least is None else int(least),
            quota_cpus=self._last.get(signals.CGROUP_QUOTA.name),
            throttled_ratio=throttled / periods if periods > 0 else None,
            others_cpu_ratio=self._others(),
            limit_bytes=None if limit is None else int(limit),
            reclaims=None if high is None else int(high),
            mounts=tuple(self._mounts()),
            disks=tuple(_disks(host)),
            hcas=tuple(str(one.get("name")) for one in _entries(host, "hcas")),
        )

    def _others(self) -> float | None:
        if self._used_ns <= 0 or self._job_ns <= 0 or self._job_ns > 1.1 * self._used_ns:
            return None  # not known, or not to be believed
        return max(0.0, 1 - self._job_ns / self._used_ns)

    def _mounts(self) -> Iterable[Mount]:
        for one in _entries(self._host, "mounts"):
            point = str(one.get("point", ""))
            yield Mount(
                point, str(one.get("type", "")), str(one.get("source", "")),
                self._connections.get(point),
            )  # fmt: skip


def launcher_of(variables: Mapping[str, Any]) -> str:
    """Return who began the job, as far as the advice differs: slurm, kubernetes, or ""."""
    if any(name.startswith("SLURM_") for name in variables):
        return "slurm"
    kubernetes = ("K8S_NODE_NAME", "JOBSET_NAME", "JOB_COMPLETION_INDEX")
    return "kubernetes" if any(name in variables for name in kubernetes) else ""


def _setup(seen: _Seen) -> RankSetup:
    """The loader that was waited for most; one that is not known by its settings is none."""
    waited = sorted(seen.waited_ns.items(), key=lambda one: (-one[1], one[0]))
    if waited:
        loader = seen.loaders.get(waited[0][0])
    else:
        loader = seen.loaders[max(seen.loaders)] if seen.loaders else None
    workers = loader.workers if loader is not None else seen.most_workers or None
    return RankSetup(loader, seen.cpus, seen.cores, workers)


def _told(flag: int) -> bool | None:
    return None if flag < 0 else bool(flag)


def _values(chunk: Chunk, name: str) -> Any:
    readings = chunk.series.get((name, ""))
    if readings is None:
        return np.zeros(0)
    return readings.values[~np.isnan(readings.values)]


def _growth(t_ns: Any, values: Any, chunk: Chunk) -> float:
    """By how much a counter rose in a chunk, as far as it was read there."""
    rows = slice(*np.searchsorted(t_ns, (chunk.start_ns, chunk.end_ns)).tolist())
    inside = values[rows]
    known = inside[inside >= 0]  # -1 and NaN are unknown
    return max(0.0, float(known[-1] - known[0])) if known.size > 1 else 0.0


def _entries(host: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = host.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _disks(host: Mapping[str, Any]) -> Iterable[Disk]:
    for one in _entries(host, "disks"):
        if not one.get("partition_of"):
            rotates, on = one.get("rotational"), one.get("on")
            yield Disk(
                str(one.get("name", "")),
                rotates if isinstance(rotates, bool) else None,
                tuple(map(str, on)) if isinstance(on, list) else (),
            )
