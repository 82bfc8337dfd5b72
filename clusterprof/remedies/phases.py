"""What to do about checkpoints, evaluation, start-up, and devices below their clock."""

from __future__ import annotations

import math
import shlex

from clusterprof.remedies.base import Filled, Mend, Rule, where
from clusterprof.remedies.commands import run
from clusterprof.remedies.rules import MEMORY_SHORT, ONE_RANK, without
from clusterprof.remedies.scene import Scene
from clusterprof.units import human

_ASYNC = "1.02-1.52x (Gao et al., ICSE 2024); saves 3.6-58.7x cheaper (Acme, arXiv 2403.07648)"
_SAVES_RATIO = 0.05
"""Of the time: what saves may cost."""
_WORTH_NS = 60e9
"""A start that is shorter is not worth a change of images."""


def _async(scene: Scene) -> Filled:
    size = scene.number("checkpoint.mean_bytes")
    said: tuple[str, ...] = ()
    if size is not None and size.value > 0 and scene.machine.available_least_bytes is not None:
        free = human(scene.machine.available_least_bytes, "bytes")
        said = (f"the host needs {human(size.value, 'bytes')} for the copy and had {free} left",)
    return Filled(
        run("torch.distributed.checkpoint.async_save(state, checkpoint_id=PATH)")
        + " in the place of torch.save(state, PATH); wait for its future before the next save",
        said,
    )


def _copy_does_not_fit(scene: Scene) -> bool:
    size, free = scene.number("checkpoint.mean_bytes"), scene.machine.available_least_bytes
    return size is not None and free is not None and size.value > free / 2


def _rarer(scene: Scene) -> Filled:
    factor = max(2, math.ceil(scene.finding.share_ratio / _SAVES_RATIO))
    length = scene.number("checkpoint.mean_ns")
    said = []
    if length is not None:
        said.append(
            f"saves of {human(length.value, 'ns')} cost {_SAVES_RATIO:.0%} when they come every"
            f" {human(length.value / _SAVES_RATIO, 'ns')}"
        )
    return Filled(
        f"save every {factor} times as many steps", tuple(said), f"Save {factor} times less often"
    )


def _local(scene: Scene) -> Filled:
    size, length = scene.number("checkpoint.mean_bytes"), scene.number("checkpoint.mean_ns")
    said: tuple[str, ...] = ()
    if size is not None and length is not None and length.value > 0:
        rate = human(1e9 * size.value / length.value, "bytes/s")
        said = (f"a save wrote {rate}",)
    return Filled(
        "torch.save to a local NVMe folder, then copy it to the shared store in a thread or a"
        " process of its own",
        said,
    )


def _sharded(scene: Scene) -> Filled:
    return Filled(
        "torch.distributed.checkpoint.save (each rank writes its shard) in the place of gathering"
        " the state on rank 0",
        (f"the job has {scene.ranks} ranks",),
    )


def _log(scene: Scene) -> Filled:
    return Filled(
        "logging.handlers.QueueHandler with a QueueListener; no fsync or flush in every step;"
        " uploads in a thread of their own"
    )


def _evaluate(scene: Scene) -> Filled:
    factor = max(2, math.ceil(scene.finding.share_ratio / 0.05))
    return Filled(
        f"evaluate every {factor} times as many steps, on part of the data, or on other devices"
        " from the last checkpoint",
        what=f"Evaluate {factor} times less often",
    )


def _on_gpu(scene: Scene) -> Filled:
    return Filled(
        "torchmetrics on CUDA tensors, .item() once at the end; what must run on the CPU goes to a"
        " process of its own"
    )


def _image(scene: Scene) -> Filled:
    return Filled(
        "install packages into the image, not at the start; TORCHINDUCTOR_CACHE_DIR and"
        " TRITON_CACHE_DIR on a disk that outlives the job"
    )


def _restore(scene: Scene) -> Filled:
    return Filled(
        "torch.distributed.checkpoint.load (each rank reads its shard), or torch.load(mmap=True);"
        f" {run('python -X importtime TRAIN.py')} names slow imports"
    )


def _clocks(scene: Scene) -> Filled:
    device = scene.finding.culprits[0].device if scene.finding.culprits else ""
    one = f" -i {shlex.quote(device)}" if device.startswith("GPU-") else ""
    return Filled(
        f"{run(f'nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK{one}')} (AMD:"
        f" {run('amd-smi metric')}) on the node names the reason; then fans, filters, air flow,"
        " power supply",
        what="Find out what slows the device, and mend it",
    )


def _drain(scene: Scene) -> Filled:
    node = shlex.quote(scene.finding.culprits[0].node) if scene.finding.culprits else "NODE"
    change = {
        "slurm": run(f"scontrol update NodeName={node} State=DRAIN Reason=throttled")
        + f"; {run(f'sbatch --exclude={node}')}",
        "kubernetes": run(f"kubectl cordon {node}"),
    }.get(scene.machine.launcher, f"leave {node} out of the hosts of the next run")
    return Filled(change)


