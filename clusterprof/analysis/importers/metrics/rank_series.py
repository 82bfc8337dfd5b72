"""Series by rank: how often the data loader of each rank had a batch ready.

## What is read

Tables of a time column (`event_time`, `timestamp`, `time`) and a column for each rank (`19`,
`rank_19`): JSON objects of lists, as SPDL publishes them, or CSV. The name of a file says what its
values are: `…data_readiness…` the share of each window in which the training loop's queue was not
empty; other shares and `…_ave_time` are those of a stage of the loader, called by the rest of the
name (`decompress`, `compose`). Give all files of a job together.

## How it is understood

Each window counts as a step of the rank, for nothing shows the real ones. Where the queue was empty
the loop waits for data: for 1 - readiness of the window. Of the stages of the loader the emptiest
one, ready for less than nine tenths of a window, is what the wait is for, and its name tells
whether it computes or reads.

## Where it is blind

An empty queue is not yet a loop that waits: it may still compute on the batch before, so each wait
is the most it can be. In SPDL's published pipeline the time its loop was blocked (`queue_get`)
agrees with it to a hundredth. When in its window a rank waited, and who waited for whom, is not in
it.
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

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.tables import Float, Int, NodeTables
from clusterprof.importers.telemetry.lines import lines_of
from clusterprof.importers.telemetry.times import time_ns
from clusterprof.importers.text_lines import whole_bytes
from clusterprof.probe import layout

Bool = NDArray[np.bool_]
_CELLS_AT_MOST = 1 << 20
_TIMES = ("event_time", "timestamp", "time")
_RANK = re.compile(r"(?:rank[ _-]?)?(\d{1,7})", re.IGNORECASE)
_HEAD = re.compile(rb'"(event_time|timestamp|time)"\s*:\s*\[')
_HEAD_RANK = re.compile(rb'"(?:rank[ _-]?)?\d{1,7}"\s*:\s*\[', re.IGNORECASE)
_READY = 0.9
_COMPUTES = re.compile(r"compos|compress|decod|process|transform|augment|collat|token|resiz|crop")
_READS = re.compile(r"download|read|fetch|open|load")


@dataclass(frozen=True, slots=True)
class Table:
    """One file: values[window, rank], NaN unknown."""

    what: str
    t_ns: Int
    ranks: tuple[int, ...]
    values: Float


class RankSeries:
    """Readiness of data, and of the stages that make them, by rank and window."""

    name: ClassVar[str] = "rank_series"
    title: ClassVar[str] = "series of data readiness by rank"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """By a list of times and lists called by ranks; in CSV by the heads of the columns."""
        if head.lstrip()[:1] == b"{":
            return bool(_HEAD.search(head[:4096]) and _HEAD_RANK.search(head))
        heads = head.split(b"\n", 1)[0].decode("latin-1").strip().lower().split(",")
        return heads[0] in _TIMES and len(heads) > 1 and all(map(_RANK.fullmatch, heads[1:]))

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node with all ranks."""
        tables = []
        for source, account in zip(sources, accounts):
            table = _table(source, account)
            if table is not None:
                account.read["values"] += table.values.size
                tables.append(table)
        loop = next((table for table in tables if "readiness" in table.what), None)
        if loop is None:
            raise CannotImportError(
                "no series says how often data were ready",
                "give the file called …data_readiness… as well",
            )
        stages = {_stage(table, tables): table for table in tables if table is not loop}
        shares = {name: table for name, table in stages.items() if not name.endswith("time")}
        account = accounts[tables.index(loop)]
        account.notes.append(
            "each window counts as a step, and an empty queue as a wait for data: waits are the"
            " most they can be"
        )
        account.notes += _said(loop, stages)
        yield _node(loop, shares)


def _node(loop: Table, shares: Mapping[str, Table]) -> NodeTables:
    node = NodeTables("", RankSeries.name, 0, loop.what)
    node.job = loop.what
    window = int(np.median(np.diff(loop.t_ns))) if loop.t_ns.size > 1 else 60_000_000_000
    end = np.minimum(np.append(loop.t_ns[1:], loop.t_ns[-1] + window), loop.t_ns + window)
    for column, rank in enumerate(loop.ranks):
        pid = rank + 1
        ready = loop.values[:, column]
        known = ~np.isnan(ready)
        start, stop = loop.t_ns[known], end[known]
        node.rank(pid, rank, max(loop.ranks) + 1)
        number = np.flatnonzero(known) + 1
        node.spans(pid, layout.STEP, start, stop, number, 2, -1, -1)
        wait = np.rint((1.0 - ready[known]) * (stop - start)).astype(np.int64)
        waits = wait > 0
        start, wait = start[waits], wait[waits]
        node.spans(pid, layout.DATA_WAIT, start, start + wait, -1, -1, -1, -1)
        computes, reads = _loading(shares, rank, start)
        seen = computes | reads
        if seen.any():
            node.spans(
                pid, layout.LOADING, start[seen], (start + wait)[seen],
                np.where(reads, wait, 0)[seen], np.where(computes, wait, 0)[seen],
            )  # fmt: skip
    return node


