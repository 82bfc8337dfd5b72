"""How full shared memory is: workers hand batches over in it, and die of SIGBUS when it is full.

Columns: `shm.used_bytes` and `shm.size_bytes` of "/dev/shm", as the first process of the job sees
it: a container has its own, of 64 MiB unless somebody said otherwise. Only a file system in memory
is asked; one on a disk or a server could keep the answer to itself.

## Source

`statvfs` of `/proc/<pid>/root/dev/shm`; its type from `/proc/<pid>/mountinfo`.

## Privilege

None for processes of the same user.

## Cost

One call every 2 s, of a file system in memory only.

## Where it is blind

One on a disk or a server is not asked, for it could keep the answer to itself. Who filled it is
not told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import Unavailable, unavailable_from_os_error
from clusterprof.linux.held import read_once
from clusterprof.linux.mountinfo import mount_of, parse_mountinfo
from clusterprof.linux.processes import why_invisible
from clusterprof.signals import Signal

POINT = "/dev/shm"
_IN_MEMORY = ("tmpfs", "ramfs")
_REMEDY = "run as the job's user, or in the container of the job"


class ShmCollector:
    """Used and whole size of /dev/shm."""

    name: ClassVar[str] = "shm"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(self, context: Context, statvfs: Callable[[Path], Any] = os.statvfs) -> None:
        self._context = context
        self._statvfs = statvfs
        self._known: tuple[str, Path] = ("", Path())  # a node may have thousands of mounts

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Say what there will be; where it lies is asked at every sample, processes come and go."""
        self._path()
        return [(signals.SHM_USED, POINT), (signals.SHM_SIZE, POINT)]

    def sample(self) -> Sequence[Value]:
        """Return what is used and what there is, in bytes; raises Unavailable."""
        path = self._path()
        try:
            found = self._statvfs(path)
        except OSError as error:
            raise unavailable_from_os_error(error, str(path), _REMEDY) from None
        size = found.f_blocks * found.f_frsize
        if size <= 0:
            raise Unavailable("absent", f"{POINT} has no limit", "")  # ramfs, tmpfs with size=0
        return [size - found.f_bfree * found.f_frsize, size]

    def close(self) -> None:
        """Do nothing: nothing is held open, which would keep a container's mounts busy."""

    def _path(self) -> Path:
        """Return where the job has it; raises Unavailable when that is no memory."""
        pids = self._context.job_pids()
        who = str(pids[0]) if pids else "self"
        if self._known[0] == who:
            return self._known[1]
        process = self._context.roots.proc / who
        try:
            mounts = parse_mountinfo(read_once(process / "mountinfo"))
        except Unavailable as reason:
            raise why_invisible(self._context.roots, pids[:1]) or reason from None
        mount = mount_of(mounts, POINT)
        if mount is None or mount.point != POINT:
            raise Unavailable("absent", f"nothing is mounted at {POINT}", "")
        if mount.type not in _IN_MEMORY:
            raise Unavailable("absent", f"{POINT} is no memory but {mount.type}", "")
        self._known = who, process / "root" / POINT[1:]
        return self._known[1]
