"""JSON Lines: one object per row, its table in the key "table"; RFC 8259, ASCII, null = missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from clusterprof.exporters.base import Run
from clusterprof.exporters.output import Output
from clusterprof.exporters.tables import Rows, Table
from clusterprof.exporters.tabular import tables_for, write_tables


class JsonLines:
    """Tables as JSON Lines; all of them may share one file."""

    name: ClassVar[str] = "json"
    suffix: ClassVar[str] = ".jsonl"

    def __init__(self, tables: Sequence[str] = (), signals: Sequence[str] = ()) -> None:
        """Write these tables (all when none is named) and the signals that fit these patterns."""
        self._tables, self._signals = tables, signals

    def check(self, output: Output) -> None:
        """Refuse tables that there are not."""
        tables_for(output, self._tables, mixed=True)

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write a file per table into a folder, or all lines into one."""
        wanted = tables_for(output, self._tables, mixed=True)
        write_tables(run, output, self.suffix, wanted, self._signals, _Writer)
        return ()


class _Writer:
    def __init__(self, file: Any, table: Table) -> None:
        self._file, self._table = file, table

    def write(self, rows: Rows) -> None:
        names = ["table", *(name for name, _ in self._table.columns)]
        encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
        lines = [
            encode(dict(zip(names, (self._table.name, *row)))) + "\n" for row in zip(*rows.values())
        ]
        self._file.write("".join(lines).encode("ascii"))

    def close(self) -> None:
        """Nothing is left to write."""
