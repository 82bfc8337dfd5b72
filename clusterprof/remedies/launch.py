"""What to do where the host launches work too slowly."""

from __future__ import annotations

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.rules import GPU_MEMORY_FREE, GPU_MEMORY_FULL, without
from clusterprof.remedies.scene import Scene
from clusterprof.units import human

_BATCH = "3.4-4.9x for batches that were too small (Gao et al., ICSE 2024)"


def _room(scene: Scene) -> tuple[str, ...]:
    free = scene.setup.gpu_memory_free_ratio
    if free is None:
        return ("how much memory of the accelerator is free was not recorded: look before",)
    return (f"{human(free, 'ratio')} of the accelerator's memory was always free",)


def _batch(scene: Scene) -> Filled:
    free = scene.setup.gpu_memory_free_ratio
    factor = "2x" if free is None else f"up to {max(1.1, 0.8 / max(1 - free, 0.05)):.1f}x"
    return Filled(
        f"batch_size {factor} of the present one, while at most 80 % of the memory is used (and the"
        " learning rate with it)",
        _room(scene),
    )


def _compile(scene: Scene) -> Filled:
    length = scene.setup.step_ns
    said = (f"a step takes {human(length, 'ns')}",) if length else ()
    return Filled(
        run('model = torch.compile(model, mode="reduce-overhead")')
        + " (CUDA graphs); fused=True for the optimizer",
        said,
    )


def _allocator(scene: Scene) -> Filled:
    command = run("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return Filled(command, _room(scene))


def _empty_cache(scene: Scene) -> Filled:
    return Filled(
        run("grep -rn empty_cache CODE")
        + " in the training code, and take it out of the loop; pad or bucket batches to a few"
        " shapes"
    )


def _smaller(scene: Scene) -> Filled:
    return Filled(
        "batch_size a tenth smaller, or torch.utils.checkpoint for activations", _room(scene)
    )


def _dynamic(scene: Scene) -> Filled:
    return Filled(
        f"{run('export TORCH_LOGS=recompiles')} says what changed; then"
        f" {run('torch._dynamo.mark_dynamic(tensor, dim)')} or"
        f" {run('torch.compile(dynamic=True)')}, or pad batches to a few lengths"
    )


def _warm(scene: Scene) -> Filled:
    return Filled(
        "run evaluation and every other late branch once before step 1, with"
        " TORCHINDUCTOR_FX_GRAPH_CACHE=1 and a cache folder that outlives the job"
        " (TORCHINDUCTOR_CACHE_DIR)"
    )


def _again(scene: Scene) -> float | None:
    return scene.value("compile.again_ratio")


REMEDIES = (
    Mend(
        "larger-batch", ("launch-bound",), "Raise the batch size",
        "while memory is at most 80 % used (docs/underfill.md: when kernels are too small)", _batch,
        seen=("thread.on_cpu_ratio",), published=_BATCH,
        moves="gpu.busy_ratio and gpu.sm_active_ratio rise",
        worse="convergence: the learning rate must follow",
        unless=(GPU_MEMORY_FULL,),
        place="job",
        effort="setting",
    ),
    Mend(
        "fewer-launches", ("launch-bound",), "Launch less and larger work",
        "torch.compile, CUDA graphs, fused optimizers", _compile, seen=("thread.on_cpu_ratio",),
        published=_BATCH, moves="thread.on_cpu_ratio falls in steps",
        worse="start-up grows by the compilation, and shapes must not change in every step",
        place="job",
        effort="code",
    ),
    Mend(
        "expandable-segments", ("launch-alloc",), "Let the allocator's segments grow",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", _allocator,
        seen=("retries_total", "mallocs_total", "frees_total"),
        published="cases only (ByteDance, OSDI 2025)", moves="allocator.retries_total stays 0",
        worse="not with CUDA IPC of some versions: shared tensors may fail",
        effort="setting",
    ),
    Mend(
        "no-empty-cache", ("launch-alloc",), "Take empty_cache() out of the loop, and fix shapes",
        "torch.cuda.empty_cache(), shapes that change", _empty_cache,
        seen=("mallocs_total", "frees_total"), moves="allocator.mallocs_total stops rising",
        worse="memory that was given back stays with the process",
        unless=(without("frees_total", "no block was given back to the driver"),),
        effort="code",
    ),
    Mend(
        "smaller-footprint", ("launch-alloc",), "Leave some memory of the accelerator free",
        "a smaller batch, or activation checkpointing", _smaller, seen=("retries_total",),
        moves="allocator.retries_total stays 0", worse="a smaller batch fills the device less",
        unless=(without("retries_total", "no allocation had to be tried again"), GPU_MEMORY_FREE),
        effort="setting",
    ),
    Mend(
        "dynamic-shapes", ("launch-recompile",), "Mark what changes as dynamic, or pad it",
        "mark_dynamic, dynamic=True, bucketed shapes; TORCH_LOGS=recompiles", _dynamic,
        seen=("compile.mean_ns", "compile.again_ratio"),
        moves="no compilation after the first ten steps", worse="dynamic code is a little slower",
        unless=(
            Rule("first-time", "all of it was code compiled for the first time",
                 lambda s: _again(s) == 0),
        ),
        effort="code",
    ),
    Mend(
        "compile-early", ("launch-recompile",),
        "Compile what is reached late before the first step",
        "run evaluation once at the start; keep the compile cache", _warm,
        seen=("compile.mean_ns", "compile.again_ratio"),
        moves="compilations move to start-up", worse="start-up takes longer",
        unless=(
            Rule("compiled-before", "all of it was code that had been compiled before",
                 lambda s: _again(s) == 1),
        ),
        effort="code",
    ),
)  # fmt: skip
