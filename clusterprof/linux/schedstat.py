"""/proc/schedstat: for how long tasks ran on every CPU, and waited for it.

https://docs.kernel.org/scheduler/sched-stats.html

    version 15
    timestamp 15819019232
    cpu0 498494191 0 3533438552 … 2045936778163039 343796328169361 4767485306
    domain0 00000000,00000003 212499247 …

The last three numbers of a CPU's line are, in every version since 10, the time in nanoseconds that
tasks ran on it, the time that they were ready to run and waited for it, and how often one was
given it. They are counted whatever the switch kernel.sched_schedstats says.
"""

from __future__ import annotations

from typing import NamedTuple


class CpuWaits(NamedTuple):
    """What all tasks of one CPU did since boot, in nanoseconds."""

    running_ns: int
    waiting_ns: int
    """Summed over tasks: eight that wait for a second make eight."""


def parse_schedstat(data: bytes) -> dict[str, CpuWaits]:
    """Return the times of every CPU in the file, by its number as text."""
    found = {}
    at = data.find(b"\ncpu")
    while at >= 0:
        stop = data.find(b"\n", at + 1)
        words = data[at + 4 : stop if stop >= 0 else len(data)].split()
        if len(words) >= 10:
            found[words[0].decode()] = CpuWaits(int(words[-3]), int(words[-2]))
        at = data.find(b"\ncpu", at + 1)
    return found
