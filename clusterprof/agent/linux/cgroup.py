"""/proc/<pid>/cgroup and the cgroup file system, version 1 and 2: quota, throttling, memory.

https://docs.kernel.org/admin-guide/cgroup-v2.html, …/cgroup-v1/, …/scheduler/sched-bwc.html

    version 2, /proc/self/cgroup           version 1
    0::/system.slice/job_7/step_0          4:memory:/slurm/uid_1000/job_7
                                           2:cpu,cpuacct:/slurm/uid_1000/job_7
    cpu.stat      usage_usec 81234567      cpuacct.usage           81234567000
                  nr_periods 9200          cpu.stat                nr_periods 9200
                  nr_throttled 811                                 nr_throttled 811
                  throttled_usec 72911223                          throttled_time 72911223000
    cpu.max       200000 100000            cpu.cfs_quota_us 200000, cpu.cfs_period_us 100000
    memory.max    max                      memory.limit_in_bytes   9223372036854771712

A limit holds for everything below it, and launchers set it levels above the process (Slurm on
the job, the process in its task): the level that matters is the tightest on the way to the root.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from clusterprof.errors import Unavailable
from clusterprof.linux.fields import Numbers
from clusterprof.linux.held import read_once
from clusterprof.linux.mountinfo import Mount, parse_mountinfo
from clusterprof.linux.roots import Roots

_NO_LIMIT_V1 = 1 << 62  # version 1 writes "none" as the largest multiple of a page
_MOUNT_REMEDY = "mount the cgroup file system at /sys/fs/cgroup"
_INSIDE_REMEDY = "run the recorder on the node, or in the container of the job"
_Limit = TypeVar("_Limit", int, float)


class Place(NamedTuple):
    """Where one controller keeps a process's cgroup."""

    version: int
    """1 or 2."""
    root: Path
    """The mount of the controller, as we see it."""
    folder: Path
    """The process's own cgroup; equals `root` or lies below it."""

    def levels(self) -> list[Path]:
        """Return the folders from the process's own cgroup up to the root of the mount."""
        found = [self.folder]
        while found[-1] != self.root:
            found.append(found[-1].parent)
        return found


class CpuStat(NamedTuple):
    """CPU quota of one cgroup; None where the kernel keeps no such count for it."""

    usage_ns: int | None
    """Version 2 only; version 1 has cpuacct.usage."""
    periods: int | None
    throttled_periods: int | None
    throttled_ns: int | None


class MemoryEvents(NamedTuple):
    """What the memory controller had to do to one cgroup; None where it is not counted."""

    high: int | None
    oom_kills: int | None


def find_cgroup(roots: Roots, pid: int | None, controller: str) -> Place:
    """Return where the cgroup of a process (None = our own) is for "cpu", "memory" or "cpuacct".

    "unified" asks for the version 2 hierarchy whatever controllers it has. Raises `Unavailable`.
    """
    who = "self" if pid is None else str(pid)
    memberships = parse_memberships(read_once(roots.proc / who / "cgroup"))
    mounts = parse_mountinfo(read_once(roots.proc / "self" / "mountinfo"))
    if controller in memberships:
        version = 1
        hits = [m for m in mounts if m.type == "cgroup" and controller in m.options]
    elif "" in memberships:
        version, controller = 2, ""
        hits = [m for m in mounts if m.type == "cgroup2"]
    else:
        raise Unavailable("absent", f"process {who} is in no cgroup of {controller}", "")
    if not hits:
        raise Unavailable(
            "absent", f"no cgroup file system for process {who} is mounted", _MOUNT_REMEDY
        )
    root = _as_we_see_it(roots, hits[-1].point)
    folder = _below(root, hits[-1], memberships[controller])
    if not folder.is_dir():
        raise Unavailable("absent", f"{folder}: no such directory", _MOUNT_REMEDY)
    return Place(version, root, folder)


