"""The host waits for the GPU within the step, and the GPU then waits for the host.

## What it sees

Lost time inside steps, outside any other wait, in steps in which the training process waited for
the device: `.item()`, `.cpu()`, `if tensor:`, `torch.cuda.synchronize()`.

## Why the GPU waits

As long as the host runs ahead, the device always has the next kernel waiting. A host that asks for
a result waits until the device has done everything, and every launch after that goes to an idle
device, until the host is ahead again.

## How it decides

Would the device have stood still without those waits too? The host was at work for
`step - waits for the device - other waits`; a device that was busy for longer than that could have
been kept busy. What the host's work exceeds the device's by is left to `launch-bound`; the rest of
the lost time in steps with such waits is this, as far as the main thread had work to do in it: what
it slept elsewhere (writing a log, on a lock) is not launching.

An imported trace of kernels shows each gap by itself: those count that begin while the host waits
for the device, until its next launch.

## What to do

Collect metrics on the GPU and fetch them every few hundred steps; copy results with
`non_blocking=True` into pinned memory and look at them a step later; replace `if loss.isnan():` by
`torch.where` or a check now and then.

## Where it is blind

Operations that synchronise by themselves (`nonzero`, boolean indexing, a pageable copy) are not
marked. Only CUDA tensors of `torch` are seen, and only `torch.cuda.synchronize`, not events of the
user's own; mark what else waits with `clusterprof.span("sync")`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.detectors.asleep import asleep_ns
from clusterprof.detectors.base import Claims, in_phase, main_thread
from clusterprof.findings import Cause, Evidence
from clusterprof.probe import layout
from clusterprof.timeline.intervals import overlaps, union
from clusterprof.timeline.model import PHASE_COMPUTE, Feeding, Lost, Rank, SpanTable
from clusterprof.timeline.traced import in_spans

_OTHER_WAITS = (
    layout.DATA_WAIT, layout.H2D, layout.CHECKPOINT, layout.EVAL, layout.COMPILE, layout.GC,
)  # fmt: skip

_NAPS_RATIO = 0.1  # of the lost time slept elsewhere: as much as falling asleep and waking up take


class H2dSync:
    """Claims idle time of steps that waiting for the device made idle."""

    cause = Cause(
        "h2d-sync",
        "h2d",
        "The host waits for the GPU within the step, and the GPU then waits for the host",
        "Keep metrics on the GPU: no .item(), .cpu() or synchronize() in every step",
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When waits for the device count."""

        exposed_at_least_ratio: float = 0.1
        """A smaller part of the lost time of those steps is left to other causes."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim lost time inside steps with synchronisations, less what launching costs anyway."""
        share = np.zeros(lost.start_ns.size)
        syncs, steps = (rank.main.spans.get(kind) for kind in (layout.SYNC, layout.STEP))
        if syncs is None or steps is None or not share.size:
            return Claims(share, "B")
        low, high = int(lost.start_ns[0]), int(lost.end_ns[-1])
        held = _in_step(steps, syncs)
        held = held & (steps.end_ns > low) & (steps.start_ns < high)
        in_such = np.isin(lost.step, steps.a[held]) & (lost.step >= 0)
        inside = in_such & in_phase(lost, PHASE_COMPUTE)
        if not inside.any():
            return Claims(share, "B")
        if layout.STARVED in rank.main.spans:
            return _traced(rank.main.spans[layout.STARVED], lost, inside, limits)
        whole = np.maximum(steps.start_ns[held], low), np.minimum(steps.end_ns[held], high)
        steps_ns = int((whole[1] - whole[0]).sum())
        lengths = np.maximum(syncs.end_ns - syncs.start_ns, 1)
        synced_ns = _within(syncs, whole, np.minimum(syncs.a, lengths) / lengths)
        others_ns = sum(_within(rank.main.spans.get(kind), whole) for kind in _OTHER_WAITS)
        host_ns = max(steps_ns - synced_ns - others_ns, 0.0)
        device_ns = steps_ns - int(lost.lost_ns[in_such].sum())
        idle_ns = float(lost.lost_ns[inside].sum())
        exposed = 1 - min(max(host_ns - device_ns, 0.0), idle_ns) / idle_ns
        if exposed < limits.exposed_at_least_ratio:
            return Claims(share, "B")
        share[inside] = min(exposed, _at_work(rank, lost, inside))
        count = max(int(held.sum()), 1)
        row = np.searchsorted(steps.start_ns, syncs.start_ns, side="right") - 1
        each = (row >= 0) & held[np.maximum(row, 0)]
        evidence = (
            Evidence(
                "sync.per_step_count",
                float(syncs.b[each].sum()) / count,
                "count",
                "waits for the device in a step",
            ),
            Evidence("sync.per_step_ns", synced_ns / count, "ns", "the host waited in a step"),
            Evidence(
                "host.per_step_ns",
                host_ns / count,
                "ns",
                "it was at work in a step: less than the device, or by how much more",
            ),
        )
        return Claims(share, "B", evidence)


