"""What exporters of tables share: which tables, and which file each goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import BinaryIO, Protocol

from clusterprof.errors import UsageError
from clusterprof.exporters.base import Run
from clusterprof.exporters.output import Output
from clusterprof.exporters.tables import TABLE_NAMES, TABLES, Rows, Table, batches
from clusterprof.profiles import nearest


class Writer(Protocol):
    """Writes the batches of one table into an open file."""

    def write(self, rows: Rows) -> None:
        """Write some rows."""

    def close(self) -> None:
        """Write what stands at the end; the file itself is closed by others."""


def tables_for(output: Output, names: Sequence[str], mixed: bool = False) -> list[str]:
    """Return the tables to write, all when none is named.

    Raises UsageError for a table that there is not, and for several that need a folder; those of
    a `mixed` format may share a file.
    """
    for name in names:
        if name not in TABLE_NAMES:
            raise UsageError(f"there is no table {name!r}{nearest(name, TABLE_NAMES)}")
    wanted = [name for name in TABLE_NAMES if name in names or not names]
    if not output.is_folder and not mixed and len(wanted) > 1:
        raise UsageError(
            f"{len(wanted)} tables need a folder: {', '.join(wanted)}",
            f"-o FOLDER/, or one of them with --table {wanted[0]}",
        )
    return wanted


def write_tables(
    run: Run,
    output: Output,
    suffix: str,
    wanted: Sequence[str],
    signals: Sequence[str],
    writer: Callable[[BinaryIO, Table], Writer],
) -> None:
    """Write tables: a file each into a folder, else all that are wanted into one file."""
    with ExitStack() as stack:
        writers: dict[str, Writer] = {}
        shared = None if output.is_folder else stack.enter_context(output.whole())
        for table in TABLES:
            if table.name in wanted:
                file = shared or stack.enter_context(output.part(table.name, suffix))
                writers[table.name] = writer(file, table)
        for table, rows in batches(run, wanted, signals):
            writers[table.name].write(rows)
        for one in writers.values():
            one.close()
