"""A CPU quota (`cpu.cfs_quota_us`, `cpu.max`) that is too small for the node's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clusterprof_lab.real.faults import cgroups
from clusterprof_lab.real.faults.base import Log, Options, Place, now_ns

PERIOD_US = 100_000  # the kernel's own, and what container managers leave
CPU_OF_STEP = 0.7
"""Part of the node's CPUs that the clean job's decoding takes."""
_LEAST_US = 2_000  # the kernel takes no less than 1,000


class CpuQuota:
    """The quota is what the node's ranks need per step, spread over a slowed step.

    They need their decoding, `CPU_OF_STEP` of a clean step together, and `other_ms` of the scenario
    (10) each for everything else. The quota stops all threads of a rank, the main thread as well.
    """

    name = "cpu-quota"

    def why_not_here(self) -> str:
        """Return why no quota can be set, "" when one can."""
        return cgroups.why_not("cpu")

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Make a group with the quota for the ranks to enter."""
        decode_ms = decoding_ms(place)
        need_ms = place.ranks * (decode_ms + place.number("other_ms", 10.0))
        with cgroups.group("cpu", place.path("quota").name, cpu_group(place)) as group:
            log = Log(place.path("cpu-quota.jsonl"))
            if not place.clean:
                quota_us = max(_LEAST_US, round(need_ms * 1e6 / place.slowed_ns * PERIOD_US))
                if group.controller.version == 1:
                    group.write(PERIOD_US, "cpu.cfs_period_us")
                    group.write(quota_us, "cpu.cfs_quota_us")
                else:
                    group.write(f"{quota_us} {PERIOD_US}", "", "cpu.max")
            start_ns = now_ns()
            yield Options([f"--decode-ms={decode_ms:.2f}"], group.folder, log=log.path)
            if not place.clean:
                counts = group.counts("cpu.stat")
                log.write(start_ns, now_ns(), "cpu-throttled", quota_us=quota_us, stat=counts)


def cpus_of(place: Place) -> list[int]:
    """Return the CPUs on which the ranks run."""
    return sorted(os.sched_getaffinity(0)) if place.node is None else [place.node.cpu]


def decoding_ms(place: Place) -> float:
    """Return how much a rank decodes per step when that takes `CPU_OF_STEP` of the ranks' CPUs."""
    return CPU_OF_STEP * place.step_ns / 1e6 * min(1.0, len(cpus_of(place)) / place.ranks)


def cpu_group(place: Place) -> Path | None:
    """Return the node's own group of the controller `cpu`, None when it has none."""
    return getattr(place.node, "cpu_group", None)


FAULT = CpuQuota()
