"""Series of a node as records: those read at the same instants share one."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof.trace.schema import Columns

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
class _Block:
    t_ns: Int
    columns: list[Column] = field(default_factory=list)


class Blocks:
    """The series of a node, gathered by the instants at which they were read."""

    def __init__(self, source: str, columns: Sequence[Column]) -> None:
        self._source = source
        self._blocks: list[_Block] = []
        open_: dict[bytes, _Block] = {}
        for column in columns:
            key = column.t_ns.tobytes()
            block = open_.get(key)
            if block is None or len(block.columns) >= _TOGETHER_AT_MOST:
                block = open_[key] = _Block(column.t_ns)
                self._blocks.append(block)
            if column.values.dtype.kind == "f":
                column.values = np.asarray(np.nan_to_num(column.values), np.float64)
            block.columns.append(column)

    def next_ns(self, after_ns: int) -> Iterator[int]:
        """Yield when each comes next, at or after an instant; nothing of those at their end."""
        for block in self._blocks:
            row = int(block.t_ns.searchsorted(after_ns))
            if row < block.t_ns.size:
                yield int(block.t_ns[row])

    def between(self, low_ns: int, high_ns: int) -> Iterator[Columns]:
        """Yield the records of [low_ns, high_ns)."""
        for number, block in enumerate(self._blocks):
            a, b = (int(block.t_ns.searchsorted(t)) for t in (low_ns, high_ns))
            if a == b:
                continue
            yield Columns(
                f"{self._source}:{number}",
                [one.signal for one in block.columns],
                [one.device for one in block.columns],
                array("q", block.t_ns[a:b].tobytes()),
                [_packed(one.values[a:b]) for one in block.columns],
                [
                    None if one.mask is None else one.mask[a:b].astype(np.uint8).tobytes()
                    for one in block.columns
                ],
            )


def _packed(values: Int | Float) -> array[int] | array[float]:
    return array("d" if values.dtype.kind == "f" else "q", values.tobytes())
