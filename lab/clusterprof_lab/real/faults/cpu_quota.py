"""A CPU quota (`cpu.cfs_quota_us`, `cpu.max`) that is too small for the node's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clusterprof_lab.real.faults import cgroups
from clusterprof_lab.real.faults.base import Log, Options, Place, now_ns

PERIOD_US = 100_000  # the kernel's own; a scenario may have another (`period_ms`)
CPU_OF_STEP = 0.7
"""Part of the node's CPUs that the clean job's decoding takes."""
_LEAST_US = 2_000  # the kernel takes no less than 1,000


class CpuQuota:
    """The quota is what the node's ranks need per step, spread over a slowed step.

    They need their decoding, `cpu_of_step` of the scenario (0.7) of a clean step together,
    and `other_ms` (10) each for everything else. Of the time in which a batch is awaited they run
    for the part of the quota in a period: the less they need, the more of it is the quota's. It
    stops all threads of a rank, the main thread as well.
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
        period_us = round(1000 * place.number("period_ms", PERIOD_US / 1000))
        with cgroups.group("cpu", place.path("quota").name, cpu_group(place)) as group:
            log = Log(place.path("cpu-quota.jsonl"))
            quota_us = max(_LEAST_US, round(need_ms * 1e6 / place.slowed_ns * period_us))

            def switch(on: bool) -> None:
                if group.controller.version == 1:
                    group.write(period_us, "cpu.cfs_period_us")
                    group.write(quota_us if on else -1, "cpu.cfs_quota_us")
                else:
                    group.write(f"{quota_us if on else 'max'} {period_us}", "", "cpu.max")

            script = [f"--decode-ms={decode_ms:.2f}"]
            start_ns = now_ns()
            if place.clean:
                yield Options(script, group.folder, log=log.path)
            else:
                switch(True)
                yield Options(script, group.folder, log=log.path, switch=switch)
            if not place.clean:
                counts = group.counts("cpu.stat")
                log.write(start_ns, now_ns(), "cpu-throttled", quota_us=quota_us, stat=counts)


def cpus_of(place: Place) -> list[int]:
    """Return the CPUs on which the ranks run."""
    return sorted(os.sched_getaffinity(0)) if place.node is None else [place.node.cpu]


def cpu_of_step(place: Place) -> float:
    """Return which part of the node's CPUs the clean job's decoding takes."""
    return place.number("cpu_of_step", CPU_OF_STEP)


def decoding_ms(place: Place) -> float:
    """Return how much a rank decodes per step when that takes `cpu_of_step` of the ranks' CPUs."""
    return cpu_of_step(place) * place.step_ns / 1e6 * min(1.0, len(cpus_of(place)) / place.ranks)


def cpu_group(place: Place) -> Path | None:
    """Return the node's own group of the controller `cpu`, None when it has none."""
    return getattr(place.node, "cpu_group", None)


FAULT = CpuQuota()
