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


def event(cat: str, name: str, at: float, dur: float, **more: Any) -> dict[str, Any]:
    """A complete event, `at` µs after the first instant of the trace."""
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


def on_device(
    name: str,
    at: float,
    dur: float,
    correlation: int,
    cat: str = "kernel",
    device: int = 0,
    **args: Any,
) -> dict[str, Any]:
    """A kernel or a copy."""
    args = {"device": device, "stream": 7, "correlation": correlation, **args}
    return event(cat, name, at, dur, pid=device, tid=7, args=args)


def call(name: str, at: float, dur: float, correlation: int = 0, **more: Any) -> dict[str, Any]:
    """A call of the runtime."""
    return event("cuda_runtime", name, at, dur, args={"correlation": correlation}, **more)


def step(number: int, at: float, dur: float) -> dict[str, Any]:
    """A step of the profiler."""
    return event("user_annotation", f"ProfilerStep#{number}", at, dur)


def document(events: Iterable[dict[str, Any]], **beside: Any) -> str:
    """A whole trace."""
    return json.dumps({"schemaVersion": 1, **beside, "traceEvents": list(events)})


def read(path: Path) -> tuple[list[NodeTables], Account]:
    """What the importer makes of a file, and what it says of it."""
    (source,) = open_sources(path)
    account = Account(path, Kineto.title)
    importer = Kineto()
    assert importer.recognizes(source.head, path)
    return list(importer.nodes([source], [account])), account


def written(folder: Path, text: str | bytes, name: str = "rank0.json") -> Path:
    """A file of these words."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def spans(node: NodeTables, kind: int, pid: int = 100) -> list[tuple[int, ...]]:
    """Start, end and a to d of the spans of one kind, in order of their end."""
    collected = []
    for batch in node.records():
        for record in batch:
            if isinstance(record, Spans) and record.pid == pid:
                columns = [record.columns[name] for name in SPAN_FIELDS]
                rows = zip(*columns)
                collected += [(row[0], row[1], *row[3:]) for row in rows if row[2] == kind]
    return collected


def busy_ns(node: NodeTables, device: str = "gpu0") -> list[tuple[int, int]]:
    """Readings of how long a device has been at work."""
    collected: list[tuple[int, int]] = []
    for batch in node.records():
        for record in batch:
            if isinstance(record, Columns) and record.devices == [device]:
                collected += zip(record.t_ns, record.values[0])
    return collected


def ranks(node: NodeTables) -> list[dict[str, Any]]:
    """The processes of a node."""
    events = [r for batch in node.records() for r in batch if isinstance(r, Event)]
    return [dict(e.attributes) for e in events if e.kind == "process-registered"]


def idle_ns(node: NodeTables, from_ns: int, until_ns: int, device: str = "gpu0") -> int:
    """How long a device was idle between two instants."""
    t_ns, busy = np.array(busy_ns(node, device)).T
    at = np.interp([from_ns, until_ns], t_ns, busy)
    return int(until_ns - from_ns - (at[1] - at[0]))
