"""What to do where threads get no CPU, no memory, or not their interpreter."""

from __future__ import annotations

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.cpus import cpus_said, more_cpus
from clusterprof.remedies.rules import ONE_NUMA_NODE, ONE_RANK, room_for_workers
from clusterprof.remedies.scene import Scene
from clusterprof.units import human

_GREYHOUND = "CPU contention lengthened jobs by 12 % in probes (Greyhound, ATC 2025)"


def _fewer_threads(scene: Scene) -> Filled:
    room, workers = room_for_workers(scene), scene.workers
    threads, within = run("OMP_NUM_THREADS=1 MKL_NUM_THREADS=1"), run("torch.set_num_threads(1)")
    parts = [f"{threads} for workers, {within} in them"]
    said = cpus_said(scene)
    if workers is not None:
        said.insert(0, f"num_workers is {workers}")
        if room is not None and workers > room:
            parts.insert(0, f"{run(f'DataLoader(num_workers={room})')} in the place of {workers}")
    return Filled("; ".join(parts), tuple(said))


def _neighbour(scene: Scene) -> Filled:
    other = scene.machine.others_cpu_ratio
    said: tuple[str, ...] = ()
    if other is not None:
        said = (f"others used {human(other, 'ratio')} of the CPU time used on the node",)
    alone = {
        "slurm": run("sbatch --exclusive"),
        "kubernetes": "a Guaranteed pod under cpuManagerPolicy: static",
    }.get(scene.machine.launcher, "cores of its own for it (taskset, cpuset)")
    look = run("pidstat -u 1 10")
    return Filled(f"{look} on the node names it; then {alone}, or another node", said)


def _pin(scene: Scene) -> Filled:
    bind = {
        "slurm": run("srun --cpu-bind=ldoms --gpu-bind=closest"),
        "kubernetes": "topologyManagerPolicy: single-numa-node and cpuManagerPolicy: static",
    }.get(
        scene.machine.launcher,
        f"{run('numactl --cpunodebind=NODE --membind=NODE')} before each rank",
    )
    return Filled(bind, (f"the node has {scene.machine.numa_nodes} NUMA nodes",))


def _hypervisor(scene: Scene) -> Filled:
    return Filled(
        "ask for a dedicated host or CPU pinning of the virtual machine; mpstat 1 (%steal) shows it"
    )


def _fit_quota(scene: Scene) -> Filled:
    room = room_for_workers(scene)
    n = "N" if room is None else str(room)
    return Filled(
        f"{run(f'DataLoader(num_workers={n})')} and {run('OMP_NUM_THREADS=1')}, so that no more"
        " threads run than the quota has CPUs",
        tuple(cpus_said(scene)),
    )


def _memory(scene: Scene) -> Filled:
    limit, times = scene.machine.limit_bytes or 0, scene.machine.reclaims or 0
    said = (f"its cgroup was over memory.high {times:,} times",) if times else ()
    if not limit:
        return Filled("raise memory.high of the job's cgroup, or set it to max", said)
    to = human(int(1.5 * limit), "bytes")
    how = {"slurm": "sbatch --mem", "kubernetes": "resources.limits.memory"}
    name = how.get(scene.machine.launcher, "memory.max of its cgroup (docker run --memory)")
    return Filled(
        f"{name}: {to} in the place of {human(limit, 'bytes')}",
        (f"the job's limit is {human(limit, 'bytes')}", *said),
    )


def _less_memory(scene: Scene) -> Filled:
    workers, loader = scene.workers, scene.setup.loader
    said, parts = [], []
    if workers is not None and workers > 1:
        call = run(f"DataLoader(num_workers={max(1, workers // 2)})")
        parts.append(f"{call} in the place of {workers}")
        said.append(f"num_workers is {workers}")
    if loader is not None and loader.prefetch and loader.prefetch > 1:
        parts.append(f"prefetch_factor={max(1, loader.prefetch // 2)} in the place of"
                     f" {loader.prefetch}")  # fmt: skip
    parts.append("keep the data set's index in one numpy array or memory map, not in Python lists"
                 " that each worker copies")  # fmt: skip
    least = scene.machine.available_least_bytes
    if least is not None and scene.machine.memory_short:
        said.append(f"{human(least, 'bytes')} were to be had at the least")
    return Filled("; ".join(parts), tuple(said))


def _freeze(scene: Scene) -> Filled:
    return Filled(
        f"after building model and data set: {run('gc.collect(); gc.freeze(); gc.disable()')};"
        f" then in the loop: {run('if step % 500 == 0: gc.collect()')}, at the same step on all"
        " ranks"
    )


def _thread(scene: Scene) -> Filled:
    name = scene.resource or "the thread"
    return Filled(
        f"{run('py-spy dump --pid PID')} names what {name} runs; run it as multiprocessing.Process,"
        " or every few hundred steps",
        (f"it is {name}",) if scene.resource else (),
    )


def _affine(scene: Scene) -> bool:
    return not scene.resource.startswith("affinity")


