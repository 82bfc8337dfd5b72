"""Rows of an operator table: which rank did which operation of a step, when; parquet or JSON."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.text_lines import TIME_AT_MOST_NS, number, objects_of, whole_ns

SECOND_NS, MICROSECOND_NS = 1_000_000_000, 1000
WORK = ("forward-compute", "backward-compute", "optimizer", "gc")
"""Operations of one rank alone."""
COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id")
STEP_AT_MOST = 1 << 40
PLACE_AT_MOST = 1 << 20
ROWS_AT_MOST = 20_000_000
_ROWS_AT_ONCE = 65_536
_THREAD = re.compile(r"PP rank (\d{1,6}), TP rank (\d{1,6})")

Place = tuple[int, int]
"""Pipeline stage, and place among those that hold the same stage."""


@dataclass(slots=True)
class Row:
    """One operation in one step; times from the step's beginning."""

    step: int
    sequence: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Table:
    """All rows, by place and operation."""

    rows: dict[Place, dict[str, list[Row]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    ranks: dict[Place, int] = field(default_factory=dict)
    """Numbers of ranks, where the file has them."""
    count: int = 0

    def add(self, place: Place, operation: str, row: Row, account: Account) -> None:
        """Take in a row; what is senseless is counted and left out."""
        sensible = 0 <= row.start_ns <= row.end_ns < TIME_AT_MOST_NS
        small = all(0 <= one < PLACE_AT_MOST for one in (*place, row.sequence + 1))
        if not sensible:
            account.skipped["operations with a negative or senseless time"] += 1
        elif not small or not 0 <= row.step < STEP_AT_MOST or self.count >= ROWS_AT_MOST:
            account.skipped["operations with a senseless step, rank or number"] += 1
        else:
            self.rows[place][operation].append(row)
            self.count += 1
            account.read["operations"] += 1


def read_parquet(source: Source, account: Account, table: Table) -> None:
    """Take in a parquet file. Raises CannotImportError without pyarrow, or for a broken file."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CannotImportError(
            f"{source.path.name}: parquet needs the package pyarrow, which is not installed",
            "pip install pyarrow, or give the timeline as JSON instead",
        ) from error
    try:
        with parquet.ParquetFile(source.file) as file:
            names = [*COLUMNS, *(["rank"] if "rank" in file.schema_arrow.names else [])]
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names):
                for row in batch.to_pylist():
                    _parquet_row(row, account, table)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise CannotImportError(f"{source.path.name}: {error}", "copy it again") from error


def _parquet_row(row: Mapping[str, Any], account: Account, table: Table) -> None:
    start, length = whole_ns(row["start_ts"], SECOND_NS), whole_ns(row["duration"], SECOND_NS)
    step, stage, copy = (_int(row[name]) for name in ("step", "stage", "dp_rank"))
    if start is None or length is None or step is None or stage is None or copy is None:
        account.skipped["operations without a time, a step or a rank"] += 1
        return
    place, rank = (stage, copy), _int(row.get("rank"))
    if rank is not None and 0 <= rank < PLACE_AT_MOST:
        table.ranks[place] = rank
    sequence = _int(row["seq_id"])
    entry = Row(step, -1 if sequence is None else sequence, start, start + length)
    table.add(place, str(row["optype"]), entry, account)


def read_timeline(source: Source, account: Account, table: Table) -> None:
    """Take in a timeline in Chrome's format: threads say the stage, processes the copy."""
    stages: dict[tuple[Any, Any], int] = {}
    for one in objects_of(source, account):
        arguments = one.get("args")
        key = (one.get("pid"), one.get("tid"))
        if not isinstance(arguments, dict) or not isinstance(key[0], int):
            account.skipped["events without a process"] += 1
        elif one.get("ph") == "M":
            match = _THREAD.match(str(arguments.get("name")))
            if match and isinstance(key[1], int) and len(stages) < PLACE_AT_MOST:
                if int(match[2]) == 0:
                    stages[key] = int(match[1])
                elif one.get("name") == "thread_name":
                    account.skipped["threads of further tensor-parallel ranks"] += 1
        elif one.get("ph") == "X":
            _timeline_row(one, arguments, key, account, table)
    _place(stages, account, table)


def _timeline_row(
    one: Mapping[str, Any], arguments: Mapping[str, Any], key: Any, account: Account, table: Table
) -> None:
    start = whole_ns(one.get("ts"), MICROSECOND_NS)
    length = whole_ns(one.get("dur"), MICROSECOND_NS)
    step, sequence = _int(arguments.get("step")), _int(arguments.get("seq_id"))
    if start is None or length is None or step is None or not isinstance(key[1], int):
        account.skipped["operations without a time, a step or a rank"] += 1
        return
    entry = Row(step, -1 if sequence is None else sequence, start, start + length)
    # Threads are named before or after what they did: by thread for now, by stage at the end.
    if 0 <= key[0] < PLACE_AT_MOST and 0 <= key[1] < PLACE_AT_MOST:
        table.add((key[1], key[0]), str(one.get("name")), entry, account)
    else:
        account.skipped["operations with a senseless step, rank or number"] += 1


def _place(stages: Mapping[tuple[Any, Any], int], account: Account, table: Table) -> None:
    by_thread, table.rows = table.rows, defaultdict(lambda: defaultdict(list))
    for (thread, copy), operations in by_thread.items():
        stage = stages.get((copy, thread))
        if stage is None:
            account.skipped["operations of a thread whose stage is not told"] += sum(
                map(len, operations.values())
            )
            continue
        for operation, rows in operations.items():
            table.rows[stage, copy][operation] += rows
    for operations in table.rows.values():
        _waited(operations)


def _waited(operations: Mapping[str, list[Row]]) -> None:
    """Let operations with others begin when the one before has ended: a timeline shows of them
    only the transfer."""
    together: dict[tuple[int, int], list[tuple[bool, Row]]] = defaultdict(list)
    for name, rows in operations.items():
        for row in rows:
            together[row.step, row.start_ns].append((name not in WORK, row))
    step, until = -1, -1
    for this, start in sorted(together):
        if this != step:
            step, until = this, -1
        some = together[this, start]
        for waits, row in some:
            if waits and 0 <= until < start:
                row.start_ns = until
        until = max(until, *(row.end_ns for _, row in some))


def _int(value: Any) -> int | None:
    return int(value) if number(value) is not None and value == int(value) else None


def places_in_order(table: Table) -> Iterator[tuple[Place, int]]:
    """Yield the places with their ranks; where the file says none, stages one after the other."""
    copies = 1 + max((copy for _, copy in table.rows), default=0)
    for stage, copy in sorted(table.rows):
        yield (stage, copy), table.ranks.get((stage, copy), stage * copies + copy)
