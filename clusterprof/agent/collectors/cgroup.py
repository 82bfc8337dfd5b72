"""Limits and use of the job's cgroup, and how long its CPU quota throttled it.

How long tasks waited for a CPU, for I/O and for memory, as the scheduler counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, JobFileCollector, Value
from clusterprof.agent.linux import cgroup
from clusterprof.agent.linux.cgroup import Pressure, find_cgroup, open_pressure_file, parse_pressure
from clusterprof.agent.linux.files import MissingFile, OpenFile, ParsedFile, open_file
from clusterprof.errors import Unavailable
from clusterprof.signals import Signal

_NO_QUOTA = Unavailable("absent", "no CPU quota is set", "")
_NO_LIMIT = Unavailable("absent", "no memory limit is set", "")
_NOT_COUNTED = Unavailable("absent", "the kernel does not count it for this cgroup", "")
_NO_HIGH_V1 = Unavailable("absent", "cgroup version 1 has no memory.high", "")
_CGROUP_COLUMNS: tuple[Signal, ...] = (
    signals.CGROUP_CPU,
    signals.CGROUP_PERIODS,
    signals.CGROUP_THROTTLED_PERIODS,
    signals.CGROUP_THROTTLED,
    signals.CGROUP_QUOTA,
    signals.CGROUP_MEMORY,
    signals.CGROUP_MEMORY_LIMIT,
    signals.CGROUP_MEMORY_HIGH,
    signals.CGROUP_OOM_KILLS,
)


class CgroupCollector(JobFileCollector):
    """Limits and use of the job's cgroup, and how long its CPU quota throttled it.

    Columns: the nine `cgroup.*` signals. CPU values are those of the level with the
    tightest quota on the path from the job to the root, memory values those of the level
    with the tightest limit; without any limit, those of the job's own cgroup. Versions 1
    and 2 are supported for each controller separately (a node may mount both).

    ## Source

    `/proc/<pid>/cgroup`, and of the levels above it `cpu.stat`, `cpu.max`,
    `memory.current`, `memory.max`, `memory.events`, or their counterparts of version 1
    (docs.kernel.org/admin-guide/cgroup-v2, cgroup-v1).

    ## Privilege

    None; the cgroup file system must be mounted where the recorder runs.

    ## Cost

    Two to five small files, five times a second.

    ## Where it is blind

    In a container with its own cgroup namespace the levels above are hidden: a tighter
    limit there is invisible, only its effect shows. The root has no limits. Where a
    controller is not enabled for the job's cgroup, nothing is counted for it.
    """

    name: ClassVar[str] = "cgroup"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 200_000_000

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the cgroup of the job's first process, or else our own, and open its files.

        Raises: Unavailable when neither the CPU nor the memory controller can be read.
        """
        pid = self.choose_pid()
        self._cpu = _open_controller(_Cpu, self._context, pid)
        self._memory = _open_controller(_Memory, self._context, pid)
        if isinstance(self._cpu, Unavailable) and isinstance(self._memory, Unavailable):
            raise self._cpu
        controllers = (self._cpu, self._memory)
        self.open_files = [
            file
            for controller in controllers
            if not isinstance(controller, Unavailable)
            for file in controller.open_files
        ]
        return [(signal, "") for signal in _CGROUP_COLUMNS]

    def parse(self, contents: Sequence[bytes | Unavailable]) -> Sequence[Value]:
        """Return times and events since the cgroup was created; current quota, limit and use."""
        cpu, memory = self._cpu, self._memory
        of_cpu = 0 if isinstance(cpu, Unavailable) else len(cpu.open_files)
        return [
            *([cpu] * 5 if isinstance(cpu, Unavailable) else cpu.parse(contents[:of_cpu])),
            *([memory] * 4 if isinstance(memory, Unavailable) else memory.parse(contents[of_cpu:])),
        ]

    def close(self) -> None:
        """Close all files of the cgroup."""
        for controller in (self._cpu, self._memory):
            if not isinstance(controller, Unavailable):
                controller.close()


class _Cpu:
    """The CPU columns of one cgroup."""

    def __init__(self, context: Context, pid: int | None) -> None:
        cgroup_folder = cgroup.find_cgroup(context.roots, pid, "cpu")
        folder, quota = cgroup.find_tightest_quota(cgroup_folder)
        self._quota: Value = _NO_QUOTA if quota is None else quota
        self._parse = cgroup.CpuStatParser(cgroup_folder.version)
        self.open_files = [open_file(folder / "cpu.stat")]
        if cgroup_folder.version == 1:
            self.open_files.append(
                _open_cpu_usage(context, pid, folder.relative_to(cgroup_folder.root))
            )

    def parse(self, contents: Sequence[bytes | Unavailable]) -> Sequence[Value]:
        stat, *usage = contents
        if isinstance(stat, Unavailable):
            return [stat] * 4 + [self._quota]
        values: list[Value] = [
            _NOT_COUNTED if value is None else value for value in self._parse(stat)
        ]
        if usage:
            values[0] = _parse_number(usage[0])
        return [*values, self._quota]

    def close(self) -> None:
        for file in self.open_files:
            file.close()


