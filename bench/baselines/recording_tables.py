"""A recording as plain tables on true time: the input of every baseline.

Only `truth.clocks` is used besides the recording, so that rules that compare ranks have a common
clock, as their authors assume. Signals that were not recorded are absent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from baselines.tables import END, KIND, NO_SPANS, START, C, Node, Rank, RecordingTables, Series
from clusterprof.analysis.timeline.load.ranks import parse_job_position
from clusterprof.errors import NoRecording
from clusterprof.probe import layout
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Event, Header, Rows, Spans

_TRAINING = (layout.STEP, layout.DATA_WAIT, layout.COLLECTIVE, layout.FORWARD)


def read_recording(recording: Path, clocks: Mapping[str, tuple[int, float]]) -> RecordingTables:
    """Read all nodes of a recording; the last one read is kept."""
    files = sorted(path for path in recording.rglob("*") if path.is_file())
    stamp = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return _read_recording(
        recording, stamp, tuple(sorted((name, *clock) for name, clock in clocks.items()))
    )


@lru_cache(maxsize=1)
def _read_recording(
    recording: Path, stamp: Any, clocks: tuple[tuple[str, int, float], ...]
) -> RecordingTables:
    by_name = {name: (offset, drift) for name, offset, drift in clocks}
    seen = RecordingTables({}, [], {})
    try:
        folders = list_node_folders(recording)
    except NoRecording:
        return seen
    jobs: dict[str, dict[int, list[Rank]]] = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        for job, rank in _NodeReader(folder, by_name).add_to(seen):
            jobs[job][rank.rank].append(rank)
    joined = [
        {number: _join_incarnations(job[number]) for number in sorted(job)} for job in jobs.values()
    ]
    # Two jobs on the same nodes have the same ranks: the larger one is looked at.
    seen.ranks |= max(
        joined, key=lambda job: sum(rank.in_step_ns for rank in job.values()), default={}
    )
    return seen


class _NodeReader:
    """One node while it is read."""

    def __init__(self, folder: Path, clocks: Mapping[str, tuple[int, float]]) -> None:
        self.records = list(NodeReader(folder))
        headers = [record for record in self.records if isinstance(record, Header)]
        self.devices = [dict(device) for header in headers[:1] for device in header.devices]
        names = [str(v) for header in headers[:1] for v in header.node.values()]
        self.offset_ns, self.drift = next(
            (clocks[name] for name in [*names, folder.name] if name in clocks), (0, 0.0)
        )
        host = headers[0].node.get("hostname", folder.name) if headers else folder.name
        cpus: Any = headers[0].host.get("cpus") if headers else 0
        self.node = Node(host, cpus.get("count", 0) if isinstance(cpus, dict) else int(cpus or 0))

    def convert_time(self, t_ns: np.ndarray) -> np.ndarray:
        """Node time -> true time."""
        t_ns = np.asarray(t_ns, np.int64) - self.offset_ns
        return t_ns if not self.drift else np.rint(t_ns / (1 + self.drift)).astype(np.int64)

    def add_to(self, seen: RecordingTables) -> list[tuple[str, Rank]]:
        """Add what this node has; return its training processes, each with its job."""
        self._series()
        seen.nodes.append(self.node)
        registered: dict[int, dict[str, Any]] = {}
        for record in self.records:
            if isinstance(record, Event) and record.kind == "process-registered":
                registered[record.attributes["pid"]] = record.attributes
            if isinstance(record, Event) and record.kind == "group-announced":
                attributes = record.attributes
                seen.groups[attributes["group"]] = frozenset(attributes["ranks"])
        parents = self._threads()
        spans = self._spans()
        workers = _find_workers(spans, parents)
        out = []
        for pid, attributes in sorted(registered.items()):
            place = parse_job_position(attributes)
            rank = place.rank
            table = spans.get(pid, NO_SPANS)
            marked = np.isin(table[:, KIND], _TRAINING).any()
            if rank is None or workers.get(pid) or not (marked or not spans):
                continue  # a launcher, a worker, or a helper
            mine = tuple(sorted(worker for worker, main in workers.items() if main == pid))
            job = place.job or place.rendezvous
            out.append((job, self._rank(rank, pid, attributes, spans, mine)))
        return out

    def _rank(
        self, rank: int, pid: int, attributes: Mapping[str, Any], spans: dict, mine: tuple
    ) -> Rank:
        table = spans.get(pid, NO_SPANS)
        loads = [spans[process] for process in (pid, *mine) if process in spans]
        fetches = _sort_by_start([load[load[:, KIND] == layout.FETCH] for load in loads])
        device = str(attributes.get("device") or "")
        owned = [str(entry.get("id")) for entry in self.devices if entry.get("pid") == pid]
        local = parse_job_position(attributes).node_local_rank
        if not device and owned:
            device = owned[0]
        elif not device and local is not None and local < len(self.devices):
            device = str(self.devices[local].get("id"))
        return Rank(
            rank, self.node, device, table, fetches, mine, _find_steps(table, self.node.span_ns)
        )

    def _series(self) -> None:
        parts: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        for record in self.records:
            if isinstance(record, Columns):
                t_ns = self.convert_time(record.t_ns)
                for at, key in enumerate(zip(record.signals, record.devices)):
                    values = np.asarray(record.values[at], np.float64)
                    mask = record.masks[at] or bytes(len(t_ns))
                    kept = np.frombuffer(mask, np.uint8) == 0
                    parts[key].append((t_ns[kept], values[kept]))
        for key, blocks in parts.items():
            t_ns, values = (np.concatenate(column) for column in zip(*blocks))
            if len(t_ns):
                order = np.argsort(t_ns, kind="stable")
                self.node.series[key] = Series(t_ns[order], values[order])
        ends = [sery.t_ns for sery in self.node.series.values()]
        if ends:
            low, high = min(t[0] for t in ends), max(t[-1] for t in ends)
            self.node.span_ns = (int(low), int(high))

    def _spans(self) -> dict[int, np.ndarray]:
        parts: dict[int, list[np.ndarray]] = defaultdict(list)
        for record in self.records:
            if isinstance(record, Spans):
                table = np.stack([np.asarray(record.columns[name]) for name in SPAN_FIELDS], axis=1)
                for column in (START, END):
                    table[:, column] = self.convert_time(table[:, column])
                parts[record.pid].append(table)
        return {pid: _sort_by_start(blocks) for pid, blocks in parts.items()}

    def _threads(self) -> dict[int, int]:
        """Note run delays; return the parent of each process."""
        first: dict[int, float] = {}
        parents: dict[int, int] = {}
        for record in self.records:
            if not isinstance(record, Rows):
                continue
            columns = {name: np.asarray(c) for name, c in zip(record.names, record.columns)}
            if "parent_pid" in columns:
                parents.update(zip(columns["pid"].tolist(), columns["parent_pid"].tolist()))
            if {"pid", "tid", "run_delay_ns_total"} <= columns.keys():
                main = (columns["pid"] == columns["tid"]) & (columns["run_delay_ns_total"] >= 0)
                rows = (columns[name][main].tolist() for name in ("pid", "run_delay_ns_total"))
                for pid, delay in zip(*rows):
                    self.node.run_delay_ns[pid] = delay - first.setdefault(pid, delay)
        return parents


def _find_workers(spans: Mapping[int, np.ndarray], parents: Mapping[int, int]) -> dict[int, int]:
    """Worker -> the process it loads for, as it said itself, or as the kernel knows it."""
    out = {}
    for pid, table in spans.items():
        born = table[table[:, KIND] == layout.WORKER_START]
        loads = (table[:, KIND] == layout.FETCH).any()
        trains = np.isin(table[:, KIND], _TRAINING).any()
        if len(born) and born[0, C] > 0:
            out[pid] = int(born[0, C])
        elif loads and not trains and pid in parents:
            out[pid] = parents[pid]
    return out


def _find_steps(table: np.ndarray, whole: tuple[int, int]) -> np.ndarray:
    """Steps as marked; else from one wait for data to the next; else all there is."""
    marked = table[table[:, KIND] == layout.STEP]
    if len(marked):
        return marked[:, [START, END]]
    waits = table[table[:, KIND] == layout.DATA_WAIT]
    if len(waits) > 1:
        return np.stack([waits[:-1, START], waits[1:, START]], axis=1)
    if len(table):
        return np.array([[table[:, START].min(), table[:, END].max()]])
    return np.array([whole], np.int64)


def _sort_by_start(tables: Iterable[np.ndarray]) -> np.ndarray:
    tables = list(tables)
    table = np.concatenate(tables) if tables else NO_SPANS
    return table[np.argsort(table[:, START], kind="stable")]


def _join_incarnations(parts: list[Rank]) -> Rank:
    """One rank out of its lives."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    workers = tuple(pid for part in parts for pid in part.workers)
    steps = np.concatenate([part.steps for part in parts])
    return Rank(
        last.rank,
        last.node,
        last.device,
        _sort_by_start(part.spans for part in parts),
        _sort_by_start(part.fetches for part in parts),
        workers,
        steps[np.argsort(steps[:, 0])],
    )
