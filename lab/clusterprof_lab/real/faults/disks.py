"""Disks of a fault's own: loop devices with a file system and a limited speed.

A loop device has its own line in /proc/diskstats. It is throttled by `blkio.throttle.*` of the root
group (version 1), which also throttles write-back. Version 2 has no throttle for its root; the
job's own group would need `io.max`, which is not implemented.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clusterprof_lab.real.faults import processes
from clusterprof_lab.real.faults.base import Place, check_root

THROTTLE = Path("/sys/fs/cgroup/blkio")
IMAGES = Path("/dev/shm")
"""Where the bytes of loop devices are kept, if there is room; else in the folder of the place."""
_CHUNK = 1 << 20
_SPARE_BYTES = 32 << 20  # for the file system itself
# What is still in use goes with its last user: a node's mount with the node.
_UNMOUNT = 'mounted=$0; "$@" umount "$mounted" || "$@" umount -l "$mounted"; rmdir "$mounted"'
_UNTHROTTLE = "; ".join(
    f'echo "$0 0" >{THROTTLE}/blkio.throttle.{way}_bps_device' for way in ("read", "write")
)


def why_not_here() -> str:
    """Return why no slow disk can be made, "" when one can."""
    reason = check_root("a loop device")
    if reason:
        return reason
    reason = processes.list_missing_commands("losetup", "mkfs.ext4", "mount", "umount", "nsenter")
    if reason:
        return reason
    if not Path("/dev/loop-control").exists():
        return "the kernel has no loop devices"
    if not os.access(THROTTLE / "blkio.throttle.read_bps_device", os.W_OK, effective_ids=True):
        return "the cgroup controller 'blkio' of version 1 is not there to throttle a disk"
    return ""


class Disk:
    """A mounted disk of a fault."""

    def __init__(self, device: str, mounted: Path, reach: Path) -> None:
        number = os.stat(device).st_rdev
        self.device = device
        self.number = f"{os.major(number)}:{os.minor(number)}"
        self.mounted = mounted
        """As the job sees it."""
        self.reach = reach
        """The same, as this process can open it."""

    def limit(self, way: str, bytes_per_second: int) -> None:
        """Let so much through, "read" or "write"; 0 = all."""
        rule = f"{self.number} {bytes_per_second}"
        (THROTTLE / f"blkio.throttle.{way}_bps_device").write_text(rule)

    def write_data(self, name: str, size: int, place: Place) -> Path:
        """Write a file of random bytes that is not in the page cache; return the job's path."""
        block = place.random.bytes(_CHUNK)
        with (self.reach / name).open("wb") as file:
            for start in range(0, size, _CHUNK):
                file.write(block[: min(_CHUNK, size - start)])
            file.flush()
            os.fsync(file.fileno())
            drop_page_cache(file.fileno())
        return self.mounted / name


def drop_page_cache(descriptor: int) -> None:
    """Drop what the page cache has of a file."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _measure_free_bytes(folder: Path) -> int:
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


@contextmanager
def attach_loop_device(place: Place, name: str, size: int) -> Iterator[str]:
    """Attach a loop device of this size; it is detached, and its image removed, at the end."""
    # Not on the machine's disk: other writers would make this one slow at random times.
    images = IMAGES if _measure_free_bytes(IMAGES) > 2 * size else place.folder
    image = images / f"clusterprof-lab-{os.getpid()}-{place.make_path(name).name}.image"
    undo = 'losetup --detach "$(losetup --noheadings --output NAME --associated "$0")"; rm -f "$0"'
    with processes.run_at_end(undo, str(image)):
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        yield processes.run_command("losetup", "--find", "--show", str(image))


@contextmanager
def remove_limits_at_end(disk: Disk) -> Iterator[None]:
    """Remove all limits of a disk at the end: a limit survives the process that set it."""
    with processes.run_at_end(_UNTHROTTLE, disk.number):
        yield


@contextmanager
def mount_disk(place: Place, name: str, size: int) -> Iterator[Disk]:
    """Mount a disk of this size on a place; nothing is left of it at the end.

    RuntimeError when a step of it fails.
    """
    mounted = place.make_path(name)
    with attach_loop_device(place, name, size + _SPARE_BYTES) as loop:
        processes.run_command("mkfs.ext4", "-q", "-F", "-m", "0", loop)
        mounted.mkdir()
        with processes.run_at_end(_UNMOUNT, str(mounted), *place.make_node_command()):
            processes.run_command(
                *place.make_node_command("mount", "-t", "ext4", loop, str(mounted))
            )
            reach = mounted
            if place.node is not None:
                reach = Path(f"/proc/{place.node.pid}/root{mounted}")
            made = Disk(loop, mounted, reach)
            with remove_limits_at_end(made):
                yield made
