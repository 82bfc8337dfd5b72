"""What to do where the data path waits for the CPU."""

from __future__ import annotations

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.cpus import cpus_said, more_cpus, raised_quota
from clusterprof.remedies.rules import (
    CPUS_CONTENDED,
    MEMORY_SHORT,
    MUCH_PREFETCHED,
    NO_WORKERS,
    QUOTA_USED_UP,
    WORKERS_FILL_CPUS,
    WORKERS_UNKNOWN,
    cpus_share,
    needed_workers,
    next_workers,
)
from clusterprof.remedies.scene import Scene
from clusterprof.units import human

_PLUMBER = "up to 47x for pipelines that were set up wrongly (Plumber, MLSys 2022)"
_META = "preparing data on the trainers cost up to 56 % of throughput (Meta, ISCA 2022)"
_GREYHOUND = "CPU contention lengthened jobs by 12 % in probes (Greyhound, ATC 2025)"


def _more_workers(scene: Scene) -> Filled:
    workers, new, needed = scene.workers or 0, next_workers(scene), needed_workers(scene)
    said = [f"num_workers is {workers}", *cpus_said(scene)]
    if needed is not None and scene.setup.own_ratio:
        lost = human(scene.setup.own_ratio, "ratio")
        said.append(f"with {lost} of its steps lost, {needed} would keep up")
        if new is not None and new < needed:
            said.append(f"CPUs are there for {new} only, so a part of the loss will stay")
    to = "N" if new is None else str(new)
    bound = ", at most the CPUs of the rank less one" if new is None else ""
    call = run(f"DataLoader(num_workers={to})")
    change = f"{call} in the place of num_workers={workers}"
    change += " (N: at most the CPUs of the rank less one)" if bound else ""
    return Filled(change, tuple(said), f"Raise num_workers from {workers} to {to}{bound}")


def _ahead(scene: Scene) -> Filled:
    loader = scene.setup.loader
    now = loader.prefetch if loader is not None and loader.prefetch else 2
    new = max(4, 2 * now)
    return Filled(
        f"{run(f'DataLoader(prefetch_factor={new})')} in the place of {now}",
        (f"prefetch_factor is {now}, so {scene.workers or 0} workers hold"
         f" {now * (scene.workers or 0)} batches at most",),
        f"Raise prefetch_factor from {now} to {new}",
    )  # fmt: skip


def _persistent(scene: Scene) -> Filled:
    return Filled(
        run("DataLoader(persistent_workers=True)"), ("workers are started anew in every epoch",)
    )


def _cheaper(scene: Scene) -> Filled:
    pid = scene.resource.removeprefix("worker pid ")
    number, here = (pid, " of this run") if pid.isdecimal() else ("PID", "")
    return Filled(
        f"{run(f'py-spy record -d 30 -o profile.svg --pid {number}')}, a worker{here}, names the"
        " functions; do what is alike in every epoch once, offline (decode, resize, tokenise), and"
        " the rest with fewer operations",
        tuple(cpus_said(scene)),
    )


def _on_gpu(scene: Scene) -> Filled:
    free = scene.setup.gpu_memory_free_ratio
    said = (
        (f"{human(free, 'ratio')} of the accelerator's memory was always free",)
        if free is not None else ()
    )  # fmt: skip
    return Filled("nvidia.dali, torchvision.transforms.v2 on CUDA tensors, nvImageCodec", said)


WHOLE_NODE = Rule(
    "whole-node",
    "the job may use all CPUs of the node already",
    lambda s: (
        s.machine.quota_cpus is None
        and s.machine.cpus is not None
        and s.setup.cpus_allowed == s.machine.cpus
    ),
)
WORKERS_NEEDED = Rule(
    "cpus-suffice",
    "the CPUs the rank may use would do for the workers needed",
    lambda s: (c := cpus_share(s)) is None or (n := needed_workers(s)) is None or n + 1 <= c,
)
PERSISTENT = Rule(
    "persistent-already",
    "workers are kept already, there are none, or it is not known",
    lambda s: (
        s.setup.loader is None
        or s.setup.loader.persistent is not False
        or s.setup.loader.workers == 0
    ),
)
WORKERS_IDLE = Rule(
    "workers-rest",
    "workers rested and were not allowed to work further ahead: a longer prefetch is the remedy",
    lambda s: (s.workers or 0) > 0 and (s.value("worker.not_ahead_ratio") or 0.0) > 0,
)
NOT_AHEAD = Rule(
    "not-ahead",
    "working further ahead would not have made the batches ready, or that is not known",
    lambda s: (
        not (s.value("worker.not_ahead_ratio") or 0.0)
        and (s.value("worker.without_work_ratio") or 0.0) < 0.5
    ),
)
_STARVED = ("cpu-preprocess", "cpu-loader-config")