def _traced(gaps: SpanTable, lost: Lost, inside: np.ndarray, limits: H2dSync.Limits) -> Claims:
    """What a trace of kernels shows: gaps in which the host came out of a wait for the device."""
    after, waited = in_spans(
        gaps, lost.start_ns, lost.end_ns,
        after=np.where(gaps.b > 0, gaps.end_ns - gaps.start_ns, 0), waited=gaps.b,
    )  # fmt: skip
    share = np.where(inside, np.minimum(after / np.maximum(lost.lost_ns, 1), 1.0), 0.0)
    whole = float(lost.lost_ns[inside].sum())
    if float((share * lost.lost_ns).sum()) < limits.exposed_at_least_ratio * whole:
        return Claims(np.zeros(share.size), "A")
    ratio = float(waited[share > 0].sum()) / max(float(after[share > 0].sum()), 1.0)
    note = "of that time, the host was still in the call that waits for the device"
    return Claims(share, "A", (Evidence("host.synchronising_ratio", ratio, "ratio", note),))


def _at_work(rank: Rank, lost: Lost, inside: np.ndarray) -> float:
    """Which part of the lost time the main thread can have been at work in: it ran or waited for a
    CPU so long, or slept outside marked waits for no longer than the rest. 1 = not known.

    Of all pieces together: those of a sample more or less say little of each.
    """
    ran = main_thread(rank, "on_cpu_ns", lost, inside)
    ran += np.nan_to_num(main_thread(rank, "run_delay_ns", lost, inside))
    known = inside & ~np.isnan(ran)
    if not known.any():
        return 1.0
    ran_ns = float((ran * (lost.end_ns - lost.start_ns))[known].sum())
    lost_ns = max(float(lost.lost_ns[known].sum()), 1.0)
    elsewhere_ns = float(asleep_ns(rank, lost, known).sum())
    if elsewhere_ns < _NAPS_RATIO * lost_ns:
        return 1.0
    return min(1.0, max(ran_ns, lost_ns - elsewhere_ns) / lost_ns)


def _in_step(steps: SpanTable, syncs: SpanTable) -> np.ndarray:
    """bool[n]: in which steps the host waited for the device."""
    row = np.searchsorted(steps.start_ns, syncs.start_ns, side="right") - 1
    row = row[(row >= 0) & (syncs.start_ns < steps.end_ns[np.maximum(row, 0)])]
    return np.bincount(row, minlength=steps.start_ns.size) > 0


def _within(table: SpanTable | None, whole: tuple, weight: np.ndarray | None = None) -> float:
    """How much of some intervals the spans cover; `weight` = part of each span that counts."""
    if table is None:
        return 0.0
    if weight is None:
        parts = overlaps(whole, union((table.start_ns, table.end_ns)))
        return float((parts.end_ns - parts.start_ns).sum())
    parts = overlaps(whole, (table.start_ns, table.end_ns))
    return float(((parts.end_ns - parts.start_ns) * weight[parts.interval]).sum())
