"""Recommendations for copies to the accelerator, waits for it, and hosts that launch too slowly."""

from __future__ import annotations

from clusterprof.analysis.advice.base import (
    ExclusionRule,
    FilledRecommendation,
    Recommendation,
    mark_command,
)
from clusterprof.analysis.advice.context import AdviceContext
from clusterprof.analysis.advice.rules import (
    FRAMEWORK_SEEN,
    GPU_MEMORY_FREE,
    GPU_MEMORY_FULL,
    NO_FRAMEWORK,
    XLA_SEEN,
    make_missing_evidence_rule,
)
from clusterprof.units import format_quantity

_PINNED_GAIN = "1.02-1.15x (Gao et al., ICSE 2024)"


def _fill_pinned_memory(context: AdviceContext) -> FilledRecommendation:
    loader = context.setup.loader
    reasons = ("pin_memory is off",) if loader is not None and loader.pinned is False else ()
    pinned = mark_command("DataLoader(pin_memory=True)")
    copied = mark_command('batch.to("cuda", non_blocking=True)')
    return FilledRecommendation(f"{pinned} and {copied}", reasons)


def _fill_rare_metrics(context: AdviceContext) -> FilledRecommendation:
    syncs_per_step = context.find_evidence("per_step_count")
    note = f" ({syncs_per_step.value:.1f} in a step now)" if syncs_per_step is not None else ""
    return FilledRecommendation(
        f"{mark_command('total += loss.detach()')} and"
        f" {mark_command('if step % 100 == 0: print(total.item())')}: no"
        f" .item(), .cpu(), print(tensor) or torch.cuda.synchronize() in every step{note}"
    )


def _fill_fewer_bytes(context: AdviceContext) -> FilledRecommendation:
    if context.setup.has_xla:
        return FilledRecommendation("offload fewer arrays to the host, only what is used late")
    return FilledRecommendation(
        mark_command('batch.to("cuda", non_blocking=True).float().div_(255)')
        + " of uint8 images instead of float32 copies; keep what does not change, and optimizer"
        " states if they fit, on the accelerator"
    )


