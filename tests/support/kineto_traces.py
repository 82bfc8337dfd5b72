"""Small traces of PyTorch's profiler, written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.kineto.importer import Kineto
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Event, Spans

HOST = {"pid": 100, "tid": 100}
START_US = 1_000_000


def make_event(cat: str, name: str, at: float, dur: float, **more: Any) -> dict[str, Any]:
    """Make a complete event, `at` µs after the first instant of the trace."""
    args = more.pop("args", {})
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        **HOST,
        "ts": START_US + at,
        "dur": dur,
        "args": args,
        **more,
    }


def make_device_event(
    name: str,
    at: float,
    dur: float,
    correlation: int,
    cat: str = "kernel",
    device: int = 0,
    **args: Any,
) -> dict[str, Any]:
    """Make a kernel or a copy."""
    args = {"device": device, "stream": 7, "correlation": correlation, **args}
    return make_event(cat, name, at, dur, pid=device, tid=7, args=args)


def make_runtime_call(
    name: str, at: float, dur: float, correlation: int = 0, **more: Any
) -> dict[str, Any]:
    """Make a call of the CUDA runtime."""
    return make_event("cuda_runtime", name, at, dur, args={"correlation": correlation}, **more)


def make_step(number: int, at: float, dur: float) -> dict[str, Any]:
    """Make a step of the profiler."""
    return make_event("user_annotation", f"ProfilerStep#{number}", at, dur)


def make_trace(events: Iterable[dict[str, Any]], **beside: Any) -> str:
    """Make a whole trace."""
    return json.dumps({"schemaVersion": 1, **beside, "traceEvents": list(events)})


def import_trace(path: Path) -> tuple[list[NodeTables], Account]:
    """Import a file; return its node and the notes about it."""
    (source,) = open_sources(path)
    account = Account(path, Kineto.title)
    importer = Kineto()
    assert importer.recognizes(source.head, path)
    return list(importer.nodes([source], [account])), account


def write_trace(folder: Path, text: str | bytes, name: str = "rank0.json") -> Path:
    """Write a trace file with this text."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def list_spans(node: NodeTables, kind: int, pid: int = 100) -> list[tuple[int, ...]]:
    """List start, end and a to d of the spans of one kind, in order of their ends."""
    collected = []
    for batch in node.records():
        for record in batch:
            if isinstance(record, Spans) and record.pid == pid:
                columns = [record.columns[name] for name in SPAN_FIELDS]
                rows = zip(*columns)
                collected += [(row[0], row[1], *row[3:]) for row in rows if row[2] == kind]
    return collected


def list_busy_ns(node: NodeTables, device: str = "gpu0") -> list[tuple[int, int]]:
    """List the readings of a device's busy time."""
    collected: list[tuple[int, int]] = []
    for batch in node.records():
        for record in batch:
            if isinstance(record, Columns) and record.devices == [device]:
                collected += zip(record.t_ns, record.values[0])
    return collected


def list_ranks(node: NodeTables) -> list[dict[str, Any]]:
    """List the processes of a node."""
    events = [r for batch in node.records() for r in batch if isinstance(r, Event)]
    return [dict(e.attributes) for e in events if e.kind == "process-registered"]


def measure_idle_ns(node: NodeTables, from_ns: int, until_ns: int, device: str = "gpu0") -> int:
    """Measure how long a device was idle between two instants."""
    t_ns, busy = np.array(list_busy_ns(node, device)).T
    at = np.interp([from_ns, until_ns], t_ns, busy)
    return int(until_ns - from_ns - (at[1] - at[0]))
