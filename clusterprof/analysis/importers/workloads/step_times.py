"""Tables of step times: one row per rank and step.

## How to make the file

In the training script, for each step:

    print("rank,step,duration_s", file=table)      # once
    print(f"{rank},{step},{time.perf_counter() - began}", file=table)

## How to analyze it

    clusterprof analyze steps.csv

## What is read

CSV (with `,`, `;` or tab), JSON lines, a JSON list of objects, and Parquet if pyarrow is installed.
Columns, by these or similar names: `rank` (`worker`), `step` (`iteration`), and `duration`
(`step_time`, `batch_time`) or `start` and `end`; `host` and `job` where there are any. The unit is
part of the name (`step_time_ms`, `duration (s)`). Starts and ends without a unit are Unix times or
dates.

## How the numbers are computed

The ranks of a synchronous job leave each step together. If there are only durations, each is taken
as the rank's own time: all ranks begin a step together, and those that finish early wait for the
slowest, which is the culprit. With starts and ends, steps keep their times, and ranks wait where no
step begins before the previous one has ended on all ranks. A step that some rank lacks shows no
wait.

    rank 0   |== own time ==|-- waits --|== own …
    rank 5   |====== own time =========|====== …

## What it cannot see

The table does not show why a rank is slow. Times that include the wait for other ranks are equal on
all ranks, so no rank looks slow. Ranks that do not wait for each other (parameter servers) are
shown as if they did, if there are only durations.
"""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.columns import describe_slowest_ranks
from clusterprof.analysis.importers.core.node_tables import (
    Float,
    Int,
    NodeTables,
    compute_group_number,
)
from clusterprof.analysis.importers.core.text import name_trace
from clusterprof.analysis.importers.metrics.metric_readings import (
    convert_epoch,
    parse_time,
    read_stripped_lines,
)
from clusterprof.analysis.importers.metrics.prometheus import read_series
from clusterprof.probe import layout

_UNIT_NAMES = {
    1.0: ("ns", "nanosecond", "nanoseconds"),
    1e3: ("us", "usec", "µs", "microsecond", "microseconds"),
    1e6: ("ms", "msec", "millis", "millisecond", "milliseconds"),
    1e9: ("s", "sec", "secs", "second", "seconds"),
}
_UNITS = {name: unit_ns for unit_ns, names in _UNIT_NAMES.items() for name in names}
_UNIT = re.compile(r"[\s_(\[/]([a-zµ]+)[)\]]?$")