COPY_RECOMMENDATIONS = (
    Recommendation(
        "pin-memory",
        ("h2d-copy",),
        "Copy from pinned memory without blocking the host",
        'pin_memory=True in the loader, .to("cuda", non_blocking=True)',
        _fill_pinned_memory,
        evidence_names=("blocking_ratio", "pcie_receive_bytes_per_second"),
        published=_PINNED_GAIN,
        expected_change="h2d.blocking_ratio falls to 0",
        worse="pinned memory cannot be swapped out: prefetched batches always occupy it",
        unless=(
            NO_FRAMEWORK,
            make_missing_evidence_rule("blocking_ratio", "no copy blocked the host"),
            ExclusionRule(
                "memory-short",
                "the node is short of memory, which pinned pages make worse",
                lambda s: s.machine.is_memory_short or "cpu-memory" in s.other_causes,
            ),
        ),
        effort="setting",
    ),
    Recommendation(
        "copy-ahead",
        ("h2d-copy", "h2d-copy-bound"),
        "Copy the next batch while the current one is computed",
        "a separate stream for copies",
        FilledRecommendation(
            mark_command(
                "with torch.cuda.stream(copies): next_batch = batch.to(device, non_blocking=True)"
            )
            + f"; then {mark_command('torch.cuda.current_stream().wait_stream(copies)')} before it"
            f" is used"
        ),
        evidence_names=("blocking_ratio", "bytes_per_second", "to_device_ratio"),
        published=_PINNED_GAIN,
        expected_change="copies no longer cause lost time",
        worse="memory of the accelerator for one more batch",
        unless=(
            NO_FRAMEWORK,
            XLA_SEEN,
            ExclusionRule(
                "gpu-memory-full",
                "less than a fifth of the accelerator's memory was free",
                lambda s: (f := s.setup.gpu_memory_free_ratio) is not None and f < 0.2,
            ),
        ),
        effort="code",
    ),
    Recommendation(
        "pin-copied-memory",
        ("h2d-copy-bound",),
        "Copy from and to pinned memory",
        'pin_memory=True in the loader, .to("cuda", non_blocking=True)',
        _fill_pinned_memory,
        evidence_names=("bytes_per_second",),
        published=_PINNED_GAIN,
        expected_change="the rate of copies rises to that of the link",
        worse="pinned memory cannot be swapped out: prefetched batches always occupy it",
        unless=(
            NO_FRAMEWORK,
            XLA_SEEN,
            ExclusionRule(
                "already-fast",
                "copies run at 10 GB/s or more, as only pinned memory does",
                lambda s: (v := s.value("copy.bytes_per_second")) is not None and v >= 10e9,
            ),
        ),
        effort="setting",
    ),
    Recommendation(
        "copy-less",
        ("h2d-copy-bound",),
        "Copy fewer bytes in each step",
        "smaller types, transforms on the accelerator, tensors that stay there",
        _fill_fewer_bytes,
        evidence_names=("bytes_per_second", "to_device_ratio"),
        expected_change="gpu.pcie_receive_bytes_per_second falls",
        worse="work of the accelerator, and its memory",
        unless=(NO_FRAMEWORK,),
        effort="code",
    ),
    Recommendation(
        "fetch-metrics-rarely",
        ("h2d-sync",),
        "Keep metrics on the accelerator, fetch them rarely",
        "no .item(), .cpu() or synchronize() in every step",
        _fill_rare_metrics,
        evidence_names=("per_step_count", "sync.waited_per_step_ns", "host.per_step_ns"),
        published="cases only (Gao et al., ICSE 2024)",
        expected_change="sync.waits_per_step_count falls below 0.1",
        worse="metrics are seen later",
        unless=(
            NO_FRAMEWORK,
            ExclusionRule(
                "few-waits",
                "the host waited less than once in ten steps",
                lambda s: (v := s.value("sync.waits_per_step_count")) is not None and v < 0.1,
            ),
        ),
        effort="code",
    ),
    Recommendation(
        "look-a-step-later",
        ("h2d-sync",),
        "Read results a step later",
        "non-blocking copies into pinned memory; torch.where instead of if tensor:",
        FilledRecommendation(
            mark_command('value = loss.detach().to("cpu", non_blocking=True)')
            + " into pinned memory, read one step later; torch.where instead of if tensor:"
        ),
        evidence_names=("per_step_count", "sync.waited_per_step_ns"),
        expected_change="sync.waited_per_step_ns falls",
        worse="a NaN is noticed a step later",
        unless=(NO_FRAMEWORK,),
        effort="code",
    ),
)

