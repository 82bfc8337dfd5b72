"""What has been read of a node and not yet been handed out: frames in, columns of one chunk out.

Each buffer keeps the frames as the reader gave them and joins them once per chunk, so that a
frame costs a list append. A chunk gets `REACH_NS` of what was before it, and at least the last
reading, so that differences and fetches that end inside it have their beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe.layout import FETCH, HOOK_NOTE, LOADER_START, WORKER_START
from clusterprof.timeline.model import Float, Int, Series, SpanTable
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Rows, Spans

Key = tuple[str, str]
REACH_NS = 2_000_000_000
LASTING = (LOADER_START, WORKER_START, HOOK_NOTE)
_KIND, _END = SPAN_FIELDS.index("kind"), SPAN_FIELDS.index("end_ns")
_SEQUENCE = len(SPAN_FIELDS)
_TABLE_ORDER = [*map(SPAN_FIELDS.index, ("start_ns", "end_ns", "a", "b", "c", "d")), _SEQUENCE]


class ColumnBuffer:
    """Samples of one collector with one set of columns."""

    def __init__(self, signals: Sequence[str], devices: Sequence[str]) -> None:
        self.keys = list(zip(signals, devices))
        self._frames: list[Columns] = []

    def add(self, columns: Columns) -> None:
        """Take one frame."""
        if len(columns.t_ns):
            self._frames.append(columns)

    def take(self, start_ns: int, end_ns: int) -> dict[Key, Series]:
        """Return the series from the reading before `start_ns` to the first one at `end_ns`."""
        frames = self._frames
        if not frames:
            return {}
        t_ns = np.concatenate([frame.t_ns for frame in frames])
        order = np.argsort(t_ns, kind="stable") if np.any(t_ns[1:] < t_ns[:-1]) else None
        t_ns = t_ns if order is None else t_ns[order]
        low = max(int(np.searchsorted(t_ns, start_ns - REACH_NS, side="right")) - 1, 0)
        high = int(np.searchsorted(t_ns, end_ns, side="left")) + 1
        found = {}
        for index, key in enumerate(self.keys):
            values = _column(frames, index)
            values = values if order is None else values[order]
            found[key] = Series(t_ns[low:high], values[low:high], key[0].endswith("_total"))
        keep = [frame for frame in frames if frame.t_ns[-1] >= end_ns - REACH_NS]
        self._frames = keep or frames[-1:]
        return found


def _column(frames: list[Columns], index: int) -> Float:
    """One column of all frames, NaN where masked."""
    values = np.concatenate([frame.values[index] for frame in frames]).astype(np.float64)
    if any(frame.masks[index] is not None for frame in frames):
        missing = np.concatenate([_mask(frame, index) for frame in frames])
        values[missing != 0] = np.nan
    return values


def _mask(frame: Columns, index: int) -> NDArray[np.uint8]:
    mask = frame.masks[index]
    if mask is None:
        return np.zeros(len(frame.t_ns), np.uint8)
    return np.frombuffer(mask, np.uint8)


class RowBuffer:
    """A table whose rows come and go."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._frames: list[dict[str, Any]] = []

    def add(self, rows: Rows) -> None:
        """Take one frame; columns that are not known are left out."""
        columns = dict(zip(rows.names, rows.columns))
        if len(columns.get("t_ns", ())):
            self._frames.append(columns)

    def take(self, end_ns: int) -> dict[str, Int]:
        """Return the columns for a chunk; those that the recording lacks are -1 throughout."""
        frames = self._frames
        sizes = [len(frame["t_ns"]) for frame in frames]
        table = {name: self._joined(name, sizes) for name in self._names}
        t_ns = table["t_ns"]
        keep = t_ns < end_ns + REACH_NS
        self._frames = [f for f in frames if f["t_ns"][-1] >= end_ns - REACH_NS] or frames[-1:]
        return table if keep.all() else {name: column[keep] for name, column in table.items()}

    def _joined(self, name: str, sizes: list[int]) -> Int:
        parts = [
            frame[name] if name in frame else np.full(size, -1, np.int64)
            for frame, size in zip(self._frames, sizes)
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)


