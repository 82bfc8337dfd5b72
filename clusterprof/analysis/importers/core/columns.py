"""Tables in which importers collect what they read, and their merge into records of a trace.

`build_streams` makes records of a node's metric series; series with the same times share a record.
`merge_streams` merges many record streams into time slices; a silent stream costs nothing.
`ImportedSpans` keeps the spans of one process in the order in which an importer adds them, and
yields them sorted by end:

    spans = ImportedSpans()
    first = spans.add(start_ns, end_ns, layout.STEP, number, 2, 0, 0)
    row, table = spans.in_order().between(low_ns, high_ns)

A long trace has millions of spans: each column is kept in the narrowest sufficient dtype, a
constant column as one number, and the sorted output is assembled one slice
at a time.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Record


class Stream(Protocol):
    """A source of records in order of time."""

    def next_ns(self, after_ns: int) -> Iterable[int]:
        """Return the times of the next records at or after `after_ns`; nothing at the end."""
        ...

    def records(self, low_ns: int, high_ns: int) -> Iterable[Record]:
        """Return the records of [low_ns, high_ns)."""
        ...

    def extend_slice(self, low_ns: int, high_ns: int) -> int:
        """Return the latest end for a slice that starts at `low_ns`: `high_ns`, or later."""
        return high_ns


def merge_streams(
    streams: Sequence[Stream], first_ns: int, slice_ns: int
) -> Iterator[list[Record]]:
    """Merge streams into slices of `slice_ns` and yield the records of each nonempty slice.

    Within a slice the records follow the order of the streams. Slices without records are skipped.
    A slice is longer where all its streams allow it, and ends before the next record of another.
    Many streams of few rows cost no more than few streams of many rows.
    """
    waiting = [(t, n) for n, stream in enumerate(streams) for t in stream.next_ns(first_ns)]
    heapq.heapify(waiting)
    low = first_ns
    while waiting:
        if waiting[0][0] >= low + slice_ns:
            low = waiting[0][0]
        high = low + slice_ns
        due = []
        while waiting and waiting[0][0] < high:
            due.append(heapq.heappop(waiting)[1])
        extended_ns = min(streams[number].extend_slice(low, high) for number in due)
        high = max(high, min([extended_ns, *(t for t, _ in waiting[:1])]))
        records: list[Record] = []
        for number in sorted(due):
            records += streams[number].records(low, high)
            for t in streams[number].next_ns(high):
                heapq.heappush(waiting, (t, number))
        yield records
        low = high


Int = NDArray[np.int64]
Float = NDArray[np.float64]
Narrow = NDArray[np.signedinteger] | int
"""An integer column in the narrowest sufficient dtype, or one int if all values are equal."""
_UNREAD_INTERVAL_NS, _MAX_UNREAD_TIMES = 30_000_000_000, 1024
_MAX_COLUMNS_PER_RECORD = 256
"""Largest number of series in one record, which keeps records small."""
_MAX_ROWS_OF_LONG_SLICE = 256
"""Largest number of spans of a process in a long slice; one span costs about as much as 256."""


def pack_column(values: ArrayLike) -> Narrow:
    """Pack integers into one int if all are equal, else into the narrowest sufficient dtype.

    values: int64[n] or one number. Returns intN[n] or int; 0 for an empty array.
    """
    column = np.asarray(values, np.int64)
    if not column.ndim:
        return int(column)
    if not column.size:
        return 0
    low, high = int(column.min()), int(column.max())
    return low if low == high else column.astype(select_dtype(low, high))


def select_dtype(low: int, high: int) -> type[np.signedinteger]:
    """Select the narrowest signed integer dtype that holds the numbers from low to high."""
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return dtype
    return np.int64


def list_unread_times(first_ns: int, last_ns: int, edges_ns: Int) -> Int:
    """List the times at which an unread device is recorded as having no reading.

    first_ns, last_ns: ns. edges_ns: int64[…], ns, always included. Returns sorted int64[n], ns:
    every 30 s, at most 1024 of them, and the edges.
    """
    count = min((last_ns - first_ns) // _UNREAD_INTERVAL_NS + 2, _MAX_UNREAD_TIMES)
    interval_ns = (last_ns - first_ns) // (count - 1)
    return np.unique(np.concatenate([first_ns + np.arange(count) * interval_ns, edges_ns.ravel()]))


@dataclass(slots=True)
class SignalColumn:
    """Readings of one signal of one device."""

    signal: str
    device: str
    t_ns: Int
    values: Int | Float
    mask: NDArray[np.bool_] | None


@dataclass(slots=True)
class BusyCounter:
    """Busy time of a device as a counter in ns that is read at every edge of a busy interval."""

    signal: str
    device: str
    start_ns: Int
    duration_ns: Narrow
    """Lengths of the intervals in ns; the intervals are sorted and disjoint."""
    from_ns: int
    until_ns: int
    _rows_before: int = field(default=0, init=False)
    _busy_before_ns: int = field(default=0, init=False)
    """Total length in ns of the first `_rows_before` intervals, which precede the last request."""

    def bounds_ns(self) -> tuple[int, int]:
        """Return the times of the first and last reading in ns."""
        low, high = self.from_ns, self.until_ns
        if self.start_ns.size:
            low = min(low, int(self.start_ns[0]))
            high = max(high, int(self._ends(slice(-1, None))[0]))
        return low, high

    def next_ns(self, after_ns: int) -> Iterator[int]:
        """Yield the time of the next reading at or after `after_ns`; nothing at the end."""
        row = max(int(self.start_ns.searchsorted(after_ns, side="right")) - 1, 0)
        rows = slice(row, row + 2)
        edges = [self.from_ns, self.until_ns, *self.start_ns[rows].tolist()]
        later = [t for t in (*edges, *self._ends(rows).tolist()) if t >= after_ns]
        if later:
            yield min(later)

    def between(self, low_ns: int, high_ns: int) -> tuple[Int, Int]:
        """Return the readings in [low_ns, high_ns): times and total busy time, int64[n], ns."""
        first = max(int(self.start_ns.searchsorted(low_ns, side="right")) - 1, 0)
        last = int(self.start_ns.searchsorted(high_ns))
        if first < self._rows_before:
            self._rows_before = self._busy_before_ns = 0
        self._busy_before_ns += int(self._durations(slice(self._rows_before, first)).sum())
        self._rows_before = first
        duration = self._durations(slice(first, last))
        edges = np.empty(2 * duration.size + 2, np.int64)
        total = np.empty_like(edges)
        edges[0], total[0] = self.from_ns, 0
        edges[1:-1:2] = self.start_ns[first:last]
        edges[2:-1:2] = edges[1:-1:2] + duration
        busy_ns = self._busy_before_ns + np.cumsum(duration)
        total[1:-1:2], total[2:-1:2] = busy_ns - duration, busy_ns
        edges[-1], total[-1] = self.until_ns, busy_ns[-1] if duration.size else self._busy_before_ns
        t_ns, row = np.unique(edges, return_index=True)
        in_window = (t_ns >= low_ns) & (t_ns < high_ns)
        return t_ns[in_window], total[row[in_window]]

    def _durations(self, rows: slice) -> Int:
        if isinstance(self.duration_ns, int):
            return np.full(self.start_ns[rows].size, self.duration_ns, np.int64)
        return self.duration_ns[rows].astype(np.int64)

    def _ends(self, rows: slice) -> Int:
        return self.start_ns[rows] + self._durations(rows)


@dataclass(slots=True)
class _BusyStream(Stream):
    name: str
    busy: BusyCounter

    def next_ns(self, after_ns: int) -> Iterator[int]:
        return self.busy.next_ns(after_ns)

    def records(self, low_ns: int, high_ns: int) -> Iterator[Columns]:
        t_ns, busy_ns = self.busy.between(low_ns, high_ns)
        if t_ns.size:
            signal, device = [self.busy.signal], [self.busy.device]
            values = [array("q", busy_ns.tobytes())]
            yield Columns(self.name, signal, device, array("q", t_ns.tobytes()), values, [None])


@dataclass(slots=True)
class _SeriesStream(Stream):
    name: str
    t_ns: Int
    columns: list[SignalColumn] = field(default_factory=list)

    def next_ns(self, after_ns: int) -> Iterator[int]:
        row = int(self.t_ns.searchsorted(after_ns))
        if row < self.t_ns.size:
            yield int(self.t_ns[row])

    def records(self, low_ns: int, high_ns: int) -> Iterator[Columns]:
        a, b = (int(self.t_ns.searchsorted(t)) for t in (low_ns, high_ns))
        yield Columns(
            self.name,
            [column.signal for column in self.columns],
            [column.device for column in self.columns],
            array("q", self.t_ns[a:b].tobytes()),
            [_pack_values(column.values[a:b]) for column in self.columns],
            [
                None if column.mask is None else column.mask[a:b].astype(np.uint8).tobytes()
                for column in self.columns
            ],
        )


def build_streams(source: str, columns: Sequence[SignalColumn | BusyCounter]) -> list[Stream]:
    """Build the streams of a node's series; series with the same times share one."""
    streams: list[Stream] = []
    open_streams: dict[bytes, _SeriesStream] = {}
    for column in columns:
        name = f"{source}:{len(streams)}"
        if isinstance(column, BusyCounter):
            streams.append(_BusyStream(name, column))
            continue
        key = blake2b(np.ascontiguousarray(column.t_ns).data).digest()
        stream = open_streams.get(key)
        if stream is None or len(stream.columns) >= _MAX_COLUMNS_PER_RECORD:
            stream = open_streams[key] = _SeriesStream(name, column.t_ns)
            streams.append(stream)
        if column.values.dtype.kind == "f":
            column.values = np.asarray(np.nan_to_num(column.values), np.float64)
        stream.columns.append(column)
    return streams


