"""What the job's cgroup may use, what it uses, and how long its quota held it back.

Columns: the nine `cgroup.*` signals. CPU numbers are those of the level whose quota is tightest on
the way from the job to the root, memory numbers those of the level whose limit is tightest; where
there is no limit at all, those of the job's own cgroup. Versions 1 and 2, each controller by itself
(a node may mount both).

## Source

`/proc/<pid>/cgroup`, and of the levels above it `cpu.stat`, `cpu.max`, `memory.current`,
`memory.max`, `memory.events`, or their counterparts of version 1
(docs.kernel.org/admin-guide/cgroup-v2, cgroup-v1).

## Privilege

None; the cgroup file system has to be mounted where the recorder runs.

## Cost

Two to five small files, five times a second.

## Where it is blind

In a container with a cgroup namespace of its own the levels above are hidden: a tighter limit there
is not seen, only what it does. The root has no limits. Where a controller is not switched on for
the job's cgroup, nothing is counted for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, ReadsFilesOfJob, Value
from clusterprof.errors import Unavailable
from clusterprof.linux import cgroup
from clusterprof.linux.held import HeldFile, MissingFile, Parsed, hold
from clusterprof.signals import Signal

_NO_QUOTA = Unavailable("absent", "no CPU quota is set", "")
_NO_LIMIT = Unavailable("absent", "no memory limit is set", "")
_NOT_COUNTED = Unavailable("absent", "the kernel does not count it for this cgroup", "")
_NO_HIGH_V1 = Unavailable("absent", "cgroup version 1 has no memory.high", "")
_COLUMNS: tuple[Signal, ...] = (
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


class CgroupCollector(ReadsFilesOfJob):
    """CPU quota, throttling and memory of the job's cgroup."""

    name: ClassVar[str] = "cgroup"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 200_000_000

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the cgroup of the job's first process, else our own, and open its files."""
        pid = self.choose_pid()
        self._cpu = _open_half(_Cpu, self._context, pid)
        self._memory = _open_half(_Memory, self._context, pid)
        if isinstance(self._cpu, Unavailable) and isinstance(self._memory, Unavailable):
            raise self._cpu
        halves = (self._cpu, self._memory)
        self.held = [
            file for half in halves if not isinstance(half, Unavailable) for file in half.held
        ]
        return [(signal, "") for signal in _COLUMNS]

    def parse(self, contents: Sequence[bytes | Unavailable]) -> Sequence[Value]:
        """Return times and events since the cgroup was made; quota, limit and use of now."""
        cpu, memory = self._cpu, self._memory
        of_cpu = 0 if isinstance(cpu, Unavailable) else len(cpu.held)
        return [
            *([cpu] * 5 if isinstance(cpu, Unavailable) else cpu.parse(contents[:of_cpu])),
            *([memory] * 4 if isinstance(memory, Unavailable) else memory.parse(contents[of_cpu:])),
        ]

    def close(self) -> None:
        """Close all files of the cgroup."""
        for half in (self._cpu, self._memory):
            if not isinstance(half, Unavailable):
                half.close()


class _Cpu:
    """The CPU columns of one cgroup."""

    def __init__(self, context: Context, pid: int | None) -> None:
        place = cgroup.find_cgroup(context.roots, pid, "cpu")
        folder, quota = cgroup.tightest_quota(place)
        self._quota: Value = _NO_QUOTA if quota is None else quota
        self._parse = cgroup.CpuStatParser(place.version)
        self.held = [hold(folder / "cpu.stat")]
        if place.version == 1:
            self.held.append(_hold_usage(context, pid, folder.relative_to(place.root)))

    def parse(self, contents: Sequence[bytes | Unavailable]) -> Sequence[Value]:
        stat, *usage = contents
        if isinstance(stat, Unavailable):
            return [stat] * 4 + [self._quota]
        values: list[Value] = [
            _NOT_COUNTED if value is None else value for value in self._parse(stat)
        ]
        if usage:
            values[0] = _number(usage[0])
        return [*values, self._quota]

    def close(self) -> None:
        for file in self.held:
            file.close()


class _Memory:
    """The memory columns of one cgroup."""

    def __init__(self, context: Context, pid: int | None) -> None:
        place = cgroup.find_cgroup(context.roots, pid, "memory")
        folder, limit = cgroup.tightest_memory(place)
        self._limit: Value = _NO_LIMIT if limit is None else limit
        self._no_high = _NO_HIGH_V1 if place.version == 1 else _NOT_COUNTED
        current, events = (
            ("memory.usage_in_bytes", "memory.oom_control")
            if place.version == 1
            else ("memory.current", "memory.events")
        )
        self._events = Parsed(hold(folder / events), cgroup.MemoryEventsParser())
        self.held = [hold(folder / current), self._events.held]

    def parse(self, contents: Sequence[bytes | Unavailable]) -> Sequence[Value]:
        current, events = contents
        values: list[Value] = [_number(current), self._limit]
        if isinstance(events, Unavailable):
            return [*values, events, events]
        high, oom_kills = self._events.meaning(events)
        values.append(self._no_high if high is None else high)
        values.append(_NOT_COUNTED if oom_kills is None else oom_kills)
        return values

    def close(self) -> None:
        for file in self.held:
            file.close()


def _open_half(
    half: type[_Cpu] | type[_Memory], context: Context, pid: int | None
) -> _Cpu | _Memory | Unavailable:
    try:
        return half(context, pid)
    except Unavailable as reason:
        return reason


def _hold_usage(context: Context, pid: int | None, below: Path) -> HeldFile | MissingFile:
    """Open cpuacct.usage at the same level; version 1 may mount cpuacct apart from cpu."""
    try:
        place = cgroup.find_cgroup(context.roots, pid, "cpuacct")
    except Unavailable as reason:
        return MissingFile(reason)
    return hold(place.root / below / "cpuacct.usage")


def _number(content: bytes | Unavailable) -> Value:
    return content if isinstance(content, Unavailable) else int(content)
