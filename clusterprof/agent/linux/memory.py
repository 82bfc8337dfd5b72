"""/proc/meminfo: memory use of the node, in KiB.

https://docs.kernel.org/filesystems/proc.html (section 1.5)

    MemTotal:       24684092 kB
    MemFree:        20304712 kB
    MemAvailable:   22804712 kB
    Cached:          1203476 kB

/proc/vmstat: activity of memory management since boot, in pages and events.

https://docs.kernel.org/filesystems/proc.html; the names are in mm/vmstat.c

    nr_free_pages 5076178
    pgmajfault 507162
    pgscan_direct 0

/sys/devices/system/node/node*/numastat: page allocations by wanted and actual node.

https://docs.kernel.org/admin-guide/numastat.html

    numa_hit 1712754
    numa_miss 0
    numa_foreign 0
    interleave_hit 17
    local_node 1708311
    other_node 4443

`numa_miss` is counted on the node that provided the page: a task wanted another node and got this
one. `other_node` counts pages of this node allocated by a task that ran on another node, whether it
wanted this node or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from clusterprof.agent.linux.files import NumberFinder, Roots


class Memory(NamedTuple):
    """Current memory use of the node, in bytes; None where the kernel has no such line."""

    available_bytes: int | None
    cached_bytes: int | None
    swap_free_bytes: int | None
    dirty_bytes: int | None
    writeback_bytes: int | None


class MeminfoParser:
    """Parses the wanted lines in successive readings of the file."""

    def __init__(self) -> None:
        self._find = NumberFinder(
            b"MemAvailable:", b"Cached:", b"SwapFree:", b"Dirty:", b"Writeback:", end=b" kB"
        )

    def __call__(self, data: bytes) -> Memory:
        """Return the memory use of the node, in bytes."""
        return Memory._make([None if kib is None else kib * 1024 for kib in self._find(data)])


LONGEST_RECORD = 64  # bytes of a line: the longest name, a space, 20 digits


class Vmstat(NamedTuple):
    """Events since boot; None where the kernel does not count them."""

    major_faults: int | None
    swap_in_pages: int | None
    swap_out_pages: int | None
    direct_scan_pages: int | None
    """Pages that a task scanned itself because it needed memory (direct reclaim)."""
    refaults: int | None
    """File pages that were read again soon after their eviction."""
    oom_kills: int | None


class VmstatParser:
    """Parses the wanted lines in successive readings of the file."""

    def __init__(self) -> None:
        self._find = NumberFinder(
            b"pgmajfault ",
            b"pswpin ",
            b"pswpout ",
            b"pgscan_direct ",
            b"workingset_refault_file ",
            b"oom_kill ",
        )
        # Before Linux 5.9 there is one count for file and anonymous pages.
        self._find_old = NumberFinder(b"workingset_refault ")

    def __call__(self, data: bytes) -> Vmstat:
        """Return the events since boot."""
        counts = self._find(data)
        if counts[4] is None:
            counts[4] = self._find_old(data)[0]
        return Vmstat._make(counts)


class Reclaim(NamedTuple):
    """Memory reclaim since boot; None where the kernel does not count it."""

    faults: int | None
    """Page faults of all kinds."""
    kswapd_scan_pages: int | None
    """Pages that kswapd scanned in the background."""
    kswapd_steal_pages: int | None
    """Pages that kswapd freed."""
    direct_steal_pages: int | None
    """Pages that a task freed itself because it needed memory (direct reclaim)."""
    stalls: int | None
    """Times a task entered direct reclaim; all zones."""
    huge_faults: int | None
    """Page faults that were served with a huge page."""
    huge_fallbacks: int | None
    """Page faults for which no huge page was free."""
    compaction_stalls: int | None
    """Times a task compacted memory itself to build a huge page."""


class ReclaimParser:
    """Parses the lines about reclaim and huge pages in successive readings of the file."""

    _ZONES = (b"dma", b"dma32", b"normal", b"high", b"movable", b"device")

    def __init__(self) -> None:
        self._find = NumberFinder(
            b"pgfault ",
            b"pgscan_kswapd ",
            b"pgsteal_kswapd ",
            b"pgsteal_direct ",
            b"thp_fault_alloc ",
            b"thp_fault_fallback ",
            b"compact_stall ",
        )
        # Before Linux 4.10 there is one count for all zones.
        self._find_stalls = NumberFinder(
            b"allocstall ", *(b"allocstall_%s " % zone for zone in self._ZONES)
        )

    def __call__(self, data: bytes) -> Reclaim:
        """Return the events since boot."""
        counts = self._find(data)
        zones = [count for count in self._find_stalls(data) if count is not None]
        return Reclaim._make([*counts[:4], sum(zones) if zones else None, *counts[4:]])


def list_numa_nodes(roots: Roots) -> list[Path]:
    """Return the folders of the NUMA nodes, sorted by number; [] without any."""
    folder = roots.sys / "devices/system/node"
    nodes = [path for path in folder.glob("node*") if path.name[4:].isdecimal()]
    return sorted(nodes, key=lambda path: int(path.name[4:]))


class NumaMissParser:
    """Parses the allocation misses in successive readings of one node's file."""

    def __init__(self) -> None:
        self._find = NumberFinder(b"numa_miss ")

    def __call__(self, data: bytes) -> int | None:
        """Return the pages of this node that went to tasks which wanted another node."""
        return self._find(data)[0]


class NumaAllocations(NamedTuple):
    """Pages allocated on one node since boot; None where the kernel does not count them."""

    wanted: int | None
    """By tasks that wanted this node."""
    local: int | None
    """By tasks that ran on this node."""
    remote: int | None
    """By tasks that ran on another node."""


class NumaAllocationsParser:
    """Parses which tasks got a node's pages, in successive readings of its file."""

    def __init__(self) -> None:
        self._find = NumberFinder(b"numa_hit ", b"local_node ", b"other_node ")

    def __call__(self, data: bytes) -> NumaAllocations:
        """Return the pages since boot."""
        return NumaAllocations._make(self._find(data))
