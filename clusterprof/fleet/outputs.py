"""Render the ledger of a cluster as text, Markdown and JSON; export its tables.

Texts of the document are safe to print (`fleet.sections`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from clusterprof.fleet.database import Ledger, convert_errors
from clusterprof.fleet.queries import FleetSummary, NodeSums
from clusterprof.fleet.sections import FleetDocument, FleetTable
from clusterprof.output.renderers.text.safety import (
    count_columns,
    escape_markdown,
    escape_text,
    fit_to_width,
    wrap_text,
)

if TYPE_CHECKING:
    from clusterprof.output.exporters.base import Output
    from clusterprof.output.exporters.tables import ExportTable, Kind, Rows

SCHEMA_VERSION = 1
_MIN_NAME_COLUMNS = 8
_LABEL_COLUMNS = 14
_BOLD, _FAINT, _END = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def render_fleet_text(document: FleetDocument, width: int = 80, color: bool = False) -> str:
    """Render for a terminal, in at most `width` columns where possible."""
    lines = [_style(f"clusterprof fleet  {document.title}", _BOLD, color)]
    lines += wrap_text(document.scope, width)
    for warning in document.warnings:
        lines += wrap_text(f"{warning}.", width)
    lines.append("")
    for label, text in document.facts:
        first, *further_lines = wrap_text(text, width - _LABEL_COLUMNS - 1) or [""]
        lines.append(f"{label:<{_LABEL_COLUMNS}} {first}")
        lines += [" " * (_LABEL_COLUMNS + 1) + line for line in further_lines]
    for table in document.tables:
        lines += ["", _style(table.title, _BOLD, color)]
        lines += _render_rows(table, width, color)
        note = f"{_describe_left_out(table)}{table.note}"
        lines += [_style(line, _FAINT, color) for line in wrap_text(note.replace("`", ""), width)]
    for note in document.notes:
        lines += ["", *wrap_text(note, width)]
    return "\n".join(lines) + "\n"


def _style(text: str, code: str, color: bool) -> str:
    return f"{code}{text}{_END}" if color else text


def _describe_left_out(table: FleetTable) -> str:
    return f"{table.left_out:,} more: --top N. " if table.left_out else ""


def _render_rows(table: FleetTable, width: int, color: bool) -> Iterator[str]:
    """Render a table; columns of names share the columns that numbers leave."""
    cells = [tuple(heading.text for heading in table.headings), *table.rows]
    widths = [
        max(count_columns(row[column]) for row in cells) for column in range(len(table.headings))
    ]
    widths = _fit_widths(table, widths, width)
    for number, row in enumerate(cells):
        parts = []
        for text, heading, columns in zip(row, table.headings, widths):
            fitted = fit_to_width(text, columns)
            pad = " " * (columns - count_columns(fitted.rstrip()))
            fitted = fitted.rstrip()
            parts.append(pad + fitted if heading.is_number else fitted + pad)
        line = "  ".join(parts).rstrip()
        yield _style(line, _FAINT, color) if number == 0 else line


def _fit_widths(table: FleetTable, widths: Sequence[int], width: int) -> list[int]:
    """Shrink the widest columns of names until a row fits, down to a few columns each."""
    fitted = list(widths)
    names = [column for column, heading in enumerate(table.headings) if not heading.is_number]
    while sum(fitted) + 2 * (len(fitted) - 1) > width and names:
        widest = max(names, key=lambda column: fitted[column])
        if fitted[widest] <= _MIN_NAME_COLUMNS:
            break
        fitted[widest] -= 1
    return fitted


def render_fleet_markdown(document: FleetDocument) -> str:
    """Render as Markdown."""
    lines = [f"# clusterprof fleet: {escape_markdown(document.title)}", "", _mark(document.scope)]
    for warning in document.warnings:
        lines += ["", f"**{_mark(warning)}**"]
    lines.append("")
    lines += [f"* **{label}**: {_mark(text)}" for label, text in document.facts]
    for table in document.tables:
        lines += ["", f"## {table.title}", ""]
        heads = [_mark(heading.text) or " " for heading in table.headings]
        lines.append("| " + " | ".join(heads) + " |")
        marks = ["---:" if heading.is_number else "---" for heading in table.headings]
        lines.append("|" + "|".join(marks) + "|")
        lines += ["| " + " | ".join(_mark(cell) for cell in row) + " |" for row in table.rows]
        lines += ["", f"{_describe_left_out(table)}{table.note}"]
    for note in document.notes:
        lines += ["", _mark(note)]
    return "\n".join(lines) + "\n"


def _mark(text: str) -> str:
    return escape_markdown(text, 2000)


def render_fleet_json(summary: FleetSummary) -> str:
    """Render every table as one JSON document (RFC 8259); keys are only added.

    Times are integer nanoseconds, which add up exactly; what is not known is null or "".
    """
    plain = asdict(summary)
    plain["nodes"] = [_convert_node(node) for node in summary.nodes]
    plain["weeks"] = [
        {**asdict(week), "causes": [_name_amount(*part, "lost_ns") for part in week.causes]}
        for week in summary.weeks
    ]
    plain["lemons"] = [
        {
            "node": lemon.node,
            "causes": [_name_amount(*part, "caused_ns") for part in lemon.causes],
            "devices": [{"device": device, "caused_ns": ns} for device, ns in lemon.devices],
        }
        for lemon in summary.lemons
    ]
    plain["problems"] = [{"path": path, "why": why} for path, why in summary.problems]
    document = {"format": "clusterprof-fleet", "schema_version": SCHEMA_VERSION, **plain}
    return json.dumps(_escape_values(document), indent=2, allow_nan=False) + "\n"


def _convert_node(node: NodeSums) -> dict[str, Any]:
    return {**asdict(node), "is_lemon": node.is_lemon}


def _name_amount(cause: str, ns: int, key: str) -> dict[str, Any]:
    return {"cause": cause, key: ns}


def _escape_values(value: Any) -> Any:
    if isinstance(value, str):
        return escape_text(value, 4096)
    if isinstance(value, dict):
        return {key: _escape_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_values(item) for item in value]
    return value


# --- tables for other programs ---


_MAX_CELL_CHARACTERS = 4096
FLEET_TABLES: dict[str, tuple[tuple[str, Kind], ...]] = {
    "jobs": (
        *(("job", "int"), ("name", "text"), ("title", "text"), ("user", "text")),
        *(("account", "text"), ("started_ns", "int"), ("week", "text"), ("nodes", "int")),
        *(("gpus", "int"), ("ranks", "int"), ("steps", "int"), ("window_ns", "int")),
        *(("unmeasured_ns", "int"), ("outside_ns", "int"), ("in_step_ns", "int")),
        *(("productive_ns", "int"), ("lost_ns", "int"), ("main_cause", "text")),
        *(("is_upper_bound", "bool"), ("is_emulated", "bool"), ("too_little_seen", "text")),
        *(("price_per_gpu_hour", "float"), ("currency", "text"), ("lost_cost", "float")),
    ),
    "causes": (
        *(("job", "int"), ("week", "text"), ("cause", "text"), ("family", "text")),
        *(("lost_ns", "int"), ("outside_ns", "int")),
    ),
    "nodes": (
        *(("job", "int"), ("node", "text"), ("switch", "text"), ("ranks", "int")),
        *(("window_ns", "int"), ("lost_ns", "int"), ("caused_ns", "int")),
        *(("is_tested", "bool"), ("is_culprit", "bool"), ("position", "int")),
        ("chance_ratio", "float"),
    ),
    "culprits": (
        *(("job", "int"), ("cause", "text"), ("node", "text"), ("rank", "int")),
        *(("device", "text"), ("resource", "text"), ("caused_ns", "int")),
    ),
}
"""Table -> its columns, in order."""
_QUERIES = {
    "jobs": "SELECT id, name, title, user, account, started_ns, week, nodes, gpus, ranks, steps,"
    " window_ns, unmeasured_ns, outside_ns, in_step_ns, productive_ns, lost_ns, main_cause,"
    " is_upper_bound, is_emulated, too_little_seen, price_per_gpu_hour, coalesce(currency, ''),"
    " lost_ns * price_per_gpu_hour / 3.6e12 FROM jobs ORDER BY id",
    "causes": "SELECT job, week, causes.name, family, lost_ns, outside_ns FROM job_causes"
    " JOIN causes ON causes.id = cause ORDER BY job, causes.name",
    "nodes": "SELECT job, nodes.name, switch, ranks, window_ns, lost_ns, caused_ns, is_tested,"
    " is_culprit, position, chance_ratio FROM job_nodes JOIN nodes ON nodes.id = node"
    " ORDER BY job, nodes.name",
    "culprits": "SELECT job, causes.name, nodes.name, rank, device, resource, caused_ns"
    " FROM culprits JOIN causes ON causes.id = cause JOIN nodes ON nodes.id = node"
    " ORDER BY job, number",
}


def export_ledger(ledger: Ledger, form: str, output: Output, names: list[str]) -> None:
    """Write tables of a ledger: one file each into a folder, or one table into a file.

    form: parquet or csv. names: tables to write; all when none is named.
    Raises: UsageError for an unknown table, several tables without a folder, and Parquet without
    pyarrow or to a terminal.
    """
    from clusterprof.output.exporters.tables import ExportTable  # the exporters load the analysis
    from clusterprof.output.exporters.tabular import select_named_tables

    wanted = select_named_tables(output, list(FLEET_TABLES), names)
    with convert_errors(ledger.path):
        ledger.connection.execute("BEGIN")  # all tables show the same jobs
        try:
            for name in wanted:
                _write_table(ledger, form, output, ExportTable(name, FLEET_TABLES[name]))
        finally:
            ledger.connection.execute("COMMIT")


def _write_table(ledger: Ledger, form: str, output: Output, table: ExportTable) -> None:
    from clusterprof.output.exporters.tabular import open_table_writer

    suffix = f".{form}"
    whole = output.open_part(table.name, suffix) if output.is_folder else output.open_whole()
    with whole as file:
        writer = open_table_writer(form, file, table)
        for rows in _iterate_batches(ledger, table):
            writer.write(rows)
        writer.close()


def _iterate_batches(ledger: Ledger, table: ExportTable) -> Iterator[Rows]:
    from clusterprof.output.exporters.tables import BATCH_ROWS

    cursor = ledger.connection.execute(_QUERIES[table.name])
    while rows := cursor.fetchmany(BATCH_ROWS):
        columns = zip(*rows)
        yield {
            name: [_convert_cell(value, kind) for value in values]
            for (name, kind), values in zip(table.columns, columns)
        }


def _convert_cell(value: Any, kind: str) -> Any:
    if kind == "text":
        return escape_text(value, _MAX_CELL_CHARACTERS)
    return bool(value) if kind == "bool" else value
