"""Runs an importer as the analysis does, and returns the result as plain values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Importer
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.core.columns import ImportedSpans
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Event, Spans

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def require_folder(name: str) -> Path:
    """Return a folder of public traces; skip the test where it is missing."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder


def load_known_answers(name: str) -> Any:
    """Load what is published about the files in a folder."""
    return json.loads((require_folder(name) / "known.json").read_text())


def import_folder(importer: Importer, *paths: Path) -> tuple[list[NodeTables], list[Account], str]:
    """Return nodes, accounts, and why nothing could be imported ("" when something could)."""
    sources = [source for path in paths for source in open_sources(path)]
    for source in sources:
        assert importer.recognizes(source.head, source.path), source.path
    accounts = [Account(source.path, importer.title) for source in sources]
    try:
        return list(importer.nodes(sources, accounts)), accounts, ""
    except CannotImportError as error:
        return [], accounts, error.message


def list_spans(node: NodeTables) -> dict[str, list[tuple[int, ...]]]:
    """List by `pid kind` start, end, a, b, c, d of each span, in order of their ends."""
    collected: dict[str, list[tuple[int, ...]]] = {}
    for record in _list_records(node):
        if not isinstance(record, Spans):
            continue
        columns = record.columns
        names = ("start_ns", "end_ns", "kind", "a", "b", "c", "d")
        for start, end, kind, *values in zip(*(columns[name] for name in names)):
            key = f"{record.pid} {layout.KIND_NAMES[kind]}"
            collected.setdefault(key, []).append((start, end, *values))
    return collected


def list_readings(node: NodeTables) -> dict[str, list[tuple[int, float]]]:
    """List by `signal device` time and value of each reading."""
    collected: dict[str, list[tuple[int, float]]] = {}
    for record in _list_records(node):
        if isinstance(record, Columns):
            for signal, device, values in zip(record.signals, record.devices, record.values):
                rows = zip(record.t_ns, values)
                collected.setdefault(f"{signal} {device}", []).extend((t, v) for t, v in rows)
    return collected


def list_ranks(node: NodeTables) -> dict[int, tuple[int | None, int | None, str]]:
    """List rank, world size and device by pid."""
    collected = {}
    for record in _list_records(node):
        if isinstance(record, Event) and record.kind == "process-registered":
            attributes = record.attributes
            collected[attributes["pid"]] = (
                attributes["rank"],
                attributes["world_size"],
                attributes["device"],
            )
    return collected


def list_groups(node: NodeTables) -> dict[int, list[int]]:
    """List the ranks of each group."""
    return {
        record.attributes["group"]: record.attributes["ranks"]
        for record in _list_records(node)
        if isinstance(record, Event) and record.kind == "group-announced"
    }


def decode_operation(d: int) -> tuple[int, int]:
    """Decode operation and peer from field d of a collective span."""
    return d & layout.OPERATION_MASK, (d >> layout.PEER_SHIFT & layout.PEER_MASK) - 1


def _list_records(node: NodeTables) -> Iterable[Any]:
    return (record for batch in node.records() for record in batch)


def read_span_table(spans: ImportedSpans) -> np.ndarray:
    """List all spans in the order in which they were added: int64[7, n], by `SPAN_FIELDS`."""
    batches = [np.empty((len(SPAN_FIELDS), 0), np.int64)]
    for batch in spans._batches:
        batches.append(np.vstack(np.broadcast_arrays(*batch.fields(slice(None)))))
    return np.concatenate(batches, axis=1)
