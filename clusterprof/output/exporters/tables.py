"""Build tables of a recording and its report, batch by batch while the recording is read.

    samples     a row per reading: node, device, signal, unit, t_ns, value, why missing
    spans       a row per span of a process
    events      events at one instant
    gaps        what could not be observed, from when, and why
    ledger      a row per rank, part of its time and cause; sums to its window
    findings    a row per cause

Times `*_ns` of instants are ns since 1970 on the common clock; durations are as
measured.

Build the tables made from the report: the ledger of every rank, and the findings.

Track why values are missing: the gaps of a recording, collected while it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from clusterprof.output.exporters.base import Run, RunNode
from clusterprof.output.exporters.processes import ProcessDirectory, decode_peer, format_span_name
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.probe.layout import ARGUMENTS
from clusterprof.report.model import Finding, RankLedger
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Columns, Event, Gap, Spans
from clusterprof.units import format_quantity, infer_unit

MAX_TEXT_CHARACTERS = 4096
_UNMEASURED, _OUTSIDE, _PRODUCTIVE, _LOST = "unmeasured", "outside", "productive", "lost"
_CAUSED = "caused"


def build_ledger_rows(run: Run) -> list[tuple[Any, ...]]:
    """Build a row per rank, part of its window, and cause.

    Per rank the parts unmeasured, outside, productive and lost add up to its window.
    `caused` assigns the same lost time to its culprits, and is not a further part.
    """
    emulated = {rank.index: rank.emulated for node in run.nodes for rank in node.ranks}
    rows: list[tuple[Any, ...]] = []
    for index, rank in enumerate(run.report.ranks):
        identity = (
            escape_text(rank.node, MAX_TEXT_CHARACTERS),
            rank.rank,
            rank.pid,
            escape_text(rank.device, MAX_TEXT_CHARACTERS),
            emulated.get(index, run.report.emulated),
            escape_text(rank.source, MAX_TEXT_CHARACTERS),
        )
        rows += [
            (*identity, part, escape_text(cause, MAX_TEXT_CHARACTERS), ns)
            for part, cause, ns in _split_window(rank)
        ]
    is_emulated = run.report.emulated
    rows += [
        ("", None, None, "", is_emulated, "", _CAUSED, escape_text(cause, MAX_TEXT_CHARACTERS), ns)
        for cause, ns in run.report.lost_without_culprit
    ]
    return rows


def _split_window(rank: RankLedger) -> list[tuple[str, str, int]]:
    return [
        (_UNMEASURED, "", rank.unmeasured_ns),
        (_PRODUCTIVE, "", rank.productive_ns),
        *((_OUTSIDE, cause, ns) for cause, ns in rank.outside_buckets),
        *((_LOST, cause, ns) for cause, ns in rank.buckets),
        *((_CAUSED, cause, ns) for cause, ns in rank.caused),
    ]


def build_finding_rows(run: Run) -> list[tuple[Any, ...]]:
    """Build a row per finding, with its first culprit, in the order of the report."""
    return [_build_finding_row(finding) for finding in run.report.findings]


def _build_finding_row(finding: Finding) -> tuple[Any, ...]:
    cause, first = finding.cause, finding.culprits[0] if finding.culprits else None
    evidence = "; ".join(
        f"{item.name} {format_quantity(item.value, item.unit)} {item.note}".strip()
        for item in finding.evidence
    )
    advice = finding.advice[0].what if finding.advice else cause.advice
    return (
        *(escape_text(word, MAX_TEXT_CHARACTERS) for word in (cause.id, cause.family, cause.title)),
        finding.lost_ns,
        _convert_number(finding.share_ratio),
        finding.recoverable_ns,
        _convert_number(finding.confidence_ratio),
        escape_text(finding.grade, MAX_TEXT_CHARACTERS),
        finding.upper_bound,
        finding.outside_steps,
        escape_text(first.node, MAX_TEXT_CHARACTERS) if first else "",
        first.rank if first else None,
        escape_text(first.device, MAX_TEXT_CHARACTERS) if first else "",
        escape_text(first.resource, MAX_TEXT_CHARACTERS) if first else "",
        len(finding.culprits),
        escape_text(evidence, MAX_TEXT_CHARACTERS),
        escape_text(advice, MAX_TEXT_CHARACTERS),
    )


def _convert_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


NO_REASON = "missing, and the recording does not say why"


class GapReasons:
    """The latest gap of every column, device and collector of one node."""

    def __init__(self) -> None:
        self._gaps: dict[tuple[str, str, str], str] = {}

    def add(self, gap: Gap) -> None:
        """Add one gap."""
        self._gaps[gap.collector, gap.signal, gap.device] = format_reason(gap)

    def find(self, collector: str, signal: str, device: str) -> str:
        """Find why a column has no value, from its most specific gap."""
        places = ((signal, device), (signal, ""), ("", device), ("", ""))
        for place in places:
            reason = self._gaps.get((collector, *place))
            if reason is not None:
                return reason
        return NO_REASON


def format_reason(gap: Gap) -> str:
    """Format a gap's reason as text that is safe to display."""
    return escape_text(f"{gap.kind}: {gap.message}", 1000)


