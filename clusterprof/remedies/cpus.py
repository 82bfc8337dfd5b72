"""How many CPUs a rank is left, and how to ask for more: shared by what is done about the CPU."""

from __future__ import annotations

from clusterprof.remedies.base import Filled
from clusterprof.remedies.commands import run
from clusterprof.remedies.rules import needed_workers
from clusterprof.remedies.scene import Scene


def cpus_said(scene: Scene) -> list[str]:
    """Say what affinity, cpuset and quota leave the rank."""
    setup, machine = scene.setup, scene.machine
    said = []
    if setup.cpus_allowed:
        of = f" of {machine.cpus}" if machine.cpus else ""
        cores = setup.cores_allowed
        few = f", {cores} cores" if cores and cores < setup.cpus_allowed else ""
        ranks = f", shared by {setup.sharing} ranks" if setup.sharing > 1 else ""
        said.append(f"the rank may use {setup.cpus_allowed}{of} CPUs{few}{ranks}")
    if machine.quota_cpus:
        said.append(f"the cgroup's quota is {machine.quota_cpus:g} CPUs")
    return said


def needed_cpus(scene: Scene) -> int | None:
    """Return the CPUs one rank would keep busy, as far as the node has them; None unknown."""
    needed = scene.value("job.cpus_needed_count")
    if needed is not None and needed == needed:
        return max(2, round(needed + 0.499))
    workers = needed_workers(scene) or scene.workers
    if workers is None:
        return None
    there = scene.machine.cpus
    return min(workers + 1, there // max(scene.setup.on_node, 1)) if there else workers + 1


def more_cpus(scene: Scene) -> Filled:
    """Ask the launcher of the job for more CPUs."""
    count = needed_cpus(scene)
    n = "N" if count is None else str(count)
    change = {
        "slurm": f"{run(f'srun --cpus-per-task={n} --cpu-bind=cores')} (srun does not take it over"
        " from sbatch since Slurm 22.05)",
        "kubernetes": f"resources.requests.cpu and limits.cpu: {n} for each rank of the pod",
    }.get(
        scene.machine.launcher,
        f"leave each rank {n} CPUs: undo taskset, numactl --physcpubind or docker run"
        f" --cpuset-cpus, or name {n} CPUs in it",
    )
    what = f"Give each rank {n} CPUs" if count is not None else ""
    return Filled(change, tuple(cpus_said(scene)), what)


def raised_quota(scene: Scene) -> Filled:
    """Ask for a quota that all workers and main threads of the node's ranks fit into."""
    quota, count = scene.machine.quota_cpus, None
    workers = scene.workers
    if workers is not None:
        count = (workers + 1) * max(scene.setup.on_node, 1)
    if quota and (count is None or count <= quota):
        count = round(2 * quota)
    n = "N" if count is None else str(count)
    change = {
        "kubernetes": f"resources.limits.cpu: {n} (or no limit)",
        "slurm": run(f"sbatch --cpus-per-task={n}"),
    }.get(
        scene.machine.launcher,
        f"cpu.max of its cgroup: {run(f'docker run --cpus={n}')}, or no limit",
    )
    said = cpus_said(scene)
    if workers is not None:
        said.append(
            f"{scene.setup.on_node} rank{'' if scene.setup.on_node == 1 else 's'} of"
            f" {workers} workers and a main thread each"
        )
    return Filled(change, tuple(said), f"Raise the CPU quota to {n}" if count else "")