RANK_NAMES = (
    "rank",
    "global_rank",
    "rank_id",
    "worker",
    "worker_id",
    "worker_rank",
    "process",
    "trainer",
)
STEP_NAMES = (
    "step",
    "global_step",
    "iteration",
    "iter",
    "step_id",
    "step_number",
    "batch",
    "batch_idx",
)
START_NAMES = ("start", "start_time", "step_start", "begin", "begin_time", "ts_start")
END_NAMES = ("end", "end_time", "step_end", "stop", "stop_time", "finish", "ts_end")
DURATION_NAMES = (
    "duration",
    "step_time",
    "step_duration",
    "iteration_time",
    "iter_time",
    "batch_time",
    "batch_time_norm",
    "elapsed",
    "elapsed_time",
    "time_per_step",
    "dur",
)
HOST_NAMES = ("host", "hostname", "node", "node_name")
JOB_NAMES = ("job", "job_id", "job_name", "run", "run_id")
_OPERATION_NAMES = ("optype", "op", "op_type", "operation", "kernel", "stage_name", "mb_id")
"""Column names of tables with several rows for one step of a rank."""
_FALLBACK_STEP_NAMES = ("time",)  # a step count if the duration is in another column


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Indices of the columns, None if missing. Units in ns, 0 if not stated."""

    rank: int
    step: int
    start: int | None = None
    end: int | None = None
    duration: int | None = None
    host: int | None = None
    job: int | None = None
    start_unit: float = 0.0
    end_unit: float = 0.0
    duration_unit: float = 0.0


def match_columns(heads: Sequence[str]) -> StepColumns | None:
    """Match the columns by their names; None if they are not a table of step times."""
    normalized = [_normalize_head(head) for head in heads]
    rank, step = _find_column(normalized, RANK_NAMES), _find_column(normalized, STEP_NAMES)
    start, end = _find_column(normalized, START_NAMES), _find_column(normalized, END_NAMES)
    duration = _find_column(normalized, DURATION_NAMES)
    if step is None and duration is not None:
        step = _find_column(normalized, _FALLBACK_STEP_NAMES)
    if any(name in _OPERATION_NAMES for name, _ in normalized):
        return None
    if rank is None or step is None or (duration is None and (start is None or end is None)):
        return None
    unit = {
        column: normalized[column][1] for column in (start, end, duration) if column is not None
    }
    return StepColumns(
        rank,
        step,
        start,
        end,
        duration,
        _find_column(normalized, HOST_NAMES),
        _find_column(normalized, JOB_NAMES),
        *(
            unit.get(column, 0.0) if column is not None else 0.0
            for column in (start, end, duration)
        ),
    )


def _find_column(normalized: Sequence[tuple[str, float]], names: Sequence[str]) -> int | None:
    """Find the column of the first of these names that is present."""
    heads = [name for name, _ in normalized]
    return next((heads.index(name) for name in names if name in heads), None)


def _normalize_head(head: str) -> tuple[str, float]:
    """Normalize a head and split off its unit: `Step Time (ms)` -> step_time, 1e6."""
    head = head.strip().lower()
    unit = 0.0
    match = _UNIT.search(head)
    if match and match[1] in _UNITS:
        unit = _UNITS[match[1]]
        head = head[: match.start()].rstrip("_ \t")
    return re.sub(r"[\s.\-]+", "_", head).strip("_"), unit


MAX_ROWS = 1 << 25
MAX_RANK = 1 << 20
MAX_JOBS = 1024
_MAX_STEP = 1 << 53
_MAX_NS = float(1 << 62)
PARQUET_MAGIC = b"PAR1"
_NUMBER = re.compile(r"(?:[A-Za-z_ -]*)(\d{1,9})")
_FOOTER_BYTES = 64 << 10
_WORD = re.compile(rb"[A-Za-z][A-Za-z_]{1,31}")
_DELIMITERS = ",;\t|"


@dataclass(slots=True)
class StepTable:
    """Rows of one job."""

    rank: array[int] = field(default_factory=lambda: array("q"))
    step: array[int] = field(default_factory=lambda: array("q"))
    start_ns: array[int] = field(default_factory=lambda: array("q"))
    """Start of the step in ns; -1 if unknown."""
    duration: array[float] = field(default_factory=lambda: array("d"))
    """Duration in ns, or in the table's own unit if none is stated."""
    has_unit: bool = True
    """False if the unit of durations is not stated."""
    has_zone: bool = True
    """False if the time zone of the times is unknown."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Hostname by rank."""


def read_heads(head: bytes) -> list[str] | None:
    """Read the column names at the beginning of a file; None if it is not a table."""
    line = head.lstrip(b"\xef\xbb\xbf \r\n").split(b"\n", 1)[0].strip()
    if line[:1] in b"[{":
        start = head.find(b"{")
        try:
            first = msgspec.json.decode(line) if line[:1] == b"{" else _parse_first(head[start:])
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None
        return list(map(str, first)) if isinstance(first, dict) else None
    if not 0 < len(line) < 1 << 16 or b"\0" in line:
        return None
    text = line.decode("utf-8", "replace")
    delimiter = guess_delimiter(text)
    return [name.strip().strip('"') for name in text.split(delimiter)] if delimiter else None


