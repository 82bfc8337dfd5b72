"""Recommendations for a data path that waits for the CPU, and for threads that lack CPU time,
memory, or the Python interpreter lock.
"""

from __future__ import annotations

from clusterprof.analysis.advice.base import (
    ExclusionRule,
    FilledRecommendation,
    Recommendation,
    mark_command,
)
from clusterprof.analysis.advice.context import AdviceContext
from clusterprof.analysis.advice.rules import (
    AWAITED_WORK,
    CPUS_CONTENDED,
    JOB_ALONE,
    JOB_OVERSUBSCRIBES,
    MEMORY_SHORT,
    NO_ACCELERATOR,
    NO_WORKERS,
    ONE_NUMA_NODE,
    ONE_RANK,
    OTHERS_USE_CPUS,
    OWN_WORK,
    PREFETCH_IS_HIGH,
    QUOTA_USED_UP,
    WORKERS_FILL_CPUS,
    WORKERS_START,
    WORKERS_STAY,
    WORKERS_UNEVEN,
    WORKERS_UNKNOWN,
    choose_prefetch_factor,
    choose_worker_count,
    compute_cpus_per_rank,
    compute_max_workers,
    describe_cpu_users,
    describe_cpus,
    estimate_needed_cpus,
    estimate_needed_workers,
    has_busy_side_process,
    is_oversubscribed,
)
from clusterprof.units import format_quantity


def fill_more_cpus(context: AdviceContext) -> FilledRecommendation:
    """Fill the recommendation to request more CPUs from the job's launcher."""
    count = estimate_needed_cpus(context)
    n = "N" if count is None else str(count)
    change = {
        "slurm": f"{mark_command(f'srun --cpus-per-task={n} --cpu-bind=cores')} (srun no"
        " longer inherits it from sbatch since Slurm 22.05)",
        "kubernetes": f"resources.requests.cpu and limits.cpu: {n} for each rank of the pod",
    }.get(
        context.machine.launcher,
        f"leave the rank {n} CPUs: undo taskset, numactl --physcpubind or docker run"
        f" --cpuset-cpus, or name {n} CPUs in it",
    )
    instruction = f"Give the rank {n} CPUs" if count is not None else ""
    return FilledRecommendation(change, tuple(describe_cpus(context)), instruction)


def fill_raised_quota(context: AdviceContext) -> FilledRecommendation:
    """Fill the recommendation of a quota for all workers and main threads on the node."""
    quota, count = context.machine.quota_cpus, None
    workers = context.workers
    if workers is not None:
        count = (workers + 1) * max(context.setup.ranks_on_node, 1)
    if quota and (count is None or count <= quota):
        count = round(2 * quota)
    n = "N" if count is None else str(count)
    change = {
        "kubernetes": f"resources.limits.cpu: {n} (or no limit)",
        "slurm": mark_command(f"sbatch --cpus-per-task={n}"),
    }.get(
        context.machine.launcher,
        f"cpu.max of its cgroup: {mark_command(f'docker run --cpus={n}')}, or no limit",
    )
    reasons = describe_cpus(context)
    if workers is not None:
        ranks = context.setup.ranks_on_node
        plural = "" if ranks == 1 else "s"
        reasons.append(f"{ranks} rank{plural} of {workers} workers and a main thread each")
    return FilledRecommendation(
        change, tuple(reasons), f"Raise the CPU quota to {n}" if count else ""
    )


_PLUMBER = "up to 47x for pipelines that were set up wrongly (Plumber, MLSys 2022)"
_META = "preparing data on the trainers cost up to 56 % of throughput (Meta, ISCA 2022)"
_GREYHOUND = "CPU contention lengthened jobs by 12 % in probes (Greyhound, ATC 2025)"