class _Memory:
    """The memory columns of one cgroup."""

    def __init__(self, context: Context, pid: int | None) -> None:
        cgroup_folder = cgroup.find_cgroup(context.roots, pid, "memory")
        folder, limit = cgroup.find_tightest_memory_limit(cgroup_folder)
        self._limit: Value = _NO_LIMIT if limit is None else limit
        self._no_high = _NO_HIGH_V1 if cgroup_folder.version == 1 else _NOT_COUNTED
        current, events = (
            ("memory.usage_in_bytes", "memory.oom_control")
            if cgroup_folder.version == 1
            else ("memory.current", "memory.events")
        )
        self._events = ParsedFile(open_file(folder / events), cgroup.MemoryEventsParser())
        self.open_files = [open_file(folder / current), self._events.file]

    def parse(self, contents: Sequence[bytes | Unavailable]) -> Sequence[Value]:
        current, events = contents
        values: list[Value] = [_parse_number(current), self._limit]
        if isinstance(events, Unavailable):
            return [*values, events, events]
        high, oom_kills = self._events.parse(events)
        values.append(self._no_high if high is None else high)
        values.append(_NOT_COUNTED if oom_kills is None else oom_kills)
        return values

    def close(self) -> None:
        for file in self.open_files:
            file.close()


def _open_controller(
    controller: type[_Cpu] | type[_Memory], context: Context, pid: int | None
) -> _Cpu | _Memory | Unavailable:
    try:
        return controller(context, pid)
    except Unavailable as reason:
        return reason


def _open_cpu_usage(
    context: Context, pid: int | None, relative_folder: Path
) -> OpenFile | MissingFile:
    """Open cpuacct.usage of the same level; version 1 may mount cpuacct separately from cpu."""
    try:
        cgroup_folder = cgroup.find_cgroup(context.roots, pid, "cpuacct")
    except Unavailable as reason:
        return MissingFile(reason)
    return open_file(cgroup_folder.root / relative_folder / "cpuacct.usage")


def _parse_number(content: bytes | Unavailable) -> Value:
    return content if isinstance(content, Unavailable) else int(content)


_PRESSURE_COLUMNS: dict[str, tuple[Signal, ...]] = {
    "cpu": (signals.PRESSURE_CPU_SOME,),
    "io": (signals.PRESSURE_IO_SOME, signals.PRESSURE_IO_FULL),
    "memory": (signals.PRESSURE_MEMORY_SOME, signals.PRESSURE_MEMORY_FULL),
}
_NO_FULL_LINE = Unavailable("absent", "this kernel writes no line 'full'", "")


class PressureCollector(JobFileCollector):
    """How long tasks waited for a CPU, for I/O and for memory, as the scheduler counts it.

    Columns: five totals of device "" (the node), and the five of device "cgroup" where the
    job has a cgroup of its own with pressure files (version 2). A file that cannot be read
    is a reason in its columns; the collector is unavailable only when no file can be read.

    ## Source

    `/proc/pressure/{cpu,io,memory}` and the counterparts of the job's cgroup, version 2
    (docs.kernel.org/accounting/psi).

    ## Privilege

    None; it needs a kernel with CONFIG_PSI, and `psi=1` where PSI is off by default.

    ## Cost

    Three small files, six where the job has a cgroup of its own; PSI costs the kernel's
    scheduler a little, whether it is read or not.

    ## Where it is blind

    It names no task and no device. It excludes waits that the kernel does not count as I/O:
    for a socket, a lock, a FUSE server. Cgroups of version 1 have no pressure files.
    """

    name: ClassVar[str] = "pressure"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the pressure files of the node and, where they exist, of the job's cgroup.

        Raises: Unavailable when none can be read.
        """
        self.choose_pid()
        self._files: list[tuple[ParsedFile[Pressure], int]] = []  # file, number of its columns
        columns = []
        missing = []
        for folder, device, suffix in self._folders():
            for resource, wanted in _PRESSURE_COLUMNS.items():
                file = open_pressure_file(folder, resource + suffix)
                if isinstance(file, MissingFile):
                    missing.append(file)
                self._files.append((ParsedFile(file, parse_pressure), len(wanted)))
                columns += [(signal, device) for signal in wanted]
        if len(missing) == len(self._files):
            raise missing[0].reason
        self.open_files = [parsed.file for parsed, _ in self._files]
        return columns

    def parse(self, contents: Sequence[bytes | Unavailable]) -> Sequence[Value]:
        """Return the totals, in ns since boot or since the cgroup was created."""
        values: list[Value] = []
        for (parsed, width), content in zip(self._files, contents, strict=True):
            if isinstance(content, Unavailable):
                values += [content] * width
                continue
            some_ns, full_ns = parsed.parse(content)
            values.append(some_ns)
            if width == 2:
                values.append(_NO_FULL_LINE if full_ns is None else full_ns)
        return values

    def close(self) -> None:
        """Close all pressure files."""
        for parsed, _ in self._files:
            parsed.close()

    def _folders(self) -> list[tuple[Path, str, str]]:
        """Return the folders of pressure files: folder, device, suffix of the file names."""
        folders = [(self._context.roots.proc / "pressure", "", "")]
        try:
            cgroup_folder = find_cgroup(self._context.roots, self._pid, "unified")
        except Unavailable:
            return folders  # the collector `cgroup` reports the reason
        # The root cgroup equals the node; version 1 hierarchies have no pressure files.
        if (
            cgroup_folder.folder != cgroup_folder.root
            and (cgroup_folder.folder / "cpu.pressure").exists()
        ):
            folders.append((cgroup_folder.folder, "cgroup", ".pressure"))
        return folders
