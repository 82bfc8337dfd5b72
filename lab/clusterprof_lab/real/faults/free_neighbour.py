"""A neighbor that is always busy and costs the job nothing: looks like a fault but is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from clusterprof_lab.real.faults import processes
from clusterprof_lab.real.faults.base import Log, Options, Place, now_ns

_WRITE_BYTES, _WRITES_PER_SECOND = 1 << 20, 8
# A SCHED_IDLE task runs when nobody else wants the CPU, and is stopped as soon as one does.
_COMPUTE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True: pass
"""
_WRITE = """
import mmap, os, sys, time
size, number = int(sys.argv[2]), 0
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
block = mmap.mmap(-1, size)
while True:
    os.pwrite(file, block, number % 16 * size)
    number += 1
    time.sleep(1 / float(sys.argv[3]))
"""


class FreeNeighbour:
    """An endless loop on CPU time nobody wants, and writes to a disk the job does not read."""

    name = "free-neighbour"

    def why_not_here(self) -> str:
        """Return "": it needs no privilege."""
        return ""

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Keep the neighbor running."""
        cpus = sorted(os.sched_getaffinity(0))
        others = [cpu for cpu in cpus if place.node is None or cpu != place.node.cpu]
        log, path = Log(place.make_path("free-neighbour.jsonl")), place.make_path("neighbour.bin")
        start_ns = now_ns()
        with ExitStack() as stack:
            stack.callback(path.unlink, missing_ok=True)
            if not place.clean:
                compute = processes.make_python_command(_COMPUTE, str((others or cpus)[-1]))
                words = (str(path), str(_WRITE_BYTES), str(_WRITES_PER_SECOND))
                stack.enter_context(processes.keep_running(compute))
                stack.enter_context(
                    processes.keep_running(processes.make_python_command(_WRITE, *words))
                )
            yield Options(log=log.path)
            if not place.clean:
                log.write(start_ns, now_ns(), "", costs="nothing")


FAULT = FreeNeighbour()
