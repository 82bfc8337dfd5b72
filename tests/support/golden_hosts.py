"""Golden outputs of fixture machines, and what a recording of them holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from clusterprof.trace.schema import Columns, Event, Gap, Record

HOSTS = Path(__file__).parents[1] / "hosts"
PATIENCE = 20.0
S = 1_000_000_000


def read_golden(name: str, file: str, text: str) -> None:
    path = HOSTS / name / file
    text = text.replace(f"{HOSTS / name}/", "/")
    if os.environ.get("CLUSTERPROF_ACCEPT_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def format_record(record: Record) -> Iterator[str]:
    if isinstance(record, Gap):
        where = f"{record.signal} {record.device}".strip()
        yield f"gap {record.t_ns / S:g} s {where}: {record.kind}, {record.message}"
    elif isinstance(record, Event):
        yield f"event {record.t_ns / S:g} s {record.kind} {dict(record.attributes)}"
    elif isinstance(record, Columns):
        columns = zip(record.signals, record.devices, record.values, record.masks, strict=True)
        for signal, device, values, mask in columns:
            shown = ["-" if mask and mask[row] else repr(v) for row, v in enumerate(values)]
            times = [f"{t_ns / S:g} s" for t_ns in record.t_ns]
            yield " ".join([*times, signal, device, *shown])
