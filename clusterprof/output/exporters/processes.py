"""Identify the processes of spans while a node's recording is read.

It also names spans and their four values for export (see probe.layout).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clusterprof.analysis.timeline.collectives.operations import OPERATION_NAMES
from clusterprof.analysis.timeline.load.ranks import parse_job_position
from clusterprof.output.exporters.base import RunNode, RunRank
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.probe import layout
from clusterprof.trace.schema import Event, Record, Rows, Spans


@dataclass(frozen=True, slots=True)
class SpanProcess:
    """One process with spans."""

    pid: int
    started_ticks: int
    role: str
    """rank, worker (of a rank's dataloader), or other."""
    rank: RunRank | None
    """The rank it is or works for; None when it is not known."""
    worker_number: int
    """Number of a worker, from 0; -1 unknown."""
    global_rank: int | None
    """Global rank, also of a process that the analysis does not list as a rank."""


class ProcessDirectory:
    """Identities of the processes of one node."""

    def __init__(self, node: RunNode) -> None:
        self._ranks = {(rank.pid, rank.started_ticks): rank for rank in node.ranks}
        self._by_pid = {rank.pid: rank for rank in node.ranks}
        self._workers: dict[int, tuple[int, int]] = {}
        self._parents: dict[int, int] = {}
        self._numbers: dict[int, int | None] = {}
        self._known: dict[tuple[int, int], SpanProcess] = {}

    def update(self, record: Record) -> None:
        """Update the identities from one record."""
        if isinstance(record, Event):
            pid = record.attributes.get("pid")
            if record.kind == "process-registered" and isinstance(pid, int):
                self._numbers[pid] = parse_job_position(record.attributes).rank
        elif isinstance(record, Rows) and record.table == "processes":
            names = list(record.names)
            if "pid" in names and "parent_pid" in names:
                pids = record.columns[names.index("pid")]
                parents = record.columns[names.index("parent_pid")]
                self._parents.update(zip(pids[:].tolist(), parents[:].tolist()))
        elif isinstance(record, Spans):
            self._update_workers(record)

    def _update_workers(self, spans: Spans) -> None:
        started = spans.columns["kind"] == layout.WORKER_START
        if started.any():
            row = int(started.nonzero()[0][-1])
            number, owner = (int(spans.columns[name][row]) for name in ("a", "c"))
            self._workers[spans.pid] = number, owner
            self._known.pop((spans.pid, spans.started_ticks), None)

    def find(self, pid: int, started_ticks: int) -> SpanProcess:
        """Return a process, as far as it has been identified."""
        key = pid, started_ticks
        process = self._known.get(key)
        if process is None:
            process = self._identify(pid, started_ticks)
            if process.role != "other":  # later records may still identify it
                self._known[key] = process
        return process

    def _identify(self, pid: int, started_ticks: int) -> SpanProcess:
        rank = self._find_rank(pid, started_ticks)
        if rank is not None:
            return SpanProcess(pid, started_ticks, "rank", rank, -1, rank.rank)
        number, owner = self._workers.get(pid, (-1, self._parents.get(pid, -1)))
        parent_rank = self._by_pid.get(owner)
        if parent_rank is not None:
            return SpanProcess(pid, started_ticks, "worker", parent_rank, number, parent_rank.rank)
        return SpanProcess(pid, started_ticks, "other", None, -1, self._numbers.get(pid))

    def _find_rank(self, pid: int, started_ticks: int) -> RunRank | None:
        rank = self._ranks.get((pid, started_ticks))
        if rank is not None:
            return rank
        candidate = self._by_pid.get(pid)  # without spans the analysis may not know its start time
        return candidate if candidate is not None and candidate.started_ticks < 0 else None


_FORM_SUFFIXES = {layout.ISSUE: " (issue)", layout.WAIT: " (wait)"}

_UNNAMED_KINDS = (layout.HOOK_NOTE, layout.STARVED, layout.LOADING)
_EXPORTED_NAMES = {
    "measured_sequence": "sequence",
    "first": "",
    "marked_by": "",
    "code": "",
    "parent_pid": "",
}
VALUE_NAMES: Mapping[int, tuple[str, ...]] = {
    kind: tuple(_EXPORTED_NAMES.get(name, name) for name in names)
    for kind, names in layout.ARGUMENTS.items()
    if kind not in _UNNAMED_KINDS
}
"""Kind -> names of its values; "" = not shown. The value -1 is unknown, and left out."""
UNKNOWN_VALUE = {layout.SYNC: layout.WHOLE_NS}


def format_span_name(kind: int, d: int, names: Mapping[int, str]) -> str:
    """Format the name of a span: its operation, its phase, or the user's own name."""
    if kind == layout.COLLECTIVE and d >= 0:
        operation = OPERATION_NAMES.get(d & layout.OPERATION_MASK, "collective")
        return operation + _FORM_SUFFIXES.get(d >> layout.FORM_SHIFT & layout.FORM_MASK, "")
    if kind in layout.KIND_NAMES:
        return layout.KIND_NAMES[kind]
    return escape_text(names.get(kind, f"kind {kind}"), 100)


def decode_peer(kind: int, d: int) -> int | None:
    """Return the peer rank of a send or receive; None for every other span."""
    if kind != layout.COLLECTIVE or d < 0:
        return None
    peer = d >> layout.PEER_SHIFT & layout.PEER_MASK
    return peer - 1 if peer else None
