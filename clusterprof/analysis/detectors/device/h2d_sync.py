"""The host waits for the GPU within the step, and the GPU then waits for the host.

## What it sees

Lost time inside steps, outside any other wait, in steps in which the training process waited for
the device: `.item()`, `.cpu()`, `if tensor:`, `torch.cuda.synchronize()`.

## Why the GPU waits

As long as the host runs ahead, the device always has the next kernel queued. A host that asks for a
result waits until the device has done everything, and every launch after that goes to an idle
device, until the host is ahead again.

## How it decides

Would the device have been idle without those waits too? The host was working for
`step - waits for the device - other waits`; a device that was busy for longer than that could have
been kept busy. The time by which the host's work exceeds the device's is left to `launch-bound`;
the rest of the lost time in steps with such waits is this, as far as the main thread had work to do
in it: time slept elsewhere (writing a log, on a lock) is not launching, nor is computing in
functions outside of PyTorch, as sampled stacks show it (`cpu-preprocess` in a job without a data
loader, else `eval-host`), nor waiting for a CPU in them (`cpu-contention`).

An imported trace of kernels shows each gap separately: gaps count that begin while the host waits
for the device, as far as the host was still in that wait or launching; what else it did in the gap
has other causes. A wait of less than a fiftieth of that time is not its reason.

## What to do

Collect metrics on the GPU and fetch them every few hundred steps; copy results with
`non_blocking=True` into pinned memory and read them a step later; replace
`if loss.isnan():` by `torch.where` or an occasional check.

## Where it is blind

Operations that synchronize implicitly (`nonzero`, boolean indexing, a pageable copy) have no span.
Only tensors of `torch` and the `synchronize()` of its device modules are seen, not the user's own
events; mark other waits with `clusterprof.span("sync")`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.base import (
    Claims,
    find_drained_segments,
    measure_main_thread,
    measure_sleep,
    select_phases,
)
from clusterprof.analysis.detectors.pauses import measure_own_code
from clusterprof.analysis.timeline.data_wait.samples import allocate_span_amounts
from clusterprof.analysis.timeline.intervals import find_overlaps, merge_intervals
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, DataWaitBreakdown, LostTime, Rank
from clusterprof.analysis.timeline.spans import SpanTimes, StarvedSpans, StepSpans, SyncSpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence

_OTHER_WAITS = (
    layout.DATA_WAIT,
    layout.H2D,
    layout.CHECKPOINT,
    layout.EVAL,
    layout.COMPILE,
    layout.GC,
)

_MIN_WAITED_RATIO = 0.02  # of the time in a gap that is charged to the wait
_MAX_SHORT_SLEEP_RATIO = 0.1  # of the lost time: sleep that waking up explains


class H2dSync:
    """Claims idle time of steps that was caused by waiting for the device."""

    cause = Cause(
        "h2d-sync",
        "h2d",
        "The host waits for the GPU within the step, and the GPU then waits for the host",
        "Keep metrics on the GPU: no .item(), .cpu() or synchronize() in every step",
        precedence=320,
        tone=1,
        trace_spans=(layout.SYNC, layout.STARVED),
        manual_check=(
            "`nsys profile`: `cudaStreamSynchronize` in the step, and kernels only after it; "
            "`torch.cuda.set_sync_debug_mode(1)` warns at each such call."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for waits for the device."""

        exposed_at_least_ratio: float = 0.1
        """A smaller share of the lost time of those steps is left to other causes."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim lost time inside steps with synchronizations, minus the cost of launching."""
        share = np.zeros(lost.start_ns.size)
        syncs, steps = rank.main.get_spans(SyncSpans), rank.main.get_spans(StepSpans)
        if syncs is None or steps is None or not share.size:
            return Claims(share, "B")
        low, high = int(lost.start_ns[0]), int(lost.end_ns[-1])
        has_sync = _find_steps_with_sync(steps, syncs)
        has_sync = has_sync & (steps.end_ns > low) & (steps.start_ns < high)
        in_sync_steps = np.isin(lost.step, steps.step[has_sync]) & (lost.step >= 0)
        inside = in_sync_steps & select_phases(lost, PHASE_COMPUTE)
        if not inside.any():
            return Claims(share, "B")
        gaps = rank.main.get_spans(StarvedSpans)
        if gaps is not None:
            return _measure_traced_gaps(gaps, lost, inside, limits)
        step_windows = (
            np.maximum(steps.start_ns[has_sync], low),
            np.minimum(steps.end_ns[has_sync], high),
        )
        steps_ns = int((step_windows[1] - step_windows[0]).sum())
        lengths = np.maximum(syncs.end_ns - syncs.start_ns, 1)
        synced_ns = _measure_coverage(
            syncs, step_windows, np.minimum(syncs.waited_ns, lengths) / lengths
        )
        others_ns = sum(
            _measure_coverage(rank.main.spans.get(kind), step_windows) for kind in _OTHER_WAITS
        )
        host_ns = max(steps_ns - synced_ns - others_ns, 0.0)
        device_ns = steps_ns - int(lost.lost_ns[in_sync_steps].sum())
        idle_ns = float(lost.lost_ns[inside].sum())
        exposed = 1 - min(max(host_ns - device_ns, 0.0), idle_ns) / idle_ns
        if exposed < limits.exposed_at_least_ratio:
            return Claims(share, "B")
        share[inside] = min(exposed, _estimate_active_ratio(rank, lost, inside))
        for column in ("on_cpu_ns", "run_delay_ns"):  # waiting for a CPU there is no launching
            share = np.maximum(share - measure_own_code(rank, lost, column), 0.0)
        count = max(int(has_sync.sum()), 1)
        row = np.searchsorted(steps.start_ns, syncs.start_ns, side="right") - 1
        in_selected_step = (row >= 0) & has_sync[np.maximum(row, 0)]
        evidence = (
            Evidence(
                "sync.waits_per_step_count",
                float(syncs.times[in_selected_step].sum()) / count,
                "count",
                "waits for the device in a step",
            ),
            Evidence(
                "sync.waited_per_step_ns", synced_ns / count, "ns", "the host waited in a step"
            ),
            Evidence(
                "host.per_step_ns",
                host_ns / count,
                "ns",
                "the host worked in a step; a device with queued work would hide that",
            ),
        )
        return Claims(share, "B", evidence)


