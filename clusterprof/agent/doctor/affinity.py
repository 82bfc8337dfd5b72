"""On which cores a rank may run, how much of them its quota leaves, and how many workers fit.

`Cpus_allowed_list` of /proc/<pid>/status (docs.kernel.org/filesystems/proc, section 3.7) is what
remains of affinity and cpuset together; `thread_siblings_list` (Documentation/ABI/stable/
sysfs-devices-system-cpu) tells hyper-threads of one core apart; quotas are the cgroup's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.errors import Unavailable
from clusterprof.linux import cgroup
from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import entries, text
from clusterprof.recorder.surroundings.change import ADMIN, JOB, YOU, Change
from clusterprof.recorder.surroundings.place import Process

_CPUS_AT_MOST = 1 << 16
_MAIN_THREADS = 1
_FEW_RATIO = 0.5
_SHARED_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def read_affinity(
    roots: Roots,
    pid: int | None,
    processes: Sequence[Process],
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Return the cores that a process may use (None = our own), and what they are good for.

    cpus_allowed, cpus_online (lists of ranges as the kernel writes them), their counts, cores_count
    (physical, of those allowed), quota_cpus, numa_nodes of the allowed, ranks_sharing (how many
    ranks have the same cores), ranks_count (how many the quota is for), workers_count (dataloader
    workers of one rank that have a core of their own beside its main thread),
    worker_threads_count (the same with hyper-threads), omp_num_threads, bound, and `ranks`: pid,
    rank, cpus_allowed, numa_nodes of each. A key that is not there is unknown.
    """
    online = parse_cpus(text(roots.sys / "devices/system/cpu/online"))
    allowed = _allowed(roots, pid)
    out: dict[str, Any] = {}
    if not online:
        online = {int(line.split()[0][3:]) for line in _cpu_lines(roots)}
    if online:
        out |= {"cpus_online": ranges(online), "cpus_online_count": len(online)}
    if allowed and online:
        allowed &= online  # the kernel lists CPUs that are not there
    if not allowed:
        return out
    cores = _cores(roots, allowed)
    out |= {"cpus_allowed": ranges(allowed), "cpus_allowed_count": len(allowed)}
    out["cores_count"] = len(cores)
    nodes = _numa(roots)
    if nodes:
        out["numa_nodes"] = sorted(node for node, cpus in nodes.items() if cpus & allowed)
        out["numa_nodes_online"] = sorted(nodes)
    quota = _quota(roots, pid)
    if quota is not None:
        out["quota_cpus"] = quota
    ranks = [one for one in processes if one.rank is not None]
    out["ranks"] = [_rank(roots, one, nodes) for one in ranks]
    out["ranks_sharing"] = sharing = _sharing(roots, allowed, ranks, environ)
    out["ranks_count"] = all_ranks = max(sharing, len(ranks))
    share = None if quota is None else quota / all_ranks
    out["workers_count"] = _fit(len(cores) / sharing, share)
    out["worker_threads_count"] = _fit(len(allowed) / sharing, share)
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isascii() and threads.isdigit():
        out["omp_num_threads"] = int(threads)
    out["bound"] = len(allowed) < len(online) if online else None
    return out


def _rank(roots: Roots, process: Process, nodes: Mapping[int, set[int]]) -> dict[str, Any]:
    allowed = _allowed(roots, process.pid)
    out: dict[str, Any] = {"pid": process.pid, "rank": process.rank}
    if allowed:
        out["cpus_allowed"] = ranges(allowed)
        out["numa_nodes"] = sorted(node for node, cpus in nodes.items() if cpus & allowed)
    return out


def _fit(cpus: float, quota: float | None) -> int:
    usable = cpus if quota is None else min(cpus, quota)
    return max(0, int(usable) - _MAIN_THREADS)