def _fill_more_workers(context: AdviceContext) -> FilledRecommendation:
    workers, count = context.workers or 0, choose_worker_count(context)
    needed = estimate_needed_workers(context)
    reasons = [f"num_workers is {workers}", *describe_cpus(context)]
    if needed is not None and context.setup.own_loss_ratio:
        lost = format_quantity(context.setup.own_loss_ratio, "ratio")
        reasons.append(f"with {lost} of its steps lost, {needed} would keep up")
        if count is not None and count < needed:
            reasons.append(f"there are CPUs for {count} only, so part of the loss will remain")
    target = "N" if count is None else str(count)
    bound = ", at most the CPUs of the rank less one" if count is None else ""
    if context.setup.loader is None:  # processes of the job's own, or of another library
        return FilledRecommendation(
            f"{target} processes that make batches instead of {workers}{bound}",
            (f"processes that make batches: {workers}", *reasons[1:]),
            f"Raise the number of processes that make batches from {workers} to {target}{bound}",
        )
    call = mark_command(f"DataLoader(num_workers={target})")
    change = f"{call} instead of num_workers={workers}"
    change += " (N: at most the CPUs of the rank less one)" if bound else ""
    return FilledRecommendation(
        change, tuple(reasons), f"Raise num_workers from {workers} to {target}{bound}"
    )


def _fill_prefetch(context: AdviceContext) -> FilledRecommendation:
    factor, raised = choose_prefetch_factor(context)
    workers = context.workers or 0
    batches = factor * workers
    return FilledRecommendation(
        f"{mark_command(f'DataLoader(prefetch_factor={raised})')} instead of {factor}",
        (f"prefetch_factor is {factor}, so {workers} workers hold {batches} batches at most",),
        f"Raise prefetch_factor from {factor} to {raised}",
    )


def _fill_cheaper_preprocessing(context: AdviceContext) -> FilledRecommendation:
    kind, pid = context.resource_facts.kind, context.resource_facts.pid
    pid_text, suffix = ("PID", "") if pid is None else (str(pid), " of this run")
    process = "the training process" if kind == "training-process" else "a worker"
    change = "do once and offline what every epoch repeats (decode, resize, tokenize), and the rest"
    change += " with fewer operations"
    if not context.code:
        profile = mark_command(f"py-spy record -d 30 -o profile.svg --pid {pid_text}")
        change = f"find the functions in {process}{suffix} with {profile}; {change}"
    return FilledRecommendation(change, tuple(describe_cpus(context)))


def _fill_gpu_preprocessing(context: AdviceContext) -> FilledRecommendation:
    free = context.setup.gpu_memory_free_ratio
    reasons: list[str] = []
    if free is not None:
        reasons = [f"{format_quantity(free, 'ratio')} of the accelerator's memory was always free"]
    return FilledRecommendation(
        "nvidia.dali, torchvision.transforms.v2 on CUDA tensors, nvImageCodec", tuple(reasons)
    )


WHOLE_NODE = ExclusionRule(
    "whole-node",
    "the job may use all CPUs of the node already",
    lambda s: (
        s.machine.quota_cpus is None
        and s.machine.cpus is not None
        and s.setup.cpus_allowed == s.machine.cpus
    ),
)
CPUS_SUFFICE = ExclusionRule(
    "cpus-suffice",
    "the CPUs the rank may use are enough for the workers needed",
    lambda s: (
        (c := compute_cpus_per_rank(s)) is None
        or (n := estimate_needed_workers(s)) is None
        or n + 1 <= c
    ),
)
WORKERS_PERSISTENT = ExclusionRule(
    "persistent-already",
    "workers are persistent already, there are none, or it is not known",
    lambda s: (
        s.setup.loader is None
        or s.setup.loader.persistent is not False
        or s.setup.loader.workers == 0
    ),
)
WORKERS_IDLE = ExclusionRule(
    "workers-rest",
    "workers were idle because their prefetch limit was reached: raise prefetch_factor instead",
    lambda s: (s.workers or 0) > 0 and (s.value("worker.not_ahead_ratio") or 0.0) > 0,
)
PREFETCH_USELESS = ExclusionRule(
    "not-ahead",
    "more prefetching would not have made the batches ready in time, or that is not known",
    lambda s: (
        not (s.value("worker.not_ahead_ratio") or 0.0)
        and (s.value("worker.without_work_ratio") or 0.0) < 0.5
    ),
)
_STARVED_CAUSES = ("cpu-preprocess", "cpu-loader-config")

