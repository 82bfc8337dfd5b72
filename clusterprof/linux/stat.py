"""/proc/stat: CPU time of the node and of every core, in clock ticks.

https://docs.kernel.org/filesystems/proc.html (section 1.7)

          user nice system idle iowait irq softirq steal guest guest_nice
    cpu  7812 0 4128 213569 1792 0 115 2771 0 0
    cpu0 1260 0 1554 110721 190 0 10 1416 0 0
    intr 157918 0 0 …
    procs_running 3
    procs_blocked 0

`user` holds `guest` and `nice` holds `guest_nice`, so neither is added again. Cores that are
offline have no line. idle and iowait may step back by a few ticks, because a sleeping core's
share is estimated; the page above says so of iowait.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from clusterprof.linux.fields import integers

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_JITTER_AT_MOST_NS = 3_000_000_000
_TOTAL_AT = len("cpu  ")


class CpuTimes(NamedTuple):
    """CPU time of one core or of the node, in nanoseconds since boot."""

    user_ns: int
    """user + nice."""
    system_ns: int
    """system + irq + softirq."""
    idle_ns: int
    iowait_ns: int
    steal_ns: int


class Tasks(NamedTuple):
    """Tasks of the node at this instant."""

    running: int
    """Running or ready to run."""
    blocked: int
    """Waiting for I/O."""


def essence(data: bytes) -> bytes:
    """Return the parts that `parse_total` and `parse_tasks` need."""
    return data[: data.index(b"\n") + 1] + data[data.rindex(b"procs_running") :]


def parse_total(data: bytes) -> CpuTimes:
    """Return the times of all cores together: the first line."""
    try:
        return _times(integers(data[_TOTAL_AT : data.index(b"\n") + 1]))
    except ValueError:  # a sandbox that imitates /proc may part them in another way
        return _times([int(word) for word in data[: data.index(b"\n")].split()[1:]])


def parse_tasks(data: bytes) -> Tasks:
    """Return the tasks that run and the tasks that wait for I/O."""
    # Searched from the end: the line before them names every interrupt and can be 100 KB long.
    words = data[data.rindex(b"procs_running") :].split(None, 4)
    if words[2] != b"procs_blocked":
        raise ValueError(f"no line 'procs_blocked': {words[2]!r}")
    return Tasks(int(words[1]), int(words[3]))


def parse_cores(data: bytes) -> dict[str, CpuTimes]:
    """Return the times of each core that is online, by its number as text."""
    lines = data[: data.index(b"\nintr")].split(b"\n")[1:]
    fields = [line.split(None, 9) for line in lines]
    return {row[0][3:].decode(): _times([int(word) for word in row[1:9]]) for row in fields}


def never_back(now: CpuTimes, before: CpuTimes | None) -> CpuTimes:
    """Return `now` without the kernel's small backward steps of idle and iowait.

    A counter that steps back reads as a reset and voids the interval. A step of more than 3 s is
    one (the core was offline in between) and is passed on as it is.
    """
    if before is None or (now.idle_ns >= before.idle_ns and now.iowait_ns >= before.iowait_ns):
        return now
    return now._replace(
        idle_ns=_held(now.idle_ns, before.idle_ns),
        iowait_ns=_held(now.iowait_ns, before.iowait_ns),
    )


def _held(now_ns: int, before_ns: int) -> int:
    return before_ns if now_ns < before_ns <= now_ns + _JITTER_AT_MOST_NS else now_ns


def _times(row: list[int]) -> CpuTimes:
    # Kernels before 2.6.11 lack steal; nothing that runs PyTorch is that old, but a sandbox that
    # imitates /proc may write fewer fields.
    user, nice, system, idle, iowait, irq, softirq = row[:7]
    return CpuTimes(
        (user + nice) * TICK_NS,
        (system + irq + softirq) * TICK_NS,
        idle * TICK_NS,
        iowait * TICK_NS,
        row[7] * TICK_NS if len(row) > 7 else 0,
    )
