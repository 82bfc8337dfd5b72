"""/proc/diskstats: requests, sectors and time of every block device.

https://docs.kernel.org/admin-guide/iostats.html

     254  0 vda 18741 8065 3002754 37736 3263 36490 3025384 14863 0 21736 53577 4036 73 93480 965
                reads merged sectors ms  writes merged sectors ms now busy_ms queue_ms …

A sector is 512 bytes regardless of the device's own sector size. The four times are unsigned 32-bit
numbers of milliseconds, which wrap after 49.7 days; the counts are 64 bits wide.

/proc/<pid>/mountinfo: what is mounted where, as that process sees it.

https://docs.kernel.org/filesystems/proc.html (section 3.5)

    36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
    (1)(2)(3)  (4)   (5)   (6)        (7)     (8)(9)  (10)      (11)

(3) device number, (4) root of the mount within its file system, (5) mount point, (6) options, (7)
any number of fields, (8) a lone "-", (9) type, (10) source, (11) options of the file system. Space,
tab, newline and backslash are written as octal: "\\040".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from clusterprof.units import SECTOR_BYTES

LONGEST_RECORD = 512  # bytes: two numbers, a name of 32 and 17 numbers of 20 digits


class DiskStats(NamedTuple):
    """Counters of one block device since boot; times in ms modulo 2^32."""

    reads: int
    read_bytes: int
    read_ms: int
    writes: int
    write_bytes: int
    write_ms: int
    busy_ms: int
    queue_ms: int


def parse_disk(line: bytes) -> DiskStats:
    """Parse the counters of one line."""
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


def list_disk_names(lines: list[bytes]) -> list[str]:
    """Return the device name of each line, "" for an empty line."""
    return [line.split(None, 3)[2].decode() if line else "" for line in lines]


def is_partition(name: str, names: set[str]) -> bool:
    """Return whether a name is a partition of another device in `names`.

    A partition is its disk's name and a number, with a "p" between if the disk's name ends in a
    digit: sda1 of sda, nvme0n1p2 of nvme0n1; dm-10 is no partition of dm-1.
    """
    disk = name.rstrip("0123456789")
    if disk == name:
        return False
    if disk.endswith("p") and disk[:-1][-1:].isdigit():
        return disk[:-1] in names
    return disk in names


_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount."""

    device: str
    """major:minor."""
    root: str
    """The folder of the file system that is mounted."""
    point: str
    """The mount point."""
    type: str
    """ext4, nfs4, cgroup2, …"""
    source: str
    """/dev/sda1, server:/export, …"""
    options: tuple[str, ...]
    """Options of the file system; for cgroup v1 these name the controllers."""


def parse_mountinfo(data: bytes) -> list[Mount]:
    """Parse all mounts in the order of mounting: a later one hides an earlier one below it."""
    mounts = []
    for line in data.decode(errors="surrogateescape").splitlines():
        mount_text, _, type_text = line.partition(" - ")
        fields, tail = mount_text.split(" "), type_text.split(" ")
        if len(fields) < 6 or len(tail) < 2:
            continue  # not a line in the kernel's format
        options = tuple(tail[2].split(",")) if len(tail) > 2 else ()
        mounts.append(
            Mount(
                fields[2],
                decode_octal_escapes(fields[3]),
                decode_octal_escapes(fields[4]),
                tail[0],
                decode_octal_escapes(tail[1]),
                options,
            )
        )
    return mounts


def find_mount(mounts: list[Mount], path: str) -> Mount | None:
    """Find the mount that contains an absolute path without symbolic links; None without any."""
    deepest: Mount | None = None
    for mount in mounts:
        inside = mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
        if inside and (deepest is None or len(mount.point) >= len(deepest.point)):
            deepest = mount
    return deepest


def decode_octal_escapes(text: str) -> str:
    """Decode the kernel's octal escapes in a path."""
    if "\\" not in text:
        return text
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
