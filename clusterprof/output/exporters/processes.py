"""Whose spans these are: learnt while the recording of a node passes by."""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.exporters.base import RunNode, RunRank
from clusterprof.probe import layout
from clusterprof.timeline.identity import place_of
from clusterprof.trace.schema import Event, Record, Rows, Spans


@dataclass(frozen=True, slots=True)
class Person:
    """One process with spans."""

    pid: int
    started_ticks: int
    role: str
    """rank, worker (of a rank's dataloader), or other."""
    rank: RunRank | None
    """The rank it is, or works for; None when it is not known."""
    number: int
    """Of a worker, from 0; -1 unknown."""
    global_rank: int | None
    """Also of a process that the analysis took for no rank."""


class Who:
    """Who the processes of one node are."""

    def __init__(self, node: RunNode) -> None:
        self._ranks = {(one.pid, one.started_ticks): one for one in node.ranks}
        self._by_pid = {one.pid: one for one in node.ranks}
        self._workers: dict[int, tuple[int, int]] = {}
        self._parents: dict[int, int] = {}
        self._numbers: dict[int, int | None] = {}
        self._known: dict[tuple[int, int], Person] = {}

    def see(self, record: Record) -> None:
        """Learn from one record what it says of who is who."""
        if isinstance(record, Event):
            pid = record.attributes.get("pid")
            if record.kind == "process-registered" and isinstance(pid, int):
                self._numbers[pid] = place_of(record.attributes).rank
        elif isinstance(record, Rows) and record.table == "processes":
            names = list(record.names)
            if "pid" in names and "parent_pid" in names:
                pids = record.columns[names.index("pid")]
                parents = record.columns[names.index("parent_pid")]
                self._parents.update(zip(pids[:].tolist(), parents[:].tolist()))
        elif isinstance(record, Spans):
            self._see_workers(record)

    def _see_workers(self, spans: Spans) -> None:
        started = spans.columns["kind"] == layout.WORKER_START
        if started.any():
            row = int(started.nonzero()[0][-1])
            number, owner = (int(spans.columns[name][row]) for name in ("a", "c"))
            self._workers[spans.pid] = number, owner
            self._known.pop((spans.pid, spans.started_ticks), None)

    def of(self, pid: int, started_ticks: int) -> Person:
        """Return who a process is, as far as it is known by now."""
        key = pid, started_ticks
        found = self._known.get(key)
        if found is None:
            found = self._told(pid, started_ticks)
            if found.role != "other":  # of that one more may yet be told
                self._known[key] = found
        return found

    def _told(self, pid: int, started_ticks: int) -> Person:
        rank = self._rank(pid, started_ticks)
        if rank is not None:
            return Person(pid, started_ticks, "rank", rank, -1, rank.rank)
        number, owner = self._workers.get(pid, (-1, self._parents.get(pid, -1)))
        above = self._by_pid.get(owner)
        if above is not None:
            return Person(pid, started_ticks, "worker", above, number, above.rank)
        return Person(pid, started_ticks, "other", None, -1, self._numbers.get(pid))

    def _rank(self, pid: int, started_ticks: int) -> RunRank | None:
        found = self._ranks.get((pid, started_ticks))
        if found is not None:
            return found
        same = self._by_pid.get(pid)  # without spans the analysis may not know when it began
        return same if same is not None and same.started_ticks < 0 else None
