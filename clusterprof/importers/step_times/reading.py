"""Rows of a table, from CSV, JSON lines, a JSON list or parquet, as packed columns."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.step_times.names import Columns, columns_of
from clusterprof.importers.telemetry.answers import elements
from clusterprof.importers.telemetry.lines import lines_of
from clusterprof.importers.telemetry.times import epoch_ns, time_ns

ROWS_AT_MOST = 1 << 25
RANK_AT_MOST = 1 << 20
JOBS_AT_MOST = 1024
_STEP_AT_MOST = 1 << 53
_NS_AT_MOST = float(1 << 62)
PARQUET = b"PAR1"
_NUMBER = re.compile(r"(?:[A-Za-z_ -]*)(\d{1,9})")
_FOOTER_BYTES = 64 << 10
_WORD = re.compile(rb"[A-Za-z][A-Za-z_]{1,31}")
_DELIMITERS = ",;\t|"


@dataclass(slots=True)
class Table:
    """The rows of one job."""

    rank: array[int] = field(default_factory=lambda: array("q"))
    step: array[int] = field(default_factory=lambda: array("q"))
    start_ns: array[int] = field(default_factory=lambda: array("q"))
    """-1 = not known."""
    duration: array[float] = field(default_factory=lambda: array("d"))
    """ns; in the table's own unit where that is not stated."""
    stated: bool = True
    """False when the unit of durations is not stated."""
    zoned: bool = True
    """False when nobody says in which zone the times are."""
    hosts: dict[int, str] = field(default_factory=dict)
    """By rank."""


def heads_of(head: bytes) -> list[str] | None:
    """Return the names of the columns at the beginning of a file; None for no table."""
    line = head.lstrip(b"\xef\xbb\xbf \r\n").split(b"\n", 1)[0].strip()
    if line[:1] in b"[{":
        start = head.find(b"{")
        try:
            first = msgspec.json.decode(line) if line[:1] == b"{" else _first(head[start:])
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None
        return list(map(str, first)) if isinstance(first, dict) else None
    if not 0 < len(line) < 1 << 16 or b"\0" in line:
        return None
    text = line.decode("utf-8", "replace")
    delimiter = delimiter_of(text)
    return [name.strip().strip('"') for name in text.split(delimiter)] if delimiter else None


