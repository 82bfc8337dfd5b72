"""Compare the CPUs that a rank's processes may use with those they would keep busy.

    needed  = sum over threads of (time on a CPU + time ready and waiting for one) / time
    allowed = CPUs that affinity and cpuset permit and that are online

Eight workers that each need a whole CPU but are bound to one CPU need eight and get
one, even if the main process may run anywhere. Two hyper-threads of a core count as two
CPUs, although they do little more work than one.

Stacking order of block devices, so that no byte is counted twice.

A read from a volume (device-mapper, md) is counted by the volume and again by each disk
that serves it; with NVMe multipath it is counted by the head of the namespace and by
the path. Sums therefore use only the devices at the bottom of the stack:

    dm-0 ── md0 ── nvme0n1p3 (of nvme0n1)        nvme2n1 ── nvme2c0n1
                └─ nvme1n1                               └─ nvme2c1n1
    bottom: nvme0n1, nvme1n1, nvme2c0n1, nvme2c1n1

The header describes the stacking (`host.disks`, "on" and "partition_of"); NVMe paths
are recognized by their names. A volume without known devices below it counts itself.

Which waits for pages a disk explains follows from what it did for the job in every 10 seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.analysis.timeline import series
from clusterprof.analysis.timeline.model import Chunk, Float, Int, Process, Rank
from clusterprof.probe.layout import DATA_WAIT, FETCH, STEP, WORKER_START
from clusterprof.trace.schema import Header
from clusterprof.util.ranges import parse_cpulist

_CPU_TOPOLOGY_KEY = "cpus"  # key in `Chunk.shared`
_LIMITING_DEMAND_RATIO = 1.05  # needed over allowed; less is normal scheduling cost


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """The CPUs of a node, from the header of its recording."""

    online: frozenset[int]
    """Empty = unknown."""
    cores: tuple[frozenset[int], ...]
    """CPUs that share a core, for every core; empty if each CPU is a core or the topology is
    unknown.
    """
    nodes: tuple[tuple[int, frozenset[int]], ...]
    """NUMA nodes and their CPUs; empty = unknown."""

    def count_cores(self, cpus: frozenset[int]) -> int:
        """Return the number of cores that these CPUs belong to."""
        if not self.cores:
            return len(cpus)
        return sum(1 for core in self.cores if core & cpus)

    def find_numa_node(self, cpu: int) -> int | None:
        """Return the NUMA node of a CPU, None if unknown."""
        return next((node for node, cpus in self.nodes if cpu in cpus), None)


@dataclass(frozen=True, slots=True)
class CpuSetLoad:
    """Demand of the processes that share one set of CPUs during a window."""

    allowed: frozenset[int]
    """CPUs that are online and on which they may run."""
    online: int
    """Number of online CPUs of the node."""
    cores: int
    """Number of cores that the allowed CPUs belong to."""
    needed: float
    """CPUs that all processes confined to this set would keep busy; NaN if unknown."""
    workers: int
    """Number of dataloader workers among these processes."""

    @property
    def demand_ratio(self) -> float:
        """Needed CPUs over allowed CPUs; 0 if unknown."""
        return self.needed / len(self.allowed) if self.needed >= 0 else 0.0

    @property
    def is_limiting(self) -> bool:
        """True if affinity or cpuset kept the processes from CPUs that they would have used."""
        return len(self.allowed) < self.online and self.demand_ratio > _LIMITING_DEMAND_RATIO


def parse_cpu_topology(header: Header) -> CpuTopology:
    """Parse the CPU topology from the header of a recording.

    Malformed entries count as unknown.
    """
    facts = header.host.get("cpus")
    facts = facts if isinstance(facts, dict) else {}
    nodes = facts.get("nodes")
    nodes = nodes if isinstance(nodes, dict) else {}
    return CpuTopology(
        _parse_cpu_list(facts.get("online")),
        tuple(_parse_cpu_list(core) for core in facts.get("cores") or ()),
        tuple((int(n), _parse_cpu_list(cpus)) for n, cpus in nodes.items() if str(n).isdigit()),
    )


def find_tightest_cpu_set(rank: Rank, start_ns: int, end_ns: int) -> CpuSetLoad | None:
    """Find the CPU set with the highest demand to which processes of the rank are bound.

    start_ns, end_ns: the window. Candidates are the allowed CPUs of each process of the
    rank. All processes of the node that are confined to a set share it, whatever their
    rank. None if no process is bound to fewer CPUs than the node has, or placement was not
    recorded.
    """
    cpus = get_cpu_topology(rank.chunk)
    allowed_sets = [combine_allowed_cpus([process], cpus) for process in (rank.main, *rank.workers)]
    sets = {allowed for allowed in allowed_sets if allowed and allowed != cpus.online}
    if not sets or end_ns <= start_ns:
        return None
    node_processes = [
        (process, combine_allowed_cpus([process], cpus))
        for process in rank.chunk.processes.values()
    ]
    loads = []
    for allowed in sets:
        confined = [
            process for process, cpu_set in node_processes if cpu_set and cpu_set <= allowed
        ]
        needed = _estimate_needed_cpus(confined, start_ns, end_ns)
        workers = sum(is_loader_process(process) for process in confined)
        cores = cpus.count_cores(allowed)
        loads.append(CpuSetLoad(allowed, len(cpus.online), cores, needed, workers))
    return max(loads, key=lambda load: (load.demand_ratio, -len(load.allowed), min(load.allowed)))


def get_cpu_topology(chunk: Chunk) -> CpuTopology:
    """Return the CPU topology of a chunk's node; it is parsed once for all ranks."""
    topology: CpuTopology | None = chunk.shared.get(_CPU_TOPOLOGY_KEY)
    if topology is None:
        topology = chunk.shared[_CPU_TOPOLOGY_KEY] = parse_cpu_topology(chunk.header)
    return topology


