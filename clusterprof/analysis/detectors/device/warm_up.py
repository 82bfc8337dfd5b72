"""One-time host work: loading kernels, creating contexts, capturing graphs.

## What it sees

Idle time of the device inside steps while the host was in calls that happen once: loading of
modules and libraries, creation of contexts, the first launch of a kernel, capture and instantiation
of CUDA graphs.

## Why the GPU waits

Kernels are loaded when they are launched first (lazy loading), libraries such as cuDNN and cuBLAS
set themselves up at their first call, and nothing runs while a graph is captured. Each of these
takes milliseconds to seconds, once.

## How it decides

An imported trace of a profiler names the calls: `cuModuleLoadData`, `cudaLibraryLoadData`,
`cudaFuncGetAttributes`, `cudaGraphInstantiate`, everything from `cudaStreamBeginCapture` to
`cudaStreamEndCapture`. A launch or the creation of a stream that takes a millisecond or more on an
idle device counts if most of the time in such calls lies in the first of several steps (of one
step: in its first half). A call that allocates, frees or pins memory counts only before the tenth
launch of the trace, while contexts and libraries are set up; others are `memory-free` or
`launch-alloc`. In a recording of clusterprof the time inside `clusterprof.span("warm_up")` counts,
as far as the device was idle; the first step is `startup`.

## What to do

Nothing, if the run is long: it is over after some steps. A profile should leave these steps out
(`schedule(wait=…, warmup=…)`). For short or restarted jobs keep caches on a disk that outlives the
job (`CUDA_CACHE_PATH`, `TRITON_CACHE_DIR`, `TORCHINDUCTOR_CACHE_DIR`), and run one step of each
shape before the clock starts.

## Where it is blind

`torch.compile` and JAX have marks of their own (`startup`, `launch-recompile`). The search for the
fastest kernel (`cudnn.benchmark`) keeps the device busy and is not lost time here. A launch that is
slow for another reason in the first step looks alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    measure_host_work,
    name_host_functions,
)
from clusterprof.analysis.timeline.model import DataWaitBreakdown, LostTime, Rank
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence


class WarmUp:
    """Claims idle time in which the host loaded kernels or captured graphs."""

    cause = Cause(
        "warm-up",
        "startup",
        "One-time host work: loading kernels, creating contexts, capturing graphs",
        "Leave the first steps out of a profile; for short jobs keep kernel caches on disk",
        precedence=105,
        tone=1,
        hidden_cost="pause",
        trace_spans=(layout.HOST_WORK, layout.STARVED),
        manual_check=(
            "profile some later steps (`torch.profiler.schedule(wait=20, warmup=5, active=5)`): it "
            "must be gone. `CUDA_MODULE_LOADING=EAGER` moves the loading of kernels before the "
            "first step."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for warm-up."""

        warming_at_least_ratio: float = 0.0
        """A smaller share of a segment is left unattributed; 0 = none is too small."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim lost time in which the host was in calls that happen once."""
        share = measure_host_work(rank, lost, layout.WARMING_UP)
        share[share < limits.warming_at_least_ratio] = 0.0
        if not share.any():
            return Claims(share, "A")
        evidence = Evidence(
            "host.loading_ratio",
            compute_claimed_mean(lost, share),
            "ratio",
            "of that time, the host loaded kernels, created contexts or captured graphs",
        )
        named = name_host_functions(rank, lost, share, layout.WARMING_UP)
        return Claims(share, "A", (evidence, *named))
