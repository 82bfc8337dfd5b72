"""The processes of a node in one chunk: spans, samples of threads, I/O, and who they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterprof.probe.layout import WORKER_START
from clusterprof.timeline.buffers import RowBuffer, groups
from clusterprof.timeline.model import Int, Process, ProcessIo, SpanTable, ThreadTable
from clusterprof.timeline.placement import Placements
from clusterprof.timeline.spans import SpanBuffer
from clusterprof.trace.schema import Event, Rows, Spans
from clusterprof.trace.spanframes import PackedSpans

_THREADS = {
    "t_ns": "t_ns",
    "state": "state",
    "on_cpu_ns": "on_cpu_ns_total",
    "run_delay_ns": "run_delay_ns_total",
    "user_ns": "user_ns_total",
    "system_ns": "system_ns_total",
    "block_io_delay_ns": "block_io_delay_ns_total",
    "major_faults": "major_faults_total",
    "wchan": "wchan",
}
_IO = {
    "t_ns": "t_ns",
    "rss_bytes": "rss_bytes",
    "read_chars": "read_chars_total",
    "write_chars": "write_chars_total",
    "read_bytes": "read_bytes_total",
    "write_bytes": "write_bytes_total",
}
_WHO = ("pid", "parent_pid", "started_ticks", "name")


class ProcessBuffer:
    """Everything about processes that has been read and not yet handed out."""

    def __init__(self) -> None:
        self._threads = RowBuffer([*_THREADS.values(), "pid", "tid", "name"])
        self._rows = RowBuffer([*_IO.values(), *_WHO])
        self._spans = SpanBuffer()
        self._placements = Placements()
        self._registered: dict[int, Mapping[str, Any]] = {}
        self._exited_ns: dict[int, int] = {}
        self._who: dict[int, tuple[int, int, str]] = {}  # parent, started ticks, name
        self._wchan_names: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()
        self._thread_names: tuple[str, ...] = ()

    def add_rows(self, rows: Rows) -> None:
        """Take a frame of one of the three tables; others are not ours."""
        if rows.table == "threads":
            self._threads.add(rows)
            self._wchan_names = _longer(self._wchan_names, rows.strings.get("wchan"))
            self._thread_names = _longer(self._thread_names, rows.strings.get("name"))
        elif rows.table == "processes":
            self._rows.add(rows)
            self._names = _longer(self._names, rows.strings.get("name"))
        elif rows.table == "placement":
            self._placements.add(rows)

    def add_spans(self, spans: Spans | PackedSpans) -> None:
        """Take a frame of spans."""
        self._spans.add(spans)

    def add_event(self, event: Event) -> None:
        """Take a registration or an exit."""
        pid = event.attributes.get("pid")
        if not isinstance(pid, int):
            return
        if event.kind == "process-registered":
            self._registered[pid] = {**self._registered.get(pid, {}), **event.attributes}
            self._exited_ns.pop(pid, None)
        else:
            self._exited_ns[pid] = event.t_ns

    def take(
        self, start_ns: int, end_ns: int, last: bool
    ) -> tuple[dict[int, Process], tuple[str, ...]]:
        """Return the processes of a chunk by pid, and what their threads' `wchan` points to."""
        threads = _by_thread(self._threads.take(end_ns), self._thread_names)
        rows = self._rows.take(end_ns)
        io = {pid: _io(table) for pid, table in groups(rows, "pid").items()}
        self._learn(rows)
        self._placements.turn(start_ns, end_ns)
        taken = self._spans.take(end_ns, last)
        spans = taken.of
        registered = [p for p in self._registered if self._exited_ns.get(p, end_ns) >= start_ns]
        active = {pid for pid, last_ns in taken.last_end_ns.items() if last_ns >= start_ns}
        pids = sorted({*threads, *io, *active, *registered})
        found = {
            pid: self._process(pid, spans.get(pid, {}), threads.get(pid, {}), io.get(pid))
            for pid in pids
        }
        self._forget(start_ns, set(pids))
        return found, self._wchan_names

    def _learn(self, rows: dict[str, Int]) -> None:
        """Remember parent, start and name as last seen."""
        for row in {pid: row for row, pid in enumerate(rows["pid"].tolist())}.values():
            pid, parent, ticks, name = (int(rows[column][row]) for column in _WHO)
            known = self._names[name] if 0 <= name < len(self._names) else ""
            self._who[pid] = parent, ticks, known

    def _process(
        self,
        pid: int,
        spans: Mapping[int, SpanTable],
        threads: Mapping[int, ThreadTable],
        io: ProcessIo | None,
    ) -> Process:
        registration = self._registered.get(pid, {})
        parent, ticks, name = self._who.get(pid, (-1, -1, ""))
        if parent < 0 and WORKER_START in spans:
            parent = int(spans[WORKER_START].c[-1])
        of_spans = self._spans.started_ticks(pid)
        if of_spans is not None:
            ticks = of_spans
        elif ticks < 0:
            ticks = int(registration.get("started_ticks", -1))
        placement = self._placements.of(pid)
        return Process(pid, ticks, parent, name, registration, spans, threads, io, placement)

    def _forget(self, start_ns: int, seen: set[int]) -> None:
        """Drop processes that were not in this chunk at all."""
        self._spans.forget(seen)
        self._placements.forget(seen)
        for pid in [pid for pid in self._who if pid not in seen]:
            del self._who[pid]
        for pid in [pid for pid, t in self._exited_ns.items() if t < start_ns]:
            if pid not in seen:
                del self._exited_ns[pid]
                self._registered.pop(pid, None)


def _longer(before: tuple[str, ...], now: Any) -> tuple[str, ...]:
    """The list of strings only ever grows; a frame out of order may bring an older one."""
    return tuple(now) if now is not None and len(now) > len(before) else before


def _by_thread(rows: dict[str, Int], names: tuple[str, ...]) -> dict[int, dict[int, ThreadTable]]:
    """Split the table by process and thread; a tid is unique on a node."""
    found: dict[int, dict[int, ThreadTable]] = {}
    for tid, table in groups(rows, "tid").items():
        columns = {name: table[column] for name, column in _THREADS.items()}
        at = int(table["name"][-1])
        name = names[at] if 0 <= at < len(names) else ""
        found.setdefault(int(table["pid"][-1]), {})[tid] = ThreadTable(**columns, name=name)
    return found


def _io(table: dict[str, Int]) -> ProcessIo:
    return ProcessIo(**{name: table[column] for name, column in _IO.items()})
