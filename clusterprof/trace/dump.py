"""Print a recording as JSON lines, for inspection and tests.

One line per record, strict RFC 8259 in plain ASCII: NaN and infinities are null,
everything outside printable ASCII is escaped, so that no name in a recording can send
commands to a terminal. The last line summarizes what was read and what was damaged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Columns, Record


def export_records(*paths: Path) -> Iterator[str]:
    """Yield a JSON text per record of recordings, nodes or segments, then a summary.

    Raises: NoRecording on the call when there is nothing to read; iterating raises nothing.
    """
    return _iterate_lines(tuple(folder for path in paths for folder in list_node_folders(path)))


def _iterate_lines(folders: tuple[Path, ...]) -> Iterator[str]:
    totals: dict[str, int] = {}
    for folder in folders:
        reader = NodeReader(folder, accepts_implausible_times=True)
        for record in reader:
            yield _format_json(
                {
                    "record": type(record).__name__.lower(),
                    "folder": folder.name,
                    **_convert_record(record),
                }
            )
        for field in fields(reader.damage):
            value = getattr(reader.damage, field.name)
            if field.name.startswith(("implausible_", "altered_")) and not value:
                continue  # the summary of a healthy recording stays as it was
            if isinstance(value, int):
                totals[field.name] = totals.get(field.name, 0) + value
    yield _format_json({"record": "summary", "nodes": len(folders), **totals})


def _convert_record(record: Record) -> dict[str, Any]:
    plain = {field.name: _convert_value(getattr(record, field.name)) for field in fields(record)}
    if isinstance(record, Columns):
        plain["values"] = [
            values
            if mask is None
            else [None if missing else value for value, missing in zip(values, mask)]
            for values, mask in zip(plain["values"], record.masks)
        ]
        del plain["masks"]  # a missing value is null; a Gap gives the reason
    return plain


def _convert_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _convert_value(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _convert_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_value(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value


def _format_json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
