"""/proc/<pid>/cgroup and the cgroup file system, v1 and v2: quota, throttling, memory.

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

A limit applies to everything below it, and launchers set it several levels above the process (Slurm
on the job, while the process is in its task). The relevant level is the tightest one on the path to
the root.

/proc/pressure/{cpu,io,memory} and the cgroup's *.pressure: time lost by waiting, in µs.

https://docs.kernel.org/accounting/psi.html

    some avg10=0.06 avg60=0.21 avg300=0.99 total=8537362
    full avg10=0.00 avg60=0.13 avg300=0.96 total=8183134

`total` is an integral kept by the scheduler: it is exact regardless of the sampling interval.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from clusterprof.agent.linux.files import (
    MissingFile,
    NumberFinder,
    OpenFile,
    Roots,
    open_file,
    read_file_once,
)
from clusterprof.agent.linux.storage.disks import Mount, parse_mountinfo
from clusterprof.errors import Unavailable

_NO_LIMIT_V1 = 1 << 62  # version 1 writes "no limit" as the largest multiple of a page
_MOUNT_REMEDY = "mount the cgroup file system at /sys/fs/cgroup"
_INSIDE_REMEDY = "run the recorder on the node, or in the container of the job"
_Limit = TypeVar("_Limit", int, float)


class CgroupFolder(NamedTuple):
    """The cgroup of a process in the hierarchy of one controller."""

    version: int
    """1 or 2."""
    root: Path
    """Mount point of the controller, as this process sees it."""
    folder: Path
    """The process's own cgroup; equals `root` or lies below it."""

    def list_levels(self) -> list[Path]:
        """Return the folders from the process's own cgroup up to the root of the mount."""
        folders = [self.folder]
        while folders[-1] != self.root:
            folders.append(folders[-1].parent)
        return folders


class CpuStat(NamedTuple):
    """CPU quota of one cgroup; None where the kernel keeps no such count for it."""

    usage_ns: int | None
    """Version 2 only; version 1 has cpuacct.usage."""
    periods: int | None
    throttled_periods: int | None
    throttled_ns: int | None


class MemoryEvents(NamedTuple):
    """Events of the memory controller for one cgroup; None where they are not counted."""

    high: int | None
    oom_kills: int | None


def find_cgroup(roots: Roots, pid: int | None, controller: str) -> CgroupFolder:
    """Find the cgroup of a process (None = our own) for "cpu", "memory" or "cpuacct".

    "unified" requests the version 2 hierarchy regardless of its controllers.
    Raises: Unavailable when the process has no such cgroup or it is not mounted here.
    """
    proc_entry = "self" if pid is None else str(pid)
    memberships = parse_memberships(read_file_once(roots.proc / proc_entry / "cgroup"))
    mounts = parse_mountinfo(read_file_once(roots.proc / "self" / "mountinfo"))
    if controller in memberships:
        version = 1
        hits = [m for m in mounts if m.type == "cgroup" and controller in m.options]
    elif "" in memberships:
        version, controller = 2, ""
        hits = [m for m in mounts if m.type == "cgroup2"]
    else:
        raise Unavailable("absent", f"process {proc_entry} is in no cgroup of {controller}", "")
    if not hits:
        raise Unavailable(
            "absent", f"no cgroup file system for process {proc_entry} is mounted", _MOUNT_REMEDY
        )
    root = _resolve_mount_point(roots, hits[-1].point)
    folder = _resolve_cgroup_folder(root, hits[-1], memberships[controller])
    if not folder.is_dir():
        raise Unavailable("absent", f"{folder}: no such directory", _MOUNT_REMEDY)
    return CgroupFolder(version, root, folder)


def parse_memberships(data: bytes) -> dict[str, str]:
    """Parse the cgroup path per controller; "" is the version 2 hierarchy."""
    paths = {}
    for line in data.decode(errors="surrogateescape").splitlines():
        number, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller or number == "0":
                paths[controller] = path.removesuffix(" (deleted)")
    return paths


class CpuStatParser:
    """Parses successive readings of a cpu.stat; version 2 writes µs, version 1 ns."""

    def __init__(self, version: int) -> None:
        throttled = b"throttled_usec " if version == 2 else b"throttled_time "
        self._throttled_scale = 1_000 if version == 2 else 1
        self._find = NumberFinder(b"usage_usec ", b"nr_periods ", b"nr_throttled ", throttled)

    def __call__(self, data: bytes) -> CpuStat:
        """Return the counts since the cgroup was created."""
        usage_us, periods, throttled_periods, throttled = self._find(data)
        return CpuStat(
            None if usage_us is None else usage_us * 1_000,
            periods,
            throttled_periods,
            None if throttled is None else throttled * self._throttled_scale,
        )


