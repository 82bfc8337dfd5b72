"""Rules that cancel a remedy, shared by the families, and the arithmetic they rest on."""

from __future__ import annotations

import math

from clusterprof.remedies.base import Rule
from clusterprof.remedies.scene import Scene
from clusterprof.units import human

BUSY_DISK_RATIO = 0.9
ONE_REQUEST_COUNT = 1.5
"""Requests at the disk on average: with fewer it was given one at a time, and could do more."""
SMALL_READ_BYTES = 256 << 10
MUCH_PREFETCH = 4
FULL_GPU_RATIO = 0.2
"""Memory of the accelerator that was never in use, below which a larger batch has no room."""


def cpus_share(scene: Scene) -> int | None:
    """Return the whole CPUs that one rank may use: its part of what affinity and quota leave."""
    setup, machine = scene.setup, scene.machine
    bounds = []
    if setup.cpus_allowed:
        bounds.append(setup.cpus_allowed / max(setup.sharing, 1))
    if machine.quota_cpus:
        bounds.append(machine.quota_cpus / max(setup.on_node, 1))
    return max(1, math.floor(min(bounds))) if bounds else None


def room_for_workers(scene: Scene) -> int | None:
    """Return how many workers fit beside the main thread; None when the CPUs are unknown."""
    cpus = cpus_share(scene)
    return None if cpus is None else max(1, cpus - 1)


def needed_workers(scene: Scene) -> int | None:
    """Return how many workers would make a batch within the time a step computes.

    4 workers, and 0.43 of the steps lost waiting for them: 4 / 0.57, so 8. None = not known.
    """
    workers, lost = scene.workers, scene.setup.own_ratio
    if workers is None or not lost or lost >= 1:
        return None
    if workers == 0:  # loads and computes by turns
        return max(2, math.ceil(lost / (1 - lost)))
    return max(workers + 1, math.ceil(workers / (1 - lost)))


def next_workers(scene: Scene) -> int | None:
    """Return the number of workers to set: what is needed, as far as CPUs are there."""
    needed, room = needed_workers(scene), room_for_workers(scene)
    known = [one for one in (needed, room) if one is not None]
    return min(known) if room is not None else None if not known else known[0]


def _workers_fill_cpus(scene: Scene) -> bool:
    workers, room = scene.workers, room_for_workers(scene)
    return workers is not None and room is not None and workers >= room


def _full(scene: Scene) -> str:
    """Say which CPUs the workers that are there fill."""
    workers, cpus = scene.workers or 0, cpus_share(scene) or 1
    many = f"{workers} worker{'' if workers == 1 else 's'}"
    if scene.machine.quota_cpus and not scene.setup.cpus_allowed:
        return f"the quota leaves {cpus} CPUs to the rank, which it and its {many} fill"
    allowed, sharing = scene.setup.cpus_allowed or cpus, scene.setup.sharing
    if sharing > 1:
        fills = "fills" if workers == 1 else "fill"
        return f"{sharing} ranks share {allowed} CPUs, and {many} {fills} its part"
    return f"the {allowed} CPUs of the rank are full with its {many} and its main thread"


def _contended(scene: Scene) -> str:
    cpus = scene.machine.cpus
    return (
        f"threads wait for the {cpus} CPUs as it is" if cpus else "threads wait for CPUs as it is"
    )


def _saturated(scene: Scene) -> str:
    busy = scene.number("disk.busy_ratio")
    part = human(busy.value, "ratio") if busy is not None else "most"
    return f"the disk was busy for {part} of the waits"


def _device_saturated(scene: Scene) -> bool:
    busy, queue = scene.number("disk.busy_ratio"), scene.number("disk.queue_count")
    if busy is None or busy.value < BUSY_DISK_RATIO:
        return False
    name = scene.resource.partition(" (")[0]
    disk = next((one for one in scene.machine.disks if one.name == name), None)
    alone = queue is not None and queue.value < ONE_REQUEST_COUNT
    return not (alone and disk is not None and disk.rotational is False)


def _small(scene: Scene) -> float | None:
    size = scene.number("read_size_bytes")
    return None if size is None else size.value