REMEDIES = (
    Mend(
        "raise-quota", ("cpu-throttled", *_STARVED), "Raise or remove the CPU quota of the job",
        "resources.limits.cpu, docker run --cpus, cpu.max", raised_quota,
        seen=("held_back_ratio", "throttled_periods_total"),
        moves="cgroup.throttled_periods_total stops rising",
        worse="neighbours on the node get less when all are busy",
        unless=(Rule("not-throttled", "the quota did not run out, or there is none",
                     lambda s: s.cause != "cpu-throttled" and not QUOTA_USED_UP.holds(s)),),
        place="node",
        effort="setting",
    ),
    Mend(
        "prefetch-more", ("cpu-loader-config",), "Let workers work further ahead",
        "DataLoader(prefetch_factor=4)", _ahead,
        seen=("worker.not_ahead_ratio", "worker.without_work_ratio"),
        moves="worker.not_ahead_ratio falls",
        worse="workers x prefetch_factor batches are held in host memory",
        unless=(WORKERS_UNKNOWN, NO_WORKERS, MUCH_PREFETCHED, MEMORY_SHORT, NOT_AHEAD),
        effort="setting",
    ),
    Mend(
        "more-workers", _STARVED, "Load with more workers",
        "DataLoader(num_workers=N): as many as keep up with the step, at most the CPUs of the rank"
        " less one", _more_workers,
        seen=("worker.on_cpu_ratio", "worker.without_work_ratio"), published=_PLUMBER,
        moves="worker.on_cpu_ratio of the waits falls, loader.workers_count rises",
        worse="each worker needs memory for its copy of the data set and the batches it holds",
        unless=(WORKERS_UNKNOWN, WORKERS_FILL_CPUS, QUOTA_USED_UP, CPUS_CONTENDED, MEMORY_SHORT,
                WORKERS_IDLE),
        missed="More workers are not advised",
        effort="setting",
    ),
    Mend(
        "persistent-workers", ("cpu-loader-config",), "Keep the workers between epochs",
        "DataLoader(persistent_workers=True)", _persistent, seen=("worker.without_work_ratio",),
        moves="the first wait of an epoch is as short as the others",
        worse="workers keep their memory during evaluation", unless=(PERSISTENT,),
        effort="setting",
    ),
    Mend(
        "prepare-ahead", ("cpu-preprocess",), "Do once what each epoch repeats, or do it cheaper",
        "decode, resize and tokenise offline; profile a worker to see what costs most", _cheaper,
        seen=("worker.on_cpu_ratio", "loader.workers_count"), published=_META,
        moves="worker.on_cpu_ratio falls", worse="room for the prepared data",
        effort="data",
    ),
    Mend(
        "prepare-on-gpu", ("cpu-preprocess",), "Move transforms to the accelerator",
        "DALI, torchvision v2 on CUDA tensors", _on_gpu, seen=("worker.on_cpu_ratio",),
        published=_META, moves="worker.on_cpu_ratio falls",
        worse="memory and time of the accelerator, which training wants too",
        unless=(Rule("gpu-memory-full", "less than a fifth of the accelerator's memory was free",
                     lambda s: (f := s.setup.gpu_memory_free_ratio) is not None and f < 0.2),),
        effort="code",
    ),
    Mend(
        "more-cpus-for-workers", _STARVED, "Ask for as many CPUs as the workers need",
        "srun --cpus-per-task, resources.requests.cpu, an undone binding", more_cpus,
        seen=("worker.on_cpu_ratio", "cpus_allowed_count"), published=_GREYHOUND,
        moves="job.cpus_allowed_count rises, and num_workers can be raised",
        worse="fewer jobs fit on the node",
        unless=(WORKERS_NEEDED, WHOLE_NODE, QUOTA_USED_UP),
        effort="setting",
    ),
)  # fmt: skip
