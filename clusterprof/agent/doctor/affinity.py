"""The cores on which a rank may run, the CPU quota it gets, and how many workers fit.

`Cpus_allowed_list` of /proc/<pid>/status (docs.kernel.org/filesystems/proc, section
3.7) is the intersection of affinity and cpuset; `thread_siblings_list`
(Documentation/ABI/stable/ sysfs-devices-system-cpu) identifies the hyper-threads of one
core; quotas are the cgroup's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.agent.doctor.environment import ADMIN, JOB, USER, RankProcess, SuggestedChange
from clusterprof.agent.linux import cgroup
from clusterprof.agent.linux.files import Roots, list_folder, read_text
from clusterprof.errors import Unavailable

_MAX_CPUS = 1 << 16
_MAIN_THREADS = 1
_LOW_QUOTA_RATIO = 0.5
_LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def read_affinity(
    roots: Roots, pid: int | None, processes: Sequence[RankProcess], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the cores that a process may use (None = this process), and how ranks share them.

    cpus_allowed, cpus_online (lists of ranges in kernel format), their counts, cores_count
    (physical cores among those allowed), quota_cpus, numa_nodes of the allowed,
    ranks_sharing (ranks that use these cores), ranks_count (ranks that the quota is for),
    workers_count (dataloader workers of one rank that have a core of their own in addition
    to its main thread), worker_threads_count (likewise, counting hyper-threads),
    omp_num_threads, bound, and `ranks`: pid, rank, cpus_allowed, numa_nodes of each. An
    absent key is unknown.
    """
    online = parse_cpus(read_text(roots.sys / "devices/system/cpu/online"))
    allowed = _read_allowed_cpus(roots, pid)
    out: dict[str, Any] = {}
    if not online:
        online = {int(line.split()[0][3:]) for line in _read_cpu_lines(roots)}
    if online:
        out |= {"cpus_online": format_cpus(online), "cpus_online_count": len(online)}
    if allowed and online:
        allowed &= online  # the kernel also lists CPUs that do not exist
    if not allowed:
        return out
    cores = _pick_core_cpus(roots, allowed)
    out |= {"cpus_allowed": format_cpus(allowed), "cpus_allowed_count": len(allowed)}
    out["cores_count"] = len(cores)
    nodes = _read_numa_nodes(roots)
    if nodes:
        out["numa_nodes"] = sorted(node for node, cpus in nodes.items() if cpus & allowed)
        out["numa_nodes_online"] = sorted(nodes)
    quota = _read_cpu_quota(roots, pid)
    if quota is not None:
        out["quota_cpus"] = quota
    ranks = [process for process in processes if process.rank is not None]
    out["ranks"] = [_describe_rank(roots, process, nodes) for process in ranks]
    out["ranks_sharing"] = sharing = _count_sharing_ranks(roots, allowed, ranks, environ)
    out["ranks_count"] = quota_ranks = max(sharing, len(ranks))
    share = None if quota is None else quota / quota_ranks
    out["workers_count"] = _count_workers(len(cores) / sharing, share)
    out["worker_threads_count"] = _count_workers(len(allowed) / sharing, share)
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isascii() and threads.isdigit():
        out["omp_num_threads"] = int(threads)
    out["bound"] = len(allowed) < len(online) if online else None
    return out


def _describe_rank(
    roots: Roots, process: RankProcess, nodes: Mapping[int, set[int]]
) -> dict[str, Any]:
    allowed = _read_allowed_cpus(roots, process.pid)
    out: dict[str, Any] = {"pid": process.pid, "rank": process.rank}
    if allowed:
        out["cpus_allowed"] = format_cpus(allowed)
        out["numa_nodes"] = sorted(node for node, cpus in nodes.items() if cpus & allowed)
    return out


def _count_workers(cpus: float, quota: float | None) -> int:
    usable = cpus if quota is None else min(cpus, quota)
    return max(0, int(usable) - _MAIN_THREADS)


