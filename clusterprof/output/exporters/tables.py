"""A recording and its report as tables, made batch by batch while the recording is read.

    samples     a row per reading: node, device, signal, unit, t_ns, value, or why there is none
    spans       a row per span of a process
    events      what happened at one instant
    gaps        what was not seen, from when, and why
    ledger      a row per rank, part of its time and cause; sums to its window to the nanosecond
    findings    a row per cause

Times `*_ns` of instants are ns since 1970 on the clock of all nodes; durations are as measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from clusterprof.exporters.base import Run, RunNode
from clusterprof.exporters.reasons import Reasons
from clusterprof.exporters.span_words import peer_of, span_name
from clusterprof.exporters.tables_report import findings, ledger
from clusterprof.exporters.who import Who
from clusterprof.renderers.text_safety import safe_text
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Columns, Event, Gap, Spans
from clusterprof.units import unit_of

Kind = Literal["text", "int", "float", "bool"]
LONG = 4096  # characters of one foreign string
BATCH_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class Table:
    """The columns of one table, in order."""

    name: str
    columns: tuple[tuple[str, Kind], ...]


SAMPLES = Table(
    "samples",
    (
        ("node", "text"), ("collector", "text"), ("device", "text"), ("signal", "text"),
        ("unit", "text"), ("t_ns", "int"), ("value", "float"), ("why_missing", "text"),
    ),
)  # fmt: skip
SPANS = Table(
    "spans",
    (
        ("node", "text"), ("rank", "int"), ("pid", "int"), ("role", "text"), ("span", "text"),
        ("kind", "int"), ("start_ns", "int"), ("duration_ns", "int"), ("sequence", "int"),
        ("a", "int"), ("b", "int"), ("c", "int"), ("d", "int"), ("peer_rank", "int"),
    ),
)  # fmt: skip
EVENTS = Table(
    "events",
    (("node", "text"), ("t_ns", "int"), ("event", "text"), ("attributes", "text")),
)
GAPS = Table(
    "gaps",
    (
        ("node", "text"), ("t_ns", "int"), ("collector", "text"), ("signal", "text"),
        ("device", "text"), ("kind", "text"), ("message", "text"), ("remedy", "text"),
    ),
)  # fmt: skip
LEDGER = Table(
    "ledger",
    (
        ("node", "text"), ("rank", "int"), ("pid", "int"), ("device", "text"),
        ("emulated", "bool"), ("source", "text"), ("part", "text"), ("cause", "text"),
        ("duration_ns", "int"),
    ),
)  # fmt: skip
FINDINGS = Table(
    "findings",
    (
        ("cause", "text"), ("family", "text"), ("title", "text"), ("lost_ns", "int"),
        ("share_ratio", "float"), ("recoverable_ns", "int"), ("confidence_ratio", "float"),
        ("grade", "text"), ("upper_bound", "bool"), ("outside_steps", "bool"),
        ("culprit_node", "text"), ("culprit_rank", "int"), ("culprit_device", "text"),
        ("culprit_resource", "text"), ("culprits", "int"), ("evidence", "text"),
        ("advice", "text"),
    ),
)  # fmt: skip
TABLES = (SAMPLES, SPANS, EVENTS, GAPS, LEDGER, FINDINGS)
TABLE_NAMES = tuple(table.name for table in TABLES)
_OF_REPORT = {LEDGER.name: ledger, FINDINGS.name: findings}

Rows = Mapping[str, Sequence[Any]]
"""Column -> values, None where there is none; all columns are as long."""


class Batch:
    """Rows of one table that have not been written yet."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.rows = 0
        self.columns: dict[str, list[Any]] = {name: [] for name, _ in table.columns}

    def add(self, rows: int, **columns: Sequence[Any] | str | int | None) -> None:
        """Add rows; what is no list is the same in all of them."""
        for name, values in columns.items():
            if values is None or isinstance(values, str | int):
                values = [values] * rows
            self.columns[name] += values
        self.rows += rows

    def take(self) -> dict[str, list[Any]]:
        """Return the rows, and begin anew."""
        taken = self.columns
        self.columns = {name: [] for name in taken}
        self.rows = 0
        return taken


def batches(
    run: Run, wanted: Sequence[str], signals: Sequence[str]
) -> Iterator[tuple[Table, Rows]]:
    """Yield the rows of the wanted tables, at most some `BATCH_ROWS` at a time; memory is that.

    `signals`: patterns such as `gpu.*`; only samples whose signal fits one are given, all if none.
    """
    recorded = [Batch(one) for one in (SAMPLES, SPANS, EVENTS, GAPS) if one.name in wanted]
    for node in run.nodes if recorded else ():
        yield from _of_node(node, {one.table.name: one for one in recorded}, signals)
    for table in TABLES:
        if table.name in wanted and table.name in _OF_REPORT:
            yield table, _columns(table, _OF_REPORT[table.name](run))


