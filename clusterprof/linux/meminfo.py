"""/proc/meminfo: where the node's memory is, in KiB.

https://docs.kernel.org/filesystems/proc.html (section 1.5)

    MemTotal:       24684092 kB
    MemFree:        20304712 kB
    MemAvailable:   22804712 kB
    Cached:          1203476 kB
"""

from __future__ import annotations

from typing import NamedTuple

from clusterprof.linux.fields import Numbers


class Memory(NamedTuple):
    """Memory of the node now, in bytes; None where the kernel has no such line."""

    available_bytes: int | None
    cached_bytes: int | None
    swap_free_bytes: int | None
    dirty_bytes: int | None
    writeback_bytes: int | None


class MeminfoParser:
    """Finds the wanted lines in successive readings of the file."""

    def __init__(self) -> None:
        self._find = Numbers(
            b"MemAvailable:", b"Cached:", b"SwapFree:", b"Dirty:", b"Writeback:", end=b" kB"
        )

    def __call__(self, data: bytes) -> Memory:
        """Return the memory of the node, in bytes."""
        return Memory._make([None if kib is None else kib * 1024 for kib in self._find(data)])
