"""All ranks and workers of a machine on one CPU, as after a wrong cpuset or binding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from clusterprof_lab.real.faults import cgroups
from clusterprof_lab.real.faults.base import Log, Options, Place, now_ns


class Pinned:
    """The ranks decode so much that on one CPU it takes as long as a slowed step.

    Spread over their CPUs it is hidden behind the step, up to half a step lost on two CPUs. For the
    machine itself: a node of this lab has but one CPU anyway.
    """

    name = "pinned"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        if len(os.sched_getaffinity(0)) < 2:
            return "one CPU only: there is nothing to take away"
        return cgroups.check_controller("cpuset")

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Make a group with one CPU for the ranks to enter."""
        decode_ms = place.slowed_ns / 1e6 / place.ranks
        cpus = sorted(os.sched_getaffinity(0))
        with cgroups.make_group("cpuset", place.make_path("pinned").name) as group:
            log = Log(place.make_path("pinned.jsonl"))
            allowed = cpus if place.clean else cpus[-1:]
            group.write(",".join(map(str, allowed)), "cpuset.cpus", "cpuset.cpus")
            if group.controller.version == 1:  # where a group starts with neither
                above = (group.folder.parent / "cpuset.mems").read_text().strip()
                group.write(above, "cpuset.mems")
            start_ns = now_ns()
            yield Options([f"--decode-ms={decode_ms:.2f}"], group.folder, log=log.path)
            if not place.clean:
                log.write(start_ns, now_ns(), "cpu-contention", cpus=allowed)


FAULT = Pinned()
