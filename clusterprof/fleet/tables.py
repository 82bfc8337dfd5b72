"""Write the tables of a cluster's ledger for other programs: jobs, causes, nodes, culprits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clusterprof.fleet.database import Ledger, convert_errors
from clusterprof.output.exporters.base import Output
from clusterprof.output.exporters.tables import BATCH_ROWS, Rows, Table
from clusterprof.output.exporters.tabular import open_table_writer, select_named_tables
from clusterprof.output.renderers.text.safety import escape_text

_MAX_CELL_CHARACTERS = 4096
JOBS = Table(
    "jobs",
    (
        *(("job", "int"), ("name", "text"), ("title", "text"), ("user", "text")),
        *(("account", "text"), ("started_ns", "int"), ("week", "text"), ("nodes", "int")),
        *(("gpus", "int"), ("ranks", "int"), ("steps", "int"), ("window_ns", "int")),
        *(("unmeasured_ns", "int"), ("outside_ns", "int"), ("in_step_ns", "int")),
        *(("productive_ns", "int"), ("lost_ns", "int"), ("main_cause", "text")),
        *(("is_upper_bound", "bool"), ("is_emulated", "bool"), ("too_little_seen", "text")),
        *(("price_per_gpu_hour", "float"), ("currency", "text"), ("lost_cost", "float")),
    ),
)
CAUSES = Table(
    "causes",
    (
        *(("job", "int"), ("week", "text"), ("cause", "text"), ("family", "text")),
        *(("lost_ns", "int"), ("outside_ns", "int")),
    ),
)
NODES = Table(
    "nodes",
    (
        *(("job", "int"), ("node", "text"), ("switch", "text"), ("ranks", "int")),
        *(("window_ns", "int"), ("lost_ns", "int"), ("caused_ns", "int")),
        *(("is_tested", "bool"), ("is_culprit", "bool"), ("position", "int")),
        ("chance_ratio", "float"),
    ),
)
CULPRITS = Table(
    "culprits",
    (
        *(("job", "int"), ("cause", "text"), ("node", "text"), ("rank", "int")),
        *(("device", "text"), ("resource", "text"), ("caused_ns", "int")),
    ),
)
FLEET_TABLES = (JOBS, CAUSES, NODES, CULPRITS)
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
    wanted = select_named_tables(output, [table.name for table in FLEET_TABLES], names)
    with convert_errors(ledger.path):
        ledger.connection.execute("BEGIN")  # all tables show the same jobs
        try:
            for table in FLEET_TABLES:
                if table.name in wanted:
                    _write_table(ledger, form, output, table)
        finally:
            ledger.connection.execute("COMMIT")


def _write_table(ledger: Ledger, form: str, output: Output, table: Table) -> None:
    suffix = f".{form}"
    whole = output.open_part(table.name, suffix) if output.is_folder else output.open_whole()
    with whole as file:
        writer = open_table_writer(form, file, table)
        for rows in _iterate_batches(ledger, table):
            writer.write(rows)
        writer.close()


def _iterate_batches(ledger: Ledger, table: Table) -> Iterator[Rows]:
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