CPU_RECOMMENDATIONS = (
    Recommendation(
        "raise-quota",
        ("cpu-throttled", *_STARVED_CAUSES),
        "Raise or remove the CPU quota of the job",
        "resources.limits.cpu, docker run --cpus, cpu.max",
        fill_raised_quota,
        evidence_names=("held_back_ratio", "throttled_periods_total"),
        expected_change="cgroup.throttled_periods_total stops rising",
        worse="other jobs on the node get less CPU time when all are busy",
        unless=(
            ExclusionRule(
                "not-throttled",
                "the quota did not run out, or there is none",
                lambda s: s.cause != "cpu-throttled" and not QUOTA_USED_UP.holds(s),
            ),
        ),
        addressee="node",
        effort="setting",
    ),
    Recommendation(
        "persistent-workers",
        ("cpu-loader-config",),
        "Keep the workers between epochs",
        "DataLoader(persistent_workers=True)",
        FilledRecommendation(
            mark_command("DataLoader(persistent_workers=True)"),
            ("workers are started again in every epoch",),
        ),
        evidence_names=("worker.starting_ratio",),
        expected_change="the first wait of an epoch is as short as the others",
        worse="workers keep their memory during evaluation",
        unless=(WORKERS_PERSISTENT, WORKERS_STAY),
        effort="setting",
    ),
    Recommendation(
        "prefetch-more",
        ("cpu-loader-config",),
        "Let workers prefetch more batches",
        "DataLoader(prefetch_factor=4)",
        _fill_prefetch,
        evidence_names=("worker.not_ahead_ratio", "worker.without_work_ratio"),
        expected_change="worker.not_ahead_ratio falls",
        worse="workers x prefetch_factor batches are held in host memory",
        unless=(WORKERS_UNKNOWN, NO_WORKERS, PREFETCH_IS_HIGH, MEMORY_SHORT, PREFETCH_USELESS),
        effort="setting",
    ),
    Recommendation(
        "more-workers",
        _STARVED_CAUSES,
        "Load with more workers",
        "DataLoader(num_workers=N): as many as keep up with the step, at most the CPUs of the rank"
        " less one",
        _fill_more_workers,
        evidence_names=("worker.on_cpu_ratio", "worker.without_work_ratio"),
        published=_PLUMBER,
        expected_change="worker.on_cpu_ratio of the waits falls, loader.workers_count rises",
        worse="each worker needs memory for its copy of the data set and the batches it holds",
        unless=(
            OWN_WORK,
            WORKERS_UNKNOWN,
            WORKERS_FILL_CPUS,
            QUOTA_USED_UP,
            CPUS_CONTENDED,
            MEMORY_SHORT,
            WORKERS_IDLE,
            WORKERS_START,
        ),
        withheld_text="More workers are not advised",
        needs_workers=True,
        effort="setting",
    ),
    Recommendation(
        "prepare-ahead",
        ("cpu-preprocess",),
        "Do repeated preprocessing once, or make it cheaper",
        "decode, resize and tokenize offline; profile a worker to see what costs most",
        _fill_cheaper_preprocessing,
        evidence_names=("worker.on_cpu_ratio", "loader.workers_count"),
        published=_META,
        expected_change="worker.on_cpu_ratio falls",
        worse="storage for the prepared data",
        unless=(AWAITED_WORK,),
        effort="data",
    ),
    Recommendation(
        "prepare-on-gpu",
        ("cpu-preprocess",),
        "Move transforms to the accelerator",
        "DALI, torchvision v2 on CUDA tensors",
        _fill_gpu_preprocessing,
        evidence_names=("worker.on_cpu_ratio",),
        published=_META,
        expected_change="worker.on_cpu_ratio falls",
        worse="memory and time of the accelerator, which training needs too",
        unless=(
            *(OWN_WORK, WORKERS_UNEVEN, AWAITED_WORK, NO_ACCELERATOR),
            ExclusionRule(
                "gpu-memory-full",
                "less than a fifth of the accelerator's memory was free",
                lambda s: (f := s.setup.gpu_memory_free_ratio) is not None and f < 0.2,
            ),
        ),
        effort="code",
    ),
    Recommendation(
        "more-cpus-for-workers",
        _STARVED_CAUSES,
        "Ask for as many CPUs as the workers need",
        "srun --cpus-per-task, resources.requests.cpu, an undone binding",
        fill_more_cpus,
        evidence_names=("worker.on_cpu_ratio", "cpus_allowed_count"),
        published=_GREYHOUND,
        expected_change="job.cpus_allowed_count rises, and num_workers can be raised",
        worse="fewer jobs fit on the node",
        unless=(CPUS_SUFFICE, WHOLE_NODE, QUOTA_USED_UP),
        effort="setting",
    ),
)


