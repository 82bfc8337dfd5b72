"""Select and write tables, for all exporters of tables.

Export tables as comma-separated values, a file per table (RFC 4180, UTF-8, header line
first).

Spreadsheets interpret a text that begins with = + - @ as a formula, so such a text is
prefixed with '. No text contains control characters, numbers stay numbers, missing
values are empty.

Export tables as JSON Lines (RFC 8259, ASCII, null = missing).

One object per row, with its table in the key "table".

Export tables as Apache Parquet with pyarrow (the extra `arrow`), a file per table.

For DuckDB, pandas and Spark.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO, ClassVar, Protocol

from clusterprof.config import format_suggestion
from clusterprof.errors import UsageError
from clusterprof.output.exporters.base import Output, Run
from clusterprof.output.exporters.tables import (
    TABLE_NAMES,
    TABLES,
    ExportTable,
    Rows,
    iterate_batches,
)


class TableWriter(Protocol):
    """Writes the batches of one table into an open file."""

    def write(self, rows: Rows) -> None:
        """Write some rows."""

    def close(self) -> None:
        """Write what follows the last row; the file itself is closed by the caller."""


def select_tables(output: Output, names: Sequence[str], mixed: bool = False) -> list[str]:
    """Select the tables to write, all when none is named.

    mixed: the format may put several tables into one file.
    Raises: UsageError for an unknown table, and for several tables that need a folder.
    """
    return select_named_tables(output, TABLE_NAMES, names, mixed)


def select_named_tables(
    output: Output, known: Sequence[str], names: Sequence[str], mixed: bool = False
) -> list[str]:
    """Select some of the known tables; arguments and errors are those of `select_tables`.

    Raises: UsageError as `select_tables` does.
    """
    for name in names:
        if name not in known:
            raise UsageError(f"unknown table {name!r}{format_suggestion(name, known)}")
    wanted = [name for name in known if name in names or not names]
    if not output.is_folder and not mixed and len(wanted) > 1:
        raise UsageError(
            f"{len(wanted)} tables need a folder: {', '.join(wanted)}",
            f"give -o FOLDER/, or choose one table: --table {wanted[0]}",
        )
    return wanted


def write_tables(
    run: Run,
    output: Output,
    suffix: str,
    wanted: Sequence[str],
    signals: Sequence[str],
    open_writer: Callable[[BinaryIO, ExportTable], TableWriter],
) -> None:
    """Write tables: one file each into a folder, else all wanted ones into one file."""
    with ExitStack() as stack:
        writers: dict[str, TableWriter] = {}
        shared = None if output.is_folder else stack.enter_context(output.open_whole())
        for table in TABLES:
            if table.name in wanted:
                file = shared or stack.enter_context(output.open_part(table.name, suffix))
                writers[table.name] = open_writer(file, table)
        for table, rows in iterate_batches(run, wanted, signals):
            writers[table.name].write(rows)
        for table_writer in writers.values():
            table_writer.close()


def open_table_writer(form: str, file: BinaryIO, table: ExportTable) -> TableWriter:
    """Open the writer of a table in a format: csv or parquet.

    Raises: UsageError without the packages of the format.
    """
    if form == Parquet.name:
        return _ParquetWriter(_import_arrow(), file, table)
    return _CsvWriter(file, table)


_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


class Csv:
    """Exports tables as CSV."""

    name: ClassVar[str] = "csv"
    suffix: ClassVar[str] = ".csv"

    def __init__(self, tables: Sequence[str] = (), signals: Sequence[str] = ()) -> None:
        """Write these tables (all when none is named) and the signals that match these patterns."""
        self._tables, self._signals = tables, signals

    def check(self, output: Output) -> None:
        """Reject unknown tables, and several tables without a folder."""
        select_tables(output, self._tables)

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write a file per table into a folder, or one table."""
        wanted = select_tables(output, self._tables)
        write_tables(run, output, self.suffix, wanted, self._signals, _CsvWriter)
        return ()