def combine_allowed_cpus(processes: Iterable[Process], cpus: CpuTopology) -> frozenset[int]:
    """Combine the CPUs on which any of the processes may run.

    Empty if unknown for one of them.
    """
    allowed: frozenset[int] = frozenset()
    for process in processes:
        cpu_set = process.placement.cpus & cpus.online if process.placement is not None else None
        if not cpu_set:
            return frozenset()
        allowed |= cpu_set
    return allowed


def is_loader_process(process: Process) -> bool:
    """Return whether a process is a dataloader worker: it fetches batches and does not train."""
    if WORKER_START in process.spans:
        return True
    return FETCH in process.spans and not {DATA_WAIT, STEP} & process.spans.keys()


def _estimate_needed_cpus(processes: Iterable[Process], start_ns: int, end_ns: int) -> float:
    threads = [thread for process in processes for thread in process.threads.values()]
    if not any(len(thread.t_ns) > 1 and thread.run_delay_ns[-1] >= 0 for thread in threads):
        return np.nan
    spent_ns = 0.0
    for thread in threads:
        spent_ns += _measure_growth(thread.t_ns, thread.on_cpu_ns, start_ns, end_ns)
        spent_ns += _measure_growth(thread.t_ns, thread.run_delay_ns, start_ns, end_ns)
    return spent_ns / (end_ns - start_ns)


def _measure_growth(t_ns: Int, values: Int, start_ns: int, end_ns: int) -> float:
    """Measure by how much a counter rose in the sampled part of a window; 0 without samples."""
    if len(t_ns) < 2:
        return 0.0
    start, end = max(start_ns, int(t_ns[0])), min(end_ns, int(t_ns[-1]))
    if end <= start:
        return 0.0
    growth = series.compute_column_increase(t_ns, values, np.array([start]), np.array([end]))
    return 0.0 if np.isnan(growth[0]) else float(growth[0])


def _parse_cpu_list(text: object) -> frozenset[int]:
    try:
        return parse_cpulist(text) if isinstance(text, str) else frozenset()
    except ValueError:
        return frozenset()


_NVME_PATH = re.compile(r"(nvme\d+)c\d+(n\d+)")
_BOTTOM_DISKS_KEY, _DISKS_BELOW_KEY = "undermost disks", "disks under"


def find_bottom_disks(chunk: Chunk) -> frozenset[str]:
    """Find the recorded disks that are not stacked on another recorded disk."""
    bottom_disks: frozenset[str] | None = chunk.shared.get(_BOTTOM_DISKS_KEY)
    if bottom_disks is None:
        names = [device for name, device in chunk.series if name == signals.DISK_READ_BYTES.name]
        unstacked = frozenset(name for name in names if not find_disks_below(chunk, name))
        bottom_disks = chunk.shared[_BOTTOM_DISKS_KEY] = unstacked
    return bottom_disks


def find_disks_below(chunk: Chunk, disk: str) -> tuple[str, ...]:
    """Find the recorded bottom disks below one disk, sorted; () if it is a bottom disk itself."""
    disks_below: dict[str, tuple[str, ...]] | None = chunk.shared.get(_DISKS_BELOW_KEY)
    if disks_below is None:
        recorded = {d for name, d in chunk.series if name == signals.DISK_READ_BYTES.name}
        direct_below = _map_disks_below(chunk, recorded)
        disks_below = chunk.shared[_DISKS_BELOW_KEY] = {
            name: tuple(
                sorted(_collect_bottom_disks(name, direct_below, recorded, frozenset()) - {name})
            )
            for name in recorded
        }
    return disks_below.get(disk, ())


