"""Columns as they stand in the blocks of a frame, to be unfolded together with those of others.

A frame holds a second, a chunk of analysis a minute of frames that look alike: their blocks are
unfolded and joined with a handful of calls. Whoever asks for a column on its own gets it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from clusterprof.trace import frame
from clusterprof.trace.blockplans import Place, Plan
from clusterprof.trace.unpack import Planes, ends_of, unpack_blocks

Run = tuple[str, int, int, Sequence[int]]
"""Columns that lie together: how they are stored, their block, the first row there, and which
columns they are, in that order."""


class FoldedFrame:
    """The blocks of one frame; its records share it."""

    __slots__ = ("_arrays", "_at", "blocks", "plan", "planes")

    def __init__(self, plan: Plan, planes: Planes, blocks: Sequence[frame.Block]) -> None:
        self.plan = plan
        self.blocks = blocks
        self.planes: Planes | None = planes
        """None once it has been unfolded."""
        self._arrays: list[NDArray[Any]] = []
        self._at = 0

    def put(self, arrays: list[NDArray[Any]], at: int) -> None:
        """Take what was unfolded together: blocks as (columns, frames, rows), and its own place."""
        self._arrays, self._at, self.planes = arrays, at, None

    def unfolded(self) -> tuple[list[NDArray[Any]], int]:
        """Return the blocks as (columns, frames, rows), and which of the frames this is."""
        if self.planes is not None:
            unfold_together([self])
        return self._arrays, self._at

    def one(self, place: Place) -> NDArray[Any]:
        """Return a column as it was recorded."""
        code, block, row = place
        if block < 0:
            return np.empty(0, "<f8" if code in "md" else "<i8")
        arrays, at = self.unfolded()
        return restored(code, arrays[block][row, at])

    def ends(self, place: Place) -> tuple[int, int]:
        """Return the first and the last value of a column of whole numbers."""
        code, index, row = place
        if self.planes is None or code in "md":
            column = self.one(place)
            return int(column[0]), int(column[-1])
        factor = frame.FACTORS[code]
        first, last = ends_of(self.planes, self.blocks, index, row)
        return _wrapped(first * factor), _wrapped(last * factor)


def unfold_together(frames: Iterable[FoldedFrame]) -> None:
    """Unfold what is still folded of some frames; those that look alike with the same calls."""
    alike: dict[int, dict[int, FoldedFrame]] = {}
    for one in frames:
        if one.planes is not None:
            alike.setdefault(id(one.plan), {})[id(one)] = one
    for group in alike.values():
        some = list(group.values())
        arrays = unpack_blocks([(one.planes, one.blocks) for one in some if one.planes])
        for at, one in enumerate(some):
            one.put(arrays, at)


class BlockColumns(Sequence[NDArray[Any]]):
    """The columns of one record; each is made when it is asked for."""

    __slots__ = ("frame", "places", "rows")

    def __init__(self, places: tuple[Place, ...], rows: int, of: FoldedFrame) -> None:
        self.places = places
        """The same object for records that look alike."""
        self.rows = rows
        self.frame = of

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(index, slice):
            return [self.frame.one(place) for place in self.places[index]]
        return self.frame.one(self.places[index])

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter([self.frame.one(place) for place in self.places])

    def folded(self, index: int) -> FoldedColumn:
        """Return a column of whole numbers that stays folded."""
        return FoldedColumn(BlockColumns(self.places[index : index + 1], self.rows, self.frame))


class FoldedColumn:
    """One column of whole numbers; its first and last value are had without unfolding it."""

    __slots__ = ("_ends", "columns")

    def __init__(self, columns: BlockColumns) -> None:
        self.columns = columns
        """Itself, as the only column."""
        self._ends: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.columns.rows

    def __getitem__(self, index: int) -> int:
        if index not in (0, -1):
            return int(self.whole()[index])
        if self._ends is None:
            self._ends = self.columns.frame.ends(self.columns.places[0])
        return self._ends[index]

    def whole(self) -> NDArray[Any]:
        """Return all of it."""
        return self.columns[0]


def joined(records: Sequence[BlockColumns], dtype: type[np.generic]) -> list[NDArray[Any]]:
    """Return each column of records with equal columns, all records behind each other."""
    unfold_together([one.frame for one in records])
    place = [index for *_, some in _runs(records[0].places) for index in some]
    row_of = dict(zip(place, range(len(place))))
    out = np.empty((len(place), sum([one.rows for one in records])), dtype)
    past = 0
    for like, low, high in _stretches(records):
        first, past = past, past + (high - low) * like.rows
        arrays, _ = like.frame.unfolded()
        for code, block, row, some in _runs(like.places):
            values = arrays[block][row : row + len(some), low:high].reshape(len(some), -1)
            rows = [row_of[index] for index in some]
            together = rows[-1] - rows[0] == len(rows) - 1 and rows == sorted(rows)
            where: Any = slice(rows[0], rows[-1] + 1) if together else rows
            out[where, first:past] = restored(code, values)
    return [out[row_of[index]] for index in range(len(place))]


@lru_cache(maxsize=256)
def _runs(places: tuple[Place, ...]) -> tuple[Run, ...]:
    """Which columns lie together."""
    order = sorted(range(len(places)), key=places.__getitem__)
    found: list[tuple[str, int, int, list[int]]] = []
    for index in order:
        code, block, row = places[index]
        last = found[-1] if found else None
        if last is not None and last[:2] == (code, block) and last[2] + len(last[3]) == row:
            last[3].append(index)
        else:
            found.append((code, block, row, [index]))
    return tuple(found)


def _stretches(records: Sequence[BlockColumns]) -> Iterator[tuple[BlockColumns, int, int]]:
    """Records that stand behind each other where they were unfolded: (one of them, from, to)."""
    like = records[0]
    among, low = like.frame.unfolded()
    high = low
    for one in records:
        arrays, at = one.frame.unfolded()
        if not (one.places is like.places and arrays is among and at == high):
            yield like, low, high
            like, among, low = one, arrays, at
        high = at + 1
    yield like, low, high


def restored(code: str, stored: NDArray[Any]) -> NDArray[Any]:
    """Undo the scaling of columns that were stored in one way."""
    if code == "m":
        return stored / 1000.0
    factor = frame.FACTORS.get(code, 1)
    return stored if factor == 1 else stored * np.int64(factor)


def _wrapped(value: int) -> int:
    """A number as an int64 has it."""
    return (value + (1 << 63) & (1 << 64) - 1) - (1 << 63)
