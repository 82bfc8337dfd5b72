"""Read-only access to an untrusted SQLite database that cannot run anything.

The file is opened read only and immutable, without extensions and without a trusted schema, so no
view, trigger, virtual table or generated column is ever run. Only known tables are queried, and
only their existing columns. A statement is stopped if it
brings no row for longer than the size of the file explains, or more rows than fit
into the file: pages may refer to each other in circles. Huge values are refused.

Names in a profile: CUDA calls, NVTX ranges, NCCL kernels, launcher variables.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Source
from clusterprof.analysis.importers.core.host_activity import label_runtime_call
from clusterprof.errors import UsageError
from clusterprof.probe import layout

MAGIC = b"SQLite format 3\x00"
MAX_UNPACKED_BYTES = 1 << 30
MAX_SECONDS_WITHOUT_ROW = 2.0
MAX_SECONDS_PER_BYTE = 1 / (20 << 20)
"""Largest plausible time per byte for searching the file without finding anything."""
_MIN_ROW_BYTES = 6  # smallest size of a row in a page
_MAX_VALUE_BYTES = 64 << 20  # the output of a process may be one string
_MAX_TEXT_CHARACTERS = 512
_ROWS_PER_FETCH = 65_536
_PROGRESS_STEPS = 100_000  # virtual machine steps between two checks of the deadline
_MAX_TIME_NS = 1 << 62
_LIMIT_LENGTH, _LIMIT_ATTACHED = 0, 7  # SQLITE_LIMIT_LENGTH and SQLITE_LIMIT_ATTACHED
Int = NDArray[np.int64]


class DamagedError(Exception):
    """The database could not be read further; everything before is good."""


class Database:
    """Known tables of one file, as rows or as numpy arrays; a context manager.

    Raises: UsageError when the file cannot be opened.
    """

    def __init__(self, source: Source) -> None:
        self._deadline = 0.0
        self._db, size = _open_database(source)
        self._max_idle_s = MAX_SECONDS_WITHOUT_ROW + size * MAX_SECONDS_PER_BYTE
        self._max_rows = size // _MIN_ROW_BYTES
        self._db.set_progress_handler(
            lambda: int(time.monotonic() > self._deadline), _PROGRESS_STEPS
        )
        self._db.text_factory = lambda data: data.decode("utf-8", "replace")
        if hasattr(self._db, "setlimit"):  # since Python 3.11
            for limit, maximum in ((_LIMIT_LENGTH, _MAX_VALUE_BYTES), (_LIMIT_ATTACHED, 0)):
                self._db.setlimit(limit, maximum)
        try:
            self._query("PRAGMA trusted_schema = OFF")
            self._query("PRAGMA cell_size_check = ON")
            self.tables = self._list_tables()
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
        """Return whether there is a table with these columns."""
        return table in self.tables and all(column in self.tables[table] for column in columns)

    def count(self, table: str) -> int:
        """Return the number of rows of a table; 0 if there is no table of this name.

        Raises: DamagedError when the file cannot be read further.
        """
        if table not in self.tables:
            return 0
        # A plain count cannot be interrupted, even if pages form a circle.
        limited = f'SELECT 1 FROM "{table}" LIMIT {self._max_rows + 1}'
        return int(next(iter(self._fetch(f"SELECT count(*) FROM ({limited})", ())))[0][0])

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
        """Yield columns of a table, some rows at a time; a missing column is None.

        Raises: DamagedError when the file cannot be read further.
        """
        if table not in self.tables:
            return
        known = self.tables[table]
        names = ", ".join(
            _cap_column_text(column) if column in known else "NULL" for column in columns
        )
        yield from self._fetch(f'SELECT {names} FROM "{table}"', ())

    def integers(
        self, table: str, times: Sequence[str], columns: Sequence[str] = (), where: str = ""
    ) -> Iterator[Int]:
        """Yield integer columns of a table as int64[columns, n], some thousands of rows at a time.

        Rows in which one of `times` is not a valid time (not an integer, negative, too large) are
        left out. A value of `columns` that is not an integer, or a missing column, is -1. where: a
        condition in SQL for the rows; its columns must be among `columns` that the table has.

        Raises: DamagedError when the file cannot be read further.
        """
        if not self.has(table, *times, *(columns if where else ())):
            return
        known = self.tables[table]
        names = [f'"{column}"' for column in times]
        for column in columns:
            expression = f'CASE typeof("{column}") WHEN \'integer\' THEN "{column}" ELSE -1 END'
            names.append(expression if column in known else "-1")
        condition = " AND ".join(
            f'typeof("{column}") = \'integer\' AND "{column}" >= 0 AND "{column}" < {_MAX_TIME_NS}'
            for column in times
        ) + (f" AND ({where})" if where else "")
        for rows in self._fetch(f'SELECT {", ".join(names)} FROM "{table}" WHERE {condition}', ()):
            yield np.array(rows, np.int64).T

    def _fetch(self, query: str, values: tuple[Any, ...]) -> Iterator[list[tuple[Any, ...]]]:
        count = 0
        try:
            self._deadline = time.monotonic() + self._max_idle_s
            cursor = self._db.execute(query, values)
            while rows := cursor.fetchmany(_ROWS_PER_FETCH):
                count += len(rows)
                if count > self._max_rows + _ROWS_PER_FETCH:
                    raise DamagedError("more rows than fit into the file: its pages form a circle")
                yield rows
                self._deadline = time.monotonic() + self._max_idle_s
        except (sqlite3.Error, UnicodeError, OverflowError, MemoryError) as error:
            # SQLite's messages repeat names of the file, which need not be valid text.
            raise DamagedError(str(error) or type(error).__name__) from error

    def _query(self, query: str) -> list[tuple[Any, ...]]:
        return [row for rows in self._fetch(query, ()) for row in rows]

    def _list_tables(self) -> dict[str, frozenset[str]]:
        """List the real tables with their real columns, none of which is computed."""
        tables = {}
        # Views and virtual tables have no root page.
        for name, root in self._query(
            "SELECT name, rootpage FROM sqlite_master WHERE type = 'table'"
        ):
            if not isinstance(name, str) or not isinstance(root, int) or root <= 0 or '"' in name:
                continue
            columns = self._query(f'PRAGMA table_xinfo("{name}")')
            tables[name] = frozenset(row[1] for row in columns if row[6] == 0)
        return tables


def _cap_column_text(column: str) -> str:
    """Return SQL that reads only the beginning of text and blobs."""
    is_long = f"typeof(\"{column}\") IN ('text', 'blob')"
    return (
        f'CASE WHEN {is_long} THEN substr("{column}", 1, {_MAX_TEXT_CHARACTERS}) ELSE'
        f' "{column}" END'
    )


def _open_database(source: Source) -> tuple[sqlite3.Connection, int]:
    """Open the database and return it with its size in bytes."""
    if _is_database(source.file):
        quoted_path = quote(str(source.file.resolve()))
        try:
            db = sqlite3.connect(f"file:{quoted_path}?mode=ro&immutable=1", uri=True)
            return db, source.file.stat().st_size
        except sqlite3.Error as error:
            raise UsageError(f"{source.path}: {error}") from error
    # Packed: nothing is unpacked to disk, so the content must fit into memory.
    unpack = "unpack it yourself (gunzip, zstd -d, unzip) and give the file itself"
    packed = bytearray()
    for block in source.blocks():
        packed += block
        if len(packed) > MAX_UNPACKED_BYTES:
            raise UsageError(f"{source.path}: more than {MAX_UNPACKED_BYTES:,} bytes", unpack)
    db = sqlite3.connect(":memory:")
    if not hasattr(db, "deserialize"):
        db.close()
        raise UsageError(f"{source.path}: a packed database needs Python 3.11", unpack)
    try:
        # A database in WAL mode cannot be opened in memory: mark it as having no WAL.
        packed[18:20] = b"\x01\x01"
        db.deserialize(bytes(packed))
    except (sqlite3.Error, OverflowError) as error:
        db.close()
        raise UsageError(f"{source.path}: {error}", unpack) from error
    return db, len(packed)


def _is_database(path: Path) -> bool:
    """Return whether a file on disk is a SQLite database; a missing file was read from memory."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except FileNotFoundError:
        return False