def read_parquet_words(path: Path) -> list[str]:
    """Read the words at the end of a parquet file, which contain its column names."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _FOOTER_BYTES))
            end = file.read(_FOOTER_BYTES)
    except OSError:
        return []
    return [word.decode() for word in dict.fromkeys(_WORD.findall(end))]


def guess_delimiter(text: str) -> str:
    """Guess the delimiter of a line: the most frequent candidate; empty if there is none."""
    delimiter = max(_DELIMITERS, key=text.count)
    return delimiter if delimiter in text else ""


def _parse_first(data: bytes) -> Any:
    """Parse the first object of a list."""
    end = data.find(b"}")
    return msgspec.json.decode(data[: end + 1]) if end > 0 else None


def read_tables(source: Source, account: Account) -> dict[str, StepTable]:
    """Read the rows of each job in a file.

    Raises: CannotImportError when the file is not a table of step times or has too many jobs.
    """
    heads, rows = _read_rows(source, account)
    columns = match_columns(heads)
    if columns is None:
        raise CannotImportError(
            "not a table of step times", "columns rank, step, and duration or start and end"
        )
    tables: dict[str, StepTable] = {}
    count = 0
    for row in rows:
        if count >= MAX_ROWS:
            account.skipped["rows beyond the limit"] += 1
            continue
        job = str(row[columns.job]) if columns.job is not None and columns.job < len(row) else ""
        if job not in tables and len(tables) >= MAX_JOBS:
            raise CannotImportError(f"more than {MAX_JOBS:,} jobs", "give fewer at once")
        table = tables.setdefault(job, StepTable(has_unit=columns.duration_unit > 0))
        problem = _add_row(table, columns, row)
        if problem:
            account.skipped[f"rows {problem}"] += 1
        else:
            count += 1
    account.read["rows"] += count
    return {job: table for job, table in tables.items() if table.rank}


def _read_rows(source: Source, account: Account) -> tuple[list[str], Iterator[Sequence[Any]]]:
    start = source.head.lstrip(b"\xef\xbb\xbf \r\n")[:1]
    if source.head[:4] == PARQUET_MAGIC:
        return _read_parquet(source)
    heads = read_heads(source.head) or []
    if start == b"{":
        return heads, _select_cells(_decode_lines(source, account), heads, account)
    if start == b"[":
        return heads, _select_cells(read_series(source, account), heads, account)
    return heads, _read_csv(source, account, len(heads))


def _select_cells(
    objects: Iterator[Any], heads: list[str], account: Account
) -> Iterator[list[Any]]:
    for record in objects:
        if isinstance(record, dict):
            yield [record.get(head) for head in heads]
        else:
            account.skipped["lines that are not objects"] += 1


def _decode_lines(source: Source, account: Account) -> Iterator[Any]:
    decode = msgspec.json.Decoder().decode
    for line in read_stripped_lines(source, account):
        if not line.strip():
            continue
        try:
            yield decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            account.skipped["lines that are not JSON"] += 1


def _read_csv(source: Source, account: Account, width: int) -> Iterator[list[str]]:
    lines = (
        line.decode("utf-8", "replace").replace("\0", "")
        for line in read_stripped_lines(source, account)
    )
    lines = (line for line in lines if line.strip("\ufeff \t"))
    first = next(lines, "")
    rows = csv.reader(lines, delimiter=guess_delimiter(first) or ",")
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error:
            account.skipped["rows that are not CSV"] += 1
            continue
        if len(row) < width:
            account.skipped["rows with columns missing"] += 1
            continue
        yield row


def _read_parquet(source: Source) -> tuple[list[str], Iterator[Sequence[Any]]]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise CannotImportError(
            "this table is parquet, and the package pyarrow is not installed",
            "pip install pyarrow, or write the table as CSV",
        ) from error
    try:
        file = parquet.ParquetFile(source.file)
    except Exception as error:  # pyarrow's errors have no common base class of their own
        raise CannotImportError(f"damaged parquet file ({error})", "write it again") from error
    heads = list(file.schema_arrow.names)

    def iterate_rows() -> Iterator[Sequence[Any]]:
        for batch in file.iter_batches(65_536):
            yield from zip(*(column.to_pylist() for column in batch.columns))

    return heads, iterate_rows()


def _add_row(table: StepTable, columns: StepColumns, row: Sequence[Any]) -> str:
    """Add a row; return an empty text, or why it was rejected."""
    rank, step = _convert_integer(row[columns.rank]), _convert_integer(row[columns.step])
    if rank is None or rank > MAX_RANK:
        return "without a rank"
    if step is None or step > _MAX_STEP:
        return "without a step"
    start = end = None
    if columns.start is not None:
        start, zoned = _convert_time(row[columns.start], columns.start_unit)
        table.has_zone &= zoned
    if columns.duration is not None:
        duration = _convert_float(row[columns.duration]) * (columns.duration_unit or 1.0)
    elif columns.end is not None:
        end, _ = _convert_time(row[columns.end], columns.end_unit)
        duration = math.nan if start is None or end is None else float(end - start)
        table.has_unit = True
    if not 0 <= duration < _MAX_NS:
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


def _convert_integer(value: Any) -> int | None:
    """Convert 3, 3.0, "3" or "worker-3" to 3; None for anything else."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and value >= 0 else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value >= 0 else None
    match = _NUMBER.fullmatch(str(value).strip().removesuffix(".0")) if value is not None else None
    return int(match[1]) if match and not str(value).strip().startswith("-") else None


