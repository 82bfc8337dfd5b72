"""The GPU copies data to or from the host while no kernel runs.

## What it sees

Time inside steps in which a copy between host and GPU was under way and no kernel ran.

## Why the GPU waits

A copy of many bytes takes as long as the bus needs, 40 ms for a gigabyte at 25 GB/s, and five times
that from memory that is not pinned. Kernels that use the data wait for it, unless the next batch is
copied while the present one is computed.

## How it decides

An imported trace of a profiler has each copy on the device's timeline: its share is the whole of
the time in which only copies ran, outside waits for data. A recording of clusterprof has the bytes
that the GPU received and sent over its bus (`gpu.pcie_receive_bytes_per_second`): its share is the
time that these bytes need at the highest rate of the run, at least 6 GB/s, in idle time of a step
outside every other wait, if the mean rate there is at least 1 GB/s. Idle time in which the host
slept in `poll`, as in a driver, counts as well then: it waited for the copy. Time inside a copy
that the probe recorded is `h2d-copy`: there the host was blocked, however busy the bus was.

## What to do

Overlap: copy the next batch on a stream of its own while the present one is computed. Pin the
memory. Copy less: smaller types (`uint8` images, `bfloat16`), transforms on the GPU, data that stay
there. Check that the GPU has all lanes of its link.

## Where it is blind

A copy inside a wait for data, or hidden behind kernels, costs nothing and is not claimed. Counters
of the bus also count what a network card reads from the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    compute_sleep_ratios,
    find_certain_idle_time,
    is_poll,
    limit_to_lost_time,
    measure_sleep,
    select_phases,
)
from clusterprof.analysis.timeline.data_wait.samples import find_sleep_samples
from clusterprof.analysis.timeline.intervals import measure_overlap, merge_intervals
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_COPY,
    DataWaitBreakdown,
    Float,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.series import compute_mean
from clusterprof.analysis.timeline.spans import ExposedCopySpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence

_SOURCES = (
    (signals.GPU_PCIE_RECEIVE, "were received over the bus in that time"),
    (signals.GPU_PCIE_TRANSMIT, "were sent over the bus in that time"),
)


class H2dCopyBound:
    """Claims time in which a device copied and did nothing else."""

    cause = Cause(
        "h2d-copy-bound",
        "h2d",
        "The GPU copies data to or from the host while no kernel runs",
        "Copy the next batch on another stream during the step, from pinned memory, or copy less",
        precedence=305,
        tone=2,
        hidden_cost="interval",
        trace_spans=(layout.EXPOSED_COPY, layout.STARVED),
        manual_check=(
            "`nsys profile`: `[CUDA memcpy HtoD]` with no kernel beside it; `nvidia-smi dmon -s "
            "t`: `rxpci` near the rate of the link in steps; `nvidia-smi -q`: width and generation "
            "of the link."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for copies."""

        moved_at_least_bytes_per_second: float = 1e9
        """Mean rate of the bus in idle time from which copies count; less is control traffic."""
        copying_at_least_bytes_per_second: float = 6e9
        """A copy is assumed to run at least at this rate: pageable memory over PCIe 3.0."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim the time of copies that nothing hid, as a trace or the bus counters show it."""
        copying = select_phases(lost, PHASE_COPY)
        copies = rank.main.get_spans(ExposedCopySpans)
        if copies is not None:
            return Claims(copying.astype(float), "A", _describe_copies(lost, copying, copies))
        share = np.zeros(lost.start_ns.size)
        inside = select_phases(lost, PHASE_COMPUTE)
        rates = _measure_bus_rates(rank, lost)
        if not inside.any() or not rates:
            return Claims(share, "B")
        rate = sum(np.nan_to_num(values) for values, _, _ in rates.values())
        idle_ns = np.where(inside, lost.lost_ns, 0)
        mean = float((rate * idle_ns).sum()) / max(float(idle_ns.sum()), 1.0)
        if mean < limits.moved_at_least_bytes_per_second:
            return Claims(share, "B")
        highest = max(
            limits.copying_at_least_bytes_per_second, *(top for _, top, _ in rates.values())
        )
        length = np.maximum(lost.end_ns - lost.start_ns, 1)
        copied_ns = np.where(inside, rate / highest * length, 0.0)
        copied_ns = np.maximum(copied_ns, _measure_driver_waits(rank, lost, inside))
        copied_ns = limit_to_lost_time(copied_ns, lost, inside)
        share = np.where(inside, np.minimum(copied_ns / np.maximum(lost.lost_ns, 1), 1.0), 0.0)
        evidence = (
            Evidence(name, compute_claimed_mean(lost, share, values), "bytes/s", note)
            for name, (values, _, note) in rates.items()
        )
        return Claims(share, "B", tuple(evidence))


def _describe_copies(
    lost: LostTime, copying: np.ndarray, copies: ExposedCopySpans
) -> tuple[Evidence, ...]:
    """Describe the bytes and the direction of copies in a trace."""
    segments = merge_intervals((lost.start_ns[copying], lost.end_ns[copying]))
    times = copies.start_ns, copies.end_ns
    part = measure_overlap(times, segments) / np.maximum(times[1] - times[0], 1)
    copied_ns = float((part * (times[1] - times[0])).sum())
    if copied_ns <= 0:
        return ()
    incoming = float((part * copies.to_device_ns).sum()) / copied_ns
    moved = float((part * copies.bytes).sum())
    note = "of that time the copies went to the device"
    evidence = [Evidence("copy.to_device_ratio", min(incoming, 1.0), "ratio", note)]
    if moved > 0:
        rate, note = moved / copied_ns * 1e9, "were copied in that time"
        evidence.insert(0, Evidence("copy.bytes_per_second", rate, "bytes/s", note))
    return tuple(evidence)


def _measure_driver_waits(rank: Rank, lost: LostTime, inside: NDArray[np.bool_]) -> Float:
    """Measure how long the host slept in a wait that may be for a copy, while its device idled.

    Returns float64[n], ns, without marked waits. inside: bool[n].
    """
    thread = rank.main.threads.get(rank.pid)
    if thread is None:
        return np.zeros(lost.start_ns.size)
    polls = find_sleep_samples(thread, rank.chunk.wchan_names, is_poll)
    ratios = compute_sleep_ratios(rank, lost, inside, polls)
    polled_ns = measure_sleep(rank, lost, inside) * ratios
    busy_ns = (lost.end_ns - lost.start_ns - lost.lost_ns).astype(np.float64)
    return find_certain_idle_time(polled_ns, busy_ns)


def _measure_bus_rates(rank: Rank, lost: LostTime) -> dict[str, tuple[Float, float, str]]:
    """Measure the rate of the bus in each segment, and the highest of this chunk, by signal."""
    rates = {}
    for signal, note in _SOURCES:
        series = rank.chunk.series.get((signal.name, rank.device))
        if series is not None and not np.isnan(series.values).all():
            values = compute_mean(series, lost.start_ns, lost.end_ns)
            rates[signal.name] = values, float(np.nanmax(series.values)), note
    return rates
