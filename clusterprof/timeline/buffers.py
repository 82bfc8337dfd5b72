"""What has been read of a node and not yet been handed out: frames in, columns of one chunk out.

Each buffer keeps the frames as the reader gave them and joins them once per chunk, so that a
frame costs a list append. A chunk gets `REACH_NS` of what was before it, and at least the last
reading, so that differences and fetches that end inside it have their beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe.layout import (
    DATA_WAIT,
    FETCH,
    HOOK_NOTE,
    KIND_NAMES,
    LOADER_START,
    OPTIMIZER,
    STEP,
    WORKER_START,
)
from clusterprof.timeline.model import Int, Series, SpanTable
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Rows, Spans

Key = tuple[str, str]
Frame = TypeVar("Frame")
REACH_NS = 2_000_000_000
LASTING = (LOADER_START, WORKER_START, HOOK_NOTE)
LAST_ONE = (FETCH, DATA_WAIT, STEP, OPTIMIZER)  # say what a process is, however long ago
FETCH_NAME = KIND_NAMES[FETCH]
_KIND, _END = SPAN_FIELDS.index("kind"), SPAN_FIELDS.index("end_ns")
_SEQUENCE = len(SPAN_FIELDS)
_MOST = 128  # kinds there can be; a foreign or impossible span counts as this one and goes
_TABLE_ORDER = [*map(SPAN_FIELDS.index, ("start_ns", "end_ns", "a", "b", "c", "d")), _SEQUENCE]


class ColumnBuffer:
    """Samples of one collector with one set of columns."""

    def __init__(self, signals: Sequence[str], devices: Sequence[str]) -> None:
        self._signals, self._devices = signals, devices
        self.keys = list(zip(signals, devices))
        self._frames: list[Columns] = []

    def holds(self, columns: Columns) -> bool:
        """True for a frame with this set of columns."""
        return columns.signals == self._signals and columns.devices == self._devices

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
        t_ns = t_ns[low:high]
        masked = {i for frame in frames for i, mask in enumerate(frame.masks) if mask is not None}
        found = {}
        parts_of = zip(*[frame.values for frame in frames])
        for index, (key, parts) in enumerate(zip(self.keys, parts_of)):
            values = np.concatenate(parts, dtype=np.float64, casting="unsafe")
            if index in masked:
                values[np.concatenate([_mask(frame, index) for frame in frames])] = np.nan
            values = values if order is None else values[order]
            found[key] = Series(t_ns, values[low:high], key[0].endswith("_total"))
        self._frames = _still_needed(frames, [frame.t_ns[-1] for frame in frames], end_ns)
        return found


def _still_needed(frames: list[Frame], last_ns: list[int], end_ns: int) -> list[Frame]:
    """The frames in the reach of the next chunk, and the one with the last reading before it."""
    before = [(t_ns, i) for i, t_ns in enumerate(last_ns) if t_ns < end_ns - REACH_NS]
    latest = max(before)[1] if before else -1
    return [f for i, f in enumerate(frames) if i == latest or last_ns[i] >= end_ns - REACH_NS]


def _mask(frame: Columns, index: int) -> NDArray[np.bool_]:
    mask = frame.masks[index]
    if mask is None:
        return np.zeros(len(frame.t_ns), np.bool_)
    return np.frombuffer(mask, np.uint8) != 0


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
        self._frames = _still_needed(frames, [frame["t_ns"][-1] for frame in frames], end_ns)
        return table if keep.all() else {name: column[keep] for name, column in table.items()}

    def _joined(self, name: str, sizes: list[int]) -> Int:
        parts = [
            frame[name] if name in frame else np.full(size, -1, np.int64)
            for frame, size in zip(self._frames, sizes)
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)


def groups(table: dict[str, Int], name: str) -> dict[int, dict[str, Int]]:
    """Split a table by the values of one column, rows by time, with one sort and one copy."""
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


class SpanBuffer:
    """Spans of one process: each is handed out in the chunk in which it ended.

    One that came too late for its chunk is handed out in the next. With it go the spans of the
    last `REACH_NS`, the last fetch, wait and step, and the marks that hold for all later time.
    """

    def __init__(self, started_ticks: int) -> None:
        self.started_ticks = started_ticks
        self._frames: list[Spans] = []
        self._fetch_kinds: set[int] = set()
        self._waiting = np.zeros((len(SPAN_FIELDS) + 1, 0), np.int64)
        self._recent = self._waiting

    def add(self, spans: Spans) -> None:
        """Take one frame."""
        self._fetch_kinds |= {kind for kind, name in spans.names.items() if name == FETCH_NAME}
        if len(spans.columns["start_ns"]):
            self._frames.append(spans)

    @property
    def empty(self) -> bool:
        """True when nothing waits to be handed out."""
        return not self._frames and not self._waiting.size

    def take(self, end_ns: int, last: bool, scratch: Scratch) -> dict[int, SpanTable]:
        """Return the spans of a chunk by kind, sorted by start."""
        table = self._joined(scratch)
        if self._fetch_kinds:
            self._name_fetches(table)
        late = table[_END] >= end_ns
        waiting = late.any() and not last
        self._waiting = table[:, late] if waiting else self._recent[:, :0]
        kind = table[_KIND].astype(np.int16)
        kind[(table[_KIND] < 0) | (table[_KIND] > _MOST) | (table[_END] < table[0])] = _MOST
        if waiting:
            kind[late] = _MOST
        order = np.argsort(kind, kind="stable")
        sizes = np.bincount(kind)
        order = order[: len(order) - int(sizes[_MOST:].sum())]
        table = np.take(table, order, axis=1)
        bounds = np.concatenate([[0], np.cumsum(sizes[:_MOST])]).tolist()
        kinds = np.flatnonzero(sizes[:_MOST]).tolist()
        found = {k: _span_table(table[:, bounds[k] : bounds[k + 1]]) for k in kinds}
        kept = [np.flatnonzero(table[_END] >= end_ns - REACH_NS)]
        kept += [np.arange(bounds[k], bounds[k + 1]) for k in kinds if k in LASTING]
        kept += [np.array([bounds[k + 1] - 1]) for k in kinds if k in LAST_ONE]
        self._recent = table[:, np.unique(np.concatenate(kept))]
        return found

    def _name_fetches(self, table: Int) -> None:
        """A user's span called "fetch" is one that did not measure CPU time and bytes."""
        rows = np.isin(table[_KIND], list(self._fetch_kinds))
        table[_KIND, rows] = FETCH
        for name in "abcd":
            table[SPAN_FIELDS.index(name), rows] = -1

    def _joined(self, scratch: Scratch) -> Int:
        """What was handed out lately, what waited, and what came, in shared memory."""
        frames, self._frames = self._frames, []
        sizes = [len(frame.columns["start_ns"]) for frame in frames]
        before = self._recent.shape[1]
        waiting = before + self._waiting.shape[1]
        table = scratch.columns(waiting + sum(sizes))
        table[:, :before] = self._recent
        table[:, before:waiting] = self._waiting
        if not frames:
            return table
        for row, name in enumerate(SPAN_FIELDS):
            np.concatenate([f.columns[name] for f in frames], out=table[row, waiting:])
        first = np.array([frame.first_sequence for frame in frames])
        at = np.cumsum([0, *sizes[:-1]])
        table[_SEQUENCE, waiting:] = np.arange(sum(sizes)) + np.repeat(first - at, sizes)
        return table


class Scratch:
    """Memory for one process's spans at a time: fresh pages cost more than the copying."""

    def __init__(self) -> None:
        self._table = np.zeros((_SEQUENCE + 1, 1 << 14), np.int64)

    def columns(self, count: int) -> Int:
        """Return int64[8, count], valid until the next call."""
        if count > self._table.shape[1]:
            self._table = np.zeros((_SEQUENCE + 1, 2 * count), np.int64)
        return self._table[:, :count]


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
