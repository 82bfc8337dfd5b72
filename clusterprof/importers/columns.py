"""Series of a node as records: those read at the same instants share one."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof.trace.schema import Columns, Record

Int = NDArray[np.int64]
Float = NDArray[np.float64]
_TOGETHER_AT_MOST = 256
"""Series of one record, so that one record stays small."""


@dataclass(slots=True)
class Column:
    """Readings of one signal of one device."""

    signal: str
    device: str
    t_ns: Int
    values: Int | Float
    mask: NDArray[np.bool_] | None


@dataclass(slots=True)
class Stream:
    """Rows in order of time, which become records some at a time."""

    t_ns: Int
    cut: Callable[[int, int], Iterable[Record]]
    """Makes records of the rows [a, b)."""
    row: int = 0
    """The first that was not given out."""

    def until(self, high_ns: int) -> Iterable[Record]:
        """Return the records of what comes next, up to an instant."""
        a = self.row
        self.row = max(a + 1, int(self.t_ns.searchsorted(high_ns)))
        return self.cut(a, self.row)


def in_slices(streams: Sequence[Stream], first_ns: int, slice_ns: int) -> Iterator[list[Record]]:
    """Yield what several streams have in each stretch of time, in their order; none is empty.

    Stretches follow each other; a long silence is passed over. A stream costs nothing while it is
    silent, so many streams of few rows cost no more than few of many.
    """
    waiting = [(int(one.t_ns[0]), n) for n, one in enumerate(streams) if one.t_ns.size]
    heapq.heapify(waiting)
    low = first_ns
    while waiting:
        if waiting[0][0] >= low + slice_ns:
            low = waiting[0][0]
        high = low + slice_ns
        here = []
        while waiting and waiting[0][0] < high:
            here.append(heapq.heappop(waiting)[1])
        found: list[Record] = []
        for number in sorted(here):
            one = streams[number]
            found += one.until(high)
            if one.row < one.t_ns.size:
                heapq.heappush(waiting, (int(one.t_ns[one.row]), number))
        yield found
        low = high


@dataclass(slots=True)
class _Block:
    name: str
    t_ns: Int
    columns: list[Column] = field(default_factory=list)

    def records(self, a: int, b: int) -> Iterator[Columns]:
        """The one record of some rows."""
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


def streams_of(source: str, columns: Sequence[Column]) -> list[Stream]:
    """Return the series of a node, gathered by the instants at which they were read."""
    blocks: list[_Block] = []
    open_: dict[bytes, _Block] = {}
    for column in columns:
        key = column.t_ns.tobytes()
        block = open_.get(key)
        if block is None or len(block.columns) >= _TOGETHER_AT_MOST:
            block = open_[key] = _Block(f"{source}:{len(blocks)}", column.t_ns)
            blocks.append(block)
        if column.values.dtype.kind == "f":
            column.values = np.asarray(np.nan_to_num(column.values), np.float64)
        block.columns.append(column)
    return [Stream(block.t_ns, block.records) for block in blocks]


def _packed(values: Int | Float) -> array[int] | array[float]:
    return array("d" if values.dtype.kind == "f" else "q", values.tobytes())
