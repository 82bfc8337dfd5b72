"""Comma-separated values, a file per table (RFC 4180, UTF-8, a line of names first).

A spreadsheet takes a text that begins with = + - @ for a formula: such a text gets a ' in front.
Nothing that controls anything is in any of them, numbers stay numbers, what is missing is empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, ClassVar

from clusterprof.exporters.base import Run
from clusterprof.exporters.output import Output
from clusterprof.exporters.tables import Rows, Table
from clusterprof.exporters.tabular import tables_for, write_tables

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Csv:
    """Tables as CSV."""

    name: ClassVar[str] = "csv"
    suffix: ClassVar[str] = ".csv"

    def __init__(self, tables: Sequence[str] = (), signals: Sequence[str] = ()) -> None:
        """Write these tables (all when none is named) and the signals that fit these patterns."""
        self._tables, self._signals = tables, signals

    def check(self, output: Output) -> None:
        """Refuse tables that there are not, and several without a folder."""
        tables_for(output, self._tables)

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write a file per table into a folder, or one table."""
        wanted = tables_for(output, self._tables)
        write_tables(run, output, self.suffix, wanted, self._signals, _Writer)
        return ()


class _Writer:
    def __init__(self, file: Any, table: Table) -> None:
        self._file, self._table = file, table
        self._file.write((",".join(name for name, _ in table.columns) + "\r\n").encode())

    def write(self, rows: Rows) -> None:
        text = io.StringIO()
        columns = [
            [neutral(value) for value in rows[name]]
            if kind == "text"
            else _flags(rows[name])
            if kind == "bool"
            else rows[name]
            for name, kind in self._table.columns
        ]
        csv.writer(text, lineterminator="\r\n").writerows(zip(*columns))
        self._file.write(text.getvalue().encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Nothing is left to write."""


def neutral(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula."""
    return "'" + text if text.lstrip(" '").startswith(_FORMULA) else text


def _flags(values: Sequence[bool | None]) -> list[str]:
    return ["" if value is None else str(value).lower() for value in values]