class MemoryEventsParser:
    """Parses the events of a memory.events (version 2) or memory.oom_control (version 1)."""

    def __init__(self) -> None:
        self._find = NumberFinder(b"high ", b"oom_kill ")

    def __call__(self, data: bytes) -> MemoryEvents:
        """Return the events since the cgroup was created."""
        return MemoryEvents._make(self._find(data))


def read_quota(folder: Path, version: int) -> float | None:
    """Read how many CPUs the quota of one cgroup allows; None without a quota."""
    if version == 2:
        quota, _, period = read_file_once(folder / "cpu.max").partition(b" ")
        return None if quota == b"max" else int(quota) / int(period)
    quota_us = int(read_file_once(folder / "cpu.cfs_quota_us"))
    if quota_us < 0:
        return None
    return quota_us / int(read_file_once(folder / "cpu.cfs_period_us"))


def read_memory_limit(folder: Path, version: int) -> int | None:
    """Read the memory limit of one cgroup in bytes; None without a limit."""
    text = read_file_once(
        folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")
    ).strip()
    if text == b"max" or int(text) >= _NO_LIMIT_V1:
        return None
    return int(text)


def find_tightest_quota(cgroup_folder: CgroupFolder) -> tuple[Path, float | None]:
    """Find the level with the smallest CPU quota; the process's own level without a quota."""
    return _find_tightest_limit(cgroup_folder, read_quota)


def find_tightest_memory_limit(cgroup_folder: CgroupFolder) -> tuple[Path, int | None]:
    """Find the level with the smallest memory limit; the process's own level without one."""
    return _find_tightest_limit(cgroup_folder, read_memory_limit)


def _find_tightest_limit(
    cgroup_folder: CgroupFolder, read: Callable[[Path, int], _Limit | None]
) -> tuple[Path, _Limit | None]:
    tightest: tuple[Path, _Limit | None] = (cgroup_folder.folder, None)
    for level in cgroup_folder.list_levels():
        try:
            limit = read(level, cgroup_folder.version)
        except Unavailable:
            continue  # the root has no such file, and a level may be unreadable for us
        if limit is not None and (tightest[1] is None or limit < tightest[1]):
            tightest = (level, limit)
    return tightest


def _resolve_mount_point(roots: Roots, point: str) -> Path:
    """Translate a mount point to the root under which we find /sys."""
    inside = point.removeprefix("/sys/")
    return roots.sys / inside if inside != point else Path(point)


def _resolve_cgroup_folder(root: Path, mount: Mount, path: str) -> Path:
    """Return the folder of a cgroup path in a mount that may show only a part.

    In a container the root of the mount is the container's own cgroup, and the path begins with it.
    A path that does not, or that leads upwards ("/.."), belongs to a cgroup that is invisible here.
    """
    inside = path
    if mount.root != "/" and (path + "/").startswith(mount.root + "/"):
        inside = path[len(mount.root) :]
    elif mount.root != "/":
        inside = "/.."
    if ".." in inside.split("/"):
        raise Unavailable(
            "absent",
            f"the cgroup {path} lies outside the mounted part of the hierarchy",
            _INSIDE_REMEDY,
        )
    return root / inside.strip("/") if inside.strip("/") else root


PSI_REMEDY = (
    "needs Linux 4.20 or later with CONFIG_PSI=y, and psi=1 where the kernel defaults to off"
)


class Pressure(NamedTuple):
    """Time since boot during which tasks waited for one resource, in ns."""

    some_ns: int
    """At least one task waited."""
    full_ns: int | None
    """Every non-idle task waited; None where the file has no such line (cpu, before 5.13)."""


def open_pressure_file(folder: Path, name: str) -> OpenFile | MissingFile:
    """Open a pressure file and read it once, because disabled PSI shows only on reading."""
    file = open_file(folder / name, PSI_REMEDY)
    try:
        file.read()
    except Unavailable as reason:
        file.close()
        return MissingFile(reason)
    return file


def parse_pressure(data: bytes) -> Pressure:
    """Parse the totals of a pressure file, in ns.

    Raises: ValueError for another format.
    """
    if not data.startswith(b"some"):
        raise ValueError(f"pressure file does not begin with 'some': {data[:80]!r}")
    some_start = data.index(b"total=") + 6
    full_start = data.rindex(b"total=") + 6
    end = data.find(b"\n", some_start)
    return Pressure(
        int(data[some_start:] if end < 0 else data[some_start:end]) * 1_000,
        None if full_start == some_start else int(data[full_start:]) * 1_000,
    )
