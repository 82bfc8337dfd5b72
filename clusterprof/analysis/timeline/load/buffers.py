"""Frames of a node that were read and not yet assigned to a chunk.

Each buffer keeps the frames as read and concatenates them once per chunk, so that a
frame costs one list append. A chunk also gets the `LOOKBACK_NS` before
it, and at least the last reading, so that differences and fetches that end inside the
chunk have their start.

Spans of all processes that were read and not yet assigned to a chunk.

Each span belongs to the chunk in which it ended; a span that arrived too late for its
chunk belongs to the next one. A chunk also gets the spans of the last
`LOOKBACK_NS`, the last fetch, wait and step of each process, and the
kinds that stay valid for all later time. All processes are sorted in one pass, by
process and kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.model import Float, Int, Series
from clusterprof.analysis.timeline.spans import SpanTable, StackSamples
from clusterprof.probe.layout import (
    ARGUMENTS,
    BACKWARD,
    COLLECTIVE,
    DATA_WAIT,
    EXPOSED,
    FETCH,
    FIRST_USER_KIND,
    FORWARD,
    HOOK_NOTE,
    KIND_NAMES,
    LOADER_START,
    OPTIMIZER,
    STACK_SAMPLE,
    STACK_SAMPLER,
    STEP,
    WORKER_START,
)
from clusterprof.trace.column_decoder import BlockColumns, concat_columns
from clusterprof.trace.decoder import PackedSpans, SpanColumns
from clusterprof.trace.plausibility import find_impossible_spans, find_impossible_values
from clusterprof.trace.schema import SPAN_FIELDS, Column, Columns, Rows, Spans

LOOKBACK_NS = 2_000_000_000
"""Time before a chunk from which spans and samples are repeated, in ns."""
PERSISTENT_KINDS = (LOADER_START, WORKER_START, HOOK_NOTE)
LATEST_ONLY_KINDS = (FETCH, DATA_WAIT, STEP, OPTIMIZER)  # the last one shows what a process is
TRAINING_KINDS = (DATA_WAIT, STEP, OPTIMIZER, EXPOSED, LOADER_START)  # training process
SAMPLER_KINDS = (STACK_SAMPLE, STACK_SAMPLER)
# Of these kinds and of user-defined kinds a training process needs only the spans that show when
# it was active. Collectives of a known group are kept whole: they are matched with other ranks.
_THINNED_KINDS = (FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE)
FETCH_NAME = KIND_NAMES[FETCH]
_KIND, _END = SPAN_FIELDS.index("kind"), SPAN_FIELDS.index("end_ns")
_GROUP = SPAN_FIELDS.index("abcd"[ARGUMENTS[COLLECTIVE].index("group")])
_SEQUENCE = len(SPAN_FIELDS)
# limit of kind numbers; a foreign or impossible span gets this number and is dropped
_KIND_LIMIT = 128
_TABLE_ORDER = [
    *map(SPAN_FIELDS.index, ("start_ns", "end_ns")),
    _SEQUENCE,
    *map(SPAN_FIELDS.index, "abcd"),
]


@dataclass(frozen=True, slots=True)
class _OwnedSpans:
    """Spans and, for each span, the internal number of its process."""

    table: Int
    """int64[8, n]: SPAN_FIELDS and the sequence number."""
    owner: Int


@dataclass(frozen=True, slots=True)
class ChunkSpans:
    """The spans of one chunk."""

    by_pid: dict[int, dict[int, SpanTable]]
    """By pid, then kind, sorted by start."""
    last_end_ns: dict[int, int]
    """By pid: end of the last span."""
    stacks: dict[int, StackSamples]
    """By pid: samples of its Python stack, which are no spans of the job's own work."""