def parquet_words(path: Path) -> list[str]:
    """Return the words at the end of a parquet file, where the names of its columns stand."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _FOOTER_BYTES))
            end = file.read(_FOOTER_BYTES)
    except OSError:
        return []
    return [word.decode() for word in dict.fromkeys(_WORD.findall(end))]


def delimiter_of(text: str) -> str:
    """Return what stands most often between the columns of a line."""
    best = max(_DELIMITERS, key=text.count)
    return best if best in text else ""


def _first(data: bytes) -> Any:
    """The first object of a list."""
    end = data.find(b"}")
    return msgspec.json.decode(data[: end + 1]) if end > 0 else None


def tables_of(source: Source, account: Account) -> dict[str, Table]:
    """Return the rows of each job in a file."""
    heads, rows = _rows(source, account)
    columns = columns_of(heads)
    if columns is None:
        raise CannotImportError(
            "not a table of step times", "columns rank, step, and duration or start and end"
        )
    tables: dict[str, Table] = {}
    count = 0
    for row in rows:
        if count >= ROWS_AT_MOST:
            account.skipped["rows beyond the most that are read"] += 1
            continue
        job = str(row[columns.job]) if columns.job is not None and columns.job < len(row) else ""
        if job not in tables and len(tables) >= JOBS_AT_MOST:
            raise CannotImportError(f"more than {JOBS_AT_MOST:,} jobs", "give fewer at once")
        table = tables.setdefault(job, Table(stated=columns.duration_unit > 0))
        why = _add(table, columns, row)
        if why:
            account.skipped[f"rows {why}"] += 1
        else:
            count += 1
    account.read["rows"] += count
    return {job: table for job, table in tables.items() if table.rank}


def _rows(source: Source, account: Account) -> tuple[list[str], Iterator[Sequence[Any]]]:
    start = source.head.lstrip(b"\xef\xbb\xbf \r\n")[:1]
    if source.head[:4] == PARQUET:
        return _parquet(source)
    heads = heads_of(source.head) or []
    if start == b"{":
        return heads, _objects(_decoded(source, account), heads, account)
    if start == b"[":
        return heads, _objects(elements(source, account), heads, account)
    return heads, _csv(source, account, len(heads))


def _objects(objects: Iterator[Any], heads: list[str], account: Account) -> Iterator[list[Any]]:
    for one in objects:
        if isinstance(one, dict):
            yield [one.get(head) for head in heads]
        else:
            account.skipped["lines that are no objects"] += 1


def _decoded(source: Source, account: Account) -> Iterator[Any]:
    decode = msgspec.json.Decoder().decode
    for line in lines_of(source, account):
        if not line.strip():
            continue
        try:
            yield decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            account.skipped["lines that are no JSON"] += 1


def _csv(source: Source, account: Account, width: int) -> Iterator[list[str]]:
    lines = (
        line.decode("utf-8", "replace").replace("\0", "") for line in lines_of(source, account)
    )
    lines = (line for line in lines if line.strip("\ufeff \t"))
    first = next(lines, "")
    rows = csv.reader(lines, delimiter=delimiter_of(first) or ",")
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error:
            account.skipped["rows that are no CSV"] += 1
            continue
        if len(row) < width:
            account.skipped["rows with columns missing"] += 1
            continue
        yield row


def _parquet(source: Source) -> tuple[list[str], Iterator[Sequence[Any]]]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise CannotImportError(
            "this table is parquet, and the package pyarrow is not installed",
            "pip install pyarrow, or write the table as CSV",
        ) from error
    try:
        file = parquet.ParquetFile(source.file)
    except Exception as error:  # pyarrow's errors share no base of its own
        raise CannotImportError(f"a damaged parquet file ({error})", "write it again") from error
    heads = list(file.schema_arrow.names)

    def rows() -> Iterator[Sequence[Any]]:
        for batch in file.iter_batches(65_536):
            yield from zip(*(column.to_pylist() for column in batch.columns))

    return heads, rows()


def _add(table: Table, columns: Columns, row: Sequence[Any]) -> str:
    """Add a row; "" or why it says nothing."""
    rank, step = _whole(row[columns.rank]), _whole(row[columns.step])
    if rank is None or rank > RANK_AT_MOST:
        return "without a rank"
    if step is None or step > _STEP_AT_MOST:
        return "without a step"
    start = end = None
    if columns.start is not None:
        start, zoned = _instant(row[columns.start], columns.start_unit)
        table.zoned &= zoned
    if columns.duration is not None:
        duration = _float(row[columns.duration]) * (columns.duration_unit or 1.0)
    elif columns.end is not None:
        end, _ = _instant(row[columns.end], columns.end_unit)
        duration = math.nan if start is None or end is None else float(end - start)
        table.stated = True
    if not 0 <= duration < _NS_AT_MOST:
        return "without a duration, or with a negative one"
    if columns.start is not None and start is None:
        return "without a start"
    table.rank.append(rank)
    table.step.append(step)
    table.start_ns.append(-1 if start is None else start)
    table.duration.append(duration)
    if columns.host is not None and row[columns.host]:
        table.hosts.setdefault(rank, str(row[columns.host]))
    return ""


def _whole(value: Any) -> int | None:
    """3, 3.0, "3", "worker-3" -> 3."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and value >= 0 else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value >= 0 else None
    match = _NUMBER.fullmatch(str(value).strip().removesuffix(".0")) if value is not None else None
    return int(match[1]) if match and not str(value).strip().startswith("-") else None


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _instant(value: Any, unit: float) -> tuple[int | None, bool]:
    """The ns of an instant; whether the zone of its clock is known."""
    number = _float(value)
    if math.isnan(number):
        return time_ns(str(value)) or (None, True)
    if number < 0:
        return None, True
    if not unit:
        return epoch_ns(number), True
    exact = value if isinstance(value, int) else None
    ns = exact * int(unit) if exact is not None else number * unit
    return (round(ns), True) if ns < _NS_AT_MOST else (None, True)
