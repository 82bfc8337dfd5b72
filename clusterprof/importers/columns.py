"""Series of a node as records: those read at the same instants share one."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clusterprof.importers.slices import Stream
from clusterprof.trace.schema import Columns

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Narrow = NDArray[np.signedinteger] | int
"""A column in a type just wide enough; a number where it is the same everywhere."""
_UNREAD_NS, _UNREAD_AT_MOST = 30_000_000_000, 1024
_TOGETHER_AT_MOST = 256
"""Series of one record, so that one record stays small."""


def narrow(values: ArrayLike) -> Narrow:
    """Return whole numbers as one if they are all the same, else in a type just wide enough."""
    column = np.asarray(values, np.int64)
    if not column.ndim:
        return int(column)
    if not column.size:
        return 0
    low, high = int(column.min()), int(column.max())
    return low if low == high else column.astype(held_by(low, high))


def held_by(low: int, high: int) -> type[np.signedinteger]:
    """Return the narrowest type that holds the numbers from low to high."""
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return dtype
    return np.int64


def unread_ns(first_ns: int, last_ns: int, edges_ns: Int) -> Int:
    """Return when a device that nobody read is said to have no reading: often, and at the edges."""
    count = min((last_ns - first_ns) // _UNREAD_NS + 2, _UNREAD_AT_MOST)
    between = (last_ns - first_ns) // (count - 1)
    return np.unique(np.concatenate([first_ns + np.arange(count) * between, edges_ns.ravel()]))


@dataclass(slots=True)
class Column:
    """Readings of one signal of one device."""

    signal: str
    device: str
    t_ns: Int
    values: Int | Float
    mask: NDArray[np.bool_] | None


@dataclass(slots=True)
class Busy:
    """When a device was at work, as a counter of ns that is read at every edge."""

    signal: str
    device: str
    start_ns: Int
    took_ns: Narrow
    """Sorted, disjoint: starts, and how long each was."""
    from_ns: int
    until_ns: int
    _seen: int = field(default=0, init=False)
    _seen_ns: int = field(default=0, init=False)
    """So many intervals lie before what was asked for last, and are so long together."""

    def bounds_ns(self) -> tuple[int, int]:
        """Return the first and the last reading."""
        low, high = self.from_ns, self.until_ns
        if self.start_ns.size:
            low = min(low, int(self.start_ns[0]))
            high = max(high, int(self._ends(slice(-1, None))[0]))
        return low, high

    def next_ns(self, after_ns: int) -> Iterator[int]:
        """Yield when it is read next, at or after an instant; nothing at its end."""
        row = max(int(self.start_ns.searchsorted(after_ns, side="right")) - 1, 0)
        some = slice(row, row + 2)
        edges = [self.from_ns, self.until_ns, *self.start_ns[some].tolist()]
        later = [t for t in (*edges, *self._ends(some).tolist()) if t >= after_ns]
        if later:
            yield min(later)

    def between(self, low_ns: int, high_ns: int) -> tuple[Int, Int]:
        """Return the readings in [low, high): when, and how long it had worked by then."""
        first = max(int(self.start_ns.searchsorted(low_ns, side="right")) - 1, 0)
        last = int(self.start_ns.searchsorted(high_ns))
        if first < self._seen:
            self._seen = self._seen_ns = 0
        self._seen_ns += int(self._took(slice(self._seen, first)).sum())
        self._seen = first
        took = self._took(slice(first, last))
        edges = np.empty(2 * took.size + 2, np.int64)
        total = np.empty_like(edges)
        edges[0], total[0] = self.from_ns, 0
        edges[1:-1:2] = self.start_ns[first:last]
        edges[2:-1:2] = edges[1:-1:2] + took
        worked = self._seen_ns + np.cumsum(took)
        total[1:-1:2], total[2:-1:2] = worked - took, worked
        edges[-1], total[-1] = self.until_ns, worked[-1] if took.size else self._seen_ns
        t_ns, row = np.unique(edges, return_index=True)
        here = (t_ns >= low_ns) & (t_ns < high_ns)
        return t_ns[here], total[row[here]]

    def _took(self, some: slice) -> Int:
        if isinstance(self.took_ns, int):
            return np.full(self.start_ns[some].size, self.took_ns, np.int64)
        return self.took_ns[some].astype(np.int64)

    def _ends(self, some: slice) -> Int:
        return self.start_ns[some] + self._took(some)


@dataclass(slots=True)
class _BusyStream:
    name: str
    busy: Busy

    def next_ns(self, after_ns: int) -> Iterator[int]:
        return self.busy.next_ns(after_ns)

    def records(self, low_ns: int, high_ns: int) -> Iterator[Columns]:
        t_ns, worked = self.busy.between(low_ns, high_ns)
        if t_ns.size:
            signal, device = [self.busy.signal], [self.busy.device]
            values = [array("q", worked.tobytes())]
            yield Columns(self.name, signal, device, array("q", t_ns.tobytes()), values, [None])


@dataclass(slots=True)
class _Block:
    name: str
    t_ns: Int
    columns: list[Column] = field(default_factory=list)

    def next_ns(self, after_ns: int) -> Iterator[int]:
        row = int(self.t_ns.searchsorted(after_ns))
        if row < self.t_ns.size:
            yield int(self.t_ns[row])

    def records(self, low_ns: int, high_ns: int) -> Iterator[Columns]:
        a, b = (int(self.t_ns.searchsorted(t)) for t in (low_ns, high_ns))
        yield Columns(
            self.name,
            [one.signal for one in self.columns],
            [one.device for one in self.columns],
            array("q", self.t_ns[a:b].tobytes()),
            [_packed(one.values[a:b]) for one in self.columns],
            [
                None if one.mask is None else one.mask[a:b].astype(np.uint8).tobytes()
                for one in self.columns
            ],
        )


def streams_of(source: str, columns: Sequence[Column | Busy]) -> list[Stream]:
    """Return the series of a node, gathered by the instants at which they were read."""
    streams: list[Stream] = []
    open_: dict[bytes, _Block] = {}
    for column in columns:
        name = f"{source}:{len(streams)}"
        if isinstance(column, Busy):
            streams.append(_BusyStream(name, column))
            continue
        key = blake2b(np.ascontiguousarray(column.t_ns).data).digest()
        block = open_.get(key)
        if block is None or len(block.columns) >= _TOGETHER_AT_MOST:
            block = open_[key] = _Block(name, column.t_ns)
            streams.append(block)
        if column.values.dtype.kind == "f":
            column.values = np.asarray(np.nan_to_num(column.values), np.float64)
        block.columns.append(column)
    return streams


def _packed(values: Int | Float) -> array[int] | array[float]:
    return array("d" if values.dtype.kind == "f" else "q", values.tobytes())
