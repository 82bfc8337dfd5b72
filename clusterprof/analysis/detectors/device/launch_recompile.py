"""Code is compiled again in the middle of training.

## What it sees

Lost time inside steps, after the first ones, in which `torch.compile` or JAX was compiling.

## Why the GPU waits

A compiled graph is valid for what it was traced with: shapes, types, flags. A batch of another
length, or a Python number that changes, is traced and compiled again, which takes seconds during
which nothing runs.

## How it decides

The compiler itself reports start and end of each compilation. Its share is the whole of a lost
segment inside a compilation that the first steps (`startup`) do not explain.

## What to do

Pad or bucket the shapes, mark what changes as dynamic (`torch._dynamo.mark_dynamic`,
`dynamic=True`), and keep changing Python numbers out of compiled code. `TORCH_LOGS=recompiles`
shows what changed; JAX shows it with `jax_explain_cache_misses`.

## Where it is blind

Compilation in a separate thread delays launches but has no span. Other compilers (TensorRT,
TensorFlow, Triton kernels outside of `torch.compile`) are seen only if the user marks them:
`clusterprof.span("compile")`. JAX does not report whether it had compiled the same code before.
Code that is reached late for the first time, such as evaluation, is compiled then and counts too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import Claims, select_phases
from clusterprof.analysis.timeline.model import PHASE_STARTUP, DataWaitBreakdown, LostTime, Rank
from clusterprof.analysis.timeline.spans import CompileSpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence


class LaunchRecompile:
    """Claims the time inside compilations after the first steps."""

    cause = Cause(
        "launch-recompile",
        "launch",
        "Code is compiled again in the middle of training",
        "Pad or bucket shapes, or mark what changes as dynamic",
        precedence=710,
        tone=1,
        hidden_cost="interval",
        trace_spans=(layout.COMPILE,),
        manual_check=(
            "`TORCH_LOGS=recompiles` on the job: every line is one, with its reason. JAX: "
            "`jax.config.update('jax_log_compiles', True)`."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a compilation."""

        compiling_at_least_ns: int = 0
        """A shorter lost segment is left unattributed; 0 = none is too short."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim every lost segment inside a compilation; those of the first steps are `startup`."""
        inside = select_phases(lost, PHASE_STARTUP)
        if not inside.any():
            return Claims(np.zeros(inside.size), "A")
        inside &= lost.end_ns - lost.start_ns >= limits.compiling_at_least_ns
        evidence = []
        compilations = rank.main.get_spans(CompileSpans)
        if inside.any() and compilations is not None:
            length = float((compilations.end_ns - compilations.start_ns).mean())
            note = "a compilation took on average"
            evidence.append(Evidence("compile.mean_ns", length, "ns", note))
            compiled_before = compilations.compiled_before
            counts = compiled_before[compiled_before >= 0]  # JAX does not report it
            if counts.size:
                repeated = float(np.mean(counts > 0))
                note = "of the compilations were of code that had been compiled before"
                evidence.append(Evidence("compile.again_ratio", repeated, "ratio", note))
        return Claims(inside.astype(float), "A", tuple(evidence))
