"""Records to write, a clock that a test sets, and what "the same record" means."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import (
    SPAN_FIELDS,
    Clock,
    Columns,
    Event,
    Gap,
    Header,
    Record,
    Rows,
    Spans,
)
from clusterprof.trace.writer import RecordingWriter

SECOND_NS = 1_000_000_000

HEADER = Header(
    node={"key": "node-1-0badcafe-1700000000", "hostname": "node-1"},
    started={"monotonic_ns": 5 * SECOND_NS, "boottime_ns": 5 * SECOND_NS, "realtime_ns": 17},
    host={"cpus": 2, "memory_bytes": 1 << 35, "disks": ["vda"], "mounts": []},
    devices=[{"id": "emulated-0", "emulated": True}],
    launcher={"job": "", "variables": {"RANK": "0"}},
    versions={"clusterprof": "0", "schema": "1"},
    profile={"hz": 10},
    collectors=[{"name": "disk", "interval_ns": 100_000_000, "status": "ok"}],
)


class ManualClock:
    """A clock that a test moves."""

    def __init__(self, now_ns: int = 5 * SECOND_NS) -> None:
        self.now_ns = now_ns

    def __call__(self) -> Clock:
        return Clock(self.now_ns, self.now_ns + 7, self.now_ns + 1_700_000_000 * SECOND_NS)


def make_canonical(record: Record) -> dict[str, Any]:
    """Return a record with every column as its type and its very bits."""
    plain = {
        field.name: _make_canonical_value(getattr(record, field.name)) for field in fields(record)
    }
    return {"record": type(record).__name__, **plain}


def _make_canonical_value(value: Any) -> Any:
    if isinstance(value, array):
        return value.typecode, value.tobytes()
    if isinstance(value, np.ndarray):
        return {"int64": "q", "float64": "d"}[value.dtype.name], value.tobytes()
    if isinstance(value, list | tuple):
        return tuple(_make_canonical_value(item) for item in value)
    if isinstance(value, dict):
        return {key: _make_canonical_value(item) for key, item in value.items()}
    return value


def make_second(number: int) -> list[Record]:
    """Make the records that a small recorder writes in its n-th second: three frames."""
    draw = random.Random(number)
    start_ns = (10 + number) * SECOND_NS
    t_ns = array("q", [start_ns + tick * 100_000_000 + draw.randrange(90_000) for tick in range(4)])
    disk = Columns(
        "disk",
        ("disk.reads_total", "disk.read_ns_total", "disk.busy_ns_total"),
        ("vda", "vda", "vdb"),
        t_ns,
        (
            array("q", [1_000 * number + draw.randrange(100) for _ in t_ns]),
            array("q", [1_000_000 * draw.randrange(9_000) for _ in t_ns]),
            array("q", [0, 0, 0, 0]),
        ),
        (None, None, b"\x00\x01\x01\x01"),
    )
    gpu = Columns(
        "gpu_emulated",
        ("gpu.busy_ratio", "gpu.power_watts"),
        ("emulated-0", "emulated-0"),
        t_ns,
        (
            array("d", [draw.randrange(101) / 100 for _ in t_ns]),
            array("d", [draw.random() for _ in t_ns]),
        ),
        (None, None),
    )
    threads = Rows(
        "threads",
        ("t_ns", "tid", "wchan"),
        (
            array("q", [start_ns, start_ns, start_ns + 5, start_ns + 5]),
            array("q", [70, 71, 70, 71]),
            array("q", [0, -1, 1, -1]),
        ),
        {"wchan": ("folio_wait_bit_common", "futex_wait_queue")},
    )
    return [disk, gpu, threads, make_spans(number, 12, draw)]


def make_spans(number: int, rows: int, draw: random.Random) -> Spans:
    """Return the spans of one process, one after the other."""
    columns = {name: array("q") for name in SPAN_FIELDS}
    now_ns = (10 + number) * SECOND_NS
    for row in range(rows):
        start_ns = now_ns + draw.randrange(9_000)
        now_ns = start_ns + draw.randrange(9_000_000)
        for name, value in zip(SPAN_FIELDS, (start_ns, now_ns, 1 + row % 4, row, -1, 8, 0)):
            columns[name].append(value)
    return Spans(4242, 99_000, 1 + number * rows, 0, {64: "tokenise"}, columns)


def make_simple_records() -> list[Record]:
    """Return one record of each kind that has no columns."""
    return [
        Clock(1, 2, 3),
        Event(4, "process-exited", {"pid": 4242, "status": None, "args": ["a", 1.5]}),
        Gap(5, "gpu_nvidia", "gpu.power_watts", "GPU-1", "denied", "no permission", "be root"),
    ]


def write_recording(
    folder: Path, seconds: Iterable[Sequence[Record]], **options: Any
) -> RecordingWriter:
    """Write a recording, a second after the other, and close it."""
    clock = ManualClock()
    options.setdefault("keep_free_bytes", 0)
    writer = RecordingWriter(folder, HEADER, clock, **options)
    for records in seconds:
        clock.now_ns += SECOND_NS
        writer.append(*records)
    writer.close()
    return writer


def read_frames(path: Path) -> tuple[list[list[dict[str, Any]]], NodeReader]:
    """Return the canonical records of each frame, and the reader with its damage."""
    reader = NodeReader(path)
    return [[make_canonical(record) for record in records] for records in reader.frames()], reader


def find_frame_boundaries(data: bytes) -> list[int]:
    """Return where each frame of a healthy segment begins, and where the last one ends.

    Written here anew, after docs/design/recording-format.md, so that reader and test cannot be
    wrong together.
    """
    ends = [0]
    while ends[-1] < len(data):
        at = ends[-1]
        assert data[at : at + 4] == b"CPF\x01"
        ends.append(at + 16 + int.from_bytes(data[at + 4 : at + 8], "little"))
    return ends
