"""Where the CPU time of each core goes: which cores are full while others idle.

Columns: the five `cpu.*_ns_total` of every core that is online, device "0", "1", … A core that goes
offline or comes online changes the columns.

## Source

`/proc/stat`: the lines `cpu0`, `cpu1`, …

## Privilege

None.

## Cost

One read and a line to parse for every core, once a second: on 256 cores this is the dearest file
there is.

## Where it is blind

Which process used a core is not in it (the tables `threads` and `processes` have the job's). Times
advance by clock ticks; two hyper-threads of one core are two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged
from clusterprof.linux.held import HeldFile
from clusterprof.linux.stat import CpuTimes, never_back, parse_cores
from clusterprof.signals import Signal

_COLUMNS: tuple[Signal, ...] = (
    signals.CPU_USER,
    signals.CPU_SYSTEM,
    signals.CPU_IDLE,
    signals.CPU_IOWAIT,
    signals.CPU_STEAL,
)


class CoresCollector:
    """CPU time of every core."""

    name: ClassVar[str] = "cores"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._path = context.roots.proc / "stat"

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open /proc/stat and find the cores that are online."""
        self._stat = HeldFile(self._path)
        self._last: dict[str, CpuTimes] = parse_cores(self._stat.read())
        return [(signal, core) for core in self._last for signal in _COLUMNS]

    def sample(self) -> Sequence[Value]:
        """Return the times of every core since boot."""
        cores = parse_cores(self._stat.read())
        if cores.keys() != self._last.keys():
            raise DevicesChanged
        self._last = {core: never_back(now, self._last[core]) for core, now in cores.items()}
        return [value for times in self._last.values() for value in times]

    def close(self) -> None:
        """Close /proc/stat."""
        self._stat.close()
