"""Facts of the machine and its processes from psutil, where there is no Linux /proc.

That is the case on macOS and BSD and in some sandboxes. psutil is imported by the function that
needs it, so that the recorder on Linux never loads it.

https://psutil.readthedocs.io
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterprof.agent.linux.cpu import list_cpus
from clusterprof.agent.linux.files import Roots, read_text
from clusterprof.agent.linux.processes import read_identity
from clusterprof.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    import psutil

START_TICKS_PER_SECOND = 100
"""Unit of `started_ticks` without /proc: hundredths of a second since 1970, where Linux counts
clock ticks since boot. Both identify a process together with its pid.
"""
_MAX_PROCESSES = 1024
_NS_PER_S = 1_000_000_000


def has_linux_proc(roots: Roots) -> bool:
    """Return whether this is Linux and its /proc has any entry."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        with os.scandir(roots.proc) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def import_psutil() -> Any:
    """Import psutil and return the module.

    Raises: Unavailable when it is not installed or does not support this system.
    """
    try:
        import psutil
    except ImportError as error:
        raise Unavailable("absent", f"psutil: {error}", "pip install psutil", True) from None
    except NotImplementedError:
        raise Unavailable("absent", f"psutil does not support {sys.platform}", "") from None
    return psutil


def convert_psutil_error(error: BaseException, source: str) -> Unavailable:
    """Convert an error of psutil to `Unavailable`.

    source: what was read ("psutil.disk_io_counters").
    """
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, PermissionError) or type(error).__name__ == "AccessDenied":
        return Unavailable(
            "denied", f"{source}: permission denied", "run as the job's user or as root"
        )
    if isinstance(error, AttributeError | NotImplementedError | FileNotFoundError):
        return Unavailable("absent", f"{source}: not available on this system", "")
    return Unavailable("failed", f"{source}: {type(error).__name__}: {error}"[:300], "")


def read_start_ticks(pid: int) -> int | None:
    """Read the start of a process from psutil; None if it does not exist or is hidden.

    Unit: `START_TICKS_PER_SECOND`.
    """
    try:
        started_s: float = import_psutil().Process(pid).create_time()
    except Exception:  # no such process, a zombie on macOS, or no psutil
        return None
    return round(started_s * START_TICKS_PER_SECOND)


def find_start_ticks(roots: Roots, pid: int) -> int | None:
    """Find the start of a process, in the unit that registrations on this machine use."""
    if has_linux_proc(roots):
        identity = read_identity(roots, pid)
        return None if identity is None else identity.started_ticks
    return read_start_ticks(pid)


def read_environ(pid: int) -> dict[str, str]:
    """Read the environment of a process from psutil; {} if it is gone or hidden."""
    try:
        return dict(import_psutil().Process(pid).environ())
    except Exception:  # gone, of another user, or no psutil
        return {}


class PsutilProcessTree:
    """The processes of a job by psutil: the registered ones and all their descendants.

    A process stays in the tree while it lives, even if another process adopts it. The recorder
    itself and its helpers are left out.
    """

    def __init__(self) -> None:
        self._psutil = import_psutil()
        self._known: dict[int, psutil.Process] = {}
        self._parents: dict[int, int] = {}  # of every process of the machine

    def refresh(self, pids: Sequence[int]) -> list[psutil.Process]:
        """Search below `pids` and all known processes; return every process that is alive."""
        self._known = {pid: process for pid, process in self._known.items() if process.is_running()}
        if not pids and not self._known:
            return []
        self._read_parents()
        children: dict[int, list[int]] = {}
        for pid, parent_pid in self._parents.items():
            children.setdefault(parent_pid, []).append(pid)
        queue = [*pids, *self._known]
        searched = {os.getpid()}
        while queue:
            pid = queue.pop()
            if pid not in searched and (pid in self._known or self._add(pid)):
                queue += children.get(pid, ())
            searched.add(pid)
        return list(self._known.values())

    def get_parent(self, pid: int) -> int:
        """Return the parent that a process had when it was first seen, -1 if it was hidden."""
        return self._parents.get(pid, -1)

    def _read_parents(self) -> None:
        """Read the parents of new processes.

        A pid that was reused between two calls keeps the parent of the old process.
        """
        alive = self._psutil.pids()
        self._parents = {pid: self._parents[pid] for pid in alive if pid in self._parents}
        for pid in alive:
            if pid not in self._parents:
                try:
                    self._parents[pid] = self._psutil.Process(pid).ppid()
                except self._psutil.Error:  # it ended, or is hidden
                    continue

    def _add(self, pid: int) -> bool:
        if len(self._known) >= _MAX_PROCESSES:
            return False
        try:
            self._known[pid] = self._psutil.Process(pid)
        except self._psutil.Error:
            return False
        return True


class HostFacts(NamedTuple):
    """Facts of the machine that do not change; a reason where one is not known."""

    platform: str
    """System, release and machine ("Linux 6.18.44 x86_64")."""
    logical_cores: int | Unavailable
    physical_cores: int | Unavailable
    memory_bytes: int | Unavailable
    booted_ns: int | Unavailable
    """Nanoseconds since 1970 (UTC)."""


def read_host_facts(roots: Roots) -> HostFacts:
    """Read the facts from /proc and /sys, and from psutil what these do not give."""
    cpus = list_cpus(roots)
    siblings = {cpu.siblings for cpu in cpus}
    cores = None if "" in siblings else len(siblings)
    return HostFacts(
        _describe_platform(),
        len(cpus) or _ask_psutil("cpu_count", lambda psutil: psutil.cpu_count()),
        cores or _ask_psutil("cpu_count", lambda psutil: psutil.cpu_count(logical=False)),
        _read_memory_bytes(roots)
        or _ask_psutil("virtual_memory", lambda psutil: psutil.virtual_memory().total),
        _read_boot_ns(roots)
        or _ask_psutil("boot_time", lambda psutil: round(psutil.boot_time() * _NS_PER_S)),
    )


def _describe_platform() -> str:
    system = os.uname()
    return f"{system.sysname} {system.release} {system.machine}"


def _read_memory_bytes(roots: Roots) -> int | None:
    for line in read_text(roots.proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _read_boot_ns(roots: Roots) -> int | None:
    for line in read_text(roots.proc / "stat").splitlines():
        if line.startswith("btime "):
            return int(line.split()[1]) * _NS_PER_S
    return None


def _ask_psutil(source: str, read: Callable[[Any], int | None]) -> int | Unavailable:
    try:
        value = read(import_psutil())
    except Exception as error:
        return convert_psutil_error(error, f"psutil.{source}")
    if not value:  # psutil's way to say that it does not know
        return Unavailable("absent", f"psutil.{source}: not known on this system", "")
    return int(value)
