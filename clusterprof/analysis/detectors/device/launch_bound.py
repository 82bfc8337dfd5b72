"""The host launches work too slowly.

## What it sees

Lost time inside a step, outside any wait, in which the main thread was busy on a CPU: it had the
next kernel to launch and had not got to it.

## Why the GPU waits

Each operation costs the host 5 to 20 µs of Python and driver. When kernels are shorter than that,
the queue runs dry, and the GPU waits for the next launch, thousands of times in a step.

## How it decides

The device must have been measured as idle in that window. Its share is the part of the main
thread's time spent on a CPU, if that is at least the limit. A main thread that slept or was blocked
explains nothing by launching.

## What to do

Raise the batch size as far as memory allows. Fuse operations with `torch.compile`, or replay steps
as CUDA graphs. Move logging and metrics out of the step.

## Where it is blind

Between two device samples the order of idle and busy is unknown: kernel rates, which would settle
it, are not recorded. An imported trace of kernels knows: its share is the time in which the next
kernel had not been launched yet. Anything else that keeps the main thread computing inside the
step, such as a metric on the CPU, looks the same and has the same remedy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.detectors.base import Claims, in_phase, main_thread, mean_over
from clusterprof.findings import Cause, Evidence
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_COMPUTE, Feeding, Lost, Rank
from clusterprof.timeline.traced import in_spans


class LaunchBound:
    """Claims idle device time in steps in which the main thread was busy."""

    cause = Cause(
        "launch-bound",
        "launch",
        "The host launches work too slowly",
        "Raise the batch size, or fuse operations with torch.compile or CUDA graphs",
    )
    needs = ("spans", "threads", "device")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a step counts as bound by launching."""

        on_cpu_at_least_ratio: float = 0.5
        """Part of the piece that the main thread must have been on a CPU."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim time of the main thread on a CPU inside steps."""
        if layout.STARVED in rank.main.spans:
            return _starved(rank, lost)
        inside = in_phase(lost, PHASE_COMPUTE) & (lost.step != 0)
        if not inside.any():
            return Claims(np.zeros(inside.size), "B")
        on_cpu = np.nan_to_num(main_thread(rank, "on_cpu_ns", lost, inside))
        share = np.where(on_cpu >= limits.on_cpu_at_least_ratio, on_cpu, 0.0)
        evidence = (
            Evidence(
                "thread.on_cpu_ratio",
                mean_over(lost, share),
                "ratio",
                "of that time, the main thread was busy on a CPU",
            ),
        )
        return Claims(share, "B", evidence)


def _starved(rank: Rank, lost: Lost) -> Claims:
    """What a trace of kernels shows: the device was idle, and its next kernel not yet launched."""
    inside = in_phase(lost, PHASE_COMPUTE)
    table = rank.main.spans[layout.STARVED]
    late, launching, synced, memory, copying = in_spans(
        table, lost.start_ns, lost.end_ns,
        late=None, launching=table.a, synced=table.b, memory=table.c, copying=table.d,
    )  # fmt: skip
    share = np.where(inside, np.minimum(late / np.maximum(lost.lost_ns, 1), 1.0), 0.0)
    late = np.maximum(late, 1.0)
    told = (
        ("host.launching_ratio", launching, "of that time, the host was in operators and launches"),
        ("host.synchronising_ratio", synced, "of it, the host waited for the device"),
        ("host.allocating_ratio", memory, "of it, the host allocated or freed device memory"),
        ("host.copying_ratio", copying, "of it, the host copied to the device"),
    )
    evidence = tuple(
        Evidence(name, mean_over(lost, share, np.minimum(ns / late, 1.0)), "ratio", note)
        for name, ns, note in told if ns.any()
    )  # fmt: skip
    return Claims(share, "A", evidence)
