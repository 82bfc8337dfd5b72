"""Available memory of the node, and what the kernel does to free more.

How the kernel frees memory, in the background or by stalling tasks, and on which node.

How full shared memory is, through which workers pass batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.files import MissingFile, OpenFile, open_file, read_file_once
from clusterprof.agent.linux.memory import (
    LONGEST_RECORD,
    MeminfoParser,
    NumaAllocationsParser,
    NumaMissParser,
    ReclaimParser,
    VmstatParser,
    list_numa_nodes,
)
from clusterprof.agent.linux.processes import explain_invisible_processes
from clusterprof.agent.linux.storage.disks import find_mount, parse_mountinfo
from clusterprof.errors import Unavailable, convert_os_error
from clusterprof.signals import Signal

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMINFO_COLUMNS: tuple[Signal, ...] = (
    signals.MEMORY_AVAILABLE,
    signals.MEMORY_CACHED,
    signals.MEMORY_SWAP_FREE,
    signals.MEMORY_DIRTY,
    signals.MEMORY_WRITEBACK,
)
_VMSTAT_COLUMNS: tuple[Signal, ...] = (
    signals.MEMORY_MAJOR_FAULTS,
    signals.MEMORY_SWAP_IN,
    signals.MEMORY_SWAP_OUT,
    signals.MEMORY_RECLAIM_DIRECT,
    signals.MEMORY_REFAULTS,
    signals.MEMORY_OOM_KILLS,
)
_VMSTAT_UNITS = (1, _PAGE_BYTES, _PAGE_BYTES, 1, 1, 1)
_NO_LINE = Unavailable("absent", "this kernel does not count it", "")


class MemoryCollector:
    """Available memory of the node, and what the kernel does to free more.

    Columns: from /proc/meminfo and /proc/vmstat of the node, and `memory.numa_misses_total`
    of every NUMA node ("node0", …). A line that the kernel does not write is a reason in
    its column.

    ## Source

    `/proc/meminfo`, `/proc/vmstat`, `/sys/devices/system/node/node*/numastat`
    (docs.kernel.org/filesystems/proc, admin-guide/numastat).

    ## Privilege

    None.

    ## Cost

    Two files of some 60 and 170 lines and one for each NUMA node, once a second.

    ## Where it is blind

    It covers the whole node and does not show which process evicts whose pages. The
    collector `cgroup` has the memory of the job's own cgroup.
    """

    name: ClassVar[str] = "memory"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._roots = context.roots

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open meminfo, vmstat and the numastat of every NUMA node."""
        self._meminfo = OpenFile(self._roots.proc / "meminfo")
        self._vmstat = open_file(self._roots.proc / "vmstat", longest_record=LONGEST_RECORD)
        self._parse_meminfo, self._parse_vmstat = MeminfoParser(), VmstatParser()
        nodes = list_numa_nodes(self._roots)
        self._numa = [(open_file(node / "numastat"), NumaMissParser()) for node in nodes]
        columns = [(signal, "") for signal in _MEMINFO_COLUMNS + _VMSTAT_COLUMNS]
        return columns + [(signals.MEMORY_NUMA_MISSES, node.name) for node in nodes]

    def sample(self) -> Sequence[Value]:
        """Return current bytes, and events since boot."""
        values: list[Value] = [
            _NO_LINE if value is None else value
            for value in self._parse_meminfo(self._meminfo.read())
        ]
        values += self._sample_vmstat()
        for file, parse in self._numa:
            try:
                misses = parse(file.read())
                values.append(_NO_LINE if misses is None else misses)
            except Unavailable as reason:
                values.append(reason)
        return values

    def close(self) -> None:
        """Close all files."""
        self._meminfo.close()
        self._vmstat.close()
        for file, _ in self._numa:
            file.close()

    def _sample_vmstat(self) -> list[Value]:
        try:
            events = self._parse_vmstat(self._vmstat.read())
        except Unavailable as reason:
            return [reason] * len(_VMSTAT_COLUMNS)
        return [
            _NO_LINE if event is None else event * unit
            for event, unit in zip(events, _VMSTAT_UNITS, strict=True)
        ]


_RECLAIM_COLUMNS: tuple[Signal, ...] = (
    signals.MEMORY_FAULTS,
    signals.MEMORY_KSWAPD_SCAN,
    signals.MEMORY_KSWAPD_STEAL,
    signals.MEMORY_DIRECT_STEAL,
    signals.MEMORY_STALLS,
    signals.MEMORY_HUGE_FAULTS,
    signals.MEMORY_HUGE_FALLBACKS,
    signals.MEMORY_COMPACTION_STALLS,
)
_NUMA_COLUMNS: tuple[Signal, ...] = (
    signals.MEMORY_NUMA_HITS,
    signals.MEMORY_NUMA_LOCAL,
    signals.MEMORY_NUMA_REMOTE,
)
_NO_NUMBER = Unavailable("failed", "the kernel's file contains words instead of numbers", "")


