"""Others compute on the node's CPU, and the kernel shares it out between them and the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from clusterprof_lab.real.faults import cgroups, processes
from clusterprof_lab.real.faults.base import Log, Options, Place, now_ns
from clusterprof_lab.real.faults.cpu_quota import CPU_OF_STEP, cpu_group, cpus_of, decoding_ms

_ALL_SHARES = 102_400  # of both groups: whoever else is about hardly counts
_BE_BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass\n"


class CpuHogs:
    """An endless loop per CPU in a group of its own, beside the group of the ranks.

    As long as both want the CPU each gets its part of the shares: the ranks get so much that their
    decoding, `CPU_OF_STEP` of a clean step, takes as long as a slowed step.
    """

    name = "cpu-hogs"

    def why_not_here(self) -> str:
        """Return why the CPU cannot be shared out as wanted, "" when it can."""
        return cgroups.why_not("cpu")

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Make the two groups and keep one of them busy."""
        parts = CPU_OF_STEP * (1.0 - place.share)
        own, parent = place.path("hogged").name, cpu_group(place)
        with ExitStack() as stack:
            job = stack.enter_context(cgroups.group("cpu", own, parent))
            others = stack.enter_context(cgroups.group("cpu", f"{own}-hogs", parent))
            _share_out(job, parts)
            _share_out(others, 1.0 - parts)
            log = Log(place.path("cpu-hogs.jsonl"))
            cpus = cpus_of(place)
            for cpu in cpus if not place.clean else ():
                hog = processes.running(processes.python(_BE_BUSY, str(cpu)))
                others.enter(stack.enter_context(hog).pid)
            start_ns = now_ns()
            yield Options([f"--decode-ms={decoding_ms(place):.2f}"], job.folder, log=log.path)
            if not place.clean:
                log.write(start_ns, now_ns(), "cpu-contention", cpus=cpus, job_gets=parts)


def _share_out(group: cgroups.Group, part: float) -> None:
    shares = max(2, round(part * _ALL_SHARES))
    if group.controller.version == 1:
        group.write(shares, "cpu.shares")
    else:
        group.write(max(1, round(shares * 10_000 / _ALL_SHARES)), "", "cpu.weight")


FAULT = CpuHogs()