def parse_cpus(words: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it ("0-3,8,10-11"); empty if it is none."""
    found: set[int] = set()
    for word in words.strip().split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return set()
        if int(last or first) >= _CPUS_AT_MOST:
            return set()
        found.update(range(int(first), int(last or first) + 1))
    return found


def ranges(cpus: set[int]) -> str:
    """Write numbers as the kernel does: "0-3,8"."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def _allowed(roots: Roots, pid: int | None) -> set[int]:
    who = "self" if pid is None else str(pid)
    for line in text(roots.proc / who / "status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_cpus(line.partition(":")[2])
    return set(os.sched_getaffinity(0)) if pid is None and roots == Roots() else set()


def _cpu_lines(roots: Roots) -> list[str]:
    lines = text(roots.proc / "stat").splitlines()
    return [line for line in lines if line.startswith("cpu") and line[3:4].isdigit()]


def _cores(roots: Roots, cpus: set[int]) -> set[int]:
    """Return one CPU of every physical core: hyper-threads of one core are siblings."""
    found = set()
    for cpu in cpus:
        path = roots.sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        found.add(min(parse_cpus(text(path)) & cpus or {cpu}))
    return found


def _numa(roots: Roots) -> dict[int, set[int]]:
    folders = entries(roots.sys / "devices/system/node")
    return {
        int(folder.name[4:]): parse_cpus(text(folder / "cpulist"))
        for folder in folders
        if folder.name.startswith("node") and folder.name[4:].isdigit()
    }


def _quota(roots: Roots, pid: int | None) -> float | None:
    try:
        return cgroup.tightest_quota(cgroup.find_cgroup(roots, pid, "cpu"))[1]
    except (Unavailable, ValueError):
        return None


def _sharing(
    roots: Roots, allowed: set[int], ranks: Sequence[Process], environ: Mapping[str, str]
) -> int:
    """Return how many ranks of this node may run on any of these cores, at least 1."""
    same = sum(bool(_allowed(roots, one.pid) & allowed) for one in ranks)
    said = [int(environ[name]) for name in _SHARED_RANKS if environ.get(name, "").isdigit()]
    bound_apart = "SLURM_STEP_ID" in environ and "LOCAL_WORLD_SIZE" not in environ
    if same > 1 or bound_apart or not said:
        return max(same, 1)
    return max(said[0], 1)


def changes(
    affinity: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], launchers: Sequence[str]
) -> list[Change]:
    """Say what keeps the ranks from the cores they need."""
    allowed = affinity.get("cpus_allowed_count")
    online = affinity.get("cpus_online_count")
    if allowed is None:
        return []
    out: list[Change] = []
    sharing, workers = affinity["ranks_sharing"], affinity["workers_count"]
    quota = affinity.get("quota_cpus")
    of = f" of the node's {online}" if online else ""
    if quota is not None and quota / affinity["ranks_count"] < allowed / sharing * _FEW_RATIO:
        per = f" for {affinity['ranks_count']} ranks" if affinity["ranks_count"] > 1 else ""
        message = f"the cgroup's quota is {quota:g} CPUs{per} on {allowed} that a rank may use"
        remedy = "ask for more CPUs, or raise limits.cpu of the container to what it requests"
        out.append(Change("affinity", f"{message}: what is beyond it is throttled", remedy, JOB))
    elif workers < 1 and online and online > allowed:
        message = f"a rank has {_cpus(allowed / sharing)}{of}: no core for dataloader workers"
        out.append(Change("affinity", message, _more_cores(launchers), JOB))
    threads = affinity.get("omp_num_threads")
    if threads is not None and threads * sharing > allowed:
        ranks = "a rank" if sharing == 1 else f"{sharing} ranks"
        message = f"OMP_NUM_THREADS={threads} of {ranks} on {_cpus(allowed)} takes turns"
        remedy = f"set OMP_NUM_THREADS={max(1, allowed // sharing)} or less"
        out.append(Change("affinity", message, remedy, YOU))
    nodes = {one["pid"]: one.get("numa_nodes") for one in affinity["ranks"]}
    far = [
        f"{one['id']} of rank {user['rank']}"
        for one in devices
        for user in one["users"]
        if nodes.get(user["pid"]) and one.get("numa_node", nodes[user["pid"]][0])
        not in nodes[user["pid"]]
    ]  # fmt: skip
    if far:
        message = f"{', '.join(far)}: the device is at another NUMA node than the rank's CPUs"
        remedy = "bind tasks close to their devices: --gpu-bind=closest, or numactl --cpunodebind"
        out.append(Change("affinity", message, remedy, JOB))
    if "cores_count" in affinity and online is None:
        message = "how many CPUs the node has cannot be read"
        out.append(Change("affinity", message, "mount /sys into the container", ADMIN))
    return out


def _cpus(count: float) -> str:
    return f"{count:g} CPU{'' if count == 1 else 's'}"


def _more_cores(launchers: Sequence[str]) -> str:
    if "Slurm" in launchers:
        return "srun --cpus-per-task=N; srun does not take it from sbatch since 22.05"
    if "Open MPI" in launchers:
        return "mpirun --bind-to none, or --map-by ppr:N:node:PE=CORES; it binds to one core"
    if "MPI" in launchers or "MVAPICH" in launchers or "PALS" in launchers:
        return "give each rank more cores: --depth N --cpu-bind depth, or MV2_CPU_BINDING_POLICY"
    if "Kubernetes" in launchers:
        return "ask for more CPUs in the pod's requests and limits"
    return "start it without taskset or numactl, or with more cores"