def groups(keys: Int) -> dict[int, Int]:
    """Return for each distinct key the rows that have it, in order; as fast as a radix sort."""
    distinct = np.unique(keys)
    compact = np.searchsorted(distinct, keys)
    small = compact.astype(np.int16 if len(distinct) < 2**15 else np.int64)
    order = np.argsort(small, kind="stable")
    bounds = np.searchsorted(small[order], np.arange(len(distinct) + 1))
    return {
        int(key): order[low:high]
        for key, low, high in zip(distinct.tolist(), bounds[:-1].tolist(), bounds[1:].tolist())
    }


class SpanBuffer:
    """Spans of one process: each is handed out in the chunk in which it ended.

    One that came too late for its chunk is handed out in the next. With it go the spans of the
    last `REACH_NS`, the last fetch, and the marks that say something about all later time.
    """

    def __init__(self, started_ticks: int) -> None:
        self.started_ticks = started_ticks
        self._frames: list[Spans] = []
        self._waiting = np.zeros((len(SPAN_FIELDS) + 1, 0), np.int64)
        self._recent = self._waiting

    def add(self, spans: Spans) -> None:
        """Take one frame."""
        if len(spans.columns["start_ns"]):
            self._frames.append(spans)

    @property
    def empty(self) -> bool:
        """True when nothing waits to be handed out."""
        return not self._frames and not self._waiting.size

    def take(self, end_ns: int, last: bool) -> dict[int, SpanTable]:
        """Return the spans of a chunk by kind, sorted by start."""
        fresh = self._joined()
        done = fresh[_END] < end_ns
        if not last and not done.all():
            self._waiting, fresh = fresh[:, ~done], fresh[:, done]
        else:
            self._waiting = fresh[:, :0]
        table = np.concatenate([self._recent, fresh], axis=1) if self._recent.size else fresh
        order = np.argsort(np.clip(table[_KIND], 0, 2**15 - 1).astype(np.int16), kind="stable")
        table = table[:, order]
        kinds, first = np.unique(table[_KIND], return_index=True)
        bounds = np.append(first, table.shape[1])
        found = {
            int(kind): _span_table(table[:, low:high])
            for kind, low, high in zip(kinds, bounds[:-1], bounds[1:])
        }
        self._recent = self._kept(table, end_ns)
        return found

    def _joined(self) -> Int:
        sizes = [len(frame.columns["start_ns"]) for frame in self._frames]
        waiting = self._waiting.shape[1]
        table = np.empty((_SEQUENCE + 1, waiting + sum(sizes)), np.int64)
        table[:, :waiting] = self._waiting
        for row, name in enumerate(SPAN_FIELDS if sizes else ()):
            np.concatenate([f.columns[name] for f in self._frames], out=table[row, waiting:])
        at = waiting
        for frame, size in zip(self._frames, sizes):
            table[_SEQUENCE, at : at + size] = np.arange(size) + frame.first_sequence
            at += size
        self._frames = []
        sane = table[_END] >= table[0]
        return table if sane.all() else table[:, sane]

    def _kept(self, table: Int, end_ns: int) -> Int:
        kind = table[_KIND]
        keep = (table[_END] >= end_ns - REACH_NS) | np.isin(kind, LASTING)
        fetches = np.flatnonzero(kind == FETCH)
        if fetches.size:
            keep[fetches[-1]] = True
        return table[:, keep]


def _span_table(table: Int) -> SpanTable:
    start = table[0]
    if np.any(start[1:] < start[:-1]):
        table = table[:, np.argsort(start, kind="stable")]
    return SpanTable(*(table[row] for row in _TABLE_ORDER))


def merge(into: dict[Key, Series], more: Iterable[tuple[Key, Series]]) -> None:
    """Add series; where a signal changed its set of columns, join the two stretches."""
    for key, series in more:
        before = into.get(key)
        if before is None:
            into[key] = series
            continue
        t_ns = np.concatenate([before.t_ns, series.t_ns])
        t_ns, first = np.unique(t_ns, return_index=True)
        values = np.concatenate([before.values, series.values])[first]
        into[key] = Series(t_ns, values, series.is_counter)