class ReclaimCollector:
    """How the kernel frees memory, in the background or by stalling tasks, and on which node.

    Columns: counters of /proc/vmstat about reclaim, huge pages and compaction, and for
    every NUMA node ("node0", …) the pages allocated on it by tasks on this node and on
    others. A line that the kernel does not write is a reason in its column.

    ## Source

    `/proc/vmstat` and `/sys/devices/system/node/node*/numastat`
    (docs.kernel.org/admin-guide/numastat, mm/vmstat.c).

    ## Privilege

    None.

    ## Cost

    Two small files and one for each NUMA node, every 2 s.

    ## Where it is blind

    Counters cover the node and all jobs on it. The NUMA placement of a single process is
    not read: /proc/<pid>/numa_maps walks all memory of a process and holds its lock.
    """

    name: ClassVar[str] = "reclaim"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(self, context: Context) -> None:
        self._roots = context.roots

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open vmstat and the numastat of every NUMA node."""
        self._vmstat = OpenFile(self._roots.proc / "vmstat", longest_record=LONGEST_RECORD)
        self._parse = ReclaimParser()
        nodes = list_numa_nodes(self._roots)
        self._nodes = [(open_file(node / "numastat"), NumaAllocationsParser()) for node in nodes]
        columns = [(signal, "") for signal in _RECLAIM_COLUMNS]
        return columns + [(signal, node.name) for node in nodes for signal in _NUMA_COLUMNS]

    def sample(self) -> Sequence[Value]:
        """Return the events and pages since boot."""
        values = _read_counts(self._vmstat, self._parse, len(_RECLAIM_COLUMNS))
        for file, parse in self._nodes:
            values += _read_counts(file, parse, len(_NUMA_COLUMNS))
        return values

    def close(self) -> None:
        """Close all files."""
        self._vmstat.close()
        for file, _ in self._nodes:
            file.close()


def _read_counts(
    file: OpenFile | MissingFile, parse: Callable[[bytes], Sequence[int | None]], width: int
) -> list[Value]:
    """Return the counts of a file, or in place of each count the reason why it is unknown."""
    try:
        return [_NO_LINE if count is None else count for count in parse(file.read())]
    except Unavailable as reason:
        return [reason] * width
    except ValueError:
        return [_NO_NUMBER] * width


SHM_MOUNT_POINT = "/dev/shm"
_IN_MEMORY = ("tmpfs", "ramfs")
_SHM_REMEDY = "run as the job's user, or in the container of the job"


class ShmCollector:
    """How full shared memory is, through which workers pass batches.

    Columns: `shm.used_bytes` and `shm.size_bytes` of "/dev/shm", as the first process of the job
    sees it: a container has its own, of 64 MiB by default. Only a file system in memory is read;
    one on a disk or a server might not answer.

    ## Source

    `statvfs` of `/proc/<pid>/root/dev/shm`; its type from `/proc/<pid>/mountinfo`.

    ## Privilege

    None for processes of the same user.

    ## Cost

    One call every 2 s, for a file system in memory only.

    ## Where it is blind

    A file system on a disk or a server is not read, because it might not answer. It does
    not show which process filled it.
    """

    name: ClassVar[str] = "shm"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(self, context: Context, statvfs: Callable[[Path], Any] = os.statvfs) -> None:
        self._context = context
        self._statvfs = statvfs
        # cached because a node may have thousands of mounts
        self._known: tuple[str, Path] = ("", Path())

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Return the columns; the path is looked up again at every sample.

        Raises: Unavailable when /dev/shm is not in memory or not readable.
        """
        self._path()
        return [(signals.SHM_USED, SHM_MOUNT_POINT), (signals.SHM_SIZE, SHM_MOUNT_POINT)]

    def sample(self) -> Sequence[Value]:
        """Return used and total bytes.

        Raises: Unavailable when they cannot be read.
        """
        path = self._path()
        try:
            stats = self._statvfs(path)
        except OSError as error:
            raise convert_os_error(error, str(path), _SHM_REMEDY, by_user=True) from None
        size = stats.f_blocks * stats.f_frsize
        if size <= 0:
            raise Unavailable(
                "absent", f"{SHM_MOUNT_POINT} has no limit", ""
            )  # ramfs, tmpfs with size=0
        return [size - stats.f_bfree * stats.f_frsize, size]

    def close(self) -> None:
        """Do nothing: nothing stays open, because that would keep a container's mounts busy."""

    def _path(self) -> Path:
        """Return the path as the job's process sees it; raise Unavailable if not in memory."""
        pids = self._context.job_pids()
        owner = str(pids[0]) if pids else "self"
        if self._known[0] == owner:
            return self._known[1]
        process = self._context.roots.proc / owner
        try:
            mounts = parse_mountinfo(read_file_once(process / "mountinfo"))
        except Unavailable as reason:
            raise explain_invisible_processes(self._context.roots, pids[:1]) or reason from None
        mount = find_mount(mounts, SHM_MOUNT_POINT)
        if mount is None or mount.point != SHM_MOUNT_POINT:
            raise Unavailable("absent", f"nothing is mounted at {SHM_MOUNT_POINT}", "")
        if mount.type not in _IN_MEMORY:
            raise Unavailable(
                "absent", f"{SHM_MOUNT_POINT} is not in memory but on {mount.type}", ""
            )
        self._known = owner, process / "root" / SHM_MOUNT_POINT[1:]
        return self._known[1]
