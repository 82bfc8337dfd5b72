"""Prints a recording as JSON lines: the window that makes it readable and testable.

One line per record, strict RFC 8259 in plain ASCII: NaN and infinities are null, everything
outside printable ASCII is escaped, so that no name in a recording reaches a terminal as a command.
The last line sums up what was read and what was damaged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.trace.reader import NodeReader, node_folders
from clusterprof.trace.schema import Columns, Record


def dump(*paths: Path) -> Iterator[str]:
    """Yield a JSON text per record of recordings, nodes or segments, then a summary.

    Raises NoRecording at once when there is nothing to read, and nothing later.
    """
    return _lines(tuple(folder for path in paths for folder in node_folders(path)))


def _lines(folders: tuple[Path, ...]) -> Iterator[str]:
    totals: dict[str, int] = {}
    for folder in folders:
        reader = NodeReader(folder)
        for record in reader:
            yield _json(
                {
                    "record": type(record).__name__.lower(),
                    "folder": folder.name,
                    **_plain_record(record),
                }
            )
        for field in fields(reader.damage):
            totals[field.name] = totals.get(field.name, 0) + getattr(reader.damage, field.name)
    yield _json({"record": "summary", "nodes": len(folders), **totals})


def _plain_record(record: Record) -> dict[str, Any]:
    plain = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
    if isinstance(record, Columns):
        plain["values"] = [
            values
            if mask is None
            else [None if missing else value for value, missing in zip(values, mask)]
            for values, mask in zip(plain["values"], record.masks)
        ]
        del plain["masks"]  # a missing value is null; a Gap says why
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
