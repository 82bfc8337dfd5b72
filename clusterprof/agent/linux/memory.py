"""/proc/vmstat: what memory management had to do since boot, in pages and events.

https://docs.kernel.org/filesystems/proc.html; the names are in mm/vmstat.c

    nr_free_pages 5076178
    pgmajfault 507162
    pgscan_direct 0
"""

from __future__ import annotations

from typing import NamedTuple

from clusterprof.linux.fields import Numbers

LONGEST_RECORD = 64  # bytes of a line: the longest name, a space, 20 digits


class Vmstat(NamedTuple):
    """Events since boot; None where the kernel does not count them."""

    major_faults: int | None
    swap_in_pages: int | None
    swap_out_pages: int | None
    direct_scan_pages: int | None
    """Pages a task that wanted memory had to look at itself."""
    refaults: int | None
    """File pages that came back soon after their eviction."""
    oom_kills: int | None


class VmstatParser:
    """Finds the wanted lines in successive readings of the file."""

    def __init__(self) -> None:
        self._find = Numbers(
            b"pgmajfault ",
            b"pswpin ",
            b"pswpout ",
            b"pgscan_direct ",
            b"workingset_refault_file ",
            b"oom_kill ",
        )
        # One count for file and anonymous pages, before Linux 5.9.
        self._find_old = Numbers(b"workingset_refault ")

    def __call__(self, data: bytes) -> Vmstat:
        """Return the events since boot."""
        found = self._find(data)
        if found[4] is None:
            found[4] = self._find_old(data)[0]
        return Vmstat._make(found)


class Reclaim(NamedTuple):
    """How memory was found for those who asked, since boot; None where it is not counted."""

    faults: int | None
    """Page faults of all kinds."""
    kswapd_scan_pages: int | None
    """Pages that kswapd looked at, behind the tasks' backs."""
    kswapd_steal_pages: int | None
    """Pages that kswapd freed."""
    direct_steal_pages: int | None
    """Pages that a task freed itself because it wanted some."""
    stalls: int | None
    """Times a task began to free pages itself; all zones."""
    huge_faults: int | None
    """Page faults that were given a huge page."""
    huge_fallbacks: int | None
    """Page faults for which no huge page was free."""
    compaction_stalls: int | None
    """Times a task moved pages itself to make a huge one."""


class ReclaimParser:
    """Finds the lines about reclaim and huge pages in successive readings of the file."""

    _ZONES = (b"dma", b"dma32", b"normal", b"high", b"movable", b"device")

    def __init__(self) -> None:
        self._find = Numbers(
            b"pgfault ",
            b"pgscan_kswapd ",
            b"pgsteal_kswapd ",
            b"pgsteal_direct ",
            b"thp_fault_alloc ",
            b"thp_fault_fallback ",
            b"compact_stall ",
        )
        # One count for all zones before Linux 4.10.
        self._find_stalls = Numbers(
            b"allocstall ", *(b"allocstall_%s " % zone for zone in self._ZONES)
        )

    def __call__(self, data: bytes) -> Reclaim:
        """Return the events since boot."""
        found = self._find(data)
        zones = [count for count in self._find_stalls(data) if count is not None]
        return Reclaim._make([*found[:4], sum(zones) if zones else None, *found[4:]])
