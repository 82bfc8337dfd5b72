"""The GPU runs below its clock.

## What it sees

The excess compute time on a GPU that was slowed down by heat, a power brake or a hardware fault.

## Why the GPU waits

It does not wait: it computes more slowly than it could. A step takes longer by the ratio of the
clocks, and with synchronous training all other GPUs wait for this one.

## How it decides

Only while work was on the device, and only while the device itself gave a reason that is a fault
(NVML's mask: hardware slowdown, thermal slowdown, power brake; the reasons of AMD's firmware and
Intel's drivers are translated into the same terms). The excess is busy time multiplied by the
missing part of the clock, 1 - clock / highest clock. The power cap alone is not a fault: large GPUs
run at it all day.

## What to do

Check cooling and power of the node, and drain it until they are repaired. Compare its clocks with
those of its neighbors.

## Where it is blind

Kernels bound by memory bandwidth suffer less from a lower clock than assumed. An idle GPU at a low
clock is never called throttled. AMD devices report their reasons in table v1.3 (MI200) and from
v1.6 on (MI300 from Linux 6.12 on); for the versions in between nothing is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof import signals
from clusterprof.analysis.detectors.base import Claims, compute_claimed_mean, select_phases
from clusterprof.analysis.timeline.model import PHASE_THROTTLED, DataWaitBreakdown, LostTime, Rank
from clusterprof.analysis.timeline.series import compute_mean
from clusterprof.report.model import Cause, Evidence


class DeviceThrottled:
    """Claims the excess compute time on a slowed device."""

    cause = Cause(
        "device-throttled",
        "device",
        "The GPU runs below its clock",
        "Check cooling and power of the node, and drain it until they are repaired",
        precedence=210,
        can_be_node_fault=True,
        always_traced=True,
        manual_check=(
            "`nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER` on the node, under load: the "
            "reason that is active, and clocks against those of another GPU."
        ),
    )
    needs = (signals.GPU_THROTTLE.name, signals.GPU_SM_CLOCK.name, signals.GPU_SM_CLOCK_MAX.name)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a lowered clock."""

        excess_at_least_ns: int = 0
        """A shorter excess is left unattributed; 0 = none is too short."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim every segment that is excess of slowed computation."""
        inside = select_phases(lost, PHASE_THROTTLED)
        if not inside.any():
            return Claims(np.zeros(inside.size), "A")
        inside &= lost.lost_ns >= limits.excess_at_least_ns
        evidence = []
        clock = rank.chunk.series.get((signals.GPU_SM_CLOCK.name, rank.device))
        if inside.any() and clock is not None:
            values = compute_mean(clock, lost.start_ns, lost.end_ns)
            hertz = compute_claimed_mean(lost, inside.astype(float), values)
            evidence.append(Evidence("gpu.sm_clock_hertz", hertz, "hertz", "was the mean SM clock"))
        return Claims(np.where(inside, 1.0, 0.0), "A", tuple(evidence))
