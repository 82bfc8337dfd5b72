"""How long tasks waited for each CPU: which are wanted by many while others idle.

Columns: `cpu.run_delay_ns_total` of every CPU that is online, device "0", "1", … All tasks count,
those of other jobs too: a CPU to which too many were bound shows here, whoever they are. A CPU that
goes offline or comes online changes the columns.

## Source

`/proc/schedstat`, field 8 of every CPU (docs.kernel.org/scheduler/sched-stats).

## Privilege

None; the kernel must have been built with CONFIG_SCHEDSTATS.

## Cost

One file every 2 s: 1.6 ms where it lists 256 CPUs.

## Where it is blind

Who waited is not told: `threads` has the job's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.linux.held import LONG_RECORDS, HeldFile
from clusterprof.linux.schedstat import CpuWaits, parse_schedstat
from clusterprof.signals import Signal

_UNKNOWN_FORM = Unavailable("failed", "/proc/schedstat: no CPU in a form that is known", "")


class RunqueueCollector:
    """Time that tasks were ready to run and waited, by CPU."""

    name: ClassVar[str] = "runqueue"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(self, context: Context) -> None:
        self._path = context.roots.proc / "schedstat"

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open /proc/schedstat and find the CPUs."""
        self._file = HeldFile(self._path, longest_record=LONG_RECORDS)
        self._cpus = list(self._read())
        return [(signals.CPU_RUN_DELAY, cpu) for cpu in self._cpus]

    def sample(self) -> Sequence[Value]:
        """Return the waits at every CPU since boot."""
        found = self._read()
        if list(found) != self._cpus:
            raise DevicesChanged
        return [times.waiting_ns for times in found.values()]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> dict[str, CpuWaits]:
        try:
            found = parse_schedstat(self._file.read())
        except ValueError:
            found = {}
        if not found:
            raise _UNKNOWN_FORM.with_traceback(None)
        return found
