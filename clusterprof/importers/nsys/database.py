"""A SQLite database of somebody else's, read so that nothing in it can do anything.

Opened read only and immutable; no extension, no trusted schema, so no view, trigger, virtual table
or generated column is ever run. Only known tables are asked, and only for columns they have. A
statement that works for longer than the size of the file explains without bringing a row is
stopped, and so is one that brings more rows than fit into the file: pages may refer to each other
in circles. Huge values are refused.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from clusterprof.errors import UsageError
from clusterprof.importers.base import Source

MAGIC = b"SQLite format 3\x00"
UNPACKED_BYTES_AT_MOST = 1 << 30
SECONDS_WITHOUT_A_ROW = 2.0
SECONDS_PER_BYTE = 1 / (20 << 20)
"""Looking through a file without finding anything is not slower than this."""
_ROW_BYTES = 6  # of a page, at least
_VALUE_BYTES = 64 << 20  # what a process printed may be one string
_TEXT_CHARACTERS = 512
_ROWS = 65_536
_STEPS = 100_000  # of SQLite's machine, between two looks at the clock
_NO_TIME = 1 << 62
_LENGTH, _ATTACHED = 0, 7  # numbers of limits
Int = NDArray[np.int64]


class DamagedError(Exception):
    """The database could not be read on; what came before is good."""


class Database:
    """Known tables of one file, as rows or as numpy arrays; a context manager.

    Raises UsageError when the file cannot be opened at all.
    """

    def __init__(self, source: Source) -> None:
        self._deadline = 0.0
        self._db, size = _opened(source)
        self._patience_s = SECONDS_WITHOUT_A_ROW + size * SECONDS_PER_BYTE
        self._rows_at_most = size // _ROW_BYTES
        self._db.set_progress_handler(lambda: int(time.monotonic() > self._deadline), _STEPS)
        self._db.text_factory = lambda data: data.decode("utf-8", "replace")
        if hasattr(self._db, "setlimit"):  # since Python 3.11
            for limit, most in ((_LENGTH, _VALUE_BYTES), (_ATTACHED, 0)):
                self._db.setlimit(limit, most)
        try:
            self._run("PRAGMA trusted_schema = OFF")
            self._run("PRAGMA cell_size_check = ON")
            self.tables = self._tables()
        except (sqlite3.Error, DamagedError) as error:
            self.close()
            raise UsageError(f"{source.path}: not a readable SQLite file ({error})") from error

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def has(self, table: str, *columns: str) -> bool:
        """Say whether there is a table with these columns."""
        return table in self.tables and all(one in self.tables[table] for one in columns)

    def count(self, table: str) -> int:
        """Return how many rows a table has. Raises DamagedError."""
        if table not in self.tables:
            return 0
        # A plain count cannot be stopped, not even where pages are in circles.
        some = f'SELECT 1 FROM "{table}" LIMIT {self._rows_at_most + 1}'
        return int(next(iter(self._some(f"SELECT count(*) FROM ({some})", ())))[0][0])

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
        """Yield columns of a table, some rows at a time; what it lacks is None.

        Raises DamagedError where the file cannot be read on.
        """
        if table not in self.tables:
            return
        known = self.tables[table]
        names = ", ".join(_shortened(one) if one in known else "NULL" for one in columns)
        yield from self._some(f'SELECT {names} FROM "{table}"', ())

    def integers(
        self, table: str, times: Sequence[str], others: Sequence[str] = ()
    ) -> Iterator[Int]:
        """Yield integer columns of a table as arrays, one row each, some thousands at a time.

        Rows in which one of `times` is no time (no integer, negative, beyond all clocks) are left
        out; one of `others` that is no integer or that the table lacks is -1. Raises DamagedError.
        """
        if not self.has(table, *times):
            return
        known = self.tables[table]
        names = [f'"{one}"' for one in times]
        for one in others:
            of = f'CASE typeof("{one}") WHEN \'integer\' THEN "{one}" ELSE -1 END'
            names.append(of if one in known else "-1")
        good = " AND ".join(
            f'typeof("{one}") = \'integer\' AND "{one}" >= 0 AND "{one}" < {_NO_TIME}'
            for one in times
        )
        for some in self._some(f'SELECT {", ".join(names)} FROM "{table}" WHERE {good}', ()):
            yield np.array(some, np.int64).T

    def _some(self, query: str, values: tuple[Any, ...]) -> Iterator[list[tuple[Any, ...]]]:
        count = 0
        try:
            self._deadline = time.monotonic() + self._patience_s
            cursor = self._db.execute(query, values)
            while some := cursor.fetchmany(_ROWS):
                count += len(some)
                if count > self._rows_at_most + _ROWS:
                    raise DamagedError("more rows than fit into the file: its pages are in circles")
                yield some
                self._deadline = time.monotonic() + self._patience_s
        except (sqlite3.Error, UnicodeError, OverflowError, MemoryError) as error:
            # Messages of SQLite repeat the file's own names, which need not be text.
            raise DamagedError(str(error) or type(error).__name__) from error

    def _run(self, query: str) -> list[tuple[Any, ...]]:
        return [row for some in self._some(query, ()) for row in some]

    def _tables(self) -> dict[str, frozenset[str]]:
        """Real tables with their real columns: nothing that would compute anything when asked."""
        found = {}
        # A view or a virtual table has no root page.
        for name, root in self._run(
            "SELECT name, rootpage FROM sqlite_master WHERE type = 'table'"
        ):
            if not isinstance(name, str) or not isinstance(root, int) or root <= 0 or '"' in name:
                continue
            told = self._run(f'PRAGMA table_xinfo("{name}")')
            found[name] = frozenset(row[1] for row in told if row[6] == 0)
        return found


def _shortened(column: str) -> str:
    """Text and blobs are only looked at where they begin."""
    whole = f"typeof(\"{column}\") IN ('text', 'blob')"
    return f'CASE WHEN {whole} THEN substr("{column}", 1, {_TEXT_CHARACTERS}) ELSE "{column}" END'


def _opened(source: Source) -> tuple[sqlite3.Connection, int]:
    """Return the database, and how many bytes it has."""
    if _is_database(source.file):
        where = quote(str(source.file.resolve()))
        try:
            db = sqlite3.connect(f"file:{where}?mode=ro&immutable=1", uri=True)
            return db, source.file.stat().st_size
        except sqlite3.Error as error:
            raise UsageError(f"{source.path}: {error}") from error
    # Packed: nothing is unpacked to disk, so what it holds must fit into memory.
    unpack = "unpack it yourself (gunzip, zstd -d, unzip) and give the file itself"
    packed = bytearray()
    for block in source.blocks():
        packed += block
        if len(packed) > UNPACKED_BYTES_AT_MOST:
            raise UsageError(f"{source.path}: more than {UNPACKED_BYTES_AT_MOST:,} bytes", unpack)
    db = sqlite3.connect(":memory:")
    if not hasattr(db, "deserialize"):
        db.close()
        raise UsageError(f"{source.path}: a packed database needs Python 3.11", unpack)
    try:
        # A database that keeps a journal of its own cannot be opened in memory: say it keeps none.
        packed[18:20] = b"\x01\x01"
        db.deserialize(bytes(packed))
    except (sqlite3.Error, OverflowError) as error:
        db.close()
        raise UsageError(f"{source.path}: {error}", unpack) from error
    return db, len(packed)


def _is_database(path: Path) -> bool:
    """Say whether a file is one as it lies on the disk; what lies there no more is in memory."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except FileNotFoundError:
        return False
