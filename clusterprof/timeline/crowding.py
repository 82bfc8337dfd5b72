"""How many CPUs the processes of a rank may run on, against how many they would have kept busy.

    needed  = sum over threads of (time on a CPU + time ready and waiting for one) / time
    allowed = what affinity and cpuset leave to them, as far as it is online

Eight workers that each want a whole CPU and were bound to one need eight and get one, also where
the main process may run anywhere. Two hyper-threads of a core are two CPUs here, and do little more
than one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from clusterprof.cpulists import parse_cpulist
from clusterprof.probe.layout import DATA_WAIT, FETCH, STEP, WORKER_START
from clusterprof.timeline import series
from clusterprof.timeline.model import Chunk, Int, Process, Rank
from clusterprof.trace.schema import Header

_CPUS = "cpus"  # name in `Chunk.shared`
_CROWDED_FROM_RATIO = 1.05  # needed over allowed: less is what every scheduler costs


@dataclass(frozen=True, slots=True)
class Cpus:
    """The CPUs of a node, from the header of its recording."""

    online: frozenset[int]
    """Empty = unknown."""
    cores: tuple[frozenset[int], ...]
    """CPUs that share a core, for every core; empty where each CPU is a core, or it is unknown."""
    nodes: tuple[tuple[int, frozenset[int]], ...]
    """NUMA nodes and their CPUs; empty = unknown."""

    def cores_among(self, cpus: frozenset[int]) -> int:
        """Return how many cores some CPUs are."""
        if not self.cores:
            return len(cpus)
        return sum(1 for core in self.cores if core & cpus)

    def node_of(self, cpu: int) -> int | None:
        """Return the NUMA node of a CPU, None when unknown."""
        return next((node for node, cpus in self.nodes if cpu in cpus), None)


@dataclass(frozen=True, slots=True)
class Crowd:
    """What the processes of a rank had to share for a while."""

    allowed: frozenset[int]
    """CPUs that are online and that they may run on."""
    online: int
    """CPUs of the node."""
    cores: int
    """Cores that the allowed CPUs are."""
    needed: float
    """CPUs that all who may run nowhere else would have kept busy; NaN unknown."""
    workers: int
    """Dataloader workers among them."""

    @property
    def pressed(self) -> float:
        """Needed over allowed; 0 when unknown."""
        return self.needed / len(self.allowed) if self.needed >= 0 else 0.0

    @property
    def bound(self) -> bool:
        """True when affinity or cpuset kept them from CPUs that they would have used."""
        return len(self.allowed) < self.online and self.pressed > _CROWDED_FROM_RATIO


def cpus_of(header: Header) -> Cpus:
    """Return the CPUs that a header names; garbage is unknown."""
    facts = header.host.get("cpus")
    facts = facts if isinstance(facts, dict) else {}
    nodes = facts.get("nodes")
    nodes = nodes if isinstance(nodes, dict) else {}
    return Cpus(
        _listed(facts.get("online")),
        tuple(_listed(core) for core in facts.get("cores") or ()),
        tuple((int(n), _listed(cpus)) for n, cpus in nodes.items() if str(n).isdigit()),
    )


def crowd_of(rank: Rank, start_ns: int, end_ns: int) -> Crowd | None:
    """Return the tightest set of CPUs that processes of the rank are bound to, in a stretch.

    A set is that of any of them; who may run nowhere else shares it, of whichever rank. None when
    none is bound to fewer CPUs than the node has, or nobody looked.
    """
    cpus = node_cpus(rank.chunk)
    found = [allowed_to([one], cpus) for one in (rank.main, *rank.workers)]
    sets = {allowed for allowed in found if allowed and allowed != cpus.online}
    if not sets or end_ns <= start_ns:
        return None
    everybody = [(one, allowed_to([one], cpus)) for one in rank.chunk.processes.values()]
    crowds = []
    for allowed in sets:
        inside = [one for one, own in everybody if own and own <= allowed]
        needed = _needed(inside, start_ns, end_ns)
        workers = sum(is_loader(one) for one in inside)
        cores = cpus.cores_among(allowed)
        crowds.append(Crowd(allowed, len(cpus.online), cores, needed, workers))
    return max(crowds, key=lambda one: (one.pressed, -len(one.allowed), min(one.allowed)))


def node_cpus(chunk: Chunk) -> Cpus:
    """Return the CPUs of a chunk's node; worked out once for all its ranks."""
    known: Cpus | None = chunk.shared.get(_CPUS)
    if known is None:
        known = chunk.shared[_CPUS] = cpus_of(chunk.header)
    return known


def allowed_to(processes: Iterable[Process], cpus: Cpus) -> frozenset[int]:
    """Return the CPUs that any of them may run on; empty when unknown of one of them."""
    found: frozenset[int] = frozenset()
    for process in processes:
        own = process.placement.cpus & cpus.online if process.placement is not None else None
        if not own:
            return frozenset()
        found |= own
    return found


def is_loader(process: Process) -> bool:
    """Return whether a process is a dataloader worker: it fetches and does not train."""
    if WORKER_START in process.spans:
        return True
    return FETCH in process.spans and not {DATA_WAIT, STEP} & process.spans.keys()


def _needed(processes: Iterable[Process], start_ns: int, end_ns: int) -> float:
    threads = [thread for process in processes for thread in process.threads.values()]
    if not any(len(thread.t_ns) > 1 and thread.run_delay_ns[-1] >= 0 for thread in threads):
        return np.nan
    spent_ns = 0.0
    for thread in threads:
        spent_ns += _growth(thread.t_ns, thread.on_cpu_ns, start_ns, end_ns)
        spent_ns += _growth(thread.t_ns, thread.run_delay_ns, start_ns, end_ns)
    return spent_ns / (end_ns - start_ns)


def _growth(t_ns: Int, values: Int, start_ns: int, end_ns: int) -> float:
    """By how much a counter rose in the part of a stretch that was read; 0 where nothing was."""
    if len(t_ns) < 2:
        return 0.0
    start, end = max(start_ns, int(t_ns[0])), min(end_ns, int(t_ns[-1]))
    if end <= start:
        return 0.0
    growth = series.rise_of(t_ns, values, np.array([start]), np.array([end]))
    return 0.0 if np.isnan(growth[0]) else float(growth[0])


def _listed(text: object) -> frozenset[int]:
    try:
        return parse_cpulist(text) if isinstance(text, str) else frozenset()
    except ValueError:
        return frozenset()
