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

    They need their decoding, `get_decode_cpu_ratio` of the scenario (0.7) of a clean step together,
    and `other_ms` (10) each for everything else. Of the time in which a batch is awaited they run
    for the part of the quota in a period: the less they need, the more of it is the quota's. It
    stops all threads of a rank, the main thread as well.
    """

    name = "cpu-quota"

    def why_not_here(self) -> str:
        """Return why no quota can be set, "" when one can."""
        return cgroups.check_controller("cpu")

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Make a group with the quota for the ranks to enter."""
        decode_ms = compute_decoding_ms(place)
        need_ms = place.ranks * (decode_ms + place.get_number("other_ms", 10.0))
        period_us = round(1000 * place.get_number("period_ms", PERIOD_US / 1000))
        with cgroups.make_group(
            "cpu", place.make_path("quota").name, make_cpu_group(place)
        ) as group:
            log = Log(place.make_path("cpu-quota.jsonl"))
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
                counts = group.read_counts("cpu.stat")
                log.write(start_ns, now_ns(), "cpu-throttled", quota_us=quota_us, stat=counts)


def list_cpus(place: Place) -> list[int]:
    """Return the CPUs on which the ranks run."""
    return sorted(os.sched_getaffinity(0)) if place.node is None else [place.node.cpu]


def get_decode_cpu_ratio(place: Place) -> float:
    """Return which part of the node's CPUs the clean job's decoding takes."""
    return place.get_number("cpu_of_step", CPU_OF_STEP)


def compute_decoding_ms(place: Place) -> float:
    """Return the decode time of a step that uses `get_decode_cpu_ratio` of its CPUs, ms."""
    return (
        get_decode_cpu_ratio(place)
        * place.step_ns
        / 1e6
        * min(1.0, len(list_cpus(place)) / place.ranks)
    )


def make_cpu_group(place: Place) -> Path | None:
    """Return the node's own group of the controller `cpu`, None when it has none."""
    return getattr(place.node, "cpu_group", None)


FAULT = CpuQuota()