NOT_BOUND = Rule("not-bound", "affinity and cpuset leave the job what it would use", _affine)
BOUND = Rule(
    "bound",
    "affinity or a cpuset keeps the job from CPUs that are free: more CPUs come first",
    lambda s: not _affine(s),
)
NO_REST = Rule(
    "no-cpu-stolen",
    "a hypervisor took less than 5 % of the node's CPU time",
    lambda s: (s.value("cpu.steal_ratio") or 0.0) < 0.05,
)
NO_CEILING = Rule(
    "no-ceiling",
    "the job's cgroup has no memory limit and was never over memory.high, or it is not known",
    lambda s: s.machine.limit_bytes is None and not s.machine.reclaims,
)
JOB_ALONE = Rule(
    "job-alone",
    "the job itself used nine tenths of the CPU time that was used on the node",
    lambda s: (other := s.machine.others_cpu_ratio) is not None and other < 0.1,
)
OTHERS_USE_THEM = Rule(
    "others-use-them",
    "others used more of the node's CPU time than the job: then these are to be moved",
    lambda s: (other := s.machine.others_cpu_ratio) is not None and other > 0.5,
)
FEW_THREADS = Rule(
    "workers-fit",
    "there are no more workers than CPUs left to the rank beside its main thread: others use them",
    lambda s: (
        (w := s.workers) is not None and (room := room_for_workers(s)) is not None and w <= room
    ),
)

REMEDIES = (
    Mend(
        "more-cpus", ("cpu-contention",), "Give each rank more CPUs",
        "srun --cpus-per-task, resources.requests.cpu, an undone binding", more_cpus,
        seen=("runnable_ratio", "cpus_needed_count", "cpus_allowed_count"), published=_GREYHOUND,
        moves="thread.runnable_ratio falls", worse="fewer jobs fit on the node",
        unless=(NOT_BOUND,),
        effort="setting",
    ),
    Mend(
        "fit-the-quota", ("cpu-throttled",), "Run no more threads than the quota has CPUs",
        "num_workers and OMP_NUM_THREADS", _fit_quota,
        seen=("held_back_ratio",), moves="cgroup.throttled_periods_total rises more slowly",
        worse="the loader has fewer workers: it may then be too slow for another reason",
        unless=(Rule("threads-fit-quota", "there are no more workers than the quota has CPUs for",
                     lambda s: (w := s.workers) is not None
                     and (r := room_for_workers(s)) is not None and w <= r),),
        effort="setting",
    ),
    Mend(
        "find-the-neighbour", ("cpu-contention",), "Find who else uses the CPUs, and move it",
        "pidstat -u 1, top; exclusive nodes", _neighbour,
        seen=("runnable_ratio", "pressure.cpu_some_ratio", "kernel.cpu_ratio"),
        published=_GREYHOUND, moves="thread.runnable_ratio falls", worse="whoever is moved",
        unless=(BOUND, JOB_ALONE),
        place="node",
        effort="look",
    ),
    Mend(
        "fewer-threads", ("cpu-contention",), "Run fewer workers and library threads",
        "num_workers, OMP_NUM_THREADS=1, torch.set_num_threads(1) in workers", _fewer_threads,
        seen=("runnable_ratio",), published=_GREYHOUND, moves="thread.runnable_ratio falls",
        worse="a loader with fewer workers may be too slow for another reason",
        unless=(BOUND, FEW_THREADS, OTHERS_USE_THEM),
        effort="setting",
    ),
    Mend(
        "pin-to-numa", ("cpu-contention",), "Bind each rank to the NUMA node of its accelerator",
        "numactl, srun --cpu-bind=ldoms", _pin, seen=("runnable_ratio",), published=_GREYHOUND,
        moves="thread.runnable_ratio falls", worse="a rank cannot use CPUs that are idle elsewhere",
        unless=(ONE_NUMA_NODE, BOUND, ONE_RANK),
        effort="setting",
    ),
    Mend(
        "stolen-cpus", ("cpu-contention",), "Ask for CPUs that no other virtual machine uses",
        "a dedicated host, pinned CPUs", _hypervisor, seen=("cpu.steal_ratio",),
        moves="cpu.steal_ratio falls", worse="price of the machine", unless=(NO_REST,),
        place="node",
        effort="site",
    ),
    Mend(
        "more-memory", ("cpu-memory",), "Raise the memory limit of the job",
        "sbatch --mem, resources.limits.memory", _memory,
        seen=("memory_ratio", "memory_some_ratio", "swap_in_bytes_total"),
        moves="worker.memory_ratio falls", worse="memory that neighbours no longer have",
        unless=(NO_CEILING, Rule("node-full", "the node itself has none left",
                               lambda s: s.machine.memory_short)),
        place="node",
        effort="setting",
    ),
    Mend(
        "less-memory", ("cpu-memory",), "Use less memory in the loader",
        "fewer workers, shorter prefetch, one index for all workers", _less_memory,
        seen=("memory_ratio", "memory_some_ratio", "swap_in_bytes_total", "kswapd_ratio"),
        moves="worker.memory_ratio falls", worse="the loader works less far ahead",
        effort="setting",
    ),
    Mend(
        "plan-collections", ("cpu-gc",), "Freeze long-lived objects and collect at planned steps",
        "gc.freeze(), gc.disable(), gc.collect() every 500 steps", _freeze, seen=("gc.mean_ns",),
        published="+12.6 % at 128 data-parallel ranks (ByteDance, OSDI 2025)",
        moves="gc.mean_ns falls, and collections of all ranks fall together",
        worse="cycles that are garbage stay in memory until the next planned collection",
        effort="code",
    ),
    Mend(
        "thread-to-process", ("cpu-gil",), "Move what the other thread computes to a process",
        "multiprocessing, or less often", _thread,
        seen=("on_lock_ratio", "other_thread.on_cpu_ratio"),
        moves="thread.on_lock_ratio falls", worse="what it works on must be copied to that process",
        effort="code",
    ),
)  # fmt: skip
