"""Other processes take the node's CPU before the job, for a part of every few milliseconds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from clusterprof_lab.real.faults import processes
from clusterprof_lab.real.faults.base import Log, Options, Place, check_root, now_ns
from clusterprof_lab.real.faults.cpu_quota import (
    compute_decoding_ms,
    get_decode_cpu_ratio,
    list_cpus,
)

_PERIOD_NS = 20_000_000
# With the priority of a real-time process: shares of groups are kept only while both sides always
# want the CPU, and a loader that rests now and then was found to lose nothing to its neighbor.
_BE_BUSY = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
period, mine = int(sys.argv[2]), int(sys.argv[3])
due = time.monotonic_ns()
while True:
    while time.monotonic_ns() < due + mine:
        pass
    due += period
    time.sleep(max(0, due - time.monotonic_ns()) / 1e9)
"""


class CpuHogs:
    """A loop per CPU that takes its part of every `_PERIOD_NS` before all other processes.

    The ranks get so much that their decoding, `get_decode_cpu_ratio` of a clean step, takes as
    long as a slowed step.
    """

    name = "cpu-hogs"

    def why_not_here(self) -> str:
        """Return why no process can be put before the ranks, "" when one can."""
        return check_root("a process that runs before all others")

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Keep the node's CPU busy for others' part of the time."""
        parts = get_decode_cpu_ratio(place) * (1.0 - place.share)
        with ExitStack() as stack:
            log = Log(place.make_path("cpu-hogs.jsonl"))
            cpus = list_cpus(place)
            others_ns = round((1.0 - parts) * _PERIOD_NS)
            words = (str(_PERIOD_NS), str(others_ns))
            hogs = [
                stack.enter_context(
                    processes.keep_running(
                        processes.make_python_command(_BE_BUSY, str(cpu), *words)
                    )
                )
                for cpu in (cpus if not place.clean else ())
            ]

            def switch(on: bool) -> None:
                for hog in hogs:
                    hog.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

            script = [f"--decode-ms={compute_decoding_ms(place):.2f}"]
            start_ns = now_ns()
            yield Options(script, log=log.path, switch=switch if hogs else None)
            if not place.clean:
                log.write(start_ns, now_ns(), "cpu-contention", cpus=cpus, job_gets=parts)


FAULT = CpuHogs()
