"""What has been read of a node and not yet been handed out: frames in, columns of one chunk out.

Each buffer keeps the frames as the reader gave them and joins them once per chunk, so that a
frame costs a list append. A chunk gets `REACH_NS` of what was before it, and at least the last
reading, so that differences and fetches that end inside it have their beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Float, Int, Series
from clusterprof.timeline.spans import REACH_NS
from clusterprof.trace.blockcolumns import BlockColumns, joined
from clusterprof.trace.schema import Column, Columns, Rows

Key = tuple[str, str]
Frame = TypeVar("Frame")


class ColumnBuffer:
    """Samples of one collector with one set of columns."""

    def __init__(self, signals: Sequence[str], devices: Sequence[str]) -> None:
        self._signals, self._devices = signals, devices
        self.keys = list(zip(signals, devices))
        self._frames: list[Columns] = []

    def holds(self, columns: Columns) -> bool:
        """True for a frame with this set of columns."""
        signals, devices = columns.signals, columns.devices
        same = signals is self._signals and devices is self._devices
        return same or (signals == self._signals and devices == self._devices)

    def add(self, columns: Columns) -> None:
        """Take one frame."""
        if len(columns.t_ns):
            self._frames.append(columns)

    def take(self, start_ns: int, end_ns: int) -> dict[Key, Series]:
        """Return the series from the reading before `start_ns` to the first one at `end_ns`."""
        frames = self._frames
        if not frames:
            return {}
        t_ns, columns = _joined(frames)
        order = np.argsort(t_ns, kind="stable") if np.any(t_ns[1:] < t_ns[:-1]) else None
        t_ns = t_ns if order is None else t_ns[order]
        low = max(int(np.searchsorted(t_ns, start_ns - REACH_NS, side="right")) - 1, 0)
        high = int(np.searchsorted(t_ns, end_ns, side="left")) + 1
        t_ns = t_ns[low:high]
        masked = {
            i
            for frame in frames
            if frame.masks.count(None) < len(frame.masks)
            for i, mask in enumerate(frame.masks)
            if mask is not None
        }
        found = {}
        for index, (key, values) in enumerate(zip(self.keys, columns)):
            if index in masked:
                values[np.concatenate([_mask(frame, index) for frame in frames])] = np.nan
            values = values if order is None else values[order]
            found[key] = Series(t_ns, values[low:high], key[0].endswith("_total"))
        self._frames = _still_needed(frames, [frame.t_ns[-1] for frame in frames], end_ns)
        return found


def _joined(frames: Sequence[Columns]) -> tuple[Int, list[Float]]:
    """The times and each column of all frames together, int64[n] and float64[n]."""
    stretches: list[tuple[Int, list[Float]]] = []
    for folded, run in groupby(frames, lambda frame: isinstance(frame.values, BlockColumns)):
        some = list(run)
        if folded:
            (t_ns,) = joined([one.t_ns.columns for one in some], np.int64)
            values: list[Any] = [one.values for one in some]
            stretches.append((t_ns, joined(values, np.float64)))
            continue
        columns = zip(*(one.values for one in some))
        stretches.append(
            (
                np.concatenate([one.t_ns for one in some]),
                [np.concatenate(c, dtype=np.float64, casting="unsafe") for c in columns],
            )
        )
    if len(stretches) == 1:
        return stretches[0]
    t_ns = np.concatenate([t_ns for t_ns, _ in stretches])
    return t_ns, [np.concatenate(parts) for parts in zip(*(columns for _, columns in stretches))]


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
        self._frames: list[Rows] = []
        self._last_ns: list[int] = []

    def add(self, rows: Rows) -> None:
        """Take one frame; columns that are not known are left out."""
        t_ns = times_of(rows)
        if len(t_ns):
            self._frames.append(rows)
            self._last_ns.append(int(t_ns[-1]))

    def take(self, end_ns: int) -> dict[str, Int]:
        """Return the columns for a chunk; those that the recording lacks are -1 throughout."""
        parts: dict[str, list[Int]] = {name: [np.zeros(0, np.int64)] for name in self._names}
        for _, run in groupby(self._frames, _shape):
            for name, column in _rows_joined(list(run), self._names).items():
                parts[name].append(column)
        table = {name: np.concatenate(columns) for name, columns in parts.items()}
        keep = table["t_ns"] < end_ns + REACH_NS
        kept = _still_needed(list(zip(self._frames, self._last_ns)), self._last_ns, end_ns)
        self._frames = [rows for rows, _ in kept]
        self._last_ns = [last_ns for _, last_ns in kept]
        return table if keep.all() else {name: column[keep] for name, column in table.items()}


def times_of(rows: Rows) -> Column:
    """Return when each row was sampled, first and last at least; empty when it does not say."""
    if "t_ns" not in rows.names:
        return ()
    index = rows.names.index("t_ns")
    if isinstance(rows.columns, BlockColumns):
        return rows.columns.folded(index)
    return rows.columns[index]


def _shape(rows: Rows) -> tuple[Any, ...]:
    """What frames have in common whose columns can be joined together."""
    return tuple(rows.names), isinstance(rows.columns, BlockColumns)


def _rows_joined(frames: Sequence[Rows], names: Sequence[str]) -> dict[str, Int]:
    """The named columns of frames that look alike; -1 throughout where they lack one."""
    place = {name: index for index, name in enumerate(frames[0].names)}
    columns: Sequence[Int]
    if isinstance(frames[0].columns, BlockColumns):
        folded: list[Any] = [one.columns for one in frames]
        columns = joined(folded, np.int64)
    else:
        columns = [
            np.concatenate(c).astype(np.int64) for c in zip(*(one.columns for one in frames))
        ]
    missing = np.full(len(columns[place["t_ns"]]), -1, np.int64)
    return {name: columns[place[name]] if name in place else missing for name in names}


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
