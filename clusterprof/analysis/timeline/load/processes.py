"""Processes of a node in one chunk: spans, thread samples, I/O and identity.

Placement of a node's processes, chunk by chunk: allowed CPUs and NUMA nodes, CPUs used.

Map processes to the accelerators they use, as observed by collectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from clusterprof.analysis.timeline.load.buffers import RowBuffer, SpanBuffer, split_by_column
from clusterprof.analysis.timeline.model import Int, Placement, Process, ProcessIo, ThreadTable
from clusterprof.analysis.timeline.spans import SpanTable, StackSamples, WorkerStartSpans
from clusterprof.analysis.timeline.stacks import STACKS_DEFINED, StackInterner
from clusterprof.probe.layout import WORKER_START
from clusterprof.trace.decoder import PackedSpans
from clusterprof.trace.schema import Event, Rows, Spans
from clusterprof.util.ranges import parse_cpulist

_COLUMNS = ("t_ns", "pid", "processor", "cpus_allowed", "nodes_allowed")
_LISTS = ("cpus_allowed", "nodes_allowed")


class PlacementBuffer:
    """Rows of the table `placement` that were read and not yet assigned to a chunk."""

    def __init__(self) -> None:
        self._rows = RowBuffer(_COLUMNS)
        self._lists: dict[str, tuple[frozenset[int], ...]] = dict.fromkeys(_LISTS, ())
        self._tables: Mapping[int, Mapping[str, Int]] = {}
        self._placement_of: dict[int, Placement] = {}
        self._start_ns = self._end_ns = 0

    def add(self, rows: Rows) -> None:
        """Add a frame of the table."""
        self._rows.add(rows)
        for name in _LISTS:
            cpu_lists = rows.strings.get(name, ())
            if len(cpu_lists) > len(self._lists[name]):
                self._lists[name] = tuple(_parse_cpu_set(cpu_list) for cpu_list in cpu_lists)

    def start_chunk(self, start_ns: int, end_ns: int) -> None:
        """Start the chunk from `start_ns` to `end_ns`."""
        self._start_ns, self._end_ns = start_ns, end_ns
        self._tables = split_by_column(self._rows.take(end_ns), "pid")

    def find(self, pid: int) -> Placement | None:
        """Return the placement of a process; without new samples, the last one known."""
        table = self._tables.get(pid)
        if table is not None:
            inside = (table["t_ns"] >= self._start_ns) & (table["t_ns"] < self._end_ns)
            cpus, nodes = (self._last(name, table) for name in _LISTS)
            ran_on = table["processor"][inside]
            self._placement_of[pid] = Placement(cpus, nodes, ran_on[ran_on >= 0])
        elif pid in self._placement_of:
            self._placement_of[pid] = replace(
                self._placement_of[pid], observed_cpus=np.zeros(0, np.int64)
            )
        return self._placement_of.get(pid)

    def drop_unseen(self, active: set[int]) -> None:
        """Drop processes that were not in this chunk."""
        for pid in [pid for pid in self._placement_of if pid not in active]:
            del self._placement_of[pid]

    def _last(self, name: str, table: Mapping[str, Int]) -> frozenset[int]:
        list_index = int(table[name][-1])
        return (
            self._lists[name][list_index]
            if 0 <= list_index < len(self._lists[name])
            else frozenset()
        )


def _parse_cpu_set(cpu_list: str) -> frozenset[int]:
    """Parse a list of numbers; a malformed list is empty, which means unknown."""
    try:
        return parse_cpulist(str(cpu_list))
    except ValueError:
        return frozenset()


_THREAD_COLUMNS = {
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
_IO_COLUMNS = {
    "t_ns": "t_ns",
    "rss_bytes": "rss_bytes",
    "read_chars": "read_chars_total",
    "write_chars": "write_chars_total",
    "read_bytes": "read_bytes_total",
    "write_bytes": "write_bytes_total",
}
_IDENTITY_COLUMNS = ("pid", "parent_pid", "started_ticks", "name")


class ProcessBuffer:
    """All process data that were read and not yet assigned to a chunk."""

    def __init__(self, rejects_late_ends: bool = False) -> None:
        """rejects_late_ends: spans that end long after the last record are refused, and counted."""
        self._threads = RowBuffer([*_THREAD_COLUMNS.values(), "pid", "tid", "name"])
        self._rows = RowBuffer([*_IO_COLUMNS.values(), *_IDENTITY_COLUMNS])
        self._spans = SpanBuffer(rejects_late_ends)
        self._placements = PlacementBuffer()
        self._registered: dict[int, Mapping[str, Any]] = {}
        self._exited_ns: dict[int, int] = {}
        self._identities: dict[int, tuple[int, int, str]] = {}  # parent, started ticks, name
        self._wchan_names: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()
        self._thread_names: tuple[str, ...] = ()
        self.stacks = StackInterner()
        """The stacks of all processes so far."""

    def add_rows(self, rows: Rows) -> None:
        """Add a frame of one of the three process tables; other tables are ignored."""
        if rows.table == "threads":
            self._threads.add(rows)
            self._wchan_names = _choose_longer(self._wchan_names, rows.strings.get("wchan"))
            self._thread_names = _choose_longer(self._thread_names, rows.strings.get("name"))
        elif rows.table == "processes":
            self._rows.add(rows)
            self._names = _choose_longer(self._names, rows.strings.get("name"))
        elif rows.table == "placement":
            self._placements.add(rows)

    @property
    def refused_spans(self) -> int:
        """Return the number of spans refused so far."""
        return self._spans.refused

    def add_spans(self, spans: Spans | PackedSpans) -> None:
        """Add a frame of spans."""
        self._spans.add(spans)

    def add_event(self, event: Event) -> None:
        """Add a registration, an exit, or the definitions of stacks."""
        if event.kind == STACKS_DEFINED:
            self.stacks.add(event.attributes)
            return
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
        """Return the processes of a chunk by pid, and the names that their `wchan` points to."""
        threads = _split_by_thread(self._threads.take(end_ns), self._thread_names)
        rows = self._rows.take(end_ns)
        io = {pid: _make_process_io(table) for pid, table in split_by_column(rows, "pid").items()}
        self._update_identities(rows)
        self._placements.start_chunk(start_ns, end_ns)
        chunk_spans = self._spans.take(end_ns, last)
        spans = chunk_spans.by_pid
        registered = [p for p in self._registered if self._exited_ns.get(p, end_ns) >= start_ns]
        active = {pid for pid, last_ns in chunk_spans.last_end_ns.items() if last_ns >= start_ns}
        pids = sorted({*threads, *io, *active, *registered})
        processes = {
            pid: self._process(pid, spans.get(pid, {}), threads.get(pid, {}), io.get(pid))
            for pid in pids
        }
        for pid, samples in chunk_spans.stacks.items():
            if pid in processes:
                processes[pid] = self._with_stacks(processes[pid], samples)
        self._drop_unseen(start_ns, set(pids))
        return processes, self._wchan_names

    def _update_identities(self, rows: dict[str, Int]) -> None:
        """Update start and name of each process to the last values seen, its parent to the first.

        A process whose parent ends gets another one, mostly process 1.
        """
        first_rows: dict[tuple[int, int], int] = {}
        for row, process in enumerate(zip(rows["pid"].tolist(), rows["started_ticks"].tolist())):
            first_rows.setdefault(process, row)
        for row in {pid: row for row, pid in enumerate(rows["pid"].tolist())}.values():
            pid, _, ticks, name = (int(rows[column][row]) for column in _IDENTITY_COLUMNS)
            parent, known_ticks, _ = self._identities.get(pid, (-1, -1, ""))
            if parent < 0 or known_ticks != ticks:
                parent = int(rows["parent_pid"][first_rows[pid, ticks]])
            process_name = self._names[name] if 0 <= name < len(self._names) else ""
            self._identities[pid] = parent, ticks, process_name

    def _process(
        self,
        pid: int,
        spans: Mapping[int, SpanTable],
        threads: Mapping[int, ThreadTable],
        io: ProcessIo | None,
    ) -> Process:
        registration = self._registered.get(pid, {})
        parent, ticks, name = self._identities.get(pid, (-1, -1, ""))
        if parent < 0 and WORKER_START in spans:
            parent = int(WorkerStartSpans.from_table(spans[WORKER_START]).parent_pid[-1])
        span_ticks = self._spans.started_ticks(pid)
        if span_ticks is not None:
            ticks = span_ticks
        elif ticks < 0:
            registered_ticks = registration.get("started_ticks")
            ticks = -1 if registered_ticks is None else int(registered_ticks)
        placement = self._placements.find(pid)
        return Process(pid, ticks, parent, name, registration, spans, threads, io, placement)

    def _with_stacks(self, process: Process, samples: StackSamples) -> Process:
        numbers = self.stacks.translate(process.pid, process.started_ticks, samples.stack)
        return replace(process, stacks=replace(samples, stack=numbers))

    def _drop_unseen(self, start_ns: int, active: set[int]) -> None:
        """Drop processes that were not in this chunk."""
        self._spans.drop_unseen(active)
        self._placements.drop_unseen(active)
        for pid in [pid for pid in self._identities if pid not in active]:
            del self._identities[pid]
        for pid in [pid for pid, t in self._exited_ns.items() if t < start_ns]:
            if pid not in active:
                del self._exited_ns[pid]
                self._registered.pop(pid, None)


def _choose_longer(before: tuple[str, ...], update: Any) -> tuple[str, ...]:
    """Choose the longer list of strings.

    Lists only grow, and a late frame may contain an older one.
    """
    return tuple(update) if update is not None and len(update) > len(before) else before


def _split_by_thread(
    rows: dict[str, Int], names: tuple[str, ...]
) -> dict[int, dict[int, ThreadTable]]:
    """Split the table by process and thread; a tid is unique on a node."""
    threads_by_pid: dict[int, dict[int, ThreadTable]] = {}
    for tid, table in split_by_column(rows, "tid").items():
        columns = {name: table[column] for name, column in _THREAD_COLUMNS.items()}
        name_index = int(table["name"][-1])
        name = names[name_index] if 0 <= name_index < len(names) else ""
        threads_by_pid.setdefault(int(table["pid"][-1]), {})[tid] = ThreadTable(
            **columns, name=name
        )
    return threads_by_pid


def _make_process_io(table: dict[str, Int]) -> ProcessIo:
    return ProcessIo(**{name: table[column] for name, column in _IO_COLUMNS.items()})


class DeviceUsers:
    """Device owners and users from the events of a node; the last event of each kind counts.

    `device-owner` (device, pid): a tool names the process that owns a device; a process may
    own several. `device-used` (pid, device): the one device that a process was seen to use.
    """

    def __init__(self) -> None:
        self._owners: dict[object, object] = {}
        self._works_on: dict[int, str] = {}

    def observe(self, event: Event) -> bool:
        """Process an event; return whether it concerned the use of a device."""
        pid, device = event.attributes.get("pid"), event.attributes.get("device")
        if event.kind == "device-owner":
            self._owners[device] = pid
        elif event.kind == "device-used" and isinstance(pid, int):
            self._works_on[pid] = str(device)
        else:
            return False
        return True

    def with_users(self, devices: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the devices with their owner as `pid` and their observed users as `users`."""
        devices_with_owner = [
            {**entry, "pid": self._owners[entry["id"]]}
            if entry.get("id") in self._owners
            else entry
            for entry in devices
        ]
        if not self._works_on:
            return devices_with_owner
        users: dict[str, list[int]] = {}
        for pid, device in self._works_on.items():
            users.setdefault(device, []).append(pid)
        return [
            {**entry, "users": users.get(str(entry.get("id")), [])} for entry in devices_with_owner
        ]
