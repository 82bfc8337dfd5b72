"""Where the job's processes may run, and did: affinity, cpuset, NUMA nodes of memory, last CPU.

One row per process and look: the list of CPUs that its affinity and its cpuset leave, the list of
NUMA nodes it may have memory of (`/proc/<pid>/status`), and the CPU its main thread ran on last
(`stat`, field 39). A process is looked at when it is new and every 2 s from then on, at most 64 in
one tick, who waited longest first.

## Source

`/proc/<pid>/status` (Cpus_allowed_list, Mems_allowed_list) and field 39 of `stat`
(docs.kernel.org/filesystems/proc).

## Privilege

None for processes of the same user; others' under hidepid are not seen.

## Cost

Two files of each process every 2 s, at most 64 processes in one tick.

## Where it is blind

What single threads were given (OMP_PROC_BIND and the like) is not looked at; nor is where the
memory lies that a process has, only where it may lie.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from clusterprof.collectors.base import Context
from clusterprof.linux.processes import why_invisible
from clusterprof.linux.status import STATUS_BYTES, parse_allowed
from clusterprof.linux.task import parse_processor, read_unheld
from clusterprof.linux.thread import Strings

COLUMNS = ("t_ns", "pid", "processor", "cpus_allowed", "nodes_allowed")
"""Names of the values of a row, all int64, in their order; -1 = not available."""

_MOST = 64
_EVERY_NS = 2_000_000_000
_NEVER_NS = -_EVERY_NS


class PlacementCollector:
    """Allowed CPUs and NUMA nodes of every process of the job, and the CPU it ran on."""

    name: ClassVar[str] = "placement"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 500_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._context = context
        self._clock = clock

    def open(self) -> Sequence[str]:
        """Start without any process; whose they are is known from the collector `threads`."""
        self._cpus, self._nodes = Strings(), Strings()
        self._looked_ns: dict[int, int] = {}
        self._due_ns = _NEVER_NS
        return COLUMNS

    def sample(self) -> Sequence[tuple[int, ...]]:
        """Return the rows of this tick; raises Unavailable (denied) when /proc hides the job."""
        now_ns = self._clock()
        known = {*self._context.readings.pids(), *self._context.job_pids()}
        if now_ns < self._due_ns and known == self._looked_ns.keys():
            return []
        self._looked_ns = {pid: self._looked_ns.get(pid, _NEVER_NS) for pid in sorted(known)}
        due = [pid for pid, looked_ns in self._looked_ns.items() if now_ns - looked_ns >= _EVERY_NS]
        turn = sorted(due, key=self._looked_ns.__getitem__)[:_MOST]
        rows = [row for pid in turn if (row := self._row(now_ns, pid)) is not None]
        if turn and not rows:
            invisible = why_invisible(self._context.roots, turn)
            if invisible is not None:
                raise invisible
        self._looked_ns |= dict.fromkeys(turn, now_ns)
        self._due_ns = min(self._looked_ns.values(), default=_NEVER_NS) + _EVERY_NS
        return rows

    def strings(self) -> dict[str, Sequence[str]]:
        """Return the lists that the columns `cpus_allowed` and `nodes_allowed` point to."""
        return {"cpus_allowed": self._cpus.all, "nodes_allowed": self._nodes.all}

    def close(self) -> None:
        """Do nothing: no file is held."""

    def _row(self, now_ns: int, pid: int) -> tuple[int, ...] | None:
        folder = f"{self._context.roots.proc}/{pid}"
        try:
            cpus, nodes = parse_allowed(read_unheld(f"{folder}/status", STATUS_BYTES))
            stat = self._context.readings.take(pid, now_ns)
            processor = parse_processor(stat or read_unheld(f"{folder}/task/{pid}/stat"))
        except (OSError, ValueError, IndexError):
            return None  # it has ended, or is hidden
        return (now_ns, pid, processor, _index(self._cpus, cpus), _index(self._nodes, nodes))


def _index(strings: Strings, word: str) -> int:
    return strings.index(word) if word else -1