class SpanBuffer:
    """Collects spans of all processes and returns those of a chunk by process and kind."""

    def __init__(self, rejects_late_ends: bool = False) -> None:
        """rejects_late_ends: spans with times that no process has are refused at the end."""
        self._frames: list[Spans | PackedSpans] = []
        # For each part of each frame: process, number of spans, sequence number of the first.
        self._owners: list[int] = []
        self._sizes: list[int] = []
        self._firsts: list[int] = []
        self._number: dict[int, int] = {}  # pid -> the number of its rows
        self._ticks: dict[int, int] = {}
        self._named: dict[int, set[int]] = {}  # number -> its kinds that are named "fetch"
        self._next = 0
        self._rejects_late_ends = rejects_late_ends
        self.refused = 0
        """Spans refused so far."""
        no_spans = np.zeros((_SEQUENCE + 1, 0), np.int64)
        self._waiting = self._recent = _OwnedSpans(no_spans, no_spans[0])

    def add(self, spans: Spans | PackedSpans) -> None:
        """Add one frame; a reused process id starts anew."""
        self._frames.append(spans)
        is_packed = isinstance(spans, PackedSpans)
        parts: Sequence[Any] = spans.parts if isinstance(spans, PackedSpans) else (spans,)
        ticks, numbers = self._ticks, self._number
        for part in parts:
            pid = part.pid
            if ticks.get(pid) != part.started_ticks:
                self._begin(pid, part.started_ticks)
            self._owners.append(numbers[pid])
            if part.names and FETCH_NAME in part.names.values():
                kinds = {kind for kind, name in part.names.items() if name == FETCH_NAME}
                self._named[numbers[pid]] = self._named.get(numbers[pid], set()) | kinds
        self._sizes += [part.rows for part in parts] if is_packed else [_count_spans(spans)]
        self._firsts += [part.first_sequence for part in parts]

    def _begin(self, pid: int, started_ticks: int) -> None:
        self._drop(pid)
        self._ticks[pid] = started_ticks
        self._number[pid] = self._next
        self._next += 1

    def _drop(self, pid: int) -> None:
        self._named.pop(self._number.pop(pid, -1), None)
        self._ticks.pop(pid, None)

    def started_ticks(self, pid: int) -> int | None:
        """Return the start ticks of the process that has these spans; None without spans."""
        return self._ticks.get(pid)

    def drop_unseen(self, active: set[int]) -> None:
        """Drop processes that are not among those seen and have no pending spans."""
        waiting = set(self._waiting.owner.tolist())
        for pid in [p for p, n in self._number.items() if p not in active and n not in waiting]:
            self._drop(pid)

    def take(self, end_ns: int, last: bool) -> ChunkSpans:
        """Return the spans of a chunk."""
        pids = list(self._number)
        numbers = [self._number[pid] for pid in pids]
        columns, number_of_row = self._take_columns()
        owner_index = np.full(self._next + 1, -1, np.int32)
        owner_index[numbers] = np.arange(len(pids))
        owner = owner_index[number_of_row]
        start, end = columns.decode_edges()
        fields = {0: start, _END: end, _KIND: columns.decode_field(_KIND)}
        fetches = self._find_named_fetches(fields[_KIND], number_of_row)
        fields[_KIND][fetches] = FETCH
        kind = np.clip(fields[_KIND], -1, _KIND_LIMIT).astype(np.int16)
        kind[(kind < 0) | (owner < 0) | (end < start)] = _KIND_LIMIT
        if last and self._rejects_late_ends:
            impossible = find_impossible_spans(start, end, end_ns)
            kind[impossible] = _KIND_LIMIT
            self.refused += int(np.count_nonzero(impossible))
        late = np.flatnonzero(end >= end_ns) if not last else np.zeros(0, np.int64)
        kind[late] = _KIND_LIMIT
        late = late[owner[late] >= 0]
        fields[_GROUP] = columns.decode_field(_GROUP, fetches)
        order, groups, bounds = _group_by_process_and_kind(
            (start, end, fields[_GROUP]), np.maximum(owner, 0), kind, len(pids)
        )
        table = np.empty((_SEQUENCE + 1, order.size), np.int64)
        waiting = np.empty((_SEQUENCE + 1, late.size), np.int64)
        for row in range(_SEQUENCE + 1):
            field = fields.pop(row) if row in fields else columns.decode_field(row, fetches)
            # "clip" takes half the time of a check of each row
            np.take(field, order, mode="clip", out=table[row])
            waiting[row] = field[late]
        self._waiting = _OwnedSpans(waiting, number_of_row[late])
        self._recent = self._select_kept(table, groups, bounds, np.array(numbers, np.int64), end_ns)
        tables_by_pid: dict[int, dict[int, SpanTable]] = {pid: {} for pid in pids}
        ends: dict[int, int] = {}
        stacks: dict[int, StackSamples] = {}
        tables = _build_span_tables(table, bounds)
        latest = np.maximum.reduceat(table[_END], bounds[:-1]).tolist() if groups else []
        for (process, kind_number), span_table, end in zip(groups, tables, latest):
            pid = pids[process]
            if kind_number == STACK_SAMPLE:
                stacks[pid] = StackSamples.from_table(span_table)
            if kind_number in SAMPLER_KINDS:
                continue  # a process is sampled as long as it lives, even if it hangs
            tables_by_pid[pid][kind_number] = span_table
            ends[pid] = max(ends.get(pid, end), end)
        return ChunkSpans(tables_by_pid, ends, stacks)

    def _find_named_fetches(self, kind: Int, number_of_row: Int) -> Int:
        """Find the user spans named "fetch": fetches without measured CPU time and bytes."""
        rows = [
            np.flatnonzero((number_of_row == number) & np.isin(kind, list(kinds)))
            for number, kinds in self._named.items()
        ]
        return np.concatenate([np.zeros(0, np.int64), *rows])

    def _select_kept(
        self, table: Int, groups: list[tuple[int, int]], bounds: Int, numbers: Int, end_ns: int
    ) -> _OwnedSpans:
        """Select the spans of this chunk that the next chunk also gets."""
        keep = table[_END] >= end_ns - LOOKBACK_NS
        for (_, kind), low, high in zip(groups, bounds[:-1].tolist(), bounds[1:].tolist()):
            if kind in PERSISTENT_KINDS:
                keep[low:high] = True
            elif kind in LATEST_ONLY_KINDS:
                keep[high - 1] = True
        process = np.repeat([process for process, _ in groups], np.diff(bounds))
        rows = np.flatnonzero(keep)
        return _OwnedSpans(table[:, rows], numbers[process[rows].astype(np.int64)])

    def _take_columns(self) -> tuple[_SpanFields, Int]:
        """Take the spans kept, the spans pending and the new spans, and the number of each one's
        process.
        """
        first = np.array(self._firsts, np.int64)
        sequence = np.arange(sum(self._sizes))
        sequence += np.repeat(first - np.cumsum([0, *self._sizes[:-1]])[: first.size], self._sizes)
        before = self._recent, self._waiting
        columns = _SpanFields([rows.table for rows in before], self._frames, sequence)
        owners = np.repeat(np.array(self._owners, np.int64), self._sizes)
        self._frames, self._owners, self._sizes, self._firsts = [], [], [], []
        return columns, np.concatenate([*(rows.owner for rows in before), owners])


