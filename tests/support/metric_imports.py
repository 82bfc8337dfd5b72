"""Imports metrics from bytes in memory, and returns the result as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterprof.analysis.importers.core.base import Account, Importer
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.probe import layout
from clusterprof.trace.schema import Columns, Event, Spans

Readings = list[tuple[int, float | None]]


@dataclass
class ImportedNode:
    """One node."""

    name: str
    wall: bool
    devices: list[dict[str, Any]]
    series: dict[str, Readings]
    """By `signal device`: time in ns, value (None = not available)."""
    spans: dict[tuple[int, str], list[tuple[int, ...]]] = field(default_factory=dict)
    """By rank and kind: start, end, a, b, c, d."""


def import_files(
    importer: Importer, folder: Path, **files: bytes
) -> tuple[list[ImportedNode], list[Account]]:
    """Write files (`name_ext=…`), check that they are recognised, and read them in one call."""
    sources = []
    for name, data in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(data)
        sources += list(open_sources(path))
    assert all(importer.recognizes(source.head, source.path) for source in sources)
    accounts = [Account(source.path, importer.title) for source in sources]
    return [collect_node(node) for node in importer.nodes(sources, accounts)], accounts


def collect_node(node: Any) -> ImportedNode:
    """Collect everything that a node holds."""
    header = node.header()
    out = ImportedNode(
        header.node["display"], "realtime_ns" in header.started, list(header.devices), {}
    )
    ranks: dict[int, int] = {}
    for records in node.records():
        for record in records:
            if isinstance(record, Event) and record.kind == "process-registered":
                ranks[record.attributes["pid"]] = record.attributes["rank"]
            elif isinstance(record, Columns):
                for signal, device, values, mask in zip(
                    record.signals, record.devices, record.values, record.masks
                ):
                    column = out.series.setdefault(f"{signal} {device}".strip(), [])
                    for row, (t_ns, value) in enumerate(zip(record.t_ns, values)):
                        column.append((t_ns, None if mask and mask[row] else value))
            elif isinstance(record, Spans):
                columns = [record.columns[name] for name in ("start_ns", "end_ns", *"abcd")]
                for kind, *rest in zip(record.columns["kind"], *columns):
                    key = (ranks[record.pid], layout.KIND_NAMES[kind])
                    out.spans.setdefault(key, []).append(tuple(rest))
    return out


SHARED = Path(__file__).parents[2].parent / "shared/data"