NATIVE_RECOMMENDATIONS = (
    Recommendation(
        "wait-once",
        ("h2d-sync",),
        "Let the host run ahead: wait once, not after each kernel",
        "cudaDeviceSynchronize only where a result is read; events and streams in between",
        FilledRecommendation(
            "remove "
            + mark_command("cudaDeviceSynchronize()")
            + " after launches: kernels of a stream run in order without it; check errors with "
            + mark_command("cudaGetLastError()")
            + "; reduce on the device and read the result in later steps"
        ),
        evidence_names=("host.synchronising_ratio",),
        expected_change="host.synchronising_ratio falls",
        worse="an error of a kernel is seen at a later call",
        unless=(FRAMEWORK_SEEN,),
        effort="code",
    ),
    Recommendation(
        "copy-asynchronously",
        ("h2d-copy", "h2d-copy-bound"),
        "Copy from pinned memory on another stream, or copy less",
        "cudaMallocHost once, cudaMemcpyAsync on a stream of its own",
        FilledRecommendation(
            mark_command("cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, copies)")
            + " from memory of "
            + mark_command("cudaMallocHost")
            + " while kernels of the other stream run; join many small copies into one, and keep"
            " what does not change on the device"
        ),
        evidence_names=("blocking_ratio", "bytes_per_second"),
        expected_change="copies no longer cause lost time",
        worse="memory of the accelerator for one more buffer",
        unless=(FRAMEWORK_SEEN,),
        effort="code",
    ),
    Recommendation(
        "launch-graphs",
        ("launch-bound",),
        "Launch less and larger work",
        "fused kernels, CUDA graphs",
        FilledRecommendation(
            "fuse short kernels, or capture the launches of a step once"
            f" ({mark_command('cudaStreamBeginCapture')}) and replay them"
            f" ({mark_command('cudaGraphLaunch')})"
        ),
        evidence_names=("host.launching_ratio",),
        expected_change="host.launching_ratio falls",
        worse="a graph must be captured again when arguments change",
        unless=(FRAMEWORK_SEEN,),
        effort="code",
    ),
    Recommendation(
        "pin-once",
        ("memory-free",),
        "Pin a buffer once and use it for every copy",
        "cudaHostRegister or cudaMallocHost before the first step; pin_memory=True in the loader",
        FilledRecommendation(
            f"call {mark_command('cudaHostRegister')} or {mark_command('cudaMallocHost')} once,"
            " before the first step, for the largest size that is needed, and use the buffer again;"
            " in PyTorch keep tensors of .pin_memory()"
        ),
        evidence_names=("pinning_ratio",),
        expected_change="host.pinning_ratio is not reported any more",
        worse="pinned memory cannot be swapped out",
        unless=(make_missing_evidence_rule("pinning_ratio", "no memory was pinned"),),
        effort="code",
    ),
    Recommendation(
        "allocate-once",
        ("launch-alloc", "memory-free"),
        "Allocate buffers of the device once",
        "cudaMalloc before the first step, or a pool",
        FilledRecommendation(
            f"take {mark_command('cudaMalloc')} and {mark_command('cudaFree')} out of the loop, or"
            f" use {mark_command('cudaMallocAsync')} with a pool that keeps its memory"
            " (cudaMemPoolAttrReleaseThreshold)"
        ),
        evidence_names=("allocating_ratio", "freeing_ratio"),
        expected_change="host.allocating_ratio is not reported any more",
        worse="the process keeps memory that it returned before",
        unless=(FRAMEWORK_SEEN,),
        effort="code",
    ),
)


_BATCH_GAIN = "3.4-4.9x for batches that were too small (Gao et al., ICSE 2024)"


def _describe_free_memory(context: AdviceContext) -> tuple[str, ...]:
    free_ratio = context.setup.gpu_memory_free_ratio
    if free_ratio is None:
        return ("free accelerator memory was not recorded: check it first",)
    return (f"{format_quantity(free_ratio, 'ratio')} of the accelerator's memory was always free",)


def _fill_larger_batch(context: AdviceContext) -> FilledRecommendation:
    free = context.setup.gpu_memory_free_ratio
    factor = "2x" if free is None else f"up to {max(1.1, 0.8 / max(1 - free, 0.05)):.1f}x"
    return FilledRecommendation(
        f"batch_size {factor} of the current one, using at most 80 % of the memory (adjust the"
        " learning rate too)",
        _describe_free_memory(context),
    )


def _fill_compilation(context: AdviceContext) -> FilledRecommendation:
    length = context.setup.step_ns
    reasons = (f"a step takes {format_quantity(length, 'ns')}",) if length else ()
    compilation = mark_command('model = torch.compile(model, mode="reduce-overhead")')
    # A window of inference has no optimizer, and a probed job trains.
    trains = context.setup.has_optimizer or not context.is_window
    optimizer = "; fused=True for the optimizer" if trains else ""
    return FilledRecommendation(f"{compilation} (CUDA graphs){optimizer}", reasons)