def _columns(table: Table, rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[at] for row in rows] for at, (name, _) in enumerate(table.columns)}


def _of_node(
    node: RunNode, open_: Mapping[str, Batch], signals: Sequence[str]
) -> Iterator[tuple[Table, Rows]]:
    who, reasons, fits = Who(node), Reasons(), Fits(signals)
    name = safe_text(node.name, LONG)
    spoken: dict[tuple[int, int], dict[int, str]] = {}
    for records in NodeReader(node.folder).frames():
        for record in records:
            who.see(record)
            if isinstance(record, Gap):
                reasons.see(record)
                if GAPS.name in open_:
                    _gap(open_[GAPS.name], node, name, record)
            elif isinstance(record, Columns) and SAMPLES.name in open_:
                _samples(open_[SAMPLES.name], node, name, record, reasons, fits)
            elif isinstance(record, Spans) and SPANS.name in open_:
                _spans(open_[SPANS.name], node, name, record, who, spoken)
            elif isinstance(record, Event) and EVENTS.name in open_:
                _event(open_[EVENTS.name], node, name, record)
        for batch in open_.values():
            if batch.rows >= BATCH_ROWS:
                yield batch.table, batch.take()
    for batch in open_.values():
        if batch.rows:
            yield batch.table, batch.take()


class Fits:
    """Which signals are wanted."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns
        self._known: dict[str, bool] = {}

    def __call__(self, signal: str) -> bool:
        known = self._known.get(signal)
        if known is None:
            known = any(fnmatchcase(signal, pattern) for pattern in self._patterns)
            self._known[signal] = known = known or not self._patterns
        return known


def _samples(
    batch: Batch, node: RunNode, name: str, found: Columns, reasons: Reasons, fits: Fits
) -> None:
    rows = len(found.t_ns)
    if not rows:
        return
    t_ns = node.common_ns(found.t_ns).tolist()
    collector = safe_text(found.collector, LONG)
    columns = zip(found.signals, found.devices, found.values, found.masks)
    for signal, device, values, mask in columns:
        if not fits(signal):
            continue
        missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(rows, np.bool_)
        if mask is not None:
            missing |= np.frombuffer(mask, np.uint8) != 0
        read: list[Any] = values.tolist()
        why: str | list[str] = ""
        if missing.any():
            said = reasons.of(found.collector, signal, device)
            gone = missing.tolist()
            read = [None if lost else value for value, lost in zip(read, gone)]
            why = [said if lost else "" for lost in gone]
        batch.add(
            rows, node=name, collector=collector, device=safe_text(device, LONG),
            signal=safe_text(signal, LONG), unit=_unit(signal), t_ns=t_ns, value=read,
            why_missing=why,
        )  # fmt: skip


def _unit(signal: str) -> str:
    try:
        return unit_of(signal)
    except ValueError:  # of a recorder newer than this reader
        return ""


def _spans(
    batch: Batch,
    node: RunNode,
    name: str,
    spans: Spans,
    who: Who,
    spoken: dict[tuple[int, int], dict[int, str]],
) -> None:
    rows = len(spans.columns["start_ns"])
    if not rows:
        return
    names = spoken.setdefault((spans.pid, spans.started_ticks), {})
    names.update(spans.names)
    person = who.of(spans.pid, spans.started_ticks)
    columns = {field: column.tolist() for field, column in spans.columns.items()}
    start, end = spans.columns["start_ns"], spans.columns["end_ns"]
    pairs = list(zip(columns["kind"], columns["d"]))
    batch.add(
        rows, node=name, rank=person.global_rank, pid=spans.pid, role=person.role,
        span=[span_name(kind, d, names) for kind, d in pairs], kind=columns["kind"],
        start_ns=node.common_ns(start).tolist(), duration_ns=(end - start).tolist(),
        sequence=list(range(spans.first_sequence, spans.first_sequence + rows)),
        peer_rank=[peer_of(kind, d) for kind, d in pairs],
        **{field: columns[field] for field in "abcd"},
    )  # fmt: skip


def _event(batch: Batch, node: RunNode, name: str, event: Event) -> None:
    said = json.dumps(event.attributes, default=str, sort_keys=True)  # ASCII, whatever is in it
    batch.add(
        1, node=name, t_ns=node.instant_ns(event.t_ns), event=safe_text(event.kind, LONG),
        attributes=safe_text(said, LONG),
    )  # fmt: skip


def _gap(batch: Batch, node: RunNode, name: str, gap: Gap) -> None:
    words = (gap.collector, gap.signal, gap.device, gap.kind, gap.message, gap.remedy)
    keys = ("collector", "signal", "device", "kind", "message", "remedy")
    said = {key: safe_text(word, LONG) for key, word in zip(keys, words)}
    batch.add(1, node=name, t_ns=node.instant_ns(gap.t_ns), **said)
