"""/proc/vmstat: what memory management had to do since boot, in pages and events.

https://docs.kernel.org/filesystems/proc.html; the names are in mm/vmstat.c

    nr_free_pages 5076178
    pgmajfault 507162
    pgscan_direct 0
"""

from __future__ import annotations

from typing import NamedTuple

from clusterprof.linux.fields import number_after


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


def parse_vmstat(data: bytes) -> Vmstat:
    """Return the events that are wanted."""
    refaults = number_after(data, b"\nworkingset_refault_file ")
    if refaults is None:  # one count for file and anonymous pages, before Linux 5.9
        refaults = number_after(data, b"\nworkingset_refault ")
    return Vmstat(
        number_after(data, b"\npgmajfault "),
        number_after(data, b"\npswpin "),
        number_after(data, b"\npswpout "),
        number_after(data, b"\npgscan_direct "),
        refaults,
        number_after(data, b"\noom_kill "),
    )
