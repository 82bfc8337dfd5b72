"""Code is compiled again in the middle of training.

## What it sees

Lost time inside steps, after the first ones, in which `torch.compile` or JAX was compiling.

## Why the GPU waits

A compiled graph holds for what it was traced with: shapes, types, flags. A batch of another length,
or a Python number that changes, is traced and compiled anew, for seconds, and nothing runs.

## How it decides

The compiler itself says when it begins and ends. Its share is the whole of a lost piece inside a
compilation that the first steps (`startup`) do not explain.

## What to do

Pad or bucket the shapes, mark what changes as dynamic (`torch._dynamo.mark_dynamic`,
`dynamic=True`), and keep changing Python numbers out of compiled code. `TORCH_LOGS=recompiles` says
what changed; JAX says it with `jax_explain_cache_misses`.

## Where it is blind

Compilation in a thread of its own costs launches without being marked. Other compilers (TensorRT,
TensorFlow, Triton kernels outside of `torch.compile`) are seen only where the user marks them:
`clusterprof.span("compile")`. JAX does not say whether it had compiled the same code before. Code
that is first reached late, such as evaluation, is compiled for the first time there, and counts
too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.detectors.base import Claims, in_phase
from clusterprof.findings import Cause, Evidence
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_STARTUP, Feeding, Lost, Rank


class LaunchRecompile:
    """Claims the time inside compilations after the first steps."""

    cause = Cause(
        "launch-recompile",
        "launch",
        "Code is compiled again in the middle of training",
        "Pad or bucket shapes, or mark what changes as dynamic",
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a compilation counts."""

        compiling_at_least_ns: int = 0
        """A shorter lost piece is left unattributed; 0 = none is too short."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim every lost piece inside a compilation; those of the first steps are start-up."""
        inside = in_phase(lost, PHASE_STARTUP)
        if not inside.any():
            return Claims(np.zeros(inside.size), "A")
        inside &= lost.end_ns - lost.start_ns >= limits.compiling_at_least_ns
        evidence = []
        table = rank.main.spans.get(layout.COMPILE)
        if inside.any() and table is not None:
            length = float((table.end_ns - table.start_ns).mean())
            note = "a compilation took on average"
            evidence.append(Evidence("compile.mean_ns", length, "ns", note))
            told = table.a[table.a >= 0]  # JAX does not say it
            if told.size:
                again = float(np.mean(told > 0))
                note = "of the compilations were of code that had been compiled before"
                evidence.append(Evidence("compile.again_ratio", again, "ratio", note))
        return Claims(inside.astype(float), "A", tuple(evidence))