def _convert_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _convert_time(value: Any, unit: float) -> tuple[int | None, bool]:
    """Convert a time to ns, and tell whether the zone of its clock is known."""
    number = _convert_float(value)
    if math.isnan(number):
        return parse_time(str(value)) or (None, True)
    if number < 0:
        return None, True
    if not unit:
        return convert_epoch(number), True
    exact = value if isinstance(value, int) else None
    ns = exact * int(unit) if exact is not None else number * unit
    return (round(ns), True) if ns < _MAX_NS else (None, True)


_MAX_MEDIAN_SECONDS = 60.0
"""Median of durations without a unit below which they are assumed to be seconds, else ms."""
MAX_RANKS = 1 << 14
_MIN_SYNCHRONOUS_SHARE = 0.9
"""Smallest share of the steps that must begin only after all ranks have ended the previous one."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """One row per rank and step, in order of steps; int64[n] each."""

    rank: Int
    step: Int
    start_ns: Int
    own_end_ns: Int
    """When the rank had done its own part, ns."""
    end_ns: Int
    """When all ranks had done their parts, ns."""
    number: Int
    """Number of the operation with which the ranks left the step, from 0; -1 if unknown."""


def build_nodes(table: StepTable, key: str, source: str, account: Account) -> Iterator[NodeTables]:
    """Yield the nodes of one job.

    Raises: CannotImportError when the table has too many ranks.
    """
    steps = _compute_steps(table, account)
    ranks = np.unique(steps.rank)
    if ranks.size > MAX_RANKS:
        raise CannotImportError(f"{ranks.size:,} ranks exceed {MAX_RANKS:,}")
    by_host: dict[str, list[int]] = {}
    for rank in ranks.tolist():
        by_host.setdefault(table.hosts.get(rank, ""), []).append(rank)
    order = np.argsort(steps.rank, kind="stable")
    edges = steps.rank[order].searchsorted(ranks), steps.rank[order].searchsorted(ranks, "right")
    rows_of = {
        rank: order[a:b] for rank, a, b in zip(ranks.tolist(), *map(np.ndarray.tolist, edges))
    }
    has_wall_clock = bool(table.start_ns) and table.start_ns[0] >= 0 and table.has_zone
    group = compute_group_number(ranks.tolist())
    for host in sorted(by_host):
        node = NodeTables(host, source, 0 if has_wall_clock else None, host or key)
        node.job = node.display_name = key
        node.has_time_unit = table.has_unit
        for rank in by_host[host]:
            pid, rows = rank + 1, rows_of[rank]
            node.add_rank(pid, rank, int(ranks[-1]) + 1)
            if rank == by_host[host][0]:
                node.add_group(pid, group, ranks.tolist())
            start, end, own_end = steps.start_ns[rows], steps.end_ns[rows], steps.own_end_ns[rows]
            node.add_spans(pid, layout.STEP, start, end, steps.step[rows], 2, -1, -1)
            is_joined = steps.number[rows] >= 0
            if is_joined.any():
                node.add_collectives(
                    pid,
                    own_end[is_joined],
                    end[is_joined],
                    group,
                    steps.number[rows][is_joined],
                    operation=layout.BARRIER,
                )
        yield node
    account.read["ranks"] += ranks.size
    account.read["steps"] += int(np.unique(steps.step).size)


def _compute_steps(table: StepTable, account: Account) -> StepRows:
    rank, step = (np.frombuffer(column, np.int64) for column in (table.rank, table.step))
    start = np.frombuffer(table.start_ns, np.int64)
    duration = np.frombuffer(table.duration, np.float64)
    order = np.lexsort((np.arange(rank.size), rank, step))
    rank, step, start, duration = rank[order], step[order], start[order], duration[order]
    last = np.append((rank[1:] != rank[:-1]) | (step[1:] != step[:-1]), True)
    if not last.all():
        account.skipped["rows replaced by a later row of the same rank and step"] += int(
            (~last).sum()
        )
    rank, step, start, duration = rank[last], step[last], start[last], duration[last]
    duration = duration * _infer_unit(table, duration, account)
    if float(duration.sum()) + float(start.max(initial=0)) >= _MAX_NS:
        raise CannotImportError("the durations add up to more than a century", "state their unit")
    own_ns = np.rint(duration).astype(np.int64)
    first = np.flatnonzero(np.append(True, step[1:] != step[:-1]))
    account.answers += describe_slowest_ranks(rank, own_ns, first)
    if start.min(initial=0) >= 0:
        return _build_timed_steps(rank, step, start, own_ns, first, account)
    account.notes.append(
        "only durations: ranks are assumed to begin each step together, and to wait at its end for"
        " the slowest"
    )
    longest = np.maximum.reduceat(own_ns, first)
    begins = np.concatenate([[0], np.cumsum(longest)[:-1]])
    row = np.repeat(np.arange(first.size), np.diff(np.append(first, rank.size)))
    is_complete = _find_complete_steps(rank, first, account)
    number = np.where(is_complete, np.cumsum(is_complete) - 1, -1)[row]
    begin = begins[row]
    end = np.where(number >= 0, begin + longest[row], begin + own_ns)
    return StepRows(rank, step, begin, begin + own_ns, end, number)


def _infer_unit(table: StepTable, duration: Float, account: Account) -> float:
    if table.has_unit:
        return 1.0
    seconds = float(np.median(duration)) < _MAX_MEDIAN_SECONDS
    account.notes.append(
        f"no unit is stated: durations are read as {'s' if seconds else 'ms'}; shares and ratios"
        " do not depend on it"
    )
    return 1e9 if seconds else 1e6


def _find_complete_steps(rank: Int, first: Int, account: Account) -> NDArray[np.bool_]:
    """Find the steps that every rank has; for others the awaited rank is unknown."""
    present = np.diff(np.append(first, rank.size))
    is_complete = present == np.unique(rank).size
    missing = int((~is_complete).sum())
    if missing:
        account.notes.append(
            f"{missing:,} of {first.size:,} steps lack some rank: which rank waited"
            " for which is unknown there"
        )
    return np.asarray(is_complete)


def _build_timed_steps(
    rank: Int, step: Int, start: Int, own_ns: Int, first: Int, account: Account
) -> StepRows:
    """Keep the times of the steps; ranks wait if each step begins after all ended the last."""
    end = start + own_ns
    row = np.repeat(np.arange(first.size), np.diff(np.append(first, rank.size)))
    release = np.maximum.reduceat(end, first)
    begins = np.minimum.reduceat(start, first)
    is_synchronous = begins[1:] >= release[:-1]
    is_complete = _find_complete_steps(rank, first, account)
    if first.size < 2 or is_synchronous.mean() < _MIN_SYNCHRONOUS_SHARE:
        account.notes.append(
            "ranks begin steps before all have ended the previous one: no rank is shown to"
            " wait for another"
        )
        return StepRows(rank, step, start, end, end, np.full(rank.size, -1, np.int64))
    is_joined = is_complete & np.append(is_synchronous, True)
    number = np.where(is_joined, np.cumsum(is_joined) - 1, -1)[row]
    return StepRows(rank, step, start, end, np.where(number >= 0, release[row], end), number)


class StepTimes:
    """Importer of tables with rank, step and duration."""

    name: ClassVar[str] = "step_times"
    title: ClassVar[str] = "table of step times"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether the column names are those of step times."""
        if head[:4] == PARQUET_MAGIC:
            return match_columns(read_parquet_words(path)) is not None
        heads = read_heads(head)
        return heads is not None and match_columns(heads) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the nodes of every job in a table.

        Raises: CannotImportError when the table has no usable row.
        """
        source, account = sources[0], accounts[0]
        tables = read_tables(source, account)
        if not tables:
            raise CannotImportError("the table has no usable row", "")
        stem = name_trace(source.path)
        for job, table in sorted(tables.items()):
            yield from build_nodes(table, f"{stem} {job}".strip(), self.name, account)
