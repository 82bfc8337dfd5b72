"""Where the node's CPU time goes: all cores together, and how many tasks want one.

Columns: the five `cpu.*_ns_total` of device "all", `cpu.runnable_count` and `cpu.blocked_count` of
the node. Each core by itself is `collectors/cores.py`, at a tenth of the rate: on a node with 256
cores their lines cost more than all other files together.

## Source

`/proc/stat`: the line `cpu` and the `procs_` ones (docs.kernel.org/filesystems/proc, section 1.7).

## Privilege

None.

## Cost

One read of a file that grows with the cores and interrupts of the node; two of its lines are
parsed.

## Where it is blind

The whole node, in a container too: it does not tell the job from its neighbours. Times advance by
clock ticks (10 ms on most kernels). iowait depends on where the waiting task last ran, and says
little where other work fills the cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, ReadsFiles, Value
from clusterprof.linux.held import HeldFile
from clusterprof.linux.stat import CpuTimes, essence, never_back, parse_tasks, parse_total
from clusterprof.signals import Signal

_TIMES: tuple[Signal, ...] = (
    signals.CPU_USER,
    signals.CPU_SYSTEM,
    signals.CPU_IDLE,
    signals.CPU_IOWAIT,
    signals.CPU_STEAL,
)


class CpuCollector(ReadsFiles):
    """CPU time of the node, and the tasks that run or wait for I/O."""

    name: ClassVar[str] = "cpu"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context) -> None:
        self._path = context.roots.proc / "stat"

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open /proc/stat."""
        self._stat = HeldFile(self._path)
        self.held = [self._stat]
        self._last: CpuTimes | None = None
        return [(signal, "all") for signal in _TIMES] + [
            (signals.CPU_RUNNABLE, ""),
            (signals.CPU_BLOCKED, ""),
        ]

    def read(self) -> Sequence[bytes]:
        """Read /proc/stat; of one that is long, only what `parse` wants is kept."""
        data = self._stat.read()
        return [data if self._stat.short else essence(data)]

    def parse(self, contents: Sequence[bytes]) -> Sequence[Value]:
        """Return the node's times since boot and the tasks of that instant."""
        (data,) = contents
        self._last = never_back(parse_total(data), self._last)
        return self._last + parse_tasks(data)

    def close(self) -> None:
        """Close /proc/stat."""
        self._stat.close()
