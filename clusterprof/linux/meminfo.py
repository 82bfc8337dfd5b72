"""/proc/meminfo: where the node's memory is, in KiB.

https://docs.kernel.org/filesystems/proc.html (section 1.5)

    MemTotal:       24684092 kB
    MemFree:        20304712 kB
    MemAvailable:   22804712 kB
    Cached:          1203476 kB
"""

from __future__ import annotations

from typing import NamedTuple

_KIB = 1024


class Memory(NamedTuple):
    """Memory of the node now, in bytes; None where the kernel has no such line."""

    available_bytes: int | None
    cached_bytes: int | None
    swap_free_bytes: int | None
    dirty_bytes: int | None
    writeback_bytes: int | None


def parse_meminfo(data: bytes) -> Memory:
    """Return the lines that are wanted, in bytes."""
    return Memory(
        _bytes_after(data, b"\nMemAvailable:"),
        _bytes_after(data, b"\nCached:"),
        _bytes_after(data, b"\nSwapFree:"),
        _bytes_after(data, b"\nDirty:"),
        _bytes_after(data, b"\nWriteback:"),
    )


def _bytes_after(data: bytes, key: bytes) -> int | None:
    start = data.find(key)
    if start < 0:
        return None
    start += len(key)
    return int(data[start : data.index(b" kB", start)]) * _KIB