SHORT_START = Rule(
    "short-start",
    "the slowest rank started in less than a minute: it happens once",
    lambda s: (v := s.number("startup.longest_ns")) is not None and v.value < _WORTH_NS,
)
NO_EVAL = without("eval.mean_ns", "no evaluation was marked")
_EVERYWHERE = Rule(
    "everywhere",
    "the cause is not one node's or one rank's: then it is the room or the setting, not a node",
    lambda s: not where(s),
)

_ALL_SAVE = Rule(
    "all-save",
    "all ranks spend as long in saves: these may be shards already",
    lambda s: s.ranks > 1 and bool(s.finding.culprits) and not where(s),
)

REMEDIES = (
    Mend(
        "save-in-background", ("checkpoint",), "Save in the background: snapshot, then write",
        "torch.distributed.checkpoint.async_save, or a snapshot to host memory", _async,
        seen=("checkpoint.mean_ns", "checkpoint.mean_bytes"), published=_ASYNC,
        moves="checkpoint.mean_ns falls to the time of the snapshot",
        worse="host memory for a copy of the state; a crash may lose the save under way",
        unless=(MEMORY_SHORT, Rule(
            "copy-does-not-fit", "a copy of the state is more than half of the host memory left",
            _copy_does_not_fit)),
        effort="code",
    ),
    Mend(
        "save-locally-first", ("checkpoint",), "Write to a local disk first, upload afterwards",
        "a local NVMe folder, and a copy in the background", _local,
        seen=("checkpoint.mean_ns", "checkpoint.mean_bytes"), published=_ASYNC,
        moves="checkpoint.mean_ns falls",
        worse="a save is safe only when the copy is done", unless=(
            without("checkpoint.mean_bytes", "how much a save wrote is not known"),),
        effort="code",
    ),
    Mend(
        "save-shards", ("checkpoint",), "Let each rank write its own shard",
        "torch.distributed.checkpoint.save", _sharded, seen=("checkpoint.mean_ns",),
        published="below 0.9 % of the time at a save in every step (ByteRobust, SOSP 2025)",
        moves="checkpoint.mean_ns falls with the number of ranks",
        worse="a save is many files, and to load it in another world size they are regrouped",
        unless=(ONE_RANK, _ALL_SAVE),
        place="job",
        effort="code",
    ),
    Mend(
        "save-less-often", ("checkpoint",), "Save less often", "a longer interval", _rarer,
        seen=("checkpoint.mean_ns",), moves="the share falls with the interval",
        worse="a failure costs more steps",
        place="job",
        effort="setting",
    ),
    Mend(
        "log-in-background", ("eval-host",), "Log from a thread of its own, and not in every step",
        "QueueHandler, no fsync in steps", _log, seen=("writing_ratio", "write_chars_total"),
        moves="thread.writing_ratio falls", worse="the last lines before a crash may be missing",
        unless=(without("writing_ratio", "the main thread was not blocked in writing"),),
        effort="code",
    ),
    Mend(
        "evaluate-less", ("eval-host",), "Evaluate less often", "a longer interval, fewer samples",
        _evaluate, seen=("eval.mean_ns",), moves="the share falls with the interval",
        worse="a bad run is noticed later", unless=(NO_EVAL,),
        place="job",
        effort="setting",
    ),
    Mend(
        "metrics-on-gpu", ("eval-host",), "Compute metrics on the accelerator",
        "torchmetrics on CUDA tensors", _on_gpu, seen=("thread.on_cpu_ratio",),
        moves="thread.on_cpu_ratio falls", worse="a little time and memory of the accelerator",
        unless=(without("thread.on_cpu_ratio", "the main thread did not compute in such pauses"),),
        effort="code",
    ),
    Mend(
        "prebuilt-image", ("startup",), "Use a prebuilt image and keep the compile cache",
        "packages in the image; TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR", _image,
        seen=("startup.longest_ns", "startup.share_ratio"),
        published="installing for 10 min or more was 1.7 % of all issues (Gao et al., ICSE 2024)",
        moves="startup.longest_ns falls", worse="images must be rebuilt for new packages",
        unless=(SHORT_START,),
        place="job",
        effort="code",
    ),
    Mend(
        "restore-in-parallel", ("startup",), "Load checkpoints in parallel, import less",
        "sharded or memory-mapped loading; python -X importtime", _restore,
        seen=("startup.longest_ns", "startup.share_ratio"), moves="startup.longest_ns falls",
        worse="load on the store at the start", unless=(SHORT_START,),
        place="job",
        effort="code",
    ),
    Mend(
        "mend-cooling", ("device-throttled",), "Find out what slows the device, and mend it",
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER", _clocks, seen=("sm_clock_hertz",),
        published="MFU up to 1.7x by watching nodes (Guard, MLSys 2026)",
        moves="gpu.sm_clock_hertz is that of the other devices", worse="the node is away meanwhile",
        place="node",
        effort="look",
    ),
    Mend(
        "drain-node", ("device-throttled",), "Drain the node until it is mended",
        "scontrol update State=DRAIN, kubectl cordon", _drain, seen=("sm_clock_hertz",),
        published="step times vary 1 % in the place of 20 % (Guard, MLSys 2026)",
        moves="the cause is gone without the node", worse="one node less", unless=(_EVERYWHERE,),
        place="node",
        effort="site",
    ),
)  # fmt: skip
