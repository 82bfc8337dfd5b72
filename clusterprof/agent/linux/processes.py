"""/proc/<pid>/task/<tid>/children and /proc/<pid>/stat: the processes of a job.

A job is the registered processes and everything below them. `children` (CONFIG_PROC_CHILDREN)
names the children of one thread, and what else lives on the node costs nothing. Without it
processes of the node are asked for their parent: each that is new, the youngest 2,000 of them in
one search, and where there are many no more than a fiftieth of the time. What was once found in
the tree stays in it while it lives, whoever adopts it.

The kernel gives no news of births, but the last word of /proc/loadavg is the newest process or
thread number: as long as it stands still nothing was born, and nothing has to be searched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from clusterprof.errors import Unavailable
from clusterprof.linux.roots import Roots
from clusterprof.linux.task import Descriptors, TaskFile, hold, parse_stat

_CHILDREN_BYTES, _USUAL_BYTES = 65536, 479  # what Python takes from its own small blocks
_MOST_THREADS_ASKED = 256
_MOST_SCANNED = 2000
_REST_FROM_NS, _REST_TIMES = 5_000_000, 50  # after a search of all the node that took so long


class Identity(NamedTuple):
    """A process for all time: its number and when it started (field 22 of its `stat`)."""

    pid: int
    started_ticks: int


def read_identity(roots: Roots, pid: int) -> Identity | None:
    """Return who has the number `pid` now, or None when nobody or somebody we may not see."""
    data = _read(f"{roots.proc}/{pid}/stat")
    return None if data is None else Identity(pid, parse_stat(data).started_ticks)


class ProcessTree:
    """The processes of a job, searched for when something was born.

    `refresh()` is cheap when nothing was: one read of /proc/loadavg. A search asks the main
    thread of every known process for children; other threads, which rarely fork, are asked at
    a `thorough` one. Whoever reads the processes learns first that one has ended and says
    `forget`; until then it stays known.
    """

    def __init__(self, roots: Roots, descriptors: Descriptors, most: int = 1024) -> None:
        self._proc = str(roots.proc)
        self._descriptors = descriptors
        self._most = most
        self._known: dict[int, TaskFile | None] = {}  # pid -> its main thread's `children`
        self._loadavg = hold(f"{self._proc}/loadavg", descriptors)
        self._newest = b""
        self._self = os.getpid()
        self._has_children_files: bool | None = None
        self._parents: dict[int, int] = {}  # of every process of the node, without such files
        self._scan_due_ns = 0
        self.left_out = 0
        """Processes that were not taken up because the tree already held `most`."""

    def born(self) -> bool:
        """True when a process or thread may have been born since the last call."""
        if self._loadavg is None:
            return True
        try:
            newest = self._loadavg.read(128).rsplit(None, 1)[-1]
        except (OSError, IndexError):
            return True
        changed, self._newest = newest != self._newest, newest
        return changed

    def refresh(self, pids: Sequence[int], thorough: bool = False) -> list[int]:
        """Search below `pids` and below all found before; return every process known."""
        for pid in pids:
            if pid not in self._known:
                self._take_up(pid)
        queue = list(self._known)
        children_of: Callable[[int, bool], Iterable[int]] = self._children
        if self._has_children_files is False:
            by_parent = self._scan_parents(thorough)
            children_of = lambda pid, _: by_parent.get(pid, ())  # noqa: E731
        while queue:
            for child in children_of(queue.pop(), thorough):
                # The recorder and its helpers may hang below the job and are not part of it.
                if child not in self._known and child != self._self and self._take_up(child):
                    queue.append(child)
        return list(self._known)

    def pids(self) -> list[int]:
        """Return the processes found so far, without looking."""
        return list(self._known)

    def forget(self, pid: int) -> None:
        """Drop a process that is known to have ended."""
        held = self._known.pop(pid, None)
        if held is not None:
            held.close()

    def close(self) -> None:
        """Close all descriptors."""
        for pid in list(self._known):
            self.forget(pid)
        if self._loadavg is not None:
            self._loadavg.close()
            self._loadavg = None

    def _take_up(self, pid: int) -> bool:
        if len(self._known) >= self._most:
            self.left_out += 1
            return False
        path = f"{self._proc}/{pid}"
        if not os.path.exists(f"{path}/stat"):
            return False
        held = hold(f"{path}/task/{pid}/children", self._descriptors)
        if self._has_children_files is None:
            self._has_children_files = held is not None
        self._known[pid] = held
        return True

    def _children(self, pid: int, thorough: bool) -> Iterable[int]:
        held = self._known.get(pid)
        found: list[bytes] = []
        if held is not None:
            try:
                children = held.read(_USUAL_BYTES)
                if len(children) >= _USUAL_BYTES:
                    children = held.read(_CHILDREN_BYTES)
            except OSError:
                return ()
            if not children and not thorough:
                return ()
            found += children.split()
        if thorough:
            for tid in self._other_threads(pid):
                found += (_read(f"{self._proc}/{pid}/task/{tid}/children") or b"").split()
        return [int(word) for word in found]

    def _other_threads(self, pid: int) -> list[str]:
        try:
            tids = os.listdir(f"{self._proc}/{pid}/task")
        except OSError:
            return []
        return [tid for tid in tids if tid != str(pid)][:_MOST_THREADS_ASKED]

    def _scan_parents(self, thorough: bool) -> dict[int, list[int]]:
        """Children by parent, of all processes of the node that have been asked.

        A number that was given away again between two searches keeps the parent of the old
        process: that one had ended, and the new one is asked once the number has been away.
        """
        began_ns = time.monotonic_ns()
        if thorough or began_ns >= self._scan_due_ns:
            numbers = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
            self._parents = {pid: up for pid, up in self._parents.items() if pid in numbers}
            new = sorted(numbers - self._parents.keys())
            for pid in new[-_MOST_SCANNED:]:  # the youngest: a job is younger than its node
                data = _read(f"{self._proc}/{pid}/stat")
                if data is not None:
                    self._parents[pid] = parse_stat(data).parent_pid
            took_ns = time.monotonic_ns() - began_ns
            rest_ns = _REST_TIMES * took_ns if took_ns >= _REST_FROM_NS else 0
            self._scan_due_ns = began_ns + took_ns + rest_ns
        by_parent: dict[int, list[int]] = {}
        for pid, parent in self._parents.items():
            by_parent.setdefault(parent, []).append(pid)
        return by_parent


def why_invisible(roots: Roots, pids: Iterable[int]) -> Unavailable | None:
    """Say why none of these processes can be seen; None when they may simply have ended."""
    remedy = "run as the job's user or as root, or mount /proc without hidepid"
    for pid in pids:
        try:
            os.stat(f"{roots.proc}/{pid}/stat")
        except PermissionError:
            return Unavailable("denied", f"{roots.proc}/{pid}: permission denied", remedy)
        except OSError:
            continue
    if _is_hidepid(_read(f"{roots.proc}/self/mounts") or b""):
        return Unavailable("denied", f"{roots.proc}: mounted with hidepid", remedy)
    return None


def _is_hidepid(mounts: bytes) -> bool:
    for line in mounts.splitlines():
        words = line.split()
        if len(words) >= 4 and words[2] == b"proc":
            values = (option[8:] for option in words[3].split(b",") if option[:8] == b"hidepid=")
            if any(value not in (b"0", b"off") for value in values):
                return True
    return False


def _read(path: str) -> bytes | None:
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