def _fill_fewer_threads(context: AdviceContext) -> FilledRecommendation:
    room, workers = compute_max_workers(context), context.workers
    cpus = compute_cpus_per_rank(context)
    count = 1 if cpus is None else max(1, cpus - (workers or 0))
    within = mark_command("torch.set_num_threads(1)")
    threads = mark_command(f"OMP_NUM_THREADS={count} MKL_NUM_THREADS={count}")
    parts = [f"{threads} for the training process, {within} in workers"]
    reasons = [*describe_cpus(context), *describe_cpu_users(context)]
    if is_oversubscribed(context):
        wanted = context.machine.job_cpus_wanted
        reasons.insert(0, f"the job's own threads want {wanted:.1f} CPUs")
    if workers is not None:
        reasons.insert(0, f"num_workers is {workers}")
        if room is not None and workers > room:
            parts.insert(
                0, f"{mark_command(f'DataLoader(num_workers={room})')} instead of {workers}"
            )
    return FilledRecommendation("; ".join(parts), tuple(reasons))


def _fill_find_cpu_user(context: AdviceContext) -> FilledRecommendation:
    ratio = context.machine.other_processes_cpu_ratio
    reasons = describe_cpu_users(context)
    if ratio is not None:
        share = format_quantity(ratio, "ratio")
        reasons.insert(0, f"others used {share} of the CPU time used on the node")
    alone = {
        "slurm": mark_command("sbatch --exclusive"),
        "kubernetes": "a Guaranteed pod under cpuManagerPolicy: static",
    }.get(context.machine.launcher, "dedicated cores for the job (taskset, cpuset)")
    command = mark_command("pidstat -u 1 10")
    if not has_busy_side_process(context):
        return FilledRecommendation(
            f"{command} on the node names it; then {alone}, or another node", tuple(reasons)
        )
    name, pid, cpus = context.machine.busy_side_processes[0]
    return FilledRecommendation(
        f"{mark_command(f'renice 19 -p {pid}')}, or start it elsewhere; {command} shows whether"
        " others remain",
        tuple(reasons),
        f"Move {name} (pid {pid}) of the job: it keeps {cpus:.1f} CPUs busy and does not train",
    )


def _fill_quota_limits(context: AdviceContext) -> FilledRecommendation:
    room = compute_max_workers(context)
    n = "N" if room is None else str(room)
    return FilledRecommendation(
        f"{mark_command(f'DataLoader(num_workers={n})')} and {mark_command('OMP_NUM_THREADS=1')},"
        " so that no more threads run than the quota has CPUs",
        tuple(describe_cpus(context)),
    )


def _fill_more_memory(context: AdviceContext) -> FilledRecommendation:
    limit, times = context.machine.memory_limit_bytes or 0, context.machine.reclaims or 0
    reasons = (f"its cgroup was over memory.high {times:,} times",) if times else ()
    if not limit:
        return FilledRecommendation(
            "raise memory.high of the job's cgroup, or set it to max", reasons
        )
    new_limit = format_quantity(int(1.5 * limit), "bytes")
    option = {"slurm": "sbatch --mem", "kubernetes": "resources.limits.memory"}
    name = option.get(context.machine.launcher, "memory.max of its cgroup (docker run --memory)")
    return FilledRecommendation(
        f"{name}: {new_limit} instead of {format_quantity(limit, 'bytes')}",
        (f"the job's limit is {format_quantity(limit, 'bytes')}", *reasons),
    )