def _pack_values(values: Int | Float) -> array[int] | array[float]:
    return array("d" if values.dtype.kind == "f" else "q", values.tobytes())


_REFERRING_KINDS = frozenset({layout.EXPOSED, layout.EXPOSED_COLLECTIVE})


@dataclass(slots=True)
class _SpanBatch:
    """Spans that were added in one call."""

    start_ns: Int
    duration_ns: Narrow
    columns: list[Narrow]
    """kind, a, b, c, d."""

    def end(self) -> Int:
        return self.start_ns + self.duration_ns

    def fields(self, rows: NDArray[np.integer] | slice) -> list[Int | Narrow]:
        """Return all fields of the selected rows."""
        start = self.start_ns[rows]
        duration, *columns = (
            column if isinstance(column, int) else column[rows]
            for column in (self.duration_ns, *self.columns)
        )
        return [start, start + duration, *columns]


class ImportedSpans:
    """All spans of one process."""

    def __init__(self) -> None:
        self._batches: list[_SpanBatch] = []
        self.rows = 0

    def add(self, start_ns: ArrayLike, end_ns: ArrayLike, *fields: ArrayLike) -> int:
        """Add spans and return the row of the first.

        start_ns, end_ns: int64[n], ns. fields: kind and a to d, int64[n] or one number each.
        """
        start = np.array(start_ns, np.int64)
        duration = pack_column(np.broadcast_to(np.asarray(end_ns, np.int64), start.shape) - start)
        first, self.rows = self.rows, self.rows + start.size
        if start.size:
            columns = (np.asarray(field, np.int64) for field in fields)
            wide = (
                column if not column.ndim else np.broadcast_to(column, start.shape)
                for column in columns
            )
            self._batches.append(
                _SpanBatch(start, duration, [pack_column(column) for column in wide])
            )
        return first

    def bounds_ns(self) -> list[int]:
        """Return the first start and the last end in ns; an empty list if there are no spans."""
        if not self._batches:
            return []
        low = min(int(batch.start_ns.min()) for batch in self._batches)
        return [low, max(int(batch.end().max()) for batch in self._batches)]

    def in_order(self) -> OrderedSpans:
        """Return the spans sorted by their end."""
        return OrderedSpans(self._batches)