def _measure_traced_gaps(
    gaps: StarvedSpans, lost: LostTime, inside: np.ndarray, limits: H2dSync.Limits
) -> Claims:
    """Claim the gaps in a trace of kernels that began while the host waited for the device."""
    caused = gaps.synced_ns + gaps.launching_ns
    caused = np.where(gaps.synced_ns >= _MIN_WAITED_RATIO * caused, caused, 0)
    after, waited = allocate_span_amounts(
        gaps,
        lost.start_ns,
        lost.end_ns,
        after=np.where(gaps.synced_ns > 0, caused, 0),
        waited=np.where(caused > 0, gaps.synced_ns, 0),
    )
    share = np.where(inside, np.minimum(after / np.maximum(lost.lost_ns, 1), 1.0), 0.0)
    inside_ns = float(lost.lost_ns[inside].sum())
    if float((share * lost.lost_ns).sum()) < limits.exposed_at_least_ratio * inside_ns:
        return Claims(np.zeros(share.size), "A")
    ratio = float(waited[share > 0].sum()) / max(float(after[share > 0].sum()), 1.0)
    note = "of that time, the host was still in the call that waits for the device"
    return Claims(share, "A", (Evidence("host.synchronising_ratio", ratio, "ratio", note),))


def _estimate_active_ratio(rank: Rank, lost: LostTime, inside: np.ndarray) -> float:
    """Estimate the share of the lost time in which the main thread can have been active.

    It ran or was runnable for that time, or slept outside marked waits no longer than the rest. 1 =
    unknown. Measured over all segments together: one sample says little about one segment.
    """
    active_share = measure_main_thread(rank, "on_cpu_ns", lost, inside)
    active_share += np.nan_to_num(measure_main_thread(rank, "run_delay_ns", lost, inside))
    measured = inside & ~np.isnan(active_share)
    if not measured.any():
        return 1.0
    ran_ns = float((active_share * (lost.end_ns - lost.start_ns))[measured].sum())
    lost_ns = max(float(lost.lost_ns[measured].sum()), 1.0)
    asleep_ns = measure_sleep(rank, lost, measured)
    elsewhere_ns = float(asleep_ns.sum())
    if elsewhere_ns < _MAX_SHORT_SLEEP_RATIO * lost_ns:
        return 1.0
    # The queue was empty after such a wait, so the device was idle while the thread slept there.
    drained = measured & find_drained_segments(rank, lost)
    idle_asleep_ns = float(np.minimum(asleep_ns, lost.lost_ns)[drained].sum())
    active_ns = min(max(ran_ns, lost_ns - elsewhere_ns), lost_ns - idle_asleep_ns)
    return min(1.0, active_ns / lost_ns)


def _find_steps_with_sync(steps: StepSpans, syncs: SyncSpans) -> np.ndarray:
    """Find the steps in which the host waited for the device: bool[steps]."""
    row = np.searchsorted(steps.start_ns, syncs.start_ns, side="right") - 1
    row = row[(row >= 0) & (syncs.start_ns < steps.end_ns[np.maximum(row, 0)])]
    return np.bincount(row, minlength=steps.start_ns.size) > 0


def _measure_coverage(
    table: SpanTimes | None, windows: tuple, weight: np.ndarray | None = None
) -> float:
    """Measure how much of the windows the spans cover, in ns.

    weight: share of each span that counts.
    """
    if table is None:
        return 0.0
    if weight is None:
        overlap_rows = find_overlaps(windows, merge_intervals((table.start_ns, table.end_ns)))
        return float((overlap_rows.end_ns - overlap_rows.start_ns).sum())
    overlap_rows = find_overlaps(windows, (table.start_ns, table.end_ns))
    return float(
        ((overlap_rows.end_ns - overlap_rows.start_ns) * weight[overlap_rows.interval]).sum()
    )