def _fill_less_memory(context: AdviceContext) -> FilledRecommendation:
    workers, loader = context.workers, context.setup.loader
    reasons, parts = [], []
    if workers is not None and workers > 1:
        call = mark_command(f"DataLoader(num_workers={max(1, workers // 2)})")
        parts.append(f"{call} instead of {workers}")
        reasons.append(f"num_workers is {workers}")
    if loader is not None and loader.prefetch and loader.prefetch > 1:
        parts.append(f"prefetch_factor={max(1, loader.prefetch // 2)} instead of {loader.prefetch}")
    parts.append(
        "keep the data set's index in one numpy array or memory map, not in Python lists that each"
        " worker copies"
    )
    least = context.machine.min_available_bytes
    if least is not None and context.machine.is_memory_short:
        reasons.append(f"{format_quantity(least, 'bytes')} was the least memory available")
    return FilledRecommendation("; ".join(parts), tuple(reasons))


def _fill_thread_to_process(context: AdviceContext) -> FilledRecommendation:
    name = context.resource or "the thread"
    return FilledRecommendation(
        f"{mark_command('py-spy dump --pid PID')} names what {name} runs; run it as"
        " multiprocessing.Process, or every few hundred steps",
        (f"it is {name}",) if context.resource else (),
    )


def _has_cpus_for_workers(context: AdviceContext) -> bool:
    workers, room = context.workers, compute_max_workers(context)
    return workers is not None and room is not None and workers <= room


def _is_unbound(context: AdviceContext) -> bool:
    return context.resource_facts.kind != "cpu-set"