Kind = Literal["text", "int", "float", "bool"]
MAX_CELL_CHARACTERS = 4096  # of one text from the recording
BATCH_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class ExportTable:
    """The columns of one table, in order."""

    name: str
    columns: tuple[tuple[str, Kind], ...]


SAMPLES = ExportTable(
    "samples",
    (
        ("node", "text"),
        ("collector", "text"),
        ("device", "text"),
        ("signal", "text"),
        ("unit", "text"),
        ("t_ns", "int"),
        ("value", "float"),
        ("why_missing", "text"),
    ),
)
SPANS = ExportTable(
    "spans",
    (
        ("node", "text"),
        ("rank", "int"),
        ("pid", "int"),
        ("role", "text"),
        ("span", "text"),
        ("kind", "int"),
        ("start_ns", "int"),
        ("duration_ns", "int"),
        ("sequence", "int"),
        ("value_names", "text"),
        ("value_1", "int"),
        ("value_2", "int"),
        ("value_3", "int"),
        ("value_4", "int"),
        ("peer_rank", "int"),
    ),
)
EVENTS = ExportTable(
    "events", (("node", "text"), ("t_ns", "int"), ("event", "text"), ("attributes", "text"))
)
GAPS = ExportTable(
    "gaps",
    (
        ("node", "text"),
        ("t_ns", "int"),
        ("collector", "text"),
        ("signal", "text"),
        ("device", "text"),
        ("kind", "text"),
        ("message", "text"),
        ("remedy", "text"),
    ),
)
LEDGER = ExportTable(
    "ledger",
    (
        ("node", "text"),
        ("rank", "int"),
        ("pid", "int"),
        ("device", "text"),
        ("emulated", "bool"),
        ("source", "text"),
        ("part", "text"),
        ("cause", "text"),
        ("duration_ns", "int"),
    ),
)
FINDINGS = ExportTable(
    "findings",
    (
        ("cause", "text"),
        ("family", "text"),
        ("title", "text"),
        ("lost_ns", "int"),
        ("share_ratio", "float"),
        ("recoverable_ns", "int"),
        ("confidence_ratio", "float"),
        ("grade", "text"),
        ("upper_bound", "bool"),
        ("outside_steps", "bool"),
        ("culprit_node", "text"),
        ("culprit_rank", "int"),
        ("culprit_device", "text"),
        ("culprit_resource", "text"),
        ("culprits", "int"),
        ("evidence", "text"),
        ("advice", "text"),
    ),
)
TABLES = (SAMPLES, SPANS, EVENTS, GAPS, LEDGER, FINDINGS)
TABLE_NAMES = tuple(table.name for table in TABLES)
_REPORT_TABLES = {LEDGER.name: build_ledger_rows, FINDINGS.name: build_finding_rows}

Rows = Mapping[str, Sequence[Any]]
"""Column -> values, None where there is none; all columns have equal length."""


class TableBatch:
    """Rows of one table that have not been written yet."""

    def __init__(self, table: ExportTable) -> None:
        self.table = table
        self.rows = 0
        self.columns: dict[str, list[Any]] = {name: [] for name, _ in table.columns}

    def add(self, rows: int, **columns: Sequence[Any] | str | int | None) -> None:
        """Add rows; a value that is not a list is repeated in all of them."""
        for name, values in columns.items():
            if values is None or isinstance(values, str | int):
                values = [values] * rows
            self.columns[name] += values
        self.rows += rows

    def take(self) -> dict[str, list[Any]]:
        """Return the rows, and start an empty batch."""
        columns = self.columns
        self.columns = {name: [] for name in columns}
        self.rows = 0
        return columns


def iterate_batches(
    run: Run, wanted: Sequence[str], signals: Sequence[str]
) -> Iterator[tuple[ExportTable, Rows]]:
    """Yield the rows of the wanted tables, in batches of about `BATCH_ROWS` that bound memory.

    signals: patterns such as `gpu.*`; only samples of matching signals are included, all if
    empty.
    """
    recorded = [
        TableBatch(table) for table in (SAMPLES, SPANS, EVENTS, GAPS) if table.name in wanted
    ]
    for node in run.nodes if recorded else ():
        yield from _iterate_node_batches(
            node, {batch.table.name: batch for batch in recorded}, signals
        )
    for table in TABLES:
        if table.name in wanted and table.name in _REPORT_TABLES:
            yield table, _convert_rows(table, _REPORT_TABLES[table.name](run))


def _convert_rows(table: ExportTable, rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[column] for row in rows] for column, (name, _) in enumerate(table.columns)}


