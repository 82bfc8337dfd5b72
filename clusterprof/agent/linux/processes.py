"""/proc/<pid>/task/<tid>/children and /proc/<pid>/stat: the processes of a job.

A job is the registered processes and all their descendants. `children` (CONFIG_PROC_CHILDREN) lists
the children of one thread, so other processes of the node cost nothing. Without it the parent of
each new process of the node is read: at most the youngest 2,000 in one scan, and on a busy node no
more than a fiftieth of the time. A process found in the tree stays in it while it lives, even if
another process adopts it.

The kernel does not announce new processes, but the last word of /proc/loadavg is the newest process
or thread number: while it is unchanged no task was created and no search is needed.

/proc/<pid>/status: the CPUs and NUMA nodes that a process may use.

https://docs.kernel.org/filesystems/proc.html (table 1-2),
https://docs.kernel.org/admin-guide/cgroup-v1/cpusets.html

    Cpus_allowed:        00000000,00000008
    Cpus_allowed_list:   3
    Mems_allowed_list:   0-1

`Cpus_allowed_list` is the intersection of the process's affinity and its cpuset; it may name
offline CPUs. It applies to the main thread: another thread may have a set of its own.

The kernel's own threads: children of kthreadd, process 2 of the machine.

https://docs.kernel.org/core-api/workqueue.html, https://docs.kernel.org/mm/physical_memory.html

    /proc/2/comm               kthreadd
    /proc/2/task/2/children    3 4 5 6 …
    /proc/14/comm              ksoftirqd/0
    /proc/14/schedstat         81234567 4711 99      ns on a CPU, ns waiting for one, turns

They are invisible in a container with its own PID namespace and where /proc is mounted with
hidepid.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.threads import (
    DescriptorBudget,
    TaskFile,
    open_task_file,
    parse_stat,
    read_file_start,
)
from clusterprof.errors import Unavailable

_CHILDREN_BYTES, _USUAL_BYTES = 65536, 479  # the second fits Python's own small-block allocator
_MAX_THREADS = 256
_MAX_SCANNED = 2000
# pause after a scan of the whole node that took this long
_LONG_SCAN_NS, _SCAN_REST_FACTOR = 5_000_000, 50


class ProcessIdentity(NamedTuple):
    """A unique process identity: its pid and its start time (field 22 of its `stat`)."""

    pid: int
    started_ticks: int


def read_identity(roots: Roots, pid: int) -> ProcessIdentity | None:
    """Read the identity of the process with this pid; None if it is missing or invisible."""
    data = _read_process_file(f"{roots.proc}/{pid}/stat")
    return None if data is None else ProcessIdentity(pid, parse_stat(data).started_ticks)


class ProcessTree:
    """The processes of a job, searched again when a task was created.

    `refresh()` without a new task costs one read of /proc/loadavg. A search reads the children of
    every known process's main thread; other threads, which rarely fork, are read only if
    `thorough`. The caller learns first that a process has ended and calls `forget`; until then it
    stays known.
    """

    def __init__(
        self, roots: Roots, descriptors: DescriptorBudget, max_processes: int = 1024
    ) -> None:
        self._proc = str(roots.proc)
        self._descriptors = descriptors
        self._most = max_processes
        self._known: dict[int, TaskFile | None] = {}  # pid -> its main thread's `children`
        self._loadavg = open_task_file(f"{self._proc}/loadavg", descriptors)
        self._newest = b""
        self._self = os.getpid()
        self._has_children_files: bool | None = None
        # of every process of the node, where there are no such files
        self._parents: dict[int, int] = {}
        self._scan_due_ns = 0
        self.omitted_count = 0
        """Number of processes that were omitted because the tree already held its maximum."""

    def has_new_tasks(self) -> bool:
        """Return whether a process or thread may have been created since the last call."""
        if self._loadavg is None:
            return True
        try:
            newest = self._loadavg.read(128).rsplit(None, 1)[-1]
        except (OSError, IndexError):
            return True
        changed, self._newest = newest != self._newest, newest
        return changed

    def refresh(self, pids: Sequence[int], thorough: bool = False) -> list[int]:
        """Search below `pids` and all known processes; return every known process."""
        for pid in pids:
            if pid not in self._known:
                self._add(pid)
        queue = list(self._known)
        children_of: Callable[[int, bool], Iterable[int]] = self._children
        if self._has_children_files is False:
            by_parent = self._scan_parents(thorough)
            children_of = lambda pid, _: by_parent.get(pid, ())  # noqa: E731
        while queue:
            for child in children_of(queue.pop(), thorough):
                # The recorder and its helpers may be descendants of the job but are not part of it.
                if child not in self._known and child != self._self and self._add(child):
                    queue.append(child)
        return list(self._known)

    def pids(self) -> list[int]:
        """Return the known processes without searching."""
        return list(self._known)

    def forget(self, pid: int) -> None:
        """Remove a process that has ended."""
        file = self._known.pop(pid, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close all descriptors."""
        for pid in list(self._known):
            self.forget(pid)
        if self._loadavg is not None:
            self._loadavg.close()
            self._loadavg = None

    def _add(self, pid: int) -> bool:
        if len(self._known) >= self._most:
            self.omitted_count += 1
            return False
        path = f"{self._proc}/{pid}"
        if not os.path.exists(f"{path}/stat"):
            return False
        file = open_task_file(f"{path}/task/{pid}/children", self._descriptors)
        if self._has_children_files is None:
            self._has_children_files = file is not None
        self._known[pid] = file
        return True

    def _children(self, pid: int, thorough: bool) -> Iterable[int]:
        file = self._known.get(pid)
        words: list[bytes] = []
        if file is not None:
            try:
                children = file.read(_USUAL_BYTES)
                if len(children) >= _USUAL_BYTES:
                    children = file.read(_CHILDREN_BYTES)
            except OSError:
                return ()
            if not children and not thorough:
                return ()
            words += children.split()
        if thorough:
            for tid in self._other_threads(pid):
                words += (
                    _read_process_file(f"{self._proc}/{pid}/task/{tid}/children") or b""
                ).split()
        return [int(word) for word in words]

    def _other_threads(self, pid: int) -> list[str]:
        try:
            tids = os.listdir(f"{self._proc}/{pid}/task")
        except OSError:
            return []
        return [tid for tid in tids if tid != str(pid)][:_MAX_THREADS]

    def _scan_parents(self, thorough: bool) -> dict[int, list[int]]:
        """Return the children by parent, for all processes of the node read so far.

        A pid that was reused between two scans keeps the parent of the old process until a scan has
        seen it missing.
        """
        began_ns = time.monotonic_ns()
        if thorough or began_ns >= self._scan_due_ns:
            numbers = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
            self._parents = {pid: up for pid, up in self._parents.items() if pid in numbers}
            new_pids = sorted(numbers - self._parents.keys())
            for pid in new_pids[-_MAX_SCANNED:]:  # the youngest: a job is younger than its node
                data = _read_process_file(f"{self._proc}/{pid}/stat")
                if data is not None:
                    self._parents[pid] = parse_stat(data).parent_pid
            took_ns = time.monotonic_ns() - began_ns
            rest_ns = _SCAN_REST_FACTOR * took_ns if took_ns >= _LONG_SCAN_NS else 0
            self._scan_due_ns = began_ns + took_ns + rest_ns
        by_parent: dict[int, list[int]] = {}
        for pid, parent in self._parents.items():
            by_parent.setdefault(parent, []).append(pid)
        return by_parent