def parse_memberships(data: bytes) -> dict[str, str]:
    """Return the path of the cgroup by controller; "" is the version 2 hierarchy."""
    paths = {}
    for line in data.decode(errors="surrogateescape").splitlines():
        number, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller or number == "0":
                paths[controller] = path.removesuffix(" (deleted)")
    return paths


class CpuStatParser:
    """Finds the counts in successive readings of a cpu.stat; version 2 writes µs, version 1 ns."""

    def __init__(self, version: int) -> None:
        throttled = b"throttled_usec " if version == 2 else b"throttled_time "
        self._throttled_scale = 1_000 if version == 2 else 1
        self._find = Numbers(b"usage_usec ", b"nr_periods ", b"nr_throttled ", throttled)

    def __call__(self, data: bytes) -> CpuStat:
        """Return the counts since the cgroup was made."""
        usage_us, periods, throttled_periods, throttled = self._find(data)
        return CpuStat(
            None if usage_us is None else usage_us * 1_000,
            periods,
            throttled_periods,
            None if throttled is None else throttled * self._throttled_scale,
        )


class MemoryEventsParser:
    """Finds the events of a memory.events (version 2) or memory.oom_control (version 1)."""

    def __init__(self) -> None:
        self._find = Numbers(b"high ", b"oom_kill ")

    def __call__(self, data: bytes) -> MemoryEvents:
        """Return the events since the cgroup was made."""
        return MemoryEvents._make(self._find(data))


def read_quota(folder: Path, version: int) -> float | None:
    """Return how many CPUs the quota of one cgroup allows, None without a quota."""
    if version == 2:
        quota, _, period = read_once(folder / "cpu.max").partition(b" ")
        return None if quota == b"max" else int(quota) / int(period)
    quota_us = int(read_once(folder / "cpu.cfs_quota_us"))
    if quota_us < 0:
        return None
    return quota_us / int(read_once(folder / "cpu.cfs_period_us"))


def read_memory_limit(folder: Path, version: int) -> int | None:
    """Return the memory limit of one cgroup in bytes, None without a limit."""
    text = read_once(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).strip()
    if text == b"max" or int(text) >= _NO_LIMIT_V1:
        return None
    return int(text)


def tightest_quota(place: Place) -> tuple[Path, float | None]:
    """Return the level with the fewest CPUs allowed; the process's own when there is no quota."""
    return _tightest(place, read_quota)


def tightest_memory(place: Place) -> tuple[Path, int | None]:
    """Return the level with the least memory allowed; the process's own when there is no limit."""
    return _tightest(place, read_memory_limit)


def _tightest(
    place: Place, read: Callable[[Path, int], _Limit | None]
) -> tuple[Path, _Limit | None]:
    best: tuple[Path, _Limit | None] = (place.folder, None)
    for level in place.levels():
        try:
            limit = read(level, place.version)
        except Unavailable:
            continue  # the root has no such file, and a level may be somebody else's
        if limit is not None and (best[1] is None or limit < best[1]):
            best = (level, limit)
    return best


def _as_we_see_it(roots: Roots, point: str) -> Path:
    """Return a mount point of the machine under the root where we find its /sys."""
    inside = point.removeprefix("/sys/")
    return roots.sys / inside if inside != point else Path(point)


def _below(root: Path, mount: Mount, path: str) -> Path:
    """Return the folder of a cgroup path in a mount that may show only a part of the hierarchy.

    In a container the mount's root is the container's own cgroup, and the path begins with it.
    A path that does not, or that leads upwards ("/.."), belongs to a cgroup we cannot see.
    """
    inside = path
    if mount.root != "/" and (path + "/").startswith(mount.root + "/"):
        inside = path[len(mount.root) :]
    elif mount.root != "/":
        inside = "/.."
    if ".." in inside.split("/"):
        raise Unavailable(
            "absent", f"the cgroup {path} lies outside of what is mounted here", _INSIDE_REMEDY
        )
    return root / inside.strip("/") if inside.strip("/") else root
