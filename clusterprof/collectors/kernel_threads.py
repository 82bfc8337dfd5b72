"""What the kernel's own threads take of the CPUs: reclaim, packets, deferred work, interrupts.

Columns: `kernel.cpu_ns_total` of every family of threads that was found (kswapd, kcompactd,
khugepaged, ksoftirqd, kworker, irq, ptlrpcd), counted from when a thread was first seen. At most
1,024 threads are read.

## Source

`/proc/<pid>/stat` of the children of kthreadd (docs.kernel.org/filesystems/proc).

## Privilege

None; in a container of its own PID namespace kernel threads are not to be seen.

## Cost

At most 1,024 files every 2 s.

## Where it is blind

Interrupts themselves, and packets taken in right behind them, run in whatever task they interrupt
and are in `cpu.system_ns_total`. For whom a thread worked is not told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged
from clusterprof.linux.kernel_threads import Clocks
from clusterprof.linux.task import Descriptors
from clusterprof.signals import Signal

_SEARCH_NS = 10_000_000_000
_DESCRIPTORS = 256  # two to a CPU or so; a file that is not held costs ten times as much


class KernelThreadsCollector:
    """CPU time of the kernel's own threads, by family."""

    name: ClassVar[str] = "kernel_threads"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._roots = context.roots
        self._clock = clock

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the threads; raises Unavailable when /proc shows none."""
        self._clocks = Clocks(self._roots, Descriptors(_DESCRIPTORS))
        self._clocks.search()
        self._searched_ns = self._clock()
        self._clocks.read()
        self._columns = sorted(self._clocks.total_ns)
        return [(signals.KERNEL_CPU, family) for family in self._columns]

    def sample(self) -> Sequence[Value]:
        """Return the time of every family since its first thread was seen."""
        now_ns = self._clock()
        if now_ns - self._searched_ns >= _SEARCH_NS:
            self._clocks.search()
            self._searched_ns = now_ns
        self._clocks.read()
        if sorted(self._clocks.total_ns) != self._columns:
            raise DevicesChanged
        return [self._clocks.total_ns[family] for family in self._columns]

    def close(self) -> None:
        """Close all files."""
        self._clocks.close()