def explain_invisible_processes(roots: Roots, pids: Iterable[int]) -> Unavailable | None:
    """Explain why none of these processes can be seen; None when they may simply have ended."""
    remedy = "run as the job's user or as root, or mount /proc without hidepid"
    for pid in pids:
        try:
            os.stat(f"{roots.proc}/{pid}/stat")
        except PermissionError:
            return Unavailable("denied", f"{roots.proc}/{pid}: permission denied", remedy)
        except OSError:
            continue
    if _has_hidepid_mount(_read_process_file(f"{roots.proc}/self/mounts") or b""):
        return Unavailable("denied", f"{roots.proc}: mounted with hidepid", remedy)
    return None


def _has_hidepid_mount(mounts: bytes) -> bool:
    for line in mounts.splitlines():
        words = line.split()
        if len(words) >= 4 and words[2] == b"proc":
            values = (option[8:] for option in words[3].split(b",") if option[:8] == b"hidepid=")
            if any(value not in (b"0", b"off") for value in values):
                return True
    return False


def _read_process_file(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, _CHILDREN_BYTES)
    except OSError:
        return None
    finally:
        os.close(fd)


STATUS_BYTES = 32768  # the masks of 8,192 CPUs and 1,024 nodes are 2.6 KB
_CPUS, _NODES = b"\nCpus_allowed_list:", b"\nMems_allowed_list:"