class _CsvWriter:
    def __init__(self, file: Any, table: ExportTable) -> None:
        self._file, self._table = file, table
        self._file.write((",".join(name for name, _ in table.columns) + "\r\n").encode())

    def write(self, rows: Rows) -> None:
        text = io.StringIO()
        columns = [
            [escape_formula(value) for value in rows[name]]
            if kind == "text"
            else _format_flags(rows[name])
            if kind == "bool"
            else rows[name]
            for name, kind in self._table.columns
        ]
        csv.writer(text, lineterminator="\r\n").writerows(zip(*columns))
        self._file.write(text.getvalue().encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """There is nothing left to write."""


def escape_formula(text: str) -> str:
    """Escape a text so that no spreadsheet interprets it as a formula."""
    return "'" + text if text.lstrip(" '").startswith(_FORMULA_PREFIXES) else text


def _format_flags(values: Sequence[bool | None]) -> list[str]:
    return ["" if value is None else str(value).lower() for value in values]


class JsonLines:
    """Exports tables as JSON Lines; all tables may share one file."""

    name: ClassVar[str] = "json"
    suffix: ClassVar[str] = ".jsonl"

    def __init__(self, tables: Sequence[str] = (), signals: Sequence[str] = ()) -> None:
        """Write these tables (all when none is named) and the signals that match these patterns."""
        self._tables, self._signals = tables, signals

    def check(self, output: Output) -> None:
        """Reject unknown tables."""
        select_tables(output, self._tables, mixed=True)

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write a file per table into a folder, or all lines into one."""
        wanted = select_tables(output, self._tables, mixed=True)
        write_tables(run, output, self.suffix, wanted, self._signals, _JsonLinesWriter)
        return ()


class _JsonLinesWriter:
    def __init__(self, file: Any, table: ExportTable) -> None:
        self._file, self._table = file, table

    def write(self, rows: Rows) -> None:
        names = ["table", *(name for name, _ in self._table.columns)]
        encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
        lines = [
            encode(dict(zip(names, (self._table.name, *row)))) + "\n" for row in zip(*rows.values())
        ]
        self._file.write("".join(lines).encode("ascii"))

    def close(self) -> None:
        """There is nothing left to write."""


class Parquet:
    """Exports tables as Parquet, compressed with zstd."""

    name: ClassVar[str] = "parquet"
    suffix: ClassVar[str] = ".parquet"

    def __init__(self, tables: Sequence[str] = (), signals: Sequence[str] = ()) -> None:
        """Write these tables (all when none is named) and the signals that match these patterns."""
        self._tables, self._signals = tables, signals

    def check(self, output: Output) -> None:
        """Reject a terminal, several tables without a folder, and a missing pyarrow."""
        if output.is_terminal:
            raise UsageError("Parquet is not text: give it a folder with -o", "-o FOLDER/")
        select_tables(output, self._tables)
        _import_arrow()

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write a file per table into a folder, or one table.

        Raises: UsageError without pyarrow.
        """
        arrow = _import_arrow()

        def open_writer(file: Any, table: ExportTable) -> _ParquetWriter:
            return _ParquetWriter(arrow, file, table)

        wanted = select_tables(output, self._tables)
        write_tables(run, output, self.suffix, wanted, self._signals, open_writer)
        return ()


def _import_arrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError(
            f"export --to parquet needs pyarrow, which cannot be imported ({error})",
            "pip install 'clusterprof[arrow]', or --to csv",
        ) from None


class _ParquetWriter:
    """Writes one row group per batch, so that memory is limited to one batch."""

    def __init__(self, arrow: Any, file: Any, table: ExportTable) -> None:
        self._arrow, self._table = arrow, table
        types = {
            "text": arrow.dictionary(arrow.int32(), arrow.string()),
            "int": arrow.int64(),
            "float": arrow.float64(),
            "bool": arrow.bool_(),
        }
        fields = [arrow.field(name, types[kind]) for name, kind in table.columns]
        about = {"clusterprof.table": table.name, "clusterprof.schema_version": "1"}
        self._schema = arrow.schema(fields, metadata=about)
        self._writer = arrow.parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, rows: Rows) -> None:
        columns = [
            self._arrow.array(
                _convert_floats(rows[name]) if kind == "float" else rows[name], field.type
            )
            for (name, kind), field in zip(self._table.columns, self._schema)
        ]
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _convert_floats(values: Sequence[Any]) -> list[float | None]:
    """Convert to floats, since Arrow rejects integers that a float cannot hold; counters may
    be as large.
    """
    return [None if value is None else float(value) for value in values]
