"""How the kernel finds memory: behind the tasks' backs, or by making them wait; and on which node.

Columns: counters of /proc/vmstat about reclaim, huge pages and compaction, and of every NUMA node
("node0", …) the pages it gave, to tasks on it and on others.
A line the kernel does not write is a reason in its column.

## Source

`/proc/vmstat` and `/sys/devices/system/node/node*/numastat` (docs.kernel.org/admin-guide/numastat,
mm/vmstat.c).

## Privilege

None.

## Cost

Two small files and one for each NUMA node, every 2 s.

## Where it is blind

Counters are the node's, of all jobs on it. Whose pages lie where is not asked process by process:
/proc/<pid>/numa_maps walks all of a process's memory and holds its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import Unavailable
from clusterprof.linux.held import HeldFile, MissingFile, hold
from clusterprof.linux.numastat import NumaPlacesParser, numa_nodes
from clusterprof.linux.vmstat import LONGEST_RECORD, ReclaimParser
from clusterprof.signals import Signal

_VMSTAT: tuple[Signal, ...] = (
    signals.MEMORY_FAULTS,
    signals.MEMORY_KSWAPD_SCAN,
    signals.MEMORY_KSWAPD_STEAL,
    signals.MEMORY_DIRECT_STEAL,
    signals.MEMORY_STALLS,
    signals.MEMORY_HUGE_FAULTS,
    signals.MEMORY_HUGE_FALLBACKS,
    signals.MEMORY_COMPACTION_STALLS,
)
_NODE: tuple[Signal, ...] = (
    signals.MEMORY_NUMA_HITS,
    signals.MEMORY_NUMA_LOCAL,
    signals.MEMORY_NUMA_REMOTE,
)
_NO_NUMBER = Unavailable("failed", "the kernel's file holds words where numbers should be", "")
_NO_LINE = Unavailable("absent", "this kernel does not count it", "")


class ReclaimCollector:
    """Reclaim, huge pages, compaction, and the NUMA nodes that memory came from."""

    name: ClassVar[str] = "reclaim"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(self, context: Context) -> None:
        self._roots = context.roots

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open vmstat and the numastat of every NUMA node."""
        self._vmstat = HeldFile(self._roots.proc / "vmstat", longest_record=LONGEST_RECORD)
        self._parse = ReclaimParser()
        nodes = numa_nodes(self._roots)
        self._nodes = [(hold(node / "numastat"), NumaPlacesParser()) for node in nodes]
        columns = [(signal, "") for signal in _VMSTAT]
        return columns + [(signal, node.name) for node in nodes for signal in _NODE]

    def sample(self) -> Sequence[Value]:
        """Return the events and pages since boot."""
        values = _counts(self._vmstat, self._parse, len(_VMSTAT))
        for held, parse in self._nodes:
            values += _counts(held, parse, len(_NODE))
        return values

    def close(self) -> None:
        """Close all files."""
        self._vmstat.close()
        for held, _ in self._nodes:
            held.close()


def _counts(
    held: HeldFile | MissingFile, parse: Callable[[bytes], Sequence[int | None]], width: int
) -> list[Value]:
    """Return what a file counts, or in the place of each count why it is not known."""
    try:
        return [_NO_LINE if count is None else count for count in parse(held.read())]
    except Unavailable as reason:
        return [reason] * width
    except ValueError:
        return [_NO_NUMBER] * width