def _loading(shares: Mapping[str, Table], rank: int, t_ns: Int) -> tuple[Bool, Bool]:
    """Of each wait whether the stage it is for computes, and whether it reads."""
    best = np.full(t_ns.size, _READY)
    which = np.full(t_ns.size, -1)
    for number, table in enumerate(shares.values()):
        values = _at(table, rank, t_ns)
        emptier = values < best
        best, which = np.where(emptier, values, best), np.where(emptier, number, which)
    names = list(shares)
    computing = [i for i, name in enumerate(names) if _COMPUTES.search(name)]
    reading = [i for i, name in enumerate(names) if _READS.search(name) and i not in computing]
    return np.isin(which, computing), np.isin(which, reading)


def _at(table: Table, rank: int, t_ns: Int) -> Float:
    """Values of a rank at some instants; NaN where there is none."""
    if rank not in table.ranks:
        return np.full(t_ns.size, np.nan)
    row = np.minimum(table.t_ns.searchsorted(t_ns), table.t_ns.size - 1)
    return np.where(table.t_ns[row] == t_ns, table.values[row, table.ranks.index(rank)], np.nan)


def _said(loop: Table, stages: Mapping[str, Table]) -> Iterator[str]:
    """What the series say of the rank whose data were ready least."""
    means = _means(loop)
    worst = loop.ranks[int(np.argmin(means))]
    middle = float(np.median(means[np.isfinite(means)]))
    if not means.min() < _READY * middle:
        return
    parts = [f"rank {worst}: data were ready {means.min():.0%} of the time, {middle:.0%} on the"
             " middle rank"]  # fmt: skip
    for name, table in sorted(stages.items()):
        if worst in table.ranks:
            of_rank = _means(table)
            mine = float(of_rank[table.ranks.index(worst)])
            usual = float(np.median(of_rank[np.isfinite(of_rank)]))
            form = "{:.3f} s" if name.endswith("time") else "{:.0%}"
            parts.append(f"{name} {form.format(mine)} ({form.format(usual)})")
    yield "; ".join(parts)


def _means(table: Table) -> Float:
    """Mean of each rank; infinite where nothing is known."""
    known = ~np.isnan(table.values)
    count = known.sum(axis=0)
    total = np.where(known, table.values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.inf)


def _stage(table: Table, tables: Sequence[Table]) -> str:
    """What is left of a file's name without that in which all begin."""
    words = [each.what.lower().split("_") for each in tables]
    alike = [len(set(some)) == 1 for some in zip(*words)] if len(tables) > 1 else []
    return "_".join(table.what.lower().split("_")[[*alike, False].index(False) :])


def _table(source: Source, account: Account) -> Table | None:
    """Read one file; None when nothing in it could be used."""
    columns = (
        _json_columns(source, account)
        if source.head.lstrip()[:1] == b"{"
        else _csv_columns(source, account)
    )
    times: list[object] = next((columns.pop(name) for name in _TIMES if name in columns), [])
    ranks: dict[int, list[object]] = {}
    for name, values in columns.items():
        match = _RANK.fullmatch(name.strip())
        if match is None or len(values) != len(times):
            account.skipped["columns of no rank, or shorter than the times"] += 1
        else:
            ranks[int(match[1])] = values
    said = [time_ns(str(one)) for one in times]
    kept = [row for row, one in enumerate(said) if one is not None]
    if len(kept) < len(said):
        account.skipped["windows with an impossible time"] += len(said) - len(kept)
    if not ranks or not kept:
        account.cut = account.cut or "no rank and no time in it"
        return None
    t_ns = np.array([one[0] for one in said if one is not None], np.int64)
    table = np.array([[_number(ranks[rank][row]) for rank in sorted(ranks)] for row in kept])
    t_ns, first = np.unique(t_ns, return_index=True)
    what = source.path.name.split(".")[0]
    if not what.lower().endswith("time"):
        outside = (table < 0) | (table > 1)
        if outside.any():
            account.skipped["values that are no shares"] += int(outside.sum())
        table = np.where(outside, np.nan, table)
    return Table(what, t_ns, tuple(sorted(ranks)), table[first])


def _number(value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        return np.nan
    return number if np.isfinite(number) else np.nan


def _json_columns(source: Source, account: Account) -> dict[str, list[object]]:
    try:
        found = msgspec.json.decode(whole_bytes(source))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        account.refuse(f"no valid JSON ({error})")
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): values for name, values in found.items() if isinstance(values, list)}


def _csv_columns(source: Source, account: Account) -> dict[str, list[object]]:
    lines = (
        line.decode("utf-8", "replace").replace("\0", "") for line in lines_of(source, account)
    )
    rows = csv.reader(line for line in lines if line.strip())
    try:
        heads = [head.strip().lower() for head in next(rows, [])]
        columns: dict[str, list[object]] = {head: [] for head in heads}
        for count, row in enumerate(rows, 1):
            if count * len(heads) > _CELLS_AT_MOST:
                raise CannotImportError(f"more than {_CELLS_AT_MOST:,} values", "give fewer")
            if len(row) != len(heads):
                account.skipped["rows with more or fewer columns than the first"] += 1
                continue
            for head, cell in zip(heads, row):
                columns[head].append(cell)
    except csv.Error as error:
        account.cut = f"no valid CSV ({error})"
    return columns
