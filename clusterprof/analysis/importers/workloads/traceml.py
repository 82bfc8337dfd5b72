"""The summary that TraceML writes at the end of a run (`final_summary.json`).

## How to make the file

    traceml run train.py --nproc-per-node 8

## How to analyze it

    clusterprof analyze final_summary.json

## What is read

Section `step_time` of schema 1.3 and later: per rank the averages of input wait, step, copies to
the device, forward, backward and optimizer in ms, over the analyzed steps; and the identity of each
rank. TraceML's own diagnosis becomes a note of the report.

## How the numbers are computed

The summary holds averages. Every step therefore gets the average length and the average parts, one
after the other: input wait, copies, forward, backward, optimizer, rest. Sums over the steps are as
measured; differences between steps are lost. Values that TraceML did not measure (`null`) stay
unknown.

## What it cannot see

TraceML does not time collective operations: a slow network looks like a long backward pass. It does
not record the activity of the device, so waits are those of the host, an upper bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import read_json_bytes
from clusterprof.probe import layout

_MAX_STEPS = 1_000_000
_MAX_TOTAL_STEPS = 1 << 14
"""Largest number of steps over all ranks; more identical steps add no information."""
_MAX_MS = 1e9
_PHASES = (
    ("h2d_ms", layout.H2D),
    ("forward_ms", layout.FORWARD),
    ("backward_ms", layout.BACKWARD),
    ("optimizer_ms", layout.OPTIMIZER),
)


class TraceML:
    """Importer of TraceML's final summaries."""

    name: ClassVar[str] = "traceml"
    title: ClassVar[str] = "TraceML summary"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether this is a summary: it begins with its schema and one of its sections."""
        return (
            head.lstrip()[:1] == b"{"
            and b'"schema_version"' in head[:4096]
            and (b'"primary_diagnosis"' in head or b'"step_time"' in head)
        )

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per host.

        Raises: CannotImportError when no rank has a step time.
        """
        for source, account in zip(sources, accounts):
            content = _read_content(source)
            diagnosis = content.get("primary_diagnosis")
            if isinstance(diagnosis, dict) and diagnosis.get("status"):
                text = f"{diagnosis.get('status')}: {diagnosis.get('summary') or ''}".strip(": ")
                account.notes.append(f"TraceML's own diagnosis: {text[:300]}")
                account.answers.append(account.notes[-1])
            yield from _build_nodes(content, account)


def _read_content(source: Source) -> dict[str, Any]:
    try:
        content = json.loads(read_json_bytes(source))
    except (ValueError, RecursionError) as error:
        raise CannotImportError(f"not readable JSON ({str(error)[:120]})") from error
    return content if isinstance(content, dict) else {}


def _build_nodes(content: Mapping[str, Any], account: Account) -> Iterator[NodeTables]:
    section = _get_section(content, "step_time")
    rows = _get_section(_get_section(section, "groups"), "rows")
    window = _get_section(_get_section(section, "global"), "window")
    steps, first = (
        _convert_integer(window.get("steps_analyzed")),
        _convert_integer(window.get("start_step")),
    )
    nodes: dict[str, NodeTables] = {}
    max_steps = min(_MAX_STEPS, _MAX_TOTAL_STEPS // max(len(rows), 1) + 1)
    if steps and steps > max_steps:
        account.notes.append(f"{max_steps:,} of {steps:,} steps are shown: all have the same times")
    for key, row in rows.items():
        if not isinstance(row, dict):
            continue
        identity, metrics = _get_section(row, "identity"), _get_section(row, "metrics")
        rank = _convert_integer(identity.get("global_rank", key))
        step_ms = _convert_milliseconds(metrics.get("step_time_ms"))
        wait_ms = _convert_milliseconds(metrics.get("input_wait_ms"))
        if wait_ms is None:
            wait_ms = _convert_milliseconds(metrics.get("dataloader_ms"))
        if rank is None or not step_ms or not steps:
            account.skipped["ranks without a step time"] += 1
            continue
        host = identity.get("hostname")
        host = host[:255] if isinstance(host, str) else ""
        node = nodes.setdefault(host, NodeTables(host, TraceML.name))
        node.add_rank(rank + 1, rank, _convert_integer(identity.get("world_size")))
        count = min(steps, max_steps)
        _add_steps(node, rank + 1, count, first or 1, step_ms, wait_ms, metrics)
        account.read["ranks"] += 1
        account.read["steps"] += count
    if not nodes:
        raise CannotImportError(
            "no rank has a step time", "TraceML writes it after some steps were traced"
        )
    account.notes.append("averages over all steps: differences between steps are unknown")
    yield from nodes.values()


def _add_steps(
    node: NodeTables,
    pid: int,
    count: int,
    first: int,
    step_ms: float,
    wait_ms: float | None,
    metrics: Mapping[str, Any],
) -> None:
    wait_ns, step_ns = round((wait_ms or 0.0) * 1e6), round(step_ms * 1e6)
    length = wait_ns + step_ns
    start = np.arange(count, dtype=np.int64) * length
    node.add_spans(pid, layout.STEP, start, start + length, first + np.arange(count), 2, -1, -1)
    if wait_ns:
        node.add_spans(pid, layout.DATA_WAIT, start, start + wait_ns, -1, -1, -1, -1)
    phase_start = start + wait_ns
    for name, kind in _PHASES:
        phase_ms = _convert_milliseconds(metrics.get(name))
        phase_ns = min(round((phase_ms or 0.0) * 1e6), int(start[0] + length - phase_start[0]))
        if phase_ns:
            node.add_spans(pid, kind, phase_start, phase_start + phase_ns, -1, -1)
            phase_start = phase_start + phase_ns


def _get_section(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = mapping.get(key)
    return section if isinstance(section, dict) else {}


def _convert_integer(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        value = int(value)
    is_valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
    return value if is_valid else None


def _convert_milliseconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < _MAX_MS else None  # also rejects NaN
