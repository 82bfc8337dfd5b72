"""Imports trace files, and returns the result as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.registry import find_importer
from clusterprof.probe import layout
from clusterprof.trace.schema import Columns, Event, Spans

SEEDS = Path(__file__).parents[1] / "analysis" / "importers" / "seeds"
SHARED = Path(__file__).parents[2].parent / "shared/data"
MS = 1_000_000
Span = tuple[float, float, int, int, int, int]
"""Start and end in ms from an origin, then a to d."""


def import_files(paths: Sequence[Path]) -> tuple[list[NodeTables], list[Account]]:
    """Read files in one call."""
    sources = [source for path in paths for source in open_sources(path)]
    importer = find_importer(sources[0].head, sources[0].path)
    assert importer is not None, "nobody recognises it"
    accounts = [Account(source.path, importer.title) for source in sources]
    return list(importer.nodes(sources, accounts)), accounts


def list_spans(node: NodeTables, pid: int, origin_ns: int = 0) -> dict[str, list[Span]]:
    """List what a process did by the name of the span kind; `list_samples` has its stacks."""
    collected: dict[str, list[Span]] = {}
    names: dict[int, str] = dict(layout.KIND_NAMES)
    node.header()
    for records in node.records():
        for record in records:
            if isinstance(record, Spans) and record.pid == pid:
                names.update({int(kind): word for kind, word in record.names.items()})
                columns = (record.columns[name] for name in _FIELDS)
                for start, end, kind, *values in zip(*columns):
                    if kind == layout.STACK_SAMPLE:
                        continue
                    begin, until = (start - origin_ns) / MS, (end - origin_ns) / MS
                    collected.setdefault(names[kind], []).append((begin, until, *values))
    return {name: sorted(spans) for name, spans in collected.items()}


_FIELDS = ("start_ns", "end_ns", "kind", "a", "b", "c", "d")


def list_readings(
    node: NodeTables, signal: str, device: str, origin_ns: int = 0
) -> dict[float, int]:
    """List the readings of a signal: value by ms since an origin."""
    collected: dict[float, int] = {}
    for records in node.records():
        for record in records:
            columns = (
                zip(record.signals, record.devices, record.values)
                if isinstance(record, Columns)
                else ()
            )
            for name, of, values in columns:
                if (name, of) == (signal, device):
                    collected |= {(t - origin_ns) / MS: v for t, v in zip(record.t_ns, values)}
    return collected


def list_ranks(node: NodeTables) -> list[tuple[int, int | None, int | None, str]]:
    """List pid, rank, world size and device of each process."""
    return [
        (
            e.attributes["pid"],
            e.attributes["rank"],
            e.attributes["world_size"],
            e.attributes["device"],
        )
        for records in node.records()
        for e in records
        if isinstance(e, Event) and e.kind == "process-registered"
    ]
