"""Rules that exclude recommendations of several families, and the arithmetic behind them."""

from __future__ import annotations

import math

from clusterprof.analysis.advice.base import ExclusionRule
from clusterprof.analysis.advice.context import AdviceContext
from clusterprof.units import format_quantity

BUSY_DISK_RATIO = 0.9
SINGLE_REQUEST_COUNT = 1.5
"""Mean requests at the disk; with fewer it got one request at a time and could do more."""
SMALL_READ_BYTES = 256 << 10
HIGH_PREFETCH_FACTOR = 4
_MIN_IDLE_CPU = 0.3
"""Part of a CPU that must be idle for one more worker."""
MIN_FREE_GPU_RATIO = 0.2
"""Share of accelerator memory never in use; with less, a larger batch has no room."""


def compute_cpus_per_rank(context: AdviceContext) -> int | None:
    """Compute the whole CPUs one rank may use: its share of what affinity and quota allow.

    None if neither is known.
    """
    setup, machine = context.setup, context.machine
    bounds = []
    if setup.cpus_allowed:
        bounds.append(setup.cpus_allowed / max(setup.ranks_sharing_cpus, 1))
    if machine.quota_cpus:
        bounds.append(machine.quota_cpus / max(setup.ranks_on_node, 1))
    return max(1, math.floor(min(bounds))) if bounds else None


def compute_max_workers(context: AdviceContext) -> int | None:
    """Compute how many workers fit next to the main thread; None if the CPUs are unknown.

    A main thread that mostly waits needs no CPU of its own: where the job was measured, the CPUs
    that it left idle are room for more workers than there are.
    """
    cpus = compute_cpus_per_rank(context)
    if cpus is None:
        return None
    room, wanted = max(1, cpus - 1), context.machine.job_cpus_wanted
    if wanted is None or context.workers is None:
        return room
    idle = cpus - wanted / max(context.setup.ranks_on_node, 1)
    return max(room, context.workers + math.ceil(idle - _MIN_IDLE_CPU))


def estimate_needed_workers(context: AdviceContext) -> int | None:
    """Estimate how many workers would prepare a batch within the compute time of a step.

    4 workers, and 0.43 of the steps lost waiting for them: 4 / 0.57, so 8. None if not known.
    """
    workers, lost = context.workers, context.setup.own_loss_ratio
    if workers is None or not lost or lost >= 1:
        return None
    if workers == 0:  # loading and computing alternate
        return max(2, math.ceil(lost / (1 - lost)))
    return max(workers + 1, math.ceil(workers / (1 - lost)))


def choose_worker_count(context: AdviceContext) -> int | None:
    """Choose the number of workers: as needed, limited by the CPUs; None if not known."""
    needed, room = estimate_needed_workers(context), compute_max_workers(context)
    limits = [count for count in (needed, room) if count is not None]
    return min(limits) if room is not None else None if not limits else limits[0]


def choose_prefetch_factor(context: AdviceContext) -> tuple[int, int]:
    """Return the present prefetch factor, 2 if none is known, and the factor to choose instead."""
    loader = context.setup.loader
    factor = loader.prefetch if loader is not None and loader.prefetch else 2
    return factor, max(HIGH_PREFETCH_FACTOR, 2 * factor)


def describe_cpus(context: AdviceContext) -> list[str]:
    """Describe what affinity, cpuset and quota leave to the rank."""
    setup, machine = context.setup, context.machine
    parts = []
    if setup.cpus_allowed:
        total = f" of {machine.cpus}" if machine.cpus else ""
        cores = setup.cores_allowed
        cores_text = f", {cores} cores" if cores and cores < setup.cpus_allowed else ""
        sharing = setup.ranks_sharing_cpus
        ranks = f", shared by {sharing} ranks" if sharing > 1 else ""
        parts.append(f"the rank may use {setup.cpus_allowed}{total} CPUs{cores_text}{ranks}")
    if machine.quota_cpus:
        parts.append(f"the cgroup's quota is {machine.quota_cpus:g} CPUs")
    return parts


