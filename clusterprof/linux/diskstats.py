"""/proc/diskstats: requests, sectors and time of every block device.

https://docs.kernel.org/admin-guide/iostats.html

     254  0 vda 18741 8065 3002754 37736 3263 36490 3025384 14863 0 21736 53577 4036 73 93480 965
                reads merged sectors ms  writes merged sectors ms now busy_ms queue_ms …

A sector is 512 bytes whatever the device's own. The four times are unsigned 32-bit numbers of
milliseconds, which begin again at zero after 49.7 days; the counts are 64 bits wide.
"""

from __future__ import annotations

from typing import NamedTuple

from clusterprof.units import SECTOR_BYTES

LONGEST_RECORD = 512  # bytes: two numbers, a name of 32 and 17 numbers of 20 digits


class DiskStats(NamedTuple):
    """What one block device did since boot; times in ms modulo 2^32 as the kernel keeps them."""

    reads: int
    read_bytes: int
    read_ms: int
    writes: int
    write_bytes: int
    write_ms: int
    busy_ms: int
    queue_ms: int


def parse_disk(line: bytes) -> DiskStats:
    """Return the numbers of one line."""
    row = line.split(None, 14)
    return DiskStats(
        int(row[3]),
        int(row[5]) * SECTOR_BYTES,
        int(row[6]),
        int(row[7]),
        int(row[9]) * SECTOR_BYTES,
        int(row[10]),
        int(row[12]),
        int(row[13]),
    )


def disk_names(lines: list[bytes]) -> list[str]:
    """Return the device name of each line, "" for an empty line."""
    return [line.split(None, 3)[2].decode() if line else "" for line in lines]


def is_partition(name: str, names: set[str]) -> bool:
    """Say whether a name is a partition of another device in `names`, by the kernel's own rule.

    A partition is its disk's name and a number, with a "p" between if the disk's name ends in a
    digit: sda1 of sda, nvme0n1p2 of nvme0n1; dm-10 is no partition of dm-1.
    """
    disk = name.rstrip("0123456789")
    if disk == name:
        return False
    if disk.endswith("p") and disk[:-1][-1:].isdigit():
        return disk[:-1] in names
    return disk in names
