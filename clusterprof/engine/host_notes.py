"""What a reader should know of a node's host: bound workers, far GPUs, full memory, heat.

No share of lost time is claimed by these; they are said once per kind, for all nodes alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clusterprof import signals
from clusterprof.cpulists import cpulist
from clusterprof.hostlists import fold
from clusterprof.timeline import series
from clusterprof.timeline.crowding import Cpus, allowed_to, is_loader, node_cpus
from clusterprof.timeline.model import Chunk, Process
from clusterprof.timeline.ranks import rank_number
from clusterprof.units import human

_FULL_FROM_RATIO = 0.95
_FAR_FROM_RATIO = 0.5
_LOOKS_AT_LEAST = 3
_HOT_FROM_RATIO = 0.01
_MOST = 16  # of one kind on one node
_SHM_REMEDY = (
    "workers die of a bus error when it is full: give the container more (docker run --shm-size,"
    " a memory-backed emptyDir) or load fewer batches ahead"
)


class HostNotes:
    """Sentences about one node, gathered while its chunks pass by."""

    def __init__(self) -> None:
        self._bound: dict[int, str] = {}  # by pid of the training process
        self._looks: Counter[tuple[str, str, int]] = Counter()
        self._far: Counter[tuple[str, str, int]] = Counter()
        self._full = (0.0, "")
        self._hot_ns: Counter[str] = Counter()
        self._seen_ns = 0

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Pass chunks through and note what they show."""
        for chunk in chunks:
            cpus = node_cpus(chunk)
            self._note_bound(chunk, cpus)
            self._note_far(chunk, cpus)
            self._note_full(chunk)
            self._note_hot(chunk)
            yield chunk

    def notes(self) -> tuple[str, ...]:
        """Return the sentences, each without the name of the node."""
        said = list(self._bound.values())[:_MOST]
        for (who, device, node), looks in sorted(self._looks.items()):
            far = self._far[who, device, node] / max(looks, 1)
            if looks >= _LOOKS_AT_LEAST and far >= _FAR_FROM_RATIO:
                said.append(
                    f"{who} ran on another NUMA node than its accelerator {device} (node {node})"
                    f" {far:.0%} of the time: bind it to CPUs of node {node}"
                )
        if self._full[1]:
            said.append(self._full[1])
        for package, hot_ns in sorted(self._hot_ns.items()):
            if hot_ns >= _HOT_FROM_RATIO * self._seen_ns > 0:
                said.append(
                    f"heat slowed the CPUs of {package} for {human(hot_ns, 'ns')} of"
                    f" {human(self._seen_ns, 'ns')}: look at the node's cooling"
                )
        return tuple(dict.fromkeys(said))

    def _note_bound(self, chunk: Chunk, cpus: Cpus) -> None:
        """Workers that may run on fewer CPUs than there are of them."""
        loaders: dict[int, list[Process]] = {}
        for process in chunk.processes.values():
            if is_loader(process) and process.placement is not None:
                loaders.setdefault(process.parent_pid, []).append(process)
        for pid, workers in loaders.items():
            allowed = allowed_to(workers, cpus)
            cores = cpus.cores_among(allowed)
            if not allowed or len(allowed) == len(cpus.online) or len(workers) <= cores:
                continue
            only = f"{len(allowed)} of {len(cpus.online)} CPUs"
            if cores < len(allowed):
                only += f", {cores} cores,"
            self._bound[pid] = (
                f"{len(workers)} dataloader workers of {_name(chunk.processes.get(pid), pid)} may"
                f" run on {only} only (CPU {cpulist(allowed)}): give the job more (srun"
                " --cpus-per-task, the container's cpuset) or undo a binding (--cpu-bind, taskset)"
            )

    def _note_far(self, chunk: Chunk, cpus: Cpus) -> None:
        """Where processes ran that have an accelerator of a known NUMA node."""
        if len(cpus.nodes) < 2:
            return
        for device in chunk.header.devices:
            node = _node_of(device, chunk.header.host)
            if node is None:
                continue
            for process in _users(chunk, device):
                if process.placement is None:
                    continue
                key = (_name(process, process.pid), str(device.get("id")), node)
                nodes = [cpus.node_of(cpu) for cpu in process.placement.ran_on.tolist()]
                self._looks[key] += sum(one is not None for one in nodes)
                self._far[key] += sum(one not in (None, node) for one in nodes)

    def _note_full(self, chunk: Chunk) -> None:
        for (name, folder), used in chunk.series.items():
            size = chunk.series.get((signals.SHM_SIZE.name, folder))
            if name != signals.SHM_USED.name or size is None:
                continue
            whole = size.values
            if len(whole) != len(used.values) or not (whole > 0).any():
                continue
            ratios = np.where(whole > 0, used.values, np.nan) / np.where(whole > 0, whole, 1.0)
            if np.isnan(ratios).all():
                continue
            row = int(np.nanargmax(ratios))
            if ratios[row] >= max(_FULL_FROM_RATIO, self._full[0]):
                part, most = human(used.values[row], "bytes"), human(whole[row], "bytes")
                self._full = ratios[row], f"{folder} was full ({part} of {most}): {_SHM_REMEDY}"

    def _note_hot(self, chunk: Chunk) -> None:
        self._seen_ns += chunk.end_ns - chunk.start_ns
        for (name, package), readings in chunk.series.items():
            if name == signals.CPU_THROTTLED.name:
                growth, _ = series.differences(readings.values)
                inside = readings.t_ns[1:] > chunk.start_ns
                self._hot_ns[package] += int(growth[inside].sum())


def of_nodes(said: Sequence[tuple[str, Sequence[str]]]) -> tuple[str, ...]:
    """Return the notes of all nodes, (name, notes) each; what holds for several is said once."""
    where: dict[str, list[str]] = {}
    for name, notes in said:
        for note in notes:
            where.setdefault(note, []).append(name)
    return tuple(f"{fold(names)}: {note}" for note, names in where.items())


def _node_of(device: Mapping[str, Any], host: Mapping[str, Any]) -> int | None:
    """The NUMA node of an accelerator by its own entry, else by its PCI address; None unknown.

    NVML writes eight digits for the PCI domain and capitals, the kernel four.
    """
    node = device.get("numa_node")
    cpus = host.get("cpus")
    nodes = cpus.get("accelerators") if isinstance(cpus, dict) else None
    if not isinstance(node, int) and isinstance(nodes, dict):
        domain, _, rest = str(device.get("pci_bus_id", "")).lower().partition(":")
        node = nodes.get(f"{domain[-4:]}:{rest}")
    return node if isinstance(node, int) and node >= 0 else None


def _users(chunk: Chunk, device: Mapping[str, Any]) -> list[Process]:
    names = {device.get("id"), device.get("uuid")} - {None, ""}
    pids = {device.get("pid"), *(device.get("users") or ())}
    return [
        one
        for one in chunk.processes.values()
        if one.pid in pids or one.registration.get("device") in names
    ]


def _name(process: Process | None, pid: int) -> str:
    rank = rank_number(process.registration) if process is not None else None
    return f"process {pid}" if rank is None else f"rank {rank}"
