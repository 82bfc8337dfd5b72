"""How long tasks waited for a CPU, for I/O and for memory, as the scheduler saw it.

Columns: five totals of device "" (the node), and the same of device "cgroup" where the job has a
cgroup of its own with pressure files (version 2). One file that cannot be read is a reason in its
columns; only when none can is the whole collector unavailable.

## Source

`/proc/pressure/{cpu,io,memory}` and the same of the job's cgroup, version 2
(docs.kernel.org/accounting/psi).

## Privilege

None; a kernel with CONFIG_PSI, and `psi=1` where its default is off.

## Cost

Three small files, six where the job has a cgroup of its own; in the kernel PSI costs the scheduler
a little, whether it is read or not.

## Where it is blind

It names no task and no device. Waits that the kernel does not count as I/O are in none of it: for a
socket, a lock, a FUSE server. Cgroups of version 1 have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import ReadsFilesOfJob, Value
from clusterprof.errors import Unavailable
from clusterprof.linux.cgroup import find_cgroup
from clusterprof.linux.held import MissingFile, Parsed
from clusterprof.linux.pressure import Pressure, hold_pressure, parse_pressure
from clusterprof.signals import Signal

_COLUMNS: dict[str, tuple[Signal, ...]] = {
    "cpu": (signals.PRESSURE_CPU_SOME,),
    "io": (signals.PRESSURE_IO_SOME, signals.PRESSURE_IO_FULL),
    "memory": (signals.PRESSURE_MEMORY_SOME, signals.PRESSURE_MEMORY_FULL),
}
_NO_FULL = Unavailable("absent", "this kernel writes no line 'full'", "")


class PressureCollector(ReadsFilesOfJob):
    """Time lost to waiting for CPU, I/O and memory: node and cgroup."""

    name: ClassVar[str] = "pressure"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the pressure files of the node and, where there are any, of the job's cgroup."""
        self.choose_pid()
        self._files: list[tuple[Parsed[Pressure], int]] = []  # file, number of its columns
        columns = []
        missing = []
        for folder, device, suffix in self._folders():
            for resource, wanted in _COLUMNS.items():
                held = hold_pressure(folder, resource + suffix)
                if isinstance(held, MissingFile):
                    missing.append(held)
                self._files.append((Parsed(held, parse_pressure), len(wanted)))
                columns += [(signal, device) for signal in wanted]
        if len(missing) == len(self._files):
            raise missing[0].reason
        self.held = [parsed.held for parsed, _ in self._files]
        return columns

    def parse(self, contents: Sequence[bytes | Unavailable]) -> Sequence[Value]:
        """Return the totals, in ns since boot or since the cgroup was made."""
        values: list[Value] = []
        for (parsed, width), content in zip(self._files, contents, strict=True):
            if isinstance(content, Unavailable):
                values += [content] * width
                continue
            some_ns, full_ns = parsed.meaning(content)
            values.append(some_ns)
            if width == 2:
                values.append(_NO_FULL if full_ns is None else full_ns)
        return values

    def close(self) -> None:
        """Close all pressure files."""
        for parsed, _ in self._files:
            parsed.close()

    def _folders(self) -> list[tuple[Path, str, str]]:
        """Where pressure files lie: folder, device, suffix of the names."""
        folders = [(self._context.roots.proc / "pressure", "", "")]
        try:
            place = find_cgroup(self._context.roots, self._pid, "unified")
        except Unavailable:
            return folders  # the cgroup collector says why
        # The root cgroup is the node over again; version 1 hierarchies have no pressure at all.
        if place.folder != place.root and (place.folder / "cpu.pressure").exists():
            folders.append((place.folder, "cgroup", ".pressure"))
        return folders