class OrderedSpans:
    """Spans sorted by their end; references between rows are translated to the sorted rows."""

    def __init__(self, batches: list[_SpanBatch]) -> None:
        self._batches = batches
        sizes = [batch.start_ns.size for batch in batches]
        self._first = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        end = np.concatenate([batch.end() for batch in batches] or [np.zeros(0, np.int64)])
        self._order = np.argsort(end, kind="stable").astype(_select_index_dtype(end.size))
        end.sort()
        self._end = end
        self._sorted_row = self._order[:0]
        if any(batch.columns[0] in _REFERRING_KINDS for batch in batches):
            self._sorted_row = np.empty_like(self._order)
            self._sorted_row[self._order] = np.arange(1, end.size + 1, dtype=self._order.dtype)

    def next_ns(self, after_ns: int) -> list[int]:
        """Return the next end at or after `after_ns` in a list; an empty list if there is none."""
        row = int(self._end.searchsorted(after_ns))
        return [int(self._end[row])] if row < self._end.size else []

    def extend_slice(self, low_ns: int, high_ns: int) -> int:
        """Return the end of a slice of 256 spans from `low_ns`; `high_ns` if that is later."""
        row = int(self._end.searchsorted(low_ns)) + _MAX_ROWS_OF_LONG_SLICE
        end_ns = self._end[row] if row < self._end.size else self._end[-1] + 1
        return max(high_ns, int(end_ns))

    def between(self, low_ns: int, high_ns: int) -> tuple[int, Int]:
        """Return the spans that ended in [low_ns, high_ns).

        Returns the row of the first among the sorted spans, counted from 0, and all fields,
        int64[7, n].
        """
        a, b = (int(self._end.searchsorted(t)) for t in (low_ns, high_ns))
        table = np.empty((len(SPAN_FIELDS), b - a), np.int64)
        rows = self._order[a:b].astype(np.int64)
        batch_of_row = self._first.searchsorted(rows, side="right") - 1
        for number in np.unique(batch_of_row).tolist():
            batch_rows = np.flatnonzero(batch_of_row == number)
            batch = self._batches[number]
            for field_index, column in enumerate(
                batch.fields(rows[batch_rows] - self._first[number])
            ):
                table[field_index, batch_rows] = column
            if batch.columns[0] in _REFERRING_KINDS:
                table[3, batch_rows] = self._sorted_row[table[3, batch_rows]]
        return a, table


