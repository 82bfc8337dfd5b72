"""/proc/<pid>/mountinfo: what is mounted where, as that process sees it.

https://docs.kernel.org/filesystems/proc.html (section 3.5)

    36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
    (1)(2)(3)  (4)   (5)   (6)        (7)     (8)(9)  (10)      (11)

(3) device number, (4) root of the mount within its file system, (5) mount point, (6) options,
(7) any number of fields, (8) a lone "-", (9) type, (10) source, (11) options of the file system.
Space, tab, newline and backslash are written as octal: "\\040".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount."""

    device: str
    """major:minor."""
    root: str
    """Which folder of the file system is mounted."""
    point: str
    """Where."""
    type: str
    """ext4, nfs4, cgroup2, …"""
    source: str
    """/dev/sda1, server:/export, …"""
    options: tuple[str, ...]
    """Options of the file system; for cgroup v1 these name the controllers."""


def parse_mountinfo(data: bytes) -> list[Mount]:
    """Return all mounts in the order of mounting: a later one hides an earlier one below it."""
    mounts = []
    for line in data.decode(errors="surrogateescape").splitlines():
        front, _, back = line.partition(" - ")
        fields, tail = front.split(" "), back.split(" ")
        if len(fields) < 6 or len(tail) < 2:
            continue  # not a line of the kernel's
        options = tuple(tail[2].split(",")) if len(tail) > 2 else ()
        mounts.append(
            Mount(fields[2], unescape(fields[3]), unescape(fields[4]), tail[0], unescape(tail[1]),
                  options)
        )  # fmt: skip
    return mounts


def mount_of(mounts: list[Mount], path: str) -> Mount | None:
    """Return the mount an absolute path without symbolic links lies on."""
    best: Mount | None = None
    for mount in mounts:
        inside = mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def unescape(text: str) -> str:
    """Undo the kernel's octal escapes in paths."""
    if "\\" not in text:
        return text
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