def _map_disks_below(chunk: Chunk, recorded: set[str]) -> Mapping[str, list[str]]:
    out: dict[str, list[str]] = {}
    for entry in chunk.header.host.get("disks") or ():
        if not isinstance(entry, dict):
            continue
        below = entry.get("on") or ([entry["partition_of"]] if "partition_of" in entry else [])
        if isinstance(below, list) and below:
            out[str(entry.get("name"))] = [str(disk) for disk in below]
    for name in sorted(recorded):
        if match := _NVME_PATH.fullmatch(name):
            out.setdefault(match[1] + match[2], []).append(name)
    return out


def _collect_bottom_disks(
    name: str, direct_below: Mapping[str, list[str]], recorded: set[str], above: frozenset[str]
) -> set[str]:
    """Collect the recorded disks at the bottom.

    The disk itself if nothing recorded lies below it.
    """
    bottom: set[str] = set()
    for below in direct_below.get(name, ()):
        if below not in above:  # a device table with a cycle is malformed; ignore the cycle
            bottom |= _collect_bottom_disks(below, direct_below, recorded, above | {name})
    return bottom or ({name} & recorded)


DISK_BIN_NS = 10_000_000_000
"""Length of the bins of `measure_disk_bins`, ns: about a hundred samples of a thread."""
_MIN_REQUEST_BYTES = 4096  # a page: no read of a file is smaller


def measure_disk_bins(chunk: Chunk, has_mounts: bool) -> tuple[Float, Float]:
    """Measure what disks did for the job in each bin of 10 s, as two ratios, float64[bins].

    A mount's server may read from the same disk: the job's own requests are at most as many as
    the pages that it read, and each took the disk's mean time of a read.
    """
    count = max(-(-(chunk.end_ns - chunk.start_ns) // DISK_BIN_NS), 1)
    edges = np.minimum(chunk.start_ns + DISK_BIN_NS * np.arange(count + 1), chunk.end_ns)
    length = np.maximum(np.diff(edges), 1).astype(np.float64)
    active_ns = _measure_disk_activity(chunk, edges)
    job_bytes, job_chars = _sum_job_bytes(chunk, edges)
    disk_bytes, reads, read_ns = (
        np.sum(_measure_disk_growth(chunk, signal, edges), axis=0)
        for signal in (signals.DISK_READ_BYTES, signals.DISK_READS, signals.DISK_READ_TIME)
    )
    if np.ndim(disk_bytes) == 0 or np.isnan(job_bytes).any():
        return active_ns / length, np.zeros(count)
    if not has_mounts:
        return active_ns / length, np.where(job_bytes > 0, 1.0, 0.0)
    if np.ndim(reads) and np.ndim(read_ns):
        requests = np.minimum(job_bytes / _MIN_REQUEST_BYTES, reads)
        active_ns = np.minimum(active_ns, requests * read_ns / np.maximum(reads, 1))
    read_bytes = np.minimum(job_bytes, disk_bytes)
    requested = np.maximum(job_chars, job_bytes)
    return active_ns / length, read_bytes / np.maximum(requested, 1)


def _measure_disk_activity(chunk: Chunk, edges: Int) -> Float:
    """Measure for how long the busiest disk had requests in each bin, ns; NaN if unknown.

    The kernel counts busy time, which some versions cut short, and the sum of all reads' times.
    """
    busiest = np.full(len(edges) - 1, np.nan)
    for signal in (signals.DISK_BUSY, signals.DISK_READ_TIME):
        for grown in _measure_disk_growth(chunk, signal, edges):
            busiest = np.fmax(busiest, grown)
    return np.minimum(busiest, np.diff(edges))


def _measure_disk_growth(chunk: Chunk, signal: signals.Signal, edges: Int) -> list[Float]:
    """Measure by how much a counter of each disk grew between the edges, float64[bins]."""
    out, disks = [], find_bottom_disks(chunk)
    for (name, device), readings in chunk.series.items():
        if name == signal.name and device in disks and len(readings.t_ns) > 1:
            inside = np.clip(edges, readings.t_ns[0], readings.t_ns[-1])
            out.append(series.compute_increase(readings, inside[:-1], inside[1:]))
    return out


def _sum_job_bytes(chunk: Chunk, edges: Int) -> tuple[Float, Float]:
    """Sum what all processes of the job read between the edges, float64[bins] each.

    Returns bytes from devices and bytes requested by calls; NaN if no process is known, or an
    active one is not.
    """
    total = np.zeros((2, len(edges) - 1))
    is_known = False
    for process in chunk.processes.values():
        io = process.io
        if io is None or not io.t_ns.size:
            if process.spans or process.threads:
                return np.full(total.shape[1], np.nan), np.full(total.shape[1], np.nan)
            continue
        is_known = True
        inside = np.clip(edges, io.t_ns[0], io.t_ns[-1])
        for row, column in enumerate((io.read_bytes, io.read_chars)):
            grown = series.compute_column_increase(io.t_ns, column, inside[:-1], inside[1:])
            total[row] += np.nan_to_num(grown)
    return (total[0], total[1]) if is_known else (total[0] * np.nan, total[1] * np.nan)