class _SpanFields:
    """The fields of some spans, those of frames after those of tables.

    A field is decoded when it is requested: at once, all fields would take most of the memory of
    the analysis.
    """

    def __init__(
        self, tables: Sequence[Int], frames: Sequence[Spans | PackedSpans], sequence: Int
    ) -> None:
        """tables: int64[8, n] each. sequence: sequence numbers of the spans of the frames."""
        self._tables, self._sequence = tables, sequence
        self._first = sum(table.shape[1] for table in tables)
        self._runs: list[tuple[slice, SpanColumns | list[Spans]]] = []
        end = self._first
        for packed, group in groupby(frames, lambda frame: isinstance(frame, PackedSpans)):
            run: list[Any] = list(group)
            first, end = end, end + sum(map(_count_spans, run))
            self._runs.append((slice(first, end), SpanColumns(run) if packed else run))
        self._size = end

    def decode_edges(self) -> tuple[Int, Int]:
        """Decode the starts and ends of all spans, int64[n] each, ns."""
        start, end = self._copy_tables(0), self._copy_tables(_END)
        for rows, run in self._runs:
            if isinstance(run, SpanColumns):
                run.write_edges(start[rows], end[rows])
            else:
                _write_field(run, 0, start[rows])
                _write_field(run, _END, end[rows])
        return start, end

    def decode_field(self, row: int, fetches: Int | None = None) -> Int:
        """Decode the field in this row of a table, not a time, of all spans: int64[n].

        fetches: spans whose values are not known, -1.
        """
        out = self._copy_tables(row)
        if row == _SEQUENCE:
            out[self._first :] = self._sequence
            return out
        for rows, run in self._runs:
            if isinstance(run, SpanColumns):
                run.write_field(row, out[rows])
            else:
                _write_field(run, row, out[rows])
        if fetches is not None:
            out[fetches] = -1
        return out

    def _copy_tables(self, row: int) -> Int:
        out = np.empty(self._size, np.int64)
        np.concatenate([out[:0], *(table[row] for table in self._tables)], out=out[: self._first])
        return out