def _fill_expandable_segments(context: AdviceContext) -> FilledRecommendation:
    command = mark_command("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return FilledRecommendation(command, _describe_free_memory(context))


def _fill_kept_segments(context: AdviceContext) -> FilledRecommendation:
    if (context.value("allocator.returned_ratio") or 0.0) >= 0.8:  # it keeps none
        change = mark_command("unset PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NO_HIP_MEMORY_CACHING")
        return FilledRecommendation(change, what="Switch the cache of PyTorch's allocator on")
    return FilledRecommendation(
        mark_command("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
        + f"; where that is not supported, {mark_command('max_split_size_mb:512')} instead, if"
        " memory is freed because it is fragmented"
    )


def _fill_smaller_batch(context: AdviceContext) -> FilledRecommendation:
    return FilledRecommendation(
        "batch_size a tenth smaller, or torch.utils.checkpoint for activations",
        _describe_free_memory(context),
    )


def _get_recompile_ratio(context: AdviceContext) -> float | None:
    return context.value("compile.again_ratio")


WINDOW_ONLY = ExclusionRule(
    "window-only",
    "the trace is a window of the job: neither the memory of the device nor the other steps are"
    " known",
    lambda s: s.is_window,
)
ONE_RANK_LATE = ExclusionRule(
    "one-rank-late",
    "one rank is late with a batch that the others launch in time",
    lambda s: (
        s.ranks > 1
        and sum(10 * c.caused_ns >= s.finding.culprits[0].caused_ns for c in s.finding.culprits)
        == 1
    ),
)

ONLY_PINNED = ExclusionRule(
    "only-pinned",
    "memory was pinned, and hardly any freed",
    lambda s: (s.value("host.pinning_ratio") or 0.0) > 10 * (s.value("host.freeing_ratio") or 0.0),
)

LAUNCH_RECOMMENDATIONS = (
    Recommendation(
        "larger-batch",
        ("launch-bound",),
        "Raise the batch size",
        "while memory is at most 80 % used (docs/underfill.md: when kernels are too small)",
        _fill_larger_batch,
        evidence_names=("thread.on_cpu_ratio",),
        published=_BATCH_GAIN,
        expected_change="gpu.busy_ratio and gpu.sm_active_ratio rise",
        worse="convergence: the learning rate must follow",
        unless=(NO_FRAMEWORK, GPU_MEMORY_FULL, WINDOW_ONLY, ONE_RANK_LATE),
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "fewer-launches",
        ("launch-bound",),
        "Launch less and larger work",
        "torch.compile, CUDA graphs, fused optimizers",
        _fill_compilation,
        evidence_names=("thread.on_cpu_ratio",),
        published=_BATCH_GAIN,
        expected_change="thread.on_cpu_ratio falls in steps",
        worse="start-up grows by the compilation, and shapes must not change in every step",
        unless=(NO_FRAMEWORK,),
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "skip-first-steps",
        ("warm-up",),
        "Judge later steps",
        "leave the first steps out of a profile or a benchmark",
        FilledRecommendation(
            mark_command("torch.profiler.schedule(wait=20, warmup=5, active=5)")
            + f", or {mark_command('clusterprof analyze --steps 10: RUN')}: what happens once does"
            " not matter in a long run"
        ),
        evidence_names=("loading_ratio",),
        expected_change="warm-up disappears, and what remains is the cost of every step",
        diagnose=True,
        addressee="job",
        effort="look",
    ),
    Recommendation(
        "keep-kernel-caches",
        ("warm-up",),
        "Keep the caches of compiled kernels",
        "cache folders on a disk that outlives the job",
        FilledRecommendation(
            f"{mark_command('export CUDA_CACHE_PATH=/shared/cache/cuda')},"
            f" {mark_command('export TRITON_CACHE_DIR=/shared/cache/triton')} and"
            f" {mark_command('export TORCHINDUCTOR_CACHE_DIR=/shared/cache/inductor')}"
        ),
        evidence_names=("loading_ratio",),
        expected_change="the first steps take less time after a restart",
        worse="caches are valid for one version of driver and libraries",
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "warm-up-first",
        ("warm-up",),
        "Run one step of each shape before the clock starts",
        "a forward and backward pass on zeros; graphs captured before training",
        FilledRecommendation(
            mark_command("model(torch.zeros_like(batch)).sum().backward()")
            + " once for each shape before the first step, then set gradients to zero; capture CUDA"
            " graphs there too"
        ),
        evidence_names=("loading_ratio",),
        expected_change="warm-up lies before the first step",
        worse="start-up takes as much longer",
        effort="code",
    ),
    Recommendation(
        "no-cache-flush",
        ("memory-free",),
        "Take what frees memory out of the loop",
        "torch.cuda.empty_cache(), cudaHostUnregister, buffers allocated again in each step",
        FilledRecommendation(
            mark_command("grep -rnE 'empty_cache|ipc_collect|cudaHostUnregister' CODE")
            + " in the training code, and take it out of the loop; make pinned and temporary"
            " buffers once"
        ),
        evidence_names=("freeing_ratio",),
        expected_change="host.freeing_ratio is not reported any more",
        worse="the process keeps memory that it returned before",
        unless=(NO_FRAMEWORK, ONLY_PINNED),
        effort="code",
    ),
    Recommendation(
        "keep-segments",
        ("memory-free",),
        "Let the allocator keep and grow its blocks",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, else max_split_size_mb",
        _fill_kept_segments,
        evidence_names=("freeing_ratio", "returned_ratio"),
        published="cases only (ByteDance, OSDI 2025)",
        expected_change="num_device_free of torch.cuda.memory_stats() stays constant",
        worse="not with CUDA IPC of some versions: shared tensors may fail",
        unless=(NO_FRAMEWORK, ONLY_PINNED),
        effort="setting",
    ),
    Recommendation(
        "expandable-segments",
        ("launch-alloc",),
        "Let the allocator's segments grow",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        _fill_expandable_segments,
        evidence_names=("retries_total", "mallocs_total", "frees_total"),
        published="cases only (ByteDance, OSDI 2025)",
        expected_change="allocator.retries_total stays 0",
        worse="not with CUDA IPC of some versions: shared tensors may fail",
        unless=(NO_FRAMEWORK,),
        effort="setting",
    ),
    Recommendation(
        "no-empty-cache",
        ("launch-alloc",),
        "Remove empty_cache() from the loop, and keep shapes fixed",
        "torch.cuda.empty_cache(), shapes that change",
        FilledRecommendation(
            mark_command("grep -rn empty_cache CODE")
            + " in the training code, and remove it from the loop; pad or bucket batches to a few"
            " shapes"
        ),
        evidence_names=("mallocs_total", "frees_total"),
        expected_change="allocator.mallocs_total stops rising",
        worse="the process keeps memory that it returned before",
        unless=(
            NO_FRAMEWORK,
            make_missing_evidence_rule("frees_total", "no block was returned to the driver"),
        ),
        effort="code",
    ),
    Recommendation(
        "smaller-footprint",
        ("launch-alloc",),
        "Leave some memory of the accelerator free",
        "a smaller batch, or activation checkpointing",
        _fill_smaller_batch,
        evidence_names=("retries_total",),
        expected_change="allocator.retries_total stays 0",
        worse="a smaller batch uses the device less",
        unless=(
            make_missing_evidence_rule("retries_total", "no allocation was retried"),
            GPU_MEMORY_FREE,
        ),
        effort="setting",
    ),
    Recommendation(
        "dynamic-shapes",
        ("launch-recompile",),
        "Mark changing dimensions as dynamic, or pad them",
        "mark_dynamic, dynamic=True, bucketed shapes; TORCH_LOGS=recompiles",
        FilledRecommendation(
            f"{mark_command('export TORCH_LOGS=recompiles')} says what changed; then"
            f" {mark_command('torch._dynamo.mark_dynamic(tensor, dim)')} or"
            f" {mark_command('torch.compile(dynamic=True)')}, or pad batches to a few lengths"
        ),
        evidence_names=("compile.mean_ns", "compile.again_ratio"),
        expected_change="no compilation after the first ten steps",
        worse="dynamic code is a little slower",
        unless=(
            ExclusionRule(
                "first-time",
                "all of it was code compiled for the first time",
                lambda s: _get_recompile_ratio(s) == 0,
            ),
        ),
        effort="code",
    ),
    Recommendation(
        "compile-early",
        ("launch-recompile",),
        "Compile late code paths before the first step",
        "run evaluation once at the start; keep the compile cache",
        FilledRecommendation(
            "run evaluation and every other late branch once before step 1, with"
            " TORCHINDUCTOR_FX_GRAPH_CACHE=1 and a cache folder that outlives the job"
            " (TORCHINDUCTOR_CACHE_DIR)"
        ),
        evidence_names=("compile.mean_ns", "compile.again_ratio"),
        expected_change="compilations move to start-up",
        worse="start-up takes longer",
        unless=(
            ExclusionRule(
                "compiled-before",
                "all of it was code that had been compiled before",
                lambda s: _get_recompile_ratio(s) == 1,
            ),
        ),
        effort="code",
    ),
)
