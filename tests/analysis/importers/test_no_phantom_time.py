"""Nothing that an importer writes lies outside the events of its file."""

from __future__ import annotations

import gzip
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.registry import IMPORTERS
from clusterprof.probe import layout
from clusterprof.trace.schema import Columns, Spans
from tests.support.kineto_traces import (
    make_device_event,
    make_runtime_call,
    make_step,
    make_trace,
    write_trace,
)

SEEDS = Path(__file__).parent / "seeds"
REAL = Path(__file__).resolve().parents[4] / "shared" / "data"
DERIVED = frozenset(
    {
        layout.STARVED,
        layout.HOST_WORK,
        layout.EXPOSED,
        layout.EXPOSED_COPY,
        layout.EXPOSED_COLLECTIVE,
        layout.LOADING,
    }
)
"""Spans that importers compute; every other kind begins and ends with an event of the file."""


def files() -> list[Path]:
    """Samples of every format, and small traces of other people where they are."""
    samples = [path for path in sorted(SEEDS.rglob("*")) if path.is_file()]
    real = sorted(REAL.glob("kineto-*/*.gz")) + sorted(REAL.glob("nsys-sqlite/*.gz"))
    return samples + [path for path in real if path.stat().st_size < 100_000]


def import_file(path: Path) -> Iterator[NodeTables]:
    """Yield the nodes of a file; none where no importer takes it."""
    for source in open_sources(path):
        importer = next((i for i in IMPORTERS if i.recognizes(source.head, source.path)), None)
        if importer is not None:
            try:
                yield from importer.nodes([source], [Account(source.path, importer.title)])
            except CannotImportError:
                return


def extent(node: NodeTables, derived: bool) -> tuple[float, float]:
    """First and last instant of the spans that are computed, or of everything else, ns."""
    first, last = math.inf, -math.inf
    for batch in node.records():
        for record in batch:
            times: list[int] = []
            if isinstance(record, Spans):
                columns = (record.columns[name] for name in ("start_ns", "end_ns", "kind"))
                for start, end, kind in zip(*columns):
                    if (kind in DERIVED) == derived:
                        times += (start, end)
            elif isinstance(record, Columns) and not derived:
                times += record.t_ns
            first, last = min([first, *times]), max([last, *times])
    return first, last


@pytest.mark.parametrize("path", files(), ids=lambda path: f"{path.parent.name}-{path.name[:30]}")
def test_derived_spans_lie_within_the_recorded_time(path: Path) -> None:
    for node in import_file(path):
        first, last = extent(node, derived=False)
        computed_first, computed_last = extent(node, derived=True)
        assert first <= computed_first and computed_last <= last


def is_time(value: object) -> bool:
    """Return whether a value of a trace is a usable number of microseconds."""
    return isinstance(value, (int, float)) and 0 <= value < 4e15


def read_extent_ns(path: Path) -> int:
    """Time from the first to the last event of a file, read without the importers; 0 unknown."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw.startswith(b"SQLite format 3"):
        copy = sqlite3.connect(":memory:")
        copy.deserialize(raw[:18] + b"\x01\x01" + raw[20:])
        tables = [row[0] for row in copy.execute("select name from sqlite_master")]
        times: list[int] = []
        for table in tables:
            columns = [row[1] for row in copy.execute(f"pragma table_info('{table}')")]
            for column in {"start", "end"} & set(columns):
                times += [row[0] for row in copy.execute(f"select [{column}] from [{table}]")]
        known = [time for time in times if isinstance(time, int) and time >= 0]
        return max(known) - min(known) if known else 0
    try:
        trace = json.loads(raw)
    except ValueError:
        return 0
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    timed = [
        (event["ts"], event["ts"] + (event.get("dur") or 0))
        for event in events
        if isinstance(event, dict) and event.get("ph") == "X" and is_time(event.get("ts"))
        if is_time(event.get("dur") or 0)
    ]
    if not timed:
        return 0
    return round(1e3 * (max(end for _, end in timed) - min(at for at, _ in timed)))


PROFILES = [path for path in files() if path.parent.name.startswith(("kineto", "nsys"))]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name[:40])
def test_a_profile_is_no_longer_than_its_events(path: Path) -> None:
    length_ns = read_extent_ns(path)
    for node in import_file(path) if length_ns else ():
        first_ns, last_ns = node.bounds_ns()
        assert last_ns - first_ns <= length_ns + 1_000  # rounding of microseconds


def test_memory_calls_do_not_lengthen_a_short_trace(tmp_path: Path) -> None:
    # 13 ms across a whole second of the trace's clock: readings of whole seconds made 1 s of it.
    trace = [
        make_step(1, 995_000, 13_000),
        make_runtime_call("cudaMalloc", 996_000, 100),
        make_runtime_call("cudaFree", 1_004_000, 100),
        make_runtime_call("cudaLaunchKernel", 1_005_000, 10, 1),
        make_device_event("gemm", 1_005_020, 2_000, 1),
    ]
    (node,) = import_file(write_trace(tmp_path, make_trace(trace)))
    first_ns, last_ns = node.bounds_ns()
    assert last_ns - first_ns == 13_000_000