def parse_cpus(words: str) -> set[int]:
    """Parse a CPU list in kernel format ("0-3,8,10-11"); empty set if it is not one."""
    cpus: set[int] = set()
    for word in words.strip().split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return set()
        if int(last or first) >= _MAX_CPUS:
            return set()
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def format_cpus(cpus: set[int]) -> str:
    """Format CPU numbers as the kernel does: "0-3,8"."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def _read_allowed_cpus(roots: Roots, pid: int | None) -> set[int]:
    folder = "self" if pid is None else str(pid)
    for line in read_text(roots.proc / folder / "status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_cpus(line.partition(":")[2])
    return set(os.sched_getaffinity(0)) if pid is None and roots == Roots() else set()


def _read_cpu_lines(roots: Roots) -> list[str]:
    lines = read_text(roots.proc / "stat").splitlines()
    return [line for line in lines if line.startswith("cpu") and line[3:4].isdigit()]


def _pick_core_cpus(roots: Roots, cpus: set[int]) -> set[int]:
    """Return one CPU of every physical core; the hyper-threads of one core are siblings."""
    core_cpus = set()
    for cpu in cpus:
        path = roots.sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        core_cpus.add(min(parse_cpus(read_text(path)) & cpus or {cpu}))
    return core_cpus


def _read_numa_nodes(roots: Roots) -> dict[int, set[int]]:
    folders = list_folder(roots.sys / "devices/system/node")
    return {
        int(folder.name[4:]): parse_cpus(read_text(folder / "cpulist"))
        for folder in folders
        if folder.name.startswith("node") and folder.name[4:].isdigit()
    }


def _read_cpu_quota(roots: Roots, pid: int | None) -> float | None:
    try:
        return cgroup.find_tightest_quota(cgroup.find_cgroup(roots, pid, "cpu"))[1]
    except (Unavailable, ValueError):
        return None


def _count_sharing_ranks(
    roots: Roots, allowed: set[int], ranks: Sequence[RankProcess], environ: Mapping[str, str]
) -> int:
    """Return how many ranks of this node may run on any of these cores, at least 1."""
    sharing = sum(bool(_read_allowed_cpus(roots, process.pid) & allowed) for process in ranks)
    local_sizes = [
        int(environ[name]) for name in _LOCAL_SIZE_VARIABLES if environ.get(name, "").isdigit()
    ]
    separate_cores = "SLURM_STEP_ID" in environ and "LOCAL_WORLD_SIZE" not in environ
    if sharing > 1 or separate_cores or not local_sizes:
        return max(sharing, 1)
    return max(local_sizes[0], 1)


def find_affinity_changes(
    affinity: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], launchers: Sequence[str]
) -> list[SuggestedChange]:
    """Return suggested changes for problems that keep the ranks from the cores they need."""
    allowed = affinity.get("cpus_allowed_count")
    online = affinity.get("cpus_online_count")
    if allowed is None:
        return []
    out: list[SuggestedChange] = []
    sharing, workers = affinity["ranks_sharing"], affinity["workers_count"]
    quota = affinity.get("quota_cpus")
    of_online = f" of the node's {online}" if online else ""
    if quota is not None and quota / affinity["ranks_count"] < allowed / sharing * _LOW_QUOTA_RATIO:
        per_ranks = f" for {affinity['ranks_count']} ranks" if affinity["ranks_count"] > 1 else ""
        message = (
            f"the cgroup's quota is {quota:g} CPUs{per_ranks} on {allowed} that a rank may use"
        )
        remedy = "ask for more CPUs, or raise limits.cpu of the container to what it requests"
        out.append(
            SuggestedChange("affinity", f"{message}: CPU use beyond it is throttled", remedy, JOB)
        )
    elif workers < 1 and online and online > allowed:
        message = (
            f"a rank has {_format_cpu_count(allowed / sharing)}{of_online}: no core for"
            f" dataloader workers"
        )
        out.append(SuggestedChange("affinity", message, _get_more_cores_remedy(launchers), JOB))
    threads = affinity.get("omp_num_threads")
    if threads is not None and threads * sharing > allowed:
        ranks = "a rank" if sharing == 1 else f"{sharing} ranks"
        message = (
            f"OMP_NUM_THREADS={threads} of {ranks} on {_format_cpu_count(allowed)}"
            f" oversubscribes them"
        )
        remedy = f"set OMP_NUM_THREADS={max(1, allowed // sharing)} or less"
        out.append(SuggestedChange("affinity", message, remedy, USER))
    nodes = {rank["pid"]: rank.get("numa_nodes") for rank in affinity["ranks"]}
    far = [
        f"{device['id']} of rank {user['rank']}"
        for device in devices
        for user in device["users"]
        if nodes.get(user["pid"])
        and device.get("numa_node", nodes[user["pid"]][0]) not in nodes[user["pid"]]
    ]
    if far:
        message = f"{', '.join(far)}: the device is at another NUMA node than the rank's CPUs"
        remedy = "bind tasks close to their devices: --gpu-bind=closest, or numactl --cpunodebind"
        out.append(SuggestedChange("affinity", message, remedy, JOB))
    if "cores_count" in affinity and online is None:
        message = "the number of CPUs of the node cannot be read"
        out.append(SuggestedChange("affinity", message, "mount /sys into the container", ADMIN))
    return out


def _format_cpu_count(count: float) -> str:
    return f"{count:g} CPU{'' if count == 1 else 's'}"


def _get_more_cores_remedy(launchers: Sequence[str]) -> str:
    if "Slurm" in launchers:
        return "srun --cpus-per-task=N; srun does not take it from sbatch since 22.05"
    if "Open MPI" in launchers:
        return "mpirun --bind-to none, or --map-by ppr:N:node:PE=CORES; it binds to one core"
    if "MPI" in launchers or "MVAPICH" in launchers or "PALS" in launchers:
        return "give each rank more cores: --depth N --cpu-bind depth, or MV2_CPU_BINDING_POLICY"
    if "Kubernetes" in launchers:
        return "ask for more CPUs in the pod's requests and limits"
    return "start it without taskset or numactl, or with more cores"