def parse_allowed(data: bytes) -> tuple[str, str]:
    """Parse the lists of allowed CPUs and NUMA nodes; "" for a missing list."""
    return _find_value(data, _CPUS), _find_value(data, _NODES)


def _find_value(data: bytes, word: bytes) -> str:
    offset = data.find(word)
    if offset < 0:
        return ""
    offset += len(word)
    stop = data.find(b"\n", offset)
    return data[offset : stop if stop >= 0 else len(data)].strip().decode("ascii", "replace")


FAMILIES = {
    "kswapd": "kswapd",
    "kcompactd": "kcompactd",
    "khugepaged": "khugepaged",
    "ksoftirqd": "ksoftirqd",
    "kworker": "kworker",
    "irq": "irq",
    "ptlrpcd": "ptlrpcd",
}
"""Families by thread name: memory reclaim, compaction and huge pages (two), packet receive,
deferred work (write-back, NFS, decryption), interrupts, Lustre requests.
"""
MAX_KERNEL_THREADS = 1024
_KTHREADD_CHILDREN_BYTES = 65536
_KTHREADD = 2
_KERNEL_THREADS_HIDDEN = Unavailable(
    "absent", "the kernel's own threads are not visible here, as in most containers", ""
)


def list_kernel_threads(roots: Roots) -> list[int]:
    """Return the pids of the kernel's threads, oldest first.

    Raises: Unavailable when they are not visible here.
    """
    folder = f"{roots.proc}/{_KTHREADD}"
    try:
        name = read_file_start(f"{folder}/comm")
        numbers = read_file_start(
            f"{folder}/task/{_KTHREADD}/children", _KTHREADD_CHILDREN_BYTES
        ).split()
        pids = [int(word) for word in numbers]
    except (OSError, ValueError):
        raise explain_invisible_processes(
            roots, [_KTHREADD]
        ) or _KERNEL_THREADS_HIDDEN.with_traceback(None) from None
    if name.strip() != b"kthreadd":
        raise _KERNEL_THREADS_HIDDEN.with_traceback(None)
    return pids


def read_thread_family(roots: Roots, pid: int) -> str:
    """Read a thread's name and return its family; "" = none of the observed families."""
    try:
        name = read_file_start(f"{roots.proc}/{pid}/comm").decode("ascii", "replace").strip()
    except OSError:
        return ""
    stem = name.partition("/")[0].rstrip("0123456789_")  # kswapd0, irq/24-nvme, ptlrpcd_00_01
    return FAMILIES.get(stem, "")


class KernelThreadTimes:
    """Accumulated CPU time of families of kernel threads, which may start and end at any time."""

    def __init__(self, roots: Roots, descriptors: DescriptorBudget) -> None:
        self._roots = roots
        self._descriptors = descriptors
        self._families: dict[int, str] = {}  # of every thread seen, "" among them
        self._files: dict[int, TaskFile] = {}
        self._last_ns: dict[int, int] = {}
        self.total_ns: dict[str, int] = {}
        """By family, since its first thread was seen."""

    def search(self) -> None:
        """Search for new threads.

        Raises: Unavailable when no kernel thread is visible.
        """
        alive = list_kernel_threads(self._roots)
        alive_pids = dict.fromkeys(alive)
        self._families = {pid: name for pid, name in self._families.items() if pid in alive_pids}
        for pid in alive:
            if pid in self._families:
                continue
            family = self._families[pid] = read_thread_family(self._roots, pid)
            if not family or len(self._files) >= MAX_KERNEL_THREADS:
                continue
            try:
                path = f"{self._roots.proc}/{pid}/schedstat"
                self._files[pid] = TaskFile(path, self._descriptors)
            except OSError:
                continue
            self.total_ns.setdefault(family, 0)

    def read(self) -> None:
        """Add the CPU time of every thread since its last reading."""
        for pid, file in list(self._files.items()):
            try:
                on_cpu_ns = int(file.read(128).split(None, 1)[0])
            except (OSError, ValueError, IndexError):  # the thread has ended
                self._files.pop(pid).close()
                self._last_ns.pop(pid, None)
                self._families.pop(pid, None)
                continue
            # Time before its first reading is not part of this recording.
            growth = on_cpu_ns - self._last_ns.get(pid, on_cpu_ns)
            self.total_ns[self._families[pid]] += max(0, growth)
            self._last_ns[pid] = on_cpu_ns

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