NOT_BOUND = ExclusionRule("not-bound", "affinity and cpuset leave the job enough CPUs", _is_unbound)
BOUND = ExclusionRule(
    "bound",
    "affinity or a cpuset keeps the job off free CPUs: giving it more CPUs comes first",
    lambda s: not _is_unbound(s),
)
NO_CPU_STOLEN = ExclusionRule(
    "no-cpu-stolen",
    "a hypervisor took less than 5 % of the node's CPU time",
    lambda s: (s.value("cpu.steal_ratio") or 0.0) < 0.05,
)
NO_MEMORY_LIMIT = ExclusionRule(
    "no-ceiling",
    "the job's cgroup has no memory limit and was never over memory.high, or it is not known",
    lambda s: s.machine.memory_limit_bytes is None and not s.machine.reclaims,
)
WORKERS_FIT = ExclusionRule(
    "workers-fit",
    "there are no more workers than CPUs left next to its main thread, and its threads want no more"
    " than it has: other processes use them",
    lambda s: _has_cpus_for_workers(s) and not is_oversubscribed(s),
)
CPU_TIME_RECOMMENDATIONS = (
    Recommendation(
        "more-cpus",
        ("cpu-contention",),
        "Give each rank more CPUs",
        "srun --cpus-per-task, resources.requests.cpu, an undone binding",
        fill_more_cpus,
        evidence_names=("runnable_ratio", "cpus_needed_count", "cpus_allowed_count"),
        published=_GREYHOUND,
        expected_change="thread.runnable_ratio falls",
        worse="fewer jobs fit on the node",
        unless=(NOT_BOUND,),
        effort="setting",
    ),
    Recommendation(
        "fit-the-quota",
        ("cpu-throttled",),
        "Run no more threads than the quota has CPUs",
        "num_workers and OMP_NUM_THREADS",
        _fill_quota_limits,
        evidence_names=("held_back_ratio",),
        expected_change="cgroup.throttled_periods_total rises more slowly",
        worse="the loader has fewer workers: it may then be too slow for another reason",
        unless=(
            ExclusionRule(
                "threads-fit-quota",
                "there are no more workers than the quota has CPUs for",
                _has_cpus_for_workers,
            ),
        ),
        effort="setting",
    ),
    Recommendation(
        "find-the-neighbour",
        ("cpu-contention",),
        "Find what else uses the CPUs, and move it",
        "pidstat -u 1, top; exclusive nodes",
        _fill_find_cpu_user,
        evidence_names=("runnable_ratio", "pressure.cpu_some_ratio", "kernel.cpu_ratio"),
        published=_GREYHOUND,
        expected_change="thread.runnable_ratio falls",
        worse="the work that is moved",
        unless=(BOUND, JOB_ALONE, JOB_OVERSUBSCRIBES),
        addressee="node",
        effort="look",
    ),
    Recommendation(
        "fewer-threads",
        ("cpu-contention",),
        "Run fewer workers and library threads",
        "num_workers, OMP_NUM_THREADS=1, torch.set_num_threads(1) in workers",
        _fill_fewer_threads,
        evidence_names=("runnable_ratio",),
        published=_GREYHOUND,
        expected_change="thread.runnable_ratio falls",
        worse="a loader with fewer workers may be too slow for another reason",
        unless=(BOUND, WORKERS_FIT, OTHERS_USE_CPUS),
        effort="setting",
    ),
    Recommendation(
        "pin-to-numa",
        ("cpu-contention",),
        "Bind each rank to the NUMA node of its accelerator",
        "numactl, srun --cpu-bind=ldoms",
        lambda s: FilledRecommendation(
            {
                "slurm": mark_command("srun --cpu-bind=ldoms --gpu-bind=closest"),
                "kubernetes": "topologyManagerPolicy: single-numa-node and cpuManagerPolicy:"
                " static",
            }.get(
                s.machine.launcher,
                f"{mark_command('numactl --cpunodebind=NODE --membind=NODE')} before each rank",
            ),
            (f"the node has {s.machine.numa_nodes} NUMA nodes",),
        ),
        evidence_names=("runnable_ratio",),
        published=_GREYHOUND,
        expected_change="thread.runnable_ratio falls",
        worse="a rank cannot use CPUs that are idle elsewhere",
        unless=(ONE_NUMA_NODE, BOUND, ONE_RANK),
        effort="setting",
    ),
    Recommendation(
        "stolen-cpus",
        ("cpu-contention",),
        "Ask for CPUs that no other virtual machine uses",
        "a dedicated host, pinned CPUs",
        FilledRecommendation(
            "ask for a dedicated host or CPU pinning of the virtual machine; mpstat 1 (%steal)"
            " shows it"
        ),
        evidence_names=("cpu.steal_ratio",),
        expected_change="cpu.steal_ratio falls",
        worse="price of the machine",
        unless=(NO_CPU_STOLEN,),
        addressee="node",
        effort="site",
    ),
    Recommendation(
        "more-memory",
        ("cpu-memory",),
        "Raise the memory limit of the job",
        "sbatch --mem, resources.limits.memory",
        _fill_more_memory,
        evidence_names=("memory_ratio", "memory_some_ratio", "swap_in_bytes_total"),
        expected_change="worker.memory_ratio falls",
        worse="other jobs on the node have less memory",
        unless=(
            NO_MEMORY_LIMIT,
            ExclusionRule(
                "node-full", "the node has no memory left", lambda s: s.machine.is_memory_short
            ),
        ),
        addressee="node",
        effort="setting",
    ),
    Recommendation(
        "less-memory",
        ("cpu-memory",),
        "Use less memory in the loader",
        "fewer workers, shorter prefetch, one index for all workers",
        _fill_less_memory,
        evidence_names=("memory_ratio", "memory_some_ratio", "swap_in_bytes_total", "kswapd_ratio"),
        expected_change="worker.memory_ratio falls",
        worse="the loader prefetches less",
        effort="setting",
    ),
    Recommendation(
        "plan-collections",
        ("cpu-gc",),
        "Freeze long-lived objects and collect at planned steps",
        "gc.freeze(), gc.disable(), gc.collect() every 500 steps",
        FilledRecommendation(
            "after building model and data set (for worker.collecting_ratio: in worker_init_fn):"
            f" {mark_command('gc.collect(); gc.freeze(); gc.disable()')}; then in the loop:"
            f" {mark_command('if step % 500 == 0: gc.collect()')}, at the same step on all ranks"
        ),
        evidence_names=("worker.collecting_ratio", "gc.mean_ns"),
        published="+12.6 % at 128 data-parallel ranks (ByteDance, OSDI 2025)",
        expected_change="gc.mean_ns falls, and collections of all ranks fall together",
        worse="garbage cycles stay in memory until the next planned collection",
        effort="code",
    ),
    Recommendation(
        "thread-to-process",
        ("cpu-gil",),
        "Move the computation of the other thread to a process",
        "multiprocessing, or less often",
        _fill_thread_to_process,
        evidence_names=("on_lock_ratio", "other_thread.on_cpu_ratio"),
        expected_change="thread.on_lock_ratio falls",
        worse="its data must be copied to that process",
        effort="code",
    ),
)