def _count_spans(frame: Spans | PackedSpans) -> int:
    """Count the spans of a frame."""
    return frame.rows if isinstance(frame, PackedSpans) else len(frame.columns["start_ns"])


def _write_field(frames: Iterable[Spans], row: int, out: Int) -> None:
    np.concatenate([frame.columns[SPAN_FIELDS[row]] for frame in frames], out=out)


def _group_by_process_and_kind(
    fields: tuple[Int, Int, Int], owner: Int, kind: Int, processes: int
) -> tuple[Int, list[tuple[int, int]], Int]:
    """Sort spans by process and kind, in order of arrival.

    fields: start, end and group of each span. Returns the rows in this order, (process, kind) of
    each group and the bounds of the groups. Spans of kind `_KIND_LIMIT` are left out.
    """
    kinds = np.flatnonzero(np.bincount(kind, minlength=_KIND_LIMIT + 1)[:_KIND_LIMIT])
    width = len(kinds) + 1
    # Two-byte keys are sorted by counting.
    size = np.int16 if processes * width < 1 << 15 else np.int64
    dense = np.full(_KIND_LIMIT + 1, len(kinds), size)
    dense[kinds] = np.arange(len(kinds))
    key = owner.astype(size)
    key *= size(width)
    key += dense[kind]
    key[kind == _KIND_LIMIT] = processes * width
    sizes = np.bincount(key, minlength=processes * width + 1)[:-1]
    order = np.argsort(key, kind="stable")[: int(sizes.sum())]
    used_keys = np.flatnonzero(sizes)
    groups = [(number // width, int(kinds[number % width])) for number in used_keys.tolist()]
    order, bounds = _drop_unread_spans(fields, order, groups, sizes[used_keys].tolist())
    return order, groups, bounds


def _drop_unread_spans(
    fields: tuple[Int, Int, Int], order: Int, groups: list[tuple[int, int]], sizes: list[int]
) -> tuple[Int, Int]:
    """Drop spans that no analysis reads.

    Of each group keep the first, last and latest to arrive. This removes half of all spans.
    fields: start, end and group of each span.
    """
    start, end, span_group = fields
    workers = {process for process, kind in groups if kind == WORKER_START}
    trains = {process for process, kind in groups if kind in TRAINING_KINDS} - workers
    rows: list[Int] = []
    end_row = 0
    for (process, kind), size in zip(groups, sizes):
        first_row, end_row = end_row, end_row + size
        group = order[first_row:end_row]
        if process in trains and (kind in _THINNED_KINDS or kind >= FIRST_USER_KIND):
            edges = {int(start[group].argmin()), int(end[group].argmax()), size - 1}
            keep = np.zeros(size, np.bool_) if kind != COLLECTIVE else span_group[group] != 0
            keep[list(edges)] = True
            group = group[keep]
        rows.append(group)
    bounds = np.concatenate([[0], np.cumsum([group.size for group in rows])]).astype(np.int64)
    return np.concatenate([order[:0], *rows]), bounds


def _build_span_tables(table: Int, bounds: Int) -> list[SpanTable]:
    """Build one table per group, sorted by start.

    Copies, so that a group that is kept does not keep all others.
    """
    start = table[0]
    backward_rows = np.flatnonzero(start[1:] < start[:-1]) + 1
    group = np.searchsorted(bounds, backward_rows, side="right") - 1
    unsorted = set(group[bounds[group] != backward_rows].tolist())
    tables = []
    edges = bounds.tolist()
    for index, (low, high) in enumerate(pairwise(edges)):
        columns = table[:, low:high].copy()
        if index in unsorted:
            columns = columns[:, np.argsort(columns[0], kind="stable")]
        tables.append(SpanTable(*[columns[row] for row in _TABLE_ORDER]))
    return tables


Key = tuple[str, str]
Frame = TypeVar("Frame")


class ColumnBuffer:
    """Samples of one collector with one set of columns."""

    def __init__(self, signals: Sequence[str], devices: Sequence[str]) -> None:
        self._signals, self._devices = signals, devices
        self.keys = list(zip(signals, devices))
        self._frames: list[Columns] = []
        self.refused = 0
        """Values so far that no signal has; they count as not available."""

    def matches(self, columns: Columns) -> bool:
        """Return whether a frame has this set of columns."""
        signals, devices = columns.signals, columns.devices
        is_identical = signals is self._signals and devices is self._devices
        return is_identical or (signals == self._signals and devices == self._devices)

    def add(self, columns: Columns) -> None:
        """Add one frame."""
        if len(columns.t_ns):
            self._frames.append(columns)

    def take(self, start_ns: int, end_ns: int) -> dict[Key, Series]:
        """Return the series of a chunk.

        From the reading before `start_ns` to the first reading at or after `end_ns`.
        """
        frames = self._frames
        if not frames:
            return {}
        t_ns, columns = _concat_frames(frames)
        order = np.argsort(t_ns, kind="stable") if np.any(t_ns[1:] < t_ns[:-1]) else None
        t_ns = t_ns if order is None else t_ns[order]
        low = max(int(np.searchsorted(t_ns, start_ns - LOOKBACK_NS, side="right")) - 1, 0)
        high = int(np.searchsorted(t_ns, end_ns, side="left")) + 1
        t_ns = t_ns[low:high]
        masked = {
            i
            for frame in frames
            if frame.masks.count(None) < len(frame.masks)
            for i, mask in enumerate(frame.masks)
            if mask is not None
        }
        series_by_key = {}
        for index, (key, values) in enumerate(zip(self.keys, columns)):
            if index in masked:
                values[np.concatenate([_decode_mask(frame, index) for frame in frames])] = np.nan
            values = values if order is None else values[order]
            impossible = find_impossible_values(values)
            if impossible.any():
                values[impossible] = np.nan
                inside = (t_ns >= start_ns) & (t_ns < end_ns)
                self.refused += int(np.count_nonzero(impossible[low:high] & inside))
            series_by_key[key] = Series(t_ns, values[low:high], key[0].endswith("_total"))
        self._frames = _select_needed_frames(frames, [frame.t_ns[-1] for frame in frames], end_ns)
        return series_by_key


def _concat_frames(frames: Sequence[Columns]) -> tuple[Int, list[Float]]:
    """Concatenate the times and each column of all frames, int64[n] and float64[n]."""
    runs: list[tuple[Int, list[Float]]] = []
    for folded, run in groupby(frames, lambda frame: isinstance(frame.values, BlockColumns)):
        frames_of_run = list(run)
        if folded:
            (t_ns,) = concat_columns([block.t_ns.columns for block in frames_of_run], np.int64)
            values: list[Any] = [block.values for block in frames_of_run]
            runs.append((t_ns, concat_columns(values, np.float64)))
            continue
        columns = zip(*(block.values for block in frames_of_run))
        runs.append(
            (
                np.concatenate([block.t_ns for block in frames_of_run]),
                [np.concatenate(c, dtype=np.float64, casting="unsafe") for c in columns],
            )
        )
    if len(runs) == 1:
        return runs[0]
    t_ns = np.concatenate([t_ns for t_ns, _ in runs])
    return t_ns, [np.concatenate(parts) for parts in zip(*(columns for _, columns in runs))]


def _select_needed_frames(frames: list[Frame], last_ns: list[int], end_ns: int) -> list[Frame]:
    """Select the frames that the next chunk needs, and the one with the last reading before."""
    before = [(t_ns, i) for i, t_ns in enumerate(last_ns) if t_ns < end_ns - LOOKBACK_NS]
    latest = max(before)[1] if before else -1
    return [f for i, f in enumerate(frames) if i == latest or last_ns[i] >= end_ns - LOOKBACK_NS]


def _decode_mask(frame: Columns, index: int) -> NDArray[np.bool_]:
    mask = frame.masks[index]
    if mask is None:
        return np.zeros(len(frame.t_ns), np.bool_)
    return np.frombuffer(mask, np.uint8) != 0


class RowBuffer:
    """Rows of one table, in which the entities change over time."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._frames: list[Rows] = []
        self._last_ns: list[int] = []

    def add(self, rows: Rows) -> None:
        """Add one frame; columns with unknown names are ignored."""
        t_ns = get_row_times(rows)
        if len(t_ns):
            self._frames.append(rows)
            self._last_ns.append(int(t_ns[-1]))

    def take(self, end_ns: int) -> dict[str, Int]:
        """Return the columns for a chunk; columns missing from the recording are -1 throughout."""
        parts: dict[str, list[Int]] = {name: [np.zeros(0, np.int64)] for name in self._names}
        for _, run in groupby(self._frames, _get_row_layout):
            for name, column in _concat_rows(list(run), self._names).items():
                parts[name].append(column)
        table = {name: np.concatenate(columns) for name, columns in parts.items()}
        keep = table["t_ns"] < end_ns + LOOKBACK_NS
        frames = _select_needed_frames(
            list(zip(self._frames, self._last_ns)), self._last_ns, end_ns
        )
        self._frames = [rows for rows, _ in frames]
        self._last_ns = [last_ns for _, last_ns in frames]
        return table if keep.all() else {name: column[keep] for name, column in table.items()}


def get_row_times(rows: Rows) -> Column:
    """Return the sample times of the rows, at least the first and last.

    Empty if there is no such column. int64[n], ns.
    """
    if "t_ns" not in rows.names:
        return ()
    index = rows.names.index("t_ns")
    if isinstance(rows.columns, BlockColumns):
        return rows.columns.encoded_column(index)
    return rows.columns[index]


def _get_row_layout(rows: Rows) -> tuple[Any, ...]:
    """Return the layout that frames must share for their columns to be concatenated."""
    return tuple(rows.names), isinstance(rows.columns, BlockColumns)


def _concat_rows(frames: Sequence[Rows], names: Sequence[str]) -> dict[str, Int]:
    """Concatenate the named columns of frames with equal layout.

    -1 throughout for missing columns.
    """
    index_of = {name: index for index, name in enumerate(frames[0].names)}
    columns: Sequence[Int]
    if isinstance(frames[0].columns, BlockColumns):
        folded: list[Any] = [rows.columns for rows in frames]
        columns = concat_columns(folded, np.int64)
    else:
        columns = [
            np.concatenate(c).astype(np.int64) for c in zip(*(rows.columns for rows in frames))
        ]
    missing = np.full(len(columns[index_of["t_ns"]]), -1, np.int64)
    return {name: columns[index_of[name]] if name in index_of else missing for name in names}


def split_by_column(table: dict[str, Int], name: str) -> dict[int, dict[str, Int]]:
    """Split a table by the values of one column, rows sorted by time.

    One sort and one copy. table: int64[n] columns. Returns for each value the columns of
    its rows.
    """
    keys = table[name]
    distinct = np.array(sorted(set(keys.tolist())), np.int64)
    compact = np.searchsorted(distinct, keys)
    small = compact.astype(np.int16 if len(distinct) < 2**15 else np.int64)
    t_ns = table["t_ns"]
    if np.all(t_ns[1:] >= t_ns[:-1]):
        order = np.argsort(small, kind="stable")
    else:
        order = np.lexsort((t_ns, small))
    ordered = {column: values[order] for column, values in table.items()}
    bounds = np.concatenate([[0], np.cumsum(np.bincount(small, minlength=len(distinct)))]).tolist()
    return {
        key: {column: values[low:high] for column, values in ordered.items()}
        for key, low, high in zip(distinct.tolist(), bounds[:-1], bounds[1:])
    }


def merge_series(target: dict[Key, Series], added: Iterable[tuple[Key, Series]]) -> None:
    """Merge series into `target`; concatenate both parts of a series that exists there."""
    for key, series in added:
        existing = target.get(key)
        if existing is None:
            target[key] = series
            continue
        t_ns = np.concatenate([existing.t_ns, series.t_ns])
        t_ns, first = np.unique(t_ns, return_index=True)
        values = np.concatenate([existing.values, series.values])[first]
        target[key] = Series(t_ns, values, series.is_counter)
