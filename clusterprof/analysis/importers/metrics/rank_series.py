"""Series by rank: how often the data loader of each rank had a batch ready.

## How to make the file

Export the performance statistics of an SPDL pipeline with one column per rank, as in the data that
SPDL publishes.

## How to analyze it

    clusterprof analyze readiness/

## What is read

Tables with a time column (`event_time`, `timestamp`, `time`) and a column for each rank (`19`,
`rank_19`): JSON objects of lists, or CSV. The file name defines the values. `…data_readiness…` is
the share of each window in which the queue of the training loop was not empty. Other shares and
`…_ave_time` belong to a stage of the loader, named by the rest of the file name (`decompress`,
`compose`). Give all files of a job together.

## How the numbers are computed

Each window counts as a step of the rank, because the files do not show the real steps. The loop
waits for data while its queue is empty: for 1 - readiness of the window. The wait is attributed to
the least ready of the loader stages that were ready for less than nine tenths of a window. The name
of that stage shows whether it computes or reads.

## What it cannot see

An empty queue does not prove that the loop waits: it may still compute on the previous batch. Each
wait is therefore an upper bound. In SPDL's published pipeline the time in which the loop was
blocked (`queue_get`) differs from it by less than a hundredth. The files do not show when in a
window a rank waited, or which rank waited for which.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import Float, Int, NodeTables
from clusterprof.analysis.importers.core.text import name_trace, read_json_bytes
from clusterprof.analysis.importers.metrics.metric_readings import parse_time, read_stripped_lines
from clusterprof.probe import layout

Bool = NDArray[np.bool_]
_MAX_CELLS = 1 << 20
_TIMES = ("event_time", "timestamp", "time")
_RANK = re.compile(r"(?:rank[ _-]?)?(\d{1,7})", re.IGNORECASE)
_TIME_KEY = re.compile(rb'"(event_time|timestamp|time)"\s*:\s*\[')
_RANK_KEY = re.compile(rb'"(?:rank[ _-]?)?\d{1,7}"\s*:\s*\[', re.IGNORECASE)
_READY_SHARE = 0.9
_COMPUTES = re.compile(r"compos|compress|decod|process|transform|augment|collat|token|resiz|crop")
_READS = re.compile(r"download|read|fetch|open|load")


@dataclass(frozen=True, slots=True)
class RankTable:
    """One file: values[window, rank], NaN if unknown."""

    name: str
    t_ns: Int
    ranks: tuple[int, ...]
    values: Float


class RankSeries:
    """Importer of data readiness, and of loader stages, by rank and window."""

    name: ClassVar[str] = "rank_series"
    title: ClassVar[str] = "series of data readiness by rank"
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file has a list of times and lists (or columns) named by ranks."""
        if head.lstrip()[:1] == b"{":
            return bool(_TIME_KEY.search(head[:4096]) and _RANK_KEY.search(head))
        heads = head.split(b"\n", 1)[0].decode("latin-1").strip().lower().split(",")
        return heads[0] in _TIMES and len(heads) > 1 and all(map(_RANK.fullmatch, heads[1:]))

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node with all ranks.

        Raises: CannotImportError when no file contains the data readiness.
        """
        tables = []
        for source, account in zip(sources, accounts):
            table = _read_table(source, account)
            if table is not None:
                account.read["values"] += table.values.size
                tables.append(table)
        loop = next((table for table in tables if "readiness" in table.name), None)
        if loop is None:
            raise CannotImportError(
                "no series contains the data readiness", "also give the file named …data_readiness…"
            )
        stages = {
            _strip_common_words(table, tables): table for table in tables if table is not loop
        }
        shares = {name: table for name, table in stages.items() if not name.endswith("time")}
        account = accounts[tables.index(loop)]
        account.notes.append(
            "each window counts as a step, and an empty queue as a wait for data: waits are an"
            " upper bound"
        )
        worst = list(_describe_worst_rank(loop, stages))
        account.notes += worst
        account.answers += worst
        yield _build_node(loop, shares)


def _build_node(loop: RankTable, shares: Mapping[str, RankTable]) -> NodeTables:
    node = NodeTables("", RankSeries.name, 0, loop.name)
    node.job = loop.name
    window = int(np.median(np.diff(loop.t_ns))) if loop.t_ns.size > 1 else 60_000_000_000
    end = np.minimum(np.append(loop.t_ns[1:], loop.t_ns[-1] + window), loop.t_ns + window)
    for column, rank in enumerate(loop.ranks):
        pid = rank + 1
        ready = loop.values[:, column]
        measured = ~np.isnan(ready)
        start, stop = loop.t_ns[measured], end[measured]
        node.add_rank(pid, rank, max(loop.ranks) + 1)
        number = np.flatnonzero(measured) + 1
        node.add_spans(pid, layout.STEP, start, stop, number, 2, -1, -1)
        wait = np.rint((1.0 - ready[measured]) * (stop - start)).astype(np.int64)
        waits = wait > 0
        start, wait = start[waits], wait[waits]
        node.add_spans(pid, layout.DATA_WAIT, start, start + wait, -1, -1, -1, -1)
        computes, reads = _find_waited_stage(shares, rank, start)
        is_known = computes | reads
        if is_known.any():
            node.add_spans(
                pid,
                layout.LOADING,
                start[is_known],
                (start + wait)[is_known],
                np.where(reads, wait, 0)[is_known],
                np.where(computes, wait, 0)[is_known],
            )
    return node


def _find_waited_stage(shares: Mapping[str, RankTable], rank: int, t_ns: Int) -> tuple[Bool, Bool]:
    """Find whether the stage of each wait computes, and whether it reads: bool[n] each."""
    lowest = np.full(t_ns.size, _READY_SHARE)
    stage = np.full(t_ns.size, -1)
    for number, table in enumerate(shares.values()):
        values = _sample_rank(table, rank, t_ns)
        emptier = values < lowest
        lowest, stage = np.where(emptier, values, lowest), np.where(emptier, number, stage)
    names = list(shares)
    computing = [i for i, name in enumerate(names) if _COMPUTES.search(name)]
    reading = [i for i, name in enumerate(names) if _READS.search(name) and i not in computing]
    return np.isin(stage, computing), np.isin(stage, reading)


def _sample_rank(table: RankTable, rank: int, t_ns: Int) -> Float:
    """Sample the values of a rank at some times, float64[n]; NaN where there is none."""
    if rank not in table.ranks:
        return np.full(t_ns.size, np.nan)
    row = np.minimum(table.t_ns.searchsorted(t_ns), table.t_ns.size - 1)
    return np.where(table.t_ns[row] == t_ns, table.values[row, table.ranks.index(rank)], np.nan)


def _describe_worst_rank(loop: RankTable, stages: Mapping[str, RankTable]) -> Iterator[str]:
    """Describe the rank whose data was ready least often, if it differs from the others."""
    means = _compute_means(loop)
    worst = loop.ranks[int(np.argmin(means))]
    is_known = np.isfinite(means)
    median = float(np.median(means[is_known])) if is_known.any() else 0.0
    if not means.min() < _READY_SHARE * median:
        return
    parts = [
        f"rank {worst}: data was ready {means.min():.0%} of the time, {median:.0%} on the"
        " median rank"
    ]
    for name, table in sorted(stages.items()):
        if worst in table.ranks:
            stage_means = _compute_means(table)
            worst_mean = float(stage_means[table.ranks.index(worst)])
            if not np.isfinite(worst_mean):
                continue  # nothing is known of this stage on that rank
            median_of_stage = float(np.median(stage_means[np.isfinite(stage_means)]))
            form = "{:.3f} s" if name.endswith("time") else "{:.0%}"
            parts.append(f"{name} {form.format(worst_mean)} ({form.format(median_of_stage)})")
    yield "; ".join(parts)


def _compute_means(table: RankTable) -> Float:
    """Compute the mean of each rank, float64[ranks]; infinite where nothing is known."""
    measured = ~np.isnan(table.values)
    count = measured.sum(axis=0)
    total = np.where(measured, table.values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.inf)


def _strip_common_words(table: RankTable, tables: Sequence[RankTable]) -> str:
    """Strip from a file name the leading words that all files have in common."""
    names = [other.name.lower().split("_") for other in tables]
    is_common = [len(set(words_at)) == 1 for words_at in zip(*names)] if len(tables) > 1 else []
    return "_".join(table.name.lower().split("_")[[*is_common, False].index(False) :])


def _read_table(source: Source, account: Account) -> RankTable | None:
    """Read one file; None if it has no usable data."""
    columns = (
        _read_json_columns(source, account)
        if source.head.lstrip()[:1] == b"{"
        else _read_csv_columns(source, account)
    )
    times: list[object] = next((columns.pop(name) for name in _TIMES if name in columns), [])
    ranks: dict[int, list[object]] = {}
    for name, values in columns.items():
        match = _RANK.fullmatch(name.strip())
        if match is None or len(values) != len(times):
            account.skipped["columns without a rank, or of another length"] += 1
        else:
            ranks[int(match[1])] = values
    parsed = [parse_time(str(time)) for time in times]
    timed_rows = [row for row, parsed_time in enumerate(parsed) if parsed_time is not None]
    if len(timed_rows) < len(parsed):
        account.skipped["windows with an impossible time"] += len(parsed) - len(timed_rows)
    if not ranks or not timed_rows:
        account.cut = account.cut or "the file has no rank or no time"
        return None
    t_ns = np.array([parsed_time[0] for parsed_time in parsed if parsed_time is not None], np.int64)
    table = np.array(
        [[_convert_number(ranks[rank][row]) for rank in sorted(ranks)] for row in timed_rows]
    )
    t_ns, first = np.unique(t_ns, return_index=True)
    series_name = name_trace(source.path)
    if not series_name.lower().endswith("time"):
        outside = (table < 0) | (table > 1)
        if outside.any():
            account.skipped["values outside 0 to 1"] += int(outside.sum())
        table = np.where(outside, np.nan, table)
    return RankTable(series_name, t_ns, tuple(sorted(ranks)), table[first])


def _convert_number(value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        return np.nan
    return number if np.isfinite(number) else np.nan


def _read_json_columns(source: Source, account: Account) -> dict[str, list[object]]:
    try:
        content = msgspec.json.decode(read_json_bytes(source))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        account.refuse(f"not valid JSON ({error})")
        return {}
    if not isinstance(content, dict):
        return {}
    return {str(name): values for name, values in content.items() if isinstance(values, list)}


def _read_csv_columns(source: Source, account: Account) -> dict[str, list[object]]:
    lines = (
        line.decode("utf-8", "replace").replace("\0", "")
        for line in read_stripped_lines(source, account)
    )
    rows = csv.reader(line for line in lines if line.strip())
    try:
        heads = [head.strip().lower() for head in next(rows, [])]
        columns: dict[str, list[object]] = {head: [] for head in heads}
        for count, row in enumerate(rows, 1):
            if count * len(heads) > _MAX_CELLS:
                raise CannotImportError(f"more than {_MAX_CELLS:,} values", "give fewer")
            if len(row) != len(heads):
                account.skipped["rows with more or fewer columns than the first"] += 1
                continue
            for head, cell in zip(heads, row):
                columns[head].append(cell)
    except csv.Error as error:
        account.cut = f"not valid CSV ({error})"
    return columns