def _select_index_dtype(size: int) -> type[np.signedinteger]:
    return np.int32 if size < 1 << 31 else np.int64


_MAX_CHANCE_DEVIATIONS = 3  # standard deviations of how often a rank is slowest by chance
_MAX_SLOWEST_RANKS = 4


def describe_slowest_ranks(rank: Int, own_ns: Int, first: Int) -> list[str]:
    """Describe the ranks that were slowest more often than chance explains; [] if there are none.

    Steps in which two ranks took longest do not count. rank, own_ns: int64[rows], sorted by step;
    first: int64[steps], the first row of each step.
    """
    ranks = np.unique(rank)
    longest = np.repeat(np.maximum.reduceat(own_ns, first), np.diff(np.append(first, rank.size)))
    is_longest = own_ns == longest
    alone = np.repeat(np.add.reduceat(is_longest, first) == 1, np.diff(np.append(first, rank.size)))
    times = np.array([int((is_longest & alone & (rank == number)).sum()) for number in ranks])
    even = first.size / ranks.size
    chosen = np.argsort(-times, kind="stable")
    chosen = chosen[times[chosen] > even + _MAX_CHANCE_DEVIATIONS * math.sqrt(even)]
    if ranks.size < 2 or not chosen.size:
        return []
    means = np.array([own_ns[rank == number].mean() for number in ranks])
    typical = max(float(np.median(means)), 1.0)
    parts = [
        f"rank {ranks[index]} in {times[index]:,} of {first.size:,} steps"
        f" ({means[index] / typical:.3g} times the median rank's mean)"
        for index in chosen[:_MAX_SLOWEST_RANKS]
    ]
    hidden_count = chosen.size - len(parts)
    suffix = f", and {hidden_count:,} more" if hidden_count else ""
    return [f"slowest of {ranks.size:,} ranks: {', '.join(parts)}{suffix}"]
