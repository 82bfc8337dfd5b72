"""The kernel's own threads: children of kthreadd, process 2 of the machine.

https://docs.kernel.org/core-api/workqueue.html, https://docs.kernel.org/mm/physical_memory.html

    /proc/2/comm               kthreadd
    /proc/2/task/2/children    3 4 5 6 …
    /proc/14/comm              ksoftirqd/0
    /proc/14/schedstat         81234567 4711 99      ns on a CPU, ns waiting for one, turns

A container with process numbers of its own, and a /proc mounted with hidepid, shows none of them.
"""

from __future__ import annotations

from clusterprof.errors import Unavailable
from clusterprof.linux.processes import why_invisible
from clusterprof.linux.roots import Roots
from clusterprof.linux.task import Descriptors, TaskFile, read_unheld

FAMILIES = {
    "kswapd": "kswapd",
    "kcompactd": "kcompactd",
    "khugepaged": "khugepaged",
    "ksoftirqd": "ksoftirqd",
    "kworker": "kworker",
    "irq": "irq",
    "ptlrpcd": "ptlrpcd",
}
"""What is looked for: frees memory, makes huge pages (two), takes packets in, does deferred work
(write-back, NFS, decryption), handles interrupts, sends Lustre's requests."""
THREADS_AT_MOST = 1024
_CHILDREN_BYTES = 65536
_KTHREADD = 2
_HIDDEN = Unavailable(
    "absent", "the kernel's own threads are not visible here, as in most containers", ""
)


def kernel_threads(roots: Roots) -> list[int]:
    """Return the numbers of the kernel's threads, oldest first; raises Unavailable."""
    folder = f"{roots.proc}/{_KTHREADD}"
    try:
        name = read_unheld(f"{folder}/comm")
        numbers = read_unheld(f"{folder}/task/{_KTHREADD}/children", _CHILDREN_BYTES).split()
        found = [int(word) for word in numbers]
    except (OSError, ValueError):
        raise why_invisible(roots, [_KTHREADD]) or _HIDDEN.with_traceback(None) from None
    if name.strip() != b"kthreadd":
        raise _HIDDEN.with_traceback(None)
    return found


def family_of(roots: Roots, pid: int) -> str:
    """Return to which family a thread belongs, "" = to none that is looked for."""
    try:
        name = read_unheld(f"{roots.proc}/{pid}/comm").decode("ascii", "replace").strip()
    except OSError:
        return ""
    stem = name.partition("/")[0].rstrip("0123456789_")  # kswapd0, irq/24-nvme, ptlrpcd_00_01
    return FAMILIES.get(stem, "")


class Clocks:
    """CPU time of families of threads, summed up as it grows; threads come and go."""

    def __init__(self, roots: Roots, descriptors: Descriptors) -> None:
        self._roots = roots
        self._descriptors = descriptors
        self._families: dict[int, str] = {}  # of every thread seen, "" among them
        self._files: dict[int, TaskFile] = {}
        self._last_ns: dict[int, int] = {}
        self.total_ns: dict[str, int] = {}
        """By family, since its first thread was seen."""

    def search(self) -> None:
        """Look for new threads; raises Unavailable when none can be seen."""
        alive = kernel_threads(self._roots)
        known = dict.fromkeys(alive)
        self._families = {pid: name for pid, name in self._families.items() if pid in known}
        for pid in alive:
            if pid in self._families:
                continue
            family = self._families[pid] = family_of(self._roots, pid)
            if not family or len(self._files) >= THREADS_AT_MOST:
                continue
            try:
                path = f"{self._roots.proc}/{pid}/schedstat"
                self._files[pid] = TaskFile(path, self._descriptors)
            except OSError:
                continue
            self.total_ns.setdefault(family, 0)

    def read(self) -> None:
        """Add what every thread has run since it was last read."""
        for pid, file in list(self._files.items()):
            try:
                on_cpu_ns = int(file.read(128).split(None, 1)[0])
            except (OSError, ValueError, IndexError):  # it has ended
                self._files.pop(pid).close()
                self._last_ns.pop(pid, None)
                self._families.pop(pid, None)
                continue
            # What it ran before it was seen is not of this recording.
            growth = on_cpu_ns - self._last_ns.get(pid, on_cpu_ns)
            self.total_ns[self._families[pid]] += max(0, growth)
            self._last_ns[pid] = on_cpu_ns

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