def _iterate_node_batches(
    node: RunNode, batches: Mapping[str, TableBatch], signals: Sequence[str]
) -> Iterator[tuple[ExportTable, Rows]]:
    processes, reasons, is_selected = ProcessDirectory(node), GapReasons(), SignalFilter(signals)
    name = escape_text(node.name, MAX_CELL_CHARACTERS)
    kind_names: dict[tuple[int, int], dict[int, str]] = {}
    for records in NodeReader(node.folder).frames():
        for record in records:
            processes.update(record)
            if isinstance(record, Gap):
                reasons.add(record)
                if GAPS.name in batches:
                    _add_gap(batches[GAPS.name], node, name, record)
            elif isinstance(record, Columns) and SAMPLES.name in batches:
                _add_samples(batches[SAMPLES.name], node, name, record, reasons, is_selected)
            elif isinstance(record, Spans) and SPANS.name in batches:
                _add_spans(batches[SPANS.name], node, name, record, processes, kind_names)
            elif isinstance(record, Event) and EVENTS.name in batches:
                _add_event(batches[EVENTS.name], node, name, record)
        for batch in batches.values():
            if batch.rows >= BATCH_ROWS:
                yield batch.table, batch.take()
    for batch in batches.values():
        if batch.rows:
            yield batch.table, batch.take()


class SignalFilter:
    """Selects signals by patterns."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns
        self._known: dict[str, bool] = {}

    def __call__(self, signal: str) -> bool:
        is_selected = self._known.get(signal)
        if is_selected is None:
            is_selected = any(fnmatchcase(signal, pattern) for pattern in self._patterns)
            self._known[signal] = is_selected = is_selected or not self._patterns
        return is_selected


def _add_samples(
    batch: TableBatch,
    node: RunNode,
    name: str,
    record: Columns,
    reasons: GapReasons,
    is_selected: SignalFilter,
) -> None:
    rows = len(record.t_ns)
    if not rows:
        return
    t_ns = node.common_ns(record.t_ns).tolist()
    collector = escape_text(record.collector, MAX_CELL_CHARACTERS)
    columns = zip(record.signals, record.devices, record.values, record.masks)
    for signal, device, values, mask in columns:
        if not is_selected(signal):
            continue
        missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(rows, np.bool_)
        if mask is not None:
            missing |= np.frombuffer(mask, np.uint8) != 0
        read: list[Any] = values.tolist()
        why: str | list[str] = ""
        if missing.any():
            reason = reasons.find(record.collector, signal, device)
            missing_rows = missing.tolist()
            read = [None if lost else value for value, lost in zip(read, missing_rows)]
            why = [reason if lost else "" for lost in missing_rows]
        batch.add(
            rows,
            node=name,
            collector=collector,
            device=escape_text(device, MAX_CELL_CHARACTERS),
            signal=escape_text(signal, MAX_CELL_CHARACTERS),
            unit=_infer_signal_unit(signal),
            t_ns=t_ns,
            value=read,
            why_missing=why,
        )


def _infer_signal_unit(signal: str) -> str:
    try:
        return infer_unit(signal)
    except ValueError:  # written by a recorder newer than this reader
        return ""


_VALUE_NAMES = {kind: " ".join(names) for kind, names in ARGUMENTS.items()}
"""What the values of a span are, in order; further values are unused."""


def _add_spans(
    batch: TableBatch,
    node: RunNode,
    name: str,
    spans: Spans,
    processes: ProcessDirectory,
    kind_names: dict[tuple[int, int], dict[int, str]],
) -> None:
    rows = len(spans.columns["start_ns"])
    if not rows:
        return
    names = kind_names.setdefault((spans.pid, spans.started_ticks), {})
    names.update(spans.names)
    process = processes.find(spans.pid, spans.started_ticks)
    columns = {field: column.tolist() for field, column in spans.columns.items()}
    start, end = spans.columns["start_ns"], spans.columns["end_ns"]
    pairs = list(zip(columns["kind"], columns["d"]))
    batch.add(
        rows,
        node=name,
        rank=process.global_rank,
        pid=spans.pid,
        role=process.role,
        span=[format_span_name(kind, d, names) for kind, d in pairs],
        kind=columns["kind"],
        start_ns=node.common_ns(start).tolist(),
        duration_ns=(end - start).tolist(),
        sequence=list(range(spans.first_sequence, spans.first_sequence + rows)),
        peer_rank=[decode_peer(kind, d) for kind, d in pairs],
        value_names=[_VALUE_NAMES.get(kind, "") for kind in columns["kind"]],
        **{f"value_{number}": columns[field] for number, field in enumerate("abcd", 1)},
    )


def _add_event(batch: TableBatch, node: RunNode, name: str, event: Event) -> None:
    attributes = json.dumps(
        event.attributes, default=str, sort_keys=True
    )  # ASCII, whatever it contains
    batch.add(
        1,
        node=name,
        t_ns=node.instant_ns(event.t_ns),
        event=escape_text(event.kind, MAX_CELL_CHARACTERS),
        attributes=escape_text(attributes, MAX_CELL_CHARACTERS),
    )


def _add_gap(batch: TableBatch, node: RunNode, name: str, gap: Gap) -> None:
    words = (gap.collector, gap.signal, gap.device, gap.kind, gap.message, gap.remedy)
    keys = ("collector", "signal", "device", "kind", "message", "remedy")
    texts = {key: escape_text(word, MAX_CELL_CHARACTERS) for key, word in zip(keys, words)}
    batch.add(1, node=name, t_ns=node.instant_ns(gap.t_ns), **texts)