# Meaning of an NVTX range.
OTHER_RANGE, STEP, NUMBERED_STEP, WAIT, OPTIMIZER, OPERATOR = range(6)

_CALL_NAME = re.compile(r"(?:cuda|cu|hip)[A-Z]\w*")
_STEP_WORD = (
    r"(?:profiler|train(?:ing)?|optimi[sz]er|global|mini)?[ _.-]?(?:step|iteration|iter|batch)"
)
_STEP_NAME = re.compile(rf"\s*{_STEP_WORD}\s*[:=#_\[( -]*(\d{{1,15}})?[\])]?\s*", re.IGNORECASE)
_OPTIMIZER_NAME = re.compile(r"optimizer\.step|optimizer_step|optimizer step", re.IGNORECASE)
_DATA_WAIT_NAME = re.compile(
    r"data[ _-]?loader|data[ _-]?(wait|fetch|load)|(load|get|next|fetch)[ _-]?(data|batch)\b"
    r"|batch[ _-]?(fetch|load|wait)|wait[ _-]?(for[ _-]?)?(data|batch)",
    re.IGNORECASE,
)
OPERATOR_NAME = re.compile(r"::|, op_id|, seq =|nccl")
_NCCL = re.compile(r"(?:nccl|rccl)(?:Dev)?Kernel_?([A-Za-z]+)")
_OPERATIONS = (
    ("AllReduce", layout.ALL_REDUCE),
    ("AllGather", layout.ALL_GATHER),
    ("ReduceScatter", layout.REDUCE_SCATTER),
    ("Broadcast", layout.BROADCAST),
    ("Reduce", layout.REDUCE),
    ("SendRecv", layout.ALL_TO_ALL),
    ("AllToAll", layout.ALL_TO_ALL),
    ("AlltoAll", layout.ALL_TO_ALL),
    ("Gather", layout.GATHER),
    ("Scatter", layout.SCATTER),
)
_FRAMEWORK = re.compile(
    r"\bat::|aten::|torch|tensorflow|jaxlib|\bxla|paddle|python|optimizer|dataloader", re.IGNORECASE
)
_MAX_TEXTS, _MAX_TEXT_TOTAL = 1 << 19, 32 << 20
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def label_call(name: str) -> int:
    """Label a call of the CUDA runtime or driver (`core.host_activity`); 0 for other texts."""
    return label_runtime_call(name) if _CALL_NAME.fullmatch(name) else 0