def estimate_needed_cpus(context: AdviceContext) -> int | None:
    """Estimate the CPUs one rank would keep busy, up to those of the node; None if unknown."""
    needed = context.value("job.cpus_needed_count")
    if needed is not None and needed == needed:
        return max(2, round(needed + 0.499))
    workers = estimate_needed_workers(context) or context.workers
    if workers is None:
        return None
    cpus = context.machine.cpus
    return min(workers + 1, cpus // max(context.setup.ranks_on_node, 1)) if cpus else workers + 1


def describe_cpu_users(context: AdviceContext) -> list[str]:
    """Describe which processes of the job used the CPUs."""
    users = [f"{name} (pid {pid}) {cpus:.1f}" for name, pid, cpus in context.machine.cpu_users]
    return [f"CPUs kept busy by processes of the job: {', '.join(users)}"] if users else []


def is_oversubscribed(context: AdviceContext) -> bool:
    """Return whether the threads of the job alone want more CPUs than it has."""
    wanted, machine = context.machine.job_cpus_wanted, context.machine
    limits = [count for count in (machine.cpus, machine.quota_cpus) if count]
    return wanted is not None and bool(limits) and wanted > min(limits)


_MIN_SIDE_CPUS = 0.5


def has_busy_side_process(context: AdviceContext) -> bool:
    """Return whether a process of the job that does not train keeps half a CPU busy or more."""
    users = context.machine.busy_side_processes
    return bool(users) and users[0][2] >= _MIN_SIDE_CPUS


def _has_workers_on_all_cpus(context: AdviceContext) -> bool:
    workers, room = context.workers, compute_max_workers(context)
    return workers is not None and room is not None and workers >= room


def _describe_full_cpus(context: AdviceContext) -> str:
    """Describe which CPUs the existing workers fill."""
    workers, cpus = context.workers or 0, compute_cpus_per_rank(context) or 1
    names = f"{workers} worker{'' if workers == 1 else 's'}"
    if context.machine.quota_cpus and not context.setup.cpus_allowed:
        cpus_text = f"{cpus} CPU{'' if cpus == 1 else 's'}"
        return f"the quota leaves {cpus_text} to the rank, which its main thread and {names} fill"
    allowed, sharing = context.setup.cpus_allowed or cpus, context.setup.ranks_sharing_cpus
    if sharing > 1:
        fills = "fills" if workers == 1 else "fill"
        return f"{sharing} ranks share {allowed} CPUs, and {names} {fills} its share"
    if allowed == 1:
        return f"the only CPU of the rank is full with its {names} and its main thread"
    return f"the {allowed} CPUs of the rank are full with its {names} and its main thread"


def _describe_contention(context: AdviceContext) -> str:
    cpus = context.machine.cpus
    return f"threads wait for the {cpus} CPUs already" if cpus else "threads wait for CPUs already"


def _describe_disk_load(context: AdviceContext) -> str:
    busy = context.find_evidence("disk.busy_ratio")
    part = format_quantity(busy.value, "ratio") if busy is not None else "most"
    return f"the disk was busy for {part} of the waits"


def _is_disk_saturated(context: AdviceContext) -> bool:
    busy, queue = (
        context.find_evidence("disk.busy_ratio"),
        context.find_evidence("disk.queue_count"),
    )
    if busy is None or busy.value < BUSY_DISK_RATIO:
        return False
    name = context.resource_name
    disk = next((candidate for candidate in context.machine.disks if candidate.name == name), None)
    alone = queue is not None and queue.value < SINGLE_REQUEST_COUNT
    return not (alone and disk is not None and disk.rotational is False)


def get_evidence_value(context: AdviceContext, name: str) -> float | None:
    """Return the value of the evidence whose name ends so; None if there is none."""
    item = context.find_evidence(name)
    return None if item is None else item.value


def _get_read_size(context: AdviceContext) -> float | None:
    return get_evidence_value(context, "read_size_bytes")


DEVICE_SATURATED = ExclusionRule(
    "device-saturated",
    f"the disk was busy for {BUSY_DISK_RATIO:.0%} of the waits or more, unless it is a solid-state"
    " disk with one request at a time: more readers would only queue",
    _is_disk_saturated,
    _describe_disk_load,
)
JOB_ALONE = ExclusionRule(
    "job-alone",
    "ranks and workers used nine tenths of the CPU time that was used on the node",
    lambda s: (
        (other := s.machine.other_processes_cpu_ratio) is not None
        and other < 0.1
        and not has_busy_side_process(s)
    ),
)
OTHERS_USE_CPUS = ExclusionRule(
    "others-use-them",
    "others used more of the node's CPU time than the job: then move these instead",
    lambda s: (other := s.machine.other_processes_cpu_ratio) is not None and other > 0.5,
)
JOB_OVERSUBSCRIBES = ExclusionRule(
    "job-oversubscribes",
    "the threads of the job alone want more CPUs than it has",
    is_oversubscribed,
)

WORKERS_FILL_CPUS = ExclusionRule(
    "workers-fill-cpus",
    "workers and main thread use all CPUs of the rank already (affinity, cpuset and quota, shared"
    " with the other ranks of the node)",
    _has_workers_on_all_cpus,
    _describe_full_cpus,
)
QUOTA_USED_UP = ExclusionRule(
    "quota-used-up",
    "the CPU quota of the job's cgroup runs out: raise the quota instead",
    lambda s: "cpu-throttled" in s.other_causes or (s.machine.throttled_ratio or 0.0) >= 0.1,
    lambda s: "the CPU quota of the job runs out",
)
CPUS_CONTENDED = ExclusionRule(
    "cpus-contended",
    "threads wait for CPUs (cpu-contention was found too): more workers make them wait longer",
    lambda s: "cpu-contention" in s.other_causes,
    _describe_contention,
)
MEMORY_SHORT = ExclusionRule(
    "memory-short",
    "the node is short of memory: less than a tenth of it was available at some time, or cpu-memory"
    " was found too",
    lambda s: s.machine.is_memory_short or "cpu-memory" in s.other_causes,
    lambda s: "the node is short of memory",
)
ONE_NUMA_NODE = ExclusionRule(
    "one-numa-node",
    "the node has one NUMA node, or their number is unknown",
    lambda s: (s.machine.numa_nodes or 1) < 2,
)
NO_WORKERS = ExclusionRule(
    "no-workers", "the loader has no workers (num_workers=0)", lambda s: s.workers == 0
)
OWN_WORK = ExclusionRule(
    "own-work",
    "the training thread itself computes in the loader, and workers cannot help it",
    lambda s: (
        (own := s.value("loader.own_work_ratio")) is not None
        and own >= 0.5 * (s.value("worker.on_cpu_ratio") or 0.0)
    ),
)
AWAITED_WORK = ExclusionRule(
    "awaited-work",
    "another process or thread of the job, not a data loader, makes what the step waits for",
    lambda s: s.value("awaited.waiting_ratio") is not None,
)
NO_AWAITED_WORK = ExclusionRule(
    "no-awaited-work",
    "the step does not wait for another process or thread of the job, or it is not known for which",
    lambda s: not AWAITED_WORK.holds(s),
)
NO_ACCELERATOR = ExclusionRule(
    "no-accelerator", "no accelerator was measured", lambda s: not s.setup.has_device
)
MAX_WORKER_BALANCE = 0.75
"""Mean load of the workers, of the busiest one's, below which their shares are uneven."""
WORKERS_UNEVEN = ExclusionRule(
    "workers-uneven",
    "one worker has most of the work: divide it evenly first",
    lambda s: (
        (balance := s.value("worker.balance_ratio")) is not None and balance < MAX_WORKER_BALANCE
    ),
)
WORKERS_UNKNOWN = ExclusionRule(
    "workers-unknown",
    "the loader is not PyTorch's, or its settings are unknown",
    lambda s: s.workers is None,
)
READS_ARE_LARGE = ExclusionRule(
    "reads-are-large",
    "the average read is 256 KiB or more: the records are large already",
    lambda s: (_get_read_size(s) or 0.0) >= SMALL_READ_BYTES,
    lambda s: f"the average read is {format_quantity(_get_read_size(s) or 0.0, 'bytes')} already",
)
PREFETCH_IS_HIGH = ExclusionRule(
    "much-prefetched",
    f"prefetch_factor is {HIGH_PREFETCH_FACTOR} or more already",
    lambda s: s.setup.loader is not None and (s.setup.loader.prefetch or 0) >= HIGH_PREFETCH_FACTOR,
)
ONE_NODE = ExclusionRule("one-node", "the job runs on one node", lambda s: s.nodes < 2)
ONE_RANK = ExclusionRule("one-rank", "the job has one rank", lambda s: s.ranks < 2)
NO_LIMIT = ExclusionRule(
    "no-memory-limit",
    "the job's cgroup has no memory limit, or the limit is unknown",
    lambda s: s.machine.memory_limit_bytes is None,
)
GPU_MEMORY_FULL = ExclusionRule(
    "gpu-memory-full",
    "at some time less than a fifth of the accelerator's memory was free",
    lambda s: (
        s.setup.gpu_memory_free_ratio is not None
        and s.setup.gpu_memory_free_ratio < MIN_FREE_GPU_RATIO
    ),
)
GPU_MEMORY_FREE = ExclusionRule(
    "gpu-memory-free",
    "a fifth of the accelerator's memory or more was always free",
    lambda s: (
        s.setup.gpu_memory_free_ratio is not None
        and s.setup.gpu_memory_free_ratio >= MIN_FREE_GPU_RATIO
    ),
)

NO_FRAMEWORK = ExclusionRule(
    "no-framework",
    "the trace shows nothing of PyTorch or another framework",
    lambda s: not s.setup.has_framework,
)
FRAMEWORK_SEEN = ExclusionRule(
    "framework", "the job uses a framework, or that is not known", lambda s: s.setup.has_framework
)
XLA_SEEN = ExclusionRule(
    "xla",
    "the job runs programs of XLA, to which calls of PyTorch do not apply",
    lambda s: s.setup.has_xla,
)
WORKERS_STAY = ExclusionRule(
    "workers-stay",
    "workers were hardly ever started again",
    lambda s: (s.value("worker.starting_ratio") or 0.0) < 0.1,
)
WORKERS_START = ExclusionRule(
    "workers-start",
    "in most of the waits the workers were starting: more of them take longer",
    lambda s: (s.value("worker.starting_ratio") or 0.0) >= 0.5,
)


def make_missing_evidence_rule(name: str, text: str) -> ExclusionRule:
    """Make a rule that holds if a piece of evidence is missing or zero."""
    return ExclusionRule(
        f"no-{name}", text, lambda s: not (e := s.find_evidence(name)) or e.value <= 0
    )


def make_file_system_rule(kind: str, title: str) -> ExclusionRule:
    """Make a rule that holds if the named mount is of another file system type."""
    return ExclusionRule(
        f"not-{kind}", f"the mount is not {title}", lambda s: s.file_system != kind
    )
