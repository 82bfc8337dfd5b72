"""How much memory there is to be had, and what the kernel does to find more.

Columns: from /proc/meminfo and /proc/vmstat of the node, and `memory.numa_misses_total` of every
NUMA node ("node0", …). A line the kernel does not write is a reason in its column.

## Source

`/proc/meminfo`, `/proc/vmstat`, `/sys/devices/system/node/node*/numastat`
(docs.kernel.org/filesystems/proc, admin-guide/numastat).

## Privilege

None.

## Cost

Two files of some 60 and 170 lines and one for each NUMA node, once a second.

## Where it is blind

The whole node: who evicts whose pages is not told. Memory of the job's own cgroup is the collector
`cgroup`'s.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import Unavailable
from clusterprof.linux.held import HeldFile, hold
from clusterprof.linux.meminfo import MeminfoParser
from clusterprof.linux.numastat import NumastatParser, numa_nodes
from clusterprof.linux.vmstat import LONGEST_RECORD, VmstatParser
from clusterprof.signals import Signal

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMINFO: tuple[Signal, ...] = (
    signals.MEMORY_AVAILABLE,
    signals.MEMORY_CACHED,
    signals.MEMORY_SWAP_FREE,
    signals.MEMORY_DIRTY,
    signals.MEMORY_WRITEBACK,
)
_VMSTAT: tuple[Signal, ...] = (
    signals.MEMORY_MAJOR_FAULTS,
    signals.MEMORY_SWAP_IN,
    signals.MEMORY_SWAP_OUT,
    signals.MEMORY_RECLAIM_DIRECT,
    signals.MEMORY_REFAULTS,
    signals.MEMORY_OOM_KILLS,
)
_VMSTAT_UNITS = (1, _PAGE_BYTES, _PAGE_BYTES, 1, 1, 1)
_NO_LINE = Unavailable("absent", "this kernel does not count it", "")


class MemoryCollector:
    """Memory of the node, reclaim, swap, and allocations on the wrong NUMA node."""

    name: ClassVar[str] = "memory"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._roots = context.roots

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open meminfo, vmstat and the numastat of every NUMA node."""
        self._meminfo = HeldFile(self._roots.proc / "meminfo")
        self._vmstat = hold(self._roots.proc / "vmstat", longest_record=LONGEST_RECORD)
        self._parse_meminfo, self._parse_vmstat = MeminfoParser(), VmstatParser()
        nodes = numa_nodes(self._roots)
        self._numa = [(hold(node / "numastat"), NumastatParser()) for node in nodes]
        columns = [(signal, "") for signal in _MEMINFO + _VMSTAT]
        return columns + [(signals.MEMORY_NUMA_MISSES, node.name) for node in nodes]

    def sample(self) -> Sequence[Value]:
        """Return bytes now, and events since boot."""
        values: list[Value] = [
            _NO_LINE if value is None else value
            for value in self._parse_meminfo(self._meminfo.read())
        ]
        values += self._sample_vmstat()
        for held, parse in self._numa:
            try:
                misses = parse(held.read())
                values.append(_NO_LINE if misses is None else misses)
            except Unavailable as reason:
                values.append(reason)
        return values

    def close(self) -> None:
        """Close all files."""
        self._meminfo.close()
        self._vmstat.close()
        for held, _ in self._numa:
            held.close()

    def _sample_vmstat(self) -> list[Value]:
        try:
            events = self._parse_vmstat(self._vmstat.read())
        except Unavailable as reason:
            return [reason] * len(_VMSTAT)
        return [
            _NO_LINE if event is None else event * unit
            for event, unit in zip(events, _VMSTAT_UNITS, strict=True)
        ]