def label_range(text: str) -> tuple[int, int]:
    """Label an NVTX range and return the number in its name, -1 if there is none."""
    if OPERATOR_NAME.search(text):
        return OPERATOR, -1
    step = _STEP_NAME.fullmatch(text)
    if step:
        return (NUMBERED_STEP, int(step[1])) if step[1] else (STEP, -1)
    if _DATA_WAIT_NAME.search(text):
        return WAIT, -1
    return (OPTIMIZER if _OPTIMIZER_NAME.search(text) else OTHER_RANGE), -1


def find_operation(kernel: str) -> int:
    """Find the collective operation of a kernel; 0 for kernels that compute."""
    match = _NCCL.search(kernel)
    if match is None:
        return 0
    name = match[1]
    return next((kind for word, kind in _OPERATIONS if name.startswith(word)), 15)


@dataclass(slots=True)
class Strings:
    """Meaning of the strings of a profile by their id; others are left out."""

    calls: dict[int, int]
    """Class of a CUDA call (`core.host_activity`)."""
    kernels: dict[int, int]
    """Collective operation of a kernel."""
    texts: dict[int, str]
    """Texts of NVTX ranges."""
    has_framework: bool = False
    """Whether any name is one of Python or of a framework: a kernel, a range, a library."""


def read_strings(db: Database) -> Strings:
    """Read the strings of a profile in one pass, with bounded memory.

    Raises: DamagedError when the file cannot be read further.
    """
    strings = Strings({}, {}, {})
    remaining_characters = _MAX_TEXT_TOTAL
    for rows in db.rows("StringIds", ("id", "value")):
        for id_, value in rows:
            if not isinstance(id_, int) or not isinstance(value, str):
                continue
            if not strings.has_framework and "\0" not in value:  # not the whole environment
                strings.has_framework = bool(_FRAMEWORK.search(value))
            if kind := label_call(value):
                strings.calls[id_] = kind
            elif operation := find_operation(value):
                strings.kernels[id_] = operation
            elif (
                len(strings.texts) < _MAX_TEXTS
                and remaining_characters > 0
                and not value.startswith("/")
            ):
                strings.texts[id_] = value
                remaining_characters -= len(value)
    return strings


def read_launcher_rank(db: Database) -> tuple[int | None, int | None]:
    """Read rank and world size from the variables of the profiled command; None if unknown.

    They are the rank of each process only if each was profiled separately. No other variable is
    read.

    Raises: DamagedError when the file cannot be read further.
    """
    variables: dict[str, int] = {}
    for rows in db.rows("META_DATA_CAPTURE", ("name", "value")):
        for name, value in rows:
            if isinstance(name, str) and name.endswith(":ENVIRONMENT_VARIABLE"):
                key, _, text = str(value).partition("=")
                text = text.strip('"')
                if (
                    key in (*_RANK_VARIABLES, *_WORLD_SIZE_VARIABLES)
                    and text.isdecimal()
                    and len(text) < 9
                ):
                    variables[key] = int(text)
    rank = next((variables[key] for key in _RANK_VARIABLES if key in variables), None)
    world = next((variables[key] for key in _WORLD_SIZE_VARIABLES if key in variables), None)
    return (None, None) if rank is None or (world is not None and rank >= world) else (rank, world)
