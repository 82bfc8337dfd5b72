"""Apache Parquet by pyarrow (the extra `arrow`): a file per table, for DuckDB, pandas, Spark."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

from clusterprof.errors import UsageError
from clusterprof.exporters.base import Run
from clusterprof.exporters.output import Output
from clusterprof.exporters.tables import Rows, Table
from clusterprof.exporters.tabular import tables_for, write_tables


class Parquet:
    """Tables as Parquet, zstd inside."""

    name: ClassVar[str] = "parquet"
    suffix: ClassVar[str] = ".parquet"

    def __init__(self, tables: Sequence[str] = (), signals: Sequence[str] = ()) -> None:
        """Write these tables (all when none is named) and the signals that fit these patterns."""
        self._tables, self._signals = tables, signals

    def check(self, output: Output) -> None:
        """Refuse a terminal, several tables without a folder, and to go without pyarrow."""
        if output.is_terminal:
            raise UsageError("Parquet is not text: give it a folder with -o", "-o FOLDER/")
        tables_for(output, self._tables)
        _arrow()

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write a file per table into a folder, or one table; raises UsageError without pyarrow."""
        arrow = _arrow()

        def writer(file: Any, table: Table) -> _Writer:
            return _Writer(arrow, file, table)

        wanted = tables_for(output, self._tables)
        write_tables(run, output, self.suffix, wanted, self._signals, writer)
        return ()


def _arrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError(
            f"export --to parquet needs pyarrow, which cannot be imported ({error})",
            "pip install 'clusterprof[arrow]', or --to csv",
        ) from None


class _Writer:
    """One row group per batch, so that memory is that of a batch."""

    def __init__(self, arrow: Any, file: Any, table: Table) -> None:
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
            self._arrow.array(_floats(rows[name]) if kind == "float" else rows[name], field.type)
            for (name, kind), field in zip(self._table.columns, self._schema)
        ]
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _floats(values: Sequence[Any]) -> list[float | None]:
    """Arrow refuses whole numbers that a float cannot hold exactly; counters may be as large."""
    return [None if value is None else float(value) for value in values]