DEVICE_SATURATED = Rule(
    "device-saturated",
    f"the disk was busy for {BUSY_DISK_RATIO:.0%} of the waits or more, and not with one request at"
    " a time on a disk that does not rotate: more readers only queue",
    _device_saturated,
    _saturated,
)
WORKERS_FILL_CPUS = Rule(
    "workers-fill-cpus",
    "there are as many workers as CPUs are left to the rank beside its main thread (affinity,"
    " cpuset, quota, shared with the other ranks of the node)",
    _workers_fill_cpus,
    _full,
)
QUOTA_USED_UP = Rule(
    "quota-used-up",
    "the CPU quota of the job's cgroup runs out: then the quota is the remedy, not workers",
    lambda s: "cpu-throttled" in s.beside or (s.machine.throttled_ratio or 0.0) >= 0.1,
    lambda s: "the CPU quota of the job runs out",
)
CPUS_CONTENDED = Rule(
    "cpus-contended",
    "threads wait for CPUs (cpu-contention was found too): more workers make them wait longer",
    lambda s: "cpu-contention" in s.beside,
    _contended,
)
MEMORY_SHORT = Rule(
    "memory-short",
    "the node is short of memory: less than a tenth of it was to be had at one time, or cpu-memory"
    " was found too",
    lambda s: s.machine.memory_short or "cpu-memory" in s.beside,
    lambda s: "the node is short of memory",
)
ONE_NUMA_NODE = Rule(
    "one-numa-node",
    "the node has one NUMA node, or how many is not known",
    lambda s: (s.machine.numa_nodes or 1) < 2,
)
NO_WORKERS = Rule(
    "no-workers",
    "the loader has no workers (num_workers=0)",
    lambda s: s.workers == 0,
)
WORKERS_UNKNOWN = Rule(
    "workers-unknown",
    "the loader is not PyTorch's, or did not say how it is set up",
    lambda s: s.workers is None,
)
READS_ARE_LARGE = Rule(
    "reads-are-large",
    "a read asks for 256 KiB or more on average: the records are large already",
    lambda s: (_small(s) or 0.0) >= SMALL_READ_BYTES,
    lambda s: f"a read asks for {human(_small(s) or 0.0, 'bytes')} already",
)
READS_ARE_SMALL = Rule(
    "reads-are-small",
    "a read asks for less than 256 KiB on average: larger records come first",
    lambda s: 0.0 < (_small(s) or 0.0) < SMALL_READ_BYTES,
)
MUCH_PREFETCHED = Rule(
    "much-prefetched",
    f"prefetch_factor is {MUCH_PREFETCH} or more already",
    lambda s: s.setup.loader is not None and (s.setup.loader.prefetch or 0) >= MUCH_PREFETCH,
)
ONE_NODE = Rule("one-node", "the job runs on one node", lambda s: s.nodes < 2)
ONE_RANK = Rule("one-rank", "the job has one rank", lambda s: s.ranks < 2)
NOT_SLURM = Rule("not-slurm", "the job is not Slurm's", lambda s: s.machine.launcher != "slurm")
NO_LIMIT = Rule(
    "no-memory-limit",
    "the job's cgroup has no memory limit, or it is not known",
    lambda s: s.machine.limit_bytes is None,
)
GPU_MEMORY_FULL = Rule(
    "gpu-memory-full",
    "less than a fifth of the accelerator's memory was free at one time",
    lambda s: (
        s.setup.gpu_memory_free_ratio is not None and s.setup.gpu_memory_free_ratio < FULL_GPU_RATIO
    ),
)
GPU_MEMORY_FREE = Rule(
    "gpu-memory-free",
    "a fifth of the accelerator's memory or more was always free",
    lambda s: (
        s.setup.gpu_memory_free_ratio is not None
        and s.setup.gpu_memory_free_ratio >= FULL_GPU_RATIO
    ),
)


def without(name: str, what: str) -> Rule:
    """Return the rule that holds where a number was not seen, or is 0."""
    return Rule(f"no-{name}", what, lambda s: not (e := s.number(name)) or e.value <= 0)


def kind_is_not(kind: str, title: str) -> Rule:
    """Return the rule that holds where the named mount is of another kind."""
    return Rule(f"not-{kind}", f"the mount is not {title}", lambda s: s.file_system != kind)
