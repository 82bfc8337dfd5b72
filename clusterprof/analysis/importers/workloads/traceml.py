"""TraceML's end-of-run summary (`final_summary.json`).

## What is read

Section `step_time` of schema 1.3 and later: per rank the average of its input wait, step, copies to
the device, forward, backward and optimizer, in ms, over the steps that were analysed; who each rank
is; and TraceML's own diagnosis, which is passed on as a note.

## How it is understood

A summary holds averages, so every step is given the average's length and parts, one behind the
other: input wait, copies, forward, backward, optimizer, what is left. Sums over the steps are what
was measured; how steps differed is gone. What TraceML never measured (`null`) stays unknown.

## Where it is blind

TraceML does not time collective operations: a slow network looks like a long backward pass. Nothing
says what the device did meanwhile, so waits are those of the host, an upper bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.tables import NodeTables
from clusterprof.importers.text_lines import whole_bytes
from clusterprof.probe import layout

_STEPS_AT_MOST = 1_000_000
_STEPS_OF_ALL = 1 << 18
"""Of all ranks together; more of the same say nothing more."""
_MS_AT_MOST = 1e9
_PARTS = (
    ("h2d_ms", layout.H2D),
    ("forward_ms", layout.FORWARD),
    ("backward_ms", layout.BACKWARD),
    ("optimizer_ms", layout.OPTIMIZER),
)


class TraceML:
    """TraceML's final summaries."""

    name: ClassVar[str] = "traceml"
    title: ClassVar[str] = "TraceML summary"
    together: ClassVar[bool] = False

    def recognises(self, head: bytes, path: Path) -> bool:
        """Say whether this is a summary: its schema and one of its sections come first."""
        return (
            head.lstrip()[:1] == b"{"
            and b'"schema_version"' in head[:4096]
            and (b'"primary_diagnosis"' in head or b'"step_time"' in head)
        )

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per host. Raises CannotImportError when no rank has a step time."""
        for source, account in zip(sources, accounts):
            content = _content(source)
            said = content.get("primary_diagnosis")
            if isinstance(said, dict) and said.get("status"):
                words = f"{said.get('status')}: {said.get('summary') or ''}".strip(": ")
                account.notes.append(f"TraceML's own diagnosis: {words[:300]}")
            yield from _nodes(content, account)


def _content(source: Source) -> dict[str, Any]:
    try:
        found = json.loads(whole_bytes(source))
    except (ValueError, RecursionError) as error:
        raise CannotImportError(f"no JSON that can be read ({str(error)[:120]})") from error
    return found if isinstance(found, dict) else {}


def _nodes(content: Mapping[str, Any], account: Account) -> Iterator[NodeTables]:
    section = _part(content, "step_time")
    rows = _part(_part(section, "groups"), "rows")
    window = _part(_part(section, "global"), "window")
    steps, first = _whole(window.get("steps_analyzed")), _whole(window.get("start_step"))
    nodes: dict[str, NodeTables] = {}
    most = min(_STEPS_AT_MOST, _STEPS_OF_ALL // max(len(rows), 1) + 1)
    if steps and steps > most:
        account.notes.append(f"{most:,} of {steps:,} steps are shown: all are alike here")
    for key, row in rows.items():
        if not isinstance(row, dict):
            continue
        who, metrics = _part(row, "identity"), _part(row, "metrics")
        rank = _whole(who.get("global_rank", key))
        step_ms = _milliseconds(metrics.get("step_time_ms"))
        wait_ms = _milliseconds(metrics.get("input_wait_ms"))
        if wait_ms is None:
            wait_ms = _milliseconds(metrics.get("dataloader_ms"))
        if rank is None or not step_ms or not steps:
            account.skipped["ranks without a step time"] += 1
            continue
        host = who.get("hostname")
        host = host[:255] if isinstance(host, str) else ""
        node = nodes.setdefault(host, NodeTables(host, TraceML.name))
        node.rank(rank + 1, rank, _whole(who.get("world_size")))
        count = min(steps, most)
        _add_steps(node, rank + 1, count, first or 1, step_ms, wait_ms, metrics)
        account.read["ranks"] += 1
        account.read["steps"] += count
    if not nodes:
        raise CannotImportError(
            "no rank has a step time in it", "TraceML writes one once some steps were traced"
        )
    account.notes.append("averages over all steps: how steps differed is not known")
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
    node.spans(pid, layout.STEP, start, start + length, first + np.arange(count), 2, -1, -1)
    if wait_ns:
        node.spans(pid, layout.DATA_WAIT, start, start + wait_ns, -1, -1, -1, -1)
    at = start + wait_ns
    for name, kind in _PARTS:
        part_ms = _milliseconds(metrics.get(name))
        part_ns = min(round((part_ms or 0.0) * 1e6), int(start[0] + length - at[0]))
        if part_ns:
            node.spans(pid, kind, at, at + part_ns, -1, -1)
            at = at + part_ns


def _part(some: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = some.get(key)
    return found if isinstance(found, dict) else {}


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        value = int(value)
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
    return value if good else None


def _milliseconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < _MS_AT_MOST else None  # nor NaN
